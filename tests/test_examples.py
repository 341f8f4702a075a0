"""Every example runs as it stands, offline, and the trace ends nearer to where it was pulled."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_runs_and_moves_the_trace(example: Path, tmp_path: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "WANDB_DISABLED": "true"}
    done = subprocess.run(
        [sys.executable, str(example)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **offline},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    before = re.search(r"before: (-?[\d.]+)", done.stdout)
    after = re.search(r"after: (-?[\d.]+) \(the penalty's own: (-?[\d.]+)\)", done.stdout)
    assert before is not None and after is not None, done.stdout
    start, end, rest = float(before[1]), float(after[1]), float(after[2])
    assert abs(end - rest) < abs(start - rest) / 2


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_is_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) < 40


def test_every_way_to_train_has_an_example() -> None:
    names = {example.stem for example in EXAMPLES}
    assert names >= {"plain_loop", "accelerate_loop", "hf_trainer", "lightning_module"}
