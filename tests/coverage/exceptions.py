"""What the rules that shrink configs and choose inputs get wrong, model type by model type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.coverage.inputs import BATCH, GRID, TOKENS, ids, normal, patches
from tests.coverage.shrink import Nested


def _sections(first: int, *rest: int, **more: Any) -> dict[str, Any]:
    """Rotary settings with the sections of a multimodal rotation."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [first, *rest]}
    return {"rope_parameters": rope | more}


_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_expand": 2}
_FRAMES = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "d_model": 32}
_CODEC = {"upsample_groups": 4, "codebook_dim": 8, "num_quantizers": 4, "num_filters": 4}
_CODEC |= {"upsampling_ratios": [4, 2], "vector_quantization_hidden_dimension": 8, "num_kv": None}
del _CODEC["num_kv"]

_STAGES = {"image_size": 64, "depths": [2, 2], "num_heads": [2, 4], "embed_dim": 16, "window_size": 4}
_HGNET = {
    "embedding_size": 8, "hidden_sizes": [16, 16, 16, 16], "stem_channels": [3, 8, 8],
    "stage_in_channels": [8, 16, 16, 16], "stage_mid_channels": [8, 8, 8, 8],
    "stage_out_channels": [16, 16, 16, 16], "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [1, 1, 1, 1], "depths": [1, 1, 1, 1],
}  # fmt: skip

SETTINGS: dict[str, dict[str, Any]] = {
    # decoders and encoders of text
    "helium": {"head_dim": 8},
    "esmc": {"head_dim": 8, "num_key_value_heads": 4},
    "xlnet": {"d_head": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "deepseek_v2": {"n_group": 1, "topk_group": 1},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "n_group": 1, "topk_group": 1},
    "step3p5": {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 4,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "glm4v_text": _sections(2, 1, 1, partial_rotary_factor=1.0),
    "glm4v_moe_text": _sections(2, 1, 1, partial_rotary_factor=0.5) | {"head_dim": 16},
    "glm_image_text": _sections(2, 1, 1, partial_rotary_factor=1.0),
    "glm_ocr_text": _sections(2, 1, 1, partial_rotary_factor=1.0),
    "qwen2_vl_text": _sections(2, 1, 1),
    "qwen2_5_vl_text": _sections(2, 1, 1),
    "qwen2_5_omni_text": _sections(2, 1, 1),
    "qwen2_5_omni_talker": _sections(4, 2, 2),
    "paddleocr_vl_text": _sections(4, 2, 2),
    "zamba": {
        "num_hidden_layers": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "n_mamba_heads": 2,
        "use_mamba_kernels": False,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "use_mamba_kernels": False,
        "use_mem_rope": True,
    },
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2},
    "nemotron_h": {"n_groups": 2, "use_mamba_kernels": False},
    "bamba": _MAMBA2 | {"attn_layer_indices": [1]},
    "granitemoehybrid": _MAMBA2 | {
        "layer_types": ["linear_attention", "full_attention"],
        "position_embedding_type": "rope",
    },
    "falcon_h1": _MAMBA2 | {"mamba_d_ssm": 64},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "head_dim": 8},
    "reformer": {
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
    },
    "esm": {"vocab_size": 128, "mask_token_id": 3, "pad_token_id": 0},
    "lilt": {"hidden_size": 48},
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
             "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [48, 48], **_sections(1, 1, 2)},
    "longcat_flash": {"head_dim": 8},
    "perceiver": {"d_latents": 32, "num_self_attends_per_block": 2},
    "xmod": {"default_language": "en_XX"},
    "autoformer": _FRAMES | {"moving_average": 3, "label_length": 2},
    "informer": _FRAMES,
    "time_series_transformer": _FRAMES,
    "moshi_depth": {"num_codebooks": 12, "max_position_embeddings": 16},
    "mimi": _CODEC,
    "clvp_encoder": {"hidden_size": 256},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "blt_patcher": {"head_dim": 8},
    "blt_global_transformer": {"head_dim": 8},
    "blt_local_encoder": {"head_dim": 8},
    "blt_local_decoder": {"head_dim": 8},
    "hunyuan_vl_text": _sections(2, 2, 2, 2),
    "mistral_large4_text": {
        "num_hidden_layers": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "layer_types": ["indexed_attention"] * 4,
        "indexer_types": ["full"] * 4,
        "no_rope_layers": [1, 0, 1, 0],
        "kv_source_layers": [0, 1, 0, 1],
        "head_dim": 8,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": 4, "indexer_compress_ratio": 2,
    },
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "dots3_note_text": {"per_layer_config": {}},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            one: {"rope_type": "default", "rope_theta": 10_000.0}
            for one in ("sliding_attention", "full_attention")
        },
    },
    # pictures
    "swin": _STAGES,
    "donut-swin": _STAGES,
    "cvt": {"depth": [1, 2, 3], "num_heads": [1, 2, 4], "embed_dim": [16, 32, 32]},
    "florence_vision": {"depths": [1, 1, 1, 1], "window_size": 4, "num_groups": [4, 4, 4, 4]},
    "sam2_hiera_det_model": {
        "image_size": [64, 64], "window_size_per_stage": [8, 4, 4, 2],
        "blocks_per_stage": [1, 2, 2, 1], "global_attention_blocks": [2],
        "num_attention_heads_per_stage": [1, 2, 4, 4],
        "window_positional_embedding_background_size": [4, 4],
    },
    "bros": {"dim_bbox_sinusoid_emb_2d": 32, "dim_bbox_sinusoid_emb_1d": 4, "dim_bbox_projection": 8},
    "bridgetower": {"vision_config": Nested(hidden_size=64, num_hidden_layers=2), "hidden_size": 64,
                    "text_config": Nested(hidden_size=64)},
    "bridgetower_vision_model": {"hidden_size": 64},
    "lw_detr_vit": {"image_size": 64, "num_windows": 4, "num_windows_side": 2, "window_block_indices": [0]},
    "lw_detr": {"d_model": 32, "projector_out_channels": 32, "group_detr": 1},
    "d_fine": {"head_dim": 8, "d_model": 32, "encoder_in_channels": [16, 16, 16]},
    "hgnet_v2": _HGNET,
    "kimi_k25_vision": {"pos_emb_height": 8, "pos_emb_width": 8},
    "dots3_note_audio_encoder": {"head_dim": 8, "num_key_value_heads": 4, "conv_output_size": 7680},
    "dots3_note_vision_encoder": {"per_layer_config": {}},
    "qwen3_asr_encoder": {"n_window": 16, "max_position_embeddings": 16, "n_window_infer": 64, "downsample_hidden_size": 16},
    "gemma4_audio": {"attention_chunk_size": 4, "attention_context_left": 3},
    "gemma3n_audio": {"conf_attention_chunk_size": 4, "conf_attention_context_left": 3},
}  # fmt: skip
CLASSES: dict[str, str] = {}


def _series(config: Any) -> Iterator[dict[str, Any]]:
    past = 8 + max(config.lags_sequence)
    yield {
        "past_values": normal(BATCH, past),
        "past_time_features": normal(BATCH, past, max(config.num_time_features, 0)),
        "past_observed_mask": torch.ones(BATCH, past, dtype=torch.float64),
        "future_values": normal(BATCH, 4, seed=4),
        "future_time_features": normal(BATCH, 4, max(config.num_time_features, 0), seed=5),
        "use_cache": False,
    }


def _crossed(config: Any) -> Iterator[dict[str, Any]]:
    """A decoder with an encoder's tokens."""
    width = getattr(config, "encoder_hidden_size", None) or getattr(config, "cross_attention_hidden_size", None)
    yield {"input_ids": ids(), "encoder_hidden_states": normal(BATCH, 7, width or config.hidden_size)}


def _asked(config: Any) -> Iterator[dict[str, Any]]:
    """A Q-Former: queries and a picture's tokens."""
    yield {
        "query_embeds": normal(BATCH, 6, config.hidden_size),
        "encoder_hidden_states": normal(BATCH, 7, config.encoder_hidden_size, seed=3),
    }


def _instructed(config: Any) -> Iterator[dict[str, Any]]:
    for one in _asked(config):
        yield {"input_ids": ids(), **one}


def _patched(config: Any) -> Iterator[dict[str, Any]]:
    yield {"hidden_states": patches(config), "grid_thw": GRID}


def _masked(config: Any) -> Iterator[dict[str, Any]]:
    yield {
        "pixel_values": normal(BATCH, 16, 3 * config.patch_size**2),
        "pixel_attention_mask": torch.ones(BATCH, 16).long(),
        "spatial_shapes": torch.tensor([[4, 4]] * BATCH),
    }


def _places(side: int) -> torch.Tensor:
    """Columns and rows of a square picture's patches."""
    steps = torch.arange(side)
    grid = torch.stack(torch.meshgrid(steps, steps, indexing="xy"), -1).reshape(1, -1, 2)
    return grid.expand(BATCH, -1, -1)


INPUTS: dict[Any, Any] = {
    "autoformer": _series,
    "informer": _series,
    "time_series_transformer": _series,
    "perceiver": lambda config: [{"inputs": normal(BATCH, TOKENS, config.d_model)}],
    "moshi_depth": lambda config: [
        {"input_ids": ids(), "last_hidden_state": normal(BATCH, 1, config.input_size), "use_cache": False}
    ],
    "blip_2_qformer": _asked,
    "instructblip_qformer": _instructed,
    "instructblipvideo_qformer": _instructed,
    "trocr": _crossed,
    "blip_text_model": _crossed,
    "canary_decoder": _crossed,
    "ernie4_5_vl_moe_vision": _patched,
    "inkling2_vision": lambda config: [
        {"pixel_values": normal(12, 16, 16, 3), "image_grid_thw": GRID},
    ],
    "kimi_k25_vision": lambda config: [{"pixel_values": normal(48, 3, 8, 8), "grid_thw": GRID}],
    "muse_glimmer_vision": lambda config: [{"pixel_values": normal(48, 384), "grid_thw": GRID}],
    "muse_spark_vision": lambda config: [{"pixel_values": normal(48, 384), "grid_thw": GRID}],
    "paddleocr_vl_vision": lambda config: [
        {"pixel_values": normal(1, 48, 3, 8, 8), "grid_thw": GRID}
    ],
    "siglip2_vision_model": _masked,
    "fun_asr_nano_encoder": lambda config: [
        {"input_features": normal(BATCH, 32, 560), "input_features_mask": torch.ones(BATCH, 32).long()}
    ],
    "qwen3_asr_encoder": lambda config: [
        {"input_features": normal(BATCH, 128, 64), "input_features_mask": torch.ones(BATCH, 64).long()}
    ],
    "audioflamingo3_encoder": lambda config: [
        {"input_features": normal(BATCH, 128, 128), "input_features_mask": torch.ones(BATCH, 128).long()}
    ],
    "gemma4_audio": lambda config: [{"input_features": normal(BATCH, 64, 128)}],
    "gemma3n_audio": lambda config: [
        {"audio_mel": normal(BATCH, 64, 128), "audio_mel_mask": torch.zeros(BATCH, 64).bool()}
    ],
    "gemma4_vision": lambda config: [
        {"pixel_values": normal(BATCH, 36, 192), "pixel_position_ids": _places(6)}
    ],
    "bridgetower_vision_model": lambda config: [{"image": normal(BATCH, 3, 32, 32)}],
    "bros": lambda config: [
        {"input_ids": ids(), "bbox": normal(BATCH, TOKENS, 4).abs()}
    ],
}  # fmt: skip
"""What to feed a model type, or one of its classes: a function of the config that yields inputs,
all of which are run."""
