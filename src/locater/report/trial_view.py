"""A trial of methods: loss and lowest entropy against the learning rate, a table, a page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import altair as alt

from locater.control.trial import Standing, Trial, spread
from locater.report.charts import save_page, specification, told_apart
from locater.report.page import Section
from locater.report.tables import Columns, markdown_table, plain_markdown


def columns(trial: Trial) -> Columns:
    """Of a standing: the loss at every learning rate, then what it comes to."""

    def loss(rate: float, one: Standing) -> str:
        runs = trial.at(one.method, rate)
        mark = "*" * sum(run.loss is None for run in runs)
        return f"{fmean(run.counted for run in runs):.3f}{mark}"

    return {
        "method": "method",
        **{f"{rate:g}": partial(loss, rate) for rate in trial.config.learning_rates},
        "best": lambda one: spread(one.loss),
        "sensitivity": lambda one: spread(one.sensitivity),
        "lowest entropy": lambda one: "-" if one.entropy is None else f"{one.entropy:.0%} of ln T",
    }


def trial_chart(trial: Trial, *, title: str = "") -> Any:
    """Two panels against the learning rate: the loss with its seeds, the lowest head's entropy."""
    records = [
        {
            "method": one.method,
            "rate": one.learning_rate,
            "seed": one.seed,
            "loss": one.counted,
            "entropy": one.entropy,
            "end": "finished" if one.loss is not None else f"diverged at step {one.diverged}",
        }
        for one in trial.runs
    ]
    base = alt.Chart(alt.Data(values=records), width=380, height=280)
    names, rates = list(trial.config.chosen), list(trial.config.learning_rates)
    log = alt.Scale(type="log", nice=False)
    panels = []
    for field, words in (
        ("loss", "held-out loss in nats (diverged: as at the start)"),
        ("entropy", "lowest head's entropy / ln T"),
    ):
        axis = alt.Y(f"mean({field}):Q", title=words, scale=alt.Scale(zero=field == "entropy"))
        looks = told_apart("method", names, symbolOpacity=1)
        shown = base.encode(
            x=alt.X("rate:Q", title="learning rate", scale=log, axis=alt.Axis(values=rates)),
            color=looks["color"],
        )
        lines = shown.mark_line().encode(y=axis, strokeDash=looks["strokeDash"])
        points = shown.mark_point(filled=True, size=30, opacity=0.7).encode(
            y=alt.Y(f"{field}:Q", title=words),
            shape=alt.Shape("is_over:N", legend=None, scale=alt.Scale(range=["circle", "cross"])),
            tooltip=["method:N", "rate:Q", "seed:Q", "loss:Q", "entropy:Q", "end:N"],
        )
        points = points.transform_calculate(is_over="datum.end != 'finished'")
        band = shown.mark_area(opacity=0.15).encode(
            y=alt.Y(f"min({field}):Q", title=words), y2=f"max({field}):Q"
        )
        panels.append(
            alt.layer(band, lines, points).properties(
                title=words.split(" in ")[0].split(" /")[0],
                description=f"{words} against the learning rate, one line for each of "
                f"{', '.join(names)}; the band spans the seeds.",
            )
        )
    return alt.hconcat(*panels, title=title)


def save_trial(trial: Trial, path: Path, *, title: str) -> Path:
    """Write a page (.html) with the picture, the sentence and the table, or the picture alone."""
    chart = trial_chart(trial, title=title)
    config = trial.config
    table = markdown_table(trial.standings(), columns(trial), is_plain=True)
    sections = [
        Section(
            key="picture",
            title="Loss and entropy against the learning rate",
            chart=specification(chart),
            caption="Each line is the mean over seeds, the band spans them, a point is a run.",
        ),
        Section(
            key="table",
            title="The methods, the lowest loss first",
            text=f"{table}\n\nA star is a run that diverged; it counts with its loss at the start. "
            "Sensitivity is the mean over learning rates of the loss above the method's best "
            "(Wortsman et al. 2023). ± is a standard error over seeds.",
        ),
    ]
    intro = (
        f"**{plain_markdown(trial.sentence())}** {len(trial.runs)} runs of {config.steps} steps, "
        f"{config.batch} blocks of {config.tokens} tokens each."
    )
    return save_page(path, chart, f"Trial: {title}", sections, intro=intro)
