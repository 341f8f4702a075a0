"""What attentions are given and the logits of their last query, block by block of a text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.errors import InputError, LocaterError
from locater.models.live import LiveAttention
from locater.models.names import plain_name
from locater.probe.logit_rows import Logits
from locater.probe.watch import Place, Watch


@dataclass(eq=False)
class AttentionSamples:
    """One attention over all blocks; inputs are kept of the first blocks only."""

    attention: LiveAttention
    inputs: Float[Tensor, "kept tokens model"]
    logits: Float[Tensor, "blocks heads keys"]
    """Of the last query of every block, as the model computed them."""


@dataclass(eq=False)
class _Seen:
    """Filled in place: thousands of pieces between a model's own tensors would tear memory up."""

    inputs: Tensor | None = None
    logits: Tensor | None = None
    begun: set[int] = field(default_factory=set)

    def put(self, done: int, blocks: int, keep: int, tokens: Tensor, rows: Tensor) -> None:
        """Store a batch that begins at block `done`."""
        if self.logits is None or self.inputs is None:
            self.logits = torch.empty(blocks, *rows.shape[1:], dtype=rows.dtype)
            self.inputs = torch.empty(keep, *tokens.shape[1:])
        if rows.shape[1:] != self.logits.shape[1:] or len(rows) != len(tokens):
            raise InputError(
                f"logits of {tuple(rows.shape)} follow logits of {tuple(self.logits.shape)}.",
                hint="every block must run through each attention once, with all its tokens.",
            )
        if done in self.begun:
            raise InputError(
                "an attention runs several times in a pass (layers that share their weights).",
                hint="theory is held against each layer's own tokens; use Probe to measure.",
            )
        self.begun.add(done)
        self.logits[done : done + len(rows)] = rows
        self.inputs[done : done + len(tokens)] = tokens[: max(keep - done, 0)]


def collect(
    model: nn.Module,
    attentions: list[LiveAttention],
    blocks: Tensor,
    *,
    keep: int,
    batch: int = 16,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[AttentionSamples]:
    """Run the model on blocks (blocks × tokens, or tokens' vectors) and watch its attentions.

    Inputs of the first `keep` blocks are held, `keep · tokens · model` floats per attention; of all
    blocks the logits are.  Model outputs are not used: give the part without a head.
    """
    places = {one.module: Place.of(one.layout) for one in attentions if one.module is not None}
    names = {module: plain_name(path) for path, module in model.named_modules()}
    seen = {place.name: _Seen() for place in places.values()}
    done = 0

    def heard(place: Place, logits: Logits) -> Tensor:
        last = torch.tensor([logits.shape[2] - 1], device=logits.device)
        rows, visible = logits.rows(slice(None), last)
        if visible is not None and not bool(visible.expand(rows.shape).all()):
            raise InputError(
                f"the last query of {place.name} does not see every key.",
                hint="a sliding window or padding hides some; use fewer tokens.",
            )
        return rows[:, :, 0].cpu()

    def left(place: Place, tokens: Tensor, rows: list[Any]) -> None:
        if place.name not in seen:
            return
        seen[place.name].put(done, len(blocks), keep, tokens.float().cpu(), torch.cat(rows))

    was_training = model.training
    model.eval()
    try:
        for part in blocks.split(batch):
            watch = Watch(places, names, heard, left)
            with torch.inference_mode():
                watch.start(nn.Identity())  # the model's own hooks have yet to run
                try:
                    model(part)
                except (RuntimeError, IndexError, ValueError, TypeError) as error:
                    reason = str(error).strip().splitlines() or [type(error).__name__]
                    raise LocaterError(
                        f"the model fails on blocks of {part.shape[1]} tokens: {reason[0][:200]}",
                        hint="use fewer tokens than the model has positions, and a model that "
                        "takes token ids alone.",
                    ) from error
                finally:
                    watch.stop()
            done += len(part)
            report(done, len(blocks))
    finally:
        model.train(was_training)
    missing = [name for name, one in seen.items() if one.logits is None]
    if missing:
        raise LocaterError(
            f"{missing[0]} did nothing that could be seen.",
            hint="of transformers load attn_implementation='sdpa' or 'eager'.",
        )
    return [
        AttentionSamples(one, mine.inputs, mine.logits)
        for one in attentions
        if (mine := seen.get(one.layout.name)) and mine.inputs is not None
        if mine.logits is not None
    ]
