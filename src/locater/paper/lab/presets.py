"""Section 7 and Appendix D as frozen settings, at full size and sized for a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from locater.errors import ConfigError
from locater.paper.lab.settings import TrainConfig

Reading = Literal["printed", "swapped", "printed-sum-normalized", "swapped-sum-normalized"]
READINGS: tuple[Reading, ...] = (
    "printed",
    "swapped",
    "printed-sum-normalized",
    "swapped-sum-normalized",
)
KAPPAS = (0.0, 1e-3, 1e-2, 1e-1, 1.0)
"""κ₂ of Figs. 6 and 8-12."""
_PAPER_TOKENS = 64 * 64
_CPU_STEPS = 2500
_FIGURES = {"fig6": (128, 1), "fig7": (128, 1), "fig8": (32, 1), "fig9": (32, 3), "fig10": (32, 6),
            "fig11": (128, 3), "fig12": (128, 6)}  # fmt: skip
HOT = 0.03
"""A learning rate at which attention without any help collapses to single tokens in 100 steps."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One line of a figure or of a table."""

    label: str
    config: TrainConfig
    group: str = ""
    """Which baseline it is compared with: that of the same group."""
    reading: str = ""
    """What the regularizer's strengths were taken to be; empty without it."""
    kappa: float | None = None
    """κ₂."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Settings × seeds that answer one question."""

    name: str
    question: str
    settings: tuple[Setting, ...]
    seeds: int = 3

    def configs(self, seeds: int | None = None) -> list[TrainConfig]:
        """Every run, seed after seed, so that a sweep that is stopped has whole seeds."""
        return [
            replace(setting.config, seed=seed)
            for seed in range(seeds or self.seeds)
            for setting in self.settings
        ]


def base(dim: int = 128, layers: int = 1, *, cpu: bool = False, **changes: Any) -> TrainConfig:
    """The paper's settings at a size; on a CPU with fewer steps, batch and vocabulary.

    There the learning rate is raised so that steps × learning rate stays the paper's.
    """
    rate = 1e-4 if dim <= 32 else 2.5e-5
    config = TrainConfig(dim=dim, layers=layers, learning_rate=rate)
    if cpu:
        config = replace(
            config,
            vocabulary="bpe",
            vocabulary_size=2048,
            batch=16,
            steps=_CPU_STEPS,
            learning_rate=round(rate * config.steps / _CPU_STEPS, 6),
            measure_every=50,
            predict_every=25,
        )
    return replace(config, **changes)


def with_locater(config: TrainConfig, reading: Reading, kappa: float) -> TrainConfig:
    """κ₁ = 100 and κ₂ under a reading of the paper.

    `printed` is the text: κ₁ weighs the scale, κ₂ the mean.  `swapped` is what the captions
    describe.  `sum-normalized` divides both by the 64 × 64 tokens of the paper's batch, as adding
    them to fairseq's summed loss does; with a smaller batch the effective strength stays that.
    """
    if reading not in READINGS:
        raise ConfigError(f"unknown reading {reading!r}.", hint="one of " + ", ".join(READINGS))
    is_sum = reading.endswith("sum-normalized")
    share = config.batch * config.tokens / _PAPER_TOKENS if is_sum else 1.0
    scale, mean = (100.0, kappa) if reading.startswith("printed") else (kappa, 100.0)
    return replace(
        config,
        scale_strength=scale * share,
        mean_strength=mean * share,
        normalization="sum" if is_sum else "mean",
    )


def _settings(
    config: TrainConfig,
    readings: Sequence[Reading],
    kappas: Sequence[float],
    *,
    group: str = "",
) -> list[Setting]:
    """The model without LocAteR, then every reading with every κ₂."""
    prefix = f"{group}, " if group else ""
    found = [Setting(label=f"{prefix}none", config=config, group=group)]
    for reading in readings:
        for kappa in kappas:
            found.append(
                Setting(
                    label=f"{prefix}{reading}, κ₂ = {kappa:g}",
                    config=with_locater(config, reading, kappa),
                    group=group,
                    reading=reading,
                    kappa=kappa,
                )
            )
    return found


def _figure(name: str, *, cpu: bool) -> Sweep:
    dim, layers = _FIGURES[name]
    config = base(dim, layers, cpu=cpu)
    readings: tuple[Reading, ...] = ("printed", "swapped-sum-normalized") if cpu else READINGS
    kappas: tuple[float, ...] = KAPPAS
    if cpu:  # hours, not days: all of them once, three with three seeds, else the two ends or one
        some = {"fig8": KAPPAS, "fig6": (0.0, 1e-2, 1.0), "fig12": (1.0,)}
        kappas = some.get(name, (0.0, 1.0))
    if name == "fig7":
        kappas = (1.0,)
    return Sweep(
        name=f"{name}-cpu" if cpu else name,
        question=f"Fig. {name.removeprefix('fig')}: d = {dim}, {layers} "
        f"{'layer' if layers == 1 else 'layers'}",
        settings=tuple(_settings(config, readings, kappas)),
        seeds={"fig6": 5, "fig7": 3}.get(name, 1) if cpu else 3,
    )


def _pull(config: TrainConfig, label: str, **changes: Any) -> Setting:
    return Setting(label=label, config=replace(config, **changes))


def _ablation(config: TrainConfig) -> Sweep:
    parts = [Setting(label="none", config=config)]
    for strength in (1.0, 100.0):
        for name, scale, mean in (("scale", 1, 0), ("mean", 0, 1), ("both", 1, 1)):
            only = "both terms" if name == "both" else f"{name} term alone"
            changes = {"scale_strength": scale * strength, "mean_strength": mean * strength}
            parts.append(_pull(config, f"{only}, strength {strength:g}", **changes))
    return Sweep(
        name="ablation-cpu",
        question="(b) Which term does what: scale alone, mean alone, both?",
        settings=tuple(parts),
    )


def _target(config: TrainConfig) -> Sweep:
    changes = {"scale_strength": 0.01, "mean_strength": 1.0, "target_unit": "temperature"}
    return Sweep(
        name="target-cpu",
        question="(c) Does a target beyond the threshold, |tr W|/λ > 2, localize?",
        settings=(
            Setting(label="none", config=config),
            *(
                _pull(config, f"target {target:g} λ", target=float(target), **changes)
                for target in (-4, 0, 1, 4, 8)
            ),
        ),
    )


def _covariance(config: TrainConfig) -> Sweep:
    settings = [Setting(label="none", config=config)]
    pulls: dict[str, TrainConfig] = {
        "printed, κ₂ = 1": with_locater(config, "printed", 1.0),
        "swapped, κ₂ = 1": with_locater(config, "swapped", 1.0),
        "target 4 λ": replace(config, scale_strength=0.01, mean_strength=1.0, target=4.0,
                              target_unit="temperature"),
    }  # fmt: skip
    for label, pulled in pulls.items():
        settings.append(Setting(label=f"{label}, on W_QK", config=pulled))
        settings.append(
            Setting(label=f"{label}, on W_QK Σ", config=replace(pulled, covariance="running"))
        )
    return Sweep(
        name="covariance-cpu",
        question="(c') Does the penalty on W_QK Σ do better than the proxy W_QK?",
        settings=tuple(settings),
    )


def _architectures(config: TrainConfig) -> Sweep:
    kinds = {
        "Pre-LN": replace(config, norm="pre"),
        "masked tokens": replace(config, task="masked"),
        "digits": replace(config, task="vision", corpus="digits", vocabulary="word",
                          vocabulary_size=None, tokens=16, batch=64, steps=1000, measure_every=20),
    }  # fmt: skip
    readings: tuple[Reading, ...] = ("printed", "swapped-sum-normalized")
    return Sweep(
        name="architectures-cpu",
        question="(d) Other architectures and tasks: Pre-LN, an encoder with masked tokens, ViT",
        settings=tuple(
            setting
            for name, kind in kinds.items()
            for setting in _settings(kind, readings, (1.0,), group=name)
        ),
    )


def _rivals(config: TrainConfig, name: str, question: str) -> Sweep:
    settings = _settings(config, READINGS, (1.0,))
    for rival in ("sigma-reparam", "qk-norm", "qk-clip", "qk-weight-decay"):
        settings.append(_pull(config, rival, stabilizer=rival))
    return Sweep(name=name, question=question, settings=tuple(settings))


def _tiny() -> Sweep:
    config = TrainConfig(
        corpus="embedded",
        vocabulary_size=500,
        dim=8,
        tokens=16,
        batch=4,
        steps=20,
        learning_rate=1e-2,
        measure_every=5,
    )
    settings = _settings(config, ("printed",), (1.0,))
    return Sweep(name="tiny", question="A trial of seconds", settings=tuple(settings), seeds=1)


def _quick(name: str) -> Sweep:
    """Minutes, on the text that Python carries: three seeds of a small Fig. 6 or 7."""
    config = base(
        32,
        cpu=True,
        corpus="embedded",
        vocabulary="word",
        vocabulary_size=2000,
        steps=600,
        learning_rate=5e-3,
        measure_every=20,
        predict_every=30,
    )
    readings: tuple[Reading, ...] = ("printed", "swapped-sum-normalized")
    kappas = (1.0,) if name == "fig7" else (0.0, 1.0)
    return Sweep(
        name=f"{name}-quick",
        question=f"Fig. {name.removeprefix('fig')} in miniature: d = 32, 1 layer",
        settings=tuple(_settings(config, readings, kappas)),
    )


def _sweeps() -> dict[str, Sweep]:
    small = base(32, cpu=True)
    question = "(a) Does LocAteR lower perplexity, under which reading and normalization?"
    found = [
        *(_figure(name, cpu=cpu) for cpu in (False, True) for name in _FIGURES),
        _quick("fig6"),
        _quick("fig7"),
        Sweep(
            name="normalization-cpu",
            question=question,
            settings=tuple(_settings(small, READINGS, (0.0, 1.0))),
        ),
        _ablation(small),
        _target(small),
        _covariance(small),
        _architectures(small),
        _rivals(small, "rivals-cpu", "(e) Against the rivals, at the usual learning rate"),
        _rivals(
            replace(small, learning_rate=HOT),
            "rivals-hot-cpu",
            f"(e) Against the rivals, at a learning rate of {HOT:g}: what prevents the collapse?",
        ),
        _tiny(),
    ]
    return {sweep.name: sweep for sweep in found}


SWEEPS = _sweeps()
PRESETS: dict[str, TrainConfig] = {
    **{name: base(*_FIGURES[name]) for name in _FIGURES},
    **{f"{name}-cpu": base(*_FIGURES[name], cpu=True) for name in _FIGURES},
    **{reading: with_locater(base(), reading, 1.0) for reading in READINGS},
    **{f"{reading}-cpu": with_locater(base(32, cpu=True), reading, 1.0) for reading in READINGS},
    "tiny": SWEEPS["tiny"].settings[0].config,
}
"""Single runs: a figure's size without LocAteR, or a reading of LocAteR with κ₂ = 1."""


def sweep_named(name: str) -> Sweep:
    """A sweep by its name."""
    if name not in SWEEPS:
        raise ConfigError(f"unknown sweep {name!r}.", hint="one of " + ", ".join(SWEEPS) + ".")
    return SWEEPS[name]


def preset_named(name: str) -> TrainConfig:
    """A single run's settings by their name."""
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}.", hint="one of " + ", ".join(PRESETS) + ".")
    return PRESETS[name]
