"""Auditing layer by layer: a checkpoint's file or a live model in, a table of heads out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locater.audit.heads import (
    Grams,
    LogitDraws,
    RhoMethod,
    null_columns,
    rho_profile,
    spectral_columns,
)
from locater.audit.layers import Layers, blocks
from locater.audit.table import LIST_COLUMNS, Audit, HeadRecord, judge
from locater.checkpoints.open import open_checkpoint
from locater.core.form import QKForm
from locater.core.process import TokenProcess
from locater.core.score import HeadMoments
from locater.core.theory import regime_of
from locater.engines import one_thread
from locater.errors import ConfigError, InputError, LocaterError
from locater.models.layout import AttentionLayout, Skipped
from locater.models.live import AnyPair
from locater.models.recipes import RECIPES
from locater.models.resolve import INPUT_CAVEAT, Recipe

Report = Callable[[int, int], None]
Tensors = Mapping[str, Tensor]

POSITIONS = 128
"""Rows keep ρ at about this many positions; regimes are read off all of them."""
_WORDS: dict[str, str] = {
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


def named_process(name: str, tokens: int, *, phi: float = 0.9) -> TokenProcess:
    """The tokens that an audit can assume; `unit-walk` has a kernel of trace T.

    >>> named_process("unit-walk", 3).kernel.diagonal()
    tensor([0.5000, 1.0000, 1.5000], dtype=torch.float64)
    """
    if name == "autoregressive":
        return TokenProcess.autoregressive(tokens, phi)
    if name == "independent":
        return TokenProcess.independent(tokens)
    if name not in _WORDS:
        raise ConfigError(f"unknown process {name!r}.", hint=f"one of {', '.join(_WORDS)}.")
    if name == "random-walk" or tokens < 2:
        return TokenProcess.random_walk(tokens)
    step = torch.arange(1, tokens + 1, dtype=torch.float64)
    return TokenProcess(torch.minimum(step[:, None], step) * (2 / (tokens + 1)))


MOST_TOKENS = 8192


@dataclass(frozen=True, kw_only=True, eq=False)
class AuditSettings:
    """What to assume of the tokens, and how much to compute."""

    tokens: int = 512
    """T, the length of the sequence; its last token asks."""
    process: str | TokenProcess = "unit-walk"
    """Assumed tokens by name, or a process of your own; then `tokens` is its length."""
    phi: float = 0.9
    """Correlation of neighbors of the autoregressive process."""
    processes: Mapping[str, TokenProcess] = field(default_factory=dict)
    """Measured tokens by attention name; they replace the assumed ones there."""
    offset: int = 0
    """Distance between query and key at which a rotary form is taken."""
    gains: bool = True
    """Multiply the factors with the gains of the norm before the attention, where it is known."""
    eigenvalues: bool = True
    """Whether to take eigenvalues and singular values, and what follows from them."""
    method: str = "gaussian"
    """How ρ is found: `gaussian`, or `exact`, which takes up to a second per head."""

    def __post_init__(self) -> None:
        length = self.process.tokens if isinstance(self.process, TokenProcess) else self.tokens
        if length > MOST_TOKENS:
            raise ConfigError(
                f"{length:,} tokens are too many: their kernel is {length:,} × {length:,}.",
                hint=f"at most {MOST_TOKENS:,}; a head's regime changes little with T.",
            )
        if self.offset < 0:
            raise ConfigError(
                f"offset must be zero or more, got {self.offset}.",
                hint="it counts the tokens from the key to the query.",
            )
        if self.method not in _METHODS:
            raise ConfigError(
                f"unknown method {self.method!r}.", hint=f"one of {', '.join(_METHODS)}."
            )
        lengths = sorted({one.tokens for one in (self.assumed, *self.processes.values())})
        if len(lengths) > 1 and self.processes:
            raise ConfigError(
                f"the processes have different lengths: {', '.join(map(str, lengths))}.",
                hint=f"pass tokens={lengths[0]} or measure again.",
            )

    @cached_property
    def assumed(self) -> TokenProcess:
        """The tokens of layers that were not measured."""
        if isinstance(self.process, TokenProcess):
            return self.process
        return named_process(self.process, self.tokens, phi=self.phi)

    @property
    def length(self) -> int:
        """T."""
        return self.assumed.tokens

    @property
    def words(self) -> str:
        """The tokens, in words."""
        said = (
            "tokens of a given process"
            if isinstance(self.process, TokenProcess)
            else _WORDS[self.process].format(phi=self.phi)
        )
        if self.processes:
            said = f"measured tokens of {len(self.processes)} layers; elsewhere {said}"
        return f"T = {self.length}, {said}"

    @property
    def positions(self) -> tuple[int, ...]:
        """Where rows keep ρ, from the first token to the last."""
        count = min(self.length, POSITIONS + 1)
        steps = (round(1 + k * (self.length - 1) / (count - 1)) for k in range(count))
        return tuple(dict.fromkeys(steps))


def audit_checkpoint(
    source: str | Path,
    *,
    base: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
    recipes: Sequence[Recipe] = RECIPES,
    report: Report | None = None,
    **settings: Any,
) -> Audit:
    """Audit a folder, a file, a URL or a hub id, one layer's queries and keys at a time.

    `base` is what a LoRA adapter stands on; `config` completes what the checkpoint says of itself;
    `report(done, total)` hears of every layer.  The rest is `AuditSettings`.
    """
    chosen = settings_of(settings)
    with open_checkpoint(source, base=base, config=config) as checkpoint:
        layers = Layers.of_checkpoint(checkpoint, recipes=recipes, gains=chosen.gains)
        audit = audit_layers(
            layers,
            chosen,
            report,
            name=checkpoint.name,
            format=checkpoint.format,
            caveats=checkpoint.caveats,
        )
        return replace(audit, bytes_read=checkpoint.bytes_read)


def audit_model(
    model: nn.Module,
    *,
    name: str | None = None,
    recipes: Sequence[Recipe] = RECIPES,
    pairs: Sequence[AnyPair] | None = None,
    report: Report | None = None,
    **settings: Any,
) -> Audit:
    """Audit a live model, LoRA and parametrizations as they act now; see `audit_checkpoint`.

    >>> audit = audit_model(nn.TransformerEncoderLayer(8, 2), tokens=16)
    >>> [(row.layer, row.head, row.head_dim) for row in audit.rows]
    [(0, 0, 4), (0, 1, 4)]
    """
    chosen = settings_of(settings)
    layers = Layers.of_model(model, recipes=recipes, pairs=pairs, gains=chosen.gains)
    with torch.no_grad():
        return audit_layers(layers, chosen, report, name=name or type(model).__name__)


def settings_of(values: Mapping[str, Any]) -> AuditSettings:
    """Settings from keywords; None stands for the default."""
    known = AuditSettings.__dataclass_fields__
    for name in values:
        if name not in known:
            raise ConfigError(f"unknown setting {name!r}.", hint=f"one of {', '.join(known)}.")
    return AuditSettings(**{k: v for k, v in values.items() if v is not None})


def audit_layers(
    layers: Layers,
    settings: AuditSettings,
    report: Report | None = None,
    *,
    name: str,
    format: str = "module",
    caveats: Iterable[str] = (),
    chosen: Sequence[AttentionLayout] | None = None,
) -> Audit:
    """Audit the attentions of an open checkpoint or a live model, or some chosen ones of them."""
    rows: list[HeadRecord] = []
    skipped: list[Skipped] = []
    auditor = Auditor(settings)
    wanted = layers.layouts if chosen is None else chosen
    with one_thread():
        for done, layout in enumerate(wanted, 1):
            try:
                rows += auditor.layer(layers, layout, layers.tensors(layout))
            except LocaterError as error:
                skipped.append(Skipped(name=layout.name, reason=error.message))
            except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
                reason = f"its spectrum could not be computed: {str(error).splitlines()[0]}"
                skipped.append(Skipped(name=layout.name, reason=reason))
            if report is not None:
                report(done, len(wanted))
    skipped = [*layers.skipped, *skipped]
    if not rows:
        reasons = "; ".join(f"{one.name or 'the model'}: {one.reason}" for one in skipped[:4])
        raise InputError(
            f"no attention of {name} could be read. {reasons or 'It has no layers'}.",
            hint="the reasons say what is missing: a config (config.json, --heads), a "
            "locater.models.recipes.Recipe for its tensors, or weights that are numbers.",
        )
    return Audit(
        name=name,
        format=format,
        tokens=settings.length,
        process=settings.words,
        method=_METHODS[settings.method],
        positions=settings.positions,
        rows=tuple(rows),
        caveats=tuple(dict.fromkeys((*caveats, *_caveats(settings, layers)))),
        skipped=tuple(skipped),
    )


class Auditor:
    """Audits one layer after the other under the same settings and the same drawn tokens."""

    def __init__(self, settings: AuditSettings) -> None:
        self.settings = settings
        self._assumed = LogitDraws.of(settings.assumed)

    def layer(self, layers: Layers, layout: AttentionLayout, tensors: Tensors) -> list[HeadRecord]:
        """The rows of one attention, a few key heads at a time."""
        tokens = self.settings.length
        rows: list[HeadRecord] = []
        is_measured = layout.name in self.settings.processes  # then the gains are in the tokens
        gain, shift = (None, None) if is_measured else layers.gain(layout, tensors)
        for key_heads in blocks(layout):
            form = layout.form(tensors, distances=tokens, key_heads=key_heads)
            if shift is not None:
                form = layers.shifted(form, shift)
            rows += self._block(layout, form, gain, first=len(rows))
        return rows

    def _block(
        self, layout: AttentionLayout, form: QKForm, gain: Tensor | None, *, first: int
    ) -> list[HeadRecord]:
        settings, share = self.settings, layout.heads // layout.kv_heads
        process = settings.processes.get(layout.name, settings.assumed)
        options: dict[str, Any] = {"share": share, "offset": settings.offset, "gain": gain}
        grams = Grams.of(form, process.covariance, **options)
        columns = spectral_columns(grams, form.temperature, eigenvalues=settings.eigenvalues)
        plain, own = grams, columns
        if process.covariance is not None:  # the null is about the weights themselves
            plain = Grams.of(form, **options)
            own = spectral_columns(plain, form.temperature, eigenvalues=settings.eigenvalues)
        columns |= null_columns(plain, own, head_dim=layout.head_dim, model=layout.model)
        is_cross = layout.kind == "cross"
        is_turned = process.covariance is not None and form.rotary is not None and not is_cross
        if is_turned and not settings.offset:  # measured tokens: every key at its own distance
            moments = HeadMoments.of(form, process)
        else:
            moments = grams.moments(form, process, is_cross=is_cross)
        method: RhoMethod = "exact" if settings.method == "exact" else "gaussian"
        profile = rho_profile(moments, method=method)
        regime = regime_of(profile, columns["r"])
        entropy, error, bound = self._drawn(process).entropy(moments)
        kept = torch.tensor(settings.positions) - 1
        columns |= {
            "tokens_on": regime.count,
            "first_on": regime.first,
            "last_on": regime.last,
            "peak": profile.peak,
            "entropy": entropy,
            "entropy_error": error,
            "entropy_bound": bound,
            "effective_tokens": entropy.exp(),
            "rho": profile.rho[:, kept],
        }
        lists = {name: column.tolist() for name, column in columns.items()}
        return [
            _record(layout, first + head, regime.names[head], lists, head, settings.length)
            for head in range(form.query.shape[0])
        ]

    def _drawn(self, process: TokenProcess) -> LogitDraws:
        """One process' draws; measured ones are used once and not kept."""
        if process is not self.settings.assumed:
            return LogitDraws.of(process)
        return self._assumed


def _record(
    layout: AttentionLayout,
    head: int,
    regime: str,
    columns: Mapping[str, list[Any]],
    place: int,
    tokens: int,
) -> HeadRecord:
    values = {name: _plain(name, column[place]) for name, column in columns.items()}
    verdict, reason = judge(
        entropy=values["entropy"],
        entropy_bound=values["entropy_bound"],
        peak=values["peak"],
        tokens=tokens,
        qk_norm=layout.qk_norm,
    )
    return HeadRecord(
        name=layout.name,
        part=layout.part,
        kind=layout.kind,
        layer=layout.layer,
        head=head,
        kv_head=head // (layout.heads // layout.kv_heads),
        model=layout.model,
        head_dim=layout.head_dim,
        temperature=layout.temperature,
        regime=regime,
        verdict=verdict,
        reason=reason,
        **values,
    )


def _plain(name: str, value: Any) -> Any:
    """Lists as tuples, and None for a number that does not exist."""
    if name in LIST_COLUMNS:
        return tuple(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _caveats(settings: AuditSettings, layers: Layers) -> Iterator[str]:
    """What holds for all rows, then what holds for some layers, each said once."""
    layouts, count = layers.layouts, len(layers.norms)
    if layers.norms.keys() - settings.processes.keys():  # measured tokens carry their gains
        yield (
            f"the gains of the norm before the attention are part of W here ({count} of "
            f"{len(layouts)} layers)"
        )
    if settings.gains and count < len(layouts):
        yield f"no norm is known before {len(layouts) - count} attentions: W_QK stands as stored"
    if not settings.processes:
        yield (
            "no text was read: ρ, entropies and verdicts are those of assumed tokens "
            f"({settings.words})"
        )
    if any(layout.rotary for layout in layouts):
        where = (
            "a query and a key at the same position"
            if not settings.offset
            else f"a key {settings.offset} tokens before its query"
        )
        rest = (
            "; ρ and entropy on measured tokens have every key at its own distance"
            if settings.processes and not settings.offset
            else "; attention at other distances differs, and with it entropy and verdict"
        )
        yield f"rotary heads are taken at offset {settings.offset}: W_Qᵀ R W_K of {where}{rest}"
    said = [
        caveat.partition(": the spectrum is")[0]  # the offset is named above
        for layout in layouts
        for caveat in layout.caveats
        if caveat != INPUT_CAVEAT or layout.name not in layers.norms
    ]
    for caveat, many in Counter(said).items():
        yield caveat if many == len(layouts) else f"{caveat} ({many} of {len(layouts)} layers)"
