"""Logits of an attention, a few rows at a time, as a model's own call defines them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

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
