"""What rows of attention do (entropy, ρ, logits, distance): never T × T.

A row is one query of one sequence; its logits are those of the model's own call.  Rows are written
out a few at a time; what needs no single logit is had of all rows from one more fused attention,
whose values are the keys (`fused_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from locater.errors import InputError

MASKED = -9e3
"""Additive masks at or below this hide a key: models write -1e4, the dtype's smallest or -inf."""

Some = slice | Int[Tensor, " some"]
"""Sequences of a batch."""
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
    score_mod: Callable[..., Tensor] | None = None
    """As flex_attention takes it: (logit, sequence, head, query, key) to the logit in its place."""
    mask_mod: Callable[..., Tensor] | None = None
    """As flex_attention takes it: whether (sequence, head, query, key) is visible."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sequences, heads, queries, keys."""
        return (*self.query.shape[:3], self.key.shape[2])

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.query.device

    def rows(
        self, sequences: Some, queries: Int[Tensor, " rows"]
    ) -> tuple[Float[Tensor, "some heads rows keys"], Visible]:
        """The logits of these queries, -inf where a key is hidden, and which are visible.

        Keys after the last that a causal flag lets any of them see are left out.
        """
        query = wide(self.query[sequences].index_select(2, queries))
        reach, dtype = self.reach(queries), query.dtype
        key = self.key[sequences][:, :, :reach].to(dtype)  # none of them sees further
        shared = key.shape[1]
        grouped = query.unflatten(1, (shared, -1)).flatten(2, 3)  # a key head's queries together
        logits = (grouped @ key.mT).view(*query.shape[:3], -1).mul_(self.scale)
        if self.score_mod is not None:
            logits = self.score_mod(logits, *self._places(sequences, queries, reach)).to(dtype)
        for mask in self.masks:
            if mask.dtype != torch.bool:
                logits = logits + _part(mask, sequences, queries)[..., :reach].to(dtype)
        visible = self.visible(sequences, queries)
        if visible is not None:
            logits = logits.masked_fill(~visible, -torch.inf)
        return logits, visible

    def reach(self, queries: Int[Tensor, " rows"]) -> int:
        """The keys up to the last that a causal flag lets any of these queries see."""
        keys = self.key.shape[2]
        return min(int(queries.max()) + 1, keys) if self.is_causal else keys

    def visible(self, sequences: Some, queries: Int[Tensor, " rows"]) -> Visible:
        """Which keys, up to their reach, these queries see; None if they see all of them."""
        reach, shown = self.reach(queries), list[Tensor]()
        if self.is_causal:
            keys = torch.arange(reach, device=self.device)
            shown.append((keys <= queries[:, None])[None, None])
        for mask in self.masks:
            part = _part(mask, sequences, queries)[..., :reach]
            shown.append(part if part.dtype == torch.bool else part > MASKED)
        if self.mask_mod is not None:
            shown.append(self._by_mod(sequences, queries, reach))
        return reduce(torch.Tensor.logical_and, shown) if shown else None

    def _by_mod(
        self, sequences: Some, queries: Tensor, reach: int
    ) -> Bool[Tensor, "#batch #heads #rows keys"]:
        """What `mask_mod` shows, whichever of its arguments it looks at."""
        assert self.mask_mod is not None
        shown = self.mask_mod(*self._places(sequences, queries, reach))
        return shown.expand(torch.broadcast_shapes(shown.shape, (1, 1, 1, reach)))

    def _places(
        self, sequences: Some, queries: Tensor, reach: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sequence, head, query and key of a block of rows, as the functions of flex take them."""
        batch = torch.arange(self.query.shape[0], device=self.device)[sequences]
        heads = torch.arange(self.query.shape[1], device=self.device)
        keys = torch.arange(reach, device=self.device)
        return batch[:, None, None, None], heads[:, None, None], queries[:, None], keys

    def real_keys(self) -> Bool[Tensor, "batch keys"] | None:
        """Keys that some query sees; None where all are: the others are padding."""
        batch, heads, queries, keys = self.shape
        if not self.masks and self.mask_mod is None:
            return None
        real = torch.ones(batch, keys, dtype=torch.bool, device=self.device)
        for mask in self.masks:
            four = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
            shown = four.any(2) if four.dtype == torch.bool else four.amax(2) > MASKED
            real = real & shown.any(1)
        if self.mask_mod is not None:
            seen = torch.zeros_like(real)
            step = max(1, BLOCK // (keys * batch * heads))
            for rows in torch.arange(queries, device=self.device).split(step):
                seen |= self._by_mod(slice(None), rows, keys).any(2).any(1)
            real = real & seen
        return None if bool(real.all()) else real

    def head(self, head: int) -> ScoredKeys:
        """The same attention of one head alone."""
        key = head * self.key.shape[1] // self.query.shape[1]
        masks = [
            one if one.ndim < 3 or one.shape[-3] == 1 else one[..., head : head + 1, :, :]
            for one in self.masks
        ]
        mods: dict[str, Any] = {}
        if self.mask_mod is not None:
            mods["mask_mod"] = lambda b, h, q, k, mod=self.mask_mod: mod(b, h + head, q, k)
        if self.score_mod is not None:
            mods["score_mod"] = lambda s, b, h, q, k, mod=self.score_mod: mod(s, b, h + head, q, k)
        query, keys = self.query[:, head : head + 1], self.key[:, key : key + 1]
        return replace(self, query=query, key=keys, masks=tuple(masks), **mods)

    @property
    def only_hides(self) -> bool:
        """Whether masks hide keys or leave their logits as they are, which are q · k then."""
        changes = [one for one in self.masks if one.dtype != torch.bool]
        hides = (bool(((one == 0) | (one <= MASKED)).all()) for one in changes)
        return self.score_mod is None and all(hides)


@dataclass(frozen=True, eq=False)
class SoftmaxInput:
    """Logits that a model writes out itself, as they enter its softmax."""

    logits: Float[Tensor, "batch heads queries keys"]
    extra: int = 0
    """Keys after those of the tokens, which belong to no token: learned sinks."""

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
        self, sequences: Some, queries: Int[Tensor, " rows"]
    ) -> tuple[Float[Tensor, "some heads rows keys"], Visible]:
        """The logits of these queries, -inf where a key is hidden, and which are visible."""
        logits = wide(self.logits[sequences].index_select(2, queries))
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
        keys -= attention.extra
        real = attention.real_keys()
        if real is not None and queries < keys:
            used = real[:, :keys].any(0).nonzero()
            keys = max(int(used.max()) + 1 if len(used) else keys, queries)
        first = 0 if is_causal or keys < queries else keys - queries
        own = None if real is None else real[:, first : first + queries]
        return cls(first, own if own is None or own.shape[1] == queries else None)


def _part(mask: Tensor, sequences: slice | Tensor, queries: Tensor) -> Tensor:
    """A mask's part for some sequences and queries, where it tells them apart."""
    part = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    part = part if part.shape[0] == 1 else part[sequences]
    return part if part.shape[2] == 1 else part.index_select(2, queries)


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
        values = values.to(_exact(values.device))
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
        _add(vars(self), vars(other))

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
        is_edge = ((self.mean <= 0) | (self.mean >= 1)) & (self.sequences >= 2)
        return torch.where(is_edge, least, self.standard_error)


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
    own: Ratio
    distance: Ratio
    queries: Float[Tensor, " heads"]
    """Rows, and the queries that see one key alone."""
    max_logit: Float[Tensor, " heads"]
    """Over all `queries`."""

    def add(self, other: Tally) -> None:
        """Take in other rows."""
        _add(vars(self), vars(other))


Queries = Literal["last", "all"] | Int[Tensor, " rows"]


def tally(
    attention: Logits,
    queries: Queries = "last",
    profiles: Queries | None = None,
    *,
    real: RealQueries | None = None,
    block: int = BLOCK,
) -> Tally | None:
    """Measure rows of an attention in O(T · block) memory; None if none of them can choose.

    "last" is every sequence's last query that is not padding.  Numbers by key are those of the rows
    `profiles`, which are `queries` where none are given.  Rows that see fewer than two keys
    have nothing to choose and are not counted, but for `queries` and the largest logit.

    Paper: Definition 1 for ρ, Section 5 for the entropy.
    """
    keys = attention.shape[3]
    if keys < 2:
        raise InputError(
            f"attention over {keys} key has nothing to choose.", hint="give at least 2 tokens."
        )
    real = real or RealQueries.of(attention)
    chosen = queries if profiles is None else profiles
    found = _in_blocks(attention, chosen, real, block)
    if found is None:
        return None
    last = found
    if not isinstance(chosen, str) or chosen != "last":
        last = _in_blocks(attention, "last", real, block) or found
    found["last_gates"] = replace(last["gates"])
    if profiles is not None:
        is_all = isinstance(queries, str) and queries == "all"
        whole = _at_once(attention, real, block) if is_all else None
        found |= whole or _in_blocks(attention, queries, real, block, by_key=False) or {}
    return Tally(**found) if bool((found["entropy"].weights > 0).any()) else None


def largest_logits(
    attention: Logits,
    bounds: Float[Tensor, "batch heads queries"] | None = None,
    *,
    block: int = BLOCK,
) -> Float[Tensor, " heads"]:
    """Each head's largest logit over all queries and the keys that they see, in blocks.

    Rows with bounds are looked at while they may hold a larger one, and not at all if theirs
    is -inf.
    """
    batch, heads, queries, keys = attention.shape
    is_large = bounds is not None or heads * queries * keys > block
    if isinstance(attention, ScoredKeys) and heads > 1 and is_large:
        every = [None] * heads if bounds is None else bounds.split(1, 1)
        by_head = [
            largest_logits(attention.head(one), every[one], block=block) for one in range(heads)
        ]
        return torch.cat(by_head)
    if bounds is not None:  # what is no number is looked at
        bounds = bounds.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
    device, everything = attention.device, (torch.arange(batch), torch.arange(queries))
    pieces = [
        (math.inf if bounds is None else bounds[some][:, :, rows].max().item(), some, rows)
        for some, parts in _parts(*everything, heads * keys, block)
        for rows in parts
    ]
    largest = torch.full((heads,), -torch.inf, dtype=_exact(attention.device), device=device)
    for top, sequences, rows in sorted(pieces, key=lambda one: -one[0]):
        if bounds is not None and top <= largest.min():
            break
        found = attention.rows(sequences.to(device), rows.to(device))[0].amax(-1)
        if bounds is not None:
            found = found.masked_fill(bounds[sequences][:, :, rows] == -torch.inf, -torch.inf)
        largest = torch.maximum(largest, found.amax((0, 2)))
    return largest


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


def _in_blocks(
    attention: Logits, queries: Queries, real: RealQueries, block: int, *, by_key: bool = True
) -> dict[str, Any] | None:
    """The fields of a `Tally` over these rows, which are written out in blocks."""
    total: dict[str, Any] = {}
    per_row = attention.shape[1] * attention.shape[3]
    for sequences, rows in _plan(queries, real.is_real, attention.shape):
        for some, pieces in _parts(sequences, rows, per_row, block):
            _add(total, _measured(attention, real, some, pieces, by_key=by_key))
    return total or None


def _add(total: dict[str, Any], more: dict[str, Any]) -> None:
    """Take in other sequences."""
    for name, value in more.items():
        if name not in total:
            total[name] = value
        elif isinstance(value, Ratio):
            total[name].add(value)
        elif name == "max_logit":
            total[name] = torch.maximum(total[name], value)
        else:
            total[name] = _added(total[name], value)


def _added(one: Float[Tensor, "*_"], other: Float[Tensor, "*_"]) -> Float[Tensor, "*_"]:
    """Add sums by position, of which one may know more positions."""
    if one.ndim and one.shape[-1] != other.shape[-1]:
        longest = max(one.shape[-1], other.shape[-1])
        one, other = (functional.pad(side, (0, longest - side.shape[-1])) for side in (one, other))
    return one + other


def _measured(
    attention: Logits, real: RealQueries, sequences: Tensor, pieces: list[Tensor], *, by_key: bool
) -> dict[str, Any]:
    """Sum over all pieces of these sequences' rows, then over the sequences."""
    start = int(sequences[0])
    where: Some = slice(start, start + len(sequences))
    if int(sequences[-1]) - start + 1 != len(sequences):
        where = sequences.to(attention.device)
    sums: dict[str, Tensor] = {}
    top = torch.tensor(-torch.inf)
    for piece in pieces:
        more, highest = _row_sums(attention, real, where, piece.to(attention.device), by_key=by_key)
        sums = {name: sums[name] + part for name, part in more.items()} if sums else more
        top = torch.maximum(top.to(highest), highest)
    found = _over_sequences(sums) | {"max_logit": top.to(_exact(top.device))}
    if not by_key:
        return found
    shown = sums["shown"]
    return found | {
        "gates": Ratio.of(sums["gates"], shown),
        "gates_by_theta": Ratio.of(sums["theta_gates"], sums["theta_shown"]),
        "attention": Ratio.of(sums["attention"], shown),
        "logits": Ratio.of(sums["logits"], shown),
        "logits_squared": sums["squares"].to(_exact(shown.device)).sum(0),
    }


def _over_sequences(sums: dict[str, Tensor]) -> dict[str, Any]:
    """Fields of a `Tally` from a row's numbers, summed by sequence and head."""
    names = ("entropy", "log_keys", "sink", "own", "distance")
    ratios: dict[str, Any] = {name: Ratio.of(sums[name], sums["rows"]) for name in names}
    return ratios | {"queries": sums["queries"].to(_exact(sums["queries"].device)).sum(0)}


@dataclass(frozen=True, eq=False)
class Rows:
    """Numbers of single rows, by sequence, head and query."""

    count: Int[Tensor, "#batch #heads rows"]
    """The keys that a row sees; 0 for padding."""
    entropy: Float[Tensor, "batch heads rows"]
    sink: Float[Tensor, "batch heads rows"]
    """Attention on the first key that the row sees."""
    own: Float[Tensor, "batch heads rows"]
    """Attention on the query's own key; NaN where it has none, like the distance."""
    distance: Float[Tensor, "batch heads rows"]
    top: Float[Tensor, "batch heads rows"]
    """The largest logit, or a bound of it; -inf for a row that sees nothing."""

    def sums(self) -> dict[str, Tensor]:
        """Over the rows that can choose."""
        counted = self.count >= 2

        def total(values: Tensor) -> Tensor:
            return torch.where(counted, values, 0).sum(2)

        ones = torch.ones_like(self.entropy)
        log_keys = self.count.clamp_min(1).to(_exact(ones.device)).log()
        return {
            "queries": (ones * (self.count >= 1)).sum(2),
            "rows": total(ones),
            "log_keys": total(log_keys * ones),
            **{name: total(getattr(self, name)) for name in ("entropy", "sink", "own", "distance")},
        }


def _at_once(attention: Logits, real: RealQueries, block: int) -> dict[str, Any] | None:
    """The fields of a `Tally` that need no single logit, over all rows; None if they cannot be had.

    The largest logit does need them, but of no row whose denominator is below it.
    """
    if not (isinstance(attention, ScoredKeys) and is_fusable(attention)):
        return None
    total, bounds = dict[str, Any](), list[Tensor]()
    together = max(1, _TOGETHER // max(attention.query[:1].numel(), 1))
    for start in range(0, attention.shape[0], together):
        rows = fused_rows(attention, real, slice(start, start + together))
        _add(total, _over_sequences(rows.sums()))
        bounds.append(rows.top)
    total["max_logit"] = largest_logits(attention, torch.cat(bounds), block=block)
    return total


def is_fusable(attention: ScoredKeys) -> bool:
    """Whether one more fused attention says what all rows do: logits are q · k, or hidden."""
    return attention.device.type in ("cpu", "cuda") and attention.only_hides


_TOGETHER = 1 << 22  # numbers of queries, or of a mask, at a time


def fused_rows(attention: ScoredKeys, real: RealQueries, sequences: slice) -> Rows:
    """Numbers of all rows of some sequences, from a fused attention whose values are the keys.

    The entropy of a row is the logarithm of its softmax's denominator less its mean logit, which
    is q · E[k]: exact, in memory that grows with T.  One more column of the values holds the keys'
    places.  Where keys follow the query's own, a second attention, over those up to it, tells
    distances ahead from those behind.
    """
    _, heads, queries, keys = attention.shape
    is_masked = bool(attention.masks) or attention.mask_mod is not None
    is_masked |= bool(real.first_key) and not attention.is_causal  # no flag says "up to its own"
    step = queries
    if is_masked:
        by_head = [one.shape[-3] if one.ndim > 2 else 1 for one in attention.masks]
        by_head += [heads] if attention.mask_mod is not None else [1]
        step = max(64, _TOGETHER // (keys * len(attention.query[sequences]) * max(by_head)))
    parts = [
        _fused_part(attention, real, sequences, slice(start, start + step), is_masked)
        for start in range(0, queries, step)
    ]
    if len(parts) == 1:
        return parts[0]
    return Rows(
        *(torch.cat([getattr(one, part.name) for one in parts], 2) for part in fields(Rows))
    )


def _fused_part(
    attention: ScoredKeys, real: RealQueries, sequences: slice, queries: slice, is_masked: bool
) -> Rows:
    query = wide(attention.query[sequences, :, queries])
    index = torch.arange(attention.shape[2], device=query.device)[queries]
    reach = attention.reach(index) if is_masked else attention.shape[3]
    key = attention.key[sequences, :, :reach].to(query.dtype)
    middle = key.mean(2, keepdim=True)  # attention does not see it, and rounding does
    seen = _Seen.of(attention, real, sequences, index, reach, is_masked)
    width, own, scale = query.shape[-1], seen.own, attention.scale
    query, key = (functional.pad(one, (0, 8 - width % 8)) for one in (query, key - middle))
    value = key.clone()
    value[..., width] = torch.arange(reach, dtype=key.dtype, device=key.device) / reach
    mean, denominator = fused_attention(query, key, value, scale, seen.visible, seen.is_causal)
    distance = own - reach * mean[..., width]
    mean[..., width] = 0
    entropy = denominator - scale * _dot(query, mean)
    sink = (scale * _dot(query, _picked(key, seen.first, query.shape[1])) - denominator).exp()
    mine = key[:, :, own[0] : own[-1] + 1]
    if mine.shape[2] < len(own):
        mine = functional.pad(mine, (0, 0, 0, len(own) - mine.shape[2]))
    mine = (scale * _dot(query, mine) - denominator).exp() * seen.sees_own
    if seen.looks_ahead and real.first_key is not None:
        behind, is_causal = seen.behind, seen.behind is None
        some, part = fused_attention(query, key, value, scale, behind, is_causal)
        share = (part - denominator).exp() * (True if behind is None else behind.any(-1))
        distance = 2 * share * (own - reach * some[..., width]) - distance
    count = seen.count
    if real.is_real is not None:
        count = count * real.is_real[sequences, queries][:, None]
    bound = denominator + scale * _dot(query[..., :width], middle)
    bound = torch.where(count >= 1, bound + 1e-5 * (1 + bound.abs()), -torch.inf)
    known = math.nan if real.first_key is None else 1
    return Rows(count, entropy.clamp_min(0), sink, mine * known, distance * known, bound)


@dataclass(frozen=True, eq=False)
class _Seen:
    """Which keys a block of queries sees."""

    own: Int[Tensor, " rows"]
    count: Int[Tensor, "#batch #heads rows"]
    sees_own: Bool[Tensor, "#batch #heads rows"]
    first: Int[Tensor, "#batch #heads #rows"]
    looks_ahead: bool
    """Whether any sees a key after its own."""
    is_causal: bool = False
    visible: Visible = None
    behind: Visible = None
    """Of the visible keys those up to the query's own; None for all up to it."""

    @classmethod
    def of(
        cls,
        attention: ScoredKeys,
        real: RealQueries,
        sequences: slice,
        index: Tensor,
        reach: int,
        is_masked: bool,
    ) -> _Seen:
        own, place = index + (real.first_key or 0), torch.arange(reach, device=index.device)
        if not is_masked:
            causal, nothing = attention.is_causal, index.new_zeros(1, 1, 1)
            count = (index + 1).clamp_max(reach) if causal else torch.full_like(index, reach)
            return cls(
                own, count[None, None], (own < reach)[None, None], nothing, not causal, causal
            )
        shown = attention.visible(sequences, index)
        shown = (place >= 0)[None, None, None] if shown is None else shown
        shown = shown.expand(-1, -1, len(index), -1)
        sees_own = _at(shown, own.clamp_max(reach - 1)) & (own < reach)
        behind = shown & (place <= own[:, None])
        ahead = not torch.equal(behind, shown)
        first = shown.to(torch.uint8).argmax(-1)
        return cls(own, shown.sum(-1), sees_own, first, ahead, False, shown, behind)


def _dot(query: Tensor, key: Tensor) -> Tensor:
    """Every query with its key; key heads, and their rows, may be fewer."""
    grouped = query.unflatten(1, (key.shape[1], -1))
    if key.shape[2] == 1:
        return (grouped @ key[:, :, None].mT)[..., 0].flatten(1, 2)
    return torch.einsum("bkgrd,bkrd->bkgr", grouped, key).flatten(1, 2)


def _picked(key: Tensor, index: Tensor, heads: int) -> Tensor:
    """Every row's key, by key head; by head where rows of one group differ."""
    if index.shape[1] > 1:
        key = key.repeat_interleave(heads // key.shape[1], 1)
    places = index.expand(*key.shape[:2], -1)[..., None].expand(-1, -1, -1, key.shape[-1])
    return key.gather(2, places)


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, visible: Visible, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """A fused attention's output, and the logarithm of each row's denominator."""
    mask = None
    if visible is not None:  # its rows are a multiple of 16 apart, as the kernels of CUDA ask
        spare = -visible.shape[-1] % 16
        hidden = functional.pad(~visible, (0, spare))
        mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
        mask = mask.masked_fill_(hidden, -torch.inf)[..., : visible.shape[-1]]
    if query.device.type == "cpu":
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return fused(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)
    shape = (*query.shape[:3], key.shape[2])
    key, value = (one.repeat_interleave(shape[1] // one.shape[1], 1) for one in (key, value))
    mask = None if mask is None else mask.expand(shape)
    fused = torch.ops.aten._scaled_dot_product_efficient_attention
    output, denominator, *_ = fused(query, key, value, mask, True, 0.0, is_causal, scale=scale)
    return output, denominator[..., : shape[2]]


def _row_sums(
    attention: Logits, real: RealQueries, where: Some, queries: Tensor, *, by_key: bool
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
        top = torch.where(count >= 1, top, -torch.inf)
    place, known = queries + (real.first_key or 0), math.nan if real.first_key is None else 1
    away = (place[:, None] - torch.arange(keys, device=logits.device)).abs().to(logits.dtype)
    first = visible.to(torch.uint8).argmax(-1)
    rows = Rows(
        count,
        entropy,
        _at(weights, first),
        _at(weights, place.clamp_max(keys - 1)) * (place < keys) * known,
        (weights * away).sum(-1) * known,
        top,
    )
    sums = rows.sums()
    if by_key:
        sums |= _key_sums(filled, weights, visible, torch.where(counted, count, 0), attention.shape)
    return sums, top.amax((0, 2))


def _at(weights: Tensor, key: Tensor) -> Tensor:
    """Every row's weight on one key."""
    return weights.gather(-1, key[..., None].expand(*weights.shape[:-1], 1))[..., 0]


def _key_sums(
    logits: Tensor, weights: Tensor, visible: Tensor, count: Tensor, shape: tuple[int, ...]
) -> dict[str, Tensor]:
    """What rows that can choose add up to by key, and by the key's place among those they see."""
    # Definition 1 on the keys that the query sees: 0 <= (ω_i − mean ω + 1)/T <= 1
    score = logits - ((logits.sum(-1) / count.clamp_min(1)) - 1)[..., None]
    gates = (score >= 0) & (score <= count[..., None]) & visible
    by_key = {
        "shown": visible.sum(2, dtype=logits.dtype).expand(logits[:, :, 0].shape),
        "gates": gates.sum(2, dtype=logits.dtype),
        "attention": weights.sum(2),
        "logits": logits.sum(2),
        "squares": logits.square().sum(2),
    }
    missing = shape[3] - logits.shape[-1]
    padded = {name: functional.pad(part, (0, missing)) for name, part in by_key.items()}
    return padded | _by_theta(gates, visible, count)


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
    return {"theta_gates": inside.sum(2).to(dtype), "theta_shown": sizes.sum(2).to(dtype)}


def wide(values: Tensor) -> Tensor:
    """Float32, or float64 where it is that."""
    return values if values.dtype == torch.float64 else values.float()


def _exact(device: torch.device) -> torch.dtype:
    """Float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True)
class TokenRank:
    """How alike the tokens are that one attention is given, averaged over sequences.

    >>> import torch
    >>> from locater.models.loading import load_model
    >>> model, _ = load_model("demo")
    >>> from locater import Probe
    >>> with Probe(model) as probe:
    ...     _ = model(torch.arange(40)[None])
    >>> [one.layer for one in probe.rank]
    [0, 1, 2, 3]
    """

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
    tokens = wide(tokens) * real
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
    return matrices.square().sum((1, 2), dtype=_exact(matrices.device))
