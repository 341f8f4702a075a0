"""Run by torchrun on two gloo processes, once for all that is tested on them."""

import os
import sys
from pathlib import Path

import probe_worker
import stabilizer_worker
import worker
from torch import distributed

if __name__ == "__main__":
    distributed.init_process_group("gloo")
    worker.main(Path(sys.argv[1]) / "penalty.json")
    probe_worker.main(Path(sys.argv[1]) / "probe.json")
    stabilizer_worker.main(Path(sys.argv[1]) / "stabilizers.json")
    distributed.barrier()  # no rank leaves while another still talks to it
    distributed.destroy_process_group()
    os._exit(0)  # gloo's own threads may abort a process that ends on a busy machine
