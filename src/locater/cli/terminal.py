"""What every command shares: flags from a dataclass, tables, JSON, talk, a progress bar."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

Config = TypeVar("Config")


def parse(config: type[Config], command: str, arguments: Sequence[str]) -> Config:
    """Flags to a settings dataclass; leaves with 2 and usage where they do not fit."""
    import tyro

    return tyro.cli(config, prog=f"locater {command}", args=list(arguments))


def check_figure(path: Path | None) -> None:
    """Refuse a file that no figure can be written to: before hours of work, not after them."""
    if path is not None:
        from locater.report.charts import check_suffix

        check_suffix(path)


def console() -> Any:
    """Stdout for tables: the terminal's width, else 100 columns."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 100)


def print_json(data: Any) -> None:
    """Data on stdout; NaN and infinity as null."""
    print(json.dumps(_plain(data), ensure_ascii=False, indent=2, allow_nan=False))


def _plain(data: Any) -> Any:
    """What JSON can say: NaN and infinity, which it cannot, become null."""
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def plain(text: str) -> str:
    """A name that a file chose, without what could move the cursor of a terminal."""
    return "".join(one if one.isprintable() or one == "\n" else "�" for one in text)


def say(text: str) -> None:
    """Talk goes to stderr."""
    print(text, file=sys.stderr)


@contextmanager
def progress(name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, where that is a terminal; otherwise silence."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeLeft())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(name)
        yield lambda done, total: progress.update(task, completed=done, total=total)
