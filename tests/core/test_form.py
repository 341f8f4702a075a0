"""A form's statistics come from its thin factors; each is held against the dense matrix."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from locater import ConfigError, InputError, QKForm, Rotary, Spectrum, TokenProcess
from locater.core.form import Relative
from locater.core.spectrum import semidefinite_root
from locater.core.theory import logit_moments

HEADS, MODELS, SEEDS = st.integers(1, 5), st.integers(1, 7), st.integers(0, 2**31)
NAN, INF = math.nan, math.inf


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def draw(head: int, model: int, seed: int, *heads: int) -> tuple[QKForm, Tensor]:
    """Random factors and a random covariance, which is singular once in four times."""
    generator = torch.Generator().manual_seed(seed)
    form = QKForm(*normal(generator, 2, *heads, head, model), temperature=1.7)
    mixing = normal(generator, model, model)
    if seed % 4 == 0 and model > 1:
        mixing[0] = 0
    return form, mixing @ mixing.mT


def symmetric_root(covariance: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.mT


def norms(spectrum: Spectrum) -> Tensor:
    """‖W_Q Σ^½‖_F ‖W_K Σ^½‖_F, which bounds what may cancel."""
    query, key = (
        gram.diagonal(dim1=-2, dim2=-1).sum(-1) for gram in (spectrum.query_gram, spectrum.key_gram)
    )
    return (query * key).sqrt()


def close(actual: Tensor, expected: Tensor, scale: float | Tensor = 0.0) -> None:
    """To 1e-11 of the value, or of the size of the terms that cancelled in it."""
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12 * float(scale))


@given(head=HEADS, model=MODELS, seed=SEEDS, with_covariance=st.booleans())
def test_every_statistic_is_that_of_the_dense_matrix(
    head: int, model: int, seed: int, with_covariance: bool
) -> None:
    form, covariance = draw(head, model, seed)
    covariance = covariance if with_covariance else torch.eye(model, dtype=torch.float64)
    root = symmetric_root(covariance)
    dense = root @ form.query.mT @ form.key @ root
    spectrum = form.spectrum(covariance if with_covariance else None)
    size = (form.query @ root).norm() * (form.key @ root).norm()  # bounds what may cancel

    close(spectrum.trace, dense.trace(), size)
    close(spectrum.trace_of_square, (dense @ dense).trace(), size**2)
    close(spectrum.frobenius_squared, dense.square().sum(), size**2)
    assert form.rank == min(head, model)
    singular = torch.linalg.svdvals(dense)
    close(spectrum.singular_values, singular[: form.rank], size)
    close(spectrum.spectral_norm, singular[0], size)
    close(spectrum.stable_rank, dense.square().sum() / singular[0] ** 2)
    skew = (dense - dense.mT) / 2
    close(spectrum.asymmetry, skew.square().sum() / dense.square().sum(), 1.0)
    close(spectrum.xi, dense.trace() / dense.norm(), math.sqrt(model))
    close(spectrum.eta, dense.norm() / 1.7)
    close(spectrum.r, dense.trace() / 1.7, size)
    close(spectrum.dispersion, form.rank * dense.square().sum() - dense.trace() ** 2, 9 * size**2)


@given(head=HEADS, model=MODELS, seed=SEEDS, with_covariance=st.booleans())
def test_the_few_eigenvalues_have_every_power_sum_of_the_dense_matrix(
    head: int, model: int, seed: int, with_covariance: bool
) -> None:
    """By Newton's identities, tr(Wᵏ) for k up to the rank fixes all eigenvalues but the zeros."""
    form, covariance = draw(head, model, seed)
    covariance = covariance if with_covariance else torch.eye(model, dtype=torch.float64)
    dense = form.query.mT @ form.key @ covariance
    spectrum = form.spectrum(covariance if with_covariance else None)
    root = semidefinite_root(covariance)
    size = ((form.query @ root).norm() * (form.key @ root).norm()).item()
    assert spectrum.eigenvalues.shape == (form.rank,)
    for power in range(1, form.rank + 1):
        sums = spectrum.eigenvalues.pow(power).sum()
        expected = torch.linalg.matrix_power(dense, power).trace()
        assert abs(sums.item() - expected.item()) <= 1e-12 * power * size**power


@given(head=HEADS, model=MODELS, seed=SEEDS)
def test_variance_and_nonnormality_are_sums_over_eigenvalues(
    head: int, model: int, seed: int
) -> None:
    form, covariance = draw(head, model, seed)
    spectrum = form.spectrum(covariance)
    values = spectrum.eigenvalues
    size = norms(spectrum)
    mean = values.mean()
    close(spectrum.mean, mean.real, size)
    close(spectrum.variance, (values - mean).abs().square().mean(), size**2)
    gap = spectrum.frobenius_squared - values.abs().square().sum()
    close(spectrum.nonnormality, gap, size**2)
    assert gap >= -1e-12 * size**2  # Schur


@given(model=MODELS, seed=SEEDS, with_covariance=st.booleans())
def test_a_symmetric_form_is_normal_and_its_variance_is_eq_8(
    model: int, seed: int, with_covariance: bool
) -> None:
    form, covariance = draw(model, model, seed)
    matrix = form.matrix() + form.matrix().mT
    form = QKForm.from_matrix(matrix, temperature=2.0)
    assert form.is_symmetric
    spectrum = form.spectrum(covariance if with_covariance else None)
    size = spectrum.frobenius_squared
    close(spectrum.trace_of_square, size)
    close(spectrum.nonnormality, torch.zeros_like(size), size)
    close(spectrum.asymmetry, torch.zeros_like(size), 1.0)
    close(spectrum.xi, spectrum.xi_as_printed)
    close(spectrum.eta, spectrum.eta_as_printed)
    values = spectrum.eigenvalues.real
    close(spectrum.variance, values.var(correction=0), size)
    general = QKForm.from_matrix(matrix, temperature=2.0)
    object.__setattr__(general, "is_symmetric", False)
    close(general.spectrum().variance, form.spectrum().variance, size)


@pytest.mark.paper("Eq. 8")
def test_the_printed_variance_of_a_complex_spectrum_can_be_negative() -> None:
    rotation = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)  # eigenvalues ±i
    spectrum = QKForm.from_matrix(rotation, temperature=1.0).spectrum()
    assert spectrum.trace_of_square / 2 - spectrum.mean**2 == -1
    assert spectrum.variance.item() == pytest.approx(1.0)
    assert spectrum.asymmetry == 1
    assert spectrum.nonnormality.item() == pytest.approx(0.0, abs=1e-15)
    assert spectrum.xi == 0
    assert spectrum.xi_as_printed.isnan() and spectrum.eta_as_printed.isnan()


@settings(max_examples=15)
@given(head=HEADS, model=MODELS, seed=SEEDS, with_covariance=st.booleans())
def test_a_stack_of_heads_is_its_heads_one_by_one(
    head: int, model: int, seed: int, with_covariance: bool
) -> None:
    stack, covariance = draw(head, model, seed, 2, 3)
    given_covariance = covariance if with_covariance else None
    together = stack.spectrum(given_covariance)
    names = (
        *("trace", "trace_of_square", "frobenius_squared", "singular_values", "spectral_norm"),
        *("stable_rank", "mean", "variance", "dispersion", "asymmetry", "nonnormality"),
        *("xi", "eta", "r"),
    )
    for row in range(2):
        for column in range(3):
            query, key = stack.query[row, column], stack.key[row, column]
            alone = QKForm(query, key, stack.temperature).spectrum(given_covariance)
            size = norms(alone).square()
            for name in names:
                close(getattr(together, name)[row, column], getattr(alone, name), 1 + size)


@settings(max_examples=30)
@given(head=HEADS, model=MODELS, seed=SEEDS)
def test_xi_stays_within_the_root_of_the_rank(head: int, model: int, seed: int) -> None:
    form, covariance = draw(head, model, seed, 50)
    for spectrum in (form.spectrum(), form.spectrum(covariance)):
        size = norms(spectrum).square()
        bound = form.rank * spectrum.frobenius_squared
        assert (spectrum.trace.square() <= bound + 1e-12 * size).all()
        assert (spectrum.dispersion >= -1e-12 * size).all()


@given(
    dim=st.integers(2, 40),
    share=st.integers(-100, 100),
    eta=st.sampled_from([0.0, 1e-3, 0.3, 5.0]),
)
def test_a_spectrum_is_made_to_order_for_every_feasible_xi_and_eta(
    dim: int, share: int, eta: float
) -> None:
    xi = share / 100 * math.sqrt(dim)
    form = QKForm.from_xi_eta(xi, eta, dim=dim)
    assert form.temperature == math.sqrt(dim) and form.rank == dim and form.is_symmetric
    assert form.spectrum().eta.item() == pytest.approx(eta, rel=1e-12)
    assert form.spectrum().r.item() == pytest.approx(xi * eta, rel=1e-12, abs=1e-14)


def test_a_single_eigenvalue_has_xi_of_plus_or_minus_one() -> None:
    assert QKForm.from_xi_eta(-1.0, 0.5, dim=1).trace().item() == -0.5


def test_the_basis_of_a_spectrum_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(3)
    values = normal(generator, 2, 5)
    basis = torch.linalg.qr(normal(generator, 5, 5)).Q
    turned = QKForm.from_matrix(basis @ torch.diag_embed(values) @ basis.mT, temperature=1.0)
    form = QKForm.from_eigenvalues(values, temperature=1.0)
    for name in ("trace", "trace_of_square", "frobenius_squared", "variance", "singular_values"):
        close(getattr(form.spectrum(), name), getattr(turned.spectrum(), name), 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_spectra_are_taken_in_float64_whatever_the_weights_are_stored_in(
    dtype: torch.dtype,
) -> None:
    form, covariance = draw(2, 3, seed=1)
    low = form.to(dtype)
    assert low.query.dtype == low.trace().dtype == dtype
    for given_covariance in (None, covariance.float()):
        spectrum = low.spectrum(given_covariance)
        exact = low.to(torch.float64).spectrum(
            None if given_covariance is None else given_covariance.double()
        )
        assert spectrum.eigenvalues.dtype == torch.complex128
        for name in ("trace", "frobenius_squared", "variance", "spectral_norm"):
            assert getattr(spectrum, name).dtype == torch.float64
            found, truth = getattr(spectrum, name), getattr(exact, name)
            if dtype.itemsize < 4 and given_covariance is None:  # products are taken in float32
                size = exact.frobenius_squared.sqrt().item() ** (2 if name[0] in "fv" else 1)
                rounding = 4 * low.query.shape[-1] * torch.finfo(torch.float32).eps
                assert (found - truth).abs().max().item() <= rounding * size
            else:
                assert torch.equal(found, truth)


def test_moving_a_form_moves_all_of_it() -> None:
    form = QKForm(
        torch.ones(2, 2, 3),
        torch.ones(2, 2, 3),
        1.0,
        query_bias=torch.ones(2, 2),
        key_bias=torch.ones(2, 2),
        rotary=Rotary(torch.ones(1), "interleaved"),
        distance_bias=torch.ones(2, 4),
        relative=Relative(torch.ones(2, 3, 2), bias=torch.ones(2, 3), ahead=1),
    )
    moved = form.to(torch.float64)
    assert moved.relative is not None
    for table in (moved.relative.columns, moved.relative.bias):
        assert table is not None and table.dtype == torch.float64
    assert moved.rotary is not None and moved.rotary.layout == "interleaved"
    tensors = (moved.query, moved.key, moved.query_bias, moved.key_bias, moved.distance_bias)
    for tensor in (*tensors, moved.rotary.frequencies):
        assert tensor is not None and tensor.dtype == torch.float64
    assert form.to(device=torch.device("cpu")).query.dtype == torch.float32


@given(size=st.integers(1, 8), seed=SEEDS)
def test_a_root_times_its_transpose_is_the_covariance(size: int, seed: int) -> None:
    _, covariance = draw(1, size, seed)
    root = semidefinite_root(covariance)
    close(root @ root.mT, covariance, covariance.abs().amax())


SQUARE, THIN = torch.eye(3, dtype=torch.float64), torch.ones(2, 3, dtype=torch.float64)
BROKEN = torch.tensor([[1.0, NAN, 0.0], [0.0, 1.0, INF]])
FORM = QKForm(THIN, THIN, 1.0)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "message", "hint"),
    [
        (
            lambda: QKForm(THIN, THIN.mT, 1.0),
            "query is (2, 3) and key is (3, 2).",
            "repeat shared key heads (GQA) first",
        ),
        (lambda: QKForm(THIN[0], THIN[0], 1.0), "query is (3,) and key", "(*heads, head, model)"),
        (lambda: QKForm(BROKEN, THIN, 1.0), "query holds NaN or infinite", "earlier checkpoint"),
        (lambda: QKForm(THIN, BROKEN, 1.0), "key holds NaN or infinite", "earlier checkpoint"),
        (
            lambda: QKForm(THIN, THIN, 1.0, query_bias=torch.tensor([0.0, NAN])),
            "query_bias holds NaN",
            "earlier checkpoint",
        ),
        (
            lambda: QKForm(THIN, THIN, 1.0, key_bias=torch.ones(3)),
            "key_bias is (3,), the factors ask for (2,).",
            "one bias vector of the head dimension",
        ),
        (
            lambda: QKForm(THIN, THIN, 1.0, query_bias=torch.ones(1, 2)),
            "query_bias is (1, 2), the factors ask for (2,).",
            "for every head",
        ),
        (
            lambda: QKForm(THIN, THIN, 1.0, distance_bias=torch.ones(2, 5)),
            "distance_bias is (2, 5) for heads ().",
            "entry k is added to the key k tokens back",
        ),
        (
            lambda: QKForm(THIN, THIN, 1.0, distance_bias=torch.tensor([-INF])),
            "distance_bias holds NaN or infinite",
            "earlier checkpoint",
        ),
        (
            lambda: QKForm(THIN, THIN, 1.0, rotary=Rotary(torch.ones(2))),
            "2 rotary frequencies turn more than 2 dimensions.",
            "turns a pair of dimensions",
        ),
        (
            lambda: QKForm.from_matrix(THIN, temperature=1.0),
            "matrix is (2, 3), not square.",
            "QKForm(query, key)",
        ),
        (
            lambda: QKForm.from_matrix(THIN[0], temperature=1.0),
            "matrix is (3,), not square.",
            "QKForm(query, key)",
        ),
        (
            lambda: QKForm.from_matrix(SQUARE * NAN, temperature=1.0),
            "key holds NaN",
            "earlier checkpoint",
        ),
        (lambda: FORM.spectrum(torch.eye(4)), "covariance is (4, 4), expected 3 x 3.", "square"),
        (lambda: FORM.spectrum(THIN), "covariance is (2, 3), expected 3 x 3.", "square"),
        (lambda: FORM.spectrum(-SQUARE), "is not positive definite: its smallest", "clip them"),
        (lambda: FORM.spectrum(0 * SQUARE), "covariance is zero.", "positive diagonal"),
        (lambda: FORM.spectrum(NAN * SQUARE), "covariance holds NaN", "was made from"),
        (
            lambda: FORM.spectrum(SQUARE + torch.ones(3, 3).triu(1)),
            "covariance is not symmetric.",
            "(C + C.mT) / 2",
        ),
        (
            lambda: FORM.spectrum(SQUARE - 0.6 * (1 - SQUARE)),
            "covariance is not positive definite: its smallest eigenvalue is -0.2.",
            "estimate it from more data",
        ),
    ],
)
def test_weights_and_covariances_that_cannot_be_used_are_named(
    call: Callable[[], object], message: str, hint: str
) -> None:
    with pytest.raises(InputError, match=f"{re.escape(message)}(.|\n)*hint: .*{re.escape(hint)}"):
        call()


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN, INF])
def test_a_temperature_is_positive_and_finite(temperature: float) -> None:
    with pytest.raises(ConfigError, match=r"got .*\nhint: the usual choice is the square root"):
        QKForm(THIN, THIN, temperature)
    with pytest.raises(ConfigError, match="temperature must be positive and finite"):
        QKForm.from_matrix(SQUARE, temperature=temperature)


@pytest.mark.parametrize(
    ("xi", "eta", "dim", "match"),
    [
        (3.0, 1.0, 8, r"no spectrum of 8 eigenvalues has xi = 3, eta = 1.\nhint: Eq. 5 asks"),
        (-3.0, 1.0, 8, r"has xi = -3(.|\n)*\|xi\| <= sqrt\(dim\)"),
        (1.0, -0.1, 8, r"eta = -0.1.\nhint: .*eta must not be negative"),
        (0.0, 1.0, 0, r"no spectrum of 0 eigenvalues"),
        (0.5, 1.0, 1, r"one eigenvalue has xi = 1 or -1, not 0.5.\nhint: use a larger dim"),
    ],
)
def test_no_spectrum_has_an_infeasible_xi_or_eta(
    xi: float, eta: float, dim: int, match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        QKForm.from_xi_eta(xi, eta, dim=dim)


# --- forms as an algebra ----------------------------------------------------------------------


def dressed(seed: int, *heads: int) -> QKForm:
    """A stack of heads with everything that a form can carry."""
    generator = torch.Generator().manual_seed(seed)
    return QKForm(
        *normal(generator, 2, *heads, 4, 5),
        temperature=1.7,
        query_bias=normal(generator, *heads, 4),
        key_bias=normal(generator, *heads, 4),
        distance_bias=normal(generator, *heads, 6),
        rotary=Rotary.from_base(4),
        relative=Relative(
            normal(generator, *heads, 5, 4),
            normal(generator, *heads, 3, 4),
            normal(generator, *heads, 3, 5),
            grid=(2, 3),
        ),
    )


@pytest.mark.parametrize("index", [0, -1, slice(1, 3), [2, 0], (1, 0), (slice(None), 1)])
def test_some_heads_of_a_stack_are_those_heads(index: object) -> None:
    form = dressed(0, 3, 2)
    some = form[index]
    assert some.rotary is form.rotary
    torch.testing.assert_close(some.matrix(), form.matrix()[index])  # type: ignore[index]
    for name in ("query_bias", "key_bias", "distance_bias"):
        assert torch.equal(getattr(some, name), getattr(form, name)[index])
    assert some.relative is not None and form.relative is not None
    for name in ("columns", "rows", "bias"):
        assert torch.equal(getattr(some.relative, name), getattr(form.relative, name)[index])


def test_places_on_a_grid_are_rows_and_columns_apart() -> None:
    relative = dressed(0).relative
    assert relative is not None and relative.rows is not None and relative.places == 6
    assert relative.columns is not None and relative.bias is not None
    queries = torch.arange(6)
    keys, bias = relative.keys_at(queries, 6), relative.bias_at(queries, 6)
    assert keys is not None and bias is not None
    for i in range(6):
        for j in range(6):
            down, across = i // 3 - j // 3, i % 3 - j % 3
            joined = relative.rows[down + 1] + relative.columns[across + 2]
            assert torch.equal(keys[i, j], joined)
            assert bias[i, j] == relative.bias[down + 1, across + 2]
    with pytest.raises(InputError, match=r"cannot place 7 tokens.\nhint: ask for 6 tokens at most"):
        relative.keys_at(queries, 7)


@pytest.mark.parametrize("exponent", [-200, 150])
def test_a_balanced_form_keeps_what_places_add(exponent: int) -> None:
    form = replace(dressed(1), distance_bias=None, rotary=None)
    assert form.relative is not None
    power = torch.tensor(exponent)
    tables = form.relative.mapped(
        lambda name, table: table if name == "bias" else torch.ldexp(table, power)
    )
    far = replace(
        form,
        query=torch.ldexp(form.query, power),
        key=torch.ldexp(form.key, power),
        query_bias=None,
        key_bias=None,
        relative=tables,
        temperature=math.ldexp(form.temperature, 2 * exponent),
    )
    process = TokenProcess.random_walk(6)
    near = replace(form, query_bias=None, key_bias=None)
    found, expected = (logit_moments(one, process) for one in (far.balanced(), near))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@given(head=HEADS, other=HEADS, model=MODELS, seed=SEEDS)
def test_a_difference_is_that_of_the_dense_matrices(
    head: int, other: int, model: int, seed: int
) -> None:
    first, second = draw(head, model, seed, 2)[0], draw(other, model, seed + 1, 2)[0]
    difference = first - second
    dense = first.matrix() - second.matrix()
    close(difference.matrix(), dense, dense.abs().amax())
    assert difference.query.shape[-2] == head + other
    close(difference.frobenius_squared(), dense.square().sum((-2, -1)), dense.norm() ** 2)


def test_a_small_difference_keeps_its_digits() -> None:
    form = draw(3, 6, 0)[0]
    query, key = form.query, form.key
    near = QKForm(query + 1e-9 * query.flip(0), key - 1e-9 * key, form.temperature)
    first_order = 1e-9 * (query.flip(0).mT @ key - query.mT @ key)
    change = (near - form).frobenius_squared().sqrt().item()
    assert change == pytest.approx(first_order.norm().item(), rel=1e-7)
    assert (form - form).frobenius_squared().item() == 0


@given(head=HEADS, model=MODELS, seed=SEEDS)
def test_the_transpose_and_what_it_says_of_asymmetry(head: int, model: int, seed: int) -> None:
    form = draw(head, model, seed)[0]
    assert torch.equal(form.T.matrix(), form.key.mT @ form.query)
    size = form.frobenius_squared()
    gap = (form - form.T).frobenius_squared() / (4 * size)
    torch.testing.assert_close(form.spectrum().asymmetry, gap, rtol=1e-9, atol=1e-12)


def test_heads_and_differences_that_do_not_exist_are_refused() -> None:
    form = dressed(0, 3)
    for index in (3, (0, 0), 1.5):
        with pytest.raises(InputError, match=r"a stack of heads \(3,\) has no .*\nhint: index"):
            form[index]
    with pytest.raises(InputError, match=r"5 dimensions with temperature 1.7 less one on 4 with"):
        form - QKForm(torch.ones(3, 4, 4), torch.ones(3, 4, 4), 1.7)
    with pytest.raises(InputError, match=r"temperature 1.7 less one on 5 with 2.\nhint: give both"):
        form - QKForm(form.query, form.key, 2.0)


# --- sizes ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("query", "message"),
    [
        (torch.zeros(0, 2, 3), r"query and key are \(0, 2, 3\): they hold no numbers"),
        (torch.zeros(2, 0, 3), r"query and key are \(2, 0, 3\)"),
        (torch.zeros(2, 3, 0), r"query and key are \(2, 3, 0\)"),
        (torch.ones(2, 3) * 1j, r"query holds torch.complex64, not floating-point"),
        (torch.ones(2, 3, dtype=torch.int8), r"query holds torch.int8, not floating-point"),
    ],
)
def test_weights_that_are_no_weights_are_refused(query: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        QKForm(query, query, 1.0)


def test_a_spectrum_beyond_all_numbers_is_refused() -> None:
    huge = 1e75 * torch.ones(2, 3, dtype=torch.float64)
    with pytest.raises(InputError, match=r"factors of 2e\+75 and 2e\+75 have a W_QK whose square"):
        QKForm(huge, huge, 1.0).spectrum()
    fine = QKForm(huge / 1e6, huge / 1e6, 1.0).spectrum()
    assert fine.frobenius_squared.isfinite() and fine.stable_rank.item() == pytest.approx(1.0)


@pytest.mark.parametrize("exponent", [-500, -200, 150, 480])
def test_a_balanced_form_has_the_same_logits_to_the_last_bit(exponent: int) -> None:
    form = dressed(1, 2)
    far = QKForm(
        *(torch.ldexp(part, torch.tensor(exponent)) for part in (form.query, form.key)),
        math.ldexp(form.temperature, min(2 * exponent, 1000)),
    )
    near = far.balanced()
    assert near.query.abs().amax() < 1 and near.key.abs().amax() < 1
    tokens = normal(torch.Generator().manual_seed(0), 2, 5)
    ours = (near.query @ tokens[0] * (near.key @ tokens[1])).sum(-1) / near.temperature
    theirs = (form.query @ tokens[0] * (form.key @ tokens[1])).sum(-1) / form.temperature
    if 2 * exponent <= 1000:
        assert torch.equal(ours, theirs)
    assert form.balanced() is form


def test_gains_multiply_the_tokens_first_and_short_weights_lose_little() -> None:
    """Against float64 throughout, on heads whose singular values span five orders."""
    generator = torch.Generator().manual_seed(0)
    decay = torch.logspace(0, -5, 16, dtype=torch.float64)[:, None]
    query, key = (decay * torch.randn(6, 16, 200, generator=generator).double() for _ in range(2))
    key = key[::3].repeat_interleave(3, 0)
    gain = torch.rand(200, generator=generator).double() + 0.5
    low = QKForm(query.bfloat16(), key.bfloat16(), temperature=4.0)
    exact = QKForm(low.query.double() * gain, low.key.double() * gain, temperature=4.0).spectrum()
    found = low.spectrum(share=3, gain=gain)
    dense = torch.linalg.svdvals(exact.query.mT @ exact.key)[:, :16]
    torch.testing.assert_close(
        exact.singular_values, dense, rtol=1e-6, atol=1e-8 * dense.amax().item()
    )
    torch.testing.assert_close(
        found.singular_values, dense, rtol=0, atol=2e-6 * dense.amax().item()
    )
    size = exact.frobenius_squared
    for name, scale in (("trace", size.sqrt()), ("trace_of_square", size), ("eta", size.sqrt())):
        assert ((getattr(found, name) - getattr(exact, name)).abs() <= 2e-6 * scale).all()
