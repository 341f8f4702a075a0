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
from locater.core.score import HeadMoments, SampledHeads, normal_between
from locater.core.theory import Profile, attention_entropy, predicted_attention, propagation

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
    "clusters": "clusters of keys, given the query",
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
    own = torch.Generator().manual_seed(generator.initial_seed())
    makers["clusters"] = lambda: _clustered(heads, draws, own)
    for name, make in makers.items():
        start = time.perf_counter()
        prediction = make()
        yield name, replace(prediction, seconds=time.perf_counter() - start)


def _gaussian(
    form: QKForm, process: TokenProcess, draws: int, generator: torch.Generator
) -> Prediction:
    drawn = predicted_attention(form, process, draws=draws, generator=generator)
    moments = HeadMoments.of(form, process).score().logits()
    profile = propagation(form, process, method="gaussian")
    return Prediction(profile, drawn.entropy, drawn.attention, *moments)


def _exact(
    form: QKForm, process: TokenProcess, draws: int, generator: torch.Generator
) -> Prediction:
    drawn = predicted_attention(form, process, law="exact", draws=draws, generator=generator)
    return Prediction(propagation(form, process), drawn.entropy, drawn.attention)


def _full(heads: SampledHeads, *, exact: bool) -> Prediction:
    """With the moments of queries and keys themselves."""
    score = heads.score()
    rho = score.rho("exact" if exact else "gaussian")
    return Prediction(Profile.by_token(rho, "full moments"), None, None, *score.logits())


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


_CLUSTERS = (1, 4, 16)
"""Numbers of clusters to choose from; more than a text has kinds of tokens say nothing new."""
_PRIOR = 8.0
"""Tokens' worth of what all positions and queries share, in the means and shares of each."""


@dataclass(frozen=True, eq=False)
class KeyClusters:
    """Keys of one head as a mixture: clusters at every position, and Gaussian scores within them.

    Where tokens are few kinds (amino acids, atoms, words as they are embedded) a key's score is not
    Gaussian but one of a few Gaussians.  The share of a cluster depends on the position and on the
    query's own cluster.  What a block's keys have in common beside their clusters is left out: the
    softmax does not see it.
    """

    query: Float[Tensor, "samples head"]
    mean: Float[Tensor, "samples tokens clusters"]
    """Of the logits of the sampled queries, for a key of each cluster."""
    variance: Float[Tensor, "samples clusters"]
    share: Float[Tensor, "samples tokens clusters"]

    @classmethod
    def of(cls, head: SampledHeads, clusters: int, generator: torch.Generator) -> KeyClusters:
        """Cluster keys and queries, and take moments within clusters."""
        query, key = head.query, head.key
        own = query - query.mean(0)
        label = _nearest(key.flatten(0, 1), clusters, generator).view(key.shape[:2])
        group = _nearest(query, clusters, generator)
        inside = torch.nn.functional.one_hot(label, clusters).to(key)  # samples tokens clusters
        count = inside.sum(0)
        total = torch.einsum("ntc,nth->tch", inside, key)
        center = total.sum(0) / count.sum(0)[:, None].clamp_min(1)
        place = (total + _PRIOR * center) / (count + _PRIOR)[..., None]
        left = key - place[torch.arange(head.tokens), label]
        slope = torch.linalg.pinv(own.mT @ own, hermitian=True) @ (own.mT @ left.flatten(1))
        known = (own @ slope).view(key.shape)  # what the query says of the key, cluster aside
        left = left - known
        left = left - left.mean(1, keepdim=True)
        parts = [left[label == cluster] for cluster in range(clusters)]
        spread = torch.stack([part.mT @ part / max(len(part), 1) for part in parts])
        mean = torch.einsum("nh,tch->ntc", query, place)
        mean = (mean + (known * query[:, None]).sum(-1)[..., None]) / head.temperature
        shift = 0.0 if head.shift is None else head.shift[:, None]
        asked = torch.nn.functional.one_hot(group, clusters).to(key)
        joint = torch.einsum("ng,ntc->gtc", asked, inside) + _PRIOR * count / len(key)
        share = joint / joint.sum(-1, keepdim=True)
        variance = ((query @ spread) * query).sum(-1).mT / head.temperature**2
        return cls(query, mean + shift, variance, share[group])

    def rho(self) -> Float[Tensor, " tokens"]:
        """How often a token's gradient passes the softmax, averaged over the sampled queries."""
        tokens = self.mean.shape[1]
        expected = (self.share * self.mean).sum(-1)  # of each key, whatever its cluster
        between = (self.share * self.mean.square()).sum(-1) - expected.square()
        average = expected.mean(-1)[:, None, None] + (self.mean - expected[..., None]) / tokens
        others = (between.sum(-1, keepdim=True) - between)[..., None] / tokens**2
        variance = (self.variance[:, None] + others) / tokens**2
        inside = normal_between((1 + self.mean - average) / tokens, variance)
        return (inside * self.share).sum(-1).mean(0)

    def rows(self, draws: int, generator: torch.Generator) -> Float[Tensor, "draws tokens"]:
        """Rows of logits: a sampled query, a cluster for every key, a Gaussian score in it."""
        pick = torch.randint(len(self.query), (draws,), generator=generator)
        tokens = self.mean.shape[1]
        below = self.share[pick].cumsum(-1)[..., :-1]  # a uniform number falls into one share
        place = torch.rand(draws, tokens, 1, generator=generator, dtype=below.dtype)
        label = (place >= below).sum(-1, keepdim=True)
        noise = torch.randn(draws, tokens, generator=generator, dtype=self.mean.dtype)
        scale = self.variance[pick].clamp_min(0).sqrt()
        return self.mean[pick].gather(-1, label)[..., 0] + noise * scale.gather(1, label[..., 0])

    def attention(
        self, draws: int, generator: torch.Generator
    ) -> tuple[Float[Tensor, ""], Float[Tensor, " tokens"]]:
        """Mean entropy and mean attention of drawn rows."""
        drawn = torch.softmax(self.rows(draws, generator), -1)
        return attention_entropy(drawn).mean(), drawn.mean(0)


def _clustered(heads: SampledHeads, draws: int, generator: torch.Generator) -> Prediction:
    """Every head with the number of clusters that predicts the last quarter of its own samples."""
    rho, entropy, attention = [], [], []
    cut = heads.samples * 3 // 4
    shift = None if heads.shift is None else heads.shift.float()
    half = replace(heads, query=heads.query.float(), key=heads.key.float(), shift=shift)
    for head in half.each():  # float32 is what models compute in, and costs half
        rows = replace(head, query=head.query[cut:], key=head.key[cut:]).logits().double()
        score = (1 + rows - rows.mean(-1, keepdim=True)) / heads.tokens
        seen = ((score >= 0) & (score <= 1)).double().mean(0)
        known = attention_entropy(torch.softmax(rows, -1)).mean()
        first = replace(head, query=head.query[:cut], key=head.key[:cut])
        errors = {}
        for clusters in _CLUSTERS:
            found = KeyClusters.of(first, clusters, generator)
            gap = found.attention(draws, generator)[0] - known
            errors[clusters] = (found.rho() - seen).square().mean() + gap**2 / heads.tokens
        found = KeyClusters.of(head, min(errors, key=lambda one: errors[one]), generator)
        drawn = found.attention(draws, generator)
        rho.append(found.rho())
        entropy.append(drawn[0])
        attention.append(drawn[1])
    profile = Profile.by_token(torch.stack(rho).double(), "clusters of keys")
    return Prediction(profile, torch.stack(entropy).double(), torch.stack(attention).double())


def _nearest(
    points: Float[Tensor, "points head"], clusters: int, generator: torch.Generator
) -> Tensor:
    """Which of the centers that Lloyd's iteration finds is nearest to every point."""
    if clusters == 1:
        return torch.zeros(len(points), dtype=torch.long)
    some = points[torch.randperm(len(points), generator=generator)[:4096]]
    centers = _far_apart(some, clusters, generator)
    for _ in range(10):
        label = _closest(some, centers)
        size = label.bincount(minlength=clusters)[:, None]
        total = torch.zeros_like(centers).index_add_(0, label, some)
        centers = torch.where(size > 0, total / size.clamp_min(1), centers)
    return _closest(points, centers)


def _far_apart(
    points: Float[Tensor, "points head"], count: int, generator: torch.Generator
) -> Float[Tensor, "count head"]:
    """As k-means++ begins: each with a chance that is its squared distance from those before."""
    chosen, far = [points[0]], points.new_full((len(points),), torch.inf)
    for place in torch.rand(count - 1, generator=generator, dtype=points.dtype):
        far = torch.minimum(far, (points - chosen[-1]).square().sum(-1))
        below = far.cumsum(0)
        index = torch.searchsorted(below, place * below[-1], right=True)
        chosen.append(points[index.clamp_max(len(points) - 1)])
    return torch.stack(chosen)


def _closest(points: Float[Tensor, "points head"], centers: Float[Tensor, "count head"]) -> Tensor:
    """Which center is nearest to every point; what all distances of a point share is left out."""
    return (centers.square().sum(-1) / 2 - points @ centers.mT).argmin(-1)
