"""Which files of a folder are meant: pipelines, runs, the shards of many ranks, foreign formats."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from locater import LocaterError, audit_checkpoint
from locater.checkpoints.open import open_checkpoint
from locater.cli import main

LLAMA = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2,
         "hidden_size": 16, "num_hidden_layers": 1}  # fmt: skip
STEM = "model.layers.0.self_attn"


def llama(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = {"q_proj": 16, "k_proj": 8, "v_proj": 8}
    return {
        f"{STEM}.{child}.weight": torch.randn(count, 16, generator=generator)
        for child, count in rows.items()
    }


def stored(folder: Path, seed: int = 0, name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True)
    save_file(llama(seed), folder / name)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def refusal(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says of a path that it cannot audit."""
    assert main(["audit", str(path)]) == 1
    return capsys.readouterr().err


def test_the_one_folder_with_a_checkpoint_is_the_one_meant(tmp_path: Path) -> None:
    stored(tmp_path / "old" / "0_Transformer")
    (tmp_path / "old" / "1_Pooling").mkdir()
    (tmp_path / "old" / "1_Pooling" / "config.json").write_text("{}")
    found = audit_checkpoint(tmp_path / "old", tokens=8)
    same = audit_checkpoint(tmp_path / "old" / "0_Transformer", tokens=8)
    assert found.rows == same.rows
    assert "the checkpoint is that in 0_Transformer/" in found.caveats


def test_the_parts_of_a_pipeline_are_listed_and_each_can_be_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"unet": "diffusion_pytorch_model.safetensors", "text_encoder": "model.safetensors"}
    for part, name in names.items():
        stored(tmp_path / part, name=name)
    save_file(llama(), tmp_path / "unet" / "diffusion_pytorch_model.fp16.safetensors")
    (tmp_path / "model_index.json").write_text("{}")
    said = refusal(tmp_path, capsys)
    assert "holds 2 checkpoints in folders of their own: text_encoder, unet." in said
    assert len(audit_checkpoint(tmp_path / "unet", tokens=8).rows) == 4


def test_the_checkpoints_of_a_run_are_listed_by_their_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (1000, 200):
        stored(tmp_path / "run" / f"checkpoint-{step}", seed=step)
    said = refusal(tmp_path / "run", capsys)
    assert "checkpoint-200, checkpoint-1000." in said
    assert "the checkpoints of a run together" in said


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("model.onnx", "ONNX"),
        ("model.keras", "Keras"),
        ("weights.h5", "HDF5"),
        ("params.npz", "NumPy"),
        ("flax_model.msgpack", "Flax"),
        ("manifest.ocdbt", "Orbax"),
        ("saved_model.pb", "TensorFlow"),
        ("model.nemo", "NeMo"),
    ],
)
def test_formats_that_are_not_read_are_named_with_the_way_out(
    name: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(b"PK\x03\x04" + bytes(200))
    for path in (tmp_path, tmp_path / name):
        said = refusal(path, capsys)
        assert named in said
        assert "which is not read." in said
        assert "hint:" in said


def test_metas_parts_are_joined_and_none_is_taken_for_the_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = {"layers.0.attention.wq.weight": torch.randn(16, 16),
             "layers.0.attention.wk.weight": torch.randn(8, 16)}  # fmt: skip
    alike = {"layers.0.attention_norm.weight": torch.rand(16) + 1}
    cut = {"layers.0.attention.wo.weight": torch.randn(16, 8)}
    for part in range(2):
        mine = {name: value.chunk(2)[part].clone() for name, value in whole.items()}
        torch.save(mine | alike | cut, tmp_path / f"consolidated.0{part}.pth")
    params = {"dim": 16, "n_heads": 4, "n_kv_heads": 2, "n_layers": 1}
    (tmp_path / "params.json").write_text(json.dumps(params))
    with open_checkpoint(tmp_path) as found:
        values = found.read([*whole, *alike])
        assert all(torch.equal(values[name], value) for name, value in (whole | alike).items())
    assert len(audit_checkpoint(tmp_path, tokens=8).rows) == 4
    assert "one of several parts" in refusal(tmp_path / "consolidated.01.pth", capsys)


DCP = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
import torch.multiprocessing as processes
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

def work(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/.meet", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.load(f"{folder}/whole.pt")
    ways = [Shard(0), Shard(1), Replicate()]
    state = {name: distribute_tensor(value, mesh, [ways[place % 3]])
             for place, (name, value) in enumerate(whole.items())}
    dcp.save({"model": state, "step": 3}, checkpoint_id=f"{folder}/dcp")
    dist.destroy_process_group()

if __name__ == "__main__":
    processes.spawn(work, (sys.argv[1],), nprocs=2)
"""


@pytest.fixture(scope="module")
def distributed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that two ranks wrote, in rows, in columns and whole."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "write.py").write_text(DCP)
    torch.save(llama(), folder / "whole.pt")
    subprocess.run([sys.executable, str(folder / "write.py"), str(folder)], check=True, timeout=120)
    return folder / "dcp"


def test_what_many_ranks_wrote_is_put_together(distributed: Path) -> None:
    with open_checkpoint(distributed, config=LLAMA) as found:
        assert found.format == "distributed"
        values = found.read(found.shapes)
        for name, value in llama().items():
            assert torch.equal(values[f"model.{name}"], value)
    assert len(audit_checkpoint(distributed, config=LLAMA, tokens=8).rows) == 4


def test_a_chunk_that_is_not_there_is_missed(distributed: Path, tmp_path: Path) -> None:
    for file in distributed.iterdir():
        os.link(file, tmp_path / file.name)
    gone = next(tmp_path.glob("*.distcp"))
    gone.unlink()
    with open_checkpoint(tmp_path, config=LLAMA) as found, pytest.raises(LocaterError):
        found.read(found.shapes)


class Harm:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


def test_metadata_that_would_run_code_is_refused_unrun(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").touch()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Harm(f"touch {tmp_path}/harm")))
    with pytest.raises(LocaterError, match=r"refused, for reading it may run code.*posix.system"):
        open_checkpoint(tmp_path)
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("damage", [b"", b"\x80\x04}.", b"\x80\x04N.", b"junk"])
def test_damaged_metadata_is_said(damage: bytes, tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").touch()
    (tmp_path / ".metadata").write_bytes(damage)
    with pytest.raises(LocaterError, match=r"\.metadata"):
        open_checkpoint(tmp_path)
