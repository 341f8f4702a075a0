"""Claim: the study of Fig. 5 costs a thirtieth of a plain loop, less than drawing its tokens alone.

ρ and the attention entropy of 9 (mean, scale) pairs x 10 drawn W_QK x 300 random walks of 40 tokens
in 128 dimensions, by (i) a numpy loop over draws and sequences, (ii) numpy, vectorised over the
sequences of a draw, and `simulate` with either estimator; CPU time on one core.  Beside it the time
that drawing the same random numbers takes, the wall time on all cores, and how many sequences a
standard error of .005 asks for.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from timing import Timing, cpu_time, ratio

from locater.simulation import Estimator, SimulateConfig, simulate

STUDY = SimulateConfig(exact=False)  # the paper's setting
TOKENS, MODEL, SEQUENCES = STUDY.tokens, STUDY.model, STUDY.sequences
UNITS = [pair for pair in STUDY.pairs for _ in range(STUDY.draws)]
Study = list[tuple[np.ndarray, float]]


def drawn_form(rng: np.random.Generator, mean: float, scale: float) -> np.ndarray:  # noqa: TID251
    basis, _ = np.linalg.qr(rng.standard_normal((MODEL, MODEL)))
    return (basis * rng.normal(mean, scale, MODEL)) @ basis.T


def loop() -> Study:
    """What a reader of the paper would write."""
    rng, results = np.random.default_rng(0), []  # noqa: TID251
    for mean, scale in UNITS:
        form = drawn_form(rng, mean, scale)
        opened, entropy = np.zeros(TOKENS), 0.0
        for _ in range(SEQUENCES):
            walk = rng.standard_normal((TOKENS, MODEL)).cumsum(axis=0)
            logits = walk @ (form @ walk[-1]) / math.sqrt(MODEL)
            score = (logits - logits.mean() + 1) / TOKENS
            opened += (score >= 0) & (score <= 1)
            attention = np.exp(logits - logits.max())
            attention /= attention.sum()
            entropy -= (attention * np.log(attention + 1e-300)).sum()
        results.append((opened / SEQUENCES, entropy / SEQUENCES))
    return results


def vectorised() -> Study:
    """The same without the loop over sequences."""
    rng, results = np.random.default_rng(0), []  # noqa: TID251
    for mean, scale in UNITS:
        form = drawn_form(rng, mean, scale)
        walk = rng.standard_normal((SEQUENCES, TOKENS, MODEL)).cumsum(axis=1)
        asked = walk[:, -1] @ form.T
        logits = np.einsum("ntm,nm->nt", walk, asked) / math.sqrt(MODEL)
        score = (logits - logits.mean(axis=1, keepdims=True) + 1) / TOKENS
        opened = ((score >= 0) & (score <= 1)).mean(axis=0)
        attention = np.exp(logits - logits.max(axis=1, keepdims=True))
        attention /= attention.sum(axis=1, keepdims=True)
        entropy = -(attention * np.log(attention + 1e-300)).sum(axis=1).mean()
        results.append((opened, entropy))
    return results


def random_numbers(config: SimulateConfig) -> None:
    """Only draw what `simulate` draws."""
    shape = (TOKENS, MODEL) if config.estimator == "count" else (TOKENS + MODEL,)
    generator = torch.Generator().manual_seed(0)
    for _ in range(config.units):
        torch.randn(MODEL, generator=generator, dtype=torch.float64)
        for start in range(0, config.sequences, 500):
            torch.randn(min(500, config.sequences - start), *shape, generator=generator)


def wall_time(config: SimulateConfig, repeats: int = 5) -> Timing:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        simulate(config)
        seconds.append(time.perf_counter() - start)
    return Timing(seconds)


def sequences_needed(error: float = 0.005) -> dict[Estimator, float]:
    """Sequences for this standard error at the worst position, averaged over the pairs."""
    config = replace(STUDY, sequences=20_000, draws=2)
    needed: dict[Estimator, list[float]] = {"conditional": [], "count": []}
    for unit in simulate(config).units:
        for estimator, found in needed.items():
            profile = getattr(unit, estimator)
            found.append(config.sequences * (profile.standard_error.max().item() / error) ** 2)
    return {estimator: sum(found) / len(found) for estimator, found in needed.items()}


def main() -> None:
    with threadpool_limits(1):
        study = {"loop": loop(), "vectorised": vectorised()}
        slow = {
            "numpy loop": cpu_time(loop, repeats=3, warmup=False),
            "numpy, vectorised": cpu_time(vectorised, repeats=3, warmup=False),
        }
    for name, timing in slow.items():
        print(f"{name}: {timing}")
    needed, numbers, takes = sequences_needed(), {}, {}
    for estimator in needed:
        config = replace(STUDY, estimator=estimator)
        takes[estimator] = cpu_time(lambda config=config: simulate(config, workers=1), repeats=7)
        numbers[estimator] = cpu_time(lambda config=config: random_numbers(config), repeats=7)
        print(f"simulate, {estimator}: {takes[estimator]}")
        print(f"  on {os.cpu_count()} cores, wall: {wall_time(config)}")
        for name, timing in slow.items():
            print(f"  {name} takes {ratio(timing, takes[estimator])}")
        print(f"  its random numbers alone: {numbers[estimator]}")
        print(f"  simulate takes {ratio(takes[estimator], numbers[estimator])} of that")
        many = replace(config, draws=1, sequences=20_000)
        ours = cpu_time(lambda many=many: simulate(many, workers=1), repeats=3)
        alone = cpu_time(lambda many=many: random_numbers(many), repeats=3)
        print(f"  with {many.sequences} sequences {ratio(ours, alone)}")
        seconds = ours.median / (many.units * many.sequences) * needed[estimator]
        print(f"  a standard error of .005: {needed[estimator]:.0f} sequences, {seconds:.3g} s")
    share = ratio(takes["conditional"], numbers["count"])
    print(f"simulate, conditional, against drawing whole sequences alone: {share}")
    simulation = simulate(STUDY)
    for name, results in study.items():
        gaps = []
        for pair in (pair for pair in STUDY.pairs if pair[1] == 0.01):  # all draws are alike there
            own = [rho for unit, (rho, _) in zip(UNITS, results, strict=True) if unit == pair]
            gaps.append(np.abs(np.mean(own, 0) - simulation.mean_profile(*pair).rho.numpy()).max())
        print(f"{name}: ρ of scale 0.01 differs from ours by at most {max(gaps):.3f}")


if __name__ == "__main__":
    main()
