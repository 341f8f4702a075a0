"""What a `Probe` hands out: heads and tokens' rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from locater.core.theory import Profile
from locater.probe.rows import BINS, Ratio, Tally
from locater.probe.watch import Place


@dataclass(frozen=True, eq=False, kw_only=True)
class MeasuredHead:
    """What one head did, over all the rows that were measured; logits are in nats.

    A row is one query of one sequence.  Standard errors take the rows of a sequence to depend on
    each other and sequences not to; one sequence alone has none (NaN).
    """

    name: str
    """Of the attention module."""
    layer: int | None
    head: int
    kind: str
    entropy: float
    """−Σ p ln p of a row, averaged over rows, in nats."""
    entropy_error: float
    max_entropy: float
    """ln T averaged over rows, T the keys that the query sees: the entropy of uniform attention."""
    rho: Profile
    """Share of rows in which the key's gate is open (Definition 1), of the rows that see the key,
    by key position."""
    rho_by_theta: Profile
    """The same by θ = i/T, where the key is the i-th of the T that the query sees: comparable
    between rows of different length; in bins that end at θ."""
    max_logit: float
    logit_mean: Float[Tensor, " keys"]
    """Of the rows that see the key, like the variance."""
    logit_variance: Float[Tensor, " keys"]
    attention: Float[Tensor, " keys"]
    """Mean attention by key position, of the rows that see the key."""
    sink_mass: float
    """Attention on the first key that the query sees."""
    distance: float
    """Σ p_j |t − j| with t the query's own position; NaN in cross-attention."""
    rows: int

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and lists: what JSON needs."""
        plain = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in vars(self).items()
            if isinstance(value, (int, float, str))
        }
        return plain | {
            "rho": _plain(self.rho.rho),
            "rho_error": _plain(self.rho.standard_error),
            "rho_by_theta": _plain(self.rho_by_theta.rho),
            "attention": _plain(self.attention),
            "logit_mean": _plain(self.logit_mean),
            "logit_variance": _plain(self.logit_variance),
        }


def _plain(tensor: Tensor | None) -> list[float | None]:
    values = [] if tensor is None else tensor.tolist()
    return [value if math.isfinite(value) else None for value in values]


def head_records(place: Place, sums: Tally) -> list[MeasuredHead]:
    """One record per head of an attention."""
    keys = sums.gates.values.shape[-1]
    theta = torch.arange(1, keys + 1, dtype=torch.float64) / keys
    bins = torch.arange(1, BINS + 1, dtype=torch.float64) / BINS
    rho, rho_error = sums.gates.mean.cpu(), sums.gates.count_error.cpu()
    by_theta, theta_error = sums.gates_by_theta.mean.cpu(), sums.gates_by_theta.count_error.cpu()
    logit_mean, attention = sums.logits.mean.cpu(), sums.attention.mean.cpu()
    squares, rows = sums.logits_squared.cpu(), sums.logits.weights.cpu()
    variance = (squares / rows - logit_mean**2).clamp_min(0) * rows / (rows - 1)
    variance = torch.where(rows > 1, variance, torch.nan)
    scalars = {
        name: value.tolist()
        for name, value in (
            ("entropy", sums.entropy.mean),
            ("entropy_error", sums.entropy.standard_error),
            ("max_entropy", sums.log_keys.mean),
            ("max_logit", sums.max_logit),
            ("sink_mass", sums.sink.mean),
            ("distance", sums.distance.mean * (1 if place.kind == "self" else math.nan)),
        )
    }
    return [
        MeasuredHead(
            name=place.name,
            layer=place.layer,
            head=head,
            kind=place.kind,
            rho=_profile(theta, rho[head], rho_error[head], f"{place.name}, head {head}"),
            rho_by_theta=_profile(
                bins, by_theta[head], theta_error[head], f"{place.name}, head {head}, by θ"
            ),
            logit_mean=logit_mean[head],
            logit_variance=variance[head],
            attention=attention[head],
            rows=round(sums.entropy.weights[head].item()),
            **{name: values[head] for name, values in scalars.items()},
        )
        for head in range(len(rho))
    ]


def _profile(theta: Tensor, rho: Tensor, error: Tensor, label: str) -> Profile:
    return Profile(theta=theta, rho=rho, standard_error=error, source="measured", label=label)


@dataclass(frozen=True, kw_only=True)
class TokenRank:
    """How alike the tokens are that one attention is given, averaged over sequences."""

    name: str
    layer: int | None
    similarity: float
    """Mean cosine between two tokens of a sequence: 1 when all point the same way."""
    effective_rank: float
    """‖X‖⁴_F / ‖XᵀX‖²_F, the participation ratio of the squared singular values: 1 at collapse."""
    residual: float
    """‖X − 1x̄ᵀ‖_F / ‖X‖_F: 0 when all tokens are equal (after Dong et al. 2021)."""
    sequences: int


def token_rank(
    tokens: Float[Tensor, "batch tokens model"], real: Bool[Tensor, "batch tokens"] | None
) -> Float[Tensor, "sequences 3"]:
    """Similarity, effective rank and residual of each sequence; at most model² numbers at a time.

    >>> same = torch.ones(1, 4, 8)
    >>> token_rank(same, None).round(decimals=3)
    tensor([[1., 1., 0.]])
    """
    _, length, model = tokens.shape
    together = max(1, _GRAM // min(length, model) ** 2)
    every = torch.ones_like(tokens[..., 0], dtype=torch.bool) if real is None else real
    parts = [
        _rank_of(some, kept)
        for some, kept in zip(tokens.split(together), every.split(together), strict=True)
    ]
    return torch.cat(parts) if parts else tokens.new_zeros(0, 3)


_GRAM = 1 << 20  # entries of Gram matrices at a time; one alone may have more


def _rank_of(
    tokens: Float[Tensor, "batch tokens model"], real: Bool[Tensor, "batch tokens"]
) -> Float[Tensor, "sequences 3"]:
    count = real.sum(1)
    tokens, real, count = tokens[count > 1], real[count > 1, :, None], count[count > 1]
    tokens = (tokens if tokens.dtype == torch.float64 else tokens.float()) * real
    tiny = torch.finfo(tokens.dtype).tiny
    tokens = tokens / tokens.abs().amax((1, 2), keepdim=True).clamp_min(tiny)
    unit = torch.nn.functional.normalize(tokens, dim=-1)
    pairs = unit.sum(1).square().sum(1) - unit.square().sum((1, 2))
    gram = tokens.mT @ tokens if tokens.shape[1] > tokens.shape[2] else tokens @ tokens.mT
    norm = tokens.square().sum((1, 2)).clamp_min(tiny)
    apart = (tokens - tokens.sum(1, keepdim=True) / count[:, None, None]) * real
    return torch.stack(
        [
            pairs / (count * (count - 1)),
            norm.square() / gram.square().sum((1, 2)).clamp_min(tiny),
            (apart.square().sum((1, 2)) / norm).sqrt(),
        ],
        dim=1,
    )


@dataclass(eq=False)
class Seen:
    """What was measured of one attention."""

    place: Place
    sums: Tally | None = None
    ranks: list[Float[Tensor, "sequences 3"]] = field(default_factory=list)
    inputs: list[Float[Tensor, "batch tokens model"]] = field(default_factory=list)

    def add(self, other: Seen) -> None:
        """Take in another pass."""
        if self.sums is None:
            self.sums = other.sums
        elif other.sums is not None:
            self.sums.add(other.sums)
        self.ranks += other.ranks
        self.inputs += other.inputs

    def rank(self) -> TokenRank | None:
        """Averages over all sequences."""
        if not self.ranks:
            return None
        every = torch.cat(self.ranks).double()
        similarity, effective, residual = every.mean(0).tolist()
        return TokenRank(
            name=self.place.name,
            layer=self.place.layer,
            similarity=similarity,
            effective_rank=effective,
            residual=residual,
            sequences=len(every),
        )


def gathered(results: Mapping[str, Seen]) -> dict[str, Seen]:
    """The sums of all ranks, on every rank; inputs that were kept stay where they are."""
    mine = [(name, seen.place, seen.sums, seen.ranks) for name, seen in results.items()]
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, _on(mine, torch.device("cpu")))
    whole: dict[str, Seen] = {}
    for rank in every:
        for name, place, sums, ranks in rank:
            whole.setdefault(name, Seen(place)).add(Seen(place, sums, list(ranks)))
    for name, seen in results.items():
        whole[name].inputs = seen.inputs
        if seen.sums is not None:
            whole[name].sums = _on(whole[name].sums, seen.sums.max_logit.device)
    return whole


def _on(thing: Any, device: torch.device) -> Any:
    """The same with every tensor on another device."""
    if isinstance(thing, Tensor):
        return thing.to(device)
    if isinstance(thing, (list, tuple)):
        return type(thing)(_on(one, device) for one in thing)
    if isinstance(thing, (Tally, Ratio)):
        return type(thing)(
            **{one.name: _on(getattr(thing, one.name), device) for one in fields(thing)}
        )
    return thing


def layer_metrics(results: Sequence[Seen]) -> dict[str, float]:
    """Averages over the heads of each attention, and of its tokens, as `locater/layer_{i}/…`."""
    metrics: dict[str, float] = {}
    for label, seen in zip(_labels([seen.place for seen in results]), results, strict=True):
        if seen.sums is not None:
            heads = head_records(seen.place, seen.sums)
            metrics |= {
                f"locater/{label}/entropy": _mean([one.entropy for one in heads]),
                f"locater/{label}/min_entropy": min(one.entropy for one in heads),
                f"locater/{label}/rho": _mean([one.rho.rho.nanmean().item() for one in heads]),
                f"locater/{label}/max_logit": max(one.max_logit for one in heads),
                f"locater/{label}/sink_mass": _mean([one.sink_mass for one in heads]),
                f"locater/{label}/distance": _mean([one.distance for one in heads]),
            }
        rank = seen.rank()
        if rank is not None:
            metrics |= {
                f"locater/{label}/similarity": rank.similarity,
                f"locater/{label}/effective_rank": rank.effective_rank,
                f"locater/{label}/residual": rank.residual,
            }
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _labels(places: list[Place]) -> list[str]:
    """layer_3 where that says which; else with the part and kind; else the module's own name."""
    for label in (
        [f"layer_{place.layer}" for place in places],
        [f"{place.part}_{place.kind}/layer_{place.layer}" for place in places],
    ):
        if len(set(label)) == len(label):
            return label
    return [place.name or "model" for place in places]
