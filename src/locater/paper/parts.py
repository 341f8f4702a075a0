"""The parts of the reproduction: each is given a context and makes sections and verdicts.

A new part is a function from a `Context` to a `Result` and a row in `PARTS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from locater.audit import audit_model
from locater.errors import guarded
from locater.paper import claims, curves, figures
from locater.paper.claims import Verdict
from locater.paper.explorer import explorer_section
from locater.paper.figures import fig5_chart, fig5_verdicts
from locater.paper.lab.claims import (
    curve_verdicts,
    effects,
    gates_verdicts,
    protocol_finding,
    protocol_regimes,
    protocol_table,
    protocol_verdicts,
)
from locater.paper.lab.figures import (
    bands_chart,
    curves_chart,
    effects_chart,
    heat_chart,
    setting_name,
)
from locater.paper.lab.presets import Setting, Sweep, sweep_named
from locater.paper.lab.run import Run
from locater.paper.lab.summary import markdown, summarize
from locater.paper.lab.sweep import SweepFolders, run_sweep
from locater.paper.lab.train import load_trained
from locater.reality.against_theory import RealityConfig, against_theory
from locater.report.audit_view import audit_exports, audit_sections
from locater.report.charts import specification
from locater.report.page import Section
from locater.report.reality_view import profile_panels, profile_records
from locater.report.tables import Columns, markdown_table, plain_markdown
from locater.simulation import preset, simulate

Record = dict[str, Any]
Scale = Literal["quick", "cpu", "paper"]
_BLOCKS = {"quick": 1200, "cpu": 2400, "paper": 2400}
"""Blocks of text that theory is held against; half of them for the moments."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a part may know and use."""

    scale: Scale
    store: Path
    """A folder for what the part wants to find again after an interruption."""
    data: Path | None = None
    """Where the text lies that models are trained on."""
    results: Path | None = None
    """Published runs, which are not trained again."""
    reality: Path | None = None
    """Published studies of real models."""
    train: bool = True
    """Otherwise only runs that are finished are taken, and parts that need a model left out."""
    progress: Callable[[int, int], None] = lambda done, total: None
    say: Callable[[str], None] = lambda _: None


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a part made; plain enough for JSON."""

    sections: tuple[Section, ...]
    verdicts: tuple[Verdict, ...] = ()
    finding: str = ""
    """What it came to, in one sentence of Markdown, for the top of the page."""
    exports: Mapping[str, Record] = field(default_factory=dict)
    """Figures for papers beside those of the sections: specifications by name."""

    def to_dict(self) -> Record:
        """Plain data that `from_dict` takes back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Result:
        """Read it back."""
        return cls(
            sections=tuple(Section(**section) for section in data["sections"]),
            verdicts=tuple(Verdict(**verdict) for verdict in data["verdicts"]),
            finding=data["finding"],
            exports=data["exports"],
        )


@dataclass(frozen=True)
class Part:
    """How a part is made, and about how long it takes on two cores."""

    make: Callable[[Context], Result]
    group: str
    """What it stands under in the page's contents."""
    seconds: Mapping[Scale, float]
    scales: tuple[Scale, ...] = ("quick", "cpu", "paper")
    """Where it is made unless only other parts are asked for."""


def theory_part(
    _: Context,
    *,
    key: str,
    title: str,
    records: Callable[[], list[Record]],
    chart: Callable[[list[Record]], Any],
    verdicts: Callable[[list[Record]], list[Verdict]],
    caption: str,
) -> Result:
    """One of Figs. 1-4: its records, the chart of them and what they say to the paper."""
    made = records()
    section = _chart_section(key, title, chart(made), caption)
    return Result(sections=(section,), verdicts=tuple(verdicts(made)))


def _chart_section(
    key: str, title: str, chart: Any, caption: str, text: str = "", *, folded: str = ""
) -> Section:
    return Section(
        key=key,
        title=title,
        chart=specification(chart),
        caption=caption,
        text=text,
        folded=folded,
    )


_FIG1 = partial(
    theory_part,
    key="fig1",
    title="Figure 1: softmax and its piecewise form",
    records=curves.softmax_curves,
    chart=figures.softmax_chart,
    verdicts=claims.fig1_verdicts,
    caption="A token is on where the piecewise line is neither 0 nor 1. The two touch at "
    "the origin only: ρ tells where gradients pass the linearized softmax, not how much attention "
    "a token gets.",
)
_FIG2 = partial(
    theory_part,
    key="fig2",
    title="Figure 2: ρ(θ) over the (ξ, η) grid",
    records=curves.rho_grid,
    chart=figures.rho_grid_chart,
    verdicts=claims.fig2_verdicts,
    caption="With the right variance (teal) attention localizes more sharply than printed "
    "(vermilion): at ξ = 10, η = 1 the peak is .91, not .36. At ξ = 0 it is the middle that stays "
    "on, not all tokens alike. At finite length (blue) and small η every token is on: the 1/T "
    "that the paper drops decides.",
)
_FIG3 = partial(
    theory_part,
    key="fig3",
    title="Figure 3: the localization threshold",
    records=curves.threshold_curves,
    chart=figures.threshold_chart,
    verdicts=claims.fig3_verdicts,
    caption="Below ξη = 2 all late tokens are on, above it only those up to θ = 1/2 + 1/(ξη). This "
    "figure of the paper is right; η is 0.01, not the 0.02 of its text.",
)
_FIG4 = partial(
    theory_part,
    key="fig4",
    title="Figure 4: the entropy lower bound",
    records=curves.entropy_curves,
    chart=figures.entropy_bound_chart,
    verdicts=claims.fig4_verdicts,
    caption="The bound that logits of a given norm attain only falls. The printed one exceeds ln "
    "T, the largest entropy there is, for every ν up to 10: its peak, and the advice drawn from "
    "it, are artefacts of a misprint.",
)


def simulated_part(context: Context) -> Result:
    """Fig. 5: the paper's two panels, then others; resumed where it was interrupted."""
    panels = preset("fig5")
    total, done, simulations = sum(panel.units for panel in panels.values()), 0, {}
    for name, panel in panels.items():
        before = done

        def report(units: int, _: int, before: int = before) -> None:
            context.progress(before + units, total)

        simulations[name] = simulate(
            panel, store=context.store / "simulate", report=report, say=context.say
        )
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


def curves_part(context: Context, figure: str) -> Result:
    """One of Figs. 6 and 8-12: spectrum, entropy and perplexity in training."""
    sweep, runs = _trained(context, figure)
    section = _chart_section(
        figure,
        f"Figure {figure.removeprefix('fig')}: LocAteR in training",
        curves_chart(sweep, runs),
        "Dashed: without LocAteR. Does the scale (B) shrink as κ₂ grows, does entropy (C) rise, "
        "does perplexity (D) fall below the dashed line? The text and the captions of the paper "
        "disagree on what κ₂ weighs, so each row shows one reading.",
        markdown(summarize(sweep, runs)),
        folded=_shared_settings(sweep),
    )
    return Result(sections=(section,), verdicts=tuple(curve_verdicts(sweep, runs, figure)))


def gates_part(context: Context) -> Result:
    """Fig. 7: which tokens are on while the model trains."""
    sweep, runs = _trained(context, "fig7")
    section = _chart_section(
        "fig7",
        "Figure 7: signal propagation in training",
        heat_chart(sweep, runs),
        "Light: the gradient of that token's attention passes. Look for stripes: positions that "
        "stay open while others close, with LocAteR more than without.",
        folded=_shared_settings(sweep),
    )
    return Result(sections=(section,), verdicts=tuple(gates_verdicts(sweep, runs, "fig7")))


def protocol_part(context: Context) -> Result:
    """Does LocAteR lower perplexity?  The runs that docs/protocol.md announced."""
    if context.results is None:
        return Result(sections=())
    regimes = protocol_regimes(context.results)
    others = regimes.pop("passes-3-others")
    verdicts = protocol_verdicts(regimes, others, "protocol")
    section = _chart_section(
        "protocol",
        "Does LocAteR lower perplexity?",
        effects_chart(effects(regimes)),
        "Above the dashed line LocAteR costs, below it gains; bars are 95 % intervals over seeds. "
        "docs/protocol.md, written before the runs, says what is compared and when a difference "
        "counts.",
        protocol_table(regimes),
    )
    finding = protocol_finding(regimes)
    finding = finding and f"{finding} [All of it](#protocol)."
    passes = {name: pair for name, pair in regimes.items() if name != "tuned"}
    bands = _chart_section(
        "passes",
        "Many passes over little text",
        bands_chart(passes),
        "Perplexity on all of the valid text falls, then rises again as a model learns its text by "
        "heart. The verdicts score each run at its best.",
        f"What else would do it:\n\n{markdown(summarize(*others))}",
    )
    gates = _chart_section(
        "fig7-passes",
        "Figure 7 after a hundred passes",
        heat_chart(*regimes["passes-15"]),
        "As in Fig. 7, but over 50,000 steps at the paper's learning rate. Do tokens close in "
        "bulk or in stripes? What closes them is asked in docs/lab.md.",
    )
    after = " Asked after a look at the runs."
    verdicts += gates_verdicts(*regimes["passes-15"], "fig7-passes", note=after)
    sections = (section, bands, gates)
    return Result(sections=sections, verdicts=tuple(verdicts), finding=finding)


def audit_part(context: Context) -> Result:
    """The heads of the models of Fig. 7, as `locater audit` shows them."""
    if not context.train:
        return Result(sections=())
    sweep, _ = _trained(context, "fig7")
    audits = []
    for setting, path in _folders(context, sweep):
        model, _ = load_trained(path, data=_data(context, sweep))
        audit = audit_model(model, tokens=model.config.length)
        audits.append(replace(audit, name=setting_name(setting)))
    first, *rest = audit_sections(audits)
    sections = (replace(first, title="The trained models, audited"), *rest)
    return Result(sections=sections, exports=audit_exports(audits))


def reality_part(context: Context) -> Result:
    """Theory against the models that were just trained, on text that they have not seen."""
    if not context.train:
        return Result(sections=())
    sweep, _ = _trained(context, "fig7")
    studies: list[Record] = []
    for setting, path in _folders(context, sweep):
        model, material = load_trained(path, data=_data(context, sweep))
        source, count = material.whole_valid, _BLOCKS[context.scale]
        blocks = torch.cat([source.at(step)[0] for step in range(source.steps_per_epoch)])[:count]
        found = against_theory(model, blocks, RealityConfig())
        profiles = profile_records(found, heads=2)
        studies.append(
            {"model": setting_name(setting), "summary": found.summary(), "profiles": profiles}
        )
    printed, ours = (
        [study["summary"][f"rho_error_{name}"] for study in studies] for name in ("printed", "full")
    )
    verdict = Verdict(
        where="Sec. 4",
        claim="The eigenspectrum tells where attention looks (for random-walk tokens).",
        outcome="differs" if max(printed) > 0.1 else "reproduced",
        found=f"on trained heads the printed formula misses ρ by {max(printed):.2f} on average "
        f"over positions; with the tokens' measured moments the theory misses it by "
        f"{max(ours):.3f} (the worst model of each)",
        section="reality",
    )
    section = _reality_section(
        studies,
        key="reality",
        title="Theory against reality, on the models just trained",
        chart_title="ρ of the trained heads, measured and predicted",
        caption=_COUNTED,
        intro="Mean |error| of ρ over positions, and attention entropy in nats.",
        columns={
            "ρ as printed": "rho_error_printed:.3f",
            "K, Σ, means": "rho_error_means:.3f",
            "full moments": "rho_error_full:.3f",
            "noise of counting": "rho_noise:.3f",
            "entropy": "entropy:.3f",
            "error of the predicted": "entropy_error_full:.3f",
        },
    )
    told = (
        f"**Of heads just trained, the printed formula misses ρ by {_range(printed)}**, the theory "
        f"with the tokens' measured moments by {_range(ours)} ([the heads](#reality))."
    )
    return Result(sections=(section,), verdicts=(verdict,), finding=told)


def published_part(context: Context) -> Result:
    """Real models that others have trained, as `benchmarks/study_reality.py` found them."""
    with guarded(
        f"what lies in {context.reality}", hint="take away what study_reality.py did not write."
    ):
        return _published(context)


def _published(context: Context) -> Result:
    paths = sorted(context.reality.glob("*.json")) if context.reality else []
    studies = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    studies = [study for study in studies if study["side"]]  # not the laboratory's own
    if not studies:
        return Result(sections=())
    section = _reality_section(
        studies,
        key="published",
        title="Theory against reality, on models that others trained",
        chart_title="ρ of real heads",
        caption=f"Heads from the best predicted to the worst. {_COUNTED} Measured beforehand; "
        "docs/theory-vs-reality.md has the study.",
        intro="Mean |error| over heads and positions.",
        columns={
            "heads": "heads",
            "ρ as printed": "rho_error_printed:.3f",
            "full moments, given the query": "rho_error_given_query:.3f",
            "noise of counting": "rho_noise:.3f",
            "entropy, given the query (nats)": "entropy_error_given_query:.3f",
        },
    )
    told = "; ".join(
        "{model} ({heads} heads): as printed off by {rho_error_printed:.2f}, with the tokens' "
        "measured moments by {rho_error_given_query:.3f}".format(
            model=plain_markdown(study["model"]), **study["summary"]
        )
        for study in studies
    )
    found = (
        f"**Where real heads look follows from their weights and their tokens' moments.** Mean "
        f"error of ρ, {told}. Copying what was counted on other text does about as well: what the "
        "theory is for is what happens after a change ([the heads](#published))."
    )
    return Result(sections=(section,), finding=found)


_COUNTED = (
    "Points were counted on held-out text with the model's own logits; lines follow from its "
    "weights and the moments of its tokens on other text."
)


def _reality_section(
    studies: Sequence[Record],
    *,
    key: str,
    title: str,
    chart_title: str,
    caption: str,
    intro: str,
    columns: Columns,
) -> Section:
    """Measured and predicted ρ of some heads, and the errors of every model."""
    records = [
        {**record, "panel": f"{study['model']}: {record['panel']}"}
        for study in studies
        for record in study["profiles"]
    ]
    rows = [{"model": study["model"], **study["summary"]} for study in studies]
    table = markdown_table(rows, {"model": "model", **columns})
    chart = profile_panels(records, title=chart_title)
    return _chart_section(key, title, chart, caption, f"{intro}\n\n{table}")


def _range(values: Sequence[float]) -> str:
    low, high = (f"{value:.2g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _shared_settings(sweep: Sweep) -> str:
    """What the runs share, for the reader who wants to make them again."""
    config = asdict(sweep.settings[0].config)
    words = ", ".join(f"{name} {value}" for name, value in config.items() if name != "seed")
    return f"Seeds 0 to {sweep.seeds - 1}. Settings of the run without LocAteR: `{words}`.\n"


def _data(context: Context, sweep: Sweep) -> str:
    """The text of a sweep: the embedded one, the given folder, or the hub's."""
    corpus = sweep.settings[0].config.corpus
    if corpus == "embedded":
        return corpus
    return str(context.data) if context.data is not None else f"hub:{corpus}"


def _trained(context: Context, figure: str) -> tuple[Sweep, dict[str, Run]]:
    """The runs of a figure; finished ones are never trained again."""
    sweep = sweep_named(figure if context.scale == "paper" else f"{figure}-{context.scale}")
    results = None if context.scale == "quick" else context.results  # none are published of it
    folders = SweepFolders(out=context.store / "lab", data=_data(context, sweep), results=results)
    if context.train:
        run_sweep(sweep.configs(), folders, report=context.progress)
    return sweep, folders.ended(sweep)


def _folders(context: Context, sweep: Sweep) -> list[tuple[Setting, Path]]:
    """The first seed's run folder of every setting; one without its model is trained again."""
    configs = [replace(setting.config, seed=0) for setting in sweep.settings]
    folders = SweepFolders(out=context.store / "lab", data=_data(context, sweep))
    run_sweep(configs, folders, report=context.progress)
    paths = [folders.out / config.digest for config in configs]
    return list(zip(sweep.settings, paths, strict=True))


def errata_text() -> str:
    """`docs/errata.md`."""
    path = published("docs/errata.md")
    assert path is not None  # it comes with the package
    return path.read_text(encoding="utf-8")


def published(name: str) -> Path | None:
    """What stands at `docs/…` or `results/…`, in the installed package or in the source tree."""
    here = Path(__file__)
    places = (here.parent / name, here.parents[3] / name)
    return next((place for place in places if place.exists()), None)


def _errata(_: Context) -> Result:
    text = errata_text().split("\n", 1)[1]
    section = Section(key="errata", title="What the paper says, and what is right", text=text)
    return Result(sections=(section,))


def _always(seconds: float) -> dict[Scale, float]:
    return {"quick": seconds, "cpu": seconds, "paper": seconds}


def _hours(quick_seconds: float, cpu: float, paper: float) -> dict[Scale, float]:
    return {"quick": quick_seconds, "cpu": 3600 * cpu, "paper": 3600 * paper}


_LARGE: tuple[Scale, ...] = ("cpu", "paper")
_TRAINING = "Training"
PARTS: dict[str, Part] = {
    "published": Part(published_part, "Real heads", _always(0.5)),
    "reality": Part(reality_part, "Real heads", _hours(20, 0.02, 0.02)),
    "models": Part(audit_part, "Real heads", _hours(5, 0.01, 0.01)),
    "explorer": Part(lambda _: Result(sections=(explorer_section(),)), "Theory", _always(0.5)),
    "fig1": Part(_FIG1, "Theory", _always(0.5)),
    "fig2": Part(_FIG2, "Theory", _always(4)),
    "fig3": Part(_FIG3, "Theory", _always(0.5)),
    "fig4": Part(_FIG4, "Theory", _always(0.5)),
    "fig5": Part(simulated_part, "Theory", _always(25)),
    "protocol": Part(protocol_part, _TRAINING, _always(2)),
    "fig6": Part(partial(curves_part, figure="fig6"), _TRAINING, _hours(60, 2.5, 30)),
    "fig7": Part(gates_part, _TRAINING, _hours(5, 0.1, 1)),
    **{
        figure: Part(partial(curves_part, figure=figure), _TRAINING, _hours(0, 0.5, 30), _LARGE)
        for figure in ("fig8", "fig9", "fig10", "fig11", "fig12")
    },
    "claims": Part(  # verdicts alone: what is right instead stands in the errata
        lambda _: Result(sections=(), verdicts=tuple(claims.theory_verdicts())), "", _always(2)
    ),
    "errata": Part(_errata, "Reference", _always(0.5)),
}
"""In the order of the page."""
