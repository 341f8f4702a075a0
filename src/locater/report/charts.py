"""What charts share: colors, ρ against θ, and every format that a chart is saved in."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from locater.errors import ConfigError, MissingExtraError
from locater.files import write_file

try:
    import altair as alt
    import vl_convert
except ImportError as error:  # pragma: no cover - the dev environment has it
    raise MissingExtraError("altair or vl-convert-python", extra="report") from error

Record = dict[str, Any]

# Okabe and Ito's palette, which color-blind readers can tell apart; the paper is always vermilion
_PRINTED, _RIGHT, _EXACT = "#D55E00", "#0072B2", "#222222"
SCALE = [_PRINTED, _RIGHT, "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]


def curve_color(records: Sequence[Record]) -> tuple[alt.Color, alt.StrokeDash]:
    """Color and dash by curve, in the order of the records; the same legend for both."""
    names = list(dict.fromkeys(record["curve"] for record in records))
    colors = SCALE[: len(names)]
    dashes = [[5, 3], [1, 0], [2, 2], [8, 2], [1, 3], [4, 1]][: len(names)]
    legend = alt.Legend(title=None, orient="top", labelLimit=400)
    return (
        alt.Color(
            "curve:N", scale=alt.Scale(domain=names, range=colors), legend=legend, sort=names
        ),
        alt.StrokeDash(
            "curve:N", scale=alt.Scale(domain=names, range=dashes), legend=legend, sort=names
        ),
    )


def rho_chart(records: Sequence[Record], *, title: str = "", width: int = 420) -> alt.Chart:
    """ρ against θ, one line per curve: a panel of Figs. 2 and 3."""
    color, dash = curve_color(records)
    return (
        alt.Chart(
            alt.Data(values=list(records)),
            title=title,
            description="Signal propagation probability by relative position, one line per way of "
            "computing it: " + ", ".join(dict.fromkeys(record["curve"] for record in records)),
            width=width,
            height=240,
        )
        .mark_line(clip=True)
        .encode(
            x=alt.X("theta:Q", title="relative position θ = i/T", scale=alt.Scale(domain=[0, 1])),
            y=alt.Y("rho:Q", title="ρ(θ)", scale=alt.Scale(domain=[0, 1])),
            color=color,
            strokeDash=dash,
            tooltip=["curve:N", "theta:Q", alt.Tooltip("rho:Q", format=".4f")],
        )
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


_SUFFIXES = (".html", ".svg", ".png", ".pdf", ".json")


def save_chart(chart: alt.TopLevelMixin | dict[str, Any], path: Path) -> Path:
    """Write a chart as .html (self-contained), .svg, .png, .pdf or .json (the specification)."""
    check_suffix(path)
    spec = chart if isinstance(chart, dict) else specification(chart)
    kind = "vega" if "/schema/vega/" in spec.get("$schema", "") else "vegalite"
    writers: dict[str, Callable[[dict[str, Any]], str | bytes]] = {
        ".html": lambda spec: getattr(vl_convert, f"{kind}_to_html")(spec, bundle=True),
        ".svg": getattr(vl_convert, f"{kind}_to_svg"),
        ".png": lambda spec: getattr(vl_convert, f"{kind}_to_png")(spec, scale=2),
        ".pdf": getattr(vl_convert, f"{kind}_to_pdf"),
        ".json": json.dumps,
    }
    return write_file(path, writers[path.suffix](spec))
