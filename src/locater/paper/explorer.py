"""The explorer: ρ(θ) under sliders, computed in the reader's browser by the chart itself."""

from __future__ import annotations

from typing import Any

from locater.core.theory import ON, VANISHING
from locater.paper.curves import CORRECTED, PRINTED
from locater.report.charts import colors_of
from locater.report.page import Section, asset, rendered

Spec = dict[str, Any]
FINITE = "Gaussian, exact moments at T"
_CURVES = (PRINTED, CORRECTED, FINITE)
_START = {"xi": 10.0, "eta": 1.0, "tokens": 64, "process": "random-walk", "neighbors": 0.9}
_PROCESSES = {
    "random-walk": "random walk (the paper's)",
    "autoregressive": "autoregressive",
    "independent": "independent",
}
_DEPENDENCE = {
    # u and κ of the centered kernel; independent tokens are autoregressive ones with φ = 0
    "walk": "process == 'random-walk'",
    "row": "(2 - pow(phi, datum.i) - pow(phi, tokens - datum.i + 1) - (1 - phi))"
    " / ((1 - phi) * tokens)",
    "last_row": "(1 - pow(phi, tokens)) / ((1 - phi) * tokens)",
    "whole": "(tokens * (1 - phi * phi) - 2 * phi * (1 - pow(phi, tokens)))"
    " / pow((1 - phi) * tokens, 2)",
    "u": "datum.walk ? (datum.i - (tokens + 1) / 2) / tokens"
    " : (pow(phi, tokens - datum.i) - datum.last_row) / tokens",
    "kappa": "datum.walk ? (1 - 1 / (tokens * tokens)) / 12"
    " : (1 - 2 * datum.row + datum.whole) / (tokens * tokens) - datum.u * datum.u",
}


def _between(mean: str, deviation: str) -> str:
    """P(0 ≤ N(mean, deviation²) ≤ 1) in Vega's language."""
    return f"cumulativeNormal(1, {mean}, {deviation}) - cumulativeNormal(0, {mean}, {deviation})"


_LIMITS = {  # Eq. 6 with Lemma 1's variance as printed, and as it is
    "printed": _between("(datum.theta - 0.5) * xi * eta", "eta * sqrt(2 * datum.theta * datum.theta"
    " + 7 / 12)"),
    "corrected": _between("(datum.theta - 0.5) * xi * eta", "eta * sqrt(2 * datum.theta * "
    "(datum.theta - 1) + 7 / 12)"),
}  # fmt: skip
# the rules of locater.classify, in its order of precedence
_REGIME = (
    f"datum.peak < {VANISHING:g} ? 'vanishing' : datum.count == tokens ? 'uniform'"
    " : datum.count < datum.last - datum.first + 1 ? 'scattered' : datum.first == 1 ? 'early'"
    " : datum.last == tokens ? 'late' : 'middle'"
)


def _formulas(columns: dict[str, str]) -> list[Spec]:
    return [{"type": "formula", "as": name, "expr": text} for name, text in columns.items()]


def _data() -> list[Spec]:
    finite = {
        "theta": "datum.i / tokens",
        **_DEPENDENCE,
        **_LIMITS,
        "mean": "1 / tokens + datum.u * xi * eta",
        "deviation": "eta * sqrt(2 * datum.u * datum.u + datum.kappa)",
        "rho": _between("datum.mean", "datum.deviation"),
    }
    on = {"on": f"datum.rho >= {ON:g} * datum.peak", "place": "datum.on ? datum.i : null"}
    tokens: list[Spec] = [
        {"type": "sequence", "start": 1, "stop": {"signal": "tokens + 1"}, "as": "i"},
        *_formulas(finite),
        {"type": "joinaggregate", "ops": ["max"], "fields": ["rho"], "as": ["peak"]},
        *_formulas(on),
    ]
    summary = {
        "type": "aggregate",
        "ops": ["max", "sum", "min", "max"],
        "fields": ["peak", "on", "place", "place"],
        "as": ["peak", "count", "first", "last"],
    }
    limits = [
        {"type": "sequence", "start": 0, "stop": 201, "as": "step"},
        *_formulas({"theta": "datum.step / 200", **_LIMITS}),
        {"type": "fold", "fields": ["printed", "corrected"], "as": ["which", "rho"]},
        *_formulas({"curve": f"datum.which == 'printed' ? '{PRINTED}' : '{CORRECTED}'"}),
    ]
    return [
        {"name": "tokens_rho", "transform": tokens},
        {
            "name": "regime",
            "source": "tokens_rho",
            "transform": [summary, *_formulas({"name": _REGIME})],
        },
        {
            "name": "finite",
            "source": "tokens_rho",
            "transform": [
                {"type": "project", "fields": ["theta", "rho"]},
                *_formulas({"curve": f"'{FINITE}'"}),
            ],
        },
        {"name": "limits", "transform": limits},
        {"name": "curves", "source": ["limits", "finite"]},
    ]


def explorer_spec() -> Spec:
    """A Vega specification whose signals are ξ, η, T, the token process and its φ.

    Its data `tokens_rho`, `curves` and `regime` hold what is drawn.
    """
    names, colors = list(_CURVES), colors_of(list(_CURVES))
    dashes = [[5, 3], [1, 0], [2, 2]]
    return {
        "$schema": "https://vega.github.io/schema/vega/v6.json",
        "description": "Signal propagation probability against relative position for the chosen "
        "ξ, η, length and tokens: as printed, corrected in the limit, and with the exact moments "
        "at finite length. The table below has the numbers.",
        "width": 640,
        "height": 300,
        "padding": 5,
        "autosize": {"type": "fit", "contains": "padding"},
        "signals": [
            {"name": "width", "init": "containerSize()[0] || 640",
             "on": [{"events": "window:resize", "update": "containerSize()[0]"}]},
            *({"name": name, "value": value} for name, value in _START.items()),
            {"name": "phi", "update": "process == 'autoregressive' ? neighbors : 0"},
        ],
        "data": _data(),
        "scales": [
            {"name": "x", "type": "linear", "domain": [0, 1], "range": "width"},
            {"name": "y", "type": "linear", "domain": [0, 1], "range": "height"},
            {"name": "color", "type": "ordinal", "domain": names, "range": colors},
            {"name": "dash", "type": "ordinal", "domain": names, "range": dashes},
        ],
        "axes": [
            {"scale": "x", "orient": "bottom", "title": "relative position θ = i/T", "grid": True,
             "tickCount": 5},
            {"scale": "y", "orient": "left", "title": "ρ(θ)", "grid": True, "tickCount": 5},
        ],
        "legends": [
            {"stroke": "color", "strokeDash": "dash", "orient": "top", "symbolType": "stroke",
             "symbolStrokeWidth": 2, "labelLimit": 400,
             "columns": {"signal": "width < 560 ? 1 : 3"}}
        ],
        "marks": [_lines()],
    }  # fmt: skip


def _lines() -> Spec:
    place = {"x": {"scale": "x", "field": "theta"}, "y": {"scale": "y", "field": "rho"}}
    style = {
        "stroke": {"scale": "color", "field": "curve"},
        "strokeDash": {"scale": "dash", "field": "curve"},
        "strokeWidth": {"value": 2},
    }
    tip = "{curve: datum.curve, θ: format(datum.theta, '.3f'), ρ: format(datum.rho, '.4f')}"
    hover = {"size": {"value": 60}, "opacity": {"value": 0}, "tooltip": {"signal": tip}}
    return {
        "type": "group",
        "from": {"facet": {"name": "curve", "data": "curves", "groupby": "curve"}},
        "marks": [
            {
                "type": "line",
                "from": {"data": "curve"},
                "aria": False,
                "sort": {"field": "datum.theta"},
                "encode": {"update": {**place, **style}},
            },
            {
                "type": "symbol",
                "from": {"data": "curve"},
                "aria": False,
                "encode": {"update": {**place, **hover}},
            },
        ],
    }


def explorer_section() -> Section:
    """The sliders, the chart, the regime in words and the numbers in a table."""
    room = "locater.paper"
    return Section(
        key="explorer",
        title="Explorer: move the spectrum",
        before=rendered("explorer.html", "controls", _START, _PROCESSES, room=room),
        chart=explorer_spec(),
        after=rendered("explorer.html", "values", list(_CURVES), room=room),
        script=asset("explorer.js", room=room),
        caption="A regime is named after the tokens that are on: those whose ρ is at least half of "
        "the largest, on the dotted curve. Printed and corrected limits belong to the random walk, "
        "whatever tokens are chosen.",
    )
