"""The numbers of a few heads at a time, from head × head Gram matrices alone.

Beside them what independent Gaussian factors of the same norms would show: the null that training
leaves.  Take W_Q and W_K with independent Gaussian entries, all of one factor of equal variance,
such that E‖W_Q‖²_F and E‖W_K‖²_F are those of the head.  Then tr W = Σ q_ij k_ij has mean 0 and
variance ‖W_Q‖²_F ‖W_K‖²_F/(head·model), and E‖W‖²_F = ‖W_Q‖²_F ‖W_K‖²_F/head, both exactly; so have
factors drawn from the spheres of those norms.  The eigenvalues' spread and the largest singular
value have no such formula at finite size and are drawn, head × head numbers at a time, by
Bartlett's theorem: W_Q = A U with U orthonormal and A triangular, so W_K W_Qᵀ has the law of Z Aᵀ
with a Gaussian Z, and W_Qᵀ W_K the singular values of Aᵀ B.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from locater.core.bounds import entropy_lower_bound
from locater.core.form import QKForm, semidefinite_root
from locater.core.process import TokenProcess, centered_kernel
from locater.core.score import HeadMoments
from locater.core.theory import Profile, normal_between

_DRAWS = 48


@dataclass(frozen=True, kw_only=True)
class Null:
    """Means and deviations for factors of Frobenius norm 1."""

    spread: float
    """Of the eigenvalues' standard deviation."""
    spread_deviation: float
    norm: float
    """Of the largest singular value."""
    norm_deviation: float


@cache
def null_of(head_dim: int, model: int, *, draws: int = _DRAWS, seed: int = 0) -> Null:
    """The null of one shape; the same at every call.

    >>> null = null_of(8, 64)
    >>> 0.02 < null.spread < 0.06, 0.1 < null.norm < 0.25
    (True, True)
    """
    generator = torch.Generator().manual_seed(seed)
    left, right = (_triangular(draws, head_dim, model, generator) for _ in range(2))
    small = min(head_dim, model)
    noise = torch.randn(draws, head_dim, small, generator=generator, dtype=torch.float64)
    scale = 1 / (head_dim * model)
    # for more rows than columns the d × d matrix of W itself is the smaller one
    product = noise @ left.mT if head_dim <= model else left.mT @ noise
    values = torch.linalg.eigvals(product) * scale
    spread = (values - values.mean(-1, keepdim=True)).abs().square().mean(-1).sqrt()
    norm = torch.linalg.matrix_norm(left.mT @ right, 2) * scale
    return Null(
        spread=spread.mean().item(),
        spread_deviation=spread.std().item(),
        norm=norm.mean().item(),
        norm_deviation=norm.std().item(),
    )


def _triangular(
    draws: int, head_dim: int, model: int, generator: torch.Generator
) -> Float[Tensor, "draws head small"]:
    """A with the law of the triangular factor of a Gaussian head × model matrix, or that itself."""
    if head_dim > model:
        return torch.randn(draws, head_dim, model, generator=generator, dtype=torch.float64)
    normal = torch.randn(draws, head_dim, head_dim, generator=generator, dtype=torch.float64)
    freedom = model - torch.arange(head_dim, dtype=torch.float64)
    gamma = torch._standard_gamma((freedom / 2).expand(draws, -1), generator=generator)
    return normal.tril(-1) + torch.diag_embed((2 * gamma).sqrt())


RhoMethod = Literal["gaussian", "exact"]
DRAWS = 128
"""Rows of logits that are drawn for the mean entropy of a head."""
_EXACT_AT_ONCE = 8_000_000
_ROWS_AT_ONCE = 1_000_000


@dataclass(frozen=True, eq=False)
class Grams:
    """Products of the factors of a stack of heads, in float64: all that a spectrum needs."""

    query: Float[Tensor, "heads head head"]  # W_Q Σ W_Qᵀ
    key: Float[Tensor, "heads head head"]  # W_K Σ W_Kᵀ, turned where an offset is asked for
    cross: Float[Tensor, "heads head head"]  # W_K Σ W_Qᵀ
    rank: int
    """The largest rank that W_QK can have."""

    @classmethod
    def of(
        cls,
        form: QKForm,
        covariance: Float[Tensor, "model model"] | None = None,
        *,
        share: int = 1,
        offset: int = 0,
        gain: Float[Tensor, " model"] | None = None,
    ) -> Grams:
        """Multiply the factors; `share` neighboring query heads have the same key head.

        `gain` multiplies the tokens before both.
        """
        query, key = form.query.detach(), form.key[::share].detach()
        if gain is None:
            query, key = query.double(), key.double()
        else:
            query, key = (part.to(torch.float64, copy=True).mul_(gain) for part in (query, key))
        if form.rotary is not None and offset:
            angle = torch.tensor(float(-offset), dtype=torch.float64, device=key.device)
            rotary = replace(form.rotary, frequencies=form.rotary.frequencies.double())
            key = rotary.turn(key.mT, rotary.phases(angle)).mT
        colored = key if covariance is None else key @ covariance.to(key)
        own = query if covariance is None else query @ covariance.to(query)
        head = key.shape[-2]
        # the heads of a group lie side by side: one product with their key head serves them all
        group = query.reshape(key.shape[0], -1, key.shape[-1])
        cross = (group @ colored.mT).unflatten(1, (share, head)).flatten(0, 1).mT
        return cls(own @ query.mT, (colored @ key.mT).repeat_interleave(share, 0), cross, form.rank)

    @property
    def trace(self) -> Float[Tensor, " heads"]:
        """tr W."""
        return self.cross.diagonal(dim1=-2, dim2=-1).sum(-1)

    @property
    def trace_of_square(self) -> Float[Tensor, " heads"]:
        """tr W²."""
        return (self.cross * self.cross.mT).sum((-2, -1))

    @property
    def frobenius_squared(self) -> Float[Tensor, " heads"]:
        """‖S‖²_F."""
        return (self.query * self.key).sum((-2, -1))

    def eigenvalues(self) -> Complex[Tensor, "heads rank"]:
        """The eigenvalues that can differ from zero, largest first."""
        values = torch.linalg.eigvals(self.cross)
        order = values.abs().argsort(-1, descending=True)[..., : self.rank]
        return values.gather(-1, order)

    def singular_values(self) -> Float[Tensor, "heads rank"]:
        """The singular values, largest first; small ones to about 1e-8 of the largest."""
        roots = []
        for gram in (self.query, self.key):
            root, failed = torch.linalg.cholesky_ex(gram)
            if bool((failed > 0).any()):
                root = semidefinite_root(gram)
            roots.append(root)
        return torch.linalg.svdvals(roots[0].mT @ roots[1])[..., : self.rank]

    def moments(self, form: QKForm, process: TokenProcess, *, is_cross: bool) -> HeadMoments:
        """What the queries and keys of these heads are under a process.

        A turned form is that of one offset, the same for all keys.  In cross-attention the query
        knows nothing of the keys' tokens, which follow the process.
        """
        tokens = process.tokens
        query_mean = None if form.query_bias is None else form.query_bias.detach().double()
        key_mean = None
        if process.mean is not None:
            mean = process.mean.to(self.query)
            key_mean = mean @ form.key.detach().double().mT
            own = form.query.detach().double() @ mean[-1]
            query_mean = own if query_mean is None else query_mean + own
        shift = None
        if form.distance_bias is not None:
            shift = form.distance_bias.detach().double()[..., :tokens].flip(-1)
        return HeadMoments(
            process.kernel.to(self.query),
            self.query,
            self.key,
            torch.zeros_like(self.cross) if is_cross else self.cross,
            query_mean,
            key_mean,
            shift,
            None,
            form.temperature,
        )


def spectral_columns(
    grams: Grams, temperature: float, *, eigenvalues: bool
) -> dict[str, Float[Tensor, " heads"]]:
    """The columns that `Spectrum` has, without its QR factorizations of the whole factors."""
    trace, square, scale = grams.trace, grams.trace_of_square, grams.frobenius_squared
    columns = {
        "trace": trace,
        "trace_of_square": square,
        "frobenius_squared": scale,
        "mean": trace / grams.rank,
        "dispersion": grams.rank * scale - trace.square(),
        "asymmetry": (1 - square / scale) / 2,
        "xi": trace / scale.sqrt(),
        "eta": scale.sqrt() / temperature,
        "r": trace / temperature,
    }
    if eigenvalues:
        values, singular = grams.eigenvalues(), grams.singular_values()
        columns |= {
            "variance": (values - columns["mean"][:, None]).abs().square().mean(-1),
            "nonnormality": scale - values.abs().square().sum(-1),
            "spectral_norm": singular[:, 0],
            "stable_rank": scale / singular[:, 0].square(),
            "eigenvalues_real": values.real,
            "eigenvalues_imag": values.imag,
            "singular_values": singular,
        }
    return columns


def null_columns(
    grams: Grams, columns: dict[str, Tensor], *, head_dim: int, model: int
) -> dict[str, Float[Tensor, " heads"]]:
    """How far a spectrum is from that of independent factors with the same norms."""
    norms = [gram.diagonal(dim1=-2, dim2=-1).sum(-1) for gram in (grams.query, grams.key)]
    size = (norms[0] * norms[1]).sqrt()  # ‖W_Q‖_F ‖W_K‖_F
    found = {
        "trace_z": columns["trace"] / size * math.sqrt(head_dim * model),
        "frobenius_ratio": columns["frobenius_squared"].sqrt() / size * math.sqrt(head_dim),
    }
    if "variance" in columns:
        null = null_of(head_dim, model)
        spread, norm = columns["variance"].clamp_min(0).sqrt() / size, columns["spectral_norm"]
        found |= {
            "spread_ratio": spread / null.spread,
            "spread_z": (spread - null.spread) / null.spread_deviation,
            "norm_ratio": norm / size / null.norm,
            "norm_z": (norm / size - null.norm) / null.norm_deviation,
        }
    return found


def rho_profile(moments: HeadMoments, *, method: RhoMethod) -> Profile:
    """ρ at every position, from the score's exact mean and variance or from its exact law."""
    tokens = moments.tokens
    theta = torch.arange(1, tokens + 1, dtype=torch.float64) / tokens
    if method == "exact":
        flat = replace(moments, query_mean=None) if _is_free(moments) else _completed(moments)
        size = 2 * moments.key_gram.shape[-1]
        some = max(1, _EXACT_AT_ONCE // (tokens * size**2))
        heads = moments.key_gram.shape[0]
        parts = [
            flat.heads(slice(start, start + some)).score().law().between(0.0, 1.0)
            for start in range(0, heads, some)
        ]
        return Profile(theta=theta, rho=torch.cat(parts).view(heads, tokens), label="exact")
    if moments.key_mean is not None or moments.rotary is not None:
        mean, variance = _completed(moments).score().moments()
    else:
        mean, variance = _central_moments(moments)
    rho = normal_between(mean, variance.clamp_min(0).sqrt())
    return Profile(theta=theta, rho=rho, label="gaussian")


def _is_free(moments: HeadMoments) -> bool:
    return moments.query_mean is None and moments.key_mean is None


def _completed(moments: HeadMoments) -> HeadMoments:
    """Both means, or neither: the law of a score needs them in pairs."""
    if _is_free(moments):
        return moments
    heads, tokens, head = len(moments.key_gram), moments.tokens, moments.key_gram.shape[-1]
    query, key = moments.query_mean, moments.key_mean
    zeros = torch.zeros(heads, tokens, head, dtype=torch.float64, device=moments.kernel.device)
    return replace(
        moments,
        query_mean=zeros[:, 0] if query is None else query,
        key_mean=zeros if key is None else key,
    )


def _central_moments(
    moments: HeadMoments,
) -> tuple[Float[Tensor, "heads tokens"], Float[Tensor, "heads tokens"]]:
    """`Score.moments` for tokens of mean zero: [q (K_TT f + b G_kk b) + u² tr W²]/λ²."""
    kernel, tokens = moments.kernel, moments.tokens
    cross, spread = centered_kernel(kernel)
    scale = kernel[-1, -1] * (moments.key_gram * moments.query_gram).sum((-2, -1))
    if moments.query_mean is not None:
        ask = moments.query_mean[:, None, :]
        scale = scale + (ask @ moments.key_gram @ ask.mT)[:, 0, 0]
    square = (moments.cross_gram * moments.cross_gram.mT).sum((-2, -1))
    trace = moments.cross_gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    mean = 1 / tokens + trace[:, None] * cross / moments.temperature
    if moments.shift is not None:
        mean = mean + (moments.shift - moments.shift.mean(-1, keepdim=True)) / tokens
    variance = scale[:, None] * spread + square[:, None] * cross.square()
    return mean, variance / moments.temperature**2


@dataclass(frozen=True, eq=False)
class LogitDraws:
    """Draws of tokens that all heads share, so that their entropies differ by the heads alone.

    Given the last token's query q, the keys are Gaussian: logit j is k_T·q K[j, T]/K[T, T] plus
    noise of covariance (K − K[:, T] K[T, :]/K[T, T]) · qᵀ G_kk q, all over λ.  So a row of logits
    from its exact law costs one draw of (q, k_T) and one of tokens numbers.
    """

    process: TokenProcess
    noise: Float[Tensor, "draws tokens"]
    generator_seed: int

    @classmethod
    def of(cls, process: TokenProcess, *, draws: int = DRAWS, seed: int = 0) -> LogitDraws:
        """Draw what does not depend on the heads."""
        kernel = process.kernel.double()
        last = kernel[:, -1]
        rest = (kernel - last[:, None] * last / last[-1])[:-1, :-1]
        root, failed = torch.linalg.cholesky_ex(rest)
        if bool(failed > 0):
            root = semidefinite_root(rest)
        generator = torch.Generator().manual_seed(seed)
        normal = torch.randn(draws, len(rest), generator=generator, dtype=torch.float64)
        noise = torch.nn.functional.pad(normal @ root.mT, (0, 1))
        return cls(process, noise.float(), seed + 1)

    def entropy(
        self, moments: HeadMoments
    ) -> tuple[Float[Tensor, " heads"], Float[Tensor, " heads"], Float[Tensor, " heads"]]:
        """Mean entropy of the heads' attention, its standard error, and Eq. 9's bound on it."""
        if moments.rotary is not None:
            return self._turned(moments)
        ask, answer = self._last_token(moments)
        own = (ask * answer).sum(-1) / moments.temperature  # heads draws
        spread = ((ask @ moments.key_gram) * ask).sum(-1).clamp_min(0).sqrt() / moments.temperature
        share = (moments.kernel[:, -1] / moments.kernel[-1, -1]).float()
        shift = None if moments.shift is None else moments.shift[:, None].float()
        draws, tokens = self.noise.shape
        heads, some = len(ask), max(1, _ROWS_AT_ONCE // (draws * tokens))
        found: list[Tensor] = []
        for start in range(0, heads, some):
            rows = slice(start, start + some)
            logits = own[rows, :, None].float() * share + spread[rows, :, None].float() * self.noise
            if moments.key_mean is not None:
                seen = ask[rows] @ moments.key_mean[rows].mT / moments.temperature
                logits = logits + seen.float()
            logits = logits if shift is None else logits + shift[rows]
            found.append(_entropy_and_bound(logits))
        entropy, bound = torch.cat(found, 1).double()
        return entropy.mean(-1), entropy.std(-1) / math.sqrt(draws), bound.mean(-1)

    def _turned(
        self, moments: HeadMoments
    ) -> tuple[Float[Tensor, " heads"], Float[Tensor, " heads"], Float[Tensor, " heads"]]:
        """The same where every key is turned by its own distance: whole rows of keys are drawn."""
        moments, draws = _completed(moments), self.noise.shape[0]
        found = []
        for head in range(len(moments.key_gram)):
            generator = torch.Generator().manual_seed(self.generator_seed)
            logits = moments.heads(slice(head, head + 1)).sample_logits(draws, generator)
            found.append(_entropy_and_bound(logits.movedim(0, 1).float()))
        entropy, bound = torch.cat(found, 1).double()
        return entropy.mean(-1), entropy.std(-1) / math.sqrt(draws), bound.mean(-1)

    def _last_token(
        self, moments: HeadMoments
    ) -> tuple[Float[Tensor, "heads draws head"], Float[Tensor, "heads draws head"]]:
        """The last token's query, bias included, and its key around the mean."""
        joint = torch.cat(
            (
                torch.cat((moments.query_gram, moments.cross_gram.mT), -1),
                torch.cat((moments.cross_gram, moments.key_gram), -1),
            ),
            -2,
        )
        # queries and keys of one token are often nearly dependent: lift the pivots a little
        lift = 1e-12 * joint.diagonal(dim1=-2, dim2=-1).mean(-1) + 1e-300
        eye = torch.eye(joint.shape[-1], dtype=joint.dtype, device=joint.device)
        root, failed = torch.linalg.cholesky_ex(joint + lift[:, None, None] * eye)
        if bool((failed > 0).any()):
            root = semidefinite_root(joint)
        generator = torch.Generator().manual_seed(self.generator_seed)
        size = (self.noise.shape[0], joint.shape[-1])
        normal = torch.randn(size, generator=generator, dtype=torch.float64)
        pair = normal @ root.mT * moments.kernel[-1, -1].sqrt()
        head = moments.key_gram.shape[-1]
        ask, answer = pair[..., :head], pair[..., head:]
        return (ask if moments.query_mean is None else ask + moments.query_mean[:, None]), answer


def _entropy_and_bound(
    logits: Float[Tensor, "heads draws tokens"],
) -> Float[Tensor, "two heads draws"]:
    """The entropy of each row and the least entropy that a row of its norm could have."""
    norm = torch.linalg.vector_norm(logits - logits.mean(-1, keepdim=True), dim=-1)
    bound = entropy_lower_bound(norm.double(), logits.shape[-1])
    logits = logits - logits.amax(-1, keepdim=True)
    weight = logits.exp()
    total = weight.sum(-1)
    entropy = total.log() - (weight * logits).sum(-1) / total
    return torch.stack((entropy.double(), bound))
