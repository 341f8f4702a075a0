"""What changed between two checkpoints, head by head, and over many: a timeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.audit.audit import (
    AuditConfig,
    AuditKeywords,
    Layers,
    Report,
    audit_checkpoint,
    audit_layers,
    blocks,
    settings_of,
)
from locater.audit.table import Audit, HeadRecord
from locater.checkpoints.open import open_checkpoint
from locater.checkpoints.source import Say, silent
from locater.core.form import QKForm
from locater.engines import Engine, one_thread, run_all
from locater.errors import InputError, LocaterError
from locater.models.layout import AttentionLayout, Skipped
from locater.notebook import Shown

TRACKED = ("r", "eta", "xi", "trace", "mean", "variance", "spectral_norm", "entropy",
           "entropy_bound", "effective_tokens", "peak", "tokens_on")  # fmt: skip
"""The columns that a comparison subtracts and a timeline follows."""


@dataclass(frozen=True, kw_only=True)
class HeadChange:
    """What changed in one head; `after` minus `before` where not said otherwise."""

    name: str
    part: str
    kind: str
    layer: int
    head: int
    distance: float
    """‖W_after − W_before‖_F / ‖W_before‖_F, from the factors."""
    changes: Mapping[str, float | None]
    """By column: r, eta, mean, variance, entropy, …"""
    regime_before: str
    regime_after: str

    @property
    def has_moved(self) -> bool:
        """Whether W, or by biases and norms alone a column that rests on them, is another."""
        return self.distance > 0 or any(self.changes.values())


@dataclass(frozen=True, kw_only=True, repr=False)
class Comparison(Shown):
    """Two audits and their differences, largest distance first.

    >>> from locater import compare_checkpoints
    >>> change = compare_checkpoints("demo", "demo", tokens=32)
    >>> max(row.distance for row in change.rows)
    0.0
    """

    before: Audit
    after: Audit
    rows: tuple[HeadChange, ...]
    skipped: tuple[Skipped, ...] = ()
    """Attentions that only one of the two has, or that could not be read in both."""

    _picture = ("rect", "head:O", "layer:O", "distance:Q")

    def _line(self) -> str:
        return f"{self.before.name} → {self.after.name}, {len(self.rows)} heads"

    def _table(self) -> list[dict[str, Any]]:
        return [asdict(row) for row in self.rows]

    @property
    def summary(self) -> str:
        """One paragraph."""
        if not self.rows:
            return f"{self.before.name} and {self.after.name} have no head in common."
        moved = [row for row in self.rows if row.has_moved]
        moves = Counter((row.regime_before, row.regime_after) for row in self.rows)
        middle = self.rows[len(self.rows) // 2].distance
        said = "; ".join(f"{n} went from {a} to {b}" for (a, b), n in moves.items() if a != b)
        first = self.rows[0]
        return (
            f"{self.before.name} → {self.after.name}: {len(moved)} of {len(self.rows)} heads "
            f"changed; ‖ΔW‖_F/‖W‖_F is {middle:.3g} in the median and {first.distance:.3g} at most "
            f"({first.name}, head {first.head}). Regimes: {said or 'none changed'}. "
            f"Rests on {self.after.process}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values; the two audits by their names and summaries."""
        return {
            "before": self.before.name,
            "after": self.after.name,
            "head": list(dict.fromkeys((*self.before.head, *self.after.head))),
            "summary": self.summary,
            "process": self.after.process,
            "caveats": Timeline(audits=(self.before, self.after)).caveats,
            "skipped": [asdict(one) for one in self.skipped],
            "rows": [asdict(row) for row in self.rows],
        }


def compare_checkpoints(
    before: str | Path | nn.Module,
    after: str | Path | nn.Module,
    settings: AuditConfig | None = None,
    *,
    base: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
    report: Report | None = None,
    say: Say = silent,
    **keywords: Unpack[AuditKeywords],
) -> Comparison:
    """Audit two checkpoints or live models side by side and say what changed per head.

    `base` and `config` serve both; settings are those of `audit_checkpoint`.  Heads are matched by
    the name of their attention, wrappers left out, or where names differ by part, kind and layer.
    `report` and `say` hear of every step and of waiting.

    >>> compare_checkpoints("demo", "demo", tokens=32).rows[0].distance
    0.0
    """
    settings = settings_of(settings, keywords)
    if isinstance(before, nn.Module) and isinstance(after, nn.Module):
        first, second = (Layers.of_model(one, gains=settings.gains) for one in (before, after))
        with torch.no_grad():
            return _compared(first, second, settings, report)
    if isinstance(before, nn.Module) or isinstance(after, nn.Module):
        raise InputError(
            "a live model is compared with a live model.",
            hint="save it first, or load the checkpoint.",
        )
    with (
        open_checkpoint(before, base=base, config=config, say=say) as old,
        open_checkpoint(after, base=base, config=config, say=say) as new,
    ):
        first, second = (Layers.of_checkpoint(one, gains=settings.gains) for one in (old, new))
        return _compared(first, second, settings, report)


def _compared(
    first: Layers, second: Layers, settings: AuditConfig, report: Report | None
) -> Comparison:
    pairs, alone = _matched(first.layouts, second.layouts)
    if not pairs:
        raise InputError(
            "the two models have no attention in common.",
            hint="compare two checkpoints of one architecture.",
        )
    total, done = 3 * len(pairs), 0

    def tick(*_: int) -> None:
        nonlocal done
        done += 1
        if report is not None:
            report(done, total)

    before = audit_layers(first, settings, tick, [ours for ours, _ in pairs])
    after = audit_layers(second, settings, tick, [theirs for _, theirs in pairs])
    distances: dict[str, list[float]] = {}
    with one_thread():
        for ours, theirs in pairs:
            try:
                distances[ours.name] = _distances(first, ours, second, theirs)
            except LocaterError as error:
                alone.append(Skipped(name=ours.name, reason=error.message))
            tick()
    names = {theirs.name: ours.name for ours, theirs in pairs}
    later = {(names[row.name], row.head): row for row in after.rows}
    rows = [
        _change(row, later[row.name, row.head], distances[row.name][row.head])
        for row in before.rows
        if (row.name, row.head) in later and row.name in distances
    ]
    rows.sort(key=lambda row: -float(f"{row.distance:.9g}"))  # equal ones stay in their order
    skipped = dict.fromkeys((*alone, *before.skipped, *after.skipped))
    return Comparison(before=before, after=after, rows=tuple(rows), skipped=tuple(skipped))


def _matched(
    first: Iterable[AttentionLayout], second: Iterable[AttentionLayout]
) -> tuple[list[tuple[AttentionLayout, AttentionLayout]], list[Skipped]]:
    """Attentions of the same name, else of the same place; and what has no partner."""
    by_name = {layout.name: layout for layout in second}
    by_place: dict[tuple[str, str, int], list[AttentionLayout]] = {}
    for layout in by_name.values():
        by_place.setdefault((layout.part, layout.kind, layout.layer), []).append(layout)
    pairs, alone, taken = [], [], set()
    for ours in first:
        places = by_place.get((ours.part, ours.kind, ours.layer), [])
        theirs = by_name.get(ours.name) or (places[0] if len(places) == 1 else None)
        shape = (ours.heads, ours.kv_heads, ours.head_dim, ours.model)
        if theirs is None:
            alone.append(Skipped(name=ours.name, reason="only the first model has it"))
        elif shape != (theirs.heads, theirs.kv_heads, theirs.head_dim, theirs.model):
            taken.add(theirs.name)
            alone.append(Skipped(name=ours.name, reason="its heads have other shapes in the two"))
        else:
            taken.add(theirs.name)
            pairs.append((ours, theirs))
    for name in by_name:
        if name not in taken:
            alone.append(Skipped(name=name, reason="only the second model has it"))
    return pairs, alone


def _distances(
    first: Layers, ours: AttentionLayout, second: Layers, theirs: AttentionLayout
) -> list[float]:
    """The relative change of every head of one attention, a few key heads at a time."""
    left, right = first.tensors(ours), second.tensors(theirs)
    changes: list[float] = []
    for key_heads in blocks(ours):
        before, after = first.form(ours, left, key_heads), second.form(theirs, right, key_heads)
        changes += relative_change(before, after).tolist()
    return changes


def relative_change(before: QKForm, after: QKForm) -> Float[Tensor, "*heads"]:
    """‖W_after − W_before‖_F / ‖W_before‖_F without a model × model matrix, exact near zero.

    >>> form = QKForm(torch.eye(2, 3), torch.ones(2, 3), temperature=1.0)
    >>> relative_change(form, QKForm(2 * form.query, form.key, temperature=1.0)).item()
    1.0
    """
    old, new = (
        QKForm(form.query.detach().double(), form.key.detach().double(), 1.0)
        for form in (before, after)
    )
    change = (new - old).frobenius_squared().clamp_min(0)
    return (change / old.frobenius_squared()).sqrt()


def _change(before: HeadRecord, after: HeadRecord, distance: float) -> HeadChange:
    changes: dict[str, float | None] = {}
    for column in TRACKED:
        one, other = getattr(before, column), getattr(after, column)
        changes[column] = None if one is None or other is None else other - one
    return HeadChange(
        **_about(before),
        distance=distance,
        changes=changes,
        regime_before=before.regime,
        regime_after=after.regime,
    )


def _about(row: HeadRecord) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ("name", "part", "kind", "layer", "head")}


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One audit per checkpoint of a run, in the order given.

    >>> from locater import audit_timeline
    >>> line = audit_timeline(["demo", "demo"], tokens=32)
    >>> line.trajectories()[0]["r"][0] == line.trajectories()[0]["r"][1]
    True
    """

    audits: tuple[Audit, ...]

    @property
    def caveats(self) -> list[str]:
        """What any of the audits says of itself, once."""
        return list(dict.fromkeys(caveat for audit in self.audits for caveat in audit.caveats))

    def trajectories(self) -> list[dict[str, Any]]:
        """One record per head: its columns as lists over the checkpoints, None where it lacks."""
        heads: dict[tuple[Any, ...], list[HeadRecord | None]] = {}
        # names tell heads apart that places do not, but a prefix may differ between them
        is_unclear = any(len(set(map(_place, one.rows))) < len(one.rows) for one in self.audits)
        for place, audit in enumerate(self.audits):
            for row in audit.rows:
                key = (row.name, row.head) if is_unclear else _place(row)
                heads.setdefault(key, [None] * len(self.audits))[place] = row
        return [_trajectory(track) for track in heads.values()]

    def to_dict(self) -> dict[str, Any]:
        """Plain values: the checkpoints' summaries and every head's trajectory."""
        return {
            "checkpoints": [audit.name for audit in self.audits],
            "head": list(dict.fromkeys(line for audit in self.audits for line in audit.head)),
            "summaries": [audit.summary for audit in self.audits],
            "caveats": self.caveats,
            "skipped": [
                {"checkpoint": audit.name, **asdict(one)}
                for audit in self.audits
                for one in audit.skipped
            ],
            "trajectories": self.trajectories(),
        }


def _place(row: HeadRecord) -> tuple[Any, ...]:
    return row.part, row.kind, row.layer, row.head


def _trajectory(track: Sequence[HeadRecord | None]) -> dict[str, Any]:
    first = next(row for row in track if row is not None)
    return _about(first) | {
        column: [None if row is None else getattr(row, column) for row in track]
        for column in ("verdict", "regime", *TRACKED)
    }


def audit_timeline(
    sources: Sequence[str | Path],
    settings: AuditConfig | None = None,
    *,
    base: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
    engine: Engine = "local",
    workers: int | None = None,
    ray_address: str | None = None,
    report: Report | None = None,
    say: Say = silent,
    **keywords: Unpack[AuditKeywords],
) -> Timeline:
    """Audit several checkpoints of one run, some at a time, here or on Ray.

    The settings are those of `audit_checkpoint`; on Ray every node must see the checkpoints.

    >>> [len(audit.rows) for audit in audit_timeline(["demo", "demo"], tokens=32).audits]
    [16, 16]
    """
    settings = settings_of(settings, keywords)

    def work(place: int) -> Audit | LocaterError:
        try:
            return audit_checkpoint(
                sources[place], settings, base=base, config=config, workers=1, say=say
            )
        except LocaterError as error:
            return error

    audits = run_all(
        work, len(sources), engine=engine, workers=workers, ray_address=ray_address, report=report
    )
    for audit in audits:
        if isinstance(audit, LocaterError):
            raise audit
    return Timeline(audits=tuple(one for one in audits if isinstance(one, Audit)))
