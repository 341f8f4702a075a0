"""Where each family of models keeps its queries and keys: one table, for live models and files.

A row needs tensor names, their shapes and a config mapping (`config.json`), nothing else, so the
same row reads a checkpoint on disk and a model in training.  What a model type does otherwise than
its names tell stands in `TRAITS`; what transformers assumes of it, and whether its forms were found
to be its own, in two files that `python -m tests.coverage.sweep --publish` writes beside this one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, Literal

from locater.models.positions import Config, RelativeSpec

NAMES_CAVEAT = "recognized by its tensor names alone; temperature and positions are assumed"
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "nhead", "heads",
         "attention_heads")  # fmt: skip
"""How configs and modules spell the number of heads; a `decoder_attention_heads` comes first."""

Temperature = Callable[[Config, int, int], float]


def root_of_head(config: Config, head_dim: int, layer: int) -> float:
    """λ = √head_dim."""
    return math.sqrt(head_dim)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Where one family keeps its queries and keys.

    >>> from locater.models.resolve import layouts
    >>> mine = Recipe(family="mine", query="ask", key="answer")
    >>> shapes = {"blocks.0.mix.ask.weight": (8, 8), "blocks.0.mix.answer.weight": (8, 8)}
    >>> found, skipped = layouts(shapes, {"num_heads": 2}, recipes=[mine])
    >>> found[0].name, found[0].heads, found[0].head_dim
    ('blocks.0.mix', 2, 4)
    """

    family: str
    query: str
    """The query projection's name below its attention module: `q_proj`, or `in_proj_weight`."""
    key: str = ""
    """The key projection's name; empty where query, key and value share one tensor."""
    model_types: tuple[str, ...] = ()
    """The config's `model_type`s that this row reads; empty: any that no other row names."""
    packing: Literal["concatenated", "grouped", "four groups", "gate first"] = "concatenated"
    """How a shared tensor is cut: all queries, all keys, all values; or for every key head its
    queries, its key, its value; or in four groups of queries, values, keys."""
    transposed: bool | None = False
    """Stored as (model, rows); None: the longer side is the rows."""
    key_parts: int = 1
    """2 where the key's tensor holds keys, then values."""
    heads: tuple[str, ...] = HEADS
    """Config keys that may hold the number of heads."""
    temperature: Temperature = root_of_head
    """λ from the config, the head dimension and the layer."""
    rotary: Literal["half", "interleaved", "half if configured"] | None = None
    position_bias: Literal["alibi", "scaled alibi", "t5"] | None = None
    part: str = ""
    """Which part of a model it is, where the names do not tell."""
    caveats: tuple[str, ...] = ()
    is_latent: bool = False
    """Multi-head latent attention: `query` is the projection to the keys' latent vector."""


def said_by_module(config: Config, head_dim: int, layer: int) -> float:
    """λ from a live module's `scaling` or `scale`, as factor or divisor; else √head_dim."""
    scale = config.get("scaling", config.get("scale"))
    if not isinstance(scale, float) or scale <= 0:
        return math.sqrt(head_dim)
    return scale if scale > 1 else 1 / scale


def _gpt2_temperature(config: Config, head_dim: int, layer: int) -> float:
    root = math.sqrt(head_dim) if config.get("scale_attn_weights", True) else 1.0
    return root * (layer + 1 if config.get("scale_attn_by_inverse_layer_idx") else 1)


def _deberta_temperature(config: Config, head_dim: int, layer: int) -> float:
    terms = config.get("pos_att_type") or () if config.get("relative_attention") else ()
    return math.sqrt(head_dim * (1 + ("c2p" in terms) + ("p2c" in terms)))


_PROJ = Recipe(family="projections", query="q_proj", key="k_proj")
_ROTARY = replace(_PROJ, rotary="half", part="decoder")
_FUSED = Recipe(family="fused", query="query_key_value", packing="grouped", part="decoder")
_NAMED = Recipe(family="named", query="query", key="key")
_VIT = ("vit", "deit", "dinov2")
_GGUF = Recipe(
    family="gguf", query="attn_q", key="attn_k", part="decoder", temperature=said_by_module
)
_GGUF_ANY = replace(_GGUF, rotary="half if configured", position_bias="alibi")  # if configured
_GPT2 = Recipe(family="gpt2", query="c_attn", part="decoder", temperature=_gpt2_temperature)
_DEBERTA = Recipe(
    family="deberta",
    query="query_proj",
    key="key_proj",
    temperature=_deberta_temperature,
    caveats=("products of tokens with position embeddings are added to the logits",),
)
_GPT2_CROSS = replace(_GPT2, query="q_attn", key="c_attn", transposed=True, key_parts=2)
_T5 = Recipe(family="t5", query="q", key="k", position_bias="t5")
_ANY = Recipe(
    family="", query="", temperature=said_by_module, rotary="half if configured",
    caveats=(NAMES_CAVEAT,),
)  # fmt: skip
_LATENT = Recipe(
    family="mla", query="kv_a_proj_with_mqa", is_latent=True, rotary="half", part="decoder"
)

RECIPES: tuple[Recipe, ...] = (
    # rotary positions
    replace(_ROTARY, model_types=("llama", "mistral", "mixtral", "starcoder2", "smollm3")),
    replace(_ROTARY, model_types=("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")),
    replace(_ROTARY, model_types=("phi", "stablelm", "olmo", "olmo2", "gpt_oss", "gemma")),
    replace(_ROTARY, model_types=("gemma2", "gemma3_text", "granite", "gptj", "cohere")),
    replace(_ROTARY, model_types=("phi3", "phi4_multimodal"), query="qkv_proj", key=""),
    replace(_ROTARY, model_types=("codegen",), query="qkv_proj", key="", packing="four groups"),
    replace(_ROTARY, model_types=("hrm_text",), query="gqkv_proj", key="", packing="gate first"),
    replace(
        _ROTARY, model_types=("gradium_phonon_tts",), query="in_proj", key="", rotary="interleaved"
    ),
    replace(_FUSED, model_types=("gpt_neox", "gpt_neox_japanese", "persimmon"), rotary="half"),
    replace(_FUSED, model_types=("falcon",), rotary="half", position_bias="scaled alibi"),
    replace(_ROTARY, model_types=("modernbert",), query="Wqkv", key="", part="encoder"),
    replace(_GGUF, model_types=("llama",), rotary="interleaved"),  # llama.cpp reorders these heads
    replace(_GGUF_ANY, caveats=(NAMES_CAVEAT,)),
    replace(_GGUF_ANY, query="attn_qkv", key="", caveats=(NAMES_CAVEAT,)),
    # a bias by distance
    replace(_FUSED, model_types=("bloom",), position_bias="alibi"),
    replace(
        _ROTARY, model_types=("mpt",), query="Wqkv", key="", position_bias="alibi", rotary=None
    ),
    replace(_T5, model_types=("t5", "mt5", "umt5", "switch_transformers", "longt5", "pop2piano")),
    replace(_T5, model_types=("mpnet", "udop")),
    replace(_T5, model_types=("pix2struct_text_model",), query="query", key="key", part="decoder"),
    # absolute positions
    replace(_GPT2_CROSS, model_types=("gpt2",)),
    replace(_GPT2, transposed=None, model_types=("gpt2", "gpt_bigcode", "openai-gpt")),
    replace(_PROJ, model_types=("gpt_neo",), part="decoder"),
    replace(_PROJ, model_types=_VIT, part="vision"),
    replace(_NAMED, model_types=_VIT, part="vision"),  # as stored by earlier versions
    replace(_NAMED, model_types=("albert",), caveats=("one set of weights serves all layers",)),
    Recipe(family="q_lin", query="q_lin", key="k_lin", part="encoder", model_types=("distilbert",)),
    replace(_DEBERTA, model_types=("deberta-v2", "sew-d")),
    replace(_DEBERTA, model_types=("deberta",), query="in_proj", key="", packing="grouped"),
    Recipe(family="multihead", query="in_proj_weight"),
    Recipe(family="multihead", query="q_proj_weight", key="k_proj_weight"),
    # latent vectors with a norm between two factors (MLA)
    _LATENT,
    # whatever else bears these names: fairseq, nanoGPT, timm, diffusers, a user's own
    replace(_ANY, family="q_proj", query="q_proj", key="k_proj"),
    replace(_ANY, family="q_proj", query="q_proj.linear", key="k_proj.linear"),
    replace(_ANY, family="nanogpt", query="c_attn", transposed=None),
    replace(_ANY, family="llama", query="wq", key="wk", rotary="interleaved"),
    Recipe(
        family="grounding-dino",
        query="vision_proj",
        key="text_proj",
        model_types=("grounding-dino", "mm-grounding-dino"),
    ),
    Recipe(family="molmo2", model_types=("molmo2_vision",), query="wq", key="wk"),
    replace(_ANY, family="query", query="query", key="key"),
    replace(_ANY, family="query", query="query_proj", key="key_proj", rotary=None),
    replace(_ANY, family="q_lin", query="q_lin", key="k_lin", rotary=None),
    replace(_ANY, family="q", query="q", key="k", rotary=None),
    replace(_ANY, family="to_q", query="to_q", key="to_k"),
    replace(_ANY, family="to_q", query="to_q", key="to_kv", key_parts=2, rotary=None),
    Recipe(
        family="evolla",
        query="query",
        key="key_protein",
        temperature=lambda config, head_dim, layer: math.sqrt(config["num_attention_heads"]),
    ),
    replace(_ANY, family="linear_q", query="linear_q", key="linear_k"),
    replace(_ANY, family="project_q", query="project_q", key="project_k", rotary=None),
    replace(_ANY, family="nemo", query="query_net", key="key_net", rotary=None),
    replace(_ANY, family="ctrl", query="Wq", key="Wk", rotary=None),
    replace(_ANY, family="funnel", query="q_head", key="k_head", rotary=None),
    replace(_ANY, family="cvt", query="projection_query", key="projection_key", rotary=None),
    replace(_ANY, family="qkv", query="qkv", rotary=None),
    replace(_ANY, family="to_qkv", query="to_qkv", rotary=None),
    replace(_ANY, family="qkv", query="Wqkv"),
    replace(_ANY, family="qkv", query="qkv_proj"),
    replace(_ANY, family="qkv", query="w_qkv"),
    replace(_ANY, family="qkv", query="wqkv", model_types=("kimi_k25_vision",)),
    replace(_ANY, family="qkv", query="att_proj"),
)

_GRID_BIAS = RelativeSpec(rule="grid bias")
_SINUSOIDS = RelativeSpec(rule="sinusoids")
RELATIVE: tuple[tuple[tuple[str, ...], RelativeSpec], ...] = (
    (("rel_pos_h", "rel_pos_w"), RelativeSpec(rule="grid products")),  # SAM
    (("relative_position_bias_table",), _GRID_BIAS),  # Swin
    (("relative_position_bias.relative_position_bias_table",), _GRID_BIAS),
    (("relative_k_proj.weight", "bias_u", "bias_v"), _SINUSOIDS),  # Transformer-XL's
    (("linear_pos.weight", "pos_bias_u", "pos_bias_v"), _SINUSOIDS),
    (("distance_embedding.weight",), RelativeSpec(rule="products", is_reversed=True)),
    (("emb_rel_k",), RelativeSpec(rule="products", is_reversed=True, is_bounded=True)),  # VITS
    (("embed_positions.pe_k.weight",), RelativeSpec(rule="products")),  # SpeechT5
    (("rel_pos_emb.weight",), RelativeSpec(rule="products")),  # Granite Speech
    (
        ("relative_attention_bias_layer.bias_values.weight",),
        RelativeSpec(rule="bias", is_reversed=True),
    ),
)
"""Tensors below an attention, or above it, that hold terms by relative position."""

_GEMMA4 = ("gemma4_text", "gemma4_unified_text", "diffusion_gemma_text", "embedding_gemma2_text",
           "gemma3n_text")  # fmt: skip
TRAITS: Mapping[str, frozenset[str]] = {
    trait: frozenset(types.split())
    for trait, types in {
        # temperature
        "unscaled": "t5 mt5 umt5 switch_transformers longt5 pop2piano udop gpt_neo "
        "pix2struct_text_model pix2struct_vision_model gemma4_vision dia_encoder dia_decoder dia "
        + " ".join(_GEMMA4),
        "scaled by head_dim": "inkling_text",
        "scaled by width": "cvt",
        "half of head_dim": "zamba zamba2",
        # rotary positions
        "interleaved": "gptj cohere cohere2 cohere2_moe codegen glm glm4 glm4v_text glm_ocr_text "
        "helium ernie4_5 ernie4_5_moe ernie4_5_vl_moe_text blt_global_transformer "
        "blt_local_decoder blt_local_encoder blt_patcher llama4_text moonshine "
        "moonshine_streaming moonshine_streaming_encoder openai_privacy_filter qwen2_5_omni_dit "
        "deepseek_v2 deepseek_v3 deepseek_v32 bailing_hybrid longcat_flash glm_moe_dsa "
        "roformer mistral4 axk1 axk2 youtu pe_audio_encoder pe_video_encoder "
        "pe_audio_video_encoder",
        "turns backwards": "nanochat",
        "turns in windows only": "cohere2 cohere2_moe exaone4 exaone_moe kolibri1 flint afmoe",
        "says how it turns": "esm granitemoehybrid",
        "turns by its share": "minimax_m3_vl_text",
        "no rotation": "kimi_linear glm5_next_text xcodec2 neucodec",  # or heads turn, not tokens
        "turns": "roformer clvp_encoder",
        "turns by its projection": "clvp_encoder",
        "turns in two dimensions": "chmv2 cohere_compass_vision dinov3_vit "
        "dots3_note_vision_encoder ernie4_5_vl_moe_vision exaone4_5_vision gemma4_vision "
        "glm4v_moe_vision glm4v_vision glm5_next_vision glm_ocr_vision inkling2_vision "
        "kimi_k25_vision lfm3_vl_vision lightglue llama4_vision_model minimax_m3_vl_vision mlcd "
        "mlcd_vision_model muse_glimmer_vision muse_spark_vision paddleocr_vl_vision pixtral "
        "qwen2_5_omni_vision_encoder qwen2_5_vl_vision qwen2_vl_vision qwen3_5_moe_vision "
        "qwen3_5_vision qwen3_omni_moe_vision_encoder qwen3_vl_moe_vision qwen3_vl_vision "
        "qwen4_exp_vision sam3_vit_model sapiens2 step3p5_vision video_llama_3_vision vjepa2 "
        "eomt_dinov3",
        # norms before attention (others read what the norm beside them makes, as it is), of
        # queries and keys, and of latent vectors
        "other input": "openai-gpt swinv2 swin2sr sam_mask_decoder sam_hq_mask_decoder "
        "sam2_mask_decoder sam2_video sam2_video_mask_decoder sam3_tracker_mask_decoder "
        "sam3_tracker_video sam3_tracker_video_mask_decoder edgetam_video "
        "edgetam_video_mask_decoder sam3_detr_encoder sam3_geometry_encoder "
        "sam3_lite_text_detr_encoder sam3_lite_text_geometry_encoder roberta-prelayernorm "
        "mobilebert sew-d falcon_h1 git evolla cvt segformer emu3_vqgan timesformer "
        "xclip_vision_model",
        "norm without gains": "nanochat llama4_text muse_glimmer_text muse_spark_text neomme",
        "norm where it turns": "llama4_text",
        "normalizes inputs": "blt blt_local_encoder blt_local_decoder",
        "gain adds one": "gemma gemma2 gemma3_text recurrent_gemma vaultgemma nemotron "
        "t5gemma2_text t5gemma2_decoder qwen3_next qwen3_5_text qwen3_5_moe_text "
        "minimax_m3_vl_text qwen4_exp_text muse_glimmer_text muse_spark_text step3p5 "
        "videoprism_text_model videoprism_vision_model",
        "centered norm": "cohere esmc stablelm locater",
        "normalized after turning": "hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text",
        "scaled latents": "longcat_flash dots3_note_text",
        # tensors and masks
        "cut by heads": "gpt_bigcode",
        "heads of 64": "bridgetower_vision_model",
        "in groups": "squeezebert",
        "one head": "chameleon_vqgan janus_vqgan",
        "chooses keys": "deepseek_v32 glm_moe_dsa axk2 hy_v4 dots3_note_text glm5_next_text "
        "mistral_large4_text minimax_m3_vl_text qwen4_exp_text step3p5",
        "own mask": "swin donut-swin maskformer-swin swinv2 swin2sr clap_audio_model eomt "
        "eomt_dinov3 git deepseek_ocr2_encoder gemma3n_audio gemma4_audio mllama_vision_model "
        "pixtral longformer led informer qwen2_5_omni_dit idefics2_vision idefics2 inkling_text "
        "inkling2_text t5gemma2_decoder blt_local_encoder blt_local_decoder blt "
        "mask2former oneformer",
        "no softmax": "autoformer mra reformer xlstm yoso",
        # what a form does not have
        "adds terms": "cpmant layoutlmv3 lilt udop beit grounding-dino "
        "mm-grounding-dino bros pegasus_x sam3_detr_decoder "
        "sam3_lite_text_detr_decoder inkling_text inkling2_text zaya",
        "pools": "hiera sam2_hiera_det_model mobilevit pvt pvt_v2 segformer florence_vision "
        "groupvit_vision_model videoprism_vision_model cvt canine",
        "turns otherwise": "qwen2_5_omni_dit gemma4_vision vjepa2",
        "joins keys": "t5gemma2_decoder diffusion_gemma_text lightglue",
        "scales dimensions": "timesfm2_5 timesfm videoprism videoprism_vision_model",
        "is sparse": "longformer led informer longt5 pegasus_x",
        "scales by position": "beam",
    }.items()
}
"""What holds of some model types, whatever their tensors are called."""

Status = Literal["verified", "partly", "wrong", "skipped"]


@dataclass(frozen=True)
class Known:
    """What is known of one model type."""

    model_type: str
    status: Status | None
    """`verified`: every attention's form gives the logits that enter the model's own softmax, live
    and from file.  `partly`: what `missing` names is left out, and the layouts' caveats say so.
    `wrong`: some form does not give the model's logits.  `skipped`: no attention of it is read.
    None: no tiny model of this type was put to the test, or it has no softmax attention."""
    gap: float | None = None
    """The largest difference, in standard deviations of the logits, live or from file."""
    missing: tuple[str, ...] = ()
    """What is left out or wrong, in words."""
    transformers: str = ""
    """The version that the type was tested with."""

    @property
    def sentence(self) -> str:
        """One sentence for a report's head."""
        why = "; ".join(self.missing)
        tested = f"transformers {self.transformers}"
        if self.status == "verified":
            gap = "" if self.gap is None else f" (largest gap {self.gap:.0e} standard deviations)"
            return f"verified: {self.model_type} gives the model's own logits in {tested}{gap}"
        if self.status == "partly":
            return f"partly verified in {tested}: {why}"
        if self.status == "wrong":
            return f"known gap, found in {tested}: {why}"
        if self.status == "skipped":
            return f"not read: {why}"
        return f"unverified: {why or 'names only; no model of this type was put to the test'}"


@cache
def _table(name: str = "coverage.json") -> dict[str, Any]:
    text = resources.files("locater.models").joinpath(name).read_text("utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def defaults(model_type: object) -> dict[str, Any]:
    """What transformers assumes where a config of this type is silent.

    `own` holds settings of attention, `names` other spellings, `parts` the types of its parts.

    >>> defaults("clip_text_model")["own"]["num_attention_heads"]
    8
    """
    assumed: dict[str, Any] = _table("defaults.json").get(str(model_type), {})
    return assumed


def known(model_type: str | None) -> Known:
    """What is known of a config's `model_type` (also of a part: `siglip_vision_model`).

    >>> known("llama").status, known("mine").status
    ('verified', None)
    >>> known("mine").sentence
    'unverified: names only; no model of this type was put to the test'
    """
    table = _table()
    found = table["types"].get(model_type)
    if found is None:
        return Known(str(model_type or ""), None)
    return Known(
        str(model_type),
        found["status"],
        found.get("gap"),
        tuple(found.get("missing", ())),
        table["transformers"],
    )
