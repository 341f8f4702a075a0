"""The softmax, its piecewise-linear form (Section 2) and the entropy of attention."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from locater.errors import InputError


def linearized_softmax(logits: Float[Tensor, "*batch tokens"]) -> Float[Tensor, "*batch tokens"]:
    """⟨γⁱ, ω⟩ + γ₀ⁱ = (ω_i − mean ω)/T + 1/T, the Taylor expansion of the softmax at the origin.

    Paper: Section 2.

    >>> linearized_softmax(torch.tensor([1.0, 0.0, -1.0, 0.0]))
    tensor([0.5000, 0.2500, 0.0000, 0.2500])
    """
    tokens = logits.shape[-1]
    if tokens < 2:
        raise InputError(
            f"a softmax over {tokens} token has nothing to choose.", hint="give at least 2 tokens."
        )
    return (logits - logits.mean(-1, keepdim=True) + 1) / tokens


def piecewise_softmax(logits: Float[Tensor, "*batch tokens"]) -> Float[Tensor, "*batch tokens"]:
    """The linearized softmax, cut off at 0 and 1; its entries need not add up to 1.

    Paper: Section 2, Fig. 1.

    >>> piecewise_softmax(torch.tensor([4.0, 0.0]))
    tensor([1., 0.])
    """
    return linearized_softmax(logits).clamp(0, 1)


def propagates(logits: Float[Tensor, "*batch tokens"]) -> Bool[Tensor, "*batch tokens"]:
    """Whether a token's own gate is open: ⟨γⁱ, ω⟩ + γ₀ⁱ in [0, 1].

    Paper: Definition 1; ρ_i is the probability of this event.

    >>> propagates(torch.tensor([4.0, 2.0, 0.0, -2.0]))
    tensor([ True,  True,  True, False])
    """
    score = linearized_softmax(logits)
    return (score >= 0) & (score <= 1)


def attention_entropy(
    probabilities: Float[Tensor, "*batch tokens"],
) -> Float[Tensor, "*batch"]:
    """Shannon entropy −Σ p ln p of attention rows, in nats; 0 ln 0 counts as 0.

    Paper: Section 5 (after Zhai et al. 2023).

    >>> attention_entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    tensor([0.6931, 0.0000])
    """
    return torch.special.entr(probabilities).sum(-1)
