"""Rows are measured in blocks: the same numbers for every block, and never T × T of anything."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from locater.errors import InputError
from locater.probe.rows import (
    MASKED,
    Ratio,
    RealQueries,
    ScoredKeys,
    SoftmaxInput,
    largest_logits,
    tally,
)


def scored(tokens: int, seed: int = 0, **more: Any) -> ScoredKeys:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, 4, tokens, 3, generator=generator, dtype=torch.float64)
    key = torch.randn(2, 2, tokens, 3, generator=generator, dtype=torch.float64)
    return ScoredKeys(query=query, key=key, scale=1.3, **more)


@settings(max_examples=40)
@given(
    tokens=st.integers(2, 9),
    block=st.integers(1, 400),
    is_causal=st.booleans(),
    queries=st.sampled_from(["last", "all"]),
    seed=st.integers(0, 2**31),
)
def test_every_block_size_gives_the_same_numbers(
    tokens: int, block: int, is_causal: bool, queries: Literal["last", "all"], seed: int
) -> None:
    attention = scored(tokens, seed, is_causal=is_causal)
    whole, parts = tally(attention, queries), tally(attention, queries, block=block)
    assert whole is not None and parts is not None
    for name in ("gates", "gates_by_theta", "attention", "logits", "entropy", "sink", "distance"):
        ours, theirs = getattr(parts, name), getattr(whole, name)
        torch.testing.assert_close(ours.mean, theirs.mean, equal_nan=True)
        torch.testing.assert_close(ours.values_squared, theirs.values_squared)
    torch.testing.assert_close(parts.max_logit, whole.max_logit)  # sums in another order
    assert torch.equal(parts.entropy.weights, whole.entropy.weights)


@settings(max_examples=30)
@given(tokens=st.integers(2, 9), seed=st.integers(0, 2**31))
def test_written_out_logits_are_measured_like_queries_and_keys(tokens: int, seed: int) -> None:
    attention = scored(tokens, seed, is_causal=True)
    logits, _ = attention.rows(slice(None), torch.arange(tokens))
    fused, eager = tally(attention, "all"), tally(SoftmaxInput(logits), "all")
    assert fused is not None and eager is not None
    torch.testing.assert_close(fused.entropy.mean, eager.entropy.mean)
    torch.testing.assert_close(fused.gates.mean, eager.gates.mean, equal_nan=True)
    torch.testing.assert_close(fused.distance.mean, eager.distance.mean)


class Largest(TorchDispatchMode):
    """Remembers how many numbers the largest tensor has that anything returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() == result.untyped_storage().nbytes() // (
            result.element_size()
        ):
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("is_causal", [True, False])
def test_nothing_of_the_size_of_the_attention_matrix_is_made(is_causal: bool) -> None:
    tokens = 256
    attention = scored(tokens, is_causal=is_causal)
    with Largest() as ours:
        tally(attention, "all", block=8 * 4 * tokens)
    assert ours.numel <= 2 * 8 * 4 * tokens  # running counts have one place more than keys
    with Largest() as theirs:
        attention.rows(slice(None), torch.arange(tokens))
    assert theirs.numel == 2 * 4 * tokens**2


@settings(max_examples=30)
@given(count=st.integers(2, 20), seed=st.integers(0, 2**31))
def test_the_error_of_equal_weights_is_that_of_a_mean(count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    ratio = Ratio.of(values, torch.ones_like(values))
    torch.testing.assert_close(ratio.mean, values.mean(0))
    torch.testing.assert_close(ratio.standard_error, values.std(0) / count**0.5)


def test_a_share_of_none_or_all_has_an_error_too() -> None:
    values = torch.tensor([[0.0, 1.0, 0.0]]).expand(50, 3)
    ratio = Ratio.of(values, torch.ones(50, 3))
    assert (ratio.standard_error == 0).all()
    middle = 0.5 / 51
    expected = (middle * (1 - middle) / 50) ** 0.5
    torch.testing.assert_close(ratio.count_error, torch.full((3,), expected).double())


def test_one_key_is_an_error_and_no_row_that_can_choose_is_none() -> None:
    with pytest.raises(InputError, match="attention over 1 key has nothing to choose"):
        tally(scored(1))
    hidden = torch.zeros(5, 5, dtype=torch.bool)
    assert tally(scored(5, masks=(hidden,)), "all") is None


def test_the_first_query_has_the_first_key_only_under_a_causal_flag() -> None:
    query, key = torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 5, 3)
    cache = ScoredKeys(query=query, key=key, scale=1.0)
    flag = ScoredKeys(query=query, key=key, scale=1.0, is_causal=True)
    assert RealQueries.of(cache).first_key == 3
    assert RealQueries.of(flag).first_key == 0
    assert RealQueries.of(cache, is_self=False).first_key is None


@pytest.mark.parametrize(("value", "is_hidden"), [(MASKED, True), (MASKED + 1, False)])
def test_a_mask_hides_at_its_limit_and_below(value: float, is_hidden: bool) -> None:
    mask = torch.zeros(5, 5, dtype=torch.float64)
    mask[:, 3] = value
    attention = scored(5, masks=(mask,))
    _, visible = attention.rows(slice(None), torch.arange(5))
    assert visible is not None and bool(visible[..., 3].any()) != is_hidden
    written = torch.zeros(2, 4, 5, 5)
    written[..., 3] = value
    for one in (attention, SoftmaxInput(written)):
        real = one.real_keys()
        assert (real is not None) == is_hidden
        assert real is None or real.tolist() == [[True, True, True, False, True]] * 2
    _, seen = SoftmaxInput(written).rows(slice(None), torch.arange(5))
    assert (seen is not None) == is_hidden


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_largest_logits_are_those_of_all_rows_in_blocks(is_causal: bool) -> None:
    tokens = 64
    attention = scored(tokens, is_causal=is_causal)
    with Largest() as ours:
        found = largest_logits(attention, block=8 * 4 * tokens)
    assert ours.numel <= 8 * 4 * tokens
    whole, _ = attention.rows(slice(None), torch.arange(tokens))
    torch.testing.assert_close(found, whole.amax((0, 2, 3)))
    measured = tally(attention, "all")
    assert measured is not None
    torch.testing.assert_close(measured.max_logit, found)
