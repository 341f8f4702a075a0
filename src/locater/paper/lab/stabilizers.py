"""Rivals of LocAteR: what others do to keep attention from collapsing, under the same loop.

The laboratory's model has places for norms and caps of its own and a joint W_QK: its published runs
and their checkpoints keep them.  `control/stabilizers` does the same to any other model.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import distributed, nn
from torch.nn.utils import parametrize

from locater.control.stabilizers import LargestLogits, UnitNorm
from locater.errors import ConfigError, InputError, unknown
from locater.models.live import find_attention
from locater.paper.lab.model import Attention

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


class _Clip(Stabilized):
    def __init__(self, model: nn.Module, max_logit: float) -> None:
        found = find_attention(model)
        self.modules = {one.layout.name: one.module for one in found}
        self.max_logit, self.largest = max_logit, LargestLogits(model, found)
        self.largest.attach()

    @torch.no_grad()
    def after_step(self) -> None:
        for name, largest in self.largest.found.items():
            attention = self.modules[name]
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
