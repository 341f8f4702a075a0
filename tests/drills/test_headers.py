"""A hundred thousand mutated headers: nothing escapes, nothing hangs, no memory is filled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.drill
COUNT, SHARE = 100_000, 2


def test_a_hundred_thousand_headers_are_read_or_refused(seed: int) -> None:
    program = [sys.executable, str(Path(__file__).with_name("headers.py")), str(COUNT // SHARE)]
    running = [
        subprocess.Popen([*program, str(seed + part)], stdout=subprocess.PIPE, text=True)
        for part in range(SHARE)
    ]
    for process in running:
        out, _ = process.communicate(timeout=3600)
        *wrong, table = out.splitlines()
        sys.stderr.write(f"\n{table}\n")
        assert (process.returncode, wrong) == (0, []), wrong[:5]
        assert json.loads(table)["peak_megabytes"] < 2048
