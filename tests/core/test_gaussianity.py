import math
from statistics import NormalDist

import pytest
import torch

from locater import InputError
from locater.core.process import Gaussianity, gaussianity, random_projections


@pytest.mark.statistical
def test_gaussian_features_pass_and_laplace_features_do_not(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(5000, 40, generator=generator, dtype=torch.float64)
    shape = gaussianity(normal)
    limit = NormalDist().inv_cdf(1 - 1e-6 / 80)
    assert (shape.excess_kurtosis.abs() < limit * math.sqrt(24 / 5000) * 1.5).all()
    signs = torch.randn(5000, 40, generator=generator).sign()
    laplace = signs * torch.empty(5000, 40).exponential_(generator=generator)
    heavy = gaussianity(laplace)
    assert heavy.excess_kurtosis.median().item() == pytest.approx(3, abs=0.5)
    assert heavy.rejected() == 1.0
    assert abs(heavy.quantiles[0.999]) > NormalDist().inv_cdf(0.999) * 1.2


def test_sums_over_dimensions_are_nearer_to_gaussian_than_each() -> None:
    generator = torch.Generator().manual_seed(0)
    laplace = torch.randn(4000, 200, generator=generator).sign() * torch.empty(
        4000, 200
    ).exponential_(generator=generator)
    mixed = gaussianity(random_projections(laplace, 32, generator))
    assert mixed.excess_kurtosis.abs().median() < gaussianity(laplace).excess_kurtosis.median() / 10


def test_constant_features_are_left_out_or_refused() -> None:
    samples = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    samples[:, 0] = 1
    assert gaussianity(samples).skewness.shape == (1,)
    with pytest.raises(InputError, match="constant"):
        gaussianity(torch.ones(20, 2))
    with pytest.raises(InputError, match="8 or more"):
        gaussianity(torch.ones(2, 2))


@pytest.mark.parametrize(("statistic", "share"), [(9.20, 0.0), (9.22, 0.5)])
def test_the_test_rejects_beyond_the_chi_square_quantile_of_one_percent(
    statistic: float, share: float
) -> None:
    skewness = torch.tensor([0.0, math.sqrt(6 * statistic / 100)], dtype=torch.float64)
    law = Gaussianity(skewness, torch.zeros(2, dtype=torch.float64), 100, {})
    assert law.statistic[1].item() == pytest.approx(statistic)
    assert law.rejected() == share
    assert law.rejected(0.001) == 0  # whose quantile is 13.8
