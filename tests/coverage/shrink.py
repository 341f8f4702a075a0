"""Any config of transformers, made tiny: by the names of its settings, not of its model.

Every setting that a rule knows is replaced; all others keep their default, so that what is special
about a family (a soft-cap, a partial rotation, a norm of the queries) stays what it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

WIDTH = 32
HEADS = 4
SHARED = 2
"""Key heads, where queries share them by default."""
HEAD = 16
"""A head's dimension, where it is a setting of its own: not the quotient of width and heads."""
LAYERS = 2
VOCABULARY = 128
SPECIAL = 72
"""Ids from here on are special tokens (images, sounds); below 3 are padding, first and last."""
POSITIONS = 64
IMAGE = 32
EXPERTS = 4

Rule = Callable[[Any], Any]


def const(value: Any) -> Rule:
    """The same for every default; a list keeps its length."""
    return lambda old: _like(old, value)


def at_most(value: int) -> Rule:
    """Smaller defaults stay."""
    return lambda old: _each(old, lambda one: min(one, value))


def _each(old: Any, rule: Callable[[Any], Any]) -> Any:
    return [_each(one, rule) for one in old] if isinstance(old, (list, tuple)) else rule(old)


def _like(old: Any, value: Any) -> Any:
    return _each(old, lambda one: 0 if one == 0 else value)


def _heads(old: Any) -> Any:
    return _each(old, lambda one: one if one < 2 else HEADS)


def _shared(old: Any) -> Any:
    return _each(old, lambda one: one if one < 2 else SHARED)


def _patch(old: Any) -> Any:
    return _each(old, lambda one: 8 if one >= 8 else one)


KEEP: Rule = lambda old: old  # noqa: E731

RULES: tuple[tuple[str, Rule], ...] = (
    # what must not be taken for a width or a number of layers
    (r".*(dropout|drop_rate|_eps|_coefficient|_loss|_cost|threshold).*", KEEP),
    (r"(type_vocab_size|type_vocab_sizes|modality_type_vocab_size|task_type_vocab_size)", KEEP),
    (r"(inner_group_num|num_hidden_groups|num_key_value_groups|n_langs|vector_size)", KEEP),
    (r"(num_channels|in_channels|in_chans|audio_channels|input_channels|num_channels_out)", KEEP),
    (r".*(kernel_size|kernel_sizes|conv_kernel|stride|strides|padding|ratio|ratios)", KEEP),
    (r"(temporal_patch_size|spatial_merge_size|merge_kernel_size|tubelet_size)", KEEP),
    (
        r"(mel_bins|num_mel_bins|n_mel_bins|feature_size|input_feat_per_channel|input_feat_size)",
        KEEP,
    ),
    (r"(conv_dim|tdnn_dim|num_conv_layers|num_feat_extract_layers)", KEEP),
    # heads
    (
        r".*(num_key_value_heads|num_kv_heads|n_head_kv|key_value_attention_heads)(_per_layer)?",
        _shared,
    ),
    (r".*(attention_heads|num_heads|n_heads?|nhead|_heads|heads)(_per_\w+)?", _heads),
    (r"(qk_nope_head_dim|qk_rope_head_dim|v_head_dim)", const(8)),
    (r"qk_head_dim", const(16)),
    (r"(index_head_dim)", const(HEAD)),
    (
        r"(.*head_dim|d_kv|dim_head|attention_head_size|kv_channels|d_head|resampler_dim_head)",
        const(HEAD),
    ),
    (r"rotary_dim", at_most(4)),
    (r"query_pre_attn_scalar", const(24)),
    (r"(q_lora_rank|kv_lora_rank|o_lora_rank|.*_rank)", at_most(12)),
    # layers
    (
        r"(num_layers|num_hidden_layers|n_layers?|layers|depth|.*_layers|.*_depth|num_blocks)",
        at_most(LAYERS),
    ),
    (r"(depths|blocks_per_stage|block_sizes|stage_num_blocks|n_attn_blocks)", at_most(LAYERS)),
    (r"(first_k_dense_replace|num_dense_layers|moe_layer_start_index)", at_most(1)),
    (r"(num_kv_shared_layers|num_nextn_predict_layers)", const(0)),
    (
        r".*(layer_period|sliding_window_pattern|_every_n_layers|layer_interval|layer_group_size)",
        at_most(2),
    ),
    (r".*layer_offset", at_most(1)),
    (r"(full_attention_interval|cross_attention_frequency|interleave_moe_layer_step)", at_most(2)),
    # widths
    (
        r"(.*hidden_sizes?|.*hidden_dim|d_model|n_embd|dim|emb_dim|embed_dims?|embedding_size)",
        const(WIDTH),
    ),
    (
        r"(.*_embed_dim|embed_dim_per_stage|.*embedding_dim|.*_embd|word_embed_proj_dim)",
        const(WIDTH),
    ),
    (
        r"(projection_dim|.*project\w*_dim|projection_size|out_hidden_size|output_dim|proj_dim)",
        const(WIDTH),
    ),
    (
        r"(.*intermediate_size\w*|.*ffn_dim|d_ff|d_inner|dff|mlp_dim|.*dim_feedforward|ffn_hidden_size)",
        const(48),
    ),
    (
        r"(encoder_feedforward_dim|dim_ff|.*linear_units|feed_forward_size|n_inner|.*_ffn_hidden_size)",
        const(48),
    ),
    (
        r"(encoder_in_channels|decoder_in_channels|d_latents|adapter_in_dim|adapter_out_dim)",
        const(WIDTH),
    ),
    (
        r"(adapter_input_size|backbone_hidden_size|condition_dim|text_hidden_size|mask_feature_size)",
        const(WIDTH),
    ),
    (r"(lru_width|true_hidden_size|intra_bottleneck_size|vit_dim|mask_dim)", const(WIDTH)),
    # experts
    (r"(n_group|topk_group|num_expert_group)", const(1)),
    (r"(.*num_experts|n_routed_experts|num_local_experts|zero_expert_num)", at_most(EXPERTS)),
    (r"(num_experts_per_tok(en)?|moe_k|moe_topk|top_k_experts)", at_most(2)),
    (r"(n_shared_experts|num_shared_experts|moe_num_shared_experts)", at_most(1)),
    # words, positions, windows
    (r".*vocab_size\w*", const(VOCABULARY)),
    (r"(pad_token_id|pad_id)", const(0)),
    (r"bos_token_id|decoder_start_token_id", const(1)),
    (r"eos_token_id", const(2)),
    (
        r"(.*max_position_embeddings|n_positions|max_seq_len|n_ctx|.*max_\w*positions)",
        at_most(POSITIONS),
    ),
    (r"(.*sliding_window|.*sliding_window_size|local_attention|attention_chunk_size)", at_most(4)),
    (r"(attention_window_size|local_attention_window_len)", at_most(4)),
    (r"window_size", lambda old: _each(old, lambda one: 32 if one >= 64 else min(one, 4))),
    (r"(global_attn_indexes|fullatt_block_indexes)", lambda old: [1]),
    # pictures and sound
    (r"(.*image_size|img_size|crop_size|pretrain_image_size)", const(IMAGE)),
    (r"patch_size", _patch),
    (
        r"(num_queries|num_query_tokens|num_latents|resampler_n(um)?_latents|num_detection_tokens)",
        at_most(6),
    ),
    # state spaces and linear attention beside the attention
    (r"(mamba_d_state|state_size|ssm_state_size)", at_most(8)),
    (r"(chunk_size|mamba_chunk_size)", at_most(8)),
)


FLOATS: dict[str, float] = {
    "attn_logit_softcapping": 3.0,
    "attention_logit_cap": 3.0,
    "conf_attention_logit_cap": 3.0,
    "attention_multiplier": 0.2,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 0.8,
}
"""What is near one, or out of the logits' reach, would hide a form that does not know of it."""

NONES: dict[str, int] = {
    "head_dim": HEAD,
    "num_key_value_heads": SHARED,
    "num_experts_per_tok": 2,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
}
"""Settings that a default config leaves open and a model needs."""


def ruled(name: str, old: Any) -> Any:
    """The tiny value of one setting."""
    for pattern, rule in RULES:
        if re.fullmatch(pattern, name):
            return rule(old)
    return old


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_numbers(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(_is_number(one) or _is_numbers(one) for one in value)
    return False


@dataclass
class Shrinker:
    """One config tree; its special tokens have the same ids wherever they are named."""

    exceptions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What the rules get wrong, by model type."""
    ids: dict[str, int] = field(default_factory=dict)

    def settings(self, config: Any, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What to give to the class of a default config so that it becomes tiny."""
        import transformers

        old = config.to_dict()
        common = set(transformers.PreTrainedConfig().to_dict()) - TOKENS
        special = {**self.exceptions.get(config.model_type, {}), **(changes or {})}
        usual = _usual(config)
        nested = {name: value for name, value in special.items() if isinstance(value, Nested)}
        new: dict[str, Any] = {}
        chosen = representatives(old)
        for name, value in old.items():
            if name in special and name not in nested:
                continue
            if name == "head_dim" and old.get("qk_rope_head_dim"):
                continue  # it follows
            if name == "per_layer_config" and value:
                new[name] = _by_layer(value, old, chosen)
                continue
            below = vars(config).get(name)  # getattr refuses settings that differ between layers
            if isinstance(below, transformers.PreTrainedConfig):
                given = dict(nested[name]) if name in nested else None
                new[name] = {**self.settings(below, given), "model_type": below.model_type}
            elif name not in common:
                tiny = self.value(name, value, chosen)
                if tiny != usual.get(name, value):
                    new[name] = tiny
        new |= _stages(old)
        if old.get("qk_rope_head_dim"):  # latent attention shares no key heads
            new |= {name: HEADS for name in ("num_key_value_heads",) if name in new}
        return new | {name: value for name, value in special.items() if name not in nested}

    def value(self, name: str, old: Any, chosen: Chosen) -> Any:
        """The tiny value of one setting, among those that speak of layers or of tokens too."""
        if isinstance(old, Mapping) and "rope" in name:
            return _rope(old)
        if old is None and name in NONES:
            return NONES[name]
        if isinstance(old, float) and name in FLOATS:
            return FLOATS[name]
        if isinstance(old, (list, tuple)) and len(old) == chosen.of and chosen.of > 1:
            old = [old[place] for place in chosen.places]
            return ruled(name, old) if _is_numbers(old) else old
        if _is_number(old) and name in LAYER_COUNTS and old == chosen.of:
            return len(chosen.places)
        if _is_number(old) and re.fullmatch(
            r"(?!pad|bos|eos|decoder_start).*_token_(id|index)", name
        ):
            return self.ids.setdefault(name, SPECIAL + len(self.ids))
        if _is_number(old) or _is_numbers(old):
            return ruled(name, old)
        return old


def _stages(old: Mapping[str, Any]) -> dict[str, Any]:
    """A backbone has at least as many layers as it hands out."""
    wanted = old.get("out_indices")
    if not wanted or not _is_number(old.get("num_hidden_layers")):
        return {}
    count = max(LAYERS, len(wanted))
    places = list(range(count - len(wanted) + 1, count + 1))
    names = [f"stage{place}" for place in places]
    return {"num_hidden_layers": count, "out_indices": places, "out_features": names}


def _usual(config: Any) -> dict[str, Any]:
    """What its class would set by itself: inside another config, the default may be another."""
    try:
        return type(config)().to_dict()
    except Exception:  # noqa: BLE001  # some cannot be made without settings
        return {}


class Nested(dict[str, Any]):
    """Exceptions for a config inside a config."""


TOKENS = {"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"}
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth")


@dataclass(frozen=True)
class Chosen:
    """Which of a model's default layers a tiny one keeps."""

    places: Sequence[int]
    of: int


def representatives(settings: Mapping[str, Any]) -> Chosen:
    """The first layer of every kind, as the lists with one entry per layer tell them apart."""
    count = next((settings[name] for name in LAYER_COUNTS if _is_number(settings.get(name))), 0)
    lists = [
        value
        for value in settings.values()
        if isinstance(value, (list, tuple)) and len(value) == count > 1
    ]
    own = settings.get("per_layer_config") or {}
    lists.append([own.get(f"{place:02d}", own.get(str(place))) for place in range(count)])
    kinds: dict[str, int] = {}
    for place in range(count):
        kinds.setdefault(repr([one[place] for one in lists]), place)
    places = sorted(kinds.values())
    while 0 < len(places) < min(LAYERS, count):
        places.append(places[-1])
    return Chosen(places[:6], count)


def _by_layer(old: Mapping[str, Any], whole: Mapping[str, Any], chosen: Chosen) -> dict[str, Any]:
    """Settings of single layers: what was larger than in other layers stays larger."""
    new: dict[str, Any] = {}
    for place, was in enumerate(chosen.places):
        own = old.get(f"{was:02d}", old.get(str(was)))
        if own:
            new[f"{place}"] = {
                name: _beside(name, value, whole.get(name)) for name, value in own.items()
            }
    return new


def _beside(name: str, value: Any, usual: Any) -> Any:
    if not _is_number(value):
        return value
    tiny = ruled(name, value)
    if not _is_number(usual) or tiny == value:
        return tiny
    return tiny * 2 if value > usual else max(tiny // 2, 1) if value < usual else tiny


def _rope(old: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings: the sections of a multimodal rotation must add up to half a head."""
    new = dict(old)
    for name, value in old.items():
        if isinstance(value, Mapping):
            new[name] = _rope(value)
        elif name.endswith("section") and _is_numbers(value):
            share = HEAD // 2 // len(value)
            new[name] = [HEAD // 2 - share * (len(value) - 1), *[share] * (len(value) - 1)]
    return new
