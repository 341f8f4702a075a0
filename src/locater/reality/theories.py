"""What the theory says of a head, from the paper's printed formula to full moments."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from locater.core.form import QKForm
from locater.core.process import TokenProcess
from locater.core.score import HeadMoments, SampledHeads
from locater.core.theory import (
    Profile,
    attention_entropy,
    predicted_attention,
    propagation,
)

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
    "copy": "no theory: as counted on the first part",
}
"""What each prediction knows, from the paper's formula to full moments.

`full` has the exact law of the score where that was asked for, a Gaussian one otherwise.
"""


@dataclass(frozen=True, eq=False)
class Prediction:
    """What the theory says of the heads of one attention."""

    profile: Profile
    entropy: Float[Tensor, " heads"] | None = None
    attention: Float[Tensor, "heads tokens"] | None = None
    logit_mean: Float[Tensor, "heads tokens"] | None = None
    logit_variance: Float[Tensor, "heads tokens"] | None = None
    seconds: float = math.nan


def predictions(
    form: QKForm,
    process: TokenProcess,
    heads: SampledHeads,
    *,
    draws: int,
    exact: bool,
    generator: torch.Generator,
) -> Iterator[tuple[str, Prediction]]:
    """From the paper's formula to full moments, each with one more ingredient than the last."""
    walk = TokenProcess.random_walk(process.tokens)
    bare = QKForm(form.query, form.key, form.temperature)
    still = replace(form, rotary=None)
    makers: dict[str, Callable[[], Prediction]] = {
        "printed": lambda: Prediction(propagation(bare, walk, method="as_printed")),
        "walk": lambda: Prediction(propagation(bare, walk)),
        "kernel": lambda: _gaussian(bare, replace(process, mean=None), draws, generator),
        "means": lambda: _gaussian(still, process, draws, generator),
    }
    if form.rotary is not None:
        makers["rotary"] = lambda: _gaussian(form, process, draws, generator)
    if exact:
        makers["exact"] = lambda: _exact(form, process, draws, generator)
        makers["full_gaussian"] = lambda: _full(heads, exact=False)
    makers["full"] = lambda: _drawn(_full(heads, exact=exact), heads, draws, generator)
    makers["given_query"] = lambda: _drawn(
        Prediction(Profile.by_token(heads.rho_given_query(), "given the query")),
        heads,
        draws,
        generator,
        given_query=True,
    )
    for name, make in makers.items():
        start = time.perf_counter()
        prediction = make()
        yield name, replace(prediction, seconds=time.perf_counter() - start)


def _gaussian(
    form: QKForm, process: TokenProcess, draws: int, generator: torch.Generator
) -> Prediction:
    mean, variance = HeadMoments.of(form, process).score().moments()
    drawn = predicted_attention(form, process, draws=draws, generator=generator)
    tokens = process.tokens
    return Prediction(
        propagation(form, process, method="gaussian"),
        entropy=drawn.entropy,
        attention=drawn.attention,
        logit_mean=tokens * mean - 1,
        logit_variance=tokens**2 * variance,
    )


def _exact(
    form: QKForm, process: TokenProcess, draws: int, generator: torch.Generator
) -> Prediction:
    drawn = predicted_attention(form, process, law="exact", draws=draws, generator=generator)
    profile = propagation(form, process)
    return Prediction(profile, entropy=drawn.entropy, attention=drawn.attention)


def _full(heads: SampledHeads, *, exact: bool) -> Prediction:
    """With the moments of queries and keys themselves."""
    score, tokens = heads.score(), heads.tokens
    mean, variance = score.moments()
    return Prediction(
        Profile.by_token(score.rho("exact" if exact else "gaussian"), "full moments"),
        logit_mean=tokens * mean - 1,
        logit_variance=tokens**2 * variance,
    )


def _drawn(
    prediction: Prediction,
    heads: SampledHeads,
    draws: int,
    generator: torch.Generator,
    *,
    given_query: bool = False,
) -> Prediction:
    """The same with attention and entropy of drawn rows of logits."""
    logits = heads.sample_logits(draws, generator, given_query=given_query)
    attention = torch.softmax(logits, -1)
    entropy = attention_entropy(attention).mean(0)
    return replace(prediction, entropy=entropy, attention=attention.mean(0))
