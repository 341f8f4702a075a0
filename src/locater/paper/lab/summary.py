"""What runs say together: paired differences over seeds, two tests, tables, docs/protocol.md."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from locater.core import theory
from locater.errors import InputError, needing
from locater.paper.lab.presets import PAIR, PRIMARY, Setting, Sweep
from locater.paper.lab.run import Record, Run
from locater.report.tables import markdown_table

Finding = Literal["lower", "higher", "equivalent", "undecided"]
LEVEL = 0.05


def student(freedom: int) -> Any:
    """Student's t with so many degrees of freedom, a distribution of scipy."""
    with needing("scipy", extra="lab"):
        from scipy import stats  # type: ignore[import-untyped]
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
        mean, error = mean_and_error(values)
        known = len(values) > 1
        return cls(mean, float(student(len(values) - 1).isf(0.025)) * error if known else math.nan)

    def text(self, digits: int = 2, sign: str = "") -> str:
        """The mean and, where it is known, its interval."""
        if math.isnan(self.mean):
            return "-"
        half = "" if math.isnan(self.half) else f" ± {self.half:.{digits}f}"
        return f"{self.mean:{sign}.{digits}f}{half}"


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean of independent values and its standard error, NaN for a single one."""
    count, mean = len(values), sum(values) / len(values)
    if count == 1:
        return mean, math.nan
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1) / count)


def final(run: Run) -> Record:
    """The last record of a run that has come to its end."""
    assert run.final is not None
    return run.final


def final_mean(run: Run, name: str) -> float:
    """Of a quantity over layers, at the end."""
    values: list[float] = last(run, name).tolist()
    return sum(values) / len(values)


def last(run: Run, name: str) -> Float[Tensor, "*layers"]:
    """A quantity of every layer at the end."""
    if name not in final(run):
        raise _incomplete(run, name)
    values = json.dumps(final(run)[name]).replace("null", "NaN")
    return torch.tensor(json.loads(values), dtype=torch.float64)


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


def best_loss(run: Run) -> float:
    """The primary outcome: the best loss on all of valid over the run's evaluations."""
    return min(_losses(run))


def entropy_at_best(run: Run) -> float:
    """The mean entropy over layers at the step of the best loss."""
    scored = [one for one in run.records if one.get("whole_valid_loss") is not None]
    values = min(scored, key=lambda one: float(one["whole_valid_loss"]))["entropy"]
    return math.nan if None in values else sum(values) / len(values)


def last_loss(run: Run) -> float:
    """The loss on all of valid after the last step."""
    return _losses(run)[-1]


def _losses(run: Run) -> list[float]:
    losses = [float(loss) for _, loss in run.series("whole_valid_loss") if loss is not None]
    if not losses:
        raise _incomplete(run, "whole_valid_loss")
    return losses


def participation(run: Run, name: str = "rho") -> float:
    """Of `rho` or `predicted_rho` at the end, over layers; NaN where it was not measured."""
    if name not in final(run):
        return math.nan
    return theory.participation(last(run, name)).mean().item()


@dataclass(frozen=True)
class Quantity:
    """What is compared: its value at a run, the smallest difference that matters, and its words."""

    name: str
    value: Callable[[Run], float]
    margin: float
    is_log: bool = False
    """Differences of logarithms are told as percentages."""

    def text(self, values: Sequence[float]) -> str:
        """The mean difference with half its 95 % interval; a ratio where it is a large one."""
        found = Interval.of(values)
        if self.is_log and abs(found.mean) > math.log(10):
            times = [exp(found.mean + sign * found.half) for sign in (0, -1, 1) if found.half >= 0]
            middle, *ends = (f"{float(f'{one:.2g}'):,.10g}" for one in times or [exp(found.mean)])
            return f"× {middle}" + (f" [{', '.join(ends)}]" if ends else "")
        if self.is_log:
            found = Interval(percent(found.mean), 100 * found.half * exp(found.mean))
        if not values:
            return "-"
        return f"{found.text(2, '+')} %" if self.is_log else found.text(3, "+")


PERPLEXITY = Quantity("perplexity", best_loss, math.log(1.005), is_log=True)
"""Half a percent is the smallest effect that matters."""
LAST = replace(PERPLEXITY, name="perplexity after the last step", value=last_loss)
TEST = replace(PERPLEXITY, name="test perplexity", value=lambda run: last(run, "test_loss").item())
SCALE = Quantity(
    "‖W_QK‖²",
    lambda run: math.log(max(final_mean(run, "frobenius_squared"), 1e-300)),
    math.log(1.05),
    is_log=True,
)
ENTROPY = Quantity("entropy", lambda run: final_mean(run, "entropy"), 0.02)
"""In nats, after the last step; the largest there is, ln 64, is 4.16."""
ENTROPY_AT_BEST = replace(ENTROPY, value=lambda run: entropy_at_best(run))
PARTICIPATION = Quantity("share of tokens that take part in ρ", participation, 0.02)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A quantity of one setting against that of another, seed by seed."""

    quantity: Quantity = PERPLEXITY
    differences: tuple[float, ...]
    """One for each seed that both have finished; of the log perplexity unless said."""
    diverged: tuple[int, int] = (0, 0)
    """Runs without and with the method whose loss ended NaN or infinite."""
    p_different: float = math.nan
    """Of a two-sided paired t-test; `judged` puts the corrected one here."""
    p_apart: float = math.nan
    """Of two one-sided tests against ± the margin: small where the difference is smaller."""
    is_final: bool = True
    """False while others that it is corrected with are not there yet: it may still be decided."""

    @property
    def finding(self) -> Finding:
        """What is said of it."""
        if self.p_different < LEVEL:
            return "lower" if sum(self.differences) < 0 else "higher"
        return "equivalent" if self.p_apart < LEVEL else "undecided"

    @property
    def words(self) -> str:
        """The finding in the protocol's words."""
        if any(self.diverged):
            return "no test: {} runs without it and {} with it diverged".format(*self.diverged)
        is_small = self.p_apart < LEVEL
        small = 100 * math.expm1(self.quantity.margin) if self.quantity.is_log else 0.0
        margin = f"{small:.2g} %".replace("0.", ".") if small else f"{self.quantity.margin:g}"
        if self.finding == "equivalent":
            return f"equivalent within ±{margin}"
        if self.finding == "undecided":
            return "undecided" if self.is_final else "undecided so far"
        return f"{self.finding}, but by less than {margin}" if is_small else self.finding

    @property
    def sentence(self) -> str:
        """The finding with its size."""
        if any(self.diverged):
            return self.words
        if not self.differences:
            return "no run is finished"
        count = len(self.differences)
        seeds = "one seed" if count == 1 else f"{count} seeds"
        return f"{self.words} ({self.quantity.text(self.differences)}, {seeds})"


def ended(sweep: Sweep, runs: Mapping[str, Run], setting: Setting) -> dict[int, Run]:
    """The runs of a setting that have come to their end, by seed."""
    found = {seed: runs.get(replace(setting.config, seed=seed).digest) for seed in sweep.all_seeds}
    return {seed: run for seed, run in found.items() if run is not None and run.final is not None}


def baseline(sweep: Sweep, setting: Setting) -> Setting | None:
    """The setting of the same group without any method."""
    alike = (one for one in sweep.settings if one.group == setting.group)
    return next((one for one in alike if (one.method or one.label).endswith("none")), None)


def compare(
    sweep: Sweep,
    runs: Mapping[str, Run],
    setting: Setting,
    quantity: Quantity = PERPLEXITY,
    *,
    before: Setting | None = None,
) -> Comparison:
    """One setting of a sweep against another, by default that without any method in its group."""
    before = before or baseline(sweep, setting)
    assert before is not None
    return _paired(sweep, runs, [before, setting], quantity, lambda first, last: last - first)


def trend(
    sweep: Sweep, runs: Mapping[str, Run], settings: Sequence[Setting], quantity: Quantity
) -> Comparison:
    """How a quantity changes from the least κ₂ to the largest, by its slope over ln κ₂.

    κ₂ = 0 has no logarithm and is set aside; where it and one other are all there is, the two are
    compared.
    """
    strong = [setting for setting in settings if setting.kappa]
    if len(strong) < 2:
        return compare(sweep, runs, settings[-1], quantity, before=settings[0])
    x = [math.log(setting.kappa or 1.0) for setting in strong]
    middle, reach = sum(x) / len(x), x[-1] - x[0]
    weights = [(one - middle) * reach / sum((o - middle) ** 2 for o in x) for one in x]
    return _paired(
        sweep, runs, strong, quantity,
        lambda *values: sum(w * v for w, v in zip(weights, values, strict=True)),
    )  # fmt: skip


def _paired(
    sweep: Sweep,
    runs: Mapping[str, Run],
    settings: Sequence[Setting],
    quantity: Quantity,
    change: Callable[..., float],
) -> Comparison:
    """A change across settings, seed by seed, where all of them have come to their end."""
    found = [ended(sweep, runs, setting) for setting in settings]
    seeds = [seed for seed in found[0] if all(seed in one for one in found)]
    whole = [s for s in seeds if not any(one[s].has_diverged for one in found)]
    return with_tests(
        Comparison(
            quantity=quantity,
            differences=tuple(
                change(*(quantity.value(one[seed]) for one in found)) for seed in whole
            ),
            diverged=(
                sum(found[0][seed].has_diverged for seed in seeds),
                sum(one[seed].has_diverged for seed in seeds for one in found[1:]),
            ),
        )
    )


def with_tests(comparison: Comparison) -> Comparison:
    """Both tests, not corrected; no test where a run diverged or fewer than two seeds are there."""
    values, margin = comparison.differences, comparison.quantity.margin
    if len(values) < 2 or any(comparison.diverged) or any(map(math.isnan, values)):
        return comparison
    mean, error = mean_and_error(values)
    if error == 0:
        return replace(comparison, p_different=float(mean == 0), p_apart=float(abs(mean) >= margin))
    tail = student(len(values) - 1).sf
    return replace(
        comparison,
        p_different=float(2 * tail(abs(mean) / error)),
        p_apart=float(tail((margin - abs(mean)) / error)),
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
    return {
        method: setting
        if loss < math.inf
        else replace(setting, label=f"{setting.label}, no choice")
        for method, (loss, setting) in best.items()
    }


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
    """A row for every setting; `runs` are by digest, missing ones are left out.

    Verdicts are corrected over the sweep and wait for all of a setting's seeds; those of the
    protocol's primary comparisons are not given here, for they are corrected over all regimes.
    """
    methods = [one for one in sweep.settings if baseline(sweep, one) not in (one, None)]
    compared = {one.label: compare(sweep, runs, one) for one in methods}
    own = [one.label for one in methods if not is_primary(sweep, one)]
    words = dict.fromkeys(compared, "see the protocol")
    for label, found in zip(own, judged([compared[label] for label in own]), strict=True):
        is_whole = len(found.differences) + sum(found.diverged) >= sweep.seeds > 1
        words[label] = found.words if is_whole else ""
    return [
        _row(
            sweep, runs, setting,
            compared[setting.label].differences if setting.label in compared else (),
            words.get(setting.label, ""),
        )
        for setting in sweep.settings
    ]  # fmt: skip


def is_primary(sweep: Sweep, setting: Setting) -> bool:
    """Whether the protocol judges a setting by its primary comparisons."""
    return sweep.name.removesuffix("-confirmed") in PRIMARY and setting.method in PAIR


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
        "tokens on": lambda row: row.participation.text(2),
        "tokens on, predicted": lambda row: row.predicted.text(2),
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
