"""The LocAteR objective (Section 6) and its closed-form gradient, batched over heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from locater.core.spectrum import Spectrum
from locater.errors import ConfigError, InputError, check_choice

Reduce = Literal["sum", "mean"]
TargetUnit = Literal["trace", "temperature"]


@dataclass(frozen=True, kw_only=True)
class LocAteRConfig:
    """How hard to pull on each head's eigenspectrum (Section 6), beside a loss that is a mean.

    The strengths by default are those of the paper's captions over the 4,096 tokens of its batch.
    Its text, 100 and 1, drives W_QK to zero, which switches attention off.

    >>> LocAteRConfig(scale_strength=0.0, mean_strength=1.0).target
    1.0
    """

    scale_strength: float = 1 / 4096
    """Weight of tr(W_QKᵀ W_QK): shrinks the spectrum (the text's κ₁)."""
    mean_strength: float = 100 / 4096
    """Weight of (tr(W_QK) − target)²: keeps its mean off zero (the text's κ₂)."""
    target: float = 1.0
    """Where to hold the trace; theory localizes beyond 2 temperatures only."""
    target_unit: TargetUnit = "trace"
    """`temperature` reads the target as a multiple of λ, that is as r = tr(W)/λ."""
    reduce: Reduce = "sum"
    """Over all heads of all layers."""

    def __post_init__(self) -> None:
        for name in ("scale_strength", "mean_strength"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(
                    f"{name} must be zero or more, got {value}.",
                    hint="zero switches the term off; a reward for a wide spectrum is not LocAteR.",
                )
        if self.scale_strength == self.mean_strength == 0:
            raise ConfigError(
                "both strengths are zero, so there is nothing to regularize.",
                hint="leave the regularizer out, or give one term a strength.",
            )
        if not math.isfinite(self.target):
            raise ConfigError(f"target must be finite, got {self.target}.", hint="the paper has 1.")
        for name, choices in (("target_unit", TargetUnit), ("reduce", Reduce)):
            check_choice(name, getattr(self, name), get_args(choices))

    def target_trace(self, temperature: float) -> float:
        """The trace to hold, for a head with this λ."""
        return self.target * (temperature if self.target_unit == "temperature" else 1.0)

    def equilibrium(self, rank: int, *, temperature: float = 1.0) -> float:
        """The trace at which the penalty alone comes to rest: m τ/(m + s/rank).

        >>> round(LocAteRConfig(scale_strength=100.0, mean_strength=1.0).equilibrium(128), 6)
        0.561404
        """
        pull = self.mean_strength + self.scale_strength / rank
        return self.mean_strength * self.target_trace(temperature) / pull


def penalty_spectrum(
    query: Float[Tensor, "heads head model"],
    key: Float[Tensor, "groups head model"],
    covariance: Float[Tensor, "model model"] | None = None,
) -> Spectrum:
    """tr(W) and ‖S‖²_F per query head in float32 or better; neighbors share a key head."""
    query, key = _fitting(query, key)
    return Spectrum(query, key, 1.0, covariance)


def query_gradient(
    spectrum: Spectrum, scale: float, pull: Float[Tensor, " heads"]
) -> Float[Tensor, "heads head model"]:
    """∂/∂W_Q of scale·‖S‖²_F + (a term whose derivative in the trace is pull).

    Paper: Section 6.  Erratum E22: the printed gradient of the mean term has tr(W_QK) for 2.
    """
    query, key = spectrum.colored
    result = (pull.view(len(key), -1, 1, 1) * key[:, None]).flatten(0, 1)
    return result.baddbmm_(spectrum.key_gram, query, alpha=2 * scale)


def key_gradient(
    spectrum: Spectrum, scale: float, pull: Float[Tensor, " heads"]
) -> Float[Tensor, "groups head model"]:
    """∂/∂W_K of the same, summed over the query heads that share a key head."""
    query, key = spectrum.colored
    if spectrum.share == 1:
        result, gram = pull[:, None, None] * query, spectrum.query_gram
    else:
        groups = (len(key), spectrum.share)
        result = torch.einsum("gs,gshm->ghm", pull.view(groups), query.unflatten(0, groups))
        gram = spectrum.query_gram.unflatten(0, groups).sum(1)
    return result.baddbmm_(gram, key, alpha=2 * scale)


def _fitting(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """The two in float32 or better, if they fit each other."""
    if query.shape[1:] != key.shape[1:] or query.shape[0] % key.shape[0]:
        raise InputError(
            f"query is {tuple(query.shape)} and key is {tuple(key.shape)}.",
            hint="both are (heads, head, model), and key heads divide the query heads.",
        )
    if query.dtype in (torch.float32, torch.float64):
        return query, key
    return query.float(), key.float()


def unrounded(device: torch.device) -> torch.autocast:
    """Where autocast does not make products of 16 bits out of float32."""
    return torch.autocast(device.type, enabled=False)


class _Differentiated(torch.autograd.Function):
    """A value whose gradient in a weight is known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, gradient: Callable[[], Tensor]) -> Tensor:
        ctx.gradient, ctx.dtype = gradient, weight.dtype
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (output,) = outputs
        if not ctx.needs_input_grad[1]:
            return output, None, None
        with unrounded(output.device):
            return output, ctx.gradient().mul_(output).to(ctx.dtype), None


def locater_penalty(
    query: Float[Tensor, "heads head model"],
    key: Float[Tensor, "groups head model"],
    config: LocAteRConfig,
    *,
    temperature: float = 1.0,
    covariance: Float[Tensor, "model model"] | None = None,
) -> Float[Tensor, ""]:
    """Σ over heads of scale·‖W‖²_F + mean·(tr W − target)², at head-dimension cost.

    Paper: Section 6, for W = W_QK; with a `covariance` for the W = W_QK Σ of its theory.  No
    model × model matrix is formed from the factors, and no graph but a node for each.

    >>> config = LocAteRConfig(scale_strength=0.5, mean_strength=2.0)
    >>> query = torch.tensor([[[1.0, 2.0, 0.0], [0.0, 1.0, -1.0]]])
    >>> key = torch.tensor([[[1.0, 0.0, 1.0], [2.0, -1.0, 0.0]]])
    >>> locater_penalty(query, key, config)
    tensor(16.)
    """
    return lazy_penalty(query, lambda: key, config, temperature=temperature, covariance=covariance)


def lazy_penalty(
    query: Float[Tensor, "heads head model"],
    key: Callable[[], Tensor],
    config: LocAteRConfig,
    *,
    temperature: float = 1.0,
    covariance: Float[Tensor, "model model"] | None = None,
) -> Float[Tensor, ""]:
    """`locater_penalty` with a key that is made when asked for, as a view of a parameter.

    Its view and node come after the query's node, so that the backward pass is done with one
    gradient, down to the parameter, before it makes the other: half the memory.
    """
    with unrounded(query.device):
        return _penalty(query, key, config, config.target_trace(temperature), covariance)


def _penalty(
    query: Tensor,
    key: Callable[[], Tensor],
    config: LocAteRConfig,
    target: float,
    covariance: Tensor | None,
) -> Tensor:
    scale, mean = config.scale_strength, config.mean_strength
    if covariance is None and 4 * query.shape[-2] >= 3 * query.shape[-1]:
        # W_QK is hardly larger than its factors: nothing to gain
        query, keys = _fitting(query, key())
        share = query.shape[0] // keys.shape[0]
        form = query.mT @ (keys if share == 1 else keys.repeat_interleave(share, 0))
        gap = form.diagonal(dim1=-2, dim2=-1).sum(-1) - target
        return scale * form.square().sum() + mean * gap.square().sum()
    if covariance is not None:
        wide = query.dtype if query.dtype == torch.float64 else torch.float32
        covariance = covariance.detach().to(query.device, wide)
    with torch.no_grad():
        spectrum = penalty_spectrum(query, key(), covariance)
        gap = spectrum.trace - target
        value = scale * spectrum.frobenius_squared.sum() + mean * gap.square().sum()
    of_query = partial(query_gradient, spectrum, scale, 2 * mean * gap)
    of_key = partial(key_gradient, spectrum, scale, 2 * mean * gap)
    value = _Differentiated.apply(value, query, of_query)  # type: ignore[no-untyped-call]
    result: Tensor = _Differentiated.apply(value, key(), of_key)  # type: ignore[no-untyped-call]
    return result
