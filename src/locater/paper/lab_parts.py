"""Figs. 6-12 of the reproduction, and what the models trained for them look like inside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from locater.audit import audit_model
from locater.paper.lab.presets import Setting, Sweep, sweep_named
from locater.paper.lab.run import Run
from locater.paper.lab.summary import markdown, summarize
from locater.paper.lab.sweep import SweepFolders, run_sweep
from locater.paper.lab.trained import load_trained
from locater.paper.lab_claims import curve_verdicts, stripes_verdict
from locater.paper.lab_figures import curves_chart, heat_chart, setting_name
from locater.paper.part import Context, Result
from locater.reality.against_theory import RealityConfig, against_theory
from locater.report.audit_view import audit_exports, audit_sections
from locater.report.charts import specification
from locater.report.page import Section
from locater.report.reality_view import profile_panels, profile_records
from locater.report.verdicts import Verdict

_BLOCKS = {"quick": 1200, "cpu": 2400, "paper": 2400}
"""Blocks of text that theory is held against; half of them for the moments."""


def curves_part(context: Context, figure: str) -> Result:
    """One of Figs. 6 and 8-12: spectrum, entropy and perplexity in training."""
    sweep, runs = _trained(context, figure)
    section = Section(
        key=figure,
        title=f"Figure {figure.removeprefix('fig')}: LocAteR in training",
        chart=specification(curves_chart(sweep, runs)),
        caption="Dashed: without LocAteR. Does the scale (B) shrink as κ₂ grows, does entropy (C) "
        "rise, does perplexity (D) fall below the dashed line? The text and the captions of the "
        "paper disagree on what κ₂ weighs, so each row shows one reading.",
        text=markdown(summarize(sweep, runs)) + _settings(sweep),
    )
    return Result(sections=(section,), verdicts=tuple(curve_verdicts(sweep, runs, figure)))


def gates_part(context: Context, figure: str = "fig7") -> Result:
    """Fig. 7: which tokens' gates are open while the model trains."""
    sweep, runs = _trained(context, figure)
    section = Section(
        key=figure,
        title="Figure 7: signal propagation in training",
        chart=specification(heat_chart(sweep, runs)),
        caption="Light: the gradient of that token's attention passes. Look for stripes: positions "
        "that stay open while others close, with LocAteR more than without.",
        text=_settings(sweep),
    )
    return Result(sections=(section,), verdicts=(stripes_verdict(sweep, runs, figure),))


def audit_part(context: Context) -> Result:
    """The heads of the models of Fig. 7, as `locater audit` shows them."""
    sweep, runs = _trained(context, "fig7")
    audits = []
    for setting, path in _folders(context, sweep, runs):
        model, _ = load_trained(path, data=_data(context, sweep))
        audit = audit_model(model, tokens=model.config.length)
        audits.append(replace(audit, name=setting_name(setting)))
    sections = tuple(_audit_section(one) for one in audit_sections(audits))
    return Result(sections=sections, exports=audit_exports(audits))


def _audit_section(section: Section) -> Section:
    titles = {"summary": "The trained models, audited"}
    return replace(section, title=titles.get(section.key, section.title))


def reality_part(context: Context) -> Result:
    """Theory against the models that were just trained, on text that they have not seen."""
    sweep, runs = _trained(context, "fig7")
    lines, records, printed, ours = [], [], [], []
    for setting, path in _folders(context, sweep, runs):
        model, material = load_trained(path, data=_data(context, sweep))
        source, count = material.whole_valid, _BLOCKS[context.scale]
        blocks = torch.cat([source.at(step)[0] for step in range(source.steps_per_epoch)])[:count]
        found = against_theory(model, blocks, RealityConfig())
        summary = found.summary()
        printed.append(summary["rho_error_printed"])
        ours.append(summary["rho_error_full"])
        lines.append(
            f"| {setting_name(setting)} | {summary['rho_error_printed']:.3f} | "
            f"{summary['rho_error_means']:.3f} | {ours[-1]:.3f} | {summary['rho_noise']:.3f} | "
            f"{summary['entropy']:.3f} | {summary['entropy_error_full']:.3f} |"
        )
        records += [
            {**record, "panel": f"{setting_name(setting)}: {record['panel']}"}
            for record in profile_records(found, heads=2)
        ]
    head = (
        "| model | ρ as printed | K, Σ, means | full moments | noise of counting | entropy | "
        "error of the predicted |\n|---|---|---|---|---|---|---|\n"
    )
    chart = profile_panels(records, title="ρ of the trained heads, measured and predicted")
    section = Section(
        key="reality",
        title="Theory against reality, on the models just trained",
        chart=specification(chart),
        caption="Points were counted on held-out text with the model's own logits; lines follow "
        "from its weights and the moments of its tokens on other text.",
        text="Mean |error| of ρ over positions, and attention entropy in nats.\n\n"
        + head
        + "\n".join(lines),
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
    told = (
        f"Over heads and positions, the printed formula misses ρ by {_range(printed)}, the theory "
        f"with measured moments by {_range(ours)}."
    )
    return Result(sections=(section,), verdicts=(verdict,), headline=_headline(section, told))


def published_part(context: Context) -> Result:
    """Real models that others have trained, as `benchmarks/study_reality.py` found them."""
    paths = sorted(context.reality.glob("*.json")) if context.reality else []
    studies = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    studies = [study for study in studies if study["side"]]  # not the laboratory's own
    if not studies:
        return Result(sections=())
    records = [
        {**record, "panel": f"{study['model']}: {record['panel']}"}
        for study in studies
        for record in study["profiles"]
    ]
    lines, told = [], []
    for study in studies:
        total = study["summary"]
        lines.append(
            f"| {study['model']} | {total['heads']} | {total['rho_error_printed']:.3f} | "
            f"{total['rho_error_full']:.3f} | {total['rho_noise']:.3f} | "
            f"{total['entropy_error_full']:.3f} |"
        )
        told.append(
            f"{study['model']}, {total['heads']} heads: the printed formula misses ρ by "
            f"{total['rho_error_printed']:.2f} on average, the theory with measured moments by "
            f"{total['rho_error_full']:.3f}."
        )
    head = (
        "| model | heads | ρ as printed | full moments | noise of counting | entropy, full (nats) "
        "|\n|---|---|---|---|---|---|\n"
    )
    section = Section(
        key="published",
        title="Theory against reality, on models that others trained",
        chart=specification(profile_panels(records, title="ρ of real heads")),
        caption="Heads from the best predicted to the worst. Points were counted on held-out text "
        "with the model's own logits; lines follow from its weights and the moments of its tokens "
        "on other text. Measured beforehand; docs/theory-vs-reality.md has the study.",
        text="Mean |error| over heads and positions.\n\n" + head + "\n".join(lines),
    )
    return Result(sections=(section,), headline=_headline(section, " ".join(told)))


def _headline(section: Section, told: str) -> Section:
    title = "Does theory predict real heads?"
    return replace(
        section, key="headline", title=title, caption=f"{told} {section.caption}", text=""
    )


def _range(values: Sequence[float]) -> str:
    low, high = (f"{value:.2g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _settings(sweep: Sweep) -> str:
    """What the runs share, for the reader who wants to make them again."""
    config = asdict(sweep.settings[0].config)
    words = ", ".join(f"{name} {value}" for name, value in config.items() if name != "seed")
    return f"\n\nSeeds 0 to {sweep.seeds - 1}. Settings of the run without LocAteR: `{words}`.\n"


def _sweep(context: Context, figure: str) -> Sweep:
    return sweep_named(figure if context.scale == "paper" else f"{figure}-{context.scale}")


def _data(context: Context, sweep: Sweep) -> str:
    """The text of a sweep: the embedded one, the given folder, or the hub's."""
    corpus = sweep.settings[0].config.corpus
    if corpus == "embedded":
        return corpus
    return str(context.data) if context.data is not None else f"hub:{corpus}"


def _trained(context: Context, figure: str) -> tuple[Sweep, dict[str, Run]]:
    """The runs of a figure; finished ones are never trained again."""
    sweep = _sweep(context, figure)
    folders = SweepFolders(
        out=context.store / "lab", data=_data(context, sweep), results=context.results
    )
    runs = run_sweep(sweep.configs(), folders, report=context.progress)
    return sweep, {run.config.digest: run for run in runs}


def _folders(context: Context, sweep: Sweep, runs: dict[str, Run]) -> list[tuple[Setting, Path]]:
    """The first seed's run folder of every setting; one without its model is trained again."""
    config = {setting.label: replace(setting.config, seed=0) for setting in sweep.settings}
    folders = SweepFolders(out=context.store / "lab", data=_data(context, sweep))
    run_sweep(list(config.values()), folders, report=context.progress)
    return [
        (setting, context.store / "lab" / config[setting.label].digest)
        for setting in sweep.settings
    ]
