from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from locater.core.penalty import (
    LocAteRConfig,
    key_gradient,
    locater_penalty,
    penalty_spectrum,
    query_gradient,
)
from locater.errors import ConfigError, InputError

SEEDS = st.integers(0, 2**31)


def dense_penalty(query: Tensor, key: Tensor, config: LocAteRConfig, temperature: float) -> Tensor:
    """The definition: every head's W_QK multiplied out."""
    shared = key.repeat_interleave(query.shape[0] // key.shape[0], 0)
    forms = query.mT @ shared
    trace = torch.einsum("hmm->h", forms)
    target = config.target * (temperature if config.target_unit == "temperature" else 1)
    scale = config.scale_strength * forms.square().sum()
    return scale + config.mean_strength * (trace - target).square().sum()


@pytest.mark.parametrize(
    ("key", "trace", "norm", "value", "scale_query", "scale_key", "mean_query", "mean_key"),
    [
        (
            [[1, 0, 1], [2, -1, 0]],
            *(0, 28, 16),
            [[4, 12, -4], [4, 18, -10]],
            [[18, -4, 10], [12, -4, 4]],
            [[-2, 0, -2], [-4, 2, 0]],
            [[-2, -4, 0], [0, -2, 2]],
        ),
        (
            [[1, 1, 0], [0, 2, -1]],
            *(6, 28, 64),
            [[4, 12, -4], [4, 18, -10]],
            [[10, 18, -4], [4, 12, -4]],
            [[10, 10, 0], [0, 20, -10]],
            [[10, 20, 0], [0, 10, -10]],
        ),
    ],
    ids=["reg", "reg2"],
)
@pytest.mark.paper("Section 6")
def test_values_and_gradients_are_the_integers_worked_out_by_hand(
    key: list[list[int]],
    trace: int,
    norm: int,
    value: int,
    scale_query: list[list[int]],
    scale_key: list[list[int]],
    mean_query: list[list[int]],
    mean_key: list[list[int]],
) -> None:
    query = torch.tensor([[[1.0, 2, 0], [0, 1, -1]]])
    keys = torch.tensor([key], dtype=torch.float32)
    terms = penalty_spectrum(query, keys)
    assert (terms.trace.item(), terms.frobenius_squared.item()) == (trace, norm)
    config = LocAteRConfig(scale_strength=0.5, mean_strength=2.0)
    assert locater_penalty(query, keys, config).item() == value
    for strengths, expected in (
        ((1.0, 0.0), (scale_query, scale_key)),
        ((0.0, 1.0), (mean_query, mean_key)),
    ):
        pull = 2 * strengths[1] * (terms.trace - 1)
        assert query_gradient(terms, strengths[0], pull)[0].tolist() == expected[0]
        assert key_gradient(terms, strengths[0], pull)[0].tolist() == expected[1]


@given(
    groups=st.integers(1, 3),
    share=st.integers(1, 3),
    head=st.integers(1, 4),
    model=st.integers(1, 6),
    in_temperatures=st.booleans(),
    seed=SEEDS,
)
def test_penalty_and_gradients_are_those_of_the_dense_definition(
    groups: int, share: int, head: int, model: int, in_temperatures: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(groups * (share + 1), head, model, generator=generator, dtype=torch.float64)
    query, key = (part.clone().requires_grad_() for part in draw.split((groups * share, groups)))
    config = LocAteRConfig(
        scale_strength=0.7,
        mean_strength=1.3,
        target=0.4,
        target_unit="temperature" if in_temperatures else "trace",
    )
    dense = dense_penalty(query, key, config, 2.5)
    ours = locater_penalty(query, key, config, temperature=2.5)
    torch.testing.assert_close(ours, dense)
    expected = torch.autograd.grad(3 * dense, (query, key))
    torch.testing.assert_close(torch.autograd.grad(3 * ours, (query, key)), expected)


@given(head=st.integers(1, 4), model=st.integers(1, 6), seed=SEEDS)
def test_with_a_covariance_it_is_the_penalty_of_the_whitened_factors(
    head: int, model: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(model, model, generator=generator, dtype=torch.float64)
    query, key = torch.randn(2, 2, head, model, generator=generator, dtype=torch.float64)
    parameters = [query.requires_grad_(), key.requires_grad_()]
    config = LocAteRConfig(scale_strength=0.7, mean_strength=1.3)
    dense = dense_penalty(query @ root, key @ root, config, 1.0)
    ours = locater_penalty(query, key, config, covariance=root @ root.mT)
    torch.testing.assert_close(ours, dense)
    expected = torch.autograd.grad(dense, parameters)
    torch.testing.assert_close(torch.autograd.grad(ours, parameters), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_regularized_in_float32(dtype: torch.dtype) -> None:
    """Sums of 64 × 512 products: in the weights' own precision they would be off by percents."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 4, 64, 512, generator=generator) / 16).to(dtype)
    config = LocAteRConfig(scale_strength=100.0, mean_strength=1.0)
    parameters = [part.clone().requires_grad_() for part in (query, key)]
    value = locater_penalty(parameters[0], parameters[1], config)
    exact = [part.double().requires_grad_() for part in (query, key)]
    expected = dense_penalty(exact[0], exact[1], config, 1.0)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=0)
    value.backward()
    expected.backward()
    for ours, true in zip(parameters, exact, strict=True):
        assert ours.grad is not None and true.grad is not None and ours.grad.dtype == dtype
        torch.testing.assert_close(ours.grad, true.grad.to(dtype), rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize(("head", "model"), [(4, 64), (8, 8)])
def test_autocast_changes_neither_value_nor_gradients(head: int, model: int) -> None:
    """Also where W_QK is hardly larger than its factors; bfloat16 would be off by a percent."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 3, head, model, generator=generator).requires_grad_()
    config = LocAteRConfig(scale_strength=0.5, mean_strength=2.0)
    expected = locater_penalty(query, key, config)
    wanted = torch.autograd.grad(expected, (query, key))
    with torch.autocast("cpu", torch.bfloat16):
        value = locater_penalty(query, key, config)
    assert torch.equal(value, expected)
    for ours, true in zip(torch.autograd.grad(value, (query, key)), wanted, strict=True):
        assert torch.equal(ours, true)


def test_trace_keeps_its_digits_at_the_size_of_a_large_head() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 128, 4096, generator=generator) / 64
    terms = penalty_spectrum(query, key + query)
    exact = penalty_spectrum(query.double(), (key + query).double())
    # half a million float32 products, added pairwise: a few units in the last place
    torch.testing.assert_close(terms.trace.double(), exact.trace, rtol=1e-6, atol=0)
    norm = terms.frobenius_squared.double()
    torch.testing.assert_close(norm, exact.frobenius_squared, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("mean", "rank", "trace", "norm", "value"),
    [
        (0.001, 128, 0.00127836369447108, 1.27672948073574e-8, 9.98721636305529e-4),
        (0.01, 32, 0.00318979266347687, 3.1796178862409e-7, 0.00996810207336523),
        (0.1, 128, 0.113475177304965, 1.00598561440571e-4, 0.0886524822695035),
        (1.0, 32, 0.242424242424242, 0.00183654729109275, 0.757575757575758),
        (1.0, 128, 0.56140350877193, 0.00246229609110496, 0.43859649122807),
    ],
)
def test_equilibrium_is_a_projector_at_the_closed_form_trace(
    mean: float, rank: int, trace: float, norm: float, value: float
) -> None:
    config = LocAteRConfig(scale_strength=100.0, mean_strength=mean)
    assert config.equilibrium(rank) == pytest.approx(trace, rel=1e-13)
    side = math.sqrt(trace / rank)  # W_Q = W_K = side · I has W_QK = (trace / rank) I
    factor = (side * torch.eye(rank, dtype=torch.float64))[None].requires_grad_()
    other = factor.detach().clone().requires_grad_()
    terms = penalty_spectrum(factor.detach(), other.detach())
    assert terms.frobenius_squared.item() == pytest.approx(norm, rel=1e-12)
    penalty = locater_penalty(factor, other, config)
    assert penalty.item() == pytest.approx(value, rel=1e-12)
    penalty.backward()
    assert factor.grad is not None
    assert factor.grad.abs().max().item() < 1e-13 * config.scale_strength


def test_descent_reaches_the_equilibrium_from_a_random_start() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 6, 10, generator=generator, dtype=torch.float64) * 0.3
    parameters = [query.requires_grad_(), key.requires_grad_()]
    config = LocAteRConfig(scale_strength=2.0, mean_strength=1.0, target=3.0)
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = locater_penalty(parameters[0], parameters[1], config)
        loss.backward()
        return loss

    optimizer.step(closure)
    terms = penalty_spectrum(query.detach(), key.detach())
    assert terms.trace.item() == pytest.approx(config.equilibrium(6), rel=1e-6)
    expected = config.equilibrium(6) ** 2 / 6
    assert terms.frobenius_squared.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale_strength": -1.0}, "scale_strength must be zero or more"),
        ({"mean_strength": math.nan}, "mean_strength must be zero or more"),
        ({"scale_strength": 0.0, "mean_strength": 0.0}, "nothing to regularize"),
        ({"target": math.inf}, "target must be finite"),
        ({"reduce": "max"}, "unknown reduce 'max'"),
        ({"target_unit": "nats"}, "unknown target_unit 'nats'"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_settings_that_make_no_sense_say_so(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LocAteRConfig(**settings)  # type: ignore[arg-type]


def test_factors_that_do_not_fit_say_so() -> None:
    with pytest.raises(InputError, match=r"query is \(3, 2, 4\) and key is \(2, 2, 4\)"):
        penalty_spectrum(torch.zeros(3, 2, 4), torch.zeros(2, 2, 4))
