"""The paper's transformer (Section 7): fairseq 0.12.2's `transformer_lm` as its defaults have it.

ReLU, dropout after embeddings, attention and feed-forward, sinusoidal positions, embeddings scaled
by √d, biases everywhere but in the untied output layer.  It has places for norms of queries and
keys and a joint W_QK, which its published runs and their checkpoints keep.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args, get_type_hints

import torch
from jaxtyping import Float, Int64, Num
from torch import Tensor, nn
from torch.nn import functional

from locater.control.stabilizers import Stabilizer, stabilize
from locater.errors import ConfigError, InputError, at_least, check_choice
from locater.paper.lab.loss import linear_cross_entropy

Norm = Literal["post", "pre", "none"]
NormKind = Literal["layer", "rms"]
Positions = Literal["sinusoidal", "rotary"]
Activation = Literal["relu", "swiglu"]
Task = Literal["causal", "masked", "vision"]
QK = Literal["factored", "joint"]
StabilizerName = Literal[
    "none", "sigma-reparam", "qk-norm", "qk-clip", "soft-cap", "qk-weight-decay"
]
STABILIZERS: tuple[StabilizerName, ...] = get_args(StabilizerName)
ROPE_THETA = 10_000.0
_FIRST_POSITION = 2  # fairseq counts positions from its padding index, 1, plus one


@cache  # a sweep makes thousands of settings
def _choices(settings: type) -> dict[str, tuple[str, ...]]:
    """The words that each setting of a class may be, where it has such."""
    found = {name: get_args(hint) for name, hint in get_type_hints(settings).items()}
    return {n: words for n, words in found.items() if words and isinstance(words[0], str)}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a model is made of; the defaults are Section 7's."""

    task: Task = "causal"
    """Predict the next token, hidden tokens (BERT-like), or which digit a picture shows (ViT)."""
    layers: int = 1
    """Blocks of attention and feed-forward net."""
    dim: int = 128
    """d, the width of tokens and attention."""
    ffn: int | None = None
    """Width of the feed-forward net; d where none is given."""
    heads: int = 1
    """Attention heads in a layer."""
    kv_heads: int | None = None
    """Heads of keys and values, which several query heads share; as many where none is given."""
    norm: Norm = "post"
    """Normalization after each residual sum, before each block, or none at all."""
    norm_kind: NormKind = "layer"
    """LayerNorm, or RMSNorm."""
    positions: Positions = "sinusoidal"
    """Added to the tokens, or queries and keys turned by them (rotary)."""
    activation: Activation = "relu"
    """Of the feed-forward net; swiglu has a gate of its own."""
    bias: bool = True
    """Biases of all linear layers but the output."""
    qk: QK = "factored"
    """W_Q and W_K, or one d × d matrix W_QK a head as in Section 2."""
    qk_bias: bool = True
    """Biases of queries and keys: they select tokens where W_QK is zero; no penalty sees them."""
    tied: bool = False
    """One matrix for embeddings and output."""
    dropout: float = 0.1
    """The share of entries set to zero while training."""

    def __post_init__(self) -> None:
        for name, words in _choices(type(self)).items():  # type: ignore[arg-type]
            check_choice(name, getattr(self, name), words)
        least = {"layers": 1, "dim": 4, "heads": 1, "kv_heads": 1, "ffn": 1}
        at_least(self, least, hint="the paper has dim 32 or 128, 1, 3 or 6 layers, one head.")
        shared = self.kv_heads or self.heads
        if self.dim % self.heads or self.heads % shared:
            raise ConfigError(
                f"{self.heads} heads with {shared} heads of keys do not divide {self.dim} "
                "dimensions.",
                hint="the heads divide dim, and the heads of keys divide the heads.",
            )
        if self.dim % 2 or (self.positions == "rotary" and self.dim // self.heads % 2):
            raise ConfigError(
                f"positions need pairs of dimensions; dim is {self.dim} and a head has "
                f"{self.dim // self.heads}.",
                hint="the paper has dim 32 or 128.",
            )
        if self.qk == "joint" and (shared != self.heads or self.positions == "rotary"):
            raise ConfigError(
                "one matrix W_QK a head goes with neither shared keys nor rotary positions.",
                hint="use qk='factored'.",
            )
        if self.tied and self.task != "causal":
            raise ConfigError(
                f"embeddings and output of the task {self.task!r} have different rows.",
                hint="tied=True is for causal models.",
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(
                f"dropout must be from 0 to below 1, got {self.dropout}.", hint="the paper has 0.1."
            )


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(Shape):
    """A shape for a vocabulary and a length."""

    vocabulary: int
    """Tokens it can predict; for `vision`, the number of classes."""
    length: int = 64
    """Tokens in a sequence, T; for `vision`, patches in an image."""
    patch: int = 4
    """Pixels in a patch, for `vision`."""

    def __post_init__(self) -> None:
        Shape.__post_init__(self)
        for name in ("vocabulary", "length", "patch"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} must be one or more, got {getattr(self, name)}.",
                    hint="the paper has sequences of 64 tokens.",
                )

    @property
    def described(self) -> dict[str, object]:
        """What stands beside stored weights, so that `locater audit` reads them like any other."""
        found: dict[str, object] = {"model_type": "locater", "num_attention_heads": self.heads}
        if self.kv_heads is not None:
            found["num_key_value_heads"] = self.kv_heads
        if self.rope_theta is not None:
            found["rope_theta"] = self.rope_theta
        return found

    @property
    def rope_theta(self) -> float | None:
        """The base of the rotary frequencies; None without rotary positions."""
        return ROPE_THETA if self.positions == "rotary" else None


class Attention(nn.Module):
    """Self-attention, fused unless its logits are capped."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        dim, self.num_heads = config.dim, config.heads
        self.num_key_value_heads = config.kv_heads or config.heads
        self.is_causal = config.task == "causal"
        self.scaling = (dim // config.heads) ** -0.5
        self.rope_theta = config.rope_theta
        is_joint, qk_bias = config.qk == "joint", config.qk_bias and config.bias
        shared = dim // config.heads * self.num_key_value_heads
        self.q_proj = nn.Linear(dim, dim * (config.heads if is_joint else 1), bias=qk_bias)
        self.k_proj = nn.Linear(dim, shared, bias=qk_bias and not is_joint)
        self.v_proj = nn.Linear(dim, shared, bias=config.bias)
        self.out_proj = nn.Linear(dim, dim, bias=config.bias)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        self.head_dim = self.q_proj.out_features // self.num_heads

    def forward(self, hidden: Float[Tensor, "batch length model"]) -> Tensor:
        """Mix the tokens of each sequence."""
        query = self.q_norm(self._split(self.q_proj(hidden), self.head_dim))
        key = self.k_norm(self._split(self.k_proj(hidden), self.head_dim))
        value = self._split(self.v_proj(hidden), hidden.shape[-1] // self.num_heads)
        if self.rope_theta is not None:
            query, key = rotated(query, self.rope_theta), rotated(key, self.rope_theta)
        if key.shape[1] != query.shape[1]:  # shared by several heads; of a joint W_QK by all
            key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
            value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=self.is_causal, scale=self.scaling
        )
        return self.out_proj(mixed.transpose(1, 2).flatten(2))

    def _split(self, rows: Tensor, size: int) -> Tensor:
        return rows.unflatten(2, (-1, size)).transpose(1, 2)


class Block(nn.Module):
    """Attention, then a feed-forward layer, each with a residual connection."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        dim, ffn = config.dim, config.ffn or config.dim
        self.self_attn = Attention(config)
        self.fc1 = nn.Linear(dim, ffn, bias=config.bias)
        self.fc2 = nn.Linear(ffn, dim, bias=config.bias)
        self.gate: nn.Module | None = None
        if config.activation == "swiglu":
            self.gate = nn.Linear(dim, ffn, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        self.attn_norm_before, self.ffn_norm_before = (_norm(config, "pre") for _ in range(2))
        self.attn_norm_after, self.ffn_norm_after = (_norm(config, "post") for _ in range(2))

    def forward(self, hidden: Float[Tensor, "batch length model"]) -> Tensor:
        """One layer of the model."""
        mixed = self.dropout(self.self_attn(self.attn_norm_before(hidden)))
        hidden = self.attn_norm_after(hidden + mixed)
        shown = self.ffn_norm_before(hidden)
        if self.gate is None:
            inner = functional.relu(self.fc1(shown))
        else:
            inner = functional.silu(self.gate(shown)) * self.fc1(shown)
        return self.ffn_norm_after(hidden + self.dropout(self.fc2(inner)))


def _norm(config: TransformerConfig, place: Norm) -> nn.Module:
    """The normalization that stands at a place, if one does."""
    if config.norm != place:
        return nn.Identity()
    return (
        nn.RMSNorm(config.dim, eps=1e-6) if config.norm_kind == "rms" else nn.LayerNorm(config.dim)
    )


class Transformer(nn.Module):
    """The paper's transformer, initialized from a generator of its own.

    >>> config = TransformerConfig(vocabulary=50, dim=8, length=4)
    >>> model = Transformer(config, torch.Generator().manual_seed(0))
    >>> tokens = torch.zeros(2, 4, dtype=torch.int64)
    >>> model(tokens).shape, model.loss(tokens, tokens).shape
    (torch.Size([2, 4, 8]), torch.Size([]))
    """

    positions: Tensor

    def __init__(self, config: TransformerConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.config = config
        self.loss_dtype: torch.dtype | None = None
        """Precision of the output layer's products in training; the model's own where None."""
        with torch.random.fork_rng(devices=[]):  # torch's own first values, replaced below
            self._build(config)
        self.reset(generator)

    def _build(self, config: TransformerConfig) -> None:
        self.embedding: nn.Module
        if config.task == "vision":
            self.embedding = nn.Linear(config.patch, config.dim)
        else:
            rows = config.vocabulary + (config.task == "masked")  # the last row is the mask
            self.embedding = nn.Embedding(rows, config.dim)
        self.register_buffer("positions", sinusoids(config.length, config.dim), persistent=False)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = _norm(config, "pre")
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(config.dim, config.vocabulary, bias=False)
        if config.tied and isinstance(self.embedding, nn.Embedding):
            self.output.weight = self.embedding.weight

    def forward(self, inputs: Num[Tensor, "batch length *pixels"]) -> Tensor:
        """Hidden states of the last layer; logits are `output(hidden)`."""
        if inputs.shape[1] > self.config.length:
            raise ConfigError(
                f"{inputs.shape[1]} tokens, but the model was built for {self.config.length}.",
                hint="build it with that length.",
            )
        hidden = self.embedding(inputs)
        if self.config.task != "vision":
            hidden = hidden * math.sqrt(self.config.dim)
        if self.config.positions == "sinusoidal":
            hidden = hidden + self.positions[: inputs.shape[1]]
        hidden = self.dropout(hidden)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.final_norm(hidden)

    def loss(
        self, inputs: Num[Tensor, "batch length *pixels"], targets: Int64[Tensor, "*targets"]
    ) -> Float[Tensor, ""]:
        """Mean loss of the predicted tokens, or of the images' classes, in nats."""
        hidden = self(inputs)
        if self.config.task == "vision":
            hidden = hidden.mean(dim=1, keepdim=True)
        dtype = self.loss_dtype if self.training else None  # what is reported is not rounded
        return linear_cross_entropy(
            hidden.flatten(0, 1), self.output.weight, targets.flatten(), dtype=dtype
        )

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Draw every parameter anew, as fairseq does."""
        dim = self.config.dim
        for layer in self.modules():
            if isinstance(layer, nn.Linear):  # also the biases of queries, keys and values
                bound = layer.in_features**-0.5
                layer.weight.uniform_(-bound, bound, generator=generator)
                if layer.bias is not None:
                    layer.bias.uniform_(-bound, bound, generator=generator)
        for attention in self.modules():
            if isinstance(attention, Attention):
                self._reset_attention(attention, generator)
        if isinstance(self.embedding, nn.Embedding):
            self.embedding.weight.normal_(0, dim**-0.5, generator=generator)
        if not self.config.tied:
            self.output.weight.normal_(0, dim**-0.5, generator=generator)

    def _reset_attention(self, attention: Attention, generator: torch.Generator) -> None:
        dim = self.config.dim
        bound = math.sqrt(3 / (2 * dim))  # Xavier with gain 1/√2 for a square matrix
        for part in (attention.q_proj, attention.k_proj, attention.v_proj):
            part.weight.uniform_(-bound, bound, generator=generator)
        bound = math.sqrt(3 / dim)
        attention.out_proj.weight.uniform_(-bound, bound, generator=generator)
        if attention.out_proj.bias is not None:
            attention.out_proj.bias.zero_()
        if self.config.qk == "joint":  # as wide as the product W_Qᵀ W_K would be
            spread = math.sqrt(dim // self.config.heads) / (2 * dim)
            attention.q_proj.weight.normal_(0, spread, generator=generator)
            attention.k_proj.weight.copy_(torch.eye(dim))
            attention.k_proj.weight.requires_grad_(False)


def rotated(
    rows: Float[Tensor, "batch heads length head"], theta: float
) -> Float[Tensor, "batch heads length head"]:
    """Turn the pairs (x_i, x_{i + head/2}) by position · θ^(−2i/head), as Llama does."""
    half = rows.shape[-1] // 2
    rate = theta ** (-torch.arange(half, device=rows.device, dtype=torch.float32) / half)
    angle = torch.arange(rows.shape[-2], device=rows.device)[:, None] * rate
    cosine, sine = angle.cos().to(rows.dtype), angle.sin().to(rows.dtype)
    left, right = rows[..., :half], rows[..., half:]
    return torch.cat([left * cosine - right * sine, right * cosine + left * sine], dim=-1)


def sinusoids(length: int, dim: int) -> Float[Tensor, "length dim"]:
    """Sines, then cosines, of position · 10000^(−i / (dim/2 − 1)); positions count from 2."""
    half = dim // 2
    rate = torch.exp(torch.arange(half) * (-math.log(10000) / (half - 1)))
    angle = torch.arange(_FIRST_POSITION, _FIRST_POSITION + length)[:, None] * rate
    return torch.cat([angle.sin(), angle.cos()], dim=1)


def apply_stabilizer(
    model: nn.Module,
    name: StabilizerName,
    *,
    max_logit: float = 100.0,
    decay: float = 0.1,
    learning_rate: float | None = None,
) -> Stabilizer:
    """Change a lab model in place, before its optimizer is built; call `after_step` in the loop.

    `control.stabilizers` has them, but for two: `qk-norm` is LayerNorm on every head's queries and
    keys (Henry et al. 2020, Dehghani et al. 2023), in the places that the model has for it, and
    `qk-weight-decay` lets queries and keys alone decay by `learning_rate` · `decay` a step.
    """
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    check_choice("stabilizer", name, STABILIZERS)
    if name != "none" and not attentions:
        raise InputError(
            f"{type(model).__name__} has no attention of the laboratory's.",
            hint="stabilizers work on lab.model.Transformer.",
        )
    if name == "qk-norm":
        for attention in attentions:
            _normalize(attention)
        return Stabilizer()
    if name == "qk-weight-decay":
        return _Decay(attentions, decay, learning_rate)
    settings = {"max_logit": max_logit} if name in ("qk-clip", "soft-cap") else {}
    return stabilize(model, name, **settings)


def _normalize(attention: Attention) -> None:
    """Give queries and keys a LayerNorm with gains and no bias, on the weights' device."""
    weight = attention.q_proj.weight
    for side in ("q_norm", "k_norm"):
        norm = nn.LayerNorm(
            attention.head_dim, bias=False, device=weight.device, dtype=weight.dtype
        )
        setattr(attention, side, norm)


class _Decay(Stabilizer):
    def __init__(
        self, attentions: list[Attention], decay: float, learning_rate: float | None
    ) -> None:
        if learning_rate is None or not 0 <= decay * learning_rate < 1:
            raise ConfigError(
                f"decay times learning_rate must lie from 0 to below 1, got {decay} times "
                f"{learning_rate}.",
                hint="give the optimizer's learning rate.",
            )
        self.keep = 1 - decay * learning_rate
        sides = [side for one in attentions for side in (one.q_proj, one.k_proj)]
        self.weights = [side.weight for side in sides if side.weight.requires_grad]

    @torch.no_grad()
    def after_step(self) -> None:
        for weight in self.weights:
            weight.mul_(self.keep)
