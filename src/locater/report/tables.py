"""Tables: rows and columns once, as Markdown for a page or as lines for a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from locater.errors import InputError
from locater.files import write_file

Columns = Mapping[str, str | Callable[[Any], object]]
"""Titles, each with a function of the row, or with the name of the row's entry and its format.

Titles alone, as a list, are for rows that are lists of cells."""
_MARK = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def cells(rows: Iterable[Any], columns: Columns | Sequence[str]) -> list[list[str]]:
    """The text of every cell; a dash where there is no value.

    >>> cells(
    ...     [{"head": 3, "rho": 0.12345}, {"head": 4, "rho": None}], {"h": "head", "ρ": "rho:.2f"}
    ... )
    [['3', '0.12'], ['4', '-']]
    """
    if isinstance(columns, Mapping):
        return [[_text(row, cell) for cell in columns.values()] for row in rows]
    return [[str(cell) for cell in row] for row in rows]


def _text(row: Any, cell: str | Callable[[Any], object]) -> str:
    form = ""
    if isinstance(cell, str):
        name, _, form = cell.partition(":")
        value = row[name] if isinstance(row, Mapping) else getattr(row, name)
    else:
        value = cell(row)
    return "-" if value is None else format(value, form)


def markdown_table(
    rows: Iterable[Any], columns: Columns | Sequence[str], *, is_plain: bool = False
) -> str:
    """The table for a page; `is_plain` shows cells as they are where they look like Markdown.

    >>> print(markdown_table([(1, "a|b")], ["number", "text"]))
    | number | text |
    |---|---|
    | 1 | a\\|b |
    """
    shown = plain_markdown if is_plain else lambda cell: cell.replace("|", "\\|")
    lines = [[shown(cell) for cell in line] for line in (list(columns), *cells(rows, columns))]
    written = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([written[0], "|" + "---|" * len(columns), *written[1:]])


def plain_markdown(value: object) -> str:
    """Text that Markdown shows as it is, on one line."""
    words = " ".join(str(value).split())
    return "".join(f"\\{letter}" if letter in "|_*~`<>[]\\" else letter for letter in words)


def plain(text: str) -> str:
    """A name that a file chose, without what could move the cursor of a terminal."""
    return "".join(one if one.isprintable() or one == "\n" else "�" for one in text)


def terminal_table(
    rows: Iterable[Any],
    columns: Columns | Sequence[str],
    *,
    title: str = "",
    left: Collection[str] = (),
    is_compact: bool = False,
) -> Any:
    """The table for a terminal (of rich): numbers to the right, columns in `left` to the left."""
    from rich.box import HEAVY_HEAD, SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title or None,
        title_justify="left",
        box=SIMPLE_HEAD if is_compact else HEAVY_HEAD,
        pad_edge=not is_compact,
        padding=(0, 1, 0, 0) if is_compact else (0, 1),
    )
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=is_compact)
    for line in cells(rows, columns):
        table.add_row(*(Text(plain(cell)) for cell in line))
    return table


def update_page(page: Path, table: Callable[[str], str]) -> Path:
    """Write every table of a page anew, between its marks `<!-- results: NAME -->`."""
    text = page.read_text(encoding="utf-8")
    if not _MARK.search(text):
        raise InputError(f"{page} has no mark for results.", hint="<!-- results: fig6-cpu -->")
    return write_file(page, _MARK.sub(lambda match: f"{match[1]}{table(match[2])}{match[3]}", text))
