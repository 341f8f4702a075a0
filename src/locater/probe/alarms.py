"""Alarms of a probe: each measured pass against rules, and against the first one measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from locater.errors import ConfigError
from locater.probe.records import TokenRank
from locater.probe.rows import Tally
from locater.probe.watch import Place

Rule = Literal["entropy", "logits", "rank", "not finite"]


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A rule that fired; it fires again only after its numbers were fine in between."""

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
    """When attention is in trouble; a limit of 0, or infinity for logits, switches a rule off."""

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
        for name in ("entropy_share", "logit_limit", "logit_ratio", "residual"):
            if not getattr(self, name) >= 0:
                raise ConfigError(
                    f"{name} must be zero or more, got {getattr(self, name)}.",
                    hint="see docs/probe.md for what each rule compares.",
                )


Measured = tuple[Place, Tally | None, TokenRank | None]
Finding = tuple[Rule, Place, int | None, float, float, bool, str]


class AlarmBook:
    """Keeps what was first measured and which rules are broken now."""

    def __init__(self, rules: AlarmRules) -> None:
        self.rules = rules
        self.alarms: list[Alarm] = []
        self._first: dict[tuple[str, int], float] = {}
        self._ringing: set[tuple[str, str, int | None]] = set()

    def check(self, forward: int, measured: Sequence[Measured]) -> None:
        """Hold one measured pass against the rules."""
        self._ringing -= {("not finite", place.name, None) for place, sums, _ in measured if sums}
        findings = [*self._entropy(measured), *self._logits(measured), *self._rank(measured)]
        for rule, place, head, value, limit, is_broken, message in findings:
            key = (rule, place.name, head)
            if is_broken and key not in self._ringing:
                self.alarms.append(
                    Alarm(
                        rule=rule,
                        forward=forward,
                        name=place.name,
                        layer=place.layer,
                        head=head,
                        value=value,
                        limit=limit,
                        message=message,
                    )
                )
            (self._ringing.add if is_broken else self._ringing.discard)(key)

    def ring_not_finite(self, forward: int, place: Place, head: int, message: str) -> None:
        """Logits that are no numbers: an alarm by themselves, until a pass is measured again."""
        key = ("not finite", place.name, None)
        if key not in self._ringing:
            self._ringing.add(key)
            self.alarms.append(
                Alarm(
                    rule="not finite",
                    forward=forward,
                    name=place.name,
                    layer=place.layer,
                    head=head,
                    value=math.nan,
                    limit=math.inf,
                    message=message,
                )
            )

    def _entropy(self, measured: Sequence[Measured]) -> Iterator[Finding]:
        for place, sums, _ in measured:
            if sums is None:
                continue
            entropies, largest = sums.entropy.mean.tolist(), sums.log_keys.mean.tolist()
            for head, (entropy, most) in enumerate(zip(entropies, largest, strict=True)):
                first = self._first.setdefault((place.name, head), entropy)
                limit = min(self.rules.entropy_share * most, first / 2)
                yield (
                    "entropy",
                    place,
                    head,
                    entropy,
                    limit,
                    entropy < limit,
                    (
                        f"{place.name}, head {head}: entropy {entropy:.3g} is below {limit:.3g}, "
                        f"the smaller of {self.rules.entropy_share:g} ln T and half of the first "
                        f"({first:.3g})."
                    ),
                )

    def _logits(self, measured: Sequence[Measured]) -> Iterator[Finding]:
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
            yield (
                "logits",
                place,
                head,
                top,
                limit,
                top > limit,
                (
                    f"{place.name}, head {head}: a logit of {top:.3g} is above {limit:.3g}, "
                    f"the smaller of {self.rules.logit_limit:g} and {self.rules.logit_ratio:g} "
                    f"times the median head's {middle:.3g} "
                    f"(at least {self.rules.logit_limit / 5:g})."
                ),
            )

    def _rank(self, measured: Sequence[Measured]) -> Iterator[Finding]:
        for place, _, rank in measured:
            if rank is not None:
                yield (
                    "rank",
                    place,
                    None,
                    rank.residual,
                    self.rules.residual,
                    rank.residual < self.rules.residual,
                    (
                        f"{place.name}: its tokens lie within {rank.residual:.3g} of their mean, "
                        f"relative to their norm; the limit is {self.rules.residual:g} (effective "
                        f"rank {rank.effective_rank:.3g}, similarity {rank.similarity:.3g})."
                    ),
                )
