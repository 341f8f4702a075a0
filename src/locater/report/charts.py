"""What charts share: colors, ρ against θ, and every format that a chart is saved in."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from locater.errors import ConfigError, needing
from locater.files import write_file
from locater.report.page import Section, render_page

with needing("altair or vl-convert-python", extra="report"):
    import altair as alt
    import vl_convert

Record = dict[str, Any]

# Okabe and Ito's palette, which color-blind readers can tell apart
SCALE = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
INK = "#222222"
"""What was measured, and the run without anything: it follows the paper, light or dark."""
_PRINTED, _OURS, *_OTHERS = SCALE
_MEANINGS = {
    "as printed": _PRINTED, "following the text": _PRINTED,
    "corrected": "#44AA99",
    "exact": _OURS, "Gaussian, exact": _OURS, "attained": _OURS, "piecewise": _OURS,
    "full moments": _OURS,
    "measured K": "#CC79A7", "+ means": "#E69F00", "+ rotation": "#009E73",
    "exact walk": "#882255", "… exact law": "#999933", "full moments, Gaussian": "#B8A02A",
    "clusters": "#AA4499",
    "measured": INK, "softmax": INK, "none": INK, "without": INK,
    "largest": "#888888", "noise": "#888888", "no theory": "#888888",
    "following the captions": "#009E73",
}  # fmt: skip
"""A prediction has one color everywhere, known by how its name begins: the paper's is vermilion,
the best of ours blue."""
_DASHES = [[5, 3], [1, 0], [2, 2], [8, 2], [1, 3], [4, 1]]
_SUFFIXES = (".html", ".svg", ".png", ".pdf", ".json")


def colors_of(names: Sequence[Any]) -> list[str]:
    """The color of each name; one without a meaning gets a color that is neither paper nor ours."""
    known = [
        max((key for key in _MEANINGS if str(name).startswith(key)), key=len, default=None)
        for name in names
    ]
    free = [*(c for c in _OTHERS if c not in {_MEANINGS[k] for k in known if k}), *_OTHERS]
    return [
        _MEANINGS[key] if key else free[known[:place].count(None) % len(free)]
        for place, key in enumerate(known)
    ]


def told_apart(
    field: str,
    names: Sequence[str],
    *,
    title: str | None = None,
    colors: list[str] | None = None,
    dashes: list[list[int]] = _DASHES,
    **legend: Any,
) -> dict[str, Any]:
    """Color and dash of lines by the name in a field, in this order, under one legend."""
    names = list(names)
    shown = alt.Legend(title=title, orient="top", **{"labelLimit": 400, **legend})
    color = alt.Scale(domain=names, range=colors or colors_of(names))
    dash = alt.Scale(domain=names, range=dashes[: len(names)])
    return {
        "color": alt.Color(f"{field}:N", scale=color, legend=shown, sort=names),
        "strokeDash": alt.StrokeDash(f"{field}:N", scale=dash, legend=shown, sort=names),
    }


def theta_axis(title: str = "relative position θ = i/T") -> alt.X:
    """θ from 0 to 1."""
    return alt.X("theta:Q", title=title, scale=alt.Scale(domain=[0, 1]))


def rho_axis(title: str = "ρ(θ)") -> alt.Y:
    """ρ from 0 to 1."""
    return alt.Y("rho:Q", title=title, scale=alt.Scale(domain=[0, 1]))


def curve_chart(
    records: Sequence[Record], x: alt.X, y: alt.Y, *, title: str, description: str, width: int = 420
) -> alt.Chart:
    """One line for each `curve` of the records: Figs. 1-4."""
    names = list(dict.fromkeys(record["curve"] for record in records))
    shown = [x.shorthand, alt.Tooltip(y.shorthand, format=".4f")]
    return (
        alt.Chart(
            alt.Data(values=list(records)),
            title=title,
            description=description,
            width=width,
            height=240,
        )
        .mark_line(clip=True)
        .encode(x=x, y=y, tooltip=["curve:N", *shown], **told_apart("curve", names))
    )


def rho_chart(records: Sequence[Record], *, title: str = "", width: int = 420) -> alt.Chart:
    """ρ against θ, one line per curve: a panel of Figs. 2 and 3."""
    names = ", ".join(dict.fromkeys(record["curve"] for record in records))
    description = (
        "Signal propagation probability by relative position, one line per way of computing it: "
        + names
    )
    axes = theta_axis(), rho_axis()
    return curve_chart(records, *axes, title=title, description=description, width=width)


def head_map(
    data: alt.Data, layers: list[str], *, color: alt.Color, tooltip: list[Any], **more: Any
) -> alt.Chart:
    """Layers × heads as colored cells, the layers in this order."""
    cells = alt.Chart(data, width=alt.Step(18), height=alt.Step(18), **more).mark_rect()
    return cells.encode(
        x=alt.X("head:O", axis=alt.Axis(labelAngle=0, labelOverlap=True)),
        y=alt.Y("layer:O", sort=layers),
        color=color,
        tooltip=tooltip,
    )


def specification(chart: alt.TopLevelMixin) -> dict[str, Any]:
    """The Vega-Lite specification; held against the schema by the tests, not at every use."""
    spec: dict[str, Any] = chart.to_dict(validate=False)
    return spec


def check_suffix(path: Path) -> None:
    """Refuse a file name that says no kind of figure."""
    if path.suffix not in _SUFFIXES:
        raise ConfigError(
            f"cannot write a figure as {path.name!r}.", hint="use one of: " + ", ".join(_SUFFIXES)
        )


def save_chart(chart: alt.TopLevelMixin | dict[str, Any], path: Path) -> Path:
    """Write a chart as .html (a page, light or dark), .svg, .png, .pdf or .json (its data)."""
    check_suffix(path)
    spec = chart if isinstance(chart, dict) else specification(chart)
    kind = "vega" if "/schema/vega/" in spec.get("$schema", "") else "vegalite"
    writers: dict[str, Callable[[dict[str, Any]], str | bytes]] = {
        ".html": lambda spec: render_page(path.stem, [Section(key="figure", title="", chart=spec)]),
        ".svg": getattr(vl_convert, f"{kind}_to_svg"),
        ".png": lambda spec: getattr(vl_convert, f"{kind}_to_png")(spec, scale=2),
        ".pdf": getattr(vl_convert, f"{kind}_to_pdf"),
        ".json": json.dumps,
    }
    return write_file(path, writers[path.suffix](spec))


def save_page(
    path: Path, chart: alt.TopLevelMixin, title: str, sections: Sequence[Section], *, intro: str
) -> Path:
    """Write these sections as a page (.html), or the chart alone as a figure."""
    if path.suffix != ".html":
        return save_chart(chart, path)
    return write_file(path, render_page(title, sections, intro=intro))
