"""Kill every command that runs for long, at random moments: its end is as if nothing had been.

`make drill` runs these; each says how many kills there were, and how long it all took.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.drill
Keep = Callable[[dict[str, float]], None]
Kill = Callable[[int, random.Random], bool]
PAGE = 4096  # bytes: a file takes whole ones
HANGS = 1200  # seconds, where a command takes half a minute: machines are busy

TRAIN = ["train", "--preset", "tiny", "--steps", "60", "--evaluations", "5", "--measure-every", "7",
         "--checkpoint-every", "10", "--out", "in/run"]  # fmt: skip
SWEEP = ["sweep", "tiny", "--seeds", "3", "--workers", "2", "--out", "in/runs",
         "--results", "in/results"]  # fmt: skip
SIMULATE = ["simulate", "fig5", "--panels", "Σ = I", "--draws", "40", "--sequences", "400",
            "--workers", "2", "--store", "in/store", "--out", "in/f.json"]  # fmt: skip
TRIAL = ["trial", "demo", "--methods", "none,qk-clip", "--learning-rates", "1e-3,1e-2", "--steps",
         "6", "--seeds", "2", "--tokens", "16", "--store", "in/store",
         "--out", "in/t.json"]  # fmt: skip
REPRODUCE = ["reproduce", "--only", "fig1,fig2,fig4,claims", "--no-exports", "--out", "in/page"]
COMMANDS = [TRAIN, SWEEP, SIMULATE, TRIAL, REPRODUCE]
"""Each writes into the folder `in` alone."""
RESULTS = ("*.json", "page/*.html", "store/**/*.json", "results/*", "**/metrics.jsonl",
           "**/*.safetensors")  # fmt: skip


def results(here: Path) -> dict[str, bytes]:
    """What a command is for, file by file; a page without the seconds that it took."""
    files = {path for pattern in RESULTS for path in (here / "in").glob(pattern)}
    seconds = rb"(Made by locater \S+) in \d+ s"
    return {
        str(path.relative_to(here / "in")): re.sub(seconds, rb"\1", path.read_bytes())
        for path in sorted(files)
    }


def started(arguments: list[str], here: Path, by: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """The command in a session of its own."""
    program = [*by, sys.executable, "-m", "locater.cli", *arguments]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "start_new_session": True}
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(program, cwd=here, env=env, **quiet)  # type: ignore[call-overload]


def finished(process: subprocess.Popen[bytes]) -> None:
    """Wait for its end, which has to be a good one."""
    said = process.communicate(timeout=HANGS)[1]
    assert process.returncode == 0, said.decode()[-2000:]


def members(session: int, name: str = "") -> list[int]:
    """The processes of a session that are alive and whose command line fits the pattern."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z" and re.search(name, line):
            found.append(int(entry.name))
    return sorted(found)


def everybody(session: int, draw: random.Random) -> bool:
    """The power goes."""
    for process in members(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return True


def one(name: str) -> Kill:
    """One process of the session whose command line fits the pattern, not its first."""

    def kill(session: int, draw: random.Random) -> bool:
        found = [process for process in members(session, name) if process != session]
        with contextlib.suppress(ProcessLookupError):
            if found:
                os.kill(draw.choice(found), signal.SIGKILL)
        return bool(found)

    return kill


def parent(session: int, draw: random.Random) -> bool:
    """The command alone; its workers have to notice."""
    os.kill(session, signal.SIGKILL)
    return True


def settled(session: int, seconds: float = 120.0) -> None:
    """Wait until all that the command started is gone; what stays is an error."""
    until = time.monotonic() + seconds
    while members(session):
        if time.monotonic() > until:
            left = members(session)
            everybody(session, random.Random(0))
            raise AssertionError(f"processes {left} stayed")
        time.sleep(0.1)


def drill(
    arguments: list[str], here: Path, *, kills: int, seed: int, kill: Kill = everybody
) -> dict[str, float]:
    """Start it again and again and kill it at random moments; whenever it ends, compare.

    What a kill leaves is what the next start finds, so that most ends have several kills behind
    them.  Kills begin shortly before the first file is there: importing torch is no work.
    """
    whole, began = here / "whole", time.monotonic()
    whole.mkdir()
    process = started(arguments, whole)
    while process.poll() is None and not any(whole.iterdir()):
        time.sleep(0.02)
    first = time.monotonic() - began
    finished(process)
    lasted, expected = time.monotonic() - began, results(whole)
    assert expected
    draw, landed, ends = random.Random(seed), 0, 0
    while landed < kills:
        folder = here / f"killed-{ends}"
        folder.mkdir()
        for _ in range(12):
            process = started(arguments, folder)
            try:
                process.wait(draw.uniform(0.8 * first, lasted))
            except subprocess.TimeoutExpired:
                landed += kill(process.pid, draw)
            try:
                said = process.communicate(timeout=HANGS)[1].decode()
            except subprocess.TimeoutExpired:
                everybody(process.pid, draw)
                raise AssertionError(f"it hangs after kill {landed}") from None
            settled(process.pid)
            if process.returncode >= 0:
                assert "Traceback" not in said, said
            if process.returncode == 0:
                break
        else:
            finished(started(arguments, folder))
        assert results(folder) == expected, f"after kill {landed}"
        shutil.rmtree(folder)
        ends += 1
    return {"kills": landed, "ends": ends, "seconds of one": round(lasted, 1),
            "seconds of all": round(time.monotonic() - began)}  # fmt: skip


@pytest.fixture(autouse=True)
def table(
    record_property: Callable[[str, object], None],
) -> Iterator[Callable[[dict[str, float]], None]]:
    """Keeps what a drill counted, and shows it with -s or in the report."""

    def keep(row: dict[str, float]) -> None:
        for name, value in row.items():
            record_property(name, value)
        sys.stderr.write(f"\n  {json.dumps(row)}\n")

    yield keep


@pytest.mark.parametrize("arguments", [TRAIN, TRIAL, REPRODUCE], ids=lambda a: a[0])
def test_commands(arguments: list[str], tmp_path: Path, seed: int, table: Keep) -> None:
    table(drill(arguments, tmp_path, kills=50, seed=seed))


@pytest.mark.parametrize(
    ("kill", "kills"), [(everybody, 10), (parent, 20), (one("spawn_main"), 20)],
    ids=["all", "parent", "worker"],
)  # fmt: skip
def test_sweeps(kill: Kill, kills: int, tmp_path: Path, seed: int, table: Keep) -> None:
    """A worker that is killed is replaced within the same command; a parent takes all with it."""
    table(drill(SWEEP, tmp_path, kills=kills, seed=seed, kill=kill))


@pytest.mark.parametrize(
    ("engine", "kill", "kills"),
    [("local", everybody, 50), ("ray", everybody, 10), ("ray", one("^ray::"), 20),
     ("ray", one(r"^\S*raylet/raylet "), 20)],
    ids=["local", "ray-all", "ray-worker", "raylet"],
)  # fmt: skip
def test_simulations(
    engine: str, kill: Kill, kills: int, tmp_path: Path, seed: int, table: Keep
) -> None:
    arguments = [*SIMULATE, "--engine", engine]
    table(drill(arguments, tmp_path, kills=kills, seed=seed, kill=kill))


def said(process: subprocess.Popen[bytes]) -> str:
    """What it said until its end, which is a good one or an error with a way out."""
    text = process.communicate(timeout=HANGS)[1].decode()
    assert process.returncode in (0, 1), text
    assert "Traceback" not in text, text
    assert process.returncode == 0 or "hint:" in text, text
    return text


def alone(arguments: list[str], here: Path) -> dict[str, bytes]:
    """The results of the command where nothing goes wrong."""
    here.mkdir()
    finished(started(arguments, here))
    return results(here)


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda a: a[0])
def test_two_processes_on_one_folder(arguments: list[str], tmp_path: Path) -> None:
    """One does the work; the other ends as well or says so, and harms nothing."""
    expected = alone(arguments, tmp_path / "alone")
    pair = [started(arguments, tmp_path) for _ in range(2)]
    for process in pair:
        said(process)
    assert 0 in [process.returncode for process in pair]
    assert results(tmp_path) == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda a: a[0])
def test_a_full_disk(arguments: list[str], tmp_path: Path, table: Keep) -> None:
    """A disk that fills at every eighth of the way: an error with a hint; with room, the end.

    In between nothing is there that is not whole, and no run says that it is finished without its
    model.
    """
    expected, disk = alone(arguments, tmp_path / "alone"), tmp_path / "in"
    used = sum(-(-len(content) // PAGE) * PAGE for content in expected.values())
    disk.mkdir()
    failed = 0
    for part in range(8):
        size = f"size={max(PAGE, used * part // 8)}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(disk)], check=True)
        try:
            process = started(arguments, tmp_path)
            said(process)
            failed += process.returncode
            whole_or_absent(results(tmp_path), expected)
            subprocess.run(["mount", "-o", "remount,size=512m", str(disk)], check=True)
            finished(started(arguments, tmp_path))
            assert results(tmp_path) == expected
        finally:
            subprocess.run(["umount", str(disk)], check=True)
    table({"sizes": 8, "errors": failed, "kilobytes": used // 1024})
    assert failed


def whole_or_absent(found: dict[str, bytes], expected: dict[str, bytes]) -> None:
    """Of what was made so far; records of a run grow by lines, and end with a model."""
    for name, content in found.items():
        if name.endswith("metrics.jsonl"):
            if b'"finished"' in content:
                run = name.removesuffix("metrics.jsonl")
                owed = {one for one in expected if one.startswith(run)}
                assert owed <= found.keys(), owed - found.keys()
        elif name in expected:
            assert content == expected[name], name


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv (util-linux)")
@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda a: a[0])
def test_a_folder_that_may_not_be_written(arguments: list[str], tmp_path: Path) -> None:
    """As somebody to whom permissions mean something: one sentence, and a hint."""
    (tmp_path / "in").mkdir(mode=0o555)
    plain = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    process = started(arguments, tmp_path, plain if os.geteuid() == 0 else [])
    assert "hint:" in said(process)
    assert process.returncode == 1
    assert not results(tmp_path)
