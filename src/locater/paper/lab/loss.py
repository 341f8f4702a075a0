"""The loss of a linear output layer, without the matrix of tokens × vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from locater.errors import ConfigError, InputError


def fast_dtype(device: torch.device | str = "cpu") -> torch.dtype | None:
    """bfloat16 where the device multiplies in it, else None: other CPUs emulate it, slowly."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else None
    checks = [getattr(torch.cpu, f"_is_{name}_supported", None) for name in _BFLOAT16]
    is_fast = device.type == "cpu" and any(check() for check in checks if check is not None)
    return torch.bfloat16 if is_fast else None


_BFLOAT16 = ("avx512_bf16", "amx_tile")


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

    At most `chunk` × vocabulary logits exist at a time, in one buffer that every chunk uses again.
    With `dtype=torch.bfloat16` the factors of the three matrix products have that precision (see
    `fast_dtype`); sums and probabilities are float32 or better always.
    """
    if chunk < 1:
        raise ConfigError(f"chunk must be one or more, got {chunk}.", hint="256 suits a CPU.")
    keep = targets != ignore_index
    if not bool(keep.all()):
        hidden, targets = hidden[keep], targets[keep]
    if targets.numel() == 0:
        raise InputError("no token has a target.", hint="every target is ignore_index.")
    least, most = (int(one) for one in torch.aminmax(targets))
    if least < 0 or most >= weight.shape[0]:
        raise InputError(
            f"targets from {least} to {most} do not fit a vocabulary of {weight.shape[0]}.",
            hint="the text was numbered with another vocabulary than the model's.",
        )
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(hidden, weight, targets, chunk, dtype)  # type: ignore[no-untyped-call]
    return _Work(hidden, weight, targets, chunk, dtype).run()


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
        work = _Work(hidden, weight, targets, chunk, dtype)
        hidden_grad = torch.empty_like(work.hidden, dtype=work.exact)
        weight_grad = torch.zeros_like(work.weight, dtype=work.exact)
        loss = work.run(hidden_grad, weight_grad)
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.dtypes = hidden.dtype, weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = [
            (one * grad).to(dtype) for one, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return grads[0], grads[1], None, None, None


class _Work:
    """One pass over the tokens; logits lie as vocabulary × chunk, which multiplies fastest."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk: int,
        dtype: torch.dtype | None,
    ) -> None:
        self.hidden, self.weight, self.targets = hidden.detach(), weight.detach(), targets
        self.chunk = min(chunk, len(targets))
        self.kind = dtype or hidden.dtype
        self.exact = torch.promote_types(
            torch.promote_types(hidden.dtype, weight.dtype), torch.float32
        )
        self.factor = self.weight.to(self.kind)
        room = weight.shape[0] * self.chunk
        self.scores = hidden.new_empty(room, dtype=self.exact)
        self.rounded = self.scores
        if self.kind != self.exact:
            self.rounded = hidden.new_empty(room, dtype=self.kind)

    @torch.no_grad()
    def run(self, hidden_grad: Tensor | None = None, weight_grad: Tensor | None = None) -> Tensor:
        """The mean loss; gradients are added to what is given."""
        tokens = len(self.targets)
        total = self.hidden.new_zeros((), dtype=self.exact)
        with torch.autocast(self.hidden.device.type, enabled=False):
            for start in range(0, tokens, self.chunk):
                part = slice(start, min(start + self.chunk, tokens))
                loss, share, norm = self._exponentials(part)
                total += loss
                if hidden_grad is not None and weight_grad is not None:
                    torch.div(share.mT @ self.factor, norm, out=hidden_grad[part])
                    rows = (self.hidden[part] / norm).to(self.kind)
                    if self.kind == self.exact:
                        weight_grad.addmm_(share, rows)
                    else:
                        weight_grad += share @ rows
            if hidden_grad is not None and weight_grad is not None:
                hidden_grad -= self.weight[self.targets]
                weight_grad.index_add_(0, self.targets, self.hidden.to(self.exact), alpha=-1)
                hidden_grad /= tokens
                weight_grad /= tokens
        return total / tokens

    def _exponentials(self, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        """A chunk's summed loss, its exp(logit − largest) and the sums of those, by token."""
        rows, goal = self.hidden[part].to(self.kind), self.targets[part]
        shape = self.weight.shape[0], len(goal)
        scores = self.scores[: shape[0] * shape[1]].view(shape)
        rounded = self.rounded[: shape[0] * shape[1]].view(shape)
        torch.mm(self.factor, rows.mT, out=rounded)
        if self.kind != self.exact:
            scores.copy_(rounded)
        scores -= scores.amax(dim=0)
        picked = scores.gather(0, goal[None]).sum()
        norm = scores.exp_().sum(dim=0)
        if self.kind != self.exact:
            rounded.copy_(scores)
        return norm.log().sum() - picked, rounded, norm[:, None]
