"""What others do to keep attention from collapsing, on any model whose attention recipes read.

Each is one call, before the optimizer is built where it adds parameters.  `penalty()` after the
forward pass is for the loss, `on(optimizer)` does what has to be done around a step, `remove()`
stops it.  Parameters and buffers that a method adds lie in the model, and so in its checkpoints.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from locater.control.locater import LocAteR
from locater.core.penalty import LocAteRConfig
from locater.errors import ConfigError, InputError, LocaterError, unknown
from locater.models.layout import Projection
from locater.models.live import LiveAttention, Source, find_attention
from locater.probe.rows import (
    MASKED,
    Logits,
    RealQueries,
    ScoredKeys,
    fused_attention,
    is_fusable,
    largest_logits,
)
from locater.probe.watch import Place, Recorder


class Stabilizer:
    """What a method does in a training loop; nothing, for those that change the model alone."""

    def penalty(self) -> Float[Tensor, ""] | float:
        """What the loss is to have added, after the forward pass."""
        return 0.0

    def before_step(self) -> None:
        """Call before `optimizer.step()`; `on` does."""

    def after_step(self) -> None:
        """Call after `optimizer.step()`; `on` does."""

    def on(self, optimizer: torch.optim.Optimizer) -> Stabilizer:
        """Do what has to be done around every step of an optimizer."""
        optimizer.register_step_pre_hook(lambda *_: self.before_step())
        optimizer.register_step_post_hook(lambda *_: self.after_step())
        return self

    def remove(self) -> None:
        """Watch the model no longer; what was added to it stays."""

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint has to keep beside the model's own."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""


# γ W / σ(W)


class UnitNorm(nn.Module):
    """γ W / σ(W): a weight whose spectral norm is a parameter of its own.

    σ is estimated by one power iteration a step, from vectors that a checkpoint keeps; reading the
    weight changes nothing, so measurements leave a run as it was.
    """

    left: Tensor
    right: Tensor

    def __init__(self, weight: Float[Tensor, "rows columns"], gain: float = 1.0) -> None:
        super().__init__()
        self.gain = nn.Parameter(weight.new_full((), gain))
        start, _, other = torch.linalg.svd(weight.detach().double(), full_matrices=False)
        self.register_buffer("left", start[:, 0].to(weight.dtype))
        self.register_buffer("right", other[0].to(weight.dtype))

    def forward(self, weight: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
        """The weight with spectral norm γ; gradients flow through σ too.

        A weight of zeros, as adapters begin with, is left at γ W until it has left zero.
        """
        norm = self.left @ weight @ self.right
        return weight * (self.gain / torch.where(norm == 0, 1.0, norm))

    @torch.no_grad()
    def iterate(self, weight: Float[Tensor, "rows columns"]) -> None:
        """One power iteration on the weight as it now is."""
        start = weight @ self.right
        # of zeros there was no vector to keep: begin at the largest column
        other = weight[:, weight.square().sum(0).argmax()]
        self.left.copy_(functional.normalize(torch.where(start.any(), start, other), dim=0))
        self.right.copy_(functional.normalize(weight.mT @ self.left, dim=0))


class SigmaReparam(Stabilizer):
    """Every linear layer but the output is γ W / σ(W) (Zhai et al. 2023)."""

    def __init__(self, model: nn.Module, *, keeps_weights: bool = False) -> None:
        """γ begins at 1, as published; with `keeps_weights` at σ(W), which changes no output."""
        ends = getattr(model, "get_output_embeddings", lambda: None)() or getattr(
            model, "output", None
        )
        tied = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
        self.layers = []
        for layer in list(model.modules()):
            is_linear = isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"
            weight = getattr(layer, "weight", None) if is_linear else None
            if layer is ends or weight is None or id(weight) in tied or not weight.requires_grad:
                continue
            _refuse_sharded(weight, "sigma-reparam")
            if isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear):
                continue  # of nn.MultiheadAttention, which reads it out of its module
            norm = torch.linalg.matrix_norm(weight.detach(), 2).item() if keeps_weights else 1.0
            parametrize.register_parametrization(layer, "weight", UnitNorm(weight, norm or 1.0))
            self.layers.append(layer)
        if not self.layers:
            raise InputError(
                f"{type(model).__name__} has no linear layer that can be reparametrized.",
                hint="sigma-reparam works on nn.Linear with trainable weights.",
            )

    def after_step(self) -> None:
        """One power iteration for every weight."""
        for layer in self.layers:
            parts = layer.get_submodule("parametrizations.weight")
            parts.get_submodule("0").iterate(parts.original)  # type: ignore[operator]


# Normalized queries and keys


class HeadNorm(nn.Module):
    """Root mean square 1, times learned gains, for some heads among a linear layer's outputs."""

    rows: Tensor

    def __init__(self, rows: Int[Tensor, "heads head"], like: Tensor) -> None:
        super().__init__()
        self.register_buffer("rows", rows.to(like.device), persistent=False)
        self.weight = nn.Parameter(torch.ones_like(rows[0], device=like.device, dtype=like.dtype))

    def forward(self, outputs: Float[Tensor, "*tokens rows"]) -> Float[Tensor, "*tokens rows"]:
        """The same outputs, with these heads normalized."""
        heads = outputs[..., self.rows]
        normed = functional.rms_norm(heads, heads.shape[-1:], self.weight, 1e-6)
        return outputs.index_copy(-1, self.rows.flatten(), normed.flatten(-2))


def _normalized(layer: nn.Module, args: Any, outputs: Tensor) -> Tensor:
    """A forward hook; known by its name, so that copies and pickles of a model have it too."""
    for name in ("query_norm", "key_norm"):
        norm = getattr(layer, name, None)
        outputs = outputs if norm is None else norm(outputs)
    return outputs


class QKNorm(Stabilizer):
    """Every head's queries and keys have root mean square 1, times gains that are learned.

    Before any rotation, as in Qwen 3 (after Henry et al. 2020, Dehghani et al. 2023).  It changes
    the architecture: a trained model changes too, and its checkpoints load after this call only.
    """

    def __init__(self, model: nn.Module, *, layers: str | None = None) -> None:
        attentions = find_attention(model, layers=layers)
        for attention in attentions:
            _refuse_normalized(attention, "qk-norm")
            for side, source in _sides(attention):
                if source.adapter is not None:
                    raise InputError(
                        f"{side.weight} has an adapter, whose part qk-norm would not normalize.",
                        hint="leave it out with layers=, or merge what adapts it.",
                    )
                if source.attribute != "weight":
                    raise InputError(
                        f"the queries and keys of {attention.layout.name} come from no layer.",
                        hint="nn.MultiheadAttention multiplies its weights in one function; "
                        "qk-norm needs linear layers whose outputs it can normalize.",
                    )
        for attention in attentions:
            both = zip(("query_norm", "key_norm"), _sides(attention), strict=True)
            for name, (side, source) in both:
                owner, weight = source.owner, source.read()
                rows = _rows(side, weight, attention.layout.head_dim)
                setattr(owner, name, HeadNorm(rows, weight))
                if _normalized not in owner._forward_hooks.values():
                    owner.register_forward_hook(_normalized)


def _sides(attention: LiveAttention) -> list[tuple[Projection, Source]]:
    """Where its queries and keys lie, and the weights themselves."""
    sides = (attention.layout.query, attention.layout.key)
    return [(side, attention.sources[side.weight]) for side in sides]


def _rows(side: Projection, weight: Tensor, head_dim: int) -> Int[Tensor, "heads head"]:
    """The rows of a stored weight, which are its layer's outputs, that belong to each head."""
    rows = torch.arange(weight.shape[1 if side.transposed else 0], dtype=torch.float64)
    return replace(side, transposed=False, groups=1).heads(rows[:, None], head_dim)[..., 0].long()


def _bias_rows(side: Projection, bias: Tensor, head_dim: int) -> Int[Tensor, "heads head"]:
    return side.bias_heads(torch.arange(len(bias), dtype=torch.float64), head_dim).long()


def _refuse_normalized(attention: LiveAttention, method: str) -> None:
    layout = attention.layout
    if layout.qk_norm or any(hasattr(one.owner, "query_norm") for _, one in _sides(attention)):
        raise InputError(
            f"{layout.name} normalizes its queries and keys already.",
            hint=f"{method} would change nothing there: leave it out with layers=.",
        )
    if layout.is_latent:
        raise InputError(
            f"{layout.name} makes its queries and keys from latent vectors (MLA).",
            hint=f"{method} is not defined here for them: leave it out with layers=.",
        )
    for _, source in _sides(attention):
        _refuse_sharded(source.read(), method)


def _is_made(source: Source) -> bool:
    """Whether a weight is made of other parameters, so that it cannot be changed in place."""
    is_parametrized = parametrize.is_parametrized(source.owner, source.attribute)
    return is_parametrized or source.adapter is not None


def _refuse_sharded(weight: Tensor, method: str) -> None:
    if isinstance(weight, DTensor):
        raise InputError(
            f"{method} changes whole weights, and these are sharded.",
            hint="call it before fully_shard, or train with DDP.",
        )


# Scaled back where logits are too large


class LargestLogits(Recorder):
    """Each attention's largest logit by head, over the training passes since it was cleared."""

    def __init__(self, model: nn.Module, attentions: Sequence[LiveAttention]) -> None:
        super().__init__(model, attentions)
        self.found: dict[str, Float[Tensor, " heads"]] = {}

    def pass_begins(self) -> bool:
        """Only training counts."""
        return self.model.training

    def attention_called(self, place: Place, logits: Logits) -> None:
        """Keep the largest of every head."""
        largest = largest_logits(logits)
        with self.lock:
            self.found[place.name] = torch.maximum(largest, self.found.get(place.name, largest))


class QKClip(Stabilizer):
    """A head whose largest logit passed `max_logit` in a step is scaled back to it (Kimi K2, 2025).

    Queries and keys take half of it each.  A key head that is shared gives way to the loudest of
    its query heads, and the others' queries make up for it: every head's logits change by its own
    factor.  A bias by distance is no part of what the weights can scale.
    """

    def __init__(
        self, model: nn.Module, *, max_logit: float = 100.0, layers: str | None = None
    ) -> None:
        _check_positive(max_logit=max_logit)
        self.max_logit, self.attentions = max_logit, find_attention(model, layers=layers)
        for attention in self.attentions:
            _refuse_normalized(attention, "qk-clip")
            for side, source in _sides(attention):
                if _is_made(source):
                    raise InputError(
                        f"{side.weight} is made of other parameters, which qk-clip cannot scale.",
                        hint="leave it out with layers=, or merge what adapts it.",
                    )
        self.largest = LargestLogits(model, self.attentions)
        self.largest.attach()

    def remove(self) -> None:
        """Watch the model no longer."""
        self.largest.detach()

    @torch.no_grad()
    def after_step(self) -> None:
        """Scale back what was too large since the last step, on every rank alike."""
        for attention in self.attentions:
            layout = attention.layout
            device = attention.sources[layout.query.weight].read().device
            nothing = torch.full((layout.heads,), -torch.inf, device=device, dtype=torch.float32)
            largest = self.largest.found.pop(layout.name, nothing).to(nothing)
            if distributed.is_available() and distributed.is_initialized():
                distributed.all_reduce(largest, distributed.ReduceOp.MAX)
            if bool((largest > self.max_logit).any()):
                half = (self.max_logit / largest.clamp_min(self.max_logit)).sqrt()
                shared = half.unflatten(0, (layout.kv_heads, -1)).amin(1)
                rest = half / shared.repeat_interleave(layout.heads // layout.kv_heads)
                _scale(attention, layout.query, half * rest)
                _scale(attention, layout.key, shared)


def _scale(attention: LiveAttention, side: Projection, factor: Float[Tensor, " heads"]) -> None:
    """Multiply the heads of a projection, and their biases, in place."""
    head_dim, weight = attention.layout.head_dim, attention.sources[side.weight].read()
    by_row = torch.ones(weight.shape[1 if side.transposed else 0]).to(weight)
    by_row[_rows(side, weight, head_dim)] = factor.to(weight)[:, None]
    weight.mul_(by_row if side.transposed else by_row[:, None])
    if side.bias is not None:
        bias = attention.sources[side.bias].read()
        rows = _bias_rows(side, bias, head_dim)
        bias[rows] = bias[rows] * factor.to(bias)[:, None]


# Bounded logits

_thread = threading.local()
_SOFTMAX = (functional.softmax, torch.softmax, torch.special.softmax, Tensor.softmax)


class _Capped(TorchFunctionMode):
    """Bounds the logits of attention that is called under it."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return capped_attention(*args, limit=self.limit, **kwargs)
        if func in _SOFTMAX:
            logits, *rest = (*args, *(kwargs.pop("input") for _ in range("input" in kwargs)))
            bounded = self.limit * torch.tanh(logits / self.limit)
            return func(torch.where(logits > MASKED, bounded, logits), *rest, **kwargs)
        return func(*args, **kwargs)


def capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    limit: float,
) -> Tensor:
    """scaled_dot_product_attention on limit · tanh(logit / limit), with the matrix written out."""
    if enable_gqa:
        group = query.shape[-3] // key.shape[-3]
        key, value = (one.repeat_interleave(group, -3) for one in (key, value))
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    logits = limit * torch.tanh(logits / limit)
    if is_causal:
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(hidden, -torch.inf)
    if attn_mask is not None:
        is_flag = attn_mask.dtype == torch.bool
        logits = logits.masked_fill(~attn_mask, -torch.inf) if is_flag else logits + attn_mask
    is_blind = (logits == -torch.inf).all(-1, keepdim=True)  # a padded query: 0, as there
    weights = logits.masked_fill(is_blind, 0.0).softmax(-1).masked_fill(is_blind, 0.0)
    return functional.dropout(weights, dropout_p) @ value


def _cap_begins(module: nn.Module, args: Any) -> None:
    mode: Any = _Capped(vars(module)["soft_cap_limit"])
    mode.__enter__()
    _thread.modes = [*getattr(_thread, "modes", ()), mode]


def _cap_ends(module: nn.Module, args: Any, output: Any) -> None:
    *_thread.modes, mode = _thread.modes
    mode.__exit__(None, None, None)


class SoftCap(Stabilizer):
    """Logits are bounded by `max_logit` · tanh(logit / `max_logit`) (Gemma 2, 2024).

    No fused kernel does that: attention is written out, with its T × T matrix.  It changes the
    architecture, and a trained model's outputs with it; nothing of it is in a checkpoint.
    """

    def __init__(
        self, model: nn.Module, *, max_logit: float = 50.0, layers: str | None = None
    ) -> None:
        _check_positive(max_logit=max_logit)
        modules, self.handles = list[Any](), list[Any]()
        for attention in find_attention(model, layers=layers):
            module, reason = attention.module, None
            if module is None or isinstance(module, nn.MultiheadAttention):
                reason = "computes its logits in a function that cannot be entered"
            elif attention.layout.position_bias is not None:
                reason = "adds a bias by distance to its logits before they could be bounded"
            if reason:
                raise InputError(
                    f"{attention.layout.name} {reason}.",
                    hint="soft-cap needs attention by scaled_dot_product_attention or a softmax.",
                )
            modules.append(module)
        for module in modules:
            vars(module)["soft_cap_limit"] = max_logit
            self.handles += [
                module.register_forward_pre_hook(_cap_begins),
                module.register_forward_hook(_cap_ends, always_call=True),
            ]

    def remove(self) -> None:
        """Attend as before."""
        for handle in self.handles:
            handle.remove()


# Penalties on rows


class RowPenalty(Stabilizer):
    """A penalty on every row of attention, by its denominator or its entropy, with its gradient.

    `z_loss` weighs the mean square of the logarithm of the softmax's denominator (after PaLM's and
    ST-MoE's z-loss); `entropy_loss` the mean of max(0, `floor` · ln T − entropy), T the keys that
    the row sees.  Call `penalty()` after each training pass; each rank has its own rows, which DDP
    averages.  Both come from fused attention, in memory that grows with T.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        z_loss: float = 0.0,
        entropy_loss: float = 0.0,
        floor: float = 0.25,
        layers: str | None = None,
    ) -> None:
        if min(z_loss, entropy_loss) < 0 or z_loss + entropy_loss == 0 or not 0 < floor <= 1:
            raise ConfigError(
                f"z_loss {z_loss} and entropy_loss {entropy_loss} must be zero or more and not "
                f"both zero, and floor {floor} from 0 to 1.",
                hint="1e-4 is usual for a z-loss.",
            )
        attentions = find_attention(model, layers=layers)
        self.rows = _RowTerms(model, attentions, z_loss, entropy_loss, floor)
        self.rows.attach()

    def penalty(self) -> Float[Tensor, ""]:
        """The mean over attentions of this thread's last training pass."""
        terms: dict[str, Tensor] = getattr(self.rows.now, "done", {})
        missing = [one.name for one in self.rows.places.values() if one.name not in terms]
        if missing:
            raise LocaterError(
                f"{len(missing)} attentions were not seen in the last training pass: "
                f"{', '.join(missing[:4])}.",
                hint="a kernel that hides its logits cannot be penalized: run the model, in "
                "training mode, with scaled_dot_product_attention or a softmax.",
            )
        return torch.stack([*terms.values()]).mean()

    def remove(self) -> None:
        """Watch the model no longer."""
        self.rows.detach()


class _RowTerms(Recorder):
    keeps_graph = True

    def __init__(
        self, model: nn.Module, attentions: Sequence[LiveAttention], *settings: float
    ) -> None:
        super().__init__(model, attentions)
        self.settings = settings

    def pass_begins(self) -> bool:
        self.now.terms, self.now.done = dict[str, list[Tensor]](), dict[str, Tensor]()
        return self.model.training and torch.is_grad_enabled()

    def attention_called(self, place: Place, logits: Logits) -> None:
        source = logits.query if isinstance(logits, ScoredKeys) else logits.logits
        if place.layout is None or not any(one.name == place.name for one in self.places.values()):
            return
        if not source.requires_grad:
            raise InputError(
                f"the logits of {place.name} have no graph, so that nothing can be learned.",
                hint="of checkpointing take use_reentrant=False.",
            )
        z_loss, entropy_loss, floor = self.settings
        with torch.autocast(logits.device.type, enabled=False):
            denominator, entropy, count = rows_with_gradient(logits)
            real = RealQueries.of(logits, is_self=place.kind == "self").is_real
            count = count if real is None else count * real[:, None]
            most = floor * count.clamp_min(1).to(entropy).log()
            zero = torch.zeros_like(entropy)
            squares = torch.where(count >= 1, denominator.square(), zero).sum()
            missing = torch.where(count >= 2, (most - entropy).clamp_min(0), zero).sum()
            rows, choosing = ((zero + (count >= least)).sum().clamp_min(1) for least in (1, 2))
        term = z_loss * squares / rows + entropy_loss * missing / choosing
        self.now.terms.setdefault(place.name, []).append(term)

    def pass_ends(self) -> None:
        terms = self.now.terms.items()
        self.now.done = {name: torch.stack(parts).mean() for name, parts in terms}


def rows_with_gradient(logits: Logits) -> tuple[Tensor, Tensor, Tensor]:
    """Every row's log-denominator and entropy, to be differentiated, and how many keys it sees.

    The gradient of the log-denominator is that of the mean logit with its weights held fixed: so
    it is that of a fused attention whose values alone are the keys.
    """
    everything = slice(None), torch.arange(logits.shape[2], device=logits.device)
    if not (isinstance(logits, ScoredKeys) and is_fusable(logits)):
        rows, visible = logits.rows(*everything)
        count = (
            torch.full_like(rows[..., 0], rows.shape[-1]) if visible is None else visible.sum(-1)
        )
        rows = rows.clamp_min(-1e5)  # weights are 0 there, and so are gradients
        denominator = rows.logsumexp(-1)
        return denominator, denominator - (rows.softmax(-1) * rows).sum(-1), count
    exact = torch.float64 if logits.query.dtype == torch.float64 else torch.float32
    query, key = logits.query.to(exact), logits.key.to(exact)
    has_mask = bool(logits.masks) or logits.mask_mod is not None
    seen, mask, flag = logits.visible(*everything), None, logits.is_causal and not has_mask
    queries, keys = logits.shape[2:]
    count = torch.full((1, 1, queries), keys, device=query.device)
    if seen is not None:
        seen = functional.pad(seen, (0, keys - seen.shape[-1]))
        count = seen.sum(-1)
        mask = seen | (count == 0)[..., None] if has_mask else None  # no row without any key

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (
            one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value)
        )
        return functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=flag, scale=logits.scale
        )

    with torch.no_grad():
        denominator = fused_attention(query, key, key, logits.scale, mask, flag)[1]
    held = logits.scale * (query * attend(query.detach(), key.detach(), key)).sum(-1)
    denominator = denominator + (held - held.detach())
    return (
        denominator,
        denominator - logits.scale * (query * attend(query, key, key)).sum(-1),
        count,
    )


# A learning rate of their own


class QKRate(Stabilizer):
    """Queries and keys learn at `factor` times the learning rate, also where they share a weight.

    After every step what it changed of them is multiplied, which is what another learning rate
    does under any optimizer whose steps are proportional to it.
    """

    def __init__(self, model: nn.Module, *, factor: float, layers: str | None = None) -> None:
        _check_positive(factor=factor)
        self.factor, self.before = factor, list[Tensor]()
        chosen: dict[tuple[int, bool], tuple[Tensor, list[Tensor]]] = {}
        for attention in find_attention(model, layers=layers):
            for side, source in _sides(attention):
                for weight, rows, is_turned in _parameters(attention, side, source):
                    known = chosen.setdefault((id(weight), is_turned), (weight, []))
                    known[1].append(rows.flatten())
        self.weights = [
            (weight, torch.cat(rows).unique(), is_turned)
            for (_, is_turned), (weight, rows) in chosen.items()
        ]

    @torch.no_grad()
    def before_step(self) -> None:
        """Remember queries and keys."""
        self.before = [_taken(*one).clone() for one in self.weights]

    @torch.no_grad()
    def after_step(self) -> None:
        """Take a share of the step, or a multiple."""
        for (weight, rows, is_turned), before in zip(self.weights, self.before, strict=True):
            now = before.lerp(_taken(weight, rows, is_turned), self.factor)
            weight.index_copy_(1 if is_turned else 0, rows.to(weight.device), now)


def _taken(weight: Tensor, rows: Tensor, is_turned: bool) -> Tensor:
    return weight.index_select(1 if is_turned else 0, rows.to(weight.device))


def _parameters(
    attention: LiveAttention, side: Projection, source: Source
) -> Iterator[tuple[Tensor, Int[Tensor, "heads head"], bool]]:
    """The stored weight and bias of a side, and which of their rows are its own."""
    if _is_made(source):
        raise InputError(
            f"{side.weight} is made of other parameters.",
            hint="give them a group of their own in the optimizer.",
        )
    weight, head_dim = source.read(), attention.layout.head_dim
    _refuse_sharded(weight, "qk-rate")
    yield weight, _rows(side, weight, head_dim), side.transposed
    if side.bias is not None:
        bias = attention.sources[side.bias].read()
        yield bias, _bias_rows(side, bias, head_dim), False


# By name


class _Penalized(Stabilizer):
    """LocAteR, as one of the methods."""

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        known = {one.name for one in fields(LocAteRConfig)}
        config = LocAteRConfig(**{key: settings.pop(key) for key in known & set(settings)})
        self.regularizer = LocAteR(model, config, **settings)

    def penalty(self) -> Float[Tensor, ""]:
        return self.regularizer.penalty()

    def state_dict(self) -> dict[str, Tensor]:
        return self.regularizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.regularizer.load_state_dict(state)


METHODS: dict[str, Callable[..., Stabilizer]] = {
    "none": lambda model: Stabilizer(),
    "locater": _Penalized,
    "locater-covariance": partial(_Penalized, covariance="running"),
    "sigma-reparam": SigmaReparam,
    "qk-norm": QKNorm,
    "qk-clip": QKClip,
    "soft-cap": SoftCap,
    "z-loss": partial(RowPenalty, z_loss=1e-4),
    "entropy-floor": partial(RowPenalty, entropy_loss=1.0),
    "qk-rate": QKRate,
}


def stabilize(model: nn.Module, method: str, **settings: Any) -> Stabilizer:
    """A method by name, on a model; see each class for its settings.

    >>> model = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> method = stabilize(model, "z-loss", z_loss=0.1)
    >>> loss = model(torch.randn(2, 5, 8)).square().mean() + method.penalty()
    """
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    return METHODS[method](model, **settings)


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ConfigError(f"{name} must be positive, got {value}.", hint="100 is usual.")
