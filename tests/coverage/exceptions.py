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

_STAGES = {"image_size": 128, "depths": [2, 2, 1, 1], "num_heads": [2, 2, 4, 4], "embed_dim": 16}
_STAGES |= {"window_size": 4}
_SAM = {"output_channels": 32, "num_pos_feats": 16, "window_size": 2, "global_attn_indexes": [1]}
_VQ = {"base_channels": 32, "channel_multiplier": [1, 1], "num_embeddings": 32, "num_res_blocks": 1}
_RELATIVE = {"max_position_embeddings": 64, "num_key_value_heads": 4}
_HGNET = {
    "embedding_size": 8,
    "hidden_sizes": [16, 16, 16, 16],
    "stem_channels": [3, 8, 8],
    "stage_in_channels": [8, 16, 16, 16],
    "stage_mid_channels": [8, 8, 8, 8],
    "stage_out_channels": [16, 16, 16, 16],
    "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [1, 1, 1, 1],
    "depths": [1, 1, 1, 1],
}

_FILTERS = {"num_filters": 4, "depths": [1, 1], "downsampling_ratios": [2]}
_RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16]}
_RESNET |= {"depths": [1, 1, 1, 1], "out_features": ["stage4"]}
_DETR = {"use_timm_backbone": False, "backbone": None, "backbone_config": _RESNET, "d_model": 32}

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
    "granitemoehybrid": _MAMBA2
    | {
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
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10_000.0},
        "ffn_config": {
            "ffn_hidden_size": 48,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "hidden_size": 32,
        },
    },
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
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
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
        "image_size": [64, 64],
        "window_size_per_stage": [8, 4, 4, 2],
        "blocks_per_stage": [1, 2, 2, 1],
        "global_attention_blocks": [2],
        "hidden_size": 8,
        "num_attention_heads_per_stage": [1, 2, 2, 4],
        "embed_dim_per_stage": [8, 16, 32, 64],
        "window_positional_embedding_background_size": [4, 4],
    },
    "bros": {
        "dim_bbox_sinusoid_emb_2d": 32,
        "dim_bbox_sinusoid_emb_1d": 4,
        "dim_bbox_projection": 8,
    },
    "bridgetower": {
        "vision_config": Nested(hidden_size=64, num_hidden_layers=2),
        "hidden_size": 64,
        "text_config": Nested(hidden_size=64),
    },
    "bridgetower_vision_model": {"hidden_size": 64},
    "lw_detr_vit": {
        "image_size": 64,
        "num_windows": 4,
        "num_windows_side": 2,
        "window_block_indices": [0],
    },
    "lw_detr": {"d_model": 32, "group_detr": 1, "projector_scale_factors": [1.0]},
    "d_fine": {"head_dim": 8, "d_model": 32, "encoder_in_channels": [16, 16, 16]},
    "hgnet_v2": _HGNET,
    "kimi_k25_vision": {"pos_emb_height": 8, "pos_emb_width": 8},
    "dots3_note_audio_encoder": {"head_dim": 8, "num_key_value_heads": 4, "conv_output_size": 7680},
    "dots3_note_vision_encoder": {"per_layer_config": {}},
    "gemma4_audio": {"attention_chunk_size": 4, "attention_context_left": 3},
    "gemma3n_audio": {"conf_attention_chunk_size": 4, "conf_attention_context_left": 3},
    "sam_vision_model": _SAM,
    "sam_prompt_encoder": {"image_embedding_size": 4},
    "sam_hq_vision_model": _SAM,
    "sam_hq_prompt_encoder": {"image_embedding_size": 4},
    "layoutlmv3": {"input_size": 32, "coordinate_size": 6, "shape_size": 4},
    "pixtral": {"head_dim": 8},
    "llama4_vision_model": {
        "intermediate_size": 128,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    },
    "mllama_vision_model": {
        "max_num_tiles": 2,
        "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        "intermediate_layers_indices": [1],
        "vision_output_dim": 64,
        "num_global_layers": 1,
    },
    "clap_audio_model": {
        "spec_size": 64,
        "num_mel_bins": 16,
        "window_size": 4,
        "depths": [2, 2],
        "num_attention_heads": [2, 4],
        "patch_embeds_hidden_size": 16,
        "hidden_size": 32,
        "num_hidden_layers": 2,
    },
    "audio-spectrogram-transformer": {
        "num_mel_bins": 16,
        "max_length": 24,
        "frequency_stride": 8,
        "time_stride": 8,
    },
    "chameleon_vqgan": {
        **_VQ,
        "num_embeddings": 2,
        "resolution": 8,
        "latent_channels": 32,
        "embed_dim": 32,
    },
    "emu3_vqgan": {
        "base_channels": 32,
        "channel_multiplier": [1, 1],
        "codebook_size": 32,
        "attn_resolutions": [1],
        "num_res_blocks": 1,
        "embed_dim": 4,
        "hidden_size": 32,
    },
    "janus_vqgan": {**_VQ, "latent_channels": 32, "num_patches": 4},
    "xclip_vision_model": {"num_frames": 4},
    "xclip": {"vision_config": Nested(num_frames=4)},
    "deimv2": {"head_dim": 8},
    "glm5_next_text": {"num_key_value_heads": 4},
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "dots3_note_text": {"per_layer_config": {}, "head_dim": 16},
    "granite_speech5_encoder": {"context_size": 8, "num_key_value_heads": 4},
    # sound
    "moonshine": {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4},
    "moonshine_streaming": {"num_key_value_heads": 4, "head_dim": 8},
    "moonshine_streaming_encoder": {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "sliding_windows": [[4, 1], [4, 0]],
    },
    "nemotron3_diarization_audio": _RELATIVE,
    "nemotron3_5_transcribe_asr_audio": _RELATIVE,
    "nemotron3_5_transcribe_word_timestamp": _RELATIVE,
    "phi4_multimodal_audio": {
        "ext_pw_out_channel": 32,
        "depthwise_separable_out_channel": 32,
        "nemo_conv_channels": 32,
        "left_chunk": 18,
    },
    "qwen2_5_omni_bigvgan": {"upsample_initial_channel": 64},
    "qwen2_5_omni_dit": {
        "enc_channels": [16, 16, 16, 16, 48],
        "enc_dim": 16,
        "enc_emb_dim": 16,
        "enc_attention_channels": 8,
        "enc_se_channels": 8,
        "num_embeds": 32,
        "block_size": 6,
        "look_ahead_layers": [1],
        "look_backward_layers": [0],
        "head_dim": 8,
    },
    "qwen2_5_omni_audio_encoder": {"n_window": 8},
    "qwen3_omni_moe_audio_encoder": {
        "n_window": 50,
        "n_window_infer": 100,
        "downsample_hidden_size": 16,
    },
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 16, **_sections(2, 1, 1)},
    "timesfm": {"context_length": 96},
    "vits": {
        "flow_size": 32,
        "upsample_initial_channel": 16,
        "upsample_rates": [2, 2],
        "upsample_kernel_sizes": [4, 4],
        "spectrogram_bins": 17,
        "duration_predictor_filter_channels": 16,
        "posterior_encoder_num_wavenet_layers": 1,
        "prior_encoder_num_wavenet_layers": 1,
    },
    "t5gemma2_text": {"dropout_rate": 0.0},
    "sam2_vision_model": {
        "backbone_channel_list": [64, 32, 16, 8],
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    },
    "sam2_prompt_encoder": {"image_size": 64, "patch_size": 16},
    "sam2": {"image_size": 64},
    "chameleon": {
        "vocabulary_map": {
            "<image>": 100,
            **{f"IMGIMG{one}Z": 101 + k for k, one in enumerate("AB")},
        }
    },
    "emu3": {
        "vocabulary_map": {"<image>": 100, "<|extra_200|>": 101, "<|visual token 000000|>": 102}
    },
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "spatial_target_layers": [1]},
    "t5gemma2_decoder": {"dropout_rate": 0.0, "sliding_window": 4},
    "pix2struct_text_model": {"initializer_range": 0.02, "d_kv": 8},
    "qwen3_asr_encoder": {"n_window": 50, "n_window_infer": 100, "downsample_hidden_size": 16},
    "minicpm_ocr_vision": {"insert_layer_id": 0},
    "minicpmv4_6_vision": {"insert_layer_id": 0},
    "minicpmv4_7_vision": {"insert_layer_id": 0},
    "kosmos-2": {"latent_query_num": 6},
    "kosmos-2.5": {"latent_query_num": 6},
    **{
        name: {"insert_layer_id": 0, "vision_config": Nested(insert_layer_id=0)}
        for name in ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7")
    },
    "idefics": {"freeze_text_layers": False, "freeze_vision_layers": False},
    "granite_speech_encoder": {"context_size": 8},
    "granite_speech_plus_encoder": {"context_size": 8},
    "gradium_phonon_tts": {"num_key_value_heads": 4},
    "evolla": {"head_dim": 8},
    "EvollaModel": {"head_dim": 8},
    "xcodec2": {"num_key_value_heads": 4},
    "neucodec": {"num_key_value_heads": 4},
    "pp_formulanet_vision": {
        "image_size": 128,
        "output_channels": 32,
        "post_conv_in_channels": 32,
        "post_conv_mid_channels": 32,
        "post_conv_out_channels": 32,
        "window_size": 2,
    },
    "pvt": {"image_size": 64},
    "pvt_v2": {"image_size": 64},
    "mobilevit": {"image_size": 128},
    "videoprism_vision_model": {"image_size": [36, 36]},
    "superpoint": {"descriptor_decoder_dim": 32},
    "seggpt": {
        "image_size": [64, 32],
        "intermediate_hidden_state_indices": [0, 1],
        "merge_index": 0,
        "pretrain_image_size": 32,
    },
    "vitmatte": {"backbone_config": Nested(num_channels=4), "convstream_hidden_sizes": [8, 8, 8]},
    "zoedepth": {
        "neck_hidden_sizes": [32, 32, 32, 32],
        "bottleneck_features": 32,
        "fusion_hidden_size": 32,
        "num_relative_features": 8,
    },
    "efficientloftr": {
        "stage_num_blocks": [1, 1, 1, 1],
        "out_features": [16, 16, 32, 32],
        "hidden_size": 32,
        "stage_in_channels": [1, 16, 16, 32],
        "fine_fusion_dims": [32, 32, 16],
        "num_attention_layers": 2,
        "stage_block_dims": [16, 16, 32, 32],
    },
    "moshi": {"num_codebooks": 4},
    "gemma4_assistant": {
        "__default__": {
            "text_config": {
                "model_type": "gemma4_text",
                "hidden_size_per_layer_input": 0,
                "vocab_size_per_layer_input": 0,
            }
        }
    },
    "seamless_m4t": {
        "vocab_size": 128,
        "pad_token_id": 0,
        "t2u_pad_token_id": 1,
        "t2u_bos_token_id": 0,
        "t2u_eos_token_id": 2,
        "t2u_decoder_start_token_id": 2,
        "unit_hifi_gan_vocab_size": 64,
        "upsample_initial_channel": 64,
    },
    "seamless_m4t_v2": {
        "vocab_size": 128,
        "pad_token_id": 0,
        "t2u_pad_token_id": 1,
        "t2u_bos_token_id": 0,
        "t2u_eos_token_id": 2,
        "t2u_decoder_start_token_id": 2,
        "unit_hifi_gan_vocab_size": 64,
        "upsample_initial_channel": 64,
        "char_vocab_size": 64,
        "scale_embedding": False,
    },
    "blt_local_decoder": {"head_dim": 8, "hidden_size_global": 32},
    "blt_local_encoder": {"head_dim": 8},
    "efficientnet": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 32},
    "align_vision_model": {"width_coefficient": 0.1, "depth_coefficient": 0.1, "hidden_dim": 32},
    "molmo2": {"adapter_config": Nested(vision_feature_layer=[1, 0]), "image_patch_id": 99},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "pocket_tts_audio_tokenizer": _CODEC,
    "bit": {"embedding_size": 32, "hidden_sizes": [32, 32], "depths": [1, 1], "num_groups": 8},
    "textnet": {"stem_out_channels": 8, "hidden_sizes": [8, 8, 8, 8, 8]},
    "vibevoice_acoustic_tokenizer": {
        "num_filters": 4,
        "hidden_size": 16,
        "depths": [1, 1],
        "downsampling_ratios": [2],
    },
    "qwen3_omni_moe_talker": {"spatial_merge_size": 2},
    "tvp": {
        "max_img_size": 64,
        "visual_prompt_size": 8,
        "num_frames": 2,
        "hidden_size": 32,
        "backbone_config": {
            "model_type": "resnet",
            "embedding_size": 8,
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [8, 16, 32, 32],
            "out_features": ["stage4"],
        },
    },
    "superglue": {
        "keypoint_detector_config": Nested(descriptor_decoder_dim=32),
        "keypoint_encoder_sizes": [8, 8, 8, 8],
    },
    "lightglue": {
        "keypoint_detector_config": Nested(descriptor_decoder_dim=32),
        "descriptor_dim": 32,
    },
    "vibevoice_acoustic_tokenizer_encoder": _FILTERS,
    "vibevoice_acoustic_tokenizer_decoder": _FILTERS,
    "sam3_vision_model": {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]},
    "got_ocr2_vision": {**_SAM, "output_channels": 32},
    "deepseek_ocr2_sam_vision_model": {**_SAM, "downsample_channels": [32, 32]},
    "unlimited_ocr_sam_vision_model": {**_SAM, "downsample_channels": [32, 32]},
    "detr": _DETR,
    "conditional_detr": _DETR,
    "dab-detr": _DETR,
    "table-transformer": _DETR,
    "deformable_detr": {
        **_DETR,
        "backbone_config": {**_RESNET, "out_features": ["stage2", "stage3", "stage4"]},
    },
    "oneformer": {"conv_dim": 32, "mask_dim": 32},
    "fun_asr_nano": {"adaptor_config": Nested(intermediate_size=8)},
    "mimi_decoder": _CODEC,
    "pocket_tts_audio_tokenizer_decoder": _CODEC,
}
CLASSES: dict[str, str] = {
    "musicgen": "MusicgenForConditionalGeneration",
    "musicgen_melody": "MusicgenMelodyForConditionalGeneration",
    "musicgen_decoder": "MusicgenForCausalLM",
    "musicgen_melody_decoder": "MusicgenMelodyForCausalLM",
    "speecht5": "SpeechT5Model",
}


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
    width = getattr(config, "encoder_hidden_size", None) or getattr(
        config, "cross_attention_hidden_size", None
    )
    yield {
        "input_ids": ids(),
        "encoder_hidden_states": normal(BATCH, 7, width or config.hidden_size),
    }


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


def _flattened(config: Any) -> Iterator[dict[str, Any]]:
    """Patches that carry their row and column, as Pix2Struct takes them."""
    config = getattr(config, "vision_config", config)
    width = config.patch_embed_hidden_size
    places = torch.stack((torch.arange(9) // 3 + 1, torch.arange(9) % 3 + 1), -1).double()
    pixels = normal(BATCH, 9, width)
    yield {
        "flattened_patches": torch.cat((places.expand(BATCH, -1, -1), pixels), -1),
        "attention_mask": torch.ones(BATCH, 9).long(),
    }


def _tiled(config: Any) -> Iterator[dict[str, Any]]:
    yield {
        "pixel_values": normal(1, 3, 8, 8 * 32),
        "target_sizes": torch.tensor([[4, 4], [4, 4]]),
    }


def _both(size: Any) -> tuple[int, int]:
    return (
        (int(size[0]), int(size[1])) if isinstance(size, (list, tuple)) else (int(size), int(size))
    )


def _detr(config: Any) -> Iterator[dict[str, Any]]:
    yield {
        "vision_features": [normal(BATCH, 32, 4, 4)],
        "text_features": normal(BATCH, 5, 32),
        "vision_pos_embeds": [normal(BATCH, 32, 4, 4, seed=3)],
        "text_mask": torch.ones(BATCH, 5).bool(),
    }


def _detr_decoder(config: Any) -> Iterator[dict[str, Any]]:
    yield {
        "vision_features": normal(BATCH, 16, 32),
        "text_features": normal(BATCH, 5, 32),
        "vision_pos_encoding": normal(BATCH, 16, 32, seed=3),
        "text_mask": torch.ones(BATCH, 5).bool(),
        "spatial_shapes": torch.tensor([[4, 4]]),
    }


def _mask_decoder(config: Any) -> Iterator[dict[str, Any]]:
    yield {
        "decoder_queries": normal(BATCH, 6, 32),
        "backbone_features": [
            normal(BATCH, 32, 16, 16),
            normal(BATCH, 32, 8, 8),
            normal(BATCH, 32, 4, 4),
        ],
        "encoder_hidden_states": normal(BATCH, 16, 32),
        "prompt_features": normal(BATCH, 5, 32),
        "prompt_mask": torch.ones(BATCH, 5).bool(),
    }


def _nothing(config: Any) -> Iterator[dict[str, Any]]:
    """Its parts are run one by one."""
    return iter(())


def _latents(config: Any) -> Iterator[dict[str, Any]]:
    yield {"latents": normal(BATCH, config.hidden_size, TOKENS)}
    yield {"latents": normal(BATCH, TOKENS, config.hidden_size)}


def _seen(config: Any, **picture: torch.Tensor) -> Iterator[dict[str, Any]]:
    """A picture and a text that has places for its tokens."""
    places = (torch.arange(TOKENS) > 0) & (torch.arange(TOKENS) <= config.latent_query_num)
    yield {
        **picture,
        "input_ids": ids(),
        "image_embeds_position_mask": places.expand(BATCH, -1),
        "use_cache": False,
    }


def _pooled(config: Any) -> Iterator[dict[str, Any]]:
    """A picture of four by four patches per text, whose tokens are pooled by fours."""
    text = ids()
    text[:, 1:5] = config.image_token_id
    yield {
        "input_ids": text,
        "pixel_values": normal(BATCH, 16, 192),
        "image_token_pooling": torch.arange(BATCH * 16).view(-1, 4),
        "image_grids": torch.tensor([[2, 2, 0, 0]] * BATCH),
        "use_cache": False,
    }


def _folded(config: Any) -> Iterator[dict[str, Any]]:
    """A text and a protein."""
    yield {
        "input_ids": ids(),
        "protein_input_ids": ids(9, seed=3),
        "protein_attention_mask": torch.ones(BATCH, 9).long(),
        "use_cache": False,
    }


def _codes(channels: int, **more: Any) -> Any:
    """A text and tokens of several codebooks."""
    return lambda config: [
        {
            "input_ids": ids(),
            "decoder_input_ids": ids(9, seed=3)[..., None].expand(-1, -1, channels).contiguous(),
            **more,
        }
    ]


INPUTS: dict[Any, Any] = {
    "kosmos-2": lambda config: _seen(config, pixel_values=normal(BATCH, 3, 32, 32)),
    "kosmos-2.5": lambda config: _seen(
        config, flattened_patches=next(_flattened(config))["flattened_patches"]
    ),
    "molmo2": _pooled,
    "janus_vqgan": lambda config: [{"pixel_values": normal(BATCH, 3, 8, 8)}],
    "chameleon": lambda config: [
        {
            "input_ids": torch.cat((torch.full((BATCH, 16), 100), ids()), 1),
            "pixel_values": normal(BATCH, 3, 8, 8),
            "use_cache": False,
        }
    ],
    "molmo2_adapter": lambda config: [
        {
            "image_features": normal(BATCH, 16, 2 * config.hidden_size),
            "pooled_patches_idx": torch.arange(BATCH * 16).view(-1, 4),
        }
    ],
    "blt_local_encoder": lambda config: [
        {
            "input_ids": ids(),
            "num_patches": 3,
            "patch_ids": torch.arange(TOKENS).div(4, rounding_mode="floor").expand(BATCH, -1),
        }
    ],
    "evolla": _folded,
    "EvollaModel": _folded,
    "blt": lambda config: [
        {
            "input_ids": ids(),
            "use_cache": False,
            "patch_lengths": torch.tensor([[1, 4, 4, 3]] * BATCH),
        },
    ],
    "dia": _codes(9, use_cache=False),
    "fine_acoustics": lambda config: [
        {"codebook_idx": 1, "input_ids": ids()[..., None].expand(-1, -1, 8).contiguous()}
    ],
    "pe_audio_encoder": lambda config: [{"input_values": normal(BATCH, 1, 19_200)}],
    "pe_audio": lambda config: [
        {"input_ids": ids(), "input_values": normal(BATCH, 1, 19_200)},
    ],
    "autoformer": _series,
    "informer": _series,
    "time_series_transformer": _series,
    "perceiver": lambda config: [{"inputs": normal(BATCH, TOKENS, config.d_model)}],
    "moshi_depth": lambda config: [
        {
            "input_ids": ids(),
            "last_hidden_state": normal(BATCH, 1, config.input_size),
            "use_cache": False,
        }
    ],
    "blip_2_qformer": _asked,
    "instructblip_qformer": _instructed,
    "instructblipvideo_qformer": _instructed,
    "trocr": _crossed,
    "blip_text_model": _crossed,
    "canary_decoder": _crossed,
    "ernie4_5_vl_moe_vision": _patched,
    "inkling2_vision": lambda config: [
        {"pixel_values": normal(12, 16, 16, 3), "image_grid_thw": GRID // torch.tensor([1, 2, 2])},
    ],
    "kimi_k25_vision": lambda config: [{"pixel_values": normal(48, 3, 8, 8), "grid_thw": GRID}],
    "muse_glimmer_vision": lambda config: [{"pixel_values": normal(48, 384), "grid_thw": GRID}],
    "muse_spark_vision": lambda config: [{"pixel_values": normal(48, 384), "grid_thw": GRID}],
    "paddleocr_vl_vision": lambda config: [
        {"pixel_values": normal(1, 48, 3, 8, 8), "grid_thw": GRID}
    ],
    "siglip2_vision_model": _masked,
    "fun_asr_nano_encoder": lambda config: [
        {
            "input_features": normal(BATCH, 32, 560),
            "input_features_mask": torch.ones(BATCH, 32).long(),
        }
    ],
    "qwen3_asr_encoder": lambda config: [
        {
            "input_features": normal(BATCH, 128, 200),
            "input_features_mask": torch.ones(BATCH, 200).long(),
        }
    ],
    "audioflamingo3_encoder": lambda config: [
        {
            "input_features": normal(BATCH, 128, 128),
            "input_features_mask": torch.ones(BATCH, 128).long(),
        }
    ],
    "gemma4_audio": lambda config: [{"input_features": normal(BATCH, 64, 128)}],
    "gemma3n_audio": lambda config: [
        {"audio_mel": normal(BATCH, 64, 128), "audio_mel_mask": torch.zeros(BATCH, 64).bool()}
    ],
    "gemma4_vision": lambda config: [
        {"pixel_values": normal(BATCH, 36, 192), "pixel_position_ids": _places(6)}
    ],
    "bridgetower_vision_model": lambda config: [{"image": normal(BATCH, 3, 32, 32)}],
    "speecht5": lambda config: [
        {
            "input_values": normal(BATCH, 9, 32),
            "decoder_input_values": normal(BATCH, 7, 32, seed=3),
            "use_cache": False,
        }
    ],
    "audio-spectrogram-transformer": lambda config: [{"input_values": normal(BATCH, 24, 16)}],
    "clap_audio_model": lambda config: [
        {"input_features": normal(BATCH, 1, 64, 16), "is_longer": torch.zeros(BATCH, 1).bool()}
    ],
    "clap": lambda config: [
        {
            "input_ids": ids(),
            "input_features": normal(BATCH, 1, 64, 16),
            "is_longer": torch.zeros(BATCH, 1).bool(),
        }
    ],
    "mllama_vision_model": lambda config: [
        {
            "pixel_values": normal(BATCH, 1, 2, 3, 32, 32),
            "aspect_ratio_ids": torch.full((BATCH, 1), 2),
            "aspect_ratio_mask": torch.ones(BATCH, 1, 2).long(),
        }
    ],
    "idefics": lambda config: [
        {
            "input_ids": ids(),
            "pixel_values": normal(BATCH, 1, 3, 32, 32),
            "use_cache": False,
            "image_attention_mask": torch.ones(BATCH, TOKENS, 1).long(),
        }
    ],
    "xclip_vision_model": lambda config: [{"pixel_values": normal(8, 3, 32, 32)}],
    "tvp": lambda config: [{"input_ids": ids()[:1], "pixel_values": normal(1, 2, 3, 64, 64)}],
    "florence_vision": lambda config: [{"hidden_states": normal(BATCH, 3, 64, 64)}],
    "efficientloftr": lambda config: [{"pixel_values": normal(1, 2, 3, 64, 64)}],
    "phi4_multimodal_audio": lambda config: [
        {"hidden_states": normal(BATCH, 64, 80), "mask": None}
    ],
    "qwen2_5_omni_audio_encoder": lambda config: [
        {
            "input_features": normal(128, 48),
            "feature_lens": torch.tensor([32, 16]),
            "aftercnn_lens": torch.tensor([16, 8]),
        }
    ],
    "qwen3_omni_moe_audio_encoder": lambda config: [
        {"input_features": normal(128, 300), "feature_lens": torch.tensor([200, 100])}
    ],
    "timesfm": lambda config: [
        {
            "past_values": normal(BATCH, 96),
            "past_values_padding": torch.zeros(BATCH, 96).long(),
            "freq": torch.zeros(BATCH, 1).long(),
        }
    ],
    "timesfm2_5": lambda config: [{"past_values": normal(BATCH, 128)}],
    "musicgen_decoder": lambda config: [
        {"input_ids": ids().repeat(4, 1), "encoder_hidden_states": normal(BATCH, 7, 32)}
    ],
    "musicgen_melody_decoder": lambda config: [
        {"input_ids": ids().repeat(4, 1), "encoder_hidden_states": normal(BATCH, 7, 32)}
    ],
    "kyutai_speech_to_text": lambda config: [
        {"input_ids": ids()[..., None].expand(-1, -1, 33).contiguous(), "use_cache": False}
    ],
    "dia_decoder": lambda config: [
        {
            "input_ids": ids()[..., None].expand(-1, -1, 9).contiguous(),
            "encoder_hidden_states": normal(BATCH, 7, 32),
        }
    ],
    "lxmert": lambda config: [
        {
            "input_ids": ids(),
            "visual_feats": normal(BATCH, 5, config.visual_feat_dim),
            "visual_pos": normal(BATCH, 5, 4).abs(),
        }
    ],
    "decision_transformer": lambda config: [
        {
            "states": normal(BATCH, 6, 17),
            "actions": normal(BATCH, 6, 4),
            "rewards": normal(BATCH, 6, 1),
            "returns_to_go": normal(BATCH, 6, 1),
            "timesteps": torch.arange(6).expand(BATCH, 6),
            "attention_mask": torch.ones(BATCH, 6).long(),
        }
    ],
    "patchtst": lambda config: [{"past_values": normal(BATCH, config.context_length, 1)}],
    "patchtsmixer": lambda config: [{"past_values": normal(BATCH, config.context_length, 1)}],
    "idefics2_perceiver": lambda config: [
        {"context": normal(BATCH, 9, 32), "attention_mask": torch.ones(BATCH, 9).long()}
    ],
    "granite_speech_encoder": lambda config: [{"hidden_states": normal(BATCH, 16, 160)}],
    "granite_speech_plus_encoder": lambda config: [{"hidden_states": normal(BATCH, 16, 160)}],
    "kosmos_2_5_vision_model": _flattened,
    "pix2struct_vision_model": _flattened,
    "pix2struct": lambda config: [
        {**next(_flattened(config)), "decoder_input_ids": ids(9, seed=3)}
    ],
    "lightglue": lambda config: [{"pixel_values": normal(1, 2, 3, 32, 32)}],
    "superglue": lambda config: [{"pixel_values": normal(1, 2, 3, 32, 32)}],
    "qwen3_omni_moe_talker_code_predictor": lambda config: [
        {"inputs_embeds": normal(BATCH, TOKENS, config.hidden_size), "use_cache": False}
    ],
    "seggpt": lambda config: [
        {
            "pixel_values": normal(BATCH, 3, 32, 32),
            "prompt_pixel_values": normal(BATCH, 3, 32, 32),
            "prompt_masks": normal(BATCH, 3, 32, 32),
            "embedding_type": "instance",
        }
    ],
    "video_llama_3_vision": lambda config: [
        {"pixel_values": patches(config), "grid_thw": GRID, "merge_sizes": torch.tensor([2, 2])}
    ],
    "minicpm_ocr_vision": _tiled,
    "minicpmv4_6_vision": _tiled,
    "minicpmv4_7_vision": _tiled,
    "videoprism_vision_model": lambda config: [
        {"pixel_values_videos": normal(BATCH, config.num_frames, 3, *_both(config.image_size))}
    ],
    "videomt": lambda config: [
        {"pixel_values_videos": normal(BATCH, 2, 3, *_both(config.image_size))}
    ],
    "unlimited_ocr_vision_encoder": lambda config: [{"patch_embeds": normal(BATCH, 32, 4, 4)}],
    "deepseek_ocr2_encoder": lambda config: [
        {"inputs_embeds": normal(BATCH, 16, 32), "num_patches": 8}
    ],
    "sam3_detr_encoder": _detr,
    "sam3_lite_text_detr_encoder": _detr,
    "sam3_detr_decoder": _detr_decoder,
    "sam3_lite_text_detr_decoder": _detr_decoder,
    "udop": lambda config: [
        {
            "input_ids": ids(),
            "bbox": normal(BATCH, TOKENS, 4).abs().clamp(0, 1),
            "use_cache": False,
            "pixel_values": normal(BATCH, 3, *_both(config.image_size)),
            "decoder_input_ids": ids(9, seed=3),
        }
    ],
    "voxtral_realtime_text": lambda config: [
        {"input_ids": ids(), "t_cond": normal(1, 32)[None], "use_cache": False}
    ],
    "blt_local_decoder": lambda config: [
        {"inputs_embeds": normal(BATCH, TOKENS, 32), "patch_embeds": normal(BATCH, 4, 32)}
    ],
    "siglip2": lambda config: [{"input_ids": ids(), **next(_masked(config.vision_config))}],
    "t5gemma2_decoder": _crossed,
    "inkling_audio": lambda config: [
        {"audio_input_ids": ids()[..., None].expand(-1, -1, config.n_mel_bins)}
    ],
    "molmo2_vision": lambda config: [{"pixel_values": normal(BATCH, 16, 192)}],
    "muse_spark_audio": lambda config: [{"input_values": normal(BATCH, 3840)}],
    "muse_glimmer_assistant": lambda config: [
        {
            "noise_embeds": normal(BATCH, 5, config.hidden_size),
            "use_cache": False,
            "context_hidden_states": normal(
                BATCH, 7, config.hidden_size * len(config.target_layer_ids), seed=3
            ),
        }
    ],
    "qwen3_omni_moe_talker_text": lambda config: [
        {"inputs_embeds": normal(BATCH, TOKENS, 32), "use_cache": False}
    ],
    "qwen2_5_omni_dit": lambda config: [
        {
            "hidden_states": normal(BATCH, 12, 80),
            "condition_vector": normal(BATCH, 12, 80, seed=3),
            "speaker_embedding": normal(BATCH, 12, 16, seed=4),
            "quantized_code": ids(6) % 30,
            "time_step": normal(BATCH).abs(),
            "apply_cfg": False,
        }
    ],
    "granite_speech5_encoder": lambda config: [{"input_features": normal(BATCH, 64, 320)}],
    "granite_speech5_ctc": lambda config: [{"input_features": normal(BATCH, 64, 320)}],
    "oneformer": lambda config: [
        {"pixel_values": normal(BATCH, 3, 128, 128), "task_inputs": ids(config.task_seq_len)}
    ],
    "pi0": lambda config: [
        {
            "action_embeds": normal(BATCH, 5, 32),
            "input_ids": ids(),
            "pixel_values": normal(BATCH, 1, 3, 32, 32),
        }
    ],
    "instructblip": _nothing,
    "instructblipvideo": _nothing,
    "sam3_mask_decoder": _mask_decoder,
    "sam3_lite_text_mask_decoder": _mask_decoder,
    "musicgen": lambda config: [
        {"input_ids": ids(), "decoder_input_ids": ids(9, seed=3).repeat(4, 1), "use_cache": False}
    ],
    "musicgen_melody": lambda config: [
        {"input_ids": ids(), "decoder_input_ids": ids(9, seed=3).repeat(4, 1), "use_cache": False}
    ],
    "dots3_note_audio_encoder": lambda config: [
        {
            "input_features": normal(BATCH, 128, 64),
            "chunk_sample_lengths": torch.tensor([64 * 160] * 2),
        }
    ],
    ("speecht5", "SpeechT5ForSpeechToText"): lambda config: [
        {"input_values": normal(BATCH, 3200), "decoder_input_ids": ids(9), "use_cache": False}
    ],
    ("seamless_m4t", "SeamlessM4TTextToUnitModel"): lambda config: [
        {
            "inputs_embeds": normal(BATCH, TOKENS, config.hidden_size),
            "decoder_input_ids": ids(9, seed=3),
            "use_cache": False,
        }
    ],
    ("seamless_m4t_v2", "SeamlessM4Tv2TextToUnitModel"): lambda config: [
        {
            "inputs_embeds": normal(1, 5, config.hidden_size),
            "char_input_ids": ids(10)[:1] % 60,
            "char_count_per_id": torch.full((1, 5), 2),
        }
    ],
    "mimi_decoder": _latents,
    "pocket_tts_audio_tokenizer_decoder": _latents,
    "bros": lambda config: [{"input_ids": ids(), "bbox": normal(BATCH, TOKENS, 4).abs()}],
}
"""What to feed a model type, or one of its classes: a function of the config that yields inputs,
all of which are run."""

PARTS: dict[str, Any] = {
    # a class token is the same in every frame: the first layer's messages do not vary in a model
    # an encoder and a decoder without a forward of their own around them
    "Emu3VQVAEEncoder": lambda config: [{"pixel_values": normal(BATCH, 4, 3, 16, 16)}],
    "Emu3VQVAEDecoder": lambda config: [
        {
            "hidden_states": normal(BATCH, 1, 4, 4, 4),
            "quant_states": normal(BATCH, 1, 4, 4, 4, seed=3),
        }
    ],
    "Xcodec2Decoder": lambda config: [{"hidden_states": normal(BATCH, TOKENS, 64)}],
    "NeuCodecDecoder": lambda config: [{"hidden_states": normal(BATCH, TOKENS, 64)}],
    "XCLIPVisionEncoder": lambda config: [{"inputs_embeds": normal(8, 17, config.hidden_size)}],
}
"""What to feed modules that are no models of their own, and that no input of a model wakes."""

SINGLES = {"kosmos-2", "canine", "timesfm", "blt"}
"""Model types whose masks are too large for float64, so that float32 says more."""

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.2, 1.5, 1.7],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 16,
}
_RELATIVE_TERMS = {
    "relative_attention": True,
    "max_relative_positions": 8,
    "pos_att_type": ["c2p", "p2c"],
}

VARIANTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gpt_bigcode, multi-head": ("gpt_bigcode", {"multi_query": False}, ""),
    "gpt2, scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ""),
    "gpt2, unscaled": ("gpt2", {"scale_attn_weights": False}, ""),
    "esm, rotary": ("esm", {"position_embedding_type": "rotary"}, ""),
    "falcon, new": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
        "",
    ),
    "falcon, alibi": (
        "falcon",
        {"multi_query": False, "alibi": True, "bias": True, "num_kv_heads": 4},
        "",
    ),
    "deberta-v2, relative": ("deberta-v2", _RELATIVE_TERMS, ""),
    "deberta, relative": ("deberta", _RELATIVE_TERMS, ""),
    "wav2vec2-conformer, rotary": (
        "wav2vec2-conformer",
        {"position_embeddings_type": "rotary"},
        "",
    ),
    "granitemoehybrid, no positions": ("granitemoehybrid", {"position_embedding_type": None}, ""),
    "zamba2, no positions": ("zamba2", {"use_mem_rope": False}, ""),
    "qwen2, sliding": (
        "qwen2",
        {
            "use_sliding_window": True,
            "max_window_layers": 1,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        "",
    ),
    "stablelm, normed": ("stablelm", {"qk_layernorm": True}, ""),
    "phi, normed": ("phi", {"qk_layernorm": True}, ""),
    "cohere, normed": ("cohere", {"use_qk_norm": True}, ""),
    "llama, yarn": ("llama", {"rope_parameters": _YARN}, ""),
    "llama, llama3": ("llama", {"rope_parameters": _LLAMA3}, ""),
    "phi3, longrope": (
        "phi3",
        {"rope_parameters": _LONG, "original_max_position_embeddings": 16},
        "",
    ),
    "deepseek_v3, yarn": (
        "deepseek_v3",
        {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
        "",
    ),
    "deepseek_v2, no query rank": ("deepseek_v2", {"q_lora_rank": None}, ""),
    "chameleon, swin norm": ("chameleon", {"swin_norm": True}, ""),
    "bert, decoder": ("bert", {"is_decoder": True, "add_cross_attention": True}, "BertLMHeadModel"),
    "t5, encoder": ("t5", {}, "T5EncoderModel"),
    "gpt_neox, half": (
        "gpt_neox",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.5,
            }
        },
        "",
    ),
}
"""Settings that change attention: a name, its model type, what the config sets, the class."""
