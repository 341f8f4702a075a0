"""Damaged, hostile or missing files: each says what is wrong and what to do, and nothing runs."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, save, save_file

from locater import LocaterError
from locater.adapters.checkpoint import open_checkpoint
from locater.adapters.gguf_file import GgufFile
from locater.adapters.safetensors_file import SafetensorsFile
from locater.adapters.sources import BytesInMemory

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
    "too few bytes": ({"a": WEIGHT}, 12, "cut short: it ends after 12 bytes and speaks of 16"),
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
    "an empty file": ("model.safetensors", b"", "ends after 0 bytes and speaks of 8", "again"),
    "seven bytes": ("model.safetensors", b"1234567", "ends after 7 bytes", "again"),
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
        with pytest.raises(LocaterError, match="is cut short: it ends after 4,096 bytes"):
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


# indices


def index(folder: Path, homes: Any) -> Path:
    save_file({"a": torch.ones(2)}, folder / "one.safetensors")
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": homes}))
    return path


@pytest.mark.parametrize(
    ("homes", "message", "hint"),
    [
        ({"a": "two.safetensors"}, "names two.safetensors, which is not there", "git lfs pull"),
        (
            {"a": "two.safetensors", "b": "three.safetensors"},
            "names three.safetensors, which is not there, nor are 1 other",
            "download the missing shards",
        ),
        ({"b": "one.safetensors"}, "says that one.safetensors holds b, and it does not", "again"),
        ({"a": "../one.safetensors"}, "names the shard '../one.safetensors'", "do not trust"),
        ({"a": "x/../../one.safetensors"}, "which is not a file of its folder", "do not trust"),
        ({"a": "/etc/passwd"}, "names the shard '/etc/passwd'", "do not trust"),
        ({"a": "..\\one.safetensors"}, "which is not a file of its folder", "do not trust"),
        ({"a": "C:one.safetensors"}, "which is not a file of its folder", "do not trust"),
        ({"a": 3}, "names the shard 3", "do not trust"),
        ({}, "has no weight_map", "download"),
        ([], "has no weight_map", "download"),
    ],
)
def test_an_index_that_is_wrong_is_refused(
    tmp_path: Path, homes: Any, message: str, hint: str
) -> None:
    index(tmp_path, homes)
    with pytest.raises(LocaterError, match=message) as caught:
        open_checkpoint(tmp_path)
    assert hint in str(caught.value.hint)


def test_a_right_index_is_read_and_one_bad_shard_closes_the_others(tmp_path: Path) -> None:
    index(tmp_path, {"a": "one.safetensors"})
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.shapes == {"a": (2,)}
    (tmp_path / "two.safetensors").write_bytes(with_length(10**18))
    index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    with pytest.raises(LocaterError, match=r"two\.safetensors claims a header"):
        open_checkpoint(tmp_path)  # a file left open would be a ResourceWarning, hence an error


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[1]", "must hold a JSON object, but it holds a list")],
)
def test_documents_that_are_no_json_objects_are_refused(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    index(tmp_path, {"a": "one.safetensors"})
    (tmp_path / name).write_text(text)
    with pytest.raises(LocaterError, match=f"{name} {message}"):
        open_checkpoint(tmp_path)


# pickles


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(
    tmp_path: Path, zipped: bool, sharded: bool
) -> None:
    marker = tmp_path / "ran"
    state = {"a": torch.ones(2), "b": Bomb(marker)}
    name = "shard.bin" if sharded else "pytorch_model.bin"
    torch.save(state, tmp_path / name, _use_new_zipfile_serialization=zipped)
    if sharded:
        homes = {"weight_map": {"a": name}}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(homes))
    with pytest.raises(LocaterError, match="is refused, for reading it would run code") as caught:
        open_checkpoint(tmp_path)
    assert "safetensors.torch.save_file" in str(caught.value.hint)
    assert not marker.exists()
    torch.load(tmp_path / name, weights_only=False)  # noqa: TID251  # it would have run
    assert marker.exists()


def test_a_bare_pickle_does_not_run_either(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "model.pt").write_bytes(pickle.dumps(Bomb(marker), protocol=2))
    with pytest.raises(LocaterError, match=r"is refused|is damaged"):
        open_checkpoint(tmp_path / "model.pt")
    assert not marker.exists()


def test_whole_models_and_files_without_tensors_are_refused(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(LocaterError, match="would run code"):
        open_checkpoint(tmp_path / "model.pt")
    torch.save({"epoch": 3, "lr": 0.1}, tmp_path / "log.pt")
    with pytest.raises(LocaterError, match=r"holds no tensors .* it holds epoch, lr"):
        open_checkpoint(tmp_path / "log.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(LocaterError, match="holds a list, not a state dict"):
        open_checkpoint(tmp_path / "list.pt")


# folders and the file system


def test_empty_and_crowded_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LocaterError, match="holds no checkpoint; it holds nothing"):
        open_checkpoint(tmp_path)
    (tmp_path / "README.md").touch()
    with pytest.raises(LocaterError, match=r"holds no checkpoint; it holds README\.md"):
        open_checkpoint(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(LocaterError, match=r"holds 2 checkpoints: a\.gguf, b\.gguf") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.hint == "give the path of the one that you mean."


def test_a_folder_that_lacks_a_shard_says_which(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00003.safetensors").touch()
    (tmp_path / "model-00003-of-00003.safetensors").touch()
    with pytest.raises(LocaterError, match="lacks shard 2 of 3"):
        open_checkpoint(tmp_path)


def test_paths_that_lead_nowhere_are_named(tmp_path: Path) -> None:
    with pytest.raises(LocaterError, match=r"nowhere does not exist.\nhint: give a folder, a file"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(LocaterError, match="gpt2 does not exist"):
        open_checkpoint("gpt2")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(LocaterError, match=r"model\.safetensors does not exist"):
        open_checkpoint(tmp_path)
    with pytest.raises(LocaterError, match="cannot read"):
        open_checkpoint("a\0b")


def test_symbolic_links_that_lead_back_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(LocaterError, match="a symbolic link that leads back to itself"):
            open_checkpoint(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(LocaterError, match="is not a regular file"):
        open_checkpoint(tmp_path)


def test_a_file_that_may_not_be_read_says_how_to_allow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(2)}, path)

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(LocaterError, match="permission denied") as caught:
        open_checkpoint(path)
    assert caught.value.hint == f"run: chmod u+r {path}"
    monkeypatch.undo()
    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(LocaterError, match="permission denied"):
        open_checkpoint(tmp_path)


def test_base_without_an_adapter_is_a_caveat(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path, base="b", config={"n_head": 1}) as checkpoint:
        unused = f"base= was given and not used: {tmp_path} is not an adapter"
        assert checkpoint.caveats == (unused,)


# fuzzing

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
    from tests.adapters.test_checkpoint import write_gguf

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
