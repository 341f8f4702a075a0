"""Kill every command that runs for long, at random moments; what it ends with is what it ends with.

`make drill` runs these; each says how many kills there were and how many came while it worked.
"""

from __future__ import annotations

import json
import os
import random
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

TRAIN = ["train", "--preset", "tiny", "--steps", "60", "--evaluations", "5", "--measure-every", "7",
         "--checkpoint-every", "10"]  # fmt: skip
SWEEP = ["sweep", "tiny", "--seeds", "3", "--workers", "2"]
SIMULATE = ["simulate", "fig5", "--panels", "Σ = I", "--draws", "40", "--sequences", "400"]
REPRODUCE = ["reproduce", "--only", "fig1,fig2,fig4,claims", "--no-exports"]


def started(arguments: list[str], here: Path) -> subprocess.Popen[bytes]:
    """The command in a session of its own."""
    program = [sys.executable, "-m", "locater.cli", *arguments]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "start_new_session": True}
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(program, cwd=here, env=env, **quiet)  # type: ignore[call-overload]


def finished(arguments: list[str], here: Path) -> float:
    """Run it to its end; returns the seconds it took."""
    began = time.monotonic()
    process = started(arguments, here)
    _, said = process.communicate()
    assert process.returncode == 0, said.decode()[-2000:]
    return time.monotonic() - began


def members(session: int) -> list[int]:
    """The processes of a session that are alive."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(entry.name))
    return sorted(found)


def everybody(session: int, draw: random.Random) -> None:
    """The power goes."""
    os.killpg(session, signal.SIGKILL)


def one_of_them(session: int, draw: random.Random) -> None:
    """A worker, or the parent."""
    os.kill(draw.choice(members(session) or [session]), signal.SIGKILL)


def drill(
    arguments: list[str],
    result: Callable[[Path], object],
    here: Path,
    *,
    kills: int,
    seed: int,
    kill: Callable[[int, random.Random], None] = everybody,
) -> dict[str, float]:
    """Kill the command so often at random moments, let it finish each time, compare its result."""
    whole = here / "whole"
    whole.mkdir()
    lasted = finished(arguments, whole)
    expected = result(whole)
    draw, landed = random.Random(seed), 0
    for place in range(kills):
        folder = here / f"killed-{place}"
        folder.mkdir()
        process = started(arguments, folder)
        time.sleep(draw.uniform(0, lasted))
        if process.poll() is None:
            landed += 1
            try:
                kill(process.pid, draw)
            except ProcessLookupError:
                landed -= 1
        process.communicate()
        for _ in range(100):  # workers whose parent was killed leave by themselves
            if not members(process.pid):
                break
            time.sleep(0.1)
        else:
            everybody(process.pid, draw)
        finished(arguments, folder)
        assert result(folder) == expected, f"kill {place}"
    assert landed
    return {"kills": kills, "while it worked": landed, "seconds unkilled": round(lasted, 1)}


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


@pytest.mark.parametrize("kill", [everybody, one_of_them])
def test_sweeps(
    kill: Callable[[int, random.Random], None],
    tmp_path: Path,
    seed: int,
    table: Keep,
) -> None:
    """A worker that is killed is replaced within the same command; a parent takes all with it."""
    result = bytes_of("runs/*/metrics.jsonl", "runs/*/checkpoints/*/*.safetensors", "results/*")
    arguments = [*SWEEP, "--out", "runs", "--results", "results"]
    table(drill(arguments, result, tmp_path, kills=25, seed=seed, kill=kill))


@pytest.mark.parametrize("engine", ["local", "ray"])
def test_simulations(engine: str, tmp_path: Path, seed: int, table: Keep) -> None:
    """On Ray also a worker or the raylet."""
    arguments = [
        *SIMULATE,
        "--engine",
        engine,
        "--workers",
        "2",
        "--store",
        "store",
        "--out",
        "f.json",
    ]
    kill, kills = (everybody, 50) if engine == "local" else (one_of_them, 10)
    table(drill(arguments, bytes_of("f.json"), tmp_path, kills=kills, seed=seed, kill=kill))


def test_reproduce(tmp_path: Path, seed: int, table: Keep) -> None:
    result = bytes_of("out/index.html")
    table(drill([*REPRODUCE, "--out", "out"], result, tmp_path, kills=20, seed=seed))


def test_two_processes_on_one_folder(tmp_path: Path) -> None:
    """One of them trains, the other says so and harms nothing."""
    finished([*TRAIN, "--out", "alone"], tmp_path)
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
                finished([*arguments, *out], tmp_path)
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
