"""A probe leaves a model as it is, and says clearly what it cannot measure."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
import torch
from tests.models.families import built, tokens
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaModel, StaticCache

from locater import (
    AlarmRules,
    ConfigError,
    InputError,
    LocaterError,
    Probe,
    QKForm,
    TokenProcess,
    propagation,
)
from locater.models.loading import load_model
from locater.probe.probe import training_probe


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Attention(nn.Module):
    """Queries and keys by two linear maps, in one or more heads."""

    def __init__(self, model: int = 8, heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(model, model), nn.Linear(model, model)
        self.num_heads, self.dropout = heads, dropout

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = (
            one.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for one in (self.q_proj(inputs), self.k_proj(inputs), inputs)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, mask, dropout)
        return mixed.transpose(1, 2).flatten(-2)


class Stack(nn.Module):
    """A few attentions on top of each other, recomputed in the backward pass if asked to."""

    def __init__(
        self, depth: int = 2, *, checkpointing: bool | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(dropout=dropout) for _ in range(depth)])
        self.checkpointing = checkpointing
        with torch.no_grad():
            for place, parameter in enumerate(self.parameters()):
                parameter.copy_(randn(*parameter.shape, seed=place) / 2)

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            if self.checkpointing is None:
                inputs = inputs + layer(inputs, mask)
            else:
                again = checkpoint(layer, inputs, mask, use_reentrant=self.checkpointing)
                inputs = inputs + again
        return inputs


def step(model: nn.Module, inputs: Tensor, seed: int = 3) -> tuple[Tensor, list[Tensor], Tensor]:
    """Output, gradients and the state of the random numbers after a step."""
    model.zero_grad()
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        output = model(inputs)
        output.square().mean().backward()
        state = torch.get_rng_state()
    grads = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    return output.detach(), grads, state


def assert_same(one: tuple[Any, list[Tensor], Any], other: tuple[Any, list[Tensor], Any]) -> None:
    assert torch.equal(one[0], other[0])
    assert len(one[1]) == len(other[1]) > 0
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
    assert torch.equal(one[2], other[2])


@pytest.mark.parametrize("queries", ["last", "all", 3])
@pytest.mark.parametrize("training", [True, False])
def test_outputs_gradients_and_dropout_are_unchanged_bit_for_bit(
    queries: Any, training: bool
) -> None:
    model = Stack(dropout=0.3).train(training)
    inputs = randn(4, 7, 8, seed=9)
    plain = step(model, inputs)
    with Probe(model, queries=queries) as probe:
        watched = step(model, inputs)
    assert_same(plain, watched)
    assert_same(plain, step(model, inputs))
    changed = step(model, inputs, seed=4)
    assert torch.equal(plain[0], changed[0]) is not training  # the test can see dropout
    assert len(probe.records) == 4


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_a_whole_model_in_training_is_unchanged(name: str) -> None:
    model = built(name).float().train()
    given = {"input_ids": tokens()} | ({"decoder_input_ids": tokens()} if name == "t5" else {})

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, _: Tensor) -> Tensor:
            return self.model(**given).last_hidden_state

    whole = Last()
    plain = step(whole, tokens())
    with Probe(whole, queries="all") as probe:
        assert_same(plain, step(whole, tokens()))
    assert probe.unseen == []


def test_nothing_of_the_graph_is_kept() -> None:
    model = Stack()
    with Probe(model) as probe:
        model(randn(2, 5, 8))
    for record in probe.records:
        assert not record.rho.rho.requires_grad and not record.attention.requires_grad
    assert not probe.inputs(0).requires_grad


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_attention_counts_once(reentrant: bool) -> None:
    model = Stack(checkpointing=reentrant)
    inputs = randn(4, 7, 8).requires_grad_()
    with Probe(model, queries="all") as probe:
        model(inputs).sum().backward()
    plain = Stack()
    with Probe(plain, queries="all") as truth:
        plain(inputs)
    assert [one.rows for one in probe.records] == [28] * 4
    for ours, theirs in zip(probe.records, truth.records, strict=True):
        assert ours.entropy == theirs.entropy


def test_under_autocast_the_logits_are_those_of_the_low_precision_queries_and_keys() -> None:
    model, inputs = Stack(1), randn(4, 7, 8)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(inputs)
        with Probe(model, queries="all") as probe:
            again = model(inputs)
    assert torch.equal(plain, again)
    with torch.autocast("cpu", torch.bfloat16):
        layer: Any = model.layers[0]
        query, key = layer.q_proj(inputs), layer.k_proj(inputs)
    assert query.dtype == torch.bfloat16
    split = [one.float().unflatten(-1, (2, -1)).transpose(1, 2) for one in (query, key)]
    largest = (split[0] @ split[1].mT / 2).amax((0, 2, 3))
    torch.testing.assert_close(torch.tensor([one.max_logit for one in probe.records]), largest)


def test_every_kth_forward_pass_is_measured_and_nothing_is_left_between() -> None:
    model, inputs = Stack(), randn(4, 7, 8)
    from torch.nn.modules import module as modules

    with Probe(model, every=3) as probe:
        for _ in range(7):
            model(inputs)
            assert not modules._global_forward_hooks and not modules._global_forward_pre_hooks
    assert (probe.forwards, probe.measured) == (7, 3)
    assert {one.rows for one in probe.records} == {3 * 4}
    assert not model._forward_hooks and not model._forward_pre_hooks
    probe.reset()
    with pytest.raises(LocaterError, match="has not been run since"):
        _ = probe.records


def test_only_training_or_evaluation_is_measured_where_asked() -> None:
    model, inputs = Stack(), randn(4, 7, 8)
    with Probe(model, when="training", every=2) as probe:
        for _ in range(3):
            model.eval()(inputs)
            model.train()(inputs)
    assert (probe.forwards, probe.measured) == (3, 2)


def test_an_error_in_the_model_leaves_nothing_behind() -> None:
    class Broken(Stack):
        def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
            super().forward(inputs, mask)
            if inputs.shape[1] == 5:
                raise ValueError("mine")
            return inputs

    model = Broken()
    with Probe(model) as probe:
        with pytest.raises(ValueError, match="mine"):
            model(randn(2, 5, 8))
        assert not torch.overrides._get_current_function_mode_stack()
        model(randn(2, 6, 8))
    assert probe.measured == 1
    assert {one.rows for one in probe.records} == {2}


def test_an_error_that_the_model_catches_ends_nothing() -> None:
    class Careful(Stack):
        def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
            try:
                self.layers[0](inputs[..., :3])
            except RuntimeError:
                return super().forward(inputs, mask)
            raise AssertionError

    model = Careful()
    with Probe(model) as probe:
        model(randn(2, 6, 8))
        model(randn(2, 6, 8))
    assert probe.measured == 2
    assert {one.rows for one in probe.records} == {4}


def test_batches_of_different_length_add_up_by_key_position() -> None:
    model = Stack(1)
    short, long = randn(3, 4, 8), randn(5, 7, 8, seed=1)
    with Probe(model) as probe:
        model(short)
        model(long)
    parts = []
    for one in (short, long):
        with Probe(model) as alone:
            model(one)
        parts.append(alone.records[0])
    both = probe.records[0]
    assert both.rows == 8
    weighted = (3 * parts[0].rho.rho + 5 * parts[1].rho.rho[:4]) / 8
    torch.testing.assert_close(both.rho.rho[:4], weighted)
    torch.testing.assert_close(both.rho.rho[4:], parts[1].rho.rho[4:])
    assert both.entropy == pytest.approx((3 * parts[0].entropy + 5 * parts[1].entropy) / 8)
    assert probe.inputs(0).shape == (5, 7, 8)


def test_standard_errors_take_the_rows_of_a_sequence_together() -> None:
    model = Stack(1).double()
    inputs = randn(6, 7, 8).double()
    doubled = inputs.repeat_interleave(2, 0)
    with Probe(model, queries="all") as probe:
        model(inputs)
    entropies = []
    for one in inputs:
        with Probe(model, queries="all") as alone:
            model(one[None])
        entropies.append(alone.records[0].entropy)
        assert math.isnan(alone.records[0].entropy_error)
    sample = torch.tensor(entropies)
    record = probe.records[0]
    assert record.entropy == pytest.approx(sample.mean().item())
    assert record.entropy_error == pytest.approx(sample.std().item() / 6**0.5)
    with Probe(model, queries="all") as twice:
        model(doubled)
    assert twice.records[0].entropy_error == pytest.approx(
        record.entropy_error * (5 / 11) ** 0.5  # as many more sequences, not rows
    )


@pytest.mark.statistical  # resolution: .03 in rho
@pytest.mark.parametrize(("scale", "holds"), [(1.0, True), (1.5, False)])
def test_random_walks_show_the_exact_propagation(scale: float, holds: bool, seed: int) -> None:
    length, model, walks = 12, 8, 6_000
    generator = torch.Generator().manual_seed(seed)
    attention = Attention(model, heads=1).double()
    weights = torch.randn(2, model, model, generator=generator, dtype=torch.float64) / model**0.5
    with torch.no_grad():
        attention.q_proj.weight.copy_(weights[0])
        attention.k_proj.weight.copy_(weights[1])
        attention.q_proj.bias.zero_()
        attention.k_proj.bias.zero_()
    process = TokenProcess.random_walk(length)
    with Probe(attention, keep=0) as probe, torch.no_grad():
        for _ in range(3):
            attention(process.sample(walks // 3, model=model, generator=generator))
    form = QKForm(scale * weights[0], weights[1], model**0.5)
    rho = propagation(form, process).rho
    error = (rho * (1 - rho) / walks).sqrt()
    limit = NormalDist().inv_cdf(1 - 1e-6 / (2 * length))
    measured = probe.records[0].rho
    assert bool(((measured.rho - rho).abs() < limit * error).all()) is holds
    assert measured.source == "measured"
    torch.testing.assert_close(measured.theta, torch.arange(1, length + 1).double() / length)
    if holds:
        assert measured.standard_error is not None
        torch.testing.assert_close(measured.standard_error, error, rtol=0.2, atol=1e-3)


@pytest.mark.statistical
def test_the_process_of_the_inputs_is_recovered(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(8, 8, generator=generator, dtype=torch.float64) / 8**0.5
    mean = torch.randn(6, 8, generator=generator, dtype=torch.float64)
    kernel = TokenProcess.autoregressive(6, 0.7).kernel
    truth = TokenProcess(kernel, root @ root.mT + torch.eye(8), mean)
    samples = truth.sample(1_500, generator=generator)
    model = nn.Sequential(Attention().double())
    with Probe(model, keep=1 << 30) as probe, torch.no_grad():
        for batch in samples.split(500):
            model(batch)
    found = probe.process(0)
    assert torch.equal(probe.inputs("0"), samples)
    assert found.covariance is not None and found.mean is not None
    assert truth.covariance is not None
    # traces are fixed by convention; entries have errors of at most about sqrt(2/1,500)
    torch.testing.assert_close(found.kernel, kernel, rtol=0, atol=6 * (2 / 1_500) ** 0.5)
    scale = truth.covariance.abs().max().item()
    torch.testing.assert_close(
        found.covariance, truth.covariance, rtol=0, atol=6 * scale * (2 / 1_500) ** 0.5
    )
    torch.testing.assert_close(found.mean, mean, rtol=0, atol=6 * (scale / 1_500) ** 0.5)
    assert found.explained is not None and found.explained > 0.97


def test_what_is_kept_is_limited_and_without_padding() -> None:
    model = Stack(1)
    mask = torch.ones(4, 1, 1, 6, dtype=torch.bool)
    mask[1, ..., 4:] = False
    with Probe(model, keep=2 * 6 * 8 * 4) as probe:
        model(randn(4, 6, 8), mask)
        model(randn(4, 6, 8), mask)
    assert torch.equal(probe.inputs(0), randn(4, 6, 8)[[0, 2]])
    inputs = randn(4, 6, 8)
    with Probe(model) as probe:
        model(inputs)
    inputs.zero_()  # a model may write into its own tokens later
    assert torch.equal(probe.inputs(0), randn(4, 6, 8))
    with Probe(model, keep=0) as probe:
        model(randn(4, 6, 8))
    with pytest.raises(InputError, match=r"no input of layers\.0 was kept"):
        probe.process(0)


def test_token_rank_is_that_of_the_definitions() -> None:
    model = Stack(1).double()
    inputs = randn(4, 5, 8).double() + 1
    mask = torch.ones(4, 1, 1, 5, dtype=torch.bool)
    mask[2, ..., 3:] = False
    mask[3, ..., 2:] = False
    with Probe(model) as probe:
        model(inputs, mask)
    (rank,) = probe.rank
    expected = []
    for one in (inputs[0], inputs[1], inputs[2, :3], inputs[3, :2]):
        unit = one / one.norm(dim=1, keepdim=True)
        pairs = (unit @ unit.mT)[~torch.eye(len(one), dtype=torch.bool)]
        squares = torch.linalg.svdvals(one).square()
        residual = (one - one.mean(0)).norm() / one.norm()
        participation = squares.sum() ** 2 / squares.square().sum()
        expected.append(torch.stack([pairs.mean(), participation, residual]))
    truth = torch.stack(expected).mean(0)
    found = torch.tensor([rank.similarity, rank.effective_rank, rank.residual]).double()
    torch.testing.assert_close(found, truth, rtol=1e-6, atol=1e-6)
    assert rank.sequences == 4


def test_metrics_are_plain_numbers_by_layer() -> None:
    model = Stack()
    with Probe(model) as probe:
        model(randn(4, 6, 8))
    metrics = probe.metrics()
    names = (
        "entropy min_entropy rho max_logit sink_mass own_mass distance "
        "similarity effective_rank residual"
    )
    assert set(metrics) == {
        "locater/alarms",
        *(f"locater/layer_{layer}/{name}" for layer in (0, 1) for name in names.split()),
    }
    first = [one for one in probe.records if one.layer == 0]
    assert metrics["locater/layer_0/entropy"] == sum(one.entropy for one in first) / 2
    assert metrics["locater/layer_0/max_logit"] == max(one.max_logit for one in first)


def test_every_head_is_in_the_metrics_where_asked_and_in_a_file_of_lines(tmp_path: Path) -> None:
    model = Stack()
    with torch.no_grad():
        model.layers[1].q_proj.weight[4:] *= 9  # type: ignore[union-attr, index]
    with Probe(model, per_head=True, queries="all") as probe:
        model(randn(4, 6, 8))
    metrics, records = probe.metrics(), probe.records
    for one in records:
        label = f"locater/layer_{one.layer}/head_{one.head}"
        for name in ("entropy", "max_logit", "sink_mass", "own_mass", "distance"):
            assert metrics[f"{label}/{name}"] == getattr(one, name)
    probe.to_jsonl(tmp_path / "heads.jsonl", step=3)
    probe.to_jsonl(tmp_path / "heads.jsonl", step=4)
    lines = [json.loads(line) for line in (tmp_path / "heads.jsonl").read_text().splitlines()]
    assert [(one["step"], one["layer"], one["head"]) for one in lines] == [
        (step, one.layer, one.head) for step in (3, 4) for one in records
    ]
    assert [one["entropy"] for one in lines[:4]] == [one.entropy for one in records]
    low = min(records, key=lambda one: one.entropy / one.max_entropy)
    loud = max(records, key=lambda one: one.max_logit)
    assert (low.layer, low.head) == (loud.layer, loud.head) == (1, 1)
    line = probe.summary()
    assert line.startswith("4 heads: entropy ") and line.count("layer 1, head 1") == 2
    assert f"({low.entropy:.3g} nats)" in line and f"logit {loud.max_logit:.3g} in" in line


def test_alarms_name_the_rule_and_its_numbers_and_fire_once() -> None:
    model = Stack(1)
    inputs = randn(4, 6, 8)
    with Probe(model) as probe:
        model(inputs)
        assert probe.alarms == []
        with torch.no_grad():
            model.layers[0].q_proj.weight[:4] *= 500  # type: ignore[union-attr, index]
        model(inputs)
        model(inputs)
        model(torch.ones_like(inputs) + 1e-3 * inputs)
    by_rule = {alarm.rule: alarm for alarm in probe.alarms}
    assert [alarm.rule for alarm in probe.alarms].count("logits") == 1
    loud = by_rule["logits"]
    assert (loud.name, loud.layer, loud.head, loud.forward) == ("layers.0", 0, 0, 2)
    assert loud.value > loud.limit and 20 <= loud.limit <= 100
    assert f"{loud.value:.3g}" in loud.message and f"{loud.limit:.3g}" in loud.message
    quiet = by_rule["entropy"]
    assert quiet.head == 0 and quiet.value < quiet.limit == 0.1 * math.log(6)
    flat = by_rule["rank"]
    assert flat.forward == 4 and flat.head is None and flat.value < 0.1 == flat.limit
    silent = Probe(model, rules=AlarmRules(entropy_share=0, logit_limit=math.inf, residual=0))
    with silent:
        model(inputs)
        model(torch.ones_like(inputs))
    assert silent.alarms == []


def test_a_model_without_attention_says_so() -> None:
    model = nn.Linear(4, 4)
    with Probe(model) as probe:
        model(randn(2, 4))
    with pytest.raises(LocaterError, match="no attention of Linear was seen in 1 passes"):
        _ = probe.records


def test_one_token_has_nothing_to_choose() -> None:
    model = Stack(1)
    with Probe(model) as probe:
        model(randn(2, 1, 8))  # no reason to stop the model
    with pytest.raises(InputError, match=r"layers\.0: attention over 1 key"):
        _ = probe.records
    with probe:
        model(randn(2, 5, 8))
    assert {one.rows for one in probe.records} == {2}


def test_rows_that_are_all_masked_are_ignored_and_an_error_if_there_are_no_others() -> None:
    model = Stack(1)
    mask = torch.ones(3, 1, 6, 6, dtype=torch.bool)
    mask[1] = False
    with Probe(model, queries="all") as probe:
        model(randn(3, 6, 8), mask)
    assert {one.rows for one in probe.records} == {12}
    mask[:] = False
    with Probe(model, queries="all") as probe:
        model(randn(3, 6, 8), mask)
    with pytest.raises(InputError, match=r"layers\.0: every measured row is masked"):
        _ = probe.records


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_name_the_layer_and_heads(bad: float) -> None:
    model = Stack()
    with torch.no_grad():
        model.layers[1].q_proj.bias[5] = bad  # type: ignore[union-attr, index]
    with (
        Probe(model),
        pytest.raises(InputError, match=r"logits of layers\.1 are NaN or infinite in heads \[1\]"),
    ):
        model(randn(3, 6, 8))


def test_in_training_loops_logits_that_are_no_numbers_are_an_alarm() -> None:
    model = Stack()
    probe = training_probe(model, {})
    weight = model.layers[1].q_proj.bias  # type: ignore[union-attr]
    with probe:
        for value in (0.0, math.nan, math.nan, 0.0):
            with torch.no_grad():
                weight[5] = value  # type: ignore[index]
            model.train()(randn(3, 6, 8))
    assert [(one.rule, one.layer, one.head, one.forward) for one in probe.alarms] == [
        ("not finite", 1, 1, 2)
    ]
    assert {one.rows for one in probe.records if one.layer == 1} == {6}


def test_a_limit_of_zero_switches_a_rule_of_the_alarms_off() -> None:
    model = Stack()
    with torch.no_grad():
        model.layers[0].q_proj.weight *= 60  # type: ignore[union-attr, operator]
    rung = {}
    for ratio in (0.0, 2.0):
        rules = AlarmRules(logit_ratio=ratio, logit_limit=1e4, residual=0.0, entropy_share=0.0)
        rules = replace(rules, logit_limit=10.0) if ratio else rules
        with Probe(model, rules=rules) as probe:
            model(randn(3, 6, 8))
        rung[ratio] = len(probe.alarms)
    assert rung[0.0] == 0 < rung[2.0]


def test_inputs_of_all_attentions_together_stay_within_keep() -> None:
    model = Stack(3)
    size = 6 * 8 * 4  # a sequence
    with Probe(model, keep=4 * size) as probe:
        for _ in range(3):
            model(randn(3, 6, 8))
    kept = [probe.inputs(place).numel() * 4 for place in range(3)]
    assert 0 < sum(kept) <= 4 * size
    with Probe(model, keep=9 * size) as probe:  # each has its share, in several passes
        for _ in range(3):
            model(randn(2, 6, 8))
    assert [len(probe.inputs(place)) for place in range(3)] == [3, 3, 3]


def test_a_cache_with_room_ahead_is_read_up_to_its_tokens() -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=40,
    )  # fmt: skip
    ids = torch.randint(40, (3, 12), generator=torch.Generator().manual_seed(0))
    seen = {}
    for implementation in ("sdpa", "eager"):
        model = LlamaModel._from_config(config, attn_implementation=implementation).eval()
        model.load_state_dict(seen.setdefault("weights", model.state_dict()))
        for cache in (None, StaticCache(config, max_cache_len=20)):
            with torch.no_grad(), Probe(model, queries="all") as probe:
                model(ids, past_key_values=cache, use_cache=cache is not None)
            found = [(one.rows, one.entropy, one.distance) for one in probe.records]
            for ours, plain in zip(found, seen.setdefault("found", found), strict=True):
                assert ours == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("settings", [{"queries": 0}, {"queries": "first"}, {"queries": True}])
def test_queries_are_last_all_or_a_number(settings: dict[str, Any]) -> None:
    with pytest.raises((ConfigError, Exception), match="queries"):
        Probe(Stack(), **settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"every": 0}, "every must be 1 or more, got 0"),
        ({"keep": -1}, "keep must be 0 bytes or more, got -1"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Probe(Stack(), **settings)
    with pytest.raises(ConfigError, match="residual must be zero or more"):
        AlarmRules(residual=-0.1)


def test_an_attention_is_found_by_layer_or_name() -> None:
    model = Stack()
    with Probe(model) as probe:
        model(randn(3, 6, 8))
    assert torch.equal(probe.inputs(1), probe.inputs("layers.1"))
    with pytest.raises(
        InputError, match=r"0 attentions are called 7.\nhint: .*layers\.0, layers\.1"
    ):
        probe.process(7)


def test_heads_differ_from_layer_to_layer() -> None:
    model = Stack(3)
    with Probe(model) as probe:
        model(randn(3, 6, 8))
    assert [(one.layer, one.head) for one in probe.records] == [
        (layer, head) for layer in range(3) for head in range(2)
    ]
    assert all(a.entropy != b.entropy for a, b in pairwise(probe.records))
    plain = json.loads(json.dumps(probe.records[0].as_dict(), allow_nan=False))
    assert plain["name"] == "layers.0" and len(plain["rho"]) == 6
    assert set(plain) == {*vars(probe.records[0]), "rho_error"}


def test_a_probe_leaves_no_hook_behind() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    with Probe(layer):
        layer(torch.ones(2, 4, 16))
        assert torch.nn.modules.module._has_any_global_hook()
    assert not torch.nn.modules.module._has_any_global_hook()  # torch.compile would mind


class Reshaped(Attention):
    """The same attention, its heads put into the batch (3 axes) or behind an axis more (5)."""

    axes = 4

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = (
            one.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for one in (self.q_proj(inputs), self.k_proj(inputs), inputs)
        )
        if mask is not None:
            mask = mask.expand(len(inputs), self.num_heads, -1, -1)
        sides = [one if self.axes != 3 or one is None else one.flatten(0, 1)
                 for one in (query, key, value, mask)]  # fmt: skip
        sides = [one if self.axes != 5 or one is None else one[None] for one in sides]
        mixed = functional.scaled_dot_product_attention(*sides).reshape(query.shape)  # type: ignore[arg-type]
        return mixed.transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("axes", [3, 5])
@pytest.mark.parametrize("is_masked", [True, False])
def test_heads_are_found_however_the_call_arranges_them(axes: int, is_masked: bool) -> None:
    plain, other = Stack(1), Stack(1)
    other.layers[0].__class__ = Reshaped
    other.layers[0].axes = axes
    mask = randn(3, 2, 6, 6, seed=8) > -1 if is_masked else None
    found = []
    for model in (plain, other):
        with Probe(model, queries="all") as probe:
            model(randn(3, 6, 8), mask)
        found.append(probe)
    assert len(found[1].records) == 2
    for ours, theirs in zip(found[1].records, found[0].records, strict=True):
        assert (ours.rows, ours.head) == (theirs.rows, theirs.head)
        assert ours.entropy == pytest.approx(theirs.entropy, rel=1e-5)
        torch.testing.assert_close(ours.attention, theirs.attention)


@pytest.mark.parametrize("queries", ["last", "all", 2])
def test_rho_of_the_last_query_does_not_depend_on_the_others(queries: Any) -> None:
    model = Stack(1)
    with torch.no_grad():
        model.layers[0].q_proj.weight *= 6  # type: ignore[union-attr, operator]
    mask = torch.ones(4, 1, 1, 6, dtype=torch.bool)
    mask[1, ..., 4:] = False  # its last query is the fourth
    with Probe(model, queries="last") as last:
        model(randn(4, 6, 8), mask)
    with Probe(model, queries=queries) as probe:
        model(randn(4, 6, 8), mask)
        model(randn(4, 6, 8), mask)
    for ours, theirs in zip(probe.records, last.records, strict=True):
        torch.testing.assert_close(ours.last_rho.rho, theirs.rho.rho, equal_nan=True)
        assert 0 < theirs.rho.rho.nanmean() < 1
        assert ours.last_rho.standard_error is not None


def test_two_tokens_are_enough_to_be_kept() -> None:
    model = Stack(1)
    with Probe(model) as probe:
        model(randn(3, 2, 8))
    assert torch.equal(probe.inputs(0), randn(3, 2, 8))


def test_a_layers_number_means_its_self_attention() -> None:
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, batch_first=True), 1).eval()
    with Probe(model) as probe, torch.no_grad():
        model(randn(3, 5, 8), randn(3, 7, 8, seed=1))
    assert {(one.name, one.kind) for one in probe.records} == {
        ("layers.0.self_attn", "self"),
        ("layers.0.multihead_attn", "cross"),
    }
    assert torch.equal(probe.inputs(0), probe.inputs("layers.0.self_attn"))
    with pytest.raises(InputError, match="is cross-attention"):
        probe.process("layers.0.multihead_attn")


def test_one_mask_for_all_heads_in_the_batch() -> None:
    plain, other = Stack(1), Stack(1)
    band = (torch.arange(6)[:, None] - torch.arange(6)).abs() < 3
    with Probe(plain, queries="all", profiles="all") as truth:
        plain(randn(3, 6, 8), band)
    query, key = (
        side(randn(3, 6, 8)).unflatten(-1, (2, -1)).transpose(1, 2).flatten(0, 1)
        for side in (plain.layers[0].q_proj, plain.layers[0].k_proj)  # type: ignore[operator, union-attr]
    )

    class Merged(Attention):
        def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
            functional.scaled_dot_product_attention(query, key, key, mask)
            return inputs

    other.layers[0].__class__ = Merged
    with Probe(other, queries="all", profiles="all") as probe:
        other(randn(3, 6, 8), band[None])  # (1, queries, keys)
    for ours, theirs in zip(probe.records, truth.records, strict=True):
        assert ours.rows == theirs.rows
        torch.testing.assert_close(ours.attention, theirs.attention)


def test_a_model_without_one_finite_logit_has_a_summary() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    with Probe(layer, strict=False) as probe:
        layer(torch.full((2, 4, 16), torch.nan))
    assert probe.summary().startswith(
        "no head could be measured; 1 alarms: the logits of self_attn"
    )


@pytest.mark.parametrize("step", ["attention_called", "attention_ends", "pass_ends"])
def test_a_fault_of_the_probe_is_not_called_the_models(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("not enough values to unpack")

    model, _ = load_model("demo")
    probe = Probe(model)
    monkeypatch.setattr(probe, step, broken)
    with pytest.raises(ValueError, match="not enough values to unpack"):
        list(probe.run(torch.arange(40)[None]))


def test_a_fault_of_the_model_is_not_called_the_probes() -> None:
    model, _ = load_model("demo")
    with pytest.raises(LocaterError, match="the model fails on blocks of 40 tokens"):
        list(Probe(model).run(torch.full((1, 40), 1 << 30)))
