"""All rows from one more fused attention: against float64 dense softmax, in memory linear in T."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.probe.test_rows import Largest
from torch import Tensor

from locater.probe import rows as module
from locater.probe.rows import RealQueries, Rows, ScoredKeys, fused_rows, largest_logits, tally

BATCH, HEADS, TOKENS, HEAD = 2, 4, 200, 16


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


PLACE = torch.arange(TOKENS)
BEHIND = PLACE[:, None] >= PLACE
BAND = BEHIND & (PLACE[:, None] - PLACE < 20)
REAL = torch.stack([PLACE < 150, PLACE >= 30])[:, None, None]
CASES: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "both ways": {},
    "sliding, causal": {"masks": (BAND,)},
    "sliding, both ways": {"masks": ((PLACE[:, None] - PLACE).abs() < 20,)},
    "padded, causal": {"masks": (REAL & BEHIND,)},
    "padded": {"masks": (REAL,)},
    "padded beside a causal flag": {"masks": (REAL,), "is_causal": True},
    "two masks, one by head": {"masks": (REAL, randn(1, HEADS, TOKENS, TOKENS) > -1)},
    "additive -inf": {"masks": (torch.zeros(TOKENS, TOKENS).masked_fill(~BEHIND, -torch.inf),)},
    "by a function": {"mask_mod": lambda b, h, q, k: (k <= q) & (q - k < 20 * (h + 1))},
    "own key hidden": {"masks": (BEHIND & (PLACE[:, None] != PLACE),)},
}


def attention(case: str, *, shared: int = HEADS, size: float = 2.0, **more: Any) -> ScoredKeys:
    query = size * randn(BATCH, HEADS, TOKENS, HEAD, seed=1)
    key = randn(BATCH, shared, TOKENS, HEAD, seed=2) + 3  # a common part, as real keys have
    kinds = {"query": query, "key": key, "scale": HEAD**-0.5}
    return ScoredKeys(**{**kinds, **CASES[case], **more})


def dense(one: ScoredKeys, real: RealQueries) -> dict[str, Tensor]:
    """The definitions, from the materialized matrix in float64."""
    query, key = one.query.double(), one.key.double()
    logits = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT * one.scale
    places = [torch.arange(size) for size in logits.shape]
    grid = torch.meshgrid(*places, indexing="ij")
    visible = torch.ones_like(logits, dtype=torch.bool)
    if one.is_causal:
        visible &= grid[3] <= grid[2]
    for mask in one.masks:
        visible &= mask if mask.dtype == torch.bool else mask == 0
    if one.mask_mod is not None:
        visible &= one.mask_mod(*grid)
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0)
    first = visible.to(torch.uint8).argmax(-1, keepdim=True)
    own = grid[2] + (real.first_key or 0)
    return {
        "count": visible.sum(-1),
        "entropy": torch.special.entr(weights).sum(-1),
        "sink": weights.gather(-1, first)[..., 0],
        "own": (weights * (grid[3] == own)).sum(-1),
        "distance": (weights * (grid[3] - own).abs()).sum(-1),
        "top": logits.masked_fill(~visible, -torch.inf).amax(-1),
    }


def assert_rows(found: Rows, truth: dict[str, Tensor], *, atol: float, top: float = 1e-4) -> None:
    seen = (truth["count"] >= 2) & (found.count >= 2)  # padding is no row
    assert bool(seen.any())
    scale = {"distance": TOKENS}
    for name in ("entropy", "sink", "own", "distance"):
        ours, theirs = getattr(found, name).double(), truth[name]
        error = (ours - theirs)[seen].abs().max().item() / scale.get(name, 1)
        assert error <= atol, (name, error)
    assert bool((found.top.double() + top >= truth["top"])[seen].all())


@pytest.mark.parametrize("shared", [HEADS, 2, 1])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_all_rows_are_those_of_dense_softmax(
    case: str, shared: int, dtype: torch.dtype, atol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TOGETHER", 70 * TOKENS * HEADS * BATCH)  # masks in three blocks
    one = attention(case, shared=shared)
    one = ScoredKeys(**{**vars(one), "query": one.query.to(dtype), "key": one.key.to(dtype)})
    real = RealQueries.of(one)
    found = fused_rows(one, real, slice(0, BATCH))
    assert found.entropy.dtype == dtype
    assert_rows(found, dense(one, real), atol=atol)


@pytest.mark.parametrize("asked", [40, 300])
@pytest.mark.parametrize("case", ["causal", "both ways", "padded"])
def test_other_numbers_of_queries(case: str, asked: int) -> None:
    """Cross-attention, a cache behind the queries, and more queries than keys."""
    query = randn(BATCH, HEADS, asked, HEAD, seed=3)
    masks = (REAL,) if case == "padded" else ()
    one = attention("both ways", query=query, masks=masks, is_causal=case == "causal")
    for is_self in (True, False):
        real = RealQueries.of(one, is_self=is_self)
        found = fused_rows(one, real, slice(0, BATCH))
        truth = dense(one, real)
        if not is_self:
            assert bool(found.distance.isnan().all() and found.own.isnan().all())
            found = Rows(**{**vars(found), "distance": truth["distance"], "own": truth["own"]})
        assert_rows(found, truth, atol=1e-13)


@pytest.mark.parametrize(
    ("dtype", "size", "entropy"),
    [
        (torch.float32, 4.0, 1e-5),
        (torch.float32, 75.0, 1e-4),  # logits of 300
        (torch.bfloat16, 4.0, 1e-5),  # of the rounded queries and keys: sums are in float32
        (torch.bfloat16, 75.0, 1e-4),
    ],
)
def test_sharp_rows_in_low_precision(dtype: torch.dtype, size: float, entropy: float) -> None:
    one = attention("causal", size=size)
    one = ScoredKeys(**{**vars(one), "query": one.query.to(dtype), "key": one.key.to(dtype)})
    real = RealQueries.of(one)
    truth = dense(one, real)
    assert truth["top"].max() > size * 3
    assert_rows(fused_rows(one, real, slice(0, BATCH)), truth, atol=entropy, top=1e-3)


def test_a_bias_on_logits_is_written_out_and_exact() -> None:
    """ALiBi: the fused identity would need the bias' own mean, so rows are taken in blocks."""
    slopes = 2.0 ** -torch.arange(1, HEADS + 1)
    bias = (-slopes[:, None, None] * (PLACE[:, None] - PLACE)).masked_fill(~BEHIND, -torch.inf)
    one = attention("both ways", masks=(bias.double(),))
    assert not one.only_hides and attention("additive -inf").only_hides
    found = tally(one, "all", "last")
    logits, _ = one.rows(slice(None), PLACE)
    weights = logits.softmax(-1)[:, :, 1:]  # the first query has no choice
    assert found is not None
    entropy = torch.special.entr(weights).sum(-1).mean((0, 2))
    torch.testing.assert_close(found.entropy.mean, entropy)
    own = weights.diagonal(1, -2, -1).mean((0, 2))
    torch.testing.assert_close(found.own.mean, own)


def test_a_cap_on_logits_is_part_of_what_is_measured() -> None:
    one = attention("causal", size=20.0, score_mod=lambda s, b, h, q, k: 5 * torch.tanh(s / 5))
    plain = attention("causal", size=20.0)
    found = tally(one, "all", "last")
    capped = 5 * torch.tanh(plain.query @ plain.key.mT * plain.scale / 5)
    weights = capped.masked_fill(~BEHIND, -torch.inf).softmax(-1)[:, :, 1:]
    assert found is not None
    torch.testing.assert_close(found.entropy.mean, torch.special.entr(weights).sum(-1).mean((0, 2)))
    assert bool((found.max_logit <= 5).all())


@pytest.mark.parametrize("case", ["causal", "both ways", "padded", "by a function"])
def test_nothing_of_the_size_of_the_attention_matrix_is_made_at_once(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TOGETHER", 1)  # masks of 64 rows, the least there are
    monkeypatch.setattr(module, "BLOCK", HEADS * TOKENS)
    one = attention(case)
    with Largest() as largest:
        tally(one, "all", "last", block=HEADS * TOKENS)
    assert largest.numel <= max(HEADS * TOKENS * (HEAD + 8), 64 * 208 * HEADS)
    assert largest.numel < HEADS * TOKENS**2


@pytest.mark.parametrize("size", [0.0, 2.0, 75.0])
def test_the_largest_logit_is_found_and_sharp_heads_save_the_others(
    size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = attention("padded, causal", size=size)
    real = RealQueries.of(one)
    bounds = fused_rows(one, real, slice(0, BATCH)).top
    assert real.is_real is not None
    truth = dense(one, real)["top"].masked_fill(~real.is_real[:, None], -torch.inf)
    asked: list[int] = []
    rows = ScoredKeys.rows

    def counted(self: ScoredKeys, sequences: Any, queries: Tensor) -> Any:
        asked.append(len(sequences) * len(queries))
        return rows(self, sequences, queries)

    monkeypatch.setattr(ScoredKeys, "rows", counted)
    found = largest_logits(one, bounds, block=20 * TOKENS)
    torch.testing.assert_close(found, truth.amax((0, 2)))
    share = sum(asked) / (BATCH * HEADS * TOKENS)
    assert share < 0.5 if size == 75.0 else share <= 1
    before = bounds.clone()
    before[0, 2, 7] = torch.nan  # what is no number is not hidden
    one.query[0, 2, 7] = torch.nan
    assert bool(largest_logits(one, before, block=20 * TOKENS)[2].isnan())
