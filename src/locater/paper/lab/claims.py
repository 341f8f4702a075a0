"""The claims of Section 7 and Appendix D, each held against the runs of a sweep."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from locater.paper.lab.presets import Setting, Sweep
from locater.paper.lab.run import Run
from locater.paper.lab.summary import (
    Interval,
    best_loss,
    ended,
    exp,
    final_mean,
    paired,
    participation,
    percent,
    summarize,
)
from locater.paper.verdicts import Outcome, Verdict

Value = Callable[[Run], float]
Text = Callable[[Interval], str]


def curve_verdicts(sweep: Sweep, runs: Mapping[str, Run], section: str) -> list[Verdict]:
    """What became of (B), (C) and (D) of Figs. 6 and 8-12, under every reading of κ₁ and κ₂.

    Differences are taken seed by seed, from the smallest κ₂ to the largest.  A claim counts as
    reproduced if it holds under one reading at least, which is then named; one seed decides
    nothing.
    """
    (none,) = (setting for setting in sweep.settings if setting.kappa is None)
    readings = _by_reading(sweep)
    where = "Fig. " + section.removeprefix("fig")
    size = f"d = {none.config.dim}, {none.config.layers} layer(s), {_seeds(sweep, runs, none)}"

    def verdict(letter: str, claim: str, value: Value, sign: int, text: Text) -> Verdict:
        judged = {
            reading: paired(sweep, runs, group[0], group[-1], value)
            for reading, group in readings.items()
        }
        found = "; ".join(
            f"{name}: {text(change)}{_remark(change, sign)}" for name, change in judged.items()
        )
        outcome = _outcome([_holds(change, sign) for change in judged.values()])
        return Verdict(
            where=f"{where}{letter}",
            claim=claim,
            outcome=outcome,
            found=f"{found} [{size}]",
            section=section,
        )

    together = _better_than_none(sweep, runs, none, where, size, section)
    if all(len(group) == 1 for group in readings.values()):
        return [together]  # one κ₂ has no trend
    return [
        verdict("B", "With stronger κ₂ the eigenspectrum scale shrinks.", _log_scale, -1,
                lambda c: f"‖W‖² times {exp(c.mean):.3g} from the least κ₂ to the largest"),
        verdict("C", "With stronger κ₂ the attention entropy increases.", _entropy, 1,
                lambda c: f"{c.text(3)} nats"),
        verdict("D", "With stronger κ₂ the perplexity improves.", best_loss, -1,
                lambda c: f"{_percent(c)} %"),
        together,
    ]  # fmt: skip


def _better_than_none(
    sweep: Sweep, runs: Mapping[str, Run], none: Setting, where: str, size: str, section: str
) -> Verdict:
    """Entropy and perplexity against no LocAteR: both must be better under one reading."""
    parts, holds = [], []
    for reading, group in _by_reading(sweep).items():
        entropy = paired(sweep, runs, none, group[-1], _entropy)
        loss = paired(sweep, runs, none, group[-1], best_loss)
        both = [_holds(entropy, 1), _holds(loss, -1)]
        holds.append(False if False in both else None if None in both else True)
        parts.append(
            f"{reading}, κ₂ = {group[-1].kappa:g}: entropy {entropy.text(3)} nats"
            f"{_remark(entropy, 1)}, perplexity {_percent(loss)} %{_remark(loss, -1)}"
        )
    return Verdict(
        where=f"{where}, Sec. 7",
        claim="LocAteR keeps the entropy higher and, by that, lowers the perplexity.",
        outcome=_outcome(holds),
        found="against no LocAteR: " + "; ".join(parts) + f" [{size}]",
        section=section,
    )


def stripes_verdict(sweep: Sweep, runs: Mapping[str, Run], section: str) -> Verdict:
    """Whether ρ localizes with LocAteR and is uniform without it (Fig. 7)."""
    rows = summarize(sweep, runs)
    (none,) = (row for row in rows if row.setting.kappa is None)
    others = [row for row in rows if row.setting.kappa is not None]
    changes = [paired(sweep, runs, none.setting, row.setting, _participation) for row in others]
    found = "; ".join(f"{row.setting.label}: {row.participation.text(3)}" for row in others)
    outcome = _outcome([_holds(change, -1) for change in changes])
    if outcome == "reproduced" and none.participation.mean <= 0.9:
        outcome = "differs"
    return Verdict(
        where="Fig. 7",
        claim="With LocAteR ρ shows stripes of attended tokens; without it ρ is uniform.",
        outcome=outcome,
        found="share of tokens that take part (1: all alike) without LocAteR "
        f"{none.participation.text(3)}; {found} [{_seeds(sweep, runs, none.setting)}]",
        section=section,
    )


def _participation(run: Run) -> float:
    return participation(run, "rho") or math.nan


def _log_scale(run: Run) -> float:
    return math.log(max(final_mean(run, "frobenius_squared"), 1e-300))


def _entropy(run: Run) -> float:
    return final_mean(run, "entropy")


def _holds(change: Interval, sign: int) -> bool | None:
    """Whether a change has the claimed sign beyond doubt; None where one seed cannot tell."""
    if math.isnan(change.mean) or change.is_open:
        return None
    return change.excludes_zero and change.mean * sign > 0


def _remark(change: Interval, sign: int) -> str:
    holds = _holds(change, sign)
    return "" if holds else " (cannot tell)" if holds is None else " (does not hold)"


def _outcome(holds: list[bool | None]) -> Outcome:
    if True in holds:
        return "reproduced"
    return "undecided" if None in holds else "differs"


def _percent(change: Interval) -> str:
    """A difference of losses as one of perplexities."""
    mean, half = percent(change.mean), 100 * change.half * exp(change.mean)
    return Interval(mean, half).text(2)


def _by_reading(sweep: Sweep) -> dict[str, list[Setting]]:
    """The settings of each reading, by growing κ₂."""
    readings: dict[str, list[Setting]] = {}
    for setting in sweep.settings:
        if setting.kappa is not None:
            readings.setdefault(setting.reading, []).append(setting)
    return {
        name: sorted(group, key=lambda setting: setting.kappa or 0.0)
        for name, group in readings.items()
    }


def _seeds(sweep: Sweep, runs: Mapping[str, Run], setting: Setting) -> str:
    count = len(ended(sweep, runs, setting))
    return "one seed" if count == 1 else f"{count} seeds"
