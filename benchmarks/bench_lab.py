"""Claim: the laboratory trains the paper's models faster than a plain loop, in far less memory.

One thread, CPU time, every variant in a process of its own; a step is 64 sequences of 64 tokens
with a vocabulary of 33,278.  "plain" is the same model with nn.Linear and F.cross_entropy in
float32 and torch's AdamW as it comes; "trainer" is the Hugging Face Trainer on a GPT-2 of the same
shape; "fp32" and "bf16" are the steps of `locater train --precision fp32` and `bf16`, the second
only where the CPU multiplies in bfloat16, and "former" is bf16 with the output layer of version
0.1, whose probabilities were float32.
Memory is the peak of a step above what the process held before it, parameters and moments included.
Aims: three times the plain loop's speed, 1.5 times the former output layer's at d = 128 and 1.7
times at d = 32, a fifth of the plain loop's memory, and all measurements of a run together under
5 % of its time.  Without bfloat16 the products alone bound the speed: the share of the machine's
own rate for large products says how near the bound is.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from former_loss import FormerLoss
from timing import Timing, cpu_time, ratio
from torch.nn import functional

from locater.paper.lab.batches import Batches
from locater.paper.lab.loss import is_native
from locater.paper.lab.model import Transformer, TransformerConfig
from locater.paper.lab.settings import TrainConfig
from locater.paper.lab.train import Meter

VOCABULARY, LENGTH, BATCH = 33_278, 64, 64
TOKENS = LENGTH * BATCH


def fast_dtype(device: torch.device | str = "cpu") -> torch.dtype | None:
    """bfloat16 where the device multiplies in it, else None: other CPUs emulate it, slowly."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else None
    return torch.bfloat16 if is_native(torch.bfloat16, device.type) else None


PEERS = ("plain", "trainer", *(("former",) if fast_dtype() else ()))
OURS = ("fp32", "bf16") if fast_dtype() else ("fp32",)


def memory(what: str) -> float:
    """This process' memory in MB: VmRSS now, VmHWM at most since `forget_peak` (Linux)."""
    (line,) = re.findall(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) / 1024


def forget_peak() -> float:
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def batches() -> Batches:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(VOCABULARY, (20 * TOKENS + 1,), generator=generator)
    return Batches(text, length=LENGTH, batch=BATCH, seed=0)


def built(dim: int) -> Transformer:
    config = TransformerConfig(vocabulary=VOCABULARY, dim=dim, length=LENGTH)
    return Transformer(config, torch.Generator().manual_seed(0))


def loop(dim: int, variant: str) -> tuple[Transformer, Callable[[], None]]:
    """A model and its training step."""
    model, source = built(dim), batches()
    model.loss_dtype = torch.bfloat16 if variant == "bf16" else None
    settings = {"fused": True} if variant in (*OURS, "former") else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.5e-5, weight_decay=0.01, **settings)
    count = 0

    def step() -> None:
        nonlocal count
        inputs, targets = source.at(count)
        optimizer.zero_grad()
        if variant in OURS:
            with torch.autocast("cpu", torch.bfloat16, enabled=variant == "bf16"):
                loss = model.loss(inputs, targets)
        elif variant == "former":
            with torch.autocast("cpu", torch.bfloat16):
                rows = model(inputs).flatten(0, 1)
                loss = FormerLoss.apply(rows, model.output.weight, targets.flatten())
        else:
            logits = model.output(model(inputs))
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        count += 1

    return model, step


def measure_loop(dim: int, variant: str, repeats: int) -> dict[str, object]:
    model, step = loop(dim, variant)
    step()  # the optimizer's moments exist and libraries are loaded
    model.zero_grad()
    before = forget_peak()
    step()
    found: dict[str, object] = {"memory": memory("VmHWM") - before}
    found["seconds"] = cpu_time(step, repeats=repeats, warmup=False).seconds
    if variant in OURS and repeats:
        meter = Meter(model, batches(), batches(), torch.device("cpu"))
        for name, predicts in (("measure", False), ("predict", True)):
            work = cpu_time(lambda predicts=predicts: meter.measure(predicts=predicts), repeats=3)
            found[name] = work.seconds
    return found


def measure_trainer(dim: int, repeats: int) -> dict[str, object]:
    """The Hugging Face Trainer on a GPT-2 with one layer, one head and an untied output."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=dim,
        n_inner=dim,
        n_layer=1,
        n_head=1,
        activation_function="relu",
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    seconds: list[float] = []
    growth: list[float] = []

    class Watch(TrainerCallback):
        started = baseline = 0.0

        def on_step_begin(self, *_: object, **__: object) -> None:
            self.baseline = forget_peak()
            self.started = time.process_time()

        def on_step_end(self, *_: object, **__: object) -> None:
            seconds.append(time.process_time() - self.started)
            growth.append(memory("VmHWM") - self.baseline)

    inputs = batches().inputs
    rows = [{"input_ids": row, "labels": row} for row in inputs]
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            per_device_train_batch_size=BATCH,
            max_steps=repeats + 2,
            learning_rate=2.5e-5,
            lr_scheduler_type="constant",
            max_grad_norm=0,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(
            GPT2LMHeadModel(config), settings, train_dataset=rows, callbacks=[Watch()]
        )
        trainer.train()
    return {"seconds": seconds[2:], "memory": growth[1]}


def measure(variant: str, dim: int, repeats: int) -> None:
    torch.set_num_threads(1)
    if variant == "gemm":
        one = torch.ones(2048, 2048)
        result = torch.empty_like(one)
        timing = cpu_time(lambda: torch.mm(one, one, out=result), repeats=repeats)
        found: dict[str, object] = {"seconds": timing.seconds}
    elif variant == "trainer":
        found = measure_trainer(dim, repeats)
    else:
        found = measure_loop(dim, variant, repeats)
    print(json.dumps(found))


def in_process(variant: str, dim: int, repeats: int) -> dict[str, list[float]]:
    """Without repeats the memory is wanted: then what is freed goes back to the system at once."""
    command = [sys.executable, __file__, variant, str(dim), str(repeats)]
    setting = {} if repeats else {"MALLOC_MMAP_THRESHOLD_": "65536"}
    environment = os.environ | setting
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    results: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return results


def operations(dim: int) -> float:
    """Of a step: two per weight and token, once forward and twice backward."""
    return 3 * 2 * TOKENS * (VOCABULARY * dim + 6 * dim * dim + 2 * LENGTH * dim)


def report(dim: int, repeats: int) -> None:
    variants = (*PEERS, *OURS)
    found = {variant: in_process(variant, dim, repeats) for variant in variants}
    peak = {variant: float(str(in_process(variant, dim, 0)["memory"])) for variant in variants}
    gemm = in_process("gemm", 2048, 5)
    times = {variant: Timing(one["seconds"]) for variant, one in found.items()}
    print(f"d = {dim}")
    for variant in variants:
        rate = TOKENS / times[variant].median
        print(f"  {variant}: {times[variant]} a step, {rate:,.0f} tokens/s, "
              f"{peak[variant]:.0f} MB")  # fmt: skip
    for own in OURS:
        for peer in PEERS:
            less = peak[peer] / peak[own]
            faster = ratio(times[peer], times[own])
            print(f"  {own} against {peer}: {faster} faster, {less:.3g}x less memory")
    ours = times[OURS[-1]]
    machine = 2 * 2048**3 / min(gemm["seconds"]) / 1e9
    reached = operations(dim) / ours.median / 1e9
    alone = operations(dim) / machine / 1e9
    print(f"  {OURS[-1]}: {reached:.0f} GFLOP/s; large float32 products {machine:.0f}; "
          f"{reached / machine:.0%}; products at that rate alone: {alone:.3g} s")  # fmt: skip
    config = TrainConfig()
    once, exact = (Timing(found[OURS[-1]][one]) for one in ("measure", "predict"))
    mean = once.median + (exact.median - once.median) / config.predict_every
    share = mean / (config.measure_every * ours.median)
    print(f"  a measurement {once}, with the exact prediction {exact}: every "
          f"{config.measure_every} steps, every {config.predict_every}th exact, "
          f"{share:.2%} of the time")  # fmt: skip


def main() -> None:
    kind = fast_dtype()
    print(f"products of the output layer: {'bfloat16' if kind else 'float32 (no bfloat16 here)'}")
    for dim in (128, 32):
        report(dim, 3)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
