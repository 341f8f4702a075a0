"""Every stabilizer does what its definition says, on GPT-2-, Llama-, BERT- and ViT-like models."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from tests.models.families import FAMILIES, built
from tests.probe.test_probe_model import Stack, randn
from torch import Tensor, nn
from torch.nn import functional

from locater import ConfigError, InputError, LocaterError, Probe
from locater.control.stabilizers import (
    METHODS,
    QKClip,
    QKNorm,
    QKRate,
    SigmaReparam,
    Stabilizer,
    capped_attention,
    stabilize,
)
from locater.models.live import find_attention
from locater.probe.rows import Logits, ScoredKeys
from locater.probe.watch import Place, Recorder

NAMES = ["gpt2", "llama", "bert", "vit"]
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")


@pytest.fixture(autouse=True)
def removed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Methods that watch a model's calls do so until they are removed."""
    made: list[Stabilizer] = []

    def kept(*args: Any, **settings: Any) -> Stabilizer:
        made.append(original(*args, **settings))
        return made[-1]

    original = stabilize
    monkeypatch.setitem(globals(), "stabilize", kept)
    yield
    for one in made:
        one.remove()


def model_of(name: str, implementation: str = "sdpa") -> nn.Module:
    model = built(name).train()
    model.set_attn_implementation(implementation)  # type: ignore[operator]
    for part in model.modules():  # what is compared must not be drawn anew
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for attribute in ("attention_dropout", "dropout_prob"):
            if isinstance(getattr(part, attribute, None), float):
                setattr(part, attribute, 0.0)
    return model


def output(model: nn.Module, name: str) -> Tensor:
    return model(**FAMILIES[name].inputs()).last_hidden_state  # type: ignore[no-any-return]


class Seen(Recorder):
    """Queries, keys and scale of every call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, find_attention(model))
        self.calls: dict[str, ScoredKeys] = {}

    def attention_called(self, place: Place, logits: Logits) -> None:
        assert isinstance(logits, ScoredKeys)
        self.calls[place.name] = logits


def seen(model: nn.Module, name: str) -> dict[str, ScoredKeys]:
    with Seen(model) as recorder, torch.no_grad():
        output(model, name)
    return recorder.calls


def largest(model: nn.Module, name: str) -> Tensor:
    """Every head's largest logit, by a probe."""
    with Probe(model, queries="all", keep=0) as probe, torch.no_grad():
        output(model, name)
    return torch.tensor([one.max_logit for one in probe.records], dtype=torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_a_weights_spectral_norm_is_its_gain(name: str) -> None:
    model = model_of(name)
    linear = {
        path: part.weight.detach().clone()
        for path, part in model.named_modules()
        if isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D"
    }
    plain = output(model, name).detach()
    kept = copy.deepcopy(model)
    SigmaReparam(kept, keeps_weights=True)
    torch.testing.assert_close(output(kept, name), plain)
    method = SigmaReparam(model)
    assert len(method.layers) == len(linear) > 4
    for path, before in linear.items():
        weight: Any = model.get_submodule(path).weight
        torch.testing.assert_close(weight, before / torch.linalg.matrix_norm(before, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method.on(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        output(model, name).square().mean().backward()
        optimizer.step()
    for part in method.layers:
        weight, gain = part.weight, part.parametrizations.weight[0].gain  # type: ignore[union-attr, index]
        norm = torch.linalg.matrix_norm(weight.detach(), 2)
        assert norm.item() == pytest.approx(abs(gain.item()), rel=0.05)  # one iteration a step
    again = model_of(name)
    SigmaReparam(again)
    again.load_state_dict(model.state_dict())  # the vectors of the iteration are in it
    assert torch.equal(output(again, name), output(model, name))


def test_the_gradient_flows_through_the_spectral_norm_too() -> None:
    model, inputs = nn.Linear(5, 7, bias=False).double(), randn(3, 5).double()
    weight = model.weight.detach().clone().requires_grad_()
    functional.linear(
        inputs, weight / torch.linalg.matrix_norm(weight, 2)
    ).square().sum().backward()
    SigmaReparam(model)
    model(inputs).square().sum().backward()
    found: Any = model.parametrizations
    torch.testing.assert_close(found.weight.original.grad, weight.grad)


@pytest.mark.parametrize("keeps_weights", [False, True])
def test_a_weight_of_zeros_learns_and_then_has_its_spectral_norm(keeps_weights: bool) -> None:
    """As a low-rank adapter's second factor begins."""
    layer = nn.Linear(5, 4, bias=False)
    nn.init.zeros_(layer.weight)
    method = SigmaReparam(nn.Sequential(layer), keeps_weights=keeps_weights)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    method.on(optimizer)
    inputs, wanted = (
        randn(20, 5)[..., [4, 1, 2, 3, 0]] * torch.tensor([0.0, 1, 1, 1, 1]),
        randn(20, 4),
    )
    assert not layer(inputs).any()  # the first dimension, at which estimates begin, is never used
    for _ in range(60):
        optimizer.zero_grad()
        (layer(inputs) - wanted).square().mean().backward()
        optimizer.step()
    weight, gain = layer.weight.detach(), layer.get_parameter("parametrizations.weight.0.gain")
    assert weight.any() and gain.grad is not None
    torch.testing.assert_close(
        torch.linalg.matrix_norm(weight, 2), gain.detach(), rtol=1e-2, atol=0
    )


@pytest.mark.parametrize("name", NAMES)
def test_queries_and_keys_are_normalized_by_head(name: str) -> None:
    model = model_of(name)
    plain, before = output(model, name).detach(), seen(model, name)
    QKNorm(model)
    after = seen(model, name)
    for place, call in after.items():
        for side in (call.query, call.key):  # a rotation leaves the length as it is
            torch.testing.assert_close(
                side.square().mean(-1), torch.ones_like(side[..., 0]), rtol=1e-4, atol=1e-4
            )
        cosine = functional.cosine_similarity(call.query, before[place].query, dim=-1)
        if place == min(after):  # the first layer's are the same but for their length
            torch.testing.assert_close(cosine, torch.ones_like(cosine))
    attentions = find_attention(model)
    query = attentions[0].layout.query
    norm: Any = attentions[0].sources[query.weight].owner.query_norm
    with torch.no_grad():
        norm.weight.fill_(3.0)
    louder = seen(model, name)[attentions[0].layout.name].query.square().mean(-1).sqrt()
    torch.testing.assert_close(louder, torch.full_like(louder, 3.0), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(output(model, name), plain)
    assert any("query_norm" in key for key in model.state_dict())
    again = model_of(name)
    QKNorm(again)
    again.load_state_dict(model.state_dict())
    assert torch.equal(output(again, name), output(model, name))
    assert torch.equal(output(copy.deepcopy(model), name), output(model, name))
    output(model, name).square().mean().backward()
    assert norm.weight.grad is not None and norm.weight.grad.abs().sum() > 0
    with pytest.raises(InputError, match="normalizes its queries and keys already"):
        QKNorm(model)
    with pytest.raises(InputError, match="normalizes its queries and keys already"):
        QKClip(model)


@pytest.mark.parametrize("name", NAMES)
def test_a_loud_heads_logits_are_scaled_back_and_no_others(name: str) -> None:
    model = model_of(name)
    calls = seen(model, name)
    tops = largest(model, name)
    first = find_attention(model)[0].layout
    limit = tops[: first.heads].median().item()  # half of the heads are too loud
    method = QKClip(model, max_logit=limit)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    method.on(optimizer)
    output(model, name)
    model.eval()(**FAMILIES[name].inputs())  # evaluation is not watched
    model.train()
    optimizer.step()
    method.remove()
    after = seen(model, name)[first.name]
    before = calls[first.name]
    group = first.heads // first.kv_heads
    for head in range(first.heads):
        old, new = (
            (one.query[:, head] @ one.key[:, head // group].mT * one.scale)
            for one in (before, after)
        )
        factor = min(1.0, limit / tops[head].item())
        torch.testing.assert_close(new, factor * old, rtol=1e-6, atol=1e-6)
    assert {factor < 1 for factor in (limit / tops[: first.heads]).tolist()} == {True, False}
    optimizer.step()  # nothing was seen since: nothing changes
    torch.testing.assert_close(seen(model, name)[first.name].query, after.query)


def test_clipping_refuses_weights_that_are_made_of_others() -> None:
    model = model_of("llama")
    SigmaReparam(model)
    with pytest.raises(InputError, match="made of other parameters"):
        QKClip(model)
    with pytest.raises(InputError, match="made of other parameters"):
        QKRate(model, factor=0.5)
    with pytest.raises(ConfigError, match="max_logit must be positive"):
        QKClip(model_of("llama"), max_logit=0.0)


@pytest.mark.parametrize("name", NAMES)
def test_capped_logits_are_those_of_both_ways_of_attention(name: str) -> None:
    found = {}
    for implementation in ("sdpa", "eager"):
        model = model_of(name, implementation)
        plain = output(model, name).detach()
        method = stabilize(model, "soft-cap", max_logit=0.5)
        found[implementation] = output(model, name).detach()
        assert not torch.allclose(found[implementation], plain, rtol=1e-4)
        assert torch.equal(output(copy.deepcopy(model), name), found[implementation])
        method.remove()
        assert torch.equal(output(model, name), plain)
        stabilize(model, "soft-cap", max_logit=1e5)
        torch.testing.assert_close(output(model, name), plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["sdpa"], found["eager"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_flag", [True, False])
def test_a_query_that_sees_nothing_gets_nothing_as_from_fused_attention(is_flag: bool) -> None:
    """Padding on the left under a causal mask; a cap far above all logits changes nothing else."""
    inputs = [randn(3, 2, 2, 5, 4)[k].double().requires_grad_() for k in range(3)]
    mask = torch.ones(5, 5, dtype=torch.bool).tril() & (torch.arange(5) >= 2)
    given = mask if is_flag else torch.zeros(5, 5).double().masked_fill(~mask, -torch.inf)
    ours = capped_attention(*inputs, given, limit=1e6)
    theirs = functional.scaled_dot_product_attention(*inputs, given)
    assert not ours[..., :2, :].any()
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad(one.square().sum(), inputs) for one in (ours, theirs)]
    torch.testing.assert_close(*gradients)


def test_a_cap_is_before_the_mask_and_leaves_nothing_behind() -> None:
    model, inputs = Stack(1).double(), randn(2, 6, 8).double()
    layer: Any = model.layers[0]
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    query, key, value = (
        one.unflatten(-1, (2, -1)).transpose(1, 2)
        for one in (layer.q_proj(inputs), layer.k_proj(inputs), inputs)
    )
    stabilize(model, "soft-cap", max_logit=0.3)
    logits = 0.3 * torch.tanh(query @ key.mT / 2 / 0.3)
    weights = logits.masked_fill(~mask, -torch.inf).softmax(-1)
    expected = inputs + (weights @ value).transpose(1, 2).flatten(-2)
    torch.testing.assert_close(model(inputs, mask), expected)
    with pytest.raises(RuntimeError):
        model(inputs[..., :3])
    assert not torch.overrides._get_current_function_mode_stack()
    with pytest.raises(InputError, match="cannot be entered"):
        stabilize(nn.TransformerEncoderLayer(8, 2), "soft-cap")
    with pytest.raises(InputError, match="a bias by distance"):
        stabilize(built("t5"), "soft-cap")


@contextmanager
def softmax_inputs() -> Iterator[list[Tensor]]:
    """What enters every softmax of eager attention, with its graph."""
    found: list[Tensor] = []
    softmax = functional.softmax

    def kept(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found.append(logits)
        return softmax(logits, *args, **kwargs)

    with mock.patch.object(functional, "softmax", kept):
        yield found


def defined(method: str, logits: list[Tensor]) -> Tensor:
    """The penalties as one would write them down on the attention matrix."""
    terms = []
    for one in logits:
        visible = one > -1e4
        whole = one.double().masked_fill(~visible, -torch.inf)
        count = visible.expand_as(whole).sum(-1)
        if method == "z-loss":
            terms.append(0.3 * whole.logsumexp(-1).square().mean())
        else:
            weights = whole.softmax(-1)
            logs = torch.where(visible, whole.log_softmax(-1), 0)
            entropy = -(weights * logs).sum(-1)
            gap = (0.99 * count.double().log() - entropy).clamp_min(0)
            terms.append(2.0 * gap[count >= 2].mean())
    return torch.stack(terms).mean()


SETTINGS: dict[str, dict[str, float]] = {
    "z-loss": {"z_loss": 0.3},
    "entropy-floor": {"entropy_loss": 2.0, "floor": 0.99},
}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("method", SETTINGS)
@pytest.mark.parametrize("name", NAMES)
def test_penalties_on_rows_have_the_value_and_gradient_of_their_definition(
    name: str, method: str, implementation: str
) -> None:
    truth = model_of(name, "eager")
    with softmax_inputs() as logits:
        output(truth, name)
    expected = defined(method, logits)
    expected.backward()
    model = model_of(name, implementation)
    plain = output(model, name)
    penalized = stabilize(model, method, **SETTINGS[method])
    assert torch.equal(output(model, name), plain)
    found = penalized.penalty()
    assert isinstance(found, Tensor)
    found.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5) and found.item() > 0
    largest = max(one.grad.abs().max().item() for one in truth.parameters() if one.grad is not None)
    for (path, ours), theirs in zip(model.named_parameters(), truth.parameters(), strict=True):
        mine = torch.zeros_like(ours) if ours.grad is None else ours.grad
        other = torch.zeros_like(ours) if theirs.grad is None else theirs.grad
        torch.testing.assert_close(
            mine, other, rtol=1e-4, atol=1e-5 * largest, msg=lambda text, path=path: path + text
        )


@pytest.mark.parametrize("kind", ["causal flag", "padding", "shared keys", "bias"])
@pytest.mark.parametrize("method", SETTINGS)
def test_gradients_of_rows_are_those_of_autograd_on_the_matrix(kind: str, method: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 4 if shared else 8)
            self.num_heads, self.num_key_value_heads = 4, 2 if shared else 4

        def forward(self, inputs: Tensor) -> Tensor:
            query, key = (
                one.unflatten(-1, (-1, 2)).transpose(1, 2)
                for one in (self.q_proj(inputs), self.k_proj(inputs))
            )
            self.logits = 2**-0.5 * query @ key.repeat_interleave(2 if shared else 1, 1).mT
            mixed = functional.scaled_dot_product_attention(query, key, key, **given)
            return mixed.transpose(1, 2).flatten(-2)

    shared = kind == "shared keys"
    behind = torch.ones(6, 6, dtype=torch.bool).tril()
    kinds: dict[str, dict[str, Any]] = {
        "causal flag": {"is_causal": True},
        "shared keys": {"enable_gqa": True},
        "padding": {"attn_mask": behind & (torch.arange(6) < 4)},
        "bias": {"attn_mask": randn(6, 6).double()},
    }
    given = kinds[kind]
    model, inputs = Model().double().train(), randn(3, 6, 8).double()
    penalized = stabilize(model, method, **SETTINGS[method])
    model(inputs)
    found = penalized.penalty()
    logits: Tensor = model.logits
    if kind in ("causal flag", "padding"):
        mask = behind if kind == "causal flag" else given["attn_mask"]
        logits = logits.masked_fill(~mask, -torch.inf)
    logits = logits + given["attn_mask"] if kind == "bias" else logits
    logits = logits[:, :, :4] if kind == "padding" else logits  # the others are padding
    expected = defined(method, [logits])
    torch.testing.assert_close(found, expected)
    ours = torch.autograd.grad(found, list(model.parameters()), retain_graph=True)
    theirs = torch.autograd.grad(expected, list(model.parameters()))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


def test_a_penalty_says_what_it_did_not_see() -> None:
    model = Stack(2)
    method = stabilize(model, "z-loss")
    with pytest.raises(LocaterError, match="2 attentions were not seen in the last training pass"):
        method.penalty()
    model.eval()(randn(2, 5, 8))
    with pytest.raises(LocaterError, match=r"layers\.0, layers\.1"):
        method.penalty()
    model.train()(randn(2, 5, 8))
    assert isinstance(found := method.penalty(), Tensor) and found.item() > 0
    method.remove()
    assert not model._forward_hooks
    reentrant = Stack(1, checkpointing=True)
    stabilize(reentrant, "entropy-floor")
    with pytest.raises(InputError, match="use_reentrant=False"):
        reentrant(randn(2, 5, 8).requires_grad_())
    other = Stack(1, checkpointing=False)
    learns = stabilize(other, "entropy-floor", floor=1.0)
    other(randn(2, 5, 8))
    plain = Stack(1)
    truth = stabilize(plain, "entropy-floor", floor=1.0)
    plain(randn(2, 5, 8))
    for one, part in ((learns, other), (truth, plain)):
        one.penalty().backward()  # type: ignore[union-attr]
        assert part.layers[0].q_proj.weight.grad is not None  # type: ignore[union-attr]
    torch.testing.assert_close(
        other.layers[0].q_proj.weight.grad,
        plain.layers[0].q_proj.weight.grad,  # type: ignore[union-attr]
    )


def test_a_penalty_on_some_layers_is_that_of_these_alone() -> None:
    model, inputs = Stack(2), randn(2, 5, 8)
    everywhere, second = (
        stabilize(model, "z-loss", z_loss=1.0, layers=layers) for layers in (None, "1")
    )
    model.train()(inputs)
    both, one = everywhere.penalty(), second.penalty()
    everywhere.remove()
    first = stabilize(model, "z-loss", z_loss=1.0, layers="0")
    model(inputs)
    other = first.penalty()
    torch.testing.assert_close(both, (one + other) / 2)
    assert one != other


@pytest.mark.parametrize("method", SETTINGS)
@pytest.mark.parametrize("comes_first", [True, False])
def test_a_probe_does_not_count_what_a_penalty_computes(method: str, comes_first: bool) -> None:
    model, inputs = Stack(2).train(), randn(2, 5, 8)
    with Probe(model, queries="all") as alone:
        model(inputs)
    penalized = stabilize(model, method) if comes_first else None
    with Probe(model, queries="all") as probe:
        penalized = penalized or stabilize(model, method)
        model(inputs)
    assert isinstance(penalized.penalty(), Tensor)
    assert [one.as_dict() for one in probe.records] == [one.as_dict() for one in alone.records]


def test_a_cap_that_no_logit_reaches_leaves_attention_as_it_is() -> None:
    query, key, value = randn(3, 2, 4, 6, 8).double()
    capped = capped_attention(query, key, value, limit=1e9)
    torch.testing.assert_close(capped, functional.scaled_dot_product_attention(query, key, value))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_queries_and_keys_learn_at_a_rate_of_their_own(name: str, kind: Any) -> None:
    model, grouped = model_of(name), model_of(name)
    optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1)
    stabilize(model, "qk-rate", factor=0.25).on(optimizer)
    special = {
        parameter
        for one in find_attention(grouped)
        for name in one.layout.tensors
        for parameter in one.sources[name].parameters
    }
    groups = [
        {"params": [one for one in grouped.parameters() if one not in special], "lr": 1e-2},
        {"params": [one for one in grouped.parameters() if one in special], "lr": 0.25e-2},
    ]
    other = kind(groups, weight_decay=0.1)
    for _ in range(3):
        for one, steps in ((model, optimizer), (grouped, other)):
            steps.zero_grad()
            output(one, name).square().mean().backward()
            steps.step()
    for ours, theirs in zip(model.parameters(), grouped.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_queries_and_keys_that_share_a_weight_with_values_leave_these_alone() -> None:
    model, plain = model_of("gpt2"), model_of("gpt2")
    start = {path: one.detach().clone() for path, one in plain.named_parameters()}
    for one, factor in ((model, 3.0), (plain, None)):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        if factor:
            stabilize(one, "qk-rate", factor=factor).on(optimizer)
        output(one, "gpt2").square().mean().backward()
        optimizer.step()
    for (path, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        step = theirs.detach() - start[path]
        if "c_attn" in path:
            width = step.shape[-1] // 3
            step[..., : 2 * width] *= 3
        torch.testing.assert_close(ours.detach(), start[path] + step)


@pytest.mark.parametrize("name", NAMES)
def test_every_method_trains_every_model(name: str) -> None:
    settings = {"qk-rate": {"factor": 0.5}, "locater": {"scale_strength": 0.1}}
    for method in METHODS:
        model = model_of(name)
        with torch.no_grad():
            before = output(model, name).square().mean().item()
        used = stabilize(model, method, **settings.get(method, {}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        used.on(optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            loss = output(model, name).square().mean() + used.penalty()
            loss.backward()
            optimizer.step()
        state = used.state_dict()
        assert bool(state) == (method == "locater-covariance")
        used.load_state_dict(state)
        used.remove()
        assert math.isfinite(loss.item()) and loss.item() != before, method


def test_norms_and_clips_refuse_weights_with_adapters() -> None:
    from peft import LoraConfig, get_peft_model

    adapted: Any = get_peft_model(
        model_of("llama"),  # type: ignore[arg-type]
        LoraConfig(r=2, target_modules=["q_proj"]),
    )
    with pytest.raises(InputError, match=r"(?s)has an adapter, whose part.*merge what adapts it"):
        QKNorm(adapted)
    assert not any("norm" in name for name, _ in adapted.named_parameters() if "query" in name)
    with pytest.raises(InputError, match="made of other parameters"):
        QKClip(adapted)


def test_an_unknown_method_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"(?s)unknown method 'wish'.*none, locater"):
        stabilize(Stack(), "wish")
    with pytest.raises(InputError, match="come from no layer"):
        stabilize(nn.TransformerEncoderLayer(8, 2), "qk-norm")
