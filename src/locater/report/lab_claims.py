"""The claims of Section 7 and Appendix D, each held against the runs of a sweep."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from locater.lab.presets import Sweep
from locater.lab.run import Run
from locater.lab.summary import Interval, Row, summarize
from locater.report.verdicts import Outcome, Verdict

Rows = dict[str, list[Row]]


def curve_verdicts(sweep: Sweep, runs: Mapping[str, Run], section: str) -> list[Verdict]:
    """What became of (B), (C) and (D) of Figs. 6 and 8-12, under every reading of κ₁ and κ₂.

    A claim counts as reproduced if it holds under one reading at least, which is then named.
    """
    rows = summarize(sweep, runs)
    (none,) = (row for row in rows if row.setting.kappa is None)
    readings = _by_reading(rows)
    where = "Fig. " + section.removeprefix("fig")
    size = f"d = {none.setting.config.dim}, {none.setting.config.layers} layer(s), {_seeds(none)}"

    def verdict(letter: str, claim: str, judge: Callable[[list[Row]], tuple[bool, str]]) -> Verdict:
        judged = {reading: judge(group) for reading, group in readings.items()}
        holds = any(good for good, _ in judged.values())
        found = "; ".join(
            f"{reading}: {text}{'' if good else ' (does not hold)'}"
            for reading, (good, text) in judged.items()
        )
        outcome: Outcome = "reproduced" if holds else "differs"
        return Verdict(
            where=f"{where}{letter}",
            claim=claim,
            outcome=outcome,
            found=f"{found} [{size}]",
            section=section,
        )

    def scale(group: list[Row]) -> tuple[bool, str]:
        first, last = group[0], group[-1]
        fell = _below(last.scale, first.scale)
        before, after = (
            f"{row.scale.mean:.3g} at κ₂ = {row.setting.kappa:g}" for row in (first, last)
        )
        return fell, f"‖W‖² {before}, {after}"

    def entropy(group: list[Row]) -> tuple[bool, str]:
        last = group[-1]
        rose = _below(none.entropy, last.entropy)
        return rose, f"{none.entropy.text(3)} without, {last.entropy.text(3)} with"

    def perplexity(group: list[Row]) -> tuple[bool, str]:
        last = group[-1]
        return last.verdict == "lower", f"{last.change.text(2)} %"

    return [
        verdict("B", "With stronger κ₂ the eigenspectrum scale shrinks.", scale),
        verdict("C", "LocAteR keeps the attention entropy higher.", entropy),
        verdict("D", "LocAteR improves the perplexity.", perplexity),
    ]


def stripes_verdict(sweep: Sweep, runs: Mapping[str, Run], section: str) -> Verdict:
    """Whether ρ localizes with LocAteR and is uniform without it (Fig. 7)."""
    rows = summarize(sweep, runs)
    (none,) = (row for row in rows if row.setting.kappa is None)
    others = [row for row in rows if row.setting.kappa is not None]
    localized = [row for row in others if _below(row.participation, none.participation)]
    found = "; ".join(f"{row.setting.label}: {row.participation.text(3)}" for row in others)
    return Verdict(
        where="Fig. 7",
        claim="With LocAteR ρ shows stripes of attended tokens; without it ρ is uniform.",
        outcome="reproduced" if localized and none.participation.mean > 0.9 else "differs",
        found="share of tokens that take part (1: all alike) without LocAteR "
        f"{none.participation.text(3)}; {found} [{_seeds(none)}]",
        section=section,
    )


def _by_reading(rows: list[Row]) -> Rows:
    """The settings of each reading, by growing κ₂."""
    readings: Rows = {}
    for row in rows:
        if row.setting.kappa is not None:
            readings.setdefault(row.setting.reading, []).append(row)
    return {
        name: sorted(group, key=lambda row: row.setting.kappa or 0.0)
        for name, group in readings.items()
    }


def _below(less: Interval, more: Interval) -> bool:
    """Whether one mean is below another beyond both intervals; a single seed has none."""
    halves = [0.0 if math.isnan(one.half) else one.half for one in (less, more)]
    return less.mean + halves[0] < more.mean - halves[1]


def _seeds(row: Row) -> str:
    return "one seed" if row.seeds == 1 else f"{row.seeds} seeds"
