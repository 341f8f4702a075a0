"""Writing files whole or not at all, and believing only what was written."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

from locater.errors import LocaterError

try:
    import fcntl
except ImportError:  # pragma: no cover - not on Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
PATIENCE = 5.0
"""Seconds: a worker whose parent was killed is about to leave its folder."""
Made = TypeVar("Made")


def write_file(path: Path, data: str | bytes) -> Path:
    """Write next to the file, then put it in its place: a crash or a full disk harms nothing."""
    raw = data.encode("utf-8", "replace") if isinstance(data, str) else data
    try:
        if path.exists() and not path.is_file():  # a device or a pipe is written to, not replaced
            path.write_bytes(raw)
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        name = path.with_name(f".{path.name}.{token_hex(6)}")
        options = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        handle = os.open(name, options, 0o666)  # less what the umask takes
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            name.replace(path)
            sync_folder(path.parent)
        except BaseException:
            name.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise LocaterError(
            f"cannot write {path}: {error.strerror or error}.",
            hint="choose another place or make room; what stood there before is unharmed.",
        ) from error
    return path


DEMO = Path(__file__).parent / "models/demo"
"""A small trained model, its vocabulary and a text: what `demo` stands for."""


def packaged(source: str | Path) -> str | Path:
    """The packaged model's folder for `demo`, where nothing here is called so; else the source."""
    return DEMO if str(source) == "demo" and not Path(source).exists() else source


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable: the sync of a file does not."""
    if os.name == "nt":  # pragma: no cover - folders cannot be opened there
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def keep(path: Path, data: Any) -> None:
    """Write plain data for `kept`, with a digest over it and over the place it is for."""
    write_file(path, json.dumps({"digest": _digest(path, data), "kept": data}))


def kept(path: Path, make: Callable[[Any], Made], say: Callable[[str], None]) -> Made | None:
    """What `keep` wrote there, as `make` reads it; None where it is missing or is anything else.

    A file that was changed by another hand is never taken for a result; `say` hears of it.
    """
    try:
        stored = json.loads(path.read_bytes())
        if stored["digest"] != _digest(path, stored["kept"]):
            raise ValueError(path)
        return make(stored["kept"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        say(f"{path} is not what was stored there; it is made again.")
        return None


def kept_of(
    paths: Sequence[Path], make: Callable[[Any], Made], say: Callable[[str], None]
) -> dict[int, Made]:
    """Those of several pieces of work that are there already, by their numbers."""
    found = {place: kept(path, make, say) for place, path in enumerate(paths)}
    return {place: made for place, made in found.items() if made is not None}


def _digest(path: Path, data: Any) -> str:
    text = json.dumps([path.parent.name, path.name, data])
    return blake2b(text.encode(), digest_size=16).hexdigest()


@contextmanager
def held(folder: Path | None) -> Iterator[None]:
    """Let no other process work in a folder until this ends, or the process does."""
    if folder is None or fcntl is None:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("w")
    except OSError as error:
        raise LocaterError(
            f"cannot write in {folder}: {error.strerror or error}.", hint="choose another folder."
        ) from error
    with lock:
        until = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise LocaterError(
                        f"another process is training in {folder}.",
                        hint="wait for it, end it, or give another folder.",
                    ) from None
                time.sleep(0.1)
        yield
