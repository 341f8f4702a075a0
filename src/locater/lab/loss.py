"""The loss of a linear output layer, without the matrix of tokens × vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from locater.errors import InputError


def linear_cross_entropy(
    hidden: Float[Tensor, "tokens model"],
    weight: Float[Tensor, "vocabulary model"],
    targets: Int64[Tensor, " tokens"],
    *,
    chunk: int = 256,
    dtype: torch.dtype | None = None,
    ignore_index: int = -100,
) -> Float[Tensor, ""]:
    """Mean of −log softmax(W h)[target] in nats; gradients are computed on the way, by chunks.

    At most `chunk` × vocabulary logits exist at a time.  With `dtype=torch.bfloat16` the three
    matrix products take their factors in that precision; sums and probabilities stay in float32.
    """
    keep = targets != ignore_index
    if not bool(keep.all()):
        hidden, targets = hidden[keep], targets[keep]
    if targets.numel() == 0:
        raise InputError(
            "no token has a target.", hint="every target is ignore_index; check the masks."
        )
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(hidden, weight, targets, chunk, dtype)  # type: ignore[no-untyped-call]
    return _loss(hidden, weight, targets, chunk, dtype)[0]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk: int,
        dtype: torch.dtype | None,
    ) -> Tensor:
        loss, hidden_grad, weight_grad = _loss(hidden, weight, targets, chunk, dtype, grads=True)
        ctx.save_for_backward(hidden_grad, weight_grad)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * grad, weight_grad * grad, None, None, None


def _loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
    dtype: torch.dtype | None,
    *,
    grads: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, kind = hidden.shape[0], dtype or hidden.dtype
    exact = torch.promote_types(hidden.dtype, torch.float32)
    factor = weight.detach().to(kind)
    hidden = hidden.detach()
    total = hidden.new_zeros((), dtype=exact)
    hidden_grad = torch.empty_like(hidden) if grads else hidden
    weight_grad = torch.zeros_like(weight, dtype=exact) if grads else weight
    for start in range(0, tokens, chunk):
        part = slice(start, start + chunk)
        rows, goal = hidden[part], targets[part, None]
        logits = (rows.to(kind) @ factor.mT).to(exact)
        top = logits.max(dim=1, keepdim=True).values
        logits -= top
        total -= logits.gather(1, goal).sum()
        share = logits.exp_()
        norm = share.sum(dim=1, keepdim=True)
        total += norm.log().sum()
        if grads:
            share = share.to(kind)
            hidden_grad[part] = (share @ factor).to(exact) / norm - weight[goal[:, 0]]
            weight_grad += share.mT @ (rows / norm).to(kind)
            weight_grad.index_add_(0, goal[:, 0], rows.to(exact), alpha=-1)
    if grads:
        hidden_grad /= tokens
        weight_grad /= tokens
    return (total / tokens).to(hidden.dtype), hidden_grad, weight_grad.to(weight.dtype)
