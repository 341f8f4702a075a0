"""What a comparison of trained models decides, by the rules of docs/protocol.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from locater.paper.lab.presets import Setting, Sweep
from locater.paper.lab.run import Run
from locater.paper.lab.summary import Interval, best_loss, ended, exp, pairs, percent, student

Finding = Literal["lower", "higher", "equivalent", "undecided"]
MARGIN = math.log(1.005)
"""The smallest effect that matters: half a percent of perplexity."""
LEVEL = 0.05


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One method against none, seed by seed, in one regime."""

    regime: str
    method: str
    differences: tuple[float, ...]
    """Of the log perplexity, method minus none, one for each seed that both have finished."""
    diverged: tuple[int, int] = (0, 0)
    """Runs without and with the method whose loss ended NaN or infinite."""
    p_different: float = math.nan
    """Of a two-sided paired t-test; `judged` puts the corrected one here."""
    p_apart: float = math.nan
    """Of two one-sided tests against ±.5 %: small where the difference is smaller than that."""

    @property
    def finding(self) -> Finding:
        """What is said of it."""
        mean = sum(self.differences) / max(len(self.differences), 1)
        if self.p_different < LEVEL:
            return "lower" if mean < 0 else "higher"
        return "equivalent" if self.p_apart < LEVEL else "undecided"

    @property
    def percent(self) -> tuple[float, float]:
        """The change of perplexity, and half its 95 % interval (not corrected)."""
        found = Interval.of(self.differences)
        return percent(found.mean), 100 * found.half * exp(found.mean)

    @property
    def sentence(self) -> str:
        """The finding with its size."""
        if any(self.diverged):
            without, with_it = self.diverged
            return f"no test: {without} runs without it and {with_it} with it diverged"
        if not self.differences:
            return "no run is finished"
        mean, half = self.percent
        said = {"equivalent": "equivalent within ±.5 %"}.get(self.finding, str(self.finding))
        if self.finding in ("lower", "higher") and abs(mean) < 0.5:
            said += ", but by less than .5 %"
        spread = "" if math.isnan(half) else f" ± {half:.2f}"
        return f"{said} ({mean:+.2f}{spread} %, {len(self.differences)} seeds)"


def compare(
    sweep: Sweep,
    runs: Mapping[str, Run],
    setting: Setting,
    outcome: Callable[[Run], float] = best_loss,
) -> Comparison:
    """One setting of a sweep against the setting without any method in its group."""
    (none,) = (s for s in sweep.settings if s.group == setting.group and s.method == "none")
    found = pairs(sweep, runs, none, setting)
    whole = [pair for pair in found if not any(run.has_diverged for run in pair)]
    return with_tests(
        Comparison(
            regime=sweep.name,
            method=setting.method,
            differences=tuple(outcome(after) - outcome(before) for before, after in whole),
            diverged=(
                sum(before.has_diverged for before, _ in found),
                sum(after.has_diverged for _, after in found),
            ),
        )
    )


def with_tests(comparison: Comparison, margin: float = MARGIN) -> Comparison:
    """Both tests, not corrected; no test where a run diverged or fewer than two seeds are there."""
    values = comparison.differences
    if len(values) < 2 or any(comparison.diverged):
        return comparison
    count, mean = len(values), sum(values) / len(values)
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1) / count)
    if spread == 0:
        return replace(comparison, p_different=float(mean == 0), p_apart=float(abs(mean) >= margin))
    tail = student(count - 1).sf
    return replace(
        comparison,
        p_different=float(2 * tail(abs(mean) / spread)),
        p_apart=float(tail((margin - abs(mean)) / spread)),
    )


def judged(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The same comparisons with both p-values corrected over all of them (Holm)."""
    different = holm([one.p_different for one in comparisons])
    apart = holm([one.p_apart for one in comparisons])
    return [
        replace(one, p_different=first, p_apart=second)
        for one, first, second in zip(comparisons, different, apart, strict=True)
    ]


def holm(values: Sequence[float]) -> list[float]:
    """p-values times the number of hypotheses not yet rejected, never falling; NaN stays NaN.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    order = sorted((p, place) for place, p in enumerate(values) if not math.isnan(p))
    corrected, least = list(values), 0.0
    for rank, (p, place) in enumerate(order):
        least = max(least, min(1.0, (len(values) - rank) * p))
        corrected[place] = least
    return corrected


def chosen(sweep: Sweep, runs: Mapping[str, Run]) -> dict[str, Setting]:
    """For every method the point of the grid with the best mean outcome over all seeds."""
    best: dict[str, tuple[float, Setting]] = {}
    for setting in sweep.settings:
        found = [run for run in ended(sweep, runs, setting).values() if not run.has_diverged]
        is_whole = len(found) == sweep.seeds
        loss = sum(map(best_loss, found)) / sweep.seeds if is_whole else math.inf
        if setting.method not in best or loss < best[setting.method][0]:
            best[setting.method] = loss, setting
    return {method: setting for method, (_, setting) in best.items()}
