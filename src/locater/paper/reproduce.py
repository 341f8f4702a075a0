"""One command that makes everything again: figures, their static exports, and the page.

A new part is a function from a `Context` to a `Result` and a row in `PARTS`.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from locater.engines import one_thread
from locater.errors import ConfigError
from locater.files import write_file
from locater.paper import claims, curves, figures, lab_parts
from locater.paper.explorer import explorer_section
from locater.paper.fig5 import fig5_chart, fig5_verdicts
from locater.paper.lab.run import source_commit
from locater.paper.lab.summary import update_page
from locater.paper.part import Context, Part, Result, Scale
from locater.report.charts import save_chart, specification
from locater.report.page import Section, render_page
from locater.report.verdicts import verdict_markdown
from locater.simulation import preset, simulate


def _chart_section(key: str, title: str, chart: Any, caption: str) -> Section:
    return Section(key=key, title=title, chart=specification(chart), caption=caption)


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


Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ReproduceConfig:
    """Reproduce the paper: every figure, what is right and what is wrong, one page."""

    scale: Scale = "quick"
    """How much to run: minutes on two cores, hours on them, or a GPU."""
    out: Path = Path("out")
    """Folder for the page and the figures; what is finished there is not made again."""
    only: str = ""
    """Parts to make, separated by commas (fig1,errata); all by default."""
    data: Path | None = None
    """Texts for the parts that train; the others do without."""
    results: Path | None = None
    """Published runs (a folder of .jsonl): these are not trained again."""
    reality: Path | None = None
    """Published studies of real models (results/reality): their heads come first on the page."""
    exports: bool = True
    """Write every figure as SVG, PNG and PDF too."""
    table: Path | None = None
    """Write the verdicts between the marks `<!-- results: verdicts -->` of this Markdown page."""
    fresh: bool = False
    """Make every part again, even if it is finished."""

    def __post_init__(self) -> None:
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown:
            raise ConfigError(
                f"unknown part {unknown[0]!r}.", hint="choose among: " + ", ".join(PARTS) + "."
            )
        for path, hint in (
            (self.data, "--data is a folder or file of text."),
            (self.results, "--results is a folder of runs that `locater sweep --results` wrote."),
            (self.reality, "--reality is a folder of studies of real models."),
            (self.table, "--table is a Markdown page that has the marks."),
        ):
            if path is not None and not path.exists():
                raise ConfigError(f"there is nothing at {path}.", hint=hint)
        for part in self.parts:
            if self.scale not in PARTS[part].scales:
                raise ConfigError(
                    f"{part} is too large for the scale {self.scale!r}.",
                    hint="use --scale cpu or --scale paper.",
                )

    @property
    def parts(self) -> list[str]:
        """The parts to make, in the order of the page."""
        named = [part.strip() for part in self.only.split(",") if part.strip()]
        return [
            *(part for part in PARTS if part in named),
            *(n for n in named if n not in PARTS),
        ] or [name for name, part in PARTS.items() if self.scale in part.scales]


def reproduce(config: ReproduceConfig, *, report: Say = lambda _: None) -> Path:
    """Make the parts that were asked for and return the path of the page.

    A finished part is kept under `out/parts` by the digest of what decides it (the program's own
    text, versions, scale, data), so that an interrupted run loses the part in work at most.
    """
    started = time.perf_counter()
    source, clock = _source_digest(), _Clock(config, report)
    results: dict[str, Result] = {}
    with one_thread():
        for part in config.parts:
            store = config.out / "parts" / f"{part}-{_digest(part, config, source)}.json"
            clock.begin(part)
            result = None if config.fresh else _load(store)
            is_made = result is None
            if result is None:
                context = Context(
                    scale=config.scale,
                    store=config.out,
                    data=config.data,
                    results=config.results,
                    reality=config.reality,
                    progress=clock.progress,
                )
                result = PARTS[part].make(context)
                write_file(store, json.dumps(result.to_dict(), ensure_ascii=False))
            if config.exports:
                _export(result, config.out / "figures", stamp=store)
            results[part] = result
            clock.end(part, is_made=is_made)
    verdicts = [verdict for result in results.values() for verdict in result.verdicts]
    if config.table is not None:
        update_page(config.table, lambda _: verdict_markdown(verdicts))
    page = render_page(
        "Where does attention look?",
        [*(s for result in results.values() for s in result.sections), _settings(config)],
        intro="The paper *Self-attention Networks Localize When QK-eigenspectrum Concentrates* "
        "(Bao, Hataya, Karakida 2024, arXiv 2402.02098), computed again: exactly where it "
        "approximates, correctly where it slips.",
        footer=f"Made by locater {version('locater')} in {time.perf_counter() - started:.0f} s.",
        verdicts=verdicts,
        headline=next((r.headline for r in results.values() if r.headline), None),
    )
    return write_file(config.out / "index.html", page)


class _Clock:
    """Says which part is in work and how long the rest may take."""

    def __init__(self, config: ReproduceConfig, report: Say) -> None:
        self.report, self.names = report, config.parts
        self.cost = {part: PARTS[part].seconds[config.scale] for part in config.parts}
        self.begun, self.part, self.spoke = 0.0, "", 0.0
        self.first: tuple[float, int] | None = None
        self.spent = self.expected = 0.0

    def begin(self, part: str) -> None:
        self.begun = self.spoke = time.perf_counter()
        self.part, self.first = part, None
        place = self.names.index(part)
        left = sum(self.cost[name] for name in self.names[place:])
        self.report(f"[{place + 1}/{len(self.names)}] {part}{self._left(left)}")

    def progress(self, done: int, total: int) -> None:
        """Say how far the part is, at most every five seconds.

        What was there before the first call (from an interrupted run) tells nothing of the pace.
        """
        now = time.perf_counter()
        self.first = self.first or (now, done)
        fresh = done - self.first[1]
        if now - self.spoke < 5 or fresh <= 0 or done >= total:
            return
        self.spoke = now
        rest = (now - self.first[0]) * (total - done) / fresh
        later = sum(self.cost[n] for n in self.names[self.names.index(self.part) + 1 :])
        self.report(f"    {self.part}: {done} of {total}{self._left(later, rest)}")

    def end(self, part: str, *, is_made: bool) -> None:
        """A part that was found ready tells nothing of the pace."""
        if is_made:
            self.spent += time.perf_counter() - self.begun
            self.expected += self.cost[part]

    def _left(self, cost: float, measured: float = 0.0) -> str:
        """The estimate, corrected by how fast the parts so far were."""
        pace = self.spent / self.expected if self.expected > 5 else 1.0
        seconds = measured + cost * pace
        if seconds < 2:
            return ""
        return f", about {seconds:.0f} s left" if seconds < 90 else f", {seconds / 60:.0f} min left"


def _settings(config: ReproduceConfig) -> Section:
    packages = ("locater", "torch", "altair", "vl-convert-python", "numpy")
    rows = [
        ("scale", config.scale),
        ("parts", ", ".join(config.parts)),
        ("data", config.data.name if config.data else "the prose that Python carries"),
        ("seeds", "0 for theory and simulation; 0, 1, … for training, as each figure says"),
        ("commit", source_commit() or "an installed package"),
        ("Python", f"{platform.python_version()} on {platform.platform()}"),
        *((name, version(name)) for name in packages),
    ]
    lines = ["| setting | value |", "|---|---|", *(f"| {name} | `{text}` |" for name, text in rows)]
    return Section(key="settings", title="Settings and versions", text="\n".join(lines))


def _export(result: Result, folder: Path, *, stamp: Path) -> None:
    """Every figure as SVG, PNG and PDF, unless those of this very result are there."""
    sections = [*result.sections, *([result.headline] if result.headline else [])]
    charts = {section.key: section.chart for section in sections if section.chart}
    for name, chart in {**charts, **result.exports}.items():
        for suffix in (".svg", ".png", ".pdf"):
            path = folder / f"{name}{suffix}"
            if not path.exists() or path.stat().st_mtime < stamp.stat().st_mtime:
                save_chart(chart, path)


def _source_digest() -> str:
    """Of the program's own text: a changed formula makes its parts again."""
    digest = blake2b(digest_size=8)
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".js", ".css", ".md"):
            digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    digest.update(errata_text().encode())
    return digest.hexdigest()


def _digest(part: str, config: ReproduceConfig, source: str) -> str:
    given = [_state(path) for path in (config.data, config.results, config.reality)]
    text = json.dumps([part, config.scale, given, source, version("torch"), version("altair")])
    return blake2b(text.encode(), digest_size=8).hexdigest()


def _state(path: Path | None) -> list[list[Any]]:
    """What tells a file, or the files of a folder, from others."""
    if path is None:
        return []
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    states = [(file, file.stat()) for file in files]
    return [[str(file.resolve()), state.st_size, state.st_mtime_ns] for file, state in states]


def _load(path: Path) -> Result | None:
    """A finished part; one that cannot be read is made again."""
    try:
        return Result.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None
