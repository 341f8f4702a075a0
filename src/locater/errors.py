"""The errors that `locater` raises: what was wrong, what is right, and a hint to act on."""

from __future__ import annotations

from collections.abc import Iterable


class LocaterError(Exception):
    """Something the caller can mend; `hint` says how."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class ConfigError(LocaterError):
    """A setting has a value that cannot be used."""


class InputError(LocaterError):
    """A tensor has the wrong shape or holds values that no computation can use."""


class MissingExtraError(LocaterError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, *, extra: str) -> None:
        super().__init__(
            f"{package} is not installed.", hint=f"run: pip install 'locater[{extra}]'"
        )


def unknown(what: str, value: object, choices: Iterable[str]) -> ConfigError:
    """The error for a name that is none of the choices: raise unknown("process", name, names)."""
    return ConfigError(f"unknown {what} {value!r}.", hint=f"choose one of: {', '.join(choices)}.")
