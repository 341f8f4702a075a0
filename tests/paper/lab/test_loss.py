"""The chunked loss is F.cross_entropy of a linear layer, in value and in gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from locater import ConfigError, InputError
from locater.paper.lab import loss as module
from locater.paper.lab.loss import linear_cross_entropy

Case = tuple[Tensor, Tensor, Tensor]


def case(tokens: int, model: int, vocabulary: int, *, seed: int, dtype: torch.dtype) -> Case:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, model, generator=generator, dtype=dtype)
    weight = torch.randn(vocabulary, model, generator=generator, dtype=dtype)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


@pytest.fixture(params=[True, False], ids=["multiplies in bfloat16", "does not"])
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with instructions for bfloat16, and one that multiplies rounded factors in float32."""
    monkeypatch.setattr(module, "is_native", lambda *_: request.param)


def with_gradients(loss: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return loss, *torch.autograd.grad(3 * loss, (hidden, weight))


@settings(max_examples=40)
@given(
    tokens=st.integers(1, 40),
    model=st.integers(1, 8),
    vocabulary=st.integers(1, 30),
    chunk=st.integers(1, 50),
    seed=st.integers(0, 2**31),
)
def test_value_and_gradients_are_those_of_cross_entropy(
    tokens: int, model: int, vocabulary: int, chunk: int, seed: int
) -> None:
    hidden, weight, targets = case(tokens, model, vocabulary, seed=seed, dtype=torch.float64)
    ours = linear_cross_entropy(hidden, weight, targets, chunk=chunk)
    plain = functional.cross_entropy(hidden @ weight.mT, targets)
    torch.testing.assert_close(
        with_gradients(ours, hidden, weight), with_gradients(plain, hidden, weight)
    )


def test_ignored_tokens_count_for_nothing() -> None:
    hidden, weight, targets = case(50, 6, 20, seed=0, dtype=torch.float64)
    targets[::3] = -100
    ours = linear_cross_entropy(hidden, weight, targets, chunk=7)
    plain = functional.cross_entropy(hidden @ weight.mT, targets)
    torch.testing.assert_close(
        with_gradients(ours, hidden, weight), with_gradients(plain, hidden, weight)
    )
    assert not torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, chunk=7), hidden)[
        0
    ][::3].any()


@pytest.mark.usefixtures("cpu")
def test_bfloat16_products_keep_the_error_of_their_factors() -> None:
    """Each logit is a sum of products of two rounded factors, rounded once more at the end."""
    hidden, weight, targets = case(200, 16, 300, seed=1, dtype=torch.float32)
    with torch.no_grad():
        weight /= 4
    unit = torch.finfo(torch.bfloat16).eps / 2
    largest = (hidden.abs() @ weight.abs().mT).max().item()  # bounds every sum of |products|
    logit_error = largest * (2 * unit + unit**2) + largest * unit * (1 + 2 * unit)
    ours = with_gradients(
        linear_cross_entropy(hidden, weight, targets, dtype=torch.bfloat16), hidden, weight
    )
    exact = with_gradients(
        functional.cross_entropy(hidden.double() @ weight.double().mT, targets).float(),
        hidden,
        weight,
    )
    assert (ours[0] - exact[0]).abs() <= logit_error  # log-sum-exp and the target's logit: 2 x 1/2
    # probabilities move by a factor of at most exp(2 e), then E, W (or x/s) and the result round
    relative = torch.expm1(torch.tensor(2 * logit_error + 4 * unit)).item()
    shares = torch.softmax(hidden @ weight.mT, dim=1).detach()
    for mine, true, scale in (
        (ours[1], exact[1], shares @ weight.abs()),
        (ours[2], exact[2], shares.mT @ hidden.abs()),
    ):
        bound = 3 / len(targets) * relative * scale.detach()
        assert ((mine - true).abs() <= bound + 1e-6).all()
        assert not torch.equal(mine, true)  # the products were indeed in bfloat16


@pytest.mark.usefixtures("cpu")
def test_bfloat16_chunks_add_up_to_all_words_and_tokens() -> None:
    """5,000 words are added up in three parts of uneven size, 48 tokens in three chunks."""
    hidden, weight, targets = case(48, 8, 5000, seed=4, dtype=torch.float32)
    whole = linear_cross_entropy(hidden, weight, targets, chunk=16, dtype=torch.bfloat16)
    parts = [
        linear_cross_entropy(hidden[start : start + 16], weight, targets[start : start + 16],
                             dtype=torch.bfloat16)
        for start in (0, 16, 32)
    ]  # fmt: skip
    apart = torch.stack(parts).mean()
    for mine, other in zip(
        with_gradients(whole, hidden, weight), with_gradients(apart, hidden, weight), strict=True
    ):
        torch.testing.assert_close(mine, other)  # but for the order of float32 sums


@pytest.mark.usefixtures("cpu")
def test_bfloat16_probabilities_are_better_than_autocast() -> None:
    hidden, weight, targets = case(400, 32, 500, seed=2, dtype=torch.float32)
    with torch.no_grad():
        weight /= 32**0.5
    exact = torch.autograd.grad(
        functional.cross_entropy(hidden.double() @ weight.double().mT, targets), weight
    )[0]
    ours = torch.autograd.grad(
        linear_cross_entropy(hidden, weight, targets, dtype=torch.bfloat16), weight
    )[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = functional.linear(hidden, weight)
        loss = functional.cross_entropy(logits, targets)
    plain = torch.autograd.grad(loss, weight)[0]
    assert (ours - exact).norm() < 0.5 * (plain - exact).norm()


def test_autocast_around_it_changes_nothing() -> None:
    hidden, weight, targets = case(30, 8, 20, seed=3, dtype=torch.float32)
    outside = linear_cross_entropy(hidden, weight, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = linear_cross_entropy(hidden, weight, targets)
    assert torch.equal(outside, inside)


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation returns, and counts matrix products."""

    numel = 0
    products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        self.products += "mm" in func.__name__
        for one in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(one, Tensor):
                self.numel = max(self.numel, one.untyped_storage().nbytes() // one.element_size())
        return result


def test_no_matrix_of_tokens_and_vocabulary_is_made() -> None:
    hidden, weight, targets = case(512, 4, 1000, seed=0, dtype=torch.float32)
    with Largest() as ours:
        linear_cross_entropy(hidden, weight, targets, chunk=32).backward()
    with Largest() as plain:
        functional.cross_entropy(hidden @ weight.mT, targets).backward()
    assert ours.numel == 32 * 1000
    assert plain.numel == 512 * 1000


def test_evaluation_computes_no_gradient() -> None:
    hidden, weight, targets = case(64, 4, 100, seed=0, dtype=torch.float64)
    with torch.no_grad(), Largest() as evaluation:
        loss = linear_cross_entropy(hidden, weight, targets, chunk=16)
    with Largest() as training:
        linear_cross_entropy(hidden, weight, targets, chunk=16)
    assert not loss.requires_grad
    assert (evaluation.products, training.products) == (4, 12)
    torch.testing.assert_close(loss, functional.cross_entropy(hidden @ weight.mT, targets))


def test_a_graph_that_is_kept_can_be_walked_twice() -> None:
    hidden, weight, targets = case(10, 4, 8, seed=0, dtype=torch.float64)
    loss = linear_cross_entropy(hidden, weight, targets)
    first = torch.autograd.grad(loss, weight, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(loss, weight)[0])


def test_huge_logits_stay_finite() -> None:
    hidden, weight, targets = case(20, 4, 8, seed=0, dtype=torch.float32)
    loss = linear_cross_entropy(1e4 * hidden, weight, targets)
    torch.testing.assert_close(loss, functional.cross_entropy(1e4 * hidden @ weight.mT, targets))
    assert torch.autograd.grad(loss, weight)[0].isfinite().all()


def test_wrong_targets_are_named() -> None:
    hidden, weight, targets = case(4, 2, 5, seed=0, dtype=torch.float32)
    with pytest.raises(InputError, match="targets from 0 to 5 do not fit a vocabulary of 5"):
        linear_cross_entropy(hidden, weight, torch.tensor([0, 5, 1, 2]))
    with pytest.raises(InputError, match="targets from -1 to 2"):
        linear_cross_entropy(hidden, weight, torch.tensor([0, -1, 1, 2]))
    with pytest.raises(InputError, match="no token has a target"):
        linear_cross_entropy(hidden, weight, torch.full((4,), -100))
    with pytest.raises(ConfigError, match="chunk must be one or more, got 0"):
        linear_cross_entropy(hidden, weight, targets, chunk=0)


@pytest.mark.usefixtures("cpu")
def test_a_probability_too_small_for_any_number_has_a_finite_loss() -> None:
    hidden = torch.tensor([[200.0, 0.0], [1.0, 2.0]])
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.5], [0.0, 1.0]])
    targets = torch.tensor([1, 2])
    exact = functional.cross_entropy(hidden.double() @ weight.double().mT, targets)
    ours = linear_cross_entropy(hidden, weight, targets, dtype=torch.bfloat16)
    torch.testing.assert_close(ours.double(), exact, rtol=2**-8, atol=0)  # bfloat16's unit
