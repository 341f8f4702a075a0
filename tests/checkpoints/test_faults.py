"""Damaged, hostile or missing files: each says what is wrong and what to do, and nothing runs."""

from __future__ import annotations

import json
import os
import pickle
import resource
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.checkpoints.test_open import write_gguf

from locater import LocaterError, audit_checkpoint
from locater.checkpoints.open import open_checkpoint

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
    (tmp_path / "two.safetensors").write_bytes((10**18).to_bytes(72, "little"))
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
    with pytest.raises(LocaterError, match="is refused, for reading it may run code") as caught:
        open_checkpoint(tmp_path)
    assert "Unsupported global" in caught.value.message and "touch" not in str(caught.value.hint)
    assert "safetensors.torch.save_file" in str(caught.value.hint)
    assert "\x1b" not in str(caught.value)  # torch writes its own advice in bold
    assert not marker.exists()
    torch.load(tmp_path / name, weights_only=False)  # noqa: TID251  # it would have run
    assert marker.exists()


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_bare_pickle_does_not_run_either(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "model.pt").write_bytes(pickle.dumps(Bomb(marker), protocol=protocol))
    with pytest.raises(LocaterError, match=r"is refused.*: Unsupported|is damaged"):
        open_checkpoint(tmp_path / "model.pt")
    assert not marker.exists()


def test_whole_models_and_files_without_tensors_are_refused(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(LocaterError, match="may run code"):
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


def test_a_model_without_layers_shows_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 0}')
    save_file({"model.embed_tokens.weight": torch.ones(4, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(LocaterError, match=r"no recipe finds .* model\.embed_tokens\.weight"):
        audit_checkpoint(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(LocaterError, match=r"no recipe finds .*: \(none\)"):
        audit_checkpoint(tmp_path)


def test_weights_before_a_parametrization_are_not_taken_for_the_weights(tmp_path: Path) -> None:
    attention = torch.nn.ModuleDict(
        {"q_proj": torch.nn.Linear(4, 4), "k_proj": torch.nn.Linear(4, 4)}
    )
    layers = torch.nn.ModuleDict({"0": attention})
    torch.nn.utils.parametrizations.spectral_norm(attention["q_proj"])
    path, settings = tmp_path / "model.safetensors", {"num_attention_heads": 2}
    save_file(layers.state_dict(prefix="layers."), path)
    with pytest.raises(LocaterError, match=r"layers\.0: .*before a parametrization.*live model"):
        audit_checkpoint(path, config=settings, tokens=4)
    torch.nn.utils.parametrize.remove_parametrizations(attention["q_proj"], "weight")
    save_file(layers.state_dict(prefix="layers."), path)
    assert len(audit_checkpoint(path, config=settings, tokens=4).rows) == 2


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
        unused = f"a base was given and not used: {tmp_path} is not an adapter"
        assert checkpoint.caveats == (unused,)


@pytest.mark.parametrize(
    "nonsense",
    [
        {"rope_scaling": "linear", "rope_parameters": None},
        {"rope_theta": "abc", "rope_parameters": None},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0}},
        {"layer_types": 3},
        {"num_key_value_heads": "x"},
        {"num_attention_heads": [4]},
        {"head_dim": {"a": 1}},
    ],
)
def test_values_of_a_config_that_make_no_sense_are_no_crash(
    nonsense: dict[str, Any], tmp_path: Path
) -> None:
    from tests.models.families import built

    built("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | nonsense))
    try:
        audit = audit_checkpoint(tmp_path, tokens=8)
    except LocaterError as error:
        assert error.hint
    else:  # what does not matter may be anything
        assert audit.rows


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickle_that_is_called_safetensors_is_refused(is_zip: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    torch.save({"a": torch.zeros(2)}, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(LocaterError, match=r"named \.safetensors, but it is a pickle"):
        audit_checkpoint(path)


def test_too_many_tokens_are_refused_before_their_kernel_is_made() -> None:
    with pytest.raises(LocaterError, match="131,072 tokens are too many"):
        audit_checkpoint("nowhere", tokens=131_072)


# files that claim more than they hold


def test_a_compressed_torch_file_is_refused_and_not_read_as_weights(tmp_path: Path) -> None:
    """Mapped, its deflated bytes would be finite garbage."""
    plain, packed = tmp_path / "plain.bin", tmp_path / "model.bin"
    torch.save({"a": torch.zeros(64, 64)}, plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for part in old.infolist():
            new.writestr(part.filename, old.read(part))
    with pytest.raises(LocaterError, match="is compressed") as caught:
        open_checkpoint(packed)
    assert "torch.save" in str(caught.value.hint)
    with open_checkpoint(plain) as checkpoint:
        assert not checkpoint.read(["a"])["a"].any()


def test_strides_of_zero_do_not_fill_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    torch.save({"a": torch.ones(1).expand(100_000, 50_000)}, path)  # 20 GB out of 4 bytes
    with pytest.raises(LocaterError, match=r"claims 20,000,000,000 bytes for 'a'"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x04Nr\xff\xff\xff\x07.",  # nothing, remembered as number 134,217,727
        b"\x80\x05\x96" + (1 << 31).to_bytes(8, "little") + b".",  # a bytearray of 2 GB
    ],
)
def test_metadata_of_few_bytes_takes_no_memory(pickled: bytes, tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").touch()
    (tmp_path / ".metadata").write_bytes(pickled)
    tracemalloc.start()
    try:
        with pytest.raises(LocaterError, match=r"\.metadata is damaged"):
            open_checkpoint(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
    finally:
        tracemalloc.stop()


def test_a_record_of_records_is_not_written_out(tmp_path: Path) -> None:
    """30 pairs of pairs are few bytes, and a billion where they are made into a text."""
    from torch.serialization import _get_layout

    pairs: Any = ()
    for _ in range(30):
        pairs = (pairs, pairs)

    class Layout:
        def __reduce__(self) -> Any:
            return _get_layout, (pairs,)

    (tmp_path / "__0_0.distcp").touch()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Layout()))
    with pytest.raises(LocaterError, match=r"\.metadata is damaged"):
        open_checkpoint(tmp_path)


def test_chunks_that_overlap_leave_no_number_unwritten(tmp_path: Path) -> None:
    """Their sizes add up to the tensor's, and its last row is in neither."""
    from torch.distributed.checkpoint import metadata as records
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    torch.save(torch.ones(2, 2), tmp_path / "__0_0.distcp")
    length = (tmp_path / "__0_0.distcp").stat().st_size
    places = [torch.Size((row, 0)) for row in (0, 1)]
    chunks = [records.ChunkStorageMetadata(place, torch.Size((2, 2))) for place in places]
    size = records.TensorProperties(torch.float32), torch.Size((4, 2))
    found = records.Metadata(
        state_dict_metadata={"a": records.TensorStorageMetadata(*size, chunks)},
        storage_data={
            records.MetadataIndex("a", place): _StorageInfo("__0_0.distcp", 0, length)
            for place in places
        },
    )
    (tmp_path / ".metadata").write_bytes(pickle.dumps(found))
    overlap = pytest.raises(LocaterError, match="chunks of 'a' overlap")
    with open_checkpoint(tmp_path) as checkpoint, overlap:
        checkpoint.read(["a"])


def test_frequencies_are_few(tmp_path: Path) -> None:
    from gguf import GGMLQuantizationType

    write_gguf(
        tmp_path / "a.gguf", {"rope_freqs.weight": (torch.ones(1 << 16), GGMLQuantizationType.F32)}
    )
    with pytest.raises(LocaterError, match=r"has 65,536 numbers in rope_freqs\.weight"):
        open_checkpoint(tmp_path / "a.gguf")


def packed(folder: Path, said: dict[str, Any], **parts: torch.Tensor) -> Path:
    stem = "model.layers.0.self_attn.q_proj"
    save_file({f"{stem}.{part}": one for part, one in parts.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization": said}))
    return folder


def words(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def bitsandbytes(**changes: int) -> dict[str, torch.Tensor]:
    """8 × 16 numbers in 4 bits, in blocks of 64."""
    state = {"shape": [8, 16], "blocksize": 64, "quant_type": "nf4", "dtype": "float32"} | changes
    raw = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return {"weight": torch.zeros(64, 1, dtype=torch.uint8), "weight.absmax": torch.ones(2),
            "weight.quant_map": torch.ones(16),
            "weight.quant_state.bitsandbytes__nf4": raw}  # fmt: skip


MANY = 1 << 20
HUGE: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
    "MLX's groups": (
        {"group_size": 10**10},
        {"weight": words(8, 4), "scales": torch.ones(8, 1), "biases": torch.ones(8, 1)},
    ),
    "MLX's rows": (
        {"group_size": MANY},
        {"weight": words(1, MANY // 8), "scales": torch.ones(MANY, 1),
         "biases": torch.ones(MANY, 1)},
    ),
    "GPTQ's inputs": (
        {},
        {"qweight": words(1, 1 << 16), "qzeros": words(1, 1 << 13),
         "scales": torch.ones(1, 1 << 16), "g_idx": words(MANY)},
    ),
    "AWQ's groups": (
        {},
        {"qweight": words(MANY, 1), "qzeros": words(1, 1), "scales": torch.ones(MANY - 1, 8)},
    ),
    "NVFP4's rows": (
        {},
        {"weight_packed": torch.zeros(1, MANY, dtype=torch.uint8),
         "weight_scale": torch.ones(MANY, 1), "weight_global_scale": torch.ones(1)},
    ),
    "bitsandbytes' rows": (
        {},
        {"weight": torch.ones(1, MANY, dtype=torch.int8), "SCB": torch.ones(MANY)},
    ),
    "bitsandbytes' blocks": ({}, bitsandbytes(blocksize=10**13)),
    "bitsandbytes' shape": ({}, bitsandbytes(shape=[1 << 20, 1 << 20])),
    "bitsandbytes' state": (
        {}, bitsandbytes() | {"weight.quant_state.bitsandbytes__nf4":
                              torch.full((1 << 24,), 91, dtype=torch.uint8)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HUGE)
def test_packed_weights_take_no_more_than_their_file_warrants(case: str, tmp_path: Path) -> None:
    """Each of these would be gigabytes to petabytes of numbers."""
    said, parts = HUGE[case]
    folder = packed(tmp_path, said, **parts)
    refused = r"cannot be unpacked|packed in a way that is not known"
    with pytest.raises(LocaterError, match=refused), open_checkpoint(folder) as found:
        found.read(list(found.shapes))
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert used < 4 << 20  # in kilobytes


def test_a_file_of_holes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    size = 20 << 30
    head = json.dumps({"a": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}})
    raw = len(head).to_bytes(8, "little") + head.encode()
    path.write_bytes(raw)
    os.truncate(path, len(raw) + size)
    with pytest.raises(LocaterError, match="is mostly holes"):
        open_checkpoint(path)


def test_names_that_come_twice_are_found_in_time(tmp_path: Path) -> None:
    """200,000 names took minutes, each counted among all."""
    entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    names = [f'"n{place}":{entry}' for place in range(200_000)]
    head = ("{" + ",".join([*names, names[-1]]) + "}").encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head)
    began = time.process_time()
    with pytest.raises(LocaterError, match="'n199999' appears twice"):
        open_checkpoint(path)
    assert time.process_time() - began < 10


def test_a_shard_that_is_a_link_out_of_the_folder_is_said(tmp_path: Path) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    save_file({"a": torch.ones(2)}, other / "real.safetensors")
    (folder / "model.safetensors").symlink_to(other / "real.safetensors")
    with open_checkpoint(folder) as checkpoint:
        assert any("is a link to" in caveat for caveat in checkpoint.caveats)
    with open_checkpoint(folder / "model.safetensors") as named:  # asked for by its own name
        assert not any("is a link to" in caveat for caveat in named.caveats)


def test_what_nobody_foresaw_is_an_error_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")

    def broken(*_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("locater.checkpoints.open.unpacked", broken)
    with pytest.raises(LocaterError, match="ZeroDivisionError: division by zero"):
        open_checkpoint(tmp_path)
    monkeypatch.setenv("LOCATER_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        open_checkpoint(tmp_path)
