"""One model type put to the test: what the library says of it against what it does."""

from __future__ import annotations

import contextlib
import math
import re
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from tests.coverage import doors
from tests.coverage.compare import (
    FITS,
    SEEN,
    Fit,
    LinedUp,
    Pairing,
    Rows,
    best_fit,
    controls,
    mask_kind,
    pairings,
    turned_fit,
    visible,
)
from tests.coverage.diagnose import causes, described, is_normed
from tests.coverage.doors import Report, Told
from tests.coverage.drive import Driven, in_doubles
from tests.coverage.gains import heard, misread
from tests.coverage.tiny import built, model_class, resolved, size_of, tiny_config
from tests.coverage.truth import Attention, traced
from torch import Tensor, nn

RIGHT = FITS
"""Standard deviations of the logits; models compute angles in float32 and slopes in bfloat16."""
TEETH = 5 * FITS
"""What a control must miss by, at least."""
MASKED = 9e3
"""What a probe takes for a mask: so far below the largest logit of a row."""
MEASURED = 1e-3
"""How far a probe's mean entropy and attention may be from the model's own."""

Status = Literal[
    "verified", "partly", "wrong", "skipped", "missed", "no softmax attention", "cannot build"
]


@dataclass
class Site:
    """One attention of a model, by the weights that make its queries and keys."""

    name: str
    status: str = "missed"
    """right, declared, wrong, skipped, missed or unrun."""
    gap: float | None = None
    file_gap: float | None = None
    kind: str = ""
    why: list[str] = field(default_factory=list)
    caveats: list[str] = field(default_factory=list)
    mask: str = ""
    how: str = ""
    norm: str = ""
    """`right`, or in what the gains of the norm before it are not the model's; empty: unknown."""
    blind: list[str] = field(default_factory=list)
    """Controls that did not fail."""


@dataclass
class Record:
    """What came out for one model type."""

    family: str
    """The model type, and what was set or built otherwise."""
    model_type: str = ""
    architecture: str = ""
    status: Status = "cannot build"
    missing: list[str] = field(default_factory=list)
    """Why it is not verified."""
    transformers: str = ""
    gap: float | None = None
    file_gap: float | None = None
    attentions: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    is_named: bool = False
    """A row of the table names its model type, so that nothing is told by tensor names alone."""
    locater: str = ""
    probe: dict[str, str] = field(default_factory=dict)
    audit: str = ""
    sites: list[Site] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    dtype: str = ""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values: what JSON needs."""
        return asdict(self)


def check(family: str) -> Record:
    """Put one family to the test."""
    import transformers

    record = Record(family, resolved(family).model_type, transformers=transformers.__version__)
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            Check(record).run()
        except CannotBuildError as error:
            record.status, record.missing = "cannot build", [str(error)[:300]]
    record.seconds = round(time.perf_counter() - start, 2)
    return record


class CannotBuildError(Exception):
    """Why no tiny model of a type runs here."""


NORMED = "right but for the norm of queries and keys"


class Through(nn.Module):
    """A norm taken out: what comes in goes out."""

    def forward(self, inputs: Tensor, *_: Any, **__: Any) -> Tensor:
        """As it came."""
        return inputs


LARGEST = 30_000_000
"""Parameters of a tiny model, at most."""


class Check:
    """The steps, each of which adds to the record."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.driven = Driven()
        self.live = Report([], [])
        self.stored = Report([], [])

    def run(self) -> None:
        """All steps."""
        self.model = self.build()
        self.driven = in_doubles(self.model, self.record.model_type)
        sees = any(bool(visible(one.logits).any()) for one in self.driven.attentions)
        if not sees:  # some have no eager attention, or one that hides every key
            with contextlib.suppress(ValueError, ImportError):
                self.model = built(self.chosen, tiny_config(self.record.family), "sdpa")
                self.driven = in_doubles(self.model, self.record.model_type)
        self.record.dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        self.record.others = self.driven.others
        if not self.driven.drives:
            words = self.driven.errors[:3] or ["no inputs are known for its forward arguments"]
            raise CannotBuildError(f"it does not run: {' | '.join(words)}")
        self.record.notes += self.driven.errors[:3] if len(self.driven.drives) > 1 else []
        self.record.attentions = len(self.driven.attentions)
        self.rows = Rows(self.model)
        self.live = doors.live(self.model)
        with tempfile.TemporaryDirectory() as folder:
            self.save(Path(folder))
        self.hold_forms()
        self.record.locater = self.regularized()
        for name in ("eager", "sdpa"):
            self.record.probe[name] = self.probed(name)
        self.judge()

    def build(self) -> nn.Module:
        """A tiny random model."""
        family = self.record.family
        try:
            config = tiny_config(family)
            chosen = model_class(family, config)
            if chosen is None:
                raise CannotBuildError("no class of its own: it is a part of another model")
            self.record.architecture = chosen.__name__
            size = size_of(chosen, config)
            if size > LARGEST:
                raise CannotBuildError(f"its tiny config still has {size:,} parameters")
            self.chosen = chosen
            return built(chosen, tiny_config(family))
        except (CannotBuildError, TimeoutError, MemoryError):
            raise
        except Exception as error:
            first = (str(error).strip() or type(error).__name__).splitlines()
            raise CannotBuildError(f"{type(error).__name__}: {' '.join(first[:2])}") from error

    def save(self, folder: Path) -> None:
        """Save it, read it back as a user would, and audit the file."""
        try:
            self.model.save_pretrained(folder)
        except Exception as error:  # noqa: BLE001
            self.record.notes.append(
                f"save_pretrained fails: {type(error).__name__}: {error}"[:200]
            )
            self.record.audit = "not saved"
            return
        self.stored = doors.stored(folder)
        try:
            told = doors.audited(folder)
            heads = sum(one.form.query.shape[0] for one in self.stored.told)
            same = told["rows"] == heads
            self.record.audit = "ok" if same else f"{told['rows']} rows for {heads} heads"
        except doors.LocaterError as error:
            self.record.audit = f"refused: {error.message}".replace(str(folder), "the checkpoint")[
                :300
            ]
        except Exception as error:  # noqa: BLE001
            self.record.audit = f"fails: {type(error).__name__}: {error}"[:300]

    def hold_forms(self) -> None:
        """Every form against the softmaxes that its weights entered, and what no form speaks of."""
        self.record.is_named = bool(self.live.told) and all(one.is_named for one in self.live.told)
        self.record.skipped = sorted({one.reason for one in self.live.passed})[:6]
        taken: set[int] = set()
        self.fits: dict[str, list[tuple[Pairing, Fit]]] = {}
        self.normed: list[tuple[Told, Site]] = []
        for told in self.live.told:
            site, runs = self.site(told, self.live)
            self.fits[told.name] = runs
            taken |= {id(pairing.attention) for pairing, _ in runs}
            self.record.sites.append(site)
        self.in_file()
        self.without_norms()
        self.fused_instead()
        self.hold_gains()
        seen: set[str] = set()
        for attention in self.driven.attentions:
            if id(attention) not in taken:
                site = self.unspoken(attention)
                if site.name not in seen:
                    self.record.sites.append(site)
                    seen.add(site.name)

    def hold_gains(self) -> None:
        """The gains of the norm before each attention, against that norm in the running model."""
        known = {one.name: one for one in self.live.told if one.norm and self.fits[one.name]}
        runs = heard(self.model, self.driven.drives, {one.norm for one in known.values()})
        for site in self.record.sites:
            if site.name in known:
                told = known[site.name]
                pairs = [pairing for pairing, _ in self.fits[site.name]]
                wrong = misread(self.model, told, pairs, runs[told.norm])
                site.norm = wrong or "right"

    def site(self, told: Told, report: Report) -> tuple[Site, list[tuple[Pairing, Fit]]]:
        """One attention that the library reads."""
        site = Site(told.name, kind=told.kind, caveats=_own(told))
        runs = list(self.runs(told))
        if not runs:
            site.status, site.why = "unrun", ["it did not run in this test"]
            if self.ran(told):
                site.status, site.why = "wrong", ["its queries and keys meet in no softmax"]
            return site, runs
        known = [(pairing, fit) for pairing, fit in runs if not math.isnan(fit.gap)]
        if not known:
            site.status, site.why = "unrun", [runs[0][1].reason]
            return site, runs
        pairing, worst = max(known, key=lambda one: one[1].gap)
        site.gap = worst.gap
        site.status = "right" if worst.gap < RIGHT else "declared" if told.admits else "wrong"
        if worst.lined is not None:
            site.mask = mask_kind(worst.lined.theirs)
        if site.status == "right" and worst.lined is not None:
            if not told.turns_otherwise:
                found = controls(told, report.told, worst.lined)
                site.blind = [name for name, value in found.items() if not value > TEETH]
        elif site.status != "right":
            if site.status == "wrong" and (told.qk_norm or is_normed(pairing)):
                self.normed.append((told, site))
            site.why = causes(told, pairing, worst.every, self.shared_weight(told)) or [
                worst.reason or "not explained"
            ]
            site.how = described(pairing)
        return site, runs

    def ran(self, told: Told) -> bool:
        """Whether queries and keys of an attention were made at all."""
        every = {name for drive in self.driven.drives for name in drive.heard.ran}
        return all(
            any(name.rpartition(".")[0] in every for name in names) for names in self.weights(told)
        )

    def runs(self, told: Told) -> Iterator[tuple[Pairing, Fit]]:
        """Every softmax that these weights entered, and how well the form fits it."""
        query, key = (self.rows.owner(rows) for rows in (told.query_rows, told.key_rows))
        done: Counter[int] = Counter()
        starts: dict[tuple[int, int], int] = {}
        for pairing in pairings(self.driven.attentions, query, key):
            mine = id(pairing.query)
            place = (mine, id(pairing.attention))
            if place not in starts:
                starts[place] = done[mine]
                done[mine] += pairing.attention.logits.shape[-2]
            fit = best_fit(told, pairing, starts[place])
            if told.turns_otherwise and not fit.gap < RIGHT:
                fit = turned_fit(told, pairing, starts[place]) or fit
            yield pairing, fit

    def in_file(self) -> None:
        """The forms of the saved checkpoint, against the same softmaxes."""
        sites = {site.name: site for site in self.record.sites}
        for told in self.live.told:
            site = sites[told.name]
            twin = self.twin(told)
            if twin is None:
                where = "not saved" if self.record.audit == "not saved" else self._passed(told)
                site.why.append(f"file: {where}")
                continue
            other = _difference(told, twin)
            known = [fit.gap for _, fit in self.runs(twin) if not math.isnan(fit.gap)]
            site.file_gap = max(known, default=None) if other else site.gap
            if other:
                site.why.append(f"file against live: {other}")
            if site.status == "right" and site.file_gap is not None and site.file_gap >= RIGHT:
                site.status = "declared" if twin.admits else "wrong"

    def twin(self, told: Told) -> Told | None:
        """The same attention as the file tells it."""
        mine = self.weights(told)
        return next((one for one in self.stored.told if self.weights(one) == mine), None)

    def shared_weight(self, told: Told) -> Tensor | None:
        """The parameter that holds queries and keys both."""
        query, key = self.weights(told)
        names = sorted(query & key)
        if not names:
            return None
        every = dict(self.model.named_parameters(remove_duplicate=False))
        weight, width = every[names[0]].detach(), told.form.query.shape[-1]
        if weight.ndim != 2:
            return None
        weight = weight if weight.shape[1] == width else weight.mT
        bias = every.get(names[0].removesuffix("weight") + "bias")
        return weight if bias is None else torch.cat((weight, bias.detach()[:, None]), 1)

    def without_norms(self) -> None:
        """Forms of normalized queries and keys, on the same model with those norms taken out."""
        if not self.normed:
            return
        names = {one for told, _ in self.normed for one in self.norm_names(told)}
        model = built(self.chosen, tiny_config(self.record.family))
        model = model.to(next(self.model.parameters()).dtype)
        for name in names:
            parent, _, child = name.rpartition(".")
            if any(parent == one or parent.startswith(f"{one}.") for one in names):
                continue  # it goes with the one around it
            setattr(model.get_submodule(parent), child, Through())
        heard = []
        for drive in self.driven.drives:
            with traced(model) as run, contextlib.suppress(Exception):
                drive.run(model)
            heard += run.attentions
        for told, site in self.normed:
            query, key = self.weights(told)
            runs = [(one, best_fit(told, one)) for one in pairings(heard, query, key)]
            runs = [one for one in runs if not math.isnan(one[1].gap)]
            site.why = [one for one in site.why if one.startswith("file")]
            if not runs:
                site.why.insert(0, "norm of queries and keys; not tested without it")
                continue
            pairing, worst = max(runs, key=lambda one: one[1].gap)
            if worst.gap < RIGHT:
                site.why.insert(0, NORMED if told.qk_norm else f"{NORMED}, which no caveat names")
                site.status = "wrong"
            else:
                site.status = "wrong"
                more = causes(told, pairing, worst.every, self.shared_weight(told)) or [
                    worst.reason or "not explained"
                ]
                site.why = ["beside the norm of queries and keys", *more, *site.why]

    def fused_instead(self) -> None:
        """Forms that do not fit eager attention may fit sdpa, where a model's two differ."""
        sites = {site.name: site for site in self.record.sites}
        wrong = [one for one in self.live.told if _misfits(sites[one.name])]
        if not wrong:
            return
        heard: list[Attention] = []
        with contextlib.suppress(ValueError, ImportError, RuntimeError, KeyError, TypeError):
            model = built(self.chosen, tiny_config(self.record.family), "sdpa")
            model = model.to(next(self.model.parameters()).dtype)
            for drive in self.driven.drives:
                with traced(model) as run:
                    drive.run(model)
                heard += run.attentions
        for told in wrong:
            gaps = [best_fit(told, one).gap for one in pairings(heard, *self.weights(told))]
            if gaps and max(gaps) < RIGHT:
                site, twin = sites[told.name], self.twin(told)
                site.status, site.gap, site.file_gap = "right", max(gaps), None
                site.why = [one for one in site.why if one.startswith("file")]
                if twin is not None:
                    fits = [best_fit(twin, one) for one in pairings(heard, *self.weights(told))]
                    site.file_gap = max(one.gap for one in fits)
                    site.status = "right" if site.file_gap < RIGHT else "wrong"
                self.record.notes.append(
                    f"{told.name}: held against sdpa, which eager differs from"
                )

    def norm_names(self, told: Told) -> set[str]:
        """The modules that normalize an attention's queries and keys."""
        found = set()
        for pairing, _ in self.fits.get(told.name, ()):
            for score in pairing.attention.scores:
                for name in score.left.parameters | score.right.parameters:
                    if re.search(r"norm|ln", name, re.IGNORECASE):
                        found.add(name.rpartition(".")[0])
        pattern = re.compile(
            rf"{re.escape(told.name)}\.(?:\w*_)?(?:q|k|qk|query|key)_?\w*norm", re.IGNORECASE
        )
        return found | {name for name, _ in self.model.named_modules() if pattern.fullmatch(name)}

    def weights(self, told: Told) -> tuple[frozenset[str], frozenset[str]]:
        """The live parameters behind a told form."""
        return self.rows.owner(told.query_rows), self.rows.owner(told.key_rows)

    def _passed(self, told: Told) -> str:
        reasons = [one.reason for one in self.stored.passed if one.name in ("", told.name)]
        return reasons[0] if reasons else "not read"

    def unspoken(self, attention: Attention) -> Site:
        """A softmax of the model that no form speaks of."""
        scores = list(attention.scores)
        weights = sorted(
            {one for score in scores for one in score.left.weights | score.right.weights}
        )
        site = Site(attention.module, how=", ".join(weights)[:300])
        own = {name for name, _ in self.model.get_submodule(attention.module).named_parameters()}
        if own and not any(name.startswith(f"{attention.module}.") for name in weights):
            weights = []  # a learned query on hidden states as they are: over layers, say
        if not weights:
            site.status, site.why = (
                "unprojected",
                ["its queries and keys are no products of weights"],
            )
            return site
        for one in self.live.passed:
            if not one.name or any(name.startswith(f"{one.name}.") for name in weights):
                site.status, site.why = "skipped", [one.reason]
                return site
        site.why = ["no form and no reason given"]
        return site

    def regularized(self) -> str:
        """Whether LocAteR can hold this model."""
        try:
            value = doors.penalty(self.model)
            return "ok" if math.isfinite(value) else "no finite gradient"
        except doors.LocaterError as error:
            return f"refused: {error.message}"[:200]
        except Exception as error:  # noqa: BLE001
            return f"fails: {type(error).__name__}: {error}"[:200]

    def probed(self, implementation: str) -> str:
        """Whether a probe measures what the model does, in one of its implementations."""
        model = self.model
        if implementation != "eager":
            try:
                config = tiny_config(self.record.family)
                model = built(self.chosen, config, implementation).to(
                    next(model.parameters()).dtype
                )
            except (TimeoutError, MemoryError):
                raise
            except Exception as error:  # noqa: BLE001
                return f"not offered: {error}"[:120]
        told = Measured()
        for drive in self.driven.drives:
            try:
                part = model.get_submodule(drive.name) if drive.name else model
                probe = doors.Probe(part, queries="all", profiles="all")
                with torch.no_grad(), probe:
                    drive.run(model)
                records = probe.records
            except doors.LocaterError as error:
                return f"refused: {error.message}"[:200]
            except (TimeoutError, MemoryError):
                raise
            except Exception as error:  # noqa: BLE001
                return f"fails: {type(error).__name__}: {error}"[:200]
            mine = told.compared(
                records, drive.name, self.events(drive.heard.attentions), self.live.told
            )
            if implementation != "eager" and not mine.worst < MEASURED:
                with traced(model) as heard:
                    drive.run(model)
                again = told.compared(
                    records, drive.name, self.events(heard.attentions), self.live.told
                )
                if again.worst < MEASURED:
                    self.record.notes.append(f"{implementation} attends otherwise than eager does")
                    mine = again
            told = mine
        if told.loose:
            self.record.notes.append("a probe counts keys as seen that a finite mask hides")
        return told.words()

    def events(self, heard: list[Attention]) -> dict[str, list[LinedUp]]:
        """The logits of every attention that the library reads, by its name."""
        found: dict[str, list[LinedUp]] = {}
        for told in self.live.told:
            runs = pairings(heard, *self.weights(told))
            own = [one for one in runs if f"{one.attention.module}.".startswith(f"{told.name}.")]
            for pairing in own or runs:  # a probe tells modules apart that share their weights
                fit = best_fit(told, pairing)
                if told.turns_otherwise and not fit.gap < RIGHT:
                    fit = turned_fit(told, pairing) or fit
                if fit.lined is not None:
                    found.setdefault(told.name, []).append(fit.lined)
        return found

    def judge(self) -> None:
        """The family's status: its worst attention decides."""
        record = self.record
        record.counts = dict(Counter(site.status for site in record.sites))
        gaps = [site.gap for site in record.sites if site.gap is not None]
        record.gap = max(gaps, default=None)
        record.file_gap = max(
            (one.file_gap for one in record.sites if one.file_gap is not None), default=None
        )
        counts = Counter(record.counts)
        real = sum(counts[one] for one in ("right", "declared", "wrong", "skipped", "missed"))
        record.missing = list(_missing(record))
        if not real and not counts["unrun"]:
            record.status = "no softmax attention"
        elif counts["wrong"]:
            record.status = "wrong"
        elif counts["missed"]:
            record.status = "missed"
        elif counts["skipped"] == real:
            record.status = "skipped"
        else:
            record.status = "partly" if record.missing else "verified"


def _missing(record: Record) -> Iterator[str]:
    """What keeps a model type from being verified."""
    for status in ("wrong", "missed", "declared", "skipped", "unrun"):
        for words, many in Counter(
            "; ".join(site.why) for site in record.sites if site.status == status
        ).items():
            yield f"{status} ({many}): {words}"
    for site in record.sites:
        if site.status == "right" and site.why:
            yield f"{site.name}: {'; '.join(site.why)}"
        if site.norm not in ("", "right"):
            yield f"norm before {site.name}: {site.norm}"
        if site.blind:
            yield f"{site.name}: this test would not see {', '.join(site.blind)}"
    hidden = [one for one in record.sites if one.mask == "other" and not _says_window(one)]
    if hidden:
        yield f"keys are hidden in {len(hidden)} attentions and no caveat says so"
    if record.locater != "ok":
        yield f"LocAteR: {record.locater}"
    if record.audit != "ok":
        yield f"audit: {record.audit}"
    for name, words in record.probe.items():
        if words != "ok" and not words.startswith("not offered"):
            yield f"probe, {name}: {words}"


def _misfits(site: Site) -> bool:
    """It is wrong in the live model, not in the file alone."""
    return site.status == "wrong" and site.gap is not None and not site.gap < RIGHT


def _says_window(site: Site) -> bool:
    return any("window" in one or "masked" in one or "chunk" in one for one in site.caveats)


def _own(told: Told) -> list[str]:
    return [caveat for caveat in told.caveats if caveat not in doors.GENERAL]


def _difference(live: Told, file: Told) -> str:
    """In what a file's form differs from the live model's."""
    words = []
    file = _reordered(live, file)
    if not math.isclose(live.form.temperature, file.form.temperature):
        words.append(f"temperature {file.form.temperature:.4g} for {live.form.temperature:.4g}")
    if (live.form.rotary is None) != (file.form.rotary is None):
        words.append("rotation")
    elif live.form.rotary is not None and file.form.rotary is not None:
        mine, other = live.form.rotary, file.form.rotary
        if mine.layout != other.layout or not torch.equal(mine.frequencies, other.frequencies):
            words.append("rotation")
    names = ("query", "key", "query_bias", "key_bias", "distance_bias")
    if live.form.rotary is None and file.form.rotary is None and _same_products(live, file):
        names = names[-1:]  # a file may keep a head's dimensions in another order
    sides = [(name, getattr(live.form, name), getattr(file.form, name)) for name in names]
    sides += [("gain", live.gain, file.gain), ("shift", live.shift, file.shift)]
    for name, mine, other in sides:
        if (mine is None) != (other is None) or (
            mine is not None and (mine.shape != other.shape or not torch.allclose(mine, other))
        ):
            words.append(name.replace("_", " "))
    return ", ".join(words)


def _reordered(live: Told, file: Told) -> Told:
    """A file's form that turns neighbours, in the order of a live one that turns halves."""
    mine, other = live.form.rotary, file.form.rotary
    if mine is None or other is None or (mine.layout, other.layout) != ("half", "interleaved"):
        return file
    turned, form = 2 * len(other.frequencies), file.form
    order = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, form.query.shape[-2])]
    parts: dict[str, Any] = {"query": form.query[..., order, :], "key": form.key[..., order, :]}
    for name in ("query_bias", "key_bias"):
        bias = getattr(form, name)
        parts[name] = None if bias is None else bias[..., order]
    same = doors.form_changed(form, rotary=replace(other, layout="half"), **parts)
    return replace(file, form=same)


def _same_products(live: Told, file: Told) -> bool:
    """Whether two forms without a rotation give the same logits, whatever their factors."""
    sides = []
    for form in (live.form, file.form):
        query, key = form.query, form.key
        if form.query_bias is not None:
            query = torch.cat((query, form.query_bias[..., None]), -1)
        if form.key_bias is not None:
            key = torch.cat((key, form.key_bias[..., None]), -1)
        sides.append(query.mT @ key)
    mine, other = sides
    return mine.shape == other.shape and torch.allclose(mine, other)


@dataclass(frozen=True)
class Measured:
    """How far a probe's records are from the model's own logits, over all attentions."""

    worst: float = 0.0
    unseen: int = 0
    count: int = 0
    loose: bool = False
    """Keys that a finite mask hides counted as seen."""

    def compared(
        self, records: list[Any], root: str, events: dict[str, list[LinedUp]], told: list[Told]
    ) -> Measured:
        """With the records of one more run."""
        worst, unseen, count, loose = self.worst, self.unseen, self.count, self.loose
        for one in told:
            if one.name not in events:
                continue
            count += 1
            mine = _measured(records, one.name, root)
            if not mine:
                unseen += 1
                continue
            exact, other = (_distance(mine, events[one.name], hidden) for hidden in (SEEN, MASKED))
            loose = loose or other < MEASURED <= exact
            worst = max(worst, min(exact, other))
        return Measured(worst, unseen, count, loose)

    def words(self) -> str:
        """What is wrong, if anything is."""
        words = [f"{self.unseen} of {self.count} attentions unseen"] if self.unseen else []
        words += [f"off by {self.worst:.2g}"] if not self.worst < MEASURED else []
        return ", ".join(words) or ("ok" if self.count else "nothing to compare")


def _measured(records: list[Any], name: str, root: str) -> list[Any]:
    own = name.removeprefix(f"{root}.") if root else name
    return [one for one in records if one.name == own]


def _distance(records: list[Any], events: list[LinedUp], hidden: float) -> float:
    """How far measured mean entropies and attention are from the model's own logits."""
    entropies: list[Tensor] = []
    attention: list[Tensor] = []
    sees: list[Tensor] = []
    for event in events:
        logits = event.theirs if event.whole is None else event.whole  # a sink counts as a key
        seen = visible(logits, hidden)
        weights = logits.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0)
        entropy = -torch.special.xlogy(weights, weights).sum(-1)
        counts = seen.any(-1)
        entropies.append((entropy * counts).transpose(0, 1).flatten(1))
        sees.append(counts.transpose(0, 1).flatten(1))
        attention.append(weights.sum((0, 2)) / seen.sum((0, 2)))
    heads = len(records)
    if entropies[0].shape[0] != heads:
        return math.inf
    mean = torch.cat(entropies, 1).sum(1) / torch.cat(sees, 1).sum(1)
    worst = max(abs(one.entropy - mean[place].item()) for place, one in enumerate(records))
    if len(events) == 1:
        for place, one in enumerate(records):
            mine, truth = one.attention.double(), attention[0][place]
            if mine.shape != truth.shape:
                return math.inf
            both = mine.isfinite() & truth.isfinite()
            if bool(both.any()):
                worst = max(worst, (mine - truth)[both].abs().max().item())
    return worst
