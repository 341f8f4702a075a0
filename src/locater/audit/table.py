"""The records of an audit: one row per head, the table they make, and verdicts in words.

A verdict needs a measurement: attention of the model on a text, by a form whose logits are the
model's own.  Without a text the rows hold numbers, and what stands out among the model's heads.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from statistics import median
from typing import Any, Literal, get_args

from locater.errors import InputError, needing
from locater.models.layout import Skipped
from locater.notebook import Shown
from locater.probe.samples import LARGEST_GAP

Verdict = Literal["collapsed", "uniform", "not judged", "healthy"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""Worst first."""
Status = Literal["verified", "partly", "known gap", "unverified"]
"""Whether a form is known to give the model's own logits: put to the test, in part, found wrong, or
recognized by names alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadRecord:
    """One head of one layer; columns that `Spectrum` has carry its names.

    A number that does not exist (the ξ of a form that is zero, an eigenvalue that was not asked
    for) is None.
    """

    name: str
    """The attention module's own name: `model.layers.3.self_attn`."""
    part: str
    kind: str
    layer: int
    head: int
    kv_head: int
    """The key head that this query head shares with its group."""
    model: int
    """d, the dimension of a token."""
    head_dim: int
    temperature: float
    trace: float
    trace_of_square: float
    frobenius_squared: float
    mean: float
    variance: float | None = None
    spectral_norm: float | None = None
    stable_rank: float | None = None
    asymmetry: float | None = None
    nonnormality: float | None = None
    dispersion: float
    xi: float | None = None
    eta: float
    r: float
    trace_z: float | None = None
    """tr W in standard deviations of independent factors of the same norms."""
    frobenius_ratio: float | None = None
    """‖W‖_F over that of independent factors (root mean square)."""
    spread_ratio: float | None = None
    """The eigenvalues' deviation over that of independent factors, and in its deviations."""
    spread_z: float | None = None
    norm_ratio: float | None = None
    """‖W‖₂ over that of independent factors, and in its deviations."""
    norm_z: float | None = None
    regime: str
    tokens_on: int
    first_on: int
    last_on: int
    peak: float
    """The largest ρ."""
    entropy: float
    """Mean entropy of the last token's attention under the assumed tokens, in nats."""
    entropy_error: float
    """Its standard error: it is a mean over drawn tokens."""
    entropy_bound: float
    """The least entropy that rows of logits of that norm could have, in the same draws (Eq. 9)."""
    effective_tokens: float
    """exp(entropy): how many tokens the attention rests on."""
    measured_entropy: float | None = None
    """Mean entropy of the last token's attention on the text, by the model's own logits."""
    measured_error: float | None = None
    """Its standard error over the blocks of the text."""
    logit_gap: float | None = None
    """Largest difference of the form's logits from the model's on the text, in their deviations."""
    status: Status = "unverified"
    """Whether this layer's form is known to be the model's."""
    deviation: float | None = None
    """How far the head is from the others, at most, in robust deviations."""
    deviates_in: str = ""
    """The column that this is about."""
    verdict: Verdict = "not judged"
    reason: str = ""
    """The number and the rule behind the verdict, or why there is none."""
    eigenvalues_real: tuple[float, ...] = ()
    eigenvalues_imag: tuple[float, ...] = ()
    singular_values: tuple[float, ...] = ()
    rho: tuple[float, ...] = ()
    """ρ at the audit's `positions`."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values by column."""
        return {name: getattr(self, name) for name in COLUMNS}

    @classmethod
    def from_dict(cls, values: object) -> HeadRecord:
        """The row that `to_dict` wrote, from wherever it was stored."""
        if not isinstance(values, Mapping):
            raise _edited("a row is no record")
        missing = [name for name in COLUMNS if name not in values]
        if missing:
            raise InputError(
                f"a row of an audit lacks {', '.join(missing)}.",
                hint="was it written by another version of locater?",
            )
        for column in fields(cls):
            _check(values[column.name], str(column.type), f"{column.name} of a row")
        if len(values["eigenvalues_real"]) != len(values["eigenvalues_imag"]):
            raise _edited("a row has more real parts of eigenvalues than imaginary ones, or fewer")
        plain: dict[str, Any] = {
            name: tuple(values[name]) if name in LIST_COLUMNS else values[name] for name in COLUMNS
        }
        return cls(**plain)


COLUMNS: tuple[str, ...] = tuple(one.name for one in fields(HeadRecord))
_ABOUT = ("name", "format", "tokens", "process", "method")
LIST_COLUMNS = ("eigenvalues_real", "eigenvalues_imag", "singular_values", "rho")


@dataclass(frozen=True, kw_only=True, repr=False)
class Audit(Shown):
    """A table of heads, what it rests on, and everything that could not be read.

    >>> from locater import audit_checkpoint
    >>> audit = audit_checkpoint("demo", tokens=32)
    >>> len(audit.rows), audit.rows[0].status
    (16, 'verified')
    """

    _columns = ("layer", "head", "status", "verdict", "entropy", "regime", "tokens_on", "r", "eta",
                "deviates_in", "deviation")  # fmt: skip

    name: str
    format: str
    """`safetensors`, `gguf`, `module`, …"""
    tokens: int
    """T, the length of the sequence; its last token asks."""
    process: str
    """The tokens that were assumed or measured, in words."""
    method: str
    """How ρ was computed, in words."""
    positions: tuple[int, ...]
    """The token positions, counted from 1, at which the rows keep ρ."""
    rows: tuple[HeadRecord, ...]
    head: tuple[str, ...] = ()
    """What is to be known first: whether the forms are the model's, and what was measured."""
    caveats: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = field(default=())
    bytes_read: int = 0

    def _line(self) -> str:
        return f"{self.name}, {len(self.rows)} heads"

    def _table(self) -> list[dict[str, Any]]:
        return [row.to_dict() for row in self.rows]

    def __post_init__(self) -> None:
        """Names come from files: what no text can hold is replaced before anybody writes it."""
        for one in fields(self):
            object.__setattr__(self, one.name, _written(getattr(self, one.name)))

    @property
    def is_measured(self) -> bool:
        """Whether a text was read."""
        return any(row.measured_entropy is not None for row in self.rows)

    @property
    def summary(self) -> str:
        """One paragraph."""
        counts = Counter(row.verdict for row in self.rows)
        said = ", ".join(f"{counts[one]} {one}" for one in VERDICTS if counts[one])
        if not self.is_measured:
            out = sum(stands_out(row) for row in self.rows)
            said = f"{out} stand out against the others; none is judged, for no text was read"
        layers = len({row.name for row in self.rows})
        regimes = Counter(row.regime for row in self.rows).most_common()
        seen = ", ".join(f"{count} {regime}" for regime, count in regimes)
        left = f" {len(self.skipped)} could not be read (skipped)." if self.skipped else ""
        text = (
            f"{self.name}: {len(self.rows)} head{'s'[: len(self.rows) != 1]} in {layers} attention "
            f"layer{'s'[: layers != 1]} ({self.format}); {said}. "
        )
        if self.rows:
            large = sum(abs(row.r) > 2 for row in self.rows)
            text += f"Regimes: {seen}; |r| > 2 in {large}. {self._entropies} nats."
        return f"{text}{left} Rests on {self.process}."

    @property
    def _entropies(self) -> str:
        measured = [row.measured_entropy for row in self.rows if row.measured_entropy is not None]
        values = measured or [row.entropy for row in self.rows]
        word = "Measured" if measured else "Predicted"
        return (
            f"{word} attention entropy {min(values):.2f} to {max(values):.2f} of at most "
            f"{math.log(self.tokens):.2f}"
        )

    def worst_first(self) -> list[HeadRecord]:
        """The rows in order of concern: by verdict, then by how far they are from the others."""

        def key(row: HeadRecord) -> tuple[Any, ...]:
            measured = row.measured_entropy
            depth = -abs(row.deviation or 0.0) if measured is None else measured
            return VERDICTS.index(row.verdict), depth, row.name, row.head

        return sorted(self.rows, key=key)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, rows included; what JSON stores."""
        plain = {name: getattr(self, name) for name in _ABOUT}
        return plain | {
            "head": list(self.head),
            "summary": self.summary,
            "caveats": list(self.caveats),
            "skipped": [asdict(one) for one in self.skipped],
            "bytes_read": self.bytes_read,
            "positions": list(self.positions),
            "rows": self._table(),
        }

    @classmethod
    def from_dict(cls, data: object) -> Audit:
        """The audit that `to_dict` wrote."""
        if not isinstance(data, Mapping) or not {*_ABOUT, "positions", "rows"} <= set(data):
            raise InputError(
                "this is not an audit.", hint="give what `locater audit --json` or to_json wrote."
            )
        told = {"bytes_read": 0, "head": [], "caveats": [], "skipped": [], **data}
        about = {}
        for one in fields(cls):
            if one.name not in ("rows", "skipped"):
                about[one.name] = _check(told[one.name], str(one.type), one.name)
        if told["tokens"] < 2 or not isinstance(told["rows"], list):
            raise _edited(f"{told['tokens']} tokens, or rows that are no list")
        rows = tuple(HeadRecord.from_dict(row) for row in told["rows"])
        if any(len(row.rho) != len(told["positions"]) for row in rows):
            raise _edited("a row has not one ρ for every position")
        for one in _check(told["skipped"], "list", "skipped"):
            if not isinstance(one, Mapping) or one.keys() != {"name", "reason"}:
                raise _edited("what was skipped has no name and reason")
            _check([*one.values()], "tuple[str, ...]", "skipped")
        return cls(**about, rows=rows, skipped=tuple(Skipped(**one) for one in told["skipped"]))

    def to_json(self) -> str:
        """JSON text with every column; `from_json` gives an equal audit."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Audit:
        """The audit that `to_json` wrote."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"this is not JSON: {error!s:.200}.", hint="give what to_json wrote, whole."
            ) from error
        return cls.from_dict(data)

    def to_csv(self) -> str:
        """One line per head; lists of numbers as JSON in their cell, numbers in full precision."""
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in self._table():
            writer.writerow(row | {name: json.dumps(row[name]) for name in LIST_COLUMNS})
        return text.getvalue()

    def to_parquet(self) -> bytes:
        """The rows as a Parquet file, lists as list columns, the rest in its metadata."""
        with needing("pyarrow", extra="hub"):
            import pyarrow  # type: ignore[import-untyped]
            from pyarrow import parquet
        # one type per column, so that a column of Nones is still one of numbers
        kinds = dict.fromkeys(("str", "Verdict", "Status"), pyarrow.string())
        kinds |= {"int": pyarrow.int64(), "tuple[float, ...]": pyarrow.list_(pyarrow.float64())}
        schema = [(one.name, kinds.get(one.type, pyarrow.float64())) for one in fields(HeadRecord)]
        table = pyarrow.Table.from_pylist(self._table(), schema=pyarrow.schema(schema))
        about = {name: value for name, value in self.to_dict().items() if name != "rows"}
        stored = table.replace_schema_metadata({"locater": json.dumps(about)})
        sink = io.BytesIO()
        parquet.write_table(stored, sink)
        return sink.getvalue()


def text_of(value: str) -> str:
    """A text that can be written: half of a surrogate pair, which JSON can spell, becomes `?`."""
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def _written(value: Any) -> Any:
    """A field of an audit whose texts can be written."""
    if isinstance(value, str):
        return text_of(value)
    if isinstance(value, list | tuple):
        return tuple(map(_written, value))
    if isinstance(value, Skipped):
        return Skipped(name=text_of(value.name), reason=text_of(value.reason))
    if isinstance(value, HeadRecord) and not value.name.isascii():
        return replace(value, name=text_of(value.name))
    return value


_KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,), "Verdict": (str,), "Status": (str,), "int": (int,), "list": (list,),
    "float": (int, float), "float | None": (int, float, type(None)),
}  # fmt: skip
_CHOICES: dict[str, tuple[str, ...]] = {"Verdict": VERDICTS, "Status": get_args(Status)}


def _check(value: Any, kind: str, what: str) -> Any:
    """Refuse a stored value that no audit has; a list is looked through."""
    if kind.startswith("tuple["):
        for one in _check(value, "list" if isinstance(value, list) else "tuple", what):
            _check(one, kind[6:].removesuffix(", ...]"), what)
        return value
    allowed = (tuple,) if kind == "tuple" else _KINDS[kind]
    number: Any = value if isinstance(value, int | float) else 0
    if (
        not isinstance(value, allowed)
        or isinstance(value, bool)
        or not abs(number) < (2**63 if kind == "int" else 2.0**1023)
        or value not in _CHOICES.get(kind, (value,))
    ):
        raise _edited(f"{what} is {value!r:.60}")
    return value


def _edited(what: str) -> InputError:
    return InputError(
        f"this is not an audit as one was written: {what}.",
        hint="it was edited or damaged: make it again with `locater audit --json`.",
    )


COLLAPSED_TOKENS = 2.0
"""Attention that rests on fewer tokens than this, exp(mean entropy), counts as collapsed."""
UNIFORM_SHARE = 0.99
"""Entropy of at least this share of ln T counts as uniform."""
STANDS_OUT = 5.0
"""Robust deviations from the median head at which a head is named."""
_FEWEST = 8
"""Heads of a kind that are compared with each other."""

RULES: dict[Verdict, str] = {
    "collapsed": (
        f"measured exp(mean entropy) < {COLLAPSED_TOKENS:g}: on the text the attention of the last "
        f"tokens rests on fewer than {COLLAPSED_TOKENS:g} tokens"
    ),
    "uniform": (
        f"measured mean entropy >= {UNIFORM_SHARE:g} ln T: on the text the head averages its tokens"
    ),
    "not judged": (
        "no text was read, or the form is not known to be the model's: its logits differ from the "
        f"model's own by more than {LARGEST_GAP:g} standard deviations, or were not compared"
    ),
    "healthy": "measured, by a form whose logits are the model's; none of the other rules fires",
}


def judge(
    *,
    entropy: float | None,
    tokens: int,
    logit_gap: float | None = None,
    status: Status = "verified",
) -> tuple[Verdict, str]:
    """The verdict on one head by its measured entropy, and the number behind it.

    >>> judge(entropy=0.2, tokens=64)[0], judge(entropy=4.15, tokens=64)[0]
    ('collapsed', 'uniform')
    >>> judge(entropy=None, tokens=64)
    ('not judged', 'no text was read')
    """
    if entropy is None:
        return "not judged", "no text was read"
    if logit_gap is not None and not logit_gap <= LARGEST_GAP:
        return "not judged", (
            f"the form's logits differ from the model's own by {logit_gap:.2g} standard "
            "deviations: it leaves something out"
        )
    if logit_gap is None and status != "verified":
        return "not judged", f"the form is {status}, and was not held against the model's logits"
    most, rests_on = math.log(tokens), math.exp(entropy)
    measured = f"measured entropy is {entropy:.3g} of at most {most:.3g} nats"
    if rests_on < COLLAPSED_TOKENS:
        return "collapsed", f"{measured}: attention rests on {rests_on:.3g} of {tokens} tokens"
    if entropy >= UNIFORM_SHARE * most:
        return "uniform", f"{measured}: the head averages all tokens"
    return "healthy", f"{measured}: attention rests on {rests_on:.3g} of {tokens} tokens"


def stands_out(row: HeadRecord) -> bool:
    """Whether a head is far from the model's other heads of its kind."""
    return row.deviation is not None and abs(row.deviation) >= STANDS_OUT


_COMPARED: dict[str, Callable[[float], float]] = {
    "r": float,
    "eta": math.log,
    "entropy": float,
    "stable_rank": math.log,
}


def compared(rows: Sequence[HeadRecord]) -> list[HeadRecord]:
    """The rows, each with its largest distance from the median head of its part and kind.

    In robust deviations: 1.4826 times the median distance from the median; η and the stable rank by
    their logarithms.
    """
    found: dict[tuple[str, int], tuple[float, str]] = {}
    for kind in {(row.part, row.kind) for row in rows}:
        group = [row for row in rows if (row.part, row.kind) == kind]
        for column, scale in _COMPARED.items():
            values = [(row, getattr(row, column)) for row in group]
            some = [
                (row, scale(value)) for row, value in values if value is not None and value != 0
            ]
            middle = median(value for _, value in some) if len(some) >= _FEWEST else 0.0
            width = 1.4826 * median(abs(value - middle) for _, value in some) if some else 0.0
            if len(some) < _FEWEST or not width > 1e-9 * max(1.0, abs(middle)):
                continue
            for row, value in some:
                place, far = (row.name, row.head), (value - middle) / width
                if abs(far) > abs(found.get(place, (0.0, ""))[0]):
                    found[place] = (far, column)
    return [_with_deviation(row, *found.get((row.name, row.head), (None, ""))) for row in rows]


def _with_deviation(row: HeadRecord, far: float | None, column: str) -> HeadRecord:
    """The row with this, said in the reason where nothing was measured."""
    reason = row.reason
    if far is not None and row.measured_entropy is None:
        side = "above" if far > 0 else "below"
        reason += f"; {column} is {abs(far):.1f} robust deviations {side} that of the median head"
    return replace(row, deviation=far, deviates_in=column, reason=reason)
