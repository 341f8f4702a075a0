"""Which signal tells that attention will collapse, how early, and how often it is wrong?

python benchmarks/study_alarms.py run             # 300 tiny trainings into out/alarms, resumable
python benchmarks/study_alarms.py publish         # from there to results/alarms/runs.jsonl.gz
python benchmarks/study_alarms.py tables          # docs/alarms.md from results/alarms

What a collapse is, and how signals are scored, stands in docs/alarms.md and was written down before
the runs were made.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from locater.control.stabilizers import stabilize
from locater.core.theory import predicted_attention
from locater.engines import one_thread
from locater.files import keep, kept
from locater.models.live import find_attention
from locater.paper.lab.batches import Material, load_material
from locater.paper.lab.model import Transformer
from locater.paper.lab.presets import base, modern
from locater.paper.lab.settings import TrainConfig
from locater.paper.lab.train import seed_dropout
from locater.probe.probe import Probe

STEPS, EVERY = 500, 20
TEXT: dict[str, Any] = {
    "corpus": "embedded",
    "vocabulary": "bpe",
    "vocabulary_size": 512,
    "tokens": 32,
    "batch": 16,
    "steps": STEPS,
}
MODERN: dict[str, Any] = {**TEXT, "warmup": 50, "layers": 2}
SHAPES = {
    "paper 32 x 1": replace(base(32, 1, cpu=True), **TEXT),
    "paper 32 x 3": replace(base(32, 3, cpu=True), **TEXT),
    "paper 64 x 2": replace(base(64, 2, cpu=True), **TEXT, heads=2),
    "modern 32 x 2": replace(modern(), **MODERN, dim=32, heads=2, kv_heads=1, ffn=88),
    "modern 64 x 2": replace(modern(), **MODERN, dim=64, ffn=172),
}
METHODS = ("locater", "qk-clip", "sigma-reparam", "entropy-floor")
RATES = {
    ("paper", "preset"): (1e-3, 1e-2, 2e-2),
    ("paper", "rising"): (1e-2, 2e-2, 5e-2, 0.15),
    ("modern", "preset"): (3e-3, 3e-2, 0.2),
    ("modern", "rising"): (3e-2, 0.1, 0.3, 1.0),
}
"""Learning rates without a method, by family and schedule; the method's is the last but one of
`rising` and the last of `preset`."""
RISE = 400
"""Steps over which `rising` goes up to its learning rate, evenly: what goes wrong does so late."""
CHOOSING, JUDGING = (0, 1), (2, 3)
"""Seeds whose runs choose limits, and seeds whose runs judge them."""

Record = dict[str, Any]


def plan() -> list[tuple[str, str, str, float, int]]:
    """Every run: shape, schedule, method, learning rate, seed; seed after seed."""
    return [
        (shape, schedule, method, rate, seed)
        for seed in (0, 2, 1, 3)
        for shape in SHAPES
        for schedule in ("preset", "rising")
        for method, rate in _settings(*shape.split()[:1], schedule)
    ]


def _settings(family: str, schedule: str) -> list[tuple[str, float]]:
    rates = RATES[family, schedule]
    hot = rates[-1] if schedule == "preset" else rates[-2]
    return [("none", rate) for rate in rates] + [(method, hot) for method in METHODS]


def train(shape: str, schedule: str, method: str, rate: float, seed: int) -> Record:
    """One training with everything that is measured of it, until its end or its divergence."""
    config = replace(SHAPES[shape], learning_rate=rate, seed=seed)
    if schedule == "rising":
        config = replace(config, warmup=RISE, schedule="constant")
    material = load_material(config, "embedded")
    model = material.model(config)
    stabilizer = stabilize(model, method)
    options = {"lr": rate, "weight_decay": config.weight_decay, "fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    stabilizer.on(optimizer)
    began, steps = time.process_time(), list[Record]()
    first: dict[str, torch.Tensor] = {}
    norm = math.nan
    for step in range(STEPS + 1):
        if step % EVERY == 0:
            steps.append({"step": step, "gradient": norm, **measure(model, material, first)})
            if not math.isfinite(steps[-1]["loss"]):
                break
        if step < STEPS:
            norm = advance(model, material, config, step, optimizer, stabilizer)
    stabilizer.remove()
    seconds = time.process_time() - began
    about: Record = {"shape": shape, "schedule": schedule, "method": method, "rate": rate}
    about |= {"seed": seed, "seconds": round(seconds, 2)}
    return {**about, "measured": [{k: rounded(v) for k, v in one.items()} for one in steps]}


def advance(
    model: Transformer,
    material: Material,
    config: TrainConfig,
    step: int,
    optimizer: torch.optim.Optimizer,
    stabilizer: Any,
) -> float:
    """One step; the norm of its gradient before any clipping."""
    seed_dropout(torch.device("cpu"), config.seed, step, 0)
    inputs, targets = material.train.at(step)
    model.train()
    loss = model.loss(inputs, targets) + stabilizer.penalty()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf)
    for group in optimizer.param_groups:
        group["lr"] = config.rate_at(step)
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


@torch.no_grad()
def measure(model: Transformer, material: Material, first: dict[str, torch.Tensor]) -> Record:
    """All signals of the model as it is now, on a batch that is always the same."""
    inputs, targets = (part[:32] for part in material.valid.at(0))
    model.eval()
    with Probe(model, queries="all", strict=False) as probe:
        record: Record = {"loss": model.loss(inputs, targets).item()}
    if not math.isfinite(record["loss"]) or probe.unseen:
        return {"loss": math.inf}
    heads, ranks = probe.records, probe.rank
    entropy = {"entropy": torch.tensor([one.entropy for one in heads])}
    r, eta, energy, predicted = [], [], [], []
    generator = torch.Generator().manual_seed(0)
    for attention in find_attention(model):
        form, process = attention.form().to(torch.float64), probe.process(attention.layout.name)
        spectrum = form.spectrum()
        r.append(spectrum.r.abs())
        eta.append(spectrum.eta)
        energy.append(spectrum.spectral_norm**2 / spectrum.frobenius_squared)
        drawn = predicted_attention(form, process, draws=64, generator=generator)
        predicted.append(drawn.entropy)
    entropy["predicted"] = torch.cat(predicted)
    for name, values in entropy.items():
        share = values / first.setdefault(name, values)
        record |= {name: share.amin().item(), f"mean_{name}": share.mean().item()}
    return record | {
        "logit": max(one.max_logit for one in heads),
        "trace": torch.cat(r).amax().item(),
        "eta": torch.cat(eta).amax().item(),
        "energy": torch.cat(energy).amax().item(),
        "residual": min(one.residual for one in ranks),
        "rank": min(one.effective_rank for one in ranks),
    }


def rounded(value: float) -> float | int | None:
    """Four digits; None for what is no number."""
    if isinstance(value, int):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else None


def run(store: Path) -> None:
    """Make what is missing; one run is one file."""
    every = plan()
    with one_thread():
        for place, setting in enumerate(every):
            path = store / f"{'-'.join(str(part).replace(' ', '') for part in setting)}.json"
            if kept(path, dict, print) is None:
                keep(path, train(*setting))
                print(f"{place + 1} of {len(every)}: {path.stem}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", choices=("run",))
    parser.add_argument("--store", type=Path, default=Path("out/alarms"))
    given = parser.parse_args()
    run(given.store)


if __name__ == "__main__":
    main()
