"""Queries and keys by position, from sampled tokens: moments that need no K ⊗ Σ.

The score of a head depends on its tokens through the query and the keys alone.  Their own means and
covariances at every position take head × head numbers each, and so hold for tokens whose covariance
is no Kronecker product: a first token unlike the others, or dimensions with memories of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from locater.core.form import QKForm
from locater.core.score import Score
from locater.core.theory import normal_between
from locater.errors import InputError


@dataclass(frozen=True, eq=False)
class SampledHeads:
    """The last query and all keys of a stack of heads in every sequence, biased and rotated.

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
        tokens = samples.shape[1]
        query = torch.einsum("nm,...hm->...nh", samples[:, -1], form.query)
        key = torch.einsum("ntm,...hm->...nth", samples, form.key)
        if form.query_bias is not None:
            query = query + form.query_bias[..., None, :]
        if form.key_bias is not None:
            key = key + form.key_bias[..., None, None, :]
        if form.rotary is not None:
            offset = torch.arange(1 - tokens, 1, dtype=torch.float64, device=key.device)
            key = form.rotary.turn(key, form.rotary.phases(offset))
        shift = None if form.distance_bias is None else form.distance_bias[..., :tokens].flip(-1)
        return cls(query, key, form.temperature, shift)

    @property
    def tokens(self) -> int:
        """T."""
        return self.key.shape[-2]

    @property
    def samples(self) -> int:
        """The number of sequences."""
        return self.query.shape[-2]

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
        keys = _centered(self.key - key_mean[..., None, :, :]).movedim(-2, -3).contiguous()
        base = torch.full(key_mean.shape[:-1], 1 / tokens, dtype=keys.dtype, device=keys.device)
        if self.shift is not None:
            base = base + _centered(self.shift[..., None])[..., 0]
        one = torch.ones(tokens, dtype=keys.dtype, device=keys.device)
        return Score(
            base,
            _centered(key_mean),
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
        score, stack = self.score(), self.query.shape[:-2]
        assert score.key_mean is not None
        rows = []
        for head, query in enumerate(self.query.reshape(-1, *self.query.shape[-2:])):
            base, key_mean, key, cross, spread = (
                part.reshape(-1, *part.shape[len(stack) :])[head]
                for part in (
                    score.base,
                    score.key_mean,
                    score.key_covariance,
                    score.cross_covariance,
                    score.query_covariance,
                )
            )
            slope = cross @ torch.linalg.pinv(spread, hermitian=True)
            known = key_mean[:, None] + (query - query.mean(0)) @ slope.mT
            mean = base[:, None] + (known * query).sum(-1) / self.temperature
            free = ((query @ (key - slope @ cross.mT)) * query).sum(-1).clamp_min(0)
            rows.append(normal_between(mean, free.sqrt() / self.temperature).mean(-1))
        return torch.stack(rows).view(*stack, self.tokens)

    def sample_logits(
        self, draws: int, generator: torch.Generator, *, given_query: bool = False
    ) -> Float[Tensor, "draws *heads tokens"]:
        """Draw rows of logits as if queries and keys were Gaussian with the sampled moments.

        A Gaussian mixture of the centered sequences has exactly their covariance, so nothing of
        size (tokens · head)² is factored.  With `given_query` the queries are the sampled ones, and
        only what they leave open of the keys is mixed.
        """
        shape = (draws, self.samples)
        device, wide = self.key.device, torch.float64
        mixture = torch.randn(shape, generator=generator, dtype=wide, device=device)
        mixture = mixture / (self.samples - 1) ** 0.5
        picks = torch.randint(self.samples, (draws,), generator=generator, device=device)
        rows = []
        for query, key in zip(
            self.query.reshape(-1, *self.query.shape[-2:]),
            self.key.reshape(-1, *self.key.shape[-3:]),
            strict=True,
        ):
            own, spread = query - query.mean(0), (key - key.mean(0)).flatten(1)
            if given_query:
                slope = torch.linalg.pinv(own.mT @ own, hermitian=True) @ (own.mT @ spread)
                ask = query[picks]
                drawn = own[picks] @ slope + mixture @ (spread - own @ slope)
            else:
                ask = query.mean(0) + mixture @ own
                drawn = mixture @ spread
            keys = key.mean(0) + drawn.unflatten(-1, key.shape[1:])
            rows.append((keys @ ask[..., None])[..., 0] / self.temperature)
        logits = torch.stack(rows, 1).view(draws, *self.query.shape[:-2], self.tokens)
        return logits if self.shift is None else logits + self.shift


def _centered(values: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
    """γⁱ applied along the token axis: (value_i − mean)/T."""
    return (values - values.mean(-2, keepdim=True)) / values.shape[-2]
