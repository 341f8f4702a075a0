"""Are these numbers Gaussian?  Skewness, excess kurtosis, a test, and quantiles to look at."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from locater.errors import InputError

_QUANTILES = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True, eq=False)
class Gaussianity:
    """Shape of the law of each feature, over samples, and of all standardized features together."""

    skewness: Float[Tensor, " features"]
    excess_kurtosis: Float[Tensor, " features"]
    """0 for a Gaussian, 3 for a Laplace law; its standard error for Gaussians is √(24/samples)."""
    samples: int
    quantiles: dict[float, float]
    """Probability → quantile of the standardized features; compare with a Gaussian's."""

    @property
    def statistic(self) -> Float[Tensor, " features"]:
        """Jarque and Bera's n (skewness²/6 + kurtosis²/24), χ² with 2 degrees for a Gaussian."""
        return self.samples * (self.skewness.square() / 6 + self.excess_kurtosis.square() / 24)

    def rejected(self, level: float = 0.01) -> float:
        """Share of features that the test at `level` finds not Gaussian."""
        return (self.statistic > -2 * math.log(level)).double().mean().item()


def gaussianity(samples: Float[Tensor, "samples features"]) -> Gaussianity:
    """Test every feature; constant features are left out.

    >>> generator = torch.Generator().manual_seed(0)
    >>> gaussianity(torch.randn(4000, 50, generator=generator)).rejected() < 0.1
    True
    >>> gaussianity(torch.rand(4000, 50, generator=generator)).rejected()
    1.0
    """
    samples = samples.double()
    if samples.ndim != 2 or samples.shape[0] < 8:
        raise InputError(
            f"samples are {tuple(samples.shape)}.", hint="give (samples, features), 8 or more."
        )
    spread = samples - samples.mean(0)
    deviation = spread.square().mean(0).sqrt()
    alive = deviation > 1e-9 * deviation.amax()
    if not bool(alive.any()):
        raise InputError("every feature is constant.", hint="there is no law to look at.")
    unit = spread[:, alive] / deviation[alive]
    probability = torch.tensor(_QUANTILES, dtype=torch.float64, device=unit.device)
    ordered = unit.flatten().sort().values
    place = (probability * (len(ordered) - 1)).round().long()
    return Gaussianity(
        unit.pow(3).mean(0),
        unit.pow(4).mean(0) - 3,
        len(samples),
        dict(zip(_QUANTILES, ordered[place].tolist(), strict=True)),
    )


def random_projections(
    samples: Float[Tensor, "samples features"], directions: int, generator: torch.Generator
) -> Float[Tensor, "samples directions"]:
    """Samples along random directions: for the law of sums over dimensions."""
    shape = (samples.shape[1], directions)
    random = torch.randn(shape, generator=generator, dtype=samples.dtype).to(samples.device)
    return samples @ (random / random.norm(dim=0))
