"""`Probe`: what attention really does in a running model, beside fused attention, unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from locater.core.process import Fit, TokenProcess
from locater.errors import ConfigError, InputError, LocaterError
from locater.models.layout import Skipped
from locater.models.live import LiveAttention, discover
from locater.models.names import plain_name
from locater.models.recipes import RECIPES
from locater.models.resolve import Recipe
from locater.probe.alarms import Alarm, AlarmBook, AlarmRules
from locater.probe.records import (
    MeasuredHead,
    Seen,
    TokenRank,
    gathered,
    head_records,
    layer_metrics,
    token_rank,
)
from locater.probe.rows import Asking, Logits, ScoredKeys, tally
from locater.probe.watch import Place, Watch, remove_hook

When = Literal["always", "training", "evaluation"]


class Probe:
    """Measures attention while a model runs: entropy, ρ, logits, token rank, tokens' K and Σ.

    The model's outputs, gradients and random numbers are what they are without it.

    >>> layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    >>> with Probe(layer) as probe:
    ...     _ = layer(torch.randn(8, 6, 16, generator=torch.Generator().manual_seed(0)))
    >>> [(record.name, record.head, record.rows) for record in probe.records]
    [('self_attn', 0, 8), ('self_attn', 1, 8)]
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        queries: Literal["last", "all"] | int = "last",
        every: int = 1,
        when: When = "always",
        keep: int = 1 << 28,
        generator: torch.Generator | None = None,
        rules: AlarmRules | None = None,
        strict: bool = True,
        recipes: Sequence[Recipe] = RECIPES,
    ) -> None:
        """Look at `queries` of each sequence, in one of `every` forward passes of the model.

        `queries` is "last" as in the paper, "all", or a number of random ones, drawn anew for
        every call from `generator`.  `when` limits it to the model's training or evaluation mode.
        `keep` bytes of attention inputs in all are kept for `process`.  Logits that are NaN or
        infinite are an error that ends the pass; with `strict=False` an alarm, and not counted.
        """
        _check(queries, every, when, keep)
        self.model, self.queries, self.every, self.when = model, queries, every, when
        self.generator = generator or torch.Generator().manual_seed(0)
        found, self.skipped = _discovered(model, recipes)
        self._places = {one.module: Place.of(one.layout) for one in found if one.module is not None}
        self._names = {module: plain_name(path) for path, module in model.named_modules()}
        self._keep, self._keep_each = keep, keep // max(len(self._places), 1)
        self._strict = strict
        self._empty: dict[str, LocaterError] = {}
        self._book = AlarmBook(rules or AlarmRules())
        self._seen: dict[str, Seen] = {}
        self._pass: dict[str, Seen] = {}
        self._watch: Watch | None = None
        self._handles: list[Any] = []
        self.forwards = 0
        """Forward passes of the model so far, measured or not."""
        self.measured = 0
        """Forward passes measured since the last `reset`."""

    def __enter__(self) -> Probe:
        self.attach()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()

    def attach(self) -> None:
        """Start watching; what `with` does."""
        if self._handles:
            return
        _refuse_compiled(self.model)
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

    def detach(self) -> None:
        """Stop watching; the results stay."""
        for handle in self._handles:
            remove_hook(handle)
        self._handles = []
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def reset(self) -> None:
        """Forget what was measured; the alarms, and what they compare with, stay."""
        self._seen, self._empty, self.measured = {}, {}, 0

    def gather(self) -> None:
        """Make every rank's results those of all ranks together; each rank has to call this.

        Kept inputs and alarms stay each rank's own.
        """
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._seen = gathered(self._seen)

    @property
    def records(self) -> list[MeasuredHead]:
        """One record per head of every attention that ran, in the order of first use."""
        return [
            record
            for seen in self._results()
            if seen.sums is not None
            for record in head_records(seen.place, seen.sums)
        ]

    @property
    def rank(self) -> list[TokenRank]:
        """How alike the tokens are that enter each attention: is their rank collapsing?"""
        ranks = [seen.rank() for seen in self._results()]
        return [rank for rank in ranks if rank is not None]

    @property
    def alarms(self) -> list[Alarm]:
        """Every rule that fired so far."""
        return self._book.alarms

    @property
    def unseen(self) -> list[str]:
        """Attentions that were found in the model and did nothing that could be seen."""
        return [one.name for one in self._places.values() if one.name not in self._seen]

    def inputs(self, attention: int | str) -> Float[Tensor, "samples tokens model"]:
        """The attention's inputs that were kept: whole sequences without padding, of one length.

        Of several lengths, those of the one with the most tokens are given.
        """
        seen = self._one(attention)
        by_length: dict[int, list[Tensor]] = {}
        for batch in seen.inputs:
            by_length.setdefault(batch.shape[1], []).append(batch)
        if not by_length:
            raise InputError(
                f"no input of {seen.place.name} was kept.",
                hint="raise keep= above 0, and give sequences without padding, at least 2 tokens.",
            )
        longest = max(by_length.values(), key=lambda batches: sum(one.numel() for one in batches))
        return torch.cat(longest)

    def process(
        self, attention: int | str, *, centered: bool = True, fit: Fit = "least_squares"
    ) -> TokenProcess:
        """Means, kernel and covariance of the tokens that enter an attention, by layer or name.

        Its `explained` says how much of their covariance K ⊗ Σ accounts for; `fit` chooses between
        the nearest product and matched traces, which predict deep layers better.
        """
        seen = self._one(attention)
        if seen.place.kind == "cross":
            raise InputError(
                f"{seen.place.name} is cross-attention: queries and keys see other tokens.",
                hint="take the process of a self-attention.",
            )
        return TokenProcess.from_samples(self.inputs(attention), centered=centered, fit=fit)

    def metrics(self) -> dict[str, float]:
        """Averages over the heads of each layer, under `locater/layer_{i}/…`, for any logger."""
        results = layer_metrics(self._results())
        results["locater/alarms"] = float(len(self.alarms))
        return results

    def begin(self) -> None:
        """Count a forward pass and, where it is one to measure, listen until `end`.

        For loops that call parts of the model, so that hooks on the whole of it see nothing.
        """
        if self._watch is not None:  # the model calls itself
            return
        if self.when != "always" and self.model.training != (self.when == "training"):
            return
        self.forwards += 1
        if (self.forwards - 1) % self.every == 0:
            _refuse_compiled(self.model)
            self._pass = {}
            self._watch = Watch(self._places, self._names, self._heard, self._left)
            self._watch.start(self.model)

    def end(self) -> None:
        """Take in what was measured since `begin`."""
        if self._watch is None:
            return
        self._watch.stop()
        self._watch = None
        self.measured += 1
        for name, seen in self._pass.items():
            if name in self._seen:
                self._seen[name].add(seen)
            else:
                self._seen[name] = seen
        self._book.check(self.forwards, [(s.place, s.sums, s.rank()) for s in self._pass.values()])

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            raise _compiled(type(self.model).__name__)
        self.begin()

    def _after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self._watch is None:
            return
        if output is None:  # an error is on its way out: nothing of this pass counts
            self._watch.stop()
            self._watch = None
            return
        self._watch.leave(module, args, kwargs, output)
        if not self._watch.frames:  # else the model called itself, and goes on
            self.end()

    def _root_only(self, hook: Any) -> Any:
        def only(module: nn.Module, *rest: Any) -> None:
            if module is self.model:
                hook(module, *rest)

        return only

    def _heard(self, place: Place, logits: Logits) -> Asking:
        """Measure one attention call; what it knows of padding is for the tokens' turn."""
        scored = logits if isinstance(logits, ScoredKeys) else None
        own = scored.is_self if scored else None
        if own is None:  # the call does not say: a recipe does, a flag, or as many queries as keys
            is_square = logits.shape[2] == logits.shape[3] or (scored and scored.is_causal)
            own = place.kind == "self" and bool(place.layout is not None or is_square)
        with _no_autocast(logits.device):
            asking = Asking.of(logits, is_self=own)
            try:
                sums = tally(logits, self._asked(logits, asking), asking=asking)
                if sums is None:
                    raise InputError(
                        "every measured row is masked, but for one key at most.",
                        hint="check the attention mask: true means visible in "
                        "scaled_dot_product_attention, hidden in nn.MultiheadAttention.",
                    )
            except InputError as error:  # said when results are asked for, if this was all
                self._empty[place.name] = InputError(
                    f"{place.name}: {error.message}", hint=error.hint
                )
                return asking
        bad = (~torch.isfinite(sums.entropy.values + sums.max_logit)).nonzero()[:, 0].tolist()
        if bad:
            fault = InputError(
                f"the logits of {place.name} are NaN or infinite in heads {bad}.",
                hint="look at the inputs and weights of this layer; a lower learning rate or "
                "bfloat16 instead of float16 often helps.",
            )
            if self._strict:
                raise fault
            self._book.ring_not_finite(self.forwards, place, bad[0], fault.message)
            return asking
        self._pass.setdefault(place.name, Seen(place)).add(Seen(place, sums))
        return asking

    def _asked(self, logits: Logits, asking: Asking) -> Literal["last", "all"] | Tensor:
        """The queries to look at: random ones are drawn among those that may have a choice."""
        if not isinstance(self.queries, int):
            return self.queries
        may = torch.ones(logits.shape[2], dtype=torch.bool)
        if asking.asks is not None:
            may = asking.asks.any(0).cpu()
        if isinstance(logits, ScoredKeys) and logits.is_causal:
            may[0] = False  # it sees itself alone
        places = may.nonzero()[:, 0] if bool(may.any()) else torch.arange(len(may))
        order = torch.randperm(len(places), generator=self.generator)
        return places[order[: self.queries]].sort().values

    def _left(self, place: Place, tokens: Tensor, heard: list[Asking]) -> None:
        """Measure the tokens that an attention was given, and keep some of them."""
        asks = heard[0].asks
        if asks is not None and asks.shape != tokens.shape[:2]:
            asks = None
        with torch.no_grad(), _no_autocast(tokens.device):
            mine = self._pass.setdefault(place.name, Seen(place))
            mine.ranks.append(token_rank(tokens, asks).cpu())
            every = [*self._seen.values(), *self._pass.values()]
            held = [
                (one.place.name == place.name, part.numel() * part.element_size())
                for one in every
                for part in one.inputs
            ]
            room = min(
                self._keep - sum(size for _, size in held),
                self._keep_each - sum(size for is_mine, size in held if is_mine),
            )
            whole = tokens if asks is None else tokens[asks.all(1)]
            whole = whole if whole.dtype == torch.float64 else whole.float()
            size = whole.shape[1] * whole.shape[2] * whole.element_size()
            if whole.shape[1] >= 2 and min(len(whole), room // size) > 0:
                mine.inputs.append(whole[: room // size].to("cpu", copy=True))

    def _results(self) -> list[Seen]:
        found = [seen for seen in self._seen.values() if seen.sums is not None or not self._empty]
        if found:
            return found
        for error in self._empty.values():
            raise error
        if not self.measured:
            raise LocaterError(
                f"{type(self.model).__name__} has not been run since the probe was attached.",
                hint="run the model itself, not a part of it, in `with Probe(model) as probe:`.",
            )
        raise LocaterError(
            f"no attention of {type(self.model).__name__} was seen in {self.measured} passes.",
            hint="a probe sees scaled_dot_product_attention, nn.MultiheadAttention, and softmax in "
            "attention that a recipe reads; of transformers load attn_implementation='sdpa'.",
        )

    def _one(self, attention: int | str) -> Seen:
        every = self._results()
        if isinstance(attention, str):
            found = [seen for seen in every if seen.place.name == attention]
        else:
            found = [seen for seen in every if seen.place.layer == attention]
            found = [seen for seen in found if seen.place.kind == "self"] or found
        if len(found) != 1:
            raise InputError(
                f"{len(found)} attentions are called {attention!r}.",
                hint=f"give one of these names: {', '.join(seen.place.name for seen in every)}.",
            )
        return found[0]


def training_probe(model: nn.Module, settings: Mapping[str, Any] | None) -> Probe:
    """A probe for training loops: in training only, no inputs kept, never the end of a run."""
    chosen: dict[str, Any] = {"when": "training", "keep": 0, "strict": False, **(settings or {})}
    return Probe(model, **chosen)


def new_metrics(probe: Probe) -> dict[str, float]:
    """The metrics of what was measured since they were last asked for; then it is forgotten."""
    metrics = probe.metrics() if probe.measured else {}
    probe.reset()
    return metrics


def _check(queries: object, every: int, when: str, keep: int) -> None:
    is_count = isinstance(queries, int) and not isinstance(queries, bool) and queries > 0
    if queries not in ("last", "all") and not is_count:
        raise ConfigError(
            f"queries must be 'last', 'all' or a positive number, got {queries!r}.",
            hint="'last' is the paper's choice.",
        )
    if every < 1 or keep < 0 or when not in ("always", "training", "evaluation"):
        raise ConfigError(
            f"every={every}, when={when!r}, keep={keep} make no sense.",
            hint="every >= 1, keep >= 0, when is 'always', 'training' or 'evaluation'.",
        )


def _discovered(
    model: nn.Module, recipes: Sequence[Recipe]
) -> tuple[list[LiveAttention], list[Skipped]]:
    """What recipes read; attention that they do not read may still be seen when it is called."""
    try:
        return discover(model, recipes=recipes)
    except LocaterError as error:
        return [], [Skipped(name="", reason=error.message)]


def _refuse_compiled(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise _compiled(type(module).__name__)


def _compiled(name: str) -> LocaterError:
    return LocaterError(
        f"{name} is compiled: what torch.compile has fused cannot be seen.",
        hint="probe the module that you compiled (compiled._orig_mod) in a pass of its own, "
        "without compilation.",
    )


def _no_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device.type, enabled=False)
