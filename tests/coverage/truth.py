"""What a running model's attention really is, without knowing its names.

Every operation is watched below Python (`TorchDispatchMode`), and every tensor carries where it
comes from: which weights it was multiplied with last, on what input, and what was done to it since.
A softmax over products of two such tensors is attention, whatever the model calls it; what enters
that softmax is the truth that a form is held against.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True, eq=False)
class Projection:
    """One product of activations with weights."""

    weights: frozenset[str]
    """The parameters' names."""
    given: Tensor
    """What was multiplied with them: rows of the width that the weight reads, or a picture."""
    module: str
    is_picture: bool = False
    """By a convolution: (batch, width, …)."""
    source: Lineage | None = None
    """Where what was multiplied comes from."""


@dataclass(frozen=True)
class Lineage:
    """Where a tensor comes from."""

    projections: frozenset[Projection] = frozenset()
    """The last products with weights that it is made of."""
    scores: frozenset[Score] = frozenset()
    """The last products of activations with activations."""
    parameters: frozenset[str] = frozenset()
    """Parameters that joined elementwise since: biases, gains, tables of positions."""
    steps: frozenset[str] = frozenset()
    """What was done since."""
    is_active: bool = False
    """It depends on the model's input or on positions by a table; else it is weights alone."""
    turns: frozenset[Turn] = frozenset()
    """Constants that it was multiplied with, entry by entry: cosines and sines of angles."""

    @property
    def weights(self) -> frozenset[str]:
        """The weights of its projections."""
        return frozenset(name for one in self.projections for name in one.weights)

    @property
    def is_weight(self) -> bool:
        """It is made of parameters and constants alone."""
        return bool(self.parameters) and not self.is_active

    def and_then(self, step: str, others: Iterable[Lineage]) -> Lineage:
        """Joined with others in one step."""
        every = [self, *others]
        return Lineage(
            projections=frozenset().union(*(one.projections for one in every)),
            scores=frozenset().union(*(one.scores for one in every)),
            parameters=frozenset().union(*(one.parameters for one in every)),
            steps=frozenset({step}).union(*(one.steps for one in every)),
            is_active=any(one.is_active for one in every),
            turns=frozenset().union(*(one.turns for one in every)),
        )


@dataclass(frozen=True, eq=False)
class Turn:
    """A constant that queries or keys were multiplied with."""

    values: Tensor


@dataclass(frozen=True, eq=False)
class Score:
    """One product of activations with activations: queries with keys, or attention with values."""

    left: Lineage
    right: Lineage
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Attention:
    """One softmax over keys, and what entered it."""

    module: str
    """The innermost module that was running."""
    logits: Tensor
    """With the keys last."""
    scores: frozenset[Score]
    parameters: frozenset[str]
    """What was added to the scores, by parameter name."""
    products: frozenset[str]
    """Weights whose products were added to the scores."""
    steps: frozenset[str]
    """What was done to the scores."""
    is_fused: bool = False
    """By scaled_dot_product_attention, from its arguments."""


@dataclass
class Heard:
    """Everything that was heard in a run."""

    attentions: list[Attention] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """Modules with a softmax that was not over products of activations."""
    ran: set[str] = field(default_factory=set)
    """Modules that ran."""


_PRODUCTS = {
    "mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "dot": (0, 1), "matmul": (0, 1),
    "addmm": (1, 2), "baddbmm": (1, 2), "addbmm": (1, 2), "addmv": (1, 2),
    "linear": (0, 1), "_grouped_mm": (0, 1), "mkldnn_linear": (0, 1),
    "convolution": (0, 1), "mkldnn_convolution": (0, 1),
}  # fmt: skip
_ADDED = {"addmm", "baddbmm", "addbmm", "addmv"}
_SOFTMAX = {"_softmax", "_safe_softmax"}
_VIEWS = {"view", "t", "transpose", "permute", "slice", "select", "expand", "unsqueeze", "squeeze",
          "_unsafe_view", "clone", "_to_copy", "alias", "detach", "split", "split_with_sizes",
          "unbind", "as_strided", "reshape", "copy_", "cat", "stack", "contiguous"}  # fmt: skip


class Tracer(TorchDispatchMode):
    """Listens to every operation of a model while it runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.heard = Heard()
        self.lineages: dict[int, Lineage] = {}
        self.kept: list[Any] = []  # storages live on, so that none takes another's place
        self.running: list[str] = []
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._note(parameter, Lineage(parameters=frozenset({name})), join=True)
        self.names = {module: name for name, module in model.named_modules()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        made = [one for one in tree_leaves(output) if isinstance(one, Tensor)]
        if made:
            self._follow(name, args, kwargs or {}, given, made)
        return output

    def lineage(self, tensor: Any) -> Lineage | None:
        """Where a tensor comes from; None for constants."""
        if not isinstance(tensor, Tensor):
            return None
        return self.lineages.get(tensor.untyped_storage()._cdata)

    def _note(self, tensor: Tensor, lineage: Lineage, join: bool = False) -> None:
        storage = tensor.untyped_storage()
        old = self.lineages.get(storage._cdata)
        if old is not None and join:
            lineage = replace(old, parameters=old.parameters | lineage.parameters)
        elif old is None:
            self.kept.append(storage)
        self.lineages[storage._cdata] = lineage

    def _follow(
        self, name: str, args: Any, kwargs: Any, given: list[Tensor], made: list[Tensor]
    ) -> None:
        if name in _PRODUCTS:
            self._product(name, args, made)
            return
        if name.startswith("_scaled_dot_product"):
            self._fused(args, kwargs)
            for one in made:
                if one.is_floating_point():
                    self._note(one, Lineage(is_active=True))
            return
        if name in _SOFTMAX:
            self._softmax(args[0], args[1])
        if name == "embedding":
            table = self.lineage(args[0]) or Lineage()
            self._note(made[0], Lineage(parameters=table.parameters, is_active=True))
            return
        sources = [one for tensor in given if (one := self.lineage(tensor)) is not None]
        if not sources:
            return
        known = {tensor.untyped_storage()._cdata for tensor in given}
        for one in made:
            if not (one.is_floating_point() or one.is_complex()):
                continue
            is_view = one.untyped_storage()._cdata in known and not name.endswith("_")
            if not is_view or name == "view_as_complex":
                step = () if name in _VIEWS else (name,)
                joined = sources[0].and_then("", sources[1:])
                if name in ("mul", "mul_") and joined.projections:
                    joined = replace(joined, turns=joined.turns | self._turns(given))
                self._note(one, replace(joined, steps=(joined.steps | set(step)) - {""}))

    def _turns(self, given: list[Tensor]) -> frozenset[Turn]:
        """Factors of a product that come from no weight and are no single number."""
        found = []
        for tensor in given:
            lineage = self.lineage(tensor)
            is_constant = lineage is None or not lineage.projections
            if is_constant and tensor.ndim > 1 and tensor.shape[-1] > 1:
                found.append(Turn(tensor.detach().clone()))
        return frozenset(found)

    def _product(self, name: str, args: Any, made: list[Tensor]) -> None:
        places = _PRODUCTS[name]
        left, right = (self.lineage(args[place]) for place in places)
        extra = self.lineage(args[0]) if name in _ADDED else None
        if name.endswith(("convolution", "linear")):
            extra = self.lineage(args[2]) if len(args) > 2 else None
        if left is None and right is None:
            return
        weight, other = (right, 0) if right is not None and right.is_weight else (None, 0)
        if weight is None and left is not None and left.is_weight:
            weight, other = left, 1
        if weight is not None:
            projection = Projection(
                weights=weight.parameters,
                given=args[places[other]].detach().clone(),
                module=self._module(),
                is_picture="convolution" in name,
                source=left if other == 0 else right,
            )
            lineage = Lineage(projections=frozenset({projection}), is_active=True)
        elif left is not None and right is not None:
            lineage = Lineage(
                scores=frozenset({Score(left, right, tuple(made[0].shape))}), is_active=True
            )
        else:
            one = left or right
            assert one is not None
            lineage = one.and_then("product with a constant", ())
        if extra is not None:
            joined = lineage.and_then("", (replace(extra, is_active=False),))
            lineage = replace(joined, steps=joined.steps - {""}, is_active=True)
            if name == "baddbmm" and not extra.is_weight:
                lineage = replace(lineage, steps=lineage.steps | {"add"})
        elif name == "baddbmm":
            lineage = replace(lineage, steps=lineage.steps | {"add"})
        self._note(made[0], lineage)

    def _softmax(self, logits: Tensor, axis: int) -> None:
        lineage = self.lineage(logits)
        if lineage is None:
            return
        if not lineage.scores:
            self.heard.others.append(self._module())
            return
        self.heard.attentions.append(
            Attention(
                module=self._module(),
                logits=logits.detach().movedim(axis, -1).clone(),
                scores=lineage.scores,
                parameters=lineage.parameters,
                products=lineage.weights,
                steps=lineage.steps,
            )
        )

    def _fused(self, args: Any, kwargs: Any) -> None:
        """The CPU's fused attention: (query, key, value, dropout, is_causal; attn_mask, scale)."""
        query, key = args[0], args[1]
        left, right = self.lineage(query), self.lineage(key)
        scale = kwargs.get("scale")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        if key.shape[-3] != query.shape[-3]:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        logits = query @ key.mT * scale
        if len(args) > 4 and args[4]:
            ahead = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
            logits = logits.masked_fill(ahead, -torch.inf)
        mask = kwargs.get("attn_mask")
        if mask is not None:
            logits = (
                logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
            )
        added = self.lineage(mask) or Lineage()
        score = Score(left or Lineage(), right or Lineage(), tuple(logits.shape))
        self.heard.attentions.append(
            Attention(
                module=self._module(),
                logits=logits,
                scores=frozenset({score}),
                parameters=added.parameters,
                products=added.weights,
                steps=added.steps,
                is_fused=True,
            )
        )

    def _module(self) -> str:
        return self.running[-1] if self.running else ""

    def enter(self, module: nn.Module, args: Any) -> None:
        """A module begins."""
        name = self.names.get(module)
        name = self._module() if name is None else name
        self.running.append(name)
        self.heard.ran.add(name)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """A module ends."""
        if self.running:
            self.running.pop()


@contextmanager
def traced(model: nn.Module) -> Iterator[Heard]:
    """Hear a model's attentions while it runs; PyTorch's fast path would hide some."""
    tracer = Tracer(model)
    handles = [
        register_module_forward_pre_hook(tracer.enter),
        register_module_forward_hook(tracer.leave),
    ]
    was_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), tracer:
            yield tracer.heard
    finally:
        torch.backends.mha.set_fastpath_enabled(was_fast)
        for handle in handles:
            handle.remove()
        tracer.kept.clear()
