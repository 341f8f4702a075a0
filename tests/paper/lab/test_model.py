"""The model is fairseq's transformer_lm with its defaults, and other code can see into it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import NormalDist
from typing import Any

import pytest
import torch
from tests.models.families import bias_of, weight_of
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from locater import ConfigError, LocAteR, LocAteRConfig, find_attention
from locater.paper.lab.batches import MaskedBatches, Source, load_digits
from locater.paper.lab.model import Transformer, TransformerConfig

Z_LIMIT = NormalDist().inv_cdf(1 - 1e-6 / 2)


def built(seed: int = 0, **settings: object) -> Transformer:
    config = TransformerConfig(**{"vocabulary": 50, "dim": 16, "length": 8, **settings})  # type: ignore[arg-type]
    return Transformer(config, torch.Generator().manual_seed(seed))


def tokens(model: Transformer, batch: int = 3, seed: int = 1) -> Tensor:
    shape = batch, model.config.length
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(seed))


@contextmanager
def fused_calls() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Queries and keys of every fused attention, in the order of the calls."""
    calls: list[tuple[Tensor, Tensor]] = []

    class Notes(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is functional.scaled_dot_product_attention:
                calls.append(args[:2])
            return func(*args, **(kwargs or {}))

    with Notes():
        yield calls


def plain_forward(weights: dict[str, Tensor], ids: Tensor, *, heads: int, norm: str) -> Tensor:
    """The decoder of fairseq 0.12.2 step by step, one sequence, one head and one token at a time.

    Positions count from padding_idx + 1 = 2; queries are scaled after their bias.
    """
    dim = weights["embedding.weight"].shape[1]
    half, size = dim // 2, dim // heads
    out = []
    for sequence in ids:
        rows = []
        for place, token in enumerate(sequence.tolist()):
            angles = [(place + 2) / 10000 ** (i / (half - 1)) for i in range(half)]
            wave = [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]
            row = weights["embedding.weight"][token] * dim**0.5
            rows.append(row + torch.tensor(wave, dtype=row.dtype))
        x = torch.stack(rows)
        for layer in range(sum(name.endswith("fc1.weight") for name in weights)):
            own = {
                name.removeprefix(f"layers.{layer}."): value
                for name, value in weights.items()
                if name.startswith(f"layers.{layer}.")
            }

            def normed(x: Tensor, name: str, own: dict[str, Tensor] = own) -> Tensor:
                mean, spread = x.mean(1, keepdim=True), x.var(1, keepdim=True, unbiased=False)
                scale, shift = own[f"{name}.weight"], own[f"{name}.bias"]
                return (x - mean) / (spread + 1e-5).sqrt() * scale + shift

            def linear(x: Tensor, name: str, own: dict[str, Tensor] = own) -> Tensor:
                return x @ own[f"{name}.weight"].T + own[f"{name}.bias"]

            inner = normed(x, "attn_norm_before") if norm == "pre" else x
            query, key, value = (linear(inner, f"self_attn.{side}_proj") for side in "qkv")
            query = query * size**-0.5
            mixed = torch.zeros_like(x)
            for head in range(heads):
                part = slice(head * size, (head + 1) * size)
                for place in range(len(x)):
                    logits = key[: place + 1, part] @ query[place, part]
                    mixed[place, part] = logits.softmax(0) @ value[: place + 1, part]
            x = x + linear(mixed, "self_attn.out_proj")
            x = normed(x, "attn_norm_after") if norm == "post" else x
            inner = normed(x, "ffn_norm_before") if norm == "pre" else x
            x = x + linear(linear(inner, "fc1").clamp(min=0), "fc2")
            x = normed(x, "ffn_norm_after") if norm == "post" else x
        if norm == "pre":
            x = functional.layer_norm(
                x, (dim,), weights["final_norm.weight"], weights["final_norm.bias"]
            )
        out.append(x)
    return torch.stack(out)


@pytest.mark.parametrize(
    ("norm", "layers", "heads"), [("post", 1, 1), ("post", 3, 2), ("pre", 2, 1), ("none", 2, 1)]
)
def test_one_forward_is_fairseqs(norm: str, layers: int, heads: int) -> None:
    model = built(norm=norm, layers=layers, heads=heads, ffn=24).double().eval()
    ids = tokens(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # gains and shifts that are not one and zero
                parameter.add_(torch.linspace(-0.3, 0.4, parameter.numel()))
        expected = plain_forward(dict(model.state_dict()), ids, heads=heads, norm=norm)
        # the table of positions is kept in float32
        torch.testing.assert_close(model(ids), expected, atol=2e-5, rtol=2e-5)
        logits = model.output(expected)
        loss = functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        torch.testing.assert_close(model.loss(ids, ids), loss, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_the_reference_notices_the_other_norm(norm: str) -> None:
    model = built(norm=norm, layers=2).double().eval()
    ids = tokens(model)
    weights = dict(model.state_dict())
    for one in ("attn", "ffn"):
        for layer in range(2):
            for part, value in (("weight", torch.ones(16)), ("bias", torch.zeros(16))):
                for side in ("before", "after"):
                    name = f"layers.{layer}.{one}_norm_{side}.{part}"
                    weights.setdefault(name, value.double())
    weights.setdefault("final_norm.weight", torch.ones(16).double())
    weights.setdefault("final_norm.bias", torch.zeros(16).double())
    other = plain_forward(weights, ids, heads=1, norm="pre" if norm == "post" else "post")
    assert (model(ids) - other).abs().max() > 0.1


@pytest.mark.paper("Section 7")
@pytest.mark.parametrize(("dim", "layers"), [(32, 1), (128, 1), (128, 6), (32, 3)])
def test_parameters_are_counted_as_the_papers(dim: int, layers: int) -> None:
    model = built(vocabulary=33_278, dim=dim, layers=layers, length=64)
    attention = 4 * (dim * dim + dim)
    feed_forward = 2 * (dim * dim + dim)
    block = attention + feed_forward + 2 * 2 * dim
    total = sum(parameter.numel() for parameter in model.parameters())
    assert total == 2 * 33_278 * dim + layers * block
    assert not any("positions" in name for name in model.state_dict())


def test_initial_weights_have_fairseqs_spread() -> None:
    """Variances by name; the error of a sample variance is that of the drawn distribution."""
    model = built(dim=128, layers=2, vocabulary=4_000, seed=7, ffn=64)
    dim = 128
    uniform = {  # bound of U(-b, b)
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), math.sqrt(1 / 2) * math.sqrt(3 / dim)),
        "out_proj": math.sqrt(3 / dim),
        "fc1": dim**-0.5,
        "fc2": 64**-0.5,
    }
    for name, parameter in model.named_parameters():
        kind = next((kind for kind in uniform if f"{kind}." in name), None)
        count = parameter.numel()
        if "norm" in name:
            assert (parameter == (1 if name.endswith("weight") else 0)).all()
        elif name.endswith("out_proj.bias"):
            assert not parameter.any()
        elif name in ("embedding.weight", "output.weight"):
            z = (parameter.square().mean().item() * dim - 1) / math.sqrt(2 / count)
            assert abs(z) < Z_LIMIT, name
            z = (parameter.pow(4).mean().item() * dim**2 - 3) / math.sqrt(96 / count)
            assert abs(z) < Z_LIMIT, name
        elif kind is not None:
            in_features = 64 if kind == "fc2" else dim
            bound = uniform[kind] if name.endswith("weight") else in_features**-0.5
            assert 0.9 * bound < parameter.abs().max() <= bound, name
            z = (parameter.square().mean().item() * 3 / bound**2 - 1) / math.sqrt(0.8 / count)
            assert abs(z) < Z_LIMIT, name
        else:
            raise AssertionError(name)


def test_a_joint_w_qk_starts_as_wide_as_the_product() -> None:
    """Equal variances, within the spread over 20 models of each kind."""
    norms: dict[str, Tensor] = {}
    for qk in ("factored", "joint"):
        squares = []
        for seed in range(20):
            (attention,) = find_attention(built(seed, dim=32, heads=2, qk=qk))
            form = attention.form()
            product = form.query.mT @ form.key.expand_as(form.query)
            squares.append(product.square().sum().detach() / form.query.shape[0])
        norms[qk] = torch.stack(squares)
    gap = norms["joint"].mean() - norms["factored"].mean()
    error = ((norms["joint"].var() + norms["factored"].var()) / 20).sqrt()
    assert gap.abs() < Z_LIMIT * error


def test_the_generator_alone_decides_the_weights() -> None:
    first, second, other = built(3), built(3), built(4)
    state = torch.get_rng_state()
    built(3)
    assert torch.equal(state, torch.get_rng_state())
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])
    assert not torch.equal(first.output.weight, other.output.weight)


@pytest.mark.parametrize("task", ["causal", "masked"])
def test_only_an_encoder_sees_the_future(task: str) -> None:
    model = built(task=task).eval()
    ids = tokens(model)
    changed = ids.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 50
    moved = (model(ids) - model(changed)).abs().amax(dim=(0, 2)) > 0
    assert moved[5:].all()
    assert moved[:5].any() == (task == "masked")


@pytest.mark.parametrize("qk", ["factored", "joint"])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("qk_bias", [True, False])
def test_locater_finds_the_forms_that_the_model_computes_with(
    qk: str, heads: int, qk_bias: bool
) -> None:
    model = built(qk=qk, heads=heads, layers=2, qk_bias=qk_bias, norm="pre").eval()
    inputs: list[Tensor] = []
    attention = model.get_submodule("layers.1.self_attn")
    attention.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with fused_calls() as calls:
        model(tokens(model))
    found = find_attention(model)
    assert [one.layout.name for one in found] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert found[0].layout.temperature == pytest.approx((16 / heads) ** 0.5)
    query, key = calls[1]
    x = inputs[0]
    w_query = weight_of(found[1], "query")
    w_key = weight_of(found[1], "key").expand_as(w_query)
    bias_q, bias_k = bias_of(found[1], "query"), bias_of(found[1], "key")
    mine_q = torch.einsum("btm,nhm->bnth", x, w_query)
    mine_k = torch.einsum("btm,nhm->bnth", x, w_key)
    mine_q = mine_q if bias_q is None else mine_q + bias_q[:, None]
    mine_k = mine_k if bias_k is None else mine_k + bias_k[:, None]
    torch.testing.assert_close(mine_q @ mine_k.mT, query @ key.mT, rtol=1e-4, atol=1e-5)
    assert (bias_q is not None) == qk_bias
    assert LocAteR(model, LocAteRConfig()).penalty().requires_grad


def test_a_joint_key_is_no_parameter_to_train() -> None:
    model = built(qk="joint")
    ids = tokens(model)
    model.loss(ids, ids).backward()
    attention = model.get_submodule("layers.0.self_attn")
    assert isinstance(attention.k_proj, nn.Linear)
    assert attention.k_proj.weight.grad is None
    assert torch.equal(attention.k_proj.weight, torch.eye(16))


def test_dropout_acts_in_training_only_and_at_its_rate() -> None:
    model = built(dropout=0.5, dim=64)
    ids = tokens(model)
    assert not torch.equal(model(ids), model(ids))
    model.eval()
    assert torch.equal(model(ids), model(ids))


def test_a_few_steps_learn_a_pattern_in_every_task() -> None:
    """Knowing the frequencies alone gives ln 7 on the stripes and ln 10 on the digits."""
    digits = load_digits(0)
    stripes = torch.arange(400) % 7
    cases = {
        "causal": (built(dropout=0.0), lambda step: (stripes[:8][None], stripes[1:9][None])),
        "masked": (
            built(task="masked", dropout=0.0),
            MaskedBatches(stripes, vocabulary=50, length=8, batch=8, seed=0).at,
        ),
        "vision": (
            built(task="vision", vocabulary=10, length=16, dim=32, dropout=0.0),
            Source(*digits["train"], batch=128, seed=0).at,
        ),
    }
    for task, (model, batch) in cases.items():
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        losses = []
        for step in range(60):
            optimizer.zero_grad()
            loss = model.loss(*batch(step))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        frequencies = math.log(10 if task == "vision" else 7)
        assert losses[0] > frequencies, task
        assert sum(losses[-10:]) / 10 < 0.9 * frequencies, task


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 3}, "3 heads with 3 heads of keys do not divide 16 dimensions"),
        ({"dim": 15}, "pairs of dimensions; dim is 15"),
        ({"dropout": 1.0}, "dropout must be from 0 to below 1, got 1.0"),
        ({"layers": 0}, "layers must be at least 1, got 0"),
    ],
)
def test_settings_that_make_no_model_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        built(**settings)


@pytest.mark.parametrize("name", ["norm", "task", "qk"])
def test_a_choice_that_does_not_exist_is_refused(name: str) -> None:
    config = built().config
    object.__setattr__(config, name, "both")  # the type checker of the tests would come first
    with pytest.raises(ConfigError, match=f"unknown {name} 'both'"):
        config.__post_init__()


def test_a_longer_text_than_the_model_has_positions_is_refused() -> None:
    model = built(length=8)
    with pytest.raises(ConfigError, match="9 tokens, but the model was built for 8"):
        model(torch.zeros(1, 9, dtype=torch.int64))


MODERN = {
    "vocabulary": 50,
    "dim": 16,
    "ffn": 24,
    "heads": 4,
    "kv_heads": 2,
    "layers": 2,
    "length": 12,
    "norm": "pre",
    "norm_kind": "rms",
    "positions": "rotary",
    "activation": "swiglu",
    "bias": False,
    "tied": True,
    "dropout": 0.0,
}


def as_llama(model: Transformer) -> nn.Module:
    """The same weights in transformers' Llama, whose embeddings are not scaled by √d."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = model.config
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=ours.vocabulary, hidden_size=ours.dim, intermediate_size=ours.ffn,
            num_hidden_layers=ours.layers, num_attention_heads=ours.heads,
            num_key_value_heads=ours.kv_heads, rms_norm_eps=1e-6, tie_word_embeddings=False,
        )
    )  # fmt: skip
    names = {"self_attn.out_proj": "self_attn.o_proj", "fc1": "mlp.up_proj",
             "gate": "mlp.gate_proj", "fc2": "mlp.down_proj", "attn_norm_before": "input_layernorm",
             "ffn_norm_before": "post_attention_layernorm"}  # fmt: skip
    state = {}
    for name, value in model.state_dict().items():
        for mine, theirs in names.items():
            name = name.replace(mine, theirs)
        state[f"model.{name}".replace("model.final_norm", "model.norm")] = value
    embedding = state.pop("model.embedding.weight")
    state["model.embed_tokens.weight"] = embedding * ours.dim**0.5
    state["lm_head.weight"] = state.pop("model.output.weight")
    llama.load_state_dict(state)
    return llama.eval()


def test_the_modern_model_is_llama() -> None:
    model = Transformer(TransformerConfig(**MODERN), torch.Generator().manual_seed(0)).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(1))
    tokens = torch.randint(50, (3, 12), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        theirs = as_llama(model)(tokens).logits
        torch.testing.assert_close(model.output(model(tokens)), theirs)
        other = as_llama(model.double().float())(tokens.roll(1, 1)).logits
    assert not torch.allclose(other, theirs)


def test_the_modern_models_forms_give_its_logits() -> None:
    """Shared keys and rotary positions, found by the same recipes as anybody's model."""
    model = Transformer(TransformerConfig(**MODERN), torch.Generator().manual_seed(0)).eval()  # type: ignore[arg-type]
    attention = model.layers[0].self_attn
    shown = torch.randn(1, 12, 16, generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), fused_calls() as calls:
        attention(shown)
        live, *_ = find_attention(model)
        form = live.form()
    assert (live.layout.heads, live.layout.kv_heads) == (4, 2)
    assert form.rotary is not None
    ((query, key),) = calls
    theirs = (query @ key.mT * attention.scaling)[0]
    for at, by in ((11, 3), (5, 5), (7, 0)):
        asking = form.rotary.turn(
            form.query @ shown[0, at], form.rotary.phases(torch.tensor(at - by)).to(torch.cfloat)
        )
        mine = (asking * (form.key @ shown[0, by])).sum(-1)
        torch.testing.assert_close(mine / form.temperature, theirs[:, at, by])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"heads": 4, "kv_heads": 3}, "4 heads with 3 heads of keys"),
        ({"qk": "joint", "positions": "rotary"}, "one matrix W_QK a head goes with neither"),
        ({"tied": True, "task": "masked"}, "have different rows"),
    ],
)
def test_shapes_that_make_no_model_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TransformerConfig(vocabulary=10, **changes)  # type: ignore[arg-type]
