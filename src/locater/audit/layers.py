"""The attentions of a checkpoint or a live model, read one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from locater.checkpoints.open import Checkpoint
from locater.core.form import QKForm
from locater.errors import InputError, LocaterError
from locater.models.layout import AttentionLayout, Skipped
from locater.models.live import AnyPair, discover
from locater.models.names import Shapes, plain_name
from locater.models.norms import Norm, norms
from locater.models.recipes import RECIPES, layouts
from locater.models.resolve import Recipe

Tensors = Mapping[str, Tensor]
_PARAMETRIZED = (
    "its weights are stored as they are before a parametrization, which acts on them; audit the "
    "live model, or save it after torch.nn.utils.parametrize.remove_parametrizations"
)
_BLOCK_BYTES = 48 * 2**20


@dataclass(frozen=True, eq=False)
class Layers:
    """The attentions of a checkpoint or a model, read one at a time."""

    layouts: Sequence[AttentionLayout]
    norms: Mapping[str, Norm]
    skipped: Sequence[Skipped]
    read: Callable[[Sequence[str]], Tensors]
    name: str
    """Of the model."""
    format: str = "module"
    caveats: tuple[str, ...] = ()
    """What the checkpoint says of itself."""

    @classmethod
    def of_checkpoint(
        cls, checkpoint: Checkpoint, *, recipes: Sequence[Recipe] = RECIPES, gains: bool = True
    ) -> Layers:
        """The attentions of an open checkpoint."""
        try:
            attentions, skipped = layouts(checkpoint.shapes, checkpoint.config, recipes=recipes)
        except LocaterError:
            raise
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise InputError(
                f"the config of {checkpoint.name} cannot be used: {type(error).__name__}: {error}.",
                hint="look for a value of the wrong kind in config.json.",
            ) from error
        skipped += _absent(attentions, skipped, checkpoint.config)
        stored = [one for one in attentions if ".parametrizations." in " ".join(one.tensors)]
        skipped += [Skipped(name=attention.name, reason=_PARAMETRIZED) for attention in stored]
        attentions = [attention for attention in attentions if attention not in stored]
        before = norms(checkpoint.shapes, checkpoint.config, attentions) if gains else {}
        about = (checkpoint.name, checkpoint.format, tuple(checkpoint.caveats))
        return cls(attentions, before, skipped, checkpoint.read, *about)

    @classmethod
    def of_model(
        cls,
        model: nn.Module,
        *,
        name: str | None = None,
        recipes: Sequence[Recipe] = RECIPES,
        pairs: Sequence[AnyPair] | None = None,
        gains: bool = True,
    ) -> Layers:
        """The attentions of a live model, on its parameters as they are now."""
        lives, skipped = discover(model, recipes=recipes, pairs=pairs)
        sources = {name: one for live in lives for name, one in live.sources.items()}
        vectors = {
            plain_name(name): value for name, value in model.named_parameters() if value.ndim == 1
        }
        shapes: Shapes = {name: tuple(value.shape) for name, value in vectors.items()}
        said = getattr(getattr(model, "config", None), "model_type", "")
        attentions = [live.layout for live in lives]
        before = norms(shapes, {"model_type": said}, attentions) if gains else {}

        def read(names: Sequence[str]) -> Tensors:
            return {
                name: sources[name].read() if name in sources else vectors[name] for name in names
            }

        return cls(attentions, before, skipped, read, name or type(model).__name__)

    def form(
        self,
        layout: AttentionLayout,
        tensors: Tensors,
        *,
        key_heads: slice = slice(None),
        distances: int = 2,
        gains: bool = True,
    ) -> QKForm:
        """Some heads' forms on tokens of unit variance: the norm's gains are in the factors.

        The norm's bias, the same for all tokens, acts on the logits as a bias of the queries.
        """
        form = layout.form(tensors, distances=distances, key_heads=key_heads)
        gain, shift = self.gain(layout, tensors) if gains else (None, None)
        if gain is None and shift is None:
            return form
        query, key = (part.detach().to(torch.float64, copy=True) for part in (form.query, form.key))
        bias = form.query_bias
        if shift is not None:
            own = query @ shift
            bias = own if bias is None else bias.detach().double() + own
        if gain is not None:
            query, key = query.mul_(gain), key.mul_(gain)
        return replace(form, query=query, key=key, query_bias=bias)

    def gain(
        self, layout: AttentionLayout, tensors: Tensors
    ) -> tuple[Tensor | None, Tensor | None]:
        """What the norm before an attention multiplies its tokens with, and adds to them."""
        norm = self.norms.get(layout.name)
        if norm is None:
            return None, None
        gain, shift = norm.gain(tensors), norm.shift(tensors)
        for part in (gain, shift):
            if part is not None and not bool(torch.isfinite(part).all()):
                raise InputError(
                    f"the norm before {layout.name} holds NaN or infinite values.",
                    hint="the model has diverged or the file is damaged; try another checkpoint.",
                )
        return gain, shift

    def tensors(self, layout: AttentionLayout) -> Tensors:
        """What one attention is made of; 8-bit floats as numbers that torch can multiply."""
        norm = self.norms.get(layout.name)
        tensors = self.read((*layout.tensors, *(norm.tensors if norm else ())))
        return {
            name: value.float() if value.is_floating_point() and value.element_size() < 2 else value
            for name, value in tensors.items()
        }


def _absent(
    attentions: Sequence[AttentionLayout], skipped: Sequence[Skipped], config: Mapping[str, Any]
) -> list[Skipped]:
    """Layers that the config counts and whose queries and keys are nowhere among the tensors."""
    counted = config.get("num_hidden_layers", config.get("n_layer"))
    own = {attention.layer for attention in attentions if attention.kind == "self"}
    if (
        not isinstance(counted, int)
        or len({attention.part for attention in attentions}) != 1
        or skipped
    ):
        return []
    lost = [layer for layer in range(min(counted, 10_000)) if layer not in own]
    if not lost or not own or max(own) >= counted:
        return []
    shown = ", ".join(map(str, lost[:8])) + (", …" if len(lost) > 8 else "")
    reason = (
        f"config.json counts {counted} layers; these have no queries and keys here: they have no "
        "attention, share that of another, or lie in a file that was not given"
    )
    return [Skipped(name=f"layer {shown}" if len(lost) == 1 else f"layers {shown}", reason=reason)]


def blocks(layout: AttentionLayout) -> Iterator[slice]:
    """Key heads that are audited together: about 50 MB of factors in float64."""
    share = layout.heads // layout.kv_heads
    bytes_each = max(1, (share + 1) * layout.head_dim * layout.model * 8)
    step = max(1, _BLOCK_BYTES // bytes_each)
    return (slice(start, start + step) for start in range(0, layout.kv_heads, step))
