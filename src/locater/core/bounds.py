"""Bounds on entropy and norms (Eqs. 5, 7-10), in their valid form and as printed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from locater.core.form import QKForm
from locater.errors import InputError, check_choice, unknown

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
        raise unknown("variant", variant, get_args(EntropyVariant))
    gap = norm * math.sqrt(tokens / (tokens - 1))
    others = (tokens - 1) * torch.exp(-gap)
    share = torch.where(others > 0, others * gap.clamp_max(1e300) / (1 + others), 0.0)
    return torch.log1p(others) + share


@dataclass(frozen=True, eq=False)
class Inequality:
    """Both sides of `lower <= upper` for every head.

    >>> form = QKForm(torch.eye(4), torch.eye(4), temperature=2.0)
    >>> first = collapse_bounds(form)[0]
    >>> first.equation, bool(first.holds)
    ('5', True)
    """

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
    check_choice("variant", variant, get_args(BoundsVariant))
    model, rank = form.query.shape[-1], form.rank
    plain, spectrum = form.spectrum(), form.spectrum(covariance)
    sigma = torch.eye(model, dtype=torch.float64) if covariance is None else covariance.double()
    sigma = torch.linalg.eigvalsh(sigma.to(plain.trace.device))
    # ‖Σ⁻¹‖ is infinite for a singular Σ, and the bounds that use it are then empty
    sigma = torch.where(sigma > model * torch.finfo(sigma.dtype).eps * sigma[-1], sigma, 0.0)
    trace, norm2, norm_f = spectrum.trace.abs(), plain.spectral_norm, plain.frobenius_squared.sqrt()
    across = trace / (math.sqrt(model) * sigma[-1])
    table: tuple[tuple[str, str, Tensor, Tensor], ...]
    if variant == "as_printed":
        square, inverse = spectrum.trace_of_square, sigma.pow(-2).sum().sqrt()
        root = square.clamp_min(0).sqrt()
        table = (
            ("5", "|tr W| <= sqrt(d tr W^2)", trace, math.sqrt(model) * root),
            ("7a", "|tr W| / (sqrt(d) ||Sigma||_2) <= ||W_QK||_2", across, norm2),
            ("7b", "||W_QK||_2 <= ||W_QK||_F", norm2, norm_f),
            ("7c", "||W_QK||_F <= ||W_QK||_1 (largest column sum)", norm_f,
             _column_sums(form).amax(-1)),
            ("8", "(tr W)^2 <= d tr W^2", trace.square(), model * square),
            ("10a", "|tr W_QK| <= ||Sigma^-1||_F sqrt(tr W^2)", plain.trace.abs(), inverse * root),
            ("10b", "||W_QK||_2 <= |tr W_QK|", norm2, plain.trace.abs()),
        )  # fmt: skip
    else:
        scale, along = spectrum.frobenius_squared, trace / sigma.norm()
        table = (
            ("5", "|tr W| <= sqrt(rank) ||S||_F", trace, (rank * scale).sqrt()),
            ("7a", "|tr W| / (sqrt(d) ||Sigma||_2) <= |tr W| / ||Sigma||_F", across, along),
            ("7b", "|tr W| / ||Sigma||_F <= ||W_QK||_F", along, norm_f),
            ("7c", "||W_QK||_F <= sum of |entries| of W_QK", norm_f, _column_sums(form).sum(-1)),
            ("7d", "|tr W| / tr Sigma <= ||W_QK||_2", trace / sigma.sum(), norm2),
            ("8", "(tr W)^2 <= rank ||S||_F^2", trace.square(), rank * scale),
            ("10a", "||W_QK||_2 <= ||W_QK||_F", norm2, norm_f),
            ("10b", "||W_QK||_F <= ||Sigma^-1||_2 ||S||_F", norm_f, scale.sqrt() / sigma[0]),
        )  # fmt: skip
    # ∞ · 0 bounds nothing
    return [Inequality(*row[:3], row[3].nan_to_num(math.inf, posinf=math.inf)) for row in table]


def _column_sums(form: QKForm) -> Float[Tensor, "*heads model"]:
    """Σ_i |W_QK[i, j]| for every column, a few columns of W_QK at a time."""
    query, key = form.query.double(), form.key.double()
    columns = [(query.mT @ part).abs().sum(-2) for part in key.split(256, dim=-1)]
    return torch.cat(columns, -1)
