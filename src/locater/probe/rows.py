"""What rows of attention do (entropy, ρ, logits, distance), a few at a time: never T × T.

A row is one query of one sequence; its logits are those of the model's own call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from locater.errors import InputError

MASKED = -9e3
"""Additive masks at or below this hide a key: models write -1e4, the dtype's smallest or -inf."""

Visible = Bool[Tensor, "#batch #heads #rows keys"] | None  # None: every key is


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoredKeys:
    """Queries, keys and mask as scaled_dot_product_attention takes them."""

    query: Float[Tensor, "batch heads queries head"]
    key: Float[Tensor, "batch kv_heads keys head"]
    scale: float
    masks: tuple[Tensor, ...] = ()
    """Each boolean (true: visible) or additive, broadcast to (batch, heads, queries, keys)."""
    is_causal: bool = False
    """Query i sees keys 0…i, however many queries and keys there are."""
    extra: int = 0
    """Keys after those of the tokens, which belong to no token."""
    is_self: bool | None = None
    """Whether queries and keys come from the same tokens; None where the call does not say."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sequences, heads, queries, keys."""
        return (*self.query.shape[:3], self.key.shape[2])

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.query.device

    def rows(
        self, sequences: slice | Int[Tensor, " some"], queries: Int[Tensor, " rows"]
    ) -> tuple[Float[Tensor, "some heads rows keys"], Visible]:
        """The logits of these queries, -inf where a key is hidden, and which are visible.

        Keys after the last that a causal flag lets any of them see are left out.
        """
        dtype = torch.float64 if self.query.dtype == torch.float64 else torch.float32
        query = self.query[sequences].index_select(2, queries).to(dtype)
        reach = int(queries.max()) + 1 if self.is_causal else self.key.shape[2]
        key = self.key[sequences][:, :, :reach].to(dtype)  # none of them sees further
        shared = key.shape[1]
        grouped = query.unflatten(1, (shared, -1)).flatten(2, 3)  # a key head's queries together
        logits = (grouped @ key.mT).view(*query.shape[:3], -1).mul_(self.scale)
        visible: Tensor | None = None
        if self.is_causal:
            keys = torch.arange(logits.shape[-1], device=logits.device)
            visible = (keys <= queries[:, None])[None, None]
        for mask in self.masks:
            part = _four_axes(mask)[..., :reach]
            part = part if part.shape[0] == 1 else part[sequences]
            part = part if part.shape[2] == 1 else part.index_select(2, queries)
            shown = part if part.dtype == torch.bool else part > MASKED
            logits = logits if part.dtype == torch.bool else logits + part.to(dtype)
            visible = shown if visible is None else shown & visible
        if visible is not None:
            logits = logits.masked_fill_(~visible, -torch.inf)
        return logits, visible

    def real_keys(self) -> Bool[Tensor, "batch keys"] | None:
        """Keys that some query sees; None where all are: the others are padding."""
        real: Tensor | None = None
        for mask in self.masks:
            four = _four_axes(mask)
            shown = four.any(2) if four.dtype == torch.bool else four.amax(2) > MASKED
            part = shown.any(1).expand(self.query.shape[0], self.key.shape[2])
            real = part if real is None else real & part
        return None if real is None or bool(real.all()) else real


@dataclass(frozen=True, eq=False)
class SoftmaxInput:
    """Logits that a model writes out itself, as they enter its softmax."""

    logits: Float[Tensor, "batch heads queries keys"]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sequences, heads, queries, keys."""
        batch, heads, queries, keys = self.logits.shape
        return batch, heads, queries, keys

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.logits.device

    def rows(
        self, sequences: slice | Int[Tensor, " some"], queries: Int[Tensor, " rows"]
    ) -> tuple[Float[Tensor, "some heads rows keys"], Visible]:
        """The logits of these queries, -inf where a key is hidden, and which are visible."""
        logits = self.logits[sequences].index_select(2, queries)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        hidden = logits <= MASKED
        if not bool(hidden.any()):
            return logits, None
        return logits.masked_fill(hidden, -torch.inf), ~hidden

    def real_keys(self) -> Bool[Tensor, "batch keys"] | None:
        """Keys that some query sees; None where all are: the others are padding."""
        real = ~(self.logits.amax((1, 2)) <= MASKED)
        return None if bool(real.all()) else real


Logits = ScoredKeys | SoftmaxInput
"""An attention whose logits can be had for some sequences and queries."""


@dataclass(frozen=True, eq=False)
class RealQueries:
    """Which queries are tokens and not padding, and which key is whose."""

    first_key: int | None = None
    """The key that belongs to the first query, for distances; None where none does."""
    is_real: Bool[Tensor, "batch queries"] | None = None
    """False for padding; None where no query is."""

    @classmethod
    def of(cls, attention: Logits, *, is_self: bool = True) -> RealQueries:
        """In self-attention the last query has the last key; one whose key nobody sees is padding.

        Under a causal flag, which counts from the start, the first query has the first key.  Behind
        the last key that anybody sees is the free part of a cache, which belongs to no query.
        """
        if not is_self:
            return cls()
        _, _, queries, keys = attention.shape
        is_causal = isinstance(attention, ScoredKeys) and attention.is_causal
        keys -= attention.extra if isinstance(attention, ScoredKeys) else 0
        real = attention.real_keys()
        if real is not None and queries < keys:
            used = real[:, :keys].any(0).nonzero()
            keys = max(int(used.max()) + 1 if len(used) else keys, queries)
        first = 0 if is_causal or keys < queries else keys - queries
        own = None if real is None else real[:, first : first + queries]
        return cls(first, own if own is None or own.shape[1] == queries else None)


def _four_axes(mask: Tensor) -> Tensor:
    return mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))


BINS = 20
"""Of the relative position θ = i/T by which rows of different length are compared."""
BLOCK = 1 << 18
"""Logits that are held at a time, all heads together; a single row may have more."""


@dataclass(eq=False)
class Ratio:
    """Σ values / Σ weights over sequences, with the standard error that their spread gives.

    Rows of one sequence depend on each other, sequences do not: the error is that of a ratio of
    sums over sequences.
    """

    values: Float[Tensor, "*axes"]
    weights: Float[Tensor, "*axes"]
    values_squared: Float[Tensor, "*axes"]
    products: Float[Tensor, "*axes"]
    weights_squared: Float[Tensor, "*axes"]
    sequences: Float[Tensor, "*axes"]

    @classmethod
    def of(cls, values: Float[Tensor, "batch ..."], weights: Float[Tensor, "_ ..."]) -> Ratio:
        """Sum over the sequences of a batch."""
        values = values.to(_exact(values))
        weights = weights.to(values.dtype).expand(values.shape)
        return cls(
            values.sum(0),
            weights.sum(0),
            values.square().sum(0),
            (values * weights).sum(0),
            weights.square().sum(0),
            (weights > 0).to(values.dtype).sum(0),
        )

    def add(self, other: Ratio) -> None:
        """Take in other sequences; the last axis may be longer or shorter there."""
        for one in fields(self):
            setattr(self, one.name, added(getattr(self, one.name), getattr(other, one.name)))

    @property
    def mean(self) -> Float[Tensor, "*axes"]:
        """Values per weight; NaN where nothing was seen."""
        return self.values / self.weights

    @property
    def standard_error(self) -> Float[Tensor, "*axes"]:
        """Of the mean; NaN for fewer than two sequences."""
        mean = self.mean
        spread = self.values_squared - 2 * mean * self.products + mean**2 * self.weights_squared
        freedom = self.sequences / (self.sequences - 1)
        error = (spread.clamp_min(0) * freedom).sqrt() / self.weights
        return torch.where(self.sequences < 2, torch.nan, error)

    @property
    def count_error(self) -> Float[Tensor, "*axes"]:
        """`standard_error` for a share, of which none or all has an error too."""
        middle = (self.mean * self.sequences + 0.5) / (self.sequences + 1)
        least = (middle * (1 - middle) / self.sequences).sqrt()
        error = self.standard_error
        is_edge = ((self.mean <= 0) | (self.mean >= 1)) & (self.sequences >= 2)
        return torch.where(is_edge, least, error)


@dataclass(eq=False)
class Tally:
    """Sums over the measured rows of one attention, by head and by key position."""

    gates: Ratio
    """ρ by key position: rows whose gradient passes the key's score, of those that see the key."""
    gates_by_theta: Ratio
    """ρ by θ = i/T, the key's place among the T visible ones of its row, in `BINS` bins."""
    last_gates: Ratio
    """ρ by key position of every sequence's last query alone, whichever queries are measured."""
    attention: Ratio
    """Attention by key position, of the rows that see the key."""
    logits: Ratio
    logits_squared: Float[Tensor, "heads keys"]
    entropy: Ratio
    log_keys: Ratio
    """ln T of the rows: the largest entropy they could have."""
    sink: Ratio
    distance: Ratio
    queries: Float[Tensor, " heads"]
    """Rows, and the queries that see one key alone."""
    max_logit: Float[Tensor, " heads"]
    """Over all `queries`."""

    def add(self, other: Tally) -> None:
        """Take in other rows."""
        for one in fields(self):
            ours, theirs = getattr(self, one.name), getattr(other, one.name)
            if isinstance(ours, Ratio):
                ours.add(theirs)
            elif one.name == "max_logit":
                self.max_logit = torch.maximum(ours, theirs)
            else:
                setattr(self, one.name, added(ours, theirs))


Queries = Literal["last", "all"] | Int[Tensor, " rows"]


def tally(
    attention: Logits,
    queries: Queries = "last",
    *,
    real: RealQueries | None = None,
    block: int = BLOCK,
) -> Tally | None:
    """Measure rows of an attention in O(T · block) memory; None if none of them can choose.

    "last" is every sequence's last query that is not padding.  Rows that see fewer than two keys
    have nothing to choose and are not counted, but for `queries` and the largest logit.

    Paper: Definition 1 for ρ, Section 5 for the entropy.
    """
    _, heads, _, keys = attention.shape
    if keys < 2:
        raise InputError(
            f"attention over {keys} key has nothing to choose.", hint="give at least 2 tokens."
        )
    real = real or RealQueries.of(attention)
    total: Tally | None = None
    for sequences, rows in _plan(queries, real.is_real, attention.shape):
        for part in _parts(sequences, rows, heads * keys, block):
            found = _measured(attention, real, *part)
            if total is None:
                total = found
            else:
                total.add(found)
    if total is None or not bool((total.entropy.weights > 0).any()):
        return None
    if isinstance(queries, str) and queries == "last":
        return total
    last = tally(attention, "last", real=real, block=block)
    nothing = total.gates.values.new_zeros(1, heads, keys)
    total.last_gates = last.last_gates if last else Ratio.of(nothing, nothing)
    return total


def largest_logits(attention: Logits, *, block: int = BLOCK) -> Float[Tensor, " heads"]:
    """Each head's largest logit over all queries and the keys that they see, in blocks."""
    batch, heads, queries, keys = attention.shape
    parts = _parts(torch.arange(batch), torch.arange(queries), heads * keys, block)
    device = attention.device
    return torch.stack(
        [
            attention.rows(sequences.to(device), some.to(device))[0].amax((0, 2, 3))
            for sequences, rows in parts
            for some in rows
        ]
    ).amax(0)


def _plan(
    queries: Queries, is_real: Tensor | None, shape: tuple[int, int, int, int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Which queries of which sequences: all share them, unless padding moves the last one."""
    everything = torch.arange(shape[0])
    if isinstance(queries, Tensor):
        yield everything, queries
    elif queries == "all":
        yield everything, torch.arange(shape[2])
    elif is_real is None:
        yield everything, torch.tensor([shape[2] - 1])
    else:
        place = torch.arange(1, is_real.shape[1] + 1, device=is_real.device)
        last = (is_real * place).amax(1).cpu() - 1
        for row in last[last >= 0].unique():
            yield (last == row).nonzero()[:, 0], row[None]


def _parts(
    sequences: Tensor, rows: Tensor, per_row: int, block: int
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Whole sequences together while they fit the block, else one with its rows in pieces."""
    affordable = max(1, block // per_row)
    together = max(1, affordable // max(len(rows), 1))
    for some in sequences.split(together):
        yield some, list(rows.split(affordable))


def _measured(
    attention: Logits, real: RealQueries, sequences: Tensor, pieces: list[Tensor]
) -> Tally:
    """Sum over all pieces of these sequences' rows, then over the sequences."""
    start = int(sequences[0])
    where: slice | Tensor = slice(start, start + len(sequences))
    if int(sequences[-1]) - start + 1 != len(sequences):
        where = sequences.to(attention.device)
    sums, top = _row_sums(attention, real, where, pieces[0].to(attention.device))
    for piece in pieces[1:]:
        more, highest = _row_sums(attention, real, where, piece.to(attention.device))
        sums = {name: sums[name] + more[name] for name in sums}
        top = torch.maximum(top, highest)
    shown, rows = sums["shown"], sums["rows"]
    gates = Ratio.of(sums["gates"], shown)
    return Tally(
        gates=gates,
        gates_by_theta=Ratio.of(sums["theta_gates"], sums["theta_shown"]),
        last_gates=replace(gates),
        attention=Ratio.of(sums["attention"], shown),
        logits=Ratio.of(sums["logits"], shown),
        logits_squared=sums["squares"].to(_exact(shown)).sum(0),
        entropy=Ratio.of(sums["entropy"], rows),
        log_keys=Ratio.of(sums["log_keys"], rows),
        sink=Ratio.of(sums["sink"], rows),
        distance=Ratio.of(sums["distance"], rows),
        queries=sums["queries"].to(_exact(top)).sum(0),
        max_logit=top.to(_exact(top)),
    )


def _row_sums(
    attention: Logits, real: RealQueries, where: slice | Tensor, queries: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """What these rows add up to, by sequence and head, and each head's largest logit."""
    logits, shown = attention.rows(where, queries)
    keys = logits.shape[-1]  # those after the last visible one may be missing
    visible = logits.new_ones(1, 1, 1, keys, dtype=torch.bool) if shown is None else shown
    visible = visible.expand(-1, -1, len(queries), -1)
    count = visible.sum(-1)
    if real.is_real is not None:
        count = count * real.is_real[where].index_select(1, queries)[:, None]
    counted = count >= 2
    visible = visible & counted[..., None]
    weights, entropy, top = _softmax(logits)
    filled = logits
    if shown is not None or real.is_real is not None:
        filled = logits.masked_fill(~visible, 0)
        weights = weights if bool(counted.all()) else weights * counted[..., None]
        entropy = torch.where(counted, entropy, 0)
        top = torch.where(count >= 1, top, -torch.inf)
    # Definition 1 on the keys that the query sees: 0 <= (ω_i − mean ω + 1)/T <= 1
    score = filled - ((filled.sum(-1) / count.clamp_min(1)) - 1)[..., None]
    gates = (score >= 0) & (score <= count[..., None]) & visible
    place = (queries + (real.first_key or 0))[:, None] - torch.arange(keys, device=logits.device)
    place = place.abs().to(logits.dtype) * (math.nan if real.first_key is None else 1)
    first = visible.to(torch.uint8).argmax(-1, keepdim=True).expand(*top.shape, 1)
    rows = torch.ones_like(entropy) * counted
    by_key = {
        "shown": visible.sum(2, dtype=logits.dtype).expand(logits[:, :, 0].shape),
        "gates": gates.sum(2, dtype=logits.dtype),
        "attention": weights.sum(2),
        "logits": filled.sum(2),
        "squares": filled.square().sum(2),
    }
    missing = attention.shape[3] - keys
    sums = {
        "queries": (torch.ones_like(entropy) * (count >= 1)).sum(2),
        "rows": rows.sum(2),
        "entropy": entropy.sum(2),
        "log_keys": (rows * count.clamp_min(1).to(_exact(count)).log()).sum(2),
        "sink": weights.gather(-1, first)[..., 0].sum(2),
        "distance": weights.flatten(2) @ place.to(weights.dtype).flatten(),
        **{name: functional.pad(part, (0, missing)) for name, part in by_key.items()},
        **_by_theta(gates, visible, torch.where(counted, count, 0)),
    }
    return sums, top.amax((0, 2))


def _softmax(logits: Float[Tensor, "*rows keys"]) -> tuple[Tensor, Tensor, Tensor]:
    """Attention, its entropy and the largest logit of rows; hidden keys have -inf."""
    top = logits.amax(-1)
    shifted = logits - torch.where(top == -torch.inf, 0, top)[..., None]
    weights = shifted.exp()
    total = weights.sum(-1)
    weights.div_(total.clamp_min(torch.finfo(total.dtype).tiny)[..., None])
    entropy = total.log() - torch.linalg.vecdot(weights, shifted.clamp_min_(-1e5))
    return weights, entropy, top


def _by_theta(gates: Tensor, visible: Tensor, count: Tensor) -> dict[str, Tensor]:
    """Open gates by the key's place among its row's visible keys, from running counts."""
    edges = (count[..., None] * torch.arange(BINS + 1, device=count.device)) // BINS
    places = visible.cumsum(-1, dtype=edges.dtype)
    at = torch.searchsorted(places.contiguous(), edges.contiguous())
    running = functional.pad(gates.cumsum(-1, dtype=torch.int32), (1, 0))
    ends = torch.where(edges > 0, at + 1, 0).clamp_max(gates.shape[-1])
    inside = running.gather(-1, ends.expand(*gates.shape[:-1], -1)).diff(dim=-1)
    sizes = edges.diff(dim=-1).expand(inside.shape)
    dtype = torch.get_default_dtype()
    return {
        "theta_gates": inside.sum(2).to(dtype),
        "theta_shown": sizes.sum(2).to(dtype),
    }


def _exact(tensor: Tensor) -> torch.dtype:
    """Float64, where the device has it."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def added(one: Float[Tensor, "*_"], other: Float[Tensor, "*_"]) -> Float[Tensor, "*_"]:
    """Add sums by position, of which one may know more positions."""
    if one.ndim and one.shape[-1] != other.shape[-1]:
        longest = max(one.shape[-1], other.shape[-1])
        one, other = (functional.pad(side, (0, longest - side.shape[-1])) for side in (one, other))
    return one + other


@dataclass(frozen=True)
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
    tensor([[1., 1., 0.]], dtype=torch.float64)
    """
    _, length, model = tokens.shape
    together = max(1, _GRAM // min(length, model) ** 2)
    is_real = torch.ones_like(tokens[..., 0], dtype=torch.bool) if real is None else real
    parts = zip(tokens.split(together), is_real.split(together), strict=True)
    found = [_rank_of(*part) for part in parts]
    return torch.cat(found) if found else tokens.new_zeros(0, 3)


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
    pairs = _squares(unit.sum(1, keepdim=True)) - _squares(unit)
    gram = tokens.mT @ tokens if tokens.shape[1] > tokens.shape[2] else tokens @ tokens.mT
    norm = _squares(tokens).clamp_min(tiny)
    apart = (tokens - tokens.sum(1, keepdim=True) / count[:, None, None]) * real
    return torch.stack(
        [
            pairs / (count * (count - 1)),
            norm.square() / _squares(gram).clamp_min(tiny),
            (_squares(apart) / norm).sqrt(),
        ],
        dim=1,
    )


def _squares(matrices: Float[Tensor, "batch rows columns"]) -> Float[Tensor, " batch"]:
    """Sums of squares, exact to the last digits however many there are."""
    return matrices.square().sum((1, 2), dtype=_exact(matrices))
