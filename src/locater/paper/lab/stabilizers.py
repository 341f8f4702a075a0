"""Rivals of LocAteR: what others do to keep attention from collapsing, under the same loop."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, distributed, nn
from torch.nn.utils import parametrize

from locater.errors import ConfigError, InputError, unknown
from locater.models.live import find_attention
from locater.paper.lab.model import Attention
from locater.probe.rows import Logits, largest_logits
from locater.probe.watch import Place, Recorder

Stabilizer = Literal["none", "sigma-reparam", "qk-norm", "qk-clip", "soft-cap", "qk-weight-decay"]
STABILIZERS: tuple[Stabilizer, ...] = get_args(Stabilizer)


class Stabilized:
    """What a stabilizer does after each step of the optimizer; nothing, for some."""

    def after_step(self) -> None:
        """Call once after `optimizer.step()`."""


def apply_stabilizer(
    model: nn.Module,
    name: Stabilizer,
    *,
    max_logit: float = 100.0,
    decay: float = 0.1,
    learning_rate: float | None = None,
) -> Stabilized:
    """Change a lab model in place, before its optimizer is built; call `after_step` in the loop.

    - `sigma-reparam`: every linear layer but the output is γ W / σ(W) (Zhai et al. 2023).
    - `qk-norm`: LayerNorm on every head's queries and keys (Henry et al. 2020, Dehghani et al.
      2023).
    - `qk-clip`: a head whose largest logit passed `max_logit` in a step has its queries and keys
      scaled back by as much (Kimi K2, 2025).
    - `soft-cap`: logits are bounded by `max_logit` · tanh(logit / `max_logit`) (Gemma 2, 2024).
    - `qk-weight-decay`: queries and keys alone decay by `learning_rate` · `decay` a step.
    """
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    if name not in STABILIZERS:
        raise unknown("stabilizer", name, STABILIZERS)
    if name != "none" and not attentions:
        raise InputError(
            f"{type(model).__name__} has no attention of the laboratory's.",
            hint="stabilizers work on lab.model.Transformer.",
        )
    if name == "sigma-reparam":
        return _SigmaReparam(model)
    if name == "qk-norm":
        for attention in attentions:
            _normalize(attention)
    if name in ("qk-clip", "soft-cap") and max_logit <= 0:
        raise ConfigError(f"max_logit must be positive, got {max_logit}.", hint="100 is usual.")
    if name == "soft-cap":
        for attention in attentions:
            attention.soft_cap = max_logit
    if name == "qk-clip":
        return _Clip(model, max_logit)
    if name == "qk-weight-decay":
        return _Decay(attentions, decay, learning_rate)
    return Stabilized()


class UnitNorm(nn.Module):
    """γ W / σ(W): a weight whose spectral norm is a parameter of its own.

    σ is estimated by one power iteration a step, from vectors that a checkpoint keeps; reading the
    weight changes nothing, so measurements leave a run as it was.
    """

    left: Tensor
    right: Tensor

    def __init__(self, weight: Float[Tensor, "rows columns"]) -> None:
        super().__init__()
        self.gain = nn.Parameter(weight.new_ones(()))
        start, _, other = torch.linalg.svd(weight.detach().double(), full_matrices=False)
        self.register_buffer("left", start[:, 0].to(weight.dtype))
        self.register_buffer("right", other[0].to(weight.dtype))

    def forward(self, weight: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        """The weight with spectral norm γ; gradients flow through σ too."""
        return weight * (self.gain / (self.left @ weight @ self.right))

    @torch.no_grad()
    def iterate(self, weight: Float[Tensor, "rows columns"]) -> None:
        """One power iteration on the weight as it now is."""
        self.left.copy_(nn.functional.normalize(weight @ self.right, dim=0))
        self.right.copy_(nn.functional.normalize(weight.mT @ self.left, dim=0))


class _SigmaReparam(Stabilized):
    def __init__(self, model: nn.Module) -> None:
        output = getattr(model, "output", None)
        self.layers: list[nn.Module] = []
        for layer in list(model.modules()):
            if not isinstance(layer, nn.Linear) or layer is output:
                continue
            if layer.weight.requires_grad:  # not the identity of a joint W_QK
                parametrize.register_parametrization(layer, "weight", UnitNorm(layer.weight))
                self.layers.append(layer)

    def after_step(self) -> None:
        for layer in self.layers:
            parts = layer.get_submodule("parametrizations.weight")
            parts.get_submodule("0").iterate(parts.original)  # type: ignore[operator]


def _normalize(attention: Attention) -> None:
    """Give queries and keys a LayerNorm with gains and no bias, on the weights' device."""
    weight = attention.q_proj.weight
    size = attention.head_dim
    for side in ("q_norm", "k_norm"):
        norm = nn.LayerNorm(size, bias=False, device=weight.device, dtype=weight.dtype)
        setattr(attention, side, norm)


class _LargestLogits(Recorder):
    """Each attention's largest logit by head, over the training passes since it was cleared."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, find_attention(model))
        self.found: dict[nn.Module, Tensor] = {}
        self._modules = {place.name: module for module, place in self.places.items()}

    def pass_begins(self) -> bool:
        return self.model.training

    def attention_called(self, place: Place, logits: Logits) -> None:
        module, largest = self._modules[place.name], largest_logits(logits)
        self.found[module] = torch.maximum(largest, self.found.get(module, largest))


class _Clip(Stabilized):
    def __init__(self, model: nn.Module, max_logit: float) -> None:
        self.max_logit, self.largest = max_logit, _LargestLogits(model)
        self.largest.attach()

    @torch.no_grad()
    def after_step(self) -> None:
        for attention, largest in self.largest.found.items():
            assert isinstance(attention, Attention)
            if distributed.is_available() and distributed.is_initialized():
                distributed.all_reduce(largest, distributed.ReduceOp.MAX)
            factor = (self.max_logit / largest.clamp(min=self.max_logit)).sqrt()
            is_joint = not attention.k_proj.weight.requires_grad
            for side in (attention.q_proj,) if is_joint else (attention.q_proj, attention.k_proj):
                rows = (factor.square() if is_joint else factor).repeat_interleave(
                    attention.head_dim
                )
                side.weight.mul_(rows[:, None].to(side.weight.dtype))
                if side.bias is not None:
                    side.bias.mul_(rows.to(side.bias.dtype))
        self.largest.found.clear()


class _Decay(Stabilized):
    def __init__(
        self, attentions: list[Attention], decay: float, learning_rate: float | None
    ) -> None:
        if learning_rate is None or not 0 <= decay * learning_rate < 1:
            raise ConfigError(
                f"decay times learning_rate must lie from 0 to below 1, got {decay} times "
                f"{learning_rate}.",
                hint="give the optimizer's learning rate.",
            )
        self.keep = 1 - decay * learning_rate
        sides = [side for one in attentions for side in (one.q_proj, one.k_proj)]
        self.weights = [side.weight for side in sides if side.weight.requires_grad]

    @torch.no_grad()
    def after_step(self) -> None:
        for weight in self.weights:
            weight.mul_(self.keep)
