"""Live models: torch's own modules, users' modules, wrappers and adapters, by their own logits."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.models.families import (
    FAMILIES,
    TOKENS,
    bias_of,
    built,
    floats,
    mismatch,
    observed,
    shaken,
    tokens,
    watched,
    weight_of,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from locater import InputError, LocaterError
from locater.models.live import LiveAttention, Pair, discover, find_attention
from locater.models.resolve import layouts

EXACT = 1e-12
ANGLES = 32 * torch.finfo(torch.float32).eps


class Packed(nn.Module):
    """Attention with one tensor for queries, keys and values, as timm, nanoGPT and others do it."""

    def __init__(self, child: str, count: str, *, qk_norm: bool = False, **simple: float) -> None:
        super().__init__()
        setattr(self, child, nn.Linear(24, 72))
        setattr(self, count, 4)
        vars(self).update(simple)
        self.child = child
        if qk_norm:
            self.q_norm = self.k_norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        packed = getattr(self, self.child)(x).unflatten(-1, (3, 4, 6)).transpose(1, 3)
        query, key, value = packed.unbind(2)
        scale = getattr(self, "scale", 6**-0.5)
        logits = query @ key.mT * (scale if scale < 1 else 1 / scale)
        return (functional.softmax(logits, -1) @ value).transpose(1, 2).flatten(2)


class Separate(nn.Module):
    """Attention with a projection each, under any names; queries and keys may come from afar."""

    def __init__(self, query: str, key: str, *, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.add_module(query, nn.Linear(24, 24))
        self.add_module(key, nn.Linear(24, 24 * kv_heads // heads, bias=False))
        self.children_names, self.num_heads, self.kv = (query, key), heads, kv_heads
        self.scaling = 0.3

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        ask, answer = (getattr(self, name) for name in self.children_names)
        size = 24 // self.num_heads
        query = ask(x).unflatten(-1, (-1, size)).transpose(1, 2)
        key = answer(x if memory is None else memory).unflatten(-1, (-1, size)).transpose(1, 2)
        key = key.repeat_interleave(self.num_heads // self.kv, 1)
        weights = functional.softmax(query @ key.mT * self.scaling, -1)
        return weights.mean(1) @ (x if memory is None else memory)


class Block(nn.Module):
    """A layer of a fairseq-like decoder: self-attention, then attention to an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Separate("q_proj", "k_proj")
        self.encoder_attn = Separate("q_proj", "k_proj")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(x)
        return x + self.encoder_attn(x, floats(5, 24, seed=9))


class Stack(nn.Module):
    """Blocks in a row, under the name a family gives them."""

    def __init__(self, name: str, blocks: list[nn.Module], config: object = None) -> None:
        super().__init__()
        self.stack_name = name
        self.add_module(name, nn.ModuleList(blocks))
        if config is not None:
            self.config = config

    def forward(self, x: Tensor) -> Tensor:
        for block in getattr(self, self.stack_name):
            x = x + block(x)
        return x


class Named(nn.Module):
    """A block that calls its attention by some name."""

    def __init__(self, name: str, attention: nn.Module) -> None:
        super().__init__()
        self.add_module(name, attention)

    def forward(self, x: Tensor) -> Tensor:
        (attention,) = self.children()
        return attention(x)


@dataclass
class GPTConfig:
    """What nanoGPT keeps beside its model."""

    n_head: int = 4
    n_layer: int = 2


def check(
    model: nn.Module, run: Callable[[], Any], tolerance: float = EXACT
) -> list[LiveAttention]:
    """The form of every attention in the model gives the model's own logits."""
    found = find_attention(model)
    with watched(found) as seen, torch.no_grad():
        run()
    for live in found:
        assert mismatch(live.form(distances=16), seen[live.layout.name]) < tolerance
    return found


PLAIN = {
    "timm": lambda: Stack(
        "blocks", [Named("attn", Packed("qkv", "num_heads", scale=6**-0.5)) for _ in range(2)]
    ),
    "nanoGPT": lambda: Stack(
        "h", [Named("attn", Packed("c_attn", "n_head")) for _ in range(2)], GPTConfig()
    ),
    "vit-pytorch": lambda: Stack(
        "layers", [Named("0", Packed("to_qkv", "heads", scale=0.7)) for _ in range(2)]
    ),
    "divided by its scale": lambda: Stack("blocks", [Packed("qkv", "num_heads", scale=2.9)]),
    "fairseq": lambda: Stack("layers", [Block(), Block()]),
    "diffusers": lambda: Stack("blocks", [Named("attn1", Separate("to_q", "to_k"))]),
    "q and k": lambda: Stack("layers", [Named("mixer", Separate("q", "k"))]),
    "query and key": lambda: Stack("layers", [Named("mixer", Separate("query", "key"))]),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_modules_are_found_by_their_names_and_attributes(name: str) -> None:
    model = shaken(PLAIN[name]())
    found = check(model, lambda: model(floats(TOKENS, 24)))
    assert {live.layout.heads for live in found} == {4}
    if name != "nanoGPT":
        assert "by its tensor names alone" in found[0].layout.caveats[-1]
    if name == "fairseq":
        kinds = {live.layout.name.split(".")[-1]: live.layout.kind for live in found}
        assert kinds == {"self_attn": "self", "encoder_attn": "cross"}


def test_timms_qk_norm_is_flagged() -> None:
    model = Packed("qkv", "num_heads", qk_norm=True)
    (live,) = find_attention(model)
    assert live.layout.qk_norm and live.layout.name == ""


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("vdim", [None, 10])
@pytest.mark.parametrize("bias", [True, False])
def test_multihead_attention(batch_first: bool, vdim: int | None, bias: bool) -> None:
    model = shaken(nn.MultiheadAttention(24, 4, bias=bias, vdim=vdim, batch_first=batch_first))
    x, value = floats(TOKENS, 24), floats(TOKENS, vdim or 24)
    if not batch_first:
        x, value = x.transpose(0, 1), value.transpose(0, 1)
    for need_weights in (True, False):  # two ways through torch's code
        (live,) = check(model, lambda need=need_weights: model(x, x, value, need_weights=need))
    assert (bias_of(live, "query") is not None) == bias
    assert live.module is model


def test_multihead_attention_over_keys_of_another_width_has_no_square_form() -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2, kdim=6, vdim=6))
    _, (skipped,) = discover(model)
    assert skipped.name == "0" and "queries read 8 dimensions and keys 6" in skipped.reason
    with pytest.raises(LocaterError, match="not square"):
        find_attention(model)


def test_transformer_layers_of_torch() -> None:
    size = {"d_model": 24, "nhead": 4, "dim_feedforward": 16, "dropout": 0.0, "batch_first": True}
    model = shaken(nn.Transformer(num_encoder_layers=2, num_decoder_layers=1, **size)).train()
    found = check(model, lambda: model(floats(5, 24), floats(TOKENS, 24, seed=5)))
    assert {live.layout.name: (live.layout.kind, live.layout.part) for live in found} == {
        "decoder.layers.0.multihead_attn": ("cross", "decoder"),
        "decoder.layers.0.self_attn": ("self", "decoder"),
        "encoder.layers.0.self_attn": ("self", "encoder"),
        "encoder.layers.1.self_attn": ("self", "encoder"),
    }
    alone = shaken(nn.TransformerEncoderLayer(24, 4, 16, 0.0, batch_first=True)).train()
    check(alone, lambda: alone(floats(TOKENS, 24)))


def test_a_self_attention_called_multihead_attn_is_not_cross() -> None:
    model = Named("multihead_attn", nn.MultiheadAttention(8, 2))
    assert find_attention(model)[0].layout.kind == "self"


class Mine(nn.Module):
    """A user's attention whose names nobody knows, with parameters in place of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.ask, self.answer = nn.Linear(24, 24), nn.Linear(24, 12)
        self.table = nn.Parameter(torch.zeros(24, 24))

    def forward(self, x: Tensor, *, heads: int = 4) -> Tensor:
        query = self.ask(x).unflatten(-1, (heads, -1)).transpose(1, 2)
        key = self.answer(x).unflatten(-1, (heads // 2, -1)).transpose(1, 2)
        return functional.softmax(query @ key.repeat_interleave(2, 1).mT / 1.5, -1)


def test_a_users_own_pair() -> None:
    model = shaken(Mine())
    with pytest.raises(LocaterError, match=r"ask\.weight(.|\n)*Recipe"):
        find_attention(model)
    (found,) = find_attention(model, pairs=[Pair(model.ask, model.answer, 4, temperature=1.5)])
    live = LiveAttention(found.layout, found.sources, model)
    with watched([live]) as seen, torch.no_grad():
        model(floats(TOKENS, 24))
    assert mismatch(live.form(), seen["ask"]) < EXACT
    assert (found.layout.name, found.layout.kv_heads, found.module) == ("ask", 2, None)
    bare, named = find_attention(
        model, pairs=[(model.table, model.table, 3), Pair(model.ask, model.ask, 2, name="mine")]
    )
    assert bare.query_parameters == bare.key_parameters == (model.table,)
    assert bare.layout.temperature == math.sqrt(8) and bias_of(bare, "query") is None
    assert named.layout.name == "mine" and named.layout.layer == 1


def test_pairs_that_do_not_fit_are_refused() -> None:
    model = Mine()
    with pytest.raises(InputError, match=r"\(24, 24\) and a key of \(12, 24\) do not make 3 heads"):
        find_attention(model, pairs=[(model.ask, model.answer, 3)])
    with pytest.raises(InputError, match=r"Linear is no projection of Mine\.\nhint: a Pair takes"):
        find_attention(model, pairs=[(nn.Linear(24, 24), model.answer, 4)])


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3"])
@pytest.mark.parametrize("is_dora", [False, True])
def test_lora_adapters_belong_to_the_form(name: str, is_dora: bool) -> None:
    import peft

    targets = {"llama": ["q_proj", "k_proj"], "gpt2": ["c_attn"], "phi3": ["qkv_proj"]}[name]
    config = peft.LoraConfig(
        r=3, target_modules=targets, use_dora=is_dora, fan_in_fan_out=name == "gpt2"
    )
    model = shaken(peft.get_peft_model(built(name), config))
    tolerance = EXACT if name == "gpt2" else ANGLES
    found = check(model, lambda: model(**FAMILIES[name].inputs()), tolerance)
    assert found[0].layout.name == observed(name).found[0].layout.name
    assert len(found[0].query_parameters) == (4 if is_dora else 3)

    trace = sum(live.form().trace().sum() for live in found)
    assert isinstance(trace, Tensor)
    trace.backward()
    for live in found:
        adapters = live.query_parameters[1:]
        assert all(part.grad is not None and part.grad.abs().sum() > 0 for part in adapters)
        assert live.query_parameters[0].grad is None  # the base is frozen

    with torch.no_grad():
        whole = [live.form().query for live in found]
        with model.disable_adapter():
            assert not torch.allclose(found[0].form().query, whole[0])
            assert len(found[0].query_parameters) == 1
        model.merge_adapter()
        for live, query in zip(found, whole, strict=True):
            torch.testing.assert_close(live.form().query, query)


def test_an_adapter_that_multiplies_is_skipped_until_merged() -> None:
    import peft

    config = peft.IA3Config(target_modules=["q_proj", "k_proj"], feedforward_modules=[])
    model = peft.get_peft_model(built("llama"), config)
    found, skipped = discover(model)
    assert not found and "merge the adapter first" in skipped[0].reason
    model.merge_adapter()
    assert len(find_attention(model)) == 2


def test_a_pair_sees_lora_too() -> None:
    import peft

    model = peft.get_peft_model(Mine(), peft.LoraConfig(r=2, target_modules=["ask", "answer"]))
    model = shaken(model)
    inner: Any = model.base_model.model
    (found,) = find_attention(model, pairs=[Pair(inner.ask, inner.answer, heads=4)])
    expected = inner.ask.base_layer.weight + inner.ask.get_delta_weight("default")
    torch.testing.assert_close(weight_of(found, "query").flatten(0, 1), expected)
    assert found.layout.name == "ask" and bias_of(found, "query") is not None


def compiled(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit")  # as torch imports its own compiler
        return torch.compile(model)  # compiles nothing before it runs


def checkpointed(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner: Any = model
    inner.h[0].attn = checkpoint_wrapper(inner.h[0].attn)
    return model


def lightning_module(model: nn.Module) -> nn.Module:
    import lightning

    module = lightning.LightningModule()
    module.net = model
    module.config = {"learning_rate": 0.1, "heads": 99}  # a training config is not the model's
    return module


def inside_sequential(model: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), SimpleModule(auto_model=model))


class SimpleModule(nn.Module):
    """A holder of other modules."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


WRAPPERS = {
    "data parallel": nn.DataParallel,
    "compiled": compiled,
    "both": lambda model: nn.DataParallel(compiled(model)),
    "checkpointed": checkpointed,
    "lightning": lightning_module,
    "sequential": inside_sequential,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapped_models_are_seen_through(name: str) -> None:
    model = built("gpt2")
    plain = find_attention(model)
    wrapped = find_attention(WRAPPERS[name](model))
    assert len(wrapped) == len(plain)
    for one, other in zip(wrapped, plain, strict=True):
        assert one.query_parameters[0] is other.query_parameters[0]
        assert one.layout.name.endswith(other.layout.name)
        assert (one.layout.layer, one.layout.heads) == (other.layout.layer, other.layout.heads)
        assert type(one.module).__name__ == "GPT2Attention"
    names = dict(WRAPPERS["data parallel"](model).named_parameters())
    found, _ = layouts({key: tuple(part.shape) for key, part in names.items()}, {"n_head": 4})
    assert [one.name for one in found] == [one.layout.name for one in plain]
    assert found[0].query.weight in names


@pytest.mark.parametrize("normed", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrized_weights_are_read_as_what_they_amount_to(normed: Any) -> None:
    model = shaken(Stack("layers", [Named("mixer", Separate("query", "key"))]))
    mixer: Any = model.layers[0].mixer
    normed(mixer.query)
    model.eval()
    (live,) = check(model, lambda: model(floats(TOKENS, 24)))
    torch.testing.assert_close(weight_of(live, "query").flatten(0, 1), mixer.query.weight)
    live.form().trace().sum().backward()
    assert all(part.grad is not None for part in live.query_parameters)


def test_gradients_reach_the_stored_parameters() -> None:
    for name in ("gpt2", "falcon, new", "llama", "t5"):
        model = built(name)
        for live in find_attention(model):
            live.form(distances=8).trace().sum().backward()
            for parameter in {*live.query_parameters, *live.key_parameters}:
                assert parameter.grad is not None and parameter.grad.abs().sum() > 0


def test_a_layer_that_is_used_twice_is_found_once() -> None:
    block = Named("attn", Packed("qkv", "num_heads"))
    model = Stack("blocks", [block, block, Named("attn", Packed("qkv", "num_heads"))])
    assert [live.layout.layer for live in find_attention(model)] == [0, 2]
    tied = Stack("blocks", [Named("attn", Separate("q_proj", "k_proj")) for _ in range(2)])
    first, second = (block.attn for block in tied.blocks)
    second.q_proj.weight = first.q_proj.weight
    assert len(find_attention(tied)) == 2  # their keys differ


def test_layers_are_selected_by_a_regular_expression() -> None:
    model = built("bart")
    chosen = find_attention(model, layers=r"decoder.*self_attn")
    assert [live.layout.name for live in chosen] == ["decoder.layers.0.self_attn"]
    message = r"layers='nothing' selects none of 3 attentions: decoder\.layers\.0\.encoder_attn, "
    with pytest.raises(LocaterError, match=message):
        find_attention(model, layers="nothing")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_that_are_not_numbers_of_their_own_are_skipped(dtype: torch.dtype) -> None:
    model = Stack("blocks", [Named("attn", Packed("qkv", "num_heads"))])
    packed: Any = model.blocks[0].attn.qkv
    packed.weight = nn.Parameter(packed.weight.to(dtype), requires_grad=False)
    _, (skipped,) = discover(model)
    assert skipped.name == "blocks.0.attn" and f"{dtype}: quantized" in skipped.reason


def test_models_without_storage_are_found() -> None:
    with torch.device("meta"):
        model = nn.TransformerEncoderLayer(8, 2)
    (live,) = find_attention(model)
    assert weight_of(live, "query").is_meta and weight_of(live, "query").shape == (2, 4, 8)


def test_configs_may_be_dictionaries_or_namespaces() -> None:
    for config in ({"n_head": 2}, SimpleNamespace(n_head=2)):
        packed = Packed("c_attn", "unheard_of")
        model = Stack("h", [Named("attn", packed)], config)
        assert find_attention(model)[0].layout.heads == 2
    model = Stack("h", [Named("attn", Packed("c_attn", "unheard_of"))])
    with pytest.raises(LocaterError, match="number of heads is not known"):
        find_attention(model)


def test_finding_attention_leaves_the_model_alone() -> None:
    model = built("gpt2")
    before = {name: (id(part), part._version) for name, part in model.named_parameters()}
    with torch.no_grad():
        for live in find_attention(model):
            live.form()
    assert before == {name: (id(part), part._version) for name, part in model.named_parameters()}
    assert not model._forward_hooks and tokens().shape == (2, TOKENS)
