"""From tensor names, shapes and a config to the layouts of a model's attentions, by recipes."""

from __future__ import annotations

import math
import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from locater.errors import LocaterError, guarded
from locater.models.layout import AttentionLayout, Kind, Projection, Skipped
from locater.models.names import (
    Names,
    Shapes,
    join,
    kind_of,
    layer_number,
    natural_order,
    part_of,
    unknown_family,
    weight_name,
)
from locater.models.positions import Config, RotarySpec, layer_type, rotary_spec

Temperature = Callable[[Config, int, int], float]

HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "nhead", "heads")
"""How configs and modules spell the number of heads; a `decoder_attention_heads` comes first."""
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "n_kv_head")
HEAD_DIM = ("head_dim", "d_kv")
QK_NORM = ("use_qk_norm", "qk_layernorm", "use_qk_layernorm", "qk_norm")
SCALES = ("weight_scale_inv", "weight_scale")
ROPE = ("rope_parameters", "rope_theta", "rope_scaling", "rotary_dim", "rotary_emb_base")

INPUT_CAVEAT = "x is what the projection reads, after any LayerNorm and its gains"
CROSS_CAVEAT = "cross-attention: W_QK couples two token processes, the decoder's and the encoder's"
NORM_CAVEAT = (
    "queries and keys are normalized before their product (qk-norm): no fixed W_QK exists, "
    "the spectrum is that of the weights alone"
)


def root_of_head(config: Config, head_dim: int, layer: int) -> float:
    """λ = √head_dim."""
    return math.sqrt(head_dim)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Where one family keeps its queries and keys.

    >>> mine = Recipe(family="mine", query="ask", key="answer")
    >>> shapes = {"blocks.0.mix.ask.weight": (8, 8), "blocks.0.mix.answer.weight": (8, 8)}
    >>> found, skipped = layouts_by_config(shapes, lambda name: {"num_heads": 2}, recipes=[mine])
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
    packing: Literal["concatenated", "grouped"] = "concatenated"
    """How a shared tensor is cut: all queries, all keys, all values; or for every key head its
    queries, its key, its value."""
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
    defaults: Mapping[str, Config] = field(default_factory=dict)
    """What a `model_type` assumes where its config is silent."""
    skip: str = ""
    """Why this family cannot be read at all."""


def layouts_by_config(
    shapes: Shapes, config_of: Callable[[str], Config], *, recipes: Sequence[Recipe]
) -> tuple[list[AttentionLayout], list[Skipped]]:
    """Find every attention among named tensors; each has a config, by its plain name."""
    names = Names.of(shapes)
    sites = _sites(names, recipes)
    if not sites:
        raise unknown_family(shapes)
    found: list[AttentionLayout] = []
    skipped: list[Skipped] = []
    unnumbered = 0
    for attention, rows in sites.items():
        layer = layer_number(attention)
        if layer is None:
            layer, unnumbered = unnumbered, unnumbered + 1
        try:
            with guarded("its config", hint=""):
                site = _Site.of(names, attention, layer, rows, config_of(attention))
                found.append(site.layout())
        except LocaterError as error:
            skipped.append(Skipped(name=attention, reason=error.message))
    return found, skipped + list(names.unrecognized(sites))


def _sites(names: Names, recipes: Sequence[Recipe]) -> dict[str, list[Recipe]]:
    """Every attention, in the order of its layers, with the rows whose names fit it."""
    sites: dict[str, list[Recipe]] = {}
    for recipe in recipes:
        for attention in names.owners.get(weight_name(recipe.query), ()):
            if not recipe.key or join(attention, weight_name(recipe.key)) in names:
                sites.setdefault(attention, []).append(recipe)
    return {attention: sites[attention] for attention in sorted(sites, key=natural_order)}


class _UnreadableError(LocaterError):
    """Why an attention cannot be read; becomes a `Skipped`."""


def _value(config: Config, keys: Iterable[str]) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


_SUBCONFIGS = {
    "vision": ("vision_config",),
    "audio": ("audio_config", "audio_encoder"),
    "text": ("text_config", "llm_config", "text_encoder"),
    "decoder": ("decoder",),
    "encoder": ("encoder",),
}


def _own_config(attention: str, config: Config) -> Config:
    """The part of a composite config that speaks of this attention, or all of it."""
    for key in _SUBCONFIGS.get(part_of(attention), ()):
        if isinstance(config.get(key), Mapping):
            config = config[key]
            break
    else:
        text = config.get("text_config")
        if isinstance(text, Mapping) and _value(config, HEADS) is None:
            config = text
    return config


def _choose(rows: Sequence[Recipe], model_type: str | None) -> Recipe:
    """The row that names the model's type, else the first that takes any."""
    named = [recipe for recipe in rows if model_type in recipe.model_types]
    for recipe in named or [recipe for recipe in rows if not recipe.model_types]:
        return recipe
    known = ", ".join(name for recipe in rows for name in recipe.model_types)
    raise _UnreadableError(
        f"its names are those of {known}, which differ in what they store, and the config's "
        f"model_type is {model_type!r}; name it in a Recipe's model_types"
    )


def _matrix(names: Names, name: str, transposed: bool | None) -> tuple[int, int, bool]:
    """A stored weight's rows and columns in nn.Linear's order, and if they are transposed."""
    shape = names.shape(name)
    if len(shape) != 2 or 1 in shape:
        raise _UnreadableError(
            f"{name} has shape {shape}, which is not that of a weight matrix; "
            "packed (quantized) weights cannot be read"
        )
    flipped = shape[1] > shape[0] if transposed is None else transposed
    rows, columns = shape[::-1] if flipped else shape
    return rows, columns, flipped


def _divided(rows: int, by: int, what: str) -> int:
    if by < 1 or rows % by:
        raise _UnreadableError(f"{what} has {rows} rows, which {by} heads do not divide")
    return rows // by


@dataclass(frozen=True)
class _Site:
    """One place where a row's names fit, while its layout is worked out."""

    names: Names
    attention: str
    layer: int
    config: Config
    recipe: Recipe

    @classmethod
    def of(
        cls, names: Names, attention: str, layer: int, rows: Sequence[Recipe], whole: Config
    ) -> _Site:
        """Choose the row that fits the config, and the part of the config that matters."""
        config = _own_config(attention, whole)
        model_type = config.get("model_type")
        recipe = _choose(rows, model_type)
        if recipe.skip:
            raise _UnreadableError(recipe.skip)
        known = recipe.defaults.get(str(model_type), {})
        return cls(names, attention, layer, ChainMap(dict(config), dict(known)), recipe)

    def layout(self) -> AttentionLayout:
        """Cut the tensors as the row says and note what stands around them."""
        recipe, model_type = self.recipe, self.config.get("model_type")
        part, kind = part_of(self.attention, recipe.part), kind_of(self.attention, self.names)
        heads = self.count((f"{part}_attention_heads", *recipe.heads))
        cut = self.separate if recipe.key else self.fused
        query, key, kv_heads, head_dim, model = cut(heads)
        declared = _value(self.config, HEAD_DIM)
        if declared not in (None, head_dim):
            raise _UnreadableError(
                f"{query.weight} holds {heads} heads of {head_dim} rows, "
                f"but the config says head_dim = {declared}"
            )
        temperature = recipe.temperature(self.config, head_dim, self.layer)
        bias, position_weight = self.position(kind)
        rotary = None
        if kind == "self" and not str(bias).endswith("alibi"):
            rotary = self.rotary(head_dim)
        if rotary is not None and rotary.dimensions == head_dim:  # then it scales every logit
            temperature /= rotary.magnitude**2
            rotary = replace(rotary, magnitude=1.0)
        layout = AttentionLayout(
            name=self.attention,
            family=str(model_type or recipe.family),
            layer=self.layer,
            kind=kind,
            part=part,
            query=query,
            key=key,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            model=model,
            temperature=temperature,
            rotary=rotary,
            qk_norm=self.has_qk_norm(),
            position_bias=bias,
            position_weight=position_weight,
            max_distance=self.config.get("relative_attention_max_distance") or 128,
        )
        return replace(layout, caveats=(*self.caveats(layout), *recipe.caveats))

    def count(self, keys: tuple[str, ...]) -> int:
        """The number of heads."""
        heads = _value(self.config, keys)
        if isinstance(heads, (list, tuple)) and self.layer < len(heads):
            heads = heads[self.layer]
        if not isinstance(heads, int) or heads < 1:
            raise _UnreadableError(
                f"the number of heads is not known: the config has none of {', '.join(keys)}"
            )
        return heads

    def kv_heads(self, heads: int) -> int:
        """The number of key heads in a shared tensor, which its shape does not tell."""
        if self.config.get("multi_query") and not self.config.get("new_decoder_architecture"):
            return 1
        return int(_value(self.config, KV_HEADS) or heads)

    def group(self, heads: int, kv_heads: int) -> int:
        """How many query heads share a key head."""
        if heads % kv_heads:
            raise _UnreadableError(f"{heads} query heads cannot share {kv_heads} key heads")
        return heads // kv_heads

    def separate(self, heads: int) -> tuple[Projection, Projection, int, int, int]:
        """Query and key projections that have a tensor each."""
        recipe = self.recipe
        names = [join(self.attention, weight_name(child)) for child in (recipe.query, recipe.key)]
        rows, width, flipped = _matrix(self.names, names[0], recipe.transposed)
        key_rows, key_width, _ = _matrix(self.names, names[1], recipe.transposed)
        if width != key_width:
            raise _UnreadableError(
                f"queries read {width} dimensions and keys {key_width}: "
                "W_QK is not square and has no eigenvalues"
            )
        key_rows = _divided(key_rows, recipe.key_parts, names[1])
        head_dim = _divided(rows, heads, names[0])
        kv_heads = _divided(key_rows, head_dim, names[1])
        self.group(heads, kv_heads)
        in_one = recipe.query.endswith("_weight")  # nn.MultiheadAttention: one bias for all
        query = Projection(
            weight=self.names.stored[names[0]],
            bias=self.bias(recipe.query),
            scale=self.scale(recipe.query),
            transposed=flipped,
            stop=rows,
            bias_start=0 if in_one else None,
        )
        key = replace(
            query,
            weight=self.names.stored[names[1]],
            bias=self.bias(recipe.key),
            scale=self.scale(recipe.key),
            stop=key_rows,
            bias_start=rows if in_one else None,
        )
        return query, key, kv_heads, head_dim, width

    def fused(self, heads: int) -> tuple[Projection, Projection, int, int, int]:
        """Query and key projections that share one tensor with the values."""
        recipe = self.recipe
        name = join(self.attention, weight_name(recipe.query))
        rows, width, flipped = _matrix(self.names, name, recipe.transposed)
        kv_heads = self.kv_heads(heads)
        head_dim = _divided(rows, heads + 2 * kv_heads, name)
        group = self.group(heads, kv_heads)
        query = Projection(
            weight=self.names.stored[name],
            bias=self.bias(recipe.query),
            scale=self.scale(recipe.query),
            transposed=flipped,
        )
        if recipe.packing == "grouped":
            query = replace(query, inner=group + 2, last=group)
            key = replace(query, first=group, last=group + 1)
        else:
            middle = heads * head_dim
            query = replace(query, stop=middle)
            key = replace(query, start=middle, stop=middle + kv_heads * head_dim)
        return query, key, kv_heads, head_dim, width

    def bias(self, child: str) -> str | None:
        """The stored bias of a projection."""
        leaf = "in_proj_bias" if child.endswith("_weight") else f"{child}.bias"
        return self.names.stored.get(join(self.attention, leaf))

    def scale(self, child: str) -> str | None:
        """The stored scale of an 8-bit projection."""
        names = [join(self.attention, child, leaf) for leaf in SCALES]
        if join(self.attention, child, "SCB") in self.names:
            raise _UnreadableError(f"{child} is packed in 8 bits (bitsandbytes)")
        return next((self.names.stored[name] for name in names if name in self.names), None)

    def rotary(self, head_dim: int) -> RotarySpec | None:
        """The rotary embedding, if this layer has one."""
        recipe = self.recipe
        named = self.config.get("position_embedding_type") == "rotary"
        silent = _value(self.config, ROPE) is None and not named
        if recipe.rotary is None or (recipe.rotary == "half if configured" and silent):
            return None
        layout: Literal["half", "interleaved"] = (
            "interleaved"
            if recipe.rotary == "interleaved" or self.config.get("rope_interleave")
            else "half"
        )
        return rotary_spec(self.config, head_dim=head_dim, layer=self.layer, layout=layout)

    def position(self, kind: Kind) -> tuple[str | None, str | None]:
        """What is added to a logit for its distance, and the tensor that holds it."""
        recipe = self.recipe
        if recipe.position_bias is None or kind == "cross":
            return None, None
        if recipe.position_bias != "t5":
            switch = self.config.get("alibi", recipe.rotary is None)
            return (recipe.position_bias if switch else None), None
        leaf = "relative_attention_bias.weight"
        first = re.sub(r"(block|layers?)\.\d+\.", r"\1.0.", self.attention, count=1)
        places = [self.attention, first]
        while self.attention and places[-1]:
            places.append(places[-1].rpartition(".")[0])
        names = [join(place, leaf) for place in places]
        stored = next((self.names.stored[name] for name in names if name in self.names), None)
        return ("t5" if stored else None), stored

    def has_qk_norm(self) -> bool:
        """Whether a norm stands between the projections and their product."""
        said = any(self.config.get(key) is True for key in QK_NORM)
        return said or self.attention in self.names.normed

    def caveats(self, layout: AttentionLayout) -> Iterator[str]:
        """What the spectrum of W_Qᵀ W_K leaves out here."""
        config = self.config
        yield INPUT_CAVEAT
        if layout.kind == "cross":
            yield CROSS_CAVEAT
        if layout.qk_norm:
            yield NORM_CAVEAT
        if layout.query.bias or (layout.rotary and layout.key.bias):
            yield "biases add a term to each key's logit that the spectrum does not see"
        if layout.rotary:
            yield (
                f"rotary positions ({layout.rotary.dimensions} of {layout.head_dim} dimensions, "
                f"base {layout.rotary.base:g}, {layout.rotary.scaling}): the spectrum is that of "
                "a query and a key at the same position"
            )
        if layout.rotary and layout.rotary.scaling in ("longrope", "su", "dynamic"):
            yield "the rotary frequencies are those of texts up to the original length"
        if layout.rotary and layout.rotary.magnitude != 1:
            yield f"the turned dimensions are scaled by {layout.rotary.magnitude:.4g} as well"
        if layout.position_bias:
            yield f"a bias by distance ({layout.position_bias}) is added to the logits"
        if str(config.get("position_embedding_type", "absolute")).startswith("relative"):
            yield "relative position embeddings add terms to the logits that are not in the form"
        if config.get("attn_logit_softcapping"):
            yield f"logits are capped at ±{config['attn_logit_softcapping']:g} by a tanh"
        if config.get("clip_qkv"):
            yield f"queries and keys are clipped at ±{config['clip_qkv']:g}"
        if layer_type(config, self.layer) == "sliding_attention":
            window = _value(config, ("sliding_window", "local_attention"))
            yield f"keys beyond a window of {window} tokens are masked"
        if join(self.attention, "sinks") in self.names:
            yield "a learned sink joins the keys in the softmax"
