"""Training runs on a page: what they learned, how their spectra moved, where the gates are open."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import altair as alt

from locater.errors import InputError
from locater.paper.lab.run import Run
from locater.report.charts import SCALE, specification
from locater.report.page import Section, plain_markdown

Record = dict[str, Any]
_PANELS = {
    "perplexity": "valid perplexity",
    "trace": "tr W_QK",
    "frobenius_squared": "‖W_QK‖²_F",
    "entropy": "attention entropy (nats)",
}


def run_sections(runs: Sequence[Run]) -> list[Section]:
    """Curves of all runs together, ρ over the training of each, and their settings."""
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
                    title=f"Where the gates are open: {label}",
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


def run_records(label: str, run: Run) -> list[Record]:
    """One number for each panel and step; layers averaged, losses as perplexities."""
    records = []
    for name in ("trace", "frobenius_squared", "entropy"):
        for step, value in run.series(name):
            mean = sum(value) / len(value) if isinstance(value, list) else value
            records.append({"run": label, "panel": name, "step": step, "value": mean})
    for step, loss in run.series("valid_loss"):
        if loss is not None and loss < 700:
            records.append(
                {"run": label, "panel": "perplexity", "step": step, "value": math.exp(loss)}
            )
    return [record for record in records if record["value"] is not None]


def runs_chart(runs: Sequence[Run]) -> alt.ConcatChart:
    """Perplexity, trace, scale and entropy against steps, one line per run."""
    labels = run_labels(runs)
    records = [r for label, run in zip(labels, runs, strict=True) for r in run_records(label, run)]
    colors = [SCALE[place % len(SCALE)] for place in range(len(labels))]
    dashes = [[1, 0] if place < len(SCALE) else [4, 2] for place in range(len(labels))]
    legend = alt.Legend(title=None, orient="top", columns=1, labelLimit=400)
    panels = []
    for name, title in _PANELS.items():
        values = [record for record in records if record["panel"] == name]
        scale = alt.Scale(type="log") if name == "perplexity" else alt.Scale(zero=False)
        panels.append(
            alt.Chart(alt.Data(values=values))
            .mark_line(point=alt.OverlayMarkDef(size=12))
            .encode(
                x=alt.X("step:Q", axis=alt.Axis(tickCount=4)),
                y=alt.Y("value:Q", title=title, scale=scale),
                color=alt.Color(
                    "run:N", scale=alt.Scale(domain=labels, range=colors), legend=legend
                ),
                strokeDash=alt.StrokeDash(
                    "run:N", scale=alt.Scale(domain=labels, range=dashes), legend=legend
                ),
                tooltip=["run:N", "step:Q", "value:Q"],
            )
            .properties(
                width=270, height=170, description=f"{title} against steps, one line per run."
            )
        )
    return alt.concat(*panels, columns=2)


def gates_chart(label: str, run: Run) -> alt.Chart:
    """ρ of the first layer by token and step."""
    series = run.series("rho")
    steps = [step for step, _ in series]
    width = min((b - a for a, b in pairwise(steps) if b > a), default=1)
    records = [
        {"step": step, "until": step + width, "token": token, "next": token + 1, "rho": value}
        for step, layers in series
        for token, value in enumerate(layers[0], 1)
    ]
    return (
        alt.Chart(
            alt.Data(values=records),
            width=560,
            height=180,
            description=f"Heat map of ρ by token and step for {label}.",
        )
        .mark_rect()
        .encode(
            x=alt.X("step:Q", scale=alt.Scale(nice=False)),
            x2="until:Q",
            y=alt.Y("token:Q", scale=alt.Scale(nice=False, zero=False, reverse=True)),
            y2="next:Q",
            color=alt.Color("rho:Q", title="ρ", scale=alt.Scale(domain=[0, 1], scheme="viridis")),
            tooltip=["step:Q", "token:Q", "rho:Q"],
        )
    )


def _settings(labels: Sequence[str], runs: Sequence[Run]) -> Section:
    """What sets the runs apart first, then what they share."""
    configs = [asdict(run.config) for run in runs]
    lines: dict[bool, list[str]] = {True: [], False: []}
    for name in configs[0]:
        values = [plain_markdown(config[name]) for config in configs]
        lines[len(set(values)) == 1].append(f"| {name} | " + " | ".join(values) + " |")
    ends = [plain_markdown(run.final["end"] if run.final else "unfinished") for run in runs]
    head = [
        "| setting | " + " | ".join(map(plain_markdown, labels)) + " |",
        "|---" * (len(runs) + 1) + "|",
    ]
    rows = [*head, "| end | " + " | ".join(ends) + " |", *lines[False], *lines[True]]
    return Section(key="run-settings", title="Settings of the runs", text="\n".join(rows))
