"""On two gloo processes a probe measures each rank's part, and gathered, the whole batch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed
FLOAT32 = 2e-5  # logits of size one from sums of a few dozen float32 numbers, in another order
CASES = [f"{kind} {name}" for kind in ("ddp", "fsdp") for name in ("separate", "fused")]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    out = tmp_path_factory.mktemp("distributed") / "results.json"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(str(Path(__file__).with_name("probe_worker.py")), str(out)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[float]] = json.loads(out.read_text())
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
