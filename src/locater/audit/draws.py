"""What an audit draws: entropies of attention, and what independent factors would show.

The latter is the null that training leaves.  Take W_Q and W_K with independent Gaussian entries,
all of one factor of equal variance, such that E‖W_Q‖²_F and E‖W_K‖²_F are those of the head.  Then
tr W = Σ q_ij k_ij has mean 0 and variance ‖W_Q‖²_F ‖W_K‖²_F/(head·model), and E‖W‖²_F =
‖W_Q‖²_F ‖W_K‖²_F/head, both exactly; so have factors drawn from the spheres of those norms.  The
eigenvalues' spread and the largest singular value have no such formula at finite size and are
drawn, head × head numbers at a time, by Bartlett's theorem: W_Q = A U with U orthonormal and A
triangular, so W_K W_Qᵀ has the law of Z Aᵀ with a Gaussian Z, and W_Qᵀ W_K the singular values of
Aᵀ B.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

from locater.core.bounds import entropy_lower_bound
from locater.core.score import HeadMoments, LogitDraws
from locater.core.spectrum import Spectrum

NULL_DRAWS = 48


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
def null_of(head_dim: int, model: int, *, draws: int = NULL_DRAWS, seed: int = 0) -> Null:
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


DRAWS = 128
"""Rows of logits that are drawn for the mean entropy of a head."""


def null_columns(
    spectrum: Spectrum, *, head_dim: int, model: int, eigenvalues: bool
) -> dict[str, Float[Tensor, " heads"]]:
    """How far a spectrum is from that of independent factors with the same norms."""
    grams = spectrum.query_gram, spectrum.key_gram
    norms = [gram.diagonal(dim1=-2, dim2=-1).sum(-1) for gram in grams]
    size = (norms[0] * norms[1]).sqrt()  # ‖W_Q‖_F ‖W_K‖_F
    columns = {
        "trace_z": spectrum.trace / size * math.sqrt(head_dim * model),
        "frobenius_ratio": spectrum.frobenius_squared.sqrt() / size * math.sqrt(head_dim),
    }
    if eigenvalues:
        null = null_of(head_dim, model)
        spread, norm = spectrum.variance.clamp_min(0).sqrt() / size, spectrum.spectral_norm
        columns |= {
            "spread_ratio": spread / null.spread,
            "spread_z": (spread - null.spread) / null.spread_deviation,
            "norm_ratio": norm / size / null.norm,
            "norm_z": (norm / size - null.norm) / null.norm_deviation,
        }
    return columns


def entropy_columns(draws: LogitDraws, moments: HeadMoments) -> dict[str, Float[Tensor, " heads"]]:
    """Mean entropy of the heads' attention, its standard error, and Eq. 9's bound on it."""
    generator = torch.Generator().manual_seed(1)
    heads = [_entropy_and_bound(rows) for rows in draws.rows(moments, generator, torch.float32)]
    entropy, bound = torch.cat(heads, 1)
    return {
        "entropy": entropy.mean(-1),
        "entropy_error": entropy.std(-1) / math.sqrt(entropy.shape[-1]),
        "entropy_bound": bound.mean(-1),
        "effective_tokens": entropy.mean(-1).exp(),
    }


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
