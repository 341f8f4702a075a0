"""Every example runs as it stands, offline, and the trace ends nearer to where it was pulled."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


# most of an example's time goes into importing what it trains with: that is done once, and each
# example then runs in a process of its own, forked from there
RUN_EACH = """
import os, runpy, sys
import accelerate, lightning
from transformers import GPT2LMHeadModel, Trainer
for example in sys.argv[1:]:
    child = os.fork()
    if not child:
        print("==", example, flush=True)
        runpy.run_path(example, run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, example
"""


def test_the_examples_run_and_move_the_trace(tmp_path: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "WANDB_DISABLED": "true"}
    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH, *map(str, EXAMPLES)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **offline},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = dict(zip(EXAMPLES, done.stdout.split("== ")[1:], strict=True))
    for example, text in said.items():
        assert text.startswith(str(example))
        before = re.search(r"before: (-?[\d.]+)", text)
        after = re.search(r"after: (-?[\d.]+) \(the penalty's own: (-?[\d.]+)\)", text)
        assert before is not None and after is not None, text
        start, end, rest = float(before[1]), float(after[1]), float(after[2])
        assert abs(end - rest) < abs(start - rest) / 2, example


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_is_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) < 40


def test_every_way_to_train_has_an_example() -> None:
    names = {example.stem for example in EXAMPLES}
    assert names >= {"plain_loop", "accelerate_loop", "hf_trainer", "lightning_module"}
