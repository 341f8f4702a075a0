"""Which method for your model?  Copies of it, trained briefly with each at several learning rates.

Every run is one whole-or-nothing file under a name that depends on all that decides it, so that a
trial which was ended goes on where it stood.
"""

from __future__ import annotations

import json
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from locater.control.stabilizers import METHODS, Stabilizer, stabilize
from locater.engines import Engine, run_all
from locater.errors import ConfigError, InputError, LocaterError, needing, unknown
from locater.files import held, keep, kept_of, write_file
from locater.models.live import find_attention
from locater.notebook import Shown
from locater.probe.probe import Probe

HELD_OUT = 64
"""Blocks at most, and a tenth of all at most, that no run trains on: the loss is taken there."""
STUDENT = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""What a mean of n differences has to be, in standard errors, to be told from 0 in 95 of 100."""
_drawing = threading.Lock()  # weights are drawn from torch's global generator


@dataclass(frozen=True, kw_only=True)
class TrialConfig:
    """Methods × learning rates × seeds, and how long each of these runs is.

    >>> config = TrialConfig(methods=("none", "qk-norm"), learning_rates=(1e-3,), seeds=2)
    >>> len(config.units)
    4
    """

    methods: tuple[str, ...] | None = None
    """Of `stabilize`; settings follow after colons: qk-clip:max_logit=30.  By default none,
    locater, sigma-reparam and, without `lora`, qk-norm and qk-clip, which refuse adapters."""
    learning_rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3, 3e-3)
    """Each is reached in a tenth of the steps and falls to 0 along a cosine."""
    steps: int = 100
    """Steps of every run."""
    seeds: int = 3
    """Of the order of the blocks and, where the model has no weights yet, of these."""
    tokens: int = 64
    """T, the length of a block."""
    batch: int = 8
    """Blocks in a step."""
    weight_decay: float = 0.01
    """Of AdamW, on all weights."""
    clip: float = 1.0
    """The largest norm that a step's gradient may have."""
    lora: int = 0
    """Train low-rank adapters of this rank (extra `hf`) in place of all weights; 0 does not."""

    def __post_init__(self) -> None:
        if self.methods is None:
            usual = ("none", "locater", "qk-norm", "qk-clip", "sigma-reparam")
            fitting = [one for one in usual if not (self.lora and one.startswith("qk-"))]
            object.__setattr__(self, "methods", tuple(fitting))
        for name, least in (("steps", 1), ("seeds", 1), ("tokens", 4), ("batch", 1), ("lora", 0)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"{name} must be {least} or more, got {getattr(self, name)}.",
                    hint="100 steps of 8 blocks of 64 tokens, with 3 seeds, are the defaults.",
                )
        for rate in self.learning_rates:
            if not 0 < rate < math.inf:
                raise ConfigError(
                    f"learning rates must be positive, got {rate}.", hint="1e-4 to 3e-3 are usual."
                )
        if not (self.clip > 0 and 0 <= self.weight_decay < math.inf):
            raise ConfigError(
                f"clip must be positive and weight_decay zero or more, got {self.clip} and "
                f"{self.weight_decay}.",
                hint="1.0 and 0.01 are the defaults.",
            )
        for name in ("methods", "learning_rates"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ConfigError(
                    f"{name} must be some, each once, got {', '.join(map(str, values)) or 'none'}.",
                    hint="two methods and three learning rates tell something already.",
                )
        for method in self.chosen:
            parsed(method)

    @property
    def chosen(self) -> tuple[str, ...]:
        """The methods that are tried."""
        assert self.methods is not None  # the usual ones took its place on arrival
        return self.methods

    @property
    def units(self) -> list[tuple[str, float, int]]:
        """Every run, seed after seed, so that a trial that was ended has whole seeds."""
        return [
            (method, rate, seed)
            for seed in range(self.seeds)
            for method in self.chosen
            for rate in self.learning_rates
        ]

    def rate_at(self, step: int, rate: float) -> float:
        """The learning rate of a step, counted from 0."""
        warm = max(1, self.steps // 10)
        done = max(0.0, (step + 1 - warm) / (self.steps - warm + 1))
        return rate * min(1.0, (step + 1) / warm) * (1 + math.cos(math.pi * done)) / 2


def parsed(method: str) -> tuple[str, dict[str, float]]:
    """A method's name and its settings.

    >>> parsed("locater:scale_strength=0.1:mean_strength=0")
    ('locater', {'scale_strength': 0.1, 'mean_strength': 0.0})
    """
    name, *settings = method.split(":")
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    try:
        return name, {key: float(value) for key, value in (one.split("=") for one in settings)}
    except ValueError as error:
        raise ConfigError(
            f"cannot read the settings of {method!r}.", hint="write qk-clip:max_logit=30."
        ) from error


@dataclass(frozen=True)
class TrialRun:
    """What became of one copy."""

    method: str
    learning_rate: float
    seed: int
    start: float
    """Loss on the held-out blocks before the first step, in nats per token."""
    loss: float | None
    """The same after the last; None for a run that diverged."""
    entropy: float | None
    """The lowest head's entropy at the end, as a share of uniform attention's."""
    max_logit: float | None
    diverged: int | None = None
    """The step at which the loss was no longer a number."""

    @property
    def counted(self) -> float:
        """The loss, but never more than at the start: what a run that diverged counts as."""
        return self.start if self.loss is None else min(self.loss, self.start)


@dataclass(frozen=True)
class Standing:
    """A method at its best learning rate, and over all of them; one value for each seed."""

    method: str
    learning_rate: float
    loss: list[float]
    sensitivity: list[float]
    """Mean over learning rates of the loss above the method's best (Wortsman et al. 2023)."""
    entropy: float | None
    diverged: int


@dataclass(frozen=True, repr=False)
class Trial(Shown):
    """All runs of a trial, and what they say.

    >>> runs = [
    ...     TrialRun("none", 1e-3, 0, 5.0, 4.0, 0.5, 9.0),
    ...     TrialRun("qk-norm", 1e-3, 0, 5.0, 3.9, 0.6, 4.0),
    ... ]
    >>> config = TrialConfig(methods=("none", "qk-norm"), learning_rates=(1e-3,), seeds=1)
    >>> Trial(config, runs).standings()[0].method
    'qk-norm'
    """

    config: TrialConfig
    runs: list[TrialRun]

    _picture = ("line", "learning_rate:Q", "loss:Q", "method:N")

    def _line(self) -> str:
        return f"{len(self.runs)} runs of {len(self.config.chosen)} methods"

    def _table(self) -> list[dict[str, Any]]:
        return [asdict(one) for one in self.runs]

    def at(self, method: str, rate: float) -> list[TrialRun]:
        """The runs of one method at one learning rate, by seed."""
        return [one for one in self.runs if (one.method, one.learning_rate) == (method, rate)]

    def standings(self) -> list[Standing]:
        """One for each method, the lowest loss first."""
        made = [self._standing(method) for method in self.config.chosen]
        return sorted(made, key=lambda one: fmean(one.loss))

    def _standing(self, method: str) -> Standing:
        by_rate = {rate: self.at(method, rate) for rate in self.config.learning_rates}
        counted = {rate: [one.counted for one in runs] for rate, runs in by_rate.items()}
        best = min(counted, key=lambda rate: fmean(counted[rate]))
        by_seed = list(zip(*counted.values(), strict=True))
        entropies = [one.entropy for one in by_rate[best] if one.entropy is not None]
        return Standing(
            method,
            best,
            counted[best],
            [fmean(losses) - min(losses) for losses in by_seed],
            min(entropies, default=None),
            sum(one.diverged is not None for runs in by_rate.values() for one in runs),
        )

    def sentence(self) -> str:
        """Which method has the lowest loss, and which tolerates learning rates best."""
        standings = self.standings()
        if all(one.diverged is not None for one in self.runs):
            return "Every run diverged: undecided; try lower learning rates."
        if len(standings) == 1:
            (only,) = standings
            return f"{only.method} alone was tried: its loss is {spread(only.loss)}."
        calm = sorted(standings, key=lambda one: fmean(one.sensitivity))
        lowest = _judged("lowest loss", standings, lambda one: one.loss)
        steady = "it takes two learning rates to tell which tolerates them best"
        if len(self.config.learning_rates) > 1:
            what = "least sensitive to the learning rate"
            steady = _judged(what, calm, lambda one: one.sensitivity)
        best = standings[0].learning_rate
        ends = (min(self.config.learning_rates), max(self.config.learning_rates))
        edge = f" {best:g} is the end of what was tried: go on there." if best in ends else ""
        return f"{lowest[:1].upper()}{lowest[1:]}; {steady}.{edge}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data: settings, runs, standings, the sentence."""
        return {
            "config": asdict(self.config),
            "runs": [asdict(one) for one in self.runs],
            "standings": [asdict(one) for one in self.standings()],
            "sentence": self.sentence(),
        }


def spread(values: Sequence[float]) -> str:
    """A mean over seeds with its standard error, where there are seeds to tell."""
    if len(values) < 2:
        return f"{fmean(values):.3f}"
    return f"{fmean(values):.3f} ± {stdev(values) / math.sqrt(len(values)):.3f}"


def _judged(
    what: str, ordered: Sequence[Standing], value: Callable[[Standing], list[float]]
) -> str:
    """The first, if the seeds tell it from all others: by their differences, seed for seed."""
    first, *others = ordered
    equals = [one for one in others if not _is_above(value(one), value(first))]
    numbers, seeds = spread(value(first)), len(value(first))
    if not equals:
        gap = [b - a for a, b in zip(value(first), value(others[0]), strict=True)]
        return f"{what}: {first.method} ({numbers}; {others[0].method} is {spread(gap)} above)"
    names = ", ".join(one.method for one in equals)
    who = f"{seeds} seed{'s' * (seeds > 1)} cannot tell {first.method} ({numbers}) from {names}"
    return f"{what}: undecided, {who}"


def _is_above(high: Sequence[float], low: Sequence[float]) -> bool:
    """Whether the differences are above 0 by Student's 95 %."""
    gaps = [a - b for a, b in zip(high, low, strict=True)]
    if len(gaps) < 2:
        return False
    limit = STUDENT[len(gaps) - 1] if len(gaps) <= len(STUDENT) else 2.228
    return fmean(gaps) > limit * stdev(gaps) / math.sqrt(len(gaps))


# Running


def trial(
    model: nn.Module,
    blocks: Int[Tensor, "blocks tokens"],
    config: TrialConfig | None = None,
    *,
    fresh: Callable[[], nn.Module] | None = None,
    store: Path | None = None,
    engine: Engine = "local",
    workers: int | None = None,
    ray_address: str | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
    say: Callable[[str], None] = lambda _: None,
) -> Trial:
    """Train copies of a model that predicts the next token; what is in `store` is not run again.

    `model` takes token ids and gives logits, or something that has them as `.logits`; dropout is
    off, the CPU trains, and the blocks say how many `tokens` they hold.  `fresh` makes one with new
    weights, of torch's generator, for every seed; without it all copies begin with the weights as
    they are.

    >>> import torch
    >>> from locater.models.loading import load_model
    >>> model, _ = load_model("demo", head=True)
    >>> blocks = torch.randint(40, 400, (40, 16), generator=torch.Generator().manual_seed(0))
    >>> config = TrialConfig(methods=("none",), learning_rates=(1e-3,), seeds=1, steps=2, tokens=16)
    >>> trial(model, blocks, config, workers=1).runs[0].loss is not None
    True
    """
    config = replace(config or TrialConfig(), tokens=blocks.shape[1])
    plan = _Plan(model, blocks, config, fresh)
    folder = None if store is None else store / f"trial-{plan.digest()}"
    with held(folder):
        paths, total = [], len(config.units)
        if folder is not None:  # and find out now whether we may write
            write_file(folder / "config.json", json.dumps(asdict(config), indent=2))
            paths = [folder / f"run-{index:04d}.json" for index in range(total)]
        done = kept_of(paths, lambda data: TrialRun(**data), say)
        report(len(done), total)
        if len(done) < total:
            plan.check()
        runs = run_all(
            partial(run_unit, plan),
            total,
            engine=engine,
            workers=workers,
            ray_address=ray_address,
            report=report,
            done=done,
            keep=lambda index, run: keep(paths[index], asdict(run)) if paths else None,
        )
    return Trial(config, runs)


def run_unit(plan: _Plan, index: int) -> TrialRun:
    """Train one copy to its end, or until its loss is no number: on one thread deterministic."""
    config = plan.config
    method, rate, seed = config.units[index]
    model, stabilizer = plan.copy(method, seed)
    weights = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=config.weight_decay, fused=True)
    stabilizer.on(optimizer)
    order = torch.Generator().manual_seed(seed)
    start, diverged = _held_out_loss(model, plan.held_out), None
    for step in range(config.steps):
        chosen = torch.randint(len(plan.train), (config.batch,), generator=order)
        loss = next_token_loss(model.train(), plan.train[chosen]) + stabilizer.penalty()
        if not bool(torch.isfinite(loss)):
            diverged = step
            break
        loss.backward()
        nn.utils.clip_grad_norm_(weights, config.clip)
        for group in optimizer.param_groups:
            group["lr"] = config.rate_at(step, rate)
        optimizer.step()
        optimizer.zero_grad()
    try:
        return TrialRun(method, rate, seed, start, *_judge(model, plan.held_out, diverged, config))
    finally:
        stabilizer.remove()


def _judge(
    model: nn.Module, blocks: Tensor, diverged: int | None, config: TrialConfig
) -> tuple[float | None, float | None, float | None, int | None]:
    """Loss, lowest entropy and largest logit after the last step, or where it diverged."""
    if diverged is not None:
        return None, None, None, diverged
    with Probe(model, queries="all", keep=0, strict=False) as probe:
        loss = _held_out_loss(model, blocks)
    if not math.isfinite(loss):
        return None, None, None, config.steps
    heads = [one for one in probe.records if one.max_entropy > 0]
    lowest = min((one.entropy / one.max_entropy for one in heads), default=None)
    return loss, lowest, max((one.max_logit for one in heads), default=None), None


def next_token_loss(model: nn.Module, blocks: Int[Tensor, "batch tokens"]) -> Float[Tensor, ""]:
    """The mean loss of every block's tokens but the first, in nats."""
    logits = _logits(model, blocks)[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1).float(), blocks[:, 1:].flatten())


def _logits(model: nn.Module, blocks: Tensor) -> Tensor:
    output = model(blocks)
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.shape[:2] != blocks.shape:
        raise InputError(
            f"{type(model).__name__} gives no logits for every token.",
            hint="a trial needs a model that predicts the next token, such as GPT-2 or Llama.",
        )
    return logits


@torch.no_grad()
def _held_out_loss(model: nn.Module, blocks: Tensor) -> float:
    model.eval()
    return fmean(next_token_loss(model, part).item() for part in blocks.split(16))


class _Plan:
    """What the runs of a trial share."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Tensor,
        config: TrialConfig,
        fresh: Callable[[], nn.Module] | None,
    ) -> None:
        if len(blocks) < 2:
            raise InputError(
                f"the text holds {len(blocks)} blocks of {config.tokens} tokens.",
                hint="give a longer text or fewer tokens: one block is held out.",
            )
        elsewhere = {one.device for one in model.parameters()} - {torch.device("cpu")}
        if elsewhere:
            raise InputError(
                f"{type(model).__name__} lies on {', '.join(map(str, elsewhere))}.",
                hint="a trial trains its copies on the CPU: give it model.cpu().",
            )
        self.model, self.config, self.fresh = model, config, fresh
        size = max(1, min(HELD_OUT, len(blocks) // 10))
        self.train, self.held_out = blocks[:-size], blocks[-size:]

    def digest(self) -> str:
        """Depends on everything that decides the runs."""
        versions = {name: version(name) for name in ("locater", "torch")}
        with _drawn_from(0):
            model = self.model if self.fresh is None else self.fresh()
        about = [asdict(self.config), versions, self.fresh is not None, str(model)]
        about += [_settings(vars(one)) for one in model.modules()]
        config: Any = getattr(model, "config", None)
        if hasattr(config, "to_dict"):
            about += [_settings(config.to_dict())]
        digest = blake2b(json.dumps(about).encode(), digest_size=8)
        digest.update(self.train.numpy().tobytes() + self.held_out.numpy().tobytes())
        for name, value in sorted({**dict(model.named_buffers()), **model.state_dict()}.items()):
            digest.update(name.encode())
            digest.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def copy(self, method: str, seed: int) -> tuple[nn.Module, Stabilizer]:
        """A model before its first step, with its method."""
        name, settings = parsed(method)
        with _drawn_from(seed):
            model = deepcopy(self.model) if self.fresh is None else self.fresh()
            if self.config.lora:
                model = _adapted(model, self.config.lora)
        _switch_dropout_off(model)
        try:
            return model, stabilize(model, name, **settings)
        except (LocaterError, TypeError) as error:
            reason = error.message if isinstance(error, LocaterError) else str(error)
            hint = getattr(error, "hint", None) or "see its class in locater.control.stabilizers."
            raise InputError(
                f"{method} cannot be tried on this model: {reason}",
                hint=f"leave it out of --methods, or: {hint}",
            ) from error

    def check(self) -> None:
        """Refuse what could only fail after some runs: every method, and models that look ahead."""
        find_attention(self.model)
        for method in self.config.chosen:
            self.copy(method, 0)[1].remove()
        model, blocks = deepcopy(self.model).eval(), self.held_out[:1]
        other = blocks.clone()
        other[:, -1] = (blocks[:, -1] == 0).to(blocks.dtype)  # any other token
        with torch.no_grad():
            before, after = (_logits(model, one)[:, :-1] for one in (blocks, other))
        if not torch.allclose(before, after, rtol=1e-3, atol=1e-3):
            raise InputError(
                f"{type(model).__name__} sees the tokens that it is to predict.",
                hint="a trial trains models that predict the next token; of BERT and its kin "
                "set is_decoder in config.json.",
            )


def _settings(values: dict[str, Any]) -> dict[str, Any]:
    """The plain ones among a module's attributes or a config's entries: heads, bases, kinds."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name.startswith("_") or name == "training":
            continue
        if isinstance(value, dict):
            found[name] = _settings({str(key): one for key, one in value.items()})
        elif isinstance(value, (str, int, float, list, tuple, torch.dtype, type(None))):
            found[name] = str(value)
    return found


def _switch_dropout_off(model: nn.Module) -> None:
    """Its draws would come from a generator that threads share; so short a run needs none."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _adapted(model: nn.Module, rank: int) -> nn.Module:
    with needing("peft", extra="hf"):
        import peft
    settings = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    whole: Any = model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers that keep their weights transposed, as GPT-2's
        adapted: nn.Module = peft.get_peft_model(whole, settings)
    return adapted


@contextmanager
def _drawn_from(seed: int) -> Iterator[None]:
    """Torch's own generator begins at a seed, and is afterwards what it was."""
    with _drawing, torch.random.fork_rng(devices=[]):
        torch.set_rng_state(torch.Generator().manual_seed(seed).get_state())
        yield
