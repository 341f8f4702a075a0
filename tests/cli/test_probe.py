"""`locater probe` measures any model that runs: the model's own attention matrix is the truth."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from locater.cli import main
from locater.core.theory import attention_entropy
from locater.models.loading import read_text, text_blocks

TOKENS, WINDOW = 16, 6
SIZE: dict[str, Any] = {
    "vocab_size": 13, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 4, "first_k_dense_replace": 2, "n_routed_experts": 2, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qk-norm": ("Qwen3Config", {**SIZE, "head_dim": 8}),
    "window": ("MistralConfig", {**SIZE, "sliding_window": WINDOW}),
    "latent": ("DeepseekV3Config", {**SIZE, **LATENT, "num_key_value_heads": 4}),
}


@pytest.fixture(scope="module", params=MODELS)
def model(
    request: pytest.FixtureRequest, samples: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A tiny model of a family that no theory of a fixed W_QK covers, with a tokenizer."""
    config, settings = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param) / request.param
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = AutoModel.from_config(getattr(transformers, config)(**settings))
        generator = torch.Generator().manual_seed(3)
        for parameter in made.parameters():
            parameter.data.add_(0.4 * torch.randn(parameter.shape, generator=generator))
        made.save_pretrained(folder)
    AutoTokenizer.from_pretrained(samples / "model").save_pretrained(folder)
    return folder


def probed(model: Path, samples: Path, *more: str) -> list[str]:
    flags = ["--tokens", str(TOKENS), "--blocks", "20", *more]
    return ["probe", str(model), "--text", str(samples / "text.txt"), *flags]


def dense(model: Path, samples: Path) -> list[Tensor]:
    """Every layer's attention matrix on the same blocks, as the model itself returns it."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = read_text(samples / "text.txt")
    blocks = text_blocks(tokenizer, text, tokens=TOKENS, blocks=20)
    eager = AutoModel.from_pretrained(model, attn_implementation="eager").eval()
    with torch.no_grad():
        return [one.double() for one in eager(blocks, output_attentions=True).attentions]


def test_every_head_of_any_model_is_measured(
    model: Path, samples: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(probed(model, samples, "--json")) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert "locater explain" in captured.err
    assert (len(data["heads"]), len(data["layers"]), data["unseen"]) == (8, 2, [])
    attention = torch.cat([layer.transpose(0, 1) for layer in dense(model, samples)])
    away = (torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)).abs()
    for head, truth in zip(data["heads"], attention, strict=True):
        rows = truth[:, 1:]  # the first token has nothing to choose
        assert head["entropy"] == pytest.approx(attention_entropy(rows).mean().item(), rel=1e-4)
        distance = (rows * away[1:]).sum(-1).mean().item()
        assert head["distance"] == pytest.approx(distance, rel=1e-4)
        if model.name == "window":
            assert head["distance"] < WINDOW - 1
            assert head["last_rho"][: TOKENS - WINDOW] == [None] * (TOKENS - WINDOW)


def test_the_command_prints_tables_and_writes_a_page(
    model: Path, samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(probed(model, samples, "--top", "3", "--queries", "5", "--layers", "1")) == 0
    captured = capsys.readouterr()
    assert "4 heads (3 shown) on 20 blocks of 16 tokens." in captured.out
    assert "effective rank" in captured.out and "explain" in captured.err
    assert max(map(len, captured.out.splitlines())) <= 100
    page = tmp_path / "page.html"
    assert main(probed(model, samples, "--queries", "last", "--out", str(page))) == 0
    assert "What the heads do" in page.read_text()
    assert main(probed(model, samples, "--out", str(tmp_path / "map.svg"))) == 0
    assert (tmp_path / "map.svg").read_text().startswith("<svg")


def test_alarms_are_printed_with_their_numbers(
    samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loud = AutoModel.from_pretrained(samples / "model")
    for name, parameter in loud.named_parameters():
        parameter.data.mul_(200.0 if "layers.1.self_attn.q_proj" in name else 1.0)
    loud.save_pretrained(tmp_path / "loud")
    AutoTokenizer.from_pretrained(samples / "model").save_pretrained(tmp_path / "loud")
    assert main(probed(tmp_path / "loud", samples)) == 0
    printed = capsys.readouterr().out
    assert "alarm: layers.1.self_attn, head 0: a logit of" in printed
    assert "no alarms." not in printed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--layers", "nothing"), "--layers 'nothing' selects none of these attentions: layers.0"),
        (("--queries", "0"), "queries must be 'last', 'all' or a positive number, got 0"),
        (("--top", "-1"), "top must be at least 0, got -1"),
        (("--batch", "0"), "batch must be at least 1, got 0"),
        (("--layers", "["), "--layers '[' is no regular expression: unterminated character set"),
        (("--tokens", "2"), "cannot make 20 blocks of 2 tokens"),
    ],
)
def test_mistakes_are_explained(
    change: tuple[str, ...], message: str, samples: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(probed(samples / "model", samples, *change)) == 1
    assert message in capsys.readouterr().err


def test_a_pattern_that_finds_nothing_is_refused_before_the_work(
    samples: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("locater.probe.probe.Probe.run", None)
    assert main(probed(samples / "model", samples, "--layers", "layers.7")) == 1
    assert "selects none of these attentions: layers.0.self_attn" in capsys.readouterr().err


@pytest.mark.parametrize("layers", [(), ("--layers", "layers.1")])
def test_a_model_that_diverged_is_said_to_have(
    layers: tuple[str, ...], samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = AutoModel.from_pretrained(samples / "model")
    for parameter in lost.parameters():
        parameter.data.fill_(torch.nan)
    lost.save_pretrained(tmp_path / "lost")
    AutoTokenizer.from_pretrained(samples / "model").save_pretrained(tmp_path / "lost")
    assert main(probed(tmp_path / "lost", samples, *layers)) == 1
    told = capsys.readouterr().err
    assert ("logits of layers.0.self_attn are NaN" in told) == (not layers)
    assert "alarm: the logits of layers.1.self_attn are NaN or infinite in heads [0, 1" in told
    assert "error: no head could be measured" in told and "selects none" not in told
