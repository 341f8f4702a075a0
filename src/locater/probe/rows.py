"""What attention rows do (entropy, ρ, logits, distance), a few rows at a time: never T × T.

The logits come as a model's own call defines them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
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
            seen = part if part.dtype == torch.bool else part > MASKED
            logits = logits if part.dtype == torch.bool else logits + part.to(dtype)
            visible = seen if visible is None else seen & visible
        if visible is not None:
            logits = logits.masked_fill_(~visible, -torch.inf)
        return logits, visible

    def real_keys(self) -> Bool[Tensor, "batch keys"] | None:
        """Keys that some query sees; None where all are: the others are padding."""
        real: Tensor | None = None
        for mask in self.masks:
            four = _four_axes(mask)
            seen = four.any(2) if four.dtype == torch.bool else four.amax(2) > MASKED
            part = seen.any(1).expand(self.query.shape[0], self.key.shape[2])
            real = part if real is None else real & part
        return None if real is None or bool(real.all()) else real


@dataclass(frozen=True, eq=False)
class SeenLogits:
    """Logits that a model has written out itself, as they enter its softmax."""

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


Logits = ScoredKeys | SeenLogits
"""An attention whose logits can be had for some sequences and queries."""


@dataclass(frozen=True, eq=False)
class Asking:
    """Which queries ask at all, and which key is theirs."""

    first_key: int | None = None
    """The key that belongs to the first query, for distances; None where none does."""
    asks: Bool[Tensor, "batch queries"] | None = None
    """False for padding; None where every query asks."""

    @classmethod
    def of(cls, attention: Logits, *, is_self: bool = True) -> Asking:
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
        asks = None if real is None else real[:, first : first + queries]
        return cls(first, asks if asks is None or asks.shape[1] == queries else None)


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
    """Sums over the rows that one attention was seen to make, by head and by key position."""

    gates: Ratio
    """ρ by key position: rows whose gate for the key is open, of those that see the key."""
    gates_by_theta: Ratio
    """ρ by θ = i/T, the key's place among the T visible ones of its row, in `BINS` bins."""
    attention: Ratio
    """Attention by key position, of the rows that see the key."""
    logits: Ratio
    logits_squared: Float[Tensor, "heads keys"]
    entropy: Ratio
    log_keys: Ratio
    """ln T of the rows: the largest entropy they could have."""
    sink: Ratio
    distance: Ratio
    max_logit: Float[Tensor, " heads"]

    def add(self, other: Tally) -> None:
        """Take in what was seen elsewhere."""
        for one in fields(self):
            ours, theirs = getattr(self, one.name), getattr(other, one.name)
            if isinstance(ours, Ratio):
                ours.add(theirs)
            elif one.name == "max_logit":
                self.max_logit = torch.maximum(ours, theirs)
            else:
                setattr(self, one.name, added(ours, theirs))

    @property
    def rows(self) -> int:
        """Rows counted, per head."""
        return round(self.entropy.weights.max().item())


Queries = Literal["last", "all"] | Int[Tensor, " rows"]


def tally(
    attention: Logits,
    queries: Queries = "last",
    *,
    asking: Asking | None = None,
    block: int = BLOCK,
) -> Tally | None:
    """Measure rows of an attention in O(T · block) memory; None if none of them can choose.

    "last" is every sequence's last query that is not padding.  Rows that see fewer than two keys
    have nothing to choose and are not counted.

    Paper: Definition 1 for ρ, Section 5 for the entropy.
    """
    batch, heads, asked, keys = attention.shape
    if keys < 2:
        raise InputError(
            f"attention over {keys} key has nothing to choose.", hint="give at least 2 tokens."
        )
    asking = asking or Asking.of(attention)
    total: Tally | None = None
    for sequences, rows in _plan(queries, asking.asks, batch, asked):
        for part in _parts(sequences, rows, heads * keys, block):
            one = _Block(attention, asking).measure(*part)
            if total is None or one is None:
                total = total or one
            else:
                total.add(one)
    return total


def _plan(
    queries: Queries, asks: Tensor | None, batch: int, asked: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Which queries of which sequences: all share them, unless padding moves the last one."""
    everything = torch.arange(batch)
    if isinstance(queries, Tensor):
        yield everything, queries
    elif queries == "all":
        yield everything, torch.arange(asked)
    elif asks is None:
        yield everything, torch.tensor([asked - 1])
    else:
        place = torch.arange(1, asks.shape[1] + 1, device=asks.device)
        last = (asks * place).amax(1).cpu() - 1
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


@dataclass(eq=False)
class _Block:
    attention: Logits
    asking: Asking

    def measure(self, sequences: Tensor, pieces: list[Tensor]) -> Tally | None:
        """Sum over all pieces of these sequences' rows, then over the sequences."""
        start = int(sequences[0])
        where: slice | Tensor = slice(start, start + len(sequences))
        if int(sequences[-1]) - start + 1 != len(sequences):
            where = sequences
        sums: dict[str, Tensor] = {}
        top: Tensor | None = None
        for piece in pieces:
            found, highest = self._piece(where, piece)
            sums = {name: sums[name] + found[name] for name in found} if sums else found
            top = highest if top is None else torch.maximum(top, highest)
        assert top is not None
        if not bool((sums["rows"] > 0).any()):
            return None
        seen, rows = sums["seen"], sums["rows"]
        return Tally(
            gates=Ratio.of(sums["gates"], seen),
            gates_by_theta=Ratio.of(sums["theta_gates"], sums["theta_seen"]),
            attention=Ratio.of(sums["attention"], seen),
            logits=Ratio.of(sums["logits"], seen),
            logits_squared=sums["squares"].to(_exact(seen)).sum(0),
            entropy=Ratio.of(sums["entropy"], rows),
            log_keys=Ratio.of(sums["log_keys"], rows),
            sink=Ratio.of(sums["sink"], rows),
            distance=Ratio.of(sums["distance"], rows),
            max_logit=top.to(_exact(top)),
        )

    def _piece(self, where: slice | Tensor, queries: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        asks, device = self.asking.asks, self.attention.device
        queries = queries.to(device)
        where = where if isinstance(where, slice) else where.to(device)
        logits, seen = self.attention.rows(where, queries)
        keys = logits.shape[-1]  # those after the last visible one may be missing
        visible = logits.new_ones(1, 1, 1, keys, dtype=torch.bool) if seen is None else seen
        visible = visible.expand(-1, -1, len(queries), -1)
        count = visible.sum(-1)
        counted = count >= 2
        if asks is not None:
            counted = counted & asks[where].index_select(1, queries)[:, None]
        visible = visible & counted[..., None]
        weights, entropy, top = _softmax(logits)
        filled = logits
        if seen is not None or asks is not None:
            filled = logits.masked_fill(~visible, 0)
            weights = weights if bool(counted.all()) else weights * counted[..., None]
            entropy = torch.where(counted, entropy, 0)
            top = torch.where(counted, top, -torch.inf)
        # Definition 1 on the keys that the query sees: 0 <= (ω_i − mean ω + 1)/T <= 1
        score = filled - ((filled.sum(-1) / count.clamp_min(1)) - 1)[..., None]
        gates = (score >= 0) & (score <= count[..., None]) & visible
        first_key = self.asking.first_key
        place = (queries + (first_key or 0))[:, None] - torch.arange(keys, device=device)
        place = place.abs().to(logits.dtype) * (math.nan if first_key is None else 1)
        first = visible.to(torch.uint8).argmax(-1, keepdim=True).expand(*top.shape, 1)
        rows = torch.ones_like(entropy) * counted
        by_key = {
            "seen": visible.sum(2, dtype=logits.dtype).expand(logits[:, :, 0].shape),
            "gates": gates.sum(2, dtype=logits.dtype),
            "attention": weights.sum(2),
            "logits": filled.sum(2),
            "squares": filled.square().sum(2),
        }
        missing = self.attention.shape[3] - keys
        sums = {
            "rows": rows.sum(2),
            "entropy": entropy.sum(2),
            "log_keys": (rows * count.clamp_min(1).to(_exact(count)).log()).sum(2),
            "sink": weights.gather(-1, first)[..., 0].sum(2),
            "distance": weights.flatten(2) @ place.to(weights.dtype).flatten(),
            **{name: functional.pad(one, (0, missing)) for name, one in by_key.items()},
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
        "theta_seen": sizes.sum(2).to(dtype),
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
