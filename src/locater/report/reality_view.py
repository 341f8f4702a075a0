"""Figures of theory against reality: plain records in, Altair charts and a page out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import altair as alt

from locater.reality.against_theory import Reality
from locater.reality.predictions import COLUMNS
from locater.report.charts import (
    INK,
    SCALE,
    colors_of,
    rho_axis,
    save_page,
    specification,
    theta_axis,
    told_apart,
)
from locater.report.page import Section
from locater.report.tables import Columns, markdown_table, plain_markdown

Record = dict[str, Any]
_SHOWN = ("printed", "kernel", "means", "rotary", "given_query")


def profile_records(reality: Reality, heads: int = 6) -> list[Record]:
    """ρ by position, measured and predicted, of heads from the best predicted to the worst."""
    order = sorted(reality.rows(), key=lambda row: row["rho_error_full"])
    last = len(order) - 1
    places = sorted({round(k * last / max(heads - 1, 1)) for k in range(heads)})
    records = []
    for pick in (order[place] for place in places):
        layer = next(one for one in reality.layers if one.name == pick["name"])
        curves = {name: one.profile for name, one in layer.predictions.items()}
        for curve, profile in {"measured": layer.measured.profile, **curves}.items():
            values = profile.rho[pick["head"]].tolist()
            records += [
                {
                    "panel": f"layer {layer.layer}, head {pick['head']}",
                    "curve": curve,
                    "theta": theta,
                    "rho": rho,
                }
                for theta, rho in zip(profile.theta.tolist(), values, strict=True)
            ]
    return records


def profile_panels(records: Sequence[Record], *, title: str = "") -> Any:
    """ρ against θ in one panel per head: measured as points, predictions as lines."""
    names = [name for name in _SHOWN if any(one["curve"] == name for one in records)]
    labels = [COLUMNS[name] for name in names]
    lines = [{**one, "curve": COLUMNS[one["curve"]]} for one in records if one["curve"] in names]
    dots = [one for one in records if one["curve"] == "measured"]
    position, height = theta_axis("θ = i/T"), rho_axis("ρ")
    color = told_apart("curve", labels, labelLimit=300)["color"]
    panels = list(dict.fromkeys(one["panel"] for one in records))
    charts = []
    for panel in panels:
        mine = [one for one in lines if one["panel"] == panel]
        seen = [one for one in dots if one["panel"] == panel]
        line = (
            alt.Chart(alt.Data(values=mine))
            .mark_line(clip=True)
            .encode(x=position, y=height, color=color, tooltip=["curve:N", "theta:Q", "rho:Q"])
        )
        points = (
            alt.Chart(alt.Data(values=seen))
            .mark_circle(color=INK, size=14, opacity=1)
            .encode(x=position, y=height, tooltip=["theta:Q", "rho:Q"])
        )
        charts.append(
            alt.layer(line, points).properties(
                width=210,
                height=150,
                title=panel,
                description=f"{panel}: measured signal propagation probability as points, and its "
                "predictions as lines",
            )
        )
    subtitle = "points: measured on held-out text; lines: predicted"
    return alt.concat(*charts, columns=3).properties(
        title=alt.Title(title, subtitle=subtitle, anchor="start")
    )


def error_chart(layers: Sequence[Record], *, title: str = "") -> Any:
    """Mean error of ρ by layer, one line per prediction, on a logarithmic axis."""
    kinds = {COLUMNS[name]: f"rho_error_{name}" for name in _predictions(layers)}
    kinds["noise of counting"] = "rho_noise"
    records = [
        {"layer": layer["layer"], "prediction": label, "error": max(layer[key], 1e-4)}
        for layer in layers
        for label, key in kinds.items()
    ]
    color = alt.Color(
        "prediction:N",
        title=None,
        sort=list(kinds),
        scale=alt.Scale(domain=list(kinds), range=colors_of(list(kinds))),
        legend=alt.Legend(labelLimit=300),
    )
    return (
        alt.Chart(
            alt.Data(values=records),
            title=title,
            width=460,
            height=260,
            description="Mean absolute error of the signal propagation probability by layer, one "
            "line per prediction, from the printed formula at the top to full moments",
        )
        .mark_line(point=True)
        .encode(
            x=alt.X("layer:Q", title="layer", axis=alt.Axis(tickMinStep=1)),
            y=alt.Y("error:Q", title="mean error of ρ", scale=alt.Scale(type="log")),
            color=color,
            tooltip=["layer:Q", "prediction:N", "error:Q"],
        )
    )


def _diagonal(top: float) -> Any:
    ends = alt.Data(values=[{"x": 0, "y": 0}, {"x": top, "y": top}])
    return alt.Chart(ends).mark_line(color="#888", strokeDash=[4, 3]).encode(x="x:Q", y="y:Q")


def entropy_chart(heads: Sequence[Record], *, title: str = "") -> Any:
    """Predicted against measured entropy, one point per head, and the diagonal."""
    top = max(max(row["entropy"], row["entropy_given_query"]) for row in heads)
    records = [
        {
            "layer": row["layer"],
            "head": row["head"],
            "measured": row["entropy"],
            "predicted": row["entropy_given_query"],
            "first": row["sink_mass"],
        }
        for row in heads
    ]
    points = (
        alt.Chart(alt.Data(values=records))
        .mark_circle(size=45, opacity=0.8)
        .encode(
            x=alt.X("measured:Q", title="measured entropy (nats)"),
            y=alt.Y("predicted:Q", title="predicted entropy (nats)"),
            color=alt.Color("layer:Q", title="layer", scale=alt.Scale(scheme="viridis")),
            tooltip=["layer:Q", "head:Q", "measured:Q", "predicted:Q", "first:Q"],
        )
    )
    return alt.layer(_diagonal(top), points).properties(
        width=300,
        height=300,
        title=title,
        description="Attention entropy of every head, predicted from weights and token moments "
        "against measured on held-out text, with the diagonal",
    )


def save_reality(reality: Reality, path: Path, *, title: str) -> Path:
    """Write a page (.html) with figures and tables, or the ρ panels alone as a figure."""
    panels = profile_panels(profile_records(reality), title=f"{title}: which tokens are on")
    layers, heads = reality.layer_rows(), reality.rows()
    worst = sorted(heads, key=lambda row: -row["rho_error_full"])[:20]
    columns: Columns = {
        "layer": "layer",
        **{COLUMNS[name]: f"rho_error_{name}:.3f" for name in _predictions(layers)},
        "noise": "rho_noise:.3f",
        "entropy, full": "entropy_error_full:.3f",
    }
    sections = [
        Section(
            key="entropy",
            title="Entropy, predicted and measured",
            chart=specification(entropy_chart(heads)),
            caption="Every head; prediction from full moments, given the query.",
        ),
        Section(
            key="profiles",
            title="ρ by position",
            chart=specification(panels),
            caption="Six heads, from the best predicted to the worst.",
        ),
        Section(
            key="layers",
            title="Error by layer",
            chart=specification(error_chart(layers, title="Mean error of ρ")),
            text=markdown_table(layers, columns),
        ),
        Section(
            key="worst",
            title="The worst predicted heads",
            text="Why: the two ingredients without which the head's ρ would move the most, and "
            "how far, on average over positions.\n\n" + markdown_table(worst, _HEADS),
        ),
    ]
    intro = (
        f"{len(heads)} heads. Moments of {reality.estimated_on} blocks of {reality.tokens} tokens; "
        f"attention measured on {reality.measured_on} other blocks, with the model's own logits."
    )
    notes = reality.warnings() + [f"skipped {n}: {why}" for n, why in reality.skipped.items()]
    if notes:
        text = "\n".join(f"- {plain_markdown(note)}" for note in notes)
        sections.append(Section(key="notes", title="What is left out", text=text, is_folded=True))
    return save_page(path, panels, f"Theory against reality: {title}", sections, intro=intro)


def _predictions(layers: Sequence[Record]) -> list[str]:
    """The predictions that these layers have an error of."""
    first = layers[0] if layers else {}
    return [name for name in COLUMNS if isinstance(first.get(f"rho_error_{name}"), float)]


_HEADS: Columns = {
    "layer": "layer",
    "head": "head",
    "entropy": "entropy:.2f",
    "predicted": "entropy_full:.2f",
    "first key": "sink_mass:.2f",
    "kurtosis": "logit_kurtosis:.1f",
    "ρ error": "rho_error_full:.3f",
    "in sample": "rho_error_in_sample_full:.3f",
    "why": lambda row: ", ".join(row["why"]["main"]),
}


def _ordered(name: str) -> Any:
    return lambda row: None if row["order"][name] is None else f"{row['order'][name]:.2f}"


LEAGUE: Columns = {
    "theory": "name",
    "source": "source",
    "knows": "knows",
    "about": "target",
    "kind": "kind",
    "error": "error:.3f",
    "orders": "orders:.2f",
    **{f"with {name}": _ordered(name) for name in ("entropy", "sharpness", "sink", "rank")},
    "seconds": "seconds:.2f",
    "outside its domain": lambda row: row["outside"] or None,
}


def league_chart(rows: Sequence[Record], *, title: str = "") -> Any:
    """How well every theory orders the heads by what it is about."""
    records = [
        {
            "theory": row["name"],
            "orders": row["orders"],
            "about": row["target"],
            "by": row["source"],
        }
        for row in sorted(rows, key=lambda row: -(row["orders"] or 0))
        if row["orders"] is not None
    ]
    names = [record["theory"] for record in records]
    return (
        alt.Chart(alt.Data(values=records), title=title, width=420, height=18 * len(records))
        .mark_bar()
        .encode(
            x=alt.X("orders:Q", title="rank correlation with what it is about"),
            y=alt.Y("theory:N", sort=names, title=None, axis=alt.Axis(labelLimit=280)),
            color=alt.Color("about:N", scale=alt.Scale(range=SCALE[2:])),
            tooltip=["theory:N", "by:N", "about:N", alt.Tooltip("orders:Q", format=".2f")],
        )
        .properties(description="Bars: rank correlation of heads, one bar for every theory")
    )


def save_league(league: Record, path: Path, *, title: str) -> Path:
    """Write a page (.html) with a table that sorts itself, or the bars alone as a figure."""
    chart = league_chart(league["theories"], title=title)
    measured = "\n".join(f"- **{name}**: {words}" for name, words in league["measured"].items())
    skipped = [f"- skipped {plain_markdown(f'{n}: {why}')}" for n, why in league["skipped"].items()]
    sections = [
        Section(
            key="table",
            title="Everybody's theory",
            text="error: mean |value − measured| over heads, where a theory names a number or a "
            "bound. orders: rank correlation of heads with what the theory is about, 1 where its "
            "order is right; *with …*: the same, signed, with other things measured. A click on a "
            "title sorts.\n\n" + markdown_table(league["theories"], LEAGUE, is_plain=True),
        ),
        Section(
            key="order",
            title="Who orders the heads",
            chart=specification(chart),
            caption="Rank correlation of a theory's quantity with what it is about, turned so that "
            "1 is right.",
        ),
        Section(key="measured", title="What was measured", text="\n".join([measured, *skipped])),
    ]
    intro = (
        f"{len(league['heads'])} heads. Quantities from the first half of a text in blocks of "
        f"{league['tokens']} tokens, attention measured on {league['blocks']} other blocks."
    )
    return save_page(path, chart, f"Everybody's theory: {title}", sections, intro=intro)


def change_chart(rows: Sequence[Record], *, title: str = "") -> Any:
    """Entropy before and after, one point per head with the bar of its change."""
    records = [
        {
            "layer": row["layer"],
            "head": row["head"],
            "before": row["entropy_before"],
            "after": row["entropy_after"],
            "low": max(row["entropy_after"] - row["entropy_change_bar"], 0.0),
            "high": row["entropy_after"] + row["entropy_change_bar"],
        }
        for row in rows
    ]
    top = max(max(one["before"], one["high"]) for one in records)
    base = alt.Chart(alt.Data(values=records))
    place = alt.X("before:Q", title="entropy before (nats)")
    bars = base.mark_rule(opacity=0.25).encode(x=place, y="low:Q", y2="high:Q")
    points = base.mark_circle(size=45, opacity=0.9).encode(
        x=place,
        y=alt.Y("after:Q", title="entropy after (nats)"),
        color=alt.Color("layer:Q", title="layer", scale=alt.Scale(scheme="viridis")),
        tooltip=["layer:Q", "head:Q", "before:Q", "after:Q"],
    )
    return alt.layer(_diagonal(top), bars, points).properties(
        width=380,
        height=380,
        title=title,
        description="Predicted entropy of every head before and after a change, with the diagonal",
    )


def _changes(change: Record) -> Iterator[str]:
    """What was changed, in words."""
    for name, value in change.items():
        words = name.replace("_", " ")
        if name == "query_bias":
            yield from () if value else ("no query bias",)
        elif value is True:
            yield words
        elif value not in (None, 1.0, "", False):
            yield f"{words} {value}"


def save_what_if(found: Record, path: Path, *, known: int) -> Path:
    """Write a page (.html) with a figure and a table that sorts, or the figure alone."""
    words = ", ".join(_changes(found["change"]))
    chart = change_chart(found["heads"], title=f"{found['model']}: {words}")
    names = {"entropy": ".2f", "sink_mass": ".3f", "own_mass": ".3f", "distance": ".1f",
             "largest": ".1f"}  # fmt: skip
    columns: Columns = {
        "layer": "layer",
        "head": "head",
        "change of entropy": "entropy_change:.2f",
        "±": "entropy_change_bar:.2f",
        **{
            f"{name.replace('_', ' ')} {when}": f"{name}_{when}:{form}"
            for name, form in names.items()
            for when in ("before", "after")
        },
    }
    sections = [
        Section(key="change", title="Before and after", chart=specification(chart),
                caption="The bar is the change's: nine of ten measured changes of real heads lay "
                "within it. Best guess: the change on top of what you measured."),
        Section(key="heads", title="Every head",
                text=markdown_table(found["heads"], columns)),
    ]  # fmt: skip
    intro = (
        f"{len(found['heads'])} heads at {found['tokens']} tokens, predicted from moments of "
        f"{known} blocks for Gaussian queries and keys. Nothing was run."
    )
    intro += "".join(f" Caveat: {caveat}." for caveat in found["caveats"])
    return save_page(path, chart, f"What if: {found['model']}", sections, intro=intro)
