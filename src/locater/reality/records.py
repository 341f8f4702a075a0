"""Records of theory against reality: measured, predicted, and how far apart they are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.core.diagnosis import Diagnosis
from locater.core.gaussianity import Gaussianity
from locater.core.theory import Profile

COLUMNS = {
    "printed": "as printed, Σ = I",
    "walk": "exact walk, Σ = I",
    "kernel": "measured K, Σ",
    "means": "+ means, biases",
    "rotary": "+ rotation",
    "exact": "… exact law",
    "full_gaussian": "full moments, Gaussian law",
    "full": "full moments",
    "given_query": "full moments, given the query",
}
"""What each prediction knows, from the paper's formula to full moments.

`full` has the exact law of the score where that was asked for, a Gaussian one otherwise.
"""


@dataclass(frozen=True, eq=False, kw_only=True)
class Measured:
    """What the heads of one attention did; logits are relative to their row's average."""

    profile: Profile
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


@dataclass(frozen=True, eq=False)
class Prediction:
    """What the theory says of the heads of one attention."""

    profile: Profile
    entropy: Float[Tensor, " heads"] | None = None
    attention: Float[Tensor, "heads tokens"] | None = None
    logit_mean: Float[Tensor, "heads tokens"] | None = None
    logit_variance: Float[Tensor, "heads tokens"] | None = None
    seconds: float = math.nan


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

    def rows(self) -> list[dict[str, Any]]:
        """One plain dictionary per head."""
        return [self._row(head, why) for head, why in enumerate(self.diagnosis.rows())]

    def _row(self, head: int, why: dict[str, Any]) -> dict[str, Any]:
        measured = self.measured
        row: dict[str, Any] = {
            "name": self.name,
            "layer": self.layer,
            "head": head,
            "entropy": measured.entropy[head].item(),
            "entropy_standard_error": measured.entropy_error[head].item(),
            "entropy_bound": measured.entropy_bound[head].item(),
            "mean_rho": measured.profile.rho[head].mean().item(),
            "sink_mass": measured.attention[head, 0].item(),
            "own_mass": measured.attention[head, -1].item(),
            "logit_deviation": measured.logit_variance[head].mean().sqrt().item(),
            "logit_kurtosis": measured.logit_kurtosis[head].item(),
            "rho_noise": self.rho_noise[head].item(),
            "law_error": _gap(measured.gaussian_rho[head], measured.profile.rho[head]),
            "why": why,
        }
        for column, prediction in self.predictions.items():
            row[f"rho_error_{column}"] = self.rho_error(column)[head].item()
            if prediction.entropy is not None and prediction.attention is not None:
                row[f"entropy_{column}"] = prediction.entropy[head].item()
                row[f"attention_error_{column}"] = (
                    prediction.attention[head] - measured.attention[head]
                ).abs().sum().item() / 2
            if prediction.logit_mean is not None and prediction.logit_variance is not None:
                row[f"logit_mean_error_{column}"] = _gap(
                    prediction.logit_mean[head], measured.logit_mean[head]
                )
                total = measured.logit_variance[head].sum().clamp_min(1e-300)
                ratio = prediction.logit_variance[head].sum() / total
                row[f"logit_variance_ratio_{column}"] = ratio.item()
        for column in (self.best, "full"):
            row[f"rho_error_in_sample_{column}"] = self.rho_error(column, in_sample=True)[
                head
            ].item()
        return row


@dataclass(frozen=True, eq=False)
class Reality:
    """A model held against the theory, layer by layer."""

    layers: list[LayerReality]
    estimated_on: int
    measured_on: int
    tokens: int
    skipped: dict[str, str]
    """Attentions without a fixed W_QK, and why."""

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
            if layer.logit_gap > 0.05:
                words = "logits of the form differ from the model's own: it leaves something out"
                told.setdefault(words, []).append(f"{layer.name} ({layer.logit_gap:.2f} s.d.)")
        return [
            f"{caveat} [{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}]"
            for caveat, names in told.items()
        ]

    def layer_rows(self) -> list[dict[str, Any]]:
        """Averages over the heads of each layer."""
        results = []
        for layer in self.layers:
            rows = layer.rows()
            results.append(
                {
                    "layer": layer.layer,
                    "name": layer.name,
                    "heads": layer.heads,
                    "explained": layer.explained,
                    "logit_gap": layer.logit_gap,
                    **averages(rows),
                    "token_kurtosis": layer.features["tokens"].excess_kurtosis.median().item(),
                    "query_kurtosis": layer.features["queries"].excess_kurtosis.median().item(),
                    "key_kurtosis": layer.features["keys"].excess_kurtosis.median().item(),
                    "projection_kurtosis": layer.features["token projections"]
                    .excess_kurtosis.median()
                    .item(),
                    "not_gaussian": {
                        name: shape.rejected() for name, shape in layer.features.items()
                    },
                    "seconds": {name: one.seconds for name, one in layer.predictions.items()},
                }
            )
        return results

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
        for column in self.columns:
            if any(column not in layer.predictions for layer in self.layers):
                continue
            predicted = torch.cat([layer.predictions[column].profile.rho for layer in self.layers])
            result[f"rank_correlation_rho_{column}"] = rank_correlation(
                predicted.mean(-1), rho.mean(-1)
            )
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


def _gap(first: Tensor, second: Tensor) -> float:
    return (first - second).abs().mean().item()
