"""What attentions of a running model read and answer, block after block of a text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.errors import InputError, LocaterError
from locater.models.live import LiveAttention, find_attention
from locater.probe.rows import Logits
from locater.probe.watch import Place, Recorder

LARGEST_GAP = 0.05
"""Standard deviations by which a form's logits may differ from the model's own."""


@dataclass(eq=False)
class AttentionSamples:
    """One attention over all blocks; inputs are kept of the first blocks only."""

    attention: LiveAttention
    inputs: Float[Tensor, "kept tokens model"]
    logits: Float[Tensor, "blocks heads keys"]
    """Of the last query of every block, as the model computed them; −∞ for keys it does not see."""

    @property
    def sees_all(self) -> bool:
        """Whether the last queries see every key: no window, no padding."""
        return bool((self.logits > -torch.inf).all())

    def ending_at(self, query: int) -> AttentionSamples:
        """Another query's samples as if it were the last.

        A causal one sees nothing behind it, which is cut off; of others the order of keys changes,
        which means nothing to a form without positions of its own.
        """
        tokens = self.inputs.shape[1]
        order = torch.arange(tokens)
        if bool((self.logits[..., query + 1 : tokens] == -torch.inf).all()):
            order = order[: query + 1]
        else:
            order = torch.cat((order[:query], order[query + 1 :], order[query : query + 1]))
        return AttentionSamples(self.attention, self.inputs[:, order], self.logits[..., order])


class _BlockRecorder(Recorder):
    """One query's logits of all blocks, and the inputs of the first `keep`.

    Filled in place: thousands of pieces between a model's own tensors would tear memory up.
    """

    def __init__(
        self, model: nn.Module, attentions: list[LiveAttention], blocks: int, keep: int, query: int
    ) -> None:
        super().__init__(model, attentions)
        self.blocks, self.keep, self.query = blocks, keep, query
        self.done = 0
        """The block that the pass begins at."""
        self.logits: dict[str, Tensor] = {}
        self.inputs: dict[str, Tensor] = {}
        self._ran: set[tuple[str, int]] = set()

    def attention_called(self, place: Place, logits: Logits) -> Tensor | None:
        """The query's logits; none of an attention that was not asked for."""
        if place.layout is None:
            return None
        place_of = torch.tensor([self.query % logits.shape[2]], device=logits.device)
        return logits.rows(slice(None), place_of)[0][:, :, 0].cpu()

    def attention_ends(self, place: Place, tokens: Tensor, answers: list[Any]) -> None:
        """Store one batch of one attention."""
        if place.layout is None:
            return
        name, done, rows = place.name, self.done, torch.cat(answers)
        if name not in self.logits:
            self.logits[name] = torch.empty(self.blocks, *rows.shape[1:], dtype=rows.dtype)
            self.inputs[name] = torch.empty(self.keep, *tokens.shape[1:])
        logits, inputs = self.logits[name], self.inputs[name]
        if rows.shape[1:] != logits.shape[1:] or len(rows) != len(tokens):
            raise InputError(
                f"logits of {tuple(rows.shape)} follow logits of {tuple(logits.shape)}.",
                hint="every block must run through each attention once, with all its tokens.",
            )
        if (name, done) in self._ran:
            raise InputError(
                "an attention runs several times in a pass (layers that share their weights).",
                hint="theory is held against each layer's own tokens; use Probe to measure.",
            )
        self._ran.add((name, done))
        logits[done : done + len(rows)] = rows
        inputs[done : done + len(tokens)] = tokens[: max(self.keep - done, 0)].float().cpu()


def readable(model: nn.Module, layers: str | None = None) -> list[LiveAttention]:
    """The self-attentions whose tokens can be sampled."""
    found = find_attention(model, layers=layers)
    return [one for one in found if one.layout.kind == "self" and one.module is not None]


def collect(
    model: nn.Module,
    attentions: list[LiveAttention],
    blocks: Tensor,
    *,
    keep: int,
    batch: int = 16,
    query: int = -1,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[AttentionSamples]:
    """Run the model on blocks (blocks × tokens, or tokens' vectors) and record its attentions.

    Inputs of the first `keep` blocks are held, `keep · tokens · model` floats per attention; of all
    blocks the logits are, those of one `query`.  Model outputs are not used: give the part without
    a head.
    """
    recorder = _BlockRecorder(model, attentions, len(blocks), keep, query)
    for done in recorder.run(blocks, batch=batch):
        recorder.done = done
        report(done, len(blocks))
    for place in recorder.places.values():
        if place.name not in recorder.logits:
            raise LocaterError(
                f"{place.name} did nothing that could be seen.",
                hint="of transformers load attn_implementation='sdpa' or 'eager'.",
            )
    return [
        AttentionSamples(one, recorder.inputs[name], recorder.logits[name])
        for one in attentions
        if (name := one.layout.name) in recorder.logits
    ]


_MEMORY = 1_600_000_000


def sampled(
    model: nn.Module,
    attentions: list[LiveAttention],
    blocks: Tensor,
    *,
    keep: int,
    memory: int | None = None,
    **settings: Any,
) -> Iterator[AttentionSamples]:
    """`collect`, with as many attentions in one pass of the model as fit in `memory` bytes."""
    widest = max(one.layout.model for one in attentions)
    some = max(1, (memory or _MEMORY) // (4 * keep * blocks.shape[1] * widest))
    for start in range(0, len(attentions), some):
        few = attentions[start : start + some]
        for sample in collect(model, few, blocks, keep=keep, **settings):
            yield sample
            sample.inputs = sample.inputs[:0]  # free it: layers add up to gigabytes


def logit_gap(
    ours: Float[Tensor, "blocks heads tokens"], own: Float[Tensor, "blocks heads keys"]
) -> float:
    """Largest difference between a form's logits and the model's, relative to their spread.

    Up to what a row has in common, which the softmax does not see; over the keys that are seen.  A
    learned sink stands behind them.
    """
    own = own[..., : ours.shape[-1]]
    seen = own > -torch.inf
    count = seen.sum(-1, keepdim=True).clamp_min(1)
    first, second = (
        ((part := side.masked_fill(~seen, 0)) - part.sum(-1, keepdim=True) / count) * seen
        for side in (ours, own)
    )
    spread = (second.square().sum() / seen.sum().clamp_min(1)).sqrt()
    return ((first - second).abs().amax() / spread.clamp_min(1e-12)).item()
