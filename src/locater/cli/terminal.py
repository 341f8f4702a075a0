"""What every command shares: flags from a dataclass, tables, JSON, talk, a progress bar."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from locater.errors import ConfigError, at_least
from locater.notebook import finite
from locater.report.tables import plain as plain

Config = TypeVar("Config")


@dataclass(frozen=True, kw_only=True)
class EngineFlags:
    """Where independent pieces of work run."""

    engine: Literal["local", "ray"] = "local"
    """This machine's cores, or a Ray cluster (extra `cluster`)."""
    workers: int | None = None
    """Pieces of work at a time; one thread or GPU each."""
    ray_address: str | None = None
    """A running cluster, HOST:6379; without it --engine ray starts one here."""


def parse(
    config: type[Config],
    command: str,
    arguments: Sequence[str],
    *,
    first: str = "",
    default: Config | None = None,
) -> Config:
    """Flags to a settings dataclass; leaves with 2 and usage where they do not fit.

    The flag `first` may stand first, without its name.
    """
    import tyro

    given: dict[str, Any] = {} if default is None else {"default": default}
    parsed: Config = tyro.cli(
        readable(config), prog=f"locater {command}", args=with_first(first, arguments), **given
    )
    _check(parsed)
    return parsed


def _check(settings: Any) -> None:
    """Refuse what many commands have and what would fail, or mislead, after the work is done."""
    least = {name: at for name, at in {"top": 0, "batch": 1}.items() if hasattr(settings, name)}
    at_least(settings, least, hint="--top 0 shows all; batches of 16 are usual.")
    try:
        re.compile(str(getattr(settings, "layers", "")))
    except re.error as error:
        raise ConfigError(
            f"--layers {settings.layers!r} is no regular expression: {error}.",
            hint="brackets and dots stand for themselves after a backslash.",
        ) from error


def readable(config: type[Config]) -> type[Config]:
    """The settings with flags that may be left out as `PATH`, not `{None}|PATH (default: None)`."""
    import tyro

    hints, defaults, kinds = {}, {}, get_type_hints(config, include_extras=True)
    for field in fields(config):  # type: ignore[arg-type]
        kind = kinds[field.name]
        if NoneType in get_args(kind) and (metavar := _metavar(kind)):
            hint = "" if field.default is None else None
            hints[field.name] = Annotated[
                kind, tyro.conf.arg(metavar=metavar, help_behavior_hint=hint)
            ]
            defaults[field.name] = field.default
        elif field.default in ("", ()):  # nothing is no default worth naming
            hints[field.name] = Annotated[kind, tyro.conf.arg(help_behavior_hint="")]
            defaults[field.name] = field.default
        elif field.default is MISSING and get_origin(getattr(kind, "__origin__", kind)) is tuple:
            hints[field.name] = Annotated[kind, tyro.conf.arg(help_behavior_hint="")]
    space = {"__annotations__": hints, "__doc__": config.__doc__, "__module__": config.__module__}
    made = type(config.__name__, (config,), {**space, **defaults})
    return dataclass(frozen=True, kw_only=True)(made)


def _metavar(kind: Any) -> str:
    """What stands for a value of this type in help."""
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, get_args(kind))) + "}"
    choices = [one for one in get_args(kind) if one is not NoneType]
    if choices:
        return "|".join(map(_metavar, choices))
    return {int: "INT", float: "FLOAT", str: "STR", Path: "PATH"}.get(kind, "")


def with_first(first: str, arguments: Sequence[str]) -> list[str]:
    """The arguments, with the name of the flag that may stand first without it."""
    is_bare = bool(first and arguments) and not arguments[0].startswith("-")
    return [*([f"--{first}"] if is_bare else []), *arguments]


def flag(name: str, arguments: Sequence[str], default: str) -> str:
    """One flag's value, before the others, whose defaults it decides, can be read."""
    for place, argument in enumerate(arguments):
        if argument == f"--{name}" and place + 1 < len(arguments):
            return arguments[place + 1]
        if argument.startswith(f"--{name}="):
            return argument.removeprefix(f"--{name}=")
    return default


def values(kind: type, settings: Any) -> dict[str, Any]:
    """What a command, which is a settings dataclass and more, has in that dataclass's fields."""
    return {field.name: getattr(settings, field.name) for field in fields(kind)}


def check_figure(path: Path | None) -> None:
    """Refuse a file that no figure can be written to: before hours of work, not after them."""
    if path is not None:
        from locater.report.charts import check_suffix

        check_suffix(path)


def console() -> Any:
    """Stdout for tables: the terminal's width, else 100 columns."""
    from rich.console import Console

    class Ours(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with 1: nothing is wrong

    return Ours(width=None if sys.stdout.isatty() else 100)


def show(content: Any) -> None:
    """A table, or a text as it is, on stdout."""
    from rich.text import Text

    console().print(Text(content) if isinstance(content, str) else content)


def print_json(data: Any) -> None:
    """Data on stdout; NaN and infinity as null."""
    text = json.dumps(finite(data), ensure_ascii=False, indent=2, allow_nan=False)
    print(text.encode("utf-8", "replace").decode())  # names of files may be no text


_quiet = False


def hush(is_quiet: bool) -> None:
    """Whether to say nothing but what went wrong."""
    global _quiet
    _quiet = is_quiet


def say(text: str, *, is_error: bool = False) -> None:
    """Talk goes to stderr."""
    if is_error or not _quiet:
        print(text, file=sys.stderr)


@contextmanager
def progress(
    name: str, *, talk: str = "", is_shown: bool = True, total: int = 100, **fields: Any
) -> Iterator[Callable[..., None]]:
    """A bar on stderr, where that is a terminal; otherwise silence.  `talk` shows the fields."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    texts = ("{task.description}" if name else "", talk)
    before, behind = ([TextColumn(text)] if text else [] for text in texts)
    columns = (*before, BarColumn(), MofNCompleteColumn(), *behind, TimeLeft())
    console = Console(stderr=True)
    is_off = _quiet or not console.is_terminal or not is_shown
    with Progress(*columns, console=console, disable=is_off) as progress:
        task = progress.add_task(name, total=total, **fields)
        yield lambda done, total, **fields: progress.update(
            task, completed=done, total=total, **fields
        )
