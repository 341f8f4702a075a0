"""Training on two processes has the run of one process on the whole batch."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from locater.paper.lab.presets import preset_named
from locater.paper.lab.run import Run
from locater.paper.lab.settings import TrainConfig
from locater.paper.lab.train import train

pytestmark = pytest.mark.distributed
FLOAT32 = 1e-4  # six steps of Adam on sums in another order
CONFIG = replace(
    preset_named("tiny"), corpus="lines.txt", vocabulary_size=None, steps=6, measure_every=3,
    dropout=0.0, scale_strength=0.05, mean_strength=0.05,
)  # fmt: skip
FLAGS = (
    *("--preset", "tiny", "--steps", "6", "--measure-every", "3", "--dropout", "0"),
    *("--vocabulary-size", "None", "--scale-strength", "0.05", "--mean-strength", "0.05"),
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "lines.txt"
    generator = torch.Generator().manual_seed(0)
    lines = torch.randint(9, (200, 12), generator=generator).tolist()
    path.write_text("\n".join(" ".join("abcdefghi"[word] for word in line) for line in lines))
    return path


def alone(config: TrainConfig, out: Path, text: Path) -> torch.Tensor:
    return numbers(train(config, out, data=str(text), trackers=()))


@pytest.fixture(scope="module")
def one(text: Path, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    return alone(CONFIG, tmp_path_factory.mktemp("one"), text)


def launch(out: Path, *command: str) -> torch.Tensor:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, "2", *command], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return numbers(Run.load(out))


def numbers(run: Run) -> torch.Tensor:
    names = ("valid_loss", "entropy", "trace", "frobenius_squared")
    rows = [[record[name] for name in names] for record in run.records]
    flat = [v if isinstance(v, float) else v[0] for row in rows for v in row]
    return torch.tensor([*flat, *(r["train_loss"] for r in run.records[1:])], dtype=torch.float64)


def test_two_processes_train_as_one(text: Path, tmp_path: Path, one: torch.Tensor) -> None:
    flags = (*FLAGS, "--data", str(text), "--out", str(tmp_path / "two"))
    two = launch(tmp_path / "two", "-m", "locater.cli", "train", *flags)
    assert (one - two).abs().max() < FLOAT32


def test_a_model_in_shards_trains_as_one_and_goes_on_after_an_end(
    text: Path, tmp_path: Path, one: torch.Tensor
) -> None:
    worker = str(Path(__file__).with_name("lab_worker.py"))
    settings = json.dumps(CONFIG.changes())
    two = launch(tmp_path / "two", worker, settings, str(tmp_path / "two"), str(text))
    assert (one - two).abs().max() < FLOAT32


def test_a_penalty_counted_twice_would_have_been_seen(
    text: Path, tmp_path: Path, one: torch.Tensor
) -> None:
    twice = replace(CONFIG, scale_strength=0.1, mean_strength=0.1)
    assert (one - alone(twice, tmp_path, text)).abs().max() > 100 * FLOAT32
