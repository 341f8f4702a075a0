"""Claim: an audit with all columns takes under 4 times one pass of Gram products over its weights.

From file to table on random checkpoints of the shapes of GPT-2 small (float32) and Llama-3.2-1B
(bfloat16), whole, with their vocabularies.  Every variant runs in a process of its own, CPU time,
with one thread for every BLAS in it (OpenBLAS of NumPy and SciPy too: unbound, its idle threads
count as work), imports and one small warm-up left out:

- ours: `audit_checkpoint`, all columns; and without eigenvalues;
- TransformerLens: load the model, take the eigenvalues of its QK FactoredMatrix, nothing else;
- WeightWatcher: load the model, analyze() (which also fits power laws, to all its layers);
- dense: W_QK = W_Qᵀ W_K and its eigenvalues for a sample of heads, times all heads;
- limit: read the bytes of queries and keys once, one pass of the three Gram products, in float64
  and in float32.

Then the peak memory on four sharded layers of the shape of Llama-70B.  The aims: TransformerLens
takes 3 times as long on Llama-1B and 1.8 times on GPT-2, the audit without eigenvalues takes twice
the float32 limit, and memory is about one layer's queries and keys (144 MiB) plus a constant.

Peers are installed once into an environment of their own under out/bench_audit; what cannot be
installed is named and left out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timing import Timing, ratio

ROOT = Path(__file__).parents[1]
CACHE = ROOT / "out" / "bench_audit"
PEERS = CACHE / "peers" / "bin" / "python"


@dataclass(frozen=True)
class Shape:
    config: dict[str, Any]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    model: int
    hidden: int
    sampled_heads: int
    repeats: int
    dtype: torch.dtype = torch.bfloat16


GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50_257}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "tie_word_embeddings": True,
}
LARGE = LLAMA | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
}
SHAPES = {
    "gpt2-small": Shape(GPT2, 12, 12, 12, 64, 768, 3072, 4, 5, torch.float32),
    "llama-1b": Shape(LLAMA, 16, 32, 8, 64, 2048, 8192, 1, 3),
    "llama-70b": Shape(LARGE, 4, 64, 8, 128, 8192, 28672, 0, 1),
}


def tensors_of(name: str, layer: int) -> dict[str, tuple[int, ...]]:
    """The weights of one layer as Hugging Face names them."""
    shape = SHAPES[name]
    d, hidden = shape.model, shape.hidden
    if name == "gpt2-small":
        at = f"transformer.h.{layer}"
        sizes = {"attn.c_attn": (d, 3 * d), "attn.c_proj": (d, d), "mlp.c_fc": (d, hidden),
                 "mlp.c_proj": (hidden, d)}  # fmt: skip
        weights = {f"{at}.{part}.weight": size for part, size in sizes.items()}
        biases = {f"{at}.{part}.bias": size[1:] for part, size in sizes.items()}
        norms = {f"{at}.ln_{k}.{part}": (d,) for k in (1, 2) for part in ("weight", "bias")}
        return weights | biases | norms
    at, rows, kv = f"model.layers.{layer}", shape.heads * shape.head_dim, shape.kv_heads
    found = {
        f"{at}.self_attn.q_proj.weight": (rows, d),
        f"{at}.self_attn.k_proj.weight": (kv * shape.head_dim, d),
        f"{at}.self_attn.v_proj.weight": (kv * shape.head_dim, d),
        f"{at}.self_attn.o_proj.weight": (d, rows),
        f"{at}.input_layernorm.weight": (d,),
        f"{at}.post_attention_layernorm.weight": (d,),
    }
    if name == "llama-70b":  # attention alone: nothing else is read, and disks are small
        return found
    for part, size in (("gate", (hidden, d)), ("up", (hidden, d)), ("down", (d, hidden))):
        found[f"{at}.mlp.{part}_proj.weight"] = size
    return found


def make(name: str) -> Path:
    """Write a random checkpoint once, one shard per layer."""
    from safetensors.torch import save_file

    folder, shape = CACHE / name, SHAPES[name]
    if (folder / "tokenizer.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    prefix = "transformer." if name == "gpt2-small" else "model."
    ends = {
        f"{prefix}{'wte' if name == 'gpt2-small' else 'embed_tokens'}.weight": shape.config[
            "vocab_size"
        ]
    }
    ends |= {"transformer.wpe.weight": 1024} if name == "gpt2-small" else {}
    final = "transformer.ln_f" if name == "gpt2-small" else "model.norm"
    homes: dict[str, str] = {}
    for layer in range(shape.layers + 1):
        sizes = (
            tensors_of(name, layer)
            if layer < shape.layers
            else {key: (rows, shape.model) for key, rows in ends.items()}
            | {f"{final}.weight": (shape.model,)}
            | ({f"{final}.bias": (shape.model,)} if name == "gpt2-small" else {})
        )
        shard = f"model-{layer + 1:05d}-of-{shape.layers + 1:05d}.safetensors"
        drawn = {
            key: (
                torch.ones(size)
                if len(size) == 1
                else torch.randn(size, generator=generator).mul_(0.02)
            ).to(shape.dtype)
            for key, size in sizes.items()
        }
        save_file(drawn, folder / shard, metadata={"format": "pt"})
        homes |= dict.fromkeys(drawn, shard)
    (folder / "config.json").write_text(json.dumps(shape.config))
    index = {"metadata": {}, "weight_map": homes}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Any tokenizer: TransformerLens wants one."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    made = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="b", eos_token="b")
    made.save_pretrained(folder)


def audit(name: str, *, eigenvalues: bool = True) -> int:
    from locater import audit_checkpoint

    return len(audit_checkpoint(CACHE / name, eigenvalues=eigenvalues).worst_first())


def factors(
    name: str, layer: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys of one layer by heads, straight from its shard."""
    from safetensors import safe_open

    shape = SHAPES[name]
    shard = CACHE / name / f"model-{layer + 1:05d}-of-{shape.layers + 1:05d}.safetensors"
    with safe_open(shard, "pt") as file:
        if name == "gpt2-small":
            part = file.get_slice(f"transformer.h.{layer}.attn.c_attn.weight")
            both = part[:, : 2 * shape.model].T.to(dtype)
            query, key = both[: shape.model], both[shape.model :]
        else:
            at = f"model.layers.{layer}.self_attn"
            query, key = (file.get_tensor(f"{at}.{side}_proj.weight").to(dtype) for side in "qk")
    return tuple(side.unflatten(0, (-1, shape.head_dim)) for side in (query, key))  # type: ignore[return-value]


def limit(name: str, dtype: torch.dtype = torch.float64) -> None:
    shape = SHAPES[name]
    for layer in range(shape.layers):
        query, key = factors(name, layer, dtype)
        group = query.reshape(len(key), -1, shape.model)
        for products in (query @ query.mT, key @ key.mT, group @ key.mT):
            products.square().sum()


def dense(name: str) -> None:
    shape = SHAPES[name]
    query, key = factors(name, 0)
    for head in range(shape.sampled_heads):
        own = query[head].float().mT @ key[head * shape.kv_heads // shape.heads].float()
        torch.linalg.eigvals(own)


def hf_model(name: str, layers: int | None = None) -> Any:
    from transformers import AutoModelForCausalLM

    more = {} if layers is None else {"num_hidden_layers": layers}
    return AutoModelForCausalLM.from_pretrained(CACHE / name, dtype=torch.float32, **more)


def transformer_lens(name: str) -> None:
    """Its own loader, TransformerBridge, on the folder; then the QK circuit's eigenvalues."""
    from transformer_lens.model_bridge import TransformerBridge

    shape = SHAPES[name]
    model = TransformerBridge.boot_transformers(
        str(CACHE / name), hf_model=hf_model(name), device="cpu"
    )
    with torch.no_grad():
        values = model.QK.eigenvalues
    assert values.shape == (shape.layers, shape.heads, shape.head_dim)


def weight_watcher(name: str) -> None:
    import weightwatcher

    layers = None if name == "gpt2-small" else 1
    weightwatcher.WeightWatcher(model=hf_model(name, layers)).analyze()


def memory(what: str) -> float:
    """This process' memory in MB: VmRSS now, VmHWM at most since `clear_refs` (Linux)."""
    (line,) = re.findall(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) / 1024


def peak(name: str) -> float:
    audit("gpt2-small")  # libraries load here
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    audit(name)
    return memory("VmHWM") - before


WORK: dict[str, Callable[[str], object]] = {
    "ours": audit,
    "sums": lambda name: audit(name, eigenvalues=False),
    "limit": limit,
    "limit32": lambda name: limit(name, torch.float32),
    "dense": dense,
    "TransformerLens": transformer_lens,
    "WeightWatcher": weight_watcher,
}
MODULES = {"TransformerLens": "transformer_lens", "WeightWatcher": "weightwatcher"}


def measure(variant: str, name: str) -> None:
    """One variant in this process; print its CPU seconds."""
    torch.set_num_threads(1)
    if variant == "memory":
        print(json.dumps(peak(name)))
        return
    if variant in MODULES:
        __import__(MODULES[variant])
        hf_model("gpt2-small", 1)
        repeats = 1
    else:
        if variant in ("ours", "sums"):
            from locater import audit_model

            audit_model(torch.nn.MultiheadAttention(64, 1))
        repeats = SHAPES[name].repeats
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        WORK[variant](name)
        seconds.append(time.process_time() - start)
    print(json.dumps(seconds))


def in_process(variant: str, name: str) -> Any:
    """Run a variant apart; None, with the reason said, where a peer fails."""
    python = str(PEERS) if variant in MODULES else sys.executable
    command = [python, __file__, variant, name]
    bound = {f"{blas}_NUM_THREADS": "1" for blas in ("OMP", "MKL", "OPENBLAS", "VECLIB", "NUMEXPR")}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **bound})
    if done.returncode and variant in MODULES:
        print(f"  {variant} left out: {(done.stderr.splitlines() or ['no output'])[-1]}")
        return None
    done.check_returncode()
    return json.loads(done.stdout.splitlines()[-1])


def install_peers() -> None:
    if PEERS.exists():
        return
    print("installing the peers into an environment of their own (once)", flush=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", str(CACHE / "peers")], check=True)
    pip = [str(PEERS), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    for package in ("transformer_lens", "weightwatcher"):
        limits = ["-c", str(ROOT / "constraints.txt")]
        if subprocess.run([*pip, *limits, package]).returncode:
            print(f"{package} could not be installed")


def main() -> None:
    install_peers()
    for name, shape in SHAPES.items():
        make(name)
        if name == "llama-70b":
            continue
        print(f"{name}: {shape.layers} layers of {shape.heads} heads", flush=True)
        found: dict[str, Timing] = {}
        for variant in WORK:
            seconds = in_process(variant, name)
            if seconds is None:
                continue
            timing = Timing(seconds)
            if variant == "dense":
                timing = timing.times(shape.layers * shape.heads / shape.sampled_heads)
            if variant == "WeightWatcher" and name != "gpt2-small":
                timing = timing.times(shape.layers)
            found[variant] = timing
            note = ""
            if variant == "dense":
                note = f" (from {shape.sampled_heads} heads)"
            elif variant == "WeightWatcher" and name != "gpt2-small":
                note = f" (from 1 layer, times {shape.layers})"
            print(f"  {variant}: {timing}{note}", flush=True)
        for variant in ("TransformerLens", "WeightWatcher", "dense"):
            if variant in found:
                print(f"  ours is {ratio(found[variant], found['ours'])} faster than {variant}")
        for bound in ("limit", "limit32"):
            print(f"  without eigenvalues {ratio(found['sums'], found[bound])} of the {bound}")
        print(f"  with eigenvalues {ratio(found['ours'], found['limit'])} of the limit", flush=True)
    layer = 2 * (8192 + 1024) * 8192 / 2**20
    growth = in_process("memory", "llama-70b")
    print(
        f"llama-70b, 4 sharded layers: peak memory {growth:.0f} MB above the libraries; one "
        f"layer's queries and keys are {layer:.0f} MB"
    )


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        measure(sys.argv[1], sys.argv[2])
