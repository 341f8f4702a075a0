"""Alarms of a probe: each measured pass against rules, and against the first one measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from locater.errors import ConfigError
from locater.probe.rows import Tally, TokenRank
from locater.probe.watch import Place

Rule = Literal["entropy", "logits", "rank", "not finite"]


@dataclass(frozen=True)
class Alarm:
    """A rule that fired; it fires again only after its numbers were fine in between.

    >>> found = Alarm("logits", 7, "layers.3", 3, 1, 180.0, 100.0, "layer 3 head 1: a logit of 180")
    >>> found.rule, found.value > found.limit
    ('logits', True)
    """

    rule: Rule
    forward: int
    """The forward pass that was measured, counted from 1."""
    name: str
    layer: int | None
    head: int | None
    value: float
    limit: float
    message: str
    """The rule in words, with its numbers."""


@dataclass(frozen=True, kw_only=True)
class AlarmRules:
    """When attention is in trouble; a limit of 0, or infinity for logits, switches a rule off.

    >>> AlarmRules(entropy_share=0.2).logit_limit
    100.0
    """

    entropy_share: float = 0.1
    """Entropy below this share of ln T, and below half of what it was when first measured."""
    logit_limit: float = 100.0
    """A logit above this, or …"""
    logit_ratio: float = 10.0
    """… this many times the median over heads of their largest logits, and above a fifth of
    `logit_limit`."""
    residual: float = 0.1
    """Tokens nearer to their mean than this share of their norm."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0:
                raise ConfigError(
                    f"{field.name} must be zero or more, got {value}.",
                    hint="see docs/probe.md for what each rule compares.",
                )


STUDY: dict[Rule, tuple[int, int, int, int, int]] = {
    "entropy": (54, 85, 105, 50, 195),
    "logits": (55, 87, 105, 43, 195),
    "rank": (17, 30, 105, 13, 195),
}
"""Of the trainings of docs/alarms.md in which the loss was harmed: in how many a rule at its limit
rang before that, in how many at all, of how many; and in how many of the healthy ones, of all."""

Measured = tuple[Place, Tally | None, TokenRank | None]
_Held = tuple[bool, Rule, Place, int | None, float, float, str]
"""Whether a rule is broken, which, where, and what it says."""


class AlarmBook:
    """Keeps what was first measured and which rules are broken now."""

    def __init__(self, rules: AlarmRules) -> None:
        self.rules = rules
        self.alarms: list[Alarm] = []
        self._first: dict[tuple[str, int], float] = {}
        self._ringing: set[tuple[Rule, str, int | None]] = set()

    def check(self, forward: int, measured: Sequence[Measured]) -> None:
        """Hold one measured pass against the rules."""
        self._ringing -= {("not finite", place.name, None) for place, sums, _ in measured if sums}
        for rule in (self._entropy, self._logits, self._rank):
            for is_broken, name, place, head, value, limit, message in rule(measured):
                where = place.name, place.layer, head
                alarm = Alarm(name, forward, *where, value, limit, message)
                self._ring(is_broken, alarm, (name, place.name, head))

    def ring_not_finite(self, forward: int, place: Place, head: int, message: str) -> None:
        """Logits that are no numbers: an alarm by themselves, until a pass is measured again."""
        where = place.name, place.layer, head
        alarm = Alarm("not finite", forward, *where, math.nan, math.inf, message)
        self._ring(True, alarm, ("not finite", place.name, None))

    def _ring(self, is_broken: bool, alarm: Alarm, key: tuple[Rule, str, int | None]) -> None:
        if not is_broken:
            self._ringing.discard(key)
        elif key not in self._ringing:
            self._ringing.add(key)
            self.alarms.append(replace(alarm, message=alarm.message + self._evidence(alarm.rule)))

    def _evidence(self, rule: Rule) -> str:
        """How often the rule was right, where it is the one that was tried."""
        if rule not in STUDY or self.rules != AlarmRules():
            return ""
        before, ever, harmed, false, healthy = STUDY[rule]
        return (
            f" In tiny trainings (docs/alarms.md) it rang in {ever} of {harmed} whose loss was "
            f"harmed, in {before} before that, and in {false} of {healthy} healthy ones."
        )

    def _entropy(self, measured: Sequence[Measured]) -> Iterator[_Held]:
        for place, sums, _ in measured:
            if sums is None:
                continue
            entropies, largest = sums.entropy.mean.tolist(), sums.log_keys.mean.tolist()
            for head, (entropy, most) in enumerate(zip(entropies, largest, strict=True)):
                first = self._first.setdefault((place.name, head), entropy)
                limit = min(self.rules.entropy_share * most, first / 2)
                message = (
                    f"{place.name}, head {head}: entropy {entropy:.3g} is below {limit:.3g}, the "
                    f"smaller of {self.rules.entropy_share:g} ln T and half of the first "
                    f"({first:.3g})."
                )
                yield entropy < limit, "entropy", place, head, entropy, limit, message

    def _logits(self, measured: Sequence[Measured]) -> Iterator[_Held]:
        heads = [
            (place, head, top)
            for place, sums, _ in measured
            if sums is not None
            for head, top in enumerate(sums.max_logit.tolist())
        ]
        if not heads:
            return
        middle = sorted(top for _, _, top in heads)[(len(heads) - 1) // 2]
        ratio = self.rules.logit_ratio or math.inf
        apart = max(ratio * middle, self.rules.logit_limit / 5)
        limit = min(self.rules.logit_limit, apart)
        for place, head, top in heads:
            message = (
                f"{place.name}, head {head}: a logit of {top:.3g} is above {limit:.3g}, "
                f"the smaller of {self.rules.logit_limit:g} and {self.rules.logit_ratio:g} "
                f"times the median head's {middle:.3g} (at least {self.rules.logit_limit / 5:g})."
            )
            yield top > limit, "logits", place, head, top, limit, message

    def _rank(self, measured: Sequence[Measured]) -> Iterator[_Held]:
        limit = self.rules.residual
        for place, _, rank in measured:
            if rank is not None:
                message = (
                    f"{place.name}: its tokens lie within {rank.residual:.3g} of their mean, "
                    f"relative to their norm; the limit is {limit:g} (effective rank "
                    f"{rank.effective_rank:.3g}, similarity {rank.similarity:.3g})."
                )
                residual = rank.residual
                yield residual < limit, "rank", place, None, residual, limit, message
