"""Bounds on entropy and norms: attained or never violated; as printed, violated."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from locater import (
    ConfigError,
    InputError,
    QKForm,
    attention_entropy,
    collapse_bounds,
    entropy_lower_bound,
)

TOKENS, SEEDS = st.integers(2, 80), st.integers(0, 2**31)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# --- entropy ---------------------------------------------------------------------------------


@pytest.mark.paper("Eq. 9")
@pytest.mark.parametrize(
    ("tokens", "norm", "bound", "printed"),
    [
        (64, 0.5, 4.15616753931414, 4.31020713517185),
        (64, 1.0, 4.14369866442556, 4.7820269478258),
        (64, 2.0, 4.04108739311712, 7.14200190737471),
        (64, 4.0, 2.87854704968869, 16.7253856405191),
        (64, 8.0, 0.176499279933798, 9.20174764283896),
        (2, 1.0, 0.494199916978017, 1.25030982230926),
        (40, 3.0, 3.03311961935211, 10.0463871643179),
        (512, 5.0, 5.3617353791654, 48.7166135440109),
    ],
)
def test_the_entropy_bound_meets_its_reference_vectors(
    tokens: int, norm: float, bound: float, printed: float
) -> None:
    assert entropy_lower_bound(norm, tokens).item() == pytest.approx(bound, rel=1e-12)
    as_printed = entropy_lower_bound(norm, tokens, variant="as_printed").item()
    assert as_printed == pytest.approx(printed, rel=1e-12)
    assert bound < math.log(tokens) < printed


@pytest.mark.paper("Eq. 9")
@given(tokens=TOKENS, tenth=st.integers(0, 200))
def test_the_entropy_bound_is_attained_by_one_raised_logit(tokens: int, tenth: int) -> None:
    norm = tenth / 10
    logits = torch.full((tokens,), -norm / math.sqrt(tokens * (tokens - 1)), dtype=torch.float64)
    logits[0] = norm * math.sqrt((tokens - 1) / tokens)
    assert logits.norm().item() == pytest.approx(norm)
    attained = attention_entropy(torch.softmax(logits, -1)).item()
    bound = entropy_lower_bound(norm, tokens).item()
    assert bound == pytest.approx(attained, rel=1e-9, abs=1e-13)


@pytest.mark.paper("Eq. 9")
@pytest.mark.parametrize(("variant", "holds"), [("exact", True), ("as_printed", False)])
@given(tokens=TOKENS, seed=SEEDS)
def test_no_logits_have_less_entropy_than_the_bound(
    variant: str, holds: bool, tokens: int, seed: int
) -> None:
    """Among them sparse ones, which come close; as printed, weak logits break it every time."""
    generator = torch.Generator().manual_seed(seed)
    logits = normal(generator, 400, tokens)
    logits[::2] = logits[::2] ** 5
    logits *= torch.logspace(-2, 2, 400, dtype=torch.float64)[:, None]
    entropy = attention_entropy(torch.softmax(logits, -1))
    norm = (logits - logits.mean(-1, keepdim=True)).norm(dim=-1)  # the tightest choice
    for size in (norm, logits.norm(dim=-1)):
        bound = entropy_lower_bound(size, tokens, variant=variant)
        assert bool((entropy >= bound - 1e-12).all()) == holds


@given(tokens=st.integers(2, 2000))
def test_the_entropy_bound_falls_from_the_logarithm_of_the_tokens_to_zero(tokens: int) -> None:
    norm = torch.linspace(0, 30, 500, dtype=torch.float64)
    bound = entropy_lower_bound(norm, tokens)
    assert (bound.diff() < 0).all() and (bound > 0).all()
    assert bound[0].item() == pytest.approx(math.log(tokens), rel=1e-14)
    extreme = torch.tensor([800.0, 1e10, 1e308, math.inf], dtype=torch.float64)
    assert (entropy_lower_bound(extreme, tokens) == 0).all()


def test_the_printed_bound_has_a_peak_that_the_true_one_has_not() -> None:
    norm = torch.linspace(0, 12, 2401, dtype=torch.float64)
    printed = entropy_lower_bound(norm, 64, variant="as_printed")
    assert printed.amax().item() == pytest.approx(18.72, abs=5e-3)
    assert norm[printed.argmax()].item() == pytest.approx(4.94, abs=5e-3)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            lambda: entropy_lower_bound(1.0, 1),
            InputError,
            r"no bound for 1 tokens(.|\n)*at least 2",
        ),
        (
            lambda: entropy_lower_bound(-0.5, 4),
            InputError,
            r"norms down to -0.5(.|\n)*zero or more",
        ),
        (lambda: entropy_lower_bound(math.nan, 4), InputError, r"norms down to nan(.|\n)*or more"),
        (
            lambda: entropy_lower_bound(1.0, 4, variant="tight"),
            ConfigError,
            r"unknown variant 'tight'.\nhint: choose one of: exact, as_printed.",
        ),
        (
            lambda: collapse_bounds(QKForm(torch.ones(1, 2), torch.ones(1, 2), 1.0), variant="x"),
            ConfigError,
            r"unknown variant 'x'.\nhint: choose one of: valid, as_printed.",
        ),
        (
            lambda: collapse_bounds(QKForm(torch.ones(1, 2), torch.ones(1, 2), 1.0), -torch.eye(2)),
            InputError,
            r"covariance is not positive definite(.|\n)*hint",
        ),
    ],
)
def test_bounds_that_do_not_exist_are_refused(
    call: Callable[[], object], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        call()


# --- norms -----------------------------------------------------------------------------------

COUNT = 3000


def forms(kind: str, generator: torch.Generator) -> QKForm:
    if kind == "factored":
        return QKForm(*normal(generator, 2, COUNT, 2, 5), temperature=1.0)
    matrices = normal(generator, COUNT, 5, 5)
    # some near a multiple of the identity, where the bounds are nearly attained
    matrices[::3] = 0.01 * matrices[::3] + torch.eye(5, dtype=torch.float64)
    if kind == "symmetric":
        return QKForm.from_matrix(matrices + matrices.mT, temperature=1.0)
    if kind == "semidefinite":
        return QKForm.from_matrix(matrices @ matrices.mT, temperature=1.0)
    return QKForm.from_matrix(matrices, temperature=1.0)


KINDS = ["symmetric", "semidefinite", "asymmetric", "factored"]


@pytest.mark.paper("Eqs. 5, 7, 8, 10")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("anisotropic", [False, True])
def test_the_valid_bounds_hold_for_thousands_of_forms(kind: str, anisotropic: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    form, mixing = forms(kind, generator), normal(generator, 5, 5)
    bounds = collapse_bounds(form, mixing @ mixing.mT if anisotropic else None)
    assert {bound.equation for bound in bounds} == {"5", "7a", "7b", "7c", "7d", "8", "10a", "10b"}
    for bound in bounds:
        assert bound.lower.shape == bound.upper.shape == bound.holds.shape == (COUNT,)
        assert bound.holds.all(), bound.statement


@pytest.mark.paper("Eqs. 5, 7, 8, 10")
@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        ("symmetric", {"7a", "7c", "10b"}),
        ("semidefinite", {"7a", "7c"}),
        ("asymmetric", {"5", "7a", "7c", "8", "10a", "10b"}),
    ],
)
def test_the_printed_bounds_fail_where_the_errata_say(kind: str, broken: set[str]) -> None:
    """And hold elsewhere: Eqs. 5, 8 and the first half of 10 are right for symmetric forms."""
    form = forms(kind, torch.Generator().manual_seed(0))
    bounds = collapse_bounds(form, variant="as_printed")
    assert {bound.equation for bound in bounds if not bound.holds.all()} == broken


@pytest.mark.paper("Eq. 7")
def test_the_identity_decides_the_printed_chain_of_norms() -> None:
    identity = QKForm.from_matrix(torch.eye(128, dtype=torch.float64), temperature=1.0)
    printed = {b.equation: b for b in collapse_bounds(identity, variant="as_printed")}
    assert printed["7a"].lower.item() == pytest.approx(math.sqrt(128))
    assert printed["7a"].upper.item() == pytest.approx(1.0)
    assert printed["7c"].lower.item() == pytest.approx(math.sqrt(128))
    assert printed["7c"].upper.item() == pytest.approx(1.0)


def test_both_sides_of_the_bounds_are_what_their_statements_say() -> None:
    generator = torch.Generator().manual_seed(1)
    form, mixing = QKForm(*normal(generator, 2, 2, 3), temperature=1.0), normal(generator, 3, 3)
    sigma = mixing @ mixing.mT
    values, vectors = torch.linalg.eigh(sigma)
    root = (vectors * values.sqrt()) @ vectors.mT
    matrix, trace = form.matrix(), (form.matrix() @ sigma).trace().abs()
    similar = (root @ matrix @ root).norm()
    spectral = torch.linalg.matrix_norm(matrix, 2)
    expected = {
        "5": (trace, math.sqrt(2) * similar),
        "7a": (trace / (math.sqrt(3) * values[-1]), trace / sigma.norm()),
        "7b": (trace / sigma.norm(), matrix.norm()),
        "7c": (matrix.norm(), matrix.abs().sum()),
        "7d": (trace / sigma.trace(), spectral),
        "8": (trace**2, 2 * similar**2),
        "10a": (spectral, matrix.norm()),
        "10b": (matrix.norm(), similar / values[0]),
    }
    for bound in collapse_bounds(form, sigma):
        lower, upper = expected[bound.equation]
        torch.testing.assert_close(bound.lower, lower)
        torch.testing.assert_close(bound.upper, upper)
    symmetric = QKForm.from_matrix(matrix + matrix.mT, temperature=1.0)
    dense, both = symmetric.matrix(), (symmetric.matrix() @ sigma)
    square = (both @ both).trace()
    printed = {
        "5": (both.trace().abs(), (3 * square).sqrt()),
        "7a": (
            both.trace().abs() / (math.sqrt(3) * values[-1]),
            torch.linalg.matrix_norm(dense, 2),
        ),
        "7b": (torch.linalg.matrix_norm(dense, 2), dense.norm()),
        "7c": (dense.norm(), torch.linalg.matrix_norm(dense, 1)),
        "8": (both.trace() ** 2, 3 * square),
        "10a": (dense.trace().abs(), torch.linalg.inv(sigma).norm() * square.sqrt()),
        "10b": (torch.linalg.matrix_norm(dense, 2), dense.trace().abs()),
    }
    for bound in collapse_bounds(symmetric, sigma, variant="as_printed"):
        lower, upper = printed[bound.equation]
        torch.testing.assert_close(bound.lower, lower)
        torch.testing.assert_close(bound.upper, upper)


@pytest.mark.parametrize("size", [1, 7, 15, 31])
def test_bounds_that_are_attained_still_hold(size: int) -> None:
    """A multiple of the identity turns Eqs. 5, 7, 8 and 10 into equalities, up to rounding."""
    scale = torch.linspace(0.01, 1, 50, dtype=torch.float64)
    form = QKForm.from_eigenvalues(scale[:, None].expand(50, size), temperature=1.0)
    for bound in collapse_bounds(form):
        assert bound.holds.all(), bound.statement


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0], [0.0, 0.0, 1.0], [1.0, 2.0, 3.0]])
def test_a_singular_covariance_makes_its_inverse_bound_empty_not_false(
    values: list[float],
) -> None:
    singular = torch.diag(torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64))
    form = QKForm.from_eigenvalues(torch.tensor(values, dtype=torch.float64), temperature=1.0)
    for bound in collapse_bounds(form, singular):
        assert bound.holds.all(), bound.statement
