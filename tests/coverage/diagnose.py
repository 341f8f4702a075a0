"""Why a form's logits are not the model's: which change of the form makes them fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from tests.coverage.compare import FITS, LinedUp, Pairing, centered, counted, gap
from tests.coverage.doors import QKForm, Rotary, Told, form_changed, logits_of
from tests.coverage.truth import Lineage
from torch import Tensor

TURNS = {"neg", "view_as_complex"}
NORMS = {
    "rsqrt",
    "native_layer_norm",
    "_fused_rms_norm",
    "linalg_vector_norm",
    "norm",
    "native_group_norm",
    "native_batch_norm",
    "_native_batch_norm_legit_no_training",
}


def causes(
    told: Told, pairing: Pairing, every: Sequence[LinedUp], weight: Tensor | None = None
) -> list[str]:
    """What would make the form right, as far as it can be told from numbers and operations.

    `weight` is the stored one where queries and keys share it, with its bias as a last column.
    """
    found = list(_operations(told, pairing))
    logits, heads = pairing.attention.logits, told.form.query.shape[0]
    if (
        logits.ndim == 4
        and logits.shape[1] != heads
        and pairing.query.given.shape[0] == (logits.shape[0] * logits.shape[2])
    ):
        return [*found, f"number of heads: {logits.shape[1]}, not {heads}"]
    if not every:
        return [*found, "inputs and logits do not line up"]
    changes: list[str] = []
    for lined in (_some(one) for one in every[:3]):
        changes = changes or list(_changes(told, lined))
        if not changes and weight is not None:
            changes = list(_cuts(told, lined, weight))
    if (
        not changes
        and not is_normed(pairing)
        and any(side.steps & TURNS for side in _sides(pairing))
    ):
        changes = ["rotated in another way (2-D, sections, tables)"]
    return [*found, *changes]


def _some(lined: LinedUp) -> LinedUp:
    """The first sequences are enough to tell what is wrong."""
    return replace(lined, asks=lined.asks[:2], answers=lined.answers[:2], theirs=lined.theirs[:2])


def _sides(pairing: Pairing) -> tuple[Lineage, Lineage]:
    scores = list(pairing.attention.scores)
    for score in scores:
        if pairing.query in score.left.projections | score.right.projections:
            return score.left, score.right
    return scores[0].left, scores[0].right


def _cuts(told: Told, lined: LinedUp, weight: Tensor) -> Iterator[str]:
    """Other ways to cut queries and keys out of one tensor."""
    form = told.form
    heads, head = form.query.shape[:2]
    whole = weight.detach().double()
    width = form.query.shape[-1]
    for name, query, key in _pieces(whole, heads, head):
        biases = (query[..., -1], key[..., -1]) if whole.shape[1] > width else (None, None)
        parts = {"query": query[..., :width], "key": key[..., :width]}
        parts |= dict(zip(("query_bias", "key_bias"), biases, strict=True))
        for rotation, rotary in list(_rotations(form))[:4]:
            other = form_changed(form, **parts, rotary=rotary)
            ours = logits_of(told, other, lined.asks, lined.answers)
            how = _scaled(ours, lined.theirs, counted(other, lined.theirs))
            if how is not None:
                yield "; ".join(part for part in (f"cut: {name}", rotation, how) if part)
                return


def _pieces(whole: Tensor, heads: int, head: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    rows, width = whole.shape
    if rows == 3 * heads * head:
        for order in ("qkv", "qvk", "kqv", "vqk", "kvq", "vkq"):
            parts = dict(zip(order, whole.view(3, heads, head, width), strict=True))
            yield f"concatenated {order}", parts["q"], parts["k"]
            parts = dict(zip(order, whole.view(heads, 3, head, width).unbind(1), strict=True))
            yield f"by head {order}", parts["q"], parts["k"]
            parts = dict(zip(order, whole.view(heads, head, 3, width).unbind(2), strict=True))
            yield f"by row {order}", parts["q"], parts["k"]
            for group in (2, 4):
                if heads % group == 0:
                    cut = whole.view(group, 3, heads // group, head, width).unbind(1)
                    parts = dict(zip(order, (one.flatten(0, 1) for one in cut), strict=True))
                    yield f"in {group} groups {order}", parts["q"], parts["k"]
    shared = (rows // head - heads) // 2
    if shared > 0 and heads % shared == 0 and rows == (heads + 2 * shared) * head:
        share = heads // shared
        cut = whole.view(heads + 2 * shared, head, width)
        keys = cut[heads : heads + shared].repeat_interleave(share, 0)
        yield f"concatenated, {shared} key heads", cut[:heads], keys
        cut = whole.view(shared, share + 2, head, width)
        yield (
            f"by key head, {shared}",
            cut[:, :share].flatten(0, 1),
            cut[:, share].repeat_interleave(share, 0),
        )


def is_normed(pairing: Pairing) -> bool:
    """Whether a norm stands between the projections and their product."""
    return any(side.steps & NORMS or {"mean", "pow"} <= side.steps for side in _sides(pairing))


def _operations(told: Told, pairing: Pairing) -> Iterator[str]:
    """What the model does between projection and softmax that the form does not know of."""
    attention, sides = pairing.attention, _sides(pairing)
    if is_normed(pairing):
        yield "norm of queries or keys" + ("" if told.qk_norm else ", not declared")
    if any(len(side.weights) > 1 for side in sides):
        yield "several projections make one query or key"
    if len(attention.scores) > 1:
        yield "several products are added"
    if "tanh" in attention.steps and told.softcap is None:
        yield "soft-cap, not declared"
    if attention.products:
        names = sorted({_leaf(one) for one in attention.products})
        yield "added to the scores: products with " + ", ".join(names)
    if attention.parameters:
        yield "added to the scores: " + ", ".join(
            sorted({_leaf(one) for one in attention.parameters})
        )


def _leaf(name: str) -> str:
    return ".".join(part for part in name.split(".")[-2:] if not part.isdigit())


def _rotations(form: QKForm) -> Iterator[tuple[str, Rotary | None]]:
    yield "", form.rotary
    head = form.query.shape[-2]
    if form.rotary is not None:
        yield "no rotation", None
        other = "half" if form.rotary.layout == "interleaved" else "interleaved"
        yield f"rotation: {other}", Rotary(form.rotary.frequencies, other)
        yield "rotation: the other way round", Rotary(-form.rotary.frequencies, form.rotary.layout)
    for share in (1, 2, 4):
        for layout in ("half", "interleaved"):
            if head % (2 * share) == 0:
                label = f"rotation: {layout}, base 10000, 1/{share} of the head"
                yield label, Rotary.from_base(head // share, base=10_000.0, layout=layout)


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
