"""Safetensors files, read by their header: strictly checked, one tensor at a time.

The format: eight bytes that give the length of a JSON header, the header, and the tensors' bytes
without gaps. A file that departs from it is refused, for it may come from anywhere.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from locater.checkpoints.source import ByteSource, read_bytes, refuse_pointer, truncated
from locater.errors import LocaterError

LARGEST_HEADER = 100_000_000  # bytes, as the reference implementation has it

_TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}  # stored by others; passed over, not read
_BITS |= {
    name: 8 * getattr(torch, dtype).itemsize
    for name, dtype in _TORCH_NAMES.items()
    if hasattr(torch, dtype)
}


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies among the bytes behind the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """The tensors of one safetensors file, wherever it is."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        head = read_bytes(source, 0, 8)
        if head == b"version ":  # as a git-lfs pointer begins
            refuse_pointer(read_bytes(source, 0, 64), source.name)
        if len(head) < 8:
            raise truncated(source.name, source.size, 8)
        length = int.from_bytes(head, "little")
        if length > LARGEST_HEADER:
            raise LocaterError(
                f"{source.name} claims a header of {length:,} bytes; "
                f"safetensors allows {LARGEST_HEADER:,}.",
                hint="it is not a safetensors file, or it is damaged: download it again.",
            )
        if 8 + length > source.size:
            raise truncated(source.name, source.size, 8 + length)
        self._data = 8 + length
        raw = read_bytes(source, 8, length)
        self.entries = parse_header(raw, data=source.size - self._data, name=source.name)
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: entry.shape for name, entry in self.entries.items()
        }

    @property
    def bytes_read(self) -> int:
        """How many bytes were read so far, the header's among them."""
        return self._source.bytes_read

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Read these tensors as they are stored, in the order in which they lie in the file."""
        ordered = sorted(names, key=lambda name: self.entries[name].start)
        return {name: self._tensor(name) for name in ordered}

    def _tensor(self, name: str) -> Tensor:
        entry = self.entries[name]
        dtype = getattr(torch, _TORCH_NAMES.get(entry.dtype, ""), None)
        if dtype is None:
            raise LocaterError(
                f"{name} in {self._source.name} is stored as {entry.dtype}, which is not read.",
                hint="give a checkpoint in bfloat16, float16, float32 or float8.",
            )
        raw = torch.empty(entry.stop - entry.start, dtype=torch.uint8)
        if len(raw):
            view = raw.numpy().data
            self._source.read_into(self._data + entry.start, view)
        return raw.view(dtype).reshape(entry.shape)

    def close(self) -> None:
        """Let go of the file."""
        self._source.close()


def parse_header(raw: bytes, *, data: int, name: str) -> dict[str, Entry]:
    """Check a header against the number of bytes behind it, and say where each tensor lies.

    >>> raw = b'{"bias": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
    >>> parse_header(raw, data=8, name="toy.safetensors")["bias"].shape
    (2,)
    """
    try:
        header = json.loads(raw, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        _refuse(name, f"is not JSON ({error})")
    if not isinstance(header, dict):
        _refuse(name, f"is a JSON {type(header).__name__}, not an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        _refuse(name, "has __metadata__ other than a map of strings")
    entries = {tensor: _entry(tensor, fields, name) for tensor, fields in header.items()}
    _check_cover(entries, data, name)
    return entries


def _refuse(name: str, what: str) -> NoReturn:
    raise LocaterError(
        f"the header of {name} {what}.",
        hint="the file is damaged or not safetensors: download it again.",
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{_short(twice)} appears twice")
    return found


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _entry(tensor: str, fields: object, name: str) -> Entry:
    """Check what the header says of one tensor."""
    called = _short(tensor)
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(name, f"must give {called} a dtype, a shape and data_offsets, and no more")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        _refuse(name, f"gives {called} the unknown dtype {_short(dtype)}")
    if not isinstance(shape, list) or len(shape) > 64 or not all(map(_is_count, shape)):
        _refuse(name, f"gives {called} the shape {_short(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        _refuse(name, f"gives {called} the offsets {_short(offsets)}")
    start, stop = offsets
    if start > stop:
        _refuse(name, f"gives {called} the offsets {_short(offsets)}, which end before they begin")
    if math.prod(shape) * _BITS[dtype] != 8 * (stop - start):
        _refuse(
            name,
            f"gives {called} {_short(stop - start)} bytes, which is not the size of "
            f"{_short(shape)} in {dtype}",
        )
    return Entry(dtype, tuple(shape), start, stop)


def _check_cover(entries: Mapping[str, Entry], data: int, name: str) -> None:
    """Tensors follow each other without overlap or gap, up to the last byte of the file."""
    end = 0
    last = "nothing"
    for tensor, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start < end:
            _refuse(name, f"lets {_short(tensor)} overlap {last}")
        if entry.start > end:
            _refuse(
                name, f"leaves {_short(entry.start - end)} bytes unused before {_short(tensor)}"
            )
        end, last = entry.stop, _short(tensor)
    if end > data:
        raise truncated(name, data, end)
    if end < data:
        _refuse(name, f"leaves the last {data - end:,} bytes of the file unused")
