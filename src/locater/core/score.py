"""The linearized softmax argument of a Gaussian token process, as a product of Gaussian vectors.

The score of position i is Y_i = ⟨γⁱ, ω⟩ + γ₀ⁱ with γⁱ = e_i/T − 1/T² and logits ω_j = k_j·q/λ.  The
keys enter it only through b_i = Σ_j γⁱ_j k_j, so Y_i = 1/T + b_i·q/λ, and (b_i, q) is jointly
Gaussian in 2·head dimensions whatever the kernel, the means, the biases and the rotations are (a
rotated key is a linear image of its token).  Hence every moment of the score and, after one
eigendecomposition, its whole law.  No model × model product of factors is ever formed.

The moments of (b_i, q) come from a process (`HeadMoments`) or from sampled tokens (`SampledHeads`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from locater.core.form import QKForm, Rotary, mapped
from locater.core.process import DENSE_TOKENS, LongProcess, TokenProcess, centered_kernel
from locater.core.quadratic import QuadraticFamily, QuadraticLaw
from locater.core.spectrum import Spectrum, gram_root, semidefinite_root
from locater.errors import InputError

RhoMethod = Literal["exact", "gaussian", "saddlepoint"]
_AT_ONCE = 8_000_000
"""Numbers of position-wise matrices that are held at once."""
_NODES = (10, 20, 36)
"""Of the interpolation, until it is smooth enough; the first for coarse tolerances."""
_FAMILY = 4000
"""From so many tokens × weights on, positions are interpolated in one parameter."""
_ROWS_AT_ONCE = 1_000_000
"""Numbers of drawn rows that are held at once."""


@dataclass(frozen=True, eq=False)
class HeadMoments:
    """First and second moments of one query and all keys of a stack of heads, in float64.

    Cov(k_s, k_t) = kernel[s, t] · key_gram and Cov(k_s, q) = kernel[s, T] · cross_gram before any
    rotation.
    """

    times: Float[Tensor, "tokens tokens"] | LongProcess
    """The kernel, or what stands for it where it would be too large."""
    query_gram: Float[Tensor, "*heads head head"]  # W_Q Σ W_Qᵀ
    key_gram: Float[Tensor, "*heads head head"]  # W_K Σ W_Kᵀ
    cross_gram: Float[Tensor, "*heads head head"]  # W_K Σ W_Qᵀ
    query_mean: Float[Tensor, "*heads head"] | None
    key_mean: Float[Tensor, "*heads tokens head"] | None
    """After rotation."""
    shift: Float[Tensor, "*heads tokens"] | None
    """What a bias by distance adds to the logits."""
    rotary: Rotary | None
    temperature: float
    pace: Float[Tensor, "*heads tokens phases"] | None = None
    """How much larger a norm leaves each key's fluctuation than the last one's, by phase."""

    @classmethod
    def of(
        cls,
        form: QKForm,
        process: TokenProcess | LongProcess,
        *,
        spectrum: Spectrum | None = None,
        is_cross: bool = False,
    ) -> HeadMoments:
        """Contract the factors with the process' covariance and means.

        A `spectrum` of the form under the process' covariance lends its Gram matrices.  In
        cross-attention the query knows nothing of the keys' tokens, which follow the process.
        """
        model = form.query.shape[-1]
        for name, part in (("a covariance", process.covariance), ("means", process.mean)):
            if part is not None and part.shape[1] != model:
                raise InputError(
                    f"the process has {part.shape[1]} dimensions, the form has {model}.",
                    hint=f"give {name} of the form's model dimension.",
                )
        is_long = isinstance(process, LongProcess)
        if is_long and (form.rotary or form.query_norm or form.key_norm):
            raise InputError(
                f"{process.tokens:,} tokens are too many for a head that turns or normalizes: "
                "their kernel is written out.",
                hint=f"at most {DENSE_TOKENS:,}.",
            )
        times: Any = process if isinstance(process, LongProcess) else process.kernel
        norms, pace = (form.query_norm, form.key_norm), None
        biases = [None if norm is None else norm.bias for norm in norms]
        if all(part is None for part in (process.mean, *biases)):
            form = form.under(process.covariance)
            if None not in norms:
                size = times.diagonal().clamp_min(torch.finfo(times.dtype).tiny).sqrt()
                times = times / size / size[:, None]  # norms take out how tokens grow with time
        elif isinstance(process, TokenProcess) and norms != (None, None):
            form, pace = _sized(form, process)
            spectrum = None  # that of other sizes
        if spectrum is None:
            form = form.balanced()
            query, key = form.query.double(), form.key.double()
            sigma = None if process.covariance is None else process.covariance.to(query)
            spectrum = Spectrum(query, key, form.temperature, sigma)
        rotary = form.rotary and Rotary(form.rotary.frequencies.double(), form.rotary.layout)
        query_mean, key_mean = _means(form, process, pace)
        return cls(
            times if is_long else times.to(spectrum.query_gram),
            spectrum.query_gram,
            spectrum.key_gram,
            torch.zeros_like(spectrum.cross_gram) if is_cross else spectrum.cross_gram,
            query_mean,
            key_mean,
            _shift(form, process.tokens),
            rotary,
            form.temperature,
            pace,
        )

    @property
    def tokens(self) -> int:
        """T."""
        return self.times.tokens if isinstance(self.times, LongProcess) else len(self.times)

    @property
    def kernel(self) -> Float[Tensor, "tokens tokens"]:
        """K, where it was written out."""
        assert isinstance(self.times, Tensor)
        return self.times

    @property
    def last(self) -> Float[Tensor, " tokens"]:
        """K[:, T]."""
        return self.times.last if isinstance(self.times, LongProcess) else self.times[:, -1]

    @property
    def phases(self) -> Tensor:
        """How far each key is turned against the query, and lengthened."""
        assert self.rotary is not None
        turns = _phases(self.rotary, self.tokens)
        return turns if self.pace is None else turns * self.pace

    def turned(
        self, matrix: Float[Tensor, "*heads head head"]
    ) -> Float[Tensor, "*heads _ head head"]:
        """R_j · matrix for every key position j; a single copy where nothing turns."""
        if self.rotary is None:
            return matrix[..., None, :, :]
        turned = self.rotary.turn(matrix.mT[..., None, :, :], self.phases[..., None, :])
        return turned.mT

    def _mapped(self, function: Callable[[Tensor], Tensor]) -> HeadMoments:
        names = ("query_gram", "key_gram", "cross_gram", "query_mean", "key_mean", "shift",
                 "pace")  # fmt: skip
        return mapped(self, names, lambda _, part: function(part))

    def flat(self) -> HeadMoments:
        """The same heads along a single axis."""
        stack = self.key_gram.ndim - 2
        return self._mapped(lambda part: part.flatten(0, stack - 1) if stack else part[None])

    def rho(
        self, method: RhoMethod = "exact", tolerance: float | None = None
    ) -> Float[Tensor, "*heads tokens"]:
        """ρ at every position, a bounded number of heads at a time."""
        flat, rows = self.flat(), []
        heads, size = len(flat.key_gram), 2 * flat.key_gram.shape[-1]
        some = max(1, _AT_ONCE // (self.tokens * size**2))
        for start in range(0, heads, some):
            few = slice(start, start + some)
            score = flat._mapped(lambda part, few=few: part[few]).score()  # type: ignore[misc]
            rows.append(score.rho(method, tolerance))
        return torch.cat(rows).view(*self.key_gram.shape[:-2], self.tokens)

    def logits(
        self,
    ) -> tuple[Float[Tensor, "*heads tokens"], Float[Tensor, "*heads tokens tokens"]]:
        """Mean and covariance of the logits ω over the keys, exact."""
        kernel, last = self.kernel, self.kernel[:, -1]
        cross = self.turned(self.cross_gram)  # Cov(k_j, q) / K[j, T]
        mean = last * torch.einsum("...jaa->...j", cross)
        root, keys = (
            semidefinite_root(self.query_gram),
            self.turned(semidefinite_root(self.key_gram)),
        )
        half = (root.mT[..., None, :, :] @ keys.contiguous()).flatten(-2)
        covariance = kernel * kernel[-1, -1] * (half @ half.mT)
        paired = cross.flatten(-2) @ cross.mT.flatten(-2).mT
        covariance = covariance + last[:, None] * last * paired
        query = None if self.query_mean is None else self.query_mean[..., None, :]
        if query is not None:
            seen = (query[..., None, :] @ keys)[..., 0, :]
            covariance = covariance + kernel * (seen @ seen.mT)
        if self.key_mean is not None:
            own = self.key_mean @ root
            covariance = covariance + kernel[-1, -1] * (own @ own.mT)
        if query is not None and self.key_mean is not None:
            mean = mean + (self.key_mean * query).sum(-1)
            reach = last[:, None] * (query[..., None, :] @ cross)[..., 0, :]
            mixed = reach @ self.key_mean.mT
            covariance = covariance + mixed + mixed.mT
        mean = mean / self.temperature
        return mean if self.shift is None else mean + self.shift, covariance / self.temperature**2

    def gaussian_rows(
        self, draws: int, generator: torch.Generator
    ) -> Iterator[Float[Tensor, "one draws tokens"]]:
        """Rows of Gaussian logits that have the true mean and covariance, head by head."""
        mean, covariance = self.flat().logits()
        noise = _normal((draws, *mean.shape), generator).movedim(1, 0)
        for head, drawn in enumerate(noise):
            values, vectors = torch.linalg.eigh(covariance[head])
            root = vectors * values.clamp_min(0).sqrt()
            yield (mean[head] + drawn @ root.mT)[None]

    def score(self) -> Score:
        """The joint law of (b_i, q) at every position."""
        tokens, gram = self.tokens, self.key_gram
        shape = (*gram.shape[:-2], tokens)
        base = torch.full(shape, 1 / tokens, dtype=gram.dtype, device=gram.device)
        base = base if self.shift is None else base + _centered(self.shift, -1)
        key_mean = None if self.key_mean is None else _centered(self.key_mean, -2)
        if self.rotary is None:
            cross, spread = centered_kernel(self.times)
            # the query's own variance K[T, T] is moved to the keys: the product does not change
            last = self.last[-1]
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
        phases, kernel = self.phases, self.kernel
        key = self.turned(self.key_gram)
        # Σ_k Cov(k_j, k_k)/T: the right-hand rotations add up to one complex factor per pair
        summed = self.rotary.turn(key, (kernel.to(phases) @ phases / tokens)[..., None, :])
        own = self.rotary.turn(key, phases[..., None, :]) * kernel.diagonal()[:, None, None]
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
class LogitDraws:
    """Draws that all heads share, so that their rows of logits differ by the heads alone.

    Given the last token's query q, the keys are Gaussian: logit j is k_T·q K[j, T]/K[T, T] plus
    noise of covariance (K − K[:, T] K[T, :]/K[T, T]) · qᵀ G_kk q, all over λ.  So a row of logits
    from its exact law costs one draw of (q, k_T) and one of tokens numbers.
    """

    noise: Float[Tensor, "draws tokens"]
    """Of the keys, given the last token."""
    variances: Float[Tensor, " tokens"]
    """Of the process' tokens; of a form whose norms take these out the noise is scaled too."""

    @classmethod
    def of(
        cls, process: TokenProcess | LongProcess, draws: int, generator: torch.Generator
    ) -> LogitDraws:
        """Draw what does not depend on the heads."""
        if isinstance(process, LongProcess):
            paths = process.paths(_normal((draws, process.tokens), generator))
            noise = paths - paths[:, -1:] * process.last / process.last[-1]
            return cls(noise, process.diagonal())
        kernel = process.kernel.to(generator.device, torch.float64)
        last = kernel[:, -1]
        root = gram_root((kernel - last[:, None] * last / last[-1])[:-1, :-1], 0.0)
        normal = _normal((draws, len(root)), generator)
        return cls(torch.nn.functional.pad(normal @ root.mT, (0, 1)), kernel.diagonal())

    def rows(
        self, moments: HeadMoments, generator: torch.Generator, dtype: torch.dtype = torch.float64
    ) -> Iterator[Float[Tensor, "heads draws tokens"]]:
        """Rows of logits, a few heads at a time; the generator draws the last token."""
        moments = moments.flat()
        if moments.rotary is not None:
            yield from self._turned(moments, generator, dtype)
            return
        query, key = self._last_token(moments, generator)
        own = (query * key).sum(-1) / moments.temperature  # heads draws
        spread = ((query @ moments.key_gram) * query).sum(-1).clamp_min(0).sqrt()
        spread = spread / moments.temperature
        share = (moments.last / moments.last[-1]).to(dtype)
        growth = (moments.times.diagonal() / self.variances.clamp_min(1e-300)).sqrt()
        noise = (self.noise * growth).to(dtype)
        for start in range(0, len(query), some := max(1, _ROWS_AT_ONCE // noise.numel())):
            few = slice(start, start + some)
            logits = own[few, :, None].to(dtype) * share + spread[few, :, None].to(dtype) * noise
            if moments.key_mean is not None:
                seen = query[few] @ moments.key_mean[few].mT / moments.temperature
                logits = logits + seen.to(dtype)
            yield logits if moments.shift is None else logits + moments.shift[few, None].to(dtype)

    def _last_token(
        self, moments: HeadMoments, generator: torch.Generator
    ) -> tuple[Float[Tensor, "heads draws head"], Float[Tensor, "heads draws head"]]:
        """The last token's query, mean included, and its key around the mean."""
        joint = _joint(moments.query_gram, moments.cross_gram.mT, moments.key_gram)
        # queries and keys of one token are often nearly dependent: lift the pivots a little
        lift = 1e-12 * joint.diagonal(dim1=-2, dim2=-1).mean(-1) + 1e-300
        eye = torch.eye(joint.shape[-1], dtype=joint.dtype, device=joint.device)
        root = gram_root(joint + lift[:, None, None] * eye, 0.0)
        normal = _normal((len(self.noise), joint.shape[-1]), generator)
        pair = normal @ root.mT * moments.last[-1].sqrt()
        query, key = pair.tensor_split(2, -1)
        return (query if moments.query_mean is None else query + moments.query_mean[:, None]), key

    def _turned(
        self, moments: HeadMoments, generator: torch.Generator, dtype: torch.dtype
    ) -> Iterator[Float[Tensor, "one draws tokens"]]:
        """Where every key is turned by its own distance, whole rows of keys are drawn."""
        assert moments.rotary is not None
        kernel = semidefinite_root(moments.kernel)
        root = semidefinite_root(_joint(moments.key_gram, moments.cross_gram, moments.query_gram))
        state, size = generator.get_state(), root.shape[-1]
        some = max(1, 16 * _ROWS_AT_ONCE // (moments.tokens * size))
        for head in range(len(root)):
            generator.set_state(state)
            rows = []
            for start in range(0, len(self.noise), some):
                count = min(some, len(self.noise) - start)
                noise = _normal((count, moments.tokens, size), generator)
                keys, query = (kernel @ noise @ root[head].mT).tensor_split(2, -1)
                phases = moments.phases if moments.pace is None else moments.phases[head]
                keys, query = moments.rotary.turn(keys, phases), query[:, -1]
                keys = keys if moments.key_mean is None else keys + moments.key_mean[head]
                query = query if moments.query_mean is None else query + moments.query_mean[head]
                rows.append((keys @ query[..., None])[..., 0] / moments.temperature)
            logits = torch.cat(rows)[None]
            yield (logits if moments.shift is None else logits + moments.shift[head]).to(dtype)


@dataclass(frozen=True, eq=False)
class SampledHeads:
    """The last query and all keys of a stack of heads in every sequence, biased and rotated.

    Their own means and covariances at every position hold for tokens whose covariance is no
    Kronecker product: a first token unlike the others, or dimensions with memories of their own.

    >>> tokens = torch.randn(50, 3, 2, generator=torch.Generator().manual_seed(0))
    >>> heads = SampledHeads.of(QKForm(torch.eye(2), torch.eye(2), 1.0), tokens)
    >>> (heads.logits()[0] - tokens[0] @ tokens[0, -1]).abs().amax().item() < 1e-5
    True
    """

    query: Float[Tensor, "*heads samples head"]
    key: Float[Tensor, "*heads samples tokens head"]
    temperature: float
    shift: Float[Tensor, "*heads tokens"] | None = None
    """What a bias by distance adds to the logits."""

    @classmethod
    def of(cls, form: QKForm, samples: Float[Tensor, "samples tokens model"]) -> SampledHeads:
        """Project the tokens as the form's attention does, in float64."""
        if samples.ndim != 3 or samples.shape[0] < 2 or samples.shape[-1] != form.query.shape[-1]:
            raise InputError(
                f"samples are {tuple(samples.shape)} for a form of {form.query.shape[-1]} "
                "dimensions.",
                hint="give (samples, tokens, model) with at least 2 samples.",
            )
        form, samples = form.to(torch.float64), samples.double()
        query = torch.einsum("nm,...hm->...nh", samples[:, -1], form.query)
        key = torch.einsum("ntm,...hm->...nth", samples, form.key)
        if form.query_bias is not None:
            query = query + form.query_bias[..., None, :]
        if form.key_bias is not None:
            key = key + form.key_bias[..., None, None, :]
        if form.query_norm is not None:  # exactly: with samples no norm need be approximated
            sizes = form.query_norm.factor(samples[:, -1]).T
            query = form.query_norm.apply(query, sizes)
        if form.key_norm is not None:
            sizes = form.key_norm.factor(samples).movedim(-1, 0)
            key = form.key_norm.apply(key, sizes)
        if form.rotary is not None:
            key = form.rotary.turn(key, _phases(form.rotary, samples.shape[1]))
        placed = _placed(form, samples.shape[1])
        if placed is not None:
            key = key + placed[..., None, :, :]
        return cls(query, key, form.temperature, _shift(form, samples.shape[1]))

    @property
    def tokens(self) -> int:
        """T."""
        return self.key.shape[-2]

    @property
    def samples(self) -> int:
        """The number of sequences."""
        return self.query.shape[-2]

    def each(self) -> Iterator[SampledHeads]:
        """One head after the other."""
        queries = self.query.reshape(-1, *self.query.shape[-2:])
        keys = self.key.reshape(-1, *self.key.shape[-3:])
        shifts = [None] * len(keys) if self.shift is None else self.shift.reshape(-1, self.tokens)
        for query, key, shift in zip(queries, keys, shifts, strict=True):
            yield SampledHeads(query, key, self.temperature, shift)

    def logits(self) -> Float[Tensor, "samples *heads tokens"]:
        """The logits that the head itself computes for every sequence."""
        logits = (self.key @ self.query[..., None])[..., 0] / self.temperature
        logits = logits if self.shift is None else logits + self.shift[..., None, :]
        return logits.movedim(-2, 0)

    def score(self) -> Score:
        """The score with the first and second moments of (b_i, q) as sampled at every position."""
        tokens, freedom = self.tokens, self.samples - 1
        query_mean, key_mean = self.query.mean(-2), self.key.mean(-3)
        query = self.query - query_mean[..., None, :]
        keys = _centered(self.key - key_mean[..., None, :, :], -2).movedim(-2, -3).contiguous()
        base = torch.full(key_mean.shape[:-1], 1 / tokens, dtype=keys.dtype, device=keys.device)
        one = torch.ones(tokens, dtype=keys.dtype, device=keys.device)
        return Score(
            base if self.shift is None else base + _centered(self.shift, -1),
            _centered(key_mean, -2),
            query_mean,
            one,
            keys.mT @ keys / freedom,
            one,
            keys.mT @ query[..., None, :, :] / freedom,
            query.mT @ query / freedom,
            self.temperature,
        )

    def rho_given_query(self) -> Float[Tensor, "*heads tokens"]:
        """ρ_i averaged over the sampled queries, for keys that are Gaussian given the query.

        Nothing is assumed of the queries' own law, which is where many real heads are furthest from
        Gaussian.
        """
        rows = []
        for head in self.each():
            score, query = head.score(), head.query
            cross = score.cross_covariance
            assert score.key_mean is not None
            slope = cross @ torch.linalg.pinv(score.query_covariance, hermitian=True)
            known = score.key_mean[:, None] + (query - query.mean(0)) @ slope.mT
            mean = score.base[:, None] + (known * query).sum(-1) / self.temperature
            free = ((query @ (score.key_covariance - slope @ cross.mT)) * query).sum(-1)
            rows.append(normal_between(mean, free / self.temperature**2).mean(-1))
        return torch.stack(rows).view(*self.query.shape[:-2], self.tokens)

    def sample_logits(
        self, draws: int, generator: torch.Generator, *, given_query: bool = False
    ) -> Float[Tensor, "draws *heads tokens"]:
        """Draw rows of logits as if queries and keys were Gaussian with the sampled moments.

        A Gaussian mixture of the centered sequences has exactly their covariance, so nothing of
        size (tokens · head)² is factored.  With `given_query` the queries are the sampled ones, and
        only what they leave open of the keys is mixed.
        """
        mixture = _normal((draws, self.samples), generator) / (self.samples - 1) ** 0.5
        picks = torch.randint(self.samples, (draws,), generator=generator, device=generator.device)
        rows = []
        for head in self.each():
            query, key = head.query, head.key
            own, spread = query - query.mean(0), (key - key.mean(0)).flatten(1)
            if given_query:
                slope = torch.linalg.pinv(own.mT @ own, hermitian=True) @ (own.mT @ spread)
                last_query = query[picks]
                drawn = own[picks] @ slope + mixture @ (spread - own @ slope)
            else:
                last_query = query.mean(0) + mixture @ own
                drawn = mixture @ spread
            keys = key.mean(0) + drawn.unflatten(-1, key.shape[1:])
            rows.append((keys @ last_query[..., None])[..., 0] / self.temperature)
        logits = torch.stack(rows, 1).view(draws, *self.query.shape[:-2], self.tokens)
        return logits if self.shift is None else logits + self.shift


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

    def parts(self) -> tuple[dict[str, Float[Tensor, ...]], dict[str, Float[Tensor, ...]]]:
        """The terms of the mean and of the variance of b_i·q, by what they come from."""
        key, cross = self.key_covariance, self.cross_covariance
        query = self.query_covariance[..., None, :, :]
        mean = {"kernel": self.cross_scale * torch.einsum("...aa->...", cross)}
        variance = {
            "fluctuations": self.key_scale * (key * query).sum((-2, -1)),
            "kernel": self.cross_scale.square() * (cross * cross.mT).sum((-2, -1)),
        }
        own = None if self.query_mean is None else self.query_mean[..., None, :, None]
        keys = None if self.key_mean is None else self.key_mean[..., None]
        if own is not None:
            variance["query mean"] = self.key_scale * (own.mT @ key @ own)[..., 0, 0]
        if keys is not None:
            variance["key means"] = (keys.mT @ query @ keys)[..., 0, 0]
        if own is not None and keys is not None:
            mean["means"] = (keys * own).sum((-2, -1))
            variance["mixed"] = 2 * self.cross_scale * (own.mT @ cross @ keys)[..., 0, 0]
        return mean, variance

    def moments(self) -> tuple[Float[Tensor, "*heads tokens"], Float[Tensor, "*heads tokens"]]:
        """Mean and variance of the score at every position."""
        means, variances = self.parts()
        nothing = torch.zeros_like(self.base)
        mean, variance = (sum(parts.values(), nothing) for parts in (means, variances))
        return self.base + mean / self.temperature, variance / self.temperature / self.temperature

    def logits(self) -> tuple[Float[Tensor, "*heads tokens"], Float[Tensor, "*heads tokens"]]:
        """Mean and variance of the logits relative to their row's average: those of T Y_i − 1."""
        mean, variance = self.moments()
        tokens = mean.shape[-1]
        return tokens * mean - 1, tokens**2 * variance

    def rho(
        self, method: RhoMethod = "exact", tolerance: float | None = None
    ) -> Float[Tensor, "*heads tokens"]:
        """P(0 ≤ Y_i ≤ 1), from the law of the score or from its first two moments."""
        if method == "gaussian":
            return normal_between(*self.moments())
        if method == "exact" and self._is_family:
            return family_rho(self.key_scale.sqrt(), self.cross_scale, self.base, tolerance,
                              weights=self._weights, law=self._only_law)  # fmt: skip
        return chance(self.law(), method).view(self.base.shape)

    @property
    def _is_family(self) -> bool:
        """Without means, rotation and biases a position is its (u, q) alone."""
        has_means = self.key_mean is not None or self.query_mean is not None
        is_large = self.base.shape[-1] * 2 * self.query_covariance.shape[-1] >= _FAMILY
        is_alike = not has_means and self.key_covariance.shape[-3] == 1
        return is_large and is_alike and bool((self.base == self.base.flatten()[0]).all())

    def _at(self, places: Tensor, cross: Tensor, key: Tensor) -> Score:
        return replace(self, base=self.base[..., places], key_scale=key, cross_scale=cross)

    def _weights(self, ratio: Float[Tensor, " nodes"]) -> Float[Tensor, "heads nodes weights"]:
        """Of the scores of positions with q = 1 and these u."""
        start = torch.zeros_like(ratio, dtype=torch.long)
        return self._at(start, ratio, torch.ones_like(ratio))._distinct_weights()

    def _only_law(self, places: Tensor) -> QuadraticLaw:
        return self._at(places, self.cross_scale[places], self.key_scale[places]).law()

    def law(self) -> QuadraticLaw:
        """The law of every score, heads and positions flattened into rows."""
        has_means = self.key_mean is not None or self.query_mean is not None
        if has_means or self.key_covariance.shape[-3] > 1:
            return self._law()
        return self._law_by_kernel()

    def _law_by_kernel(self) -> QuadraticLaw:
        """Without means, positions with equal |u| and q share their weights, up to u's sign."""
        scales = torch.stack((self.cross_scale.abs(), self.key_scale))
        rounded = (scales / scales.amax(-1, keepdim=True).clamp_min(1e-300)).round(decimals=13)
        _, group = torch.unique(rounded, dim=-1, return_inverse=True)
        first = torch.stack([(group == k).nonzero()[0, 0] for k in range(int(group.max()) + 1)])
        cross, key = scales[:, first]
        weights = self._at(first, cross, key)._distinct_weights()
        weights = weights[:, group] * torch.where(self.cross_scale < 0, -1.0, 1.0)[:, None]
        return QuadraticLaw(self.base.flatten(), weights.flatten(0, 1))

    def _distinct_weights(self) -> Float[Tensor, "heads positions weights"]:
        middle = self._middle_by_columns()
        if middle is None:
            return self._law().weights.unflatten(0, (-1, len(self.key_scale)))
        weights = torch.linalg.eigvalsh(middle)
        return weights.reshape(-1, *weights.shape[-2:])

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
        return _joint(core, side, torch.zeros_like(core)) / self.temperature

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
        factor = gram_root(_joint(key * balance, cross, query / balance).flatten(0, -3))
        swapped = torch.cat((factor[:, head:], factor[:, :head]), -2)
        middle = factor.mT @ swapped / (2 * self.temperature)
        constant = self.base.expand(shape).flatten()
        if self.key_mean is None and self.query_mean is None:
            return QuadraticLaw(constant, torch.linalg.eigvalsh(middle))
        weights, vectors = torch.linalg.eigh(middle)
        root = balance[..., 0].sqrt()
        none = torch.zeros_like(key[..., 0])
        keys = none if self.key_mean is None else self.key_mean * root
        own = none if self.query_mean is None else self.query_mean[..., None, :] / root
        keys, own = (part.expand(*shape, head).flatten(0, -2) for part in (keys, own))
        linear = (torch.cat((own, keys), -1)[:, None] @ factor @ vectors)[:, 0] / self.temperature
        return QuadraticLaw(constant + (keys * own).sum(-1) / self.temperature, weights, linear)


def symmetric_rho(
    form: QKForm, process: TokenProcess, method: RhoMethod = "exact", tolerance: float | None = None
) -> Float[Tensor, "*heads tokens"]:
    """ρ of a symmetric form: one eigendecomposition serves all positions."""
    form = form.balanced()
    matrix = form.matrix().double()
    if process.covariance is not None:
        root = semidefinite_root(process.covariance.to(matrix))
        matrix = root.mT @ matrix @ root
    values = torch.linalg.eigvalsh(matrix) / (2 * form.temperature)
    values = values.reshape(-1, values.shape[-1])
    kernel = process.kernel.to(values)
    cross, spread = centered_kernel(kernel)
    size = (spread * kernel[-1, -1]).sqrt()  # √(u² + κ)
    base = values.new_full((len(values), process.tokens), 1 / process.tokens)

    def weights(ratio: Tensor) -> Tensor:
        return (
            values[:, None, None, :]
            .mul(torch.stack((ratio + 1, ratio - 1), -1)[..., None])
            .flatten(-2)
        )

    def law(places: Tensor) -> QuadraticLaw:
        both = torch.stack((cross + size, cross - size), -1)[places, :, None]
        rows = (values[:, None, None, :] * both).flatten(-2)
        return QuadraticLaw(base[:, places].flatten(), rows.flatten(0, 1))

    if method == "exact" and process.tokens * 2 * values.shape[-1] >= _FAMILY:
        rho = family_rho(size, cross, base, tolerance, weights=weights, law=law)
    else:
        rho = chance(law(torch.arange(process.tokens, device=values.device)), method)
    return rho.view(*form.query.shape[:-2], process.tokens)


def family_rho(
    size: Float[Tensor, " tokens"],
    cross: Float[Tensor, " tokens"],
    base: Float[Tensor, "*heads tokens"],
    tolerance: float | None,
    *,
    weights: Callable[[Tensor], Tensor],
    law: Callable[[Tensor], QuadraticLaw],
) -> Float[Tensor, "*heads tokens"]:
    """ρ where the weights of a score are its size times a function of u over it.

    Positions for which that is no good way, and without a `tolerance` those whose ρ is so small
    that its relative digits would suffer, are taken one by one.
    """
    absolute = tolerance or 1e-11
    flat = base.reshape(-1, base.shape[-1])
    is_sized = size > 0
    ratio = torch.where(is_sized, cross / torch.where(is_sized, size, 1.0), 0.0)
    low, high = ratio.amin().item(), ratio.amax().item()
    sizes = torch.where(is_sized, size, 1e-300)
    rho = torch.full_like(flat, math.nan)
    for count in _NODES if absolute > 1e-9 else _NODES[1:]:
        nodes = QuadraticFamily.nodes(low, high, count).to(ratio)
        rows = rho.isnan().all(-1).nonzero()[:, 0]
        if len(rows):
            family = QuadraticFamily(low, high, weights(nodes)[rows])
            rho[rows] = family.between_0_and_1(flat[0, 0].item(), sizes, ratio, absolute)
    left = rho.isnan() if tolerance else rho.isnan() | (rho < 1e-3)
    places = left.any(0).nonzero()[:, 0]
    if len(places):
        exact = law(places).between(0.0, 1.0).view(len(rho), -1)
        rho[:, places] = torch.where(left[:, places], exact, rho[:, places])
    return rho.view(base.shape)


def chance(law: QuadraticLaw, method: RhoMethod) -> Float[Tensor, " rows"]:
    """P(0 ≤ Y ≤ 1) of every row, exactly or by Lugannani and Rice."""
    return law.saddlepoint_between(0.0, 1.0) if method == "saddlepoint" else law.between(0.0, 1.0)


def normal_between(
    mean: Float[Tensor, "*shape"], variance: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """P(0 ≤ N(mean, variance) ≤ 1), without cancellation in either tail."""
    # below ½ the upper tails are the small ones, and erfc keeps their digits
    mean = torch.where(mean > 0.5, 1 - mean, mean)
    is_certain = variance <= 0
    safe = torch.where(is_certain, 0.5, variance).sqrt() * math.sqrt(2)
    between = (torch.erfc(-mean / safe) - torch.erfc((1 - mean) / safe)) / 2
    return torch.where(is_certain, (mean >= 0).to(mean), between)


def _sized(form: QKForm, process: TokenProcess) -> tuple[QKForm, Tensor | None]:
    """The form with its norms as the last token meets them, and the pace of the others' keys."""
    own, mean = process.kernel.diagonal(), process.mean
    sizes, pace = {}, None
    for name in ("query_norm", "key_norm"):
        norm = getattr(form, name)
        if norm is not None:
            every = norm.mean_squares(own, process.covariance, mean).clamp_min(1e-300).sqrt()
            every = every.expand(*norm.size.shape, process.tokens)
            sizes[name] = every[..., -1]
    form, norm = form.sized(sizes), form.key_norm
    if norm is None or torch.allclose(every, every[..., -1:], rtol=1e-12, atol=0):
        return form, None
    if form.rotary is None:  # what the norm leaves as it is (MLA) stays where it is
        still = torch.zeros(norm.start // 2, dtype=torch.float64, device=form.key.device)
        form = replace(form, rotary=Rotary(still))
    assert form.rotary is not None
    pairs, head = form.rotary.frequencies.shape[0], form.key.shape[-2]
    if norm.start not in (0, 2 * pairs) or norm.stop not in (None, head):
        raise InputError(
            f"a norm of dimensions {norm.start} to {norm.stop or head} is not the whole of those "
            f"that turn, which are the first {2 * pairs} of {head}.",
            hint="give tokens without means, or norms of all dimensions or of those that do not.",
        )
    pace = (every[..., -1:] / every).expand(*form.key.shape[:-2], -1)[..., None]
    turned = pace if norm.start == 0 else torch.ones_like(pace)
    return form, torch.cat((turned.expand(*pace.shape[:-1], pairs), pace), -1)


def _means(
    form: QKForm, process: TokenProcess | LongProcess, pace: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The mean query, and the mean keys as the query sees them; None for zeros."""
    query_mean = None if form.query_bias is None else form.query_bias.double()
    key_mean = None
    if process.mean is not None:
        mean = process.mean.to(form.query.device, torch.float64)
        key_mean = mean @ form.key.double().mT
        own = form.query.double() @ mean[-1]
        query_mean = own if query_mean is None else own + query_mean
    if form.rotary is not None:  # else what a bias adds is the same for all keys
        turns = _phases(form.rotary, process.tokens)
        if form.key_bias is not None:
            bias = form.key_bias.double()[..., None, :]
            key_mean = bias if key_mean is None else key_mean + bias
        if key_mean is not None and pace is not None:
            norm = form.key_norm
            after = None if norm is None or norm.shift is None else norm.shift.double()
            shift = torch.zeros_like(key_mean) if after is None else after[..., None, :]
            key_mean = form.rotary.turn(key_mean - shift, turns * pace)
            key_mean = key_mean + form.rotary.turn(shift, turns)
        elif key_mean is not None:
            key_mean = form.rotary.turn(key_mean, turns)
    placed = _placed(form, process.tokens)
    if placed is not None:
        key_mean = placed if key_mean is None else key_mean + placed
    return query_mean, key_mean


def _phases(rotary: Rotary, tokens: int) -> Tensor:
    """How far each key is turned against the last query."""
    device = rotary.frequencies.device
    return rotary.phases(torch.arange(1 - tokens, 1, dtype=torch.float64, device=device))


def _placed(form: QKForm, tokens: int) -> Float[Tensor, "*heads tokens head"] | None:
    """What tables of relative positions add to the keys that the last query meets."""
    last = torch.tensor([tokens - 1], device=form.query.device)
    placed = None if form.relative is None else form.relative.keys_at(last, tokens)
    return None if placed is None else placed[..., 0, :, :]


def _shift(form: QKForm, tokens: int) -> Float[Tensor, "*heads tokens"] | None:
    """What is added to the logits of the last query for the distance of its keys."""
    last = torch.tensor([tokens - 1], device=form.query.device)
    added = None if form.relative is None else form.relative.bias_at(last, tokens)
    added = None if added is None else added[..., 0, :]
    if form.distance_bias is None:
        return added
    if form.distance_bias.shape[-1] < tokens:
        raise InputError(
            f"distance_bias covers {form.distance_bias.shape[-1]} distances, "
            f"the process has {tokens} tokens.",
            hint="give a bias for every distance from 0 to tokens - 1.",
        )
    shift = form.distance_bias.double()[..., :tokens].flip(-1)
    return shift if added is None else shift + added


def _centered(values: Tensor, axis: int) -> Tensor:
    """γⁱ applied along the token axis: (value_i − mean)/T."""
    return (values - values.mean(axis, keepdim=True)) / values.shape[axis]


def _joint(first: Tensor, cross: Tensor, second: Tensor) -> Tensor:
    """The block matrix [[first, cross], [crossᵀ, second]]."""
    return torch.cat((torch.cat((first, cross), -1), torch.cat((cross.mT, second), -1)), -2)


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device)
