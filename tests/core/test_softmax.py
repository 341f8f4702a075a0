"""The piecewise softmax, the event whose probability is ρ, and entropy."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from locater import InputError, attention_entropy, piecewise_softmax
from locater.core.theory import linearized_softmax, propagates

TOKENS, SEEDS = st.integers(2, 30), st.integers(0, 2**31)


@pytest.mark.paper("Section 2")
@given(tokens=TOKENS, seed=SEEDS)
def test_the_linearized_softmax_is_the_tangent_of_the_softmax_at_the_origin(
    tokens: int, seed: int
) -> None:
    origin = torch.zeros(tokens, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: torch.softmax(x, -1), origin)
    generator = torch.Generator().manual_seed(seed)
    logits = 10 * torch.randn(5, tokens, generator=generator, dtype=torch.float64)
    tangent = torch.softmax(origin, -1) + logits @ jacobian.mT
    torch.testing.assert_close(linearized_softmax(logits), tangent)
    ones = torch.ones(5, dtype=torch.float64)
    torch.testing.assert_close(linearized_softmax(logits).sum(-1), ones)


@pytest.mark.paper("Fig. 1")
@given(tokens=TOKENS, seed=SEEDS)
def test_the_piecewise_softmax_meets_the_softmax_near_the_origin_to_second_order(
    tokens: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    direction = torch.rand(tokens, generator=generator, dtype=torch.float64)
    for size in (1e-1, 1e-3, 1e-5):  # along a range of 1, the second derivative is at most 1
        gap = piecewise_softmax(size * direction) - torch.softmax(size * direction, -1)
        assert gap.abs().amax() <= size**2 / 2 + 1e-15


@given(tokens=TOKENS, seed=SEEDS)
def test_a_gate_is_open_exactly_where_the_piecewise_softmax_has_a_slope(
    tokens: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = tokens * torch.randn(4, tokens, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    gate = piecewise_softmax(logits)
    assert ((gate >= 0) & (gate <= 1)).all()
    own = torch.stack(
        [
            torch.autograd.grad(gate[:, i].sum(), logits, retain_graph=True)[0][:, i]
            for i in range(tokens)
        ],
        -1,
    )
    assert torch.equal(propagates(logits.detach()), own > 0)


def test_the_ends_of_the_interval_count_as_open() -> None:
    assert propagates(torch.tensor([3.0, -1.0, -1.0, -1.0])).all()  # scores 1, 0, 0, 0
    assert propagates(torch.tensor([3.1, -1.0, -1.0, -1.0])).tolist() == [False] * 4
    assert propagates(torch.zeros(3, 7)).all()


def test_entropy_runs_from_zero_to_the_logarithm_of_the_tokens() -> None:
    uniform = torch.full((5,), 0.2, dtype=torch.float64)
    assert attention_entropy(uniform).item() == pytest.approx(math.log(5), rel=1e-15)
    assert attention_entropy(torch.eye(4)).tolist() == [0.0] * 4
    assert attention_entropy(torch.tensor([[0.25, 0.75]])).item() == pytest.approx(
        -0.25 * math.log(0.25) - 0.75 * math.log(0.75), rel=1e-6
    )


def test_results_keep_the_dtype_of_the_logits() -> None:
    for dtype in (torch.float32, torch.float64):
        logits = torch.ones(3, dtype=dtype)
        assert piecewise_softmax(logits).dtype == attention_entropy(logits).dtype == dtype


def test_a_single_token_has_no_softmax() -> None:
    match = r"a softmax over 1 token has nothing to choose.\nhint: give at least 2 tokens"
    with pytest.raises(InputError, match=match):
        piecewise_softmax(torch.ones(4, 1))
