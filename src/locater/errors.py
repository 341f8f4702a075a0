"""The errors that `locater` raises: what was wrong, what is right, and a hint to act on."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from importlib.metadata import requires
from typing import Any

FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
"""How a disk says that there is no room."""


class LocaterError(Exception):
    """Something the caller can mend; `hint` says how.

    >>> from locater import audit_checkpoint
    >>> audit_checkpoint("/nowhere/model")
    Traceback (most recent call last):
    locater.errors.LocaterError: /nowhere/model does not exist.
    hint: give a folder, a file, a URL or a hub id (org/name).
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class ConfigError(LocaterError):
    """A setting has a value that it cannot have.

    >>> from locater import LocAteRConfig
    >>> LocAteRConfig(scale_strength=-1.0)
    Traceback (most recent call last):
    locater.errors.ConfigError: ...
    """


class InputError(LocaterError):
    """A tensor has the wrong shape or holds values that no computation can use.

    >>> import torch
    >>> from locater import QKForm
    >>> QKForm(torch.full((2, 2), torch.nan), torch.eye(2), temperature=1.0)
    Traceback (most recent call last):
    locater.errors.InputError: ...
    """


@contextmanager
def guarded(what: str, *, hint: str) -> Iterator[None]:
    """Turn whatever a strange input makes other code raise into an error with a way out.

    Files come from anywhere, and nobody foresees all of them: what is foreseen has a message of its
    own, and this is for the rest.  `LOCATER_TRACEBACK=1` lets it through as it is.
    """
    try:
        yield
    except (LocaterError, OSError):
        raise
    except Exception as error:
        if os.environ.get("LOCATER_TRACEBACK"):
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise LocaterError(f"{what} cannot be read ({reason:.200}).", hint=hint) from error


class MissingExtraError(LocaterError):
    """An optional dependency is not installed.

    >>> MissingExtraError("altair", extra="report").hint
    "run: pip install 'locater[report]'"
    """

    def __init__(self, package: str, *, extra: str) -> None:
        super().__init__(
            f"{package} is not installed.", hint=f"run: pip install 'locater[{extra}]'"
        )
        self.package, self.extra = package, extra

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(MissingExtraError, extra=self.extra), (self.package,)  # from workers, too


@contextmanager
def needing(package: str, *, extra: str) -> Iterator[None]:
    """Around an import: where it fails, the error names the extra that has the package."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(package, extra=extra) from error


def unforeseen(error: Exception) -> LocaterError:
    """What to tell a user of an error that nobody foresaw: what is missing, or how to report it."""
    if isinstance(error, OSError) and (error.filename or error.errno in FULL):
        what = error.filename or "the output cannot be written"
        hint = "make room, or check the path and who may use it; LOCATER_TRACEBACK=1 says more."
        return LocaterError(f"{what}: {error.strerror}.", hint=hint)
    if isinstance(error, ImportError) and error.name:
        name = error.name.partition(".")[0].replace("_", "-")
        listed = [line.partition("; extra == ") for line in requires("locater") or ()]
        sizes = Counter(extra for _, _, extra in listed)
        extras = {extra for package, _, extra in listed if extra and package.startswith(name)}
        if extras:  # several hold it: the smallest
            extra = min(sorted(extras), key=lambda extra: sizes[extra])
            return MissingExtraError(name, extra=extra.strip("'\""))
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return LocaterError(
        f"this should not have happened: {reason:.300}",
        hint="LOCATER_TRACEBACK=1 before the command shows where; what was finished is kept.",
    )


def check_choice(what: str, value: object, choices: Collection[str]) -> None:
    """Refuse a name that is none of the choices."""
    if value not in choices:
        raise unknown(what, value, choices)


def at_least(settings: object, least: Mapping[str, int], *, hint: str) -> None:
    """Refuse settings of a record that are smaller than they can be; None is no number."""
    for name, limit in least.items():
        value = getattr(settings, name)
        if value is not None and value < limit:
            raise ConfigError(f"{name} must be at least {limit}, got {value}.", hint=hint)


def unknown(what: str, value: object, choices: Iterable[str]) -> ConfigError:
    """The error for a name that is none of the choices: raise unknown("process", name, names)."""
    names = list(choices)
    near = get_close_matches(str(value), names, n=1)
    like = f"did you mean {near[0]}? " if near else ""
    return ConfigError(
        f"unknown {what} {value!r}.", hint=f"{like}choose one of: {', '.join(names)}."
    )
