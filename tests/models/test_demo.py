"""The model that comes with the package: small, trained, and read by every command."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from locater import LocaterError, audit_checkpoint
from locater.cli import main
from locater.files import DEMO
from locater.models.loading import load_model, text_blocks


def test_it_is_small_and_says_how_it_was_made() -> None:
    files = sorted(DEMO.iterdir())
    assert sum(path.stat().st_size for path in files) < 3_000_000
    recipe = json.loads((DEMO / "recipe.json").read_text())
    assert recipe["settings"]["seed"] == 1 and recipe["settings"]["corpus"] == "embedded"


def test_it_was_trained() -> None:
    """It uses context: a text that it never saw surprises it far less than the same words mixed."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    blocks = text_blocks(tokenizer, (DEMO / "text.txt").read_text(), tokens=128, blocks=16)
    mixed = blocks[:, torch.randperm(128, generator=torch.Generator().manual_seed(0))]
    with torch.no_grad():
        loss, other = (model(one, labels=one).loss.item() for one in (blocks, mixed))
    assert loss < other - 1 and loss < math.log(2048) - 1


def test_every_command_knows_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = audit_checkpoint("demo")
    assert len(found.rows) == 16 and found.rows[0].layer == 0
    assert main(["audit", "demo"]) == 0
    assert "verified: llama" in " ".join(capsys.readouterr().out.split())
    assert main(["probe", "demo", "--blocks", "4", "--tokens", "16"]) == 0
    assert "16 heads" in capsys.readouterr().err
    moments = tmp_path / "moments.safetensors"
    assert main(["moments", "demo", "--blocks", "8", "--tokens", "16", "--out", str(moments)]) == 0
    assert main(["what-if", str(moments), "--tokens", "32"]) == 0


def test_a_folder_of_that_name_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo").mkdir()
    assert main(["audit", "demo"]) == 1
    assert "verified" not in capsys.readouterr().out


def test_a_model_of_ones_own_needs_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "org/model"]) == 1
    assert "add --text FILE" in capsys.readouterr().err


def test_it_loads_as_any_model_does() -> None:
    model, tokenizer = load_model("demo")
    assert tokenizer.decode(tokenizer("the list of names").input_ids).strip() == "the list of names"
    assert sum(one.numel() for one in model.parameters()) > 500_000


def test_weights_that_are_missing_are_no_random_ones(tmp_path: Path) -> None:
    """transformers would fill them at random, without a word that is heard."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(DEMO, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    weights = load_file(path)
    save_file({key: one for key, one in weights.items() if "layers.2.self_attn" not in key}, path)
    with pytest.raises(LocaterError, match="lacks 4 of the model's weights") as told:
        load_model(str(tmp_path / "model"))
    assert "layers.2.self_attn" in str(told.value)
