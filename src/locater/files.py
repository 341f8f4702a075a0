"""Writing files whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from locater.errors import LocaterError


def write_file(path: Path, data: str | bytes) -> Path:
    """Write next to the file, then put it in its place: a crash or a full disk harms nothing."""
    raw = data.encode() if isinstance(data, str) else data
    try:
        if path.exists() and not path.is_file():  # a device or a pipe is written to, not replaced
            path.write_bytes(raw)
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            Path(name).chmod(0o644)
            Path(name).replace(path)
            sync_folder(path.parent)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise LocaterError(
            f"cannot write {path}: {error.strerror or error}.",
            hint="choose another place or make room; what stood there before is unharmed.",
        ) from error
    return path


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable: the sync of a file does not."""
    if os.name == "nt":  # pragma: no cover - folders cannot be opened there
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
