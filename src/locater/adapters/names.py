"""What tensor names tell: wrappers around a model, layers, parts, self- or cross-attention."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

from locater.adapters.layout import Kind, Skipped
from locater.errors import LocaterError

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
    name = re.sub(r"\.parametrizations\.(\w+)\.original[01]?$", r".\1", name)
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return re.sub(r"(^|\.)base_model\.model\.", r"\1", ".".join(parts))


@dataclass(frozen=True)
class Names:
    """Stored tensors under their plain names."""

    stored: Mapping[str, str]
    shapes: Shapes
    below: Mapping[str, list[str]]
    """What lies under a module, at most four levels deep, by names relative to it."""

    @classmethod
    def of(cls, shapes: Shapes) -> Names:
        """Index the names of a model."""
        stored = {plain_name(name): name for name in shapes}
        if len(stored) < len(shapes):  # two tensors differ in their wrappers alone
            stored = {name: name for name in shapes}
        below: dict[str, list[str]] = {}
        for name in stored:
            parts = name.split(".")
            for depth in range(1, min(len(parts), 4) + 1):
                module = ".".join(parts[:-depth])
                below.setdefault(module, []).append(".".join(parts[-depth:]))
        return cls(stored, shapes, below)

    def __contains__(self, name: object) -> bool:
        return name in self.stored

    def modules_with(self, tensor: str) -> list[str]:
        """The modules that have a tensor of this name."""
        ending = f".{tensor}"
        found = [name[: -len(ending)] for name in self.stored if name.endswith(ending)]
        return [*found, ""] if tensor in self.stored else found

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a stored tensor."""
        return tuple(self.shapes[self.stored[name]])

    def unrecognized(self, known: Container[str]) -> Iterator[Skipped]:
        """Modules with what look like queries or keys, other than the known ones."""
        left: dict[str, list[str]] = {}
        for name in self.stored:
            module, _, leaf = name.rpartition(".")
            attention, _, child = module.rpartition(".")
            looks = _SUSPECT.fullmatch(child) and not re.search("norm|ln|bias|embed", child, re.I)
            if looks and attention not in known and not leaf.endswith("bias"):
                left.setdefault(attention, []).append(f"{child}.{leaf}")
        for attention, seen in left.items():
            shown = ", ".join(seen[:4]) + (" …" if len(seen) > 4 else "")
            yield Skipped(name=attention, reason=f"no recipe reads {shown}")


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


_LAYER = re.compile(r"(?:layers?|blocks?|groups|blk|(?:^|\.)h)\.(\d+)(?:\.|$)")
_CROSS = re.compile(r"(?:^|\.)(?:cross_?att\w*|encoder_attn|enc_?dec_?att\w*)(?:\.|$)", re.I)
_TOWERS = {
    "vision": re.compile(r"(?:^|\.)(?:vision_?\w*|visual|image_encoder)\."),
    "audio": re.compile(r"(?:^|\.)audio_\w+\."),
    "text": re.compile(r"(?:^|\.)(?:text_model|text_encoder|language_model)\."),
}
_STACKS = {part: re.compile(rf"(?:^|\.){part}\.") for part in ("decoder", "encoder")}
_NORMS = re.compile(r"(?:q|k|query|key)_?(?:layer)?_?(?:norm|ln)\b|(?:norm|ln)_?[qk]\b", re.I)
_SUSPECT = re.compile(r"(?:\w+_)?(?:w?q|w?k|w?qkv?\w?|query|key)(?:_\w+)?", re.I)


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


def kind_of(attention: str, names: Names) -> Kind:
    """Tell attention to the own tokens from attention to an encoder's."""
    parent, _, last = attention.rpartition(".")
    beside = {"multihead_attn": "self_attn", "attn2": "attn1"}.get(last)  # torch, diffusers
    if _CROSS.search(attention) or (beside and join(parent, beside) in names.below):
        return "cross"
    return "self"


def has_norm(attention: str, names: Names) -> bool:
    """Whether a norm of queries or keys is among an attention's tensors."""
    return any(_NORMS.match(name) for name in names.below.get(attention, ()))
