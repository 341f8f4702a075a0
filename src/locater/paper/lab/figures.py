"""Figures of runs alone (folders or published results): Figs. 6-12, open questions, any run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import altair as alt

from locater.errors import InputError
from locater.paper.lab.presets import PAIR, READINGS, Setting, Sweep
from locater.paper.lab.run import Run
from locater.paper.lab.settings import TrainConfig
from locater.paper.lab.summary import ended, summarize
from locater.report.charts import INK, SCALE, specification, told_apart
from locater.report.page import Section
from locater.report.tables import markdown_table

Record = dict[str, Any]
NONE = "without LocAteR"
_TAIL = 0.6
"""The magnified panel begins at this share of the steps."""
_QUANTITIES = {
    "perplexity": "valid perplexity",
    "trace": "tr W_QK",
    "frobenius_squared": "‖W_QK‖²_F",
    "entropy": "attention entropy (nats)",
}
_PANELS = {
    "trace": "A  mean term: tr W_QK",
    "frobenius_squared": "B  scale: ‖W_QK‖²_F",
    "entropy": "C  attention entropy (nats)",
    "perplexity": "D  valid perplexity",
    "tail": "D, magnified",
}


def setting_name(setting: Setting) -> str:
    """For a reader who does not know our labels."""
    return NONE if setting.kappa is None else f"LocAteR {setting.label}"


def size_note(config: TrainConfig) -> str:
    """What differs from the paper's settings, for the figure itself."""
    rate = 1e-4 if config.dim <= 32 else 2.5e-5
    paper = TrainConfig(dim=config.dim, layers=config.layers, learning_rate=rate)
    words = "words" if config.vocabulary == "word" else "pieces (BPE)"
    size = f"{config.vocabulary_size:,} {words}" if config.vocabulary_size else f"all {words}"
    parts = {
        "steps": f"{config.steps:,} steps for {paper.steps:,}",
        "batch": f"batch {config.batch} for {paper.batch}",
        "learning_rate": f"learning rate {config.learning_rate:g} for {rate:g}",
        "vocabulary_size": size,
        "corpus": f"text: {config.corpus}",
        "share": f"{100 * config.share:g} % of the text",
        "task": f"task: {config.task}",
        "norm": f"norm: {config.norm}",
        "tokens": f"{config.tokens} tokens for {paper.tokens}",
    }
    apart = [text for name, text in parts.items() if getattr(config, name) != getattr(paper, name)]
    if not apart:
        return "the paper's size"
    small = "sized for a CPU: " if config.steps < paper.steps else ""
    return f"{small}{', '.join(apart)}; all else as in the paper"


def curve_records(sweep: Sweep, runs: Mapping[str, Run]) -> list[Record]:
    """Every quantity of Figs. 6 and 8-12 by step: mean over seeds, lowest and highest seed."""
    readings = list(dict.fromkeys(s.reading for s in sweep.settings if s.reading))
    records = []
    for setting in sweep.settings:
        curves = [run_curves(run) for run in ended(sweep, runs, setting).values()]
        rows = _across_seeds(curves, setting.config.steps)
        label = NONE if setting.kappa is None else f"{setting.kappa:g}"
        for reading in [setting.reading] if setting.reading else readings or [""]:
            records += [{**row, "reading": reading, "kappa": label} for row in rows]
    return records


def curves_chart(sweep: Sweep, runs: Mapping[str, Run]) -> alt.VConcatChart:
    """Figs. 6 and 8-12: mean term, scale, entropy and perplexity against steps."""
    records = curve_records(sweep, runs)
    labels = list(dict.fromkeys(record["kappa"] for record in records))
    rows = [
        alt.hconcat(
            *(_panel(records, reading, name, title, labels) for name, title in _PANELS.items()),
            title=alt.Title(_reading_title(reading), anchor="start", fontSize=13),
        )
        for reading in dict.fromkeys(record["reading"] for record in records)
    ]
    counts = [len(ended(sweep, runs, setting)) for setting in sweep.settings]
    note = f"{_band_note(counts)}; perplexity on one fixed batch of valid text"
    subtitle = [size_note(sweep.settings[0].config), note]
    title = alt.Title(sweep.question, subtitle=subtitle, anchor="start")
    return alt.vconcat(*rows, title=title, spacing=24).resolve_scale(color="shared")


def heat_chart(sweep: Sweep, runs: Mapping[str, Run]) -> alt.VConcatChart:
    """Fig. 7: which tokens are on, at each step of the first seed, with and without LocAteR."""
    seed = sweep.first_seed
    found = [(s, runs.get(replace(s.config, seed=seed).digest)) for s in sweep.settings]
    panels = [
        gates_chart(setting_name(setting), run).properties(
            width=620,
            height=150,
            title=alt.Title(setting_name(setting), anchor="start", fontSize=13),
        )
        for setting, run in found
        if run is not None
    ]
    title = alt.Title(
        sweep.question + ": signal propagation probability by token, over training",
        subtitle=[size_note(sweep.settings[0].config), f"seed {seed}, first layer, valid text"],
        anchor="start",
    )
    return alt.vconcat(*panels, title=title)


def gates_chart(label: str, run: Run) -> alt.Chart:
    """ρ of the first layer by token and step."""
    series = run.series("rho")
    steps = sorted({step for step, _ in series})
    until = dict(pairwise([*steps, 2 * steps[-1] - steps[-2] if len(steps) > 1 else steps[0] + 1]))
    records = [
        {"step": step, "until": until[step], "token": token, "next": token + 1, "rho": value}
        for step, layers in series
        for token, value in enumerate(layers[0], 1)
    ]
    return (
        alt.Chart(
            alt.Data(values=records),
            width=560,
            height=180,
            description=f"Heat map of ρ by token and step, {label}",
        )
        .mark_rect()
        .encode(
            x=alt.X("step:Q", title="step", scale=alt.Scale(nice=False)),
            x2=alt.X2("until:Q", title=""),
            y=alt.Y(
                "token:Q", title="token", scale=alt.Scale(nice=False, zero=False, reverse=True)
            ),
            y2=alt.Y2("next:Q", title=""),
            color=alt.Color("rho:Q", title="ρ", scale=alt.Scale(domain=[0, 1], scheme="viridis")),
            tooltip=["step:Q", "token:Q", "rho:Q"],
        )
    )


def comparison_chart(sweep: Sweep, runs: Mapping[str, Run]) -> alt.TopLevelMixin:
    """Change of perplexity against the baseline, with 95 % intervals over seeds."""
    rows = [row for row in summarize(sweep, runs) if not math.isnan(row.change.mean)]
    records = [
        {
            "setting": row.setting.label,
            "change": row.change.mean,
            "low": row.change.mean - (0 if math.isnan(row.change.half) else row.change.half),
            "high": row.change.mean + (0 if math.isnan(row.change.half) else row.change.half),
            "verdict": row.verdict.split(",")[0].split(" within")[0] or "one seed",
        }
        for row in rows
    ]
    y = alt.Y("setting:N", title=None, sort=None, axis=alt.Axis(labelLimit=320))
    base = alt.Chart(alt.Data(values=records)).encode(y=y)
    colors = alt.Scale(
        domain=["lower", "higher", "equivalent", "undecided", "one seed"],
        range=[SCALE[2], SCALE[0], "#444444", "#888888", "#888888"],
    )
    color = alt.Color("verdict:N", title="perplexity", scale=colors)
    x = "change of perplexity against the same seed without LocAteR, %"
    points = base.mark_point(filled=True, size=60).encode(
        x=alt.X("change:Q", title=x), color=color, tooltip=["setting:N", "change:Q", "verdict:N"]
    )
    bars = base.mark_rule().encode(x="low:Q", x2="high:Q", color=color)
    zero = alt.Chart(alt.Data(values=[{"x": 0}])).mark_rule(strokeDash=[3, 3]).encode(x="x:Q")
    return alt.layer(zero, bars, points).properties(
        width=420,
        title=alt.Title(
            sweep.question, subtitle=size_note(sweep.settings[0].config), anchor="start"
        ),
        description="Change of perplexity of each setting, a dot with its 95 % interval: "
        + "; ".join(f"{r['setting']} {r['change']:.2f} %" for r in records),
    )


def lab_chart(sweep: Sweep, runs: Mapping[str, Run]) -> alt.TopLevelMixin:
    """The chart that a sweep is about."""
    if not runs:
        raise InputError(
            f"no run of {sweep.name} is finished.",
            hint="leave out --no-train, or name the results of others with --results.",
        )
    if sweep.name.startswith("fig7"):
        return heat_chart(sweep, runs)
    return (curves_chart if sweep.name.startswith("fig") else comparison_chart)(sweep, runs)


def run_curves(run: Run) -> dict[str, dict[int, float]]:
    """One value a step: layers averaged, losses as perplexities."""
    found: dict[str, dict[int, float]] = {}
    for name in ("trace", "frobenius_squared", "entropy"):
        found[name] = {step: sum(v) / len(v) for step, v in run.series(name) if None not in v}
    losses = [(step, loss) for step, loss in run.series("valid_loss") if loss is not None]
    found["perplexity"] = {step: math.exp(loss) for step, loss in losses if loss < 700}
    return found


def _across_seeds(curves: Sequence[Mapping[str, Mapping[int, float]]], steps: int) -> list[Record]:
    rows = []
    for name in ("trace", "frobenius_squared", "entropy", "perplexity"):
        for step in sorted({step for curve in curves for step in curve[name]}):
            values = [curve[name][step] for curve in curves if step in curve[name]]
            row = {"step": step, "value": sum(values) / len(values), "low": min(values),
                   "high": max(values)}  # fmt: skip
            if name != "perplexity" or step > 0:
                rows.append({**row, "panel": name})
            if name == "perplexity" and step >= _TAIL * steps:
                rows.append({**row, "panel": "tail"})
    return rows


def _panel(
    records: Sequence[Record], reading: str, name: str, title: str, labels: Sequence[str]
) -> Any:
    values = [r for r in records if r["reading"] == reading and r["panel"] == name]
    looks = told_apart(
        "kappa",
        labels,
        title="κ₂",
        colors=[INK, SCALE[5], SCALE[2], SCALE[4], SCALE[3], "#882255"],
        dashes=[[4, 3], *([[1, 0]] * 5)],
        symbolType="stroke",
        symbolStrokeWidth=2,
        symbolOpacity=1,
    )
    is_log = name in ("perplexity", "frobenius_squared")
    scale: dict[str, Any] = {"type": "log", "nice": False} if is_log else {"zero": False}
    axis: dict[str, Any] = {"grid": not is_log}
    spread = [r[end] for r in values for end in ("low", "high") if r[end] > 0]
    if is_log and max(spread, default=1) > 1e3 * min(spread, default=1):
        low, high = (math.log10(end(spread)) for end in (min, max))
        powers = range(math.ceil(low), math.floor(high) + 1)
        axis |= {"values": [10.0**power for power in powers[:: len(powers) // 5 + 1]]}
        axis |= {"labelExpr": "format(datum.value, '.0e')"}
    y = alt.Y("value:Q", title=title, scale=alt.Scale(**scale), axis=alt.Axis(**axis))
    base = alt.Chart(alt.Data(values=values)).encode(
        x=alt.X("step:Q", title="step", axis=alt.Axis(tickCount=4), scale=alt.Scale(zero=False)),
        color=looks["color"],
    )
    band = base.mark_area(opacity=0.2).encode(y=alt.Y("low:Q", title=title), y2="high:Q")
    line = base.mark_line().encode(
        y=y,
        strokeDash=looks["strokeDash"],
        tooltip=["kappa:N", "step:Q", "value:Q", "low:Q", "high:Q"],
    )
    return alt.layer(band, line).properties(
        width=138,
        height=150,
        description=f"{title} against steps, one line per κ₂; {_reading_title(reading)}",
    )


def _reading_title(reading: str) -> str:
    """Which of the paper's two weights is on what."""
    first, second = ("scale", "mean") if reading.startswith("printed") else ("mean", "scale")
    return f"{READINGS[reading]}: κ₁ = 100 on the {first}, κ₂ on the {second}"


def _band_note(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    if most == 1 == least:
        return "one seed"
    seeds = str(most) if least == most else f"{least} to {most}"
    return f"mean of {seeds} seeds, band from the lowest to the highest"


def run_sections(runs: Sequence[Run]) -> list[Section]:
    """Any runs on a page: their curves together, ρ over the training of each, their settings."""
    if not runs:
        raise InputError("there is no run to show.", hint="give at least one.")
    labels = run_labels(runs)
    sections = [
        Section(
            key="runs",
            title="Training runs",
            chart=specification(runs_chart(runs)),
            caption="Layers are averaged. A run that diverged ends where its loss did.",
        )
    ]
    for place, (label, run) in enumerate(zip(labels, runs, strict=True), 1):
        if run.series("rho"):
            sections.append(
                Section(
                    key=f"run-{place}",
                    title=f"Which tokens are on: {label}",
                    chart=specification(gates_chart(label, run)),
                    caption="Signal propagation probability of the first layer by token, over the "
                    "steps of training.",
                )
            )
    return [*sections, _settings(labels, runs)]


def run_labels(runs: Sequence[Run]) -> list[str]:
    """Names of the folders or files; where those are digests, the settings that differ."""
    configs = [asdict(run.config) for run in runs]
    apart = [name for name in configs[0] if len({str(config[name]) for config in configs}) > 1]
    names = []
    for run, config in zip(runs, configs, strict=True):
        own = run.config.digest if run.path is None else run.path.stem
        words = ", ".join(f"{name} {config[name]}".replace("_", " ") for name in apart)
        names.append(words if own == run.config.digest and words else own)
    return [
        name if names.count(name) == 1 else f"{name} ({run.config.digest[:6]}, {place})"
        for place, (name, run) in enumerate(zip(names, runs, strict=True), 1)
    ]


def runs_chart(runs: Sequence[Run]) -> alt.ConcatChart:
    """Perplexity, trace, scale and entropy against steps, one line per run."""
    labels = run_labels(runs)
    curves = {label: run_curves(run) for label, run in zip(labels, runs, strict=True)}
    colors = [SCALE[place % len(SCALE)] for place in range(len(labels))]
    dashes = [[1, 0] if place < len(SCALE) else [4, 2] for place in range(len(labels))]
    looks = told_apart("run", labels, colors=colors, dashes=dashes, columns=1)
    panels = []
    for name, title in _QUANTITIES.items():
        values = [
            {"run": label, "step": step, "value": value}
            for label, found in curves.items()
            for step, value in found[name].items()
        ]
        scale = alt.Scale(type="log") if name == "perplexity" else alt.Scale(zero=False)
        panels.append(
            alt.Chart(alt.Data(values=values))
            .mark_line(point=alt.OverlayMarkDef(size=12))
            .encode(
                x=alt.X("step:Q", axis=alt.Axis(tickCount=4)),
                y=alt.Y("value:Q", title=title, scale=scale),
                tooltip=["run:N", "step:Q", "value:Q"],
                **looks,
            )
            .properties(
                width=270, height=170, description=f"{title} against steps, one line per run."
            )
        )
    return alt.concat(*panels, columns=2)


def _settings(labels: Sequence[str], runs: Sequence[Run]) -> Section:
    """What sets the runs apart first, then what they share."""
    configs = [asdict(run.config) for run in runs]
    ends = [run.final["end"] if run.final else "unfinished" for run in runs]
    rows = [[name, *(config[name] for config in configs)] for name in configs[0]]
    rows.sort(key=lambda row: len(set(map(str, row[1:]))) == 1)
    table = markdown_table([["end", *ends], *rows], ["setting", *labels], is_plain=True)
    return Section(key="run-settings", title="Settings of the runs", text=table)


SHORT = {"none": NONE} | {name: READINGS[name] for name in PAIR}
"""The methods of the protocol's main comparisons, in a legend."""
_DASHES = [[4, 3], [1, 0], [1, 0]]


def bands_chart(regimes: Mapping[str, tuple[Sweep, Mapping[str, Run]]]) -> alt.TopLevelMixin:
    """Perplexity on the whole valid text over training, a band over seeds, a dot at the best."""
    panels = [_bands(sweep, runs) for sweep, runs in regimes.values() if runs]
    title = alt.Title(
        "When models see their text again and again",
        subtitle="mean and range over seeds; dots: each run at its best",
        anchor="start",
    )
    return alt.concat(*panels, columns=2, title=title).resolve_scale(color="shared")


def _bands(sweep: Sweep, runs: Mapping[str, Run]) -> Any:
    lines, best = [], []
    for setting in sweep.settings:
        name = SHORT[setting.method]
        whole = [run for run in ended(sweep, runs, setting).values() if not run.has_diverged]
        found = [run.series("whole_valid_loss") for run in whole]
        best += [
            {"method": name, "step": step, "perplexity": math.exp(loss)}
            for step, loss in (min(series, key=lambda pair: pair[1]) for series in found)
        ]
        for points in zip(*found, strict=True):
            values = [math.exp(loss) for _, loss in points]
            lines.append(
                {"method": name, "step": points[0][0], "perplexity": sum(values) / len(values),
                 "low": min(values), "high": max(values)}
            )  # fmt: skip
    looks = told_apart("method", list(SHORT.values()), title=None, dashes=_DASHES, symbolOpacity=1)
    scale = alt.Scale(type="log", nice=False)
    y = alt.Y("perplexity:Q", title="valid perplexity", scale=scale, axis=alt.Axis(tickCount=5))
    base = alt.Chart(alt.Data(values=lines)).encode(alt.X("step:Q"), color=looks["color"])
    dots = alt.Chart(alt.Data(values=best)).mark_point(filled=True, size=40)
    return alt.layer(
        base.mark_area(opacity=0.2).encode(y=alt.Y("low:Q", title=""), y2="high:Q"),
        base.mark_line().encode(y=y, strokeDash=looks["strokeDash"]),
        dots.encode(x="step:Q", y=y, color=looks["color"]),
    ).properties(
        width=300, height=200, title=alt.Title(sweep.question, anchor="start", fontSize=12),
        description=f"Perplexity over training with and without LocAteR, {sweep.question}.",
    )  # fmt: skip


def effects_chart(records: Sequence[Record]) -> alt.TopLevelMixin:
    """What each reading does to perplexity, against how much text there is."""
    order = list(dict.fromkeys(record["regime"] for record in records))
    looks = told_apart("reading", list(SHORT.values())[1:], title=None, dashes=_DASHES[1:])
    values = [{**record, "place": f"{record['reading']}, {record['at']}"} for record in records]
    places = list(dict.fromkeys(value["place"] for value in values))
    base = alt.Chart(alt.Data(values=values)).encode(
        x=alt.X("regime:N", sort=order, title=None, axis=alt.Axis(labelAngle=0, labelLimit=200)),
        xOffset=alt.XOffset("place:N", sort=places),
        color=looks["color"],
    )
    y = alt.Y("change:Q", title="change of perplexity, %")
    layers = [
        alt.Chart(alt.Data(values=[{"y": 0}])).mark_rule(strokeDash=[3, 3]).encode(y="y:Q"),
        base.mark_rule().encode(y=alt.Y("low:Q", title=""), y2="high:Q"),
        base.mark_point(filled=True, size=60).encode(
            y=y, shape=alt.Shape("at:N", title=None), tooltip=["reading:N", "at:N", "change:Q"]
        ),
    ]
    return alt.layer(*layers).properties(
        width=620, height=260,
        title=alt.Title("LocAteR against none, by how much text there is", anchor="start"),
        description="Change of perplexity by regime, reading, and whether the best or the last "
        "step is scored, with 95 % intervals.",
    )  # fmt: skip
