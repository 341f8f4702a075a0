"""The closed-form QK-gradient against autograd through the one-layer model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from locater import InputError, QKGradient, TokenProcess, qk_gradient
from locater.core.gradient import one_layer_output
from locater.core.theory import linearized_softmax, piecewise_softmax


def draw(
    batch: int, tokens: int, model: int, scale: float, seed: int
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    sequences = TokenProcess.random_walk(tokens).sample(batch, model=model, generator=generator)
    target = torch.randn(batch, model, generator=generator, dtype=torch.float64)
    weights = torch.randn(3, model, model, generator=generator, dtype=torch.float64)
    qk, value, feedforward = weights * torch.tensor([scale, 1, 1])[:, None, None]
    return sequences, target, {"qk": qk, "value": value, "feedforward": feedforward}


@pytest.mark.paper("Eq. 3")
@given(
    batch=st.integers(1, 6),
    tokens=st.integers(2, 8),
    model=st.integers(1, 5),
    scale=st.sampled_from([1e-3, 0.1, 1.0, 10.0]),
    seed=st.integers(0, 2**31),
)
def test_the_closed_form_is_the_gradient_of_the_loss(
    batch: int, tokens: int, model: int, scale: float, seed: int
) -> None:
    sequences, target, weights = draw(batch, tokens, model, scale, seed)
    weights["qk"].requires_grad_()
    output = one_layer_output(sequences, **weights, temperature=1.3)
    loss = (target - output).square().sum(-1).mean() / 2
    (expected,) = torch.autograd.grad(loss, weights["qk"])
    weights["qk"] = weights["qk"].detach()
    gradient = qk_gradient(sequences, target, **weights, temperature=1.3)
    parts = (gradient.quadratic, gradient.saturated, gradient.residual)
    size = max(float(part.abs().amax()) for part in parts)
    torch.testing.assert_close(gradient.total, expected, rtol=1e-10, atol=1e-11 * size)
    torch.testing.assert_close(sum(parts), gradient.total, rtol=0, atol=0)


@pytest.mark.paper("Eqs. 19-21")
def test_each_part_is_its_own_equation_written_out() -> None:
    """Sums over tokens i, j with γ̃ⁱ = open_i γⁱ and γ̃₀ⁱ = open_i/T + [score_i > 1]."""
    sequences, target, weights = draw(3, 5, 4, 0.5, seed=3)
    qk, both = weights["qk"], weights["feedforward"] @ weights["value"]
    gamma = torch.eye(5, dtype=torch.float64) / 5 - 1 / 25
    expected = torch.zeros(3, 4, 4, dtype=torch.float64)
    saturated = opened = 0
    for x, y in zip(sequences, target, strict=True):
        last = x[-1]
        logits = x @ qk @ last / 1.3
        score = linearized_softmax(logits)
        is_open = ((score >= 0) & (score <= 1)).double()
        saturated, opened = saturated + int((score > 1).sum()), opened + int(is_open.sum())
        for i in range(5):
            pull = is_open[i] * torch.outer(gamma[i] @ x, last) / 1.3 / 3
            for j in range(5):
                overlap = (both @ x[i]) @ (both @ x[j])
                expected[0] += pull * overlap * is_open[j] * (gamma[j] @ logits)
                expected[1] += pull * overlap * (is_open[j] / 5 + float(score[j] > 1))
            expected[2] += pull * ((both @ x[i]) @ (weights["feedforward"] @ last - y))
    assert saturated and opened and saturated + opened < 15  # every kind of token occurs
    gradient = qk_gradient(sequences, target, **weights, temperature=1.3)
    assert isinstance(gradient, QKGradient)
    torch.testing.assert_close(gradient.quadratic, expected[0])
    torch.testing.assert_close(gradient.saturated, expected[1])
    torch.testing.assert_close(gradient.residual, expected[2])


def test_the_one_layer_model_mixes_tokens_by_the_piecewise_softmax() -> None:
    sequences, _, weights = draw(2, 4, 3, 1.0, seed=5)
    output = one_layer_output(sequences, **weights, temperature=2.0)
    for x, result in zip(sequences, output, strict=True):
        gate = piecewise_softmax(x @ weights["qk"] @ x[-1] / 2.0)
        mixed = weights["value"] @ (gate @ x) + x[-1]
        torch.testing.assert_close(result, weights["feedforward"] @ mixed)


def test_gradients_keep_the_dtype_of_the_tokens() -> None:
    sequences, target, weights = draw(2, 4, 3, 1.0, seed=6)
    low = {name: weight.float() for name, weight in weights.items()}
    gradient = qk_gradient(sequences.float(), target.float(), **low, temperature=1.0)
    assert gradient.total.dtype == torch.float32


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ("qk", r"qk is \(3, 2\), the tokens ask for \(3, 3\).\nhint: .*model x model"),
        ("value", r"value is \(3, 2\), the tokens ask for \(3, 3\).\nhint: .*model x model"),
        ("feedforward", r"feedforward is \(3, 2\)(.|\n)*hint: .*model x model"),
        ("target", r"target is \(2, 2\) for tokens \(2, 4, 3\).\nhint: give one target vector"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(wrong: str, match: str) -> None:
    sequences, target, weights = draw(2, 4, 3, 1.0, seed=7)
    inputs = {**weights, "target": target}
    inputs[wrong] = inputs[wrong][:, :2]
    target = inputs.pop("target")
    with pytest.raises(InputError, match=match):
        qk_gradient(sequences, target, **inputs, temperature=1.0)
