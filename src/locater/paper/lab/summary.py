"""What the runs of a sweep say together: means, 95 % intervals, differences from the baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from locater.paper.lab.presets import Setting, Sweep
from locater.paper.lab.run import Run
from locater.paper.lab.verdict import (
    Interval,
    baseline,
    best_loss,
    compare,
    ended,
    exp,
    final,
    final_mean,
    judged,
    last,
    last_loss,
    participation,
    percent,
)
from locater.report.tables import markdown_table


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting over all its seeds, at the end of training."""

    setting: Setting
    seeds: int
    diverged: int
    """Runs whose loss became NaN or infinite; the rest of the row is about the others."""
    perplexity: Interval
    """On all of valid, the best of the run's evaluations."""
    last: Interval
    """The same after the last step, where there were several."""
    test: Interval
    """On test, of the best model."""
    change: Interval
    """Of the perplexity against the baseline's with the same seed, in percent."""
    verdict: str
    """What became of the perplexity, by the protocol's rules, corrected over the sweep."""
    accuracy: Interval
    entropy: Interval
    trace: Interval
    scale: Interval
    """‖W_QK‖²_F."""
    participation: Interval
    """Of the measured ρ: 1 where all tokens are on alike, less where it localizes."""
    predicted: Interval
    """The same of the ρ that theory predicts from the measured tokens."""
    early: Interval
    late: Interval
    """The measured ρ of the first and of the last quarter of the tokens."""


def summarize(sweep: Sweep, runs: Mapping[str, Run]) -> list[Row]:
    """A row for every setting; `runs` are by digest, missing ones are left out."""
    methods = [one for one in sweep.settings if baseline(sweep, one) not in (one, None)]
    found = judged([compare(sweep, runs, setting) for setting in methods])
    words = {
        setting.label: (one.differences, one.words if len(one.differences) > 1 else "")
        for setting, one in zip(methods, found, strict=True)
    }
    return [
        _row(sweep, runs, setting, *words.get(setting.label, ((), "")))
        for setting in sweep.settings
    ]


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a table for a page; settings of which no run is finished are left out."""
    rows = [row for row in rows if row.seeds]
    if not rows:
        return "No run is finished.\n"
    columns: dict[str, Callable[[Row], str]] = {
        "setting": lambda row: row.setting.label,
        "perplexity": lambda row: row.perplexity.text(2),
        "after the last step": lambda row: row.last.text(2),
        "test": lambda row: row.test.text(2),
        "change, %": lambda row: row.change.text(2),
        "perplexity is": lambda row: row.verdict,
        "accuracy": lambda row: row.accuracy.text(3),
        "entropy": lambda row: row.entropy.text(3),
        "tr W": lambda row: row.trace.text(2),
        "‖W‖²": lambda row: "-" if math.isnan(row.scale.mean) else f"{row.scale.mean:.3g}",
        "ρ spread": lambda row: row.participation.text(2),
        "predicted": lambda row: row.predicted.text(2),
        "ρ early, late": lambda row: f"{row.early.mean:.2f}, {row.late.mean:.2f}",
        "diverged": lambda row: f"{row.diverged} of {row.seeds}" if row.diverged else "",
        "seeds": lambda row: str(row.seeds),
    }
    kept = {n: make for n, make in columns.items() if {make(row) for row in rows} - {"", "-"}}
    return markdown_table(rows, kept) + "\n"


def _row(
    sweep: Sweep,
    runs: Mapping[str, Run],
    setting: Setting,
    differences: Sequence[float],
    verdict: str,
) -> Row:
    found = list(ended(sweep, runs, setting).values())
    whole = [run for run in found if not run.has_diverged]

    def interval(value: Callable[[Run], float | None]) -> Interval:
        values = [value(run) for run in whole]
        return Interval.of([one for one in values if one is not None and not math.isnan(one)])

    return Row(
        setting=setting,
        seeds=len(found),
        diverged=len(found) - len(whole),
        perplexity=interval(lambda run: exp(best_loss(run))),
        last=interval(lambda run: exp(last_loss(run)) if run.config.evaluations > 1 else None),
        test=interval(lambda run: exp(loss) if (loss := final(run).get("test_loss")) else None),
        change=Interval.of([percent(one) for one in differences]),
        verdict=verdict,
        accuracy=interval(lambda run: final(run).get("accuracy")),
        entropy=interval(lambda run: final_mean(run, "entropy")),
        trace=interval(lambda run: final_mean(run, "trace")),
        scale=interval(lambda run: final_mean(run, "frobenius_squared")),
        participation=interval(participation),
        predicted=interval(lambda run: participation(run, "predicted_rho")),
        early=interval(lambda run: _quarter(run, 0)),
        late=interval(lambda run: _quarter(run, 3)),
    )


def _quarter(run: Run, place: int) -> float:
    """ρ of a quarter of the tokens at the end, over layers."""
    return last(run, "rho").tensor_split(4, -1)[place].mean().item()
