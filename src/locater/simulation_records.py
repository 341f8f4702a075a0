"""What a simulation is told and what it answers: settings, the result of a unit, all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from locater.core.process import TokenProcess
from locater.core.profile import Profile
from locater.errors import ConfigError

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
    memory: int = 16
    """Megabytes of tokens that one worker holds at a time."""

    def __post_init__(self) -> None:
        least_of = {"tokens": 2, "model": 1, "sequences": 2, "draws": 1, "memory": 1}
        for name, least in least_of.items():
            if getattr(self, name) < least:
                raise ConfigError(
                    f"{name} must be at least {least}, got {getattr(self, name)}.",
                    hint="the paper has 40 tokens, 128 dimensions, 300 sequences and 10 draws.",
                )
        kinds = {"form": FormName, "covariance": CovarianceName, "process": ProcessName,
                 "estimator": Estimator}  # fmt: skip
        for name, kind in kinds.items():
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(
                    f"unknown {name} {getattr(self, name)!r}.",
                    hint="choose one of: " + ", ".join(get_args(kind)) + ".",
                )
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
        if self.process == "autoregressive":
            return TokenProcess.autoregressive(self.tokens, self.phi, covariance=covariance)
        is_walk = self.process == "random-walk"
        make = TokenProcess.random_walk if is_walk else TokenProcess.independent
        return make(self.tokens, covariance=covariance)


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
            profiles[name] = labeled_profile(name, rho, error and rho.new_tensor(error))
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


def labeled_profile(label: str, rho: Tensor, error: Tensor | None) -> Profile:
    """ρ by position; sampled where it has an error, theory where it has none."""
    theta = torch.arange(1, len(rho) + 1, dtype=torch.float64) / len(rho)
    source: Any = "theory" if error is None else "simulated"
    return Profile(theta=theta, rho=rho, source=source, standard_error=error, label=label)


def generator_of(config: SimulateConfig, name: str) -> torch.Generator:
    """The random stream of one piece of work, from the seed and the work's own name."""
    digest = blake2b(f"{config.seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
