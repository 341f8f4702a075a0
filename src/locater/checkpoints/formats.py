"""Safetensors, the files of PyTorch and GGUF (llama.cpp), read without running anything.

Headers are checked strictly, for files may come from anywhere, and tensors are read one at a time.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import struct
import warnings
import zipfile
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy
import torch
from torch import Tensor

from locater.checkpoints.source import (
    ByteSource,
    Place,
    StoredTensors,
    document,
    read_bytes,
    refuse_pointer,
    shard_name,
    status,
    truncated,
)
from locater.errors import LocaterError, needing

LARGEST_HEADER = 100_000_000  # bytes, as the reference implementation has it

_TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16",
    "F32": "float32", "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}  # stored by others; passed over, not read
_BITS |= {
    name: 8 * getattr(torch, dtype).itemsize
    for name, dtype in _TORCH_NAMES.items()
    if hasattr(torch, dtype)
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in its file, and how it is stored."""

    kind: str | int
    """A dtype of safetensors, or a quantization of GGUF."""
    shape: tuple[int, ...]
    start: int
    stop: int


class TensorFile(StoredTensors):
    """Tensors that lie in one file, wherever that is."""

    def __init__(self, source: ByteSource, entries: Mapping[str, StoredTensor]) -> None:
        self._source, self._entries, self._parts = source, entries, (source,)
        self.shapes = {name: entry.shape for name, entry in entries.items()}

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Read these tensors, in the order in which they lie in the file."""
        ordered = sorted(names, key=lambda name: self._entries[name].start)
        return {name: self._tensor(name, self._entries[name]) for name in ordered}

    def _bytes(self, entry: StoredTensor, start: int = 0) -> Tensor:
        raw = torch.empty(entry.stop - entry.start, dtype=torch.uint8)
        if len(raw):
            self._source.read_into(start + entry.start, raw.numpy().data)
        return raw

    @abstractmethod
    def _tensor(self, name: str, entry: StoredTensor) -> Tensor: ...


class SafetensorsFile(TensorFile):
    """The tensors of one safetensors file, as they are stored."""

    def __init__(self, source: ByteSource) -> None:
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
        super().__init__(source, parse_header(raw, data=source.size - self._data, name=source.name))

    def _tensor(self, name: str, entry: StoredTensor) -> Tensor:
        dtype = getattr(torch, _TORCH_NAMES.get(str(entry.kind), ""), None)
        if dtype is None:
            raise LocaterError(
                f"{name} in {self._source.name} is stored as {entry.kind}, which is not read.",
                hint="give a checkpoint in bfloat16, float16, float32 or float8.",
            )
        return self._bytes(entry, self._data).view(dtype).reshape(entry.shape)


def parse_header(raw: bytes, *, data: int, name: str) -> dict[str, StoredTensor]:
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


def _entry(tensor: str, fields: object, name: str) -> StoredTensor:
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
    return StoredTensor(dtype, tuple(shape), start, stop)


def _check_cover(entries: Mapping[str, StoredTensor], data: int, name: str) -> None:
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


ZIP = b"PK\x03\x04"
PICKLES = tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))
_STATES = ("state_dict", "model_state_dict", "model", "module", "net", "params", "weights")
_SAID = ("model_args", "config", "hyper_parameters", "args")
_ASKED = re.compile(r"WeightsUnpickler error:\s*([^\n]+?)\.?(?: Please use|\n|$)")  # torch's reason
_WHOLE = "a pickle of the kind that PyTorch wrote before 1.6, which can only be read whole"


class PytorchFile(StoredTensors):
    """The state dict in a `.bin`, `.pt` or `.pth` file, mapped while it is read and then let go."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._state: Mapping[str, Tensor] | None = None
        if path.suffix == ".safetensors":
            raise LocaterError(
                f"{path} is named .safetensors, but it is a pickle of PyTorch.",
                hint="whoever named it may want it to be taken for something safer; if you trust "
                "where it comes from, rename it to .bin.",
            )
        with path.open("rb") as file:
            self._mapped = file.read(4) == ZIP
        if self._mapped:
            check_stored(path, str(path))
        state, self.config = state_of(self._load(map_location="meta"), str(path))
        self.caveats = () if self._mapped else (f"{path.name} is {_WHOLE}",)
        self._sizes = {
            name: tensor.numel() * tensor.element_size() for name, tensor in state.items()
        }
        room = status(path).st_size
        for name, size in self._sizes.items():  # strides of zero make much out of little
            if size > room:
                raise LocaterError(
                    f"{path} claims {size:,} bytes for {name!r:.60}, and has {room:,} in all.",
                    hint="it is damaged or made to fill memory: do not trust it.",
                )
        self.shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}

    def _load(self, **options: Any) -> Any:
        """Load without running code, or say what to do instead."""
        try:
            with warnings.catch_warnings():  # of protocols that it may not know: then it raises
                warnings.filterwarnings("ignore", "Detected pickle protocol")
                return torch.load(self._path, weights_only=True, **options)  # noqa: TID251
        except pickle.UnpicklingError as error:
            asked = _ASKED.search(str(error))
            raise self._refused(asked[1] if asked else "it is not a state dict") from error
        except RuntimeError as error:
            if "TorchScript" in str(error):
                raise self._refused("it is a TorchScript program") from error
            raise _damaged(str(self._path), error) from error
        except (
            OSError, ValueError, EOFError, LookupError, TypeError, AttributeError, ArithmeticError,
            MemoryError, AssertionError, RecursionError, zipfile.BadZipFile,
        ) as error:  # fmt: skip
            raise _damaged(str(self._path), error) from error

    def _refused(self, why: str) -> LocaterError:
        return LocaterError(
            f"{self._path} is refused, for reading it may run code that it holds: {why[:300]}.",
            hint="load it where you trust it, convert it with safetensors.torch.save_file("
            "model.state_dict(), 'model.safetensors'), and give that.",
        )

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Copy these tensors out of the file."""
        state = self._state
        if state is None:
            options = {"mmap": True} if self._mapped else {}
            state, _ = state_of(self._load(map_location="cpu", **options), str(self._path))
            if not self._mapped:
                self._state = state
        found = {}
        for name in names:
            found[name] = state[name].detach().clone(memory_format=torch.contiguous_format)
            self._own_bytes += self._sizes[name]
        return found

    def close(self) -> None:
        """Let go of what was read."""
        self._state = None


def _damaged(name: str, error: Exception) -> LocaterError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return LocaterError(
        f"{name} is damaged or not a PyTorch file: {reason[:200]}",
        hint="download or copy it again.",
    )


def check_stored(file: Path | io.BytesIO, name: str) -> None:
    """Refuse a zip whose parts are compressed: mapped, they would be read as weights."""
    try:
        with zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        raise _damaged(name, error) from error
    packed = [part.filename for part in parts if part.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise LocaterError(
            f"{name} is compressed ({packed[0]!r:.60}); PyTorch stores its parts as they are.",
            hint="write it again where you trust it: torch.save(torch.load(path, "
            "weights_only=True), path).",
        )


def state_of(found: Any, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a loaded file, and what it says of the model, where training scripts put them.

    >>> state_of({"model": {"weight": torch.zeros(2)}, "model_args": {"n_head": 4}}, "ckpt.pt")
    ({'weight': tensor([0., 0.])}, {'n_head': 4})
    """
    if not isinstance(found, Mapping):
        raise LocaterError(
            f"{name} holds a {type(found).__name__}, not a state dict.",
            hint="save model.state_dict() and give that.",
        )
    places = [found, *(found[key] for key in _STATES if isinstance(found.get(key), Mapping))]
    states = [{str(key): value for key, value in place.items() if isinstance(value, Tensor)}
              for place in places]  # fmt: skip
    state = next(filter(None, states), None)
    if state is None:
        seen = ", ".join(map(str, list(found)[:8]))
        raise LocaterError(
            f"{name} holds no tensors where a state dict has them; it holds {seen or 'nothing'}.",
            hint="save model.state_dict() and give that.",
        )
    configs = [found[key] for key in _SAID if isinstance(found.get(key), Mapping)]
    return state, {str(key): value for config in configs[:1] for key, value in config.items()}


class MetaShards(StoredTensors):
    """The parts of a Llama as Meta publishes it: every part has some heads of every layer."""

    def __init__(self, parts: Sequence[PytorchFile]) -> None:
        self._files = self._parts = parts
        self.config = parts[0].config
        self.caveats = (f"{len(parts)} parts of one model are joined, head after head",)
        first = parts[0].shapes
        joined = {name: shape for name, shape in first.items() if _JOINED.search(name)}
        if any(part.shapes.get(name) != shape for part in parts for name, shape in joined.items()):
            raise LocaterError(
                "the consolidated.*.pth here are not parts of one model: their shapes differ.",
                hint="keep the parts of each model in a folder of their own.",
            )
        self.shapes = {
            name: (len(parts) * shape[0], *shape[1:]) if name in joined else shape
            for name, shape in first.items()
            if name in joined or len(shape) == 1
        }

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Read these tensors, joined where each part has some of their rows."""
        whole = self._files[0].read([name for name in names if not _JOINED.search(name)])
        for name in names:
            if name not in whole:
                whole[name] = torch.cat([part.read([name])[name] for part in self._files])
        return whole


_JOINED = re.compile(r"\.w[qk]\.(?:weight|bias)$")
_DTYPES = {str(kind).removeprefix("torch.") for kind in vars(torch).values()
           if isinstance(kind, torch.dtype)}  # fmt: skip


class _Record:
    """Stands for whatever class of `torch.distributed` a pickle names: fields and nothing else."""

    def __init__(self, *values: object) -> None:
        self.values = values

    def __setstate__(self, state: object) -> None:
        fields = state[1] if isinstance(state, tuple) and len(state) == 2 else state
        if isinstance(fields, dict):
            self.__dict__.update((str(name), value) for name, value in fields.items())
        else:
            self.values = state  # type: ignore[assignment]


class _Records(pickle._Unpickler):
    """Reads the metadata of a distributed checkpoint; names of anything else are refused.

    torch's own reader unpickles it freely, which may run code.  The unpickler in C makes room for
    as many memos as a few bytes claim, and both for as long a bytearray: no metadata has one.
    """

    dispatch: ClassVar = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if code != pickle.BYTEARRAY8[0]
    }

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a class that such metadata has."""
        if module.startswith("torch.distributed."):
            return _Record
        if module == "torch" and name in _DTYPES:
            return getattr(torch, name)
        plain: dict[tuple[str, str], Any] = {
            ("torch", "Size"): tuple,
            ("torch.serialization", "_get_layout"): _Record,
            ("collections", "OrderedDict"): dict,
            ("pathlib", "PosixPath"): _Record,
            ("pathlib", "PurePosixPath"): _Record,
            ("pathlib._local", "PosixPath"): _Record,
        }
        if (module, name) not in plain:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no record")
        return plain[module, name]


@dataclass(frozen=True)
class _Chunk:
    """A box of a tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class DistributedTensors(StoredTensors):
    """What `torch.distributed.checkpoint` wrote: chunks of tensors in the files of many ranks."""

    def __init__(self, place: Place, metadata: str) -> None:
        self._place = place
        where = f"{place.name}/{metadata}"
        try:
            found = _Records(io.BytesIO(document(place, metadata))).load()
            self._dtypes, self._chunks, self.shapes = self._tensors(found, where)
        except pickle.UnpicklingError as error:
            raise LocaterError(
                f"{where} is refused, for reading it may run code that it holds: {error!s:.200}.",
                hint="where you trust it, run: python -m torch.distributed.checkpoint.format_utils "
                "dcp_to_torch FOLDER model.pt, and give that.",
            ) from error
        except (
            AttributeError, TypeError, ValueError, LookupError, EOFError, struct.error,
        ) as error:  # fmt: skip
            raise _damaged(where, error) from error

    def _tensors(self, found: Any, where: str) -> tuple[Any, Any, dict[str, tuple[int, ...]]]:
        """Types, chunks and shapes of the tensors that the metadata speaks of."""
        about = {
            str(name): entry
            for name, entry in found.state_dict_metadata.items()
            if hasattr(entry, "chunks")
        }
        shapes = {name: tuple(map(int, entry.size)) for name, entry in about.items()}
        sizes = {
            (name, tuple(chunk.offsets)): tuple(map(int, chunk.sizes))
            for name, entry in about.items()
            for chunk in entry.chunks
        }
        chunks: dict[str, list[_Chunk]] = {name: [] for name in about}
        for index, place in found.storage_data.items():
            if index.fqn not in about:
                continue
            offsets = tuple(map(int, index.offset or (0,) * len(shapes[index.fqn])))
            box = sizes[index.fqn, offsets]
            inside = zip(offsets, box, shapes[index.fqn], strict=True)
            if not all(low >= 0 and low + size <= side for low, size, side in inside):
                raise ValueError(f"a chunk of {index.fqn!r:.60} lies outside of it")
            file, start, length = place.relative_path, int(place.offset), int(place.length)
            chunk = _Chunk(offsets, box, shard_name(file, where), start, length)
            chunks[index.fqn].append(chunk)
        for name, boxes in chunks.items():
            if sum(math.prod(chunk.sizes) for chunk in boxes) != math.prod(shapes[name]):
                raise ValueError(f"chunks of {name!r:.60} are missing")
        dtypes = {name: _dtype(entry.properties) for name, entry in about.items()}
        return dtypes, chunks, shapes

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Put these tensors together."""
        found = {}
        for name in names:
            need = math.prod(self.shapes[name]) * self._dtypes[name].itemsize
            held = sum(chunk.length for chunk in self._chunks[name])
            if need > held:
                raise LocaterError(
                    f"{self._place.name} claims {need:,} bytes for {name!r:.60}, and has {held:,}.",
                    hint="it is damaged or made to fill memory: do not trust it.",
                )
            found[name] = torch.empty(self.shapes[name], dtype=self._dtypes[name])
            is_missing = torch.ones(self.shapes[name], dtype=torch.bool)
            for chunk in self._chunks[name]:
                box = zip(chunk.offsets, chunk.sizes, strict=True)
                inside = tuple(slice(low, low + size) for low, size in box)
                found[name][inside] = self._chunk(chunk, name)
                is_missing[inside] = False
            if bool(is_missing.any()):
                raise _damaged(self._place.name, ValueError(f"chunks of {name!r:.60} overlap"))
        return found

    def _chunk(self, chunk: _Chunk, name: str) -> Tensor:
        source = self._place.open(chunk.file)
        try:
            raw = io.BytesIO(read_bytes(source, chunk.start, chunk.length))
        finally:
            self._own_bytes += source.bytes_read
            source.close()
        where = f"{self._place.name}/{chunk.file}"
        check_stored(raw, where)
        raw.seek(0)
        try:
            values = torch.load(raw, map_location="cpu", weights_only=True)  # noqa: TID251
        except (RuntimeError, pickle.UnpicklingError, ValueError, EOFError) as error:
            raise _damaged(where, error) from error
        if not isinstance(values, Tensor) or tuple(values.shape) != chunk.sizes:
            raise _damaged(where, ValueError(f"it holds no chunk {chunk.sizes} of {name!r:.60}"))
        return values


def _dtype(properties: Any) -> torch.dtype:
    """What a tensor's numbers are, from its record."""
    said = getattr(properties, "dtype", None) or properties.values[0]
    if not isinstance(said, torch.dtype):
        raise TypeError(f"{said!r:.60} is no type of numbers")
    return said


_ORBAX = (
    "an Orbax checkpoint (JAX)", "restore it in JAX and write it with safetensors.flax.save_file"
)  # fmt: skip
_FOREIGN = {
    ".onnx": ("an ONNX graph", "give the PyTorch model that it was exported from"),
    ".keras": ("a Keras model", "save it from PyTorch, or its weights as safetensors"),
    ".h5": ("an HDF5 file (Keras, TensorFlow)", "give the model's safetensors version"),
    ".npz": (
        "a NumPy archive",
        "safetensors.numpy.save_file(dict(numpy.load(path)), 'model.safetensors') writes one",
    ),
    ".msgpack": ("a Flax file", "save it with save_pretrained of the PyTorch model"),
    ".tflite": ("a TensorFlow Lite model", "give the model that it was converted from"),
    ".nemo": ("a NeMo archive", "unpack it (tar xf) and give the weights in it"),
    ".mlmodel": ("a Core ML model", "give the model that it was converted from"),
    ".engine": ("a TensorRT engine", "give the model that it was built from"),
    "manifest.ocdbt": _ORBAX,
    "_CHECKPOINT_METADATA": _ORBAX,
    "saved_model.pb": ("a TensorFlow model", "give the model's safetensors version"),
    ".ckpt.index": ("a TensorFlow checkpoint", "give the model's safetensors version"),
}


def refuse_foreign(name: str, where: str) -> None:
    """Raise where a name is that of a format which is not read, with the way out."""
    for suffix, (what, way) in _FOREIGN.items():
        if name.endswith(suffix):
            raise LocaterError(f"{where} is {what}, which is not read.", hint=f"{way}.")


MAGIC = b"GGUF"
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_BLOCK = 1 << 18
_LARGEST_HEADER = 1 << 28
_KEPT = 4096  # entries of an array; vocabularies are longer and are passed over
_FREQUENCIES = "rope_freqs.weight"
_MODEL_TYPES = {
    "command-r": "cohere", "gemma3": "gemma3_text", "gpt-oss": "gpt_oss", "gptneox": "gpt_neox",
    "modern-bert": "modernbert", "phi2": "phi", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe",
    "starcoder": "gpt_bigcode", "t5encoder": "t5",
}  # fmt: skip
"""What transformers calls an architecture, where llama.cpp has another name."""
GGUF_TESTED = (
    "bloom", "gemma2", "gemma3_text", "gpt_oss", "llama", "qwen2", "qwen3", "smollm3", "stablelm",
    "starcoder2", "t5",
)  # fmt: skip
"""Model types whose files were held against the models that they were converted from."""
_CONSECUTIVE = (
    "arcee", "arctic", "baichuan", "bailingmoe", "chameleon", "chatglm", "cohere2", "command-r",
    "deci", "deepseek", "deepseek2", "ernie4_5", "ernie4_5-moe", "glm4", "granite",
    "granitehybrid", "granitemoe", "internlm2", "llada", "llama", "llama-embed", "llama4",
    "maincoder", "minicpm", "mistral3", "neo-bert", "olmo", "plm", "smollm3", "xverse",
)  # fmt: skip
"""Architectures whose rotary pairs llama.cpp keeps side by side; others have them in halves."""
_UNTURNED = (
    "bert", "bloom", "clip", "gpt2", "gptj", "jais", "jamba", "jina-bert-v2", "mpt", "nemotron_h",
    "nemotron_h_moe", "refact", "starcoder", "t5", "t5encoder",
)  # fmt: skip
"""Architectures that llama.cpp does not turn at all, whatever their metadata has."""
_ALIBI = ("bloom", "jais", "jina-bert-v2", "mpt", "refact")
_WINDOWED = {"cohere2": 4, "exaone4": 4, "gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2,
             "llama4": 4, "olmo2": 4}  # fmt: skip
"""Of so many layers one sees beyond the window, where the metadata does not say which."""
_RENAMED = tuple(
    (re.compile(ours), theirs)
    for ours, theirs in (
        (r"^(blk\.\d+)\.attn_(q|k)_norm\.", r"\1.\2_norm."),
        (r"^(blk\.\d+)\.attn_sinks(?:\.weight)?$", r"\1.sinks"),
        (r"^enc\.blk\.(\d+)\.attn_(q|k)\.", r"encoder.block.\1.layer.0.SelfAttention.\2."),
        (r"^dec\.blk\.(\d+)\.attn_(q|k)\.", r"decoder.block.\1.layer.0.SelfAttention.\2."),
        (r"^dec\.blk\.(\d+)\.cross_attn_(q|k)\.",
         r"decoder.block.\1.layer.1.EncDecAttention.\2."),
        (r"^(enc|dec)\.blk\.(\d+)\.attn_rel_b\.",
         r"\1oder.block.\2.layer.0.SelfAttention.relative_attention_bias."),
    )
)  # fmt: skip
"""Names of llama.cpp that a tensor has elsewhere: norms of queries and keys, sinks, T5."""
_CONFIG = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.relative_buckets_count": "relative_attention_num_buckets",
    "attention.scale": "scaling",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "attention.clamp_kqv": "clip_qkv",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "rope.dimension_count": "rotary_dim",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
}


class GgufFile(TensorFile):
    """The tensors of one GGUF file, dequantized to float32."""

    def __init__(self, source: ByteSource) -> None:
        with needing("gguf", extra="hub"):
            import gguf
            import gguf.quants
        self._gguf: Any = gguf
        metadata, entries = _Header(source).parse(self._gguf)
        super().__init__(source, {_renamed(name): entry for name, entry in entries.items()})
        self.config = gguf_config(metadata)
        if _FREQUENCIES in entries:  # llama3's stretching, written out
            if (count := math.prod(entries[_FREQUENCIES].shape)) > _KEPT:
                raise LocaterError(
                    f"{source.name} has {count:,} numbers in {_FREQUENCIES}, one for each "
                    f"frequency of a head; {_KEPT:,} are the most.",
                    hint="it is damaged or made to fill memory: do not trust it.",
                )
            factors = self.read([_FREQUENCIES])[_FREQUENCIES].tolist()
            self.config["rope_scaling"] = {
                "rope_type": "longrope",
                "short_factor": factors,
                "attention_factor": 1.0,
                "original_max_position_embeddings": self.config.get("max_position_embeddings", 2),
            }

    def _tensor(self, name: str, entry: StoredTensor) -> Tensor:
        raw = self._bytes(entry).numpy()
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


def _renamed(name: str) -> str:
    for pattern, there in _RENAMED:
        if pattern.search(name):
            return pattern.sub(there, name)
    return name


def gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What the metadata says, in the words of `config.json`.

    >>> said = {"general.architecture": "qwen2", "qwen2.attention.head_count": 14}
    >>> gguf_config(said)["num_attention_heads"]
    14
    """
    family = str(metadata.get("general.architecture", ""))
    config: dict[str, Any] = {"model_type": _MODEL_TYPES.get(family, family)}
    for ours, theirs in _CONFIG.items():
        value = metadata.get(f"{family}.{ours}")
        if isinstance(value, list) and len(set(map(str, value))) == 1:  # one for each layer
            value = value[0]
        if value is not None and ((value != [] and "window" not in ours) or isinstance(value, int)):
            config[theirs] = value
    layers: Any = config.get("num_hidden_layers")
    has_alibi = family in _ALIBI or (family == "baichuan" and layers == 40)
    if has_alibi:
        config["alibi"] = True
    if has_alibi or family in _UNTURNED:
        config = {key: value for key, value in config.items() if not key.startswith("ro")}
    else:
        config |= _gguf_rotary(metadata, family, config)
    width, heads = (config.get(key, 0) for key in ("hidden_size", "num_attention_heads"))
    if family in ("gemma3n", "gemma4"):
        config.setdefault("scaling", 1.0)
    elif (family, layers) in (("gemma2", 46), ("gemma3", 62)) and width and _is_count(heads):
        config.setdefault("scaling", math.sqrt(heads / width))  # the 27B ones
    return config


def _gguf_rotary(
    metadata: Mapping[str, Any], family: str, config: Mapping[str, Any]
) -> dict[str, Any]:
    """How an architecture turns its queries and keys, and in which of its layers."""
    found: dict[str, Any] = {"rope_theta": config.get("rope_theta", 10_000.0)}
    found["rope_interleave"] = family in _CONSECUTIVE
    scaling = metadata.get(f"{family}.rope.scaling.type")
    if scaling in ("linear", "yarn"):
        found["rope_scaling"] = {
            "rope_type": scaling,
            "factor": metadata.get(f"{family}.rope.scaling.factor", 1.0),
            "original_max_position_embeddings": metadata.get(
                f"{family}.rope.scaling.original_context_length"
            ),
        }
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int) or not 0 < layers <= _KEPT:
        return found
    if family in ("gemma3", "gemma3n"):
        found["rope_local_base_freq"] = config.get("rope_local_base_freq", 10_000.0)
    window = config.get("sliding_window")
    local = _gguf_windows(metadata, family, layers) if window else [False] * layers
    if any(local):
        kinds = ("full_attention", "sliding_attention")
        found["layer_types"] = [kinds[is_local] for is_local in local]
    if family in ("llama4", "smollm3"):
        found["no_rope_layers"] = [int((layer + 1) % 4 != 0) for layer in range(layers)]
    if family == "cohere2" or (family == "exaone4" and any(local)):
        found["no_rope_layers"] = [int(is_local) for is_local in local]
    return found


def _gguf_windows(metadata: Mapping[str, Any], family: str, layers: int) -> list[bool]:
    """Which layers see a window of keys alone."""
    said = metadata.get(f"{family}.attention.sliding_window_pattern", _WINDOWED.get(family))
    if isinstance(said, list) and len(said) == layers:
        return [bool(is_local) for is_local in said]
    if isinstance(said, int) and said > 1:
        return [(layer + 1) % said != 0 for layer in range(layers)]
    return [True] * layers


class _Header:
    """Reads a header from its beginning, in blocks."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._data = b""
        self._place = 0

    def parse(self, gguf: Any) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
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
        self, gguf: Any, name: str, shape: tuple[int, ...], kind: int, start: int
    ) -> StoredTensor:
        try:
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        except (KeyError, ValueError) as error:
            raise self._bad(f"gives {name!r:.60} the unknown type {kind}") from error
        if not shape or shape[-1] % block:
            raise self._bad(f"gives {name!r:.60} a shape that its type cannot have")
        stop = start + math.prod(shape) // block * size
        if stop > self._source.size:
            raise truncated(self._source.name, self._source.size, stop)
        return StoredTensor(kind, shape, start, stop)

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
