"""Files as bytes, and folders of them: read where they stand, counted, and never kept."""

from __future__ import annotations

import errno
import json
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from locater.errors import LocaterError

CHUNK = 1 << 23
_MOST_FILES = 4096  # that are looked at for checkpoints in folders
_SPARSE = 1 << 26  # bytes; smaller files may be anything
_POINTER = b"version https://git-lfs.github.com/spec"
LARGEST_DOCUMENT = 1 << 26  # bytes of a config or an index

PREFERRED = (
    "adapter_model.safetensors", "adapter_model.bin", "model.safetensors",
    "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.bin",
)  # fmt: skip
"""What libraries call a checkpoint, the first that is there being the one meant."""
CONFIGS = ("config.json", "params.json")
ADAPTER_CONFIG = "adapter_config.json"
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


Say = Callable[[str], None]
"""Hears a sentence where somebody has to wait."""


def silent(sentence: str) -> None:
    """Say nothing."""


@runtime_checkable
class ByteSource(Protocol):
    """A file somewhere that can be read at any place."""

    name: str
    size: int
    bytes_read: int

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill the buffer with the bytes from `start` on, or raise."""

    def close(self) -> None:
        """Let go of the file."""


@runtime_checkable
class Tensors(Protocol):
    """Named tensors whose shapes are known and whose values are still in a file."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's shape."""

    @property
    def bytes_read(self) -> int:
        """How many bytes were read so far."""

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Read these tensors and no others."""

    def close(self) -> None:
        """Let go of the files."""


class StoredTensors(Tensors):
    """What is made of files or other tensors: bytes are counted and files closed there."""

    shapes: Mapping[str, tuple[int, ...]] = {}
    config: Mapping[str, Any] = {}
    """What they say of the model."""
    caveats: tuple[str, ...] = ()
    _parts: Sequence[Tensors | ByteSource] = ()
    _own_bytes = 0

    @property
    def bytes_read(self) -> int:
        """How many bytes were read so far, headers' among them."""
        return self._own_bytes + sum(part.bytes_read for part in self._parts)

    def close(self) -> None:
        """Let go of the files."""
        for part in self._parts:
            part.close()


class LocalFile:
    """A file on this machine, read without mapping it, so that no page of it stays in memory."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        mode = status(path).st_mode
        if not stat.S_ISREG(mode):
            raise LocaterError(f"{path} is not a regular file.", hint="give a checkpoint's file.")
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise unreadable(path, error) from error
        found = status(path)
        self.size = found.st_size
        self.bytes_read = 0
        held = 512 * getattr(found, "st_blocks", self.size)
        if self.size > _SPARSE and held < self.size // 8:
            self._file.close()
            raise LocaterError(
                f"{path} is mostly holes: {held:,} of its {self.size:,} bytes are on the disk.",
                hint="its download was not finished: download it again.",
            )

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill the buffer with the bytes from `start` on, or raise."""
        done = 0
        try:
            self._file.seek(start)
            while done < len(buffer):
                count = self._file.readinto(buffer[done : done + CHUNK])
                if not count:
                    raise truncated(self.name, start + done, start + len(buffer))
                done += count
                self.bytes_read += count
        except (OSError, ValueError) as error:  # ValueError: the file was closed
            raise unreadable(self.name, error) from error

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


class Place(ABC):
    """A folder somewhere."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._said: tuple[str, ...] = ()

    @property
    def caveats(self) -> tuple[str, ...]:
        """What is to be said of what was read."""
        return self._said

    @abstractmethod
    def names(self) -> list[str]:
        """The files in it, as far as anybody can tell."""

    @abstractmethod
    def open(self, name: str) -> ByteSource:
        """One of its files."""

    def below(self) -> list[str]:
        """The files in its folders, by their paths; few levels deep; none that cannot be listed."""
        return []

    def has(self, name: str) -> bool:
        """Whether a file may be there; where nobody can tell, opening it will."""
        return True

    def path(self, name: str) -> Path | None:
        """Where a file is on this machine, if it is."""
        return None


class Folder(Place):
    """A folder on this machine."""

    def __init__(self, path: Path, *, named: str | None = None) -> None:
        super().__init__(str(path))
        self._path = path
        self._named = named
        """The one file that was asked for by its own name: it may lie anywhere."""

    def names(self) -> list[str]:
        """The files in it."""
        try:
            return sorted(entry.name for entry in self._path.iterdir() if not entry.is_dir())
        except OSError as error:
            raise unreadable(self._path, error) from error

    def below(self) -> list[str]:
        """The files in its folders, three levels deep and no more than a few thousand."""
        deep = [self._path.glob("/".join(["*"] * depth)) for depth in (2, 3)]
        found = islice((path for level in deep for path in level if path.is_file()), _MOST_FILES)
        return sorted(path.relative_to(self._path).as_posix() for path in found)

    def has(self, name: str) -> bool:
        """Whether there is a file of this name."""
        return os.path.lexists(self._path / name)

    def open(self, name: str) -> ByteSource:
        """One of its files; a link that leaves the folder is said."""
        path = self._path / name
        if name != self._named and path.is_symlink():
            target, home = (Path(os.path.realpath(part)) for part in (path, self._path))
            is_cache = home.parent.name == "snapshots" and home.parents[1] in target.parents
            if home not in target.parents and not is_cache:
                self._said += (f"{name} is a link to {target}, outside of the folder",)
        return LocalFile(path)

    def path(self, name: str) -> Path:
        """Where a file is on this machine."""
        return self._path / name


class Inside(Place):
    """A folder within a place."""

    def __init__(self, place: Place, folder: str) -> None:
        super().__init__(f"{place.name}/{folder}")
        self._place, self._folder = place, folder

    @property
    def caveats(self) -> tuple[str, ...]:
        """What is to be said of the place, and which of its folders this is."""
        return (*self._place.caveats, f"the checkpoint is that in {self._folder}/")

    def below(self) -> list[str]:
        """The files in its folders."""
        start = f"{self._folder}/"
        inside = [
            name.removeprefix(start) for name in self._place.below() if name.startswith(start)
        ]
        return [name for name in inside if "/" in name]

    def names(self) -> list[str]:
        """The files in it."""
        found = (name.rpartition("/") for name in self._place.below())
        return [name for folder, _, name in found if folder == self._folder]

    def has(self, name: str) -> bool:
        """Whether a file may be there."""
        return self._place.has(f"{self._folder}/{name}")

    def open(self, name: str) -> ByteSource:
        """One of its files."""
        return self._place.open(f"{self._folder}/{name}")

    def path(self, name: str) -> Path | None:
        """Where a file is on this machine, if it is."""
        return self._place.path(f"{self._folder}/{name}")


def document(place: Place, name: str) -> bytes:
    """All bytes of a small file, such as a config or an index."""
    source = place.open(name)
    try:
        if source.size > LARGEST_DOCUMENT:
            raise LocaterError(
                f"{source.name} has {source.size:,} bytes; "
                f"a config or an index has at most {LARGEST_DOCUMENT:,}.",
                hint="it is damaged or something else: download it again.",
            )
        return read_bytes(source, 0, source.size)
    finally:
        source.close()


def json_document(place: Place, name: str) -> dict[str, Any]:
    """A small JSON file that must hold an object."""
    return json_object(document(place, name), f"{place.name}/{name}")


def read_bytes(source: ByteSource, start: int, length: int) -> bytes:
    """Some bytes of a file; fewer where it ends."""
    buffer = bytearray(max(0, min(length, source.size - start)))
    source.read_into(start, memoryview(buffer))
    return bytes(buffer)


def status(path: Path) -> Any:
    """What the file system says of a path that must be there."""
    try:
        return path.stat()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise unreadable(path, error) from error


def unreadable(path: Path | str, error: Exception) -> LocaterError:
    """What to say of a file that the system does not let us read."""
    number = getattr(error, "errno", None)
    if number in (errno.ENOENT, errno.ENOTDIR):
        return LocaterError(
            f"{path} does not exist.", hint="give a folder, a file, a URL or a hub id (org/name)."
        )
    if number == errno.ELOOP:
        return LocaterError(
            f"{path} is a symbolic link that leads back to itself.",
            hint="remove the link (ls -l shows it) and download the file again.",
        )
    if number in (errno.EACCES, errno.EPERM):
        return LocaterError(
            f"{path} may not be read: permission denied.", hint=f"run: chmod u+r {path}"
        )
    reason = getattr(error, "strerror", None) or error
    return LocaterError(f"cannot read {path}: {reason}.", hint="check the disk and the path.")


def truncated(name: str, size: int, expected: int) -> LocaterError:
    """What to say of a file that ends too early."""
    return LocaterError(
        f"{name} is cut short: it has {size:,} bytes and needs {expected:,}.",
        hint="download or copy it again.",
    )


def refuse_pointer(head: bytes, name: str) -> None:
    """Raise where a file is what git-lfs leaves in the place of a large one."""
    if head.startswith(_POINTER):
        raise LocaterError(
            f"{name} is a git-lfs pointer; the weights themselves were not downloaded.",
            hint="run: git lfs pull",
        )


def json_object(raw: bytes, name: str) -> dict[str, Any]:
    """Read a JSON file that must hold an object."""
    refuse_pointer(raw, name)
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise LocaterError(
            f"{name} is not JSON: {error!s:.200}.", hint="download it again, or repair it by hand."
        ) from error
    if not isinstance(found, dict):
        raise LocaterError(
            f"{name} must hold a JSON object, but it holds a {type(found).__name__}.",
            hint="download it again.",
        )
    return found


def shard_name(name: object, index: str) -> str:
    """A shard's name as an index gives it, which must stay within the folder."""
    parts = name.split("/") if isinstance(name, str) else [".."]
    if any(part in ("", ".", "..") or "\\" in part or ":" in part for part in parts):
        raise LocaterError(
            f"{index} names the shard {name!r}, which is not a file of its folder.",
            hint="do not trust this checkpoint; download it again from its author.",
        )
    return "/".join(parts)
