"""What the runs of a sweep say together: means, 95 % intervals, differences from the baseline."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.core import theory
from locater.errors import InputError, MissingExtraError
from locater.paper.lab.presets import Setting, Sweep
from locater.paper.lab.run import Record, Run
from locater.report.tables import markdown_table


def student(freedom: int) -> Any:
    """Student's t with so many degrees of freedom, a distribution of scipy."""
    try:
        from scipy import stats  # type: ignore[import-untyped]
    except ImportError as error:  # pragma: no cover - the dev environment has it
        raise MissingExtraError("scipy", extra="lab") from error
    return stats.t(freedom)


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and half its 95 % interval; that is NaN for a single seed."""

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Student's interval of a few independent values."""
        if not values:
            return cls(math.nan, math.nan)
        count, mean = len(values), sum(values) / len(values)
        if count == 1:
            return cls(mean, math.nan)
        error = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1) / count)
        return cls(mean, float(student(count - 1).isf(0.025)) * error)

    @property
    def excludes_zero(self) -> bool:
        """Whether the sign of the mean is beyond doubt, at 95 %; never so for a single seed."""
        return abs(self.mean) > self.half

    @property
    def is_open(self) -> bool:
        """Whether there are too few seeds to say."""
        return math.isnan(self.half)

    def text(self, digits: int = 2) -> str:
        """The mean and, where it is known, its interval."""
        if math.isnan(self.mean):
            return "-"
        half = "" if math.isnan(self.half) else f" ± {self.half:.{digits}f}"
        return f"{self.mean:.{digits}f}{half}"


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

    @property
    def verdict(self) -> str:
        """What became of the perplexity, at 95 %."""
        if self.change.is_open:
            return ""
        if not self.change.excludes_zero:
            return "no difference seen"
        return "lower" if self.change.mean < 0 else "higher"


def summarize(sweep: Sweep, runs: Mapping[str, Run]) -> list[Row]:
    """A row for every setting; `runs` are by digest, missing ones are left out."""
    baselines = {s.group: s for s in reversed(sweep.settings) if s.label.endswith("none")}
    return [_row(sweep, runs, setting, baselines.get(setting.group)) for setting in sweep.settings]


def ended(sweep: Sweep, runs: Mapping[str, Run], setting: Setting) -> dict[int, Run]:
    """The runs of a setting that have come to their end, by seed."""
    found = {seed: runs.get(replace(setting.config, seed=seed).digest) for seed in sweep.all_seeds}
    return {seed: run for seed, run in found.items() if run is not None and run.final is not None}


def pairs(
    sweep: Sweep, runs: Mapping[str, Run], before: Setting, after: Setting
) -> list[tuple[Run, Run]]:
    """The runs of two settings, seed by seed, where both have come to their end."""
    ours, theirs = (ended(sweep, runs, setting) for setting in (before, after))
    return [(run, theirs[seed]) for seed, run in ours.items() if seed in theirs]


def paired(
    sweep: Sweep,
    runs: Mapping[str, Run],
    before: Setting,
    after: Setting,
    value: Callable[[Run], float],
) -> Interval:
    """How a value differs between two settings, seed by seed."""
    found = pairs(sweep, runs, before, after)
    whole = [pair for pair in found if not any(run.has_diverged for run in pair)]
    return Interval.of([value(second) - value(first) for first, second in whole])


def best_loss(run: Run) -> float:
    """The primary outcome: the best loss on all of valid over the run's evaluations."""
    losses = [loss for _, loss in run.series("whole_valid_loss") if loss is not None]
    if not losses:
        raise _incomplete(run, "whole_valid_loss")
    return float(min(losses))


def final(run: Run) -> Record:
    """The last record of a run that has come to its end."""
    assert run.final is not None
    return run.final


def last(run: Run, name: str) -> Float[Tensor, "*layers"]:
    """A quantity of every layer at the end."""
    if name not in final(run):
        raise _incomplete(run, name)
    values = json.dumps(final(run)[name]).replace("null", "NaN")
    return torch.tensor(json.loads(values), dtype=torch.float64)


def final_mean(run: Run, name: str) -> float:
    """Of a quantity over layers, at the end."""
    values: list[float] = last(run, name).tolist()
    return sum(values) / len(values)


def exp(logarithm: float) -> float:
    """A perplexity, or a ratio of two, whose square still is a number."""
    return math.exp(min(logarithm, 300.0))


def percent(logarithm: float) -> float:
    """The change that a difference of two logarithms is."""
    return 100 * math.expm1(min(logarithm, 300.0))


def _incomplete(run: Run, name: str) -> InputError:
    return InputError(
        f"run {run.path or run.config.digest} ended without {name}.",
        hint="it was changed or cut: train it again, or take it away.",
    )


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


def _row(sweep: Sweep, runs: Mapping[str, Run], setting: Setting, baseline: Setting | None) -> Row:
    found = list(ended(sweep, runs, setting).values())
    whole = [run for run in found if not run.has_diverged]
    changes = []
    if baseline is not None and baseline is not setting:
        for before, after in pairs(sweep, runs, baseline, setting):
            if not (before.has_diverged or after.has_diverged):
                changes.append(percent(best_loss(after) - best_loss(before)))

    def interval(value: Callable[[Run], float | None]) -> Interval:
        values = [value(run) for run in whole]
        return Interval.of([one for one in values if one is not None])

    return Row(
        setting=setting,
        seeds=len(found),
        diverged=len(found) - len(whole),
        perplexity=interval(lambda run: exp(best_loss(run))),
        last=interval(_last_perplexity),
        test=interval(lambda run: exp(loss) if (loss := final(run).get("test_loss")) else None),
        change=Interval.of(changes),
        accuracy=interval(lambda run: final(run).get("accuracy")),
        entropy=interval(lambda run: final_mean(run, "entropy")),
        trace=interval(lambda run: final_mean(run, "trace")),
        scale=interval(lambda run: final_mean(run, "frobenius_squared")),
        participation=interval(lambda run: participation(run, "rho")),
        predicted=interval(lambda run: participation(run, "predicted_rho")),
        early=interval(lambda run: _quarter(run, 0)),
        late=interval(lambda run: _quarter(run, 3)),
    )


def _last_perplexity(run: Run) -> float | None:
    """On all of valid after the last step; None where it was scored but once."""
    (_, loss) = run.series("whole_valid_loss")[-1]
    return exp(loss) if run.config.evaluations > 1 else None


def _quarter(run: Run, place: int) -> float:
    """ρ of a quarter of the tokens at the end, over layers."""
    return last(run, "rho").tensor_split(4, -1)[place].mean().item()


def participation(run: Run, name: str) -> float | None:
    """Of `rho` or `predicted_rho` at the end, over layers; None where it was not measured."""
    if name not in final(run):
        return None
    return theory.participation(last(run, name)).mean().item()
