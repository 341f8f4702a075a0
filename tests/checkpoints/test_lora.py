"""A LoRA adapter over its base gives the weights that PEFT's own merge gives."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints.loopback import serving
from torch import Tensor

from locater import LocaterError
from locater.checkpoints.open import open_checkpoint
from locater.models.names import plain_name
from locater.models.resolve import layouts

END = {"bos_token_id": 0, "eos_token_id": 0}
ROUNDING = 8 * torch.finfo(torch.float32).eps  # two products of rank 4 in another order


def base_model(kind: str) -> Any:
    """A tiny random model."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=11, n_embd=16, n_layer=2, n_head=4, **END))
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
    )
    return LlamaForCausalLM(config)


def adapted(tmp_path: Path, kind: str, **settings: Any) -> tuple[Any, dict[str, Tensor]]:
    """Write a base and an adapter with random factors; return the adapted model and its merge."""
    from peft import LoraConfig, get_peft_model

    generator = torch.Generator().manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = base_model(kind)
        for parameter in model.parameters():
            parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(tmp_path / "base")
        peft = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 6} | settings))
        for name, parameter in peft.named_parameters():
            if "lora_" in name or parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data.add_(0.3 * noise)
        peft.save_pretrained(tmp_path / "adapter")
        state = {name: tensor.clone() for name, tensor in peft.state_dict().items()}
        merged = peft.merge_and_unload()
    return state, {name: tensor.clone() for name, tensor in merged.state_dict().items()}


PLAIN = {"target_modules": ["q_proj", "k_proj"]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", PLAIN),
    "rsLoRA": ("llama", PLAIN | {"use_rslora": True}),
    "patterns": (
        "llama",
        PLAIN
        | {
            "rank_pattern": {"k_proj": 2, r"layers\.1\.self_attn\.q_proj": 3},
            "alpha_pattern": {"layers.0.self_attn.q_proj": 11, "k_proj": 5},
        },
    ),
    "biases": ("llama", PLAIN | {"bias": "all"}),
    "biases of LoRA": ("llama", PLAIN | {"lora_bias": True}),
    "a saved module": ("llama", PLAIN | {"modules_to_save": ["lm_head"]}),
    "other modules too": ("llama", {"target_modules": "all-linear"}),
    "DoRA": ("llama", PLAIN | {"use_dora": True}),
    "Conv1D": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "Conv1D with DoRA": (
        "gpt2",
        {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True},
    ),
}


def errors(found: dict[str, Tensor], merged: dict[str, Tensor]) -> list[float]:
    """How far each weight is from the merged model's, relative to its largest entry."""
    gaps = []
    for name, tensor in found.items():
        expected = merged[plain_name(name)]
        assert tensor.shape == expected.shape
        gaps.append(float((tensor - expected).abs().max() / expected.abs().max()))
    return gaps


@pytest.mark.parametrize("case", CASES)
def test_merged_weights_are_those_of_peft(tmp_path: Path, case: str) -> None:
    kind, settings = CASES[case]
    _, merged = adapted(tmp_path, kind, **settings)
    with open_checkpoint(tmp_path / "adapter", base=tmp_path / "base") as checkpoint:
        assert checkpoint.format == "lora"
        assert checkpoint.config["model_type"] == kind
        found, skipped = layouts(checkpoint.shapes, checkpoint.config)
        assert (len(found), skipped) == (2, [])
        tensors = checkpoint.read([name for layout in found for name in layout.tensors])
        assert max(errors(tensors, merged)) < ROUNDING
    with open_checkpoint(tmp_path / "base") as base:
        assert max(errors(base.read(tensors), merged)) > 0.01  # the adapter matters


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"use_dora": True}])
def test_factors_beside_their_base_layers_are_merged(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    state, merged = adapted(tmp_path, "llama", **PLAIN, **settings)
    torch.save(state, tmp_path / "wrapped.pt")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    said = config | settings | {"lora_alpha": 6}
    with open_checkpoint(tmp_path / "wrapped.pt", config=said) as checkpoint:
        assert checkpoint.format == "lora"
        assert not any("lora" in name for name in checkpoint.shapes)
        found, skipped = layouts(checkpoint.shapes, checkpoint.config)
        assert (len(found), skipped) == (2, [])
        tensors = checkpoint.read([name for layout in found for name in layout.tensors])
        assert max(errors(tensors, merged)) < ROUNDING
    with pytest.raises(LocaterError, match="does not say how strong its LoRA is") as caught:
        open_checkpoint(tmp_path / "wrapped.pt", config=config)
    with pytest.raises(LocaterError, match="lora_alpha is inf"):
        open_checkpoint(tmp_path / "wrapped.pt", config=config | {"lora_alpha": float("inf")})
    assert "config={'lora_alpha'" in str(caught.value.hint)


def test_factors_of_torchs_own_attention_are_merged(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model = torch.nn.ModuleDict({"attn": torch.nn.MultiheadAttention(8, 2)})
    config = LoraConfig(r=2, lora_alpha=6, target_modules=["attn"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = get_peft_model(model, config)  # type: ignore[arg-type]
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.data.add_(torch.linspace(-1, 1, len(parameter))[:, None])
        torch.save(peft.state_dict(), tmp_path / "attention.pt")
        merged = peft.merge_and_unload().state_dict()
    said = {"lora_alpha": 6, "num_heads": 2}
    with open_checkpoint(tmp_path / "attention.pt", config=said) as checkpoint:
        (found,), skipped = layouts(checkpoint.shapes, checkpoint.config)
        weight = checkpoint.read(found.tensors)[found.query.weight]
    assert not skipped
    assert errors({"attn.in_proj_weight": weight}, merged)[0] < ROUNDING


def test_the_adapter_names_its_base_and_only_what_is_needed_is_read(tmp_path: Path) -> None:
    adapted(tmp_path, "llama", **PLAIN)
    with open_checkpoint(tmp_path / "adapter", base=tmp_path / "base") as checkpoint:
        assert checkpoint.caveats == ("4 weights are merged with LoRA",)
        before = checkpoint.bytes_read
        checkpoint.read(["model.layers.0.self_attn.q_proj.weight"])
        needed = 4 * (16 * 16 + 4 * 16 + 16 * 4)
        assert checkpoint.bytes_read - before == needed
        before = checkpoint.bytes_read
        checkpoint.read(["model.layers.0.self_attn.v_proj.weight"])
        assert checkpoint.bytes_read - before == 4 * 8 * 16
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    with open_checkpoint(file, base=tmp_path / "base") as named:
        assert named.format == "lora"


@pytest.mark.parametrize(
    "named", ["{here}/base", "base", "./base", "../base", "~/base", "http://127.0.0.1:9/base",
              "file:///etc", "/", "a/b/../../../etc"],
)  # fmt: skip
def test_an_adapter_does_not_decide_what_is_opened(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path or an address in its config is opened only by who gives it; nothing is listed."""
    adapted(tmp_path, "llama", **PLAIN)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "adapter" / "adapter_config.json"
    said = json.loads(path.read_text())
    named = named.format(here=tmp_path)
    path.write_text(json.dumps(said | {"base_model_name_or_path": named}))

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a request was made")

    monkeypatch.setattr("locater.checkpoints.remote._answer", refuse)
    with pytest.raises(LocaterError, match="does not decide what is opened") as caught:
        open_checkpoint(tmp_path / "adapter")
    assert "--base" in str(caught.value.hint)
    assert "bin" not in str(caught.value).replace(named, "").split()


def test_an_adapter_and_its_base_may_be_on_a_server(tmp_path: Path) -> None:
    _, merged = adapted(tmp_path, "llama", **PLAIN)
    name = "model.layers.1.self_attn.q_proj.weight"
    with (
        serving(tmp_path) as server,
        open_checkpoint(f"{server.url}/adapter", base=f"{server.url}/base") as checkpoint,
    ):
        assert max(errors(checkpoint.read([name]), merged)) < ROUNDING


def test_a_half_precision_base_is_merged_without_rounding(tmp_path: Path) -> None:
    adapted(tmp_path, "llama", **PLAIN)
    name = "model.layers.0.self_attn.q_proj"
    base = load_file(tmp_path / "base" / "model.safetensors")
    half = {key: tensor.bfloat16() for key, tensor in base.items()}
    save_file(half, tmp_path / "base" / "model.safetensors")
    factors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    down, up = (factors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    expected = half[f"{name}.weight"].float() + 6 / 4 * up @ down
    with open_checkpoint(tmp_path / "adapter", base=tmp_path / "base") as checkpoint:
        (found,) = checkpoint.read([f"{name}.weight"]).values()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    half[f"{name}.weight"] = half[f"{name}.weight"].to(torch.float8_e4m3fn)
    save_file(half, tmp_path / "base" / "model.safetensors")
    with (
        open_checkpoint(tmp_path / "adapter", base=tmp_path / "base") as eight,
        pytest.raises(LocaterError, match="is stored in 8 bits"),
    ):
        eight.read([f"{name}.weight"])


def test_a_base_without_the_head_of_the_adapted_model_fits_all_the_same(tmp_path: Path) -> None:
    _, merged = adapted(tmp_path, "llama", **PLAIN)
    base = load_file(tmp_path / "base" / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in base.items()}
    save_file(bare, tmp_path / "base" / "model.safetensors")
    with open_checkpoint(tmp_path / "adapter", base=tmp_path / "base") as checkpoint:
        (found,) = checkpoint.read(["layers.1.self_attn.k_proj.weight"]).values()
    expected = merged["model.layers.1.self_attn.k_proj.weight"]
    assert errors({"a": found}, {"a": expected})[0] < ROUNDING


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "LOHA"}, "is a LOHA adapter; LoRA is read"),
    "a changed base": ({"init_lora_weights": "pissa_niter_4"}, "a base that its training changed"),
    "copied layers": ({"layer_replication": [[0, 1], [0, 2]]}, "a base that its training changed"),
    "no base": ({"base_model_name_or_path": None}, "does not say what it stands on"),
    "a base by its path": ({"base_model_name_or_path": "/gone"}, "is not a hub id"),
    "a pattern that never ends": ({"alpha_pattern": {"(a+)+b": 1}}, "too involved to be run"),
    "three repetitions": ({"alpha_pattern": {".*.*.*x": 1}}, "too involved to be run"),
    "patterns that are none": ({"alpha_pattern": [1]}, "no map of names to strengths"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_cannot_be_merged_say_why(tmp_path: Path, case: str) -> None:
    changes, message = REFUSED[case]
    adapted(tmp_path, "llama", **PLAIN)
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    base = None if "base_model_name_or_path" in changes else tmp_path / "base"
    with pytest.raises(LocaterError, match=message) as caught:
        open_checkpoint(tmp_path / "adapter", base=base)
    assert "merge" in str(caught.value.hint) or "--base" in str(caught.value.hint)


def test_adapters_over_the_wrong_base_are_refused(tmp_path: Path) -> None:
    adapted(tmp_path, "llama", **PLAIN)
    (tmp_path / "other").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "other" / "model.safetensors")
    with pytest.raises(LocaterError, match=r"nothing in the adapter .* fits its base; it changes"):
        open_checkpoint(tmp_path / "adapter", base=tmp_path / "other")
    with pytest.raises(LocaterError, match="adapter is an adapter itself"):
        open_checkpoint(tmp_path / "adapter", base=tmp_path / "adapter")
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({name: torch.ones(8, 8)}, tmp_path / "other" / "model.safetensors")
    with open_checkpoint(tmp_path / "adapter", base=tmp_path / "other") as narrow:
        assert "3 parts of the adapter fit no weight" in narrow.caveats[-1]
        with pytest.raises(LocaterError, match=r"is \(8, 8\), and the adapter's factors are"):
            narrow.read([name])


def test_an_adapter_without_its_settings_says_what_is_missing(tmp_path: Path) -> None:
    adapted(tmp_path, "llama", **PLAIN)
    (tmp_path / "adapter" / "adapter_config.json").unlink()
    with pytest.raises(LocaterError, match="LoRA factors without the weights") as caught:
        open_checkpoint(tmp_path / "adapter", base=tmp_path / "base")
    assert "adapter_config.json" in str(caught.value.hint) and "--base" in str(caught.value.hint)


def test_two_adapters_in_one_file_are_not_added_up(tmp_path: Path) -> None:
    factors = {
        f"q_proj.lora_{side}.{adapter}.weight": torch.ones(2, 2)
        for side in "AB"
        for adapter in ("one", "two")
    }
    base = {"q_proj.base_layer.weight": torch.ones(2, 2)}
    torch.save(factors | base, tmp_path / "both.pt")
    with pytest.raises(LocaterError, match="holds several adapters: one, two"):
        open_checkpoint(tmp_path / "both.pt", config={"lora_alpha": 1})
