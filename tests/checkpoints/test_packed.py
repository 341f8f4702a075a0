"""Packed weights are what their own libraries say they are, or are refused by their scheme's name.

`make_packed.py` made the files with those libraries: packed parts, and what the library takes them
for.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from locater import LocaterError, audit_checkpoint
from locater.checkpoints.open import open_checkpoint
from locater.cli import main

FILES = sorted((Path(__file__).with_name("data") / "packed").glob("*.safetensors"))
LLAMA = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 4,
         "hidden_size": 128, "num_hidden_layers": 1}  # fmt: skip
STEM = "model.layers.0.self_attn"


def packed_model(path: Path, folder: Path) -> torch.Tensor:
    """A Llama of one layer whose queries and keys are that file's weight; returns the truth."""
    with safe_open(path, "pt") as file:
        config = json.loads(file.metadata()["config"])
    parts = load_file(path)
    truth = parts.pop("expected")
    tensors = {
        f"{STEM}.{child}.{part}": value.clone()
        for child in ("q_proj", "k_proj")
        for part, value in parts.items()
    }
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(LLAMA | config))
    return truth


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_values_are_those_of_the_scheme_s_own_library(path: Path, tmp_path: Path) -> None:
    truth = packed_model(path, tmp_path / "packed")
    with open_checkpoint(tmp_path / "packed") as found:
        assert found.shapes == {
            f"{STEM}.{child}.weight": (32, 128) for child in ("q_proj", "k_proj")
        }
        (weight,) = found.read([f"{STEM}.k_proj.weight"]).values()
        assert any("unpacked from" in caveat for caveat in found.caveats)
    # the libraries compute in float32, some with a scale that they rounded to 16 bits first
    torch.testing.assert_close(weight, truth, rtol=2**-10, atol=2**-11 * truth.abs().amax().item())
    if "int8" not in path.stem:  # that library returns float16
        torch.testing.assert_close(weight, truth, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("scheme", ["gptq-4", "awq", "mlx-4", "nvfp4", "bitsandbytes-nf4"])
def test_an_audit_of_packed_weights_is_that_of_the_numbers(scheme: str, tmp_path: Path) -> None:
    (path,) = (path for path in FILES if path.stem == scheme)
    truth = packed_model(path, tmp_path / "packed")
    plain = {f"{STEM}.{child}.weight": truth.clone() for child in ("q_proj", "k_proj")}
    (tmp_path / "plain").mkdir()
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    (tmp_path / "plain" / "config.json").write_text(json.dumps(LLAMA))
    ours, theirs = (audit_checkpoint(tmp_path / name, tokens=16) for name in ("packed", "plain"))
    assert [row.r for row in ours.rows] == pytest.approx([row.r for row in theirs.rows], rel=1e-4)
    assert len(ours.rows) == 4


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"q_weight": (4, 32), "q_scale": (2, 4)}, "EXL2"),
        ({"trellis": (2, 2, 32)}, "EXL3"),
        ({"W_q": (32, 64), "scale": (64,), "zero": (64,)}, "HQQ"),
        ({"codes": (4, 4), "codebooks": (2, 4)}, "AQLM"),
        (
            {"weight": (32, 64), "weight_scale": (32, 8), "weight_scale_2": (1,)},
            "NVFP4 of ModelOpt",
        ),
        ({"weight": (32, 16), "scales": (32, 4)}, "MLX"),
        ({"qweight": (16, 32), "scales": (2, 32)}, "GPTQ"),
        ({"weight_packed": (32, 16), "weight_scale": (32, 2)}, "compressed-tensors"),
    ],
)
def test_what_is_not_undone_is_refused_by_name(
    parts: dict[str, tuple[int, ...]], named: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    tensors = {
        f"{STEM}.{child}.{part}": torch.zeros(shape, dtype=torch.uint8)
        for child in ("q_proj", "k_proj")
        for part, shape in parts.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert main(["audit", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"packed by {named}" in said
    assert "audit the original" in said


def test_packed_experts_beside_plain_attention_are_no_hindrance(tmp_path: Path) -> None:
    tensors = {f"{STEM}.{child}.weight": torch.randn(128, 128) for child in ("q_proj", "k_proj")}
    tensors["model.layers.0.mlp.experts.0.up.q_weight"] = torch.zeros(4, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert len(audit_checkpoint(tmp_path, tokens=8).rows) == 4


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float32])
def test_a_width_that_is_not_the_models_is_no_audit(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        f"{STEM}.{side}.weight": torch.ones(32, 64).to(dtype) for side in ("q_proj", "k_proj")
    }
    tensors |= {f"{STEM}.{side}.weight_scale": torch.ones(32) for side in ("q_proj", "k_proj")}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(LocaterError, match="reads 64 dimensions, and the model has 128"):
        audit_checkpoint(tmp_path, tokens=8)


def test_integers_without_a_scale_are_no_weights(tmp_path: Path) -> None:
    tensors = {f"{STEM}.{side}.weight": torch.ones(32, 128, dtype=torch.int8)
               for side in ("q_proj", "k_proj")}  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(LocaterError, match="int8 and has no scale"):
        audit_checkpoint(tmp_path, tokens=8)
