"""The score's moments and law against a dense, brute definition.

The tokens are one Gaussian vector x of tokens × model numbers with covariance K ⊗ Σ.  Every logit
is xᵀM_j x + g_j·x + h_j, so every mean, variance and law follows from textbook formulas for
quadratic forms, at a cost that only a test can afford.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from torch import Tensor

from locater import (
    InputError,
    QKForm,
    Rotary,
    TokenProcess,
    logit_moments,
    propagation,
    score_moments,
)
from locater.core.form import Layout, Relative
from locater.core.quadratic import QuadraticLaw
from locater.core.score import HeadMoments, LogitDraws, SampledHeads


@dataclass(frozen=True)
class Case:
    """What hypothesis draws: shapes, switches and a seed."""

    head: int
    model: int
    tokens: int
    seed: int
    turning: int = 0  # pairs of dimensions, at most
    layout: Layout = "half"
    has_covariance: bool = False
    has_mean: bool = False
    has_query_bias: bool = False
    has_key_bias: bool = False
    has_distance_bias: bool = False
    relative: str = ""

    def draw(self) -> tuple[QKForm, TokenProcess]:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        def positive(size: int) -> Tensor:
            mixing = normal(size, size)
            return mixing @ mixing.mT / size + 0.1 * torch.eye(size, dtype=torch.float64)

        form = QKForm(
            normal(self.head, self.model),
            normal(self.head, self.model),
            math.sqrt(self.head) + 0.5,
            query_bias=normal(self.head) if self.has_query_bias else None,
            key_bias=normal(self.head) if self.has_key_bias else None,
            distance_bias=normal(self.tokens + 2) if self.has_distance_bias else None,
        )
        if self.relative == "text":  # tables too short for the longest offsets
            form = replace(form, relative=Relative(normal(4, self.head), bias=normal(4), ahead=1))
        elif self.relative == "grid":
            rows, columns, bias = normal(3, self.head), normal(5, self.head), normal(3, 5)
            form = replace(form, relative=Relative(columns, rows, bias, grid=(2, 3)))
        pairs = min(self.turning, self.head // 2)
        if pairs:
            form = replace(form, rotary=Rotary(normal(pairs), self.layout))
        covariance = positive(self.model) if self.has_covariance else None
        mean = normal(self.tokens, self.model) if self.has_mean else None
        return form, TokenProcess(positive(self.tokens), covariance, mean)


SIZES = {
    "head": st.integers(1, 4),
    "model": st.integers(1, 5),
    "tokens": st.integers(2, 6),
    "seed": st.integers(0, 2**31),
    "has_covariance": st.booleans(),
}
EVERYTHING = st.builds(
    Case,
    **SIZES,
    turning=st.integers(0, 2),
    layout=st.sampled_from(["half", "interleaved"]),
    has_mean=st.booleans(),
    has_query_bias=st.booleans(),
    has_key_bias=st.booleans(),
    has_distance_bias=st.booleans(),
    relative=st.sampled_from(["", "text", "grid"]),
)
FULL_RANK = EVERYTHING.map(lambda case: replace(case, model=max(case.head, case.model)))
CENTRAL = st.builds(Case, **SIZES, has_distance_bias=st.booleans())


def rotation(form: QKForm, position: int) -> Tensor:
    head = form.query.shape[0]
    if form.rotary is None:
        return torch.eye(head, dtype=torch.float64)
    phases = form.rotary.phases(torch.tensor(position))
    return form.rotary.turn(torch.eye(head, dtype=torch.float64), phases).mT


def placed(form: QKForm, tokens: int, j: int) -> tuple[Tensor, Tensor]:
    """What joins key j of the last query, and its logit, by the tables' own order."""
    tables = form.relative
    if tables is None:
        return torch.zeros(form.query.shape[0], dtype=torch.float64), torch.tensor(0.0)
    assert tables.columns is not None and tables.bias is not None
    if tables.rows is None:
        entry = min(tokens - 1 - j + 1, 3)
        return tables.columns[entry], tables.bias[entry]
    place = j + 6 - tokens  # the query stands in the last column of the last row
    row, column = 1 - place // 3, 2 - place % 3
    return tables.rows[row + 1] + tables.columns[column + 2], tables.bias[row + 1, column + 2]


@dataclass(frozen=True)
class Dense:
    """Logit j is xᵀM_j x + g_j·x + h_j with x ~ N(mean, covariance)."""

    forms: Tensor
    linear: Tensor
    constant: Tensor
    mean: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, form: QKForm, process: TokenProcess) -> Dense:
        tokens, (head, model) = process.tokens, form.query.shape
        pick = torch.eye(tokens * model, dtype=torch.float64).view(tokens, model, -1)
        zero = torch.zeros(head, dtype=torch.float64)
        query_bias = zero if form.query_bias is None else form.query_bias
        key_bias = zero if form.key_bias is None else form.key_bias
        asks, ask = (
            rotation(form, tokens) @ form.query @ pick[-1],
            rotation(form, tokens) @ query_bias,
        )
        forms, linear, constant = [], [], []
        for j in range(tokens):
            joins, adds = placed(form, tokens, j)
            sees = rotation(form, j + 1) @ form.key @ pick[j]
            see = rotation(form, j + 1) @ key_bias + rotation(form, tokens) @ joins
            product = sees.mT @ asks / form.temperature
            forms.append((product + product.mT) / 2)
            linear.append((sees.mT @ ask + asks.mT @ see) / form.temperature)
            bias = 0 if form.distance_bias is None else form.distance_bias[tokens - 1 - j]
            constant.append(see @ ask / form.temperature + bias + adds)
        sigma = process.covariance
        sigma = torch.eye(model, dtype=torch.float64) if sigma is None else sigma
        mean = torch.zeros(tokens, model) if process.mean is None else process.mean
        return cls(
            torch.stack(forms),
            torch.stack(linear),
            torch.stack(constant),
            mean.double().flatten(),
            torch.kron(process.kernel, sigma),
        )

    def scores(self) -> Dense:
        """The same for ⟨γⁱ, ω⟩ + 1/T, with γⁱ = e_i/T − 1/T² written out."""
        tokens = len(self.constant)
        gamma = torch.eye(tokens, dtype=torch.float64) / tokens - 1 / tokens**2
        return replace(
            self,
            forms=torch.einsum("ij,jab->iab", gamma, self.forms),
            linear=gamma @ self.linear,
            constant=gamma @ self.constant + 1 / tokens,
        )

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and covariance: tr(MC) + …, 2 tr(M_j C M_k C) + ∇_jᵀ C ∇_k."""
        gradient = self.linear + 2 * self.forms @ self.mean
        mean = torch.einsum("jab,ab->j", self.forms, self.covariance) + self.constant
        mean = mean + (self.forms @ self.mean + self.linear) @ self.mean
        colored = self.forms @ self.covariance
        covariance = 2 * torch.einsum("jab,kba->jk", colored, colored)
        return mean, covariance + gradient @ self.covariance @ gradient.mT

    def law(self) -> QuadraticLaw:
        root = torch.linalg.cholesky(self.covariance)
        weights, vectors = torch.linalg.eigh(root.mT @ self.forms @ root)
        gradient = (self.linear + 2 * self.forms @ self.mean) @ root
        linear = (gradient[:, None] @ vectors)[:, 0]
        constant = (self.forms @ self.mean + self.linear) @ self.mean + self.constant
        return QuadraticLaw(constant, weights, linear if bool(linear.any()) else None)


def close(actual: Tensor, expected: Tensor, *, size: float = 0.0) -> None:
    """To 1e-10 of the largest entry, or of the size of the terms that cancelled in it."""
    scale = max(expected.abs().amax().item(), size)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10 * scale)


def size(form: QKForm) -> float:
    return (form.query.norm() * form.key.norm()).item() / form.temperature


@given(case=EVERYTHING)
def test_score_moments_are_those_of_the_dense_gaussian(case: Case) -> None:
    form, process = case.draw()
    mean, covariance = Dense.of(form, process).scores().moments()
    close(score_moments(form, process)[0], mean)
    close(score_moments(form, process)[1], covariance.diagonal(), size=1e-2 * size(form) ** 2)


@given(case=EVERYTHING)
def test_logit_moments_are_those_of_the_dense_gaussian(case: Case) -> None:
    """Up to what is equal for all keys, which no softmax sees: a key bias that does not turn."""
    form, process = case.draw()
    dense_mean, dense_covariance = Dense.of(form, process).moments()
    mean, covariance = logit_moments(form, process)
    center = torch.eye(case.tokens, dtype=torch.float64) - 1 / case.tokens
    scale = dense_covariance.abs().amax().item() + size(form) ** 2
    torch.testing.assert_close(
        center @ covariance @ center, center @ dense_covariance @ center, rtol=0, atol=1e-10 * scale
    )
    close(mean - mean.mean(), dense_mean - dense_mean.mean(), size=size(form))
    if form.key_bias is None or form.rotary is not None:
        close(mean, dense_mean, size=size(form))
        close(covariance, dense_covariance, size=size(form) ** 2)


@given(case=EVERYTHING)
def test_scores_are_the_centered_logits_over_the_tokens(case: Case) -> None:
    form, process = case.draw()
    logit_mean, logit_covariance = logit_moments(form, process)
    gamma = torch.eye(case.tokens, dtype=torch.float64) / case.tokens - 1 / case.tokens**2
    mean, variance = score_moments(form, process)
    close(mean, 1 / case.tokens + gamma @ logit_mean)
    expected = (gamma @ logit_covariance @ gamma.mT).diagonal()
    close(variance, expected, size=logit_covariance.abs().amax().item())


@settings(max_examples=60)
@given(case=FULL_RANK)
def test_the_exact_rho_is_that_of_the_dense_quadratic_form(case: Case) -> None:
    """With any kernel, means, biases and rotations."""
    form, process = case.draw()
    expected = Dense.of(form, process).scores().law().between(0.0, 1.0)
    close(propagation(form, process).rho, expected)


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("turning", [0, 2])
@pytest.mark.parametrize("has_mean", [False, True])
def test_the_exact_rho_of_rank_deficient_factors_is_that_of_the_dense_quadratic_form(
    rank: int, turning: int, has_mean: bool
) -> None:
    """Directions of the head that carry nothing, as after pruning, do no harm."""
    for seed in range(10):
        case = Case(head=8, model=16, tokens=3, seed=seed, turning=turning, has_mean=has_mean)
        form, process = replace(case, has_query_bias=has_mean).draw()
        thin, _ = replace(case, head=rank, seed=seed + 1).draw()
        query, key = (
            part[:, :rank] @ other
            for part, other in ((form.query, thin.query), (form.key, thin.key))
        )
        form = replace(form, query=query / 4, key=key / 4)
        expected = Dense.of(form, process).scores().law().between(0.0, 1.0)
        close(propagation(form, process).rho, expected)


@pytest.mark.parametrize("seed", range(60, 68))
@pytest.mark.parametrize("has_mean", [False, True])
@pytest.mark.parametrize("has_query_bias", [False, True])
def test_the_exact_rho_of_a_one_dimensional_head_is_an_integral_over_its_query(
    seed: int, has_mean: bool, has_query_bias: bool
) -> None:
    """Given the query, the score is normal: no law of quadratic forms, a different method."""
    tokens, model = 4, 2
    form, process = Case(
        head=1,
        model=model,
        tokens=tokens,
        seed=seed,
        has_covariance=seed % 2 == 0,
        has_mean=has_mean,
        has_query_bias=has_query_bias,
        has_distance_bias=seed % 3 == 1,
    ).draw()
    mean = torch.zeros(tokens, model) if process.mean is None else process.mean
    sigma = torch.eye(model) if process.covariance is None else process.covariance
    query, key = form.query[0], form.key[0]
    bias = 0.0 if form.query_bias is None else form.query_bias.item()
    gamma = torch.eye(tokens, dtype=torch.float64) / tokens - 1 / tokens**2
    ask = (mean.double()[-1] @ query).item() + bias
    ask_variance = (process.kernel[-1, -1] * (query @ sigma.double() @ query)).item()
    see = (gamma @ mean.double() @ key).numpy()
    see_variance = (gamma @ process.kernel @ gamma.mT).diagonal() * (key @ sigma.double() @ key)
    shared = (gamma @ process.kernel[:, -1] * (key @ sigma.double() @ query)).numpy()
    slope = shared / ask_variance
    rest = np.sqrt(see_variance.numpy() - shared * slope)
    base = np.full(tokens, 1 / tokens)
    if form.distance_bias is not None:
        base += (gamma @ form.distance_bias[:tokens].flip(0)).numpy()
    width = 14 * math.sqrt(ask_variance)

    def density(value: np.ndarray, i: np.ndarray) -> np.ndarray:
        """Of the query, times P(0 ≤ base + b·query/λ ≤ 1 | query)."""
        center = base[i] + (see[i] + slope[i] * (value - ask)) * value / form.temperature
        spread = rest[i] * np.abs(value) / form.temperature + 1e-300
        inside = stats.norm.cdf((1 - center) / spread) - stats.norm.cdf(-center / spread)
        return stats.norm.pdf(value, ask, math.sqrt(ask_variance)) * inside

    ends = np.unique([*np.linspace(ask - width, ask + width, 41), 0.0])  # a kink at zero
    index = np.arange(tokens)
    parts = integrate.tanhsinh(
        density, ends[:-1, None], ends[1:, None], args=(index,), atol=1e-14, rtol=1e-13
    )
    assert (parts.error < 1e-12).all()
    expected = torch.from_numpy(parts.integral.sum(0))
    torch.testing.assert_close(propagation(form, process).rho, expected, rtol=0, atol=1e-10)


@settings(max_examples=25)
@given(case=CENTRAL)
def test_queries_and_keys_may_change_places(case: Case) -> None:
    """Y has the same law under W and Wᵀ, whatever the kernel."""
    form, process = case.draw()
    swapped = replace(form, query=form.key, key=form.query)
    close(propagation(swapped, process).rho, propagation(form, process).rho)
    for swapped_moment, moment in zip(
        score_moments(swapped, process), score_moments(form, process), strict=True
    ):
        close(swapped_moment, moment)


@settings(max_examples=25)
@given(case=st.builds(Case, **SIZES))
def test_reflecting_the_walk_changes_the_sign_of_the_form(case: Case) -> None:
    form, other = case.draw()
    walk = TokenProcess.random_walk(case.tokens, covariance=other.covariance)
    opposite = replace(form, query=-form.query)
    forward, backward = propagation(form, walk).rho, propagation(opposite, walk).rho
    close(backward.flip(-1), forward)


def test_only_the_walk_is_its_own_reflection() -> None:
    form, _ = Case(head=2, model=3, tokens=5, seed=0).draw()
    stationary = TokenProcess.autoregressive(5, 0.5)
    opposite = replace(form, query=-form.query)
    forward, backward = propagation(form, stationary).rho, propagation(opposite, stationary).rho
    assert (backward.flip(-1) - forward).abs().amax() > 1e-3


@settings(max_examples=25)
@given(case=FULL_RANK)
def test_the_bases_of_the_tokens_and_of_the_head_do_not_matter(case: Case) -> None:
    form, process = case.draw()
    generator = torch.Generator().manual_seed(case.seed + 1)
    shape = (case.model, case.model)
    basis = torch.linalg.qr(torch.randn(shape, generator=generator, dtype=torch.float64)).Q
    turned = replace(form, query=form.query @ basis, key=form.key @ basis)
    sigma, mean = process.covariance, process.mean
    there = TokenProcess(
        process.kernel,
        None if sigma is None else basis.mT @ sigma @ basis,
        None if mean is None else mean @ basis,
    )
    expected = propagation(form, process).rho
    close(propagation(turned, there).rho, expected)
    if form.rotary is None:
        shape = (case.head, case.head)
        mixing = torch.randn(shape, generator=generator, dtype=torch.float64)
        mixing = torch.linalg.qr(mixing).Q * torch.linspace(1, 2, case.head, dtype=torch.float64)
        inverse = torch.linalg.inv(mixing).mT
        bias = form.query_bias
        mixed = replace(
            form,
            query=mixing @ form.query,
            key=inverse @ form.key,
            query_bias=None if bias is None else mixing @ bias,
            key_bias=None,
        )
        close(propagation(mixed, process).rho, expected)


@settings(max_examples=20)
@given(case=st.builds(Case, **SIZES))
def test_the_shortcut_of_symmetric_forms_is_the_general_law(case: Case) -> None:
    form, process = case.draw()
    matrix = form.matrix() + form.matrix().mT
    symmetric = QKForm.from_matrix(matrix, temperature=2.0)
    assert symmetric.is_symmetric
    general = replace(symmetric, is_symmetric=False)
    expected = propagation(general, process).rho
    close(propagation(symmetric, process).rho, expected)
    values, vectors = torch.linalg.eigh(matrix)
    factored = QKForm(vectors.mT, values[:, None] * vectors.mT, 2.0)
    close(propagation(factored, process).rho, expected)


def stack_of(case: Case) -> tuple[QKForm, list[QKForm], TokenProcess]:
    """Two rows of three heads that turn alike, and the same heads one by one."""
    heads = [replace(case, seed=case.seed + k).draw()[0] for k in range(6)]
    heads = [replace(head, rotary=heads[0].rotary) for head in heads]

    def stacked(name: str) -> Tensor | None:
        parts = [getattr(head, name) for head in heads]
        return None if parts[0] is None else torch.stack(parts).unflatten(0, (2, 3))

    biases = {name: stacked(name) for name in ("query_bias", "key_bias", "distance_bias")}
    query, key = (torch.stack([getattr(h, name) for h in heads]) for name in ("query", "key"))
    query, key = query.unflatten(0, (2, 3)), key.unflatten(0, (2, 3))
    stack = QKForm(query, key, heads[0].temperature, rotary=heads[0].rotary, **biases)
    tables = [head.relative for head in heads if head.relative is not None]
    if tables:
        every = [{} for _ in tables]
        for table, kept in zip(tables, every, strict=True):
            table.mapped(lambda name, value, kept=kept: kept.setdefault(name, value))
        joined = {
            name: torch.stack([kept[name] for kept in every]).unflatten(0, (2, 3))
            for name in every[0]
        }
        stack = replace(stack, relative=tables[0].mapped(lambda name, _: joined[name]))
    return stack, heads, case.draw()[1]


def compare(together: Tensor, parts: list[Tensor]) -> None:
    assert together.shape[:2] == (2, 3)
    close(together.flatten(0, 1), torch.stack(parts))


@settings(max_examples=20)
@given(case=EVERYTHING)
def test_the_moments_of_a_stack_are_those_of_its_heads(case: Case) -> None:
    stack, heads, process = stack_of(case)
    for function in (score_moments, logit_moments):
        for k in range(2):
            compare(function(stack, process)[k], [function(head, process)[k] for head in heads])
    for method in ("gaussian", "as_printed"):
        compare(
            propagation(stack, process, method=method).rho,
            [propagation(head, process, method=method).rho for head in heads],
        )


@settings(max_examples=10)
@given(case=FULL_RANK)
def test_the_laws_of_a_stack_are_those_of_its_heads(case: Case) -> None:
    """Also when the stack is worked off one head at a time."""
    stack, heads, process = stack_of(case)
    expected = [propagation(head, process).rho for head in heads]
    for at_once in (1, 8_000_000):
        with mock.patch("locater.core.score._AT_ONCE", at_once):
            compare(propagation(stack, process).rho, expected)


@given(case=EVERYTHING)
def test_what_is_equal_for_all_keys_cancels_in_the_score(case: Case) -> None:
    form, process = case.draw()
    mean, variance = score_moments(form, process)
    if form.rotary is None:
        bias = torch.linspace(-3, 3, case.head, dtype=torch.float64)
        for expected, moment in zip(
            (mean, variance), score_moments(replace(form, key_bias=bias), process), strict=True
        ):
            assert torch.equal(moment, expected)
    flat = torch.full((case.tokens,), 5.0, dtype=torch.float64)
    flat = flat if form.distance_bias is None else form.distance_bias + 5
    shifted = score_moments(replace(form, distance_bias=flat), process)
    close(shifted[0], mean, size=5.0)
    assert torch.equal(shifted[1], variance)


def test_a_key_bias_that_turns_matters() -> None:
    form, process = Case(head=2, model=3, tokens=4, seed=1, turning=1).draw()
    biased = replace(form, key_bias=torch.ones(2, dtype=torch.float64))
    gap = score_moments(biased, process)[1] - score_moments(form, process)[1]
    assert gap.abs().amax() > 1e-3


@settings(max_examples=20)
@given(case=EVERYTHING)
def test_a_rotation_by_nothing_is_no_rotation(case: Case) -> None:
    form, process = replace(case, head=case.head + 1, turning=0, has_key_bias=False).draw()
    still = replace(form, rotary=Rotary(torch.zeros(1, dtype=torch.float64)))
    for expected, moment in zip(
        score_moments(form, process), score_moments(still, process), strict=True
    ):
        close(moment, expected, size=1e-2 * size(form) ** 2)


@settings(max_examples=15)
@given(case=EVERYTHING)
def test_float32_weights_are_computed_with_in_float64(case: Case) -> None:
    form, process = case.draw()
    low = form.to(torch.float32)
    for expected, actual in (
        (propagation(low.to(torch.float64), process).rho, propagation(low, process).rho),
        (score_moments(low.to(torch.float64), process)[1], score_moments(low, process)[1]),
        (logit_moments(low.to(torch.float64), process)[1], logit_moments(low, process)[1]),
    ):
        assert actual.dtype == torch.float64 and torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("process", "match"),
    [
        (
            TokenProcess.random_walk(3, covariance=torch.eye(4)),
            r"the process has 4 dimensions, the form has 2.\nhint: give a covariance of the form's",
        ),
        (
            TokenProcess(torch.eye(3), None, torch.ones(3, 5)),
            r"the process has 5 dimensions, the form has 2.\nhint: give means of the form's model",
        ),
        (
            TokenProcess.random_walk(5),
            r"distance_bias covers 4 distances, the process has 5 tokens.\nhint: .*0 to tokens - 1",
        ),
    ],
)
def test_a_form_and_a_process_that_do_not_fit_are_refused(
    process: TokenProcess, match: str
) -> None:
    form = QKForm(torch.ones(1, 2), torch.ones(1, 2), 1.0, distance_bias=torch.zeros(4))
    for function in (score_moments, logit_moments, propagation):
        with pytest.raises(InputError, match=match):
            function(form, process)


# --- one weight, and sizes far from 1 ---------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("has_mean", [False, True])
def test_a_law_of_one_weight_is_that_of_a_squared_normal(seed: int, has_mean: bool) -> None:
    """Tokens that are all multiples of one number: Y = 1/T + w (z + shift)² + …, in closed form."""
    generator = torch.Generator().manual_seed(seed)
    query, key = torch.randn(2, 1, 1, generator=generator, dtype=torch.float64)
    size = torch.randn(6, 1, generator=generator, dtype=torch.float64)
    mean = torch.randn(6, 1, generator=generator, dtype=torch.float64) if has_mean else None
    process = TokenProcess.from_kernel(size @ size.mT, mean=mean)
    rho = propagation(QKForm(query, key, 1.0), process).rho
    center = torch.zeros(6, 1, dtype=torch.float64) if mean is None else mean
    for position in range(6):
        # Y(z) = 1/6 + c (a + b z)(e + f z), a quadratic whose set {0 <= Y <= 1} is intervals
        b, f = ((size - size.mean())[position] / 6).item(), size[-1].item()
        a, e = ((center - center.mean())[position] / 6).item(), center[-1].item()
        c = (query * key).item()
        polynomial = np.polynomial.Polynomial([1 / 6 + c * a * e, c * (a * f + b * e), c * b * f])
        edges = [root.real for level in (0, 1) for root in (polynomial - level).roots()
                 if abs(root.imag) < 1e-12]  # fmt: skip
        edges = sorted([-40.0, *edges, 40.0])
        expected = sum(
            stats.norm.cdf(high) - stats.norm.cdf(low)
            for low, high in pairwise(edges)
            if 0 <= polynomial((low + high) / 2) <= 1
        )
        assert rho[position].item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("turning", [0, 2])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("scale", [1e-160, 1e-12, 1e-6, 1e6, 1e40, 1e100, 1e150])
def test_rho_is_a_probability_at_every_size(scale: float, has_bias: bool, turning: int) -> None:
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        query, key = scale * torch.randn(2, 4, 6, generator=generator, dtype=torch.float64)
        bias = scale * torch.randn(4, generator=generator, dtype=torch.float64)
        root = torch.randn(8, 2, generator=generator, dtype=torch.float64)
        process = TokenProcess.from_kernel(root @ root.mT + 1e-12 * torch.eye(8).double())
        form = QKForm(
            query,
            key,
            2.0,
            query_bias=bias if has_bias else None,
            rotary=Rotary.from_base(2 * turning) if turning else None,
        )
        for method in ("exact", "gaussian", "saddlepoint"):
            rho = propagation(form, process, method=method).rho
            assert ((rho >= 0) & (rho <= 1)).all()
            if scale < 1e-9:  # the score is 1/T
                assert (rho == 1).all() or method == "saddlepoint"
            if scale > 1e9 and not has_bias:  # it is nearly never within [0, 1]
                assert (rho < 1e-6).all()


def test_a_score_beyond_all_numbers_is_refused() -> None:
    huge = 1e300 * torch.ones(2, 3, dtype=torch.float64)
    with pytest.raises(InputError, match=r"W_QK / temperature is beyond all numbers: factors of"):
        propagation(QKForm(huge, huge, 1.0), TokenProcess.random_walk(4))


@pytest.mark.parametrize("noise", [1e-300, -1e-300, 1e-17, -1e-17, 1e-14, -1e-14])
def test_a_weight_that_is_rounding_error_changes_nothing(noise: float) -> None:
    constant = torch.tensor([-0.2, 0.0, 1 / 6, 0.5, 1.0, 1.2]).double().repeat(2)
    weight = torch.tensor([0.3, -0.3]).double().repeat_interleave(6)[:, None]
    both = torch.cat((weight, torch.full_like(weight, noise)), -1)
    expected = QuadraticLaw(constant, weight).between(0.0, 1.0)
    found = QuadraticLaw(constant, both).between(0.0, 1.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


# --- rows of logits ---------------------------------------------------------------------------


@pytest.mark.statistical
@pytest.mark.parametrize("law", ["exact", "gaussian"])
@pytest.mark.parametrize("turning", [0, 2])
def test_drawn_rows_have_the_mean_and_covariance_of_the_logits(law: str, turning: int) -> None:
    case = Case(4, 5, 6, 3, turning, "half", True, True, True, True, True)
    form, process = case.draw()
    moments = HeadMoments.of(form, process)
    generator, draws = torch.Generator().manual_seed(0), 40_000
    if law == "exact":
        rows = LogitDraws.of(process, draws, generator).rows(moments, generator)
    else:
        rows = moments.gaussian_rows(draws, generator)
    sample = torch.cat(list(rows))[0]
    mean, covariance = moments.logits()
    limit = stats.norm.isf(1e-6 / (2 * 27))  # 1 false alarm in 10⁶: 6 means, 21 covariances
    error = (covariance.diagonal() / draws).sqrt()
    assert ((sample.mean(0) - mean).abs() < limit * error).all()
    spread = sample - sample.mean(0)
    products = spread[:, :, None] * spread[:, None]
    error = products.std(0) / math.sqrt(draws)
    assert ((products.mean(0) - covariance).abs() < limit * error).all()
    # the resolution: keys that forget the last token, or half of the spread, would be seen
    assert (error.diagonal() < 0.05 * covariance.diagonal()).all()


def test_two_samples_are_enough_and_heads_share_their_draws() -> None:
    form, process = Case(2, 3, 4, 1, 0, "half", False, False, False, False, False).draw()
    assert SampledHeads.of(form, torch.ones(2, 4, 3)).samples == 2
    twice = QKForm(*(part.expand(2, 2, 3) for part in (form.query, form.key)), form.temperature)
    generator = torch.Generator().manual_seed(0)
    draws = LogitDraws.of(process, 5, generator)
    rows = torch.cat(list(draws.rows(HeadMoments.of(twice, process), generator)))
    assert rows.shape == (2, 5, 4) and torch.equal(rows[0], rows[1])
