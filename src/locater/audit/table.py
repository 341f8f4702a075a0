"""The records of an audit: one row per head, the table they make, and verdicts in words.

Each verdict is one rule, and says its number.  All of them speak of attention at the audit's length
under the audit's tokens.  With assumed tokens (Σ = I) they compare heads; they are no measurement
of the model on text.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from locater.core.theory import VANISHING
from locater.errors import InputError, MissingExtraError
from locater.models.layout import Skipped

Verdict = Literal[
    "entropy-collapse risk", "vanishing signal", "rank-collapse risk", "not judged", "healthy"
]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
"""Worst first."""


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
    verdict: Verdict
    reason: str
    """The number and the rule behind the verdict."""
    eigenvalues_real: tuple[float, ...] = ()
    eigenvalues_imag: tuple[float, ...] = ()
    singular_values: tuple[float, ...] = ()
    rho: tuple[float, ...] = ()
    """ρ at the audit's `positions`."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values by column."""
        return {name: getattr(self, name) for name in COLUMNS}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HeadRecord:
        """The row that `to_dict` wrote, from wherever it was stored."""
        missing = [name for name in COLUMNS if name not in values]
        if missing:
            raise InputError(
                f"a row of an audit lacks {', '.join(missing)}.",
                hint="was it written by another version of locater?",
            )
        plain: dict[str, Any] = {
            name: tuple(values[name]) if name in LIST_COLUMNS else values[name] for name in COLUMNS
        }
        return cls(**plain)


COLUMNS: tuple[str, ...] = tuple(one.name for one in fields(HeadRecord))
_ABOUT = ("name", "format", "tokens", "process", "method")
LIST_COLUMNS = ("eigenvalues_real", "eigenvalues_imag", "singular_values", "rho")


@dataclass(frozen=True, kw_only=True)
class Audit:
    """A table of heads, what it rests on, and everything that could not be read."""

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
    caveats: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = field(default=())
    bytes_read: int = 0

    @property
    def summary(self) -> str:
        """One paragraph."""
        counts = Counter(row.verdict for row in self.rows)
        said = ", ".join(f"{counts[one]} {one}" for one in VERDICTS if counts[one])
        layers = len({row.name for row in self.rows})
        regimes = Counter(row.regime for row in self.rows).most_common()
        seen = ", ".join(f"{count} {regime}" for regime, count in regimes)
        left = f" {len(self.skipped)} could not be read (skipped)." if self.skipped else ""
        text = (
            f"{self.name}: {len(self.rows)} heads in {layers} attention layers ({self.format}); "
            f"{said}. "
        )
        if self.rows:
            entropies = [row.entropy for row in self.rows]
            large = sum(abs(row.r) > 2 for row in self.rows)
            text += (
                f"Regimes: {seen}; |r| > 2 in {large}. Predicted attention entropy "
                f"{min(entropies):.2f} to {max(entropies):.2f} of at most "
                f"{math.log(self.tokens):.2f} nats."
            )
        return f"{text}{left} Rests on {self.process}."

    def worst_first(self) -> list[HeadRecord]:
        """The rows in order of concern: by verdict, then by how far they are into it."""

        def key(row: HeadRecord) -> tuple[Any, ...]:
            depth = {"vanishing signal": row.peak, "rank-collapse risk": -row.entropy_bound}
            rank = VERDICTS.index(row.verdict)
            return rank, depth.get(row.verdict, row.entropy), row.name, row.head

        return sorted(self.rows, key=key)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, rows included; what JSON stores."""
        plain = {name: getattr(self, name) for name in _ABOUT}
        return plain | {
            "summary": self.summary,
            "caveats": list(self.caveats),
            "skipped": [asdict(one) for one in self.skipped],
            "bytes_read": self.bytes_read,
            "positions": list(self.positions),
            "rows": [row.to_dict() for row in self.rows],
        }

    @classmethod
    def from_dict(cls, data: object) -> Audit:
        """The audit that `to_dict` wrote."""
        if not isinstance(data, Mapping) or not {*_ABOUT, "positions", "rows"} <= set(data):
            raise InputError(
                "this is not an audit.", hint="give what `locater audit --json` or to_json wrote."
            )
        return cls(
            **{name: data[name] for name in _ABOUT},
            positions=tuple(data["positions"]),
            rows=tuple(HeadRecord.from_dict(row) for row in data["rows"]),
            caveats=tuple(data.get("caveats", ())),
            skipped=tuple(Skipped(**one) for one in data.get("skipped", ())),
            bytes_read=data.get("bytes_read", 0),
        )

    def to_json(self) -> str:
        """JSON text with every column; `from_json` gives an equal audit."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Audit:
        """The audit that `to_json` wrote."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(
                f"this is not JSON: {error}.", hint="give what to_json wrote, whole."
            ) from error
        return cls.from_dict(data)

    def to_csv(self) -> str:
        """One line per head; lists of numbers as JSON in their cell, numbers in full precision."""
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in self.rows:
            cells = row.to_dict()
            for name in LIST_COLUMNS:
                cells[name] = json.dumps(cells[name])
            writer.writerow(cells)
        return text.getvalue()

    def to_parquet(self) -> bytes:
        """The rows as a Parquet file, lists as list columns, the rest in its metadata."""
        try:
            import pyarrow  # type: ignore[import-untyped]
            from pyarrow import parquet
        except ImportError as error:
            raise MissingExtraError("pyarrow", extra="hub") from error
        table = pyarrow.Table.from_pylist(
            [row.to_dict() for row in self.rows], schema=_parquet_schema(pyarrow)
        )
        about = {name: value for name, value in self.to_dict().items() if name != "rows"}
        stored = table.replace_schema_metadata({"locater": json.dumps(about)})
        sink = io.BytesIO()
        parquet.write_table(stored, sink)
        return sink.getvalue()


def _parquet_schema(pyarrow: Any) -> Any:
    """One type per column, so that a column of Nones is still one of numbers."""
    kinds = {"str": pyarrow.string(), "Verdict": pyarrow.string(), "int": pyarrow.int64(),
             "tuple[float, ...]": pyarrow.list_(pyarrow.float64())}  # fmt: skip
    return pyarrow.schema(
        [(one.name, kinds.get(str(one.type), pyarrow.float64())) for one in fields(HeadRecord)]
    )


COLLAPSED_TOKENS = 2.0
"""Attention that rests on fewer tokens than this, exp(mean entropy), counts as collapsed."""
UNIFORM_SHARE = 0.99
"""Entropy that cannot be less than this share of ln T counts as uniform."""

RULES: dict[Verdict, str] = {
    "entropy-collapse risk": (
        f"exp(mean entropy) < {COLLAPSED_TOKENS:g}: the attention rests on fewer than "
        f"{COLLAPSED_TOKENS:g} tokens"
    ),
    "vanishing signal": (
        f"largest ρ < {VANISHING:g}: whatever the position, the token's gate is nearly always "
        "shut, and W_QK learns little from it (Lemma 2.4)"
    ),
    "rank-collapse risk": (
        f"least possible entropy (Eq. 9, corrected) >= {UNIFORM_SHARE:g} ln T: no arrangement of "
        "logits of this size leaves uniform attention, so the head averages its tokens"
    ),
    "not judged": (
        "queries and keys are normalized before their product: the size of W_QK does not set the "
        "size of the logits"
    ),
    "healthy": "none of the other rules fires",
}


def judge(
    *,
    entropy: float,
    entropy_bound: float,
    peak: float,
    tokens: int,
    qk_norm: bool = False,
) -> tuple[Verdict, str]:
    """The verdict on one head and the number behind it.

    >>> judge(entropy=0.2, entropy_bound=0.0, peak=0.9, tokens=64)[0]
    'entropy-collapse risk'
    >>> judge(entropy=4.158, entropy_bound=4.157, peak=1.0, tokens=64)[0]
    'rank-collapse risk'
    """
    most, rests_on = math.log(tokens), math.exp(entropy)
    if qk_norm:
        return "not judged", RULES["not judged"]
    if rests_on < COLLAPSED_TOKENS:
        return "entropy-collapse risk", (
            f"attention rests on {rests_on:.3g} of {tokens} tokens (mean entropy {entropy:.3g} "
            f"nats), fewer than {COLLAPSED_TOKENS:g}"
        )
    if peak < VANISHING:
        return "vanishing signal", f"largest ρ is {peak:.3g}, below {VANISHING:g}"
    if entropy_bound >= UNIFORM_SHARE * most:
        return "rank-collapse risk", (
            f"entropy is at least {entropy_bound:.4g} of {most:.4g} nats, "
            f"{entropy_bound / most:.1%}: the head averages all tokens"
        )
    return "healthy", (
        f"no rule fires: attention rests on {rests_on:.3g} of {tokens} tokens, entropy is at "
        f"least {entropy_bound:.3g} nats, largest ρ is {peak:.3g}"
    )
