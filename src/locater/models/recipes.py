"""Where each family of models keeps its queries and keys: one table, for live models and files.

A recipe needs tensor names, their shapes and a config mapping (`config.json`), nothing else, so the
same row reads a checkpoint on disk and a model in training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from locater.models.layout import AttentionLayout as AttentionLayout
from locater.models.layout import Projection as Projection
from locater.models.layout import Skipped as Skipped
from locater.models.names import Shapes as Shapes
from locater.models.positions import Config as Config
from locater.models.positions import RotarySpec as RotarySpec
from locater.models.resolve import Recipe as Recipe
from locater.models.resolve import layouts_by_config

NAMES_CAVEAT = "recognized by its tensor names alone; temperature and positions are assumed"
MLA_REASON = (
    "multi-head latent attention normalizes between its low-rank factors, "
    "so no fixed W_QK exists; measure the running model instead"
)


def unscaled(config: Config, head_dim: int, layer: int) -> float:
    """λ = 1 (T5, GPT-Neo)."""
    return 1.0


def said_by_module(config: Config, head_dim: int, layer: int) -> float:
    """λ from a live module's `scaling` or `scale`, as factor or divisor; else √head_dim."""
    scale = config.get("scaling", config.get("scale"))
    if not isinstance(scale, float) or scale <= 0:
        return math.sqrt(head_dim)
    return scale if scale > 1 else 1 / scale


def _gpt2_temperature(config: Config, head_dim: int, layer: int) -> float:
    root = math.sqrt(head_dim) if config.get("scale_attn_weights", True) else 1.0
    return root * (layer + 1 if config.get("scale_attn_by_inverse_layer_idx") else 1)


def _gemma_temperature(config: Config, head_dim: int, layer: int) -> float:
    return math.sqrt(config.get("query_pre_attn_scalar") or 256)


def _deberta_temperature(config: Config, head_dim: int, layer: int) -> float:
    terms = config.get("pos_att_type") or () if config.get("relative_attention") else ()
    return math.sqrt(head_dim * (1 + ("c2p" in terms) + ("p2c" in terms)))


def _granite_temperature(config: Config, head_dim: int, layer: int) -> float:
    return 1 / float(config.get("attention_multiplier") or 1.0)


DEFAULTS: dict[str, dict[str, Any]] = {
    "clip_text_model": {"num_attention_heads": 8},
    "clip_vision_model": {"num_attention_heads": 12},
    "siglip_text_model": {"num_attention_heads": 12},
    "siglip_vision_model": {"num_attention_heads": 12},
    "llama": {"num_attention_heads": 32},
    "mistral": {"num_attention_heads": 32},
    "qwen2": {"num_attention_heads": 32},
    "qwen3": {"num_attention_heads": 32, "head_dim": 128},
    "gemma": {"num_attention_heads": 16, "head_dim": 256},
    "gemma2": {"num_attention_heads": 8, "head_dim": 256, "query_pre_attn_scalar": 256},
    "gemma3_text": {
        "num_attention_heads": 8,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
    },
}
"""What a model type assumes where its config is silent: composite configs leave defaults out."""

_PROJ = Recipe(family="projections", query="q_proj", key="k_proj", defaults=DEFAULTS)
_ROTARY = replace(_PROJ, rotary="half", part="decoder")
_FUSED = Recipe(family="fused", query="query_key_value", packing="grouped", part="decoder")
_NAMED = Recipe(family="named", query="query", key="key")
_BERT = ("bert", "roberta", "xlm-roberta", "camembert", "electra")
_SEQ2SEQ = ("bart", "mbart", "marian", "pegasus", "m2m_100", "whisper")
_CLIP = ("clip", "clip_text_model", "clip_vision_model")
_SIGLIP = ("siglip", "siglip_text_model", "siglip_vision_model")
_VIT = ("vit", "deit", "dinov2")
_GGUF = Recipe(
    family="gguf", query="attn_q", key="attn_k", part="decoder", temperature=said_by_module
)
_GGUF_ANY = replace(_GGUF, rotary="half if configured", position_bias="alibi")  # if configured
_GPT2 = Recipe(family="gpt2", query="c_attn", part="decoder", temperature=_gpt2_temperature)
_LIN = Recipe(family="q_lin", query="q_lin", key="k_lin", part="encoder")
_DEBERTA = Recipe(
    family="deberta",
    query="query_proj",
    key="key_proj",
    temperature=_deberta_temperature,
    caveats=("products of tokens with position embeddings are added to the logits",),
)
_GPT2_CROSS = replace(_GPT2, query="q_attn", key="c_attn", transposed=True, key_parts=2)
_T5 = Recipe(family="t5", query="q", key="k", position_bias="t5")
_ANY = Recipe(family="", query="", temperature=said_by_module, caveats=(NAMES_CAVEAT,))

RECIPES: tuple[Recipe, ...] = (
    # rotary positions
    replace(_ROTARY, model_types=("llama", "mistral", "mixtral", "starcoder2", "smollm3")),
    replace(_ROTARY, model_types=("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")),
    replace(_ROTARY, model_types=("phi", "stablelm", "olmo", "olmo2", "gpt_oss", "gemma")),
    replace(_ROTARY, model_types=("gemma2", "gemma3_text"), temperature=_gemma_temperature),
    replace(_ROTARY, model_types=("granite",), temperature=_granite_temperature),
    replace(_ROTARY, model_types=("gptj", "cohere"), rotary="interleaved"),
    replace(_ROTARY, model_types=("phi3",), query="qkv_proj", key=""),
    replace(_FUSED, model_types=("gpt_neox",), rotary="half"),
    replace(_FUSED, model_types=("falcon",), rotary="half", position_bias="scaled alibi"),
    replace(_ROTARY, model_types=("modernbert",), query="Wqkv", key="", part="encoder"),
    replace(_GGUF, model_types=("llama",), rotary="interleaved"),  # llama.cpp reorders these heads
    replace(_GGUF_ANY, caveats=(NAMES_CAVEAT,)),
    replace(_GGUF_ANY, query="attn_qkv", key="", caveats=(NAMES_CAVEAT,)),
    # a bias by distance
    replace(_FUSED, model_types=("bloom",), position_bias="alibi"),
    replace(_T5, model_types=("t5", "mt5", "umt5", "switch_transformers"), temperature=unscaled),
    replace(_T5, model_types=("mpnet",)),
    # absolute positions
    replace(_GPT2_CROSS, model_types=("gpt2",)),
    replace(_GPT2, transposed=None, model_types=("gpt2", "gpt_bigcode", "openai-gpt")),
    replace(_PROJ, model_types=("gpt_neo",), part="decoder", temperature=unscaled),
    replace(_PROJ, model_types=("opt", *_SEQ2SEQ, *_CLIP, *_SIGLIP, "wav2vec2", "hubert")),
    replace(_PROJ, model_types=_VIT, part="vision"),
    replace(_NAMED, model_types=_VIT, part="vision"),  # as stored by earlier versions
    replace(_NAMED, model_types=_BERT),
    replace(_NAMED, model_types=("esm",), rotary="half if configured"),
    replace(_NAMED, model_types=("albert",), caveats=("one set of weights serves all layers",)),
    replace(_LIN, model_types=("distilbert",)),
    replace(_DEBERTA, model_types=("deberta-v2",)),
    Recipe(family="multihead", query="in_proj_weight"),
    Recipe(family="multihead", query="q_proj_weight", key="k_proj_weight"),
    # known not to have a form
    Recipe(family="mla", query="kv_a_proj_with_mqa", skip=MLA_REASON),
    # whatever else bears these names: fairseq, nanoGPT, timm, diffusers, a user's own
    replace(_ANY, family="q_proj", query="q_proj", key="k_proj", rotary="half if configured"),
    replace(_ANY, family="nanogpt", query="c_attn", transposed=None, rotary="half if configured"),
    replace(_ANY, family="llama", query="wq", key="wk", rotary="interleaved"),
    replace(_ANY, family="query", query="query", key="key", rotary="half if configured"),
    replace(_ANY, family="q_lin", query="q_lin", key="k_lin"),
    replace(_ANY, family="q", query="q", key="k"),
    replace(_ANY, family="to_q", query="to_q", key="to_k"),
    replace(_ANY, family="qkv", query="qkv"),
    replace(_ANY, family="to_qkv", query="to_qkv"),
)


def layouts(
    shapes: Shapes, config: Config, *, recipes: Sequence[Recipe] = RECIPES
) -> tuple[list[AttentionLayout], list[Skipped]]:
    """Find every attention among named tensors, and say which could not be read and why.

    >>> shapes = {"h.0.attn.c_attn.weight": (8, 24), "h.0.attn.c_attn.bias": (24,)}
    >>> (found,), skipped = layouts(shapes, {"model_type": "gpt2", "n_head": 2})
    >>> found.family, found.heads, found.key.start, found.key.transposed
    ('gpt2', 2, 8, True)
    """
    return layouts_by_config(shapes, lambda attention: config, recipes=recipes)
