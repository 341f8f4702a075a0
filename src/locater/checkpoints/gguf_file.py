"""GGUF files (llama.cpp): metadata as a config, tensors dequantized one at a time.

The header is read here, so that a file on a web server needs no more than its header and the
tensors that are asked for; the `gguf` package knows the quantizations.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor

from locater.checkpoints.source import ByteSource, read_bytes, truncated
from locater.errors import LocaterError, MissingExtraError

MAGIC = b"GGUF"
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_BLOCK = 1 << 18
_LARGEST_HEADER = 1 << 28
_KEPT = 4096  # entries of an array; vocabularies are longer and are passed over
_FREQUENCIES = "rope_freqs.weight"
_MODEL_TYPES = {"gptneox": "gpt_neox", "command-r": "cohere", "phi2": "phi"}
_CONSECUTIVE = (
    "arcee", "baichuan", "bailingmoe", "chameleon", "cohere2", "command-r", "deci", "deepseek",
    "ernie4_5", "ernie4_5-moe", "granite", "granitehybrid", "granitemoe", "internlm2", "llama",
    "llama-embed", "llama4", "minicpm", "mistral3", "olmo", "orion", "smollm3", "xverse",
)  # fmt: skip
"""Architectures whose rotary pairs llama.cpp keeps side by side; all others have them in halves."""
_CONFIG = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.scale": "scaling",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "rope.dimension_count": "rotary_dim",
    "rope.freq_base": "rope_theta",
}


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies, and how it is quantized."""

    kind: int
    shape: tuple[int, ...]
    start: int
    stop: int


class GgufFile:
    """The tensors of one GGUF file, wherever it is."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._gguf = _package()
        reader = _Header(source)
        self.metadata, self.entries = reader.parse(self._gguf)
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: entry.shape for name, entry in self.entries.items()
        }
        self.config = gguf_config(self.metadata)
        if _FREQUENCIES in self.entries:  # llama3's stretching, written out
            factors = self.read([_FREQUENCIES])[_FREQUENCIES].tolist()
            self.config["rope_scaling"] = {
                "rope_type": "longrope",
                "short_factor": factors,
                "attention_factor": 1.0,
                "original_max_position_embeddings": self.config.get("max_position_embeddings", 2),
            }

    @property
    def bytes_read(self) -> int:
        """How many bytes were read so far, the header's among them."""
        return self._source.bytes_read

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Read these tensors and dequantize them to float32."""
        ordered = sorted(names, key=lambda name: self.entries[name].start)
        return {name: self._tensor(name) for name in ordered}

    def _tensor(self, name: str) -> Tensor:
        entry = self.entries[name]
        raw = torch.empty(entry.stop - entry.start, dtype=torch.uint8).numpy()
        if len(raw):
            self._source.read_into(entry.start, raw.data)
        kind = self._gguf.GGMLQuantizationType(entry.kind)
        rows = raw.reshape(math.prod(entry.shape[:-1]), -1) if len(raw) else raw
        try:
            with numpy.errstate(all="ignore"):  # a weight may be infinite
                values = self._gguf.quants.dequantize(rows, kind)
        except NotImplementedError as error:
            raise LocaterError(
                f"{name} in {self._source.name} is stored as {kind.name}, which gguf cannot read.",
                hint="update it (pip install -U gguf), or give a file in another quantization.",
            ) from error
        return torch.from_numpy(values).float().reshape(entry.shape)

    def close(self) -> None:
        """Let go of the file."""
        self._source.close()


def gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What the metadata says, in the words of `config.json`.

    >>> said = {"general.architecture": "qwen2", "qwen2.attention.head_count": 14}
    >>> gguf_config(said)
    {'model_type': 'qwen2', 'num_attention_heads': 14}
    """
    family = str(metadata.get("general.architecture", ""))
    config: dict[str, Any] = {"model_type": _MODEL_TYPES.get(family, family)}
    for ours, theirs in _CONFIG.items():
        value = metadata.get(f"{family}.{ours}")
        if isinstance(value, list) and len(set(map(str, value))) == 1:  # one for each layer
            value = value[0]
        if value is not None and not isinstance(value, list):
            config[theirs] = value
    if family in _CONSECUTIVE:
        config["rope_interleave"] = True
    scaling = metadata.get(f"{family}.rope.scaling.type")
    if scaling in ("linear", "yarn"):
        config["rope_scaling"] = {
            "rope_type": scaling,
            "factor": metadata.get(f"{family}.rope.scaling.factor", 1.0),
            "original_max_position_embeddings": metadata.get(
                f"{family}.rope.scaling.original_context_length"
            ),
        }
    return config


def _package() -> ModuleType:
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise MissingExtraError("gguf", extra="hub") from error
    return gguf


class _Header:
    """Reads a header from its beginning, in blocks."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._data = b""
        self._place = 0

    def parse(self, gguf: ModuleType) -> tuple[dict[str, Any], dict[str, Entry]]:
        """The metadata and where the tensors lie."""
        if self._take(4) != MAGIC:
            raise self._bad("does not begin with GGUF")
        version = self._number("I")
        if version not in (2, 3):
            raise self._bad(f"has version {version}, and versions 2 and 3 are read")
        tensors, pairs = self._number("Q"), self._number("Q")
        metadata = {}
        for _ in range(pairs):
            key = self._string()
            metadata[key] = self._value(self._number("I"))
        listed = [self._listed() for _ in range(tensors)]
        if len({name for name, *_ in listed}) < len(listed):
            raise self._bad("names a tensor twice")
        step = metadata.get("general.alignment", 32)
        if not isinstance(step, int) or step < 1:
            raise self._bad(f"has the alignment {step!r}")
        data = -(-self._place // step) * step
        entries = {
            name: self._entry(gguf, name, shape, kind, data + offset)
            for name, shape, kind, offset in listed
        }
        return metadata, entries

    def _listed(self) -> tuple[str, tuple[int, ...], int, int]:
        name, rank = self._string(), self._number("I")
        if rank > 8:
            raise self._bad(f"gives {name!r:.60} {rank} dimensions")
        sides = [self._number("Q") for _ in range(rank)]
        return name, tuple(reversed(sides)), self._number("I"), self._number("Q")

    def _entry(
        self, gguf: ModuleType, name: str, shape: tuple[int, ...], kind: int, start: int
    ) -> Entry:
        try:
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        except (KeyError, ValueError) as error:
            raise self._bad(f"gives {name!r:.60} the unknown type {kind}") from error
        if not shape or shape[-1] % block:
            raise self._bad(f"gives {name!r:.60} a shape that its type cannot have")
        stop = start + math.prod(shape) // block * size
        if stop > self._source.size:
            raise truncated(self._source.name, self._source.size, stop)
        return Entry(kind, shape, start, stop)

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth > 4:
            raise self._bad(f"has metadata of the unknown kind {kind}")
        inner, count = self._number("I"), self._number("Q")
        if inner in _SCALARS and count > _KEPT:
            self._take(count * struct.calcsize("<" + _SCALARS[inner]))
            return []
        if inner == _STRING and count > _KEPT:
            self._pass_strings(count)
            return []
        values = [self._value(inner, depth + 1) for _ in range(count)]
        return values if count <= _KEPT else []

    def _pass_strings(self, count: int) -> None:
        """Step over a vocabulary, quickly."""
        for _ in range(count):
            stop = self._place + 8
            if stop > len(self._data):
                self._need(stop)
            stop += int.from_bytes(self._data[self._place : stop], "little")
            if stop > len(self._data):
                self._need(stop)
            self._place = stop

    def _number(self, form: str) -> Any:
        little = f"<{form}"
        return struct.unpack(little, self._take(struct.calcsize(little)))[0]

    def _string(self) -> str:
        return self._take(self._number("Q")).decode("utf-8", "replace")

    def _take(self, length: int) -> bytes:
        """The next bytes of the header."""
        end = self._place + length
        self._need(end)
        found = self._data[self._place : end]
        self._place = end
        return found

    def _need(self, end: int) -> None:
        """Read on, up to this byte at least."""
        if end > min(self._source.size, _LARGEST_HEADER):
            raise truncated(self._source.name, self._source.size, end)
        if end > len(self._data):
            more = max(end - len(self._data), _BLOCK)
            self._data += read_bytes(self._source, len(self._data), more)

    def _bad(self, what: str) -> LocaterError:
        return LocaterError(
            f"the header of {self._source.name} {what}.",
            hint="the file is damaged or of an older kind: download it again.",
        )
