"""One attention of one model: where its heads lie in stored tensors, and how they make a form."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from locater.core.form import HeadNorm, QKForm
from locater.errors import InputError, guarded
from locater.models.positions import RelativeSpec, RotarySpec, alibi_slopes, relative_buckets

Kind = Literal["self", "cross"]


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """A norm before an attention, or between a projection and what reads it: of each head, of all
    heads, of a latent."""

    gain: str | None = None
    """The stored gains, (size,) or one row for each head; None: the norm has none."""
    bias: str | None = None
    adds_one: bool = False
    """The gain is 1 + weight."""
    is_centered: bool = False
    """A LayerNorm: the mean is taken out first."""
    over_all: bool = False
    """All heads are normalized as one vector."""
    eps: float = 1e-6

    @property
    def tensors(self) -> tuple[str, ...]:
        """The stored tensors."""
        return tuple(name for name in (self.gain, self.bias) if name)

    def gains(self, tensors: Mapping[str, Tensor], like: Tensor) -> Tensor | None:
        """What the normalized vector is multiplied with."""
        if self.gain is None:
            return None
        weight = tensors[self.gain].to(like)
        return weight + 1 if self.adds_one else weight


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
    is_bias_apart: bool = False
    """The bias holds these heads alone, though the weight holds more."""
    scale: str | None = None
    """The tensor that an 8-bit weight is to be multiplied with: whole, by rows or by blocks."""
    width: int | None = None
    """Rows stored for each head, of which the first are ours; head_dim where none is said."""
    groups: int = 1
    """A convolution over one place in groups, each of which reads its own part of the width."""
    multiplier: float = 1.0
    dimensions: str | None = None
    """The tensor whose softplus, over log 2, multiplies each dimension (TimesFM)."""
    norm: NormSpec | None = None
    """The norm of what comes out."""
    through: Projection | None = None
    """The projection to a latent vector whose normalized values this one reads (MLA)."""

    @property
    def tensors(self) -> Iterator[str]:
        """The stored tensors that it is made of."""
        norm = self.norm.tensors if self.norm else ()
        yield from (
            name for name in (self.weight, self.bias, self.scale, self.dimensions, *norm) if name
        )
        if self.through is not None:
            yield from self.through.tensors

    def unpacked(self, tensors: Mapping[str, Tensor]) -> Float[Tensor, "_ _"]:
        """The stored weight, times its scale where it has one."""
        weight = tensors[self.weight].flatten(1)  # a convolution over one place is a matrix
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
        self, tensor: Float[Tensor, "_ ..."], head_dim: int
    ) -> Float[Tensor, "heads head model"]:
        """The heads of this projection in the stored weight; gradients flow back to it."""
        tensor = tensor.flatten(1)
        if self.groups > 1:
            tensor = torch.block_diag(*tensor.chunk(self.groups))
        rows = tensor.mT if self.transposed else tensor
        return self._ours(rows[self.start : self.stop], head_dim)

    def bias_heads(
        self, tensor: Float[Tensor, " rows"], head_dim: int
    ) -> Float[Tensor, "heads head"]:
        """The heads of this projection in the stored bias."""
        if self.is_bias_apart:
            return tensor.reshape(-1, head_dim)
        if self.bias_start is None or self.stop is None:
            return self._ours(tensor[self.start : self.stop], head_dim)
        stop = self.bias_start + self.stop - self.start
        return self._ours(tensor[self.bias_start : stop], head_dim)

    def _ours(self, rows: Tensor, head_dim: int) -> Tensor:
        blocks = rows.unflatten(0, (-1, self.inner, self.width or head_dim))
        return blocks[:, self.first : self.last].flatten(0, 1)[:, :head_dim]

    def side(
        self, tensors: Mapping[str, Tensor], head_dim: int, heads: slice
    ) -> tuple[Tensor, Tensor | None, HeadNorm | None]:
        """Some heads' factor, their bias, and the norm whose root mean square is in both."""
        factor = self.heads(self.unpacked(tensors), head_dim)
        bias = None if self.bias is None else self.bias_heads(tensors[self.bias], head_dim)
        norm = None
        if self.norm is not None:
            factor, bias, norm = self._normalized(factor, bias, self.norm, tensors)
        if self.dimensions is not None:
            gain = torch.nn.functional.softplus(tensors[self.dimensions]) / math.log(2)
            factor, bias = _scaled(factor, bias, gain)
        factor, bias = factor[heads], None if bias is None else bias[heads]
        norm = None if norm is None else norm.taken((heads,))
        if self.through is not None:
            latent, moved, norm = self.through.side(tensors, factor.shape[-1], slice(None))
            if moved is not None:
                more = (factor @ moved[..., None])[..., 0]
                bias = more if bias is None else bias + more
            if norm is not None and norm.shift is not None:
                norm = replace(norm, shift=(factor @ norm.shift[..., None])[..., 0])
            factor = factor @ latent
        if self.multiplier != 1:
            factor = factor * self.multiplier
            bias = None if bias is None else bias * self.multiplier
        return factor, bias, norm

    @staticmethod
    def _normalized(
        factor: Tensor, bias: Tensor | None, spec: NormSpec, tensors: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor | None, HeadNorm]:
        """Heads that a norm follows, at its root mean square for tokens of unit variance."""
        shape = factor.shape[:2]
        rows = factor.flatten(0, 1)[None] if spec.over_all else factor
        offset = None if bias is None else bias.reshape(rows.shape[:2])
        if spec.is_centered:
            rows = rows - rows.mean(-2, keepdim=True)
            offset = None if offset is None else offset - offset.mean(-1, keepdim=True)
        norm = HeadNorm(rows, torch.ones(rows.shape[0]), offset, eps=spec.eps)
        size = norm.mean_square().sqrt()
        scale = (rows.shape[-2] ** 0.5 / size).to(rows)[:, None]
        gain = spec.gains(tensors, rows)
        if gain is not None:
            scale = scale * gain.reshape(-1, rows.shape[-2])
        factor = (rows * scale[..., None]).reshape(factor.shape)
        bias = None if offset is None else (offset * scale).reshape(shape)
        shift = None
        if spec.bias is not None:
            shift = tensors[spec.bias].to(factor).reshape(-1, shape[1]).expand(shape)
            bias = shift if bias is None else bias + shift
        return factor, bias, HeadNorm(rows, size, offset, shift, spec.eps)


def _scaled(factor: Tensor, bias: Tensor | None, gain: Tensor) -> tuple[Tensor, Tensor | None]:
    """Heads and their biases, each dimension times its gain."""
    return factor * gain[:, None], None if bias is None else bias * gain


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
    before: NormSpec | None = None
    """The norm that makes what queries and keys read, where it is known."""
    rotary: RotarySpec | None = None
    key_turned: Projection | None = None
    """Key dimensions that all heads share and that alone turn (MLA); they come first in the form,
    and the last rows of each query head with them."""
    qk_norm: bool = False
    position_bias: str | None = None  # "alibi", "scaled alibi", "t5"
    position_weight: str | None = None
    """The tensor that holds T5's relative bias, (buckets, heads)."""
    max_distance: int = 128
    relative: RelativeSpec | None = None
    caveats: tuple[str, ...] = ()
    """What the spectrum of W_Qᵀ W_K leaves out here, in words."""

    @property
    def is_latent(self) -> bool:
        """Queries or keys are made through a latent vector (MLA)."""
        return self.query.through is not None or self.key.through is not None

    @property
    def tensors(self) -> tuple[str, ...]:
        """The stored tensors that the form is made of, each once."""
        sides = (self.query, self.key, *((self.key_turned,) if self.key_turned else ()))
        names = [name for side in sides for name in side.tensors]
        names += [self.position_weight] if self.position_weight else []
        names += self.relative.tensors if self.relative else ()
        return tuple(dict.fromkeys(names))

    @property
    def tensors_with_norm(self) -> tuple[str, ...]:
        """Those, and what the norm before the attention is made of."""
        return (*self.tensors, *(self.before.tensors if self.before else ()))

    def gain(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
        """What the norm before the attention multiplies each dimension of its tokens with, and what
        it adds, in float64."""
        if self.before is None or self.before.gain is None:
            return None, None
        own = {name: tensors[name].detach().double() for name in self.before.tensors}
        gain, shift = self.before.gains(own, own[self.before.gain]), own.get(self.before.bias or "")
        for part in own.values():
            if not bool(torch.isfinite(part).all()):
                raise InputError(
                    f"the norm before {self.name} holds NaN or infinite values.",
                    hint="the model has diverged or the file is damaged; try another checkpoint.",
                )
        return gain, shift

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
        own = self.head_dim - self.turned_rows
        query, query_bias, query_norm = self.query.side(tensors, self.head_dim, ours)
        key, key_bias, key_norm = self.key.side(tensors, own, slice(first, last))
        if self.key_turned is not None:
            query, query_bias, key, key_bias, key_norm = self._turned_first(
                tensors, query, query_bias, key, key_bias, key_norm
            )
        if share > 1:
            key = key.repeat_interleave(share, 0)
            key_bias = None if key_bias is None else key_bias.repeat_interleave(share, 0)
            key_norm = None if key_norm is None else key_norm.repeated(share)
        if self.rotary is not None and self.rotary.magnitude != 1:
            gain = torch.ones(self.head_dim, dtype=query.dtype, device=query.device)
            gain[: self.rotary.dimensions] = self.rotary.magnitude
            query, query_bias = _scaled(query, query_bias, gain)
            key, key_bias = _scaled(key, key_bias, gain)
        by_distance = self._distance_bias(tensors, distances, like=query)
        relative = None
        if self.relative is not None:
            if self.relative.rule == "sinusoids":  # the queries' bias for contents
                more = tensors[self.relative.tensors[1]].reshape(self.heads, -1)[ours].to(query)
                query_bias = more if query_bias is None else query_bias + more
            whole = self.relative.relative(
                tensors, heads=self.heads, temperature=self.temperature, distances=distances
            )
            relative = whole.mapped(lambda _, table: table[ours])
        return QKForm(
            query,
            key,
            self.temperature,
            query_bias=query_bias,
            key_bias=key_bias,
            rotary=None if self.rotary is None else self.rotary.rotary(),
            distance_bias=None if by_distance is None else by_distance[ours],
            query_norm=query_norm,
            key_norm=key_norm,
            relative=relative,
        )

    @property
    def turned_rows(self) -> int:
        """How many key dimensions all heads share."""
        if self.key_turned is None or self.key_turned.stop is None:
            return 0
        return self.key_turned.stop - self.key_turned.start

    def _turned_first(
        self,
        tensors: Mapping[str, Tensor],
        query: Tensor,
        query_bias: Tensor | None,
        key: Tensor,
        key_bias: Tensor | None,
        key_norm: HeadNorm | None,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, HeadNorm | None]:
        """Put the dimensions that turn before those that do not."""
        assert self.key_turned is not None
        count = self.turned_rows
        turned, turned_bias, _ = self.key_turned.side(tensors, count, slice(None))
        key = torch.cat((turned.expand(key.shape[0], -1, -1), key), 1)
        if key_bias is not None or turned_bias is not None:
            rest = key.new_zeros(key.shape[0], self.head_dim - count)
            first = key.new_zeros(1, count) if turned_bias is None else turned_bias
            key_bias = torch.cat(
                (first.expand(key.shape[0], -1), rest if key_bias is None else key_bias), 1
            )
        query = query.roll(count, 1)
        query_bias = None if query_bias is None else query_bias.roll(count, 1)
        key_norm = None if key_norm is None else replace(key_norm, start=count)
        return query, query_bias, key, key_bias, key_norm

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
