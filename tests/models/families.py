"""Tiny random models of every family, and their own logits as they enter the softmax."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from locater.core.form import HeadNorm, QKForm
from locater.models.layout import Skipped
from locater.models.live import LiveAttention, discover

TOKENS = 7
BATCH = 2


@dataclass
class Seen:
    """What one attention of a running model read and the logits that it made of it."""

    query_input: Tensor | None = None
    key_input: Tensor | None = None
    logits: Tensor | None = None


class Recorder:
    """Keeps what enters a softmax while an attention module runs."""

    def __init__(self) -> None:
        self.seen: dict[str, Seen] = {}
        self.running: list[str] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Stand between every caller and torch's softmax and attention."""
        softmax, attention = functional.softmax, functional.scaled_dot_product_attention

        def heard_softmax(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self.running:
                self.seen[self.running[-1]].logits = logits.detach()
            return softmax(logits, *args, **kwargs)

        def heard_attention(*args: Any, **kwargs: Any) -> Tensor:
            if self.running:
                self.seen[self.running[-1]].logits = _sdpa_logits(*args, **kwargs)
            return attention(*args, **kwargs)

        with (
            mock.patch.object(functional, "softmax", heard_softmax),
            mock.patch.object(functional, "scaled_dot_product_attention", heard_attention),
        ):
            yield


def _sdpa_logits(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **more: Any
) -> Tensor:
    scale = more.get("scale") or query.shape[-1] ** -0.5
    logits = query.detach() @ key.detach().mT * scale
    if more.get("is_causal"):
        ahead = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        logits = logits.masked_fill(ahead, -torch.inf)
    return logits if attn_mask is None else logits + attn_mask


@contextmanager
def watched(attentions: list[LiveAttention]) -> Iterator[dict[str, Seen]]:
    """Watch attentions run: the inputs of their projections, the inputs of their softmax."""
    recorder, handles = Recorder(), []
    for live in attentions:
        name, module = live.layout.name, live.module
        assert module is not None
        seen = recorder.seen[name] = Seen()

        def enter(
            own: nn.Module, args: Any, kwargs: Any, name: str = name, seen: Seen = seen
        ) -> None:
            recorder.running.append(name)
            if isinstance(own, nn.MultiheadAttention):
                given = dict(zip(("query", "key"), args, strict=False)) | kwargs
                sides = (given["query"].detach(), given["key"].detach())
                if not own.batch_first:
                    sides = (sides[0].transpose(0, 1), sides[1].transpose(0, 1))
                seen.query_input, seen.key_input = sides

        def leave(*_: Any) -> None:
            recorder.running.pop()

        def asks(_: nn.Module, args: Any, seen: Seen = seen) -> None:
            seen.query_input = args[0].detach()

        def answers(_: nn.Module, args: Any, seen: Seen = seen) -> None:
            seen.key_input = args[0].detach()

        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave))
        for side, hook in ((live.layout.query, asks), (live.layout.key, answers)):
            owner = live.sources[side.weight].adapter or live.sources[side.weight].owner
            if owner is not module:
                handles.append(owner.register_forward_pre_hook(hook))
    try:
        with recorder.listening():
            yield recorder.seen
    finally:
        for handle in handles:
            handle.remove()


def logits_of(form: QKForm, seen: Seen) -> Tensor:
    """(W_Q x_t + b_q)·(W_K x_s + b_k)/λ, turned, plus the bias by distance on earlier keys."""
    assert seen.query_input is not None and seen.key_input is not None
    query = seen.query_input[:, None] @ form.query.mT
    key = seen.key_input[:, None] @ form.key.mT
    query = query if form.query_bias is None else query + form.query_bias[:, None]
    key = key if form.key_bias is None else key + form.key_bias[:, None]
    query, key = (
        vectors
        if norm is None
        else torch.stack([norm.apply(*one) for one in zip(vectors, sizes, strict=True)])
        for norm, vectors, sizes in (
            (form.query_norm, query, _sizes(form.query_norm, seen.query_input)),
            (form.key_norm, key, _sizes(form.key_norm, seen.key_input)),
        )
    )
    if form.rotary is not None:
        phases = form.rotary.phases(torch.arange(query.shape[-2]))
        query, key = form.rotary.turn(query, phases), form.rotary.turn(key, phases)
    logits = query @ key.mT / form.temperature
    if form.distance_bias is None:
        return logits
    distance = torch.arange(query.shape[-2])[:, None] - torch.arange(key.shape[-2])
    return logits + form.distance_bias[:, distance.clamp_min(0)]


def _sizes(norm: HeadNorm | None, tokens: Tensor) -> Tensor:
    """What brings queries or keys from the root mean square of their norm to their own norm."""
    return tokens if norm is None else norm.factor(tokens).movedim(-1, 1)


def mismatch(form: QKForm, seen: Seen, *, softcap: float | None = None) -> float:
    """The largest difference between the form's logits and the model's own, over their size.

    Masked keys are left out, and with a bias by distance those after the query.  Where the model's
    logits are known up to a constant per row, so is the comparison.
    """
    assert seen.logits is not None
    ours = logits_of(form, seen).detach()
    ours = ours if softcap is None else softcap * (ours / softcap).tanh()
    theirs = seen.logits.reshape(*ours.shape[:-1], -1)
    up_to_a_constant = form.distance_bias is not None or theirs.shape[-1] > ours.shape[-1]
    theirs = theirs[..., : ours.shape[-1]]  # a sink comes last
    counted = theirs > -1e3  # masks go from -1e4 to minus infinity
    if form.distance_bias is not None:
        counted = counted & torch.ones(theirs.shape[-2:], dtype=torch.bool).tril()
    assert counted.sum() >= ours[..., 0].numel() and counted.any(-1).all()
    difference = (ours - theirs).masked_fill(~counted, torch.nan)
    if up_to_a_constant:
        difference = difference - difference.nanmean(-1, keepdim=True)
    return (difference.nan_to_num(0).abs().max() / theirs[counted].abs().max()).item()


def shaken(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter a value of its own: no bias is zero, no gain is one."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            fan_in = parameter.shape[-1] if parameter.ndim > 1 else 4
            parameter.copy_(drawn / fan_in**0.5 + (0.5 if parameter.ndim < 2 else 0))
    return model


def tokens(vocabulary: int = 50, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (BATCH, TOKENS), generator=generator)


def floats(*shape: int, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, *shape, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Family:
    """How to build a tiny model of a Hugging Face family and what to feed it."""

    config: str
    settings: Mapping[str, Any]
    inputs: Callable[[], dict[str, Tensor]] = lambda: {"input_ids": tokens()}
    attentions: int = 2
    """How many it should find."""
    traits: frozenset[str] = field(default_factory=frozenset)
    implementation: str = "eager"


SIZE = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "vocab_size": 50,
}
SHARED = {**SIZE, "num_key_value_heads": 2}
VISION = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "image_size": 8,
    "patch_size": 4,
}
SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 50,
}
T5 = {"d_model": 32, "num_heads": 4, "d_kv": 6, "d_ff": 48, "num_layers": 2, "vocab_size": 50}
WAVE = {
    **SIZE,
    "conv_dim": (8,),
    "conv_stride": (5,),
    "conv_kernel": (10,),
    "num_feat_extract_layers": 1,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def both() -> dict[str, Tensor]:
    return {"input_ids": tokens(), "decoder_input_ids": tokens(seed=3)}


def pixels() -> dict[str, Tensor]:
    return {"pixel_values": floats(3, 8, 8)}


def words_and_pixels() -> dict[str, Tensor]:
    return {"input_ids": tokens(), "pixel_values": floats(3, 8, 8)}


def sound() -> dict[str, Tensor]:
    return {"input_features": floats(4, 2 * TOKENS), "decoder_input_ids": tokens(seed=3)}


def wave() -> dict[str, Tensor]:
    return {"input_values": floats(100)}


def with_encoder() -> dict[str, Tensor]:
    return {"input_ids": tokens(), "encoder_hidden_states": floats(5, 32)}


def traits(*names: str) -> frozenset[str]:
    return frozenset(names)


NEO = {"hidden_size": 32, "num_heads": 4, "num_layers": 2, "intermediate_size": 48}
GPT = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 50}
BLOOM = {"hidden_size": 32, "n_head": 4, "n_layer": 2, "vocab_size": 50}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 4.0],
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
HALF = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}

FAMILIES: dict[str, Family] = {
    "gpt2": Family("GPT2Config", GPT, traits=traits("fused")),
    "gpt2 scaled by layer": Family("GPT2Config", {**GPT, "scale_attn_by_inverse_layer_idx": True}),
    "gpt2 unscaled": Family("GPT2Config", {**GPT, "scale_attn_weights": False}),
    "gpt2 with cross-attention": Family(
        "GPT2Config", {**GPT, "add_cross_attention": True}, with_encoder, attentions=4
    ),
    "openai-gpt": Family("OpenAIGPTConfig", GPT),
    "gpt_bigcode": Family("GPTBigCodeConfig", {**GPT, "multi_query": True}),
    "gpt_neo": Family(
        "GPTNeoConfig",
        {**NEO, "vocab_size": 50, "attention_types": [[["global", "local"], 1]]},
        traits=traits("float32"),
    ),
    "gptj": Family("GPTJConfig", {**GPT, "rotary_dim": 4}, traits=traits("rotary")),
    "gpt_neox": Family(
        "GPTNeoXConfig", {**SIZE, "rope_parameters": HALF}, traits=traits("fused", "rotary")
    ),
    "opt": Family("OPTConfig", {**SIZE, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bloom": Family("BloomConfig", BLOOM, traits=traits("fused", "bias by distance")),
    "bloom, twelve heads": Family(
        "BloomConfig",
        {**BLOOM, "hidden_size": 36, "n_head": 12},
        traits=traits("fused", "bias by distance", "float32"),
    ),
    "falcon, new": Family(
        "FalconConfig",
        {**SIZE, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
        traits=traits("fused", "rotary"),
    ),
    "falcon, multi-query": Family(
        "FalconConfig", {**SIZE, "multi_query": True}, traits=traits("rotary")
    ),
    # transformers 5 adds the bias twice in Falcon's eager path
    "falcon, old": Family(
        "FalconConfig",
        {**SIZE, "multi_query": False, "alibi": True, "bias": True},
        traits=traits("fused", "bias by distance"),
        implementation="sdpa",
    ),
    "falcon, old, twelve heads": Family(
        "FalconConfig",
        {**SIZE, "hidden_size": 36, "num_attention_heads": 12, "multi_query": False}
        | {"alibi": True},
        traits=traits("fused", "bias by distance", "bfloat16"),
        implementation="sdpa",
    ),
    "llama": Family("LlamaConfig", SHARED, traits=traits("rotary", "shared")),
    "llama, linear": Family(
        "LlamaConfig", {**SHARED, "rope_parameters": LINEAR}, traits=traits("rotary")
    ),
    "llama, dynamic": Family(
        "LlamaConfig", {**SHARED, "rope_parameters": DYNAMIC}, traits=traits("rotary")
    ),
    "llama, llama3": Family(
        "LlamaConfig", {**SHARED, "rope_parameters": LLAMA3}, traits=traits("rotary")
    ),
    "llama, yarn": Family(
        "LlamaConfig",
        {**SHARED, "rope_parameters": YARN, "max_position_embeddings": 64},
        traits=traits("rotary"),
    ),
    "mistral": Family("MistralConfig", {**SHARED, "head_dim": 16}, traits=traits("rotary")),
    "mixtral": Family("MixtralConfig", {**SHARED, "num_local_experts": 2}, traits=traits("rotary")),
    "qwen2": Family("Qwen2Config", SHARED, traits=traits("rotary")),
    "qwen2_moe": Family(
        "Qwen2MoeConfig",
        {**SHARED, "num_experts": 2, "moe_intermediate_size": 8, "num_experts_per_tok": 1}
        | {"shared_expert_intermediate_size": 8},
        traits=traits("rotary"),
    ),
    "qwen3": Family("Qwen3Config", {**SHARED, "head_dim": 16}, traits=traits("rotary", "qk-norm")),
    "qwen3_moe": Family(
        "Qwen3MoeConfig",
        {**SHARED, "head_dim": 16, "num_experts": 2, "moe_intermediate_size": 8}
        | {"num_experts_per_tok": 1},
        traits=traits("rotary", "qk-norm"),
    ),
    "gemma": Family("GemmaConfig", {**SHARED, "head_dim": 16}, traits=traits("rotary")),
    "gemma2": Family(
        "Gemma2Config",
        {**SHARED, "head_dim": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0}
        | {"sliding_window": 4},
        traits=traits("rotary", "softcap"),
    ),
    "gemma3": Family(
        "Gemma3TextConfig",
        {**SHARED, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 4}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        traits=traits("rotary", "qk-norm"),
    ),
    "granite": Family(
        "GraniteConfig", {**SHARED, "attention_multiplier": 0.2}, traits=traits("rotary")
    ),
    "cohere": Family("CohereConfig", SHARED, traits=traits("rotary")),
    "stablelm": Family("StableLmConfig", SHARED, traits=traits("rotary")),
    "starcoder2": Family("Starcoder2Config", SHARED, traits=traits("rotary")),
    "olmo": Family("OlmoConfig", SHARED, traits=traits("rotary")),
    "olmo2": Family("Olmo2Config", SHARED, traits=traits("rotary", "qk-norm")),
    "smollm3": Family(
        "SmolLM3Config", {**SHARED, "no_rope_layers": [1, 0]}, traits=traits("rotary")
    ),
    "gpt_oss": Family(
        "GptOssConfig",
        {**SHARED, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
        traits=traits("rotary", "sinks"),
    ),
    "phi3": Family("Phi3Config", SHARED, traits=traits("rotary", "fused")),
    "phi3, long": Family(
        "Phi3Config",
        {**SHARED, "max_position_embeddings": 64, "original_max_position_embeddings": 16}
        | {"rope_parameters": {**LONG, "partial_rotary_factor": 0.5}},
        traits=traits("rotary", "magnitude"),
    ),
    "phi": Family("PhiConfig", SHARED, traits=traits("rotary")),
    "bert": Family("BertConfig", SIZE),
    "bert with cross-attention": Family(
        "BertConfig",
        {**SIZE, "is_decoder": True, "add_cross_attention": True},
        with_encoder,
        attentions=4,
    ),
    "roberta": Family("RobertaConfig", SIZE),
    "xlm-roberta": Family("XLMRobertaConfig", SIZE),
    "camembert": Family("CamembertConfig", SIZE),
    "electra": Family("ElectraConfig", SIZE),
    "esm": Family(
        "EsmConfig",
        {**SIZE, "position_embedding_type": "rotary", "mask_token_id": 3},
        traits=traits("rotary"),
    ),
    "deberta-v2": Family(
        "DebertaV2Config", {**SIZE, "relative_attention": False}, traits=traits("float32")
    ),
    "distilbert": Family(
        "DistilBertConfig",
        {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 48, "vocab_size": 50},
    ),
    "albert": Family("AlbertConfig", {**SIZE, "embedding_size": 16}, attentions=1),
    "modernbert": Family("ModernBertConfig", SIZE, traits=traits("rotary", "fused")),
    "mpnet": Family("MPNetConfig", SIZE, traits=traits("bias by distance")),
    "vit": Family("ViTConfig", VISION, pixels),
    "deit": Family("DeiTConfig", VISION, pixels),
    "dinov2": Family("Dinov2Config", VISION, pixels),
    "clip": Family(
        "CLIPConfig", {"text_config": SIZE, "vision_config": VISION}, words_and_pixels, attentions=4
    ),
    "siglip": Family(
        "SiglipConfig",
        {"text_config": SIZE, "vision_config": VISION},
        words_and_pixels,
        attentions=5,
    ),
    "t5": Family("T5Config", T5, both, attentions=6, traits=traits("bias by distance")),
    "mt5": Family("MT5Config", T5, both, attentions=6, traits=traits("bias by distance")),
    "umt5": Family("UMT5Config", T5, both, attentions=6, traits=traits("bias by distance")),
    "switch_transformers": Family(
        "SwitchTransformersConfig",
        {**T5, "num_experts": 2, "num_decoder_layers": 2}
        | {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
        both,
        attentions=6,
        traits=traits("bias by distance"),
    ),
    "bart": Family("BartConfig", SEQ2SEQ, both, attentions=3),
    "mbart": Family("MBartConfig", SEQ2SEQ, both, attentions=3),
    "marian": Family("MarianConfig", SEQ2SEQ, both, attentions=3),
    "pegasus": Family("PegasusConfig", SEQ2SEQ, both, attentions=3),
    "m2m_100": Family("M2M100Config", SEQ2SEQ, both, attentions=3),
    "whisper": Family(
        "WhisperConfig",
        {**SEQ2SEQ, "num_mel_bins": 4, "max_source_positions": TOKENS, "max_target_positions": 16},
        sound,
        attentions=3,
    ),
    "wav2vec2": Family("Wav2Vec2Config", WAVE, wave),
    "hubert": Family("HubertConfig", WAVE, wave),
}


@dataclass(frozen=True)
class Observed:
    """A tiny model, what was found in it and what its attentions did."""

    model: nn.Module
    found: list[LiveAttention]
    skipped: list[Skipped]
    seen: Mapping[str, Seen]


def built(name: str) -> nn.Module:
    """A tiny model of a family, in float64, every parameter drawn anew."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**{**SPECIAL, **family.settings})
    config._experts_implementation = "eager"  # the others know no float64
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")  # GPT-BigCode
        model = transformers.AutoModel.from_config(
            config, attn_implementation=family.implementation
        )
    return shaken(model)


@cache
def observed(name: str, *, without_qk_norm: bool = False) -> Observed:
    """Run a tiny model once and keep what it did."""
    model = built(name)
    found, skipped = discover(model)
    if without_qk_norm:
        for live in found:
            assert live.module is not None
            live.module.q_norm = live.module.k_norm = nn.Identity()
    with watched(found) as seen, torch.no_grad():
        model(**FAMILIES[name].inputs())
    return Observed(model, found, skipped, seen)


def weight_of(live: LiveAttention, side: str) -> torch.Tensor:
    """W_Q of every head, or W_K of every key head, as it is stored."""
    part = getattr(live.layout, side)
    return part.heads(live.sources[part.weight].read(), live.layout.head_dim)


def bias_of(live: LiveAttention, side: str) -> torch.Tensor | None:
    """Their bias, where there is one."""
    part = getattr(live.layout, side)
    if part.bias is None:
        return None
    return part.bias_heads(live.sources[part.bias].read(), live.layout.head_dim)
