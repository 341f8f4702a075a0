"""The numbers behind Figs. 1-4, as plain records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from locater.core.bounds import entropy_lower_bound
from locater.core.form import QKForm
from locater.core.process import TokenProcess
from locater.core.theory import piecewise_softmax, propagation, rho_limit

PRINTED = "as printed"
CORRECTED = "corrected, T → ∞"
Record = dict[str, Any]


def softmax_curves(limit: float = 6.0, points: int = 121) -> list[Record]:
    """Fig. 1: the first entry of softmax and of its piecewise form, for two tokens."""
    gap = torch.linspace(-limit, limit, points, dtype=torch.float64)
    logits = torch.stack((gap, torch.zeros_like(gap)), -1)
    curves = {
        "softmax": torch.softmax(logits, -1)[:, 0],
        "piecewise linear": piecewise_softmax(logits)[:, 0],
    }
    return [
        {"curve": name, "gap": x, "value": y}
        for name, values in curves.items()
        for x, y in zip(gap.tolist(), values.tolist(), strict=True)
    ]


def rho_curves(
    xi: float,
    eta: float,
    *,
    tokens: int,
    dim: int,
    process: TokenProcess | None = None,
    points: int | None = 101,
) -> list[Record]:
    """ρ(θ) as printed, corrected in the limit, and exact at finite T (one panel of Fig. 2).

    The exact curve belongs to the two-point spectrum of `dim` eigenvalues with this ξ and η; where
    no such spectrum exists (|ξ| > √dim, as in Fig. 3) it is the Gaussian one with the exact
    finite-T moments, which large spectra approach.  Without `points` the limits are taken at the
    tokens.
    """
    at_tokens = torch.arange(1, tokens + 1, dtype=torch.float64) / tokens
    theta = at_tokens if points is None else torch.linspace(0, 1, points, dtype=torch.float64)
    limits = {
        PRINTED: rho_limit(theta, xi=xi, eta=eta, lemma1="as_printed"),
        CORRECTED: rho_limit(theta, xi=xi, eta=eta),
    }
    if abs(xi) <= math.sqrt(dim):
        form = QKForm.from_xi_eta(xi, eta, dim=dim)
        exact = propagation(form, process or TokenProcess.random_walk(tokens)).rho
        name = f"exact, T = {tokens}, d = {dim}"
    else:
        exact = rho_limit(at_tokens, xi=xi, eta=eta, tokens=tokens)
        name = f"exact moments, T = {tokens}"
    curves = [(label, theta, rho) for label, rho in limits.items()]
    curves.append((name, at_tokens, exact))
    return [
        {"curve": label, "xi": xi, "eta": eta, "theta": x, "rho": y}
        for label, positions, values in curves
        for x, y in zip(positions.tolist(), values.tolist(), strict=True)
    ]


def rho_grid(
    xis: Sequence[float] = (-10, -5, -1, 0, 1, 5, 10),
    etas: Sequence[float] = (0.001, 0.1, 0.5, 1, 5),
    *,
    tokens: int = 64,
    dim: int = 128,
) -> list[Record]:
    """Fig. 2: ρ(θ) over the (ξ, η) grid."""
    return [
        record
        for eta in etas
        for xi in xis
        for record in rho_curves(xi, eta, tokens=tokens, dim=dim, points=61)
    ]


def threshold_curves(tokens: int = 64, eta: float = 0.01) -> list[Record]:
    """Fig. 3: ρ(θ) below and above the localization threshold |ξη| = 2.

    Erratum E12: the text's η = 0.02 contradicts its own products ξη = 1.28 and 5.12.
    """
    return [
        record
        for xi in (128.0, 512.0)
        for record in rho_curves(xi, eta, tokens=tokens, dim=128, points=401)
    ]


def entropy_curves(tokens: int = 64, limit: float = 15.0, points: int = 151) -> list[Record]:
    """Fig. 4: the entropy lower bound against the norm ν of the logits."""
    norm = torch.linspace(0, limit, points, dtype=torch.float64)
    curves = {
        PRINTED: entropy_lower_bound(norm, tokens, variant="as_printed"),
        "attained bound": entropy_lower_bound(norm, tokens),
        f"largest entropy, ln {tokens}": torch.full_like(norm, math.log(tokens)),
    }
    return [
        {"curve": name, "norm": x, "entropy": y}
        for name, values in curves.items()
        for x, y in zip(norm.tolist(), values.tolist(), strict=True)
    ]
