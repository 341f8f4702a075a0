"""Claim: LocAteR at Llama-7B size is over 40 times faster and 30 times smaller than by definition.

One thread, CPU time; every variant in a process of its own, whose peak memory is counted above the
parameters and their gradients.  "naive" multiplies every head's W_QK = W_Qᵀ W_K out and leaves the
rest to autograd; "ours" is `LocAteR(model).penalty().backward()`.  At the end, the share of a whole
training step (GPT-2 small, 1,024 tokens, AdamW) that the penalty takes; the aim is under 1 %.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from timing import Timing, cpu_time, ratio
from torch import Tensor, nn

from locater import LocAteR, LocAteRConfig, Pair

CONFIG = LocAteRConfig(scale_strength=100.0, mean_strength=1.0)


@dataclass(frozen=True)
class Size:
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    model: int
    repeats: dict[str, int]


SIZES = {
    "paper, 1 layer": Size(1, 1, 1, 128, 128, {"naive": 301, "ours": 301}),
    "paper, 6 layers": Size(6, 1, 1, 128, 128, {"naive": 101, "ours": 101}),
    "GPT-2 small": Size(12, 12, 12, 64, 768, {"naive": 3, "ours": 11}),
    "Llama-7B layer": Size(1, 32, 32, 128, 4096, {"naive": 1, "ours": 11}),
    "the same, 8 key heads": Size(1, 32, 8, 128, 4096, {"naive": 1, "ours": 11}),
}


class Attention(nn.Module):
    """The queries and keys of one layer, as a checkpoint stores them, with gradients in place."""

    def __init__(self, size: Size, generator: torch.Generator) -> None:
        super().__init__()
        for name, heads in (("ask", size.heads), ("answer", size.kv_heads)):
            weight = torch.empty(heads * size.head_dim, size.model)
            linear = nn.Linear(size.model, 1, bias=False)
            linear.weight = nn.Parameter(weight.normal_(generator=generator).div_(size.model**0.5))
            linear.weight.grad = torch.zeros_like(linear.weight)
            self.add_module(name, linear)


def naive(model: nn.ModuleList, size: Size) -> Tensor:
    """The definition: every head's model × model matrix, by autograd."""
    total = torch.zeros(())
    share = size.heads // size.kv_heads
    for layer in model:
        queries = layer.get_submodule("ask").weight.unflatten(0, (size.heads, size.head_dim))
        keys = layer.get_submodule("answer").weight.unflatten(0, (size.kv_heads, size.head_dim))
        for head in range(size.heads):
            form = queries[head].mT @ keys[head // share]
            gap = form.trace() - CONFIG.target
            scale = CONFIG.scale_strength * form.square().sum()
            total = total + scale + CONFIG.mean_strength * gap.square()
    return total


def memory(what: str) -> float:
    """This process' memory in MB: VmRSS now, VmHWM at most since `forget_peak` (Linux)."""
    (line,) = re.findall(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) / 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def warm_up(variant: str) -> None:
    """The same work on a small layer: libraries load here, not in the measurement."""
    size = Size(1, 4, 4, 16, 64, {})
    model = nn.ModuleList([Attention(size, torch.Generator().manual_seed(0))])
    ask, answer = model[0].get_submodule("ask"), model[0].get_submodule("answer")
    regularizer = LocAteR(model, CONFIG, pairs=[Pair(ask, answer, heads=size.heads)])
    (regularizer.penalty() if variant == "ours" else naive(model, size)).backward()


def measure(name: str, variant: str) -> None:
    """Build the layers, run one pass for its memory and several for their time; print JSON."""
    torch.set_num_threads(1)
    size = SIZES[name]
    generator = torch.Generator().manual_seed(0)
    model = nn.ModuleList([Attention(size, generator) for _ in range(size.layers)])
    pairs = [
        Pair(layer.get_submodule("ask"), layer.get_submodule("answer"), heads=size.heads)
        for layer in model
    ]
    regularizer = LocAteR(model, CONFIG, pairs=pairs)

    def work() -> None:
        (regularizer.penalty() if variant == "ours" else naive(model, size)).backward()

    warm_up(variant)
    forget_peak()
    before = memory("VmRSS")
    single = size.repeats[variant] == 1  # then the pass that is timed is the one that is weighed
    if not single:
        work()
    timing = cpu_time(work, repeats=size.repeats[variant], warmup=False) if single else None
    growth = memory("VmHWM") - before
    timing = timing or cpu_time(work, repeats=size.repeats[variant])
    print(json.dumps({"seconds": timing.seconds, "memory": growth}))


def gpt2_step(repeats: int) -> None:
    """Train GPT-2 small for a few steps of 1,024 tokens, with and without the penalty by turns."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(1)
    model = GPT2LMHeadModel(GPT2Config())
    tokens = torch.randint(50257, (1, 1024), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    config = LocAteRConfig(scale_strength=1e-3, mean_strength=1e-3, reduce="mean")
    regularizer = LocAteR(model, config)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * (repeats + 1)):
        is_on = turn % 2 == 0
        start = time.process_time()
        optimizer.zero_grad()
        penalty = regularizer.penalty() if is_on else 0.0
        (penalty + model(tokens, labels=tokens).loss).backward()
        optimizer.step()
        if turn > 1:
            seconds[is_on].append(time.process_time() - start)
    alone = cpu_time(lambda: regularizer.penalty().backward(), repeats=11)
    print(json.dumps({"on": seconds[True], "off": seconds[False], "alone": alone.seconds}))


def in_process(*arguments: str) -> dict[str, list[float]]:
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    results: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return results


def main() -> None:
    for name in SIZES:
        found = {variant: in_process(name, variant) for variant in ("naive", "ours")}
        times = {variant: Timing(one["seconds"]) for variant, one in found.items()}
        growth = {variant: max(float(one["memory"]), 0.1) for variant, one in found.items()}
        print(f"{name}: naive {times['naive']}, ours {times['ours']}")
        print(
            f"  {ratio(times['naive'], times['ours'])} faster; memory {growth['naive']:.1f} MB "
            f"against {growth['ours']:.1f} MB, {growth['naive'] / growth['ours']:.3g}x less"
        )
    step = {name: Timing(seconds) for name, seconds in in_process("step", "5").items()}
    on, off, alone = step["on"], step["off"], step["alone"]
    differences = [a - b for a, b in zip(on.seconds, off.seconds, strict=True)]
    shares = Timing([100 * one / off.median for one in differences])
    print(f"GPT-2 small, a step of 1,024 tokens: {off} without, {on} with the penalty")
    print(
        f"  {shares.median:.2f} % [{min(shares.seconds):.2f}, {max(shares.seconds):.2f}] of a step "
        f"by difference; the penalty and its gradient alone {alone}, "
        f"{100 * alone.median / off.median:.2f} % of a step"
    )


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    elif sys.argv[1] == "step":
        gpt2_step(int(sys.argv[2]))
    else:
        measure(sys.argv[1], sys.argv[2])
