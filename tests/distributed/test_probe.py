"""On two gloo processes a probe measures each rank's part, and gathered, the whole batch."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed
FLOAT32 = 2e-5  # logits of size one from sums of a few dozen float32 numbers, in another order
CASES = [f"{kind} {name}" for kind in ("ddp", "fsdp") for name in ("separate", "fused")]


@pytest.fixture(scope="module")
def results(on_two_processes: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = json.loads((on_two_processes / "probe.json").read_text())
    return found


@pytest.mark.parametrize("case", CASES)
def test_every_rank_measures_its_own_part_and_changes_nothing(
    case: str, results: dict[str, list[float]]
) -> None:
    assert results[f"{case} output"] == [0.0, 0.0]
    assert max(results[case]) < FLOAT32


@pytest.mark.parametrize("case", CASES)
def test_gathered_results_are_those_of_the_whole_batch(
    case: str, results: dict[str, list[float]]
) -> None:
    assert max(results[f"{case}, gathered"]) < FLOAT32


@pytest.mark.parametrize("case", CASES)
def test_another_part_would_have_been_seen(case: str, results: dict[str, list[float]]) -> None:
    assert min(results[f"{case}, other part"]) > 0.01
