"""Figures of theory against reality: plain records in, Altair charts and a page out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt

from locater.core.gaussianity import normal_quantile
from locater.files import write_file
from locater.reality.against_theory import Reality
from locater.reality.theories import COLUMNS
from locater.report.charts import SCALE, save_chart, specification
from locater.report.page import Section, plain_markdown, render_page

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


def profile_panels(records: Sequence[Record], *, title: str = "", columns: int = 3) -> Any:
    """ρ against θ in one panel per head: measured as points, predictions as lines."""
    names = [name for name in _SHOWN if any(one["curve"] == name for one in records)]
    labels = [COLUMNS[name] for name in names]
    lines = [{**one, "curve": COLUMNS[one["curve"]]} for one in records if one["curve"] in names]
    dots = [one for one in records if one["curve"] == "measured"]
    position = alt.X("theta:Q", title="θ = i/T", scale=alt.Scale(domain=[0, 1]))
    height = alt.Y("rho:Q", title="ρ", scale=alt.Scale(domain=[0, 1]))
    color = alt.Color(
        "curve:N",
        title=None,
        scale=alt.Scale(domain=labels, range=SCALE[: len(labels)]),
        legend=alt.Legend(orient="top", labelLimit=300),
    )
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
            .mark_circle(color="#222", size=14, opacity=1)
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
    return alt.concat(*charts, columns=columns).properties(
        title=alt.Title(title, subtitle=subtitle, anchor="start")
    )


def error_chart(layers: Sequence[Record], *, title: str = "") -> Any:
    """Mean error of ρ by layer, one line per prediction, on a logarithmic axis."""
    names = [
        name for name in COLUMNS if layers and isinstance(layers[0].get(f"rho_error_{name}"), float)
    ]
    kinds = {COLUMNS[name]: f"rho_error_{name}" for name in names}
    kinds["noise of counting"] = "rho_noise"
    records = [
        {"layer": layer["layer"], "prediction": label, "error": max(layer[key], 1e-4)}
        for layer in layers
        for label, key in kinds.items()
    ]
    lines = [*SCALE, "#999933", "#882255", "#44AA99"][: len(kinds) - 1]
    palette = [*lines, "#888888"]
    color = alt.Color(
        "prediction:N",
        title=None,
        sort=list(kinds),
        scale=alt.Scale(domain=list(kinds), range=palette),
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


def entropy_chart(heads: Sequence[Record], *, column: str = "given_query", title: str = "") -> Any:
    """Predicted against measured entropy, one point per head, and the diagonal."""
    top = max(max(row["entropy"], row[f"entropy_{column}"]) for row in heads)
    records = [
        {
            "layer": row["layer"],
            "head": row["head"],
            "measured": row["entropy"],
            "predicted": row[f"entropy_{column}"],
            "first": row["sink_mass"],
        }
        for row in heads
    ]
    line = (
        alt.Chart(alt.Data(values=[{"x": 0, "y": 0}, {"x": top, "y": top}]))
        .mark_line(color="#888", strokeDash=[4, 3])
        .encode(x="x:Q", y="y:Q")
    )
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
    return alt.layer(line, points).properties(
        width=300,
        height=300,
        title=title,
        description="Attention entropy of every head, predicted from weights and token moments "
        "against measured on held-out text, with the diagonal",
    )


def study_chart(study: dict[str, Record], *, title: str = "", axis: str = "") -> Any:
    """Errors against one setting, such as the blocks that moments come from."""
    records = [
        {"setting": int(setting), "kind": label, "error": row[key]}
        for setting, row in study.items()
        for key, label in (
            ("rho_error_means", "ρ, K, Σ and means"),
            ("rho_error_rotary", "ρ, K, Σ, means and rotation"),
            ("rho_error_full", "ρ, full moments"),
            ("rho_error_given_query", "ρ, full moments, given the query"),
            ("entropy_error_given_query", "entropy (nats), given the query"),
            ("rho_noise", "ρ, noise of counting"),
        )
        if key in row and not (key == "rho_error_means" and "rho_error_rotary" in row)
    ]
    return (
        alt.Chart(
            alt.Data(values=records),
            title=title,
            width=300,
            height=220,
            description=f"Errors of predicted signal propagation and entropy against {axis}",
        )
        .mark_line(point=True)
        .encode(
            x=alt.X("setting:Q", title=axis, scale=alt.Scale(type="log", base=2)),
            y=alt.Y("error:Q", title="mean error", scale=alt.Scale(type="log")),
            color=alt.Color("kind:N", title=None, scale=alt.Scale(range=SCALE)),
            tooltip=["kind:N", "setting:Q", "error:Q"],
        )
    )


def kurtosis_chart(heads: Sequence[Record], *, title: str = "") -> Any:
    """Does it matter that logits are not Gaussian: kurtosis against the error of ρ, by head."""
    return (
        alt.Chart(
            alt.Data(
                values=[
                    {"kurtosis": row["logit_kurtosis"], "error": row["rho_error_full"]}
                    | {"layer": row["layer"], "head": row["head"]}
                    for row in heads
                ]
            ),
            title=title,
            width=300,
            height=220,
            description="Error of the predicted signal propagation against the excess kurtosis of "
            "logits, one point per head",
        )
        .mark_circle(size=40, opacity=0.8)
        .encode(
            x=alt.X(
                "kurtosis:Q", title="excess kurtosis of logits", scale=alt.Scale(type="symlog")
            ),
            y=alt.Y("error:Q", title="mean error of ρ, full moments"),
            color=alt.Color("layer:Q", scale=alt.Scale(scheme="viridis")),
            tooltip=["layer:Q", "head:Q", "kurtosis:Q", "error:Q"],
        )
    )


def quantile_chart(records: Sequence[Record], *, title: str = "") -> Any:
    """Are features Gaussian: quantiles of the standardized ones against the normal law's."""
    points = [{**one, "normal": normal_quantile(one["probability"])} for one in records]
    position = alt.X("normal:Q", title="quantile of a Gaussian")
    height = alt.Y("quantile:Q", title="quantile of standardized features")
    line = (
        alt.Chart(alt.Data(values=points))
        .mark_line(color="#888", strokeDash=[4, 3])
        .encode(x=position, y=alt.Y("normal:Q"))
    )
    dots = (
        alt.Chart(alt.Data(values=points))
        .mark_circle(size=22, opacity=0.6)
        .encode(
            x=position,
            y=height,
            color=alt.Color("kind:N", title=None, scale=alt.Scale(range=SCALE)),
            tooltip=["layer:Q", "kind:N", "probability:Q", "quantile:Q"],
        )
    )
    return alt.layer(line, dots).properties(
        width=300,
        height=260,
        title=title,
        description="Quantiles of standardized tokens, queries and keys of every layer against "
        "those of a Gaussian, with the diagonal",
    )


def save_reality(reality: Reality, path: Path, *, title: str) -> Path:
    """Write a page (.html) with figures and tables, or the ρ panels alone as a figure."""
    panels = profile_panels(profile_records(reality), title=f"{title}: where the gates open")
    if path.suffix != ".html":
        return save_chart(panels, path)
    layers, heads = reality.layer_rows(), reality.rows()
    worst = sorted(heads, key=lambda row: -row["rho_error_full"])[:20]
    sections = [
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
            text=_layer_table(layers),
        ),
        Section(
            key="entropy",
            title="Entropy, predicted and measured",
            chart=specification(entropy_chart(heads)),
            caption="Every head; prediction from full moments, given the query.",
        ),
        Section(
            key="worst",
            title="The worst predicted heads",
            text="Why: the two ingredients without which the head's ρ would move the most, and "
            "how far, on average over positions.\n\n" + _head_table(worst),
        ),
    ]
    intro = (
        f"{len(heads)} heads. Moments of {reality.estimated_on} blocks of {reality.tokens} tokens; "
        f"attention measured on {reality.measured_on} other blocks, with the model's own logits."
    )
    notes = reality.warnings() + [f"skipped {n}: {why}" for n, why in reality.skipped.items()]
    if notes:
        text = "\n".join(f"- {plain_markdown(note)}" for note in notes)
        sections.append(Section(key="notes", title="What is left out", text=text))
    return write_file(path, render_page(f"Theory against reality: {title}", sections, intro=intro))


def _layer_table(layers: Sequence[Record]) -> str:
    names = [name for name in COLUMNS if isinstance(layers[0].get(f"rho_error_{name}"), float)]
    lines = [
        "| layer | " + " | ".join(COLUMNS[name] for name in names) + " | noise | entropy, full |",
        "|" + "---|" * (len(names) + 3),
    ]
    for layer in layers:
        errors = " | ".join(f"{layer[f'rho_error_{name}']:.3f}" for name in names)
        noise, entropy = layer["rho_noise"], layer["entropy_error_full"]
        lines.append(f"| {layer['layer']} | {errors} | {noise:.3f} | {entropy:.3f} |")
    return "\n".join(lines)


def _head_table(heads: Sequence[Record]) -> str:
    lines = [
        "| layer | head | entropy | predicted | first key | kurtosis | ρ error | in sample | why |",
        "|" + "---|" * 9,
    ]
    lines += [
        f"| {row['layer']} | {row['head']} | {row['entropy']:.2f} | {row['entropy_full']:.2f} | "
        f"{row['sink_mass']:.2f} | {row['logit_kurtosis']:.1f} | {row['rho_error_full']:.3f} | "
        f"{row['rho_error_in_sample_full']:.3f} | {', '.join(row['why']['main'])} |"
        for row in heads
    ]
    return "\n".join(lines)
