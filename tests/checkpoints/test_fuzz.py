"""Damaged and hostile checkpoints, by the hundred, through the real command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).with_name("fuzz.py")


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_file_ends_in_a_traceback_a_hang_or_a_full_memory(count: int, seed: int) -> None:
    done = subprocess.run(
        [sys.executable, str(FUZZ), str(count), str(seed)],
        capture_output=True, text=True, check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ""), done.stdout[:2000] + done.stderr[-2000:]


def test_the_fuzzer_sees_what_escapes() -> None:
    """Its own control: a command that is broken on purpose is reported for every case."""
    code = (
        f"import sys; sys.argv = ['fuzz', '5', '0']; import runpy, locater.cli\n"
        "def broken(arguments): raise KeyError('escaped')\n"
        "locater.cli.main = broken\n"
        f"runpy.run_path({str(FUZZ)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.count("KeyError: 'escaped'") == 5
