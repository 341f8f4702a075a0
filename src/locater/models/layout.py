"""One attention of one model: where its heads lie in stored tensors, and how they make a form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from locater.core.form import QKForm
from locater.errors import InputError, guarded
from locater.models.positions import RotarySpec, alibi_slopes, relative_buckets

Kind = Literal["self", "cross"]


@dataclass(frozen=True, kw_only=True)
class Projection:
    """Where the heads of a query or key projection lie in one stored tensor."""

    weight: str
    bias: str | None = None
    transposed: bool = False
    """Stored as (model, rows), as Conv1D does, not as nn.Linear's (rows, model)."""
    start: int = 0
    stop: int | None = None
    """The rows used; they are viewed as (outer, inner, head_dim) …"""
    inner: int = 1
    first: int = 0
    last: int = 1
    """… of which inner[first:last] are ours."""
    bias_start: int | None = None
    """The bias' first row, where it is not the weight's."""
    scale: str | None = None
    """The tensor that an 8-bit weight is to be multiplied with: whole, by rows or by blocks."""

    def unpacked(self, tensors: Mapping[str, Tensor]) -> Float[Tensor, "_ _"]:
        """The stored weight, times its scale where it has one."""
        weight = tensors[self.weight]
        if self.scale is None:
            return weight
        scale = tensors[self.scale].float()
        for axis, entries in enumerate(scale.shape):
            if weight.shape[axis] % entries:
                raise InputError(
                    f"{self.weight} is {tuple(weight.shape)} and its scale {tuple(scale.shape)}.",
                    hint="give one scale, one per row, or one per block of equal size.",
                )
            if entries > 1:
                scale = scale.repeat_interleave(weight.shape[axis] // entries, axis)
        return weight.float() * (scale[:, None] if scale.ndim == 1 and len(scale) > 1 else scale)

    def heads(
        self, tensor: Float[Tensor, "_ _"], head_dim: int
    ) -> Float[Tensor, "heads head model"]:
        """The heads of this projection in the stored weight; gradients flow back to it."""
        rows = tensor.mT if self.transposed else tensor
        return self._ours(rows[self.start : self.stop], head_dim)

    def bias_heads(
        self, tensor: Float[Tensor, " rows"], head_dim: int
    ) -> Float[Tensor, "heads head"]:
        """The heads of this projection in the stored bias."""
        if self.bias_start is None or self.stop is None:
            return self._ours(tensor[self.start : self.stop], head_dim)
        stop = self.bias_start + self.stop - self.start
        return self._ours(tensor[self.bias_start : stop], head_dim)

    def _ours(self, rows: Tensor, head_dim: int) -> Tensor:
        blocks = rows.unflatten(0, (-1, self.inner, head_dim))
        return blocks[:, self.first : self.last].flatten(0, 1)


@dataclass(frozen=True, kw_only=True)
class AttentionLayout:
    """One attention of one model: where its heads lie and what stands around their W_QK."""

    name: str  # of the attention module, without what wrappers add: "model.layers.3.self_attn"
    family: str
    layer: int
    kind: Kind
    part: str  # "decoder", "encoder", "vision", "text", "audio" or "model"
    query: Projection
    key: Projection
    heads: int
    kv_heads: int
    head_dim: int
    model: int
    temperature: float
    rotary: RotarySpec | None = None
    qk_norm: bool = False
    position_bias: str | None = None  # "alibi", "scaled alibi", "t5"
    position_weight: str | None = None
    """The tensor that holds T5's relative bias, (buckets, heads)."""
    max_distance: int = 128
    caveats: tuple[str, ...] = ()
    """What the spectrum of W_Qᵀ W_K leaves out here, in words."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """The stored tensors that the form is made of, each once."""
        names = (
            self.query.weight,
            self.key.weight,
            self.query.bias,
            self.key.bias,
            self.query.scale,
            self.key.scale,
            self.position_weight,
        )
        return tuple(dict.fromkeys(name for name in names if name))

    def form(
        self,
        tensors: Mapping[str, Tensor],
        *,
        distances: int = 2048,
        key_heads: slice = slice(None),
    ) -> QKForm:
        """Make every query head's form, each with its group's key head, from the stored tensors.

        A bias by distance (ALiBi, T5) is written out for that many distances.  `key_heads` takes
        some key heads and the query heads of their groups, to save memory.
        """
        with guarded(self.name, hint="its tensors have not the shapes that its config asks for."):
            return self._form(tensors, distances, key_heads)

    def _form(self, tensors: Mapping[str, Tensor], distances: int, key_heads: slice) -> QKForm:
        if min(self.heads, self.kv_heads, self.head_dim, self.model) < 1:
            raise InputError(
                f"{self.name} has {self.heads} heads of {self.head_dim} dimensions on tokens of "
                f"{self.model}.",
                hint="nothing can attend there; the file is damaged or made to fail.",
            )
        share = self.heads // self.kv_heads
        first, last, _ = key_heads.indices(self.kv_heads)
        ours = slice(first * share, last * share)
        query = self.query.heads(self.query.unpacked(tensors), self.head_dim)[ours]
        key = self.key.heads(self.key.unpacked(tensors), self.head_dim)[first:last]
        biases = [
            side.bias_heads(tensors[side.bias], self.head_dim)[some] if side.bias else None
            for side, some in ((self.query, ours), (self.key, slice(first, last)))
        ]
        if biases[1] is not None:
            biases[1] = self._shared(biases[1])
        if self.rotary is not None and self.rotary.magnitude != 1:
            gain = torch.ones(self.head_dim, dtype=query.dtype, device=query.device)
            gain[: self.rotary.dimensions] = self.rotary.magnitude
            query, key = query * gain[:, None], key * gain[:, None]
            biases = [None if bias is None else bias * gain for bias in biases]
        rotary = None if self.rotary is None else self.rotary.rotary()
        by_distance = self._distance_bias(tensors, distances, like=query)
        return QKForm(
            query,
            self._shared(key),
            self.temperature,
            query_bias=biases[0],
            key_bias=biases[1],
            rotary=rotary,
            distance_bias=None if by_distance is None else by_distance[ours],
        )

    def _shared(self, heads: Tensor) -> Tensor:
        """Give every query head its group's key head."""
        return heads.repeat_interleave(self.heads // self.kv_heads, 0)

    def _distance_bias(
        self, tensors: Mapping[str, Tensor], distances: int, *, like: Tensor
    ) -> Float[Tensor, "heads distances"] | None:
        if self.position_weight is not None:
            weight = tensors[self.position_weight]
            bucket = relative_buckets(
                distances,
                buckets=weight.shape[0],
                max_distance=self.max_distance,
                bidirectional=self.part != "decoder",
            )
            return weight[bucket.to(weight.device)].mT
        if self.position_bias not in ("alibi", "scaled alibi"):
            return None
        slopes = alibi_slopes(self.heads)
        if self.position_bias == "scaled alibi":  # Falcon rounds them, and divides by λ as well
            slopes = slopes.bfloat16().double() / self.temperature
        return (-slopes[:, None] * torch.arange(distances)).to(like)


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """An attention that was seen and could not be read."""

    name: str
    reason: str
