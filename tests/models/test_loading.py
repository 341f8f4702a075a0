"""Models come from anywhere: words and weights that are not there are said, code never runs."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from locater import LocaterError
from locater.cli import main
from locater.models.loading import (
    load_model,
    model_from_config,
    read_text,
    text_blocks,
    tokenizer_beside,
)

SMALL = {
    "vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "albert": {**SMALL, "embedding_size": 8},
    "bert": SMALL,
    "distilbert": {"vocab_size": 300, "dim": 16, "hidden_dim": 16, "n_layers": 1, "n_heads": 2},
    "gpt2": {"vocab_size": 300, "n_embd": 16, "n_layer": 1, "n_head": 2},
    "llama": SMALL,
    "mpnet": SMALL,
    "qwen2": {**SMALL, "num_key_value_heads": 2},
    "roberta": SMALL,
    "t5": {
        "vocab_size": 300,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 16,
        "num_layers": 1,
        "num_heads": 2,
    },
    "xlm-roberta": SMALL,
}  # fmt: skip


def saved(family: str, settings: dict[str, Any], folder: Path) -> Path:
    config = transformers.AutoConfig.for_model(family, **settings)
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_without_a_vocabulary_is_not_run_on_unknown_words(
    family: str, tmp_path: Path, samples: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers makes an empty tokenizer of config.json alone."""
    folder = saved(family, FAMILIES[family], tmp_path / family)
    text = samples / "text.txt"
    assert main(["probe", str(folder), "--text", str(text), "--tokens", "8", "--blocks", "9"]) == 1
    said = capsys.readouterr()
    assert not said.out and str(folder) in said.err
    assert "tokenizer" in said.err.partition("hint:")[0] and "tokenizer.json" in said.err


def test_a_tokenizer_of_special_tokens_alone_is_refused_beside_a_config_too(tmp_path: Path) -> None:
    folder = saved("bert", SMALL, tmp_path)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    with pytest.raises(LocaterError, match="has no words"):
        tokenizer_beside(folder / "config.json")


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("t5", {**FAMILIES["t5"], "vocab_size": 384}),  # ByT5
        ("canine", {**SMALL, "num_hash_buckets": 64, "local_transformer_stride": 8}),
    ],
)
def test_bytes_and_characters_are_words(
    family: str, settings: dict[str, Any], tmp_path: Path, samples: Path
) -> None:
    folder = saved(family, settings, tmp_path)
    if family == "t5":
        transformers.ByT5Tokenizer().save_pretrained(folder)
    _, tokenizer = load_model(folder)
    blocks = text_blocks(tokenizer, read_text(samples / "text.txt"), tokens=16, blocks=4)
    assert len(blocks.unique()) > 10


def test_bytes_of_a_perceiver_are_words(tmp_path: Path) -> None:
    transformers.PerceiverConfig().save_pretrained(tmp_path)
    transformers.PerceiverTokenizer().save_pretrained(tmp_path)
    tokenizer = tokenizer_beside(tmp_path / "config.json")
    assert tokenizer is not None and len(tokenizer("abc", add_special_tokens=False).input_ids) == 3


HOSTILE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedTokenizerFast
Path({!r}).touch()
class Config(LlamaConfig):
    model_type = "hostile"
class Model(LlamaForCausalLM):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.mark.parametrize("part", ["config", "tokenizer"])
def test_code_that_comes_with_a_model_is_not_run_whatever_is_typed(
    part: str, tmp_path: Path, samples: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder, ran = tmp_path / "model", tmp_path / "ran"
    model, _ = load_model(samples / "model", head=True)
    model.save_pretrained(folder)
    (folder / "hostile.py").write_text(HOSTILE.format(str(ran)))
    if part == "config":
        config = json.loads((folder / "config.json").read_text()) | {"model_type": "hostile"}
        names = {"AutoConfig": "hostile.Config", "AutoModel": "hostile.Model",
                 "AutoModelForCausalLM": "hostile.Model"}  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config | {"auto_map": names}))
    names = {"AutoTokenizer": ["hostile.Tokenizer", "hostile.Tokenizer"]}
    told = {"tokenizer_class": "Hostile", "auto_map": names}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    text = ["--text", str(samples / "text.txt")]
    for command in (["probe", str(folder)], ["trial", str(folder / "config.json")]):
        monkeypatch.setattr("sys.stdin", io.StringIO("yes\n" * 20))
        assert main([*command, *text]) == 1
        said = capsys.readouterr()
        assert not said.out and "code" in said.err and not ran.exists()
    if part == "config":
        with pytest.raises(LocaterError, match="code"):
            model_from_config(folder / "config.json")


def test_queries_that_are_missing_are_no_head(tmp_path: Path) -> None:
    """Funnel calls its queries q_head; a head is what stands on the layers, by its whole name."""
    from safetensors.torch import load_file, save_file

    settings = {"vocab_size": 30, "block_sizes": [1], "num_decoder_layers": 1, "d_model": 16,
                "n_head": 2, "d_head": 8, "d_inner": 16}  # fmt: skip
    transformers.FunnelModel(transformers.FunnelConfig(**settings)).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    save_file({name: one for name, one in weights.items() if "q_head" not in name}, path)
    with pytest.raises(LocaterError, match=r"lacks 2 of the model's weights .*q_head"):
        load_model(tmp_path)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_checkpoint_may_do_without_what_stands_on_its_layers(
    family: str, tmp_path: Path, samples: Path
) -> None:
    folder = saved(family, SMALL, tmp_path)
    model = transformers.AutoModel.from_pretrained(folder)
    weights = {name: one for name, one in model.state_dict().items() if "pooler" not in name}
    assert len(weights) < len(model.state_dict())
    model.save_pretrained(folder, state_dict=weights)
    transformers.AutoTokenizer.from_pretrained(samples / "model").save_pretrained(folder)
    assert torch.is_tensor(load_model(folder)[0].get_input_embeddings().weight)
