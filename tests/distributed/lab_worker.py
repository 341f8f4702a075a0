"""Run by torchrun on two gloo processes: a run of the laboratory whose model lies in shards.

Accelerate shards on accelerators only; here its part is played by `fully_shard` on a CPU mesh, and
everything else is the laboratory's own: penalty, measurement, checkpoints, resumption.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from locater.paper.lab import train as module
from locater.paper.lab.settings import TrainConfig


class Sharding(Accelerator):
    """Accelerate with FSDP2 on CPUs."""

    distributed_type = DistributedType.FSDP

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        model, optimizer = args
        settings = optimizer.defaults
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        kept = ("lr", "betas", "weight_decay", "fused")
        sharded = torch.optim.AdamW(model.parameters(), **{key: settings[key] for key in kept})
        return model, AcceleratedOptimizer(sharded)

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return model


def main() -> None:
    torch.set_num_threads(1)
    config, out, data = (
        TrainConfig.from_dict(json.loads(sys.argv[1])),
        Path(sys.argv[2]),
        sys.argv[3],
    )
    module._accelerator = lambda *_: Sharding(cpu=True)

    def stop(progress: module.Progress) -> None:
        if progress.step == 5:
            raise KeyboardInterrupt

    try:
        module.train(config, out, data=data, checkpoint_every=4, trackers=(), report=stop)
    except KeyboardInterrupt:
        module.train(config, out, data=data, checkpoint_every=4, trackers=())


if __name__ == "__main__":
    main()
