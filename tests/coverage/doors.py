"""The only module here that knows where things lie in `locater`: what it says of a model."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locater import LocAteR, LocaterError, Probe, QKForm, Rotary, audit_checkpoint
from locater.audit.audit import Layers
from locater.checkpoints.open import open_checkpoint
from locater.core.form import HeadNorm
from locater.models.layout import AttentionLayout, Projection
from locater.models.live import discover
from locater.models.recipes import NAMES_CAVEAT
from locater.models.resolve import CROSS_CAVEAT, INPUT_CAVEAT

__all__ = ["LocaterError", "Probe", "QKForm", "Rotary"]

DISTANCES = 256
GENERAL = (NAMES_CAVEAT, INPUT_CAVEAT, CROSS_CAVEAT)
"""Caveats that say nothing of what may be wrong with the logits."""


@dataclass(frozen=True, eq=False)
class Told:
    """What the library says of one attention."""

    name: str
    family: str
    kind: str
    part: str
    form: QKForm
    query_rows: Tensor
    """The stored rows of the queries, as they lie in the weight."""
    key_rows: Tensor
    qk_norm: bool
    norm: str
    """The module of the norm before it, where the gains are known."""
    gain: Tensor | None
    shift: Tensor | None
    caveats: tuple[str, ...]

    @property
    def softcap(self) -> float | None:
        """The tanh that a caveat says the logits go through."""
        return _said(r"capped at ±(\S+) by a tanh", self.caveats)

    @property
    def clip(self) -> float | None:
        """Where a caveat says that queries and keys are clipped."""
        return _said(r"queries and keys are clipped at ±(\S+)", self.caveats)

    @property
    def turns_otherwise(self) -> bool:
        """A caveat says that positions are not those of a text."""
        return any(re.search("turn with|turn by three", caveat) for caveat in self.caveats)

    @property
    def says_window(self) -> bool:
        """A caveat says that keys are hidden."""
        return any(re.search("window|masked|chunk", caveat) for caveat in self.caveats)

    @property
    def is_named(self) -> bool:
        """A row of the table names its model type."""
        return NAMES_CAVEAT not in self.caveats

    @property
    def admits(self) -> list[str]:
        """Caveats that speak of terms which the form leaves out."""
        pattern = "relative position|products of tokens|not in the form"
        return [caveat for caveat in self.caveats if re.search(pattern, caveat)]


def _said(pattern: str, caveats: Sequence[str]) -> float | None:
    matches = [match for caveat in caveats if (match := re.search(pattern, caveat))]
    return float(matches[0][1]) if matches else None


@dataclass(frozen=True)
class Passed:
    """An attention that the library saw and did not read."""

    name: str
    reason: str


@dataclass(frozen=True)
class Report:
    """All that the library says of a model."""

    told: list[Told]
    passed: list[Passed]


def _told(layout: AttentionLayout, tensors: dict[str, Tensor]) -> Told:
    whole = {name: tensor.detach() for name, tensor in tensors.items()}
    before = layout.before and layout.before.gain
    gain, shift = layout.gain(whole)
    return Told(
        name=layout.name,
        family=layout.family,
        kind=layout.kind,
        part=layout.part,
        form=layout.form(whole, distances=DISTANCES),
        query_rows=_rows(layout.query, whole, layout.head_dim),
        key_rows=_rows(layout.key, whole, layout.head_dim),
        qk_norm=layout.qk_norm,
        norm=before.rpartition(".")[0] if before else "",
        gain=gain,
        shift=shift,
        caveats=layout.caveats,
    )


def _rows(side: Projection, tensors: dict[str, Tensor], head_dim: int) -> Tensor:
    """The stored rows that read the tokens: a latent's where there is one."""
    if side.through is not None:
        side, head_dim = side.through, tensors[side.weight].shape[1]
    return side.heads(side.unpacked(tensors), head_dim).flatten(0, 1)


def live(model: nn.Module) -> Report:
    """What discovery finds in a live model."""
    try:
        found, skipped = discover(model)
    except LocaterError as error:
        return Report([], [Passed("", _short(error.message))])
    told, passed = [], [Passed(one.name, one.reason) for one in skipped]
    for one in found:
        try:
            told.append(_told(one.layout, {name: one.read() for name, one in one.sources.items()}))
        except LocaterError as error:
            passed.append(Passed(one.layout.name, error.message))
    return Report(told, passed)


def stored(folder: Path) -> Report:
    """What a saved checkpoint is read as."""
    try:
        with open_checkpoint(folder) as checkpoint:
            layers = Layers.of_checkpoint(checkpoint)
            told, passed = [], [Passed(one.name, one.reason) for one in layers.skipped]
            for layout in layers.layouts:
                try:
                    told.append(_told(layout, checkpoint.read(layout.tensors_with_norm)))
                except LocaterError as error:
                    passed.append(Passed(layout.name, error.message))
            return Report(told, passed)
    except LocaterError as error:
        return Report([], [Passed("", _short(error.message))])


def _short(message: str) -> str:
    return message if len(message) < 300 else message[:297] + "…"


def audited(folder: Path) -> dict[str, Any]:
    """Audit a saved checkpoint: how many heads it has rows for, and what the audit says."""
    audit = audit_checkpoint(folder, tokens=16)
    return {"rows": len(audit.rows), "skipped": len(audit.skipped), "caveats": list(audit.caveats)}


def penalty(model: nn.Module) -> float:
    """LocAteR's penalty on a model, whose gradient must be finite and somewhere not zero."""
    model.requires_grad_(True)
    locater = LocAteR(model)
    value = locater.penalty()
    value.backward()
    slopes = [one.grad.abs().max().item() for one in model.parameters() if one.grad is not None]
    model.zero_grad()
    if not slopes or not math.isfinite(sum(slopes)) or not max(slopes) > 0:
        return math.nan
    return value.item()


def form_changed(form: QKForm, **changes: Any) -> QKForm:
    """A form with some of its parts replaced."""
    names = ("query", "key", "temperature", "query_bias", "key_bias", "rotary", "distance_bias",
             "query_norm", "key_norm", "relative")  # fmt: skip
    return QKForm(**{name: getattr(form, name) for name in names} | changes)


def _normalized(norm: HeadNorm | None, vectors: Tensor, tokens: Tensor) -> Tensor:
    """Queries or keys divided by their own norm, not by its root mean square."""
    if norm is None:
        return vectors
    sizes = norm.factor(tokens).movedim(-1, 1)
    return torch.stack([norm.apply(*one) for one in zip(vectors, sizes, strict=True)])


Turning = Callable[[Tensor], Tensor]


def logits_of(
    told: Told, form: QKForm, asks: Tensor, answers: Tensor, turning: Turning | None = None
) -> Tensor:
    """The form's logits of (batch, queries, width) on (batch, keys, width), by its definition.

    (W_Q x_t + b_q)·(W_K x_s + b_k)/λ, turned by the positions, plus what distances add.
    `turning` turns queries and keys in place of the form's rotation.
    """
    query = asks.double()[:, None] @ form.query.double().mT
    key = answers.double()[:, None] @ form.key.double().mT
    query = query if form.query_bias is None else query + form.query_bias.double()[:, None]
    key = key if form.key_bias is None else key + form.key_bias.double()[:, None]
    query, key = (
        _normalized(norm, vectors, tokens)
        for norm, vectors, tokens in (
            (form.query_norm, query, asks),
            (form.key_norm, key, answers),
        )
    )
    if told.clip is not None:
        query, key = query.clamp(-told.clip, told.clip), key.clamp(-told.clip, told.clip)
    if turning is not None:
        query, key = turning(query), turning(key)
    elif form.rotary is not None:
        turned = []
        for side in (query, key):
            turned.append(form.rotary.turn(side, form.rotary.phases(torch.arange(side.shape[-2]))))
        query, key = turned
    logits = query @ key.mT / form.temperature
    if form.distance_bias is not None:
        distance = torch.arange(query.shape[-2])[:, None] - torch.arange(key.shape[-2])
        logits = logits + form.distance_bias.double()[:, distance.clamp_min(0)]
    if form.relative is not None:
        asked, answered = torch.arange(query.shape[-2]), key.shape[-2]
        table = form.relative.keys_at(asked, answered)
        if table is not None:
            moved = torch.einsum("bhqd,hqkd->bhqk", query, table.double())
            logits = logits + moved / form.temperature
        bias = form.relative.bias_at(asked, answered)
        logits = logits if bias is None else logits + bias.double()
    if told.softcap is not None:
        logits = told.softcap * (logits / told.softcap).tanh()
    return logits
