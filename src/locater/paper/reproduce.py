"""One command that makes everything again: figures, their static exports, and the page."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

from locater.engines import one_thread
from locater.errors import ConfigError, check_choice
from locater.files import keep, kept, write_file
from locater.paper.claims import summary_line, verdict_markdown, verdict_section
from locater.paper.lab.run import source_commit
from locater.paper.parts import PARTS, Context, Result, Scale, errata_text
from locater.report.charts import save_chart
from locater.report.page import Section, render_page, rendered
from locater.report.tables import markdown_table, update_page

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
    train: bool = True
    """Train what is missing; with --no-train only finished runs are taken."""
    exports: bool = True
    """Write every figure as SVG, PNG and PDF too."""
    table: Path | None = None
    """Write the verdicts between the marks `<!-- results: verdicts -->` of this Markdown page."""
    fresh: bool = False
    """Make every part again, even if it is finished."""

    def __post_init__(self) -> None:
        for part in self.parts:
            check_choice("part", part, PARTS)
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
            result = None if config.fresh else kept(store, Result.from_dict, report)
            is_made = result is None
            if result is None:
                context = Context(
                    scale=config.scale,
                    store=config.out,
                    data=config.data,
                    results=config.results,
                    reality=config.reality,
                    train=config.train,
                    progress=clock.progress,
                    say=report,
                )
                result = PARTS[part].make(context)
                keep(store, result.to_dict())
            if config.exports:
                _export(result, config.out / "figures", stamp=store)
            results[part] = result
            clock.end(part, is_made=is_made)
    if config.table is not None:
        verdicts = [verdict for result in results.values() for verdict in result.verdicts]
        update_page(config.table, lambda _: verdict_markdown(verdicts))
    page = _page(results, config, time.perf_counter() - started)
    return write_file(config.out / "index.html", page)


def _page(results: Mapping[str, Result], config: ReproduceConfig, seconds: float) -> str:
    """What ρ is and what was found, then the verdicts, then every part's sections."""
    intro = (
        "The paper *Self-attention Networks Localize When QK-eigenspectrum Concentrates* (Bao, "
        "Hataya, Karakida 2024, arXiv 2402.02098), computed again: exactly where it approximates, "
        "correctly where it slips."
    )
    made = [
        replace(section, group=PARTS[name].group)
        for name, result in results.items()
        for section in result.sections
    ]
    sections = [*made, _settings(config)]
    verdicts = [verdict for result in results.values() for verdict in result.verdicts]
    told = {name: result.finding for name, result in results.items() if result.finding}
    findings = [
        words for name, words in told.items() if name != "reality" or "published" not in told
    ]
    if verdicts:
        wrong = ", ".join(dict.fromkeys(v.where for v in verdicts if v.outcome == "paper is wrong"))
        findings.append(
            f"**{summary_line(verdicts)}**"
            + (f" The slips: {wrong}." if wrong else "")
            + " [Each with its number](#verdicts)."
        )
        table = verdict_section(verdicts, {section.key for section in sections})
        place = next((k for k, one in enumerate(sections) if one.group != "Real heads"), 0)
        sections.insert(place, table)
    return render_page(
        "Where does attention look?",
        sections,
        intro=intro,
        opening=rendered("opening.html", "opening", findings, room="locater.paper"),
        footer=f"Made by locater {version('locater')} in {seconds:.0f} s.",
    )


class _Clock:
    """Says which part is in work and how long the rest may take."""

    def __init__(self, config: ReproduceConfig, report: Say) -> None:
        self.report, self.names = report, config.parts
        pace: Scale = config.scale if config.train else "quick"  # reading runs takes seconds
        self.cost = {part: PARTS[part].seconds[pace] for part in config.parts}
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
    table = markdown_table([(name, f"`{text}`") for name, text in rows], ["setting", "value"])
    return Section(
        key="settings", title="Settings and versions", text=table, group="Reference", is_folded=True
    )


def _export(result: Result, folder: Path, *, stamp: Path) -> None:
    """Every figure as SVG, PNG and PDF, unless those of this very result are there."""
    charts = {section.key: section.chart for section in result.sections if section.chart}
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
        if path.suffix in (".py", ".js", ".css", ".html", ".md"):
            digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    digest.update(errata_text().encode())
    return digest.hexdigest()


def _digest(part: str, config: ReproduceConfig, source: str) -> str:
    given = [_state(path) for path in (config.data, config.results, config.reality)]
    text = json.dumps(
        [part, config.scale, config.train, given, source, version("torch"), version("altair")]
    )
    return blake2b(text.encode(), digest_size=8).hexdigest()


def _state(path: Path | None) -> list[list[Any]]:
    """What tells a file, or the files of a folder, from others."""
    if path is None:
        return []
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    states = [(file, file.stat()) for file in files]
    return [[str(file.resolve()), state.st_size, state.st_mtime_ns] for file, state in states]
