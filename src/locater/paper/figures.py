"""Figs. 1-5: records in, an Altair chart out; of Fig. 5 also what it says to the paper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import altair as alt

from locater.paper.claims import Verdict
from locater.report.charts import Record, curve_chart, rho_axis, rho_chart, theta_axis, told_apart
from locater.simulation import Simulation


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
        title="Fig. 2  Which tokens are on: as printed, corrected, and exact at finite length",
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


def rho_records(simulation: Simulation) -> list[Record]:
    """ρ by position for every (mean, scale): simulated with its error, and exact."""
    records = []
    for mean, scale in simulation.config.pairs:
        sampled = simulation.mean_profile(mean, scale)
        exact = simulation.mean_profile(mean, scale, "exact")
        assert sampled.standard_error is not None
        columns = (sampled.theta, sampled.rho, sampled.standard_error, exact.rho)
        for theta, rho, deviation, true in zip(*(c.tolist() for c in columns), strict=True):
            records.append(
                {
                    "mean": f"{mean:g}",
                    "scale": scale,
                    "theta": theta,
                    "rho": rho,
                    "low": max(0.0, rho - 2 * deviation),
                    "high": min(1.0, rho + 2 * deviation),
                    "exact": true,
                }
            )
    return records


def entropy_records(simulation: Simulation) -> list[Record]:
    """Attention entropy for every (mean, scale), with ±2 standard errors."""
    records = []
    for mean, scale in simulation.config.pairs:
        entropy, error = simulation.mean_entropy(mean, scale)
        records.append(
            {
                "mean": f"{mean:g}",
                "scale": scale,
                "entropy": entropy,
                "low": entropy - 2 * error,
                "high": entropy + 2 * error,
            }
        )
    return records


def findings(simulation: Simulation) -> list[str]:
    """The paper's reading of Fig. 5, sentence by sentence, held against the numbers.

    Nothing is said where the pairs are no grid of several means and scales.
    """
    rows, means, scales = _grid(simulation)
    if not rows:
        return []
    most, least, wide, narrow = means[-1], means[0], scales[-1], scales[0]
    top, low = rows[most, narrow], rows[least, narrow]
    limit = math.log(simulation.config.tokens)
    shape = "Flat" if _share(low, top) >= 0.99 else "Sharp"
    size = "low" if top["entropy"] < low["entropy"] else "high"
    changes = [_entropy_change(rows[mean, wide], rows[mean, narrow]) for mean in (most, least)]
    step = f"from scale {wide:g} to {narrow:g}"
    ends = f"{top['entropy']:.2f} nats at mean {most:g}, {low['entropy']:.2f} at mean {least:g}"
    return [
        f"Does a larger mean localize ρ? {_verdict(low, top)}, from mean {least:g} to {most:g}.",
        f"Does a smaller scale, at mean {most:g}? {_verdict(rows[most, wide], top)}, {step}.",
        f"Does that raise the entropy, as Section 5 argues? At {changes[0]}; at {changes[1]}.",
        f"{shape} ρ goes with {size} entropy: {ends}, of at most {limit:.2f}.",
    ]


def fig5_verdicts(name: str, simulation: Simulation) -> list[Verdict]:
    """The paper's readings of one panel of Fig. 5; none where the pairs are no grid."""
    rows, means, scales = _grid(simulation)
    if not rows:
        return []
    most, least, wide, narrow = means[-1], means[0], scales[-1], scales[0]
    top, low, broad = rows[most, narrow], rows[least, narrow], rows[most, wide]
    gap, noise = _entropy_gap(low, top)
    limit = math.log(simulation.config.tokens)
    pairs = [(rows[mean, wide], rows[mean, narrow]) for mean in means]
    rises = [change > error for change, error in (_entropy_gap(*pair) for pair in pairs)]
    ends = (
        f"{top['entropy']:.2f} nats where ρ is localized (mean {most:g}), {low['entropy']:.2f} "
        f"where it is not (mean {least:g})"
    )
    readings = {
        "ρ localizes as the mean of the eigenvalues grows.": (
            _share(low, top) < 0.99,
            f"{_verdict(low, top)}, from mean {least:g} to {most:g}",
        ),
        "ρ localizes as the scale of the eigenvalues shrinks.": (
            _share(broad, top) < 0.99,
            f"{_verdict(broad, top)}, from scale {wide:g} to {narrow:g} at mean {most:g}",
        ),
        "Localized attention does not collapse: its entropy is high.": (
            gap > -noise and top["entropy"] > limit / 2,
            f"{ends}, of at most {limit:.2f} (± {noise:.2f})",
        ),
        "A smaller scale at a fixed mean raises the attention entropy.": (
            all(rises),
            "; ".join(f"at {_entropy_change(*pair)}" for pair in pairs),
        ),
    }
    return [
        Verdict(
            where=f"Sec. 5, Fig. 5, {name}" if "entropy" in claim else f"Fig. 5, {name}",
            claim=claim,
            outcome="reproduced" if holds else "differs",
            found=found,
            section="fig5",
        )
        for claim, (holds, found) in readings.items()
    ]


def _grid(
    simulation: Simulation,
) -> tuple[dict[tuple[float, float], Record], list[float], list[float]]:
    """Rows by (mean, scale), the means and the scales; no rows without a grid of several."""
    rows = {(row["mean"], row["scale"]): row for row in simulation.summary()}
    means, scales = (sorted({pair[k] for pair in rows}) for k in (0, 1))
    if min(len(means), len(scales)) < 2 or len(rows) < len(means) * len(scales):
        return {}, means, scales
    return rows, means, scales


def _share(before: Record, after: Record) -> float:
    return float(after["participation"] / before["participation"])


def _verdict(before: Record, after: Record) -> str:
    """Whether ρ comes to be on fewer tokens, and its participation."""
    share = _share(before, after)
    word = "Yes" if share < 0.9 else "A little" if share < 0.99 else "No"
    return (
        f"{word}: share of tokens on {before['participation']:.3f} → {after['participation']:.3f}"
    )


def _entropy_change(before: Record, after: Record) -> str:
    """What a smaller scale does to the entropy, within two standard errors."""
    gap, noise = _entropy_gap(before, after)
    word = "no change" if abs(gap) <= noise else "yes" if gap > 0 else "no, it falls"
    values = f"{before['entropy']:.3f} → {after['entropy']:.3f} (± {noise:.3f})"
    return f"mean {after['mean']:g} {word}: {values}"


def _entropy_gap(before: Record, after: Record) -> tuple[float, float]:
    """The difference and two of its standard errors."""
    noise = 2 * math.hypot(after["entropy_error"], before["entropy_error"])
    return after["entropy"] - before["entropy"], noise


def fig5_chart(simulations: Mapping[str, Simulation], *, title: str) -> alt.VConcatChart:
    """One row per setting: ρ with its band over the exact curve, and the entropy beside it."""
    rows = [_row(name, simulation) for name, simulation in simulations.items()]
    key = "color: simulated, ± 2 standard errors over the drawn W_QK; dashed: exact, and ln T"
    chart = alt.vconcat(*rows, title=alt.Title(title, subtitle=key, anchor="start"), spacing=30)
    return chart.resolve_scale(color="shared")


def _row(name: str, simulation: Simulation) -> alt.HConcatChart:
    records, scales = rho_records(simulation), sorted({s for _, s in simulation.config.pairs})
    means = list(dict.fromkeys(record["mean"] for record in records))
    color = told_apart("mean", means, title="mean of eigenvalues", symbolOpacity=1)["color"]
    base = alt.Chart().encode(x=theta_axis("θ = i/T"), color=color)
    band = base.mark_area(opacity=0.25).encode(y=alt.Y("low:Q", title="ρ"), y2="high:Q")
    line = base.mark_line(clip=True).encode(
        y=rho_axis("ρ"), tooltip=["mean:N", "scale:Q", "theta:Q", "rho:Q", "exact:Q"]
    )
    exact = base.mark_line(strokeDash=[3, 3], strokeWidth=1, color="#222", clip=True).encode(
        y="exact:Q", color=alt.value("#222"), detail="mean:N"
    )
    panels = (
        alt.layer(band, line, exact, data=alt.Data(values=records))
        .properties(
            width=150,
            height=130,
            description=f"{name}: simulated signal propagation probability by position, dashed the "
            "exact one, one panel per scale of the eigenvalues",
        )
        .facet(
            column=alt.Column(
                "scale:O",
                title=None,
                sort=scales,
                header=alt.Header(labelExpr="'scale ' + datum.value"),
            )
        )
    )
    points = alt.Chart(alt.Data(values=entropy_records(simulation))).encode(
        x=alt.X("scale:O", title="scale of eigenvalues", axis=alt.Axis(labelAngle=0)), color=color
    )
    limit = alt.Chart(alt.Data(values=[{"y": math.log(simulation.config.tokens)}])).mark_rule(
        strokeDash=[4, 3]
    )
    entropy = alt.layer(
        points.mark_line(point=True).encode(
            y=alt.Y("entropy:Q", title="attention entropy (nats)"), tooltip=["mean:N", "entropy:Q"]
        ),
        points.mark_rule().encode(y="low:Q", y2="high:Q"),
        limit.encode(y="y:Q"),
    ).properties(
        width=190,
        height=130,
        description=f"{name}: attention entropy against the scale of the eigenvalues, one line per "
        "mean; the rule is ln T",
    )
    return alt.hconcat(
        panels,
        entropy,
        title=alt.Title(name, subtitle=findings(simulation), anchor="start", fontSize=13),
    )
