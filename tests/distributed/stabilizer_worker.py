"""Run on two gloo processes: three steps with stabilizers under DDP and FSDP2, against one.

Every case is the largest difference of parameters between a rank and one process on the whole
batch, relative to the largest parameter; "moved" is that between one process with the method and
without, which shows that the method did something.
"""

import json
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from worker import HEADS, KV_HEADS, batch, separate

from locater.control.stabilizers import METHODS, stabilize

SETTINGS: dict[str, dict[str, float]] = {
    "locater": {"scale_strength": 0.1},
    "locater-covariance": {"scale_strength": 1e-9, "mean_strength": 0.0},  # ranks differ in it
    "qk-clip": {"max_logit": 0.2},
    "soft-cap": {"max_logit": 0.2},
    "z-loss": {"z_loss": 1.0},
    "entropy-floor": {"entropy_loss": 5.0, "floor": 1.0},
    "qk-rate": {"factor": 3.0},
}


SHARDED = ("locater", "qk-norm", "soft-cap", "z-loss", "entropy-floor")
"""What works on parameters in shards, called before `fully_shard`."""


def trained(method: str, inputs: Tensor, kind: Literal["alone", "ddp", "fsdp"] = "alone") -> Tensor:
    model = separate().train()
    for part in model:
        vars(part).update(num_heads=HEADS, num_key_value_heads=KV_HEADS)
    used = stabilize(model, method, **SETTINGS.get(method, {}))
    whole: nn.Module = DistributedDataParallel(model) if kind == "ddp" else model
    if kind == "fsdp":
        for part in (*model, model):
            fully_shard(part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    used.on(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        (whole(inputs).square().mean() + used.penalty()).backward()
        optimizer.step()
    used.remove()
    weights = [getattr(part, side).weight for part in model for side in ("q_proj", "k_proj")]
    full = [one.full_tensor() if isinstance(one, DTensor) else one for one in weights]
    return torch.cat([one.detach().flatten() for one in full])


def main(out: Path) -> None:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    results: dict[str, float] = {}
    plain, mine = trained("none", batch()), batch().chunk(size)[rank]
    for method in METHODS:
        # as one process: clipping joins its ranks' logits, which are the same there
        alone = trained(method, batch())
        scale = alone.abs().max()
        found = trained(method, mine, "ddp")
        results[method] = ((found - alone).abs().max() / scale).item()
        if method in SHARDED:
            found = trained(method, mine, "fsdp")
            results[f"{method} sharded"] = ((found - alone).abs().max() / scale).item()
        results[f"{method} moved"] = ((alone - plain).abs().max() / scale).item()
    every: list[dict[str, float]] = [{} for _ in range(size)]
    distributed.all_gather_object(every, results)
    if rank == 0:
        out.write_text(json.dumps({key: [one[key] for one in every] for key in results}))
