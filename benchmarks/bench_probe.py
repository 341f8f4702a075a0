"""Claim: from T = 4,096 all rows cost 1.3 fused attentions; under 1 % of training at every=100.

One thread, CPU time.  One attention of 12 heads of 64, causal, at T = 1,024, 4,096 and 16,384: the
attention itself; all rows' entropy, distance, first and own key from one more fused attention; all
that a probe takes of all queries (also the largest logit and the last query by key); the same with
every row written out in blocks, as it was before; and the matrix that `output_attentions` gives,
with entropy from it.  Memory is the peak above the inputs, each in a process of its own.
Then a training step of GPT-2 small's shape (SDPA, AdamW), and by a clock around it a probe's own
work in it; and what a pass takes more that is not measured, on a model that does nothing.
`bench_probe.py rows 4096` and `bench_probe.py step` run one part.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from timing import Timing, cpu_time
from torch import nn
from torch.nn import functional

from locater import Probe
from locater.probe.rows import RealQueries, ScoredKeys, fused_rows, tally

LENGTHS, STEP_TOKENS = (1024, 4096, 16384), 512
VARIANTS = ("attention", "all rows", "probe", "written out", "output_attentions")


def memory(what: str) -> float:
    """This process' memory in MB: VmRSS now, VmHWM at most since it was last cleared (Linux)."""
    (line,) = re.findall(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) / 1024


def work(variant: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
    attention = ScoredKeys(query=query, key=key, scale=0.125, is_causal=True)
    if variant == "attention":
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    if variant == "all rows":
        return fused_rows(attention, RealQueries.of(attention), slice(0, 1))
    if variant == "probe":
        return tally(attention, "all", "last")
    if variant == "written out":
        return tally(attention, "all")
    logits = query @ key.mT * 0.125
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    weights = logits.masked_fill_(hidden, -torch.inf).softmax(-1)
    return torch.special.entr(weights).sum(-1).mean(), weights @ value


def one(variant: str, tokens: int, repeats: int) -> None:
    """CPU seconds and peak memory of one variant."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    inputs = [1.5 * torch.randn(1, 12, tokens, 64, generator=generator) for _ in range(3)]
    work(variant, *(part[:, :, :64] for part in inputs))  # libraries load here
    Path("/proc/self/clear_refs").write_text("5")
    before, seconds = memory("VmRSS"), []
    for _ in range(repeats):
        start = time.process_time()
        work(variant, *inputs)
        seconds.append(time.process_time() - start)
    print(json.dumps({"memory": memory("VmHWM") - before, "seconds": seconds}))


def rows(tokens: int) -> None:
    """A table of all variants at one length."""
    repeats, matrix = {1024: 9, 4096: 3}.get(tokens, 1), 4 * 12 * tokens**2 / 1e9
    found: dict[str, dict[str, Any]] = {}
    print(f"12 heads of 64, T = {tokens}, causal: CPU time, of the attention's, peak memory")
    for name in VARIANTS:
        if name == "output_attentions" and 2.2 * matrix > available():
            print(f"  {name}: not run, a matrix has {matrix:.1f} GB")
            continue
        found[name] = in_process("one", name, str(tokens), str(repeats))
        times, base = Timing(found[name]["seconds"]), Timing(found["attention"]["seconds"]).median
        most = found[name]["memory"]
        print(f"  {name}: {times}, {times.median / base:.2f}x, {most:.0f} MB", flush=True)


def available() -> float:
    """Memory that is free, in GB (Linux)."""
    (line,) = re.findall(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(line) / 1e6


def step(repeats: int) -> None:
    """A training step, and a probe's own work in its forward pass: no other is watched."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(1)
    tokens = torch.randint(50257, (1, STEP_TOKENS), generator=torch.Generator().manual_seed(0))
    model: Any = GPT2LMHeadModel(GPT2Config(attn_implementation="sdpa"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    seconds: dict[str, list[float]] = {"plain": []}
    for turn in range(repeats + 1):
        start = time.process_time()
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        if turn:
            seconds["plain"].append(time.process_time() - start)
    kinds: dict[str, dict[str, Any]] = {
        "last query": {"queries": "last"},
        "all queries": {"queries": "all"},
        "all, written out": {"queries": "all", "profiles": "all"},
    }
    for name, settings in kinds.items():
        probe, spent = Probe(model, keep=0, **settings), [0.0]
        clock(probe, spent)
        with probe, torch.no_grad():
            model(tokens[:, :64])
            for _ in range(repeats):
                spent[0] = 0.0
                model(tokens)
                seconds.setdefault(name, []).append(spent[0])
    print(json.dumps(seconds))


def clock(probe: Probe, spent: list[float]) -> None:
    """Add what a probe's own work takes up."""
    for name in ("attention_called", "attention_ends", "pass_ends"):
        method = getattr(type(probe), name).__get__(probe)

        def timed(*args: Any, method: Any = method) -> Any:
            start = time.process_time()
            result = method(*args)
            spent[0] += time.process_time() - start
            return result

        setattr(probe, name, timed)


class Nothing(nn.Module):
    """A model that does nothing: what is left is the probe's own cost."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


def between(repeats: int) -> None:
    """CPU seconds that a forward pass takes more when it is not measured."""
    torch.set_num_threads(1)
    model, inputs, calls = Nothing(), torch.zeros(1), 20_000

    def run() -> None:
        for _ in range(calls):
            model(inputs)

    plain = cpu_time(run, repeats=repeats)
    with Probe(model, every=10**9):
        model(inputs)
        counted = cpu_time(run, repeats=repeats)
    more = [(b - a) / calls for a, b in zip(plain.seconds, counted.seconds, strict=True)]
    print(json.dumps({"seconds": more}))


def in_process(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def training() -> None:
    found = {name: Timing(seconds) for name, seconds in in_process("steps", "2").items()}
    plain, counting = found["plain"], Timing(in_process("between", "3")["seconds"]).median
    print(f"GPT-2 small's shape, a training step of {STEP_TOKENS} tokens: {plain}")
    print(f"  a pass that is not measured: {1e6 * counting:.2g} µs more")
    for name in ("last query", "all queries", "all, written out"):
        share = 100 * found[name].median / plain.median
        rare = share / 100 + 100 * counting / plain.median
        print(f"  {name}: {found[name]}, {share:.2f} % of a step; at every=100 {rare:.3f} %")


def main() -> None:
    for tokens in LENGTHS:
        rows(tokens)
    training()


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    elif sys.argv[1] == "one":
        one(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        parts: dict[str, Any] = {"rows": rows, "steps": step, "between": between}
        if sys.argv[1] == "step":
            training()
        else:
            parts[sys.argv[1]](int(sys.argv[2]))
