"""A GGUF file's attention is that of the model it was converted from, as llama.cpp converts it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints.test_open import write_gguf
from torch import Tensor

from locater import audit_checkpoint
from locater.audit.table import Audit

COMMON = {"hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 4, "vocab_size": 32,
          "num_key_value_heads": 2, "num_hidden_layers": 4, "head_dim": 8}  # fmt: skip
MOE = {"num_local_experts": 2, "num_experts_per_tok": 1}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # architecture: (model type, more of its config, metadata beyond the usual)
    "llama": ("llama", {"rope_theta": 5e5}, {"rope.freq_base": 5e5}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "smollm3": ("smollm3", {"pad_token_id": 0, "rope_theta": 1e4}, {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 8, "sliding_window": 4},
               {"attention.sliding_window": 4}),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 8, "sliding_window": 4,
                               "rope_theta": 1e6}, {"attention.sliding_window": 4,
                                                    "rope.freq_base": 1e6}),
    "gpt-oss": ("gpt_oss", MOE | {"rope_theta": 1.5e5, "sliding_window": 4, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1.5e5}},
                {"rope.freq_base": 1.5e5, "attention.sliding_window": 4}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.5}, {"rope.dimension_count": 4}),
    "starcoder2": ("starcoder2", {"sliding_window": None}, {}),
}  # fmt: skip


def tiny(model_type: str, settings: Mapping[str, Any], folder: Path) -> dict[str, Tensor]:
    """A model of transformers with random weights, saved; returns its tensors."""
    from transformers import AutoConfig, AutoModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModel.from_config(AutoConfig.for_model(model_type, **settings))
        generator = torch.Generator().manual_seed(0)
        for value in model.parameters():
            drawn = torch.randn(value.shape, generator=generator)
            value.data = (0.3 * drawn + (value.ndim == 1)).to(value)
        model.save_pretrained(folder)
    return dict(model.state_dict())


def converted(arch: str, tensors: Mapping[str, Tensor], heads: int, layers: int) -> dict[str, Any]:
    """The attention's tensors under llama.cpp's names, in its order of rows."""
    import gguf

    kind = gguf.GGMLQuantizationType.F32
    known = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(known, layers)
    found = {}
    for name, value in tensors.items():
        stem = name if arch.startswith("t5") else f"model.{name}"
        there = names.get_name(stem, try_suffixes=(".weight", ".bias"))
        if there is None or "attn" not in there:
            continue
        if arch in ("llama", "smollm3") and ("q_proj" in name or "k_proj" in name):
            count = heads if "q_proj" in name else COMMON["num_key_value_heads"]
            value = value.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
        if "norm" in there and arch.startswith("gemma"):
            value = value + 1
        found[there] = (value.contiguous().float(), kind)
    return found


def metadata(arch: str, more: Mapping[str, Any]) -> dict[str, Any]:
    usual = {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 8,
             "block_count": 4, "embedding_length": 32, "context_length": 64}  # fmt: skip
    return spelled(arch, {**usual, **more})


def spelled(arch: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata as `write_gguf` takes it."""
    return {f"{arch}.{key}".replace(".", "__"): value for key, value in said.items()}


def assert_same_heads(ours: Audit, theirs: Audit) -> None:
    assert len(ours.rows) == len(theirs.rows)
    for one, other in zip(ours.rows, theirs.rows, strict=True):
        assert (one.layer, one.head, one.kind) == (other.layer, other.head, other.kind)
        size = {"trace_of_square": other.frobenius_squared, "r": other.eta}  # terms may cancel
        for column in ("temperature", "r", "eta", "trace_of_square", "peak"):
            expected = pytest.approx(
                getattr(other, column), rel=1e-5, abs=1e-5 * size.get(column, 0)
            )
            assert getattr(one, column) == expected, column
        error = one.entropy_error + other.entropy_error  # other rows of keys, other draws
        assert abs(one.entropy - other.entropy) < 5 * error + 1e-6


@pytest.mark.parametrize("arch", CASES)
@pytest.mark.parametrize("offset", [0, 3])
def test_heads_are_those_of_the_model_it_was_made_of(
    arch: str, offset: int, tmp_path: Path
) -> None:
    model_type, settings, more = CASES[arch]
    tensors = tiny(model_type, {**COMMON, **settings}, tmp_path / "model")
    write_gguf(tmp_path / "a.gguf", converted(arch, tensors, 4, 4), arch, **metadata(arch, more))
    ours = audit_checkpoint(tmp_path / "a.gguf", tokens=16, offset=offset)
    theirs = audit_checkpoint(tmp_path / "model", tokens=16, offset=offset)
    assert_same_heads(ours, theirs)
    for word in ("window", "sink", "norm of queries", "qk-norm"):
        said = [any(word in caveat for caveat in audit.caveats) for audit in (ours, theirs)]
        assert said[0] == said[1], (word, ours.caveats, theirs.caveats)


def test_t5_has_its_bias_its_temperature_and_its_cross_attention(tmp_path: Path) -> None:
    settings = {"d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 16, "num_layers": 2,
                "vocab_size": 32, "num_decoder_layers": 2}  # fmt: skip
    tensors = tiny("t5", settings, tmp_path / "model")
    file = converted("t5", tensors, 4, 2)
    said = {"attention.head_count": 4, "attention.key_length": 8, "embedding_length": 32,
            "block_count": 2, "attention.relative_buckets_count": 32}  # fmt: skip
    write_gguf(tmp_path / "a.gguf", file, "t5", **spelled("t5", said))
    ours, theirs = (
        audit_checkpoint(tmp_path / name, tokens=16, gains=False) for name in ("a.gguf", "model")
    )
    assert {row.kind for row in ours.rows} == {"self", "cross"}
    assert_same_heads(ours, theirs)


def test_bloom_has_its_bias_by_distance(tmp_path: Path) -> None:
    settings = {"hidden_size": 32, "n_head": 4, "n_layer": 2, "vocab_size": 32}
    tensors = tiny("bloom", settings, tmp_path / "model")
    file = {}
    import gguf

    kind = gguf.GGMLQuantizationType.F32
    for layer in range(2):
        for leaf in ("weight", "bias"):
            value = tensors[f"h.{layer}.self_attention.query_key_value.{leaf}"]
            apart = value.unflatten(0, (4, 3, 8)).transpose(0, 1).flatten(0, 2)
            file[f"blk.{layer}.attn_qkv.{leaf}"] = (apart.contiguous(), kind)
            norm = tensors[f"h.{layer}.input_layernorm.{leaf}"]
            file[f"blk.{layer}.attn_norm.{leaf}"] = (norm, kind)
    said = {"bloom__attention__head_count": 4, "bloom__block_count": 2,
            "bloom__embedding_length": 32}  # fmt: skip
    write_gguf(tmp_path / "a.gguf", file, "bloom", **said)
    ours, theirs = (audit_checkpoint(tmp_path / name, tokens=16) for name in ("a.gguf", "model"))
    assert_same_heads(ours, theirs)


def test_every_layer_may_have_its_own_number_of_heads(tmp_path: Path) -> None:
    import gguf

    kind = gguf.GGMLQuantizationType.F32
    file = {}
    for layer, (heads, shared) in enumerate(((2, 1), (4, 2))):
        file[f"blk.{layer}.attn_q.weight"] = (torch.randn(8 * heads, 32), kind)
        file[f"blk.{layer}.attn_k.weight"] = (torch.randn(8 * shared, 32), kind)
    said = {"attention.head_count": [2, 4], "attention.head_count_kv": [1, 2], "block_count": 2,
            "attention.key_length": 8, "embedding_length": 32}  # fmt: skip
    write_gguf(tmp_path / "a.gguf", file, "deci", **spelled("deci", said))
    audit = audit_checkpoint(tmp_path / "a.gguf", tokens=8)
    assert [(row.layer, row.kv_head) for row in audit.rows] == [
        (0, 0), (0, 0), (1, 0), (1, 0), (1, 1), (1, 1),
    ]  # fmt: skip
    assert not audit.skipped
