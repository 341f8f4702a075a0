"""The query-key gradient of the one-layer model with the piecewise softmax (Eqs. 3, 19-21)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from locater.core.theory import linearized_softmax
from locater.errors import InputError


@dataclass(frozen=True, eq=False)
class QKGradient:
    """∇J with respect to W_QK and its three parts, averaged over the batch.

    >>> part = torch.eye(2)
    >>> QKGradient(quadratic=part, saturated=part, residual=part).total
    tensor([[3., 0.],
            [0., 3.]])
    """

    quadratic: Float[Tensor, "model model"]
    """Eq. 19, the only part that Eq. 4 keeps."""
    saturated: Float[Tensor, "model model"]
    """Eq. 20: of the same order in T as Eq. 19 (erratum E26)."""
    residual: Float[Tensor, "model model"]
    """Eq. 21: one order in T lower."""

    @property
    def total(self) -> Float[Tensor, "model model"]:
        """Eq. 3."""
        return self.quadratic + self.saturated + self.residual


def one_layer_output(
    tokens: Float[Tensor, "*batch tokens model"],
    *,
    qk: Float[Tensor, "model model"],
    value: Float[Tensor, "model model"],
    feedforward: Float[Tensor, "model model"],
    temperature: float,
) -> Float[Tensor, "*batch model"]:
    """F(X)_T = W_F (W_V X S̃(ω) + x_T) with ω = Xᵀ W_QK x_T/λ: what the gradient belongs to.

    Paper: Section 3.
    """
    last = tokens[..., -1, :]
    logits = (tokens @ qk @ last[..., None])[..., 0] / temperature
    gate = linearized_softmax(logits).clamp(0, 1)
    mixed = (gate[..., None, :] @ tokens)[..., 0, :]
    return (mixed @ value.mT + last) @ feedforward.mT


def qk_gradient(
    tokens: Float[Tensor, "batch tokens model"],
    target: Float[Tensor, "batch model"],
    *,
    qk: Float[Tensor, "model model"],
    value: Float[Tensor, "model model"],
    feedforward: Float[Tensor, "model model"],
    temperature: float,
) -> QKGradient:
    """∇J of J = ½ E‖y − F(X)_T‖² with respect to W_QK, in closed form.

    Paper: Eq. 3 and its parts Eqs. 19-21.  Erratum E25: P is missing in two lines of Appendix B.1.

    >>> generator = torch.Generator().manual_seed(0)
    >>> x, y = torch.randn(5, 4, 2, generator=generator), torch.randn(5, 2, generator=generator)
    >>> identity = torch.eye(2)
    >>> gradient = qk_gradient(
    ...     x, y, qk=identity, value=identity, feedforward=identity, temperature=1.0
    ... )
    >>> gradient.total.shape
    torch.Size([2, 2])
    """
    model = tokens.shape[-1]
    for name, matrix in (("qk", qk), ("value", value), ("feedforward", feedforward)):
        if matrix.shape != (model, model):
            raise InputError(
                f"{name} is {tuple(matrix.shape)}, the tokens ask for {(model, model)}.",
                hint="tokens are (batch, tokens, model); every weight is model x model.",
            )
    if target.shape != tokens.shape[:-2] + tokens.shape[-1:]:
        raise InputError(
            f"target is {tuple(target.shape)} for tokens {tuple(tokens.shape)}.",
            hint="give one target vector per sequence.",
        )
    count = tokens.shape[-2]
    last = tokens[:, -1]
    logits = torch.einsum("nim,mk,nk->ni", tokens, qk, last) / temperature
    score = linearized_softmax(logits)
    is_open = ((score >= 0) & (score <= 1)).to(tokens)
    base = is_open / count + (score > 1)  # γ̃₀
    # X Γ v = Σ_i γ̃ⁱ-weighted tokens = Σ_i open_i v_i (x_i − mean x)/T
    centered = (tokens - tokens.mean(1, keepdim=True)) / count
    values = tokens @ (feedforward @ value).mT  # W_F W_V x_i
    linear = score - 1 / count  # ⟨γⁱ, ω⟩
    parts = (
        torch.einsum("ni,nim->nm", linear * is_open, values),
        torch.einsum("ni,nim->nm", base, values),
        last @ feedforward.mT - target,
    )

    def term(error: Float[Tensor, "batch model"]) -> Float[Tensor, "model model"]:
        pull = torch.einsum("nim,nm->ni", values, error) * is_open
        gathered = torch.einsum("ni,nim->nm", pull, centered)
        return gathered.mT @ last / (temperature * len(tokens))

    return QKGradient(*(term(part) for part in parts))
