"""Attention out of a mode's sight (flex, flash-attention, compiled) is measured as if it were not.

flash-attention itself runs on CUDA alone: a module with its name and signatures stands in for it.
"""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.models.families import built, tokens
from tests.probe.dense_attention import FLOAT32, assert_measures, dense, every_row, last_rows
from tests.probe.test_probe_model import Stack, randn
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from locater import LocaterError, Probe
from locater.probe import kernels
from locater.probe.kernels import compiled

BATCH, HEADS, TOKENS, HEAD = 2, 4, 24, 8


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # flex without compilation is slow, and says so
        yield
    torch._dynamo.reset()
    assert not kernels._places and not kernels._users and not kernels.active()


class Calls(nn.Module):
    """An attention function, as one finds it: in a module's globals, or kept by a module."""

    def __init__(self, function: Any = None) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return (self.function or flex_attention)(*args, **kwargs)  # type: ignore[no-any-return]


def inputs(shared: int = HEADS) -> tuple[Tensor, Tensor, Tensor]:
    key, value = randn(2, BATCH, shared, TOKENS, HEAD, seed=1)
    return 2 * randn(BATCH, HEADS, TOKENS, HEAD), key + 1, value


def logits_of(query: Tensor, key: Tensor, scale: float | None = None) -> Tensor:
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return query.double() @ key.double().mT * (HEAD**-0.5 if scale is None else scale)


PLACE = torch.arange(TOKENS)
BEHIND = PLACE[:, None] >= PLACE
SLOPES = 2.0 ** -torch.arange(1, HEADS + 1)
BIAS = randn(BATCH, 1, TOKENS, TOKENS, seed=4)
LENGTHS = torch.tensor([TOKENS, 15])


def block_mask(mod: Any, batch: int | None = None, heads: int | None = None) -> Any:
    return create_block_mask(mod, batch, heads, TOKENS, TOKENS, device="cpu")


def padded(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k <= q) & (k < LENGTHS[b])


# a case: flex's own functions, and the same on whole matrices
FLEX: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({}, lambda s: s),
    "causal": (
        {"block_mask": lambda: block_mask(lambda b, h, q, k: q >= k)},
        lambda s: s.masked_fill(~BEHIND, -torch.inf),
    ),
    "window by head": (
        {"block_mask": lambda: block_mask(lambda b, h, q, k: (q - k).abs() <= h + 2, None, HEADS)},
        lambda s: s.masked_fill(
            (PLACE[:, None] - PLACE).abs() > torch.arange(HEADS)[:, None, None] + 2, -torch.inf
        ),
    ),
    "ALiBi": (
        {"score_mod": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs()},
        lambda s: s - SLOPES[:, None, None] * (PLACE[:, None] - PLACE).abs(),
    ),
    "cap, then causal": (
        {
            "score_mod": lambda s, b, h, q, k: 3 * torch.tanh(s / 3),
            "block_mask": lambda: block_mask(lambda b, h, q, k: q >= k),
        },
        lambda s: (3 * torch.tanh(s / 3)).masked_fill(~BEHIND, -torch.inf),
    ),
    # indexing one axis after another means something else for whole axes: it must be mapped
    "a table, read in steps": (
        {"score_mod": lambda s, b, h, q, k: s + BIAS[b][0][q][k]},
        lambda s: s + BIAS,
    ),
}


@pytest.mark.parametrize("case", FLEX)
@pytest.mark.parametrize("kept", ["global", "module", "compiled function", "compiled model"])
def test_flex_attention_is_measured_with_its_functions(case: str, kept: str) -> None:
    settings, truth = FLEX[case]
    given = {key: one() if key == "block_mask" else one for key, one in settings.items()}
    function: Any = {"module": flex_attention, "global": None, "compiled model": None}.get(kept)
    if kept == "compiled function":
        function = torch.compile(flex_attention, backend="eager")
    model: nn.Module = Calls(function)
    if kept == "compiled model":
        model = compiled(model, backend="eager")
    query, key, value = inputs()
    with torch.no_grad():
        plain = model(query, key, value, **given)
        with Probe(model, queries="all") as probe:
            again = model(query, key, value, **given)
    assert torch.equal(plain, again)
    logits = truth(logits_of(query, key))
    every, last = dense(logits, every_row(logits)), dense(logits, last_rows(logits))
    assert_measures(probe.records, every, last, tolerance=FLOAT32)
    assert flex_module.flex_attention is flex_attention and not hasattr(flex_attention, "_locater")


def test_two_models_that_keep_flex_each_are_both_seen_until_the_last_leaves() -> None:
    """The second finds the functions wrapped already, and its own copy of them not."""
    models = [Calls(flex_attention), Calls(torch.compile(flex_attention, backend="eager"))]
    query, key, value = inputs()
    first, second = (Probe(one, queries="all") for one in models)
    with torch.no_grad(), first:
        with second:
            for one in models:
                one(query, key, value)
        kept = second.model.function
        models[0](query, key, value)
    assert (first.measured, second.measured) == (2, 1)
    assert [one.rows for one in first.records] == [2 * one.rows for one in second.records]
    assert hasattr(kept, "_locater_original")  # a wrapper, which does nothing any more
    assert models[0].function is flex_attention
    assert not hasattr(models[1].function, "_locater_original")


def test_flex_with_shared_keys_padding_and_a_scale() -> None:
    query, key, value = inputs(shared=2)
    model = Calls()
    given = {"block_mask": block_mask(padded, BATCH), "enable_gqa": True, "scale": 0.7}
    with torch.no_grad(), Probe(model, queries="all") as probe:
        model(query, key, value, **given)
    visible = BEHIND & (LENGTHS[:, None, None, None] > PLACE)
    logits = logits_of(query, key, 0.7).masked_fill(~visible, -torch.inf)
    rows = [(b, q) for b in range(BATCH) for q in range(int(LENGTHS[b]))]
    last = [(b, int(LENGTHS[b]) - 1) for b in range(BATCH)]
    assert_measures(probe.records, dense(logits, rows), dense(logits, last), tolerance=FLOAT32)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_model_of_transformers_on_flex_is_that_on_sdpa(name: str) -> None:
    model = built(name).float()
    found = []
    for implementation in ("sdpa", "flex_attention"):
        model.set_attn_implementation(implementation)  # type: ignore[operator]
        with torch.no_grad(), Probe(model, queries="all") as probe:
            model(input_ids=tokens())
        assert probe.unseen == []
        found.append(probe.records)
    for ours, theirs in zip(*found, strict=True):
        assert (ours.name, ours.head, ours.rows) == (theirs.name, theirs.head, theirs.rows)
        assert ours.entropy == pytest.approx(theirs.entropy, abs=1e-4)
        assert ours.distance == pytest.approx(theirs.distance, abs=1e-3)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:  # fmt: skip
    """The function's signature; its sum, not its speed."""
    logits = flash_logits(q, k, softmax_scale, causal, window_size, softcap, alibi_slopes)
    weights = logits.softmax(-1).nan_to_num(0).to(v.dtype)
    shared = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
    return torch.einsum("bhqk,bkhd->bqhd", weights, shared)


def flash_logits(
    q: Tensor, k: Tensor, scale: float | None, causal: bool, window: tuple[int, int], cap: float,
    slopes: Tensor | None,
) -> Tensor:  # fmt: skip
    """After flash-attention's documentation: the last query stands at the last key."""
    logits = logits_of(q.transpose(1, 2), k.transpose(1, 2), scale)
    own = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    away = torch.arange(k.shape[1]) - own
    if cap:
        logits = cap * torch.tanh(logits / cap)
    if slopes is not None:
        logits = logits - slopes.double()[..., :, None, None] * away.abs()
    left, right = window[0], 0 if causal else window[1]
    hidden = (left >= 0) & (away < -left) | (right >= 0) & (away > right)
    return logits.masked_fill(hidden, -torch.inf)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False,
) -> Tensor:  # fmt: skip
    parts = []
    for b in range(len(cu_seqlens_q) - 1):
        mine, keys = (slice(int(one[b]), int(one[b + 1])) for one in (cu_seqlens_q, cu_seqlens_k))
        parts.append(flash_attn_func(q[None, mine], k[None, keys], v[None, keys], causal=causal)[0])
    return torch.cat(parts)


def flash_attn_qkvpacked_func(qkv: Tensor, causal: bool = False) -> Tensor:
    return flash_attn_func(*qkv.unbind(2), causal=causal)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("flash_attn")
    for function in (flash_attn_func, flash_attn_varlen_func, flash_attn_qkvpacked_func):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return module


FLASH: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"softmax_scale": 0.9, "causal": True},
    "window": {"window_size": (5, 0)},
    "window both ways": {"window_size": (3, 4)},
    "cap": {"softcap": 3.0},
    "ALiBi": {"alibi_slopes": SLOPES, "causal": True},
    "ALiBi by sequence": {"alibi_slopes": SLOPES * torch.tensor([[1.0], [2.0]])},
}


@pytest.mark.parametrize("keys", [TOKENS, TOKENS + 5])
@pytest.mark.parametrize("case", FLASH)
def test_flash_attention_is_measured_by_its_arguments(
    flash: types.ModuleType, case: str, keys: int
) -> None:
    class Model(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            return flash.flash_attn_func(*args, **kwargs)  # type: ignore[no-any-return]

    query, key = randn(BATCH, TOKENS, HEADS, HEAD), randn(BATCH, keys, 2, HEAD, seed=1)
    model = Model()
    plain = model(query, key, key, **FLASH[case])
    with Probe(model, queries="all") as probe:
        assert torch.equal(plain, model(query, key, key, **FLASH[case]))
    assert flash.flash_attn_func is flash_attn_func
    names = ("softmax_scale", "causal", "window_size", "softcap", "alibi_slopes")
    defaults = (None, False, (-1, -1), 0.0, None)
    given = [FLASH[case].get(name, one) for name, one in zip(names, defaults, strict=True)]
    logits = flash_logits(query, key, *given)
    every, last = dense(logits, every_row(logits)), dense(logits, last_rows(logits))
    assert_measures(probe.records, every, last, tolerance=FLOAT32, allow_no_place=keys != TOKENS)


def test_flash_attention_of_packed_sequences(flash: types.ModuleType) -> None:
    sizes, heads = [5, 9, 7], 2
    ends = torch.tensor([0, 5, 14, 21], dtype=torch.int32)
    query, key = randn(2, 21, heads, HEAD)

    class Model(nn.Module):
        def forward(self, *args: Any) -> Tensor:
            return flash_attn_varlen_func(*args, causal=True)

    model = Model()
    args = (query, key, key, ends, ends, 9, 9)
    plain = model(*args)
    with Probe(model, queries="all") as probe:  # found by this test module's own global name
        assert torch.equal(plain, model(*args))
    logits = torch.full((3, heads, 9, 9), -torch.inf, dtype=torch.float64)
    for b, (start, size) in enumerate(zip(ends.tolist(), sizes, strict=False)):
        q, k = (one[None, start : start + size] for one in (query, key))
        part = flash_logits(q, k, None, True, (-1, -1), 0.0, None)
        logits[b, :, :size, :size] = part[0]
    last = [(b, size - 1) for b, size in enumerate(sizes)]
    truth = dense(logits, every_row(logits)), dense(logits, last)
    assert_measures(probe.records, *truth, tolerance=FLOAT32)
    packed = randn(BATCH, TOKENS, 3, HEADS, HEAD)

    class Packed(nn.Module):
        def forward(self, one: Tensor) -> Tensor:
            return flash_attn_qkvpacked_func(one, causal=True)

    whole = Packed()
    with Probe(whole, queries="all") as probe:
        whole(packed)
    logits = flash_logits(packed[:, :, 0], packed[:, :, 1], None, True, (-1, -1), 0.0, None)
    truth = dense(logits, every_row(logits)), dense(logits, last_rows(logits))
    assert_measures(probe.records, *truth, tolerance=FLOAT32)


def entropies(probe: Probe) -> list[tuple[str, int, int, float]]:
    return [(one.name, one.head, one.rows, round(one.entropy, 4)) for one in probe.records]


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_model_is_measured_like_itself(backend: str) -> None:
    model, tokens = Stack(), randn(4, 7, 8)
    with Probe(model, queries="all") as truth:
        model(tokens)
    fast = compiled(model, backend=backend)
    plain = fast(tokens)
    plain.square().mean().backward()
    grads = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    model.zero_grad()
    graphs = len(kernels._sites)
    with Probe(fast, queries="all", every=2) as probe:
        for _ in range(4):
            again = fast(tokens)
            assert torch.equal(plain, again)
        again.square().mean().backward()
    assert len(kernels._sites) == graphs > 0  # nothing is compiled again for a probe
    assert (probe.forwards, probe.measured, probe.unseen) == (4, 2, [])
    for ours, theirs in zip(probe.records, truth.records, strict=True):
        assert (ours.name, ours.layer, ours.head) == (theirs.name, theirs.layer, theirs.head)
        assert ours.rows == 2 * theirs.rows
        assert ours.entropy == pytest.approx(theirs.entropy, abs=1e-5)
    again_grads = [one.grad for one in model.parameters() if one.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(grads, again_grads, strict=True))
    assert probe.rank == []  # the tokens that enter a compiled layer are out of sight


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_compiled_models_of_transformers(name: str, implementation: str) -> None:
    model = built(name).float().eval()
    model.set_attn_implementation(implementation)  # type: ignore[operator]
    fast = compiled(model, backend="aot_eager")
    with torch.no_grad():
        with Probe(model, queries="all") as truth:
            model(input_ids=tokens())
        with Probe(fast, queries="all") as probe:
            fast(input_ids=tokens())
    assert probe.unseen == []
    for ours, theirs in zip(entropies(probe), entropies(truth), strict=True):
        assert ours[:3] == theirs[:3] and ours[3] == pytest.approx(theirs[3], abs=2e-4)


def test_layers_that_are_compiled_one_by_one_have_their_names() -> None:
    model, tokens = Stack(), randn(4, 7, 8)
    with Probe(model, queries="all") as truth:
        model(tokens)
    for place, layer in enumerate(model.layers):
        model.layers[place] = compiled(layer, backend="eager")
    with Probe(model, queries="all") as probe:
        model(tokens)
    assert entropies(probe) == entropies(truth)


def test_a_graph_that_breaks_is_seen_in_all_its_parts() -> None:
    class Broken(Stack):
        def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
            for layer in self.layers:
                inputs = inputs + layer(inputs)
                torch._dynamo.graph_break()
            return inputs

    model, tokens = Broken(3), randn(4, 7, 8)
    with Probe(model, queries="all") as truth:
        model(tokens)
    fast = compiled(model, backend="eager")
    with Probe(fast, queries="all") as probe:
        fast(tokens)
    assert entropies(probe) == entropies(truth)


def test_models_that_others_compiled_are_refused_with_the_way_out() -> None:
    model = Stack(1)
    other = torch.compile(model, backend="eager")
    with pytest.raises(LocaterError, match=r"compiled\(model, …\)"), Probe(other):  # type: ignore[arg-type]
        pass
    with Probe(model) as probe:  # the module itself, run by itself, is no problem
        model(randn(2, 5, 8))
    assert len(probe.records) == 2
    with Probe(model), pytest.raises(Exception, match="is compiled around its probe"):
        other(randn(2, 5, 8))
    torch._dynamo.reset()
    model.compile(backend="eager")
    with pytest.raises(LocaterError, match="is compiled"), Probe(model):
        pass
