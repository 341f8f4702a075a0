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
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from locater.core.process import TokenProcess, centered_kernel
from locater.core.profile import Profile
from locater.core.softmax import attention_entropy, propagates
from locater.core.spectrum import QKForm, covariance_root, semidefinite_root
from locater.core.theory import normal_between, propagation
from locater.engines import Engine, run_units
from locater.errors import ConfigError
from locater.files import write_file

Estimator = Literal["conditional", "count"]
ProcessName = Literal["random-walk", "autoregressive", "independent"]
CovarianceName = Literal["isotropic", "anisotropic"]
FormName = Literal["symmetric", "asymmetric"]
Preset = Literal["fig5", "fig5-precise"]
Source = Literal["exact", "count", "conditional"]


@dataclass(frozen=True, kw_only=True)
class SimulateConfig:
    """Which forms and tokens to simulate, and how thoroughly."""

    tokens: int = 40
    model: int = 128
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
    """`count` draws whole sequences and counts open gates, as the paper does; `conditional` draws
    the last token and integrates the others out, which needs far fewer sequences."""
    exact: bool = True
    """Compute the exact ρ of every drawn form beside the simulated one."""
    seed: int = 0
    memory: int = 64
    """Megabytes of tokens that one worker holds at a time."""

    def __post_init__(self) -> None:
        for name, least in (
            ("tokens", 2),
            ("model", 1),
            ("sequences", 2),
            ("draws", 1),
            ("memory", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"{name} must be at least {least}, got {getattr(self, name)}.",
                    hint="the paper has 40 tokens, 128 dimensions, 300 sequences and 10 draws.",
                )
        choices = (("form", FormName), ("covariance", CovarianceName), ("process", ProcessName),
                   ("estimator", Estimator))  # fmt: skip
        for name, kind in choices:
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(
                    f"unknown {name} {getattr(self, name)!r}.",
                    hint="choose one of: " + ", ".join(get_args(kind)) + ".",
                )
        if not self.pairs or any(scale < 0 for _, scale in self.pairs):
            raise ConfigError(
                "give at least one (mean, scale) pair, with scales of zero or more.",
                hint="the scale is the standard deviation of the eigenvalues.",
            )

    @property
    def units(self) -> int:
        """Number of drawn forms."""
        return len(self.pairs) * self.draws

    def token_process(self) -> TokenProcess:
        """The process that the settings name."""
        covariance = None
        if self.covariance == "anisotropic":
            uniform = torch.rand(
                self.model,
                self.model,
                generator=_generator(self, "covariance"),
                dtype=torch.float64,
            )
            root = 5 * uniform - 2.5
            covariance = root.mT @ root / self.model
        if self.process == "random-walk":
            return TokenProcess.random_walk(self.tokens, covariance=covariance)
        if self.process == "independent":
            return TokenProcess.independent(self.tokens, covariance=covariance)
        return TokenProcess.autoregressive(self.tokens, self.phi, covariance=covariance)


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
            theta = torch.arange(1, len(rho) + 1, dtype=torch.float64) / len(rho)
            profile = Profile(theta=theta, rho=rho, label=name)
            if name != "exact":
                error = torch.tensor(data[f"{name}_error"], dtype=torch.float64)
                profile = replace(profile, source="simulated", standard_error=error)
            profiles[name] = profile
        return cls(**{name: data[name] for name in _SCALARS}, **profiles)


_SOURCES = ("count", "conditional", "exact")
_SCALARS = ("mean", "scale", "draw", "xi", "eta", "entropy", "entropy_error")


@dataclass(frozen=True, eq=False)
class Simulation:
    """The units of one setting, in their order."""

    config: SimulateConfig
    units: list[UnitResult] = field(repr=False)

    def of_pair(self, mean: float, scale: float) -> list[UnitResult]:
        """The draws of one (mean, scale)."""
        return [unit for unit in self.units if (unit.mean, unit.scale) == (mean, scale)]

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
            on = (best.rho >= best.peak / 2).nonzero()[:, 0] + 1
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
    if name not in get_args(Preset):
        raise ConfigError(
            f"unknown preset {name!r}.", hint="use one of: " + ", ".join(get_args(Preset)) + "."
        )
    base = SimulateConfig(sequences=300 if name == "fig5" else 100_000)
    return {
        "random walk, Σ = I": base,
        "random walk, anisotropic Σ": replace(base, covariance="anisotropic"),
        "AR(1) tokens, φ = 0.9": replace(base, process="autoregressive"),
        "independent tokens": replace(base, process="independent"),
        "random walk, asymmetric W_QK": replace(base, form="asymmetric"),
    }


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
    process = process or config.token_process()
    if process.tokens != config.tokens:
        raise ConfigError(
            f"the process has {process.tokens} tokens, the settings say {config.tokens}.",
            hint="give both the same length.",
        )
    shelf = _Shelf(store, config, process)
    results = {index: unit for index in range(config.units) if (unit := shelf.load(index))}
    report(len(results), config.units)
    missing = [index for index in range(config.units) if index not in results]
    runs = run_units(
        partial(run_unit, config, process),
        missing,
        engine=engine,
        workers=workers,
        ray_address=ray_address,
    )
    for index, data in runs:
        shelf.save(index, data)
        results[index] = UnitResult.from_dict(data)
        report(len(results), config.units)
    return Simulation(config, [results[index] for index in range(config.units)])


def run_unit(config: SimulateConfig, process: TokenProcess, index: int) -> dict[str, Any]:
    """Draw one W_QK, simulate its scores and compute their exact ρ: deterministic on one thread."""
    mean, scale = config.pairs[index // config.draws]
    generator = _generator(config, f"unit {index}")
    form = _draw_form(config, process, mean, scale, generator)
    spectrum = form.spectrum(process.covariance)
    sampler = _Sampler(config, process, spectrum.form, generator)
    done, sums = 0, torch.zeros(3, config.tokens, dtype=torch.float64)
    entropy = torch.zeros(2, dtype=torch.float64)
    while done < config.sequences:
        size = min(sampler.block, config.sequences - done)
        logits, chance = sampler.draw(size)
        row = attention_entropy(torch.softmax(logits, -1)).double()
        sums += torch.stack((propagates(logits).sum(0), chance.sum(0), chance.square().sum(0)))
        entropy += torch.stack((row.sum(), row.square().sum()))
        done += size
    count, chance, square = sums / done
    middle = (sums[0] + 0.5) / (done + 1)  # keeps the error of a count of 0 or of all above zero
    theta = torch.arange(1, config.tokens + 1, dtype=torch.float64) / config.tokens
    sampled = Profile(theta=theta, rho=count, source="simulated")
    freedom = done - 1
    return UnitResult(
        mean=mean,
        scale=scale,
        draw=index % config.draws,
        xi=spectrum.xi.item(),
        eta=spectrum.eta.item(),
        count=replace(sampled, standard_error=(middle * (1 - middle) / done).sqrt()),
        conditional=replace(
            sampled,
            rho=chance,
            standard_error=((square - chance.square()).clamp_min(0) / freedom).sqrt(),
        ),
        exact=propagation(form, process) if config.exact else None,
        entropy=(entropy[0] / done).item(),
        entropy_error=math.sqrt(
            max(0.0, (entropy[1] / done - (entropy[0] / done) ** 2).item()) / freedom
        ),
    ).to_dict()


class _Sampler:
    """Rows of logits of one form, and the chance of every gate given the last token.

    In whitened coordinates tokens have identity covariance and ω_j = x_jᵀ S x_T; for a symmetric S
    the basis may be chosen too, and S is a vector of eigenvalues.
    """

    def __init__(
        self,
        config: SimulateConfig,
        process: TokenProcess,
        white: QKForm,
        generator: torch.Generator,
    ) -> None:
        self.config, self.generator, self.temperature = config, generator, white.temperature
        kernel = process.kernel.double()
        self.mean = _white_mean(process)
        matrix = white.query.mT @ white.key
        is_diagonal = white.is_symmetric and self.mean is None
        self.form = torch.linalg.eigvalsh(matrix) if is_diagonal else matrix
        self.last = kernel[-1, -1]
        self.cross, spread = centered_kernel(kernel)
        self.free = (spread - self.cross.square() / self.last).clamp_min(0).sqrt()
        self.follow = kernel[:, -1] / self.last  # E[x_j | x_T] = follow_j x_T
        walk = TokenProcess.random_walk(config.tokens).kernel
        self.is_walk = bool(torch.equal(kernel, walk))
        self.root = semidefinite_root(kernel).float()
        self.rest = semidefinite_root(kernel - self.follow[:, None] * kernel[-1])
        numbers = (
            config.tokens if config.estimator == "conditional" else config.tokens * config.model
        )
        # tokens, a copy of them and what the softmax holds: at most 16 bytes a number
        most = (config.memory << 20) // (16 * (numbers + config.model))
        self.block = max(1, min(config.sequences, most))

    def draw(self, size: int) -> tuple[Float[Tensor, "size tokens"], Float[Tensor, "size tokens"]]:
        """Logits over the keys, and P(gate open | last token), for so many sequences."""
        tokens, model = self.config.tokens, self.config.model
        if self.config.estimator == "conditional":
            last = torch.randn(size, model, generator=self.generator, dtype=torch.float64)
            last *= self.last.sqrt()
            noise = torch.randn(size, tokens, generator=self.generator, dtype=torch.float64)
            ask, along = self._ask(last)
            spread = ask.norm(dim=-1, keepdim=True) * (noise @ self.rest.mT)
            logits = self.follow * along + spread
            if self.mean is not None:
                logits = logits + ask @ self.mean.mT
        else:
            walk = torch.randn(size, tokens, model, generator=self.generator)
            walk = walk.cumsum_(1) if self.is_walk else self.root @ walk
            last = walk[:, -1].double()
            ask, along = self._ask(last)
            logits = (walk @ ask.float()[..., None])[..., 0].double()
            if self.mean is not None:
                logits = logits + ask @ self.mean.mT
        middle = self.cross * along / self.last
        if self.mean is not None:
            middle = middle + ask @ (self.mean - self.mean.mean(0)).mT / tokens
        deviation = self.free * ask.norm(dim=-1, keepdim=True) / self.temperature
        chance = normal_between(1 / tokens + middle / self.temperature, deviation)
        return logits / self.temperature, chance

    def _ask(
        self, last: Float[Tensor, "size model"]
    ) -> tuple[Float[Tensor, "size model"], Float[Tensor, "size 1"]]:
        """S x_T, and its product with the last token's own deviation from the mean."""
        token = last if self.mean is None else last + self.mean[-1]
        ask = token * self.form if self.form.ndim == 1 else token @ self.form.mT
        return ask, (last * ask).sum(-1, keepdim=True)


class _Shelf:
    """Finished units on disk, under a name that depends on everything that decides their values."""

    def __init__(self, store: Path | None, config: SimulateConfig, process: TokenProcess) -> None:
        self.folder = None
        if store is not None:
            digest = blake2b(json.dumps(asdict(config), sort_keys=True).encode(), digest_size=8)
            for part in (process.kernel, process.covariance, process.mean):
                digest.update(b"none" if part is None else part.double().numpy().tobytes())
            self.folder = store / f"simulate-{digest.hexdigest()}"

    def load(self, index: int) -> UnitResult | None:
        """A finished unit; one that cannot be read is run again."""
        if self.folder is None:
            return None
        try:
            return UnitResult.from_dict(json.loads(self._path(index).read_text()))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def save(self, index: int, data: dict[str, Any]) -> None:
        if self.folder is not None:
            write_file(self._path(index), json.dumps(data))

    def _path(self, index: int) -> Path:
        assert self.folder is not None
        return self.folder / f"unit-{index:05d}.json"


def _draw_form(
    config: SimulateConfig,
    process: TokenProcess,
    mean: float,
    scale: float,
    generator: torch.Generator,
) -> QKForm:
    """W_QK with eigenvalues from N(mean, scale²) in a random orthogonal basis (Section 5)."""
    temperature, size = config.temperature or math.sqrt(config.model), config.model
    if config.form == "asymmetric":
        noise = torch.randn(size, size, generator=generator, dtype=torch.float64)
        matrix = mean * torch.eye(size, dtype=torch.float64) + scale * noise / math.sqrt(size)
        return QKForm.from_matrix(matrix, temperature=temperature)
    values = mean + scale * torch.randn(size, generator=generator, dtype=torch.float64)
    if process.covariance is None and process.mean is None:  # then the basis does not matter
        return QKForm.from_eigenvalues(values, temperature=temperature)
    noise = torch.randn(size, size, generator=generator, dtype=torch.float64)
    basis, upper = torch.linalg.qr(noise)
    basis = basis * upper.diagonal().sign()  # uniform over all orthogonal matrices
    matrix = (basis * values) @ basis.mT
    return QKForm.from_matrix((matrix + matrix.mT) / 2, temperature=temperature)


def _white_mean(process: TokenProcess) -> Float[Tensor, "tokens model"] | None:
    if process.mean is None or process.covariance is None:
        return None if process.mean is None else process.mean.double()
    root = covariance_root(process.covariance.double())
    mean = process.mean.double()
    white = torch.linalg.lstsq(root, mean.mT, driver="gelsd").solution.mT
    if not torch.allclose(white @ root.mT, mean, rtol=1e-6, atol=1e-6 * float(mean.abs().amax())):
        raise ConfigError(
            "the means leave the space in which the covariance lets tokens vary.",
            hint="simulate needs a covariance of full rank, or means within its range.",
        )
    return white


def _generator(config: SimulateConfig, name: str) -> torch.Generator:
    """The random stream of one piece of work, from the seed and the work's own name."""
    digest = blake2b(f"{config.seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
