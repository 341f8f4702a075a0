"""The errata of docs/errata.md, row by row: each print fails here, and each correction holds."""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from locater.core.bounds import Inequality, collapse_bounds, entropy_lower_bound
from locater.core.form import QKForm
from locater.core.gradient import one_layer_output, qk_gradient
from locater.core.process import TokenProcess
from locater.core.quadratic import QuadraticLaw
from locater.core.score import HeadMoments
from locater.core.theory import (
    Lemma1,
    attention_entropy,
    classify,
    linearized_softmax,
    logit_variance,
    piecewise_softmax,
    propagation,
    rho_limit,
    rho_limit_slope,
    score_moments,
)
from locater.errors import ConfigError

ROOT = Path(__file__).parents[2]
Matrix = Sequence[Sequence[int | Fraction]]

GENERIC: Matrix = ((2, 1), (1, -1))  # tr(WΣ) = 3
TRACELESS: Matrix = ((3, 0), (0, -2))  # tr(WΣ) = 0
TURNING: Matrix = ((1, 2), (-1, Fraction(1, 2)))  # asymmetric, tr W² < 0
SIGMA: Matrix = ((2, 1), (1, 3))
UNIT: Matrix = ((1, 0), (0, 1))


def gaussian_moment(
    variables: Sequence[Hashable],
    covariance: Callable[..., int | Fraction],
    mean: Callable[..., int | Fraction] = lambda _: 0,
) -> Fraction:
    """E[∏ variables] of jointly Gaussian variables: Isserlis' theorem, all pairings, exact."""
    if not variables:
        return Fraction(1)
    first, rest = variables[0], variables[1:]
    total = Fraction(0)
    if mean(first):
        total = mean(first) * gaussian_moment(rest, covariance, mean)
    for k, partner in enumerate(rest):
        others = (*rest[:k], *rest[k + 1 :])
        total += covariance(first, partner) * gaussian_moment(others, covariance, mean)
    return total


@cache
def walk_moment(form: Matrix, sigma: Matrix, *pairs: tuple[int, int]) -> Fraction:
    """E[∏ x_sᵀ W x_t] over pairs (s, t) of tokens of the random walk, exact."""
    tokens = [token for pair in pairs for token in pair]
    total = Fraction(0)
    for axes in itertools.product(range(len(form)), repeat=len(tokens)):
        weight = math.prod(form[a][b] for a, b in zip(axes[::2], axes[1::2], strict=True))
        if weight:
            total += weight * gaussian_moment(
                list(zip(tokens, axes, strict=True)),
                lambda p, q: min(p[0], q[0]) * sigma[p[1]][q[1]],
            )
    return total


def traces(form: Matrix, sigma: Matrix) -> tuple[int | Fraction, int | Fraction]:
    """tr(WΣ) and tr(WΣWΣ)."""
    size = range(len(form))
    product = [[sum(form[a][c] * sigma[c][b] for c in size) for b in size] for a in size]
    square = sum(product[a][b] * product[b][a] for a in size for b in size)
    return sum(product[a][a] for a in size), square


def exact_score_moments(form: Matrix, sigma: Matrix, tokens: int, position: int) -> list[Fraction]:
    """Mean and variance of ⟨γⁱ, ω⟩ + γ₀ⁱ at λ = 1, from the definition."""
    gamma = [Fraction(j == position, tokens) - Fraction(1, tokens**2) for j in range(1, tokens + 1)]
    mean = sum(g * walk_moment(form, sigma, (j, tokens)) for j, g in enumerate(gamma, 1))
    square = sum(
        first * second * walk_moment(form, sigma, (j, tokens), (k, tokens))
        for j, first in enumerate(gamma, 1)
        for k, second in enumerate(gamma, 1)
    )
    return [Fraction(1, tokens) + mean, square - mean**2]


def tensor(values: object) -> Tensor:
    """Plain numbers, nested as they are, in float64."""
    if isinstance(values, Sequence):
        return torch.stack([tensor(value) for value in values])
    return torch.tensor(float(values), dtype=torch.float64)  # type: ignore[arg-type]


def matrix_form(matrix: Matrix | Tensor, temperature: float = 1.0) -> QKForm:
    dense = matrix if isinstance(matrix, Tensor) else tensor(matrix)
    return QKForm.from_matrix(dense, temperature=temperature)


def normals(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def dense_rho(form: Matrix, sigma: Matrix, tokens: int, temperature: float) -> Tensor:
    """ρ from the law 1/T + (u z + √κ g)ᵀ S z/λ of the score, as one dense form of (z, g)."""
    root = torch.linalg.cholesky(tensor(sigma))
    inner = root.mT @ tensor(form) @ root
    steps = torch.arange(1, tokens + 1, dtype=torch.float64)
    u, kappa = (steps - (tokens + 1) / 2) / tokens, (1 - tokens**-2) / 12
    top = torch.einsum("i,ab->iab", u, (inner + inner.mT) / 2)
    side = (math.sqrt(kappa) * inner / 2).expand_as(top)
    joint = torch.cat((torch.cat((top, side.mT), 2), torch.cat((side, 0 * top), 2)), 1)
    constant = torch.full_like(u, 1 / tokens)
    return QuadraticLaw(constant, torch.linalg.eigvalsh(joint) / temperature).between(0.0, 1.0)


def by_equation(bounds: list[Inequality]) -> dict[str, Inequality]:
    return {bound.equation: bound for bound in bounds}


# Lemma 4 and Lemma 1 ------------------------------------------------------------------------------


def moment_tokens(i: int, j: int, last: int) -> dict[str, tuple[tuple[int, int], ...]]:
    """The pairs (s, t) whose products x_sᵀ W x_t the moments are made of."""
    return {
        "E1": ((i, j),),
        "E2": ((i, i), (i, i)),
        "E3": ((i, j), (j, i)),
        "E4": ((i, j), (j, j)),
        "E5": ((i, last), (j, last)),
    }


def printed_moments(i: int, j: int, last: int) -> dict[str, tuple[int, int]]:
    """Coefficients of tr(WΣ) or its square, and of tr(WΣWΣ), as printed."""
    square, product = i**2 - 2 * i + 2, i * j - i - j + 2
    return {
        "E1": (i - 1, 0),
        "E2": (square, 2 * square),
        "E3": (square, i**2 + i * j - 3 * i - j + 4),
        "E4": (product, 2 * product),
        "E5": (product, i * j + (last - 2) * i - j - (last - 4)),
    }


def right_moments(i: int, j: int, last: int) -> dict[str, tuple[int, int]]:
    return {
        "E1": (i, 0),
        "E2": (i**2, 2 * i**2),
        "E3": (i**2, i**2 + i * j),
        "E4": (i * j, 2 * i * j),
        "E5": (i * j, i * j + last * i),
    }


@pytest.mark.paper("Eqs. 15-18, 22")
@pytest.mark.parametrize(
    ("row", "worst", "share"),  # which i, j ≤ T = 6, and what share of the truth is printed there
    [
        ("E1", (1, 1), Fraction(0)),
        ("E2", (2, 2), Fraction(1, 2)),
        ("E3", (1, 6), Fraction(2, 7)),
        ("E4", (1, 6), Fraction(1, 6)),
        ("E5", (1, 6), Fraction(1, 6)),
    ],
    ids=["E1", "E2", "E3", "E4", "E5"],
)
def test_lemma_4_has_no_lower_orders(row: str, worst: tuple[int, int], share: Fraction) -> None:
    def value(coefficients: tuple[int, int], form: Matrix) -> Fraction:
        first, second = traces(form, SIGMA)
        first = first if row == "E1" else first**2
        return Fraction(coefficients[0] * first + coefficients[1] * second)

    for form in (GENERIC, TRACELESS):
        for i, j in itertools.combinations_with_replacement(range(1, 7), 2):
            exact = walk_moment(form, SIGMA, *moment_tokens(i, j, 6)[row])
            assert value(right_moments(i, j, 6)[row], form) == exact
    form = TRACELESS if row == "E3" else GENERIC
    truth = walk_moment(form, SIGMA, *moment_tokens(*worst, 6)[row])
    assert value(printed_moments(*worst, 6)[row], form) == share * truth != truth
    # the leading order is right: the two agree as i, j and T grow together
    far = 10**6, 2 * 10**6, 3 * 10**6
    ratio = value(printed_moments(*far)[row], form) / value(right_moments(*far)[row], form)
    assert float(ratio) == pytest.approx(1, abs=1e-5)


@pytest.mark.paper("Lemma 1, proof, (B2)")
def test_b2_begins_with_3_t_squared_i() -> None:
    for tokens, i in itertools.combinations(range(40, 0, -1), 2):
        total = 2 * sum(i * j + tokens * i for j in range(i + 1, tokens + 1))
        cubes = 3 * tokens**2 * i - 2 * tokens * i**2 - i**3
        assert total == cubes + tokens * i - i**2
    half = Fraction(1, 2)  # of T³, at θ = ½: a sum of positive numbers, printed as negative
    assert 3 * half - 2 * half**2 - half**3 == Fraction(7, 8)
    assert half - 2 * half**2 - half**3 == Fraction(-1, 8)
    # the slip is arithmetic: the printed (22) adds up to 7/8 as well
    tokens, i = 10_000, 5_000
    total = 2 * sum(i * j + (tokens - 2) * i - j - (tokens - 4) for j in range(i + 1, tokens + 1))
    assert total / tokens**3 == pytest.approx(7 / 8, abs=1e-3)


@pytest.mark.paper("Lemma 1")
def test_variance_is_least_at_the_middle() -> None:
    tokens = 6
    theta = torch.arange(1, tokens + 1, dtype=torch.float64) / tokens
    exact = tensor(
        [exact_score_moments(GENERIC, SIGMA, tokens, i)[1] for i in range(1, tokens + 1)]
    )
    scale = float(traces(GENERIC, SIGMA)[1])
    process = TokenProcess.random_walk(tokens, covariance=tensor(SIGMA))
    torch.testing.assert_close(score_moments(matrix_form(GENERIC), process)[1], exact)
    torch.testing.assert_close(logit_variance(theta, tokens=tokens) * scale, exact)
    torch.testing.assert_close(exact, exact.flip(0))  # as far from the middle, as wide
    # in the limit, at θ = 0, ½, 1: the print is 1, 13 and 31/7 times too large
    ends = tensor([0, 0.5, 1])
    ratio = logit_variance(ends, lemma1="as_printed") / logit_variance(ends)
    torch.testing.assert_close(ratio, tensor([1, 13, 31 / 7]))
    # and so at T = 64
    theta = tensor([1, 32, 64]) / 64
    ratio = logit_variance(theta, tokens=64) / logit_variance(theta, lemma1="as_printed")
    assert ratio.tolist() == pytest.approx([0.9726, 0.0770, 0.2198], abs=5e-5)


@pytest.mark.paper("Lemma 1")
def test_one_over_t_opens_small_forms() -> None:
    form, tokens = QKForm.from_xi_eta(5.0, 0.001, dim=25), 64
    process = TokenProcess.random_walk(tokens)
    exact = propagation(form, process).rho
    assert exact.min().item() == pytest.approx(1, abs=1e-9)
    law = HeadMoments.of(form, process).score().law()
    without = QuadraticLaw(law.constant - 1 / tokens, law.weights).between(0.0, 1.0)
    assert without[0].item() == pytest.approx(3.6e-9, rel=0.01)
    printed = propagation(form, process, method="as_printed").rho
    assert printed[0].item() == pytest.approx(7.6e-4, rel=0.01)
    vanishing = QKForm.from_eigenvalues(torch.zeros(4, dtype=torch.float64), temperature=1.0)
    assert propagation(vanishing, process).rho.tolist() == [1] * tokens


@pytest.mark.paper("Section 4, symmetrization")
def test_symmetrizing_loses_variance() -> None:
    symmetrized = tuple(
        tuple((TURNING[a][b] + TURNING[b][a]) / Fraction(2) for b in range(2)) for a in range(2)
    )
    half_turn = Fraction(TURNING[0][1] - TURNING[1][0], 2)
    tokens, position = 8, 4
    mean, variance = exact_score_moments(TURNING, UNIT, tokens, position)
    same, smaller = exact_score_moments(symmetrized, UNIT, tokens, position)
    u, kappa = Fraction(2 * position - tokens - 1, 2 * tokens), (1 - Fraction(1, tokens**2)) / 12
    second, norm = traces(TURNING, UNIT)[1], sum(entry**2 for row in TURNING for entry in row)
    assert variance == u**2 * (norm + second) + kappa * norm
    assert mean == same
    assert variance - smaller == kappa * 2 * half_turn**2 > 0
    temperature = math.sqrt(2)
    assert float(variance) / 2 == pytest.approx(0.26318359375, rel=1e-14)
    assert float(smaller) / 2 == pytest.approx(0.07861328125, rel=1e-14)
    process, at = TokenProcess.random_walk(tokens), position - 1
    form, halved = (matrix_form(matrix, temperature) for matrix in (TURNING, symmetrized))
    assert score_moments(form, process)[1][at].item() == pytest.approx(float(variance) / 2)
    assert dense_rho(TURNING, UNIT, tokens, temperature)[at].item() == pytest.approx(
        0.5801, abs=5e-5
    )
    assert propagation(halved, process).rho[at].item() == pytest.approx(0.7037, abs=5e-5)
    # an antisymmetric form, symmetrized to zero, loses everything
    assert exact_score_moments(((0, 1), (-1, 0)), UNIT, tokens, position)[1] == 2 * kappa


@pytest.mark.paper("Eqs. 5, 8")
def test_asymmetric_traces_need_the_norm(seed: int) -> None:
    form = matrix_form(TURNING)
    printed = by_equation(collapse_bounds(form, variant="as_printed"))
    assert not printed["5"].holds
    assert (printed["8"].upper - printed["8"].lower).item() == -7.75  # d tr W² − (tr W)²
    spectrum = form.spectrum()
    assert 4 * spectrum.variance.item() == pytest.approx(7.75)  # d² E|w − E w|²
    assert (spectrum.trace**2).item() == 2.25 > 2 * spectrum.trace_of_square.item() == -5.5
    assert (2 * spectrum.frobenius_squared).item() == 12.5
    many = matrix_form(normals(seed, 3000, 4, 4))
    valid = by_equation(collapse_bounds(many))
    assert valid["5"].holds.all()
    assert valid["8"].holds.all()
    assert not by_equation(collapse_bounds(many, variant="as_printed"))["5"].holds.all()


# Eq. 6 and Lemma 2 --------------------------------------------------------------------------------


@pytest.mark.paper("Fig. 2")
def test_eta_has_one_lambda() -> None:
    eigenvalues = torch.linspace(0.2, 0.8, 128, dtype=torch.float64)
    temperature = math.sqrt(128)
    spectrum = QKForm.from_eigenvalues(eigenvalues, temperature=temperature).spectrum()
    trace, root = eigenvalues.sum(), eigenvalues.square().sum().sqrt()
    torch.testing.assert_close(spectrum.xi * spectrum.eta, trace / temperature)
    caption = root / temperature**2
    assert (trace / temperature / (spectrum.xi * caption)).item() == pytest.approx(
        11.3137, abs=1e-4
    )
    # only with one λ is Eq. 6 the Gaussian probability of Lemma 1
    theta = torch.linspace(0, 1, 11, dtype=torch.float64)
    deviation = logit_variance(theta).sqrt() * root / temperature
    mean = (theta - 0.5) * trace / temperature
    gaussian = torch.special.ndtr((1 - mean) / deviation) - torch.special.ndtr(-mean / deviation)
    xi = spectrum.xi.item()
    torch.testing.assert_close(rho_limit(theta, xi=xi, eta=spectrum.eta.item()), gaussian)
    assert (rho_limit(theta, xi=xi, eta=caption.item()) - gaussian).abs().max() > 0.9


@pytest.mark.paper("Fig. 3")
def test_figure_3_needs_half_the_eta() -> None:
    products = {eta: [128 * eta, 512 * eta] for eta in (0.01, 0.02)}
    assert products[0.01] == pytest.approx([1.28, 5.12])  # the caption
    assert products[0.02] == pytest.approx([2.56, 10.24])  # the text's η: both beyond r = 2
    # |ξ| ≤ √d: no smaller model than d = ξ² can have it
    assert (128**2, 512**2) == (16_384, 262_144)
    for xi, dim in ((128.0, 16_383), (512.0, 262_143), (8.0, 63)):
        with pytest.raises(ConfigError, match="no spectrum"):
            QKForm.from_xi_eta(xi, 0.01, dim=dim)
    assert QKForm.from_xi_eta(8.0, 0.01, dim=64).spectrum().xi.item() == pytest.approx(8)


@pytest.mark.paper("Lemma 2.1, 2.2")
@pytest.mark.parametrize("lemma1", ["corrected", "as_printed"])
def test_edges_of_lemma_2_are_not_one(lemma1: Lemma1) -> None:
    eta = 1e-6

    def edge(theta: float, r: float, excess: float) -> float:
        """ρ near the limit, with ξη − r = excess · η."""
        at = tensor([theta])
        return rho_limit(at, xi=(r + excess * eta) / eta, eta=eta, lemma1=lemma1).item()

    for r in (0.5, 2.0, 5.0, -0.5, -2.0, -5.0):
        assert edge(0.5, r, 0.0) == pytest.approx(0.5, abs=1e-9)  # printed: 1
    for theta, r in ((1.0, 2.0), (0.7, 5.0)):  # θ = ½ + 1/r, printed: 1
        spread = math.sqrt(logit_variance(tensor(theta), lemma1=lemma1).item())
        for excess in (-10.0, -1.0, 0.0, 1.0, 10.0):
            limit = NormalDist().cdf(-excess / (r * spread))
            assert edge(theta, r, excess) == pytest.approx(limit, rel=1e-6, abs=1e-12)
    if lemma1 == "corrected":
        assert edge(1.0, 2.0, 10.0) == pytest.approx(3e-11, abs=1e-12)
        assert edge(1.0, 2.0, -10.0) == pytest.approx(1, abs=1e-9)


@pytest.mark.paper("Lemma 2.3")
@pytest.mark.parametrize(
    ("lemma1", "eta", "steepest"),
    [("corrected", 1.0, 0.381), ("corrected", 2.0, 0.577), ("as_printed", 1.0, 0.223)],
)
def test_rho_keeps_a_slope_at_xi_zero(lemma1: Lemma1, eta: float, steepest: float) -> None:
    theta = torch.linspace(0, 1, 1001, dtype=torch.float64)
    slope = rho_limit_slope(theta, xi=1e-12, eta=eta, lemma1=lemma1)
    assert slope.abs().max().item() == pytest.approx(steepest, abs=5e-4)
    variance = logit_variance(theta, lemma1=lemma1)
    limit = torch.erf(1 / (eta * (2 * variance).sqrt())) / 2
    torch.testing.assert_close(rho_limit(theta, xi=1e-12, eta=eta, lemma1=lemma1), limit)


def printed_slope(theta: float, xi: float, eta: float) -> tuple[float, float]:
    """ρ′ as printed, and the bound the proof puts on it."""
    spread = 2 * (2 * theta**2 + 7 / 12)
    first = math.exp(-(((theta - 0.5) * xi) ** 2) / spread)
    second = math.exp(-(((theta - 0.5) * xi - 1 / eta) ** 2) / spread)
    bend = 4 * theta**2 - theta + 5 / 3
    scale = xi / (math.sqrt(math.pi) * spread**1.5)
    return (first * bend - second * (bend - 1 / eta)) * scale, abs(scale) / eta


@pytest.mark.paper("Lemma 2.3, proof")
def test_printed_slope_has_the_wrong_sign() -> None:
    for lemma1 in ("corrected", "as_printed"):
        theta = torch.linspace(0, 1, 21, dtype=torch.float64, requires_grad=True)
        rho = rho_limit(theta, xi=3.0, eta=0.5, lemma1=lemma1)
        (derivative,) = torch.autograd.grad(rho.sum(), theta)
        closed = rho_limit_slope(theta.detach(), xi=3.0, eta=0.5, lemma1=lemma1)
        torch.testing.assert_close(closed, derivative)
    true = rho_limit_slope(tensor(0.75), xi=3.0, eta=0.5, lemma1="as_printed").item()
    assert true == pytest.approx(-0.185, abs=5e-4)
    assert printed_slope(0.75, 3.0, 0.5)[0] == pytest.approx(0.522, abs=5e-4)


@pytest.mark.paper("Lemma 2.3, proof")
def test_printed_slope_bound_is_exceeded() -> None:
    slope, bound = printed_slope(0.9, 0.5, 1.0)
    true = rho_limit_slope(tensor(0.9), xi=0.5, eta=1.0, lemma1="as_printed").item()
    assert bound == pytest.approx(0.0305, abs=5e-5)
    assert slope == pytest.approx(0.0418, abs=5e-5)  # the bounded expression itself
    assert abs(true) == pytest.approx(0.178, abs=5e-4)  # what it stands for


@pytest.mark.paper("Section 4, A1")
def test_zero_trace_looks_at_the_middle() -> None:
    theta = torch.linspace(0, 1, 101, dtype=torch.float64)
    rho = rho_limit(theta, xi=0.0, eta=5.0)
    assert (rho.min().item(), rho[50].item()) == pytest.approx((0.103, 0.256), abs=5e-4)
    assert rho.argmax().item() == 50
    # the exact law of finitely many tokens agrees
    form, process = QKForm.from_xi_eta(0.0, 5.0, dim=128), TokenProcess.random_walk(64)
    exact = propagation(form, process).rho
    assert (exact[0].item(), exact[31].item()) == pytest.approx((0.106, 0.258), abs=5e-4)
    # uniform only where η tends to zero; where it tends to infinity the middle is √7 times the edge
    assert rho_limit(theta, xi=0.0, eta=1e-3).sub(0.5).abs().max() < 1e-12
    rho = rho_limit(theta, xi=0.0, eta=1e5)
    assert (rho[50] / rho[0]).item() == pytest.approx(math.sqrt(7), rel=1e-6)


# Bounds of Section 5 ------------------------------------------------------------------------------


def random_covariance(seed: int, model: int) -> Tensor:
    root = normals(seed + 1, model, model)
    return root @ root.mT / model + 0.1 * torch.eye(model, dtype=torch.float64)


@pytest.mark.paper("Eq. 7")
def test_eq_7_needs_the_frobenius_norm(seed: int) -> None:
    identity = matrix_form(torch.eye(128, dtype=torch.float64))
    printed = by_equation(collapse_bounds(identity, variant="as_printed"))
    for name in ("7a", "7c"):  # |tr W|/√d and ‖W‖_F against ‖W‖₂ and the largest column sum
        assert printed[name].lower.item() == pytest.approx(11.3137, abs=1e-4)
        assert printed[name].upper.item() == pytest.approx(1)
        assert not printed[name].holds
    valid = by_equation(collapse_bounds(identity))
    assert valid["7c"].upper.item() == 128  # the sum of all entries
    forms = matrix_form(normals(seed, 1000, 5, 5))
    for bounds in (valid, by_equation(collapse_bounds(forms, random_covariance(seed, 5)))):
        assert all(bounds[name].holds.all() for name in ("7a", "7b", "7c", "7d"))


@pytest.mark.paper("Eq. 10")
def test_eq_10_needs_a_semidefinite_form(seed: int) -> None:
    signs = matrix_form(((1, 0), (0, -1)))
    printed = by_equation(collapse_bounds(signs, variant="as_printed"))["10b"]
    assert (printed.lower.item(), printed.upper.item()) == pytest.approx((1, 0))  # ‖W‖₂ ≤ |tr W|
    assert not printed.holds
    roots, sigma = normals(seed, 1000, 5, 5), random_covariance(seed, 5)
    semidefinite, symmetric = matrix_form(roots @ roots.mT), matrix_form(roots + roots.mT)
    for form, holds in ((semidefinite, True), (symmetric, False)):
        printed = by_equation(collapse_bounds(form, sigma, variant="as_printed"))
        assert bool(printed["10b"].holds.all()) == holds
        assert printed["10a"].holds.all()
        assert (printed["10b"].lower <= printed["10a"].upper).all()  # the outer inequality
    for form in (symmetric, matrix_form(roots)):
        valid = by_equation(collapse_bounds(form, sigma))
        assert valid["10a"].holds.all()
        assert valid["10b"].holds.all()


def least_entropy(norm: float, tokens: int) -> float:
    """Entropy of the softmax of one high logit: the worst on the ball of that norm."""
    logits = torch.full((tokens,), -1 / tokens, dtype=torch.float64)
    logits[0] += 1
    return attention_entropy(torch.softmax(norm * logits / logits.norm(), -1)).item()


@pytest.mark.paper("Eq. 9")
def test_printed_entropy_bound_exceeds_ln_t(seed: int) -> None:
    printed = entropy_lower_bound(2.0, 64, variant="as_printed").item()
    assert printed == pytest.approx(7.142, abs=5e-4)
    assert math.log(64) == pytest.approx(4.159, abs=5e-4)  # the entropy of no 64 numbers is larger
    for norm in (0.5, 2.0, 4.0, 8.0):
        attained = least_entropy(norm, 64)
        assert entropy_lower_bound(norm, 64).item() == pytest.approx(attained, rel=1e-12)
    assert least_entropy(2.0, 64) == pytest.approx(4.041, abs=5e-4)
    directions = torch.nn.functional.normalize(normals(seed, 2000, 64), dim=-1)
    entropy = attention_entropy(torch.softmax(4 * directions, -1))
    assert (entropy >= entropy_lower_bound(4.0, 64)).all()
    assert (entropy < entropy_lower_bound(4.0, 64, variant="as_printed")).all()


@pytest.mark.paper("Eq. 9")
def test_entropy_bound_needs_the_temperature() -> None:
    tokens, qk, temperature = tensor([0, 1]), 1.0, 0.5  # d = 1, T = 2
    norm = tokens.square().sum().item() * abs(qk)  # the printed ν = ‖XXᵀ‖₂ ‖W_QK‖₂
    logits = tokens * qk * tokens[-1] / temperature
    entropy = attention_entropy(torch.softmax(logits, -1)).item()
    assert entropy == pytest.approx(0.365, abs=5e-4)
    assert entropy_lower_bound(norm, 2).item() == pytest.approx(0.494, abs=5e-4)
    assert entropy_lower_bound(norm / temperature, 2).item() < entropy


@pytest.mark.paper("Fig. 4")
def test_entropy_bound_only_falls() -> None:
    norm = torch.linspace(0, 30, 3001, dtype=torch.float64)
    exact = entropy_lower_bound(norm, 64)
    assert (exact.diff() < 0).all()
    assert exact[0].item() == pytest.approx(math.log(64))
    printed = entropy_lower_bound(norm, 64, variant="as_printed")
    peak = int(printed.argmax())
    assert norm[peak].item() == pytest.approx(4.94, abs=0.01)
    assert printed[peak].item() == pytest.approx(18.72, abs=5e-3)
    assert norm[printed > math.log(64)].max().item() == pytest.approx(10.08, abs=0.01)
    # Zhai's own large-T form, with e^(−ν): its slope is −ν p (1 − p)
    nu = norm.clone().requires_grad_()
    bound = torch.log1p(64 * torch.exp(-nu)) + nu * torch.exp(-nu) / (1 / 64 + torch.exp(-nu))
    (slope,) = torch.autograd.grad(bound.sum(), nu)
    share = torch.sigmoid(math.log(64) - norm)
    torch.testing.assert_close(slope, -norm * share * (1 - share))


# LocAteR ------------------------------------------------------------------------------------------


def scale_term(query: Tensor, key: Tensor) -> Tensor:
    product = query.mT @ key
    return (product.mT @ product).trace()


def mean_term(query: Tensor, key: Tensor) -> Tensor:
    return ((query.mT @ key).trace() - 1) ** 2


def gradients(term: Callable[..., Tensor], query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    leaves = query.clone().requires_grad_(), key.clone().requires_grad_()
    return torch.autograd.grad(term(*leaves), leaves)


QUERY = ((1, 2, 0), (0, 1, -1))


@pytest.mark.paper("Section 6")
@pytest.mark.parametrize(
    ("key", "trace", "ratio"),
    [(((1, 0, 1), (2, -1, 0)), 0, 0.0), (((1, 1, 0), (0, 2, -1)), 6, 3.0)],
)
def test_mean_gradient_is_twice_the_gap(key: Matrix, trace: int, ratio: float) -> None:
    queries, keys = tensor(QUERY), tensor(key)
    true = gradients(mean_term, queries, keys)
    assert (queries * keys).sum() == trace
    for gradient, other in zip(true, (keys, queries), strict=True):
        torch.testing.assert_close(gradient, 2 * (trace - 1) * other)
        printed = (trace - 1) * trace * other
        torch.testing.assert_close(printed, ratio * gradient)  # tr/2 instead of 1


@pytest.mark.paper("Section 6")
def test_scale_gradients_are_right() -> None:
    queries, keys = tensor(QUERY), tensor(((1, 0, 1), (2, -1, 0)))
    by_query, by_key = gradients(scale_term, queries, keys)
    torch.testing.assert_close(by_query, 2 * keys @ keys.mT @ queries)
    torch.testing.assert_close(by_key, 2 * queries @ queries.mT @ keys)


def equilibrium_scale(scale_strength: float, mean_strength: float, model: int) -> float:
    """‖W_QK‖²_F where the penalty is least, proved least by autograd and Eq. 5."""
    trace = mean_strength / (mean_strength + scale_strength / model)
    factor = math.sqrt(trace / model) * torch.eye(model, dtype=torch.float64)

    def penalty(query: Tensor, key: Tensor) -> Tensor:
        return scale_strength * scale_term(query, key) + mean_strength * mean_term(query, key)

    for gradient in gradients(penalty, factor, factor):
        assert gradient.abs().max() < 1e-12 * max(scale_strength, mean_strength)
    # tr² ≤ d ‖W‖²_F bounds the penalty by a parabola in tr, whose least value is attained here
    least = scale_strength * mean_strength / (scale_strength + model * mean_strength)
    assert penalty(factor, factor).item() == pytest.approx(least, rel=1e-12)
    return scale_term(factor, factor).item()


@pytest.mark.paper("Figs. 6, 8-12")
def test_printed_kappa_2_adds_scale() -> None:
    strengths = (1e-3, 1e-2, 1e-1, 1.0)
    printed = [equilibrium_scale(100.0, kappa, 128) for kappa in strengths]
    assert printed == pytest.approx([1.277e-8, 1.248e-6, 1.006e-4, 2.462e-3], rel=5e-4)
    assert printed == sorted(printed)
    # with the roles exchanged the scale falls, as the captions say: a reading, not a proof
    swapped = [equilibrium_scale(kappa, 100.0, 128) for kappa in strengths]
    assert swapped == sorted(swapped, reverse=True)


@pytest.mark.paper("Section 6")
def test_trace_of_one_does_not_localize() -> None:
    temperature, process = math.sqrt(128), TokenProcess.random_walk(64)

    def flat(trace: float) -> QKForm:
        values = torch.full((128,), trace / 128, dtype=torch.float64)
        return QKForm.from_eigenvalues(values, temperature=temperature)

    target = classify(flat(1.0), process)
    assert target.r.item() == pytest.approx(0.0884, abs=5e-5)
    assert (target.name, target.count.item()) == ("late", 43)
    assert target.profile.rho[0].item() < 1e-9
    assert 2 * temperature == pytest.approx(22.6, abs=0.05)  # the trace at which r = 2
    beyond = classify(flat(5 * temperature), process)
    assert (beyond.name, beyond.count.item()) == ("middle", 13)


# Appendix B ---------------------------------------------------------------------------------------

TOKENS = ((1, 0), (1, 1), (2, 1))  # three of them
VALUE = ((1, 1), (0, 1))
FEEDFORWARD = ((2, 0), (1, 1))


@pytest.mark.paper("Appendix B.1")
def test_qk_gradient_needs_p() -> None:
    tokens, target = tensor(TOKENS), tensor((1, 2))
    qk, value, feedforward = tensor(GENERIC) / 4, tensor(VALUE), tensor(FEEDFORWARD)
    last, count = tokens[-1], len(tokens)
    logits = tokens @ qk @ last
    assert torch.equal(piecewise_softmax(logits), linearized_softmax(logits))  # all gates open
    gate = torch.eye(count, dtype=torch.float64) / count - 1 / count**2
    mixed = tokens @ value.mT @ feedforward.mT
    middle = mixed @ mixed.mT  # P
    gathered = tokens.mT @ gate
    pull = gate.mT @ logits
    right = torch.outer(gathered @ middle @ pull, last)
    printed = torch.outer(gathered @ pull, last)
    weights = {"value": value, "feedforward": feedforward, "temperature": 1.0}
    gradient = qk_gradient(tokens[None], target[None], qk=qk, **weights)
    torch.testing.assert_close(gradient.quadratic, right)
    leaf = qk.clone().requires_grad_()
    loss = (target - one_layer_output(tokens, qk=leaf, **weights)).square().sum() / 2
    (true,) = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(gradient.total, true)
    assert right.norm().item() == pytest.approx(3.21, abs=5e-3)
    assert printed.norm().item() == pytest.approx(0.27, abs=5e-3)


@pytest.mark.paper("Eqs. 3, 19-21")
def test_qk_gradient_has_the_printed_parts(seed: int) -> None:
    size, model = 5, 3
    tokens, target = 2 * normals(seed, size, model), normals(seed + 1, model)
    qk, value, feedforward = normals(seed + 2, 3, model, model)
    weights = {"value": value, "feedforward": feedforward, "temperature": 0.7}
    last, score = tokens[-1], linearized_softmax(tokens @ qk @ tokens[-1] / 0.7)
    is_open = ((score >= 0) & (score <= 1)).double()
    slope = (torch.eye(size, dtype=torch.float64) / size - 1 / size**2) * is_open  # [α, i]
    base = is_open / size + (score > 1)
    mixed = tokens @ value.mT @ feedforward.mT
    inner, ask = mixed @ mixed.mT, tokens @ qk @ last
    quadratic = torch.einsum("ai,bj,ij,b,am,n->mn", slope, slope, inner, ask, tokens, last) / 0.49
    saturated = torch.einsum("ai,b,ib,am,n->mn", slope, base, inner, tokens, last) / 0.7
    error = mixed @ (feedforward @ last - target)
    residual = torch.einsum("ai,i,am,n->mn", slope, error, tokens, last) / 0.7
    gradient = qk_gradient(tokens[None], target[None], qk=qk, **weights)
    torch.testing.assert_close(gradient.quadratic, quadratic)
    torch.testing.assert_close(gradient.saturated, saturated)
    torch.testing.assert_close(gradient.residual, residual)
    leaf = qk.clone().requires_grad_()
    loss = (target - one_layer_output(tokens, qk=leaf, **weights)).square().sum() / 2
    torch.testing.assert_close(gradient.total, *torch.autograd.grad(loss, leaf))


Z_LIMIT = NormalDist().inv_cdf(1 - 1e-6 / (2 * 3))  # nominal: 1 false alarm in 10⁶, 3 parts


@pytest.mark.statistical  # resolution: half an order in T
@pytest.mark.paper("Appendix B.2")
def test_saturated_part_does_not_fade(seed: int) -> None:
    model, long, short, walkers = 4, 512, 64, 200
    walks = normals(seed, walkers, long, model).cumsum(1)
    step = normals(seed + 1, walkers, model)
    identity = torch.eye(model, dtype=torch.float64)
    weights = {"qk": identity, "value": identity, "temperature": 2.0}
    feedforward = torch.linspace(0.5, 2, model, dtype=torch.float64).diag()
    sizes = []
    for tokens in (short, long):
        pace = long // tokens  # every pace-th token, shrunk by √pace, is a walk again
        thinned = walks[:, pace - 1 :: pace] / math.sqrt(pace)
        target = thinned[:, -1] + step
        parts = [
            qk_gradient(some, theirs, feedforward=feedforward, **weights)
            for some, theirs in zip(thinned.split(10), target.split(10), strict=True)
        ]
        norms = [[p.quadratic.norm(), p.saturated.norm(), p.residual.norm()] for p in parts]
        sizes.append(torch.tensor(norms, dtype=torch.float64))
    few, many = (size / size.mean(0) for size in sizes)
    reach = math.log(long / short)
    slope = (sizes[1].mean(0) / sizes[0].mean(0)).log() / reach
    standard_error = (many - few).std(0) / (math.sqrt(len(few)) * reach)
    room = 0.5 - Z_LIMIT * standard_error
    assert ((slope - tensor((3, 3, 2))).abs() < room).all()
    # the printed orders are bounds, far from sharp, and their comparison decides nothing
    assert (tensor((8, 5, 4)) - slope > 0.5 + Z_LIMIT * standard_error).all()


@pytest.mark.paper("Appendix B.2")
def test_b2_bounds_multiply_to_t_9() -> None:
    def order(factor: Callable[[int], Fraction | int]) -> float:
        """Exponent of T, between two large T."""
        return math.log2(factor(1600) / factor(800))

    def pairs(tokens: int) -> int:
        """Σ_ij E[(x_i x_j)²] for d = 1, where each is 2 min² + ij."""
        total = squares = steps = 0
        for j in range(1, tokens + 1):
            total += 2 * (2 * squares + j * steps) + 3 * j**2
            squares, steps = squares + j**2, steps + j
        return total

    def single(tokens: int) -> int:
        return sum(2 * i**2 + i * tokens for i in range(1, tokens + 1))

    def gates(tokens: int) -> Fraction:
        """Σ_iα (γ_αⁱ)², exactly 1/T − 1/T²."""
        own, other = Fraction(tokens - 1, tokens**2), Fraction(-1, tokens**2)
        return tokens * (own**2 + (tokens - 1) * other**2)

    assert gates(7) == Fraction(1, 7) - Fraction(1, 49)
    as_bounded = [
        0.0,  # (A), with every |γ| replaced by 1/T
        order(lambda tokens: tokens**2 * pairs(tokens)),
        order(lambda tokens: tokens**3 * single(tokens)),
        order(lambda tokens: tokens**3 * single(tokens)),
    ]
    assert [round(exponent) for exponent in as_bounded] == [0, 6, 6, 6]
    assert sum(round(exponent) for exponent in as_bounded) / 2 == 9  # printed: 8
    assert round(order(lambda tokens: gates(tokens) ** 2)) == -2  # the (A) that would give 8
    # the middle factor of (20) sums over a third index: 5, printed 4
    assert round(order(lambda tokens: tokens * pairs(tokens))) == 5


@pytest.mark.paper("Appendix B.2")
def test_cauchy_schwarz_takes_two_factors() -> None:
    def power(count: int) -> Fraction:
        """E[z^count] of a standard normal z."""
        return gaussian_moment(["z"] * count, lambda *_: 1)

    assert power(4) ** 2 == 9 > power(2) ** 4 == 1
    # Hölder's inequality is the one for four: |E abcd|⁴ ≤ E a⁴ · E b⁴ · E c⁴ · E d⁴
    assert power(1 + 1 + 1 + 1) ** 4 == power(4) ** 4
    assert power(3 + 1 + 1 + 1) ** 4 < power(12) * power(4) ** 3


@pytest.mark.paper("Appendix B.2")
def test_b2_traces_are_squared() -> None:
    form, double = ((2, 0), (0, 1)), ((4, 0), (0, 2))
    i, j = 1, 2

    def printed_b(first: int, second: int) -> int:
        return (i**2 + i * j - 3 * i - j + 4) * second + (j**2 - 2 * i + 2) * first

    def printed_c(first: int, second: int) -> int:  # β = 1, T = 2
        return (i**2 + (j - 3) * i - (j - 4)) * second + (i**2 - 2 * i + 2) * first

    exact = walk_moment(form, UNIT, (i, j), (j, i))
    first, second = traces(form, UNIT)
    assert exact == (i**2 + i * j) * second + i**2 * first**2 == 24
    assert (printed_b(first, second), printed_c(first, second)) == (22, 13)
    # twice the form, four times the moment: a trace to the first power cannot follow
    assert walk_moment(double, UNIT, (i, j), (j, i)) == 4 * exact
    assert printed_b(*traces(double, UNIT)) != 4 * printed_b(first, second)


# Remarks and words --------------------------------------------------------------------------------


@pytest.mark.paper("Remark 2")
def test_other_tokens_do_not_fade() -> None:
    ratios = []
    for tokens in (64, 256):
        step = torch.arange(1, tokens + 1, dtype=torch.float64)
        kernel = torch.minimum(step[:, None], step)
        own = (1 / tokens - 1 / tokens**2) ** 2 * kernel.diagonal()
        others = (torch.eye(tokens, dtype=torch.float64) - 1) / tokens**2
        rest = ((others @ kernel) * others).sum(1)
        ratios.append((rest.mean() / own.mean()).sqrt().item())
    # root mean squares of Σ_{α≠i} γ_αⁱ x_α over γ_iⁱ x_i: a limit of √(2/3), not of 0
    assert ratios == pytest.approx([0.820, 0.817], abs=5e-4)
    assert ratios[1] == pytest.approx(math.sqrt(2 / 3), abs=1e-3)
    # the −½ in Lemma 1's mean is this rest
    tokens, i = 1000, 700
    rest = sum(Fraction(-j, tokens**2) for j in range(1, tokens + 1) if j != i)
    assert float(rest) == pytest.approx(-0.5, abs=1e-3)


@pytest.mark.paper("Eq. 1")
def test_attention_is_a_softmax_by_column() -> None:
    tokens, qk = tensor(TOKENS).mT, tensor(TURNING)  # tokens are columns, as in Eq. 1
    logits = tokens.mT @ qk @ tokens
    by_row, by_column = torch.softmax(logits, 1), torch.softmax(logits, 0)
    # column T mixes the tokens for the last output (Eq. 2), so its weights are softmax(ω)
    torch.testing.assert_close(by_column[:, -1], torch.softmax(logits[:, -1], 0))
    torch.testing.assert_close(by_column.sum(0), torch.ones(3, dtype=torch.float64))
    assert by_row[:, -1].sum().item() == pytest.approx(1.91, abs=5e-3)
    # W_Qᵀ W_K and its transpose give other logits, but the same law
    assert not torch.equal(tokens.mT @ qk.mT @ tokens[:, -1], logits[:, -1])
    turned = tuple(zip(*TURNING, strict=True))
    rho, other = (dense_rho(form, SIGMA, 8, 1.0) for form in (TURNING, turned))
    torch.testing.assert_close(rho, other, rtol=0, atol=1e-12)
    process = TokenProcess.random_walk(8, covariance=tensor(SIGMA))
    for mine, theirs in zip(
        score_moments(matrix_form(TURNING), process),
        score_moments(matrix_form(turned), process),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.paper("Section 4")
def test_traces_are_sums_not_means() -> None:
    spectrum = QKForm.from_eigenvalues(
        torch.full((128,), 0.5, dtype=torch.float64), temperature=1.0
    ).spectrum()
    assert (spectrum.trace.item(), spectrum.trace_of_square.item()) == (64, 32)
    assert (spectrum.mean.item(), spectrum.eigenvalues.abs().square().mean().item()) == (0.5, 0.25)


@pytest.mark.paper("Section 8")
def test_less_scale_means_more_entropy() -> None:
    spread = tensor([1.0, 0.5, 0.0])
    pattern = tensor([1, 1, -1, -1])
    spectrum = QKForm.from_eigenvalues(1 + spread[:, None] * pattern, temperature=1.0).spectrum()
    assert spectrum.trace.tolist() == [4, 4, 4]
    assert spectrum.trace_of_square.tolist() == [8, 5, 4]
    assert (16 * spectrum.variance).tolist() == [16, 4, 0]  # Eq. 8
    bound = entropy_lower_bound(2 * spectrum.spectral_norm, 64)  # ‖XXᵀ‖₂/λ = 2
    assert bound.tolist() == pytest.approx([2.879, 3.681, 4.041], abs=5e-4)


@pytest.mark.paper("Lemma 3")
def test_lemma_3_holds_with_mean_m() -> None:
    form, sigma, mean, other = GENERIC, SIGMA, (3, -1), (2, 5)
    axes = range(2)

    def expect(*coordinates: int) -> Fraction:
        return gaussian_moment(coordinates, lambda a, b: sigma[a][b], lambda a: mean[a])

    def bilinear(left: Sequence[int], *matrices: Matrix, right: Sequence[int]) -> int:
        for matrix in matrices:
            left = [sum(left[a] * matrix[a][b] for a in axes) for b in axes]
        return sum(x * y for x, y in zip(left, right, strict=True))

    first, second = traces(form, sigma)
    square = bilinear(mean, form, right=mean)
    long = bilinear(mean, form, sigma, form, right=mean)
    own = sum(form[a][b] * expect(a, b) for a in axes for b in axes)
    assert own == first + square  # (11)
    for a, b in itertools.product(axes, axes):
        assert expect(a, b) == sigma[a][b] + mean[a] * mean[b]  # (12)
    row = [sum(other[a] * form[a][b] for a in axes) for b in axes]
    mixed = sum(
        row[a] * form[b][c] * expect(a, b, c) for a, b, c in itertools.product(axes, repeat=3)
    )
    tilted = bilinear(other, form, right=mean)
    assert mixed == 2 * bilinear(other, form, sigma, form, right=mean) + tilted * (first + square)
    fourth = sum(
        form[a][b] * form[c][d] * expect(a, b, c, d)
        for a, b, c, d in itertools.product(axes, repeat=4)
    )  # (13) above, (14) below
    assert fourth == 2 * second + first**2 + 4 * long + 2 * first * square + square**2
    assert own != first  # a mean that is left out changes the answer: m must be what is fixed


# What the paper got right -------------------------------------------------------------------------


@pytest.mark.paper("Section 2")
def test_softmax_coefficients_are_right() -> None:
    tokens = 5
    origin = torch.zeros(tokens, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda logits: torch.softmax(logits, -1), origin)
    gamma = torch.eye(tokens, dtype=torch.float64) / tokens - 1 / tokens**2
    torch.testing.assert_close(jacobian, gamma)
    logits = normals(0, 100, tokens) * 5
    torch.testing.assert_close(linearized_softmax(logits), logits @ gamma + 1 / tokens)
    torch.testing.assert_close(piecewise_softmax(logits), (logits @ gamma + 1 / tokens).clamp(0, 1))


@pytest.mark.paper("Lemma 1")
def test_mean_of_lemma_1_lacks_only_one_over_t() -> None:
    tokens, trace = 6, traces(GENERIC, SIGMA)[0]
    process = TokenProcess.random_walk(tokens, covariance=tensor(SIGMA))
    mean, _ = score_moments(matrix_form(GENERIC), process)
    for i in range(1, tokens + 1):
        printed = (i - Fraction(tokens + 1, 2)) * trace / tokens  # the proof's last line
        exact = exact_score_moments(GENERIC, SIGMA, tokens, i)[0]
        assert exact == printed + Fraction(1, tokens)
        assert mean[i - 1].item() == pytest.approx(float(exact), rel=1e-12)


@pytest.mark.paper("Lemma 1, proof")
def test_other_sums_of_lemma_1_are_right() -> None:
    tokens, i = 2000, 700
    theta, cube, fourth = i / tokens, tokens**3, tokens**4
    span = range(1, tokens + 1)
    # coefficients of tr(W²) and tr(W)² in the right (22), summed, against the printed leading order
    sums = {
        "A": ((i**2 + tokens * i) / tokens**2, i**2 / tokens**2),
        "B1": (2 * (i**2 + tokens * i) / cube, 2 * i**2 / cube),
        "B2": (math.nan, 2 * sum(i * j for j in span if j > i) / cube),
        "B3": (
            2 * sum(i * j + tokens * j for j in span if j < i) / cube,
            2 * sum(i * j for j in span if j < i) / cube,
        ),
        "C1": (sum(j**2 + tokens * j for j in span) / fourth, sum(j**2 for j in span) / fourth),
        "C2": (  # Σ_{j<k} jk = Σ_k k · k(k−1)/2, and Σ_{j<k} j = Σ_k k(k−1)/2
            sum((k + tokens) * k * (k - 1) for k in span) / fourth,
            sum(k * k * (k - 1) for k in span) / fourth,
        ),
    }
    printed = {
        "A": (theta**2 + theta, theta**2),
        "B1": (0, 0),
        "B2": (math.nan, theta - theta**3),
        "B3": (theta**2 + theta**3, theta**3),
        "C1": (0, 0),
        "C2": (7 / 12, 1 / 4),
    }
    for name, values in sums.items():
        assert values == pytest.approx(printed[name], abs=3 / tokens, nan_ok=True), name
    # so the coefficient of tr(W)² is that of the squared mean, and drops out of the variance
    assert printed["A"][1] - printed["B2"][1] - printed["B3"][1] + 1 / 4 == pytest.approx(
        (theta - 0.5) ** 2
    )


@pytest.mark.paper("Eq. 6")
@pytest.mark.parametrize("lemma1", ["corrected", "as_printed"])
def test_eq_6_follows_from_lemma_1(lemma1: Lemma1) -> None:
    theta = torch.linspace(0, 1, 21, dtype=torch.float64)
    trace, square, temperature = 3.0, 1.7, 2.5
    mean = (theta - 0.5) * trace / temperature
    width = (2 * logit_variance(theta, lemma1=lemma1) * square).sqrt() / temperature
    rho = (torch.erf((1 - mean) / width) + torch.erf(mean / width)) / 2
    xi, eta = trace / math.sqrt(square), math.sqrt(square) / temperature
    torch.testing.assert_close(rho_limit(theta, xi=xi, eta=eta, lemma1=lemma1), rho)


@pytest.mark.paper("Lemma 2.1, 2.2")
@pytest.mark.parametrize("lemma1", ["corrected", "as_printed"])
@pytest.mark.parametrize("r", [0.5, 2.0, 5.0, 20.0])
def test_limits_of_lemma_2_hold_off_the_edges(r: float, lemma1: Lemma1) -> None:
    theta = torch.linspace(0.005, 0.995, 100, dtype=torch.float64)  # meets no edge
    late = ((theta > 0.5) & (theta < 0.5 + 1 / r)).double()
    xi = 1e6
    rho = rho_limit(theta, xi=xi, eta=r / xi, lemma1=lemma1)
    torch.testing.assert_close(rho, late, rtol=0, atol=1e-12)
    early = ((theta < 0.5) & (theta > 0.5 - 1 / r)).double()
    rho = rho_limit(theta, xi=-xi, eta=r / xi, lemma1=lemma1)
    torch.testing.assert_close(rho, early, rtol=0, atol=1e-12)


@pytest.mark.paper("Lemma 2.4")
@pytest.mark.parametrize(("lemma1", "constant"), [("corrected", 1.382), ("as_printed", 0.5224)])
def test_rho_vanishes_as_eta_grows(lemma1: Lemma1, constant: float) -> None:
    theta = torch.linspace(0, 1, 101, dtype=torch.float64)
    for eta, xi in itertools.product((0.1, 1.0, 10.0, 1e3, 1e6), (-50.0, -1.0, 0.0, 1.0, 50.0)):
        assert rho_limit(theta, xi=xi, eta=eta, lemma1=lemma1).max().item() <= constant / eta
    sharp = rho_limit(theta, xi=0.0, eta=1e6, lemma1=lemma1).max().item() * 1e6
    assert sharp == pytest.approx(constant, abs=5e-4)


@pytest.mark.paper("Eqs. 5, 7, 8, 10")
def test_bounds_that_hold_for_real_spectra(seed: int) -> None:
    root = normals(seed, 1000, 5, 5)
    symmetric = matrix_form(root + root.mT)
    sigma = random_covariance(seed, 5)
    bounds = by_equation(collapse_bounds(symmetric, sigma, variant="as_printed"))
    assert all(bounds[name].holds.all() for name in ("5", "7b", "8", "10a"))
    eigenvalues = symmetric.spectrum(sigma).eigenvalues
    assert eigenvalues.imag.abs().max() < 1e-9
    gap = bounds["8"].upper - bounds["8"].lower
    torch.testing.assert_close(gap, 25 * eigenvalues.real.var(-1, correction=0))


@pytest.mark.paper("Section 4")
def test_concentrated_spectra_do_localize() -> None:
    def shape(eta: float, lemma1: Lemma1) -> tuple[float, float]:
        """Participation ratio and peak of ρ at ξ = 10."""
        theta = torch.linspace(0, 1, 2001, dtype=torch.float64)
        rho = rho_limit(theta, xi=10.0, eta=eta, lemma1=lemma1)
        return (rho.mean() ** 2 / rho.square().mean()).item(), rho.max().item()

    # sharper than the paper thought: its variance is too large
    assert shape(1.0, "as_printed") == pytest.approx((0.411, 0.355), abs=1e-3)
    assert shape(1.0, "corrected") == pytest.approx((0.155, 0.908), abs=1e-3)


# The page -----------------------------------------------------------------------------------------

PAGE = ROOT / "docs" / "errata.md"


def rows() -> dict[str, list[str]]:
    """The cells after the id, for every row of the tables; an id may appear once."""
    found: dict[str, list[str]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells and re.fullmatch(r"E\d+", cells[0]):
            assert cells[0] not in found, f"{cells[0]} appears twice"
            found[cells[0]] = cells[1:]
    return found


def own_tests() -> set[str]:
    module = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    return {node.name for node in module.body if isinstance(node, ast.FunctionDef)}


def docstrings(path: Path) -> Iterator[str]:
    """Every string that stands alone as a statement: docstrings, also of fields."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield str(node.value.value)


def test_every_row_of_the_page_has_its_test() -> None:
    page = rows()
    assert list(page) == [f"E{number}" for number in range(1, 34)]
    known = own_tests()
    for row, cells in page.items():
        assert len(cells) == 5, row
        assert all(cells), row
        named = re.findall(r"tests/paper/test_errata\.py::(\w+)", cells[-1])
        assert named or cells[-1] == "wording", row
        assert set(named) <= known, row
    assert sum(cells[-1] == "wording" for cells in page.values()) <= 2


def test_every_test_that_the_page_names_exists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = set(re.findall(r"\b(test_\w+)(?!\w*\.py)", text))
    assert named <= own_tests()


def test_every_erratum_cited_in_the_source_is_on_the_page() -> None:
    page = rows()
    for path in sorted((ROOT / "src").rglob("*.py")):
        for text in docstrings(path):
            cited = set(re.findall(r"\bE\d+\b", text))
            assert cited <= set(page), f"{path.name}: {sorted(cited - set(page))}"
