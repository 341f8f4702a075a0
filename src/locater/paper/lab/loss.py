"""The loss of a linear output layer, without the matrix of tokens × vocabulary."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from locater.errors import ConfigError, InputError


@cache
def is_native(dtype: torch.dtype, device: str) -> bool:
    """Whether a kind of device multiplies in a short dtype.

    A CPU without instructions for it emulates it in every product, several times slower than the
    same product in float32.
    """
    if device != "cpu":
        return True
    needed = ("avx512_bf16", "amx_tile") if dtype == torch.bfloat16 else ("amx_fp16",)
    checks = [getattr(torch.cpu, f"_is_{name}_supported", lambda: False) for name in needed]
    is_arm = torch.backends.cpu.get_cpu_capability() in ("SVE256", "SVE128")
    return is_arm or any(check() for check in checks)


def linear_cross_entropy(
    hidden: Float[Tensor, "tokens model"],
    weight: Float[Tensor, "vocabulary model"],
    targets: Int64[Tensor, " tokens"],
    *,
    chunk: int | None = None,
    dtype: torch.dtype | None = None,
    ignore_index: int = -100,
) -> Float[Tensor, ""]:
    """Mean of −log softmax(W h)[target] in nats; gradients are computed on the way, by chunks.

    At most `chunk` × vocabulary logits exist at a time, in one buffer that every chunk uses again.
    With a `dtype` below the tensors' own, such as bfloat16, logits and
    probabilities are kept in it, and of the loss only log Σ exp is read from such logits.
    """
    if chunk is not None and chunk < 1:
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
    work = _RoundedWork if dtype in (torch.bfloat16, torch.float16) else _Work
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(work, hidden, weight, targets, chunk, dtype)  # type: ignore[no-untyped-call]
    return work(hidden, weight, targets, chunk, dtype).run()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        kind: type[_Work],
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk: int | None,
        dtype: torch.dtype | None,
    ) -> Tensor:
        work = kind(hidden, weight, targets, chunk, dtype)
        hidden_grad = torch.empty_like(work.hidden, dtype=work.exact)
        weight_grad = torch.empty_like(work.weight, dtype=work.exact)
        loss = work.run(hidden_grad, weight_grad)
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.dtypes = hidden.dtype, weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        is_one = grad.device.type == "cpu" and grad.item() == 1  # the loss itself: the usual case
        grads = [
            (one if is_one else one * grad).to(dtype)
            for one, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return None, grads[0], grads[1], None, None, None


class _Work:
    """One pass over the tokens; logits lie as vocabulary × chunk, which multiplies fastest."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        chunk: int | None,
        dtype: torch.dtype | None,
    ) -> None:
        self.hidden, self.weight, self.targets = hidden.detach(), weight.detach(), targets
        self.chunk = min(chunk or self.best_chunk, len(targets))
        self.exact = torch.promote_types(
            torch.promote_types(hidden.dtype, weight.dtype), torch.float32
        )
        self.kind = dtype or self.exact
        self.factor = self.weight.to(self.kind)
        self.buffer = hidden.new_empty(weight.shape[0] * self.chunk, dtype=self.kind)

    @property
    def best_chunk(self) -> int:
        """How many tokens at a time are fastest."""
        return 256

    @torch.no_grad()
    def run(self, hidden_grad: Tensor | None = None, weight_grad: Tensor | None = None) -> Tensor:
        """The mean loss; gradients are written to what is given."""
        tokens = len(self.targets)
        total = self.hidden.new_zeros((), dtype=self.exact)
        with torch.autocast(self.hidden.device.type, enabled=False):
            for start in range(0, tokens, self.chunk):
                total += self.add(
                    slice(start, min(start + self.chunk, tokens)), hidden_grad, weight_grad
                )
            if hidden_grad is not None and weight_grad is not None:
                hidden_grad -= self.weight[self.targets]
                weight_grad.index_add_(0, self.targets, self.hidden.to(self.exact), alpha=-1)
                hidden_grad /= tokens
                weight_grad /= tokens
        return total / tokens

    def add(self, part: slice, hidden_grad: Tensor | None, weight_grad: Tensor | None) -> Tensor:
        """A chunk's summed loss; what its probabilities give to the gradients is added there."""
        rows, goal = self.hidden[part].to(self.kind), self.targets[part]
        scores = self.buffer[: self.weight.shape[0] * len(goal)].view(-1, len(goal))
        torch.mm(self.factor, rows.mT, out=scores)
        scores -= scores.amax(dim=0)
        picked = scores.gather(0, goal[None]).sum()
        norm = scores.exp_().sum(dim=0)
        if hidden_grad is not None and weight_grad is not None:
            torch.div(scores.mT @ self.factor, norm[:, None], out=hidden_grad[part])
            weight_grad.addmm_(scores, rows / norm[:, None], beta=float(part.start > 0))
        return norm.log().sum() - picked


class _RoundedWork(_Work):
    """Logits as chunk × vocabulary in a short dtype, turned into probabilities where they lie.

    Where the device has no products of that dtype, factors and results are rounded to it and
    multiplied in float32: the same arithmetic but for the order of sums.
    """

    slab = 2048
    """Rows of the weight's gradient that are added up at a time: they stay in the cache."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.short, is_fast = self.kind, is_native(self.kind, self.hidden.device.type)
        self.kind = self.short if is_fast else torch.float32
        self.factor, self.buffer = self.factor.to(self.kind), self.buffer.to(self.kind)
        self.product = torch.empty_like(self.factor)

    @property
    def best_chunk(self) -> int:
        """Fewer tokens where words are many, so that a chunk's logits stay near 16 MB."""
        return 512 if len(self.weight) <= 2**14 else 256

    def _round(self, values: Tensor) -> Tensor:
        return values if values.dtype == self.short else values.copy_(values.to(self.short))

    def add(self, part: slice, hidden_grad: Tensor | None, weight_grad: Tensor | None) -> Tensor:
        """A chunk's summed loss; the logit of the target is taken in full precision."""
        rows, goal = self.hidden[part].to(self.short).to(self.kind), self.targets[part]
        scores = self.buffer[: self.weight.shape[0] * len(goal)].view(len(goal), -1)
        self._round(torch.mm(rows, self.factor.mT, out=scores))
        rounded = scores.gather(1, goal[:, None])[:, 0].to(self.exact)
        self._round(torch.softmax(scores, -1, out=scores))
        share = scores.gather(1, goal[:, None])[:, 0].to(self.exact)
        exact = (rows.to(self.exact) * self.factor[goal].to(self.exact)).sum(-1)
        losses = rounded - share.log() - exact
        lost = share == 0  # the probability is below the smallest number there is
        if bool(lost.any()):
            logits = self.hidden[part][lost].to(self.exact) @ self.weight.to(self.exact).mT
            losses[lost] = logits.logsumexp(-1) - logits.gather(1, goal[lost, None])[:, 0]
        if hidden_grad is not None and weight_grad is not None:
            hidden_grad[part] = self._round(scores @ self.factor)
            self._round(torch.mm(scores.mT, rows, out=self.product))
            if part.start:
                slabs = weight_grad.split(self.slab), self.product.split(self.slab)
                for total, one in zip(*slabs, strict=True):
                    total += one
            else:
                weight_grad.copy_(self.product)
        return losses.sum()
