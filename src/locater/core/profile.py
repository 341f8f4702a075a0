"""The record that theory, simulation and measurement share: ρ by position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from locater.errors import InputError

Source = Literal["theory", "simulated", "measured"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Profile:
    """Signal propagation probability ρ (Definition 1) at relative positions θ = i/T.

    >>> profile = Profile(theta=torch.tensor([0.5, 1.0]), rho=torch.tensor([0.2, 0.8]))
    >>> profile.peak.item(), round(profile.participation.item(), 3)
    (0.8..., 0.735)
    """

    theta: Float[Tensor, " positions"]
    rho: Float[Tensor, "*heads positions"]
    source: Source = "theory"
    standard_error: Float[Tensor, "*heads positions"] | None = None
    """Of `rho`, where it was sampled; None where it was computed."""
    label: str = ""

    def __post_init__(self) -> None:
        if self.rho.shape[-1:] != self.theta.shape:
            raise InputError(
                f"rho has {self.rho.shape[-1]} positions and theta has {self.theta.shape[0]}.",
                hint="give one rho for every theta, along the last axis.",
            )

    @property
    def peak(self) -> Float[Tensor, "*heads"]:
        """The largest ρ."""
        return self.rho.amax(-1)

    @property
    def participation(self) -> Float[Tensor, "*heads"]:
        """(Σρ)² / (T Σρ²): 1 when ρ is uniform, 1/T when a single token is on."""
        squares = self.rho.square().sum(-1).clamp_min(torch.finfo(self.rho.dtype).tiny)
        return self.rho.sum(-1).square() / (self.rho.shape[-1] * squares)

    def records(self) -> list[dict[str, Any]]:
        """One plain dictionary per head and position: what JSON and plots need."""
        rho = self.rho.reshape(-1, self.rho.shape[-1]).tolist()
        error: list[list[float | None]] = (
            [[None] * self.theta.shape[0]] * len(rho)
            if self.standard_error is None
            else self.standard_error.reshape(-1, self.rho.shape[-1]).tolist()
        )
        return [
            {
                "label": self.label,
                "source": self.source,
                "head": head,
                "theta": theta,
                "rho": value,
                "standard_error": deviation,
            }
            for head, (row, deviations) in enumerate(zip(rho, error, strict=True))
            for theta, value, deviation in zip(self.theta.tolist(), row, deviations, strict=True)
        ]
