"""Section 7 and Appendix D as frozen settings, at full size and sized for a CPU."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from locater.errors import ConfigError, check_choice
from locater.paper.lab.settings import TrainConfig

READINGS: dict[str, str] = {
    "printed": "following the text",
    "swapped": "following the captions, beside the mean loss",
    "printed-sum-normalized": "following the text, beside the summed loss",
    "swapped-sum-normalized": "following the captions",
}
"""The paper's text and its captions disagree on which weight is which."""
PAIR: tuple[str, ...] = ("printed", "swapped-sum-normalized")
"""The text's reading and the captions', each beside the loss that it goes with."""
KAPPAS = (0.0, 1e-3, 1e-2, 1e-1, 1.0)
"""κ₂ of Figs. 6 and 8-12."""
_PAPER_TOKENS = 64 * 64
_CPU_STEPS = 2500
_FIGURES = {"fig6": (128, 1), "fig7": (128, 1), "fig8": (32, 1), "fig9": (32, 3), "fig10": (32, 6),
            "fig11": (128, 3), "fig12": (128, 6)}  # fmt: skip
ACTING = 5.0
"""A bound on logits that acts: the baseline of d = 128 reaches 9 to 12."""
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
    method: str = ""
    """What a grid of settings is chosen for."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Settings × seeds that answer one question."""

    name: str
    question: str
    settings: tuple[Setting, ...]
    seeds: int = 3
    first_seed: int = 0

    @property
    def all_seeds(self) -> range:
        """The seeds with which every setting is trained."""
        return range(self.first_seed, self.first_seed + self.seeds)

    def configs(self) -> list[TrainConfig]:
        """Every run, seed after seed, so that a sweep that is stopped has whole seeds."""
        return [
            replace(setting.config, seed=seed)
            for seed in self.all_seeds
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


def modern() -> TrainConfig:
    """What is trained today, in the laboratory's size: as Llama is built, warmed up, clipped."""
    shape = {"heads": 4, "kv_heads": 2, "ffn": 344, "norm": "pre", "norm_kind": "rms",
             "positions": "rotary", "activation": "swiglu", "tied": True}  # fmt: skip
    return base(128, 2, cpu=True, **shape, bias=False, dropout=0.0, warmup=100, schedule="cosine",
                clip=1.0, weight_decay=0.1, learning_rate=2e-3)  # fmt: skip


def with_locater(config: TrainConfig, reading: str, kappa: float) -> TrainConfig:
    """κ₁ = 100 and κ₂ under a reading of the paper.

    `printed` is the text: κ₁ weighs the scale, κ₂ the mean.  `swapped` is what the captions
    describe.  `sum-normalized` divides both by the 64 × 64 tokens of the paper's batch, as adding
    them to fairseq's summed loss does; with a smaller batch the effective strength stays that.
    """
    check_choice("reading", reading, READINGS)
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
    readings: Sequence[str],
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
                    label=f"{prefix}{READINGS[reading]}, κ₂ = {kappa:g}",
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
    readings = PAIR if cpu else tuple(READINGS)
    kappas: tuple[float, ...] = KAPPAS
    if cpu and layers > 1:  # hours, not days: the two ends, or the one that is recommended
        kappas = (1.0,) if name == "fig12" else (0.0, 1.0)
    if name == "fig7":
        kappas = (1.0,)
    return Sweep(
        name=f"{name}-cpu" if cpu else name,
        question=f"Fig. {name.removeprefix('fig')}: d = {dim}, {layers} "
        f"{'layer' if layers == 1 else 'layers'}",
        settings=tuple(_settings(config, readings, kappas)),
    )


def _changed(
    name: str, question: str, config: TrainConfig, changes: Mapping[str, Mapping[str, Any]]
) -> Sweep:
    """The settings as they are, then with each of the changes."""
    changed = {"none": config} | {
        label: replace(config, **values) for label, values in changes.items()
    }
    settings = tuple(Setting(label=label, config=one) for label, one in changed.items())
    return Sweep(name=name, question=question, settings=settings)


def _ablation(config: TrainConfig) -> Sweep:
    changes = {
        f"{name}, strength {strength:g}": {
            "scale_strength": scale * strength, "mean_strength": mean * strength
        }
        for strength in (1.0, 100.0)
        for name, scale, mean in (
            ("scale term alone", 1, 0), ("mean term alone", 0, 1), ("both terms", 1, 1)
        )
    }  # fmt: skip
    question = "(b) Which term does what: scale alone, mean alone, both?"
    return _changed("ablation-cpu", question, config, changes)


def _at_target(target: float) -> dict[str, Any]:
    return {"scale_strength": 0.01, "mean_strength": 1.0, "target": target,
            "target_unit": "temperature"}  # fmt: skip


def _target(config: TrainConfig) -> Sweep:
    question = "(c) Does a target beyond the threshold, |tr W|/λ > 2, localize?"
    changes = {f"target {target:g} λ": _at_target(target) for target in (-4.0, 0.0, 1.0, 4.0, 8.0)}
    return _changed("target-cpu", question, config, changes)


def _covariance(config: TrainConfig) -> Sweep:
    pulls = {
        f"{READINGS[reading]}, κ₂ = 1": with_locater(config, reading, 1.0).changes()
        for reading in tuple(READINGS)[:2]
    } | {"target 4 λ": _at_target(4.0)}
    changes = {
        f"{label}, on {form}": {**pull, "covariance": kind}
        for label, pull in pulls.items()
        for form, kind in (("W_QK", "none"), ("W_QK Σ", "running"))
    }
    question = "(c') Does the penalty on W_QK Σ do better than the proxy W_QK?"
    return _changed("covariance-cpu", question, config, changes)


def _architectures(config: TrainConfig) -> Sweep:
    kinds = {
        "Pre-LN": replace(config, norm="pre"),
        "masked tokens": replace(config, task="masked"),
        "digits": replace(config, task="vision", corpus="digits", vocabulary="word",
                          vocabulary_size=None, tokens=16, batch=64, steps=1000, measure_every=20),
    }  # fmt: skip
    return Sweep(
        name="architectures-cpu",
        question="(d) Other architectures and tasks: Pre-LN, an encoder with masked tokens, ViT",
        settings=tuple(
            setting
            for name, kind in kinds.items()
            for setting in _settings(kind, PAIR, (1.0,), group=name)
        ),
    )


METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    **{reading: {"reading": reading} for reading in READINGS},
    "sigma-reparam": {"stabilizer": "sigma-reparam"},
    "qk-norm": {"stabilizer": "qk-norm"},
    "qk-clip": {"stabilizer": "qk-clip", "max_logit": ACTING},
    "soft-cap": {"stabilizer": "soft-cap", "max_logit": ACTING},
    "qk-weight-decay": {"stabilizer": "qk-weight-decay"},
    "dropout .3": {"dropout": 0.3},
    "weight decay 1": {"weight_decay": 1.0},
    "scale term .01": {"scale_strength": 0.01},
    "scale term 1": {"scale_strength": 1.0},
    "mean term 1": {"mean_strength": 1.0},
    "mean term 100": {"mean_strength": 100.0},
}
"""What a run may be held by, as changes to its settings; a reading of LocAteR has κ₂ = 1."""


def with_method(config: TrainConfig, method: str) -> TrainConfig:
    """The settings with one method of `METHODS`."""
    check_choice("method", method, METHODS)
    changes = dict(METHODS[method])
    reading = changes.pop("reading", None)
    return replace(with_locater(config, reading, 1.0) if reading else config, **changes)


def compared(
    name: str,
    question: str,
    config: TrainConfig,
    methods: Sequence[str],
    *,
    seeds: int,
    first_seed: int,
    grid: Mapping[str, Sequence[Any]] | None = None,
) -> Sweep:
    """Methods side by side, each at every point of a grid of settings."""
    grid = grid or {}
    settings = []
    for point in itertools.product(*grid.values()):
        changes = dict(zip(grid, point, strict=True))
        where = ", ".join(f"{key} = {value}" for key, value in changes.items())
        for method in methods:
            is_reading = method in READINGS
            settings.append(
                Setting(
                    label=", ".join(filter(None, (where, READINGS.get(method, method)))),
                    config=with_method(replace(config, **changes), method),
                    group=where,
                    reading=method if is_reading else "",
                    kappa=1.0 if is_reading else None,
                    method=method,
                )
            )
    return Sweep(name=name, question=question, settings=tuple(settings), seeds=seeds,
                 first_seed=first_seed)  # fmt: skip


def grid_of(words: Sequence[str]) -> dict[str, list[Any]]:
    """`learning_rate=5e-4,1e-3` and its like, as settings and their values.

    >>> grid_of(["learning_rate=5e-4,1e-3", "stabilizer=qk-norm"])
    {'learning_rate': [0.0005, 0.001], 'stabilizer': ['qk-norm']}
    """
    default = TrainConfig()
    grid: dict[str, list[Any]] = {}
    for word in words:
        name, _, values = word.partition("=")
        if not hasattr(default, name) or not values or name in ("seed", "corpus"):
            raise ConfigError(
                f"{word!r} is no setting with values.",
                hint="learning_rate=5e-4,1e-3 is; settings are the flags of `locater train`, with "
                "_ for -; the seed has flags of its own.",
            )
        grid[name] = [_value(name, text, getattr(default, name)) for text in values.split(",")]
    return grid


def _value(name: str, text: str, default: Any) -> Any:
    if isinstance(default, bool):
        text = {"true": "1", "false": ""}.get(text.lower(), text)
    kind = int if default is None else type(default)  # vocabulary_size
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(
            f"{name} cannot be {text!r}.", hint=f"give numbers such as {name}={default}."
        ) from None


SELECTION, CONFIRMATION, JUDGED = 100, 200, 300
"""First seeds: to choose a learning rate, to judge at that rate, to judge without a choice."""
RATES = (5e-4, 1e-3, 2e-3, 4e-3)
PRIMARY = ("passes-0.6", "passes-3", "passes-15", "tuned")
"""The protocol's main regimes: there both readings against none are judged together."""


def _protocol() -> list[Sweep]:
    """The regimes of docs/protocol.md."""
    small = base(cpu=True, precision="bf16", evaluations=20, predict_every=1000)
    three = replace(small, share=0.03, steps=10_000, measure_every=250)
    least = replace(small, share=0.006, steps=2_500, measure_every=100)
    paper = replace(small, share=0.15, steps=50_000, learning_rate=2.5e-5, measure_every=1000)
    words = replace(paper, vocabulary="word", vocabulary_size=None, share=0.25, dim=32,
                    learning_rate=1e-4)  # fmt: skip
    others = ("none", "qk-norm", "sigma-reparam", "dropout .3", "weight decay 1",
              "scale term .01", "scale term 1", "mean term 1", "mean term 100")  # fmt: skip
    pair = ("none", *PAIR)
    rivals = (*pair, "sigma-reparam", "qk-norm", "qk-clip", "soft-cap")

    def regime(name: str, question: str, config: TrainConfig, methods: Sequence[str] = pair,
               seeds: int = 5) -> Sweep:  # fmt: skip
        return compared(name, question, config, methods, seeds=seeds, first_seed=JUDGED)

    def tuned(name: str, question: str, config: TrainConfig, methods: Sequence[str] = pair,
              rates: Sequence[float] = RATES) -> Sweep:  # fmt: skip
        return compared(name, f"{question}, each method at its own learning rate",
                        replace(config, evaluations=5), methods,
                        grid={"learning_rate": rates}, seeds=2, first_seed=SELECTION)  # fmt: skip

    digits = base(64, 2, cpu=True, task="vision", corpus="digits", vocabulary="word",
                  vocabulary_size=None, tokens=16, batch=64, steps=3000, measure_every=200,
                  predict_every=1000)  # fmt: skip
    today = replace(modern(), precision="bf16", measure_every=100, predict_every=1000)
    small = replace(small, measure_every=100)
    masked = replace(small, task="masked", dim=64, layers=2, steps=10_000, measure_every=400)
    return [
        regime("passes-3", "3 % of the text, 110 passes", three),
        regime("passes-3-others", "3 % of the text, 110 passes: what else would do it",
               three, others, 3),
        regime("passes-0.6", "0.6 % of the text, 175 passes", least),
        regime("passes-0.6-fp32", "0.6 % of the text, 175 passes, in float32",
               replace(least, precision="fp32"), pair, 3),
        regime("passes-15", "15 % of the text, 104 passes at the paper's learning rate", paper),
        tuned("tuned", "All of the text, .74 passes", small, rivals),
        tuned("task-masked", "Masked tokens, 2 layers, d = 64, 3 passes", masked),
        tuned("task-digits", "Digits, 2 layers, d = 64", digits, rates=RATES[1:]),
        tuned("task-pre-ln", "Pre-LN, all of the text, .74 passes", replace(small, norm="pre")),
        tuned("task-modern", "Built as today, 2 layers, .74 passes", today),
        regime("depth-3", "3 % of the text, 110 passes, 3 layers", replace(three, layers=3),
               pair[:2], 3),
        regime("depth-6", "3 % of the text, 110 passes, 6 layers", replace(three, layers=6),
               pair[:2], 3),
        regime("words", "25 % of the text, all its words, 99 passes", words, pair, 1),
    ]  # fmt: skip


def _rivals(config: TrainConfig, name: str, question: str) -> Sweep:
    rivals: tuple[Any, ...] = ("sigma-reparam", "qk-norm", "qk-clip", "qk-weight-decay")
    others = [Setting(label=one, config=replace(config, stabilizer=one)) for one in rivals]
    settings = (*_settings(config, tuple(READINGS), (1.0,)), *others)
    return Sweep(name=name, question=question, settings=settings)


def _tiny() -> Sweep:
    config = TrainConfig(corpus="embedded", vocabulary_size=500, dim=8, tokens=16, batch=4,
                         steps=20, learning_rate=1e-2, measure_every=5)  # fmt: skip
    settings = tuple(_settings(config, ("printed",), (1.0,)))
    return Sweep(name="tiny", question="A trial of seconds", settings=settings, seeds=1)


def _quick(name: str) -> Sweep:
    """Minutes, on the text that Python carries: three seeds of a small Fig. 6 or 7."""
    config = base(32, cpu=True, corpus="embedded", vocabulary="word", vocabulary_size=2000,
                  steps=600, learning_rate=5e-3, measure_every=20, predict_every=30)  # fmt: skip
    return Sweep(
        name=f"{name}-quick",
        question=f"Fig. {name.removeprefix('fig')} in miniature: d = 32, 1 layer",
        settings=tuple(_settings(config, PAIR, (1.0,) if name == "fig7" else (0.0, 1.0))),
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
            settings=tuple(_settings(small, tuple(READINGS), (0.0, 1.0))),
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
        *_protocol(),
    ]
    return {sweep.name: sweep for sweep in found}


SWEEPS = _sweeps()
PRESETS: dict[str, TrainConfig] = {
    **{name: base(*_FIGURES[name]) for name in _FIGURES},
    **{f"{name}-cpu": base(*_FIGURES[name], cpu=True) for name in _FIGURES},
    **{reading: with_locater(base(), reading, 1.0) for reading in READINGS},
    **{f"{reading}-cpu": with_locater(base(32, cpu=True), reading, 1.0) for reading in READINGS},
    "modern": modern(),
    "tiny": SWEEPS["tiny"].settings[0].config,
}
"""Single runs: a figure's size without LocAteR, or a reading of LocAteR with κ₂ = 1."""


def sweep_named(name: str) -> Sweep:
    """A sweep by its name."""
    check_choice("sweep", name, SWEEPS)
    return SWEEPS[name]


def preset_named(name: str) -> TrainConfig:
    """A single run's settings by their name."""
    check_choice("preset", name, PRESETS)
    return PRESETS[name]
