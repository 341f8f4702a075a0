"""A form's logits against what entered the model's own softmax."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
from tests.coverage.doors import QKForm, Told, form_changed, logits_of
from tests.coverage.truth import Attention, Lineage, Projection
from torch import Tensor, nn

SEEN = 60.0
"""A key whose logit is that far below its row's largest is masked, unless the row spans as much."""
MASK = 100.0
"""The least that models add to hide a key."""
HUGE = 5e3
"""So far below it is masked in any case."""


class Rows:
    """Which parameter holds a stored row, by its numbers: files may name and cut them otherwise."""

    def __init__(self, model: nn.Module) -> None:
        self.owners: dict[bytes, set[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.ndim < 2 or parameter.numel() > 1 << 22:
                continue
            flat = parameter.detach().double().flatten(1)
            owner = model.get_submodule(name.rpartition(".")[0])
            if isinstance(owner, nn.Conv1d) and 1 < owner.groups < len(flat):
                flat = torch.block_diag(*flat.chunk(owner.groups))  # each reads its own part
            for side in (flat, flat.T) if parameter.ndim == 2 else (flat,):
                for row in side.contiguous().numpy():
                    self.owners.setdefault(row.tobytes(), set()).add(name)

    def owner(self, rows: Tensor) -> frozenset[str]:
        """The parameters that hold every one of these rows."""
        found: set[str] | None = None
        for row in rows.detach().double().contiguous().numpy():
            mine = self.owners.get(row.tobytes(), set())
            found = set(mine) if found is None else found & mine
        return frozenset(found or ())


@dataclass(frozen=True, eq=False)
class Pairing:
    """One run of one attention: what was projected and the logits that came of it."""

    attention: Attention
    query: Projection
    key: Projection
    is_alone: bool
    """No other product was added to this one."""


def pairings(heard: list[Attention], query: frozenset[str], key: frozenset[str]) -> list[Pairing]:
    """The runs in which queries came from these weights and keys from those."""
    found = []
    for attention in heard:
        for score in attention.scores:
            for left, right in ((score.left, score.right), (score.right, score.left)):
                both = [
                    Pairing(attention, asks, answers, len(attention.scores) == 1)
                    for asks in _made_by(left, query)
                    for answers in _made_by(right, key)
                ]
                if both:
                    found += both
                    break
            else:
                continue
            break
    return found


def _made_by(lineage: Lineage | None, weights: frozenset[str], depth: int = 2) -> list[Projection]:
    """The products with these weights that it comes from, perhaps by way of others (MLA).

    There are several where keys of two sources are joined.
    """
    if lineage is None:
        return []
    found = [one for one in lineage.projections if one.weights & weights]
    if not found and depth:
        found = [
            deeper
            for one in lineage.projections
            for deeper in _made_by(one.source, weights, depth - 1)
        ]
    return list({id(one.given): one for one in found}.values())


def _rows(projection: Projection, width: int) -> Tensor | None:
    """What was projected, as rows of the weight's width."""
    given = projection.given
    if projection.is_picture:
        given = given.movedim(1, -1)
    elif given.ndim == 2 and given.shape[-1] != width and given.shape[0] == width:
        given = given.mT
    return given.reshape(-1, width) if given.shape[-1] == width else None


def _views(logits: Tensor, heads: int) -> Iterator[Tensor]:
    """Every way to read the logits as (batch, heads, queries, keys)."""
    queries, keys = logits.shape[-2:]
    lead = logits[..., 0, 0].numel()
    if lead % heads == 0:
        yield logits.reshape(-1, heads, queries, keys)
        if lead > heads:
            yield logits.reshape(heads, -1, queries, keys).transpose(0, 1)
    if logits.ndim == 4 and logits.shape[2] == heads:
        yield logits.transpose(1, 2)
    if logits.ndim == 5 and logits.shape[2] * logits.shape[3] == heads:
        yield logits.permute(0, 2, 3, 1, 4).flatten(1, 2)
    if logits.ndim == 3 and queries % heads == 0:
        yield logits.unflatten(1, (-1, heads)).transpose(1, 2)


def _batches(rows: Tensor, batch: int, tokens: int, start: int) -> Iterator[Tensor]:
    """Rows as (batch, tokens, width): batch first or tokens first, one for all, or a piece."""
    total = rows.shape[0]
    if total == batch * tokens:
        yield rows.view(batch, tokens, -1)
        if batch > 1:
            yield rows.view(tokens, batch, -1).transpose(0, 1)
    elif total == tokens:
        yield rows.expand(batch, -1, -1)
    elif batch == 1 and total >= start + tokens:
        yield rows[None, start : start + tokens]


@dataclass(frozen=True, eq=False)
class LinedUp:
    """Inputs and logits of one run, in one order of axes."""

    asks: Tensor
    answers: Tensor
    theirs: Tensor
    """(batch, heads, queries, keys)"""
    extra: int
    """Columns of the softmax that are no keys of this projection: a sink."""
    whole: Tensor | None = None
    """The logits with those columns."""


def lined_up(told: Told, pairing: Pairing, start: int = 0) -> Iterator[LinedUp]:
    """Every way in which inputs and logits of a run fit together."""
    heads, width = told.form.query.shape[0], told.form.query.shape[-1]
    asks, answers = (_rows(side, width) for side in (pairing.query, pairing.key))
    if asks is None or answers is None:
        return
    for view in _views(pairing.attention.logits.double(), heads):
        batch, _, queries, keys = view.shape
        for mine in _batches(asks, batch, queries, start):
            for many in dict.fromkeys((keys, answers.shape[0] // batch)):
                if not 1 < many <= keys:
                    continue
                for theirs in _batches(answers, batch, many, start):
                    more = keys - many
                    whole = view if more else None
                    yield LinedUp(mine, theirs, view[..., :many], more, whole)
                    if more:
                        yield LinedUp(mine, theirs, view[..., more:], more, whole)


def visible(theirs: Tensor, hidden: float = SEEN) -> Tensor:
    """Which keys a query sees; rows that see fewer than two say nothing."""
    seen = unmasked(theirs, hidden)
    return seen & (seen.sum(-1, keepdim=True) > 1)


def unmasked(theirs: Tensor, hidden: float = SEEN) -> Tensor:
    """Keys that no mask hides: a mask is infinite, or far below what the row's logits span."""
    top = theirs.nan_to_num(-math.inf, neginf=-math.inf).amax(-1, keepdim=True)
    below = top - theirs
    seen = theirs.isfinite() & (below < HUGE)
    if hidden >= HUGE:
        return seen
    span = below.masked_fill(~seen, math.nan).nanquantile(0.2, -1, keepdim=True)
    if theirs.ndim == 4:  # a mask of -100 (Swin's) lowers a key by about as much in every head
        least, most = below.amin(1, keepdim=True), below.amax(1, keepdim=True)
        seen = seen & ((least < 0.8 * MASK) | (most > 1.4 * MASK))
    return seen & ((below < hidden) | (below < 20 * span))


def centered(logits: Tensor, seen: Tensor) -> Tensor:
    """Each row less its mean over the keys it sees; zero elsewhere."""
    kept = logits.masked_fill(~seen, 0)
    mean = kept.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp_min(1)
    return (kept - mean).masked_fill(~seen, 0)


def counted(form: QKForm, theirs: Tensor) -> Tensor:
    """The logits to compare: a bias by distance is known of the query's own and earlier keys."""
    seen = visible(theirs)
    if form.distance_bias is not None:
        seen = seen & torch.ones(theirs.shape[-2:], dtype=torch.bool).tril()
        seen = seen & (seen.sum(-1, keepdim=True) > 1)
    return seen


def gap(ours: Tensor, theirs: Tensor, seen: Tensor) -> float:
    """The largest difference in standard deviations of the logits, up to a constant per row."""
    if not bool(seen.any()):
        return math.nan
    mine, truth = centered(ours, seen), centered(theirs, seen)
    spread = truth[seen].std()
    if not spread > 1e-9:
        return math.nan
    return ((mine - truth).abs().max() / spread).item()


@dataclass(frozen=True, eq=False)
class Fit:
    """How well a form's logits are those of one run."""

    gap: float
    lined: LinedUp | None
    """In the order of axes that fits; where none does, in the most usual one."""
    every: tuple[LinedUp, ...] = ()
    reason: str = ""
    """Why it cannot be told."""


FITS = 2e-3
"""No wrong order of axes, and no wrong form, comes this close by chance."""


def best_fit(told: Told, pairing: Pairing, start: int = 0) -> Fit:
    """The gap in the order of axes that fits, else in the first that is possible."""
    every = tuple(lined_up(told, pairing, start))
    if not every and pairing.attention.logits.shape[-1] == 1:
        return Fit(math.nan, None, (), "one key alone leaves nothing to choose")
    if not every:
        return Fit(math.inf, None, (), _no_way(pairing))
    gaps = [gap_of(told, told.form, lined) for lined in every]
    for value, lined in zip(gaps, every, strict=True):
        if value < FITS:
            return Fit(value, lined, every)
    known = [
        (value, lined) for value, lined in zip(gaps, every, strict=True) if not math.isnan(value)
    ]
    if not known:
        return Fit(math.nan, every[0], every, "the logits do not vary, or nothing is visible")
    return Fit(*known[0], every)


def gap_of(told: Told, form: QKForm, lined: LinedUp) -> float:
    """The gap of some form on inputs and logits that fit together."""
    places = form.relative.places if form.relative is not None else None
    if places is not None and max(lined.theirs.shape[-2:]) > places:
        return math.inf  # no table for so many
    ours = logits_of(told, form, lined.asks, lined.answers)
    return gap(ours, lined.theirs, counted(form, lined.theirs))


def turned_fit(told: Told, pairing: Pairing, start: int = 0) -> Fit | None:
    """The fit where queries and keys turn by the angles that the model itself used.

    It turned both by constants c and s with c² + s² = 1; tokens before them do not turn.
    """
    sides = [side for score in pairing.attention.scores for side in (score.left, score.right)]
    every = [turn.values for side in sides for turn in side.turns]
    constants = list({(one.shape, str(one.sum().item())): one for one in every}.values())
    for lined in lined_up(told, pairing, start):
        for cosine, sine in islice(_angles(constants), 24):
            for layout in ("half", "interleaved", "half of each half"):
                turning = partial(_turned, cosine=cosine, sine=sine, layout=layout, start=start)
                try:
                    ours = logits_of(told, told.form, lined.asks, lined.answers, turning)
                except (
                    RuntimeError,
                    IndexError,
                    ValueError,
                ):  # these do not belong to these tokens
                    continue
                value = gap(ours, lined.theirs, counted(told.form, lined.theirs))
                if value < FITS:
                    return Fit(value, lined)
    return None


def _angles(constants: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Cosines and sines, of the whole head or of its two halves, which turn by themselves."""
    whole = list(_circles(constants))
    yield from whole
    for one in whole[:8]:
        for two in whole[:8]:
            if one is not two and one[0].shape == two[0].shape:
                yield torch.cat((one[0], two[0]), -1), torch.cat((one[1], two[1]), -1)


def _circles(constants: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Cosines and sines among constants, in either order; or the parts of a complex one."""
    for first in constants:
        if first.is_complex():
            yield first.real.double(), first.imag.double()
            continue
        for second in constants:
            if second is not first and second.shape == first.shape and not second.is_complex():
                size = first.double().square() + second.double().square()
                if bool((size - size.flatten()[0]).abs().max() < 1e-4):
                    yield first.double(), second.double()


def _turned(vectors: Tensor, cosine: Tensor, sine: Tensor, layout: str, start: int) -> Tensor:
    """(batch, heads, tokens, head) turned by (…, tokens, head or half of it)."""
    tokens, head = vectors.shape[-2:]
    parts = []
    for values, fill in ((cosine, 1.0), (sine, 0.0)):
        values = _by_token(values, tokens, start)
        if values.shape[-1] * 2 <= head and layout != "interleaved":
            values = torch.cat((values, values), -1)
        elif values.shape[-1] * 2 <= head:
            values = values.repeat_interleave(2, -1)
        before, after = tokens - values.shape[-2], head - values.shape[-1]
        parts.append(torch.nn.functional.pad(values, (0, after, before, 0), value=fill))
    size = head - after
    turned, rest = vectors[..., :size], vectors[..., size:]
    if layout == "half":
        first, second = turned.chunk(2, -1)
        other = torch.cat((-second, first), -1)
    elif layout == "half of each half":
        one, two, three, four = turned.chunk(4, -1)
        other = torch.cat((-two, one, -four, three), -1)
    else:
        other = torch.stack((-turned[..., 1::2], turned[..., 0::2]), -1).flatten(-2)
    return torch.cat((turned * parts[0][..., :size] + other * parts[1][..., :size], rest), -1)


def _by_token(values: Tensor, tokens: int, start: int) -> Tensor:
    """As (batch or 1, 1, tokens, dimensions), whichever axis holds the heads."""
    values = values.reshape(*[one for one in values.shape if one != 1])
    if values.ndim == 3:
        return values[:, None] if values.shape[1] == tokens else values.transpose(0, 1)[:, None]
    if values.shape[0] > tokens:
        values = values[start : start + tokens]
    return values[None, None]


def _no_way(pairing: Pairing) -> str:
    shapes = [tuple(one.given.shape) for one in (pairing.query, pairing.key)]
    return (
        f"logits of {tuple(pairing.attention.logits.shape)} do not line up with queries of "
        f"{shapes[0]} and keys of {shapes[1]}"
    )


def controls(told: Told, others: list[Told], lined: LinedUp) -> dict[str, float]:
    """Forms that must not fit; each is wrong in one way that a user would suffer from."""
    form = told.form
    wrong: dict[str, QKForm] = {
        "temperature × 1.1": form_changed(form, temperature=form.temperature * 1.1)
    }
    for other in others:
        if other.form.query.shape == form.query.shape and not torch.equal(
            other.form.query, form.query
        ):
            wrong["another layer"] = other.form
            break
    if form.query.shape[0] > 1:
        order = torch.arange(form.query.shape[0]).roll(1)
        wrong["permuted heads"] = form_changed(
            form,
            query=form.query[order],
            query_bias=None if form.query_bias is None else form.query_bias[order],
        )
    if form.rotary is not None:
        wrong["no rotation"] = form_changed(form, rotary=None)
    if form.distance_bias is not None:
        wrong["no bias by distance"] = form_changed(form, distance_bias=None)
    if form.relative is not None:
        wrong["no terms by relative position"] = form_changed(form, relative=None)
    if form.query_bias is not None:
        wrong["no query bias"] = form_changed(form, query_bias=None)
    return {name: gap_of(told, one, lined) for name, one in wrong.items()}


def mask_kind(theirs: Tensor) -> str:
    """What a mask hides: nothing, what comes later, more than that."""
    seen = unmasked(theirs).any(1, keepdim=True)  # a mask is the same for all heads
    if bool(seen.all()):
        return "none"
    queries, keys = theirs.shape[-2:]
    causal = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return "causal" if torch.equal(seen, causal.expand_as(seen)) else "other"
