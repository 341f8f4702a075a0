"""Starting two processes costs far more than what they do: they are started once for all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

collect_ignore = [  # scripts
    *("worker.py", "workers.py", "probe_worker.py", "stabilizer_worker.py", "lab_worker.py")
]


@pytest.fixture(scope="session")
def on_two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `workers.py` wrote: `penalty.json`, `probe.json` and `stabilizers.json`."""
    out = tmp_path_factory.mktemp("distributed")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(str(Path(__file__).with_name("workers.py")), str(out)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return out
