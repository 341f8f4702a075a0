"""Runs that somebody edited, through the real commands: a page or a reason, never a traceback."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from locater import cli

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**60, 10**400, 1e308, math.nan, math.inf, 0.5, "", "NaN", "\ud800", [], {},
    [[]], [None], [1, "2"], [[1.0], []], {"step": {}}, "<script>alert(1)</script>", [[[[]]]],
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of a small sweep, as folders and as published results."""
    here = tmp_path_factory.mktemp("runs")
    sweep = ["sweep", "tiny", "--seeds", "2", "--workers", "1", "--out", str(here / "out")]
    assert cli.main([*sweep, "--results", str(here / "results")]) == 0
    return here


def changed(data: Any, draw: random.Random) -> Any:
    """Data with one thing in it replaced, left out or put twice, at any depth."""
    if isinstance(data, dict | list) and data and draw.random() < 0.75:
        keys = list(data) if isinstance(data, dict) else list(range(len(data)))
        made, key = data.copy(), draw.choice(keys)
        if draw.random() < 0.25:
            del made[key]
        else:
            made[key] = changed(data[key], draw)
        return made
    return draw.choice(ODD)


def edit(path: Path, draw: random.Random) -> None:
    """One line of a file, or the only one."""
    is_lines = path.suffix == ".jsonl"
    parts = path.read_text().splitlines() if is_lines else [path.read_text()]
    place = draw.choice((0, len(parts) - 1, draw.randrange(len(parts))))
    how = draw.random()
    if how < 0.9:
        parts[place] = json.dumps(changed(json.loads(parts[place]), draw))
    elif how < 0.95:
        parts[place] = parts[place][: draw.randrange(len(parts[place]))]
    else:
        del parts[place]
    path.write_text("".join(f"{part}\n" for part in parts))


@pytest.mark.parametrize("count", [30, pytest.param(600, marks=pytest.mark.slow)])
def test_edited_runs_are_shown_or_refused(
    count: int, trained: Path, tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    draw, codes = random.Random(seed), []
    for case in range(count):
        here = tmp_path / str(case)
        shutil.copytree(trained, here)
        run = draw.choice(sorted((here / "out").iterdir()))
        published = draw.choice(sorted((here / "results").iterdir()))
        files = [run / "config.json", run / "environment.json", run / "metrics.jsonl", published]
        edit(draw.choice([*files, run / "metrics.jsonl", published]), draw)
        no_train = ["sweep", "tiny", "--seeds", "2", "--no-train", "--out", str(here / "out")]
        for command in (
            ["report", str(run), str(published), "--out", str(here / "page.html")],
            [*no_train, "--results", str(here / "results"), "--json"],
            [*no_train, "--figure", str(here / "figure.json")],
        ):
            codes.append(cli.main(command))
            said = capsys.readouterr().err
            assert codes[-1] in (0, 1), (case, command, said)
            assert "should not have happened" not in said, (case, command, said)
            assert not codes[-1] or "\nhint: " in said, (case, command, said)
        shutil.rmtree(here)
    assert 0 < sum(codes) < len(codes)  # some are shown, some are refused
