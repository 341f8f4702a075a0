"""The linearized softmax argument of a Gaussian token process, as a product of Gaussian vectors.

The score of position i is Y_i = ⟨γⁱ, ω⟩ + γ₀ⁱ with γⁱ = e_i/T − 1/T² and logits ω_j = k_j·q/λ.  The
keys enter it only through b_i = Σ_j γⁱ_j k_j, so Y_i = 1/T + b_i·q/λ, and (b_i, q) is jointly
Gaussian in 2·head dimensions whatever the kernel, the means, the biases and the rotations are (a
rotated key is a linear image of its token).  Hence every moment of the score and, after one
eigendecomposition, its whole law.  No model × model product of factors is ever formed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.core.form import QKForm, Rotary, semidefinite_root
from locater.core.process import TokenProcess, centered_kernel
from locater.core.quadratic import QuadraticLaw
from locater.errors import InputError


@dataclass(frozen=True, eq=False)
class HeadMoments:
    """First and second moments of one query and all keys of a stack of heads, in float64.

    Cov(k_s, k_t) = kernel[s, t] · key_gram and Cov(k_s, q) = kernel[s, T] · cross_gram before any
    rotation.
    """

    kernel: Float[Tensor, "tokens tokens"]
    query_gram: Float[Tensor, "*heads head head"]  # W_Q Σ W_Qᵀ
    key_gram: Float[Tensor, "*heads head head"]  # W_K Σ W_Kᵀ
    cross_gram: Float[Tensor, "*heads head head"]  # W_K Σ W_Qᵀ
    query_mean: Float[Tensor, "*heads head"] | None
    key_mean: Float[Tensor, "*heads tokens head"] | None
    """After rotation; None when both means are zero."""
    shift: Float[Tensor, "*heads tokens"] | None
    """What a bias by distance adds to the logits."""
    rotary: Rotary | None
    temperature: float

    @classmethod
    def of(cls, form: QKForm, process: TokenProcess) -> HeadMoments:
        """Contract the factors with the process' covariance and means."""
        form = form.to(torch.float64)
        model, tokens = form.query.shape[-1], process.tokens
        kernel = process.kernel.to(form.query)
        query, key = form.query, form.key
        if process.covariance is None:
            colored_query, colored_key = query, key
        else:
            if process.covariance.shape[0] != model:
                raise InputError(
                    f"the process has {process.covariance.shape[0]} dimensions, "
                    f"the form has {model}.",
                    hint="give a covariance of the form's model dimension.",
                )
            sigma = process.covariance.to(form.query)
            colored_query, colored_key = query @ sigma, key @ sigma
        if process.mean is not None and process.mean.shape[1] != model:
            raise InputError(
                f"the means have {process.mean.shape[1]} dimensions, the form has {model}.",
                hint="give means of the form's model dimension.",
            )
        query_mean = key_mean = None
        if process.mean is not None:
            mean = process.mean.to(form.query)
            query_mean, key_mean = query @ mean[-1], mean @ key.mT
        if form.query_bias is not None:
            query_mean = form.query_bias if query_mean is None else query_mean + form.query_bias
        if form.key_bias is not None and form.rotary is not None:  # else the same for all keys
            bias = form.key_bias[..., None, :].expand(*key.shape[:-2], tokens, key.shape[-2])
            key_mean = bias if key_mean is None else key_mean + bias
        if query_mean is None and key_mean is not None:
            query_mean = torch.zeros_like(key_mean[..., 0, :])
        if key_mean is None and query_mean is not None:
            key_mean = torch.zeros_like(query_mean[..., None, :].repeat_interleave(tokens, -2))
        moments = cls(
            kernel,
            colored_query @ query.mT,
            colored_key @ key.mT,
            colored_key @ query.mT,
            query_mean,
            key_mean,
            _shift(form, tokens),
            form.rotary,
            form.temperature,
        )
        if form.rotary is None or key_mean is None:
            return moments
        return replace(moments, key_mean=form.rotary.turn(key_mean, moments.phases))

    @property
    def tokens(self) -> int:
        """T."""
        return self.kernel.shape[0]

    @property
    def phases(self) -> Tensor:
        """How far each key is turned against the query."""
        assert self.rotary is not None
        offset = torch.arange(1 - self.tokens, 1, dtype=torch.float64, device=self.kernel.device)
        return self.rotary.phases(offset)

    def turned(
        self, matrix: Float[Tensor, "*heads head head"]
    ) -> Float[Tensor, "*heads _ head head"]:
        """R_j · matrix for every key position j; a single copy where nothing turns."""
        if self.rotary is None:
            return matrix[..., None, :, :]
        turned = self.rotary.turn(matrix.mT[..., None, :, :], self.phases[:, None, :])
        return turned.mT

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> HeadMoments:
        names = ("query_gram", "key_gram", "cross_gram", "query_mean", "key_mean", "shift")
        parts: dict[str, Any] = {name: getattr(self, name) for name in names}
        mapped = {name: function(part) for name, part in parts.items() if part is not None}
        return replace(self, **mapped)  # type: ignore[arg-type]

    def flat(self) -> HeadMoments:
        """The same heads along a single axis."""
        stack = self.key_gram.ndim - 2
        return self._mapped(lambda part: part.flatten(0, stack - 1) if stack else part[None])

    def heads(self, rows: slice) -> HeadMoments:
        """Some heads of a stack whose heads lie along one axis."""
        return self._mapped(lambda part: part[rows])

    def logits(
        self,
    ) -> tuple[Float[Tensor, "*heads tokens"], Float[Tensor, "*heads tokens tokens"]]:
        """Mean and covariance of the logits ω over the keys, exact."""
        kernel, last = self.kernel, self.kernel[:, -1]
        cross = self.turned(self.cross_gram)  # Cov(k_j, q) / K[j, T]
        mean = last * torch.einsum("...jaa->...j", cross)
        half = self.turned(semidefinite_root(self.key_gram)).flatten(-2)
        root = semidefinite_root(self.query_gram)
        half = (root.mT[..., None, :, :] @ half.unflatten(-1, root.shape[-2:])).flatten(-2)
        covariance = kernel * kernel[-1, -1] * (half @ half.mT)
        covariance = covariance + last[:, None] * last * (
            cross.flatten(-2) @ cross.mT.flatten(-2).mT
        )
        if self.query_mean is not None and self.key_mean is not None:
            ask = self.query_mean[..., None, :]
            mean = mean + (self.key_mean * ask).sum(-1)
            seen = (ask[..., None, :] @ self.turned(semidefinite_root(self.key_gram)))[..., 0, :]
            covariance = covariance + kernel * (seen @ seen.mT)
            own = self.key_mean @ root
            covariance = covariance + kernel[-1, -1] * (own @ own.mT)
            reach = last[:, None] * (ask[..., None, :] @ cross)[..., 0, :]
            mixed = reach @ self.key_mean.mT
            covariance = covariance + mixed + mixed.mT
        mean = mean / self.temperature
        return mean if self.shift is None else mean + self.shift, covariance / self.temperature**2

    def sample_logits(
        self, draws: int, generator: torch.Generator
    ) -> Float[Tensor, "draws *heads tokens"]:
        """Draw rows of logits from their true law: products of Gaussian vectors."""
        joint = torch.cat(
            (
                torch.cat((self.key_gram, self.cross_gram), -1),
                torch.cat((self.cross_gram.mT, self.query_gram), -1),
            ),
            -2,
        )
        root, head = semidefinite_root(joint), self.key_gram.shape[-1]
        shape = (draws, *joint.shape[:-2], self.tokens, 2 * head)
        noise = torch.randn(shape, generator=generator, dtype=joint.dtype, device=joint.device)
        pairs = semidefinite_root(self.kernel) @ noise @ root.mT
        keys, query = pairs[..., :head], pairs[..., -1, head:]
        if self.rotary is not None:
            keys = self.rotary.turn(keys, self.phases)
        if self.key_mean is not None and self.query_mean is not None:
            keys, query = keys + self.key_mean, query + self.query_mean
        logits = (keys @ query[..., None])[..., 0] / self.temperature
        return logits if self.shift is None else logits + self.shift

    def score(self) -> Score:
        """The joint law of (b_i, q) at every position."""
        tokens, kernel = self.tokens, self.kernel
        shape = (*self.key_gram.shape[:-2], tokens)
        base = torch.full(shape, 1 / tokens, dtype=kernel.dtype, device=kernel.device)
        base = base if self.shift is None else base + _centered(self.shift, -1)
        key_mean = None if self.key_mean is None else _centered(self.key_mean, -2)
        if self.rotary is None:
            cross, spread = centered_kernel(kernel)
            # the query's own variance K[T, T] is moved to the keys: the product does not change
            last = kernel[-1, -1]
            return Score(
                base,
                None if key_mean is None else key_mean * last.sqrt(),
                None if self.query_mean is None else self.query_mean / last.sqrt(),
                spread * last,
                self.key_gram[..., None, :, :],
                cross,
                self.cross_gram[..., None, :, :],
                self.query_gram,
                self.temperature,
            )
        phases = self.phases
        key = self.turned(self.key_gram)
        # Σ_k Cov(k_j, k_k)/T: the right-hand rotations add up to one complex factor per pair
        summed = self.rotary.turn(key, (kernel.to(phases) @ phases / tokens)[:, None, :])
        own = self.rotary.turn(key, phases[:, None, :]) * kernel.diagonal()[:, None, None]
        spread = own - summed - summed.mT + summed.mean(-3, keepdim=True)
        crossed = _centered(kernel[:, -1, None, None] * self.turned(self.cross_gram), -3)
        one = torch.ones(tokens, dtype=kernel.dtype, device=kernel.device)
        return Score(
            base,
            key_mean,
            self.query_mean,
            one,
            spread / tokens**2,
            one,
            crossed,
            kernel[-1, -1] * self.query_gram,
            self.temperature,
        )


@dataclass(frozen=True, eq=False)
class Score:
    """Y_i = base_i + b_i·q/λ with b_i, q jointly Gaussian; covariances are scale × matrix.

    The matrices have one entry along the position axis where no rotation makes them differ.
    """

    base: Float[Tensor, "*heads tokens"]
    key_mean: Float[Tensor, "*heads tokens head"] | None
    query_mean: Float[Tensor, "*heads head"] | None
    key_scale: Float[Tensor, " tokens"]
    key_covariance: Float[Tensor, "*heads _ head head"]  # of b
    cross_scale: Float[Tensor, " tokens"]
    cross_covariance: Float[Tensor, "*heads _ head head"]  # of b with q
    query_covariance: Float[Tensor, "*heads head head"]
    temperature: float

    def moments(self) -> tuple[Float[Tensor, "*heads tokens"], Float[Tensor, "*heads tokens"]]:
        """Mean and variance of the score at every position."""
        key, cross = self.key_covariance, self.cross_covariance
        query = self.query_covariance[..., None, :, :]
        mean = self.cross_scale * torch.einsum("...aa->...", cross)
        variance = self.key_scale * (key * query).sum((-2, -1))
        variance = variance + self.cross_scale.square() * (cross * cross.mT).sum((-2, -1))
        if self.key_mean is not None and self.query_mean is not None:
            ask, keys = self.query_mean[..., None, :, None], self.key_mean[..., None]
            mean = mean + (keys * ask).sum((-2, -1))
            variance = variance + self.key_scale * (ask.mT @ key @ ask)[..., 0, 0]
            variance = variance + (keys.mT @ query @ keys)[..., 0, 0]
            mixed = ((ask.mT @ cross) @ keys)[..., 0, 0]
            variance = variance + 2 * self.cross_scale * mixed
        return self.base + mean / self.temperature, variance / self.temperature**2

    def law(self) -> QuadraticLaw:
        """The law of every score, heads and positions flattened into rows."""
        if self.key_mean is None and self.key_covariance.shape[-3] == 1:
            return self._law_by_kernel()
        return self._law()

    def _law_by_kernel(self) -> QuadraticLaw:
        """Without means, positions with equal |u| and q share their weights, up to u's sign."""
        scales = torch.stack((self.cross_scale.abs(), self.key_scale))
        rounded = (scales / scales.amax(-1, keepdim=True).clamp_min(1e-300)).round(decimals=13)
        _, group = torch.unique(rounded, dim=-1, return_inverse=True)
        first = torch.stack([(group == k).nonzero()[0, 0] for k in range(int(group.max()) + 1)])
        cross, key = scales[:, first]
        distinct = replace(self, base=self.base[..., first], key_scale=key, cross_scale=cross)
        middle = distinct._middle_by_columns()
        if middle is None:
            weights = distinct._law().weights.unflatten(0, (-1, len(first)))
        else:
            weights = torch.linalg.eigvalsh(middle).flatten(0, -3)
        weights = weights[:, group] * torch.where(self.cross_scale < 0, -1.0, 1.0)[:, None]
        return QuadraticLaw(self.base.flatten(), weights.flatten(0, 1))

    def _middle_by_columns(self) -> Float[Tensor, "*heads positions size size"] | None:
        """The symmetric matrix of b·q/λ from one factorization per head; None near singularity.

        With (q, k) = (L z, P z + …) for a token's own query and key and G_kk = F Fᵀ, the part of b
        that knows nothing of q is F V √(key_scale − u²ρ) g, where V ρ Vᵀ = F⁻¹ P Pᵀ F⁻ᵀ: a position
        only scales its columns.
        """
        key_gram, cross_gram = (
            part[..., 0, :, :] for part in (self.key_covariance, self.cross_covariance)
        )
        query, failed = torch.linalg.cholesky_ex(self.query_covariance)
        key, key_failed = torch.linalg.cholesky_ex(key_gram)
        # dividing by L costs as many digits as L is ill-conditioned
        size = torch.cat((query, key), -1).unflatten(-1, (2, -1)).diagonal(dim1=-3, dim2=-1)
        singular = (failed > 0) | (key_failed > 0) | (size.amin(-1) < 1e-4 * size.amax(-1)).any(-1)
        if bool(singular.any()):
            return None
        shared = torch.linalg.solve_triangular(query, cross_gram.mT, upper=False).mT
        inner = torch.linalg.solve_triangular(key, shared, upper=False)
        basis, share, _ = torch.linalg.svd(inner)
        u = self.cross_scale[:, None]
        free = (self.key_scale[:, None] - u.square() * share[..., None, :].square()).clamp_min(0)
        side = (query.mT @ key @ basis)[..., None, :, :] * (free.sqrt() / 2)[..., None, :]
        core = shared.mT @ query
        core = u[..., None] * (core + core.mT)[..., None, :, :] / 2
        middle = torch.cat(
            (torch.cat((core, side), -1), torch.cat((side.mT, torch.zeros_like(core)), -1)), -2
        )
        return middle / self.temperature

    def _law(self) -> QuadraticLaw:
        shape = torch.broadcast_shapes(
            self.key_covariance.shape[:-2], (*self.query_covariance.shape[:-2], len(self.key_scale))
        )
        head = self.query_covariance.shape[-1]
        key = self.key_scale[:, None, None] * self.key_covariance
        cross = self.cross_scale[:, None, None] * self.cross_covariance
        query = self.query_covariance[..., None, :, :].expand(*shape, head, head)
        # (b, q) and (αb, q/α) have the same product; equal sizes lose the fewest digits
        size = [torch.einsum("...aa->...", part).clamp_min(1e-300) for part in (query, key)]
        balance = (size[0] / size[1]).sqrt()[..., None, None]
        joint = torch.cat(
            (
                torch.cat((key * balance, cross), -1),
                torch.cat((cross.mT, query / balance), -1),
            ),
            -2,
        ).flatten(0, -3)
        factor = _factor(joint)
        swapped = torch.cat((factor[:, head:], factor[:, :head]), -2)
        middle = factor.mT @ swapped / (2 * self.temperature)
        constant = self.base.expand(shape).flatten()
        if self.key_mean is None or self.query_mean is None:
            return QuadraticLaw(constant, torch.linalg.eigvalsh(middle))
        weights, vectors = torch.linalg.eigh(middle)
        root = balance[..., 0].sqrt()
        keys = (self.key_mean * root).flatten(0, -2)
        ask = (self.query_mean[..., None, :] / root).expand(*shape, head).flatten(0, -2)
        linear = (torch.cat((ask, keys), -1)[:, None] @ factor @ vectors)[:, 0] / self.temperature
        return QuadraticLaw(constant + (keys * ask).sum(-1) / self.temperature, weights, linear)


def symmetric_law(form: QKForm, process: TokenProcess) -> QuadraticLaw:
    """The law of a symmetric form's scores: one eigendecomposition serves all positions."""
    spectrum = form.spectrum(process.covariance)
    values = torch.linalg.eigvalsh(spectrum.form.query.mT @ spectrum.form.key)
    kernel = process.kernel.to(values)
    cross, spread = centered_kernel(kernel)
    size = (spread * kernel[-1, -1]).sqrt()  # √(u² + κ)
    weights = torch.stack((cross + size, cross - size)) / (2 * form.temperature)
    rows = (values[..., None, None, :] * weights[..., None]).movedim(-3, -2).flatten(-2)
    constant = torch.full(rows.shape[:-1], 1 / process.tokens, dtype=rows.dtype, device=rows.device)
    return QuadraticLaw(constant.flatten(), rows.flatten(0, -2))


def _shift(form: QKForm, tokens: int) -> Float[Tensor, "*heads tokens"] | None:
    if form.distance_bias is None:
        return None
    if form.distance_bias.shape[-1] < tokens:
        raise InputError(
            f"distance_bias covers {form.distance_bias.shape[-1]} distances, "
            f"the process has {tokens} tokens.",
            hint="give a bias for every distance from 0 to tokens - 1.",
        )
    return form.distance_bias[..., :tokens].flip(-1)


def _centered(values: Tensor, axis: int) -> Tensor:
    """γⁱ applied along the token axis: (value_i − mean)/T."""
    return (values - values.mean(axis, keepdim=True)) / values.shape[axis]


def _factor(joint: Float[Tensor, "rows size size"]) -> Float[Tensor, "rows size size"]:
    """L with L Lᵀ = joint: Cholesky, or an eigenvalue root for the rows that are singular."""
    factor, failed = torch.linalg.cholesky_ex(joint)
    pivots = factor.diagonal(dim1=-2, dim2=-1)
    singular = (failed > 0) | ~(pivots.amin(-1) > 1e-6 * pivots.amax(-1))
    if bool(singular.any()):
        factor[singular] = semidefinite_root(joint[singular])
    return factor
