"""The claims of Section 7 and Appendix D, held against runs by the rules of docs/protocol.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from locater.paper.claims import Outcome, Verdict
from locater.paper.lab.presets import PAIR, PRIMARY, READINGS, Setting, Sweep, sweep_named
from locater.paper.lab.run import Run
from locater.paper.lab.summary import (
    ENTROPY,
    ENTROPY_AT_BEST,
    LAST,
    PARTICIPATION,
    PERPLEXITY,
    SCALE,
    TEST,
    Comparison,
    Finding,
    Interval,
    baseline,
    compare,
    ended,
    judged,
    markdown,
    percent,
    summarize,
    trend,
    with_tests,
)
from locater.paper.lab.sweep import SweepFolders, confirmed
from locater.report.tables import markdown_table

Runs = Mapping[str, Run]
Regimes = Mapping[str, tuple[Sweep, Runs]]
OTHER_WAYS = ("qk-norm", "sigma-reparam", "dropout .3", "weight decay 1")
SINGLE_TERMS = ("scale term .01", "scale term 1", "mean term 1", "mean term 100")


def outcome(sign: int, comparisons: Sequence[Comparison]) -> Outcome:
    """What becomes of a claimed direction, one comparison for each reading of the paper."""
    claimed = "higher" if sign > 0 else "lower"
    answers = {
        None if one.finding == "undecided" else one.finding == claimed for one in comparisons
    }
    if None in answers or not answers:
        return "undecided"
    if len(answers) > 1:
        return "depends on the reading"
    return "reproduced" if True in answers else "differs"


def told(comparisons: Sequence[Comparison], names: Sequence[str]) -> str:
    """What was found under each reading."""
    parts = zip(names, comparisons, strict=True)
    return "; ".join(f"{READINGS.get(name, name)}: {one.sentence}" for name, one in parts)


def curve_verdicts(sweep: Sweep, runs: Runs, section: str) -> list[Verdict]:
    """What became of (B), (C) and (D) of Figs. 6 and 8-12: trends in κ₂, Holm over the figure.

    One κ₂ has no trend: what it does against no LocAteR is the protocol's question.
    """
    readings = _by_reading(sweep)
    if any(len(group) < 2 for group in readings.values()):
        return []
    kinds = (
        ("B", "With stronger κ₂ the eigenspectrum scale shrinks.", SCALE, -1),
        ("C", "With stronger κ₂ the attention entropy increases.", ENTROPY, 1),
        ("D", "With stronger κ₂ the perplexity improves.", PERPLEXITY, -1),
    )
    found = judged(
        [trend(sweep, runs, group, kind[2]) for kind in kinds for group in readings.values()]
    )
    count, size = len(readings), _size(sweep, runs)
    strong = {setting.kappa for setting in sweep.settings if setting.kappa}
    if len(strong) > 1:
        ends = f"κ₂ = {min(strong):g} to {max(strong):g}"
        size += f" From {ends}, along the straight line over ln κ₂ that fits best."
    verdicts = []
    for place, (letter, claim, _, sign) in enumerate(kinds):
        some = found[count * place : count * (place + 1)]
        verdicts.append(
            Verdict(
                where=f"Fig. {section.removeprefix('fig')}{letter}",
                claim=claim,
                outcome=outcome(sign, some),
                found=f"{told(some, list(readings))} {size}",
                section=section,
            )
        )
    return verdicts


def _size(sweep: Sweep, runs: Runs) -> str:
    """The regime that a verdict holds for."""
    config = sweep.settings[0].config
    return f"[d = {config.dim}, layers: {config.layers}, {passes(runs)}untuned]"


def passes(runs: Runs) -> str:
    """How often some runs saw their text; nothing where they do not say how long it is."""
    for run in runs.values():
        length = run.environment.get("corpus", {}).get("train")
        if isinstance(length, int) and length > 0:
            times = run.config.steps * run.config.batch * run.config.tokens / length
            number = f"{times:.0f}" if times >= 10 else f"{times:.2g}"
            return f"{number} passes, ".replace("0.", ".", times < 1)
    return ""


def gates_verdicts(sweep: Sweep, runs: Runs, section: str, *, note: str = "") -> list[Verdict]:
    """The halves of Fig. 7: with LocAteR fewer tokens take part in ρ, without it all alike."""
    settings = {setting.reading: setting for setting in sweep.settings if setting.reading}
    found = judged([compare(sweep, runs, one, PARTICIPATION) for one in settings.values()])
    none = next(setting for setting in sweep.settings if not setting.reading)
    alone = [PARTICIPATION.value(run) for run in ended(sweep, runs, none).values()]
    evenness = with_tests(
        Comparison(quantity=PARTICIPATION, differences=tuple(one - 1 for one in alone))
    )
    even: dict[Finding, Outcome] = {"equivalent": "reproduced", "undecided": "undecided"}
    share = Interval.of(alone).text(3)
    size = f"{_size(sweep, runs)}{note}"
    return [
        Verdict(
            where="Fig. 7",
            claim="With LocAteR ρ localizes: fewer tokens take part.",
            outcome=outcome(-1, found),
            found=f"change of the share of tokens that take part, {told(found, list(settings))}; "
            f"without LocAteR it is {share} {size}",
            section=section,
        ),
        Verdict(
            where="Fig. 7",
            claim="Without LocAteR ρ is uniform: all tokens take part alike.",
            outcome=even.get(evenness.finding, "differs"),
            found=f"the share of tokens that take part is {share}; it would be 1 {size}",
            section=section,
        ),
    ]


def primary(regimes: Regimes) -> dict[str, list[Comparison]]:
    """Both readings against none in the protocol's regimes, Holm over all of them.

    Nothing is decided before all the seeds that were announced have ended; what is undecided is
    so for good only after the second look, and when all comparisons are there, for the correction
    depends on all of them.
    """
    flat, have_ended, second = [], [], []
    for sweep, runs in regimes.values():
        for reading in PAIR:
            setting = _method(sweep, reading)
            pair = (setting, baseline(sweep, setting))
            is_whole = all(one and len(ended(sweep, runs, one)) == sweep.seeds for one in pair)
            one = compare(sweep, runs, setting)
            flat.append(one if is_whole else replace(one, p_different=math.nan, p_apart=math.nan))
            have_ended.append(is_whole)
            second.append(sweep.seeds > LOOK)
    found = [
        replace(one, is_final=all(have_ended) and is_second)
        for one, is_second in zip(judged(flat), second, strict=True)
    ]
    return {
        name: found[len(PAIR) * place : len(PAIR) * (place + 1)]
        for place, name in enumerate(regimes)
    }


def protocol_verdicts(regimes: Regimes, others: tuple[Sweep, Runs], section: str) -> list[Verdict]:
    """The central claim in every regime, and whether the entropy is the cause."""
    found = primary(regimes)
    verdicts = [
        Verdict(
            where="Sec. 7",
            claim=f"LocAteR lowers the perplexity ({sweep.question}).",
            outcome=outcome(-1, found[name]),
            found=told(found[name], PAIR),
            section=section,
        )
        for name, (sweep, _) in regimes.items()
    ]
    return [*verdicts, _cause(regimes["passes-3"], others, found["passes-3"], section)]


def _cause(
    regime: tuple[Sweep, Runs],
    others: tuple[Sweep, Runs],
    perplexity: Sequence[Comparison],
    section: str,
) -> Verdict:
    """Whether perplexity falls *because* entropy rises: three conditions, all of them needed."""
    parts, supported = [], []
    methods = (*OTHER_WAYS, *SINGLE_TERMS)
    columns = [
        judged([compare(*others, _method(others[0], method), kind) for method in methods])
        for kind in (ENTROPY_AT_BEST, PERPLEXITY)
    ]
    changes = dict(zip(methods, zip(*columns, strict=True), strict=True))
    risen = judged([compare(*regime, _method(regime[0], one), ENTROPY_AT_BEST) for one in PAIR])
    for reading, loss, entropy in zip(PAIR, perplexity, risen, strict=True):
        gain, rise = -_mean(loss), _mean(entropy)
        alike = [m for m in OTHER_WAYS if _mean(changes[m][0]) >= 0.8 * rise]
        as_good = [m for m in alike if -_mean(changes[m][1]) >= 0.8 * gain]
        single = max(SINGLE_TERMS, key=lambda m: _mean(changes[m][0]))
        conditions = {
            f"perplexity {loss.sentence}, entropy {entropy.sentence}": loss.finding == "lower"
            and entropy.finding == "higher",
            f"of other ways to raise entropy as much ({', '.join(alike) or 'none does'}) as good: "
            f"{', '.join(as_good) or 'none'}": bool(alike) and alike == as_good,
            f"the single term that raises entropy most ({single}, {changes[single][0].sentence}) "
            f"changes perplexity by {PERPLEXITY.text(changes[single][1].differences)}":
                -_mean(changes[single][1]) >= gain / 2 > 0,
        }  # fmt: skip
        supported.append(all(conditions.values()))
        said = (f"{text} ({'yes' if holds else 'no'})" for text, holds in conditions.items())
        parts.append(f"{READINGS[reading]}: {'; '.join(said)}")
    there = ((regime[0], [*perplexity, *risen]), (others[0], [*columns[0], *columns[1]]))
    is_whole = all(len(one.differences) == sweep.seeds for sweep, found in there for one in found)
    unsure: Outcome = "not supported" if is_whole else "undecided"
    return Verdict(
        where="Sec. 7",
        claim="The perplexity is lower because the entropy is higher.",
        outcome="reproduced" if is_whole and all(supported) else unsure,
        found=". ".join(parts) + f" [{regime[0].question}]",
        section=section,
    )


def _mean(comparison: Comparison) -> float:
    return sum(comparison.differences) / max(len(comparison.differences), 1)


def _method(sweep: Sweep, method: str) -> Setting:
    return next(setting for setting in sweep.settings if setting.method == method)


def all_seeds(sweep: Sweep, runs: Runs) -> Sweep:
    """The sweep with its second five seeds, where every setting has them."""
    more = replace(sweep, seeds=2 * sweep.seeds)
    counts = {len(ended(more, runs, setting)) for setting in more.settings}
    return more if counts == {more.seeds} else sweep


LOOK = 5
"""Seeds of the first look at a main regime; the second has as many more."""
REGIMES = {
    "passes-0.6": "0.6 %, 175 passes",
    "passes-3": "3 %, 110 passes",
    "passes-15": "15 %, 104 passes",
    "tuned": "all, .74 passes, tuned",
}
"""The protocol's main regimes: how much of the text, seen how often."""


def protocol_regimes(results: Path) -> dict[str, tuple[Sweep, Runs]]:
    """The main regimes with those of their runs that are published; nothing is trained."""
    stored = {"tuned": "tuned-confirmed"}
    names = (*REGIMES, "passes-3-others")
    return {name: _published(stored.get(name, name), results) for name in names}


def _published(name: str, results: Path) -> tuple[Sweep, Runs]:
    """A sweep with its published runs, second seeds too; NAME-confirmed has those that judge."""
    folders = SweepFolders(out=results, results=results)
    sweep = sweep_named(name.removesuffix("-confirmed"))
    if name != sweep.name:
        sweep, _ = confirmed(sweep, folders.ended, seeds=LOOK)
    runs = folders.ended(replace(sweep, seeds=2 * sweep.seeds))
    return all_seeds(sweep, runs) if name.removesuffix("-confirmed") in PRIMARY else sweep, runs


def _first_look(regimes: Regimes) -> dict[str, list[Comparison]]:
    """What was said after the first five seeds, in the regimes that have ten."""
    first = {name: (replace(sweep, seeds=min(sweep.seeds, LOOK)), runs)
             for name, (sweep, runs) in regimes.items()}  # fmt: skip
    found = primary(first)
    return {name: found[name] for name, (sweep, _) in regimes.items() if sweep.seeds > LOOK}


def protocol_table(regimes: Regimes) -> str:
    """Every main comparison with its verdict, and the secondary outcomes beside it."""
    found, before, rows = primary(regimes), _first_look(regimes), []
    for name, (sweep, runs) in regimes.items():
        for place, reading in enumerate(PAIR):
            setting = _method(sweep, reading)
            side = {
                kind.name: kind.text(compare(sweep, runs, setting, kind).differences)
                for kind in (TEST, LAST, ENTROPY)
            }
            best = found[name][place]
            words = f"**{best.words}**"
            if name in before:
                first = replace(before[name][place], is_final=True)
                words += f" (after five seeds: {first.words})"
            rows.append(
                {
                    "regime": REGIMES[name],
                    "LocAteR": READINGS[reading],
                    "verdict": words if _is_begun(best) else "no run is finished",
                    "best": PERPLEXITY.text(best.differences),
                    **side,
                    "seeds": f"{len(best.differences)} of {sweep.seeds}",
                }
            )
    columns = {
        "text, passes": "regime", "LocAteR": "LocAteR", "perplexity is": "verdict",
        "at the best step": "best", "on test": TEST.name, "at the last step": LAST.name,
        "entropy, nats": ENTROPY.name, "seeds": "seeds",
    }  # fmt: skip
    return markdown_table(rows, columns) + "\n"


def _is_begun(comparison: Comparison) -> bool:
    return bool(comparison.differences) or any(comparison.diverged)


def protocol_finding(regimes: Regimes) -> str:
    """What the finished comparisons come to, with each one's number; empty while there is none."""
    found = {name: pair for name, pair in primary(regimes).items() if any(map(_is_begun, pair))}
    words = {one.finding for pair in found.values() for one in pair}
    if {"lower", "higher"} <= words:
        lead = "Whether LocAteR lowers perplexity depends on the regime and on the reading"
    elif len(words) > 1:
        lead = "What LocAteR does to perplexity is decided in some regimes only"
    else:
        lead = f"The perplexity with LocAteR is {''.join(words)}, in every regime that was run"
    told = "; ".join(
        f"{REGIMES[name]}: "
        + ", ".join(
            f"{one.words} {READINGS[reading]} ({PERPLEXITY.text(one.differences)})"
            for reading, one in zip(PAIR, pair, strict=True)
        )
        for name, pair in found.items()
    )
    return f"**{lead}.** Change at the best step, {told}." if found else ""


def effects(regimes: Regimes) -> list[dict[str, Any]]:
    """The changes of perplexity at the best and at the last step, for a chart."""
    records = []
    for name, (sweep, runs) in regimes.items():
        for reading in PAIR:
            setting = _method(sweep, reading)
            for at, kind in (("best step", PERPLEXITY), ("last step", LAST)):
                values = compare(sweep, runs, setting, kind).differences
                mean, half = vars(Interval.of([percent(v) for v in values])).values()
                if values:
                    half = 0.0 if math.isnan(half) else half
                    records.append(
                        {"regime": REGIMES[name], "reading": READINGS[reading], "at": at,
                         "change": mean, "low": mean - half, "high": mean + half}
                    )  # fmt: skip
    return records


def published_table(name: str, results: Path) -> str:
    """The table of a sweep (or of the protocol, or NAME-confirmed) from published runs alone."""
    if name == "protocol":
        regimes = protocol_regimes(results)
        return protocol_table({regime: regimes[regime] for regime in REGIMES})
    return markdown(summarize(*_published(name, results)))


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
