"""Weights in a few bits: unpacked as they are read, or refused by the name of their scheme.

A stored integer means nothing without its scale.  Four schemes are plain enough to be undone here,
each held against the values of its own library; of all others the original is asked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.checkpoints.source import StoredTensors, Tensors, json_object
from locater.errors import LocaterError

Parts = Mapping[str, Tensor]
_ATTENTION = re.compile(
    r"(?:\w+_)?(?:w?qk?v?|w?k|kv|query|key)(?:_\w+)?|c_attn|attn|in_proj|Wqkv", re.I
)
_REFUSED = {
    "q_weight": "EXL2", "trellis": "EXL3", "W_q": "HQQ", "codebooks": "AQLM", "Qidxs": "QuIP#",
    "centroids.weight": "VPTQ", "weight_scale_2": "NVFP4 of ModelOpt", "weight_blocks": "MXFP4",
    "weight._data": "Quanto",
}  # fmt: skip
"""What a projection has beside its weight, or in its place, where the scheme is not undone."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_ROWS = 256  # unpacked at a time
_LARGEST_STATE = 1 << 16  # bytes of what bitsandbytes says of one weight
_ORIGINAL = "audit the original model, of which this was made."


@dataclass(frozen=True)
class _Packed:
    """One packed weight: its true shape, the tensors it is made of, and how."""

    scheme: str
    shape: tuple[int, int]
    parts: Mapping[str, str]
    made: Callable[[Parts], Float[Tensor, "_ _"]]


class PackedTensors(StoredTensors):
    """A checkpoint's tensors, with the packed projections of attentions as the weights they are."""

    def __init__(self, base: Tensors, weights: Mapping[str, _Packed]) -> None:
        self._base, self._weights = base, weights
        self._parts = (base,)
        used = {part for packed in weights.values() for part in packed.parts.values()}
        self.shapes = {
            **{name: shape for name, shape in base.shapes.items() if name not in used},
            **{name: packed.shape for name, packed in weights.items()},
        }
        schemes = sorted({packed.scheme for packed in weights.values()})
        self.caveats = (f"{len(weights)} weights are unpacked from {', '.join(schemes)}",)

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Read these tensors; packed ones in float32."""
        found = self._base.read([name for name in names if name not in self._weights])
        for name in names:
            if name in self._weights:
                packed = self._weights[name]
                stored = self._base.read(list(packed.parts.values()))
                parts = {part: stored[at] for part, at in packed.parts.items()}
                try:
                    weight = packed.made(parts)
                    if tuple(weight.shape) != packed.shape:
                        raise ValueError(f"they make {tuple(weight.shape)}")
                    found[name] = weight
                except (RuntimeError, ValueError, LookupError, TypeError, ArithmeticError) as error:
                    raise LocaterError(
                        f"{name} cannot be unpacked to {packed.shape} ({error!s:.200}).",
                        hint="its parts are not of one checkpoint: download it again.",
                    ) from error
        return found


def unpacked(tensors: Tensors, config: Mapping[str, Any], name: str) -> PackedTensors | None:
    """The same tensors, unpacked where queries and keys are packed; refuses what it cannot undo.

    None where nothing is packed.
    """
    modules: dict[str, dict[str, str]] = {}
    for stored in tensors.shapes:
        parts = stored.split(".")
        ends = [end for end in range(1, len(parts)) if _ATTENTION.fullmatch(parts[end - 1])]
        if ends:
            module = ".".join(parts[: ends[-1]])
            modules.setdefault(module, {})[".".join(parts[ends[-1] :])] = stored
    said = config.get("quantization_config") or config.get("quantization")
    said = said if isinstance(said, Mapping) else {}
    weights = {
        f"{module}.weight": packed
        for module, stored in modules.items()
        if set(stored) - {"weight", "bias"}
        and (packed := _recognized(_Module(module, stored, tensors, said), name)) is not None
    }
    return PackedTensors(tensors, weights) if weights else None


@dataclass(frozen=True)
class _Module:
    """One projection: the tensors below it by their own names, and what the config says of all."""

    name: str
    stored: Mapping[str, str]
    tensors: Tensors
    said: Mapping[str, Any]

    @property
    def shapes(self) -> Any:
        return {part: tuple(self.tensors.shapes[at]) for part, at in self.stored.items()}

    def parts(self, *names: str) -> dict[str, str]:
        return {part: self.stored[part] for part in names if part in self.stored}


def _recognized(module: _Module, where: str) -> _Packed | None:
    """How the weight of one projection is packed, by what lies beside it; None if it is not."""
    scheme = next((scheme for part, scheme in _REFUSED.items() if part in module.stored), None)
    if scheme is None:
        for recognize in (_by_groups, _mlx, _compressed, _bitsandbytes):
            try:
                packed = recognize(module)
                if isinstance(packed, _Packed):
                    _check_size(packed, module)
            except (ValueError, LookupError, TypeError, ArithmeticError, AttributeError) as error:
                raise LocaterError(
                    f"{where} has {module.name} packed in a way that is not known "
                    f"({type(error).__name__}: {error!s:.100}).",
                    hint=_ORIGINAL,
                ) from error
            if isinstance(packed, _Packed):
                return packed
            scheme = scheme or packed
    if scheme is not None:
        raise LocaterError(
            f"{where} holds weights packed by {scheme} ({module.name}), which is not undone here.",
            hint=_ORIGINAL,
        )
    return None


def _check_size(packed: _Packed, module: _Module) -> None:
    """A weight has a bit of its file for every number: sizes that a file names may be anything."""
    rows, columns = packed.shape
    stored = max(math.prod(module.tensors.shapes[at]) for at in packed.parts.values())
    if rows < 1 or columns < 1 or rows * columns > 32 * stored:
        raise ValueError(f"{rows:,} × {columns:,} numbers from {stored:,}")


def _spread(groups: Tensor, shape: Sequence[int], dim: int = 1) -> Tensor:
    """What the groups of a weight have, along one of its axes, once for each of their numbers."""
    others = [(*sides[:dim], *sides[dim + 1 :]) for sides in (groups.shape, shape)]
    if others[0] != others[1] or shape[dim] % groups.shape[dim]:
        raise ValueError(f"groups of {tuple(groups.shape)} in {tuple(shape)}")
    return groups.float().repeat_interleave(shape[dim] // groups.shape[dim], dim)


def _by_groups(module: _Module) -> _Packed | str | None:
    """GPTQ and AWQ: (q − zero) · scale, groups of inputs share zero and scale."""
    stored, shapes, said = module.stored, module.shapes, module.said
    if "qweight" not in stored:
        return None
    if not {"qzeros", "scales"} <= set(stored) or said.get("checkpoint_format") == "marlin":
        return "GPTQ (another layout)"
    rows = shapes["scales"][1]
    bits = 32 * shapes["qzeros"][1] // rows
    parts = module.parts("qweight", "qzeros", "scales", "g_idx")
    if shapes["qweight"][1] == rows:  # packed along the inputs
        shift = 0 if said.get("checkpoint_format") == "gptq_v2" else 1
        shape = (rows, 32 * shapes["qweight"][0] // bits)
        if shapes.get("g_idx", shape[1:]) != shape[1:]:
            raise ValueError(f"groups of {shapes['g_idx']} inputs")

        def gptq(part: Parts) -> Tensor:
            zero = unpack_bits(part["qzeros"], bits) + shift
            group = part.get("g_idx", torch.arange(shape[1]) // (shape[1] // len(zero))).long()
            scale = part["scales"].float().mT
            return (unpack_bits(part["qweight"].mT, bits) - zero.mT[:, group]) * scale[:, group]

        return _Packed(f"{bits}-bit GPTQ", shape, parts, gptq)
    if bits != 4 or 8 * shapes["qweight"][1] != rows:
        return "AWQ (another layout)"

    def awq(part: Parts) -> Tensor:
        order = torch.arange(rows).view(-1, 8)[:, list(_AWQ_ORDER)].flatten()
        weight, zero = (unpack_bits(part[side], 4)[:, order] for side in ("qweight", "qzeros"))
        zero, scale = (_spread(one, weight.shape, 0) for one in (zero, part["scales"]))
        return ((weight - zero) * scale).mT.contiguous()

    return _Packed("4-bit AWQ", (rows, shapes["qweight"][0]), parts, awq)


def _mlx(module: _Module) -> _Packed | str | None:
    """MLX: scale · q + bias for every group of a row."""
    shapes = module.shapes
    if not {"weight", "scales"} <= set(shapes):
        return None
    own = module.said.get(module.name)
    own = {**module.said, **(own if isinstance(own, Mapping) else {})}
    if "biases" not in shapes or own.get("mode", "affine") != "affine":
        return f"MLX ({own.get('mode', 'without biases')})"
    size = int(own.get("group_size", 64))
    rows, columns = shapes["scales"][0], shapes["scales"][1] * size
    bits = 32 * shapes["weight"][1] // columns

    def made(part: Parts) -> Tensor:
        scale, bias = (_spread(part[side], (rows, columns)) for side in ("scales", "biases"))
        return unpack_bits(part["weight"], bits) * scale + bias

    parts = module.parts("weight", "scales", "biases")
    return _Packed(f"{bits}-bit MLX", (rows, columns), parts, made)


def _compressed(module: _Module) -> _Packed | str | None:
    """compressed-tensors: integers in 32-bit words, or pairs of 4-bit floats (NVFP4)."""
    stored = module.stored
    if "weight_packed" not in stored:
        return None
    rows, columns = module.shapes["weight_packed"]
    names = ("weight_packed", "weight_scale", "weight_global_scale", "weight_zero_point",
             "weight_shape", "weight_g_idx")  # fmt: skip
    parts = module.parts(*names)
    if "weight_global_scale" in stored:

        def nvfp4(part: Parts) -> Tensor:
            low, high = part["weight_packed"] & 15, part["weight_packed"] >> 4
            values = torch.tensor(_FP4)[torch.stack((low, high), -1).flatten(1).long()]
            scale = part["weight_scale"].float() / part["weight_global_scale"].float()
            return values * _spread(scale, values.shape)

        return _Packed("NVFP4 (compressed-tensors)", (rows, 2 * columns), parts, nvfp4)
    groups = module.said.get("config_groups") or {}
    bits = next((int(one["weights"]["num_bits"]) for one in groups.values()), 0)
    if bits not in (4, 8) or "weight_g_idx" in stored or "weight_scale" not in stored:
        return f"compressed-tensors ({bits or 'an unknown number of'} bits)"
    shape = (rows, 32 * columns // bits)

    def integers(part: Parts) -> Tensor:
        middle = 1 << (bits - 1)
        weight, scale = unpack_bits(part["weight_packed"], bits), part["weight_scale"].float()
        zero = torch.full_like(scale, middle)
        if "weight_zero_point" in part:
            zero = unpack_bits(part["weight_zero_point"].mT, bits).mT[:rows]
        return (weight - _spread(zero, shape)) * _spread(scale, shape)

    return _Packed(f"{bits}-bit compressed-tensors", shape, parts, integers)


def _bitsandbytes(module: _Module) -> _Packed | str | None:
    """bitsandbytes: rows of 8-bit integers, or blocks of 4-bit codes whose scales may be coded."""
    stored = module.stored
    if "SCB" in stored and "weight" in stored:
        return _Packed(
            "8-bit bitsandbytes",
            module.shapes["weight"],
            module.parts("weight", "SCB", "weight_format"),
            lambda part: (
                part["weight"].float() * _spread(part["SCB"][:, None], part["weight"].shape) / 127
            ),
        )
    states = [part for part in stored if part.startswith("weight.quant_state.bitsandbytes__")]
    if not states:
        return None
    size = math.prod(module.shapes[states[0]])
    if size > _LARGEST_STATE:
        raise ValueError(f"a quant_state of {size:,} bytes")
    raw = module.tensors.read([stored[states[0]]])[stored[states[0]]]
    state = json_object(raw.numpy().tobytes(), stored[states[0]])
    rows, columns = map(int, state["shape"])

    def blocks(each: Tensor, size: Any, count: int) -> Tensor:
        if len(each) != -(-count // int(size)):
            raise ValueError(f"{len(each)} blocks of {size} in {count}")
        return each.float().repeat_interleave(min(int(size), count))[:count]

    def made(part: Parts) -> Tensor:
        scale = part["weight.absmax"]
        if "weight.nested_absmax" in part:
            coded = part["weight.nested_quant_map"][scale.long()]
            outer = blocks(part["weight.nested_absmax"], state["nested_blocksize"], len(coded))
            scale = coded * outer + state["nested_offset"]
        codes = part["weight"].flatten()
        values = part["weight.quant_map"][
            torch.stack((codes >> 4, codes & 15), -1).long().flatten()
        ]
        scale = blocks(scale, state["blocksize"], len(values))
        return (values * scale)[: rows * columns].view(rows, columns)

    return _Packed(
        f"4-bit bitsandbytes ({str(state['quant_type'])[:8]})",
        (rows, columns),
        {part: at for part, at in stored.items() if part.startswith("weight")},
        made,
    )


def unpack_bits(words: Tensor, bits: int) -> Float[Tensor, "rows values"]:
    """Numbers of so many bits, lowest first, that run through the 32-bit words of a row.

    >>> unpack_bits(torch.tensor([[0x76543210]], dtype=torch.int32), 4)
    tensor([[0., 1., 2., 3., 4., 5., 6., 7.]])
    """
    if words.dtype not in (torch.int32, torch.uint32) or not 1 <= bits <= 16:
        raise ValueError(f"{bits} bits in {words.dtype}")
    start = torch.arange(0, 32 * words.shape[1] - bits + 1, bits)
    first, shift = start // 32, start % 32
    after = (first + 1).clamp_max(words.shape[1] - 1)

    def rows() -> Iterator[Tensor]:
        for some in words.contiguous().view(torch.int32).split(_ROWS):
            wide = some.long() & 0xFFFFFFFF
            found = (wide[:, first] >> shift) | (wide[:, after] << (32 - shift))
            yield (found & ((1 << bits) - 1)).float()

    return torch.cat(list(rows()))
