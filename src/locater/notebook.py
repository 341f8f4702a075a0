"""What a notebook shows of a result: one line, a small table, a picture, and its rows as data."""

from __future__ import annotations

import json
import math
from html import escape
from importlib import import_module
from typing import Any, ClassVar

from locater.errors import LocaterError, needing

SHOWN = 12
"""Rows of a table in a notebook."""


class Shown:
    """Results that are rows: each says its line, its rows, and what its picture has as axes."""

    _picture: ClassVar[tuple[str, str, str, str]] = ("rect", "head:O", "layer:O", "entropy:Q")
    """The mark, and what is across, up, and in color."""
    _columns: ClassVar[tuple[str, ...]] = ()
    """What the table in a notebook shows; what differs between rows unless said."""

    def _line(self) -> str:
        """What it is, in a few words."""
        return f"{len(self._table())} rows"

    def _table(self) -> list[dict[str, Any]]:
        """One plain dictionary a row."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._line()}>"

    def _repr_html_(self) -> str:
        rows = [_flat(row) for row in self._table()]
        names = [name for name in self._columns or _telling(rows) if rows and name in rows[0]]
        head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in names)
        body = "".join(
            "<tr>"
            + "".join(f"<td>{escape(_short(row.get(name)))}</td>" for name in names)
            + "</tr>"
            for row in rows[:SHOWN]
        )
        left = [f"{len(rows) - SHOWN} more rows"] if len(rows) > SHOWN else []
        left += (
            [f"{len(rows[0]) - len(names)} more columns"] if rows and rows[0].keys() - names else []
        )
        more = f"<p>… and {', '.join(left)}: .to_dataframe()</p>" if left else ""
        line = escape(f"{type(self).__name__}: {self._line()}")
        return f"<p>{line}</p><table><tr>{head}</tr>{body}</table>{more}"

    def to_dataframe(self) -> Any:
        """The rows as a pandas data frame."""
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            hint = "pip install pandas; .to_json() needs nothing."
            raise LocaterError(
                "a data frame needs pandas, which is not installed.", hint=hint
            ) from error
        return pandas.DataFrame([_flat(row) for row in self._table()])

    def to_json(self) -> str:
        """The rows as JSON; null where there is no number."""
        return json.dumps([finite(row) for row in self._table()], allow_nan=False)

    def plot(self) -> Any:
        """The rows as an Altair chart (extra `report`)."""
        with needing("altair", extra="report"):
            altair = import_module("altair")
        mark, across, up, color = self._picture
        names = [part.partition(":")[0] for part in (across, up, color)]
        values = [{name: finite(row.get(name)) for name in names} for row in self._table()]
        chart = altair.Chart(altair.Data(values=values))
        made = chart.mark_rect() if mark == "rect" else chart.mark_line(point=True)
        tooltip = list(dict.fromkeys((across, up, color)))
        return made.encode(x=across, y=up, color=color, tooltip=tooltip)


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """What fits in a cell."""
    return {name: one for name, one in row.items() if not isinstance(one, dict | list | tuple)}


def _telling(rows: list[dict[str, Any]]) -> list[str]:
    """Columns that differ between rows and are no prose, the first ten."""
    names = [
        name
        for name in (rows[0] if rows else ())
        if len(rows) == 1 or len({str(row.get(name)) for row in rows}) > 1
        if max(len(_short(row.get(name))) for row in rows) <= 40
    ]
    return names[:10]


def _short(value: object) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def finite(value: Any) -> Any:
    """What JSON can say: NaN and infinity, which it cannot, become null."""
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
