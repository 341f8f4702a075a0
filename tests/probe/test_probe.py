"""A probe measures what the materialized attention matrix says, wherever attention is called."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from tests.models.families import FAMILIES, built, watched
from tests.probe.dense_attention import (
    FLOAT32,
    Dense,
    assert_measures,
    dense,
    every_row,
    last_rows,
)
from torch import Tensor, nn
from torch.nn import functional

from locater import Probe
from locater.models.live import find_attention

BATCH, HEADS, TOKENS, HEAD = 3, 4, 9, 6


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Fused(nn.Module):
    """Calls scaled_dot_product_attention with whatever it is given."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return functional.scaled_dot_product_attention(*args, **kwargs)


def logits_of(
    query: Tensor, key: Tensor, scale: float, mask: Tensor | None, causal: bool
) -> Tensor:
    """What SDPA's documentation says that it computes."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = query @ key.mT * scale
    if causal:
        visible = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
        logits = logits.masked_fill(~visible, -torch.inf)
    if mask is None:
        return logits
    if mask.dtype == torch.bool:
        return logits.masked_fill(~mask, -torch.inf)
    return logits + mask


BAND = (torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)).abs() < 4
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 1.7},
    "causal": {"is_causal": True},
    "boolean mask": {"attn_mask": BAND},
    "boolean mask by head": {"attn_mask": randn(BATCH, HEADS, TOKENS, TOKENS, seed=5) > -1},
    "float mask": {"attn_mask": randn(BATCH, 1, TOKENS, TOKENS, seed=6)},
    "float mask with -inf": {
        "attn_mask": randn(1, HEADS, TOKENS, TOKENS, seed=7).masked_fill(~BAND, -torch.inf)
    },
    "float mask with the smallest number": {
        "attn_mask": torch.zeros(TOKENS, TOKENS, dtype=torch.float64).masked_fill(
            ~BAND, torch.finfo(torch.float64).min
        )
    },
    "shared keys": {"enable_gqa": True},
    "shared keys, causal": {"enable_gqa": True, "is_causal": True},
    "dropout": {"dropout_p": 0.5},
}


WAYS: dict[str, dict[str, Any]] = {
    "last": {"queries": "last"},
    "all": {"queries": "all"},  # at once where that is possible, and by key the last query
    "all, written out": {"queries": "all", "profiles": "all"},
    "last, by key all": {"queries": "last", "profiles": "all"},
}


def truths(logits: Tensor, way: str) -> tuple[list[Dense], list[Dense]]:
    """What should be found over the rows, and by key."""
    rows = {"last": last_rows(logits), "all": every_row(logits)}
    settings = WAYS[way]
    profiles = settings.get("profiles", "last")
    return dense(logits, rows[settings["queries"]]), dense(logits, rows[profiles])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_fused_attention_is_measured_as_if_it_were_materialized(case: str, way: str) -> None:
    settings = CASES[case]
    shared = 2 if settings.get("enable_gqa") else HEADS
    query = 3 * randn(BATCH, HEADS, TOKENS, HEAD)
    key, value = randn(2, BATCH, shared, TOKENS, HEAD, seed=1)
    model = Fused()
    with Probe(model, **WAYS[way]) as probe:
        model(query, key, value, **settings)
    logits = logits_of(
        query,
        key,
        settings.get("scale", HEAD**-0.5),
        settings.get("attn_mask"),
        settings.get("is_causal", False),
    )
    assert_measures(probe.records, *truths(logits, way))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("asked", "is_causal"), [(4, False), (4, True), (12, True)])
def test_fewer_or_more_queries_than_keys(asked: int, is_causal: bool, way: str) -> None:
    query, key = randn(BATCH, HEADS, asked, HEAD), randn(BATCH, HEADS, TOKENS, HEAD, seed=1)
    model = Fused()
    with Probe(model, **WAYS[way]) as probe:
        model(query, key, key, is_causal=is_causal)
    logits = logits_of(query, key, HEAD**-0.5, None, is_causal)
    # the flag counts from the start; without it nobody knows which key is a query's own
    assert_measures(probe.records, *truths(logits, way), allow_no_place=not is_causal)
    assert math.isnan(probe.records[0].distance) == (not is_causal)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("asked", [4, 16])
def test_keys_of_other_tokens_that_are_padded_leave_every_query_asking(
    asked: int, way: str
) -> None:
    """Latents over a padded text: neither by the call nor by its mask are queries padding."""
    query, key = randn(BATCH, HEADS, asked, HEAD), randn(BATCH, HEADS, TOKENS, HEAD, seed=1)
    mask = (torch.arange(TOKENS) < torch.tensor([[3], [5], [TOKENS]]))[:, None, None]
    model = Fused()
    with Probe(model, **WAYS[way]) as probe:
        model(query, key, key, attn_mask=mask)
    logits = logits_of(query, key, HEAD**-0.5, mask.expand(-1, 1, asked, -1), False)
    assert_measures(probe.records, *truths(logits, way), allow_no_place=True)
    assert math.isnan(probe.records[0].distance)


@pytest.mark.parametrize("is_fast", [False, True])
def test_multihead_attention_over_other_tokens_is_no_self_attention(is_fast: bool) -> None:
    model = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64).train(not is_fast)
    query, key = randn(3, 4, 8), randn(3, 10, 8, seed=1)
    hidden = torch.arange(10) >= torch.tensor([[3], [6], [10]])
    with torch.set_grad_enabled(not is_fast), Probe(model, queries="all") as probe:
        model(query, key, key, key_padding_mask=hidden)
    assert [(one.rows, math.isnan(one.distance)) for one in probe.records] == [(12, True)] * 2
    tokens = randn(3, 10, 8)
    with torch.set_grad_enabled(not is_fast), Probe(model, queries="all") as probe:
        model(tokens, tokens, tokens, key_padding_mask=hidden)
    assert [(one.rows, math.isnan(one.distance)) for one in probe.records] == [(19, False)] * 2


def test_random_queries_are_drawn_among_those_that_can_choose() -> None:
    query, key = randn(2, BATCH, HEADS, TOKENS, HEAD)
    real = torch.arange(TOKENS) >= TOKENS - 2
    mask = real & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    model = Fused()
    for kwargs in ({"is_causal": True}, {"attn_mask": mask}):
        with Probe(model, queries=1) as probe:
            for _ in range(30):  # none of them may stop the model
                model(query, key, key, **kwargs)
        assert probe.records[0].rows > 0


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_padding_is_neither_asked_nor_counted(side: str, is_causal: bool, way: str) -> None:
    lengths = [TOKENS, 5, 7]
    place = torch.arange(TOKENS)
    real = torch.stack([place < n if side == "right" else place >= TOKENS - n for n in lengths])
    mask = real[:, None, None].expand(-1, 1, TOKENS, -1)
    mask = mask & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril() if is_causal else mask
    query, key = randn(2, BATCH, HEADS, TOKENS, HEAD)
    model = Fused()
    with Probe(model, **WAYS[way]) as probe:
        model(query, key, key, attn_mask=mask)
    logits = logits_of(query, key, HEAD**-0.5, mask, False)
    every = [(b, q) for b in range(BATCH) for q in range(TOKENS) if real[b, q]]
    rows = {"all": every, "last": [max(row for row in every if row[0] == b) for b in range(BATCH)]}
    found = dense(logits, rows[WAYS[way]["queries"]])
    assert_measures(probe.records, found, dense(logits, rows[WAYS[way].get("profiles", "last")]))


def test_some_random_queries_are_drawn_without_touching_the_global_generator() -> None:
    query, key = randn(2, BATCH, HEADS, TOKENS, HEAD)
    model = Fused()
    before = torch.get_rng_state()
    with Probe(model, queries=3, generator=torch.Generator().manual_seed(4)) as probe:
        model(query, key, key)
    assert torch.equal(before, torch.get_rng_state())
    chosen = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(4))[:3].tolist()
    logits = logits_of(query, key, HEAD**-0.5, None, False)
    rows = [(b, q) for b in range(BATCH) for q in sorted(chosen)]
    assert_measures(probe.records, dense(logits, rows))
    with Probe(model, queries=TOKENS + 5) as probe:
        model(query, key, key)
    assert_measures(probe.records, dense(logits, every_row(logits)))


def test_rho_by_relative_position_counts_the_same_gates() -> None:
    query, key = randn(2, BATCH, HEADS, TOKENS, HEAD)
    model = Fused()
    with Probe(model, queries="all", profiles="all") as probe:
        model(2 * query, key, key, is_causal=True)
    logits = logits_of(2 * query, key, HEAD**-0.5, None, True)
    for head, record in enumerate(probe.records):
        profile = record.rho_by_theta
        bins = len(profile.theta)
        gates: list[list[float]] = [[] for _ in range(bins)]
        for b in range(BATCH):
            for t in range(1, TOKENS):
                row = logits[b, head, t, : t + 1]
                score = (row - row.mean() + 1) / (t + 1)
                for i, value in enumerate(score.tolist(), start=1):
                    # θ = i/T falls into the bin that ends at or after it
                    gates[math.ceil(i * bins / (t + 1)) - 1].append(float(0 <= value <= 1))
        expected = [sum(one) / len(one) if one else math.nan for one in gates]
        torch.testing.assert_close(
            profile.rho, torch.tensor(expected, dtype=torch.float64), equal_nan=True
        )


SHOWN = ["gpt2", "llama", "bert", "vit", "t5"]
OTHERS = ["qwen3", "gemma2", "gemma3", "bloom", "falcon, old", "gptj", "whisper", "gpt_oss"]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", [*SHOWN, *OTHERS])
def test_a_familys_own_logits_are_measured(name: str, implementation: str) -> None:
    if implementation == "sdpa" and name in ("gemma2", "bloom", "gptj", "gpt_oss"):
        return  # their attention exists in one way only
    if implementation == "eager" and name == "falcon, old":
        return
    model, inputs = built(name), FAMILIES[name].inputs()
    found = find_attention(model)
    with watched(found) as seen, torch.no_grad():
        model(**inputs)
    if implementation == "sdpa":  # the same weights: the logits that eager attention has written
        model.set_attn_implementation("sdpa")  # type: ignore[operator]
    with torch.no_grad():
        plain = model(**inputs)
        with (
            Probe(model, queries="all", profiles="all") as probe,
            Probe(model, queries="all") as quick,
        ):
            again = model(**inputs)
    assert probe.unseen == []
    assert len(probe.records) == sum(one.layout.heads for one in found)
    first = next(value for value in plain.values() if isinstance(value, Tensor))
    assert torch.equal(first, next(value for value in again.values() if isinstance(value, Tensor)))
    for one in found:
        logits = seen[one.layout.name].logits
        assert logits is not None
        logits = logits.reshape(-1, one.layout.heads, *logits.shape[-2:])
        records = [record for record in probe.records if record.name == one.layout.name]
        assert [record.layer for record in records] == [one.layout.layer] * one.layout.heads
        # many write the eager softmax in float32: deeper layers of the two ways differ by that
        is_short = logits.dtype != torch.float64 or implementation == "sdpa"
        tolerance = FLOAT32 if is_short else 1e-9
        truth = dense(logits, every_row(logits))
        assert_measures(records, truth, tolerance=tolerance)
        at_once = [record for record in quick.records if record.name == one.layout.name]
        by_key = dense(logits, last_rows(logits))
        assert_measures(at_once, truth, by_key, tolerance=tolerance)


PADDED = torch.tensor([[False] * 9, [False] * 6 + [True] * 3, [False] * 8 + [True]])
AHEAD = torch.ones(9, 9, dtype=torch.bool).triu(1)
OWN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "padding": ({}, {"key_padding_mask": PADDED}),
    "causal": ({}, {"attn_mask": AHEAD}),
    "causal flag": ({}, {"attn_mask": AHEAD, "is_causal": True}),
    "float mask": ({}, {"attn_mask": randn(9, 9, seed=9)}),
    "mask by head": ({}, {"attn_mask": randn(3 * 2, 9, 9, seed=9) > 1.5}),
    "both masks": ({}, {"attn_mask": AHEAD, "key_padding_mask": PADDED}),
    "added keys": ({"add_bias_kv": True, "add_zero_attn": True}, {"key_padding_mask": PADDED}),
    "other widths": ({"kdim": 5, "vdim": 7}, {}),
    "no bias": ({"bias": False}, {}),
    "time first": ({"batch_first": False}, {"key_padding_mask": PADDED}),
}


@pytest.mark.parametrize("mode", ["train", "eval", "fast"])
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("case", OWN)
def test_torchs_own_attention_is_measured_on_every_path(
    case: str, weights: bool, mode: str
) -> None:
    settings, given = OWN[case]
    settings = {"batch_first": True, **settings}
    module = nn.MultiheadAttention(8, 2, dtype=torch.float64, **settings).train(mode == "train")
    with torch.no_grad():
        for place, parameter in enumerate(module.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=place))
    tokens = randn(3, 9, 8)
    sides = [tokens, tokens, tokens]
    if "kdim" in settings:
        sides = [tokens, randn(3, 9, 5, seed=3), randn(3, 9, 7, seed=4)]
    if not settings["batch_first"]:
        sides = [side.transpose(0, 1).contiguous() for side in sides]
        sides = sides if "kdim" in settings else [sides[0]] * 3
    with torch.set_grad_enabled(mode != "fast"):
        plain = module(*sides, need_weights=weights, **given)[0]
        _, attention = module(*sides, average_attn_weights=False, **given)
        with Probe(module, queries="all", profiles="all") as probe:
            again = module(*sides, need_weights=weights, **given)[0]
    assert torch.equal(plain, again)
    # logarithms of the weights are the logits up to a constant of each row
    padded = torch.zeros(3, 9, dtype=torch.bool)
    padded = given.get("key_padding_mask", padded)
    rows = [(b, q) for b in range(3) for q in range(9) if not padded[b, q]]
    for record, truth in zip(probe.records, dense(attention.log(), rows), strict=True):
        assert record.rows == len(truth.entropy)
        assert math.isclose(record.entropy, sum(truth.entropy) / record.rows, rel_tol=1e-9)
        expected = [sum(one) / len(one) if one else math.nan for one in truth.gates]
        torch.testing.assert_close(
            record.rho.rho, torch.tensor(expected, dtype=torch.float64), equal_nan=True
        )


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padding", [None, PADDED])
def test_the_fast_path_of_an_encoder_stays_fast_and_is_measured(
    norm_first: bool, padding: Tensor | None
) -> None:
    layer = nn.TransformerEncoderLayer(
        8, 2, 12, dropout=0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()
        tokens = randn(3, 9, 8)
        with torch.no_grad():
            plain = model(tokens, src_key_padding_mask=padding)
            with Probe(model, queries="all") as fast:
                again = model(tokens, src_key_padding_mask=padding)
        with Probe(model, queries="all") as slow:  # gradients: PyTorch's other path
            model(tokens, src_key_padding_mask=padding)
    assert torch.equal(plain, again)
    assert [one.name for one in fast.records] == [one.name for one in slow.records]
    assert [one.name for one in fast.records][::2] == ["layers.0.self_attn", "layers.1.self_attn"]
    for ours, theirs in zip(fast.records, slow.records, strict=True):
        assert ours.rows == theirs.rows
        assert math.isclose(ours.entropy, theirs.entropy, rel_tol=1e-9)
        torch.testing.assert_close(ours.rho.rho, theirs.rho.rho, equal_nan=True)
        torch.testing.assert_close(ours.attention, theirs.attention, equal_nan=True)
    for ours, theirs in zip(fast.rank, slow.rank, strict=True):
        assert math.isclose(ours.residual, theirs.residual, rel_tol=1e-9)
        assert math.isclose(ours.similarity, theirs.similarity, rel_tol=1e-9)


def test_keys_that_are_given_take_the_place_of_projected_ones() -> None:
    """`static_k` of multi_head_attention_forward is (batch · heads, keys, head)."""
    tokens, weights = randn(TOKENS, BATCH, 8), randn(24, 8, seed=1)
    fixed = randn(BATCH * 2, TOKENS, 4, seed=2)

    class Given(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return functional.multi_head_attention_forward(
                x, x, x, 8, 2, weights, None, None, None, False, 0.0, weights[:8], None,
                static_k=fixed, static_v=fixed, need_weights=False,
            )[0]  # fmt: skip

    model = Given()
    with Probe(model, queries="all", profiles="all") as probe:
        model(tokens)
    query = (tokens @ weights[:8].mT).unflatten(-1, (2, 4)).permute(1, 2, 0, 3)
    logits = query @ fixed.unflatten(0, (BATCH, 2)).mT / 2
    assert_measures(probe.records, dense(logits, every_row(logits)), allow_no_place=True)
