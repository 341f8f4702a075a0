"""docs/architecture.md says of the rooms what the import graph says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "locater"
TEXT = (ROOT / "docs" / "architecture.md").read_text()


def section(title: str) -> str:
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_cells(text: str) -> list[str]:
    return re.findall(r"^\| `(\w+)`", text, re.MULTILINE)


ROOMS = first_cells(section("The rooms"))


def room(module: str) -> str:
    return module.split(".")[1]


def imports() -> dict[str, set[str]]:
    """The rooms that each room imports, wherever in a module."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts == ("__init__",):  # public names, found when they are used
            continue
        used = found.setdefault(parts[0], set())
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            used |= {room(name) for name in names if name.startswith("locater.")}
    return {name: used - {name} for name, used in found.items()}


def test_every_room_is_named_and_every_named_room_exists() -> None:
    there = {
        path.stem
        for path in SOURCE.iterdir()
        if path.stem != "__init__" and (path.suffix == ".py" or (path / "__init__.py").exists())
    }
    assert set(ROOMS) == there
    assert len(ROOMS) == len(set(ROOMS))


def test_rooms_import_only_rooms_below_them() -> None:
    for name, used in imports().items():
        below = ROOMS[ROOMS.index(name) + 1 :]
        assert used <= set(below), (name, used - set(below))
        assert name == "cli" or "paper" not in used


def test_the_order_is_that_of_the_import_contract() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    layers = re.search(r"^layers = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert layers is not None
    lines = [re.findall(r"locater\.(\w+)", line) for line in layers[1].splitlines() if '"' in line]
    place = {name: height for height, names in enumerate(lines) for name in names}
    assert [place[name] for name in ROOMS if name in place] == sorted(place.values())
    assert set(ROOMS) - set(place) == {"engines", "notebook", "files", "errors"}


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_modules_that_are_named_exist(page: str) -> None:
    paths = re.findall(r"`((?:\w+/)+\w+)`", (ROOT / page).read_text())
    paths = [path for path in paths if path.split("/")[0] in ROOMS]
    missing = [
        path
        for path in paths
        if not (SOURCE / f"{path}.py").exists() and not (SOURCE / path / "__init__.py").exists()
    ]
    assert missing == []


def test_the_nouns_are_in_their_rooms() -> None:
    rows = re.findall(r"^\| (`.*?`) \|.*\| `(\w+)` \|$", section("The nouns"), re.MULTILINE)
    assert len(rows) == 12
    for nouns, place in rows:
        text = "".join(path.read_text() for path in (SOURCE / place).rglob("*.py"))
        for noun in re.findall(r"`(\w+)`", nouns):
            assert re.search(rf"^class {noun}\b", text, re.MULTILINE), (noun, place)


def test_every_command_has_its_walk() -> None:
    from locater.cli import _COMMANDS

    walked = set(re.findall(r"^\| `locater ([\w-]+)`", section("The walk of each job"), re.M))
    assert walked == set(_COMMANDS)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_the_page_is_found_from(page: str) -> None:
    assert "docs/architecture.md" in (ROOT / page).read_text()
