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
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.drill
Keep = Callable[[dict[str, float]], None]
Kill = Callable[[int, random.Random], bool]

TRAIN = ["train", "--preset", "tiny", "--steps", "60", "--evaluations", "5", "--measure-every", "7",
         "--checkpoint-every", "10"]  # fmt: skip
SWEEP = ["sweep", "tiny", "--seeds", "3", "--workers", "2"]
SIMULATE = ["simulate", "fig5", "--panels", "Σ = I", "--draws", "40", "--sequences", "400"]
TRIAL = ["trial", "demo", "--methods", "none,qk-clip", "--learning-rates", "1e-3,1e-2", "--steps",
         "6", "--seeds", "2", "--tokens", "16"]  # fmt: skip
REPRODUCE = ["reproduce", "--only", "fig1,fig2,fig4,claims", "--no-exports"]


def started(arguments: list[str], here: Path) -> subprocess.Popen[bytes]:
    """The command in a session of its own."""
    program = [sys.executable, "-m", "locater.cli", *arguments]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "start_new_session": True}
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(program, cwd=here, env=env, **quiet)  # type: ignore[call-overload]


def finished(process: subprocess.Popen[bytes]) -> None:
    """Wait for its end, which has to be a good one."""
    said = process.communicate(timeout=600)[1]
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
    arguments: list[str],
    result: Callable[[Path], object],
    here: Path,
    *,
    kills: int,
    seed: int,
    kill: Kill = everybody,
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
    lasted, expected = time.monotonic() - began, result(whole)
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
                said = process.communicate(timeout=300)[1].decode()
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
        assert result(folder) == expected, f"after kill {landed}"
        shutil.rmtree(folder)
        ends += 1
    return {"kills": landed, "ends": ends, "seconds of one": round(lasted, 1),
            "seconds of all": round(time.monotonic() - began)}  # fmt: skip


def bytes_of(*patterns: str) -> Callable[[Path], object]:
    """The contents of all files that match."""

    def read(folder: Path) -> object:
        files = sorted(path for pattern in patterns for path in folder.glob(pattern))
        assert files
        return {str(path.relative_to(folder)): path.read_bytes() for path in files}

    return read


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


def test_training(tmp_path: Path, seed: int, table: Keep) -> None:
    result = bytes_of("run/metrics.jsonl", "run/checkpoints/*/*.safetensors")
    table(drill([*TRAIN, "--out", "run"], result, tmp_path, kills=50, seed=seed))


@pytest.mark.parametrize(
    ("kill", "kills"), [(everybody, 10), (parent, 20), (one("spawn_main"), 20)],
    ids=["all", "parent", "worker"],
)  # fmt: skip
def test_sweeps(kill: Kill, kills: int, tmp_path: Path, seed: int, table: Keep) -> None:
    """A worker that is killed is replaced within the same command; a parent takes all with it."""
    result = bytes_of("runs/*/metrics.jsonl", "runs/*/checkpoints/*/*.safetensors", "results/*")
    arguments = [*SWEEP, "--out", "runs", "--results", "results"]
    table(drill(arguments, result, tmp_path, kills=kills, seed=seed, kill=kill))


@pytest.mark.parametrize(
    ("engine", "kill", "kills"),
    [("local", everybody, 50), ("ray", everybody, 10), ("ray", one("^ray::"), 20),
     ("ray", one(r"^\S*raylet/raylet "), 20)],
    ids=["local", "ray-all", "ray-worker", "raylet"],
)  # fmt: skip
def test_simulations(
    engine: str, kill: Kill, kills: int, tmp_path: Path, seed: int, table: Keep
) -> None:
    where = ["--engine", engine, "--workers", "2", "--store", "store", "--out", "f.json"]
    result = bytes_of("f.json")
    table(drill([*SIMULATE, *where], result, tmp_path, kills=kills, seed=seed, kill=kill))


def test_trials(tmp_path: Path, seed: int, table: Keep) -> None:
    result = bytes_of("store/**/*.json", "trial.json")
    arguments = [*TRIAL, "--store", "store", "--out", "trial.json"]
    table(drill(arguments, result, tmp_path, kills=50, seed=seed))


def test_reproduce(tmp_path: Path, seed: int, table: Keep) -> None:
    def result(folder: Path) -> object:
        page = (folder / "out/index.html").read_text()
        return re.sub(r"(Made by locater \S+) in \d+ s", r"\1", page)

    table(drill([*REPRODUCE, "--out", "out"], result, tmp_path, kills=50, seed=seed))


def test_two_processes_on_one_folder(tmp_path: Path) -> None:
    """One of them trains, the other says so and harms nothing."""
    finished(started([*TRAIN, "--out", "alone"], tmp_path))
    pair = [started([*TRAIN, "--out", "run"], tmp_path) for _ in range(2)]
    ends = [process.communicate()[1].decode() for process in pair]
    codes = [process.returncode for process in pair]
    assert 0 in codes
    for code, said in zip(codes, ends, strict=True):
        assert code == 0 or ("hint:" in said and "Traceback" not in said), said
    read = bytes_of("*/metrics.jsonl")(tmp_path)
    assert isinstance(read, dict)
    assert read["run/metrics.jsonl"] == read["alone/metrics.jsonl"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.parametrize("arguments", [TRAIN, SWEEP, SIMULATE, REPRODUCE], ids=lambda a: a[0])
def test_a_full_disk(arguments: list[str], tmp_path: Path) -> None:
    """A disk that fills at every size from nothing up: an error with a hint; with room, the end."""
    disk = tmp_path / "disk"
    disk.mkdir()
    out = {"simulate": ["--store", "disk/store", "--out", "disk/f.json"]}.get(
        arguments[0], ["--out", "disk/out"]
    )
    failed = 0
    for kilobytes in (4, 16, 32, 64, 128, 256, 512, 1024, 4096):
        size = f"size={kilobytes}k"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(disk)], check=True)
        try:
            process = started([*arguments, *out], tmp_path)
            said = process.communicate()[1].decode()
            assert process.returncode in (0, 1), said
            assert "Traceback" not in said, said
            failed += process.returncode
            if process.returncode:
                assert "hint:" in said
                grow = "remount,size=512m"
                subprocess.run(["mount", "-o", grow, str(disk)], check=True)
                finished(started([*arguments, *out], tmp_path))
        finally:
            subprocess.run(["umount", str(disk)], check=True)
    assert failed


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv (util-linux)")
@pytest.mark.parametrize("arguments", [TRAIN, SWEEP, SIMULATE, REPRODUCE], ids=lambda a: a[0])
def test_a_folder_that_may_not_be_written(arguments: list[str], tmp_path: Path) -> None:
    """As somebody to whom permissions mean something: one sentence, and a hint."""
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    flag = "--store" if arguments[0] == "simulate" else "--out"
    plain = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    program = [sys.executable, "-m", "locater.cli", *arguments, flag, str(locked / "out")]
    done = subprocess.run(
        [*(plain if os.geteuid() == 0 else []), *program],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr
