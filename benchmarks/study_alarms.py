"""Which signal tells that attention will collapse, how early, and how often it is wrong?

python benchmarks/study_alarms.py run             # 300 tiny trainings into out/alarms, resumable
python benchmarks/study_alarms.py publish         # from there to results/alarms/runs.jsonl.gz
python benchmarks/study_alarms.py tables          # docs/alarms.md and docs/probe.md from there

What a collapse is, and how signals are scored, stands in docs/alarms.md and was written down before
the runs were made.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from locater.control.stabilizers import stabilize
from locater.core.theory import predicted_attention
from locater.engines import one_thread
from locater.files import keep, kept, write_file
from locater.models.live import find_attention
from locater.paper.lab.batches import Material, load_material
from locater.paper.lab.model import Transformer
from locater.paper.lab.presets import base, modern
from locater.paper.lab.settings import TrainConfig
from locater.paper.lab.train import seed_dropout
from locater.probe.probe import Probe
from locater.report.tables import markdown_table, update_page

STEPS, EVERY = 500, 20
TEXT: dict[str, Any] = {
    "corpus": "embedded",
    "vocabulary": "bpe",
    "vocabulary_size": 512,
    "tokens": 32,
    "batch": 16,
    "steps": STEPS,
}
MODERN: dict[str, Any] = {**TEXT, "warmup": 50, "layers": 2}
SHAPES = {
    "paper 32 x 1": replace(base(32, 1, cpu=True), **TEXT),
    "paper 32 x 3": replace(base(32, 3, cpu=True), **TEXT),
    "paper 64 x 2": replace(base(64, 2, cpu=True), **TEXT, heads=2),
    "modern 32 x 2": replace(modern(), **MODERN, dim=32, heads=2, kv_heads=1, ffn=88),
    "modern 64 x 2": replace(modern(), **MODERN, dim=64, ffn=172),
}
METHODS = ("locater", "qk-clip", "sigma-reparam", "entropy-floor")
RATES = {
    ("paper", "preset"): (1e-3, 1e-2, 2e-2),
    ("paper", "rising"): (1e-2, 2e-2, 5e-2, 0.15),
    ("modern", "preset"): (3e-3, 3e-2, 0.2),
    ("modern", "rising"): (3e-2, 0.1, 0.3, 1.0),
}
"""Learning rates without a method, by family and schedule; the method's is the last but one of
`rising` and the last of `preset`."""
RISE = 400
"""Steps over which `rising` goes up to its learning rate, evenly: what goes wrong does so late."""
CHOOSING, JUDGING = (0, 1), (2, 3)
"""Seeds whose runs choose limits, and seeds whose runs judge them."""

Record = dict[str, Any]


def plan() -> list[tuple[str, str, str, float, int]]:
    """Every run: shape, schedule, method, learning rate, seed; seed after seed."""
    return [
        (shape, schedule, method, rate, seed)
        for seed in (0, 2, 1, 3)
        for shape in SHAPES
        for schedule in ("preset", "rising")
        for method, rate in _settings(*shape.split()[:1], schedule)
    ]


def _settings(family: str, schedule: str) -> list[tuple[str, float]]:
    rates = RATES[family, schedule]
    hot = rates[-1] if schedule == "preset" else rates[-2]
    return [("none", rate) for rate in rates] + [(method, hot) for method in METHODS]


def train(shape: str, schedule: str, method: str, rate: float, seed: int) -> Record:
    """One training with everything that is measured of it, until its end or its divergence."""
    config = replace(SHAPES[shape], learning_rate=rate, seed=seed)
    if schedule == "rising":
        config = replace(config, warmup=RISE, schedule="constant")
    material = load_material(config, "embedded")
    model = material.model(config)
    stabilizer = stabilize(model, method)
    options = {"lr": rate, "weight_decay": config.weight_decay, "fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    stabilizer.on(optimizer)
    began, steps = time.process_time(), list[Record]()
    first: dict[str, torch.Tensor] = {}
    norm = math.nan
    for step in range(STEPS + 1):
        if step % EVERY == 0:
            steps.append({"step": step, "gradient": norm, **measure(model, material, first)})
            if not math.isfinite(steps[-1]["loss"]):
                break
        if step < STEPS:
            norm = advance(model, material, config, step, optimizer, stabilizer)
    stabilizer.remove()
    seconds = time.process_time() - began
    about: Record = {"shape": shape, "schedule": schedule, "method": method, "rate": rate}
    about |= {"seed": seed, "seconds": round(seconds, 2)}
    return {**about, "measured": [{k: rounded(v) for k, v in one.items()} for one in steps]}


def advance(
    model: Transformer,
    material: Material,
    config: TrainConfig,
    step: int,
    optimizer: torch.optim.Optimizer,
    stabilizer: Any,
) -> float:
    """One step; the norm of its gradient before any clipping."""
    seed_dropout(torch.device("cpu"), config.seed, step, 0)
    inputs, targets = material.train.at(step)
    model.train()
    loss = model.loss(inputs, targets) + stabilizer.penalty()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf)
    for group in optimizer.param_groups:
        group["lr"] = config.rate_at(step)
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


@torch.no_grad()
def measure(model: Transformer, material: Material, first: dict[str, torch.Tensor]) -> Record:
    """All signals of the model as it is now, on a batch that is always the same."""
    inputs, targets = (part[:32] for part in material.valid.at(0))
    model.eval()
    with Probe(model, queries="all", strict=False) as probe:
        record: Record = {"loss": model.loss(inputs, targets).item()}
    if not math.isfinite(record["loss"]) or probe.unseen:
        return {"loss": math.inf}
    heads, ranks = probe.records, probe.rank
    entropy = {"entropy": torch.tensor([one.entropy for one in heads])}
    r, eta, energy, predicted = [], [], [], []
    generator = torch.Generator().manual_seed(0)
    for attention in find_attention(model):
        form, process = attention.form().to(torch.float64), probe.process(attention.layout.name)
        spectrum = form.spectrum()
        r.append(spectrum.r.abs())
        eta.append(spectrum.eta)
        energy.append(spectrum.spectral_norm**2 / spectrum.frobenius_squared)
        drawn = predicted_attention(form, process, draws=64, generator=generator)
        predicted.append(drawn.entropy)
    entropy["predicted"] = torch.cat(predicted)
    for name, values in entropy.items():
        share = values / first.setdefault(name, values)
        record |= {name: share.amin().item(), f"mean_{name}": share.mean().item()}
    return record | {
        "logit": max(one.max_logit for one in heads),
        "trace": torch.cat(r).amax().item(),
        "eta": torch.cat(eta).amax().item(),
        "energy": torch.cat(energy).amax().item(),
        "residual": min(one.residual for one in ranks),
        "rank": min(one.effective_rank for one in ranks),
    }


def rounded(value: float) -> float | int | None:
    """Four digits; None for what is no number."""
    if isinstance(value, int):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _path(store: Path, setting: tuple[Any, ...]) -> Path:
    return store / f"{'-'.join(str(part).replace(' ', '') for part in setting)}.json"


def run(store: Path) -> None:
    """Make what is missing; one run is one file."""
    every = plan()
    with one_thread():
        for place, setting in enumerate(every):
            path = _path(store, setting)
            if kept(path, dict, print) is None:
                keep(path, train(*setting))
                print(f"{place + 1} of {len(every)}: {path.stem}", flush=True)


# Scoring: every rule here stands in docs/alarms.md, which is older than the runs

TAIL, STUCK, ROSE, PRICE, SHARP = 5, 1.0, 0.3, 0.1, 0.25
LEAD, FALSE = 100, 0.01
SIGNALS: dict[str, Callable[[list[Record], int], float]] = {
    "entropy": lambda m, t: 1 - m[t]["entropy"],
    "slope": lambda m, t: m[max(0, t - 3)]["entropy"] - m[t]["entropy"],
    "logit": lambda m, t: math.log10(max(m[t]["logit"], 1e-9)),
    "predicted": lambda m, t: 1 - m[t]["predicted"],
    "trace": lambda m, t: m[t]["trace"],
    "eta": lambda m, t: m[t]["eta"],
    "energy": lambda m, t: m[t]["energy"],
    "gradient": lambda m, t: (
        m[t]["gradient"] / median(one["gradient"] for one in m[1:t]) if t > 1 else 1.0
    ),
    "loss": lambda m, t: m[t]["loss"] - min(one["loss"] for one in m[: t + 1]),
    "residual": lambda m, t: -math.log10(max(m[t]["residual"], 1e-9)),
    "rank": lambda m, t: -m[t]["rank"],
}
ATTENTION = ("entropy", "slope", "logit", "predicted", "trace", "eta", "energy")
TOKENS = ("residual", "rank")


@dataclass(frozen=True)
class Scored:
    """A run with what became of it, and every signal at every measurement that has numbers."""

    run: Record
    kind: str
    """healthy, failed or sharp."""
    harm: int
    """The step at which the harm begins; after the last, for healthy runs."""
    above: float
    """Its last losses above its group's median."""
    signals: dict[str, list[tuple[int, float]]]

    @property
    def is_healthy(self) -> bool:
        return self.kind == "healthy"

    def score(self, signal: str, before: int = 0) -> float:
        """The largest value that was measured before the harm, by so many steps at least."""
        until = self.harm - max(before, 1)
        values = [value for step, value in self.signals[signal] if step <= until]
        return max(values, default=self.signals[signal][0][1])

    def first(self, signal: str, limit: float) -> int | None:
        """The first step at which the signal reaches a limit."""
        return next((step for step, value in self.signals[signal] if value >= limit), None)


def judged(runs: list[Record]) -> list[Scored]:
    """What became of every run, against the median of its group."""
    groups: dict[Any, list[Record]] = {}
    for one in runs:
        half = one["seed"] in CHOOSING
        groups.setdefault((one["shape"], one["schedule"], half), []).append(one)
    return [_judged(one, group) for group in groups.values() for one in group]


def _losses(run: Record) -> list[float]:
    known = [math.inf if one["loss"] is None else one["loss"] for one in run["measured"]]
    return known + [math.inf] * (STEPS // EVERY + 1 - len(known))


def _judged(run: Record, group: list[Record]) -> Scored:
    losses = _losses(run)
    middle = [median(at) for at in zip(*map(_losses, group), strict=True)]
    above = [a - b for a, b in zip(losses, middle, strict=True)]
    worse = fmean(above[-TAIL:])
    rose = fmean(losses[-TAIL:]) - min(losses)
    measured = [one for one in run["measured"] if one["loss"] is not None]
    is_sharp = min(one["entropy"] for one in measured) < SHARP
    kind = "healthy"
    if not worse <= STUCK or not rose <= ROSE:
        kind = "failed"
    elif is_sharp and worse > PRICE:
        kind = "sharp"
    harm = STEPS + EVERY if kind == "healthy" else _harm(losses, above)
    signals = {
        name: [(one["step"], signal(measured, t)) for t, one in enumerate(measured)]
        for name, signal in SIGNALS.items()
    }
    return Scored(run, kind, harm, worse, signals)


def _harm(losses: list[float], above: list[float]) -> int:
    good = [place for place, gap in enumerate(above) if gap <= PRICE]
    if not good or good[-1] < len(above) - 1:
        return EVERY * (good[-1] + 1 if good else 0)
    lows = list(accumulate(losses, min))
    risen = [place for place, loss in enumerate(losses) if loss > lows[place] + ROSE]
    return EVERY * (risen[0] if risen else len(above) - 1)


def auroc(signal: str, runs: list[Scored], before: int = 0) -> float:
    """How often a collapsed run scores above a healthy one; ties are half."""
    low = [one.score(signal) for one in runs if one.is_healthy]
    high = [one.score(signal, before) for one in _collapsed(runs, before)]
    if not low or not high:
        return math.nan
    wins = sum((a > b) + (a == b) / 2 for a in high for b in low)
    return wins / (len(low) * len(high))


def _collapsed(runs: list[Scored], before: int = 0) -> list[Scored]:
    least = before + EVERY if before else 0
    return [one for one in runs if not one.is_healthy and one.harm >= least]


def interval(signal: str, runs: list[Scored], draws: int = 400) -> tuple[float, float]:
    """The bootstrap's 95 % of an AUROC."""
    generator = torch.Generator().manual_seed(0)
    values = []
    for _ in range(draws):
        places = torch.randint(len(runs), (len(runs),), generator=generator).tolist()
        values.append(auroc(signal, [runs[place] for place in places]))
    known = sorted(value for value in values if not math.isnan(value))
    return known[round(0.025 * (len(known) - 1))], known[round(0.975 * (len(known) - 1))]


def limit_of(signal: str, runs: list[Scored]) -> float:
    """The lowest limit at which at most 1 % of the healthy runs ever ring."""
    scores = sorted((one.score(signal) for one in runs if one.is_healthy), reverse=True)
    return math.nextafter(scores[math.floor(FALSE * len(scores))], math.inf)


def performance(limits: dict[str, float], runs: list[Scored]) -> Record:
    """Caught, lead and false alarms of limits, any of which may ring."""
    firsts: list[tuple[Scored, int | None]] = []
    for one in runs:
        rings = [one.first(name, limit) for name, limit in limits.items()]
        firsts.append((one, min((step for step in rings if step is not None), default=None)))
    collapsed = [(one.harm, first) for one, first in firsts if not one.is_healthy]
    leads = sorted(harm - first for harm, first in collapsed if first is not None and first < harm)
    late = sum(first is not None and first >= harm for harm, first in collapsed)
    healthy = [first for one, first in firsts if one.is_healthy]
    false = sum(first is not None for first in healthy)
    return {
        "collapsed": len(collapsed), "caught": len(leads), "late": late,
        "lead": median(leads) if leads else None,
        "early": sum(lead >= LEAD for lead in leads),
        "healthy": len(healthy), "false": false, "range": clopper_pearson(false, len(healthy)),
    }  # fmt: skip


def clopper_pearson(count: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share."""
    from scipy import stats

    low = stats.beta.ppf(0.025, count, total - count + 1) if count else 0.0
    high = stats.beta.ppf(0.975, count + 1, total - count) if count < total else 1.0
    return float(low), float(high)


def scores(runs: list[Record]) -> dict[str, Record]:
    """Every signal, chosen on one half and judged on the other; the pair of winners besides."""
    every = judged(runs)
    choose = [one for one in every if one.run["seed"] in CHOOSING]
    judge = [one for one in every if one.run["seed"] in JUDGING]
    found: dict[str, Record] = {}
    for name in SIGNALS:
        limit = limit_of(name, choose)
        found[name] = {
            "limits": {name: limit}, "chosen": auroc(name, choose), "auroc": auroc(name, judge),
            "interval": interval(name, judge), "before": auroc(name, judge, LEAD),
            **performance({name: limit}, judge),
        }  # fmt: skip
    pair = [max(names, key=lambda name: found[name]["chosen"]) for names in (ATTENTION, TOKENS)]
    limits = {name: limit_of(name, choose) for name in pair}
    found[" or ".join(pair)] = {"limits": limits, **performance(limits, judge)}
    return found


RULES = {"entropy": ("entropy", 1 - 0.1), "logits": ("logit", 2.0), "rank": ("residual", 1.0)}
"""What `AlarmRules` rings at: a tenth of the entropy, a logit of 100, a residual of a tenth."""


def rules(runs: list[Record]) -> dict[str, tuple[int, ...]]:
    """Runs that collapsed in which a rule rang before the harm, ever, of how many; and healthy."""
    every, found = judged(runs), {}
    for rule, (signal, limit) in RULES.items():
        counts = performance({signal: limit}, every)
        rang = counts["caught"] + counts["late"]
        rest = (counts["collapsed"], counts["false"], counts["healthy"])
        found[rule] = (counts["caught"], rang, *rest)
    return found


# What is published


def load(path: Path) -> list[Record]:
    """The published runs."""
    with gzip.open(path / "runs.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def publish(store: Path, out: Path) -> Path:
    """Whole seeds alone, one line a run, the same bytes from the same runs."""
    found = [kept(_path(store, setting), dict, print) for setting in plan()]
    runs = [one for one in found if one is not None]
    size = len(plan()) // len({setting[-1] for setting in plan()})
    counts = Counter(one["seed"] for one in runs)
    lines = [json.dumps(one) for one in runs if counts[one["seed"]] == size]
    packed = gzip.compress("".join(f"{line}\n" for line in lines).encode(), 9, mtime=0)
    return write_file(out / "runs.jsonl.gz", packed)


def table(runs: list[Record], name: str) -> str:
    """A table of docs/alarms.md, by its mark."""
    made = {"signals": _signals, "runs": _kinds, "rules": _rules, "ever": _ever, "sharp": _sharp}
    return made[name](runs) + "\n"


def _signals(runs: list[Record]) -> str:
    found = scores(runs)
    order = sorted(found, key=lambda name: -found[name].get("auroc", 2))
    return markdown_table([found[name] | {"name": name} for name in order], {
        "signal": "name",
        "AUROC": lambda row: _share(row.get("auroc")),
        "95 %": lambda row: "-".join(map(_share, row["interval"])) if "interval" in row else "-",
        "100 steps before": lambda row: _share(row.get("before")),
        "limit": lambda row: ", ".join(f"{value:.3g}" for value in row["limits"].values()),
        "caught": lambda row: f"{row['caught']} of {row['collapsed']}",
        "100 steps ahead": "early",
        "lead": "lead:.0f",
        "after the harm": "late",
        "false alarms per 1,000": _false,
    })  # fmt: skip


def _rules(runs: list[Record]) -> str:
    rows = [
        (rule, f"{rang} of {bad}", f"{before} of {bad}", f"{false} of {good}")
        for rule, (before, rang, bad, false, good) in rules(runs).items()
    ]
    columns = ["rule", "rang in runs that collapsed", "before the harm", "rang in healthy runs"]
    return markdown_table(rows, columns)


def _ever(runs: list[Record]) -> str:
    """Not written down before: signals that may look at the whole run, and runs without help."""
    late = [replace(one, harm=STEPS + EVERY) for one in judged(runs)]
    bare = [one for one in late if one.run["method"] == "none"]
    rows = [(name, _share(auroc(name, late)), _share(auroc(name, bare))) for name in SIGNALS]
    rows.sort(key=lambda row: row[1], reverse=True)
    return markdown_table(rows, ["signal", "AUROC, all runs", "AUROC, runs without any method"])


def _sharp(runs: list[Record]) -> str:
    """How many healthy runs have sharp heads and huge logits."""
    healthy = [one for one in judged(runs) if one.is_healthy]
    sharp = [one for one in healthy if one.score("entropy") > 0.99]
    loud = sum(one.score("logit") > 3 for one in sharp)
    good = sum(one.above <= 0 for one in sharp)
    return (
        f"Of {len(healthy)} healthy runs {len(sharp)} have a head that fell below a hundredth of "
        f"its entropy, {loud} of these with logits above 1,000, and {good} of the {len(sharp)} end "
        "at or below the median loss of their group."
    )


def _share(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3f}".lstrip("0")


def _false(row: Record) -> str:
    low, high = (1000 * end for end in row["range"])
    return f"{1000 * row['false'] / row['healthy']:.0f} ({low:.0f}-{high:.0f})"


def _kinds(runs: list[Record]) -> str:
    every = judged(runs)
    rows = []
    for shape in SHAPES:
        for half, seeds in (("choosing", CHOOSING), ("judging", JUDGING)):
            mine = [one for one in every if one.run["shape"] == shape and one.run["seed"] in seeds]
            count = Counter(one.kind for one in mine)
            harms = [one.harm for one in mine if not one.is_healthy]
            middle = f"{median(harms):.0f}" if harms else "-"
            rows.append((shape, half, count["healthy"], count["failed"], count["sharp"], middle))
    columns = ["shape", "half", "healthy", "failed (a)", "sharp at a price (b)", "harm begins at"]
    return markdown_table(rows, columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", choices=("run", "publish", "tables"))
    parser.add_argument("--store", type=Path, default=Path("out/alarms"))
    parser.add_argument("--results", type=Path, default=Path("results/alarms"))
    given = parser.parse_args()
    if given.job == "run":
        run(given.store)
    elif given.job == "publish":
        print(publish(given.store, given.results))
    else:
        runs = load(given.results)
        for page in ("docs/alarms.md", "docs/probe.md"):
            print(update_page(Path(page), lambda name: table(runs, name)))
        print(f"STUDY of locater.probe.alarms is to be {rules(runs)}")


if __name__ == "__main__":
    main()
