"""What tensor names tell: wrappers, layers, parts, kinds of attention, and the norm before one."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from locater.errors import LocaterError
from locater.models.layout import Kind, Skipped

Shapes = Mapping[str, tuple[int, ...]]

_WRAPPERS = (
    "module",
    "_orig_mod",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "base_layer",
)


def plain_name(name: str) -> str:
    """Drop what DDP, torch.compile, FSDP1, checkpointing, PEFT and parametrizations add to a name.

    >>> plain_name("module._orig_mod.base_model.model.h.0.attn.c_attn.base_layer.weight")
    'h.0.attn.c_attn.weight'
    """
    if "parametrizations" in name:
        name = re.sub(r"\.parametrizations\.(\w+)\.original[01]?$", r".\1", name)
    if any(part in name for part in _WRAPPERS):
        name = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    return re.sub(r"(^|\.)base_model\.model\.", r"\1", name) if "base_model" in name else name


@dataclass(frozen=True)
class Names:
    """Stored tensors under their plain names, indexed by how those end."""

    stored: Mapping[str, str]
    shapes: Shapes
    owners: Mapping[str, list[str]]
    """The modules that have a tensor, by its name below them: `q_proj.weight`, `sinks`."""

    @classmethod
    def of(cls, shapes: Shapes) -> Names:
        """Index the names of a model."""
        stored = {plain_name(name): name for name in shapes}
        if len(stored) < len(shapes):  # two tensors differ in their wrappers alone
            stored = {name: name for name in shapes}
        owners: dict[str, list[str]] = {}
        for name in stored:
            module, _, leaf = name.rpartition(".")
            owners.setdefault(leaf, []).append(module)
            if module:
                attention, _, child = module.rpartition(".")
                owners.setdefault(f"{child}.{leaf}", []).append(attention)
                if child == "linear":  # a projection wrapped in a module of its own
                    above, _, name = attention.rpartition(".")
                    owners.setdefault(f"{name}.{child}.{leaf}", []).append(above)
        return cls(stored, shapes, owners)

    def __contains__(self, name: object) -> bool:
        return name in self.stored

    def first(self, names: Iterable[str]) -> str | None:
        """The first of these tensors that is there, as it is stored."""
        return next((self.stored[name] for name in names if name in self), None)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a stored tensor."""
        return tuple(self.shapes[self.stored[name]])

    @cached_property
    def modules(self) -> frozenset[str]:
        """Every module that has a tensor itself or in a child."""
        return frozenset(module for modules in self.owners.values() for module in modules)

    @cached_property
    def normed(self) -> frozenset[str]:
        """Every module that has a norm of queries or keys below it."""
        names = [name.split(".") for name in self.stored if re.search("norm|ln", name, re.I)]
        return frozenset(
            ".".join(parts[:depth])
            for parts in names
            for depth, part in enumerate(parts)
            if _NORM.fullmatch(part)
        )

    def norm_of(self, attention: str, side: str) -> str | None:
        """The child that normalizes an attention's queries or keys, if it stores gains."""
        for child in sorted(self.children.get(attention, ())):
            word = re.sub("norm|layer|ln|_", "", child.lower())
            if _NORM.fullmatch(child) and word[:1] == side[0]:
                return child if join(attention, child, "weight") in self else None
        return None

    def norm_before(self, attention: str) -> str | None:
        """The module whose name says that it is the norm before an attention."""
        for parent in upward(attention)[:3]:  # it may lie deeper than its layer: attention.self
            for child in _BESIDE:
                if join(parent, child, "weight") in self:
                    return join(parent, child)
        for pattern, last in _LAYER_BELOW:
            match = pattern.fullmatch(attention)
            if match is not None:
                stack, layers, layer = match["stack"], match["layers"], int(match["layer"])
                place = f"{stack}{layers}.{layer - 1}.{last}"
                place = place if layer else f"{stack}embeddings.LayerNorm"
                return place if f"{place}.weight" in self else None
        return None

    @cached_property
    def children(self) -> dict[str, set[str]]:
        """The names directly below each module."""
        found: dict[str, set[str]] = {}
        for name in self.stored:
            parts = name.split(".")
            for depth in range(1, len(parts)):
                found.setdefault(".".join(parts[:depth]), set()).add(parts[depth])
        return found

    def leftovers(self, attention: str, used: Iterable[str]) -> list[str]:
        """Children of an attention that hold terms of the logits, beside those that are used."""
        place = attention.removesuffix(".self")
        known = {plain_name(name) for name in used}
        left: dict[str, None] = {}
        for child in sorted(self.children.get(place, ())):
            inside = (
                [child, *self.children.get(join(place, child), ())] if child == "self" else [child]
            )
            for leaf in inside:
                full = join(attention if leaf != child else place, leaf)
                is_used = any(name == full or name.startswith(f"{full}.") for name in known)
                if _TERM.search(leaf) and not is_used and not _NORM.fullmatch(leaf):
                    left[leaf] = None
        return list(left)

    def unrecognized(self, known: Container[str]) -> Iterator[Skipped]:
        """Modules with what look like queries or keys, other than the known ones."""
        left: dict[str, list[str]] = {}
        for tensor, modules in self.owners.items():
            child = tensor.rpartition(".")[0]
            if not _SUSPECT.fullmatch(child) or _NO_WEIGHT.search(tensor):
                continue
            for module in modules:
                if module not in known:
                    left.setdefault(module, []).append(tensor)
        for module, seen in left.items():
            shown = ", ".join(seen[:4]) + (" …" if len(seen) > 4 else "")
            yield Skipped(name=module, reason=f"no recipe reads {shown}")


def unknown_family(names: Iterable[str]) -> LocaterError:
    """The error of a model that no recipe reads, with the names it has."""
    patterns = list(dict.fromkeys(re.sub(r"\d+", "#", name) for name in names))
    shown = ", ".join(patterns[:24]) + (", …" if len(patterns) > 24 else "")
    return LocaterError(
        f"no recipe finds queries and keys among these tensors: {shown or '(none)'}.",
        hint="name them: Recipe(family='mine', query='child that makes queries', "
        "key='child that makes keys'), and pass recipes=(mine, *RECIPES).",
    )


def natural_order(name: str) -> list[tuple[int, str]]:
    """Sort layer 10 after layer 2."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def weight_name(child: str) -> str:
    """The tensor of a projection: a module's weight, or a parameter of this very name."""
    return child if child.endswith("_weight") else f"{child}.weight"


def join(*parts: str) -> str:
    """A name from its parts, of which some may be empty."""
    return ".".join(part for part in parts if part)


def upward(name: str) -> list[str]:
    """The name of a module, then those of the modules around it.

    >>> upward("layers.0")
    ['layers.0', 'layers', '']
    """
    parts = name.split(".") if name else []
    return [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]


_LAYER = re.compile(r"(?:layers?|blocks?|groups|blk|(?:^|\.)h)\.(\d+)(?:\.|$)")
_CROSS = re.compile(
    r"(?:^|\.)(?:\w*cross_?att\w*|encoder_attn|enc(?:oder)?_?dec(?:oder)?_?att\w*)(?:\.|$)", re.I
)
_TOWERS = {
    "vision": re.compile(r"(?:^|\.)(?:vision_?\w*|visual|image_encoder)\."),
    "audio": re.compile(r"(?:^|\.)audio_\w+\."),
    "text": re.compile(r"(?:^|\.)(?:text_model|text_encoder|language_model)\."),
}
_STACKS = {part: re.compile(rf"(?:^|\.){part}\.") for part in ("decoder", "encoder")}
_NORM = re.compile(r"(?:q|k|query|key)_?(?:layer)?_?(?:norm|ln)|(?:norm|ln)_?[qk]", re.I)
_TERM = re.compile(
    r"rel(?:ative)?_|(?:^|_)pos(?:ition)?_|linear_pos|distance_emb|logit_scale|r_kernel|"
    r"(?:add|cross|extra)\w*_(?:q|k|query|key)(?:_|$)|conv1d|(?:^|_)[qk]_conv|per_dim_scale|"
    r"dt_proj|softmax_scal",
    re.I,
)
_SUSPECT = re.compile(r"(?:\w+_)?(?:w?q|w?k|w?qkv?\w?|query|key)(?:_\w+)?", re.I)
_NO_WEIGHT = re.compile(r"norm|ln|bias|embed|scale", re.I)


def layer_number(attention: str) -> int | None:
    """Which layer of its stack an attention is in."""
    match = _LAYER.search(attention) or re.search(r"(?:^|\.)(\d+)(?:\.|$)", attention)
    return int(match[1]) if match else None


def part_of(attention: str, usual: str = "") -> str:
    """Which tower or stack an attention is in; `usual` where no tower is named."""
    path = f"{attention}."
    for part, pattern in _TOWERS.items():
        if pattern.search(path):
            return part
    if usual:
        return usual
    return next((part for part, pattern in _STACKS.items() if pattern.search(path)), "model")


_AFTER_SELF = {
    "multihead_attn": "self_attn",  # torch
    "attn2": "attn1",  # diffusers
    "second_sub_layer": "first_sub_layer",  # NeMo
}
"""Modules that attend to an encoder's tokens where another stands beside them."""


def kind_of(attention: str, names: Names) -> Kind:
    """Tell attention to the own tokens from attention to an encoder's."""
    parent, _, last = attention.rpartition(".")
    beside = _AFTER_SELF.get(last)
    if _CROSS.search(attention) or (beside and join(parent, beside) in names.modules):
        return "cross"
    return "self"


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
_LAYER_BELOW = (
    (
        re.compile(r"(?P<stack>.*?)(?P<layers>encoder\.layer)\.(?P<layer>\d+)\.attention\.self"),
        "output.LayerNorm",  # BERT
    ),
    (
        re.compile(r"(?P<stack>.*?)(?P<layers>transformer\.layer)\.(?P<layer>\d+)\.attention"),
        "output_layer_norm",  # DistilBERT
    ),
)
"""Attentions that read what the last norm of the layer below them makes."""
