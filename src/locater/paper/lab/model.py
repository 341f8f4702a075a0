"""The paper's transformer (Section 7): fairseq 0.12.2's `transformer_lm` as its defaults have it.

ReLU, dropout after embeddings, attention and feed-forward, sinusoidal positions, embeddings scaled
by √d, biases everywhere but in the untied output layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int64, Num
from torch import Tensor, nn
from torch.nn import functional

from locater.errors import ConfigError
from locater.paper.lab.loss import linear_cross_entropy

Norm = Literal["post", "pre", "none"]
Task = Literal["causal", "masked", "vision"]
QK = Literal["factored", "joint"]
Watcher = Callable[[Tensor, Tensor], None]
_FIRST_POSITION = 2  # fairseq counts positions from its padding index, 1, plus one


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Shape and task of a model; the defaults are Section 7's."""

    vocabulary: int
    """Tokens it can predict; for `vision`, the number of classes."""
    dim: int = 128
    ffn: int | None = None
    """Width of the feed-forward layer; as wide as the model where none is given."""
    layers: int = 1
    heads: int = 1
    length: int = 64
    """Tokens in a sequence, T; for `vision`, patches in an image."""
    norm: Norm = "post"
    """LayerNorm after each residual sum, before each block, or none at all."""
    task: Task = "causal"
    """Predict the next token, hidden tokens (BERT-like), or an image's class (ViT)."""
    dropout: float = 0.1
    qk: QK = "factored"
    """W_Q and W_K, or one matrix W_QK a head as in Section 2."""
    qk_bias: bool = True
    """Biases of queries and keys: they select tokens where W_QK is zero."""
    patch: int = 4
    """Pixels in a patch, for `vision`."""

    def __post_init__(self) -> None:
        for name in ("vocabulary", "dim", "layers", "heads", "length", "patch"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} must be one or more, got {getattr(self, name)}.",
                    hint="the paper has dim 32 or 128, 1, 3 or 6 layers, one head, length 64.",
                )
        if self.dim % self.heads:
            raise ConfigError(
                f"{self.heads} heads do not divide {self.dim} dimensions.",
                hint="the paper has one head.",
            )
        if self.dim < 4 or self.dim % 2:
            raise ConfigError(
                f"sinusoidal positions need an even dim of at least 4, got {self.dim}.",
                hint="the paper has 32 or 128.",
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout must lie in [0, 1), got {self.dropout}.", hint="try 0.1.")
        for name, known in (("norm", Norm), ("task", Task), ("qk", QK)):
            if getattr(self, name) not in known.__args__:  # type: ignore[attr-defined]
                choices = ", ".join(known.__args__)  # type: ignore[attr-defined]
                raise ConfigError(
                    f"unknown {name} {getattr(self, name)!r}.", hint=f"use one of {choices}."
                )


class Attention(nn.Module):
    """Self-attention; `watchers` are shown its queries and keys as (batch, heads, length, head)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        dim, self.num_heads = config.dim, config.heads
        self.is_causal = config.task == "causal"
        self.scaling = (dim // config.heads) ** -0.5
        is_joint = config.qk == "joint"
        self.q_proj = nn.Linear(dim, dim * (config.heads if is_joint else 1), bias=config.qk_bias)
        self.k_proj = nn.Linear(dim, dim, bias=config.qk_bias and not is_joint)
        self.v_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        self.head_dim = self.q_proj.out_features // self.num_heads
        self.soft_cap: float | None = None
        """Bounds the logits by cap · tanh(logit / cap), where it is given."""
        self.watchers: list[Watcher] = []

    def forward(self, hidden: Float[Tensor, "batch length model"]) -> Tensor:
        """Mix the tokens of each sequence."""
        query = self.q_norm(self._split(self.q_proj(hidden), self.head_dim))
        key = self.k_norm(self._split(self.k_proj(hidden), self.head_dim))
        value = self._split(self.v_proj(hidden), hidden.shape[-1] // self.num_heads)
        if key.shape[1] != query.shape[1]:  # one matrix a head: every head's keys are the tokens
            key = key.expand_as(query)
        for watch in self.watchers:
            watch(query, key)
        if self.soft_cap is None:
            mixed = functional.scaled_dot_product_attention(
                query, key, value, is_causal=self.is_causal, scale=self.scaling
            )
        else:
            logits = self.logits(query, key)
            if self.is_causal:
                future = torch.ones_like(logits[0, 0], dtype=torch.bool).triu(1)
                logits = logits.masked_fill(future, -math.inf)
            mixed = logits.softmax(-1).to(value.dtype) @ value
        return self.out_proj(mixed.transpose(1, 2).flatten(2))

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        """What enters the softmax, before any mask."""
        logits = query @ key.mT * self.scaling
        cap = self.soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _split(self, rows: Tensor, size: int) -> Tensor:
        return rows.unflatten(2, (-1, size)).transpose(1, 2)


class Block(nn.Module):
    """Attention, then a feed-forward layer, each with a residual connection."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        dim, ffn = config.dim, config.ffn or config.dim
        self.self_attn = Attention(config)
        self.fc1, self.fc2 = nn.Linear(dim, ffn), nn.Linear(ffn, dim)
        self.dropout = nn.Dropout(config.dropout)
        before, after = config.norm == "pre", config.norm == "post"
        self.attn_norm_before = nn.LayerNorm(dim) if before else nn.Identity()
        self.attn_norm_after = nn.LayerNorm(dim) if after else nn.Identity()
        self.ffn_norm_before = nn.LayerNorm(dim) if before else nn.Identity()
        self.ffn_norm_after = nn.LayerNorm(dim) if after else nn.Identity()

    def forward(self, hidden: Float[Tensor, "batch length model"]) -> Tensor:
        """One layer of the model."""
        mixed = self.dropout(self.self_attn(self.attn_norm_before(hidden)))
        hidden = self.attn_norm_after(hidden + mixed)
        inner = functional.relu(self.fc1(self.ffn_norm_before(hidden)))
        return self.ffn_norm_after(hidden + self.dropout(self.fc2(inner)))


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
        self.final_norm = nn.LayerNorm(config.dim) if config.norm == "pre" else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(config.dim, config.vocabulary, bias=False)

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
        hidden = self.dropout(hidden + self.positions[: inputs.shape[1]])
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
        self.output.weight.normal_(0, dim**-0.5, generator=generator)

    def _reset_attention(self, attention: Attention, generator: torch.Generator) -> None:
        dim = self.config.dim
        bound = math.sqrt(3 / (2 * dim))  # Xavier with gain 1/√2 for a square matrix
        for part in (attention.q_proj, attention.k_proj, attention.v_proj):
            part.weight.uniform_(-bound, bound, generator=generator)
        bound = math.sqrt(3 / dim)
        attention.out_proj.weight.uniform_(-bound, bound, generator=generator)
        attention.out_proj.bias.zero_()
        if self.config.qk == "joint":  # as wide as the product W_Qᵀ W_K would be
            spread = math.sqrt(dim // self.config.heads) / (2 * dim)
            attention.q_proj.weight.normal_(0, spread, generator=generator)
            attention.k_proj.weight.copy_(torch.eye(dim))
            attention.k_proj.weight.requires_grad_(False)


def sinusoids(length: int, dim: int) -> Float[Tensor, "length dim"]:
    """Sines, then cosines, of position · 10000^(−i / (dim/2 − 1)); positions count from 2."""
    half = dim // 2
    rate = torch.exp(torch.arange(half) * (-math.log(10000) / (half - 1)))
    angle = torch.arange(_FIRST_POSITION, _FIRST_POSITION + length)[:, None] * rate
    return torch.cat([angle.sin(), angle.cos()], dim=1)
