"""`locater report`: your own runs and audits on one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tyro.conf import Positional

from locater.audit import Audit, audit_checkpoint
from locater.cli.terminal import parse, print_json, progress, say
from locater.errors import ConfigError
from locater.files import write_file
from locater.paper.lab.figures import run_labels, run_sections
from locater.paper.lab.run import Run
from locater.report.audit_view import audit_exports, audit_labels, audit_sections
from locater.report.charts import save_chart
from locater.report.page import Section, render_page


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Put training runs and audits on one page that works offline."""

    paths: Positional[tuple[str, ...]]
    """Folders or .jsonl files of `locater train`, .json files of `locater audit --json`, and
    checkpoints (folders, files, URLs, hub ids), which are audited now."""
    out: Path = Path("report.html")
    """Where to write the page."""
    figures: Path | None = None
    """A folder for every figure as SVG, PNG and PDF too."""
    tokens: int = 512
    """T, the length of the sequence, for checkpoints that are audited now."""
    json: bool = False
    """Print what is on the page as JSON."""


def do_report(arguments: Sequence[str]) -> None:
    """Read everything, write the page, print where it is."""
    command = parse(ReportCommand, "report", arguments)
    if not command.paths:
        raise ConfigError("no run and no audit is named.", hint="locater report RUN... AUDIT...")
    if command.out.suffix != ".html":
        raise ConfigError(f"cannot write a page as {str(command.out)!r}.", hint="end it in .html.")
    found = [_read(path, command.tokens) for path in command.paths]
    audits = [one for one in found if isinstance(one, Audit)]
    runs = [one for one in found if not isinstance(one, Audit)]
    page = _write(command, runs, audits)
    if command.json:
        counts = {"runs": len(runs), "audits": [audit.summary for audit in audits]}
        print_json({"page": str(page), **counts})
    else:
        print(page)


def _read(text: str, tokens: int) -> Run | Audit:
    """A run, an audit that was stored, or a checkpoint to audit."""
    path = Path(text)
    if path.suffix == ".jsonl" or (path / "metrics.jsonl").is_file():
        return Run.load(path)
    if path.suffix == ".json" and path.is_file():
        return Audit.from_json(path.read_bytes().decode("utf-8", "replace"))
    with progress(text) as report:
        return audit_checkpoint(text, tokens=tokens, report=report, say=say)


def _write(command: ReportCommand, runs: Sequence[Run], audits: Sequence[Audit]) -> Path:
    sections: list[Section] = []
    sections += run_sections(runs) if runs else []
    sections += audit_sections(audits) if audits else []
    names = [*(run_labels(runs) if runs else []), *(audit_labels(audits) if audits else [])]
    page = render_page(
        "Report: " + ", ".join(names), sections, footer=f"Made by locater {version('locater')}."
    )
    if command.figures is not None:
        _export(command.figures, sections, audits)
    return write_file(command.out, page).resolve()


def _export(folder: Path, sections: Sequence[Section], audits: Sequence[Audit]) -> None:
    charts = {section.key: section.chart for section in sections if section.chart}
    charts |= audit_exports(audits)
    for name, spec in charts.items():
        for suffix in (".svg", ".png", ".pdf"):
            save_chart(spec, folder / f"{name}{suffix}")
    say(f"wrote {3 * len(charts)} figures to {folder}")
