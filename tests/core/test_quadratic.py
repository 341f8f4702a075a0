"""The inverted law of a Gaussian quadratic form, against every closed form that exists.

Where no closed form exists, two other methods judge it: partial fractions (weights in pairs) and
the trapezoidal rule for the characteristic function, whose error is bounded beforehand.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats
from torch import Tensor

from locater import QKForm, TokenProcess, propagation
from locater.core.quadratic import QuadraticLaw
from locater.core.score import HeadMoments

DIGITS = 1e-11  # the tails promise about 12 relative digits
SEEDS = st.integers(0, 2**31)


def row(constant: float, weights: list[float], linear: list[float] | None = None) -> QuadraticLaw:
    def double(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return QuadraticLaw(
        double([constant]), double(weights)[None], None if linear is None else double(linear)[None]
    )


def upper_tail(law: QuadraticLaw, level: float) -> Tensor:
    return law.between(level, 1e12)


def lower_tail(law: QuadraticLaw, level: float) -> Tensor:
    return law.between(-1e12, level)


def test_mean_and_variance_are_those_of_the_terms() -> None:
    law = row(0.5, [1.0, -2.0], [3.0, 0.0])  # Var z² = 2, Cov(z², z) = 0
    assert law.mean().item() == 0.5 + 1 - 2
    assert law.variance().item() == 2 * (1 + 4) + 9
    assert row(0.5, [1.0, -2.0]).variance().item() == 10


@pytest.mark.parametrize("level", [1e-9, 1e-3, 0.5, 1.0, 3.0, 30.0, 300.0, 900.0])
def test_one_weight_has_the_tails_of_a_squared_normal(level: float) -> None:
    law = row(0.0, [2.0])
    assert upper_tail(law, 2 * level).item() == pytest.approx(
        math.erfc(math.sqrt(level / 2)), rel=DIGITS
    )
    assert lower_tail(law, 2 * level).item() == pytest.approx(
        math.erf(math.sqrt(level / 2)), rel=DIGITS
    )


@pytest.mark.parametrize("level", [1e-6, 0.1, 1.0, 20.0, 200.0, 460.0, 650.0])
def test_deep_tails_keep_their_relative_digits(level: float) -> None:
    """Two equal weights are an exponential, down to 1e-282; four, two of each sign, a Laplace."""
    assert upper_tail(row(0.0, [0.5, 0.5]), level).item() == pytest.approx(
        math.exp(-level), rel=DIGITS
    )
    laplace = row(0.0, [0.5, 0.5, -0.5, -0.5])
    assert upper_tail(laplace, level).item() == pytest.approx(math.exp(-level) / 2, rel=DIGITS)
    assert lower_tail(laplace, -level).item() == pytest.approx(math.exp(-level) / 2, rel=DIGITS)


@given(count=st.integers(1, 300), percent=st.integers(-12, 12))
def test_equal_weights_are_a_chi_square_of_any_degree(count: int, percent: int) -> None:
    """On the far side of the mean, where the tail is the smaller part."""
    level = max(count + percent * math.sqrt(2 * count) / 2, 0.01 * count)
    law = row(0.0, [0.1] * count)
    if level >= count:
        tail, expected = upper_tail(law, level / 10), stats.chi2.sf(level, count)
    else:
        tail, expected = lower_tail(law, level / 10), stats.chi2.cdf(level, count)
    assert tail.item() == pytest.approx(expected, rel=DIGITS)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 100, 300])
@pytest.mark.parametrize("share", [1e-6, 0.01, 0.1, 0.5, 0.9, 1.0, 1.1, 2.0])
def test_the_two_tails_of_a_level_add_up_to_one(count: int, share: float) -> None:
    law = row(0.0, [1.0] * count)
    level = share * count
    total = upper_tail(law, level) + lower_tail(law, level)
    assert total.item() == pytest.approx(1.0, rel=DIGITS)


@pytest.mark.parametrize("high", [1e-6, 0.01, 0.3, 1.0, 4.0])
def test_opposite_weights_are_a_product_of_two_normals(high: float) -> None:
    """Its density is K₀(|y|)/π, with a logarithmic pole at zero."""
    bessel = special.k0(high) * special.modstruve(-1, high)
    bessel += special.k1(high) * special.modstruve(0, high)
    assert row(0.0, [0.5, -0.5]).between(0.0, high).item() == pytest.approx(
        high / 2 * bessel, rel=DIGITS
    )


@pytest.mark.parametrize("pairs", [1, 2, 3, 5])
@pytest.mark.parametrize("level", [0.0, 0.2, 3.0, 50.0])
def test_weights_in_pairs_are_a_sum_of_exponentials(pairs: int, level: float) -> None:
    weights = [(-0.5) ** (k % 2) * (1 + 0.7 * k) for k in range(pairs)]  # of both signs
    tail = 0.0
    for weight in (w for w in weights if w > 0):
        others = math.prod(weight / (weight - other) for other in weights if other != weight)
        tail += others * math.exp(-level / (2 * weight))
    law = row(0.0, [w for w in weights for _ in range(2)])
    assert upper_tail(law, level).item() == pytest.approx(tail, rel=DIGITS)


@pytest.mark.parametrize("deviation", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("z", [-30.0, -5.0, -0.1, 0.0, 0.1, 1.0, 8.0, 37.0])
def test_without_weights_the_law_is_normal(z: float, deviation: float) -> None:
    law = row(0.5, [0.0, 0.0], [0.6 * deviation, 0.8 * deviation])
    level = 0.5 + z * deviation
    z = (level - 0.5) / deviation  # as rounded
    assert upper_tail(law, level).item() == pytest.approx(
        stats.norm.sf(z), rel=DIGITS * (1 + z * z)
    )
    assert law.variance().item() == pytest.approx(deviation**2)


def one_noncentral(
    weight: float, linear: float, low: float | np.ndarray, high: float | np.ndarray
) -> np.ndarray:
    """P(low ≤ weight·z² + linear·z ≤ high) from the roots of the two parabolas."""
    shift, vertex = linear / (2 * weight), -(linear**2) / (4 * weight)
    ends = np.sort(np.stack(((low - vertex) / weight, (high - vertex) / weight)), axis=0)
    inner, outer = np.sqrt(np.clip(ends, 0, None))
    right = stats.norm.cdf(outer - shift) - stats.norm.cdf(inner - shift)
    left = stats.norm.cdf(-inner - shift) - stats.norm.cdf(-outer - shift)
    return np.asarray(right + left)


@pytest.mark.parametrize(
    ("constant", "weight", "linear"),
    [
        (0.0, 1.0, 1.0),
        (0.2, 0.1, 3.0),
        (0.3, -0.5, 2.0),
        (0.2, 1e-3, 1.0),
        (0.1, -0.01, 0.5),
        (-0.4, 0.7, 0.01),
        (0.0, 1.0, 100.0),
        (1.5, -2.0, 0.3),
    ],
)
def test_one_weight_with_a_linear_term_is_a_noncentral_chi_square(
    constant: float, weight: float, linear: float
) -> None:
    expected = one_noncentral(weight, linear, -constant, 1 - constant).item()
    law = row(constant, [weight], [linear])
    assert law.between(0.0, 1.0).item() == pytest.approx(expected, abs=1e-10)


def two_noncentral(constant: float, weights: list[float], linear: list[float]) -> float:
    """P(0 ≤ Y ≤ 1) for two weights: given z₁ it is the line above, integrated over z₁."""
    (outer, inner), (slope, tilt) = weights, linear
    breaks = {-14.0, 14.0}
    for level in (0.0, 1.0):  # where the inner parabola stops reaching the level
        roots = np.roots([outer, slope, constant - tilt**2 / (4 * inner) - level])
        breaks |= {root.real for root in roots if abs(root.imag) == 0 and abs(root) < 14}

    def density(z: np.ndarray) -> np.ndarray:
        rest = constant + outer * z * z + slope * z
        return stats.norm.pdf(z) * one_noncentral(inner, tilt, -rest, 1 - rest)

    ends = sorted(breaks)
    parts = integrate.tanhsinh(density, ends[:-1], ends[1:], atol=1e-14, rtol=1e-13)
    return float(np.sum(parts.integral))


@pytest.mark.parametrize("seed", range(12))
def test_two_weights_with_linear_terms_agree_with_quadrature(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(2, generator=generator, dtype=torch.float64)
    sizes = 10.0 ** (sizes * torch.tensor([1.5, 2.0]) - torch.tensor([1.5, 1.5]))
    weights, linear = torch.randn(2, 2, generator=generator, dtype=torch.float64) * sizes[:, None]
    constant = torch.randn((), generator=generator, dtype=torch.float64).item() / 2
    expected = two_noncentral(constant, weights.tolist(), linear.tolist())
    law = row(constant, weights.tolist(), linear.tolist())
    assert law.between(0.0, 1.0).item() == pytest.approx(expected, abs=1e-10)


def by_characteristic_function(
    constant: float, weights: np.ndarray, linear: np.ndarray, eps: float = 1e-14
) -> float:
    """P(0 ≤ Y ≤ 1) by the trapezoidal rule for the Fourier integral (Davies 1973).

    Its aliasing error is at most the mass outside one period, and the period is chosen by a
    sub-gamma tail bound; the sum ends where the product of moduli has fallen below eps.
    """
    mean = constant + weights.sum()
    deviation = math.sqrt((weights**2).sum() + (linear**2).sum() / 2)
    reach = math.log(2 / eps)
    side = 2 * deviation * math.sqrt(reach) + 2 * np.abs(weights).max() * reach
    step = 2 * math.pi / (max(mean, 1 - mean) + side + 1)
    total, start = step / (2 * math.pi), 1
    while True:
        t = step * np.arange(start, start + 4096)[:, None]
        gap = 1 - 2j * weights * t
        exponent = 1j * constant * t[:, 0] - np.log(gap).sum(-1) / 2
        exponent -= (linear**2 * t**2 / (2 * gap)).sum(-1)
        t = t[:, 0]
        terms = np.exp(exponent) * (1 - np.exp(-1j * t)) / (1j * t)
        total += step / math.pi * terms.real.sum()
        start += 4096
        if abs(np.exp(exponent[-1])) < eps:
            return float(total)


@settings(max_examples=40)
@given(count=st.integers(10, 300), with_linear=st.booleans(), scale=st.integers(-2, 1), seed=SEEDS)
def test_random_weights_agree_with_the_fourier_integral(
    count: int, with_linear: bool, scale: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights, linear = torch.randn(2, count, generator=generator, dtype=torch.float64)
    weights *= 10.0**scale / math.sqrt(count)
    linear *= with_linear * 3 * 10.0**scale / math.sqrt(count)
    constant = torch.randn((), generator=generator, dtype=torch.float64).item() / 2
    expected = by_characteristic_function(constant, weights.numpy(), linear.numpy())
    law = row(constant, weights.tolist(), linear.tolist() if with_linear else None)
    assert law.between(0.0, 1.0).item() == pytest.approx(expected, abs=1e-11)


@settings(max_examples=40)
@given(seed=SEEDS)
@example(seed=60)
@example(seed=1081)
@example(seed=1864)
def test_weights_and_linear_terms_of_many_sizes_agree_with_the_fourier_integral(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(20, 60, (), generator=generator))
    weights, linear = torch.randn(2, count, generator=generator, dtype=torch.float64)
    many = torch.rand(2, count, generator=generator, dtype=torch.float64)
    one = torch.rand(2, generator=generator, dtype=torch.float64)
    weights *= 10 ** (1 - 5 * many[0] - one[0])
    linear *= 10 ** (0.5 - 3 * one[1] - 2 * many[1])
    constant = torch.randn((), generator=generator, dtype=torch.float64).item() / 2
    expected = by_characteristic_function(constant, weights.numpy(), linear.numpy())
    law = row(constant, weights.tolist(), linear.tolist())
    assert law.between(0.0, 1.0).item() == pytest.approx(expected, abs=1e-10)


@settings(max_examples=20)
@given(seed=SEEDS)
@example(seed=60)
def test_tiny_weights_beside_linear_terms_agree_with_the_fourier_integral(seed: int) -> None:
    """Far out, a tiny weight turns a Gaussian factor into an exponential one."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(10, 60, (), generator=generator))
    weights, linear = torch.randn(2, count, generator=generator, dtype=torch.float64)
    weights *= 10 ** (-4 * torch.rand(count, generator=generator, dtype=torch.float64)) / 3
    constant = torch.randn((), generator=generator, dtype=torch.float64).item() / 2
    expected = by_characteristic_function(constant, weights.numpy(), 0.3 * linear.numpy())
    law = row(constant, weights.tolist(), (0.3 * linear).tolist())
    assert law.between(0.0, 1.0).item() == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("above", [False, True])
@pytest.mark.parametrize("far", [2.0, 50.0, 400.0])
def test_an_interval_far_from_the_mean_keeps_its_relative_digits(far: float, above: bool) -> None:
    """A shifted exponential, with the interval in its tail."""
    law = row(far + 1, [-0.5, -0.5]) if above else row(-far, [0.5, 0.5])
    expected = math.exp(-far) - math.exp(-far - 1)
    assert law.between(0.0, 1.0).item() == pytest.approx(expected, rel=DIGITS)


@pytest.mark.parametrize("count", [1, 2, 7, 40, 300])
@pytest.mark.parametrize("weight", [0.001, 0.01, 0.1, 10.0])
def test_small_and_large_intervals_of_a_chi_square(count: int, weight: float) -> None:
    expected = special.gammainc(count / 2, 0.25 / weight)
    law = row(0.5, [weight] * count)
    assert law.between(0.0, 1.0).item() == pytest.approx(expected, rel=DIGITS)
    mirrored = row(0.5, [-weight] * count)
    assert mirrored.between(0.0, 1.0).item() == pytest.approx(expected, rel=DIGITS)


@pytest.mark.parametrize("level", [0.01, 1.0, 40.0])
def test_a_tiny_weight_beside_a_large_one_counts_for_what_it_is_worth(level: float) -> None:
    """P(z₁² + εz₂² > x) to second order in ε, from the chi-square's density and its slope."""
    density = stats.chi2.pdf(level, 1)
    slope = -density * (0.5 / level + 0.5)
    for tiny in (1e-12, 1e-7):
        expected = stats.chi2.sf(level, 1) + tiny * density - 1.5 * tiny**2 * slope
        assert upper_tail(row(0.0, [1.0, tiny]), level).item() == pytest.approx(
            expected, rel=DIGITS
        )


@pytest.mark.parametrize("scale", [1e-12, 1e-4, 1e4, 1e12])
@pytest.mark.parametrize("linear", [None, [0.1, 0.2, -0.3, 0.0, 0.0, 0.4, 0.5, 0.0, 0.2, -0.1]])
def test_the_unit_of_the_score_does_not_matter(scale: float, linear: list[float] | None) -> None:
    weights = [0.5, -0.3, 0.2, 0.1, -0.1, 0.05, 0.3, -0.2, 0.15, 0.25]
    expected = row(0.1, weights, linear).between(0.0, 1.0).item()
    scaled = row(
        0.1 * scale,
        [scale * weight for weight in weights],
        None if linear is None else [scale * value for value in linear],
    )
    assert scaled.between(0.0, scale).item() == pytest.approx(expected, rel=DIGITS)


@pytest.mark.parametrize(
    ("constant", "inside"), [(-0.1, 0.0), (0.0, 1.0), (0.3, 1.0), (1.0, 1.0), (1.1, 0.0)]
)
def test_a_score_without_variance_is_in_the_closed_interval_or_not(
    constant: float, inside: float
) -> None:
    assert row(constant, [0.0, 0.0]).between(0.0, 1.0).item() == inside
    assert row(constant, [0.0], [0.0]).between(0.0, 1.0).item() == inside


@pytest.mark.parametrize("constant", [-2.0, 0.5, 3.0])
def test_a_score_without_variance_is_above_a_level_or_not(constant: float) -> None:
    law = row(constant, [0.0, 0.0])
    assert upper_tail(law, 0.0).item() == float(constant >= 0)
    assert lower_tail(law, 0.0).item() == float(constant <= 0)


@pytest.mark.parametrize("with_linear", [False, True])
def test_many_rows_are_their_rows_one_by_one(
    with_linear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("locater.core.quadratic._BLOCK", 16 * 40 * 7)  # seven rows at a time
    generator = torch.Generator().manual_seed(1)
    weights, linear = torch.randn(2, 30, 40, generator=generator, dtype=torch.float64)
    weights *= torch.logspace(-3, 0, 30, dtype=torch.float64)[:, None]
    constant = torch.randn(30, generator=generator, dtype=torch.float64)
    law = QuadraticLaw(constant, weights, linear / 10 if with_linear else None)
    exact, saddlepoint = law.between(0.0, 1.0), law.saddlepoint_between(0.0, 1.0)
    for k in range(30):
        alone = QuadraticLaw(
            constant[k : k + 1],
            weights[k : k + 1],
            linear[k : k + 1] / 10 if with_linear else None,
        )
        torch.testing.assert_close(alone.between(0.0, 1.0)[0], exact[k], rtol=1e-11, atol=1e-14)
        # within 1e-3 of the mean, rounding errors of 1e-16 are divided by 1e-6
        single = alone.saddlepoint_between(0.0, 1.0)[0]
        torch.testing.assert_close(single, saddlepoint[k], rtol=0, atol=1e-9)


def test_the_saddlepoint_approximation_improves_with_the_number_of_weights() -> None:
    errors = []
    for count in (1, 4, 16, 64, 256):
        law = row(0.5, [0.5 / count] * count)
        exact, saddlepoint = law.between(0.0, 1.0), law.saddlepoint_between(0.0, 1.0)
        errors.append((exact - saddlepoint).abs().item())
    assert errors == sorted(errors, reverse=True)
    assert errors[0] < 0.05 and errors[-1] < 1e-5


@pytest.mark.parametrize("mean", [-1.0, 0.0, 0.3, 0.5, 1.0, 2.0])
def test_the_saddlepoint_approximation_is_exact_for_a_normal_score(mean: float) -> None:
    expected = stats.norm.cdf(1, mean, 0.4) - stats.norm.cdf(0, mean, 0.4)
    law = row(mean, [0.0, 0.0], [0.4, 0.0])
    assert law.saddlepoint_between(0.0, 1.0).item() == pytest.approx(expected, abs=1e-9)


PROCESSES = ("random-walk", "autoregressive", "independent")


def factored(rank: int, scale: float, seed: int) -> QKForm:
    generator = torch.Generator().manual_seed(seed)
    query, key = torch.randn(2, 2, rank, 48, generator=generator, dtype=torch.float64) * scale
    return QKForm(query, key + query / 2, math.sqrt(rank))


FAMILIES = {
    **{f"rank {rank}": factored(rank, 0.15, rank) for rank in (1, 2, 8, 40)},
    "large": factored(16, 2.0, 1),
    "small": factored(16, 1e-3, 2),
    "huge": factored(16, 1e60, 3),
    "negative": QKForm.from_xi_eta(-4.0, 0.8, dim=32),
    "symmetric": QKForm.from_xi_eta(5.0, 0.5, dim=64),
    "one eigenvalue": QKForm.from_eigenvalues(torch.ones(1).double(), temperature=1.0),
}


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("name", FAMILIES)
def test_one_parameter_for_all_positions_gives_what_each_position_gives(
    name: str, process: str
) -> None:
    """The sum over frequencies against the contour of every position's own law."""
    form, tokens = FAMILIES[name], TokenProcess.named(process, 300)
    score = HeadMoments.of(form, tokens).score()
    each = score.law().between(0.0, 1.0).view(score.base.shape)
    rho = propagation(form, tokens).rho
    assert (rho - each.view(rho.shape)).abs().max() < 1e-10
    small = each.view(rho.shape) < 1e-3  # these keep their relative digits
    assert torch.allclose(rho[small], each.view(rho.shape)[small], rtol=1e-8, atol=0)
    quick = propagation(form, tokens, tolerance=1e-7).rho
    assert (quick - each.view(rho.shape)).abs().max() < 1e-7


def test_most_positions_of_a_usual_head_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one way is not just the other one in disguise."""
    rows = []
    between = QuadraticLaw.between
    monkeypatch.setattr(
        QuadraticLaw,
        "between",
        lambda law, *at: rows.append(len(law.constant)) or between(law, *at),
    )
    propagation(factored(16, 0.15, 0), TokenProcess.autoregressive(200, 0.9))
    assert sum(rows) < 20
