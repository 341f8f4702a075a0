"""On two gloo processes stabilizers train as one process does: all under DDP, some in FSDP2."""

import json
from pathlib import Path

import pytest

from locater.control.stabilizers import METHODS

pytestmark = pytest.mark.distributed
FLOAT32 = 2e-5
IDLE = ("none", "locater-covariance")  # almost no strength: running covariances are each rank's


@pytest.fixture(scope="module")
def results(on_two_processes: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = json.loads((on_two_processes / "stabilizers.json").read_text())
    return found


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_train_as_one(method: str, results: dict[str, list[float]]) -> None:
    assert max(results[method]) < FLOAT32
    assert min(results[f"{method} moved"]) > 1e-4 or method in IDLE


@pytest.mark.parametrize("method", ["locater", "qk-norm", "soft-cap", "z-loss", "entropy-floor"])
def test_parameters_in_shards_train_as_whole_ones(
    method: str, results: dict[str, list[float]]
) -> None:
    assert max(results[f"{method} sharded"]) < FLOAT32
