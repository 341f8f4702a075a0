"""Run on two gloo processes: gradients with the penalty under each kind of parallelism.

Every case returns the largest difference between its gradients and those of one process on the
whole batch, relative to the largest gradient; rank 0 writes all of them as JSON.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from locater.control.locater import LocAteR
from locater.core.penalty import LocAteRConfig
from locater.models.live import Pair

CONFIG = LocAteRConfig(scale_strength=0.5, mean_strength=2.0, target=1.5)
BATCH, TOKENS, MODEL, HEADS, KV_HEADS = 4, 5, 16, 4, 2


class Attention(nn.Module):
    """Grouped-query attention with separate projections: whole heads can lie on a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(MODEL, MODEL, bias=False)
        self.k_proj = nn.Linear(MODEL, MODEL * KV_HEADS // HEADS, bias=False)
        self.v_proj = nn.Linear(MODEL, MODEL * KV_HEADS // HEADS, bias=False)
        self.o_proj = nn.Linear(MODEL, MODEL, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        split = [
            layer(tokens).unflatten(-1, (-1, MODEL // HEADS)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        ]
        mixed = nn.functional.scaled_dot_product_attention(*split, enable_gqa=True)
        return tokens + self.o_proj(mixed.transpose(1, 2).flatten(-2))


def separate() -> nn.Sequential:
    return _seeded(nn.Sequential(Attention(), Attention()))


def fused() -> nn.Sequential:
    layers = [
        nn.TransformerEncoderLayer(MODEL, HEADS, 24, dropout=0.0, batch_first=True)
        for _ in range(2)
    ]
    return _seeded(nn.Sequential(*layers))


def _seeded(model: nn.Sequential) -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def batch() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, TOKENS, MODEL, generator=generator)


def regularizer(model: nn.Module) -> LocAteR:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(inner, nn.Sequential)
    if not isinstance(inner[0], Attention):
        return LocAteR(model, CONFIG)
    pairs = [
        Pair(layer.q_proj, layer.k_proj, heads=HEADS, name=f"layers.{k}")
        for k, layer in enumerate(inner)
        if isinstance(layer, Attention)
    ]
    return LocAteR(model, CONFIG, pairs=pairs)


def running(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """Gradients of two steps with the tokens' covariance, the second with other tokens."""
    found = LocAteR(model, CONFIG, covariance="running")
    for tokens in (inputs, 2 * inputs.roll(1, -1)):
        model.zero_grad()
        model(tokens).square().mean().backward()
        found.add_gradients()
    return _collected(model)


def gradients(model: nn.Module, inputs: Tensor, penalty: Callable[[], Tensor]) -> dict[str, Tensor]:
    extra = penalty()
    (extra + model(inputs).square().mean()).backward()
    return _collected(model)


def _collected(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        found[name.removeprefix("module.")] = whole.detach().clone()
    return found


def distance(
    build: Callable[[], nn.Sequential],
    ours: dict[str, Tensor],
    true: Callable[[nn.Module], dict[str, Tensor]] | None = None,
) -> float:
    model = build()
    truth = true(model) if true else gradients(model, batch(), regularizer(model).penalty)
    largest = max(grad.abs().max().item() for grad in truth.values())
    return max((ours[k] - truth[k]).abs().max().item() for k in truth) / largest


def main(out: Path) -> None:
    rank, size = distributed.get_rank(), distributed.get_world_size()
    part = batch().chunk(size)[rank]
    mesh = init_device_mesh("cpu", (size,))
    results: dict[str, float] = {}
    for name, build in (("separate", separate), ("fused", fused)):
        whole = build()
        value = regularizer(whole).penalty().item()

        ddp = DistributedDataParallel(build())
        found = regularizer(ddp)
        results[f"ddp {name}"] = distance(build, gradients(ddp, part, found.penalty))
        doubled = DistributedDataParallel(build())
        twice = regularizer(doubled)
        results[f"ddp {name}, counted once per rank"] = distance(
            build, gradients(doubled, part, lambda twice=twice: size * twice.penalty())
        )

        ddp = DistributedDataParallel(build())
        found = regularizer(ddp)
        ddp(part).square().mean().backward()
        found.add_gradients()
        results[f"ddp {name}, add_gradients"] = distance(build, _collected(ddp))

        if name == "fused":
            ddp = DistributedDataParallel(build())
            results["ddp fused, running covariance"] = distance(
                build, running(ddp, part), lambda model: running(model, batch())
            )

        sharded = build()
        for layer in sharded:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        found = regularizer(sharded)
        results[f"fsdp {name} value"] = abs(found.penalty().item() - value) / value
        results[f"fsdp {name}"] = distance(build, gradients(sharded, part, found.penalty))
        metrics = found.metrics()
        expected = regularizer(whole).metrics()
        results[f"fsdp {name} metrics"] = max(
            abs(metrics[key] - expected[key]) / abs(expected[key]) for key in expected
        )

        sharded = build()
        for layer in sharded:
            fully_shard(layer, mesh=mesh)
        found = regularizer(sharded)
        sharded(part).square().mean().backward()
        found.add_gradients()
        results[f"fsdp {name}, add_gradients"] = distance(build, _collected(sharded))

    # a shard read as if it were whole: half of the heads, or half heads, are silently missing
    sharded = separate()
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    local = sum(
        regularizer(_on_shards(layer)).penalty()
        for layer in sharded
        if isinstance(layer, Attention)
    )
    assert isinstance(local, Tensor)
    true = regularizer(separate()).penalty().item()
    results["fsdp separate, local shards"] = abs(local.item() - true) / true

    parallel = separate()
    plan = {
        "q_proj": ColwiseParallel(),
        "k_proj": ColwiseParallel(),
        "v_proj": ColwiseParallel(),
        "o_proj": RowwiseParallel(),
    }
    for layer in parallel:
        parallelize_module(layer, mesh, plan)  # type: ignore[arg-type]
    found = regularizer(parallel)
    results["tensor parallel"] = distance(separate, gradients(parallel, batch(), found.penalty))
    if rank == 0:
        out.write_text(json.dumps(results))


def _on_shards(layer: Attention) -> nn.Sequential:
    """A module of this rank's rows alone, as if they were the whole projection."""
    copy = Attention()
    for name in ("q_proj", "k_proj"):
        weight = getattr(layer, name).weight.to_local().detach().clone()
        getattr(copy, name).weight = nn.Parameter(weight)
    return nn.Sequential(copy)
