"""What the runs of a sweep say together: means, 95 % intervals, differences from the baseline."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from locater.core import theory
from locater.errors import InputError, MissingExtraError
from locater.files import write_file
from locater.paper.lab.presets import Setting, Sweep
from locater.paper.lab.run import Run

_MARK = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


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
    """Runs whose loss became no number; the rest of the row is about the others."""
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
    return [
        _row(setting, baselines.get(setting.group), sweep.all_seeds, runs)
        for setting in sweep.settings
    ]


def paired(
    sweep: Sweep,
    runs: Mapping[str, Run],
    before: Setting,
    after: Setting,
    value: Callable[[Run], float],
) -> Interval:
    """How a value differs between two settings, seed by seed."""
    changes = []
    for seed in sweep.all_seeds:
        pair = [_run_of(setting, seed, runs) for setting in (before, after)]
        whole = [run for run in pair if run is not None and not run.has_diverged]
        if len(whole) == 2:
            changes.append(value(whole[1]) - value(whole[0]))
    return Interval.of(changes)


def best_loss(run: Run) -> float:
    """The primary outcome: the best loss on all of valid over the run's evaluations."""
    return float(min(loss for _, loss in run.series("whole_valid_loss")))


def last_loss(run: Run) -> float:
    """On all of valid, after the last step."""
    return float(run.series("whole_valid_loss")[-1][1])


def loss_on_test(run: Run) -> float | None:
    """On test, of the model that was best on valid; None where that was not asked for."""
    return (run.final or {}).get("test_loss")


def final_mean(run: Run, name: str) -> float:
    """Of a quantity over layers, at the end."""
    assert run.final is not None
    values: list[float] = run.final[name]
    return sum(values) / len(values)


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
    cells = {name: [make(row) for row in rows] for name, make in columns.items()}
    kept = {name: column for name, column in cells.items() if set(column) - {"", "-"}}
    lines = ["| " + " | ".join(kept) + " |", "|" + "---|" * len(kept)]
    for place in range(len(rows)):
        lines.append("| " + " | ".join(column[place] for column in kept.values()) + " |")
    return "\n".join(lines) + "\n"


def update_page(page: Path, table: Callable[[str], str]) -> Path:
    """Write every table of a page anew, between its marks `<!-- results: NAME -->`."""
    text = page.read_text(encoding="utf-8")
    if not _MARK.search(text):
        raise InputError(f"{page} has no mark for results.", hint="<!-- results: fig6-cpu -->")
    return write_file(page, _MARK.sub(lambda match: f"{match[1]}{table(match[2])}{match[3]}", text))


def _row(setting: Setting, baseline: Setting | None, seeds: range, runs: Mapping[str, Run]) -> Row:
    found = [_run_of(setting, seed, runs) for seed in seeds]
    ended = [run for run in found if run is not None]
    whole = [run for run in ended if not run.has_diverged]
    changes = []
    if baseline is not None and baseline is not setting:
        for run in whole:
            other = _run_of(baseline, run.config.seed, runs)
            if other is not None and not other.has_diverged:
                changes.append(100 * math.expm1(best_loss(run) - best_loss(other)))

    def interval(value: Callable[[Run], float | None]) -> Interval:
        values = [value(run) for run in whole]
        return Interval.of([one for one in values if one is not None])

    return Row(
        setting=setting,
        seeds=len(ended),
        diverged=len(ended) - len(whole),
        perplexity=interval(lambda run: math.exp(best_loss(run))),
        last=interval(lambda run: math.exp(last_loss(run)) if run.config.evaluations > 1 else None),
        test=interval(lambda run: math.exp(loss) if (loss := loss_on_test(run)) else None),
        change=Interval.of(changes),
        accuracy=interval(lambda run: (run.final or {}).get("accuracy")),
        entropy=interval(lambda run: final_mean(run, "entropy")),
        trace=interval(lambda run: final_mean(run, "trace")),
        scale=interval(lambda run: final_mean(run, "frobenius_squared")),
        participation=interval(lambda run: participation(run, "rho")),
        predicted=interval(lambda run: participation(run, "predicted_rho")),
        early=interval(lambda run: _quarter(run, 0)),
        late=interval(lambda run: _quarter(run, 3)),
    )


def _run_of(setting: Setting, seed: int, runs: Mapping[str, Run]) -> Run | None:
    run = runs.get(replace(setting.config, seed=seed).digest)
    return run if run is not None and run.final is not None else None


def _quarter(run: Run, place: int) -> float:
    """ρ of a quarter of the tokens at the end, over layers."""
    assert run.final is not None
    rho = torch.tensor(run.final["rho"], dtype=torch.float64)
    return rho.tensor_split(4, -1)[place].mean().item()


def participation(run: Run, name: str) -> float | None:
    """Of `rho` or `predicted_rho` at the end, over layers; None where it was not measured."""
    assert run.final is not None
    if name not in run.final:
        return None
    rho = torch.tensor(run.final[name], dtype=torch.float64)
    return theory.participation(rho).mean().item()
