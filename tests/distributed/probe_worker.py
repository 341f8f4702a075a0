"""Run on two gloo processes: a probe under DDP and FSDP2, against one process.

Every case is the largest difference of entropies, ρ and token ranks between a rank's probe and one
process on that rank's part of the batch, or, once gathered, on the whole batch; "output" is the
difference that the probe makes to the model's output.
"""

import json
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from worker import batch, fused, separate

from locater import Probe


def numbers(probe: Probe) -> Tensor:
    heads = [
        torch.cat([torch.tensor([one.entropy, one.max_logit, one.sink_mass]), one.rho.rho])
        for one in probe.records
    ]
    ranks = [torch.tensor([one.similarity, one.effective_rank, one.residual]) for one in probe.rank]
    return torch.cat([*heads, *ranks]).double()


def alone(model: nn.Module, inputs: Tensor) -> Tensor:
    with Probe(model, queries="all") as probe:
        model(inputs)
    return numbers(probe)


def difference(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


def main(out: Path) -> None:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    parts = batch().chunk(size)
    mesh = init_device_mesh("cpu", (size,))
    results: dict[str, float] = {}
    for name, build in (("separate", separate), ("fused", fused)):
        sharded = build()
        for layer in sharded:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        wrapped: dict[str, nn.Module] = {
            "ddp": DistributedDataParallel(build()),
            "fsdp": sharded,
        }
        for kind, model in wrapped.items():
            plain = model(parts[rank])
            with Probe(model, queries="all") as probe:
                output = model(parts[rank])
                output.square().mean().backward()
            results[f"{kind} {name} output"] = difference(plain, output)
            found = numbers(probe)
            results[f"{kind} {name}"] = difference(found, alone(build(), parts[rank]))
            results[f"{kind} {name}, other part"] = difference(
                found, alone(build(), parts[1 - rank])
            )
            probe.gather()
            results[f"{kind} {name}, gathered"] = difference(
                numbers(probe), alone(build(), batch())
            )
    every: list[dict[str, float]] = [{} for _ in range(size)]
    distributed.all_gather_object(every, results)
    if rank == 0:
        out.write_text(json.dumps({key: [one[key] for one in every] for key in results}))
