"""The LocAteR objective (Section 6) and its closed-form gradient, batched over heads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from locater.errors import ConfigError, InputError

Reduce = Literal["sum", "mean"]
TargetUnit = Literal["trace", "temperature"]


@dataclass(frozen=True, kw_only=True)
class LocAteRConfig:
    """How hard to pull on each head's eigenspectrum (Section 6)."""

    scale_strength: float = 100.0
    """Weight of tr(W_QKᵀ W_QK): shrinks the spectrum (the text's κ₁)."""
    mean_strength: float = 1.0
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
        for name, choices in (
            ("target_unit", ("trace", "temperature")),
            ("reduce", ("sum", "mean")),
        ):
            if getattr(self, name) not in choices:
                raise ConfigError(
                    f"unknown {name} {getattr(self, name)!r}.",
                    hint="choose one of: " + ", ".join(choices) + ".",
                )

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


@dataclass(frozen=True, eq=False)
class PenaltyTerms:
    """Per query head: tr(W) and ‖S‖²_F of W = W_QK Σ, with what their gradients need."""

    query: Float[Tensor, "groups share head model"]  # W_Q Σ, with Σ = I by default
    key: Float[Tensor, "groups 1 head model"]  # W_K Σ
    trace: Float[Tensor, "groups share"]
    frobenius_squared: Float[Tensor, "groups share"]
    products: tuple[Tensor, ...]
    """The Gram matrices of query and key; or W itself, where heads are nearly as wide as the model
    and that takes one product less."""

    @classmethod
    def of(
        cls,
        query: Float[Tensor, "heads head model"],
        key: Float[Tensor, "groups head model"],
        covariance: Float[Tensor, "model model"] | None = None,
    ) -> PenaltyTerms:
        """Contract in float32 or better; consecutive query heads share a key head."""
        if query.shape[1:] != key.shape[1:] or query.shape[0] % key.shape[0]:
            raise InputError(
                f"query is {tuple(query.shape)} and key is {tuple(key.shape)}.",
                hint="both are (heads, head, model), and key heads divide the query heads.",
            )
        if query.dtype not in (torch.float32, torch.float64):
            query, key = query.float(), key.float()
        query, key = query.unflatten(0, (key.shape[0], -1)), key[:, None]
        if covariance is None and 4 * query.shape[-2] >= 3 * query.shape[-1]:
            form = query.mT @ key
            trace, norm = form.diagonal(dim1=-2, dim2=-1).sum(-1), form.square().sum((-2, -1))
            return cls(query, key, trace, norm, (form,))
        colored = (query, key) if covariance is None else (query @ covariance, key @ covariance)
        # row by row: one long dot product loses digits in float32
        trace = torch.linalg.vecdot(colored[0], key).sum(-1)
        grams = colored[0] @ query.mT, colored[1] @ key.mT
        return cls(*colored, trace, (grams[0] * grams[1]).sum((-2, -1)), grams)

    def gradients(
        self, scale: float, pull: Float[Tensor, "groups share"]
    ) -> tuple[Float[Tensor, "heads head model"], Float[Tensor, "groups head model"]]:
        """∂/∂W_Q and ∂/∂W_K of scale·‖S‖²_F + (a term whose derivative in the trace is pull).

        Paper: Section 6.  Erratum E22: the printed gradient of the mean term has tr(W_QK) for 2.
        """
        pull = pull[..., None, None]
        if len(self.products) == 1:
            form = 2 * scale * self.products[0]
            form.diagonal(dim1=-2, dim2=-1).add_(pull[..., 0])
            query, key = self.key @ form.mT, (self.query @ form).sum(1)
        else:
            query_gram, key_gram = self.products
            query = (2 * scale * key_gram) @ self.query
            query.addcmul_(pull.expand_as(query), self.key.expand_as(query))
            key = (2 * scale * query_gram.sum(1)) @ self.key[:, 0]
            key.add_((pull * self.query).sum(1))
        return query.flatten(0, 1), key


class _Penalty(torch.autograd.Function):
    """scale Σ‖S‖²_F + mean Σ(tr W − target)², differentiated by hand."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        covariance: Tensor | None,
        scale: float,
        mean: float,
        target: float,
    ) -> Tensor:
        terms = PenaltyTerms.of(query.detach(), key.detach(), covariance)
        gap = terms.trace - target
        ctx.terms, ctx.scale, ctx.pull = terms, scale, 2 * mean * gap
        ctx.dtypes = query.dtype, key.dtype
        return scale * terms.frobenius_squared.sum() + mean * gap.square().sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, key = ctx.terms.gradients(ctx.scale, ctx.pull)
        query, key = query.mul_(outputs[0]), key.mul_(outputs[0])
        return query.to(ctx.dtypes[0]), key.to(ctx.dtypes[1]), None, None, None, None


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
    model × model matrix is formed from the factors, and no graph but this one node.

    >>> config = LocAteRConfig(scale_strength=0.5, mean_strength=2.0)
    >>> query = torch.tensor([[[1.0, 2.0, 0.0], [0.0, 1.0, -1.0]]])
    >>> key = torch.tensor([[[1.0, 0.0, 1.0], [2.0, -1.0, 0.0]]])
    >>> locater_penalty(query, key, config)
    tensor(16.)
    """
    if covariance is not None:
        wide = query.dtype if query.dtype == torch.float64 else torch.float32
        covariance = covariance.detach().to(query.device, wide)
    strengths = config.scale_strength, config.mean_strength, config.target_trace(temperature)
    result: Tensor = _Penalty.apply(query, key, covariance, *strengths)  # type: ignore[no-untyped-call]
    return result
