"""The norm whose output an attention reads: its gains belong to the tokens' covariance."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from locater.models.layout import AttentionLayout
from locater.models.names import Names, Shapes, join

_BESIDE = (
    "input_layernorm",  # Llama, Qwen, Gemma, GPT-NeoX, Falcon, BLOOM, Phi, …
    "ln_1",  # GPT-2, GPT-J, BigCode
    "ln_attn",  # Falcon's later layers
    "attn_norm",  # GGUF
    "attn_norm_before",  # `locater train`
    "attention_norm",  # Llama as first published
    "layernorm_before",  # ViT
    "layer_norm1",  # CLIP, SigLIP
)
_ADDS_ONE = ("gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma", "paligemma", "nemotron")
"""Model types whose norm multiplies with 1 + weight; gemma3n and gemma4 do not."""
_NORMED_AFTER = ("openai-gpt",)
"""Model types with one of these names whose norm stands behind the attention."""
_BERT = re.compile(r"(?P<stack>.*?)encoder\.layer\.(?P<layer>\d+)\.attention\.self")
_DISTILBERT = re.compile(r"(?P<stack>.*?)transformer\.layer\.(?P<layer>\d+)\.attention")


@dataclass(frozen=True, kw_only=True)
class Norm:
    """Where the norm before an attention keeps its gain and its bias."""

    weight: str
    bias: str | None = None
    adds_one: bool = False
    """The gain is 1 + weight (Gemma, Nemotron)."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """The stored tensors."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def gain(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """What a token of unit variance is multiplied with, dimension by dimension."""
        weight = tensors[self.weight].detach().double()
        return weight + 1 if self.adds_one else weight

    def shift(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """What is added to every token."""
        return None if self.bias is None else tensors[self.bias].detach().double()


def norms(
    shapes: Shapes, config: Mapping[str, Any], found: list[AttentionLayout]
) -> dict[str, Norm]:
    """The norm before each attention, by the attention's name; only where its place is certain.

    >>> norms({}, {}, [])
    {}
    """
    names = Names.of(shapes)
    kind = str(config.get("model_type", ""))
    known: dict[str, Norm] = {}
    for layout in found:
        child = _place(layout, names, kind)
        if child is None or names.shape(f"{child}.weight") != (layout.model,):
            continue
        bias = names.stored.get(f"{child}.bias")
        known[layout.name] = Norm(
            weight=names.stored[f"{child}.weight"],
            bias=bias,
            adds_one=_adds_one(kind, child, has_bias=bias is not None),
        )
    return known


def _adds_one(kind: str, child: str, *, has_bias: bool) -> bool:
    """GGUF files store the sum; a tower with biases in its norms (SigLIP) is not Gemma's own."""
    if kind not in _ADDS_ONE or re.match(r"(?:\w+\.)?blk\.", child):
        return False
    return has_bias == (kind == "nemotron")


def _place(layout: AttentionLayout, names: Names, kind: str) -> str | None:
    """The module name of the norm before an attention."""
    if layout.kind == "cross" or kind in _NORMED_AFTER:
        return None
    parent = layout.name
    for _ in range(3):  # the attention may lie a little deeper than its layer: attention.self
        for child in _BESIDE:
            if f"{join(parent, child)}.weight" in names:
                return join(parent, child)
        if not parent:
            break
        parent = parent.rpartition(".")[0]
    for pattern, last in ((_BERT, "output.LayerNorm"), (_DISTILBERT, "output_layer_norm")):
        match = pattern.fullmatch(layout.name)
        if match is None:
            continue
        stack, layer = match["stack"], int(match["layer"])
        middle = "encoder" if pattern is _BERT else "transformer"
        place = (
            f"{stack}{middle}.layer.{layer - 1}.{last}" if layer else f"{stack}embeddings.LayerNorm"
        )
        return place if f"{place}.weight" in names else None
    return None
