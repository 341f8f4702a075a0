"""Bounds on entropy and norms (Eqs. 5, 7-10), in their valid form and as printed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from locater.core.form import QKForm
from locater.errors import ConfigError, InputError

EntropyVariant = Literal["exact", "as_printed"]
BoundsVariant = Literal["valid", "as_printed"]


def entropy_lower_bound(
    norm: Float[Tensor, "*batch"] | float, tokens: int, *, variant: EntropyVariant = "exact"
) -> Float[Tensor, "*batch"]:
    """The least entropy of a softmax over `tokens` logits whose Euclidean norm is at most `norm`.

    The bound is attained, and falls from ln T to 0.  `norm` includes the 1/λ; the tightest choice
    is the norm of the centered logits.
    Paper: Eq. 9 (Zhai et al. 2023, Theorem 3.1).  Errata E20, E21: printed with e^(−ν/2) it
    exceeds ln T, and its peak (Fig. 4) is an artefact.

    >>> entropy_lower_bound(2.0, 64).item()
    4.0410...
    >>> entropy_lower_bound(2.0, 64, variant="as_printed").item() > math.log(64)
    True
    """
    norm = torch.as_tensor(norm, dtype=torch.float64)
    if tokens < 2 or not bool((norm >= 0).all()):
        raise InputError(
            f"no bound for {tokens} tokens and norms down to {norm.min().item():g}.",
            hint="give at least 2 tokens and norms that are zero or more.",
        )
    if variant == "as_printed":
        return torch.log1p(tokens * torch.exp(-norm)) + norm * torch.exp(-norm / 2) / (
            1 / tokens + torch.exp(-norm)
        )
    if variant != "exact":
        raise ConfigError(f"unknown variant {variant!r}.", hint="use 'exact' or 'as_printed'.")
    gap = norm * math.sqrt(tokens / (tokens - 1))
    others = (tokens - 1) * torch.exp(-gap)
    share = torch.where(others > 0, others * gap.clamp_max(1e300) / (1 + others), 0.0)
    return torch.log1p(others) + share


@dataclass(frozen=True, eq=False)
class Inequality:
    """Both sides of `lower <= upper` for every head."""

    equation: str
    statement: str
    lower: Float[Tensor, "*heads"]
    upper: Float[Tensor, "*heads"]

    @property
    def holds(self) -> Bool[Tensor, "*heads"]:
        """Whether it is true, to rounding error."""
        return self.lower <= self.upper * (1 + 1e-9) + 1e-300


def collapse_bounds(
    form: QKForm,
    covariance: Float[Tensor, "model model"] | None = None,
    *,
    variant: BoundsVariant = "valid",
) -> list[Inequality]:
    """The chain of bounds that ties the spectrum to rank and entropy collapse, side by side.

    Paper: Eqs. 5, 7, 8, 10.  Errata E10, E18, E19: three of them fail as printed;
    `variant="as_printed"` shows it.

    >>> bounds = collapse_bounds(QKForm.from_eigenvalues(torch.ones(128), temperature=1.0))
    >>> all(bool(bound.holds) for bound in bounds)
    True
    >>> printed = collapse_bounds(
    ...     QKForm.from_eigenvalues(torch.ones(128), temperature=1.0), variant="as_printed"
    ... )
    >>> [bound.equation for bound in printed if not bool(bound.holds)]
    ['7a', '7c']
    """
    if variant not in ("valid", "as_printed"):
        raise ConfigError(f"unknown variant {variant!r}.", hint="use 'valid' or 'as_printed'.")
    model = form.query.shape[-1]
    plain, spectrum = form.spectrum(), form.spectrum(covariance)
    sigma = torch.eye(model, dtype=torch.float64) if covariance is None else covariance.double()
    eigenvalues = torch.linalg.eigvalsh(sigma.to(plain.trace.device))
    norm2, norm_f = eigenvalues[-1], eigenvalues.square().sum().sqrt()
    # ‖Σ⁻¹‖ is infinite for a singular Σ, and the bounds that use it are then empty
    eps = model * torch.finfo(torch.float64).eps
    eigenvalues = torch.where(eigenvalues > eps * norm2, eigenvalues, 0.0)
    inverse2 = 1 / eigenvalues[0]
    trace, scale = spectrum.trace, spectrum.frobenius_squared
    rank = form.rank
    if variant == "as_printed":
        printed = spectrum.trace_of_square
        inverse_f = eigenvalues.pow(-2).sum().sqrt()
        root = printed.clamp_min(0).sqrt()
        return [
            Inequality("5", "|tr W| <= sqrt(d tr W^2)", trace.abs(), math.sqrt(model) * root),
            Inequality(
                "7a",
                "|tr W| / (sqrt(d) ||Sigma||_2) <= ||W_QK||_2",
                trace.abs() / (math.sqrt(model) * norm2),
                plain.spectral_norm,
            ),
            Inequality(
                "7b",
                "||W_QK||_2 <= ||W_QK||_F",
                plain.spectral_norm,
                plain.frobenius_squared.sqrt(),
            ),
            Inequality(
                "7c",
                "||W_QK||_F <= ||W_QK||_1 (largest column sum)",
                plain.frobenius_squared.sqrt(),
                _column_sums(form).amax(-1),
            ),
            Inequality(
                "8",
                "(tr W)^2 <= d tr W^2",
                trace.square(),
                model * printed,
            ),
            Inequality(
                "10a",
                "|tr W_QK| <= ||Sigma^-1||_F sqrt(tr W^2)",
                plain.trace.abs(),
                (inverse_f * root).nan_to_num(math.inf, posinf=math.inf),
            ),
            Inequality("10b", "||W_QK||_2 <= |tr W_QK|", plain.spectral_norm, plain.trace.abs()),
        ]
    return [
        Inequality("5", "|tr W| <= sqrt(rank) ||S||_F", trace.abs(), (rank * scale).sqrt()),
        Inequality(
            "7a",
            "|tr W| / (sqrt(d) ||Sigma||_2) <= |tr W| / ||Sigma||_F",
            trace.abs() / (math.sqrt(model) * norm2),
            trace.abs() / norm_f,
        ),
        Inequality(
            "7b",
            "|tr W| / ||Sigma||_F <= ||W_QK||_F",
            trace.abs() / norm_f,
            plain.frobenius_squared.sqrt(),
        ),
        Inequality(
            "7c",
            "||W_QK||_F <= sum of |entries| of W_QK",
            plain.frobenius_squared.sqrt(),
            _column_sums(form).sum(-1),
        ),
        Inequality(
            "7d",
            "|tr W| / tr Sigma <= ||W_QK||_2",
            trace.abs() / eigenvalues.sum(),
            plain.spectral_norm,
        ),
        Inequality(
            "8",
            "(tr W)^2 <= rank ||S||_F^2",
            trace.square(),
            rank * scale,
        ),
        Inequality(
            "10a",
            "||W_QK||_2 <= ||W_QK||_F",
            plain.spectral_norm,
            plain.frobenius_squared.sqrt(),
        ),
        Inequality(
            "10b",
            "||W_QK||_F <= ||Sigma^-1||_2 ||S||_F",
            plain.frobenius_squared.sqrt(),
            (inverse2 * scale.sqrt()).nan_to_num(math.inf, posinf=math.inf),  # not ∞ · 0
        ),
    ]


def _column_sums(form: QKForm) -> Float[Tensor, "*heads model"]:
    """Σ_i |W_QK[i, j]| for every column, a few columns of W_QK at a time."""
    query, key = form.query.double(), form.key.double()
    columns = [(query.mT @ part).abs().sum(-2) for part in key.split(256, dim=-1)]
    return torch.cat(columns, -1)
