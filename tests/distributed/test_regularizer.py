"""Two gloo processes have the gradients of one process on the whole batch."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed
FLOAT32 = 2e-5  # sums of a few thousand float32 numbers, in another order
CASES = [
    *(f"ddp {name}{how}" for name in ("separate", "fused") for how in ("", ", add_gradients")),
    *(f"fsdp {name}{how}" for name in ("separate", "fused") for how in ("", ", add_gradients")),
    *(f"fsdp {name} {what}" for name in ("separate", "fused") for what in ("value", "metrics")),
    *("tensor parallel", "ddp fused, running covariance"),
]
CONTROLS = [
    "ddp separate, counted once per rank",
    "ddp fused, counted once per rank",
    "fsdp separate, local shards",
]


@pytest.fixture(scope="module")
def results(on_two_processes: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((on_two_processes / "penalty.json").read_text())
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_penalty_counts_once_and_reads_whole_parameters(
    case: str, results: dict[str, float]
) -> None:
    assert results[case] < FLOAT32


@pytest.mark.parametrize("control", CONTROLS)
def test_mistakes_would_have_been_seen(control: str, results: dict[str, float]) -> None:
    assert results[control] > 0.05


def test_every_case_was_run(results: dict[str, float]) -> None:
    assert set(results) == {*CASES, *CONTROLS}
