"""One function per figure: records in, an Altair chart out; saving is the caller's business."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from locater.report.charts import Record, curve_chart, rho_chart


def softmax_chart(records: Sequence[Record]) -> alt.Chart:
    """Fig. 1: softmax against its piecewise-linear form, for two tokens."""
    return curve_chart(
        records,
        alt.X("gap:Q", title="ω₁ − ω₂"),
        alt.Y("value:Q", title="first entry"),
        title="Fig. 1  Softmax and its piecewise-linear form",
        description="Two curves over the difference of two logits: the softmax is smooth, the "
        "piecewise form is a straight line cut off at 0 and 1; they touch at the origin.",
    )


def rho_grid_chart(records: Sequence[Record]) -> alt.FacetChart:
    """Fig. 2: ρ(θ) over the (ξ, η) grid."""
    etas = sorted({record["eta"] for record in records})
    panel = rho_chart(records, width=118).properties(height=86)
    panel.encoding.x.axis = alt.Axis(values=[0, 0.5, 1], title="θ")
    panel.encoding.y.axis = alt.Axis(values=[0, 0.5, 1], title="ρ")
    return panel.facet(
        column=alt.Column(
            "xi:O", title="ξ = tr W / √tr W²", header=alt.Header(labelExpr="'ξ = ' + datum.value")
        ),
        row=alt.Row(
            "eta:O",
            title="η = √tr W² / λ",
            sort=etas,
            header=alt.Header(labelExpr="'η = ' + datum.value"),
        ),
        title="Fig. 2  Where the gates open: as printed, corrected, and exact at finite length",
    )


def threshold_chart(records: Sequence[Record]) -> alt.FacetChart:
    """Fig. 3: below and above the localization threshold |ξη| = 2."""
    rows = [
        {**record, "panel": f"ξ = {record['xi']:g}, ξη = {record['xi'] * record['eta']:.3g}"}
        for record in records
    ]
    return rho_chart(rows, width=320).facet(
        column=alt.Column(
            "panel:N", title=None, sort=list(dict.fromkeys(r["panel"] for r in rows))
        ),
        title="Fig. 3  Beyond ξη = 2 the late tokens go dark",
    )


def entropy_bound_chart(records: Sequence[Record]) -> alt.Chart:
    """Fig. 4: the entropy lower bound, attained and as printed."""
    return curve_chart(
        records,
        alt.X("norm:Q", title="norm ν of the logits"),
        alt.Y("entropy:Q", title="nats"),
        title="Fig. 4  The entropy lower bound falls; the printed one rises above any entropy",
        description="Entropy bound against the norm of the logits: the attained bound falls "
        "from ln T to zero, the printed one climbs past ln T and has a peak.",
    )
