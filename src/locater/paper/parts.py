"""The parts of the reproduction: each makes sections and verdicts from what it has run.

A new part is a function from a `Context` to a `Result` and a row in `PARTS`.
"""

from __future__ import annotations

from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from locater.paper import claims, curves, lab_parts
from locater.paper.explorer import explorer_section
from locater.paper.fig5 import fig5_chart, fig5_verdicts
from locater.paper.part import Context, Part, Result, Scale
from locater.report import charts as figures
from locater.report.page import Section
from locater.simulation import preset, simulate


def _chart_section(key: str, title: str, chart: Any, caption: str) -> Section:
    return Section(key=key, title=title, chart=figures.specification(chart), caption=caption)


def _fig1(context: Context) -> Result:
    records = curves.softmax_curves()
    section = _chart_section(
        "fig1",
        "Figure 1: softmax and its piecewise form",
        figures.softmax_chart(records),
        "A token's gate is open where the piecewise line is neither 0 nor 1. The two touch at "
        "the origin only: ρ tells where gradients pass the linearized softmax, not how much "
        "attention a token gets.",
    )
    return Result(sections=(section,), verdicts=(claims.fig1_verdict(records),))


def _fig2(context: Context) -> Result:
    records = curves.rho_grid()
    section = _chart_section(
        "fig2",
        "Figure 2: ρ(θ) over the (ξ, η) grid",
        figures.rho_grid_chart(records),
        "With the right variance (blue) attention localizes more sharply than printed (vermilion): "
        "at ξ = 10, η = 1 the peak is .91, not .36. At ξ = 0 it is the middle that stays open, not "
        "all tokens alike. At finite length (green) and small η every gate is open: the 1/T that "
        "the paper drops decides.",
    )
    return Result(sections=(section,), verdicts=tuple(claims.fig2_verdicts(records)))


def _fig3(context: Context) -> Result:
    records = curves.threshold_curves()
    section = _chart_section(
        "fig3",
        "Figure 3: the localization threshold",
        figures.threshold_chart(records),
        "Below ξη = 2 all late tokens are on, above it only those up to θ = 1/2 + 1/(ξη). This "
        "figure of the paper is right; η is 0.01, not the 0.02 of its text.",
    )
    return Result(sections=(section,), verdicts=(claims.fig3_verdict(records),))


def _fig4(context: Context) -> Result:
    records = curves.entropy_curves()
    section = _chart_section(
        "fig4",
        "Figure 4: the entropy lower bound",
        figures.entropy_bound_chart(records),
        "The bound that logits of a given norm attain only falls. The printed one exceeds ln T, "
        "the largest entropy there is, for every ν up to 10: its peak, and the advice drawn from "
        "it, are artefacts of a misprint.",
    )
    return Result(sections=(section,), verdicts=(claims.fig4_verdict(records),))


def _fig5(context: Context) -> Result:
    """The paper's two panels, then others; resumed where it was interrupted."""
    panels = preset("fig5")
    total, done, simulations = sum(panel.units for panel in panels.values()), 0, {}
    for name, panel in panels.items():
        before = done

        def report(units: int, _: int, before: int = before) -> None:
            context.progress(before + units, total)

        simulations[name] = simulate(panel, store=context.store / "simulate", report=report)
        done += panel.units
    items = list(simulations.items())
    paper, beyond = dict(items[:2]), dict(items[2:])
    section = _chart_section(
        "fig5",
        "Figure 5: simulated signal propagation",
        fig5_chart(
            paper, title="Fig. 5  Simulated ρ (color, ± 2 s.e.) over the exact one (dashed)"
        ),
        "300 sequences for each of 10 drawn W_QK, 40 tokens, 128 dimensions. Left, ρ by position: "
        "how far do few tokens stand out? Right, the entropy of attention. What the numbers say to "
        "the paper's readings stands above each row and in the verdicts.",
    )
    other = _chart_section(
        "fig5-beyond",
        "Figure 5, beyond the paper: other tokens, asymmetric forms",
        fig5_chart(beyond, title="Fig. 5 for other tokens and for asymmetric W_QK"),
        "Does localization survive without a random walk, and for asymmetric forms? Compare each "
        "row's answers with those above.",
    )
    verdicts = [verdict for name, made in paper.items() for verdict in fig5_verdicts(name, made)]
    return Result(sections=(section, other), verdicts=tuple(verdicts))


def _claims(context: Context) -> Result:
    """Verdicts alone: what is right instead stands in the errata."""
    return Result(sections=(), verdicts=tuple(claims.theory_verdicts()))


def _explorer(context: Context) -> Result:
    return Result(sections=(explorer_section(),))


def _errata(context: Context) -> Result:
    text = errata_text().split("\n", 1)[1]
    section = Section(key="errata", title="What the paper says, and what is right", text=text)
    return Result(sections=(section,))


def errata_text() -> str:
    """`docs/errata.md`, from the installed package or from the source tree."""
    packaged = files("locater.paper") / "errata.md"
    if packaged.is_file():
        return packaged.read_text(encoding="utf-8")
    return (Path(__file__).parents[3] / "docs" / "errata.md").read_text(encoding="utf-8")


def _always(seconds: float) -> dict[Scale, float]:
    return {"quick": seconds, "cpu": seconds, "paper": seconds}


def _hours(quick_seconds: float, cpu: float, paper: float) -> dict[Scale, float]:
    return {"quick": quick_seconds, "cpu": 3600 * cpu, "paper": 3600 * paper}


_LARGE: tuple[Scale, ...] = ("cpu", "paper")


PARTS: dict[str, Part] = {
    "explorer": Part(_explorer, _always(0.5)),
    "fig1": Part(_fig1, _always(0.5)),
    "fig2": Part(_fig2, _always(4)),
    "fig3": Part(_fig3, _always(0.5)),
    "fig4": Part(_fig4, _always(0.5)),
    "fig5": Part(_fig5, _always(25)),
    "fig6": Part(partial(lab_parts.curves_part, figure="fig6"), _hours(60, 2.5, 30)),
    "fig7": Part(lab_parts.gates_part, _hours(5, 0.1, 1)),
    **{
        figure: Part(partial(lab_parts.curves_part, figure=figure), _hours(0, 0.5, 30), _LARGE)
        for figure in ("fig8", "fig9", "fig10", "fig11", "fig12")
    },
    "models": Part(lab_parts.audit_part, _hours(5, 0.01, 0.01)),
    "published": Part(lab_parts.published_part, _always(0.5)),
    "reality": Part(lab_parts.reality_part, _hours(20, 0.02, 0.02)),
    "claims": Part(_claims, _always(2)),
    "errata": Part(_errata, _always(0.5)),
}
"""In the order of the page."""
