"""Claim: a probe at every=100 takes under 1 % of training, and 10 times less memory than T × T.

One thread, CPU time.  A training step of GPT-2 small's shape (SDPA, AdamW) without a probe, and
with one that measures every step, its last query or all queries; turns are taken, so that all
see the same machine.  `output_attentions=True` on eager attention is the usual way to them.
Steps differ by more than a probe takes, so its own work is also timed by a clock around it, and the
counter that runs between measurements on a model that does nothing.
Memory is the peak above the model and its inputs, at 4,096 tokens, each in a process of its own.
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
from timing import Timing, cpu_time, ratio
from torch import nn
from torch.nn import functional

from locater import Probe

TOKENS, LONG = 512, 4096


def memory(what: str) -> float:
    """This process' memory in MB: VmRSS now, VmHWM at most since `forget_peak` (Linux)."""
    (line,) = re.findall(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) / 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def step(repeats: int) -> None:
    """Training steps with and without a probe, by turns; what each took more than the plain one."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(1)
    model: Any = GPT2LMHeadModel(GPT2Config(attn_implementation="sdpa"))
    eager: Any = GPT2LMHeadModel(GPT2Config(attn_implementation="eager"))
    eager.load_state_dict(model.state_dict())
    tokens = torch.randint(50257, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    optimizers = {id(one): torch.optim.AdamW(one.parameters(), lr=1e-5) for one in (model, eager)}

    def train(one: Any, **more: Any) -> None:
        optimizers[id(one)].zero_grad()
        one(tokens, labels=tokens, **more).loss.backward()
        optimizers[id(one)].step()

    def probed(**settings: Any) -> None:
        with Probe(model, keep=0, **settings):
            train(model)

    variants = {
        "plain": lambda: train(model),
        "last query": lambda: probed(),
        "all queries": lambda: probed(queries="all"),
        "eager": lambda: train(eager),
        "output_attentions": lambda: train(eager, output_attentions=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(repeats + 1):
        for name, work in variants.items():
            start = time.process_time()
            work()
            if turn:
                seconds[name].append(time.process_time() - start)
    print(json.dumps(seconds))


def alone(repeats: int) -> None:
    """CPU seconds that a measured pass spends in the probe's own work, by a clock around it."""
    from transformers import GPT2Config, GPT2Model

    torch.set_num_threads(1)
    model = GPT2Model(GPT2Config(attn_implementation="sdpa")).train()
    tokens = torch.randint(50257, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    seconds: dict[str, list[float]] = {"last": [], "all": []}
    for turn in range(repeats + 1):
        for queries, found in seconds.items():
            probe = Probe(model, queries=queries, keep=0)  # type: ignore[arg-type]
            spent = [0.0]

            def clocked(work: Any, spent: list[float] = spent) -> Any:
                def timed(*args: Any) -> Any:
                    start = time.process_time()
                    result = work(*args)
                    spent[0] += time.process_time() - start
                    return result

                return timed

            probe._heard = clocked(probe._heard)  # type: ignore[method-assign]
            probe._left = clocked(probe._left)  # type: ignore[method-assign]
            with probe, torch.no_grad():
                model(tokens)
            if turn:
                found.append(spent[0])
    print(json.dumps(seconds))


class Nothing(nn.Module):
    """A model that does nothing: what is left is the probe's own cost."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs


def between(repeats: int) -> None:
    """CPU seconds that a forward pass takes more when it is not measured."""
    torch.set_num_threads(1)
    model, inputs, calls = Nothing(), torch.zeros(1), 20_000

    def work() -> None:
        for _ in range(calls):
            model(inputs)

    plain = cpu_time(work, repeats=repeats)
    with Probe(model, every=10**9):
        model(inputs)
        counted = cpu_time(work, repeats=repeats)
    more = [(b - a) / calls for a, b in zip(plain.seconds, counted.seconds, strict=True)]
    print(json.dumps({"seconds": more}))


class Fused(nn.Module):
    """Twelve heads of 64, as in GPT-2 small."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def materialized(query: torch.Tensor, key: torch.Tensor) -> float:
    """Mean entropy and propagation from the attention matrix, as one would write it down."""
    logits = query @ key.mT / query.shape[-1] ** 0.5
    visible = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    entropy = torch.special.entr(weights).sum(-1).mean()
    count = visible.sum(-1, keepdim=True)
    mean = logits.masked_fill(~visible, 0).sum(-1, keepdim=True) / count
    score = (logits - mean + 1) / count
    rho = ((score >= 0) & (score <= 1) & visible).sum(2) / visible.sum(0)
    return entropy.item() + rho.mean().item()


def peak(variant: str) -> None:
    """Peak memory above the inputs at 4,096 tokens."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 12, LONG, 64, generator=generator) for _ in range(3)]
    small = [one[:, :, :64] for one in inputs]
    model = Fused()

    def work(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if variant == "materialized":
            model(query, key, value)
            materialized(query, key)
        elif variant == "plain":
            model(query, key, value)
        else:
            with Probe(model, queries="all" if variant == "all queries" else "last", keep=0):
                model(query, key, value)

    work(*small)  # libraries load here, not in the measurement
    forget_peak()
    before = memory("VmRSS")
    start = time.process_time()
    work(*inputs)
    print(json.dumps({"memory": memory("VmHWM") - before, "seconds": time.process_time() - start}))


def in_process(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def main() -> None:
    steps = {name: Timing(seconds) for name, seconds in in_process("step", "3").items()}
    plain = steps["plain"]
    print(f"GPT-2 small's shape, a step of {TOKENS} tokens: {plain} plain, {steps['eager']} eager")
    counting = Timing(in_process("between", "7")["seconds"])
    print(f"  a forward pass that is not measured: {1e6 * counting.median:.2g} µs more")
    for name in ("last query", "all queries", "output_attentions"):
        base = steps["eager"] if name == "output_attentions" else plain
        more = [a - b for a, b in zip(steps[name].seconds, base.seconds, strict=True)]
        share = Timing([100 * one / base.median for one in more])
        line = (
            f"  {name}: {steps[name]}, {share.median:.1f} % "
            f"[{min(share.seconds):.1f}, {max(share.seconds):.1f}] more than "
            f"{'eager' if base is not plain else 'plain'}; {ratio(steps[name], plain)} of plain"
        )
        if base is plain:
            rare = [one / 100 + 100 * counting.median / plain.median for one in share.seconds]
            line += f"; at every=100 {Timing(rare).median:.3f} % [{min(rare):.3f}, {max(rare):.3f}]"
        print(line)
    for name, seconds in in_process("alone", "5").items():
        own = Timing([100 * one / plain.median for one in seconds])
        print(
            f"  the probe's own work, {name} queries, by a clock: {Timing(seconds)}, "
            f"{own.median:.2f} % [{min(own.seconds):.2f}, {max(own.seconds):.2f}] of a step"
        )
    names = ("plain", "last query", "all queries", "materialized")
    runs = {name: [in_process("peak", name) for _ in range(3)] for name in names}
    print(f"12 heads, {LONG} tokens, causal: peak memory above the inputs, CPU seconds")
    most = [one["memory"] for one in runs["materialized"]]
    for name in names:
        found = [one["memory"] for one in runs[name]]
        seconds = Timing([one["seconds"] for one in runs[name]])
        low, high = min(most) / max(found), max(most) / min(found)
        print(
            f"  {name}: {sorted(found)[1]:.0f} MB [{min(found):.0f}, {max(found):.0f}], "
            f"{seconds}; {sorted(most)[1] / sorted(found)[1]:.3g}x [{low:.3g}, {high:.3g}] "
            "less than materialized"
        )


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        work: dict[str, Any] = {"step": step, "between": between, "alone": alone}
        if sys.argv[1] in work:
            work[sys.argv[1]](int(sys.argv[2]))
        else:
            peak(sys.argv[2])
