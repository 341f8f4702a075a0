"""Thousands of damaged and hostile checkpoints through the real command; prints what escaped.

    python tests/checkpoints/fuzz.py COUNT SEED

A case is good if `locater audit` ends with 0 or with 1 and an error that has a hint, within its
time and memory.  Every line of output is a case that is not.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import save_file

from locater.cli import main

SECONDS = 30
BYTES = 3 << 30
ODD: list[Any] = [
    None, -1, 0, 1, 3, 7, 10**9, 2**63, 10**310, 1e308, -1e308, 1e-320, float("inf"), float("nan"),
    0.5, "", "x", "q" * 5000, "\ud800", "../..", [], {}, [1], [None], {"a": 1}, True, False,
    [[[]]], {"rope_type": "yarn"}, {"type": "linear", "factor": 0}, {"rope_type": "llama3"},
    {"rope_type": "longrope", "short_factor": "x", "long_factor": []}, ["full_attention", 3],
    {"rope_type": "dynamic", "factor": "big"}, {"factor": -4, "rope_type": "linear"},
    {"rope_type": "yarn", "factor": 1e308, "original_max_position_embeddings": 0},
]  # fmt: skip
KEYS = [
    "model_type", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size",
    "num_hidden_layers", "rope_scaling", "rope_theta", "rope_parameters", "partial_rotary_factor",
    "layer_types", "sliding_window", "quantization_config", "query_pre_attn_scalar", "n_head",
    "attention_multiplier", "text_config", "vision_config", "architectures", "torch_dtype",
    "max_position_embeddings", "attn_logit_softcapping", "rms_norm_eps", "no_rope_layers",
    "scale_attn_by_inverse_layer_idx", "rotary_pct", "alibi", "position_embedding_type",
]  # fmt: skip
ADAPTER_KEYS = [
    "peft_type", "r", "lora_alpha", "alpha_pattern", "rank_pattern", "use_rslora", "use_dora",
    "fan_in_fan_out", "init_lora_weights", "layer_replication", "base_model_name_or_path",
    "target_modules", "bias", "modules_to_save",
]  # fmt: skip
ADAPTER = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": None}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 1,
              "hidden_size": 8, "num_hidden_layers": 2, "rope_theta": 1e4},
    "gpt2": {"model_type": "gpt2", "n_head": 2, "n_embd": 8, "n_layer": 1},
    "t5": {"model_type": "t5", "num_heads": 2, "d_model": 8, "d_kv": 4, "num_layers": 1},
    "gemma2": {"model_type": "gemma2", "num_attention_heads": 2, "num_key_value_heads": 1,
               "hidden_size": 8, "head_dim": 4, "query_pre_attn_scalar": 4},
    "bert": {"model_type": "bert", "num_attention_heads": 2, "hidden_size": 8},
}  # fmt: skip


def weights(family: str, draw: random.Random) -> dict[str, torch.Tensor]:
    """The tensors of a tiny model of a family, as its files name them."""
    source = torch.Generator().manual_seed(draw.randrange(2**31))

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=source)

    if family == "gpt2":
        return {"h.0.attn.c_attn.weight": drawn(8, 24), "h.0.attn.c_attn.bias": drawn(24)}
    if family == "t5":
        stem = "encoder.block.0.layer.0.SelfAttention"
        return {f"{stem}.q.weight": drawn(8, 8), f"{stem}.k.weight": drawn(8, 8),
                f"{stem}.relative_attention_bias.weight": drawn(32, 2)}  # fmt: skip
    if family == "bert":
        stem = "encoder.layer.0.attention.self"
        return {f"{stem}.query.weight": drawn(8, 8), f"{stem}.key.weight": drawn(8, 8),
                f"{stem}.query.bias": drawn(8), f"{stem}.key.bias": drawn(8)}  # fmt: skip
    found = {}
    for layer in range(2):
        stem = f"model.layers.{layer}"
        found[f"{stem}.self_attn.q_proj.weight"] = drawn(8, 8)
        found[f"{stem}.self_attn.k_proj.weight"] = drawn(4, 8)
        found[f"{stem}.input_layernorm.weight"] = drawn(8)
    return found


def odd_config(folder: Path, draw: random.Random) -> list[str]:
    """One to three settings of a config have values that they cannot have."""
    family = draw.choice(list(CONFIGS))
    save_file(weights(family, draw), folder / "model.safetensors")
    config = dict(CONFIGS[family])
    for _ in range(draw.randint(1, 3)):
        config[draw.choice([*config, *KEYS])] = draw.choice(ODD)
    (folder / "config.json").write_text(json.dumps(config))
    return [str(folder)]


def odd_adapter(folder: Path, draw: random.Random) -> list[str]:
    """An adapter whose config is as odd, over a base that is not."""
    base, adapter = folder / "base", folder / "adapter"
    base.mkdir()
    adapter.mkdir()
    save_file(weights("llama", draw), base / "model.safetensors")
    (base / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    stem = "base_model.model.model.layers.0.self_attn.q_proj"
    rank = draw.choice([0, 1, 2, 2, 2, 3])
    factors = {f"{stem}.lora_A.weight": torch.ones(rank, 8),
               f"{stem}.lora_B.weight": torch.ones(8, draw.choice([rank, rank, 5]))}  # fmt: skip
    save_file(factors, adapter / "adapter_model.safetensors")
    config: dict[str, Any] = dict(ADAPTER)
    for _ in range(draw.randint(1, 3)):
        config[draw.choice(ADAPTER_KEYS)] = draw.choice(ODD)
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return [str(adapter), *(["--base", str(base)] if draw.random() < 0.7 else [])]


VALUES = (float("inf"), float("nan"), 0.0, 3e38, 1e-45, -1e20, 1.0)


def odd_tensors(folder: Path, draw: random.Random) -> list[str]:
    """Tensors with values, dtypes or shapes that no weight has."""
    family = draw.choice(list(CONFIGS))
    found = weights(family, draw)
    for _ in range(draw.randint(1, 2)):
        name = draw.choice(list(found))
        tensor, kind = found[name], draw.randrange(6)
        if kind == 0:
            found[name] = torch.full_like(tensor, draw.choice(VALUES))
        elif kind == 1:
            tensor.view(-1)[draw.randrange(max(tensor.numel(), 1))] = draw.choice(VALUES)
        elif kind == 2:
            names = "int8 int64 bool float64 float16 bfloat16 float8_e4m3fn complex64 uint8"
            dtypes = [getattr(torch, word) for word in names.split()]
            found[name] = tensor.to(draw.choice(dtypes))
        elif kind == 3:
            found[name] = torch.zeros([draw.choice([0, 1, 3, 8]) for _ in tensor.shape])
        elif kind == 4:
            found[name] = tensor[None] if draw.random() < 0.5 else tensor.flatten()
        else:
            found[name] = tensor.double() * draw.choice([1e150, 1e300, 1e-300])
    save_file({name: tensor.contiguous() for name, tensor in found.items()},
              folder / "model.safetensors")  # fmt: skip
    (folder / "config.json").write_text(json.dumps(CONFIGS[family]))
    return [str(folder)]


def flipped(path: Path, draw: random.Random, within: int) -> None:
    """Change, cut or add some bytes near the beginning of a file."""
    raw = bytearray(path.read_bytes())
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(min(within, len(raw)) or 1)
        kind = draw.randrange(4)
        if kind == 0 and raw:
            raw[place] = draw.randrange(256)
        elif kind == 1 and raw:
            del raw[place : place + draw.randint(1, 16)]
        elif kind == 2:
            raw[place:place] = bytes(draw.randrange(256) for _ in range(draw.randint(1, 16)))
        else:
            raw[place:place] = raw[place : place + draw.randint(1, 64)]
    path.write_bytes(bytes(raw if draw.random() < 0.9 else raw[: draw.randrange(len(raw) or 1)]))


def odd_header(folder: Path, draw: random.Random) -> list[str]:
    """A safetensors file with bytes changed in its header."""
    save_file(weights("llama", draw), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    flipped(folder / "model.safetensors", draw, 900)
    return [str(folder)]


def odd_pickle(folder: Path, draw: random.Random) -> list[str]:
    """A PyTorch file with bytes changed anywhere, in the new format or in the old."""
    path = folder / "pytorch_model.bin"
    torch.save(weights("llama", draw), path, _use_new_zipfile_serialization=draw.random() < 0.7)
    (folder / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    flipped(path, draw, 10**6)
    return [str(folder)]


def odd_gguf(folder: Path, draw: random.Random) -> list[str]:
    """A GGUF file with bytes changed in its header."""
    import gguf

    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_embedding_length(8)
    for name, shape in (("blk.0.attn_q.weight", (8, 8)), ("blk.0.attn_k.weight", (4, 8))):
        writer.add_tensor(name, numpy.ones(shape, dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    flipped(path, draw, 400)
    return [str(path)]


KINDS: tuple[Callable[[Path, random.Random], list[str]], ...] = (
    odd_config, odd_config, odd_adapter, odd_tensors, odd_header, odd_pickle, odd_gguf,
)  # fmt: skip


def verdict(arguments: list[str]) -> str | None:
    """What is wrong with how the command took it; None where nothing is."""
    out, err = io.StringIO(), io.StringIO()
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(["audit", *arguments, "--tokens", "8", "--json"])
    except BaseException:  # noqa: BLE001  (whatever escapes is what is looked for)
        return traceback.format_exc()
    finally:
        signal.alarm(0)
    if "Traceback" in err.getvalue() or "this should not have happened" in err.getvalue():
        return err.getvalue()
    if code == 0:
        json.loads(out.getvalue())
        return None
    return None if code == 1 and "hint:" in err.getvalue() else f"{code}: {err.getvalue()}"


def hang(*_: object) -> None:
    """What the alarm does."""
    raise TimeoutError(f"more than {SECONDS} s")


def run(count: int, seed: int) -> int:
    """Try so many; returns how many were not good."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, hang)
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    bad = 0
    for place in range(count):
        draw = random.Random(f"{seed} {place}")
        kind = draw.choice(KINDS)
        folder = Path(tempfile.mkdtemp())
        try:
            wrong = verdict(kind(folder, draw))
        finally:
            shutil.rmtree(folder)
        if wrong is not None:
            bad += 1
            row = {"kind": kind.__name__, "case": f"{seed} {place}", "wrong": wrong}
            print(json.dumps(row))  # noqa: T201
    return bad


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.exit(bool(run(int(sys.argv[1]), int(sys.argv[2]))))
