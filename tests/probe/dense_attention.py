"""What a probe should measure, from the materialized attention matrix, row by row."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from locater import MeasuredHead
from locater.core.theory import attention_entropy, propagates
from locater.probe.rows import MASKED

FLOAT64 = 1e-9
FLOAT32 = 2e-5  # logits of size ten, sums over a few dozen keys


@dataclass
class Dense:
    """Sums over rows of one head, kept as plain lists by key position."""

    keys: int
    entropy: list[float] = field(default_factory=list)
    queries: int = 0
    max_logit: float = -math.inf
    sink: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    distance: list[float] = field(default_factory=list)
    gates: list[list[float]] = field(default_factory=list)
    attention: list[list[float]] = field(default_factory=list)
    logits: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("gates", "attention", "logits"):
            setattr(self, name, [[] for _ in range(self.keys)])

    def see(self, row: Tensor, own_key: int) -> None:
        """One query's logits over all keys."""
        visible = (row > MASKED).nonzero()[:, 0]
        if len(visible) == 0:
            return
        logits = row[visible].double()
        self.queries += 1
        self.max_logit = max(self.max_logit, logits.max().item())
        if len(visible) < 2:  # nothing to choose
            return
        weights = logits.softmax(0)
        self.entropy.append(attention_entropy(weights).item())
        self.sink.append(weights[0].item())
        self.own.append(weights[visible == own_key].sum().item())
        self.distance.append((weights * (visible - own_key).abs()).sum().item())
        for key, gate, weight, logit in zip(
            visible.tolist(), propagates(logits), weights, logits, strict=True
        ):
            self.gates[key].append(float(gate))
            self.attention[key].append(weight.item())
            self.logits[key].append(logit.item())


def dense(logits: Tensor, rows: Iterable[tuple[int, int]], first_key: int = 0) -> list[Dense]:
    """Every head's truth over some (sequence, query) rows of (batch, heads, queries, keys)."""
    heads = [Dense(logits.shape[-1]) for _ in range(logits.shape[1])]
    for sequence, query in rows:
        for head, truth in enumerate(heads):
            truth.see(logits[sequence, head, query], query + first_key)
    return heads


def every_row(logits: Tensor) -> list[tuple[int, int]]:
    return [(b, q) for b in range(logits.shape[0]) for q in range(logits.shape[2])]


def last_rows(logits: Tensor) -> list[tuple[int, int]]:
    return [(b, logits.shape[2] - 1) for b in range(logits.shape[0])]


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def assert_measures(
    records: list[MeasuredHead],
    truth: list[Dense],
    profiles: list[Dense] | None = None,
    *,
    tolerance: float = FLOAT64,
    allow_no_place: bool = False,
) -> None:
    """Each head's record says what the matrix says; queries may have no place among the keys.

    `profiles` is the truth over the rows whose numbers by key are taken, where it is another one.
    """
    assert len(records) == len(truth)
    for record, one, by_key in zip(records, truth, profiles or truth, strict=True):
        assert (record.rows, record.queries) == (len(one.entropy), one.queries)
        pairs = {
            "entropy": (record.entropy, mean(one.entropy)),
            "entropy_per_query": (record.entropy_per_query, sum(one.entropy) / one.queries),
            "max_logit": (record.max_logit, one.max_logit),
            "sink_mass": (record.sink_mass, mean(one.sink)),
        }
        if record.kind == "self" and not (allow_no_place and math.isnan(record.distance)):
            pairs["distance"] = (record.distance, mean(one.distance))
            pairs["own_mass"] = (record.own_mass, mean(one.own))
        for name, (ours, theirs) in pairs.items():
            assert math.isclose(ours, theirs, rel_tol=tolerance, abs_tol=tolerance), name
        for ours, lists in (
            (record.rho.rho, by_key.gates),
            (record.attention, by_key.attention),
            (record.logit_mean, by_key.logits),
        ):
            theirs = torch.tensor([mean(values) for values in lists], dtype=torch.float64)
            torch.testing.assert_close(
                ours.double(), theirs, rtol=tolerance, atol=tolerance, equal_nan=True
            )
        variance = torch.tensor(
            [
                torch.tensor(values, dtype=torch.float64).var().item()
                if len(values) > 1
                else math.nan
                for values in by_key.logits
            ],
            dtype=torch.float64,
        )
        torch.testing.assert_close(
            record.logit_variance, variance, rtol=1e3 * tolerance, atol=tolerance, equal_nan=True
        )
