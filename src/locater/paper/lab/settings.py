"""Everything that decides a training run, in one frozen record with a digest."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any, Literal

from locater.core.penalty import LocAteRConfig, TargetUnit
from locater.errors import ConfigError, at_least
from locater.paper.lab.model import Shape, StabilizerName

Normalization = Literal["mean", "sum"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Shape):
    """One training run: the defaults are the paper's Section 7 (d = 128, one layer)."""

    corpus: str = "wikitext-2"
    """Name of the text; where it lies is no part of the settings."""
    vocabulary: Literal["word", "bpe"] = "word"
    """Tokens are words, or pieces of words (byte-pair encoding)."""
    vocabulary_size: int | None = None
    """Cuts the vocabulary; needed for bpe."""
    share: float = 1.0
    """Train on this share of the text, its first lines; the vocabulary is learned from them."""
    tokens: int = 64
    """T, the length of a sequence."""
    batch: int = 64
    """Sequences in a step, over all processes together."""
    steps: int = 50_000
    """Updates of the weights."""
    learning_rate: float = 2.5e-5
    """Of Adam, after the warm-up."""
    warmup: int = 0
    """Steps over which the learning rate rises to its value."""
    schedule: Literal["constant", "cosine"] = "constant"
    """What the learning rate does after that; cosine falls to zero at the last step."""
    clip: float = 0.0
    """The largest norm that a step's gradient may have; zero lets it be."""
    weight_decay: float = 0.01
    """Decoupled, on all parameters, as in fairseq."""
    scale_strength: float = 0.0
    """Weight of tr(W_QKᵀ W_QK) in the loss."""
    mean_strength: float = 0.0
    """Weight of (tr W_QK − target)² in the loss."""
    target: float = 1.0
    """What LocAteR holds the trace at."""
    target_unit: TargetUnit = "trace"
    """`temperature` reads the target as a multiple of λ."""
    normalization: Normalization = "mean"
    """Strengths beside a loss that is the mean over tokens, or beside their sum: then each is
    divided by the tokens of a batch."""
    covariance: Literal["none", "running"] = "none"
    """Penalize W_QK, or W_QK Σ with the running covariance of the tokens."""
    stabilizer: StabilizerName = "none"
    """A rival in place of LocAteR."""
    max_logit: float = 100.0
    """Where `qk-clip` scales queries and keys back, and what `soft-cap` bounds logits by."""
    qk_decay: float = 0.1
    """How much `qk-weight-decay` shrinks queries and keys a step, times the learning rate."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the products; weights and sums stay in float32."""
    seed: int = 0
    """Of weights, batches and dropout."""
    measure_every: int = 500
    """Steps between two measurements."""
    predict_every: int = 10
    """Measurements between two exact predictions of ρ, which cost the most."""
    evaluations: int = 1
    """How often the whole valid text is scored, denser early and last at the end; with more than
    one the best model is kept and scored on test, once, when training ends."""
    patience: int = 0
    """Evaluations without a better one after which training ends; zero never ends it early."""

    def __post_init__(self) -> None:
        Shape.__post_init__(self)
        least = {"tokens": 2, "batch": 1, "steps": 1, "measure_every": 1, "predict_every": 1,
                 "evaluations": 1, "patience": 0}  # fmt: skip
        at_least(self, least, hint="the paper's settings are the defaults.")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ConfigError(
                f"learning_rate must be positive, got {self.learning_rate}.",
                hint="the paper has 2.5e-5 at d = 128 and 1e-4 at d = 32.",
            )
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(
                f"weight_decay must be zero or more, got {self.weight_decay}.",
                hint="the paper has 0.01.",
            )
        if not 0 < self.share <= 1:
            raise ConfigError(
                f"share must be above 0 and at most 1, got {self.share}.",
                hint="0.15 trains on the first 15 % of the text's lines.",
            )
        for name in ("warmup", "clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} must be zero or more, got {getattr(self, name)}.",
                    hint="zero switches it off, as in the paper.",
                )
        self.penalty  # noqa: B018  (bad strengths are said here)

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0.

        >>> config = TrainConfig(learning_rate=1.0, warmup=2, steps=4, schedule="cosine")
        >>> [round(config.rate_at(step), 3) for step in range(4)]
        [0.5, 1.0, 1.0, 0.5]
        """
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.learning_rate
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.learning_rate * (1 + math.cos(math.pi * done)) / 2

    @property
    def evaluation_steps(self) -> tuple[int, ...]:
        """When the whole valid text is scored: at growing distances, the last at the end.

        >>> TrainConfig(steps=1000, evaluations=5).evaluation_steps
        (40, 160, 360, 640, 1000)
        """
        count = self.evaluations
        chosen = {max(1, round(self.steps * (k / count) ** 2)) for k in range(1, count + 1)}
        return tuple(sorted(chosen))

    @property
    def penalty(self) -> LocAteRConfig | None:
        """The regularizer's settings beside a mean loss; None where both strengths are zero."""
        if self.scale_strength == self.mean_strength == 0:
            return None
        share = self.batch * self.tokens if self.normalization == "sum" else 1
        return LocAteRConfig(
            scale_strength=self.scale_strength / share,
            mean_strength=self.mean_strength / share,
            target=self.target,
            target_unit=self.target_unit,
        )

    @property
    def digest(self) -> str:
        """Names the run; settings at their defaults do not enter, so that new ones change none."""
        text = json.dumps(self.changes(), sort_keys=True)
        return blake2b(text.encode(), digest_size=8).hexdigest()

    def changes(self) -> dict[str, Any]:
        """The settings that differ from the defaults."""
        values = asdict(self)
        default = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
        return {name: values[name] for name in default if values[name] != default[name]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """Read settings back; those of another version are an error that names the setting."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(
                f"unknown setting {unknown[0]!r}.",
                hint="the run was made by another version of locater.",
            )
        for field in dataclasses.fields(cls):
            value, kind = values.get(field.name, field.default), type(field.default)
            kinds = {float: (int, float), type(None): (int, type(None))}.get(kind, (kind,))
            is_huge = kind in (int, float) and type(value) in kinds and not abs(value) < 1e100
            if type(value) not in kinds or is_huge:
                raise ConfigError(f"{field.name} cannot be {value!r:.40}.", hint="train it again.")
        return cls(**values)
