"""The output layer's loss as it was in version 0.1, to measure against: float32 probabilities."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 256


class FormerLoss(torch.autograd.Function):
    """Chunks of vocabulary × tokens: bfloat16 products, exponentials and sums in float32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        kind, tokens = torch.bfloat16, len(targets)
        factor, words = weight.to(kind), weight.shape[0]
        scores, rounded = (torch.empty(words * CHUNK, dtype=d) for d in (torch.float32, kind))
        hidden_grad = torch.empty_like(hidden, dtype=torch.float32)
        weight_grad = torch.zeros_like(weight)
        total = hidden.new_zeros((), dtype=torch.float32)
        with torch.autocast("cpu", enabled=False):
            for start in range(0, tokens, CHUNK):
                part = slice(start, min(start + CHUNK, tokens))
                goal = targets[part]
                shape = words, len(goal)
                logits, short = (
                    room[: words * len(goal)].view(shape) for room in (scores, rounded)
                )
                torch.mm(factor, hidden[part].to(kind).mT, out=short)
                logits.copy_(short)
                logits -= logits.amax(dim=0)
                picked = logits.gather(0, goal[None]).sum()
                norm = logits.exp_().sum(dim=0)
                short.copy_(logits)
                total += norm.log().sum() - picked
                torch.div(short.mT @ factor, norm[:, None], out=hidden_grad[part])
                weight_grad += short @ (hidden[part] / norm[:, None]).to(kind)
            hidden_grad -= weight[targets]
            weight_grad.index_add_(0, targets, hidden.float(), alpha=-1)
        ctx.save_for_backward(hidden_grad / tokens, weight_grad / tokens)
        return total / tokens

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * grad, weight_grad * grad, None
