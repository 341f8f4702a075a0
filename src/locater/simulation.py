"""Simulated signal propagation and attention entropy (Section 5, Fig. 5), beside the exact theory.

The unit of work is one drawn W_QK.  Its random stream follows from the seed and its own index, and
it runs on one thread, so a result has the same bits on any engine, with any number of workers, in
any order, and after any interruption.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from locater.core.form import QKForm
from locater.core.process import ProcessName, TokenProcess, centered_kernel
from locater.core.spectrum import check_covariance, semidefinite_root
from locater.core.theory import Profile, is_on, propagates, propagation
from locater.engines import Engine, one_thread, run_all
from locater.errors import ConfigError, at_least, check_choice
from locater.files import keep, kept_of, write_file
from locater.notebook import Shown

Estimator = Literal["conditional", "count"]
CovarianceName = Literal["isotropic", "anisotropic"]
FormName = Literal["symmetric", "asymmetric"]
Preset = Literal["fig5", "fig5-precise"]
Source = Literal["exact", "count", "conditional"]


@dataclass(frozen=True, kw_only=True)
class SimulateConfig:
    """Which forms and tokens to simulate, and how thoroughly.

    >>> config = SimulateConfig(tokens=8, model=4, draws=2, sequences=10, pairs=((0.0, 0.1),))
    >>> config.units
    2
    """

    tokens: int = 40
    """T, the length of a sequence."""
    model: int = 128
    """d, the width of tokens."""
    sequences: int = 300
    """Token sequences drawn for every W_QK."""
    draws: int = 10
    """W_QK drawn for every (mean, scale)."""
    pairs: tuple[tuple[float, float], ...] = tuple(
        (mean, scale) for mean in (0.0, 0.5, 1.0) for scale in (0.01, 0.1, 0.5)
    )
    """Mean and standard deviation of the eigenvalues."""
    form: FormName = "symmetric"
    """`asymmetric` is mean·I + scale·(Gaussian matrix of the same norm)."""
    covariance: CovarianceName = "isotropic"
    """`anisotropic` is RᵀR/d, R uniform in [-2.5, 2.5], drawn once from the seed (Section 5)."""
    process: ProcessName = "random-walk"
    phi: float = 0.9
    """Correlation of neighbors of the autoregressive process."""
    temperature: float | None = None
    """λ; √model by default."""
    estimator: Estimator = "conditional"
    """`count` draws whole sequences and counts tokens that are on, as the paper does;
    `conditional` draws the last token and integrates the others out, which needs far fewer."""
    exact: bool = True
    """Compute the exact ρ of every drawn form beside the simulated one."""
    seed: int = 0
    """Of all draws."""
    memory: int = 16
    """Megabytes of tokens that one worker holds at a time."""

    def __post_init__(self) -> None:
        least_of = {"tokens": 2, "model": 1, "sequences": 2, "draws": 1, "memory": 1}
        paper = "the paper has 40 tokens, 128 dimensions, 300 sequences and 10 draws."
        at_least(self, least_of, hint=paper)
        kinds = {"form": FormName, "covariance": CovarianceName, "process": ProcessName,
                 "estimator": Estimator}  # fmt: skip
        for name, kind in kinds.items():
            check_choice(name, getattr(self, name), get_args(kind))
        if not self.pairs or not all(0 <= s < math.inf and math.isfinite(m) for m, s in self.pairs):
            raise ConfigError(
                f"pairs must be (mean, scale) with scales of zero or more, got {self.pairs}.",
                hint="the scale is the standard deviation of the eigenvalues.",
            )
        if self.temperature is not None and not 0 < self.temperature < math.inf:
            raise ConfigError(
                f"temperature must be positive and finite, got {self.temperature}.",
                hint="leave it out for the square root of model.",
            )

    @property
    def units(self) -> int:
        """Number of drawn forms."""
        return len(self.pairs) * self.draws

    def token_process(self) -> TokenProcess:
        """The process that the settings name."""
        covariance = None
        if self.covariance == "anisotropic":
            generator = generator_of(self, "covariance")
            uniform = torch.rand(self.model, self.model, generator=generator, dtype=torch.float64)
            root = 5 * uniform - 2.5
            covariance = root.mT @ root / self.model
        return TokenProcess.named(self.process, self.tokens, phi=self.phi, covariance=covariance)


@dataclass(frozen=True, eq=False, kw_only=True)
class UnitResult:
    """One drawn W_QK: both estimates of ρ, the exact one, and the attention entropy."""

    mean: float
    scale: float
    draw: int
    xi: float
    eta: float
    count: Profile
    conditional: Profile
    exact: Profile | None
    entropy: float
    entropy_error: float

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, which JSON keeps to the last bit."""
        data = {name: getattr(self, name) for name in _SCALARS}
        for name in _SOURCES:
            profile: Profile | None = getattr(self, name)
            data[name] = None if profile is None else profile.rho.tolist()
            if profile is not None and profile.standard_error is not None:
                data[f"{name}_error"] = profile.standard_error.tolist()
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> UnitResult:
        """Undo `to_dict`."""
        profiles: dict[str, Any] = {"exact": None}
        for name in _SOURCES if data["exact"] else _SOURCES[:2]:
            rho = torch.tensor(data[name], dtype=torch.float64)
            error = None if name == "exact" else data[f"{name}_error"]
            profiles[name] = _profile(name, rho, error and rho.new_tensor(error))
        return cls(**{name: data[name] for name in _SCALARS}, **profiles)


_SOURCES = ("count", "conditional", "exact")
_SCALARS = ("mean", "scale", "draw", "xi", "eta", "entropy", "entropy_error")


@dataclass(frozen=True, eq=False, repr=False)
class Simulation(Shown):
    """The units of one setting, in their order.

    >>> config = SimulateConfig(tokens=8, model=4, draws=2, sequences=10, pairs=((0.0, 0.1),))
    >>> simulate(config).summary()[0]["scale"]
    0.1
    """

    config: SimulateConfig
    units: list[UnitResult] = field(repr=False)

    _picture = ("line", "scale:Q", "entropy:Q", "mean:N")

    def _line(self) -> str:
        return f"{len(self.units)} draws"

    def _table(self) -> list[dict[str, Any]]:
        return self.summary()

    def of_pair(self, mean: float, scale: float) -> list[UnitResult]:
        """The draws of one (mean, scale)."""
        units = [unit for unit in self.units if (unit.mean, unit.scale) == (mean, scale)]
        if not units:
            raise ConfigError(
                f"({mean:g}, {scale:g}) was not simulated.", hint=f"the pairs: {self.config.pairs}."
            )
        return units

    def mean_profile(self, mean: float, scale: float, source: Source | None = None) -> Profile:
        """ρ averaged over the draws; its error is the spread over them (Fig. 5's bold lines)."""
        source = source or self.config.estimator
        profiles = [getattr(unit, source) for unit in self.of_pair(mean, scale)]
        if any(profile is None for profile in profiles):
            raise ConfigError(
                f"the {source} profiles were not computed.", hint="simulate with exact=True."
            )
        rho = torch.stack([profile.rho for profile in profiles])
        error = rho.std(0) / math.sqrt(len(rho)) if len(rho) > 1 else profiles[0].standard_error
        label = f"mean {mean:g}, scale {scale:g}"
        return replace(profiles[0], rho=rho.mean(0), standard_error=error, label=label)

    def mean_entropy(self, mean: float, scale: float) -> tuple[float, float]:
        """Attention entropy averaged over the draws, and its standard error."""
        units = self.of_pair(mean, scale)
        values = torch.tensor([unit.entropy for unit in units], dtype=torch.float64)
        if len(units) == 1:
            return units[0].entropy, units[0].entropy_error
        return values.mean().item(), (values.std() / math.sqrt(len(units))).item()

    def summary(self) -> list[dict[str, Any]]:
        """One row per (mean, scale): where it looks, its entropy, the samples' error."""
        rows = []
        for mean, scale in self.config.pairs:
            units = self.of_pair(mean, scale)
            best = self.mean_profile(mean, scale, "exact" if self.config.exact else None)
            entropy, entropy_error = self.mean_entropy(mean, scale)
            on = is_on(best.rho).nonzero()[:, 0] + 1
            row = {
                "mean": mean,
                "scale": scale,
                "xi": math.fsum(unit.xi for unit in units) / len(units),
                "eta": math.fsum(unit.eta for unit in units) / len(units),
                "peak": best.peak.item(),
                "participation": best.participation.item(),
                "first_on": int(on[0]),
                "last_on": int(on[-1]),
                "entropy": entropy,
                "entropy_error": entropy_error,
            }
            if self.config.exact:
                for source in ("count", "conditional"):
                    gap = self.mean_profile(mean, scale, source).rho - best.rho
                    row[f"{source}_gap"] = gap.abs().amax().item()
            rows.append(row)
        return rows


def preset(name: Preset) -> dict[str, SimulateConfig]:
    """The panels of Fig. 5: the paper's two, then other tokens and asymmetric forms.

    `fig5` has the paper's 300 sequences, `fig5-precise` 100,000.
    """
    check_choice("preset", name, get_args(Preset))
    base = SimulateConfig(sequences=300 if name == "fig5" else 100_000)
    return {
        "random walk, Σ = I": base,
        "random walk, anisotropic Σ": replace(base, covariance="anisotropic"),
        "AR(1) tokens, φ = 0.9": replace(base, process="autoregressive"),
        "independent tokens": replace(base, process="independent"),
        "random walk, asymmetric W_QK": replace(base, form="asymmetric"),
    }


def generator_of(config: SimulateConfig, name: str) -> torch.Generator:
    """The random stream of one piece of work, from the seed and the work's own name."""
    digest = blake2b(f"{config.seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def simulate(
    config: SimulateConfig,
    *,
    process: TokenProcess | None = None,
    store: Path | None = None,
    engine: Engine = "local",
    workers: int | None = None,
    ray_address: str | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
    say: Callable[[str], None] = lambda _: None,
) -> Simulation:
    """Run all units and collect them; what is already in `store` is not run again.

    A `process` of your own replaces the named one.  `report` is called with the number of finished
    units and their total; `say` hears of stored units that are not what was stored.

    >>> config = SimulateConfig(tokens=8, model=4, sequences=50, draws=2, pairs=((0.5, 0.1),))
    >>> simulation = simulate(config)
    >>> len(simulation.units), simulation.units[0].conditional.source
    (2, 'simulated')
    """
    with one_thread():
        plan = _Plan(config, process or config.token_process())
    paths = [] if store is None else _paths(store, plan)
    done = kept_of(paths, UnitResult.from_dict, say)
    report(len(done), config.units)
    units = run_all(
        partial(run_unit, plan),
        config.units,
        engine=engine,
        workers=workers,
        ray_address=ray_address,
        report=report,
        done=done,
        keep=lambda index, unit: keep(paths[index], unit.to_dict()) if paths else None,
    )
    return Simulation(config, units)


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
        count=_profile("count", average[:tokens], error[:tokens]),
        conditional=_profile("conditional", average[tokens:-1], error[tokens:-1]),
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
            check_covariance(process.covariance, size=model)
            self.color = semidefinite_root(process.covariance.double())
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
        """Logits over the keys, and P(token on | last token), for so many sequences."""
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


def _profile(label: str, rho: Tensor, error: Tensor | None) -> Profile:
    """ρ by position; sampled where it has an error, theory where it has none."""
    source: Any = "theory" if error is None else "simulated"
    return Profile.by_token(rho, label, source=source, standard_error=error)


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
