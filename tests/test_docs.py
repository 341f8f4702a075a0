"""Every code block of the documents runs, and every command is documented."""

import importlib
import inspect
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import locater
from locater import cli
from locater.cli.lab import SweepCommand, TrainCommand
from locater.paper.lab.presets import PRESETS, SWEEPS
from locater.probe.alarms import STUDY

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def command_lines() -> list[str]:
    text = [
        line for page in PAGES for block in blocks(page, "console") for line in block.split("\n")
    ]
    return [line[2:].split("  #")[0].strip() for line in text if line.startswith("$ locater ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_of_a_page_run_in_order(page: Path) -> None:
    namespace: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), namespace)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_run_and_were_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert any(cell["outputs"] for cell in cells)
    assert all(one["output_type"] != "error" for cell in cells for one in cell["outputs"])
    namespace: dict[str, object] = {}
    for cell in cells:
        exec(compile("".join(cell["source"]), path.name, "exec"), namespace)


@pytest.mark.parametrize(
    "line", sorted({*command_lines(), *(c[1] for c in cli._COMMANDS.values())})
)
def test_documented_command_lines_work(
    line: str, tmp_path: Path, samples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if re.search(r"\b(model|tuned|text\.txt|moments\.safetensors)\b", line):
        shutil.copytree(samples, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    assert cli.main(shlex.split(line)[1:]) == 0


def test_the_picture_of_the_theory_is_made_by_its_command(tmp_path: Path) -> None:
    (line,) = [one for one in command_lines() if one.endswith("theory.svg")]
    path = tmp_path / "theory.svg"
    assert cli.main([*shlex.split(line)[1:-1], str(path)]) == 0
    stored = (ROOT / "docs" / "images" / "theory.svg").read_text()
    ours, theirs = (re.findall(r' d="(M[^"]{99,})"', text) for text in (path.read_text(), stored))
    assert len(ours) == 3 and ours == theirs  # the three curves


def test_every_picture_is_shown_somewhere() -> None:
    shown = {
        (page.parent / link).resolve()
        for page in PAGES
        for link in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text())
    }
    assert shown == {path.resolve() for path in (ROOT / "docs" / "images").iterdir()}


def benchmark(name: str) -> Any:
    """A script of benchmarks/ as a module; it finds its neighbours, as when it is run."""
    folder = str(ROOT / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def tables(page: str) -> list[tuple[str, str]]:
    """Every table between marks, by its name."""
    text = (ROOT / "docs" / page).read_text()
    return re.findall(r"<!-- results: (\S+) -->\n(.*?)<!-- end -->", text, re.DOTALL)


@pytest.mark.parametrize(
    ("page", "script", "results", "count"),
    [
        ("theory-vs-reality", "draw_reality", "reality", 16),
        ("real-models", "study_models", "reality/models", 3),
        ("interventions", "study_interventions", "interventions", 5),
        ("what-if", "study_what_if", "what-if", 1),
        ("theories", "study_theories", "theories", 4),
    ],
)
def test_tables_are_those_of_the_studies(page: str, script: str, results: str, count: int) -> None:
    study = benchmark(script)
    studies, marks = study.load(ROOT / "results" / results), tables(f"{page}.md")
    assert len(marks) == count
    for name, table in marks:
        # to mend it: python benchmarks/SCRIPT.py --page docs/PAGE.md (draw_reality: see its head)
        assert table == study.table(studies, name), name


def test_alarms_and_their_tables_say_what_the_study_found() -> None:
    study = benchmark("study_alarms")
    runs = study.load(ROOT / "results" / "alarms")
    marks = [*tables("alarms.md"), *tables("probe.md")]
    assert {name for name, _ in marks} == {"runs", "signals", "sharp", "rules", "ever"}
    for name, table in marks:
        assert table == study.table(runs, name), name  # python benchmarks/study_alarms.py tables
    assert study.rules(runs) == STUDY


def test_every_command_is_documented() -> None:
    shown = {shlex.split(line)[1] for line in command_lines()}
    assert shown == set(cli._COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_project_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_public_name_has_an_example() -> None:
    """Run as doctests; the site shows them."""
    bare = [name for name in locater.__all__ if ">>>" not in (getattr(locater, name).__doc__ or "")]
    assert bare == []


def test_the_help_of_sweep_and_train_names_what_there_is() -> None:
    told = " ".join(inspect.getsource(SweepCommand).split())
    ranges = {f"fig{k}{kind}" for k in range(6, 13) for kind in ("", "-cpu")}
    assert [name for name in SWEEPS if name not in ranges and f"{name}" not in told] == []
    told = inspect.getsource(TrainCommand)
    named = {name.removesuffix("-cpu") for name in PRESETS} - ranges
    assert [name for name in named if name not in told] == []
