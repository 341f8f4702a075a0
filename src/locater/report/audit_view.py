"""Audits as charts and one page: a map of all heads, the detail of any, several side by side."""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Sequence
from importlib.metadata import version
from itertools import chain
from typing import Any

import altair as alt

from locater.audit import RULES, Audit, HeadRecord
from locater.errors import InputError
from locater.report.charts import SCALE, head_map, rho_axis, specification, theta_axis
from locater.report.page import Section, asset, render_page, rendered

Record = dict[str, Any]
NUMBERS = {
    "effective_tokens": "tokens that attention rests on, exp(entropy)",
    "entropy": "predicted attention entropy (nats)",
    "measured_entropy": "measured attention entropy (nats)",
    "deviation": "robust deviations from the median head",
    "logit_gap": "logits of the form against the model's, in deviations",
    "entropy_bound": "least entropy (nats)",
    "peak": "largest ρ",
    "tokens_on": "tokens on",
    "r": "r = tr W/λ",
    "xi": "ξ, trace over norm",
    "eta": "η, norm over λ",
    "trace": "tr W",
    "trace_z": "tr W in deviations of random factors",
    "frobenius_squared": "‖W‖²_F",
    "frobenius_ratio": "‖W‖_F over random factors'",
    "trace_of_square": "tr W²",
    "mean": "mean eigenvalue",
    "variance": "variance of the eigenvalues",
    "spread_ratio": "eigenvalues' deviation over random factors'",
    "spread_z": "eigenvalues' deviation, in deviations of random factors'",
    "spectral_norm": "‖W‖₂",
    "norm_ratio": "‖W‖₂ over random factors'",
    "norm_z": "‖W‖₂, in deviations of random factors'",
    "stable_rank": "stable rank",
    "asymmetry": "asymmetry",
    "nonnormality": "non-normality gap",
    "dispersion": "dispersion",
    "temperature": "λ",
}
WORDS = {"verdict": "verdict", "regime": "regime", "status": "form"}
COLORS = {  # Okabe and Ito's; the sign of each is its first letter
    "collapsed": "#D55E00",
    "uniform": "#56B4E9",
    "not judged": "#999999",
    "healthy": "#009E73",
    "verified": "#009E73",
    "partly": "#56B4E9",
    "known gap": "#D55E00",
    "unverified": "#999999",
    "late": "#0072B2",
    "middle": "#009E73",
    "early": "#CC79A7",
    "scattered": "#E69F00",
    "vanishing": "#D55E00",
}


def row_labels(rows: Sequence[HeadRecord]) -> dict[str, str]:
    """A short label for every attention module, in order: its layer, with what tells it apart."""
    parts, kinds = ({getattr(row, key) for row in rows} for key in ("part", "kind"))
    labels: dict[str, str] = {}
    for row in rows:
        words = [row.part] * (len(parts) > 1) + [row.kind] * (len(kinds) > 1) + [str(row.layer)]
        labels.setdefault(row.name, " ".join(words))
    if len(set(labels.values())) < len(labels):
        return {name: name for name in labels}
    return labels


def telling_column(audits: Sequence[Audit]) -> str:
    """What a map shows first: verdicts, or, where all are alike, how many tokens get attention."""
    words = {row.verdict for audit in audits for row in audit.rows}
    if len(audits) == 1 and len(words) > 1:
        return "verdict"
    return "measured_entropy" if all(audit.is_measured for audit in audits) else "effective_tokens"


def check_column(column: str) -> None:
    """Refuse a column that no map can show."""
    if column not in (*NUMBERS, *WORDS):
        raise InputError(
            f"no map of {column!r}.", hint="choose among: " + ", ".join((*WORDS, *NUMBERS)) + "."
        )


def audit_map_chart(audit: Audit, column: str = "effective_tokens") -> alt.Chart:
    """Layers × heads, colored by a column."""
    check_column(column)
    labels = row_labels(audit.rows)
    records = [
        {"layer": labels[row.name], "head": row.head, "value": getattr(row, column)}
        for row in audit.rows
    ]
    if column in WORDS:
        seen = [word for word in COLORS if any(record["value"] == word for record in records)]
        scale = alt.Scale(domain=seen, range=[COLORS[word] for word in seen])
        color = alt.Color("value:N", title=WORDS[column], scale=scale)
    else:
        values = [record["value"] for record in records if record["value"] is not None]
        signed = bool(values) and min(values) < 0 < max(values)
        looks = {"scheme": "blueorange", "domainMid": 0} if signed else {"scheme": "viridis"}
        color = alt.Color("value:Q", title=NUMBERS[column].split(" (")[0], scale=alt.Scale(**looks))
    return head_map(
        alt.Data(values=records),
        list(labels.values()),
        color=color,
        tooltip=["layer:N", "head:O", alt.Tooltip("value:N", title=column)],
        title=f"{audit_labels([audit])[0]}: {({**NUMBERS, **WORDS})[column]}",
        description=f"A map of the {len(records)} heads of {audit.name}, one row per layer, "
        f"colored by {column}.",
    )


def head_records(audit: Audit, row: HeadRecord, label: str) -> dict[str, list[Record]]:
    """What the three charts of one head show."""
    rho = zip(audit.positions, row.rho, strict=True)
    return {
        "eigenvalues": [
            {"checkpoint": label, "real": x, "imaginary": y}
            for x, y in zip(row.eigenvalues_real, row.eigenvalues_imag, strict=True)
        ],
        "singular": [
            {"checkpoint": label, "index": k, "value": value}
            for k, value in enumerate(row.singular_values, 1)
        ],
        "rho": [{"checkpoint": label, "theta": i / audit.tokens, "rho": y} for i, y in rho],
    }


def head_charts(
    audits: Sequence[Audit], name: str, head: int
) -> dict[str, alt.Chart | alt.LayerChart | alt.FacetChart]:
    """One head in all audits that have it: charts over data of their own names.

    The data are called `eigenvalues`, `singular` and `rho`, so that a page can put another head's
    in their place.
    """
    labels = audit_labels(audits)
    found: dict[str, list[Record]] = {"eigenvalues": [], "singular": [], "rho": []}
    for label, audit in zip(labels, audits, strict=True):
        for row in audit.rows:
            if (row.name, row.head) == (name, head):
                for key, records in head_records(audit, row, label).items():
                    found[key].extend(records)
    if not any(found.values()):
        raise InputError(
            f"no audit has head {head} of {name!r}.", hint="rows have `name` and `head`."
        )
    shown = alt.Legend(orient="top", title=None, columns=2, labelLimit=130)
    legend = shown if len(labels) > 1 else None
    colors = [SCALE[(place + 1) % len(SCALE)] for place in range(len(labels))]
    color = alt.Color("checkpoint:N", scale=alt.Scale(domain=labels, range=colors), legend=legend)
    base = {
        key: alt.Chart(alt.Data(name=key, values=records)).encode(color=color)
        for key, records in found.items()
    }
    charts: dict[str, Any] = {
        "eigenvalues": _plane(base["eigenvalues"], labels, legend),
        "singular": base["singular"]
        .mark_line(point=alt.OverlayMarkDef(size=14))
        .encode(
            x=alt.X("index:Q", title="rank", axis=alt.Axis(tickMinStep=1)),
            y=alt.Y("value:Q", title="singular value"),
            tooltip=["checkpoint:N", "index:Q", "value:Q"],
        ),
        "rho": base["rho"]
        .mark_line(clip=True)
        .encode(x=theta_axis(), y=rho_axis(), tooltip=["checkpoint:N", "theta:Q", "rho:Q"]),
    }
    return {
        key: chart.properties(width=270, height=200, description=_SPOKEN[key])
        for key, chart in charts.items()
    }


_SPOKEN = {
    "eigenvalues": "Eigenvalues of the chosen head's W_QK in the complex plane.",
    "singular": "Singular values of the chosen head's W_QK, largest first.",
    "rho": "Signal propagation probability of the chosen head by position.",
}


def _plane(
    base: alt.Chart, labels: Sequence[str], legend: alt.Legend | None
) -> alt.LayerChart | alt.FacetChart:
    """Points in the complex plane, one shape and color for each checkpoint."""
    zero = alt.Chart(alt.Data(values=[{"zero": 0}])).mark_rule(strokeDash=[2, 2], opacity=0.5)
    points = base.mark_point(size=24, filled=True, opacity=0.75).encode(
        x=alt.X("real:Q", title="real part"),
        y=alt.Y("imaginary:Q", title="imaginary part"),
        shape=alt.Shape("checkpoint:N", scale=alt.Scale(domain=list(labels)), legend=legend),
        tooltip=["checkpoint:N", "real:Q", "imaginary:Q"],
    )
    return alt.layer(zero.encode(x="zero:Q"), zero.encode(y="zero:Q"), points)


def head_chart(audits: Sequence[Audit], name: str, head: int) -> alt.HConcatChart:
    """The three charts of one head side by side, for a paper."""
    charts = head_charts(audits, name, head)
    return alt.hconcat(*charts.values(), title=f"{name}, head {head}")


def audit_exports(audits: Sequence[Audit]) -> dict[str, Record]:
    """Specifications of what the page draws by script: a map of each audit and its worst head."""
    charts: dict[str, Record] = {}
    for place, audit in enumerate((audit for audit in audits if audit.rows), 1):
        worst = audit.worst_first()[0]
        charts[f"audit-{place}"] = specification(audit_map_chart(audit, telling_column([audit])))
        charts[f"audit-{place}-head"] = specification(head_chart([audit], worst.name, worst.head))
    return charts


def audit_labels(audits: Sequence[Audit]) -> list[str]:
    """Names short enough for a legend: the end of a path, or more of it where two end alike.

    Equal names are numbered.
    """
    names = [audit.name for audit in audits]
    paths = [name.rstrip("/").split("/") for name in names]
    deepest = max(map(len, paths), default=1)
    ends = ({tuple(path[-depth:]) for path in paths} for depth in range(1, deepest))
    apart = [depth for depth, some in enumerate(ends, 1) if len(some) == len(set(names))]
    depth = min(apart, default=deepest)
    short = ["/".join(path[-depth:]) for path in paths]
    return [
        label if short.count(label) == 1 else f"{label} ({place})"
        for place, label in enumerate(short, 1)
    ]


_POSITIONS = 256
"""At most so many of a head's ρ go into the page; a screen shows no more."""
_EXTRA = ("model", "head_dim", "kv_head", "first_on", "last_on", "entropy_error")


def audit_page(audits: Sequence[Audit], *, title: str = "") -> str:
    """One self-contained HTML file about one audit, or about several to compare."""
    return render_page(
        title or "Audit: " + ", ".join(audit_labels(audits)),
        audit_sections(audits),
        intro="Where the heads can look, from their query-key weights. Choose a column, then a "
        "head: click it, or move with the arrow keys and press Enter.",
        footer=f"Made by locater {version('locater')}.",
    )


def audit_sections(audits: Sequence[Audit]) -> list[Section]:
    """The sections of that page, for a page that has others too."""
    if not audits:
        raise InputError("there is no audit to show.", hint="give at least one.")
    labeled = list(zip(audit_labels(audits), audits, strict=True))
    summary = rendered("audit.html", "summary", audits)
    basis = rendered("audit.html", "basis", labeled, RULES)
    heads = _head_sections(audits) if any(audit.rows for audit in audits) else []
    return [
        Section(key="summary", title="Summary", before=summary),
        *heads,
        Section(
            key="basis", title="What this rests on: settings, caveats", before=basis, is_folded=True
        ),
    ]


def _head_sections(audits: Sequence[Audit]) -> list[Section]:
    """Maps of all heads, the detail of one, and their ranking."""
    columns, first = {**WORDS, **NUMBERS}, telling_column(audits)
    worst = next(audit.worst_first()[0] for audit in audits if audit.rows)
    charts = head_charts(audits, worst.name, worst.head)
    specs = {key: specification(chart) for key, chart in charts.items()}
    several = len(audits) > 1
    return [
        Section(
            key="heads",
            title="All heads",
            before=rendered("audit.html", "maps", _data(audits), columns, first),
            script=asset("audit.js"),
            text="Rows are layers, columns are heads. Click a head, or move with the arrow keys "
            "and press Enter: the section below shows it.",
        ),
        Section(key="head", title="One head", before=rendered("audit.html", "detail", specs)),
        Section(
            key="table",
            title="Heads, most changed first" if several else "Heads of most concern",
            before=rendered("audit.html", "ranking"),
            text="The twenty heads that changed most in the chosen column, first against last."
            if several
            else "The twenty heads with the worst verdicts, or without any the farthest from the "
            "others; the maps have all of them.",
        ),
    ]


def _data(audits: Sequence[Audit]) -> dict[str, Any]:
    labels = audit_labels(audits)
    return {
        "numbers": NUMBERS,
        "words": WORDS,
        "colors": COLORS,
        "extra": _EXTRA,
        "audits": [_audit(label, one) for label, one in zip(labels, audits, strict=True)],
    }


def _audit(label: str, audit: Audit) -> dict[str, Any]:
    """Columns of numbers to five digits, words by number, and all lists in one packed text."""
    layers = row_labels(audit.rows)
    names = list(layers)
    columns = {
        key: [_short(getattr(row, key)) for row in audit.rows] for key in (*NUMBERS, *_EXTRA)
    }
    words = {}
    for key in (*WORDS, "reason"):
        values = list(dict.fromkeys(getattr(row, key) for row in audit.rows))
        place = {value: index for index, value in enumerate(values)}
        words[key] = {"values": values, "rows": [place[getattr(row, key)] for row in audit.rows]}
    kept = _spaced(len(audit.positions))
    packed = [_packed(row, kept) for row in audit.rows]
    order = {(row.name, row.head): place for place, row in enumerate(audit.worst_first())}
    return {
        "label": label,
        "tokens": audit.tokens,
        "theta": [_short(audit.positions[place] / audit.tokens) for place in kept],
        "modules": names,
        "layers": list(layers.values()),
        "row": [names.index(row.name) for row in audit.rows],
        "head": [row.head for row in audit.rows],
        "concern": [order[row.name, row.head] for row in audit.rows],
        "columns": columns,
        "words": words,
        "sizes": [sizes for sizes, _, _ in packed],
        "scales": [[_short(scale) for scale in scales] for _, scales, _ in packed],
        "lists": b64encode(b"".join(data for _, _, data in packed)).decode(),
    }


def _packed(row: HeadRecord, kept: Sequence[int]) -> tuple[list[int], list[float], bytes]:
    """A head's lists as 16-bit shares of their largest value: lengths, largest values, bytes."""
    plane = (*row.eigenvalues_real, *row.eigenvalues_imag)
    rho = [row.rho[place] for place in kept] if row.rho else []
    lists = (plane, row.singular_values, rho)
    scales = [max(map(abs, values), default=0.0) for values in lists]
    scales = [float(f"{1.0001 * scale:.5g}") or 1.0 for scale in scales]
    shares = chain.from_iterable(
        (max(-32767, min(32767, round(32767 * value / scale))) for value in values)
        for values, scale in zip(lists, scales, strict=True)
    )
    sizes = [len(row.eigenvalues_real), len(row.singular_values), len(rho)]
    return sizes, scales, struct.pack(f"<{len(plane) + sizes[1] + sizes[2]}h", *shares)


def _spaced(count: int) -> list[int]:
    """Places of at most so many positions, evenly spread, first and last among them."""
    if count <= _POSITIONS:
        return list(range(count))
    return [round(k * (count - 1) / (_POSITIONS - 1)) for k in range(_POSITIONS)]


def _short(value: float | int | None) -> float | int | None:
    return float(f"{value:.5g}") if isinstance(value, float) else value
