"""LocAteR on live models: the dense definition's value and gradients, through every door."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from locater import LocAteR, LocAteRConfig, Pair
from locater.errors import ConfigError, InputError, LocaterError

CONFIG = LocAteRConfig(scale_strength=0.7, mean_strength=1.3, target=0.4)
MODEL, HEADS, HEAD = 16, 4, 4


@pytest.fixture
def unchecked() -> Iterator[None]:
    """As on a user's machine, where no type is checked at run time."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


class Mine(nn.Module):
    """A user's attention whose names no recipe knows."""

    def __init__(self, kv_heads: int = 2) -> None:
        super().__init__()
        self.ask = nn.Linear(MODEL, HEADS * HEAD)
        self.answer = nn.Linear(MODEL, kv_heads * HEAD)
        self.out = nn.Linear(MODEL, MODEL)

    def forward(self, tokens: Tensor) -> Tensor:
        query = self.ask(tokens).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        key = self.answer(tokens).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        value = tokens.unflatten(-1, (HEADS, HEAD)).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(
            query, key.repeat_interleave(HEADS // key.shape[1], 1), value
        )
        return tokens + self.out(mixed.transpose(1, 2).flatten(-2))


def seeded(model: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def tokens(seed: int = 1, batch: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 6, MODEL, generator=generator)


def dense(
    heads: list[tuple[Tensor, Tensor]], config: LocAteRConfig, temperature: float, share: int = 1
) -> Tensor:
    """The definition, head by head: W_QK multiplied out, autograd for the rest."""
    parts = []
    for queries, keys in heads:
        for head, query in enumerate(queries):
            form = query.mT @ keys[head // share]
            gap = form.trace() - config.target_trace(temperature)
            scale = config.scale_strength * form.square().sum()
            parts.append(scale + config.mean_strength * gap.square())
    total = torch.stack(parts).sum()
    return total / len(parts) if config.reduce == "mean" else total


def split(weight: Tensor, heads: int = HEADS) -> Tensor:
    return weight.reshape(heads, -1, weight.shape[-1])


Truth = Callable[[Any], list[tuple[Tensor, Tensor]]]


def gpt2() -> tuple[nn.Module, Truth, int]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=11, n_positions=8, n_embd=MODEL, n_layer=2, n_head=HEADS)

    def truth(model: Any) -> list[tuple[Tensor, Tensor]]:
        stored = [layer.attn.c_attn.weight.T for layer in model.transformer.h]
        return [(split(w[:MODEL]), split(w[MODEL : 2 * MODEL])) for w in stored]

    return GPT2LMHeadModel(config), truth, 1


def llama() -> tuple[nn.Module, Truth, int]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=11,
        hidden_size=MODEL,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
    )

    def truth(model: Any) -> list[tuple[Tensor, Tensor]]:
        layers = [layer.self_attn for layer in model.model.layers]
        return [(split(a.q_proj.weight), split(a.k_proj.weight, 2)) for a in layers]

    return LlamaForCausalLM(config), truth, 2


def bert() -> tuple[nn.Module, Truth, int]:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=11,
        hidden_size=MODEL,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
    )

    def truth(model: Any) -> list[tuple[Tensor, Tensor]]:
        layers = [layer.attention.self for layer in model.encoder.layer]
        return [(split(a.query.weight), split(a.key.weight)) for a in layers]

    return BertModel(config), truth, 1


def albert() -> tuple[nn.Module, Truth, int]:
    """Three layers that share one set of weights: counted once."""
    from transformers import AlbertConfig, AlbertModel

    config = AlbertConfig(
        vocab_size=11,
        embedding_size=8,
        hidden_size=MODEL,
        intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
    )

    def truth(model: Any) -> list[tuple[Tensor, Tensor]]:
        attention = model.encoder.albert_layer_groups[0].albert_layers[0].attention
        return [(split(attention.query.weight), split(attention.key.weight))]

    return AlbertModel(config), truth, 1


def encoder() -> tuple[nn.Module, Truth, int]:
    def truth(model: Any) -> list[tuple[Tensor, Tensor]]:
        stored = model.self_attn.in_proj_weight
        return [(split(stored[:MODEL]), split(stored[MODEL : 2 * MODEL]))]

    layer = nn.TransformerEncoderLayer(MODEL, HEADS, 8, dropout=0.0, batch_first=True)
    return layer, truth, 1


def shared() -> tuple[nn.Module, Truth, int]:
    """One layer object, used twice: counted once."""
    layer, truth, share = encoder()
    return nn.Sequential(layer, layer), lambda model: truth(model[0]), share


def lora() -> tuple[nn.Module, Truth, int]:
    from peft import LoraConfig, get_peft_model

    model, _, _ = llama()
    adapted: Any = get_peft_model(
        model,  # type: ignore[arg-type]
        LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "k_proj"]),
    )

    def effective(linear: Any) -> Tensor:
        low, high = linear.lora_A["default"].weight, linear.lora_B["default"].weight
        return linear.base_layer.weight + 1.5 * high @ low  # alpha over rank

    def truth(model: Any) -> list[tuple[Tensor, Tensor]]:
        layers = [layer.self_attn for layer in model.base_model.model.model.layers]
        return [(split(effective(a.q_proj)), split(effective(a.k_proj), 2)) for a in layers]

    return adapted, truth, 2


MODELS = [gpt2, llama, bert, albert, encoder, shared, lora]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def moved(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the zeros that a fused weight's values get from one way and not from the other."""
    return {name: grad for name, grad in found.items() if grad.any()}


@pytest.mark.parametrize("unit", ["trace", "temperature"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("build", MODELS)
def test_penalty_and_gradients_are_those_of_the_dense_definition(
    build: Callable[[], tuple[nn.Module, Truth, int]], reduce: Any, unit: Any
) -> None:
    model, truth, share = build()
    seeded(model).double()
    config = LocAteRConfig(
        scale_strength=0.7, mean_strength=1.3, target=0.4, target_unit=unit, reduce=reduce
    )
    expected = dense(truth(model), config, math.sqrt(HEAD), share)
    expected.backward()
    wanted = moved(gradients(model))
    regularizer = LocAteR(model, config)
    penalty = regularizer.penalty()
    torch.testing.assert_close(penalty, expected)
    penalty.backward()
    torch.testing.assert_close(moved(gradients(model)), wanted)
    regularizer.add_gradients()
    torch.testing.assert_close(moved(gradients(model)), wanted)
    if build is lora:
        assert all("lora_" in name for name in wanted) and len(wanted) == 8


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("as_parameters", [False, True])
def test_a_users_own_attention_is_named_by_pairs(kv_heads: int, as_parameters: bool) -> None:
    model = nn.Sequential(Mine(kv_heads), Mine(kv_heads))
    seeded(model).double()
    sides = [
        (m.ask.weight, m.answer.weight) if as_parameters else (m.ask, m.answer)
        for m in model
        if isinstance(m, Mine)
    ]
    pairs = [Pair(*side, heads=HEADS, temperature=3.0, name=str(k)) for k, side in enumerate(sides)]
    config = LocAteRConfig(target_unit="temperature")
    heads = [
        (split(m.ask.weight), split(m.answer.weight, kv_heads))
        for m in model
        if isinstance(m, Mine)
    ]
    expected = dense(heads, config, 3.0, HEADS // kv_heads)
    expected.backward()
    wanted = gradients(model)
    penalty = LocAteR(model, config, pairs=pairs).penalty()
    torch.testing.assert_close(penalty, expected)
    penalty.backward()
    torch.testing.assert_close(gradients(model), wanted)


@pytest.mark.parametrize("chosen", [None, [2, 1]])
@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
def test_weights_that_hold_queries_keys_and_values_in_turn(
    kv_heads: int, chosen: list[int] | None
) -> None:
    """GPT-NeoX' and Falcon's packing, cut by hand: per key head its queries, its key, its value."""
    from transformers import FalconConfig, FalconModel

    config = FalconConfig(
        vocab_size=11,
        hidden_size=MODEL,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_kv_heads=kv_heads,
        new_decoder_architecture=True,
    )
    model: Any = seeded(FalconModel(config)).double()
    stored = model.h[0].self_attention.query_key_value.weight
    share = HEADS // kv_heads
    blocks = stored.reshape(kv_heads, share + 2, HEAD, MODEL)
    queries = blocks[:, :share].reshape(HEADS, HEAD, MODEL)
    keys = blocks[:, share].repeat_interleave(share, 0)
    wanted = slice(None) if chosen is None else chosen
    expected = dense([(queries[wanted], keys[wanted])], CONFIG, math.sqrt(HEAD))
    ours = LocAteR(model, CONFIG, heads=chosen).penalty()
    torch.testing.assert_close(ours, expected)
    (gradient,) = torch.autograd.grad(expected, [stored])
    torch.testing.assert_close(torch.autograd.grad(ours, [stored])[0], gradient)


def test_layers_and_heads_can_be_selected() -> None:
    model, truth, share = llama()
    seeded(model)
    (queries, keys) = truth(model)[1]
    chosen = [3, 0]
    heads = [(queries[chosen], keys[[head // share for head in chosen]])]
    regularizer = LocAteR(model, CONFIG, layers=r"layers\.1\.", heads=chosen)
    assert regularizer.total_heads == 2
    expected = dense(heads, CONFIG, math.sqrt(HEAD))
    torch.testing.assert_close(regularizer.penalty(), expected)
    expected.backward()
    wanted = moved(gradients(model))
    regularizer.add_gradients()
    torch.testing.assert_close(moved(gradients(model)), wanted)


def test_small_layers_taken_together_are_the_sum_of_each() -> None:
    model: Any = seeded(nn.Sequential(*(encoder()[0] for _ in range(3)))).double()
    together = LocAteR(model, CONFIG).penalty()
    alone = [LocAteR(model, CONFIG, layers=rf"^{k}\.").penalty() for k in range(3)]
    torch.testing.assert_close(together, torch.stack(alone).sum())
    weights = [layer.self_attn.in_proj_weight for layer in model]
    expected = torch.autograd.grad(torch.stack(alone).sum(), weights)
    torch.testing.assert_close(torch.autograd.grad(together, weights), expected)


def covariances(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    roots = torch.randn(count, MODEL, MODEL, generator=generator)
    return [root @ root.mT / MODEL for root in roots]


@pytest.mark.parametrize("per_attention", [False, True])
def test_a_given_covariance_makes_it_the_theorys_own_form(per_attention: bool) -> None:
    model, truth, share = llama()
    seeded(model)
    sigmas = covariances(2) if per_attention else covariances(1) * 2
    names = [f"model.layers.{k}.self_attn" for k in range(2)]
    given = dict(zip(names, sigmas, strict=True)) if per_attention else sigmas[0]
    roots = [torch.linalg.cholesky(sigma.double()).float() for sigma in sigmas]
    heads = [(q @ root, k @ root) for (q, k), root in zip(truth(model), roots, strict=True)]
    expected = dense(heads, CONFIG, math.sqrt(HEAD), share)
    expected.backward()
    wanted = moved(gradients(model))
    regularizer = LocAteR(model, CONFIG, covariance=given)
    torch.testing.assert_close(regularizer.penalty(), expected, rtol=1e-4, atol=0)
    regularizer.add_gradients()
    torch.testing.assert_close(moved(gradients(model)), wanted, rtol=1e-4, atol=1e-4)


def test_running_covariance_is_that_of_the_tokens_and_its_trace_that_of_the_scores() -> None:
    model = Mine(kv_heads=HEADS)
    seeded(model).train()
    pairs = [Pair(model.ask, model.answer, heads=HEADS)]
    regularizer = LocAteR(model, CONFIG, pairs=pairs, covariance="running")
    plain = LocAteR(model, CONFIG, pairs=pairs)
    assert regularizer.penalty().item() == plain.penalty().item()  # nothing seen yet
    seen = tokens()
    model(seen)
    flat = seen.flatten(0, 1).double()
    sigma = torch.cov(flat.mT, correction=0)
    running = regularizer._running["ask"].covariance()
    assert running is not None
    torch.testing.assert_close(running.double(), sigma, rtol=1e-5, atol=1e-6)
    # E[q·k] over centred tokens is tr(W_QK Σ): the activations say the same, without any form
    centred = flat - flat.mean(0)
    asked, answered = (
        split(linear.weight.double()) @ centred.mT for linear in (model.ask, model.answer)
    )
    scores = (asked * answered).sum(1).mean(-1)
    metrics = regularizer.metrics()
    assert metrics["locater/layer_0/trace"] == pytest.approx(scores.mean().item(), rel=1e-4)
    norm = (
        torch.einsum("hit,hjt->hij", asked, asked),
        torch.einsum("hit,hjt->hij", answered, answered),
    )
    squared = (norm[0] * norm[1]).sum((-2, -1)).mean() / len(flat) ** 2
    assert metrics["locater/layer_0/frobenius_squared"] == pytest.approx(squared.item(), rel=1e-4)


def test_running_covariance_forgets_slowly_and_ignores_evaluation() -> None:
    model = Mine()
    pairs = [Pair(model.ask, model.answer, heads=HEADS)]
    running = LocAteR(model, CONFIG, pairs=pairs, covariance="running")._running["ask"]
    batches = [tokens(seed=k) for k in (1, 2, 3)]
    model.train()
    model(batches[0])
    model(batches[1])
    model.eval()
    model(batches[2])
    old, new = (batch.flatten(0, 1) for batch in batches[:2])
    mean = 0.95 * old.mean(0) + 0.05 * new.mean(0)
    square = 0.95 * old.mT @ old / len(old) + 0.05 * new.mT @ new / len(new)
    assert running.mean is not None
    torch.testing.assert_close(running.mean, mean)
    torch.testing.assert_close(running.covariance(), square - torch.outer(mean, mean))


def test_a_running_covariance_keeps_its_digits_under_autocast() -> None:
    """With means of 8, squares of 65: bfloat16 rounds them by a quarter of the variance."""
    model = Mine().train()
    pairs = [Pair(model.ask, model.answer, heads=HEADS)]
    running = LocAteR(model, CONFIG, pairs=pairs, covariance="running")._running["ask"]
    seen = tokens(batch=40) + 8
    with torch.autocast("cpu", torch.bfloat16):
        model(seen)
    wanted = torch.cov(seen.flatten(0, 1).mT.double(), correction=0)
    found = running.covariance()
    assert found is not None  # float32 keeps 24 bits of 65
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=65 * 2**-20)


def two_layers(seed: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(MODEL, HEADS, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    seeded(model, seed)
    return model


@pytest.mark.parametrize("covariance", [None, "running"])
def test_a_module_that_was_replaced_is_penalized_in_its_new_shape(covariance: Any) -> None:
    model, other = two_layers(0), two_layers(1)
    regularizer = LocAteR(model, CONFIG, covariance=covariance)
    model(tokens())
    old = model.layers[1].self_attn
    old_layer = model.layers[1]
    model.layers[1] = other.layers[1]
    model(tokens(2))
    if covariance is None:
        assert regularizer.penalty().item() == LocAteR(model, CONFIG).penalty().item()
    regularizer.add_gradients()
    assert isinstance(old, nn.MultiheadAttention)
    assert old.in_proj_weight.grad is None
    assert other.layers[1].self_attn.in_proj_weight.grad is not None
    assert model.layers[0].self_attn.in_proj_weight.grad is not None
    if covariance == "running":  # it goes on with the tokens of the new module, not the old one
        before = regularizer.state_dict()
        old_layer(tokens(3))
        assert all(torch.equal(before[n], v) for n, v in regularizer.state_dict().items())
        model(tokens(4))
        after = regularizer.state_dict()
        assert all(not torch.equal(before[name], after[name]) for name in before)


def test_adapters_that_come_later_are_seen() -> None:
    from peft import LoraConfig, inject_adapter_in_model

    model = Mine()
    seeded(model)
    found, pair = own(model), [Pair(model.ask, model.answer, heads=HEADS)]
    plain = found.penalty().item()
    wrapped: Any = inject_adapter_in_model(LoraConfig(r=2, target_modules=["ask", "answer"]), model)
    seeded(wrapped, 3)
    fresh = LocAteR(wrapped, CONFIG, pairs=[Pair(wrapped.ask, wrapped.answer, heads=HEADS)])
    assert found.penalty().item() == fresh.penalty().item() != plain
    assert LocAteR(wrapped, CONFIG, pairs=pair).penalty().item() == fresh.penalty().item()


def test_a_pair_that_left_the_model_is_said() -> None:
    model = Mine()
    regularizer = own(model)
    model.ask = nn.Linear(MODEL, HEADS * HEAD)
    with pytest.raises(InputError, match=r"Linear is no projection of Mine\.\nhint: "):
        regularizer.penalty()


def test_a_state_comes_back_and_junk_is_refused(unchecked: None) -> None:
    model = Mine()
    regularizer = own(model, covariance="running")
    model(tokens())
    state = regularizer.state_dict()
    fresh = own(model, covariance="running")
    fresh.load_state_dict({})  # made before the first batch
    fresh.load_state_dict(state)
    assert fresh.penalty().item() == regularizer.penalty().item()
    mean, square = state["ask.mean"], state["ask.square"]
    junk: list[dict[str, Any]] = [
        {"other.mean": mean, "other.square": square},
        {"ask.mean": mean},
        {"ask.square": square},
        {"ask.mean": mean, "ask.square": square[:2]},
        {"ask.mean": mean[None], "ask.square": square},
        {"ask.mean": mean, "ask.square": square * math.nan},
        {"ask.mean": mean.tolist(), "ask.square": square},
        {"ask.mean": mean.to(torch.complex64), "ask.square": square},
        {**state, "model.weight": square},
    ]
    for wrong in junk:
        with pytest.raises(InputError, match=r"'.*' is (no part|not a finite tensor)[\s\S]*hint: "):
            fresh.load_state_dict(wrong)
        assert all(torch.equal(state[name], value) for name, value in fresh.state_dict().items())
    with pytest.raises(InputError, match="covariance='running'"):
        own(model).load_state_dict(state)


def own(model: Mine, **settings: Any) -> LocAteR:
    return LocAteR(model, CONFIG, pairs=[Pair(model.ask, model.answer, heads=HEADS)], **settings)


def plain_gradients() -> dict[str, Tensor]:
    """One pass over the whole batch, penalty and loss."""
    model = Mine()
    seeded(model)
    (own(model).penalty() + model(tokens()).square().mean()).backward()
    return gradients(model)


@pytest.mark.parametrize("door", ["penalty", "add_gradients"])
def test_accumulated_batches_count_the_penalty_once(door: str) -> None:
    model = Mine()
    seeded(model)
    regularizer = own(model)
    for part in tokens().chunk(2):
        extra = regularizer.penalty() / 2 if door == "penalty" else 0.0
        (extra + model(part).square().mean() / 2).backward()
    if door == "add_gradients":
        regularizer.add_gradients()
    torch.testing.assert_close(gradients(model), plain_gradients())


@pytest.mark.parametrize("door", ["penalty", "add_gradients", "add_gradients after unscale_"])
def test_scaled_losses_keep_the_balance(door: str) -> None:
    model = Mine()
    seeded(model)
    regularizer = own(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # type: ignore[attr-defined,unused-ignore]
    extra = regularizer.penalty() if door == "penalty" else 0.0
    scaler.scale(extra + model(tokens()).square().mean()).backward()
    if door == "add_gradients":
        regularizer.add_gradients(scale=scaler.get_scale())
    scaler.unscale_(optimizer)
    if door == "add_gradients after unscale_":
        regularizer.add_gradients()
    torch.testing.assert_close(gradients(model), plain_gradients())


def test_clipping_after_add_gradients_clips_the_penalty_too() -> None:
    results = []
    for door in ("penalty", "add_gradients"):
        model = Mine()
        seeded(model)
        regularizer = own(model)
        extra = regularizer.penalty() if door == "penalty" else 0.0
        (extra + model(tokens()).square().mean()).backward()
        if door == "add_gradients":
            regularizer.add_gradients()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm > 0.1
        results.append(gradients(model))
    torch.testing.assert_close(results[0], results[1])


def test_activation_checkpointing_changes_nothing() -> None:
    model = Mine()
    seeded(model)
    outputs = checkpoint(model, tokens(), use_reentrant=False)
    assert isinstance(outputs, Tensor)
    (own(model).penalty() + outputs.square().mean()).backward()
    torch.testing.assert_close(gradients(model), plain_gradients())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_model_can_be_compiled(backend: str) -> None:
    model = Mine()
    seeded(model)
    compiled: Any = torch.compile(model, backend=backend)
    regularizer = LocAteR(compiled, CONFIG, pairs=[Pair(model.ask, model.answer, heads=HEADS)])
    (regularizer.penalty() + compiled(tokens()).square().mean()).backward()
    torch.testing.assert_close(gradients(model), plain_gradients())


def test_bfloat16_parameters_are_regularized_in_float32() -> None:
    model = Mine()
    seeded(model).bfloat16()
    exact = Mine().double()
    exact.load_state_dict(model.state_dict())
    value, truth = own(model).penalty(), own(exact).penalty()
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), truth, rtol=1e-5, atol=0)
    value.backward()
    truth.backward()
    ours, wanted = gradients(model), gradients(exact)
    for name in wanted:  # off by the rounding of the result alone: half a unit of 8 bits
        torch.testing.assert_close(ours[name].double(), wanted[name], rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("build", [llama, encoder, lora])
def test_autocast_leaves_the_penalty_in_float32(
    build: Callable[[], tuple[nn.Module, Truth, int]],
) -> None:
    """For projections that lie apart, in one weight, and adapted; so the metrics too."""
    model = seeded(build()[0])
    plain, mixed = LocAteR(model, CONFIG), LocAteR(model, CONFIG)
    plain.penalty().backward()
    wanted, expected = gradients(model), plain.metrics()
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        value, metrics = mixed.penalty(), mixed.metrics()
    assert value.dtype == torch.float32
    value.backward()
    assert metrics == expected
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, wanted[name])


def test_the_model_is_never_touched() -> None:
    model, _, _ = gpt2()
    seeded(model).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = torch.arange(8)[None]
    outputs = model(inputs).logits
    regularizer = LocAteR(model, CONFIG)
    regularizer.penalty().backward()
    regularizer.add_gradients()
    regularizer.metrics()
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(model(inputs).logits, outputs)


def test_no_graph_of_the_forward_pass_is_kept() -> None:
    """The penalty's graph ends at the two weights, and `metrics` leaves none."""
    model = Mine()
    seeded(model)
    model(tokens())
    found, nodes = set(), [own(model).penalty().grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        nodes += [one for one, _ in node.next_functions]
    assert found == {id(model.ask.weight), id(model.answer.weight)}
    own(model).metrics()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_metrics_are_the_layers_traces_norms_and_r() -> None:
    model, truth, _ = bert()
    seeded(model)
    metrics = LocAteR(model, CONFIG).metrics()
    traces = []
    for layer, (query, key) in enumerate(truth(model)):
        forms = query.mT @ key
        trace = torch.einsum("hmm->h", forms).mean().item()
        traces.append(trace)
        name = f"locater/layer_{layer}"
        assert metrics.pop(f"{name}/trace") == pytest.approx(trace, rel=1e-5)
        assert metrics.pop(f"{name}/r") == pytest.approx(trace / 2, rel=1e-5)
        norm = forms.square().sum((-2, -1)).mean().item()
        assert metrics.pop(f"{name}/frobenius_squared") == pytest.approx(norm, rel=1e-5)
    assert metrics.pop("locater/global_trace") == pytest.approx(sum(traces) / 2, rel=1e-5)
    total = dense(truth(model), CONFIG, 2.0).item()
    assert metrics.pop("locater/global_penalty") == pytest.approx(total, rel=1e-5)
    assert metrics == {}


@pytest.mark.parametrize("algorithm", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.paper("Section 6")
def test_training_on_the_penalty_reaches_its_equilibrium(algorithm: Any) -> None:
    """Gradient flow ends at t* = m τ/(m + s/rank), for every head.

    Near it the slowest mode of W decays at 2 s t*/rank or faster (the scale term), so after n steps
    of size h its distance is below exp(−2 s t* h n/rank) of the start; what is left is rounding.
    """
    model = Mine(kv_heads=HEADS)
    seeded(model)
    config = LocAteRConfig(scale_strength=1.0, mean_strength=1.0, target=2.0)
    regularizer = LocAteR(model, config, pairs=[Pair(model.ask, model.answer, heads=HEADS)])
    rate = 0.05 if algorithm is torch.optim.SGD else 0.01
    optimizer = algorithm([model.ask.weight, model.answer.weight], lr=rate)
    start = regularizer.metrics()["locater/global_trace"]
    for _ in range(600):
        optimizer.zero_grad()
        regularizer.penalty().backward()
        optimizer.step()
    rest = config.equilibrium(HEAD)
    assert abs(start - rest) > 0.3  # it had some way to go
    decay = math.exp(-2 * config.scale_strength * rest * 0.05 * 600 / HEAD)
    metrics = regularizer.metrics()
    assert decay < 1e-9
    assert metrics["locater/global_trace"] == pytest.approx(rest, abs=1e-5)
    norm = metrics["locater/layer_0/frobenius_squared"]
    assert norm == pytest.approx(rest**2 / HEAD, abs=1e-5)


def refusal(call: Callable[[], object], kind: type[LocaterError]) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.hint
    return str(caught.value)


def test_weights_that_are_not_numbers_are_refused() -> None:
    for value in (math.nan, math.inf):
        model = Mine()
        with torch.no_grad():
            model.answer.weight[1, 2] = value
        assert "hold NaN or infinite values" in refusal(lambda m=model: own(m), InputError)


def test_frozen_queries_and_keys_are_refused_and_half_frozen_ones_are_not() -> None:
    model = Mine()
    seeded(model)
    model.ask.weight.requires_grad_(False)
    own(model).add_gradients()
    assert model.ask.weight.grad is None and model.answer.weight.grad is not None
    model.answer.weight.requires_grad_(False)
    assert "the queries and keys of ask are frozen" in refusal(lambda: own(model), InputError)


def test_meta_and_quantized_weights_are_refused() -> None:
    with torch.device("meta"):
        model = Mine()
    assert "ask lies on the meta device" in refusal(lambda: own(model), InputError)
    whole = Mine()
    for linear in (whole.ask, whole.answer):
        linear.weight = nn.Parameter(linear.weight.detach().to(torch.int8), requires_grad=False)
    text = refusal(lambda: own(whole), InputError)
    assert "quantized to torch.int8" in text and "floating point" in text


def test_selections_that_match_nothing_are_refused() -> None:
    model, _, _ = bert()
    text = refusal(lambda: LocAteR(model, CONFIG, layers="decoder"), LocaterError)
    assert "selects none of 2 attentions: encoder.layer.0.attention.self" in text
    text = refusal(lambda: LocAteR(model, CONFIG, heads=[0, 4]), ConfigError)
    assert "has 4 heads, no head 4" in text
    text = refusal(lambda: LocAteR(model, CONFIG, heads=[]), ConfigError)
    assert "heads=[] selects none" in text


def test_a_model_without_attention_is_refused_with_what_was_seen() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    text = refusal(lambda: LocAteR(model, CONFIG), LocaterError)
    assert "no recipe finds queries and keys among these tensors: #.weight, #.bias" in text


def test_covariances_that_do_not_fit_are_refused() -> None:
    model, _, _ = bert()
    one = {"encoder.layer.0.attention.self": torch.eye(MODEL)}
    text = refusal(lambda: LocAteR(model, CONFIG, covariance=one), ConfigError)
    assert "no covariance for encoder.layer.1.attention.self" in text
    text = refusal(lambda: LocAteR(model, CONFIG, covariance=torch.eye(3)), ConfigError)
    assert "covariance of encoder.layer.0.attention.self is (3, 3), not (16, 16)" in text


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_word_for_the_covariance_is_refused() -> None:
    model, _, _ = bert()
    text = refusal(lambda: LocAteR(model, CONFIG, covariance="walking"), ConfigError)  # type: ignore[arg-type]
    assert "unknown covariance 'walking'" in text


def test_cross_attention_has_no_running_covariance() -> None:
    model = Mine()
    pair = Pair(model.ask, model.answer, heads=HEADS, is_cross=True)
    text = refusal(lambda: LocAteR(model, CONFIG, pairs=[pair], covariance="running"), ConfigError)
    assert "ask is cross-attention" in text and "layers=" in text


def test_a_running_covariance_of_something_else_is_refused() -> None:
    """A pair of parameters is watched at the module that owns them, which may read other things."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ask, self.answer = nn.Parameter(torch.ones(4, 8)), nn.Parameter(torch.ones(4, 8))

        def forward(self, words: Tensor) -> Tensor:
            return nn.functional.linear(words[:, :8], self.ask)

    model = Wrapped()
    pairs = [Pair(model.ask, model.answer, heads=1)]
    LocAteR(model, CONFIG, pairs=pairs, covariance="running")
    text = refusal(lambda: model(torch.ones(2, 9)), InputError)
    assert "what enters ask are not its tokens of width 8" in text
