"""Attention seen as it is called: fused, by a softmax, or inside PyTorch's own attention module.

In a pass that a `Recorder` records, a torch function mode sees every call to softmax and
scaled_dot_product_attention, and hooks on all modules say which of them is running.  Nothing is
replaced: the model's own call is made, with its own arguments.  `kernels` sees the others.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from weakref import WeakMethod, finalize

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.modules import module as torch_module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from locater.errors import LocaterError
from locater.models.layout import AttentionLayout
from locater.models.live import LiveAttention
from locater.models.names import layer_number, plain_name
from locater.probe import kernels
from locater.probe.rows import Logits, ScoredKeys, SoftmaxInput

_FUSED = functional.scaled_dot_product_attention
_SOFTMAX = {functional.softmax, torch.softmax, torch.special.softmax, Tensor.softmax}
_MULTIHEAD = functional.multi_head_attention_forward
_MULTIHEAD_ARGUMENTS = inspect.signature(_MULTIHEAD)
_Own = TypeVar("_Own", bound="Recorder")


@dataclass(frozen=True, eq=False)
class Place:
    """An attention of the model: what results call it."""

    name: str
    layer: int | None
    kind: str = "self"
    part: str = "model"
    layout: AttentionLayout | None = None
    """None where no recipe reads the module: it is then known by its calls alone."""

    @classmethod
    def of(cls, layout: AttentionLayout) -> Place:
        """As discovery found it."""
        return cls(layout.name, layout.layer, layout.kind, layout.part, layout)


def labels(places: Sequence[Place | AttentionLayout]) -> list[str]:
    """layer_3 where that says which; else with the part and kind; else the module's own name."""
    for label in (
        [f"layer_{place.layer}" for place in places],
        [f"{place.part}_{place.kind}/layer_{place.layer}" for place in places],
    ):
        if len(set(label)) == len(label):
            return label
    return [place.name or "model" for place in places]


class Recorder:
    """Watches a model's attention in its forward passes; what it does with it, a subclass says.

    It hooks the model between `attach` and `detach`, which is what `with` does.  A loop that calls
    parts of the model, so that hooks on the whole of it see nothing, says `begin` and `end`.
    Every thread has passes of its own: what belongs to one is kept in `now`, the rest under `lock`.
    """

    keeps_graph = False
    """Whether `attention_called` may differentiate what it is given."""

    def __init__(self, model: nn.Module, attentions: Sequence[LiveAttention]) -> None:
        self.model = model
        self.places = {
            one.module: Place.of(one.layout) for one in attentions if one.module is not None
        }
        self._names = {module: plain_name(path) for path, module in model.named_modules()}
        self._handles: list[Any] = []
        self._ends: finalize[..., Any] | None = None
        self.lock = threading.RLock()
        self.now = threading.local()

    @property
    def _watch(self) -> _Watch | None:
        """The pass that runs in this thread."""
        return getattr(self.now, "watch", None)

    def pass_begins(self) -> bool:
        """Whether to watch the forward pass that begins."""
        return True

    def attention_called(self, place: Place, logits: Logits) -> Any:
        """One call of attention; `attention_ends` is given the answers."""

    def attention_ends(self, place: Place, tokens: Tensor, answers: list[Any]) -> None:
        """An attention's module is done with the tokens that it was given."""

    def pass_ends(self) -> None:
        """A watched pass went to its end."""

    def __enter__(self: _Own) -> _Own:
        self.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def attach(self) -> None:
        """Start watching; what `with` does."""
        if self._handles:
            return
        if not kernels.has_compiled_parts(self.model):
            kernels.wrap(self, self.model)
        if isinstance(self.model, nn.TransformerEncoderLayer):
            # a hook of its own would make PyTorch leave this layer's fast path
            self._handles = [
                register_module_forward_pre_hook(self._root_only(self._before)),
                register_module_forward_hook(
                    self._root_only(self._after), with_kwargs=True, always_call=True
                ),
            ]
        else:
            self._handles = [
                self.model.register_forward_pre_hook(self._before, prepend=True),
                self.model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
            ]
            vars(self.model)["__reduce_ex__"] = partial(_without_recorders, self.model)
        # nobody else may remember to: then it ends with its model
        self._ends = finalize(self, _let_go, list(self._handles), id(self))

    def detach(self) -> None:
        """Stop watching; the results stay."""
        if self._ends is not None:
            self._ends()
        self._handles = []
        if not any(map(_is_recorders, self.model._forward_hooks.values())):
            vars(self.model).pop("__reduce_ex__", None)
        self._stop()

    def run(self, blocks: Tensor, *, batch: int = 16) -> Iterator[int]:
        """Run the model on blocks of tokens in evaluation mode; yields how many are done."""
        was_training, done = self.model.training, 0
        device = next((one.device for one in self.model.parameters()), blocks.device)
        self.model.eval()
        try:
            with self, torch.inference_mode():
                for part in blocks.split(batch):
                    self._run(part.to(device))
                    done += len(part)
                    yield done
        finally:
            self.model.train(was_training)

    def _run(self, blocks: Tensor) -> None:
        try:
            self.model(blocks)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            if "is_ours" in vars(error):
                raise
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise LocaterError(
                f"the model fails on blocks of {blocks.shape[1]} tokens: {reason[0][:200]}",
                hint="use fewer tokens than the model has positions, and a model that takes token "
                "ids alone.",
            ) from error

    def begin(self) -> None:
        """A forward pass begins; it is watched until `end` if it is one to watch."""
        if self._watch is None and self.pass_begins():  # else the model calls itself
            self.now.watch = _Watch(self, self._names)
            self.now.watch.start(self.model)

    def end(self) -> None:
        """Take in what was recorded since `begin`."""
        if self._watch is not None:
            self._stop()
            with _measuring():
                self.pass_ends()

    def _stop(self) -> None:
        if self._watch is not None:
            self.now.watch.stop()
            self.now.watch = None

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            raise LocaterError(
                f"{type(self.model).__name__} is compiled around its probe.",
                hint="probe what locater.probe.kernels.compiled(model) gives, not the model in it.",
            )
        self.begin()

    def _after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        watch = self._watch
        if watch is None:
            return
        if output is None:  # an error is on its way out: nothing of this pass counts
            self._stop()
            return
        watch.leave(module, args, kwargs, output)
        if not watch.frames:  # else the model called itself, and goes on
            self.end()

    def _root_only(self, hook: Any) -> Any:
        weak = WeakMethod(hook)  # global hooks must not keep the model alive

        def only(module: nn.Module, *rest: Any) -> None:
            found = weak()
            if found is not None and module is found.__self__.model:
                found(module, *rest)

        return only


@dataclass(eq=False)
class _Frame:
    """A module that is running, and what its attention did so far."""

    module: nn.Module
    place: Place | None = None
    is_suspended: bool = False
    """The mode was switched off for it, because PyTorch has a fast path for it."""
    is_hidden: bool = False
    """Its attention may take the fast path: it is computed again from the module's inputs."""
    answers: list[Any] = field(default_factory=list)
    """What the recorder said to each call of attention."""


@contextmanager
def _measuring() -> Iterator[None]:
    """What fails in here is a fault of ours and not the model's."""
    try:
        yield
    except Exception as error:
        vars(error)["is_ours"] = True
        raise


_looking = threading.local()  # is_on while a recorder of this thread looks at a call


class _Watch(TorchFunctionMode):
    """One forward pass: which module runs, and which attention it calls."""

    def __init__(self, recorder: Recorder, names: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self.recorder, self.names = recorder, names
        self.attentions = dict(recorder.places)
        self.frames: list[_Frame] = []
        self.handles: list[Any] = []
        self.is_entered = False
        self.thread = threading.get_ident()

    def start(self, root: nn.Module) -> None:
        """Begin; the root's own hooks have run already, so it is entered here."""
        kernels.active().append(self)
        if kernels.has_compiled_parts(root):  # its graphs call; a mode would compile them anew
            return
        self.handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._after_any, with_kwargs=True),
        ]
        self.listen(True)
        self._enter(root, ())

    def stop(self) -> None:
        """End, whatever happened."""
        for handle in self.handles:
            _remove_hook(handle)
        if self.is_entered:
            self.listen(False)
        if self in kernels.active():
            kernels.active().remove(self)

    def listen(self, is_on: bool) -> None:
        """Switch the mode on or off."""
        enter: Any = self.__enter__
        leave: Any = self.__exit__
        _ = enter() if is_on else leave(None, None, None)
        self.is_entered = is_on

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        reader = kernels.READERS.get(func)
        if reader is not None and not torch.compiler.is_compiling():
            self.see(reader, args, kwargs)
        return func(*args, **kwargs)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self.thread != threading.get_ident():  # global hooks are called in every thread
            return
        frame = _Frame(module, self.attentions.get(module))
        self.frames.append(frame)
        if _may_be_fast(module):
            # under any torch function mode PyTorch leaves its fast path, and with it the last bits
            is_inner = any(one.is_hidden for one in self.frames)
            frame.is_hidden = not is_inner and not isinstance(module, nn.TransformerEncoder)
            if self.is_entered:
                self.listen(False)
                frame.is_suspended = True

    def _after_any(self, module: nn.Module, args: Any, *rest: Any) -> None:
        """A global hook; removed in a pass, it is called there once more, without kwargs."""
        if len(rest) == 2 and self.thread == threading.get_ident():
            self.leave(module, args, *rest)

    def leave(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """A module is done: after its own hook, or again for the root, which came first."""
        if all(one.module is not module for one in self.frames):
            return
        while self.frames[-1].module is not module:  # it failed, and the model caught the error
            self._resume(self.frames.pop())
        frame = self.frames[-1]
        with _measuring():
            if frame.is_hidden:
                self._compute_again(frame, args, kwargs)
            self._resume(self.frames.pop())
            if frame.place is not None and frame.answers:
                tokens = _tokens(frame.module, frame.place, args, kwargs)
                if tokens is not None:
                    self.recorder.attention_ends(frame.place, tokens, frame.answers)

    def _resume(self, frame: _Frame) -> None:
        if frame.is_suspended:
            self.listen(True)

    def see(self, reader: kernels.Reader, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call of attention in the modules that are running."""
        known = next((one for one in reversed(self.frames) if one.place is not None), None)
        if known is None and (reader is _softmax_logits or not self.frames):
            return
        if getattr(_looking, "is_on", False):  # a recorder's own arithmetic, not the model's
            return
        frame = known or self._named_by_call(self.frames[-1])
        learns = self.recorder.keeps_graph and torch.is_grad_enabled()
        apart = saved_tensors_hooks(_same, _same)  # checkpointing counts what others save
        with (
            _measuring(),
            torch.set_grad_enabled(learns),
            apart if learns else nullcontext(),
        ):
            self._report(frame, reader(frame, *args, **kwargs))

    def see_in(self, modules: list[nn.Module], *call: Any) -> None:
        """A call of attention in a compiled graph, and the modules that it lies in."""
        if modules[-1] in self.names:
            self.frames = [_Frame(one, self.attentions.get(one)) for one in modules]
            self.see(*call)
            self.frames = []

    def _report(self, frame: _Frame, logits: Logits | None) -> None:
        assert frame.place is not None
        if logits is None:
            return
        _looking.is_on = True
        try:
            frame.answers.append(self.recorder.attention_called(frame.place, logits))
        finally:
            _looking.is_on = False

    def _named_by_call(self, frame: _Frame) -> _Frame:
        """Attention in a module that no recipe reads is called by the module that calls it."""
        name = self.names.get(frame.module, type(frame.module).__name__)
        frame.place = self.attentions[frame.module] = Place(name, layer_number(name))
        return frame

    def _compute_again(self, frame: _Frame, args: Any, kwargs: dict[str, Any]) -> None:
        """Attention that happened out of sight, from the same inputs and weights."""
        module = frame.module
        with torch.no_grad():
            given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            if isinstance(module, nn.TransformerEncoderLayer):
                tokens, hidden = _padded(given["src"])
                tokens = module.norm1(tokens) if module.norm_first else tokens
                hidden = given.get("src_key_padding_mask") if hidden is None else hidden
                inner = _Frame(module.self_attn, self.attentions.get(module.self_attn))
                inputs = (tokens, tokens, hidden, given.get("src_mask"))
            else:
                inner = frame
                query, hidden = _padded(given["query"])
                key = query if given["key"] is given["query"] else _padded(given["key"])[0]
                hidden = given.get("key_padding_mask") if hidden is None else hidden
                inputs = (query, key, hidden, given.get("attn_mask"))
            if inner.place is None:
                inner = self._named_by_call(inner)
            assert inner.place is not None
            self._report(inner, _module_logits(inner, *inputs))
            if inner is not frame:
                self.recorder.attention_ends(inner.place, inputs[0], inner.answers)


def _may_be_fast(module: nn.Module) -> bool:
    """Whether PyTorch may run this module in one fused call, which no mode can look into."""
    if isinstance(module, nn.TransformerEncoder):
        return all(_may_be_fast(layer) for layer in module.layers)
    if isinstance(module, nn.TransformerEncoderLayer):
        stock = type(module).forward is nn.TransformerEncoderLayer.forward
        if any(part._forward_hooks or part._forward_pre_hooks for part in module.modules()):
            return False
    elif isinstance(module, nn.MultiheadAttention):
        stock = type(module).forward is nn.MultiheadAttention.forward
    else:
        return False
    learns = torch.is_grad_enabled() and any(one.requires_grad for one in module.parameters())
    return stock and not module.training and not learns


def _padded(tokens: Tensor) -> tuple[Tensor, Tensor | None]:
    """Nested tokens as a padded batch, and which of them are padding (true: hidden)."""
    if not tokens.is_nested:
        return tokens, None
    lengths = torch.tensor([len(one) for one in tokens.unbind()], device=tokens.device)
    whole = tokens.to_padded_tensor(0.0)
    return whole, torch.arange(whole.shape[1], device=tokens.device) >= lengths[:, None]


def _fused_logits(
    frame: _Frame,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Logits | None:
    """The logits of scaled_dot_product_attention, whose heads are the axis before the queries."""
    if query.is_nested or key.is_nested:
        return None
    query, key = local(query), local(key)
    mask = None if attn_mask is None else local(attn_mask)
    heads = frame.place.layout.heads if frame.place and frame.place.layout else 1
    if query.ndim < 4:
        split = heads if query.ndim == 3 and query.shape[0] % heads == 0 else 1
        query, key = (side.reshape(-1, split, *side.shape[-2:]) for side in (query, key))
        if mask is not None and mask.ndim == 3:
            of_head = split if mask.shape[0] % split == 0 else 1
            mask = mask.reshape(-1, of_head, *mask.shape[-2:])
    elif query.ndim > 4:
        lead = query.shape[:-3]
        if mask is not None and mask.ndim > 4:
            mask = mask.expand(*lead, *mask.shape[-3:]).flatten(0, -4)
        query, key = query.flatten(0, -4), key.expand(*lead, *key.shape[-3:]).flatten(0, -4)
    return ScoredKeys(
        query=query,
        key=key.expand(query.shape[0], *key.shape[1:]),
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        masks=() if mask is None else (mask,),
        is_causal=is_causal,
    )


def _softmax_logits(
    frame: _Frame, input: Tensor, dim: int | None = None, *_: Any, **__: Any
) -> Logits | None:
    """What enters a softmax over keys, if it has the attention's heads."""
    layout = frame.place.layout if frame.place else None
    if layout is None or dim not in (-1, input.ndim - 1) or not input.is_floating_point():
        return None
    logits = local(input)
    sinks = int(isinstance(getattr(frame.module, "sinks", None), Tensor))  # learned, of no token
    if logits.ndim == 3 and logits.shape[0] % layout.heads == 0:
        return SoftmaxInput(logits.unflatten(0, (-1, layout.heads)), sinks)
    if logits.ndim == 4 and layout.heads % logits.shape[1] == 0:  # fewer: tensor parallelism
        return SoftmaxInput(logits, sinks)
    return None


def _multihead_logits(frame: _Frame, *args: Any, **kwargs: Any) -> Logits | None:
    """The logits of torch.nn.functional.multi_head_attention_forward, from its arguments."""
    bound = _MULTIHEAD_ARGUMENTS.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if given["use_separate_proj_weight"]:
        weights = given["q_proj_weight"], given["k_proj_weight"]
    else:
        weights = given["in_proj_weight"].chunk(3)[:2]
    bias = given["in_proj_bias"]
    biases = (None, None) if bias is None else bias.chunk(3)[:2]
    heads = given["num_heads"]
    query, key = (
        functional.linear(given[side], weight, part)
        for side, weight, part in zip(("query", "key"), weights, biases, strict=True)
    )
    if query.ndim == 2:
        query, key = query[:, None], key[:, None]
    if given["bias_k"] is not None:
        key = torch.cat([key, given["bias_k"].expand(1, key.shape[1], -1).to(key)])
    query, key = (side.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for side in (query, key))
    if given["static_k"] is not None:
        key = given["static_k"].unflatten(0, (-1, heads))
    if given["add_zero_attn"]:
        key = functional.pad(key, (0, 0, 0, 1))
    shape = (*query.shape[:3], key.shape[2])
    return ScoredKeys(
        query=query,
        key=key,
        scale=1 / math.sqrt(query.shape[-1]),
        masks=tuple(_shown(given["key_padding_mask"], given["attn_mask"], shape)),
        extra=int(given["bias_k"] is not None) + int(given["add_zero_attn"]),
        is_self=given["query"] is given["key"] and given["static_k"] is None,
    )


def _module_logits(
    frame: _Frame, query: Tensor, key: Tensor, hidden: Tensor | None, mask: Tensor | None
) -> Logits | None:
    """The logits of nn.MultiheadAttention, from its inputs and weights."""
    own: Any = frame.module
    if own.batch_first and query.ndim == 3:
        is_self = key is query
        query = query.transpose(0, 1)
        key = query if is_self else key.transpose(0, 1)
    return _multihead_logits(
        frame,
        *(query, key, key, own.embed_dim, own.num_heads, own.in_proj_weight, own.in_proj_bias),
        *(own.bias_k, own.bias_v, own.add_zero_attn, 0.0, own.out_proj.weight, None),
        key_padding_mask=hidden,
        attn_mask=mask,
        use_separate_proj_weight=own.in_proj_weight is None,
        q_proj_weight=own.q_proj_weight,
        k_proj_weight=own.k_proj_weight,
    )


def _shown(
    hidden: Tensor | None, mask: Tensor | None, shape: tuple[int, int, int, int]
) -> Iterator[Tensor]:
    """Masks of PyTorch's own attention, which hide where they are true, as the fused one's."""
    batch, heads, _, keys = shape
    masks = [] if hidden is None else [hidden.reshape(-1, 1, 1, hidden.shape[-1])]
    if mask is not None:
        masks.append(mask if mask.ndim == 2 else mask.reshape(batch, heads, *mask.shape[-2:]))
    for one in masks:
        is_bool, more = one.dtype == torch.bool, keys - one.shape[-1]
        visible = ~one if is_bool else one
        # keys that were added see everybody
        yield functional.pad(visible, (0, more), value=is_bool) if more else visible


def _tokens(
    module: nn.Module, place: Place, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """The tokens that an attention was given: its first batch of vectors of the right width."""
    width = place.layout.model if place.layout is not None else None
    for value in (*args, *kwargs.values()):
        if not isinstance(value, Tensor) or value.ndim != 3 or not value.is_floating_point():
            continue
        if width is None or value.shape[-1] == width:
            value = _padded(value)[0] if value.is_nested else value
            is_turned = isinstance(module, nn.MultiheadAttention) and not module.batch_first
            return local(value.transpose(0, 1) if is_turned else value).detach()
    return None


def _same(tensor: Tensor) -> Tensor:
    return tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a distributed tensor: under tensor parallelism, its heads."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _remove_hook(handle: Any) -> None:
    """Remove a hook wholly: torch 2.13 keeps a note of global ones, which torch.compile minds."""
    handle.remove()
    getattr(torch_module, "_global_forward_hooks_with_kwargs", {}).pop(handle.id, None)


def _let_go(handles: list[Any], recorder: int) -> None:
    for handle in handles:
        _remove_hook(handle)
    kernels.unwrap(recorder)


def _is_recorders(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), Recorder)


def _without_recorders(model: nn.Module, protocol: int) -> Any:
    """What copy and pickle are given of a watched model: the model without what watches it."""
    made = type(model).__reduce_ex__(model, protocol)
    if not (isinstance(made, tuple) and len(made) > 2 and isinstance(made[2], dict)):
        return made
    state = {name: value for name, value in made[2].items() if name != "__reduce_ex__"}
    for kind in ("_forward_hooks", "_forward_pre_hooks"):
        hooks = state.get(kind, {})
        ours = {number for number, hook in hooks.items() if _is_recorders(hook)}
        for name in (kind, f"{kind}_with_kwargs", f"{kind}_always_called"):
            if name in state:
                kept = {one: value for one, value in state[name].items() if one not in ours}
                state[name] = OrderedDict(kept)
    return (*made[:2], state, *made[3:])


kernels.READERS.update(
    {
        _FUSED: _fused_logits,
        _MULTIHEAD: _multihead_logits,
        torch.ops.higher_order.flex_attention: kernels.graph_flex_logits,
        **dict.fromkeys((*_SOFTMAX, "softmax"), _softmax_logits),
    }
)
