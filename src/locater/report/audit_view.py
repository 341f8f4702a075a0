"""Audits to one page: a map of all heads, the detail of any, several checkpoints side by side."""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from importlib.metadata import version
from itertools import chain
from typing import Any

from locater.audit import RULES, Audit, HeadRecord
from locater.errors import InputError
from locater.report.audit_figures import (
    COLORS,
    NUMBERS,
    WORDS,
    audit_labels,
    head_charts,
    row_labels,
    telling_column,
)
from locater.report.charts import specification
from locater.report.page import Section, asset, chart_box, render_page, script_json

_POSITIONS = 256
"""At most so many of a head's ρ go into the page; a screen shows no more."""
_EXTRA = ("model", "head_dim", "kv_head", "first_on", "last_on", "entropy_error")


def audit_page(audits: Sequence[Audit], *, title: str = "") -> str:
    """One self-contained HTML file about one audit, or about several to compare."""
    return render_page(
        title or "Audit: " + ", ".join(audit_labels(audits)),
        audit_sections(audits),
        intro="Where the heads can look, from their query-key weights. Choose a column, then a "
        "head: click it, or move with the arrow keys and press Enter.",
        footer=f"Made by locater {version('locater')}.",
    )


def audit_sections(audits: Sequence[Audit]) -> list[Section]:
    """The sections of that page, for a page that has others too."""
    if not audits:
        raise InputError("there is no audit to show.", hint="give at least one.")
    if not any(audit.rows for audit in audits):
        return [_summary(audits), _rests_on(audits)]
    return [_summary(audits), _maps(audits), _detail(audits), _table(audits), _rests_on(audits)]


def _summary(audits: Sequence[Audit]) -> Section:
    said = "".join(f"<p>{escape(audit.summary)}</p>" for audit in audits)
    return Section(key="summary", title="Summary", before=said)


def _maps(audits: Sequence[Audit]) -> Section:
    choices = {**WORDS, **NUMBERS}
    first = telling_column(audits)
    options = "".join(
        f'<option value="{key}"{" selected" * (key == first)}>{escape(name)}</option>'
        for key, name in choices.items()
    )
    compare = (
        '<label>show <select name="mode"><option value="values">values</option>'
        '<option value="change">change against the first</option></select></label>'
        if len(audits) > 1
        else ""
    )
    return Section(
        key="heads",
        title="All heads",
        before=f'<script type="application/json" id="audit-data">{script_json(_data(audits))}'
        '</script><form class="controls" id="audit-controls" aria-label="What the maps show">'
        f'<label>color by <select name="column">{options}</select></label>{compare}</form>'
        '<div class="scale" id="audit-scale"></div><div class="maps" id="audit-maps"></div>',
        script=asset("audit.js"),
        text="Rows are layers, columns are heads. Click a head, or move with the arrow keys and "
        "press Enter: the section below shows it.",
    )


def _detail(audits: Sequence[Audit]) -> Section:
    names = {
        "eigenvalues": "Eigenvalues",
        "singular": "Singular values",
        "rho": "Where the gate is open",
    }
    worst = next(audit.worst_first()[0] for audit in audits if audit.rows)
    charts = head_charts(audits, worst.name, worst.head)
    figures = "".join(
        f"<figure><h4>{names[key]}</h4>"
        + chart_box(f"head-{key}", specification(charts[key]))
        + "</figure>"
        for key in names
    )
    return Section(
        key="head",
        title="One head",
        before='<h3 id="head-name" aria-live="polite"></h3><div id="head-verdicts"></div>'
        f'<div class="detail">{figures}</div><details><summary>All numbers of this head</summary>'
        '<div class="table" tabindex="0"><table id="head-numbers"></table></div></details>',
    )


def _table(audits: Sequence[Audit]) -> Section:
    several = len(audits) > 1
    what = "Heads, most changed first" if several else "Heads, worst first"
    return Section(
        key="table",
        title=what,
        before='<div class="table" tabindex="0"><table id="audit-table"></table></div>',
        text="The twenty heads that changed most in the chosen column, first against last."
        if several
        else "The twenty heads of most concern; the maps have all of them.",
    )


def _rests_on(audits: Sequence[Audit]) -> Section:
    """Settings, rules, caveats and what was skipped, as they are."""
    parts = []
    for label, audit in zip(audit_labels(audits), audits, strict=True):
        facts = {
            "format": audit.format,
            "heads": len(audit.rows),
            "tokens": audit.tokens,
            "token process": audit.process,
            "ρ": audit.method,
            "bytes read": f"{audit.bytes_read:,}",
        }
        parts.append(f"<h3>{escape(label)}</h3>{_table_of(facts.items())}")
        if audit.caveats:
            parts.append(_list("Caveats", audit.caveats))
        if audit.skipped:
            skipped = [f"{one.name}: {one.reason}" for one in audit.skipped]
            parts.append(_list("Skipped", skipped))
    parts.append(f"<h3>Rules of the verdicts</h3>{_table_of(RULES.items())}")
    return Section(key="basis", title="What this rests on", before="".join(parts))


def _list(title: str, items: Iterable[str]) -> str:
    lines = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<h4>{title}</h4><ul>{lines}</ul>"


def _table_of(items: Iterable[tuple[str, Any]]) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(str(value))}</td></tr>'
        for name, value in items
    )
    return f'<div class="table"><table>{rows}</table></div>'


def _data(audits: Sequence[Audit]) -> dict[str, Any]:
    labels = audit_labels(audits)
    return {
        "numbers": NUMBERS,
        "words": WORDS,
        "colors": COLORS,
        "extra": _EXTRA,
        "audits": [_audit(label, one) for label, one in zip(labels, audits, strict=True)],
    }


def _audit(label: str, audit: Audit) -> dict[str, Any]:
    """Columns of numbers to five digits, words by number, and all lists in one packed text."""
    layers = row_labels(audit.rows)
    names = list(layers)
    columns = {
        key: [_short(getattr(row, key)) for row in audit.rows] for key in (*NUMBERS, *_EXTRA)
    }
    words = {}
    for key in (*WORDS, "reason"):
        values = list(dict.fromkeys(getattr(row, key) for row in audit.rows))
        place = {value: index for index, value in enumerate(values)}
        words[key] = {"values": values, "rows": [place[getattr(row, key)] for row in audit.rows]}
    kept = _spaced(len(audit.positions))
    packed = [_packed(row, kept) for row in audit.rows]
    order = {(row.name, row.head): place for place, row in enumerate(audit.worst_first())}
    return {
        "label": label,
        "tokens": audit.tokens,
        "theta": [_short(audit.positions[place] / audit.tokens) for place in kept],
        "modules": names,
        "layers": list(layers.values()),
        "row": [names.index(row.name) for row in audit.rows],
        "head": [row.head for row in audit.rows],
        "concern": [order[row.name, row.head] for row in audit.rows],
        "columns": columns,
        "words": words,
        "sizes": [sizes for sizes, _, _ in packed],
        "scales": [[_short(scale) for scale in scales] for _, scales, _ in packed],
        "lists": b64encode(b"".join(data for _, _, data in packed)).decode(),
    }


def _packed(row: HeadRecord, kept: Sequence[int]) -> tuple[list[int], list[float], bytes]:
    """A head's lists as 16-bit shares of their largest value: lengths, largest values, bytes."""
    plane = (*row.eigenvalues_real, *row.eigenvalues_imag)
    rho = [row.rho[place] for place in kept] if row.rho else []
    lists = (plane, row.singular_values, rho)
    scales = [max(map(abs, values), default=0.0) for values in lists]
    scales = [float(f"{1.0001 * scale:.5g}") or 1.0 for scale in scales]
    shares = chain.from_iterable(
        (max(-32767, min(32767, round(32767 * value / scale))) for value in values)
        for values, scale in zip(lists, scales, strict=True)
    )
    sizes = [len(row.eigenvalues_real), len(row.singular_values), len(rho)]
    return sizes, scales, struct.pack(f"<{len(plane) + sizes[1] + sizes[2]}h", *shares)


def _spaced(count: int) -> list[int]:
    """Places of at most so many positions, evenly spread, first and last among them."""
    if count <= _POSITIONS:
        return list(range(count))
    return [round(k * (count - 1) / (_POSITIONS - 1)) for k in range(_POSITIONS)]


def _short(value: float | int | None) -> float | int | None:
    return float(f"{value:.5g}") if isinstance(value, float) else value
