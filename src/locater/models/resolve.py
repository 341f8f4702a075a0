"""From tensor names, shapes and a config to the layouts of a model's attentions, by recipes."""

from __future__ import annotations

import math
import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from locater.errors import LocaterError, guarded
from locater.models.layout import AttentionLayout, Kind, NormSpec, Projection, Skipped
from locater.models.names import (
    Names,
    Shapes,
    join,
    kind_of,
    layer_number,
    natural_order,
    part_of,
    unknown_family,
    upward,
    weight_name,
)
from locater.models.positions import (
    Config,
    RelativeSpec,
    RotarySpec,
    first_of,
    latent_magnitude,
    layer_type,
    rotary_spec,
)
from locater.models.recipes import (
    HEADS,
    NAMES_CAVEAT,
    RECIPES,
    RELATIVE,
    TRAITS,
    Recipe,
    defaults,
    known,
)

HEAD_LEAVES = ("attention_heads", "num_attention_heads", "num_heads")
OTHER_HEADS = ("encoder_attention_heads", "decoder_attention_heads", "resampler_n_heads",
               "conf_num_attention_heads", "num_self_attention_heads",
               "decoder_self_attention_heads")  # fmt: skip
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "n_kv_head")
HEAD_DIM = ("head_dim", "d_kv")
QK_NORM = ("use_qk_norm", "qk_layernorm", "use_qk_layernorm", "qk_norm")
NORM_EPS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "layernorm_eps")
NO_SOFTMAX = ("linear_attn", "indexer", "mlstm_layer", "global_pointer", "compressor")
"""Modules with queries and keys that choose, order or mix, and attend to nothing."""
SCALES = ("weight_scale_inv", "weight_scale")
ROPE = ("rope_parameters", "rope_theta", "rope_scaling", "rotary_dim", "rotary_emb_base")

INPUT_CAVEAT = "x is what the projection reads, after any LayerNorm and its gains"
CROSS_CAVEAT = "cross-attention: W_QK couples two token processes, the decoder's and the encoder's"
NORM_CAVEAT = (
    "queries and keys are normalized before their product (qk-norm): the form takes each norm at "
    "its root mean square"
)
LATENT_CAVEAT = (
    "latent attention (MLA) normalizes between its factors: the form takes each norm at its root "
    "mean square"
)


GAPS = {
    "adds terms": "terms from elsewhere in the model are added to the logits; not in the form",
    "pools": "queries or keys are pooled or regrouped before they meet, which is not in the form",
    "joins keys": "keys of two sources meet in one softmax, which is not in the form",
    "scales dimensions": "each dimension has a scale of its own, which is not in the form",
    "turns otherwise": "positions turn queries and keys in a way that is not in the form",
    "is sparse": "queries meet a chosen part of the keys, in an order that is not in the form",
    "scales by position": "queries are scaled by their position, which is not in the form",
}
"""What some model types do that a form does not have."""


def layouts(
    shapes: Shapes, config: Config, *, recipes: Sequence[Recipe] = RECIPES
) -> tuple[list[AttentionLayout], list[Skipped]]:
    """Find every attention among named tensors, and say which could not be read and why.

    >>> shapes = {"h.0.attn.c_attn.weight": (8, 24), "h.0.attn.c_attn.bias": (24,)}
    >>> (found,), skipped = layouts(shapes, {"model_type": "gpt2", "n_head": 2})
    >>> found.family, found.heads, found.key.start, found.key.transposed
    ('gpt2', 2, 8, True)
    """
    return layouts_by_config(shapes, lambda name: own_config(name, config), recipes=recipes)


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


_ALIKE = {
    "vision": ("visual", "image", "video", "img", "vit"),
    "text": ("language", "llm", "lm", "transformer"),
    "audio": ("speech", "sound"),
    "backbone": ("pixel_level_module", "conv_encoder", "vision_encoder"),
    "vq": ("vqmodel",),
    "decoder": ("conditioning_encoder",),  # CLVP
}
"""Words of tensor names that mean what a part of a config is called."""


NOTHING: Config = {}


def own_config(attention: str, config: Config) -> Config:
    """The part of a composite config that speaks of this attention, or all of it.

    >>> whole = {"vision_config": {"heads": 2}, "text_config": {"heads": 4}}
    >>> own_config("model.vision_tower.layers.0.attn", whole)["heads"]
    2
    """
    path = attention.split(".")
    while True:  # from the whole to its parts
        parts = _parts(config)
        scores = {key: _score(path, key, value) for key, value in parts.items()}
        best = max(scores, key=lambda key: scores[key], default="")
        has_heads = first_of(config, *HEADS) is not None
        if not best or scores[best] < (1 if has_heads else 0.5):
            usual = [key for key in ("text_config", "encoder_config") if key in parts]
            if has_heads or not usual:
                return completed(config)
            best = usual[0]
        if best in path:
            path = path[path.index(best) + 1 :]
        elif scores[best] < 1:
            path = path[1:]
        config = parts[best]


def _parts(config: Config) -> dict[str, Config]:
    """The configs inside a config, with the types that its own type assumes of them."""
    assumed = defaults(config.get("model_type")).get("parts", {})
    every = {**dict.fromkeys(assumed, NOTHING), **config}
    return {
        key: {"model_type": assumed.get(key), **value}
        for key, value in every.items()
        if _is_part(key, value)
    }


def _score(path: Sequence[str], key: str, part: Config) -> float:
    """How well a path fits a part of a config, or what that part holds."""
    own = max(_likeness(path, key.removesuffix("_config")), 2 * (part.get("model_type") in path))
    return max([own, *(_score(path, *one) for one in _parts(part).items())])


def _is_part(key: str, value: object) -> bool:
    if not isinstance(value, Mapping) or key in ("attn_config", "ffn_config"):  # DBRX, MPT
        return False
    return (key.endswith("_config") and key != "quantization_config") or "model_type" in value


def _likeness(path: Sequence[str], stem: str) -> float:
    """How well the name of a part fits a path: the same word, a beginning, a like word."""
    first = stem.split("_")[0]
    words = {first, *_ALIKE.get(first, ())}
    best = 0.5 if first == "vision" and path[:1] == ["encoder"] else 0.0
    for component in path:
        if component == stem:
            best = max(best, 3)
        elif component.startswith(f"{stem}_") or stem.startswith(f"{component}_"):
            best = max(best, 2)
        elif {component, component.split("_")[0]} & words or first in component.split("_"):
            best = max(best, 1)
    return best


def completed(config: Config) -> Config:
    """A config with what its `model_type` assumes where it is silent."""
    assumed = defaults(config.get("model_type"))
    own = {key: value for key, value in config.items() if value is not None}
    for name, spelled in assumed.get("names", {}).items():
        if spelled in own:
            own.setdefault(name, own[spelled])
    silent = {key: value for key, value in assumed.get("own", {}).items() if key not in config}
    return ChainMap(own, silent)


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


def _matrix(
    names: Names, name: str, transposed: bool | None, groups: int = 1
) -> tuple[int, int, bool]:
    """A stored weight's rows and columns in nn.Linear's order, and if they are transposed."""
    shape = names.shape(name)
    if groups > 1:
        shape = (shape[0], groups * shape[1], *shape[2:])
    if len(shape) > 2 and math.prod(shape[2:]) == 1 and shape[0] == shape[1]:
        shape = shape[:2]  # a convolution over one place, not in groups
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
class _Cut:
    """Where queries and keys lie."""

    query: Projection
    key: Projection
    heads: int
    kv_heads: int
    head_dim: int
    model: int
    key_turned: Projection | None = None


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
        cls, names: Names, attention: str, layer: int, rows: Sequence[Recipe], config: Config
    ) -> _Site:
        """Choose the row that fits the config."""
        model_type = config.get("model_type")
        recipe = _choose(rows, model_type)
        last = attention.rpartition(".")[2]
        is_linear = "linear" in layer_type(config, layer) and kind_of(attention, names) == "self"
        if model_type in TRAITS["no softmax"] or last in NO_SOFTMAX or is_linear:
            raise _UnreadableError("its queries and keys meet in no softmax")
        if recipe.family == "gguf" and isinstance(config, ChainMap):  # it says all it means
            config = ChainMap(config.maps[0])
        elif known(model_type).status in ("verified", "partly"):
            said = tuple(one for one in recipe.caveats if one != NAMES_CAVEAT)
            recipe = replace(recipe, caveats=said)
        return cls(names, attention, layer, config, recipe)

    def stored(self, *leaves: str) -> str | None:
        """The first of these tensors that the attention has."""
        return self.names.first(join(self.attention, leaf) for leaf in leaves)

    def has(self, trait: str) -> bool:
        """Whether a trait holds of this model type."""
        return self.config.get("model_type") in TRAITS[trait]

    def layout(self) -> AttentionLayout:
        """Cut the tensors as the row says and note what stands around them."""
        recipe, model_type = self.recipe, self.config.get("model_type")
        part, kind = part_of(self.attention, recipe.part), kind_of(self.attention, self.names)
        cut = self.cut(self.heads(part))
        temperature = self.temperature(cut.head_dim, cut.model)
        bias, position_weight = self.position(kind)
        rotary = None
        if kind == "self" and not str(bias).endswith("alibi"):
            rotary = self.rotary(cut)
        if rotary is not None and rotary.dimensions == cut.head_dim:  # then it scales every logit
            temperature /= rotary.magnitude**2
            rotary = replace(rotary, magnitude=1.0)
        layout = AttentionLayout(
            name=self.attention,
            family=str(model_type or recipe.family),
            layer=self.layer,
            kind=kind,
            part=part,
            temperature=temperature,
            before=self.before(kind, cut.model),
            rotary=rotary,
            qk_norm=self.has_qk_norm(),
            position_bias=bias,
            position_weight=position_weight,
            max_distance=self.config.get("relative_attention_max_distance") or 128,
            relative=self.relative() if kind == "self" else None,
            **vars(cut),
        )
        if rotary is None:  # a scale after a turn is not in the form
            query = replace(cut.query, dimensions=self.dimension_scale())
            layout = replace(layout, query=query)
        if layout.qk_norm and not recipe.is_latent:
            layout = self.with_norms(layout)
        return replace(layout, caveats=(*self.caveats(layout), *recipe.caveats))

    def heads(self, part: str) -> int:
        """The number of heads, where it may differ between parts and layers."""
        stems = [part]
        for component in reversed(self.attention.split(".")):
            stems += [component, component.rpartition("_")[2]]
        own = [f"{stem}_{leaf}" for stem in stems for leaf in HEAD_LEAVES]
        heads = first_of(self.config, *own[:3], *self.recipe.heads)
        heads = heads or first_of(self.config, *own, *OTHER_HEADS)
        if isinstance(heads, (list, tuple)):  # by layer, or by stage
            numbers = [int(one) for one in self.attention.split(".") if one.isdigit()]
            place = numbers[0] if numbers else 0
            heads = heads[place] if place < len(heads) else None
        if isinstance(heads, int) and isinstance(self.config.get("head_ratio"), int):
            heads //= self.config["head_ratio"]  # ConvBERT
        if self.has("one head"):
            return 1
        if self.has("heads of 64"):
            name = join(self.attention, weight_name(self.recipe.query))
            heads = _matrix(self.names, name, False)[1] // 64
        if not isinstance(heads, int) or heads < 1:
            raise _UnreadableError(
                f"the number of heads is not known: the config has none of "
                f"{', '.join((*own[:3], *self.recipe.heads))}"
            )
        return heads

    def cut(self, heads: int) -> _Cut:
        """Where queries and keys lie, and how many dimensions a head has."""
        if self.recipe.is_latent:
            return self.latent(heads)
        cut = self.separate(heads) if self.recipe.key else self.fused(heads)
        declared = first_of(self.config, *HEAD_DIM)
        if declared in (None, cut.head_dim, 0) or not isinstance(declared, int):
            return cut
        norm = self.names.norm_of(self.attention, "query")
        if norm and self.names.shape(join(self.attention, norm, "weight")) == (cut.head_dim,):
            return cut  # some layers have other heads (Gemma 4)
        if cut.head_dim == 2 * declared and self.recipe.key:  # queries and their gates
            kv_heads = _divided(cut.kv_heads * cut.head_dim, declared, cut.key.weight)
            self.group(heads, kv_heads)
            query = replace(cut.query, inner=2)
            return replace(cut, query=query, kv_heads=kv_heads, head_dim=declared)
        raise _UnreadableError(
            f"{cut.query.weight} holds {heads} heads of {cut.head_dim} rows, "
            f"but the config says head_dim = {declared}"
        )

    def kv_heads(self, heads: int) -> int:
        """The number of key heads in a shared tensor, which its shape does not tell."""
        if self.config.get("multi_query") and not self.config.get("new_decoder_architecture"):
            return 1
        inner = self.config.get("attn_config")  # DBRX
        inner = inner if isinstance(inner, Mapping) else {}
        return int(first_of(inner, "kv_n_heads") or first_of(self.config, *KV_HEADS) or heads)

    def group(self, heads: int, kv_heads: int) -> int:
        """How many query heads share a key head."""
        if heads % kv_heads:
            raise _UnreadableError(f"{heads} query heads cannot share {kv_heads} key heads")
        return heads // kv_heads

    def projection(self, child: str, **cut: Any) -> Projection:
        """A stored projection with its bias and scale."""
        name = join(self.attention, weight_name(child))
        cut.setdefault("bias", self.bias(child))
        return Projection(weight=self.names.stored[name], scale=self.scale(child), **cut)

    def separate(self, heads: int) -> _Cut:
        """Query and key projections that have a tensor each."""
        recipe = self.recipe
        names = [join(self.attention, weight_name(child)) for child in (recipe.query, recipe.key)]
        groups = self.groups(names)
        rows, width, flipped = _matrix(self.names, names[0], recipe.transposed, groups[0])
        key_rows, key_width, _ = _matrix(self.names, names[1], recipe.transposed, groups[1])
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
        starts = (0, rows) if in_one else (None, None)
        query, key = (
            self.projection(child, transposed=flipped, stop=stop, bias_start=start, groups=many)
            for child, stop, start, many in zip(
                (recipe.query, recipe.key), (rows, key_rows), starts, groups, strict=True
            )
        )
        return _Cut(query, key, heads, kv_heads, head_dim, width)

    def groups(self, names: Sequence[str]) -> list[int]:
        """In how many groups convolutions project: SqueezeBERT's have as many rows as they read."""
        if not self.has("in groups"):
            return [1] * len(names)
        return [rows // width for rows, width, *_ in map(self.names.shape, names)]

    def fused(self, heads: int) -> _Cut:
        """Query and key projections that share one tensor with the values."""
        recipe = self.recipe
        name = join(self.attention, weight_name(recipe.query))
        rows, width, flipped = _matrix(self.names, name, recipe.transposed)
        kv_heads = self.kv_heads(heads)
        packing = recipe.packing
        gates = heads if packing == "gate first" else 0
        head_dim = _divided(rows, gates + heads + 2 * kv_heads, name)
        group = self.group(heads, kv_heads)
        whole = self.projection(recipe.query, transposed=flipped)
        if packing == "grouped" or (group == 1 and self.has("cut by heads")):
            query = replace(whole, inner=group + 2, last=group)
            key = replace(whole, inner=group + 2, first=group, last=group + 1)
        elif packing == "four groups":
            few = _divided(heads, 4, name)
            query = replace(whole, inner=3 * few, last=few)
            key = replace(whole, inner=3 * few, first=2 * few, last=3 * few)
        else:
            start, middle = gates * head_dim, (gates + heads) * head_dim
            query = replace(whole, start=start, stop=middle)
            key = replace(whole, start=middle, stop=middle + kv_heads * head_dim)
        if whole.bias is None:  # BEiT, DeBERTa: biases of their own
            query, key = (
                replace(side, bias=self.stored(leaf), is_bias_apart=True)
                for side, leaf in ((query, "q_bias"), (key, "k_bias"))
            )
        return _Cut(query, key, heads, kv_heads, head_dim, width)

    def latent(self, heads: int) -> _Cut:
        """Multi-head latent attention: low-rank factors with a norm between them."""
        down = join(self.attention, weight_name(self.recipe.query))
        rows, model, _ = _matrix(self.names, down, False)
        rank = self.config.get("kv_lora_rank")
        if not isinstance(rank, int) or not 0 < rank <= rows:
            raise _UnreadableError(
                f"{down} has {rows} rows, and the config's kv_lora_rank is {rank}"
            )
        turned = rows - rank
        up = join(self.attention, weight_name("kv_b_proj"))
        if up not in self.names:
            raise _UnreadableError("its keys' second factor, kv_b_proj, is not stored")
        width = _divided(_matrix(self.names, up, False)[0], heads, up)
        query_name = "q_b_proj" if self.stored("q_b_proj.weight") else "q_proj"
        name = join(self.attention, weight_name(query_name))
        if name not in self.names:
            raise _UnreadableError("its queries' factors are not stored under known names")
        head_dim = _divided(_matrix(self.names, name, False)[0], heads, name)
        if self.stored("k_rope_only_layernorm.weight"):
            raise _UnreadableError("its turned keys have a norm of their own, which no form has")
        through = self.projection(
            self.recipe.query, stop=rank, norm=self.norm(join(self.attention, "kv_a_layernorm"))
        )
        key = self.projection(
            "kv_b_proj", width=width, through=through, multiplier=self.latent_scale("kv", model)
        )
        query = self.projection(query_name)
        if query_name == "q_b_proj":
            below = self.projection(
                "q_a_proj", norm=self.norm(join(self.attention, "q_a_layernorm"))
            )
            query = replace(query, through=below, multiplier=self.latent_scale("q", model))
        key_turned = self.projection(self.recipe.query, start=rank, stop=rows) if turned else None
        return _Cut(query, key, heads, heads, head_dim, model, key_turned)

    def latent_scale(self, side: str, model: int) -> float:
        """LongCat multiplies what comes out of a latent with the root of the widths' ratio."""
        rank = self.config.get(f"{side}_lora_rank")
        on = self.has("scaled latents") and self.config.get(f"mla_scale_{side}_lora", True)
        return math.sqrt(model / rank) if on and rank else 1.0

    def norm(self, place: str, *, size: int | None = None, rows: int = 0) -> NormSpec:
        """The norm of this name; without gains, where a size is given."""
        gain, bias = (self.names.first([f"{place}.{leaf}"]) for leaf in ("weight", "bias"))
        if gain is None and size is None:
            raise _UnreadableError(f"the norm of its latent vector, {place}, is not stored")
        shape = tuple(self.names.shapes[gain]) if gain else (size,)
        return NormSpec(
            gain=gain,
            bias=bias,
            adds_one=self.has("gain adds one") and self.recipe.family != "gguf",
            is_centered=bias is not None
            or self.has("centered norm")
            or self.config.get("centered_norm") is True,
            over_all=size is not None and shape == (rows,) and rows != size,
            eps=float(first_of(self.config, *NORM_EPS) or 1e-6),
        )

    def before(self, kind: Kind, model: int) -> NormSpec | None:
        """The norm that makes what queries and keys read, where it is known."""
        model_type = self.config.get("model_type")
        tested = model_type in (None, "locater") or known(model_type).status is not None
        if kind == "cross" or not tested or self.has("other input"):
            return None
        if self.config.get("swin_norm"):  # Chameleon: behind the attention
            return None
        place = self.names.norm_before(self.attention)
        if place is None or self.names.shape(f"{place}.weight") != (model,):
            return None
        return self.norm(place)

    def with_norms(self, layout: AttentionLayout) -> AttentionLayout:
        """The layout with the norms of its queries and keys."""
        sides: dict[str, Projection] = {}
        for side, count in (("query", layout.heads), ("key", layout.kv_heads)):
            child = self.names.norm_of(self.attention, side)
            if child is None and not self.has("norm without gains"):
                continue
            place = join(self.attention, child or "-")
            spec = self.norm(place, size=layout.head_dim, rows=count * layout.head_dim)
            sides[side] = replace(getattr(layout, side), norm=spec)
        return replace(layout, **sides)  # type: ignore[arg-type]

    def bias(self, child: str) -> str | None:
        """The stored bias of a projection."""
        leaf = "in_proj_bias" if child.endswith("_weight") else f"{child}.bias"
        return self.stored(leaf, *(("q_bias",) if child == "query" else ()))  # VideoMAE

    def scale(self, child: str) -> str | None:
        """The stored scale of an 8-bit projection."""
        if self.stored(f"{child}.SCB"):
            raise _UnreadableError(f"{child} is packed in 8 bits (bitsandbytes)")
        return self.stored(*(f"{child}.{leaf}" for leaf in SCALES))

    def dimension_scale(self) -> str | None:
        """The stored scale of each dimension of a query (TimesFM)."""
        return self.stored("scaling", "per_dim_scale") if self.has("scales dimensions") else None

    def temperature(self, head_dim: int, model: int) -> float:
        """λ: a multiplier that the config names, or the row's rule."""
        config, value = self.config, self.recipe.temperature(self.config, head_dim, self.layer)
        if self.recipe.family == "gguf":  # it says its own scale
            return value
        if self.has("unscaled"):
            value = 1.0
        elif self.has("scaled by head_dim"):
            value = float(head_dim)
        elif self.has("scaled by width"):
            value = math.sqrt(model)
        elif self.has("half of head_dim"):
            value = math.sqrt(head_dim / 2)
        elif config.get("attention_multiplier"):
            value = 1 / float(config["attention_multiplier"])
        elif config.get("query_pre_attn_scalar"):
            value = math.sqrt(config["query_pre_attn_scalar"])
        if self.recipe.is_latent:
            value /= latent_magnitude(config)
        for name in ("key_multiplier", "qk_scale_factor"):
            value /= float(config.get(name) or 1.0)
        return value

    def rotary(self, cut: _Cut) -> RotarySpec | None:
        """The rotary embedding, if this layer has one."""
        recipe, config = self.recipe, self.config
        named = config.get("position_embedding_type") in ("rotary", "rope") or self.has("turns")
        silent = first_of(config, *ROPE) is None and not named
        if recipe.rotary is None or (recipe.rotary == "half if configured" and silent):
            return None
        if self.has("turns in two dimensions") or not self.turns():
            return None
        layout: Literal["half", "interleaved"] = "half"
        if recipe.rotary == "interleaved" or self.has("interleaved"):
            layout = "interleaved"
        if config.get("rope_interleave") is not None:
            layout = "interleaved" if config["rope_interleave"] else "half"
        turned = cut.head_dim if self.has("turns by its share") else None
        if self.has("turns by its projection"):
            heads, width = first_of(config, *HEADS), config.get("projection_dim")
            turned = max(int(width or 0) // (2 * int(heads or 1)), 32)
        if cut.key_turned is not None and cut.key_turned.stop is not None:
            turned = cut.key_turned.stop - cut.key_turned.start
        size = turned or cut.head_dim
        spec = rotary_spec(config, head_dim=size, layer=self.layer, layout=layout, turned=turned)
        if spec is not None and self.has("turns backwards"):
            spec = replace(spec, frequencies=tuple(-one for one in spec.frequencies))
        return spec

    def turns(self) -> bool:
        """Whether this layer has rotary positions at all: some leave them out (NoPE)."""
        config = self.config
        if self.has("no rotation"):
            return False
        if self.has("says how it turns"):
            return config.get("position_embedding_type") in ("rope", "rotary")
        if self.has("turns in windows only") and first_of(config, "sliding_window") is not None:
            return layer_type(config, self.layer) == "sliding_attention"
        return config.get("use_mem_rope") is not False

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
        stored = self.names.first(join(place, leaf) for place in (self.attention, *upward(first)))
        return ("t5" if stored else None), stored

    def relative(self) -> RelativeSpec | None:
        """Tables of relative positions, by the names that they are stored under."""
        for leaves, spec in RELATIVE:
            is_above = leaves[0].count(".") > 1  # one table for all layers of a stack
            for place in upward(self.attention) if is_above else [self.attention]:
                names = [join(place, leaf) for leaf in leaves]
                if not all(name in self.names for name in names):
                    continue
                entries = self.names.shape(names[0])[0]
                if spec.rule == "grid bias" and math.isqrt(entries) ** 2 != entries:
                    continue  # entries for a class token stand beside those of places
                if leaves[0].startswith("distance_embedding"):
                    behind = self.config.get("right_max_position_embeddings")
                    spec = replace(spec, ahead=behind)
                return replace(spec, tensors=tuple(self.names.stored[name] for name in names))
        return None

    def has_qk_norm(self) -> bool:
        """Whether a norm stands between the projections and their product."""
        if self.has("normalizes inputs"):
            return False
        if self.has("norm where it turns"):  # Llama 4
            skipped = self.config.get("no_rope_layers") or ()
            turns = self.layer >= len(skipped) or bool(skipped[self.layer])
            return bool(self.config.get("use_qk_norm")) and turns
        said = any(self.config.get(key) is True for key in QK_NORM)
        return said or self.has("norm without gains") or self.attention in self.names.normed

    def caveats(self, layout: AttentionLayout) -> Iterator[str]:
        """What the spectrum of W_Qᵀ W_K leaves out here."""
        config = self.config
        yield INPUT_CAVEAT
        if layout.kind == "cross":
            yield CROSS_CAVEAT
        if self.recipe.is_latent:
            yield LATENT_CAVEAT
        elif layout.query.norm or layout.key.norm:
            yield NORM_CAVEAT
        elif layout.qk_norm:
            yield "queries and keys are normalized (qk-norm), head by head; it is not in the form"
        scaled = self.dimension_scale() == layout.query.dimensions  # or there is none
        for trait, words in GAPS.items():
            if self.has(trait) and not (trait == "scales dimensions" and scaled):
                yield words
        if layout.query.bias or (layout.rotary and layout.key.bias):
            yield "biases add a term to each key's logit that the spectrum does not see"
        yield from self.position_caveats(layout)
        cap = config.get("attn_logit_softcapping")
        if cap and not layout.query.dimensions:  # VideoPrism's head
            yield f"logits are capped at ±{cap:g} by a tanh"
        if config.get("clip_qkv"):
            yield f"queries and keys are clipped at ±{config['clip_qkv']:g}"
        yield from self.mask_caveats()
        if self.stored("sinks"):
            yield "a learned sink joins the keys in the softmax"
        left = self.names.leftovers(self.attention, layout.tensors)
        if left:
            yield f"it also holds {', '.join(left[:4])}, whose terms are not in the form"

    def position_caveats(self, layout: AttentionLayout) -> Iterator[str]:
        """What positions do to the logits."""
        rotary, config = layout.rotary, self.config
        if rotary:
            yield (
                f"rotary positions ({rotary.dimensions} of {layout.head_dim} dimensions, "
                f"base {rotary.base:g}, {rotary.scaling}): the spectrum is that of "
                "a query and a key at the same position"
            )
        if rotary and rotary.scaling in ("longrope", "su", "dynamic"):
            yield "the rotary frequencies are those of texts up to the original length"
        if rotary and rotary.magnitude != 1:
            yield f"the turned dimensions are scaled by {rotary.magnitude:.4g} as well"
        if rotary and rotary.is_sectioned:
            yield "tokens of pictures turn by three positions; the form is that of text"
        if layout.kind == "self" and self.has("turns in two dimensions"):
            yield (
                "queries and keys turn with row and column: the form is that of a query and a key "
                "at the same place"
            )
        if layout.qk_norm and rotary and self.has("normalized after turning"):
            yield "gains act after the rotation; their order is not in the form"
        if layout.position_bias:
            yield f"a bias by distance ({layout.position_bias}) is added to the logits"
        if layout.relative:
            yield layout.relative.words
        if str(config.get("position_embedding_type", "absolute")).startswith("relative"):
            yield "relative position embeddings add terms to the logits that are not in the form"

    def mask_caveats(self) -> Iterator[str]:
        """Which keys are hidden, beside those that come later."""
        config, kind = self.config, layer_type(self.config, self.layer)
        window = first_of(config, "sliding_window", "local_attention", "attention_window_size")
        everywhere = (
            isinstance(window, int)
            and not config.get("layer_types")
            and config.get("use_sliding_window") is not False
            and first_of(config, "sliding_window_pattern", "_sliding_window_pattern",
                         "global_attn_every_n_layers") is None
        )  # fmt: skip
        if kind == "sliding_attention" or everywhere:
            yield f"keys beyond a window of {window} tokens are masked"
        if kind == "chunked_attention":
            size = config.get("attention_chunk_size")
            yield f"keys outside of chunks of {size} tokens are masked"
        if self.has("chooses keys"):
            yield "keys that an indexer does not choose are masked"
        if self.has("own mask"):
            yield "keys are masked in a pattern of the model's own"
