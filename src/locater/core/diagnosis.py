"""Why a head looks where it looks: its score taken apart, and its ingredients taken away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from locater.core.form import QKForm
from locater.core.process import TokenProcess
from locater.core.score import HeadMoments

Ingredient = Literal[
    "spectrum", "covariance", "kernel", "means", "biases", "rotation", "distance", "weights"
]
MEAN_PARTS = ("kernel", "means", "distance")
VARIANCE_PARTS = ("fluctuations", "kernel", "query mean", "key means", "mixed")


@dataclass(frozen=True, eq=False)
class Change:
    """What a head would do with one ingredient neutral."""

    rho: Float[Tensor, "*heads tokens"]
    logit_variance: Float[Tensor, "*heads tokens"]


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What a head's ρ and logits come from, in the Gaussian theory.

    Logits are taken relative to their row's average, which is all that a softmax sees.

    >>> from locater import QKForm, TokenProcess
    >>> form = QKForm.from_eigenvalues(torch.tensor([2.0, 1.0]), temperature=1.0)
    >>> diagnose(form, TokenProcess.random_walk(4)).rho.shape
    torch.Size([4])
    """

    rho: Float[Tensor, "*heads tokens"]
    logit_mean: Float[Tensor, "*heads tokens"]
    logit_variance: Float[Tensor, "*heads tokens"]
    mean_parts: dict[str, Float[Tensor, "*heads tokens"]]
    """They add up to `logit_mean`: `kernel` is query and key moving together (K and tr WΣ), `means`
    the mean key read by the mean query, `distance` a bias by distance."""
    variance_parts: dict[str, Float[Tensor, "*heads tokens"]]
    """They add up to `logit_variance`: `fluctuations` and `kernel` need no means, `query mean` is
    the mean query (with its bias) reading the keys' fluctuations, `key means` the query's
    fluctuations reading where the mean keys are, `mixed` their covariance."""
    without: dict[Ingredient, Change]
    """One ingredient at a time at its neutral value: see `diagnose`."""

    def effect(self, ingredient: Ingredient) -> Float[Tensor, "*heads"]:
        """Mean |change of ρ| over positions when the ingredient is neutral."""
        return (self.without[ingredient].rho - self.rho).abs().mean(-1)

    @property
    def leading(self) -> list[Ingredient]:
        """For every head, stacks flattened, the ingredient whose absence moves its ρ the most.

        `weights` is left out: without W_QK only biases act, which is a limit and not a cause.
        """
        names = [name for name in self.without if name != "weights"]
        effects = torch.stack([self.effect(name).flatten() for name in names])
        return [names[place] for place in effects.argmax(0).tolist()]

    def rows(self) -> Iterator[dict[str, Any]]:
        """One plain dictionary per head: shares of the logits' mean square, and effects on ρ."""
        square = (self.logit_mean.square() + self.logit_variance).mean(-1).flatten()
        shares = {
            name: (part.mean(-1).flatten() / square).tolist()
            for name, part in self.variance_parts.items()
        }
        shares["pattern"] = (self.logit_mean.square().mean(-1).flatten() / square).tolist()
        effects = {name: self.effect(name).flatten().tolist() for name in self.without}
        for head, leading in enumerate(self.leading):
            mine = sorted(
                ((values[head], name) for name, values in effects.items() if name != "weights"),
                reverse=True,
            )
            yield {
                "leading": leading,
                "main": [f"{name} {value:.2f}" for value, name in mine[:2]],
                "shares": {name: values[head] for name, values in shares.items()},
                "effects": {name: values[head] for name, values in effects.items()},
            }


def diagnose(form: QKForm, process: TokenProcess) -> Diagnosis:
    """Take a head's score apart, and take its ingredients away one at a time.

    Neutral are: `spectrum`, equal singular values of W_QK at the same ‖W_QK‖_F; `covariance`,
    Σ = (tr Σ/d) I; `kernel`, tokens that know nothing of each other, at their own variances;
    `means`, m_t = 0; `biases`, none; `rotation`, none; `distance`, no bias by distance; `weights`,
    W_Q = 0, the end of what shrinking W_QK can do: what is left acts through the query's bias.

    >>> form = QKForm.from_eigenvalues(torch.tensor([2.0, 1.0]), temperature=1.0)
    >>> diagnosis = diagnose(form, TokenProcess.random_walk(4))
    >>> sorted(diagnosis.without), diagnosis.leading
    (['kernel', 'spectrum', 'weights'], ['kernel'])
    """
    form = replace(form.to(torch.float64), is_symmetric=False)
    score = HeadMoments.of(form, process).score()
    unit = process.tokens / score.temperature
    logit_mean, logit_variance = score.logits()
    mean, variance = score.parts()
    nothing = torch.zeros_like(score.base)
    mean_parts = {name: unit * mean.get(name, nothing) + nothing for name in MEAN_PARTS}
    mean_parts["distance"] = process.tokens * score.base - 1
    variance_parts = {
        name: unit**2 * variance.get(name, nothing) + nothing for name in VARIANCE_PARTS
    }
    without: dict[Ingredient, Change] = {}
    for name in get_args(Ingredient):
        other = _neutral(name, form, process)
        if other is not None:
            changed = HeadMoments.of(*other).score()
            without[name] = Change(changed.rho("gaussian"), changed.logits()[1])
    rho = score.rho("gaussian")
    return Diagnosis(rho, logit_mean, logit_variance, mean_parts, variance_parts, without)


def _neutral(
    name: Ingredient, form: QKForm, process: TokenProcess
) -> tuple[QKForm, TokenProcess] | None:
    """The same head with one ingredient neutral; None where it has none."""
    if name == "spectrum":
        return _flattened(form), process
    if name == "weights":
        return replace(form, query=torch.zeros_like(form.query)), process
    if name == "kernel":
        return form, replace(process, kernel=process.kernel.diagonal().diag())
    if name == "covariance" and process.covariance is not None:
        size = process.covariance.shape[0]
        even = torch.eye(size, dtype=torch.float64) * process.covariance.trace().item() / size
        return form, replace(process, covariance=even.to(process.covariance))
    if name == "means" and process.mean is not None:
        return form, replace(process, mean=None)
    if name == "biases" and (form.query_bias is not None or form.key_bias is not None):
        return replace(form, query_bias=None, key_bias=None), process
    if name == "rotation" and form.rotary is not None:
        return replace(form, rotary=None), process
    if name == "distance" and (form.distance_bias is not None or form.relative is not None):
        return replace(form, distance_bias=None, relative=None), process
    return None


def _flattened(form: QKForm) -> QKForm:
    """W_QK with equal singular values on the same singular vectors and the same keys.

    With W_Qᵀ = Q R, W_Kᵀ = P S and R Sᵀ = U D Vᵀ it is √(mean D²) Q U Vᵀ Pᵀ; the key's factor
    stays, so that biases and rotations act on what they did, and the query takes S⁻¹.
    """
    query_basis, query_side = torch.linalg.qr(form.query.mT)
    key_side = torch.linalg.qr(form.key.mT, mode="r").R
    left, values, right = torch.linalg.svd(query_side @ key_side.mT)
    size = values.square().mean(-1).sqrt()[..., None, None]
    query = torch.linalg.pinv(key_side) @ (query_basis @ left @ right).mT * size
    return replace(form, query=query)
