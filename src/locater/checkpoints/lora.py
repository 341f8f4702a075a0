"""LoRA adapters over the weights that they change, merged tensor by tensor as those are read."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.checkpoints.source import StoredTensors, Tensors
from locater.errors import LocaterError
from locater.models.names import plain_name

_PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_magnitude_vector|lora_embedding_[AB])"
    r"(?:\.(?P<adapter>(?!(?:weight|bias)$)[^.]+))?(?:\.(?P<leaf>weight|bias))?"
)
_SHIFT = "lora_B.bias"
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_PLAIN = re.compile(r"(?:(?:[\w-]|\\[.d\w]|\.|\[[\w-]+\])(?:[*+?]|\{\d{1,2}\})?|[()|^$])*")
MERGE = "merge it where it was trained (PEFT's merge_and_unload), save that, and give it."

_OWN_BASE = "give the base that it was trained on: with --base (base=), or as the running model."


@dataclass
class _Change:
    """What an adapter holds for one module: the names of its tensors by part."""

    module: str
    parts: dict[str, str] = field(default_factory=dict)


class LoraTensors(StoredTensors):
    """A base's tensors, each with W + s B A where the adapter has an A and a B for it.

    Merged weights are float32 at least: what the running model computes, before any rounding.
    """

    def __init__(
        self, base: Tensors, adapter: Tensors, settings: Mapping[str, Any], *, name: str
    ) -> None:
        self._base, self._adapter, self._name = base, adapter, name
        self._parts = (base,) if adapter is base else (base, adapter)
        self._settings = settings
        _check(settings, name)
        self.shapes = {
            stored: shape for stored, shape in base.shapes.items() if not _PART.fullmatch(stored)
        }
        self._stored = {plain_name(stored): stored for stored in self.shapes}
        self._changes: dict[str, _Change] = {}
        self._replaced: dict[str, str] = {}
        self._shifts: dict[str, _Change] = {}
        lost = self._match_changes()
        if adapter is not base:
            lost += self._match_replaced()
        if not self._changes and adapter is base:
            raise LocaterError(
                f"{name} holds LoRA factors without the weights that they change.",
                hint="put its adapter_config.json beside it, and give the base with --base.",
            )
        if not self._changes:
            raise LocaterError(
                f"nothing in the adapter {name} fits its base; "
                f"it changes {', '.join(lost[:4]) or 'nothing'}.",
                hint=_OWN_BASE,
            )
        self._scales = {
            change.module: self._scale(change.module, adapter.shapes[change.parts["lora_A"]][0])
            for change in self._changes.values()
        }
        self.caveats = (f"{len(self._changes)} weights are merged with LoRA",)
        if lost:
            shown = ", ".join(lost[:3]) + (", …" if len(lost) > 3 else "")
            self.caveats += (f"{len(lost)} parts of the adapter fit no weight: {shown}",)

    @property
    def changed(self) -> set[str]:
        """The base's tensors that the adapter changes."""
        return {*self._changes, *self._replaced, *self._shifts}

    def _match_changes(self) -> list[str]:
        """Find the weight of every changed module; return the modules that have none."""
        modules: dict[str, _Change] = {}
        adapters = set()
        for name in self._adapter.shapes:
            match = _PART.fullmatch(name)
            if not match:
                continue
            adapters.add(match["adapter"])
            change = modules.setdefault(match["module"], _Change(plain_name(match["module"])))
            bias = ".bias" if match["leaf"] == "bias" else ""
            change.parts[match["part"] + bias] = name
        if len(adapters) > 1:
            raise LocaterError(
                f"{self._name} holds several adapters: {', '.join(sorted(map(str, adapters)))}.",
                hint="save the one that you mean alone.",
            )
        lost = []
        for change in modules.values():
            target = self._target(change)
            if target is None:
                lost.append(change.module)
                continue
            self._changes[target] = change
            if _SHIFT in change.parts:  # lora_bias
                self._shifts[self._bias(change)] = change
        return lost

    def _target(self, change: _Change) -> str | None:
        """The base's weight that a module's A and B change."""
        factors = [change.parts.get(side, "") for side in ("lora_A", "lora_B")]
        if any(len(self._adapter.shapes.get(factor, ())) != 2 for factor in factors):
            return None
        found = (self._find(f"{change.module}.{leaf}") for leaf in ("weight", "in_proj_weight"))
        return next(filter(None, found), None)

    def _find(self, name: str) -> str | None:
        """A tensor of the base by its plain name, though a head may be wrapped around either."""
        if name in self._stored:
            return self._stored[name]
        near = [
            stored
            for plain, stored in self._stored.items()
            if plain.endswith(f".{name}") or name.endswith(f".{plain}")
        ]
        return near[0] if len(near) == 1 else None

    def _match_replaced(self) -> list[str]:
        """Whole tensors that the adapter stores: biases and modules_to_save."""
        lost = []
        for name, shape in self._adapter.shapes.items():
            if _PART.fullmatch(name):
                continue
            plain = plain_name(re.sub(r"\.modules_to_save(?:\.default)?", "", name))
            target = self._find(plain)
            if target is not None and self.shapes[target] == shape:
                self._replaced[target] = name
            else:
                lost.append(plain)
        return lost

    def _needed(self, name: str) -> list[str]:
        """The adapter's tensors that one of the base's needs."""
        change, shift = self._changes.get(name), self._shifts.get(name)
        needed = [self._replaced[name]] if name in self._replaced else []
        if change is not None:
            needed += [part for key, part in change.parts.items() if key != _SHIFT]
        return needed if shift is None else [*needed, shift.parts[_SHIFT]]

    def _bias(self, change: _Change) -> str:
        """The base's bias that a module's change adds to."""
        target = self._find(f"{change.module}.bias")
        if target is None:
            raise LocaterError(
                f"the adapter {self._name} adds a bias to {change.module}, which has none.",
                hint=MERGE,
            )
        return target

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Read these tensors, merged with the adapter's."""
        found = self._base.read(names)
        added = self._adapter.read([part for name in names for part in self._needed(name)])
        for name in names:
            if name in self._replaced:
                found[name] = added[self._replaced[name]]
            if name in self._changes:
                change = self._changes[name]
                parts = {key: added[part] for key, part in change.parts.items() if part in added}
                found[name] = self._merged(name, change.module, found[name], parts)
            if name in self._shifts:
                change = self._shifts[name]
                shift = added[change.parts[_SHIFT]]
                found[name] = found[name] + self._scales[change.module] * shift
        return found

    def _merged(
        self, name: str, module: str, weight: Float[Tensor, "_ _"], parts: Mapping[str, Tensor]
    ) -> Float[Tensor, "_ _"]:
        """W + s B A; with DoRA, of rows that keep their own length."""
        if weight.dtype.itemsize < 2:
            raise LocaterError(
                f"{name} is stored in 8 bits, and an adapter's change does not fit there.",
                hint=MERGE,
            )
        dtype = torch.promote_types(weight.dtype, torch.float32)
        down, up = parts["lora_A"].to(dtype), parts["lora_B"].to(dtype)
        flipped = bool(self._settings.get("fan_in_fan_out"))
        rows = weight.to(dtype).mT if flipped else weight.to(dtype)
        if (len(up), down.shape[1]) != tuple(rows.shape) or len(down) != up.shape[1]:
            raise LocaterError(
                f"{name} is {tuple(weight.shape)}, and the adapter's factors are "
                f"{tuple(up.shape)} and {tuple(down.shape)}.",
                hint=_OWN_BASE,
            )
        rows = rows + self._scales[module] * (up @ down)
        if "lora_magnitude_vector" in parts:
            length = parts["lora_magnitude_vector"].to(dtype).flatten()
            rows = rows * (length / rows.norm(dim=1))[:, None]
        return rows.mT.contiguous() if flipped else rows

    def _scale(self, module: str, rank: int) -> float:
        """The factor s before B A."""
        alpha = self._settings.get("lora_alpha")
        patterns = self._settings.get("alpha_pattern") or {}
        if not isinstance(patterns, Mapping):
            raise LocaterError(
                f"alpha_pattern of the adapter {self._name} is no map of names to strengths.",
                hint=MERGE,
            )
        for pattern, value in patterns.items():
            if _fits(str(pattern), module, self._name):
                alpha = value
                break
        if not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise LocaterError(
                f"{self._name} does not say how strong its LoRA is: lora_alpha is {alpha!r}.",
                hint="give it: config={'lora_alpha': 16, 'use_rslora': False}.",
            )
        if rank < 1:
            raise LocaterError(
                f"the adapter {self._name} has factors of rank {rank} for {module}.", hint=MERGE
            )
        return alpha / (math.sqrt(rank) if self._settings.get("use_rslora") else rank)


def _fits(pattern: str, module: str, name: str) -> bool:
    """Whether a pattern of an adapter's config names a module, in time that nobody can stretch.

    PEFT reads it as a regular expression; here names, alternatives, classes and at most two
    repetitions of one sign are allowed, which is what adapters have.
    """
    repeats = len(re.findall(r"[*+]|\{\d", pattern))
    if len(pattern) > 200 or len(module) > 400 or repeats > 2 or not _PLAIN.fullmatch(pattern):
        raise LocaterError(
            f"the adapter {name} chooses its strengths by the pattern {pattern!r:.60}, which is "
            "too involved to be run.",
            hint=MERGE,
        )
    try:
        return re.match(rf"(.*\.)?({pattern})$", module) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise LocaterError(
            f"the adapter {name} has the pattern {pattern!r:.60}: {error}.", hint=MERGE
        ) from error


def has_lora(names: Mapping[str, object]) -> bool:
    """Whether LoRA factors stand among a state dict's tensors."""
    return any(".lora_A." in name and _PART.fullmatch(name) for name in names)


def _check(settings: Mapping[str, Any], name: str) -> None:
    """Refuse adapters whose weights are not W + s B A."""
    kind = str(settings.get("peft_type", "LORA"))
    start = str(settings.get("init_lora_weights", True)).lower()
    if kind != "LORA":
        raise LocaterError(f"{name} is a {kind} adapter; LoRA is read.", hint=MERGE)
    if start.startswith(_CHANGED_BASE) or settings.get("layer_replication"):
        raise LocaterError(
            f"{name} stands on a base that its training changed "
            f"(init_lora_weights {start}, layer_replication {settings.get('layer_replication')}).",
            hint=MERGE,
        )
