"""Simulated signal propagation and attention entropy (Section 5, Fig. 5), beside the exact theory.

The unit of work is one drawn W_QK.  Its random stream follows from the seed and its own index, and
it runs on one thread, so a result has the same bits on any engine, with any number of workers, in
any order, and after any interruption.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from functools import partial
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.core.form import QKForm, covariance_root, semidefinite_root
from locater.core.process import TokenProcess, centered_kernel
from locater.core.softmax import propagates
from locater.core.theory import propagation
from locater.engines import Engine, one_thread, run_units
from locater.errors import ConfigError
from locater.files import write_file
from locater.simulation_records import Estimator as Estimator
from locater.simulation_records import SimulateConfig as SimulateConfig
from locater.simulation_records import Simulation as Simulation
from locater.simulation_records import UnitResult as UnitResult
from locater.simulation_records import generator_of, labeled_profile
from locater.simulation_records import preset as preset


def simulate(
    config: SimulateConfig,
    *,
    process: TokenProcess | None = None,
    store: Path | None = None,
    engine: Engine = "local",
    workers: int | None = None,
    ray_address: str | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Simulation:
    """Run all units and collect them; what is already in `store` is not run again.

    A `process` of your own replaces the named one.  `report` is called with the number of finished
    units and their total.

    >>> config = SimulateConfig(tokens=8, model=4, sequences=50, draws=2, pairs=((0.5, 0.1),))
    >>> simulation = simulate(config)
    >>> len(simulation.units), simulation.units[0].conditional.source
    (2, 'simulated')
    """
    with one_thread():
        plan = _Plan(config, process or config.token_process())
    paths = [] if store is None else _paths(store, plan)
    results = {index: unit for index, path in enumerate(paths) if (unit := _load(path))}
    report(len(results), config.units)
    missing = [index for index in range(config.units) if index not in results]
    work = partial(run_unit, plan)
    runs = run_units(work, missing, engine=engine, workers=workers, ray_address=ray_address)
    with closing(runs):
        for index, unit in runs:
            if paths:
                write_file(paths[index], json.dumps(unit.to_dict()))
            results[index] = unit
            report(len(results), config.units)
    return Simulation(config, [results[index] for index in range(config.units)])


def run_unit(plan: _Plan, index: int) -> UnitResult:
    """Draw one W_QK, simulate its scores and compute their exact ρ: deterministic on one thread."""
    config = plan.config
    mean, scale = config.pairs[index // config.draws]
    generator = generator_of(config, f"unit {index}")
    weights = plan.draw_weights(mean, scale, generator)
    white = plan.whiten(weights)
    temperature = config.temperature or math.sqrt(config.model)
    form, size = (white / temperature).float(), white.norm().item()
    tokens, done = config.tokens, config.sequences
    totals = torch.zeros(2, 2 * tokens + 1, dtype=torch.float64)  # of gates, chances and entropy
    for start in range(0, done, plan.block):
        logits, chance = plan.draw(form, min(plan.block, done - start), generator)
        logarithm = torch.log_softmax(logits, -1).clamp_min(-80)  # below, exp is slow and nothing
        row = -(logarithm.exp() * logarithm).sum(-1, keepdim=True)
        sample = torch.cat((propagates(logits), chance, row), -1).double()
        totals += torch.stack((sample.sum(0), sample.square().sum(0)))
    average, square = totals / done
    error = ((square - average.square()).clamp_min(0) / (done - 1)).sqrt()
    middle = (totals[0, :tokens] + 0.5) / (done + 1)  # a count of 0 or of all has an error too
    error[:tokens] = (middle * (1 - middle) / done).sqrt()
    exact = None
    if config.exact:
        make = QKForm.from_eigenvalues if weights.ndim == 1 else QKForm.from_matrix
        exact = propagation(make(weights, temperature=temperature), plan.process)
    return UnitResult(
        mean=mean,
        scale=scale,
        draw=index % config.draws,
        xi=((white.sum() if white.ndim == 1 else white.trace()) / size).item(),
        eta=size / temperature,
        count=labeled_profile("count", average[:tokens], error[:tokens]),
        conditional=labeled_profile("conditional", average[tokens:-1], error[tokens:-1]),
        exact=exact,
        entropy=average[-1].item(),
        entropy_error=error[-1].item(),
    )


class _Plan:
    """What the units of a simulation share, and how each draws its W_QK and rows of logits.

    In whitened coordinates tokens have identity covariance and ω_j = x_jᵀ Sᵀ x_T/λ; for a symmetric
    S and tokens without means the basis may be chosen too, and S is a vector of eigenvalues.
    Drawing is in float32, sums are in float64.
    """

    def __init__(self, config: SimulateConfig, process: TokenProcess) -> None:
        self.config, self.process = config, process
        kernel, tokens, model = process.kernel.double(), config.tokens, config.model
        mean = None if process.mean is None else process.mean.double()
        dimensions = model if mean is None else mean.shape[1]
        if (process.tokens, dimensions) != (tokens, model):
            raise ConfigError(
                f"the process has {process.tokens} tokens in {dimensions} dimensions.",
                hint=f"the settings say {tokens} tokens in {model}; give both the same.",
            )
        self.color = None
        if process.covariance is not None:
            self.color = covariance_root(process.covariance.double(), model=model)
            mean = None if mean is None else _white_mean(mean, self.color)
        self.last_mean = None if mean is None else mean[-1].float()
        # what is the same for all keys changes neither gates nor attention
        self.key_mean = None if mean is None else (mean - mean.mean(0)).float()
        last = kernel[-1, -1]
        follow = kernel[:, -1] / last  # E[x_j | x_T] = follow_j x_T
        cross, spread = centered_kernel(kernel)
        self.follow, self.cross = follow.float(), (cross / last).float()
        self.deviation = last.sqrt().item()
        self.free = (spread - cross.square() / last).clamp_min(0).sqrt().float()
        self.root = semidefinite_root(kernel).float()
        self.rest = semidefinite_root(kernel - follow[:, None] * kernel[-1]).float()
        # float32 numbers of one sequence that are alive at once: its noise, some vectors, some rows
        numbers = 6 * model + 24 * tokens + (tokens * model if config.estimator == "count" else 0)
        self.block = max(1, (config.memory << 20) // (4 * numbers))

    def draw_weights(
        self, mean: float, scale: float, generator: torch.Generator
    ) -> Float[Tensor, "*rows model"]:
        """W_QK with eigenvalues from N(mean, scale²) in a random orthogonal basis (Section 5).

        The eigenvalues alone, where the law of the tokens is the same in every basis.
        """
        options: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
        size = self.config.model
        if self.config.form == "asymmetric":
            noise = torch.randn(size, size, **options) * (scale / math.sqrt(size))
            return mean * torch.eye(size, dtype=torch.float64) + noise
        values = mean + scale * torch.randn(size, **options)
        if self.color is None and self.last_mean is None:
            return values
        basis, upper = torch.linalg.qr(torch.randn(size, size, **options))
        basis = basis * upper.diagonal().sign()  # uniform over all orthogonal matrices
        matrix = (basis * values) @ basis.mT
        return (matrix + matrix.mT) / 2

    def whiten(self, weights: Float[Tensor, "*rows model"]) -> Float[Tensor, "*some model"]:
        """S = Σ^½ W_QK Σ^½, or its eigenvalues where they suffice."""
        if weights.ndim == 1:
            return weights
        white = weights if self.color is None else self.color.mT @ weights @ self.color
        is_enough = self.config.form == "symmetric" and self.last_mean is None
        return torch.linalg.eigvalsh(white) if is_enough else white

    def draw(
        self, form: Float[Tensor, "*rows model"], size: int, generator: torch.Generator
    ) -> tuple[Float[Tensor, "size tokens"], Float[Tensor, "size tokens"]]:
        """Logits over the keys, and P(gate open | last token), for so many sequences."""
        tokens, model = self.config.tokens, self.config.model
        is_whole = self.config.estimator == "count"
        if is_whole:
            steps = torch.randn(size, tokens, model, generator=generator)
            last = (self.root[-1].expand(size, 1, tokens) @ steps)[:, 0]
        else:
            noise = torch.randn(size, model + tokens, generator=generator)
            last, steps = noise[:, :model] * self.deviation, noise[:, model:]
        token = last if self.last_mean is None else last + self.last_mean
        ask = token * form if form.ndim == 1 else token @ form
        along, norm = (last * ask).sum(-1, keepdim=True), ask.norm(dim=-1, keepdim=True)
        if is_whole:
            logits = (ask[:, None] @ steps.mT)[:, 0] @ self.root.mT
        else:
            logits = self.follow * along + norm * (steps @ self.rest.mT)
        middle = self.cross * along + 1 / tokens
        if self.key_mean is not None:
            shift = ask @ self.key_mean.mT
            logits, middle = logits + shift, middle + shift / tokens
        width = math.sqrt(2) * self.free * norm
        return logits, (torch.erf(middle / width) + torch.erf((1 - middle) / width)) / 2


def _paths(store: Path, plan: _Plan) -> list[Path]:
    """Where finished units lie: under a name that depends on everything that decides them."""
    versions = {name: version(name) for name in ("locater", "torch")}
    text = json.dumps({**asdict(plan.config), **versions}, indent=2)
    digest = blake2b(text.encode(), digest_size=8)
    for part in (plan.process.kernel, plan.process.covariance, plan.process.mean):
        digest.update(b"none" if part is None else part.double().numpy().tobytes())
    folder = store / f"simulate-{digest.hexdigest()}"
    write_file(folder / "config.json", text)  # and find out now whether we may write
    return [folder / f"unit-{index:05d}.json" for index in range(plan.config.units)]


def _load(path: Path) -> UnitResult | None:
    """A finished unit; one that cannot be read is run again."""
    try:
        return UnitResult.from_dict(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _white_mean(
    mean: Float[Tensor, "tokens model"], root: Float[Tensor, "model model"]
) -> Float[Tensor, "tokens model"]:
    """The means in coordinates in which the covariance is the identity."""
    white = torch.linalg.lstsq(root, mean.mT, driver="gelsd").solution.mT
    if not torch.allclose(white @ root.mT, mean, rtol=1e-6, atol=1e-6 * float(mean.abs().amax())):
        raise ConfigError(
            "the means leave the space in which the covariance lets tokens vary.",
            hint="simulate needs a covariance of full rank, or means within its range.",
        )
    return white
