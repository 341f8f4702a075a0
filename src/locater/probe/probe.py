"""`Probe`: what attention really does in a running model, beside fused attention, unchanged."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.core.process import Fit, TokenProcess
from locater.core.theory import Profile
from locater.errors import ConfigError, InputError, LocaterError
from locater.models.layout import Skipped
from locater.models.live import LiveAttention, discover
from locater.models.recipes import RECIPES, Recipe
from locater.notebook import Shown
from locater.probe.alarms import Alarm, AlarmBook, AlarmRules
from locater.probe.rows import (
    Logits,
    Ratio,
    RealQueries,
    ScoredKeys,
    Tally,
    TokenRank,
    tally,
    token_rank,
    wide,
)
from locater.probe.watch import Place, Recorder, labels

When = Literal["always", "training", "evaluation"]


@dataclass(frozen=True, eq=False, kw_only=True)
class MeasuredHead:
    """What one head did, over all the rows that were measured; logits are in nats.

    A row is one query of one sequence.  Standard errors take the rows of a sequence to depend on
    each other and sequences not to; one sequence alone has none (NaN).

    >>> import torch
    >>> from locater import Probe
    >>> from locater.models.loading import load_model
    >>> model, _ = load_model("demo")
    >>> with Probe(model) as probe:
    ...     _ = model(torch.arange(40)[None])
    >>> head = probe.records[0]
    >>> head.layer, head.head, head.entropy > 0
    (0, 0, True)
    """

    name: str
    """Of the attention module."""
    layer: int | None
    head: int
    kind: str
    entropy: float
    """−Σ p ln p of a row, averaged over rows, in nats."""
    entropy_error: float
    max_entropy: float
    """ln T averaged over rows, T the keys that the query sees: the entropy of uniform attention."""
    rho: Profile
    """How often a key's gradient passes the softmax (Definition 1), of the rows that see the key,
    by key position."""
    rho_by_theta: Profile
    """The same by θ = i/T, where the key is the i-th of the T that the query sees: comparable
    between rows of different length; in bins that end at θ."""
    last_rho: Profile
    """`rho` of every sequence's last query alone, which is the theory's, whatever `queries` are."""
    max_logit: float
    logit_mean: Float[Tensor, " keys"]
    """Of the rows that see the key, like the variance."""
    logit_variance: Float[Tensor, " keys"]
    attention: Float[Tensor, " keys"]
    """Mean attention by key position, of the rows that see the key."""
    sink_mass: float
    """Attention on the first key that the query sees."""
    own_mass: float
    """Attention on the query's own key; NaN in cross-attention, like the distance."""
    distance: float
    """Σ p_j |t − j| with t the query's own position."""
    rows: int
    """Queries that see two keys or more, and can choose: those that the averages are over."""
    queries: int
    """The same with those that see one key alone."""

    @property
    def entropy_per_query(self) -> float:
        """The entropy averaged over all queries: that of those that see one key is 0."""
        return self.entropy * self.rows / self.queries

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and lists, of profiles ρ: what JSON needs."""
        plain = {name: _plain(value) for name, value in vars(self).items()}
        return plain | {"rho_error": _plain(self.rho.standard_error)}


_WHERE = ("sink_mass", "own_mass", "distance")
_METRICS = ("entropy", "max_logit", *_WHERE)


def _where(head: MeasuredHead) -> str:
    return f"{head.name if head.layer is None else f'layer {head.layer}'}, head {head.head}"


def _plain(value: Any) -> Any:
    if isinstance(value, Profile):
        return _plain(value.rho)
    if isinstance(value, Tensor):
        return [_plain(one) for one in value.tolist()]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Probe(Shown, Recorder):
    """Measures attention while a model runs: entropy, ρ, logits, token rank, tokens' K and Σ.

    The model's outputs, gradients and random numbers are what they are without it.

    >>> layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    >>> with Probe(layer) as probe:
    ...     _ = layer(torch.randn(8, 6, 16, generator=torch.Generator().manual_seed(0)))
    >>> [(record.name, record.head, record.rows) for record in probe.records]
    [('self_attn', 0, 8), ('self_attn', 1, 8)]
    """

    def _line(self) -> str:
        return self.summary() if self.records else "nothing measured yet"

    def _table(self) -> list[dict[str, Any]]:
        return [one.as_dict() for one in self.records]

    def __init__(
        self,
        model: nn.Module,
        *,
        queries: Literal["last", "all"] | int = "last",
        profiles: Literal["last", "all"] | int | None = None,
        every: int = 1,
        when: When = "always",
        keep: int = 1 << 28,
        generator: torch.Generator | None = None,
        rules: AlarmRules | None = None,
        strict: bool = True,
        per_head: bool = False,
        recipes: Sequence[Recipe] = RECIPES,
    ) -> None:
        """Look at `queries` of each sequence, in one of `every` forward passes of the model.

        `queries` is "last" as in the paper, "all", or a number of random ones, drawn anew for
        every call from `generator`.  `profiles` are those whose numbers by key (ρ, attention,
        logits) are taken: the same, but of "all" the last, for these need every logit.  `when`
        limits it to the model's training or evaluation mode.
        `keep` bytes of attention inputs in all are kept for `process`.  Logits that are NaN or
        infinite are an error that ends the pass; with `strict=False` an alarm, and not counted.
        `per_head` puts every head's numbers among the metrics.
        """
        profiles = ("last" if queries == "all" else queries) if profiles is None else profiles
        _check(queries, profiles, every, when, keep)
        found: list[LiveAttention] = []
        try:
            found, self.skipped = discover(model, recipes=recipes)
        except LocaterError as error:  # what recipes do not read may be seen when it is called
            self.skipped = [Skipped(name="", reason=error.message)]
        super().__init__(model, found)
        self.queries, self.profiles, self.every, self.when = queries, profiles, every, when
        self.generator = generator or torch.Generator().manual_seed(0)
        self._keep, self._keep_each = keep, keep // max(len(self.places), 1)
        self._strict, self._per_head = strict, per_head
        self._nothing_to_measure: dict[str, LocaterError] = {}
        self._book = AlarmBook(rules or AlarmRules())
        self._results: dict[str, _Results] = {}
        self.forwards = 0
        """Forward passes of the model so far, measured or not."""
        self.measured = 0
        """Forward passes measured since the last `reset`."""

    def reset(self) -> None:
        """Forget what was measured; the alarms, and what they compare with, stay."""
        self._results, self._nothing_to_measure, self.measured = {}, {}, 0

    def gather(self) -> None:
        """Make every rank's results those of all ranks together; each rank has to call this.

        Kept inputs and alarms stay each rank's own.
        """
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._results = _gathered(self._results)

    @property
    def records(self) -> list[MeasuredHead]:
        """One record per head of every attention that ran, in the order of first use."""
        return [record for results in self._found() for record in results.heads()]

    @property
    def rank(self) -> list[TokenRank]:
        """How alike the tokens are that enter each attention: is their rank collapsing?"""
        ranks = [results.rank() for results in self._found()]
        return [rank for rank in ranks if rank is not None]

    @property
    def alarms(self) -> list[Alarm]:
        """Every rule that fired so far."""
        return self._book.alarms

    @property
    def unseen(self) -> list[str]:
        """Attentions that were found in the model and did nothing that could be seen."""
        return [place.name for place in self.places.values() if place.name not in self._results]

    def inputs(self, attention: int | str) -> Float[Tensor, "samples tokens model"]:
        """The attention's inputs that were kept: whole sequences without padding, of one length.

        Of several lengths, those of the one with the most tokens are given.
        """
        results = self._one(attention)
        by_length: dict[int, list[Tensor]] = {}
        for batch in results.inputs:
            by_length.setdefault(batch.shape[1], []).append(batch)
        if not by_length:
            raise InputError(
                f"no input of {results.place.name} was kept.",
                hint="raise keep= above 0, and give sequences without padding, at least 2 tokens.",
            )
        most = max(by_length.values(), key=lambda batches: sum(one.numel() for one in batches))
        return torch.cat(most)

    def process(
        self, attention: int | str, *, centered: bool = True, fit: Fit = "least_squares"
    ) -> TokenProcess:
        """Means, kernel and covariance of the tokens that enter an attention, by layer or name.

        Its `explained` says how much of their covariance K ⊗ Σ accounts for; `fit` chooses between
        the nearest product and matched traces, which predict deep layers better.
        """
        place = self._one(attention).place
        if place.kind == "cross":
            raise InputError(
                f"{place.name} is cross-attention: queries and keys see other tokens.",
                hint="take the process of a self-attention.",
            )
        return TokenProcess.from_samples(self.inputs(attention), centered=centered, fit=fit)

    def metrics(self) -> dict[str, float]:
        """Averages over the heads of each layer, under `locater/layer_{i}/…`, for any logger."""
        found = self._found()
        metrics = {
            f"locater/{label}/{name}": value
            for label, results in zip(labels([one.place for one in found]), found, strict=True)
            for name, value in results.metrics(per_head=self._per_head).items()
            if math.isfinite(value)
        }
        return metrics | {"locater/alarms": float(len(self.alarms))}

    def summary(self) -> str:
        """One line: how sharp attention is, and where it is sharpest and loudest."""
        heads = self.records
        if not heads:
            said = [f": {alarm.message}" for alarm in self.alarms[:1]]
            return f"no head could be measured; {len(self.alarms)} alarms{''.join(said)}"
        low = min(heads, key=lambda one: one.entropy / one.max_entropy)
        loud = max(heads, key=lambda one: one.max_logit)
        share = mean(one.entropy / one.max_entropy for one in heads)
        return (
            f"{len(heads)} heads: entropy {share:.0%} of ln T on average, lowest "
            f"{low.entropy / low.max_entropy:.0%} ({low.entropy:.3g} nats) in {_where(low)}; "
            f"largest logit {loud.max_logit:.3g} in {_where(loud)}; {len(self.alarms)} alarms."
        )

    def to_jsonl(self, path: str | Path, **more: Any) -> None:
        """Append a line of plain numbers for every head to a file, with `more` (a step) in each."""
        with Path(path).open("a", encoding="utf-8") as file:
            for one in self.records:
                plain = {k: v for k, v in one.as_dict().items() if not isinstance(v, list)}
                file.write(f"{json.dumps({**more, **plain})}\n")

    def pass_begins(self) -> bool:
        """Count a forward pass; whether it is one to measure."""
        if self.when != "always" and self.model.training != (self.when == "training"):
            return False
        with self.lock:
            self.forwards += 1
            self.now.forward, self.now.results = self.forwards, dict[str, _Results]()
        return (self.now.forward - 1) % self.every == 0

    def pass_ends(self) -> None:
        """Take in what was measured, and hold it against the alarms' rules."""
        passed = self.now.results.values()
        checked = [(one.place, one.sums, one.rank()) for one in passed]
        with self.lock:
            self.measured += 1
            self._book.check(self.now.forward, checked)
            for one in passed:
                one.inputs = self._kept(one.place, one.inputs, self._results.values())
                self._results.setdefault(one.place.name, _Results(one.place)).add(one)

    def attention_called(self, place: Place, logits: Logits) -> RealQueries:
        """Measure one call; what it knows of padding is for `attention_ends`."""
        scored = logits if isinstance(logits, ScoredKeys) else None
        is_self = scored.is_self if scored else None
        if is_self is None:  # the call does not say: a recipe does, a flag, or as many as keys
            is_square = logits.shape[2] == logits.shape[3] or (scored and scored.is_causal)
            is_self = place.kind == "self" and bool(place.layout is not None or is_square)
        with torch.autocast(logits.device.type, enabled=False):
            real = RealQueries.of(logits, is_self=is_self)
            try:
                chosen, others = self._chosen(self.queries, logits, real), None
                if self.profiles != self.queries:
                    others = self._chosen(self.profiles, logits, real)
                sums = tally(logits, chosen, others, real=real)
                if sums is None:
                    raise InputError(
                        "every measured row is masked, but for one key at most.",
                        hint="check the attention mask: true means visible in "
                        "scaled_dot_product_attention, hidden in nn.MultiheadAttention.",
                    )
            except InputError as error:  # said when results are asked for, if this was all
                self._nothing_to_measure[place.name] = InputError(
                    f"{place.name}: {error.message}", hint=error.hint
                )
                return real
        bad = (~torch.isfinite(sums.entropy.values + sums.max_logit)).nonzero()[:, 0].tolist()
        if bad:
            fault = InputError(
                f"the logits of {place.name} are NaN or infinite in heads {bad}.",
                hint="look at the inputs and weights of this layer; a lower learning rate or "
                "bfloat16 instead of float16 often helps.",
            )
            if self._strict:
                raise fault
            self._book.ring_not_finite(self.now.forward, place, bad[0], fault.message)
            return real
        self.now.results.setdefault(place.name, _Results(place)).add(_Results(place, sums))
        return real

    def _chosen(
        self, queries: Literal["last", "all"] | int, logits: Logits, real: RealQueries
    ) -> Literal["last", "all"] | Tensor:
        """The queries to look at: random ones are drawn among those that may have a choice."""
        if not isinstance(queries, int):
            return queries
        may = torch.ones(logits.shape[2], dtype=torch.bool)
        if real.is_real is not None:
            may = real.is_real.any(0).cpu()
        if isinstance(logits, ScoredKeys) and logits.is_causal:
            may[0] = False  # it sees itself alone
        places = may.nonzero()[:, 0] if bool(may.any()) else torch.arange(len(may))
        with self.lock:
            order = torch.randperm(len(places), generator=self.generator)
        return places[order[:queries]].sort().values

    def attention_ends(self, place: Place, tokens: Tensor, answers: list[RealQueries]) -> None:
        """Measure the tokens that an attention was given, and keep some of them."""
        is_real = answers[0].is_real
        if is_real is not None and is_real.shape != tokens.shape[:2]:
            is_real = None
        with torch.no_grad(), torch.autocast(tokens.device.type, enabled=False):
            mine = self.now.results.setdefault(place.name, _Results(place))
            ranks = token_rank(tokens, is_real).cpu().double()
            mine.ranks = mine.ranks + torch.nn.functional.pad(ranks, (0, 1), value=1.0).sum(0)
            whole = wide(tokens if is_real is None else tokens[is_real.all(1)])
            if whole.shape[1] >= 2:
                held = (*self._results.values(), *self.now.results.values())
                kept = self._kept(place, [whole], held)
                mine.inputs += [one.to("cpu", copy=True) for one in kept]

    def _kept(self, place: Place, batches: list[Tensor], held: Iterable[_Results]) -> list[Tensor]:
        """The sequences of an attention's inputs that there is room for beside what is held."""
        sizes = [(one.place.name == place.name, part.nbytes) for one in held for part in one.inputs]
        mine = sum(size for is_mine, size in sizes if is_mine)
        room = min(self._keep - sum(size for _, size in sizes), self._keep_each - mine)
        kept = []
        for batch in batches:
            some = batch[: max(room, 0) // max(batch[:1].nbytes, 1)]
            room -= some.nbytes
            kept += [some] if len(some) else []
        return kept

    def _found(self) -> list[_Results]:
        empty = self._nothing_to_measure
        found = [one for one in self._results.values() if one.sums is not None or not empty]
        if found:
            return found
        for error in empty.values():
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

    def _one(self, attention: int | str) -> _Results:
        every = self._found()
        if isinstance(attention, str):
            found = [one for one in every if one.place.name == attention]
        else:
            found = [one for one in every if one.place.layer == attention]
            found = [one for one in found if one.place.kind == "self"] or found
        if len(found) != 1:
            raise InputError(
                f"{len(found)} attentions are called {attention!r}.",
                hint=f"give one of these names: {', '.join(one.place.name for one in every)}.",
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


@dataclass(eq=False)
class _Results:
    """What was measured of one attention."""

    place: Place
    sums: Tally | None = None
    ranks: Float[Tensor, " 4"] = field(default_factory=lambda: torch.zeros(4).double())
    """Sums of `token_rank` over the sequences, and their number."""
    inputs: list[Float[Tensor, "batch tokens model"]] = field(default_factory=list)

    def add(self, other: _Results) -> None:
        """Take in another pass."""
        if self.sums is None:
            self.sums = other.sums
        elif other.sums is not None:
            self.sums.add(other.sums)
        self.ranks = self.ranks + other.ranks
        self.inputs += other.inputs

    def heads(self) -> list[MeasuredHead]:
        """One record per head."""
        place, sums = self.place, self.sums
        if sums is None:
            return []
        logit_mean, squares = sums.logits.mean.cpu(), sums.logits_squared.cpu()
        rows, is_self = sums.logits.weights.cpu(), 1 if place.kind == "self" else math.nan
        variance = (squares / rows - logit_mean**2).clamp_min(0) * rows / (rows - 1)
        values: dict[str, Any] = {
            "entropy": sums.entropy.mean.tolist(),
            "entropy_error": sums.entropy.standard_error.tolist(),
            "max_entropy": sums.log_keys.mean.tolist(),
            "rho": _profiles(sums.gates, place.name),
            "rho_by_theta": _profiles(sums.gates_by_theta, f"{place.name}, by θ"),
            "last_rho": _profiles(sums.last_gates, f"{place.name}, last query"),
            "max_logit": sums.max_logit.tolist(),
            "logit_mean": logit_mean,
            "logit_variance": torch.where(rows > 1, variance, torch.nan),
            "attention": sums.attention.mean.cpu(),
            "sink_mass": sums.sink.mean.tolist(),
            "own_mass": (sums.own.mean * is_self).tolist(),
            "distance": (sums.distance.mean * is_self).tolist(),
            "rows": [round(count) for count in sums.entropy.weights.tolist()],
            "queries": [round(count) for count in sums.queries.tolist()],
        }
        return [
            MeasuredHead(
                name=place.name,
                layer=place.layer,
                head=head,
                kind=place.kind,
                **{name: by_head[head] for name, by_head in values.items()},
            )
            for head in range(len(sums.max_logit))
        ]

    def rank(self) -> TokenRank | None:
        """Averages over all sequences."""
        sequences = round(self.ranks[3].item())
        if not sequences:
            return None
        similarity, effective, residual = (self.ranks[:3] / sequences).tolist()
        where = self.place.name, self.place.layer
        return TokenRank(*where, similarity, effective, residual, sequences=sequences)

    def metrics(self, *, per_head: bool) -> dict[str, float]:
        """Averages over the heads, and of the tokens; where asked for each head's own."""
        metrics: dict[str, float] = {}
        heads, rank = self.heads(), self.rank()
        if heads:
            metrics = {
                "entropy": mean(head.entropy for head in heads),
                "min_entropy": min(head.entropy for head in heads),
                "rho": mean(head.rho.rho.nanmean().item() for head in heads),
                "max_logit": max(head.max_logit for head in heads),
                **{name: mean(getattr(head, name) for head in heads) for name in _WHERE},
            }
        if per_head:
            metrics |= {
                f"head_{one.head}/{name}": getattr(one, name) for one in heads for name in _METRICS
            }
        names = ("similarity", "effective_rank", "residual") if rank is not None else ()
        return metrics | {name: getattr(rank, name) for name in names}


def mean(values: Iterable[float]) -> float:
    """The average; of no numbers there is none."""
    every = list(values)
    return sum(every) / len(every)


def _profiles(gates: Ratio, label: str) -> list[Profile]:
    """ρ of each head, by position or in bins of θ."""
    rho, errors = gates.mean.cpu(), gates.count_error.cpu()
    return [
        Profile.by_token(
            rho[head], f"{label}, head {head}", source="measured", standard_error=errors[head]
        )
        for head in range(len(rho))
    ]


def _gathered(results: Mapping[str, _Results]) -> dict[str, _Results]:
    """The sums of all ranks, on every rank; inputs that were kept stay where they are."""
    cpu = torch.device("cpu")
    mine = [(name, one.place, _on(one.sums, cpu), one.ranks) for name, one in results.items()]
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, mine)
    whole: dict[str, _Results] = {}
    for rank in every:
        for name, place, sums, ranks in rank:
            whole.setdefault(name, _Results(place)).add(_Results(place, sums, ranks))
    for name, one in results.items():
        whole[name].inputs = one.inputs
        if one.sums is not None:
            whole[name].sums = _on(whole[name].sums, one.sums.max_logit.device)
    return whole


def _on(thing: Any, device: torch.device) -> Any:
    """A tensor, or sums of them, on another device."""
    if isinstance(thing, (Tally, Ratio)):
        parts = {part.name: _on(getattr(thing, part.name), device) for part in fields(thing)}
        return type(thing)(**parts)
    return thing.to(device) if isinstance(thing, Tensor) else thing


def _check(queries: object, profiles: object, every: int, when: str, keep: int) -> None:
    for name, value in (("queries", queries), ("profiles", profiles)):
        is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if value not in ("last", "all") and not is_count:
            raise ConfigError(
                f"{name} must be 'last', 'all' or a positive number, got {value!r}.",
                hint="'last' is the paper's choice.",
            )
    if every < 1:
        raise ConfigError(f"every must be 1 or more, got {every}.", hint="1 measures each pass.")
    if keep < 0:
        raise ConfigError(
            f"keep must be 0 bytes or more, got {keep}.", hint="0 keeps no inputs of attention."
        )
    if when not in ("always", "training", "evaluation"):
        raise ConfigError(
            f"unknown when {when!r}.", hint="choose one of: always, training, evaluation."
        )
