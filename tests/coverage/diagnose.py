"""Why a form's logits are not the model's: which change of the form makes them fit."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tests.coverage.compare import LinedUp, Pairing, centered, counted, gap
from tests.coverage.doors import QKForm, Rotary, Told, form_changed, logits_of

FITS = 2e-3
NORMS = {"rsqrt", "native_layer_norm", "_fused_rms_norm", "linalg_vector_norm", "norm",
         "native_group_norm", "native_batch_norm", "_native_batch_norm_legit_no_training"}  # fmt: skip


def causes(told: Told, pairing: Pairing, lined: LinedUp | None) -> list[str]:
    """What would make the form right, as far as it can be told from numbers and operations."""
    found = list(_operations(told, pairing))
    if lined is None:
        return [*found, "order of axes"]
    return [*found, *_changes(told, lined)]


def _operations(told: Told, pairing: Pairing) -> Iterator[str]:
    """What the model does between projection and softmax that the form does not know of."""
    attention = pairing.attention
    score = next(
        one
        for one in attention.scores
        if pairing.query in one.left.projections | one.right.projections
    )
    sides = score.left, score.right
    if any(side.steps & NORMS for side in sides):
        yield "norm of queries or keys" + ("" if told.qk_norm else ", not declared")
    if any(len(side.weights) > 1 for side in sides):
        yield "several projections make one query or key"
    if len(attention.scores) > 1:
        yield "several products are added"
    if "tanh" in attention.steps and told.softcap is None:
        yield "soft-cap, not declared"
    if attention.parameters:
        yield "added to the scores: " + ", ".join(sorted({_leaf(one) for one in attention.parameters}))


def _leaf(name: str) -> str:
    return ".".join(part for part in name.split(".")[-2:] if not part.isdigit())


def _rotations(form: QKForm) -> Iterator[tuple[str, Rotary | None]]:
    yield "", form.rotary
    head = form.query.shape[-2]
    if form.rotary is not None:
        yield "no rotation", None
        other = "half" if form.rotary.layout == "interleaved" else "interleaved"
        yield f"rotation: {other}", Rotary(form.rotary.frequencies, other)
    for share in (1, 2, 4):
        for base in (10_000.0, 500_000.0, 1_000_000.0):
            for layout in ("half", "interleaved"):
                if head % (2 * share) == 0:
                    label = f"rotation: {layout}, base {base:g}, 1/{share} of the head"
                    yield label, Rotary.from_base(head // share, base=base, layout=layout)


def _changes(told: Told, lined: LinedUp) -> Iterator[str]:
    """The first change of rotation and scale that makes the form fit."""
    for name, rotary in _rotations(told.form):
        form = form_changed(told.form, rotary=rotary)
        ours = logits_of(told, form, lined.asks, lined.answers)
        how = _scaled(ours, lined.theirs, counted(form, lined.theirs))
        if how is not None:
            yield "; ".join(part for part in (name, how) if part)
            return
    form = form_changed(told.form, query=told.form.key, key=told.form.query,
                        query_bias=told.form.key_bias, key_bias=told.form.query_bias)  # fmt: skip
    ours = logits_of(told, form, lined.asks, lined.answers)
    if _scaled(ours, lined.theirs, counted(form, lined.theirs)) is not None:
        yield "queries and keys change places"


def _scaled(ours: Tensor, theirs: Tensor, seen: Tensor) -> str | None:
    """A scale, per head or per query or for all, or a term by position, that makes them agree."""
    mine, truth = centered(ours, seen), centered(theirs, seen)
    for name, axes in (("", (0, 1, 2, 3)), (" per head", (0, 2, 3)), (" per query", (0, 1, 3))):
        factor = _factor(mine, truth, axes)
        if gap(mine * factor, theirs, seen) < FITS:
            if name:
                return f"temperature{name}"
            value = factor.item()
            return "" if abs(value - 1) < 1e-4 else f"temperature ÷ {value:.4g}"
    if len(mine) < 2 or not torch.equal(seen[0], seen[1]):
        return None
    mine, truth, both = mine[0] - mine[1], truth[0] - truth[1], seen[0]
    factor = _factor(mine, truth, (0, 1, 2))
    if gap(mine * factor, truth, both) < FITS:
        value = factor.item()
        scale = "" if abs(value - 1) < 1e-4 else f", temperature ÷ {value:.4g}"
        return f"a term by position alone{scale}"
    return None


def _factor(mine: Tensor, truth: Tensor, axes: tuple[int, ...]) -> Tensor:
    size = mine.square().sum(axes, keepdim=True).clamp_min(1e-300)
    return (mine * truth).sum(axes, keepdim=True) / size


def described(pairing: Pairing) -> str:
    """What happens between projections and softmax, in the words of the operations."""
    score = next(iter(pairing.attention.scores))
    parts = []
    for name, side in (("left", score.left), ("right", score.right)):
        parts.append(
            f"{name}: {'+'.join(sorted(_leaf(one) for one in side.weights))}"
            f" then {','.join(sorted(side.steps)) or 'nothing'}"
        )
    parts.append(f"after: {','.join(sorted(pairing.attention.steps)) or 'nothing'}")
    return "; ".join(parts)


def is_close(value: float, limit: float) -> bool:
    """A number, and below a limit."""
    return math.isfinite(value) and value < limit
