"""Live models: their attentions' query-key forms, on the very parameters that are in training."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from locater.core.form import QKForm
from locater.errors import InputError, LocaterError
from locater.models.layout import AttentionLayout, Projection, Skipped
from locater.models.names import plain_name, upward
from locater.models.positions import Config
from locater.models.recipes import HEADS, RECIPES, Recipe, defaults
from locater.models.resolve import INPUT_CAVEAT, layouts_by_config, own_config


@dataclass(frozen=True, eq=False)
class Source:
    """A tensor of a live model by the module that owns it, read anew each time.

    Wrappers that swap parameters (FSDP2), parametrizations and LoRA adapters are thus seen as they
    are now.
    """

    owner: nn.Module
    attribute: str
    adapter: nn.Module | None = None
    """The PEFT layer around the owner, whose delta belongs to the weight."""

    def read(self) -> Tensor:
        """The tensor that the model multiplies with, with its graph."""
        tensor = getattr(self.owner, self.attribute)
        if self.adapter is None or self.attribute != "weight":
            return tensor
        return _adapted(tensor, self.adapter)

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters that the tensor is made of."""
        if parametrize.is_parametrized(self.owner, self.attribute):
            lists: Any = self.owner.parametrizations
            own = list(lists[self.attribute].parameters())
        else:
            own = [getattr(self.owner, self.attribute)]
        if self.adapter is not None and self.attribute == "weight":
            active = set(_active_adapters(self.adapter))
            named = self.adapter.named_parameters()
            own += [parameter for name, parameter in named if active & set(name.split("."))]
        return tuple(own)


def _active_adapters(layer: nn.Module) -> list[str]:
    """The adapters of a PEFT layer that now act beside its base weight."""
    peft: Any = layer
    if not hasattr(peft, "adapter_layer_names") or peft.merged or peft.disable_adapters:
        return []
    held = [getattr(peft, name, {}) for name in peft.adapter_layer_names]
    return [name for name in peft.active_adapters if any(name in part for part in held)]


def _adapted(weight: Tensor, layer: nn.Module) -> Tensor:
    """Add the low-rank updates of a PEFT layer, and DoRA's magnitudes, to its base weight."""
    peft: Any = layer
    active = _active_adapters(layer)
    for name in active:
        weight = weight + peft.get_delta_weight(name)
    magnitudes = getattr(peft, "lora_magnitude_vector", {})
    scaled = [name for name in active if name in magnitudes]
    if not scaled:
        return weight
    if len(active) > 1:
        raise LocaterError(
            f"several adapters act at once ({', '.join(active)}) and {scaled[0]} uses DoRA.",
            hint="merge them first: model.merge_and_unload().",
        )
    rows = 0 if peft.fan_in_fan_out else 1
    norm = weight.norm(dim=rows, keepdim=True).detach()  # as DoRA's own forward pass does
    return weight / norm * magnitudes[scaled[0]].weight.unsqueeze(rows)


class LiveTensors:
    """A model's tensors by name, as a checkpoint has them: copies on the CPU, read when asked."""

    bytes_read = 0

    def __init__(self, model: nn.Module) -> None:
        self._sources = dict(_sources(model))
        self.shapes = {name: _shape(source) for name, source in self._sources.items()}

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """These tensors as the model multiplies with them now."""
        return {name: self._sources[name].read().detach().cpu() for name in names}

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True, eq=False)
class LiveAttention:
    """One attention of a live model; its tensors are read when asked for, on live parameters."""

    layout: AttentionLayout
    sources: Mapping[str, Source]
    """The stored tensors of the layout, by name."""
    module: nn.Module | None = None
    """The attention module, for hooks; None for a pair of the user's."""

    @property
    def query_parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters that W_Q is made of."""
        return self._parameters(self.layout.query)

    @property
    def key_parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters that W_K is made of."""
        return self._parameters(self.layout.key)

    def _parameters(self, side: Projection) -> tuple[nn.Parameter, ...]:
        below = () if side.through is None else self._parameters(side.through)
        return (*self.sources[side.weight].parameters, *below)

    def form(self, *, distances: int = 2048) -> QKForm:
        """Every query head's form, with the biases and rotation that the model has.

        A bias by distance (ALiBi, T5) is written out for that many distances.
        """
        tensors = {name: self.sources[name].read() for name in self.layout.tensors}
        return self.layout.form(tensors, distances=distances)


@dataclass(frozen=True, eq=False)
class Pair:
    """A query and a key projection of the user's own attention.

    >>> class Mine(nn.Module):
    ...     def __init__(self) -> None:
    ...         super().__init__()
    ...         self.ask, self.answer = nn.Linear(8, 8), nn.Linear(8, 4)
    >>> model = Mine()
    >>> (found,) = find_attention(model, pairs=[Pair(model.ask, model.answer, heads=4)])
    >>> found.layout.kv_heads, found.layout.temperature
    (2, 1.4142135623730951)
    """

    query: nn.Module | nn.Parameter
    """An nn.Linear (LoRA or not), or a parameter of (heads · head_dim, model)."""
    key: nn.Module | nn.Parameter
    """The same, with as many or fewer heads of the same dimension (GQA)."""
    heads: int
    temperature: float | None = None
    """λ; √head_dim where none is given."""
    name: str | None = None
    """How results call it; the query's own name where none is given."""
    is_cross: bool = False


AnyPair = Pair | tuple[nn.Module | nn.Parameter, nn.Module | nn.Parameter, int]


def find_attention(
    model: nn.Module,
    *,
    recipes: Sequence[Recipe] = RECIPES,
    pairs: Sequence[AnyPair] | None = None,
    layers: str | None = None,
) -> list[LiveAttention]:
    """Find every attention of a model; `layers` is a regular expression that selects by name.

    With `pairs`, those and no others.  Nothing found is an error that says what was seen.

    >>> [found.layout.name for found in find_attention(nn.TransformerEncoderLayer(8, 2))]
    ['self_attn']
    """
    found, skipped = discover(model, recipes=recipes, pairs=pairs)
    if not found:
        reasons = "; ".join(f"{one.name or 'the model'}: {one.reason}" for one in skipped[:4])
        raise LocaterError(
            f"no attention of {type(model).__name__} could be read. {reasons}.",
            hint="pass pairs=[Pair(query_linear, key_linear, heads=…)] or a Recipe.",
        )
    chosen = [one for one in found if layers is None or re.search(layers, one.layout.name)]
    if not chosen:
        names = ", ".join(one.layout.name for one in found[:12])
        raise LocaterError(
            f"layers={layers!r} selects none of {len(found)} attentions: {names}"
            f"{', …' if len(found) > 12 else ''}.",
            hint="it is a regular expression, searched for in these names.",
        )
    return chosen


def discover(
    model: nn.Module, *, recipes: Sequence[Recipe] = RECIPES, pairs: Sequence[AnyPair] | None = None
) -> tuple[list[LiveAttention], list[Skipped]]:
    """Find every attention of a model, each once, and what could not be read."""
    if pairs is not None:
        return [_from_pair(model, pair, place) for place, pair in enumerate(pairs)], []
    sources = dict(_sources(model))
    shapes = {name: _shape(source) for name, source in sources.items()}
    modules = {plain_name(path): module for path, module in model.named_modules()}
    layouts, skipped = layouts_by_config(shapes, partial(_config_of, modules), recipes=recipes)
    found: list[LiveAttention] = []
    seen: set[tuple[object, ...]] = set()
    for layout in layouts:
        own = {name: sources[name] for name in layout.tensors_with_norm}
        live = LiveAttention(layout, own, modules.get(layout.name))
        identity = (
            layout.query.start,
            layout.key.start,
            *(id(part) for part in (*live.query_parameters, *live.key_parameters)),
        )
        if identity in seen:  # one layer object used twice
            continue
        seen.add(identity)
        reason = _unreadable(live)
        if reason:
            skipped.append(Skipped(name=layout.name, reason=reason))
        else:
            found.append(live)
    return found, skipped


def _sources(model: nn.Module) -> Iterator[tuple[str, Source]]:
    """Every tensor of a model by name, parametrized ones as what they amount to."""
    by_path = dict(model.named_modules(remove_duplicate=False))
    for path, module in by_path.items():
        if isinstance(module, parametrize.ParametrizationList):
            continue
        parent, _, child = path.rpartition(".")
        adapter = by_path[parent] if child == "base_layer" else None
        names = [name for name, value in module._parameters.items() if value is not None]
        if parametrize.is_parametrized(module):
            lists: Any = module.parametrizations
            names += list(lists)
        for name in names:
            yield f"{path}.{name}" if path else name, Source(module, name, adapter)


def _shape(source: Source) -> tuple[int, ...]:
    if parametrize.is_parametrized(source.owner, source.attribute):
        sizes = [tuple(parameter.shape) for parameter in source.parameters]
        return max(sizes, key=math.prod)
    return tuple(getattr(source.owner, source.attribute).shape)


def _unreadable(live: LiveAttention) -> str | None:
    """Why a live attention's weights cannot be used, if they cannot."""
    for parameter in (*live.query_parameters, *live.key_parameters):
        if not parameter.is_floating_point() or parameter.element_size() < 2:
            return f"its weights are stored as {parameter.dtype}: quantized weights cannot be read"
    for name in (live.layout.query.weight, live.layout.key.weight):
        layer = live.sources[name].adapter
        if layer is not None and not _is_added(layer):
            return (
                f"{type(layer).__name__} adapts {name} in a way that is not an update of the "
                "weight; merge the adapter first"
            )
    return None


def _is_added(layer: nn.Module) -> bool:
    """Whether a layer around another only adds to its weight, or scales that as DoRA does."""
    peft: Any = layer
    active = _active_adapters(layer)
    if not hasattr(peft, "get_delta_weight"):
        return getattr(peft, "merged", False) or getattr(peft, "disable_adapters", False)
    names = ("lora_variant", "lora_magnitude_vector", "lora_B")
    variants, magnitudes, lora = (getattr(peft, name, {}) for name in names)
    biased = any(name in lora and lora[name].bias is not None for name in active)
    return not ((set(variants) - set(magnitudes)) & set(active) or biased)


def _config_of(modules: Mapping[str, nn.Module], attention: str) -> Config:
    """The nearest config above an attention, completed with the module's own attributes."""
    above = [modules.get(path) for path in upward(attention)]
    configs = [_mapping(getattr(module, "config", None)) for module in above]
    named = [config for config in configs if config.get("model_type")]
    headed = [config for config in configs if any(key in config for key in HEADS)]
    config = next(iter([*named, *headed]), {})
    if defaults(config.get("model_type")):  # then its modules say nothing that files do not
        return own_config(attention, config)
    own = vars(modules[attention]) if attention in modules else {}
    simple = {key: value for key, value in own.items() if isinstance(value, (bool, int, float))}
    if named:  # a config that names its family says all but the temperature of an unknown one
        simple = {key: simple[key] for key in ("scaling", "scale") if key in simple}
    below = [modules.get(f"{attention}.{child}") for child in ("q_norm", "k_norm")]
    simple["centered_norm"] = any(isinstance(norm, nn.LayerNorm) for norm in below)
    return ChainMap({key: value for key, value in config.items() if value is not None}, simple)


def _mapping(config: object) -> Config:
    """A config object as a mapping: Hugging Face's, a dict, a dataclass or a namespace."""
    if hasattr(config, "to_dict"):
        return config.to_dict()
    if isinstance(config, Mapping):
        return config
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.asdict(config)
    return vars(config) if hasattr(config, "__dict__") else {}


def _from_pair(model: nn.Module, pair: AnyPair, place: int) -> LiveAttention:
    pair = pair if isinstance(pair, Pair) else Pair(*pair)
    (query_name, query), (key_name, key) = (_named(model, side) for side in (pair.query, pair.key))
    (rows, width), (key_rows, key_width) = _shape(query), _shape(key)
    head_dim = rows // max(pair.heads, 1)
    fits = pair.heads > 0 and rows % pair.heads == 0 and key_rows % head_dim == 0
    if not fits or width != key_width or pair.heads % (key_rows // head_dim):
        raise InputError(
            f"a query of {(rows, width)} and a key of {(key_rows, key_width)} do not make "
            f"{pair.heads} heads.",
            hint="each is (heads · head_dim, model); the key may have fewer heads (GQA).",
        )
    sources = {query_name: query, key_name: key}
    sides = []
    for name, source in ((query_name, query), (key_name, key)):
        bias = None
        if source.attribute == "weight" and isinstance(source.owner.bias, nn.Parameter):
            bias = name.removesuffix("weight") + "bias"
            sources[bias] = Source(source.owner, "bias")
        sides.append(Projection(weight=name, bias=bias))
    name = pair.name or plain_name(query_name).removesuffix(".weight")
    layout = AttentionLayout(
        name=name,
        family="pair",
        layer=place,
        kind="cross" if pair.is_cross else "self",
        part="model",
        query=sides[0],
        key=sides[1],
        heads=pair.heads,
        kv_heads=key_rows // head_dim,
        head_dim=head_dim,
        model=width,
        temperature=math.sqrt(head_dim) if pair.temperature is None else pair.temperature,
        caveats=(INPUT_CAVEAT,),
    )
    return LiveAttention(layout, sources)


def _named(model: nn.Module, side: nn.Module | nn.Parameter) -> tuple[str, Source]:
    """Find a pair's projection in the model, so that it is read where wrappers put it."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(side, nn.Module) and module is side:
            base = getattr(module, "base_layer", None)
            if isinstance(base, nn.Module):
                return f"{prefix}base_layer.weight", Source(base, "weight", side)
            if isinstance(getattr(module, "weight", None), Tensor):
                above, _, child = path.rpartition(".")
                adapter = model.get_submodule(above) if child == "base_layer" else None
                return f"{prefix}weight", Source(side, "weight", adapter)
        for name, parameter in module._parameters.items():
            if parameter is side:
                return f"{prefix}{name}", Source(module, name)
    raise InputError(
        f"{type(side).__name__} is no projection of {type(model).__name__}.",
        hint="a Pair takes nn.Linear modules or parameters of (rows, model) of the model itself.",
    )
