"""Make the model that ships as `demo`: a finished run of the laboratory, as transformers reads it.

    locater train --preset modern --layers 4 --kv-heads 4 --tokens 128 --steps 3000 \
        --learning-rate 3e-3 --evaluations 10 --seed 1 --out demo-run
    python benchmarks/make_demo.py demo-run

The run's best model (on the valid text), its vocabulary and a text of this project's own guides go
to src/locater/models/demo; the recipe is kept beside them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from locater.paper.lab import text

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "src/locater/models/demo"
NAMES = {
    "self_attn.out_proj": "self_attn.o_proj", "fc1": "mlp.up_proj", "gate": "mlp.gate_proj",
    "fc2": "mlp.down_proj", "attn_norm_before": "input_layernorm",
    "ffn_norm_before": "post_attention_layernorm", "final_norm": "norm",
}  # fmt: skip


def llama_config(settings: dict[str, Any]) -> dict[str, Any]:
    """The run's shape as a config of transformers' Llama."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": settings["vocabulary_size"],
        "hidden_size": settings["dim"],
        "intermediate_size": settings["ffn"],
        "num_hidden_layers": settings["layers"],
        "num_attention_heads": settings["heads"],
        "num_key_value_heads": settings["kv_heads"],
        "max_position_embeddings": 4 * settings["tokens"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "dtype": "bfloat16",
    }


def llama_state(state: dict[str, torch.Tensor], dim: int) -> dict[str, torch.Tensor]:
    """The weights by Llama's names; the laboratory scales embeddings by √d, Llama does not."""
    renamed = {}
    for name, value in state.items():
        for mine, theirs in NAMES.items():
            name = name.replace(mine, theirs)
        renamed[f"model.{name}"] = value
    embedding = renamed.pop("model.embedding.weight")
    renamed["model.embed_tokens.weight"] = embedding * dim**0.5
    renamed["lm_head.weight"] = renamed.pop("model.output.weight", embedding)
    return {name: value.to(torch.bfloat16).contiguous() for name, value in renamed.items()}


def vocabulary(size: int) -> Any:
    """The run's vocabulary of pieces, learned again from the same text."""
    from tokenizers import decoders

    texts = text.embedded_text(text.cache_folder())
    tokenizer = text.learned_tokenizer(texts["train"], size)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def guides() -> str:
    """The prose of this project's guides, one paragraph a line, as the laboratory's texts are."""
    pages = sorted(ROOT.glob("docs/*.md"))
    lines = [
        " ".join(text.tokenize(paragraph))
        for page in pages
        for paragraph in text.paragraphs(page.read_text(encoding="utf-8"))
    ]
    return "\n".join(lines) + "\n"


def main(run: Path) -> None:
    """Write the demo's folder."""
    settings = json.loads((run / "config.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    DEMO.mkdir(exist_ok=True)
    last = max(run.glob("checkpoints/*"))
    kept = load_file(last / "state.safetensors")
    best = {name[5:]: value for name, value in kept.items() if name.startswith("best.")}
    save_file(llama_state(best, settings["dim"]), DEMO / "model.safetensors")
    (DEMO / "model.safetensors").chmod(0o644)
    (DEMO / "config.json").write_text(json.dumps(llama_config(settings), indent=2) + "\n")
    vocabulary(settings["vocabulary_size"]).save(str(DEMO / "tokenizer.json"), pretty=False)
    (DEMO / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": text.EOS}) + "\n"
    )
    (DEMO / "text.txt").write_text(guides(), encoding="utf-8")
    end = {name: value for name, value in lines[-1].items() if isinstance(value, int | float)}
    recipe = {"settings": settings, "end": end, "made by": "benchmarks/make_demo.py"}
    (DEMO / "recipe.json").write_text(json.dumps(recipe, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
