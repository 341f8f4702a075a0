"""Each rule fires beyond its limit and not before, by any one of the numbers it is made of."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from locater import Alarm, AlarmRules
from locater.core.theory import attention_entropy
from locater.probe.alarms import STUDY, AlarmBook, Measured
from locater.probe.rows import SoftmaxInput, TokenRank, tally
from locater.probe.watch import Place

KEYS = 8
QUIET = AlarmRules(entropy_share=0.0, logit_limit=math.inf, residual=0.0)


def heads(logits: Tensor) -> Measured:
    """An attention whose heads have these logits in every row."""
    sums = tally(SoftmaxInput(logits.double().reshape(1, -1, 1, KEYS)))
    assert sums is not None
    return Place("attention", 3), sums, None


def with_entropy(entropy: float) -> Tensor:
    """Logits of that entropy: one key stands out."""
    low, high = 0.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        logits = torch.tensor([middle] + [0.0] * (KEYS - 1)).double()
        above = attention_entropy(logits.softmax(0)).item() > entropy
        low, high = (middle, high) if above else (low, middle)
    return logits


def with_largest(*largest: float) -> Tensor:
    """Heads with these largest logits."""
    return torch.tensor([[top, *[0.0] * (KEYS - 1)] for top in largest])


def rung(rules: AlarmRules, *passes: Measured) -> list[Alarm]:
    book = AlarmBook(rules)
    for forward, measured in enumerate(passes, start=1):
        book.check(forward, [measured])
    return book.alarms


@pytest.mark.parametrize(("entropy", "rings"), [(0.76, False), (0.74, True)])
def test_entropy_is_held_against_half_of_the_first(entropy: float, rings: bool) -> None:
    first, middle = with_entropy(1.5), with_entropy(1.2)
    rules = AlarmRules(entropy_share=0.9)  # ln 8 alone would ring at once
    alarms = rung(rules, heads(first), heads(middle), heads(with_entropy(entropy)))
    assert len(alarms) == rings
    for alarm in alarms:
        assert (alarm.rule, alarm.forward, alarm.name, alarm.layer, alarm.head) == (
            "entropy", 3, "attention", 3, 0,
        )  # fmt: skip
        assert alarm.limit == pytest.approx(0.75) and alarm.value == pytest.approx(entropy)
        assert "half of the first (1.5)" in alarm.message


@pytest.mark.parametrize(("share", "rings"), [(1.01, False), (0.99, True)])
def test_entropy_is_held_against_a_share_of_the_largest(share: float, rings: bool) -> None:
    limit = 0.1 * math.log(KEYS)
    alarms = rung(AlarmRules(), heads(with_entropy(1.5)), heads(with_entropy(share * limit)))
    assert [alarm.limit for alarm in alarms] == pytest.approx([limit] * rings)


@pytest.mark.parametrize(
    ("others", "limit"),
    [
        ((50.0, 50.0), 100.0),  # the limit itself
        ((3.0, 9.0), 90.0),  # ten times the median, its own among them
        ((2.0, 7.0, 4.0), 40.0),  # of an even number the lower one
        ((0.5, 0.5), 20.0),  # never below a fifth of the limit
    ],
)
def test_logits_are_held_against_a_limit_and_the_median_head(
    others: tuple[float, ...], limit: float
) -> None:
    for top, rings in ((0.99 * limit, False), (1.01 * limit, True)):
        alarms = rung(AlarmRules(entropy_share=0.0), heads(with_largest(*others, top)))
        assert [alarm.head for alarm in alarms] == [len(others)] * rings
        assert [alarm.limit for alarm in alarms] == pytest.approx([limit] * rings)
    assert rung(QUIET, heads(with_largest(*others, 1e6))) == []


@pytest.mark.parametrize(("residual", "rings"), [(0.101, False), (0.099, True)])
def test_tokens_are_held_against_their_distance_from_the_mean(residual: float, rings: bool) -> None:
    rank = TokenRank(
        name="attention",
        layer=3,
        similarity=0.9,
        effective_rank=1.2,
        residual=residual,
        sequences=4,
    )
    alarms = rung(AlarmRules(), (Place("attention", 3), None, rank))
    assert [(one.rule, one.value, one.head) for one in alarms] == [("rank", residual, None)] * rings


def test_a_rule_fires_again_only_after_its_numbers_were_fine() -> None:
    loud, fine = heads(with_largest(1.0, 300.0)), heads(with_largest(1.0, 2.0))
    alarms = rung(AlarmRules(entropy_share=0.0), fine, loud, loud, fine, loud, loud)
    assert [alarm.forward for alarm in alarms] == [2, 5]


def test_a_message_says_how_often_its_rule_was_right_where_that_was_tried() -> None:
    loud = heads(with_largest(1.0, 300.0))
    (told,) = rung(AlarmRules(), loud)
    before, ever, harmed, false, healthy = STUDY["logits"]
    said = f"rang in {ever} of {harmed} whose loss was harmed, in {before} before that"
    assert said in told.message and f"in {false} of {healthy} healthy ones" in told.message
    (other,) = rung(AlarmRules(logit_limit=99.0), loud)
    assert "docs/alarms.md" not in other.message


@pytest.mark.parametrize("name", ["entropy_share", "logit_limit", "logit_ratio", "residual"])
def test_limits_below_zero_are_refused_and_zero_is_allowed(name: str) -> None:
    AlarmRules(**{name: 0.0})
    with pytest.raises(Exception, match=f"{name} must be zero or more, got -0.5"):
        AlarmRules(**{name: -0.5})
