"""Auditing layer by layer: a checkpoint's file or a live model in, a table of heads out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, Literal, TypedDict, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.audit.draws import DRAWS, entropy_columns, null_columns
from locater.audit.table import LIST_COLUMNS, Audit, HeadRecord, Status, compared, judge
from locater.checkpoints.formats import GGUF_TESTED
from locater.checkpoints.open import Checkpoint, open_checkpoint
from locater.checkpoints.source import Say, silent
from locater.core.form import HeadNorm, QKForm
from locater.core.process import DENSE_TOKENS, LongProcess, ProcessName, TokenProcess
from locater.core.score import HeadMoments, LogitDraws, SampledHeads
from locater.core.spectrum import Spectrum
from locater.core.theory import REGIMES, Profile, attention_entropy, regime_of
from locater.engines import one_thread, run_all
from locater.errors import ConfigError, InputError, LocaterError, check_choice
from locater.files import packaged
from locater.models.layout import AttentionLayout, Skipped
from locater.models.live import AnyPair, discover
from locater.models.names import layer_number, part_of
from locater.models.positions import first_of
from locater.models.recipes import RECIPES, Recipe, known
from locater.models.resolve import INPUT_CAVEAT, layouts, own_config
from locater.probe.samples import LARGEST_GAP, AttentionSamples, logit_gap, readable, sampled

Report = Callable[[int, int], None]
Tensors = Mapping[str, Tensor]

_SUMS = ("trace", "trace_of_square", "frobenius_squared", "mean", "dispersion", "asymmetry", "xi",
         "eta", "r")  # fmt: skip
_ABOUT_LAYER = ("name", "part", "kind", "layer", "model", "head_dim", "temperature")
_FROM_EIGENVALUES = ("variance", "nonnormality", "spectral_norm", "stable_rank", "singular_values")
POSITIONS = 128
"""Rows keep ρ at about this many positions; regimes are read off all of them."""
_WORDS: dict[ProcessName, str] = {
    "unit-walk": "a random walk scaled to tokens of unit variance on average, as LayerNorm leaves "
    "them, with Σ = I (assumed, not measured)",
    "random-walk": "the paper's random walk, whose tokens grow with √t, with Σ = I (assumed, not "
    "measured)",
    "autoregressive": "stationary tokens of unit variance, neighbors correlated by {phi:g}, with "
    "Σ = I (assumed, not measured)",
    "independent": "independent tokens of unit variance, with Σ = I (assumed, not measured)",
}
_METHODS = {
    "gaussian": "ρ from the exact mean and variance of each score, taken to be Gaussian",
    "exact": "ρ from the exact law of each score",
}
MOST_TOKENS = 32_768
_PARAMETRIZED = (
    "its weights are stored as they are before a parametrization, which acts on them; audit the "
    "live model, or save it after torch.nn.utils.parametrize.remove_parametrizations"
)
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth")
_WIDTHS = ("hidden_size", "n_embd", "d_model")
_CHECKED = 32  # blocks on which the forms are held against the model
_BLOCK_BYTES = 48 * 2**20


@dataclass(frozen=True, kw_only=True, eq=False)
class AuditConfig:
    """What to assume of the tokens, and how much to compute."""

    tokens: int = 512
    """T, the length of the sequence; its last token asks."""
    process: ProcessName | TokenProcess = "unit-walk"
    """Assumed tokens by name, or a process of your own; then `tokens` is its length."""
    phi: float = 0.9
    """Correlation of neighbors of the autoregressive process."""
    processes: Mapping[str, TokenProcess] = field(default_factory=dict)
    """Measured tokens by attention name; they replace the assumed ones there.  `audit_model` takes
    them, and the attention itself, from the `blocks` of a text."""
    offset: int = 0
    """Distance between query and key at which a rotary form is taken."""
    gains: bool = True
    """Multiply the factors with the gains of the norm before the attention, where it is known."""
    eigenvalues: bool = True
    """Whether to take eigenvalues and singular values, and what follows from them."""
    method: Literal["gaussian", "exact"] = "gaussian"
    """How ρ is found: `gaussian`, or `exact`, which takes up to a second per head."""

    def __post_init__(self) -> None:
        length = self.process.tokens if isinstance(self.process, TokenProcess) else self.tokens
        is_named = not isinstance(self.process, TokenProcess) and not self.processes
        most = MOST_TOKENS if is_named and self.method == "gaussian" else DENSE_TOKENS
        if length > most:
            raise ConfigError(
                f"{length:,} tokens are too many.",
                hint=f"at most {MOST_TOKENS:,} of an assumed process, {DENSE_TOKENS:,} of another "
                "or with --exact; a head's regime changes little with T.",
            )
        if self.offset < 0:
            raise ConfigError(
                f"offset must be zero or more, got {self.offset}.",
                hint="it counts the tokens from the key to the query.",
            )
        check_choice("method", self.method, _METHODS)
        lengths = sorted({process.tokens for process in (self.assumed, *self.processes.values())})
        if len(lengths) > 1:
            raise ConfigError(
                f"the processes have different lengths: {', '.join(map(str, lengths))}.",
                hint=f"pass tokens={lengths[0]} or measure again.",
            )

    @cached_property
    def assumed(self) -> TokenProcess | LongProcess:
        """The tokens of layers that were not measured."""
        if isinstance(self.process, TokenProcess):
            return self.process
        if self.tokens > DENSE_TOKENS:
            return LongProcess(self.process, self.tokens, self.phi)
        return TokenProcess.named(self.process, self.tokens, phi=self.phi)

    @property
    def length(self) -> int:
        """T."""
        return self.assumed.tokens

    @property
    def words(self) -> str:
        """The tokens, in words."""
        said = "tokens of a given process"
        if not isinstance(self.process, TokenProcess):
            said = _WORDS[self.process].format(phi=self.phi)
        if self.processes:
            said = f"measured tokens of {len(self.processes)} layers; elsewhere {said}"
        return f"T = {self.length}, {said}"

    @property
    def positions(self) -> tuple[int, ...]:
        """Where rows keep ρ, from the first token to the last."""
        count = min(self.length, POSITIONS + 1)
        steps = (round(1 + k * (self.length - 1) / (count - 1)) for k in range(count))
        return tuple(dict.fromkeys(steps))


class AuditKeywords(TypedDict, total=False):
    """The fields of `AuditConfig`, given one by one."""

    tokens: int
    process: ProcessName | TokenProcess
    phi: float
    processes: Mapping[str, TokenProcess]
    offset: int
    gains: bool
    eigenvalues: bool
    method: Literal["gaussian", "exact"]


@dataclass(frozen=True, eq=False)
class Layers:
    """The attentions of a checkpoint or a model, read one at a time."""

    layouts: Sequence[AttentionLayout]
    skipped: Sequence[Skipped]
    read: Callable[[Sequence[str]], Tensors]
    name: str
    """Of the model."""
    format: str = "module"
    caveats: tuple[str, ...] = ()
    """What the checkpoint says of itself."""
    model_types: frozenset[str] = frozenset()
    """Those that the config names."""

    @classmethod
    def of_checkpoint(
        cls, checkpoint: Checkpoint, *, recipes: Sequence[Recipe] = RECIPES, gains: bool = True
    ) -> Layers:
        """The attentions of an open checkpoint."""
        attentions, skipped = layouts(checkpoint.shapes, checkpoint.config, recipes=recipes)
        skipped += _absent(attentions, skipped, checkpoint.config)
        stored = [one for one in attentions if ".parametrizations." in " ".join(one.tensors)]
        skipped += [Skipped(name=attention.name, reason=_PARAMETRIZED) for attention in stored]
        attentions = [attention for attention in attentions if attention not in stored]
        reason = _narrow(attentions, checkpoint.config)
        if reason:
            skipped += [Skipped(name=attention.name, reason=reason) for attention in attentions]
            attentions = []
        attentions = attentions if gains else [replace(one, before=None) for one in attentions]
        about = (checkpoint.name, checkpoint.format, tuple(checkpoint.caveats))
        types = frozenset(_model_types(checkpoint.config))
        return cls(attentions, skipped, checkpoint.read, *about, types)

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
        configs = [getattr(part, "config", None) for part in model.modules()]
        types = frozenset(str(getattr(config, "model_type", "")) for config in configs) - {""}
        attentions = [live.layout for live in lives]
        attentions = attentions if gains else [replace(one, before=None) for one in attentions]

        def read(names: Sequence[str]) -> Tensors:
            return {name: sources[name].read() for name in names}

        about = name or type(model).__name__
        return cls(attentions, skipped, read, about, model_types=types)

    def status(self, layout: AttentionLayout) -> tuple[Status, str]:
        """Whether a layer's form is known to give the model's own logits, and a sentence on it."""
        if layout.family not in self.model_types:
            if layout.family == "multihead":
                return "verified", "verified: nn.MultiheadAttention of torch"
            return "unverified", known(None).sentence
        found = known(layout.family)
        if self.format == "gguf" and layout.family not in GGUF_TESTED:
            return "unverified", f"unverified: no GGUF file of {layout.family} was put to the test"
        words: dict[str | None, Status] = {
            "verified": "verified", "partly": "partly", "wrong": "known gap"
        }  # fmt: skip
        return words.get(found.status, "unverified"), found.sentence

    def form(
        self, layout: AttentionLayout, tensors: Tensors, key_heads: slice = slice(None)
    ) -> QKForm:
        """Some heads' forms on tokens of unit variance: the norm's gains are in the factors.

        The norm's bias, the same for all tokens, acts on the logits as a bias of the queries.
        """
        return _gained(*self.parts(layout, tensors, key_heads, distances=2))

    def parts(
        self,
        layout: AttentionLayout,
        tensors: Tensors,
        key_heads: slice,
        distances: int,
        *,
        gains: bool = True,
    ) -> tuple[QKForm, Tensor | None]:
        """Some heads' forms as stored, and the gains that their factors are still to be multiplied
        with, so that nobody has to copy them."""
        form = layout.form(tensors, distances=distances, key_heads=key_heads)
        if form.relative is not None and (form.relative.places or distances) < distances:
            form = replace(form, relative=None)  # as its caveat says
        gain, shift = layout.gain(tensors) if gains else (None, None)
        if shift is not None:
            own = form.query.detach().double() @ shift
            bias = own if form.query_bias is None else form.query_bias.detach().double() + own
            form = replace(form, query_bias=bias)
        if form.query_norm is None and form.key_norm is None:
            return form, gain
        normed: dict[str, Any] = {
            name: _after(norm, gain, shift)
            for name in ("query_norm", "key_norm")
            if (norm := getattr(form, name)) is not None
        }
        return replace(_gained(form, gain), **normed).under(), None

    def tensors(self, layout: AttentionLayout) -> Tensors:
        """What one attention is made of; 8-bit floats as numbers that torch can multiply."""
        tensors = self.read(layout.tensors_with_norm)
        for side in (layout.query, layout.key):
            stored = tensors[side.weight]
            if not stored.is_floating_point() and side.scale is None:
                raise InputError(
                    f"{side.weight} holds {stored.dtype} and has no scale: packed or quantized "
                    "weights are not numbers of the model.",
                    hint="audit the original model, of which this was made.",
                )
        return {
            name: value.float() if value.is_floating_point() and value.element_size() < 2 else value
            for name, value in tensors.items()
        }


def _gained(form: QKForm, gain: Tensor | None) -> QKForm:
    """The form with the gains of the norm before it in its factors."""
    if gain is None:
        return form
    query, key = (part.detach().double() * gain for part in (form.query, form.key))
    return replace(form, query=query, key=key)


def _after(norm: HeadNorm, gain: Tensor | None, shift: Tensor | None) -> HeadNorm:
    """A norm of queries or keys, behind what the norm before the attention does to its tokens."""
    rows, bias = norm.rows.detach().double(), norm.bias
    if shift is not None:
        moved = rows @ shift
        bias = moved if bias is None else bias.double() + moved
    return replace(norm, rows=rows if gain is None else rows * gain, bias=bias)


def _model_types(config: Mapping[str, Any]) -> Iterator[str]:
    """The model types of a config and of its parts."""
    if isinstance(config.get("model_type"), str):
        yield config["model_type"]
    for part in config.values():
        if isinstance(part, Mapping):
            yield from _model_types(part)


@dataclass
class _Stack:
    """Layers that a config counts, and those of them that have queries and keys here."""

    counted: int
    part: str
    seen: set[int] = field(default_factory=set)

    def absent(self, *, is_alone: bool) -> Iterator[Skipped]:
        """Those that have none."""
        lost = [layer for layer in range(min(self.counted, 10_000)) if layer not in self.seen]
        if not lost or max(self.seen) >= self.counted:
            return
        shown = ", ".join(map(str, lost[:8])) + (", …" if len(lost) > 8 else "")
        name = f"layer {shown}" if len(lost) == 1 else f"layers {shown}"
        yield Skipped(
            name=name if is_alone else f"{name} of {self.part}",
            reason=f"config.json counts {self.counted} layers; these have no queries and keys "
            "here: they have no attention, share that of another, or lie in a file that was not "
            "given",
        )


def _absent(
    attentions: Sequence[AttentionLayout], skipped: Sequence[Skipped], config: Mapping[str, Any]
) -> Iterator[Skipped]:
    """Layers that the config counts and whose queries and keys are nowhere among the tensors."""
    stacks: dict[tuple[str, str, int], _Stack] = {}
    places = [(one.name, one.part, one.layer) for one in attentions if one.kind == "self"]
    seen = [(one.name, part_of(one.name), layer_number(one.name)) for one in skipped]
    for name, part, layer in (*places, *seen):
        own = own_config(name, config)
        said = first_of(own, f"{part}_layers", f"num_{part}_layers")
        counted = said or first_of(own, *_LAYERS)
        key = (str(own.get("model_type")), part if said else "", counted)
        if isinstance(counted, int) and layer is not None:
            stacks.setdefault(key, _Stack(counted, part)).seen.add(layer)
    for stack in stacks.values():
        yield from stack.absent(is_alone=len(stacks) == 1)


def _narrow(attentions: Sequence[AttentionLayout], config: Mapping[str, Any]) -> str | None:
    """Why attentions read fewer dimensions than a token of this model has, all of them the same.

    So do weights that are packed, or that a config of another model lies beside.  Models that
    narrow their tokens on purpose say so in their config or have stages of several widths.
    """
    width = next((config[key] for key in _WIDTHS if isinstance(config.get(key), int)), None)
    alone = not any(isinstance(value, Mapping) and _WIDTHS[0] in value for value in config.values())
    if width is None or not alone or any("bottleneck" in key for key in config):
        return None
    if len({attention.model for attention in attentions}) != 1 or attentions[0].model >= width:
        return None
    return (
        f"it reads {attentions[0].model} dimensions, and the model has {width}: its weights "
        "are packed, or the config is that of another model"
    )


def blocks(layout: AttentionLayout) -> Iterator[slice]:
    """Key heads that are audited together: about 50 MB of factors in float64."""
    share = layout.heads // layout.kv_heads
    bytes_each = max(1, (share + 1) * layout.head_dim * layout.model * 8)
    step = max(1, _BLOCK_BYTES // bytes_each)
    return (slice(start, start + step) for start in range(0, layout.kv_heads, step))


def audit_checkpoint(
    source: str | Path,
    settings: AuditConfig | None = None,
    *,
    base: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
    recipes: Sequence[Recipe] = RECIPES,
    workers: int | None = None,
    report: Report | None = None,
    say: Say = silent,
    **keywords: Unpack[AuditKeywords],
) -> Audit:
    """Audit a folder, a file, a URL or a hub id, one layer's queries and keys at a time.

    `base` is what a LoRA adapter stands on; `config` completes what the checkpoint says of itself;
    `workers` layers are held and computed at a time, one for files here and two for remote ones, so
    that a layer's bytes travel while the one before it is computed;
    `report(done, total)` hears of every layer, `say` where somebody has to wait.  What to assume of
    the tokens is said by `settings` or by the fields of `AuditConfig` as keywords:
    `audit_checkpoint(path, tokens=64)`.

    >>> audit = audit_checkpoint("demo", tokens=64)
    >>> audit.format, len(audit.rows)
    ('safetensors', 16)
    """
    settings = settings_of(settings, keywords)
    with open_checkpoint(source, base=base, config=config, say=say) as checkpoint:
        layers = Layers.of_checkpoint(checkpoint, recipes=recipes, gains=settings.gains)
        is_here = Path(packaged(str(source))).expanduser().exists()
        workers = workers or (1 if is_here else 2)
        audit = audit_layers(layers, settings, report, workers=workers)
        return replace(audit, bytes_read=checkpoint.bytes_read)


def audit_model(
    model: nn.Module,
    settings: AuditConfig | None = None,
    *,
    name: str | None = None,
    recipes: Sequence[Recipe] = RECIPES,
    pairs: Sequence[AnyPair] | None = None,
    blocks: Tensor | None = None,
    report: Report | None = None,
    **keywords: Unpack[AuditKeywords],
) -> Audit:
    """Audit a live model, LoRA and parametrizations as they act now; see `audit_checkpoint`.

    The model is run on `blocks` of a text (ids, blocks × tokens), if they are given: their tokens
    replace the assumed ones, heads are judged by their attention on them, and every form is held
    against the model's own logits.

    >>> audit = audit_model(nn.TransformerEncoderLayer(8, 2), tokens=16)
    >>> [(row.layer, row.head, row.head_dim) for row in audit.rows]
    [(0, 0, 4), (0, 1, 4)]
    """
    settings = settings_of(settings, keywords)
    layers = Layers.of_model(model, name=name, recipes=recipes, pairs=pairs, gains=settings.gains)
    seen: dict[str, OnText] = {}
    if blocks is not None:
        seen = on_text(model, blocks, report=report)
        processes = {name: layer.process for name, layer in seen.items()}
        settings = replace(settings, processes=processes, tokens=blocks.shape[1])
    with torch.no_grad():
        return audit_layers(layers, settings, report, seen=seen)


@dataclass(frozen=True, eq=False, kw_only=True)
class OnText:
    """What a text showed of one attention."""

    process: TokenProcess
    """Of the tokens that it read."""
    entropy: Float[Tensor, " heads"]
    """Mean entropy of the last tokens' attention, and its standard error over blocks."""
    entropy_error: Float[Tensor, " heads"]
    keys: int
    """How many keys the last token sees: fewer than all where a window hides some."""
    logit_gap: float
    """Largest difference of the form's logits from the model's own, in their deviations."""

    @classmethod
    def of(cls, samples: AttentionSamples) -> OnText:
        """Take the moments of the tokens and measure the attention."""
        own = samples.logits.double()
        form = samples.attention.form(distances=samples.inputs.shape[1])
        few = samples.inputs[:_CHECKED]
        heads = SampledHeads.of(form.to(torch.float64, torch.device("cpu")), few)
        entropy = attention_entropy(torch.softmax(own, -1))
        return cls(
            process=TokenProcess.from_samples(samples.inputs, fit="traces"),
            entropy=entropy.mean(0),
            entropy_error=entropy.std(0) / math.sqrt(len(entropy)),
            keys=int((own > -torch.inf).sum(-1).amax()),
            logit_gap=logit_gap(heads.logits(), own[:_CHECKED]),
        )


def on_text(
    model: nn.Module, blocks: Tensor, *, memory: int = 1 << 30, report: Report | None = None
) -> dict[str, OnText]:
    """What blocks of a text show of every self-attention of a model, by its name.

    Layers whose inputs together fit into `memory` bytes are taken in one pass of the model.
    """
    found = readable(model)
    if not found or len(blocks) < 8:
        raise LocaterError(
            f"{len(found)} self-attentions and {len(blocks)} blocks of text give no token process.",
            hint="give a model with self-attention and a longer text, or fewer --tokens.",
        )
    seen: dict[str, OnText] = {}
    for one in sampled(model, found, blocks, keep=len(blocks), batch=8, memory=memory):
        with one_thread(), torch.no_grad():
            seen[one.attention.layout.name] = OnText.of(one)
        if report is not None:
            report(len(seen), len(found))
    return seen


def settings_of(settings: AuditConfig | None, keywords: AuditKeywords) -> AuditConfig:
    """The settings, with the fields that keywords name; None stands for the default."""
    known = AuditConfig.__dataclass_fields__
    for name in keywords:
        check_choice("setting", name, known)
    given = {name: value for name, value in keywords.items() if value is not None}
    return replace(settings or AuditConfig(), **given)  # type: ignore[arg-type]


def audit_layers(
    layers: Layers,
    settings: AuditConfig,
    report: Report | None = None,
    chosen: Sequence[AttentionLayout] | None = None,
    *,
    seen: Mapping[str, OnText] | None = None,
    workers: int = 1,
) -> Audit:
    """Audit the attentions of an open checkpoint or a live model, or some chosen ones of them."""
    auditor = Auditor(settings, seen or {})
    wanted = layers.layouts if chosen is None else chosen
    reading = Lock()

    def work(place: int) -> list[HeadRecord] | Skipped:
        layout = wanted[place]
        try:
            with reading:
                tensors = layers.tensors(layout)
            return auditor.layer(layers, layout, tensors)
        except LocaterError as error:
            return Skipped(name=layout.name, reason=error.message)
        except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
            reason = f"its spectrum could not be computed: {str(error).splitlines()[0]}"
            return Skipped(name=layout.name, reason=reason)

    every = run_all(work, len(wanted), workers=workers, report=report)
    rows = [row for made in every if not isinstance(made, Skipped) for row in made]
    skipped = [*layers.skipped, *(made for made in every if isinstance(made, Skipped))]
    if not rows:
        reasons = "; ".join(f"{one.name or 'the model'}: {one.reason}" for one in skipped[:4])
        raise InputError(
            f"no attention of {layers.name} could be read. {reasons or 'It has no layers'}.",
            hint="the reasons say what is missing: a config (config.json, --heads), a "
            "locater.models.recipes.Recipe for its tensors, or weights that are numbers.",
        )
    return Audit(
        name=layers.name,
        format=layers.format,
        tokens=settings.length,
        process=settings.words,
        method=_METHODS[settings.method],
        positions=settings.positions,
        rows=tuple(compared(rows)),
        head=tuple(_head(settings, layers, wanted, seen or {})),
        caveats=tuple(dict.fromkeys((*layers.caveats, *_caveats(settings, layers)))),
        skipped=tuple(skipped),
    )


class Auditor:
    """Audits one layer after the other under the same settings and the same drawn tokens."""

    def __init__(self, settings: AuditConfig, seen: Mapping[str, OnText] | None = None) -> None:
        self.settings, self.seen = settings, seen or {}
        self._draws = _draws(settings.assumed)

    def layer(self, layers: Layers, layout: AttentionLayout, tensors: Tensors) -> list[HeadRecord]:
        """The rows of one attention, a few key heads at a time."""
        measured = self.settings.processes.get(layout.name)
        process = measured or self.settings.assumed
        draws = _draws(measured) if measured else self._draws
        rows: list[HeadRecord] = []
        status, _ = layers.status(layout)
        seen = self.seen.get(layout.name)
        with_gains = measured is None  # measured tokens carry them
        for key_heads in blocks(layout):
            parts = layers.parts(layout, tensors, key_heads, process.tokens, gains=with_gains)
            columns = self._columns(layout, *parts, process, draws)
            for values in zip(*(column.tolist() for column in columns.values()), strict=True):
                head = dict(zip(columns, values, strict=True)) | {"status": status}
                rows.append(_record(layout, len(rows), head, process.tokens, seen))
        return rows

    def _columns(
        self,
        layout: AttentionLayout,
        form: QKForm,
        gain: Tensor | None,
        process: TokenProcess | LongProcess,
        draws: LogitDraws,
    ) -> dict[str, Tensor]:
        settings, share = self.settings, layout.heads // layout.kv_heads
        if gain is not None and process.mean is not None:  # they read the factors themselves
            form, gain = _gained(form, gain), None
        still = form.at_offset(settings.offset)
        spectrum = plain = still.spectrum(process.covariance, share=share, gain=gain)
        if process.covariance is not None:  # the null is about the weights themselves
            plain = still.spectrum(share=share)
        columns = _spectral_columns(spectrum, eigenvalues=settings.eigenvalues)
        columns |= null_columns(
            plain, head_dim=layout.head_dim, model=layout.model, eigenvalues=settings.eigenvalues
        )
        is_cross = layout.kind == "cross"
        # on measured tokens every key is at its own distance, unless one was asked for
        turns = process.covariance is not None and not is_cross and not settings.offset
        moments = HeadMoments.of(
            form if turns else still, process, spectrum=spectrum, is_cross=is_cross
        )
        profile = Profile.by_token(moments.rho(settings.method))
        regime = regime_of(profile, columns["r"])
        kept = torch.tensor(settings.positions) - 1
        return columns | entropy_columns(draws, moments) | {
            "regime": regime.index,
            "tokens_on": regime.count,
            "first_on": regime.first,
            "last_on": regime.last,
            "peak": profile.peak,
            "rho": profile.rho[:, kept],
        }  # fmt: skip


def _draws(process: TokenProcess | LongProcess) -> LogitDraws:
    return LogitDraws.of(process, DRAWS, torch.Generator().manual_seed(0))


def _spectral_columns(spectrum: Spectrum, *, eigenvalues: bool) -> dict[str, Tensor]:
    """The columns that carry the names of `Spectrum`'s properties."""
    names = _SUMS + (_FROM_EIGENVALUES if eigenvalues else ())
    columns = {name: getattr(spectrum, name) for name in names}
    if eigenvalues:
        values = spectrum.eigenvalues
        values = values.gather(-1, values.abs().argsort(-1, descending=True))
        columns |= {"eigenvalues_real": values.real, "eigenvalues_imag": values.imag}
    return columns


def _record(
    layout: AttentionLayout, head: int, columns: dict[str, Any], tokens: int, seen: OnText | None
) -> HeadRecord:
    """The row of a head, with what was measured and the verdict."""
    row = {name: _plain(name, value) for name, value in columns.items()}
    row["regime"] = REGIMES[row["regime"]]
    if seen is not None:
        row |= {
            "measured_entropy": seen.entropy[head].item(),
            "measured_error": seen.entropy_error[head].item(),
            "logit_gap": seen.logit_gap,
        }
    verdict, reason = judge(
        entropy=row.get("measured_entropy"),
        tokens=tokens if seen is None else seen.keys,
        logit_gap=row.get("logit_gap"),
        status=row["status"],
    )
    about = {name: getattr(layout, name) for name in _ABOUT_LAYER}
    group = layout.heads // layout.kv_heads
    return HeadRecord(
        **about, **row, head=head, kv_head=head // group, verdict=verdict, reason=reason
    )


def _plain(name: str, value: Any) -> Any:
    """Lists as tuples, and None for a number that does not exist."""
    if name in LIST_COLUMNS:
        return tuple(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _head(
    settings: AuditConfig,
    layers: Layers,
    layouts: Sequence[AttentionLayout],
    seen: Mapping[str, OnText],
) -> Iterator[str]:
    """What is to be known first: are the forms the model's, and was anything measured?"""
    said = Counter(layers.status(layout)[1] for layout in layouts)
    for sentence, count in said.most_common():
        yield sentence if len(said) == 1 else f"{sentence} ({count} of {len(layouts)} layers)"
    if not seen:
        ask = "use --text FILE (blocks=) for verdicts"
        yield (
            f"no attention was measured: {ask}"
            if settings.processes
            else (
                f"no text was read: {ask}; ρ, regimes and entropies are those of assumed tokens "
                f"({settings.words})"
            )
        )
        return
    worst = max(seen.values(), key=lambda layer: layer.logit_gap).logit_gap
    wrong = [name for name, layer in seen.items() if not layer.logit_gap <= LARGEST_GAP]
    yield (
        f"measured on a text: the forms' logits differ from the model's own by at most {worst:.2g} "
        "standard deviations"
    )
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        yield (
            f"known gap: {wrong[0]}{more} of {len(seen)} layers differ by more than "
            f"{LARGEST_GAP:g}: their forms leave something out, and their heads are not judged"
        )


def _caveats(settings: AuditConfig, layers: Layers) -> Iterator[str]:
    """What holds for all rows, then what holds for some layers, each said once."""
    layouts = layers.layouts
    normed = {layout.name for layout in layouts if layout.before is not None}
    count = len(normed)
    if normed - settings.processes.keys():  # measured tokens carry their gains
        yield (
            f"the gains of the norm before the attention are part of W here ({count} of "
            f"{len(layouts)} layers)"
        )
    if settings.gains and count < len(layouts):
        yield f"no norm is known before {len(layouts) - count} attentions: W_QK stands as stored"
    if any(layout.rotary for layout in layouts):
        where = "a query and a key at the same position"
        rest = "; attention at other distances differs, and with it entropy"
        if settings.offset:
            where = f"a key {settings.offset} tokens before its query"
        elif settings.processes:
            rest = "; ρ and entropy on measured tokens have every key at its own distance"
        yield f"rotary heads are taken at offset {settings.offset}: W_Qᵀ R W_K of {where}{rest}"
    said = [
        caveat.partition(": the spectrum is")[0]  # the offset is named above
        for layout in layouts
        for caveat in layout.caveats
        if caveat != INPUT_CAVEAT or layout.name not in normed
    ]
    for caveat, many in Counter(said).items():
        yield caveat if many == len(layouts) else f"{caveat} ({many} of {len(layouts)} layers)"
