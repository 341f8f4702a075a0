from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.test_sampled_heads import example_form, example_process

from locater import QKForm, TokenProcess, propagation, score_moments
from locater.core.diagnosis import diagnose


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), rotary=st.booleans(), means=st.booleans())
def test_the_parts_add_up_to_the_whole(seed: int, rotary: bool, means: bool) -> None:
    form, process = example_form(seed), example_process(seed + 1)
    form = form if rotary else replace(form, rotary=None)
    process = process if means else replace(process, mean=None)
    diagnosis = diagnose(form, process)
    mean, variance = score_moments(form, process)
    tokens = process.tokens
    torch.testing.assert_close(sum(diagnosis.mean_parts.values()), tokens * mean - 1)
    torch.testing.assert_close(sum(diagnosis.variance_parts.values()), tokens**2 * variance)
    torch.testing.assert_close(diagnosis.logit_mean, tokens * mean - 1)
    torch.testing.assert_close(diagnosis.rho, propagation(form, process, method="gaussian").rho)
    assert sorted(diagnosis.without) == sorted(
        ["spectrum", "covariance", "kernel", "biases", "distance", "weights"]
        + ["rotation"] * rotary
        + ["means"] * means
    )


def test_without_weights_and_biases_nothing_chooses() -> None:
    form, process = example_form(0), example_process(1)
    unbiased = replace(form, query_bias=None, distance_bias=None)
    alone = diagnose(unbiased, process).without["weights"]
    assert alone.logit_variance.abs().amax() == 0
    assert (alone.rho == 1).all()
    # a query bias still reads the keys: the loophole
    assert diagnose(form, process).without["weights"].logit_variance.amin() > 0


def test_a_flat_spectrum_keeps_size_and_keys() -> None:
    from locater.core.diagnosis import _flattened

    form = example_form(2)
    flat = _flattened(form)
    values = flat.spectrum().singular_values
    torch.testing.assert_close(values, values[:, :1].expand_as(values))
    torch.testing.assert_close(flat.frobenius_squared(), form.frobenius_squared())
    assert torch.equal(flat.key, form.key)
    left, _, right = torch.linalg.svd(form.matrix(), full_matrices=False)
    expected = left[..., :4] @ right[..., :4, :] * values[:, :1, None]
    torch.testing.assert_close(flat.matrix(), expected)


def test_a_neutral_ingredient_changes_nothing_and_a_leading_one_is_named() -> None:
    identity = torch.eye(4, dtype=torch.float64)
    form = QKForm(identity, identity, 2.0)
    diagnosis = diagnose(form, TokenProcess.random_walk(6, covariance=3 * identity))
    assert diagnosis.effect("covariance").item() == pytest.approx(0, abs=1e-12)
    assert diagnosis.effect("spectrum").item() == pytest.approx(0, abs=1e-12)
    assert diagnosis.leading == ["kernel"]
    (row,) = diagnosis.rows()
    assert sum(row["shares"].values()) == pytest.approx(1)
    assert row["leading"] == "kernel"
