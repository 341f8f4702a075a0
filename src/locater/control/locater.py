"""LocAteR: the regularizer of Section 6 on the live parameters of any model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, Shard

from locater.core.penalty import LocAteRConfig, lazy_penalty, penalty_spectrum, unrounded
from locater.errors import ConfigError, InputError
from locater.models.layout import AttentionLayout, Projection
from locater.models.live import AnyPair, LiveAttention, find_attention
from locater.models.recipes import RECIPES, Recipe
from locater.probe.watch import labels, local

Covariance = Tensor | Mapping[str, Tensor] | Literal["running"]
Result = TypeVar("Result")
SMALL = 2**17
"""Layers with fewer query weights than this are taken together: the calls would cost the most."""


@dataclass(frozen=True, eq=False)
class _Weights:
    """Stored weights, whole; or this rank's part, of whole heads, and the group of the rest."""

    attention: LiveAttention
    query: Tensor
    key: Tensor
    group: distributed.ProcessGroup | None
    fused: tuple[Tensor, Tensor] | None
    """The heads already, where queries and keys lie in one weight."""


class _Fused(torch.autograd.Function):
    """The query and key heads of one stored weight, whose gradient is put together only once."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, layout: AttentionLayout) -> tuple[Tensor, Tensor]:
        ctx.layout, ctx.like = layout, weight.detach()
        query, key = (side.heads(weight, layout.head_dim) for side in (layout.query, layout.key))
        return query, key

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        whole = torch.zeros_like(ctx.like)
        for side, gradient in zip((ctx.layout.query, ctx.layout.key), outputs, strict=True):
            side.heads(whole, ctx.layout.head_dim).copy_(gradient)
        return whole, None


def _without_autocast(method: Callable[[LocAteR], Result]) -> Callable[[LocAteR], Result]:
    """In float32 also where adapters and latent vectors are multiplied, on every device."""

    @wraps(method)
    def exactly(self: LocAteR) -> Result:
        with ExitStack() as stack:
            for device in {one.query_parameters[0].device for one in self.attentions}:
                stack.enter_context(unrounded(device))
            return method(self)

    return exactly


class LocAteR:
    """A penalty on the query-key eigenspectrum of every head; it never touches the model.

    Take `penalty()` before the forward pass and add it to the loss.  It counts once under DDP,
    FSDP2 and tensor parallelism, whose ranks all have to ask for it.  Modules that are replaced or
    wrapped later (by adapters, say) are found again.

    >>> model = nn.TransformerEncoderLayer(8, 2)
    >>> regularizer = LocAteR(model, LocAteRConfig(scale_strength=0.1, mean_strength=1.0))
    >>> regularizer.penalty().backward()
    >>> sorted(regularizer.metrics())[:2]
    ['locater/global_penalty', 'locater/global_trace']
    """

    def __init__(
        self,
        model: nn.Module,
        config: LocAteRConfig | None = None,
        *,
        recipes: Sequence[Recipe] = RECIPES,
        pairs: Sequence[AnyPair] | None = None,
        layers: str | None = None,
        heads: Sequence[int] | None = None,
        covariance: Covariance | None = None,
    ) -> None:
        """Find the attentions of a model, and check that they can be trained.

        `layers` is a regular expression on their names, `heads` the query heads to regularize.
        `covariance` makes it the theory's W = W_QK Σ: one Σ, one per attention by name, or
        `running` for that of the tokens which reach the attention while the model trains.
        """
        self.config = config or LocAteRConfig()
        self.heads = None if heads is None else list(heads)
        if self.heads == []:
            raise ConfigError(
                "heads=[] selects none of the heads.", hint="leave it out to take all of them."
            )
        self._model, self._covariance = model, covariance
        self._search = partial(find_attention, model, recipes=recipes, pairs=pairs, layers=layers)
        self._running: dict[str, RunningCovariance] = {}
        self._find()
        normed = [one.layout.name for one in self.attentions if one.layout.qk_norm]
        if normed:
            warnings.warn(
                f"{len(normed)} attentions normalize queries and keys (qk-norm), {normed[0]} among "
                "them: shrinking their weights does not shrink the logits. Their norms' gains "
                "would: weight decay on those acts, or a Pair without norms.",
                stacklevel=2,
            )

    def _find(self) -> None:
        """Take the attentions that the model has now, each with its covariance so far."""
        self.attentions = self._search()
        for attention in self.attentions:
            self._check(attention)
            if self._covariance != "running":
                _check_covariance(attention, self._covariance)
        if self._covariance == "running":
            made = [RunningCovariance(attention) for attention in self.attentions]
            before, self._running = self._running, {running.name: running for running in made}
            for name, old in before.items():
                old.handle.remove()
                if name in self._running and self._running[name].width == old.width:
                    self._running[name].mean, self._running[name].square = old.mean, old.square

    def _renew(self) -> None:
        """Find the attentions again where one of their modules is no longer the model's own."""
        for attention in self.attentions:
            for name in (attention.layout.query.weight, attention.layout.key.weight):
                try:
                    owner = self._model.get_submodule(name.rpartition(".")[0])
                except AttributeError:
                    owner = None
                if owner is not attention.sources[name].owner:
                    self._find()
                    return

    @property
    def total_heads(self) -> int:
        """How many query heads are regularized."""
        if self.heads is not None:
            return len(self.heads) * len(self.attentions)
        return sum(attention.layout.heads for attention in self.attentions)

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint has to keep: the running covariances; empty where there are none."""
        return {
            f"{name}.{part}": value.clone()
            for name, running in self._running.items()
            for part in ("mean", "square")
            if (value := getattr(running, part)) is not None
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on with the running covariances of a checkpoint; anything else is refused."""
        parts = {f"{name}.{part}": (running, part) for name, running in self._running.items()
                 for part in ("mean", "square")}  # fmt: skip
        for name, value in state.items():
            stem = name.rpartition(".")[0]
            if name not in parts or not {f"{stem}.mean", f"{stem}.square"} <= set(state):
                raise InputError(
                    f"{name!r} is no part of this regularizer's state.",
                    hint=f"it has, each with .mean and .square: {', '.join(self._running)}."
                    if parts
                    else "it keeps no covariances: make it with covariance='running'.",
                )
            running, part = parts[name]
            shape = (running.width,) * (1 if part == "mean" else 2)
            given: Any = value
            is_tensor = isinstance(given, Tensor) and given.is_floating_point()
            if not is_tensor or given.shape != shape or not _is_finite(given):
                raise InputError(
                    f"{name!r} is not a finite tensor of {shape}.",
                    hint="give what state_dict() of the same model's regularizer gave.",
                )
        for name, value in state.items():
            running, part = parts[name]
            setattr(running, part, value.detach().clone().float())

    @_without_autocast
    def penalty(self) -> Float[Tensor, ""]:
        """The objective's second half, ready for the user's own backward pass."""
        self._renew()
        for running in self._running.values():
            running.share(getattr(self._model, "process_group", None))
        return self._total()

    def _total(self) -> Float[Tensor, ""]:
        parts, small = [], dict[tuple[object, ...], list[_Weights]]()
        for attention in self.attentions:
            weights = self._weights(attention)
            if weights.group is None and weights.query.numel() <= SMALL:
                small.setdefault(self._kind(weights), []).append(weights)
            else:
                parts.append(self._penalty([weights]))
        parts += [self._penalty(alike) for alike in small.values()]
        total = parts[0]
        for part in parts[1:]:
            total = total + part.to(total.device)
        return total / self.total_heads if self.config.reduce == "mean" else total

    def add_gradients(self, scale: float = 1.0) -> None:
        """Add the penalty's gradient to `.grad`, for loops whose loss is out of reach.

        Call it once per optimizer step, after `backward()` and before clipping; under a GradScaler
        with `scale=scaler.get_scale()`, or after `unscale_`.
        """
        self._renew()
        every = [
            parameter
            for attention in self.attentions
            for parameter in (*attention.query_parameters, *attention.key_parameters)
        ]
        parameters = [one for one in dict.fromkeys(every) if one.requires_grad]
        gradients = torch.autograd.grad(scale * self.penalty(), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient

    @torch.no_grad()
    @_without_autocast
    def metrics(self) -> dict[str, float]:
        """Trace, scale and r of every layer, averaged over heads, and the global penalty.

        With running covariances as this rank knows them since they were last shared.
        """
        self._renew()
        results: dict[str, float] = {}
        traces = []
        names = labels([attention.layout for attention in self.attentions])
        for label, attention in zip(names, self.attentions, strict=True):
            weights = self._weights(attention, is_whole=True)
            heads = self._heads(weights, "query"), self._heads(weights, "key")
            terms = penalty_spectrum(*heads, self._sigma(attention))
            trace = terms.trace.mean().item()
            traces.append(trace)
            results[f"locater/{label}/trace"] = trace
            results[f"locater/{label}/frobenius_squared"] = terms.frobenius_squared.mean().item()
            results[f"locater/{label}/r"] = trace / attention.layout.temperature
        results["locater/global_trace"] = sum(traces) / len(traces)
        results["locater/global_penalty"] = self._total().item()
        return results

    def _penalty(self, layers: list[_Weights]) -> Float[Tensor, ""]:
        """The penalty of layers of one kind, as if they were one with all their heads."""
        first, group = layers[0].attention, layers[0].group
        part = lazy_penalty(
            _joined([self._heads(layer, "query") for layer in layers]),
            lambda: _joined([self._heads(layer, "key") for layer in layers]),
            self.config,
            temperature=first.layout.temperature,
            covariance=self._sigma(first),
        )
        if group is None:
            return part
        # every rank has its own heads: their sum has the whole value and the local gradient
        others = part.detach().clone()
        distributed.all_reduce(others, group=group)
        return part + (others - part.detach())

    def _weights(self, attention: LiveAttention, *, is_whole: bool = False) -> _Weights:
        layout = attention.layout
        if layout.is_latent:  # the factors' product with their norms at the root mean square
            form = attention.form(distances=1)
            return _Weights(attention, form.query, form.key, None, (form.query, form.key))
        query = attention.sources[layout.query.weight].read()
        if layout.query.weight == layout.key.weight:
            query = _whole(query)
            fused = _Fused.apply(query, layout) if _has_views(layout) else None  # type: ignore[no-untyped-call]
            return _Weights(attention, query, query, None, fused)
        key = attention.sources[layout.key.weight].read()
        group = None if is_whole or self.heads is not None else _head_group(attention, query, key)
        query, key = (_whole(part) if group is None else local(part) for part in (query, key))
        return _Weights(attention, query, key, group, None)

    def _kind(self, weights: _Weights) -> tuple[object, ...]:
        """Layers that agree in this can be taken together."""
        layout, query = weights.attention.layout, weights.query
        shape = layout.heads, layout.kv_heads, layout.head_dim, layout.model
        sigma = self._sigma(weights.attention)
        place = None if sigma is None else id(weights.attention)
        return *shape, layout.temperature, query.dtype, query.device, place

    def _heads(self, weights: _Weights, side: Literal["query", "key"]) -> Tensor:
        layout = weights.attention.layout
        if weights.fused:
            heads = weights.fused[side == "key"]
        else:
            heads = _heads(getattr(layout, side), getattr(weights, side), layout.head_dim)
        if self.heads is None:
            return heads
        group = layout.heads // layout.kv_heads if side == "key" else 1
        return heads[[head // group for head in self.heads]]

    def _sigma(self, attention: LiveAttention) -> Tensor | None:
        if attention.layout.name in self._running:
            return self._running[attention.layout.name].covariance()
        if isinstance(self._covariance, Mapping):
            return self._covariance[attention.layout.name]
        return self._covariance if isinstance(self._covariance, Tensor) else None

    def _check(self, attention: LiveAttention) -> None:
        """What cannot be regularized is said at once, not after a day of training."""
        name, layout = attention.layout.name, attention.layout
        parameters = (*attention.query_parameters, *attention.key_parameters)
        if any(parameter.is_meta for parameter in parameters):
            raise InputError(
                f"{name} lies on the meta device.",
                hint="give the parameters values first: model.to_empty(device=…), then load them.",
            )
        if not all(parameter.is_floating_point() for parameter in parameters):
            raise InputError(
                f"{name} is quantized to {parameters[0].dtype}, which has no gradients.",
                hint="regularize a model in floating point, or leave this one out with layers=.",
            )
        if not any(parameter.requires_grad for parameter in parameters):
            raise InputError(
                f"the queries and keys of {name} are frozen.",
                hint="set requires_grad, or select trainable attentions with layers=.",
            )
        if not all(_is_finite(local(parameter)) for parameter in parameters):
            raise InputError(
                f"the queries or keys of {name} hold NaN or infinite values.",
                hint="the model has diverged: start from an earlier checkpoint.",
            )
        wrong = [head for head in self.heads or () if not 0 <= head < layout.heads]
        if wrong:
            raise ConfigError(
                f"{name} has {layout.heads} heads, no head {wrong[0]}.", hint="count from 0."
            )


def as_regularizer(model: nn.Module, locater: LocAteRConfig | LocAteR | None) -> LocAteR:
    """What a trainer was given: a regularizer as it is, or settings for one of this model."""
    return locater if isinstance(locater, LocAteR) else LocAteR(model, locater)


class RunningCovariance:
    """Mean and covariance of the tokens that reach an attention, averaged over recent batches.

    Every rank averages its own batches; `share` makes of these the average of all ranks.
    """

    def __init__(self, attention: LiveAttention, *, momentum: float = 0.95) -> None:
        if attention.layout.kind == "cross":
            raise ConfigError(
                f"{attention.layout.name} is cross-attention: queries and keys see other tokens.",
                hint="leave it out with layers=, or give a covariance.",
            )
        self.name, self.momentum = attention.layout.name, momentum
        self.width = attention.layout.model
        self.mean: Tensor | None = None
        self.square: Tensor | None = None
        self.weight = attention.sources[attention.layout.query.weight]
        self.handle = self.weight.owner.register_forward_pre_hook(self._see, with_kwargs=True)

    @torch.no_grad()
    def _see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not module.training:
            return
        tokens = args[0] if args else next(iter(kwargs.values()))
        if not isinstance(tokens, Tensor) or tokens.shape[-1] != self.width:
            raise InputError(
                f"what enters {self.name} are not its tokens of width {self.width}.",
                hint="name nn.Linear modules in pairs=, not parameters, or give a covariance.",
            )
        tokens = tokens.detach().flatten(0, -2).float()
        with unrounded(tokens.device):
            mean, square = tokens.mean(0), tokens.mT @ tokens / tokens.shape[0]
        if self.mean is None or self.square is None:
            self.mean, self.square = mean, square
        else:
            self.mean.lerp_(mean, 1 - self.momentum)
            self.square.lerp_(square, 1 - self.momentum)

    @torch.no_grad()
    def share(self, group: distributed.ProcessGroup | None = None) -> None:
        """Average over the ranks that have seen tokens, so that all have one Σ; each has to ask.

        Averages of averages are averages: it may be asked at any time, and twice.
        """
        if not (distributed.is_available() and distributed.is_initialized()):
            return
        device = self.weight.read().device
        both = torch.zeros(1 + self.width, self.width + 1, device=device)
        if self.mean is not None and self.square is not None:
            both[0, 1:], both[1:, 1:], both[0, 0] = self.mean, self.square, 1
        distributed.all_reduce(both, group=group)
        if both[0, 0] > 0:
            both /= both[0, 0].clone()
            self.mean, self.square = both[0, 1:].clone(), both[1:, 1:].clone()

    def covariance(self) -> Float[Tensor, "model model"] | None:
        """Σ as of now; None before the first batch, which is Σ = I."""
        if self.mean is None or self.square is None:
            return None
        return self.square - torch.outer(self.mean, self.mean)


def _check_covariance(attention: LiveAttention, covariance: Covariance | None) -> None:
    name, model = attention.layout.name, attention.layout.model
    if isinstance(covariance, str):
        raise ConfigError(
            f"unknown covariance {covariance!r}.",
            hint="give a tensor, one per attention by name, or 'running'.",
        )
    if isinstance(covariance, Mapping):
        if name not in covariance:
            raise ConfigError(
                f"no covariance for {name}.",
                hint="give one per attention, by name, or select fewer with layers=.",
            )
        covariance = covariance[name]
    if covariance is not None and covariance.shape != (model, model):
        raise ConfigError(
            f"the covariance of {name} is {tuple(covariance.shape)}, not {(model, model)}.",
            hint="it is that of the tokens which the queries and keys read.",
        )


def _is_finite(tensor: Tensor) -> bool:
    """Without a copy, as `isfinite` would make."""
    if tensor.numel() == 0:  # a rank without rows
        return True
    return bool(torch.stack(torch.aminmax(tensor.detach())).isfinite().all())


def _has_views(layout: AttentionLayout) -> bool:
    """The heads of both projections are views of the weight, not copies."""
    return all(side.last - side.first in (1, side.inner) for side in (layout.query, layout.key))


def _is_plain(side: Projection) -> bool:
    """Every row of the stored weight is a row of a head, in order."""
    return side.inner == 1 and not side.transposed and side.start == 0 and side.stop is None


def _heads(side: Projection, weight: Tensor, head_dim: int) -> Tensor:
    """The heads in a stored weight; the gradient of a slice would copy the whole of it."""
    return weight.unflatten(0, (-1, head_dim)) if _is_plain(side) else side.heads(weight, head_dim)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _whole(tensor: Tensor) -> Tensor:
    """A sharded parameter's full value, gradients flowing back to the shards; never a shard."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _head_group(
    attention: LiveAttention, query: Tensor, key: Tensor
) -> distributed.ProcessGroup | None:
    """The ranks among which whole heads are divided, each key head beside its query heads."""
    layout = attention.layout
    if not (isinstance(query, DTensor) and isinstance(key, DTensor)):
        return None
    if not (_is_plain(layout.query) and _is_plain(layout.key)):
        return None
    mesh = query.device_mesh
    if mesh.ndim != 1 or key.device_mesh != mesh or layout.kv_heads % mesh.size():
        return None
    if any(tensor.placements != (Shard(0),) for tensor in (query, key)):
        return None
    return mesh.get_group()
