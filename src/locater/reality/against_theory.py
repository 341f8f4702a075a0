"""Theory against reality: what a head's weights and its tokens' moments predict, and what it does.

Moments are estimated on one part of a text and attention is measured on another, with the model's
own logits.  Predictions go from the paper's printed formula to the exact law with full moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.core.bounds import entropy_lower_bound
from locater.core.diagnosis import Diagnosis, diagnose
from locater.core.form import QKForm
from locater.core.process import Gaussianity, TokenProcess, gaussianity, random_projections
from locater.core.score import SampledHeads, normal_between
from locater.core.theory import Profile, attention_entropy, linearized_softmax
from locater.engines import one_thread
from locater.errors import ConfigError, LocaterError
from locater.models.live import LiveAttention
from locater.notebook import Shown
from locater.probe.samples import LARGEST_GAP, AttentionSamples, logit_gap, readable, sampled
from locater.reality.predictions import COLUMNS, Prediction, predictions


@dataclass(frozen=True, eq=False, kw_only=True)
class Measured(Prediction):
    """What the heads of one attention did; logits are relative to their row's average."""

    entropy: Float[Tensor, " heads"]
    entropy_error: Float[Tensor, " heads"]
    attention: Float[Tensor, "heads tokens"]
    logit_mean: Float[Tensor, "heads tokens"]
    logit_variance: Float[Tensor, "heads tokens"]
    logit_kurtosis: Float[Tensor, " heads"]
    """Excess kurtosis of a logit over blocks, averaged over positions."""
    entropy_bound: Float[Tensor, " heads"]
    """The least entropy that logits of the measured norms allow, averaged over blocks."""
    gaussian_rho: Float[Tensor, "heads tokens"]
    """ρ of a Gaussian score with the measured mean and variance: what is left is the law's."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerReality:
    """One attention, predicted and measured."""

    name: str
    layer: int
    explained: float
    """Share of the inputs' covariance that K ⊗ Σ accounts for."""
    measured: Measured
    in_sample: Measured
    """The same on the blocks that the moments come from."""
    predictions: dict[str, Prediction]
    logit_gap: float
    """Largest difference of the form's own logits from the model's, in their standard deviations;
    a large one says that the form leaves something out."""
    diagnosis: Diagnosis
    features: dict[str, Gaussianity]
    caveats: tuple[str, ...] = ()

    @property
    def heads(self) -> int:
        """How many."""
        return self.measured.entropy.shape[0]

    @property
    def best(self) -> str:
        """The Kronecker prediction with the most ingredients and Gaussian moments."""
        return "rotary" if "rotary" in self.predictions else "means"

    def rho_error(self, column: str, *, in_sample: bool = False) -> Float[Tensor, " heads"]:
        """Mean |ρ predicted − ρ measured| over positions."""
        measured = self.in_sample if in_sample else self.measured
        return (self.predictions[column].profile.rho - measured.profile.rho).abs().mean(-1)

    @property
    def rho_noise(self) -> Float[Tensor, " heads"]:
        """The |error| that counting finitely many blocks causes alone, √(2/π) s.e. on average."""
        error = self.measured.profile.standard_error
        assert error is not None
        return math.sqrt(2 / math.pi) * error.mean(-1)

    def rho_error_beyond_noise(self, column: str) -> Float[Tensor, " heads"]:
        """Root mean square of ρ's error over positions, without what counting adds to it."""
        gap = self.predictions[column].profile.rho - self.measured.profile.rho
        error = self.measured.profile.standard_error
        assert error is not None
        return (gap.square() - error.square()).mean(-1).clamp_min(0).sqrt()

    def rows(self) -> list[dict[str, Any]]:
        """One plain dictionary per head."""
        done, errors = self._done(), self._errors()
        return [
            {"name": self.name, "layer": self.layer, "head": head}
            | {name: values[head].item() for name, values in done.items()}
            | {"why": why}
            | {name: values[head].item() for name, values in errors.items()}
            for head, why in enumerate(self.diagnosis.rows())
        ]

    def _done(self) -> dict[str, Float[Tensor, " heads"]]:
        """What the heads did."""
        measured, rho = self.measured, self.measured.profile.rho
        return {
            "entropy": measured.entropy,
            "entropy_standard_error": measured.entropy_error,
            "entropy_bound": measured.entropy_bound,
            "mean_rho": rho.mean(-1),
            "sink_mass": measured.attention[:, 0],
            "own_mass": measured.attention[:, -1],
            "logit_deviation": measured.logit_variance.mean(-1).sqrt(),
            "logit_kurtosis": measured.logit_kurtosis,
            "rho_noise": self.rho_noise,
            "law_error": (measured.gaussian_rho - rho).abs().mean(-1),
        }

    def _errors(self) -> dict[str, Float[Tensor, " heads"]]:
        """What every prediction says, or how far it is off."""
        found, measured = dict[str, Tensor](), self.measured
        total = measured.logit_variance.sum(-1).clamp_min(1e-300)
        for column, made in self.predictions.items():
            found[f"rho_error_{column}"] = self.rho_error(column)
            found[f"rho_beyond_noise_{column}"] = self.rho_error_beyond_noise(column)
            if made.entropy is not None and made.attention is not None:
                found[f"entropy_{column}"] = made.entropy
                gap = (made.attention - measured.attention).abs().sum(-1)
                found[f"attention_error_{column}"] = gap / 2
            if made.logit_mean is not None and made.logit_variance is not None:
                gap = (made.logit_mean - measured.logit_mean).abs().mean(-1)
                found[f"logit_mean_error_{column}"] = gap
                found[f"logit_variance_ratio_{column}"] = made.logit_variance.sum(-1) / total
        for column in (self.best, "full"):
            found[f"rho_error_in_sample_{column}"] = self.rho_error(column, in_sample=True)
        return found


KURTOSIS = {"tokens": "token", "queries": "query", "keys": "key", "token projections": "projection"}
"""What `_features` looks at, and how a layer's row calls its excess kurtosis."""


@dataclass(frozen=True, eq=False, repr=False)
class Reality(Shown):
    """A model held against the theory, layer by layer.

    >>> import torch
    >>> from locater.models.loading import load_model
    >>> model, _ = load_model("demo")
    >>> blocks = torch.randint(40, 400, (60, 16), generator=torch.Generator().manual_seed(0))
    >>> reality = against_theory(model, blocks, RealityConfig(draws=50, exact=False))
    >>> len(reality.rows()), reality.summary()["tokens"]
    (16, 16)
    """

    _columns = ("layer", "head", "entropy", "entropy_full", "sink_mass", "rho_error_printed",
                "rho_error_full", "rho_error_copy", "rho_noise")  # fmt: skip

    layers: list[LayerReality]
    estimated_on: int
    measured_on: int
    tokens: int
    skipped: dict[str, str]
    """Attentions without a fixed W_QK, and why."""

    def _line(self) -> str:
        return f"{len(self.rows())} heads of {len(self.layers)} layers, {self.tokens} tokens"

    def _table(self) -> list[dict[str, Any]]:
        return self.rows()

    def rows(self) -> list[dict[str, Any]]:
        """One plain dictionary per head of every layer."""
        return [row for layer in self.layers for row in layer.rows()]

    @property
    def columns(self) -> list[str]:
        """The predictions made, in the order of `COLUMNS`."""
        made = {name for layer in self.layers for name in layer.predictions}
        return [name for name in COLUMNS if name in made]

    def warnings(self) -> list[str]:
        """What the predictions leave out, as far as it is known or seen in the logits."""
        told: dict[str, list[str]] = {}
        for layer in self.layers:
            for caveat in layer.caveats:
                told.setdefault(caveat, []).append(layer.name)
            if layer.logit_gap > LARGEST_GAP:
                words = "logits of the form differ from the model's own: it leaves something out"
                told.setdefault(words, []).append(f"{layer.name} ({layer.logit_gap:.2f} s.d.)")
        return [
            f"{caveat} [{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}]"
            for caveat, names in told.items()
        ]

    def layer_rows(self) -> list[dict[str, Any]]:
        """Averages over the heads of each layer."""
        return [
            {
                "layer": layer.layer,
                "name": layer.name,
                "heads": layer.heads,
                "explained": layer.explained,
                "logit_gap": layer.logit_gap,
                **averages(layer.rows()),
                **{
                    f"{column}_kurtosis": layer.features[name].excess_kurtosis.median().item()
                    for name, column in KURTOSIS.items()
                },
                "not_gaussian": {name: shape.rejected() for name, shape in layer.features.items()},
                "seconds": {name: one.seconds for name, one in layer.predictions.items()},
            }
            for layer in self.layers
        ]

    def summary(self) -> dict[str, Any]:
        """Averages over all heads, and how well heads are ranked."""
        rows = self.rows()
        result: dict[str, Any] = {
            "heads": len(rows),
            "tokens": self.tokens,
            "estimated_on": self.estimated_on,
            "measured_on": self.measured_on,
            **averages(rows),
        }
        rho = torch.cat([layer.measured.profile.rho for layer in self.layers])
        by_name = {f"layer {row['layer']} head {row['head']}": row for row in rows}
        result["worst_heads"] = {
            column: quantiles(by_name, column)
            for column in self.columns
            if f"rho_error_{column}" in rows[0]
        }
        for column in self.columns:
            if any(column not in layer.predictions for layer in self.layers):
                continue
            predicted = torch.cat([layer.predictions[column].profile.rho for layer in self.layers])
            ranked = rank_correlation(predicted.mean(-1), rho.mean(-1))
            result[f"rank_correlation_rho_{column}"] = ranked
            over = _correlations(predicted, rho)
            result[f"position_correlation_{column}"] = over.nanmedian().item()
            entropy = [layer.predictions[column].entropy for layer in self.layers]
            found = [one for one in entropy if one is not None]
            if len(found) == len(entropy):
                result[f"rank_correlation_entropy_{column}"] = rank_correlation(
                    torch.cat(found), torch.cat([one.measured.entropy for one in self.layers])
                )
        return result


def averages(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Means over heads: errors of ρ, entropy, attention and logits for every prediction."""
    result: dict[str, float] = {}
    for key, value in rows[0].items():
        if key.startswith("entropy_") and key not in ("entropy_bound", "entropy_standard_error"):
            gaps = [abs(row[key] - row["entropy"]) for row in rows]
            result[key.replace("entropy_", "entropy_error_")] = sum(gaps) / len(gaps)
        elif isinstance(value, float):
            result[key] = sum(row[key] for row in rows) / len(rows)
    return result


def quantiles(rows: dict[str, dict[str, Any]], column: str) -> dict[str, Any]:
    """Median, 90th percentile and worst head of a prediction's errors of ρ and of entropy."""
    found: dict[str, Any] = {}
    errors = {"rho": {name: row[f"rho_error_{column}"] for name, row in rows.items()}}
    if all(f"entropy_{column}" in row for row in rows.values()):
        errors["entropy"] = {
            name: abs(row[f"entropy_{column}"] - row["entropy"]) for name, row in rows.items()
        }
    for name, values in errors.items():
        ordered = torch.tensor(list(values.values()), dtype=torch.float64)
        worst = max(values, key=lambda head: values[head])
        found[name] = {
            "median": ordered.median().item(),
            "p90": ordered.quantile(0.9).item(),
            "worst": values[worst],
            "worst_head": worst,
        }
    return found


def rank_correlation(first: Float[Tensor, " items"], second: Float[Tensor, " items"]) -> float:
    """Spearman's correlation; ties share their rank.

    >>> round(rank_correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 8.0, 27.0])), 9)
    1.0
    """
    ranks = torch.stack([_ranks(first), _ranks(second)])
    return _correlations(ranks[:1], ranks[1:]).item()


def _ranks(values: Float[Tensor, " items"]) -> Float[Tensor, " items"]:
    below = (values[:, None] > values).double().sum(-1)
    return below + (values[:, None] == values).double().sum(-1) / 2


def _correlations(first: Tensor, second: Tensor) -> Tensor:
    first, second = (part - part.mean(-1, keepdim=True) for part in (first, second))
    return (first * second).sum(-1) / (first.norm(dim=-1) * second.norm(dim=-1))


@dataclass(frozen=True, kw_only=True)
class RealityConfig:
    """How to hold the theory against a model.

    >>> RealityConfig(draws=200, exact=False).estimate
    0.5
    """

    estimate: float = 0.5
    """Share of the blocks, from the front of the text, that the moments are estimated on."""
    estimate_blocks: int | None = None
    """Use no more than this many of them; attention is measured on the same blocks as without."""
    draws: int = 1000
    """Rows of logits drawn for a predicted entropy."""
    exact: bool = True
    """Also invert the exact law of the score, which takes most of the time."""
    batch: int = 16
    """Blocks that run together."""
    layers: str | None = None
    """A regular expression that selects attentions by name."""
    query: int = -1
    """The token that asks, counted from 0; -1 is the last."""
    seed: int = 0
    """Of the drawn rows of logits."""

    def __post_init__(self) -> None:
        if not 0 < self.estimate < 1:
            raise ConfigError(
                f"estimate must lie between 0 and 1, got {self.estimate}.",
                hint="half of the blocks is a good share.",
            )
        for name, least in (("draws", 2), ("batch", 1)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"{name} must be {least} or more, got {getattr(self, name)}.",
                    hint="1000 draws and batches of 16 are usual.",
                )
        if self.estimate_blocks is not None and self.estimate_blocks < 8:
            raise ConfigError(
                f"estimate_blocks must be 8 or more, got {self.estimate_blocks}.",
                hint="covariances of a head need hundreds of blocks.",
            )


def against_theory(
    model: nn.Module,
    blocks: Tensor,
    config: RealityConfig | None = None,
    *,
    other: Tensor | None = None,
    report: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Reality:
    """Predict every head's attention from one part of the blocks and measure it on the rest.

    `blocks` is what the model takes: ids (blocks × tokens) in the order of the text, or vectors.
    The first share is for moments only, the rest for measurement only.  With `other` blocks, from
    another text, attention is measured on those.

    >>> import torch
    >>> from locater.models.loading import load_model
    >>> model, _ = load_model("demo")
    >>> blocks = torch.randint(40, 400, (60, 16), generator=torch.Generator().manual_seed(0))
    >>> found = against_theory(model, blocks, RealityConfig(draws=50, exact=False)).rows()[0]
    >>> abs(found["entropy"] - found["entropy_full"]) < 1  # nats, measured and predicted
    True
    """
    config = config or RealityConfig()
    halves = Halves.of(model, blocks, config, other)
    tokens, skipped = blocks.shape[1], dict(halves.skipped)
    layers: list[LayerReality] = []
    for asked in halves.samples(model, config.query, skipped, report):
        with one_thread():
            layers.append(layer_against_theory(asked, config))
        report("layers", len(layers), len(halves.attentions))
    if not layers:
        raise LocaterError(
            f"no query of {tokens} tokens can be held against the theory: "
            f"{next(iter(skipped.values()), 'none was seen')}.",
            hint="a sliding window or padding hides keys: use fewer tokens, or measure alone, "
            "with `locater probe` or Probe(model).",
        )
    return Reality(layers, halves.used, len(halves.every) - halves.used, tokens, skipped)


@dataclass(frozen=True, eq=False)
class Halves:
    """Blocks to estimate on and blocks to measure on, and the attentions that can be asked."""

    attentions: list[LiveAttention]
    skipped: dict[str, str]
    every: Tensor
    used: int
    """The first so many blocks are for moments, the others for measurement."""
    batch: int

    @classmethod
    def of(
        cls, model: nn.Module, blocks: Tensor, config: RealityConfig, other: Tensor | None = None
    ) -> Halves:
        """Split the blocks, find the attentions, refuse what cannot be answered."""
        split = round(config.estimate * len(blocks))
        used = split if config.estimate_blocks is None else min(split, config.estimate_blocks)
        rest = blocks[split:] if other is None else other
        if used < 8 or len(rest) < 8:
            raise LocaterError(
                f"{len(blocks)} blocks leave {used} to estimate on and {len(rest)} to measure.",
                hint="give a longer text, or shorter blocks: hundreds of each are needed.",
            )
        found = readable(model, config.layers)
        skipped = {
            one.layout.name: "queries and keys are normalized: no fixed W_QK exists"
            for one in found
            if one.layout.qk_norm
        }
        fixed = [one for one in found if one.layout.name not in skipped]
        if not fixed:
            raise LocaterError(
                "no self-attention of the model has a fixed W_QK.",
                hint="models with qk-norm are measured by `locater probe`, or Probe(model), alone.",
            )
        return cls(fixed, skipped, torch.cat([blocks[:used], rest]), used, config.batch)

    def samples(
        self,
        model: nn.Module,
        query: int,
        skipped: dict[str, str],
        report: Callable[[str, int, int], None],
    ) -> Iterator[AttentionSamples]:
        """Attention after attention, as if this query were the last; and why one is skipped."""
        tokens = self.every.shape[1]
        place = query + (tokens if query < 0 else 0)
        if not 0 <= place < tokens:
            raise ConfigError(
                f"query must be a token of {tokens}, got {query}.", hint="-1 is the last."
            )
        for sample in sampled(
            model,
            self.attentions,
            self.every,
            keep=self.used,
            batch=self.batch,
            query=place,
            report=lambda done, total: report("model", done, total),
        ):
            asked = sample if place + 1 == tokens else sample.ending_at(place)
            reason = _unlike_the_theory(asked, place)
            if reason:
                skipped[sample.attention.layout.name] = reason
            else:
                yield asked


def _unlike_the_theory(samples: AttentionSamples, query: int) -> str:
    """Why an attention's query cannot be held against the theory, if it cannot."""
    if not samples.sees_all:
        return "its last query does not see every key: use fewer tokens than its window"
    asking = samples.inputs[:, -1].double()
    if asking.var(0).sum() <= 1e-12 * asking.square().mean(0).sum():
        return "its query is the same in every block: there is nothing to predict"
    form = samples.attention.form(distances=2)
    is_moved = samples.inputs.shape[1] != query + 1  # keys behind the query came before it
    by_place = (form.rotary, form.distance_bias, form.relative)
    if is_moved and any(part is not None for part in by_place):
        return "keys behind a query have distances of their own: ask the last query"
    return ""


@torch.no_grad()
def layer_against_theory(samples: AttentionSamples, config: RealityConfig) -> LayerReality:
    """One attention: estimate, predict, compare."""
    layout, inputs = samples.attention.layout, samples.inputs
    generator = torch.Generator().manual_seed(config.seed)
    form, process, heads = estimated(samples)
    own, held_out = (part.double() for part in samples.logits.tensor_split([len(inputs)]))
    in_sample = measure(own, f"{layout.name}, where estimated")
    made = predicted(form, process, heads, in_sample, config, generator)
    return LayerReality(
        name=layout.name,
        layer=layout.layer,
        explained=math.nan if process.explained is None else process.explained,
        measured=measure(held_out, f"{layout.name}, measured"),
        in_sample=in_sample,
        predictions=made,
        logit_gap=logit_gap(heads.logits(), own),
        diagnosis=diagnose(form, process),
        features=_features(heads, inputs, generator),
        caveats=layout.caveats,
    )


def estimated(samples: AttentionSamples) -> tuple[QKForm, TokenProcess, SampledHeads]:
    """An attention's form, the process of its tokens, and the moments of its queries and keys."""
    tokens = samples.inputs.shape[1]
    form = samples.attention.form(distances=tokens).to(torch.float64, torch.device("cpu"))
    process = TokenProcess.from_samples(samples.inputs, fit="traces")
    return form, process, SampledHeads.of(form, samples.inputs)


def predicted(
    form: QKForm,
    process: TokenProcess,
    heads: SampledHeads,
    counted: Measured,
    config: RealityConfig,
    generator: torch.Generator,
) -> dict[str, Prediction]:
    """Everything that is known before attention is measured; `copy` is what was counted there."""
    settings: dict[str, Any] = {"draws": config.draws, "exact": config.exact}
    made = dict(predictions(form, process, heads, generator=generator, **settings))
    return made | {"copy": counted}


def measure(logits: Float[Tensor, "blocks heads tokens"], label: str = "") -> Measured:
    """What the last query of each block did, from the model's own logits."""
    blocks, _, tokens = logits.shape
    score, attention = linearized_softmax(logits), torch.softmax(logits, -1)
    rho = ((score >= 0) & (score <= 1)).double().mean(0)
    entropy = attention_entropy(attention)
    centered = logits - logits.mean(-1, keepdim=True)
    norm = centered.norm(dim=-1)
    spread = centered - centered.mean(0)
    variance = spread.square().mean(0)
    safe = variance.clamp_min(1e-300)
    error = (rho * (1 - rho) / blocks).sqrt()
    return Measured(
        profile=Profile.by_token(rho, label, source="measured", standard_error=error),
        entropy=entropy.mean(0),
        entropy_error=entropy.std(0) / math.sqrt(blocks),
        attention=attention.mean(0),
        logit_mean=centered.mean(0),
        logit_variance=variance * blocks / (blocks - 1),
        logit_kurtosis=(spread.pow(4).mean(0) / safe.square() - 3).mean(-1),
        entropy_bound=entropy_lower_bound(norm, tokens).mean(0),
        gaussian_rho=normal_between(score.mean(0), score.var(0)),
    )


def _features(
    heads: SampledHeads, inputs: Float[Tensor, "blocks tokens model"], generator: torch.Generator
) -> dict[str, Gaussianity]:
    """Are queries, keys and tokens Gaussian: by dimension, and along random directions?"""
    middle = inputs.shape[1] // 2
    queries = heads.query.movedim(-2, 0).flatten(1)
    keys = heads.key[..., middle, :].movedim(-2, 0).flatten(1)
    tokens = inputs[:, middle].double()
    return {
        "queries": gaussianity(queries),
        "keys": gaussianity(keys),
        "tokens": gaussianity(tokens),
        "token projections": gaussianity(random_projections(tokens, 64, generator)),
    }
