"""Attention that a torch function mode cannot see: flex, flash-attention, and compiled models.

flex_attention and the functions of flash-attention are wrapped by name while a recorder is
attached: the wrapper reports queries and keys, and calls the function itself.  A model that
`compiled` compiles has an operator before every attention of its graphs, which does the same.
"""

from __future__ import annotations

import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial, wraps
from types import FunctionType
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch._library.effects import EffectType
from torch.utils import _pytree as pytree

from locater.errors import LocaterError
from locater.probe.rows import Logits, ScoredKeys

Reader = Callable[..., Logits | None]
"""From a frame and the arguments of a call to its logits."""


_thread = threading.local()


def active() -> list[Any]:
    """The passes that are recorded in this thread now."""
    if not hasattr(_thread, "watches"):
        _thread.watches = []
    watches: list[Any] = _thread.watches
    return watches


# Functions that are wrapped by name


def flex_logits(
    frame: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    *_: Any,
    **__: Any,
) -> Logits | None:
    """The logits of flex_attention: its functions are mapped over rows, as it does itself."""
    mask_mod = getattr(block_mask, "mask_mod", block_mask)
    zero, one = torch.zeros((), dtype=torch.int32, device=query.device), query.new_zeros(())
    if score_mod is not None and score_mod(one, zero, zero, zero, zero) is one:
        score_mod = None
    return ScoredKeys(
        query=query,
        key=key.expand(query.shape[0], *key.shape[1:]),
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        score_mod=None if score_mod is None else _mapped(score_mod, scores=1),
        mask_mod=None if mask_mod is None else _mapped(mask_mod, scores=0),
    )


def graph_flex_logits(frame: Any, *args: Any) -> Logits | None:
    """The same in a compiled graph, where functions are given the tensors that they hold."""
    query, key, value, score_mod, block_mask, scale, _, *held = args
    scores, masks = held or ((), ())
    score_mod, mask_mod = (
        lambda *places, mod=mod, more=more: mod(*places, *more)
        for mod, more in ((score_mod, scores), (block_mask[-1], masks))
    )
    return flex_logits(frame, query, key, value, score_mod, mask_mod, scale)


def _mapped(function: Any, *, scores: int) -> Callable[..., Tensor]:
    """A function of single places, over the axes (sequences, heads, queries, keys) of rows."""

    def over_rows(*given: Tensor) -> Tensor:
        places = [one.flatten() for one in given[scores:]]
        mapped = function
        for axis in reversed(range(4)):
            dims = tuple(0 if other == axis else None for other in range(4))
            mapped = torch.vmap(mapped, in_dims=(0,) * scores + dims)
        return mapped(*given[:scores], *places)

    return over_rows


def _flash_logits(original: Any, frame: Any, *args: Any, **kwargs: Any) -> Logits | None:
    """The logits of flash-attention's functions, whose masks end with the last query and key."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if "qkv" in given:
        query, key = given["qkv"].unbind(2)[:2]
    else:
        query, key = given["q"], given["kv"].unbind(2)[0] if "kv" in given else given["k"]
    ends: list[Any] = [given.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k")]
    if ends[0] is None:
        sizes = [torch.full((len(query),), one.shape[1], device=one.device) for one in (query, key)]
    else:
        sizes = [end.diff() for end in ends]
        query, key = (
            nn.utils.rnn.pad_sequence(one.split(size.tolist()), batch_first=True)
            for one, size in zip((query, key), sizes, strict=True)
        )
    scale = given.get("softmax_scale")
    return ScoredKeys(
        query=query.transpose(1, 2),
        key=key.transpose(1, 2),
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        score_mod=_flash_score(given, sizes),
        mask_mod=_flash_mask(given, sizes),
    )


def _flash_mask(given: Mapping[str, Any], sizes: list[Tensor]) -> Callable[..., Tensor] | None:
    left, right = given.get("window_size") or (-1, -1)
    left, right = (-1 if side is None else side for side in (left, right))
    right = 0 if given.get("causal") else right
    if left < 0 and right < 0 and given.get("cu_seqlens_q") is None:
        return None

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own = q + (sizes[1] - sizes[0])[b]
        seen = (q < sizes[0][b]) & (k < sizes[1][b])
        seen = seen & (k >= own - left) if left >= 0 else seen
        return seen & (k <= own + right) if right >= 0 else seen

    return visible


def _flash_score(given: Mapping[str, Any], sizes: list[Tensor]) -> Callable[..., Tensor] | None:
    cap, slopes = given.get("softcap") or 0.0, given.get("alibi_slopes")
    if not cap and slopes is None:
        return None

    def scored(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        s = cap * torch.tanh(s / cap) if cap else s
        if slopes is None:
            return s
        slope = slopes[h] if slopes.ndim == 1 else slopes[b, h]
        return s - slope * (q + (sizes[1] - sizes[0])[b] - k).abs()

    return scored


_FLEX = ("torch.nn.attention.flex_attention", "transformers.integrations.flex_attention")
_FLASH = ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_interface")
_NAMES = {
    "flex_attention": _FLEX,
    "compile_friendly_flex_attention": _FLEX,
    "flash_attn_func": _FLASH,
    "flash_attn_varlen_func": _FLASH,
    "flash_attn_qkvpacked_func": _FLASH,
    "flash_attn_kvpacked_func": _FLASH,
}
_lock = threading.RLock()  # a recorder may be collected while it is held
_users: list[int] = []
"""Recorders that are attached, by id."""
_places: list[tuple[dict[str, Any], str, Any]] = []
"""Where wrappers stand: a module's names, the name and what it held."""


def wrap(user: object, model: nn.Module) -> None:
    """Put wrappers wherever modules, or parts of the model, hold functions of flex or flash."""
    with _lock:
        _users.append(id(user))
        loaded = [
            (name, getattr(sys.modules[module], name))
            for name, modules in _NAMES.items()
            for module in modules
            if hasattr(sys.modules.get(module), name)
        ]
        originals = [(name, getattr(one, "_locater_original", one)) for name, one in loaded]
        readers = {id(one): _reader(name, one) for name, one in originals}
        if not readers:
            return
        wrappers: dict[int, Any] = {}
        for space in _spaces(model):
            for name, value in list(space.items()):
                if isinstance(value, FunctionType) and not _is_ours(value):
                    original = getattr(value, "_torchdynamo_orig_callable", value)
                    reader = readers.get(id(original))
                    if reader is not None:
                        wrapper = wrappers.setdefault(id(value), _seen(value, reader))
                        _places.append((space, name, value))
                        space[name] = wrapper


def unwrap(user: int) -> None:
    """Put back what was there, when nobody is attached any more; users go by their id."""
    with _lock:
        if user in _users:
            _users.remove(user)
        while not _users and _places:
            space, name, value = _places.pop()
            if _is_ours(space.get(name)):
                space[name] = value


def _spaces(model: nn.Module) -> Iterator[dict[str, Any]]:
    for name, module in list(sys.modules.items()):
        if name in _FLEX or not name.startswith(("torch.", "locater.")):
            yield getattr(module, "__dict__", {})
    for part in model.modules():
        yield vars(part)


def _is_ours(function: Any) -> bool:
    return hasattr(function, "_locater_original")


def _reader(name: str, function: Any) -> Reader:
    return partial(_flash_logits, function) if name.startswith("flash") else flex_logits


def _seen(function: Any, reader: Reader) -> Any:
    """A function that does the same, and reports its arguments to what watches in this thread."""

    @wraps(function)
    def seen(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not active() or getattr(_thread, "is_inside", False):
            return function(*args, **kwargs)
        for watch in active():
            watch.see(reader, args, kwargs)
        entered = [watch for watch in active() if watch.is_entered]
        for watch in reversed(entered):  # what is compiled in there would be compiled again for it
            watch.listen(False)
        _thread.is_inside = True
        try:
            return function(*args, **kwargs)
        finally:
            _thread.is_inside = False
            for watch in entered:
                watch.listen(True)

    seen._locater_original = function  # type: ignore[attr-defined]
    return seen


# Compiled models

_compiled: WeakSet[nn.Module] = WeakSet()


@dataclass(frozen=True, eq=False)
class _Site:
    """An attention of a compiled graph."""

    reader: Reader
    model: ref[nn.Module]
    """What was compiled."""
    weight: str | None
    """The name of a parameter in the module that the graph is of; it comes before the tensors."""
    path: str
    """Of the attention's module in that one: a graph may serve many modules alike."""
    arguments: tuple[list[Any], Any]

    def modules(self, weight: Tensor | None) -> list[nn.Module]:
        """The modules that the attention lies in, from the compiled one inwards."""
        model = self.model()
        if model is None:
            return []
        top = ""
        if weight is not None and self.weight is not None:
            for name, one in model.named_parameters(remove_duplicate=False):
                if one.data_ptr() == weight.data_ptr() and f".{name}".endswith(f".{self.weight}"):
                    top = name.removesuffix(self.weight)
        steps = f"{top}{self.path}".strip(".").split(".")
        inner = [".".join(steps[: place + 1]) for place in range(len(steps)) if steps[0]]
        return [model, *(model.get_submodule(one) for one in inner)]


_sites: list[_Site] = []


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    """`torch.compile(model, **options)`, in whose graphs a `Probe` sees attention.

    >>> from locater import Probe
    >>> model = compiled(nn.TransformerEncoderLayer(16, 2, batch_first=True), backend="eager")
    >>> with Probe(model) as probe:
    ...     _ = model(torch.ones(8, 6, 16))
    >>> [(record.name, record.head, record.rows) for record in probe.records]
    [('self_attn', 0, 8), ('self_attn', 1, 8)]
    """
    backend = options.pop("backend", "inductor")
    if backend == "inductor":
        mode, settings = options.pop("mode", None), options.pop("options", None)
        backend = torch._TorchCompileInductorWrapper(mode, settings, options.get("dynamic"))
    elif isinstance(backend, str):
        backend = torch._dynamo.lookup_backend(backend)

    def watched(graph: Any, inputs: Any, **more: Any) -> Any:
        _insert(graph, model)
        return backend(graph, inputs, **more)

    result: Any = torch.compile(model, backend=watched, **options)
    _compiled.add(result)
    return result


def has_compiled_parts(model: nn.Module) -> bool:
    """Whether parts of a model are compiled, by `compiled`; by anybody else they are refused."""
    parts = [one for one in model.modules() if hasattr(one, "_orig_mod")]
    others = [one for one in parts if one not in _compiled]
    others += [one for one in model.modules() if one._compiled_call_impl is not None]
    if others:
        raise LocaterError(
            f"{type(others[0]).__name__} is compiled: what torch.compile has fused cannot be seen.",
            hint="compile it with locater.probe.kernels.compiled(model, …), which takes the same "
            "settings, or probe the module that you compiled (compiled._orig_mod) in a pass of its "
            "own.",
        )
    return bool(parts)


@cache
def _operator() -> Any:
    """What stands before an attention in a compiled graph, and is kept there for its effect."""

    def see(tensors: list[Tensor], site: int) -> None:
        if active():
            place, given = _sites[site], iter(tensors)
            modules = place.modules(None if place.weight is None else next(given))
            flat, spec = place.arguments
            values = [next(given) if one is _TENSOR else one for one in flat]
            args, kwargs = pytree.tree_unflatten(values, spec)
            for watch in active() if modules else ():
                watch.see_in(modules, place.reader, args, kwargs)

    schema = "(Tensor[] tensors, int site) -> ()"
    operator: Any = torch.library.custom_op("locater::see", see, mutates_args=(), schema=schema)
    operator.register_fake(lambda tensors, site: None)
    operator.register_effect(EffectType.ORDERED)
    return torch.ops.locater.see.default


_TENSOR = object()


def _insert(graph: Any, model: nn.Module) -> None:
    """Put the operator before every attention of a traced graph."""
    weight, name = next(_weights(graph), (None, None))
    for node in list(graph.graph.nodes):
        reader = READERS.get(node.target) if node.op in ("call_function", "call_method") else None
        if reader is None:
            continue
        paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        flat, spec = pytree.tree_flatten((node.args, node.kwargs))
        values = [_constant(graph, one) for one in flat]
        if any(isinstance(one, torch.fx.Node) for one in values):
            continue  # a number that only the pass knows, which no attention has
        path = paths[-1].partition(".")[2] if paths else ""
        _sites.append(_Site(reader, ref(model), name, path, (values, spec)))
        with graph.graph.inserting_before(node):
            given = [one for one, value in zip(flat, values, strict=True) if value is _TENSOR]
            given = [graph.graph.call_method("detach", (one,)) for one in [weight, *given] if one]
            graph.graph.call_function(_operator(), (given, len(_sites) - 1))
    graph.recompile()


def _weights(graph: Any) -> Iterator[tuple[Any, str]]:
    """Inputs of a graph that are parameters, and their names in the module that it is of."""
    for node in graph.graph.nodes:
        source = getattr(getattr(node, "_dynamo_source", None), "name", "")
        if re.fullmatch(r"L\['\w+'\](\._modules\['[^']+'\])*\._parameters\['\w+'\]", source):
            yield node, ".".join(re.findall(r"\['([^']+)'\]", source)[1:])


def _constant(graph: Any, value: Any) -> Any:
    """What an argument of a node is: itself, a tensor of the pass, or a part of the graph."""
    if not isinstance(value, torch.fx.Node):
        return value
    if isinstance(value.meta.get("example_value"), Tensor):
        return _TENSOR
    if value.op == "get_attr":
        part = graph.get_submodule(value.target) if isinstance(value.target, str) else None
        return value if part is None else part
    return value


READERS: dict[Any, Reader] = {}
"""Functions of a graph that are attention; what watches them fills it in."""
