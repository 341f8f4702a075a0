"""Damaged or hostile headers of safetensors and GGUF files: refused in words, never a crash."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, save, save_file

from locater import LocaterError
from locater.checkpoints.formats import GgufFile, SafetensorsFile
from locater.checkpoints.open import open_checkpoint
from locater.checkpoints.source import truncated

WEIGHT = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
FEWER = settings(max_examples=300, suppress_health_check=list(HealthCheck))
MANY = settings(max_examples=1000, suppress_health_check=list(HealthCheck))
VERY_MANY = settings(max_examples=20_000, suppress_health_check=list(HealthCheck))


def packed(header: object, data: int = 16) -> bytes:
    """A safetensors file with this header, be it JSON or bytes."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(data)


HEADERS: dict[str, tuple[object, int, str]] = {
    "not JSON": (b"{]", 16, "is not JSON"),
    "not UTF-8": (b'{"\xff": 1}', 16, "is not JSON"),
    "deep nesting": (b"[" * 100_000, 16, "is not JSON"),
    "a constant": (b'{"a": NaN}', 16, "NaN is no JSON number"),
    "a list": ([WEIGHT], 16, "is a JSON list, not an object"),
    "a name twice": (
        b'{"a": %b, "a": %b}' % ((json.dumps(WEIGHT).encode(),) * 2),
        16,
        "'a' appears twice",
    ),
    "a tensor that is no object": ({"a": 3}, 16, "must give 'a' a dtype, a shape and data_offsets"),
    "an odd field": ({"a": WEIGHT | {"code": "x"}}, 16, "data_offsets, and no more"),
    "odd metadata": ({"__metadata__": {"a": 1}, "a": WEIGHT}, 16, "other than a map of strings"),
    "a bad dtype": ({"a": WEIGHT | {"dtype": "F31"}}, 16, "the unknown dtype 'F31'"),
    "a dtype of another kind": ({"a": WEIGHT | {"dtype": ["F32"]}}, 16, "the unknown dtype"),
    "a negative side": ({"a": WEIGHT | {"shape": [-2, -2]}}, 16, r"the shape \[-2, -2\]"),
    "a side that is true": ({"a": WEIGHT | {"shape": [True, 4]}}, 16, r"the shape \[True, 4\]"),
    "negative offsets": (
        {"a": WEIGHT | {"data_offsets": [-16, 0]}},
        16,
        r"the offsets \[-16, 0\]",
    ),
    "offsets in reverse": ({"a": WEIGHT | {"data_offsets": [16, 0]}}, 16, "end before they begin"),
    "three offsets": ({"a": WEIGHT | {"data_offsets": [0, 8, 16]}}, 16, "the offsets"),
    "a wrong size": ({"a": WEIGHT | {"shape": [2, 3]}}, 16, r"16 bytes, which is not the size of"),
    "a shape of 10^36": ({"a": WEIGHT | {"shape": [10**18, 10**18]}}, 16, "is not the size of"),
    "overlapping tensors": (
        {"a": WEIGHT, "b": WEIGHT | {"data_offsets": [8, 24]}},
        24,
        "lets 'b' overlap 'a'",
    ),
    "a gap": ({"a": WEIGHT | {"data_offsets": [8, 24]}}, 24, "leaves 8 bytes unused before 'a'"),
    "bytes at the end": ({"a": WEIGHT}, 20, "leaves the last 4 bytes of the file unused"),
    "too few bytes": ({"a": WEIGHT}, 12, "cut short: it has 12 bytes and needs 16"),
}


@pytest.mark.parametrize("fault", HEADERS)
def test_a_header_that_is_wrong_is_refused(tmp_path: Path, fault: str) -> None:
    header, data, message = HEADERS[fault]
    path = tmp_path / "model.safetensors"
    path.write_bytes(packed(header, data))
    with pytest.raises(LocaterError, match=message) as caught:
        open_checkpoint(path)
    assert "model.safetensors" in caught.value.message
    assert "again" in str(caught.value.hint)


def test_the_same_header_without_the_fault_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(packed({"__metadata__": {"by": "me"}, "a": WEIGHT}))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.shapes == {"a": (2, 2)}


def with_length(length: int) -> bytes:
    return struct.pack("<Q", length) + bytes(64)


FILES: dict[str, tuple[str, bytes, str, str]] = {
    "an empty file": ("model.safetensors", b"", "has 0 bytes and needs 8", "again"),
    "seven bytes": ("model.safetensors", b"1234567", "has 7 bytes", "again"),
    "a header of 10^18 bytes": (
        "model.safetensors",
        with_length(10**18),
        "claims a header of 1,000,000,000,000,000,000 bytes",
        "download it again",
    ),
    "a header past the end": ("model.safetensors", with_length(1000), "is cut short", "again"),
    "a git-lfs pointer": (
        "model.safetensors",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
        "is a git-lfs pointer",
        "git lfs pull",
    ),
    "a text": ("notes.txt", b"Dear diary, this is not a checkpoint.", "not a checkpoint", "give a"),
    "a page instead of weights": ("model.bin", b"<!DOCTYPE html>...", "not a checkpoint", "give a"),
    "a zip of nothing": (
        "model.pt",
        b"PK\x03\x04" + bytes(40),
        "damaged or not a PyTorch",
        "again",
    ),
    "half a pickle": ("model.bin", b"\x80\x02\x8a\x0al\xfc", "damaged or not a PyTorch", "again"),
    "a GGUF of an old kind": ("m.gguf", b"GGUF" + struct.pack("<I", 1), "has version 1", "again"),
    "a GGUF cut short": ("m.gguf", b"GGUF" + struct.pack("<IQ", 3, 9), "is cut short", "again"),
    "a GGUF with endless tensors": (
        "m.gguf",
        b"GGUF" + struct.pack("<IQQ", 3, 10**18, 10**18) + bytes(80),
        "has metadata of|is cut short",
        "again",
    ),
}


@pytest.mark.parametrize("fault", FILES)
def test_a_file_that_is_no_checkpoint_says_so(tmp_path: Path, fault: str) -> None:
    name, data, message, hint = FILES[fault]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(LocaterError, match=message) as caught:
        open_checkpoint(tmp_path / name)
    assert hint in str(caught.value.hint)


def test_a_truncated_file_is_refused_at_every_length(tmp_path: Path) -> None:
    whole = save({"a": torch.arange(6.0), "b": torch.ones(2, 2)})
    for length in range(len(whole)):
        with pytest.raises(LocaterError, match="cut short"):
            SafetensorsFile(BytesInMemory(whole[:length], "model.safetensors"))
    assert len(SafetensorsFile(BytesInMemory(whole, "model.safetensors")).shapes) == 2


def test_a_file_that_shrinks_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4096)}, path)
    with open_checkpoint(path) as checkpoint:
        os.truncate(path, 4096)
        with pytest.raises(LocaterError, match="is cut short: it has 4,096 bytes"):
            checkpoint.read(["a"])


def test_a_tensor_that_is_not_there_is_named_with_some_that_are(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "model.safetensors")
    with (
        open_checkpoint(tmp_path) as checkpoint,
        pytest.raises(LocaterError, match=r"holds no tensor 'b'\.\nhint: it holds a"),
    ):
        checkpoint.read(["b"])


def test_four_bit_tensors_are_passed_over_and_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    entry = {"dtype": "F4", "shape": [4, 8], "data_offsets": [0, 16]}
    path.write_bytes(packed({"a": entry, "b": WEIGHT | {"data_offsets": [16, 32]}}, 32))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.read(["b"])["b"].shape == (2, 2)
        with pytest.raises(LocaterError, match=r"a in .* is stored as F4, which is not read"):
            checkpoint.read(["a"])


# fuzzing


class BytesInMemory:
    """A file that is no file."""

    def __init__(self, data: bytes, name: str) -> None:
        self.name = name
        self.size = len(data)
        self.bytes_read = 0
        self._data = data

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill the buffer with the bytes from `start` on, or raise."""
        found = self._data[start : start + len(buffer)]
        if len(found) < len(buffer):
            raise truncated(self.name, self.size, start + len(buffer))
        buffer[:] = found
        self.bytes_read += len(found)

    def close(self) -> None:
        """Nothing to let go of."""


VALID = save(
    {
        "layers.0.q.weight": torch.ones(2, 3),
        "k": torch.ones(4, dtype=torch.bfloat16),
        "n": torch.ones(0),
    },
    metadata={"format": "pt"},
)
NUMBER = struct.pack("<Q", 2**64 - 1)


def mutated(base: bytes) -> st.SearchStrategy[bytes]:
    """A valid file with some bytes changed, removed or put in."""
    spot = st.integers(0, len(base))
    piece = st.binary(max_size=4) | st.sampled_from([b"-", b"9" * 5000, b'"', b"{", b"[", NUMBER])

    def apply(edits: list[tuple[int, int, bytes]]) -> bytes:
        data = base
        for start, length, new in edits:
            data = data[:start] + new + data[start + length :]
        return data

    return st.lists(st.tuples(spot, st.integers(0, 6), piece), max_size=4).map(apply)


ODD = st.sampled_from(
    [None, True, -1, 2**70, 1.5, float("nan"), "", "F32", [], [0], [[1]], {}, {"dtype": 1}]
)
FIELDS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F4", "U8", "nonsense"]) | ODD,
        "shape": st.lists(st.integers(-1, 5), max_size=2) | ODD,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | ODD,
    },
    optional={"more": ODD},
)
NEARLY = st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), FIELDS | ODD, max_size=3)
INPUTS = st.binary(max_size=99) | mutated(VALID) | NEARLY.map(lambda header: packed(header, 24))


def survives(data: bytes) -> None:
    """Either every tensor is read, as the reference reads it, or it is an error of ours."""
    try:
        file = SafetensorsFile(BytesInMemory(data, "fuzz"))
        found = file.read(list(file.shapes))
    except LocaterError as error:
        assert error.hint
        return
    try:
        expected = load(data)
    except (SafetensorError, KeyError, ValueError):  # stricter in places, e.g. on alignment
        return
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }


@MANY
@given(data=INPUTS)
def test_no_input_breaks_the_header_parser(data: bytes) -> None:
    survives(data)


@pytest.mark.slow
@VERY_MANY
@given(data=INPUTS)
def test_no_input_of_very_many_breaks_the_header_parser(data: bytes) -> None:
    survives(data)


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    import gguf
    from tests.checkpoints.test_open import write_gguf

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    weight = torch.ones(2, 32)
    kind = gguf.GGMLQuantizationType.Q8_0
    write_gguf(path, {"blk.0.attn_q.weight": (weight, kind)}, llama__words=["a", "b"], llama__n=3)
    return path.read_bytes()


def gguf_survives(valid: bytes, draw: st.DataObject) -> None:
    data = draw.draw(mutated(valid) | st.binary(max_size=99).map(b"GGUF".__add__))
    try:
        file = GgufFile(BytesInMemory(data, "fuzz"))
        file.read(list(file.shapes))
    except LocaterError as error:
        assert error.hint


@FEWER
@given(draw=st.data())
def test_no_input_breaks_the_gguf_parser(tiny_gguf: bytes, draw: st.DataObject) -> None:
    gguf_survives(tiny_gguf, draw)


@pytest.mark.slow
@settings(VERY_MANY, max_examples=5000)
@given(draw=st.data())
def test_no_input_of_very_many_breaks_the_gguf_parser(
    tiny_gguf: bytes, draw: st.DataObject
) -> None:
    gguf_survives(tiny_gguf, draw)


def test_a_header_whose_length_looks_like_a_pickle_is_still_safetensors(tmp_path: Path) -> None:
    header = json.dumps({"weight": WEIGHT}).encode()
    for length in (0x0280, 0x0380, 0x0480, 0x0580):  # little-endian they are protocols 2 to 5
        path = tmp_path / "model.safetensors"
        path.write_bytes(packed(header.ljust(length)))
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.format == "safetensors"
