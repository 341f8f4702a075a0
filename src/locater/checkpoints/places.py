"""Where checkpoints lie, and which files of a folder, a web folder or a hub repository are one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from locater.checkpoints.source import ByteSource, LocalFile, read_bytes, unreadable
from locater.errors import LocaterError

LARGEST_DOCUMENT = 1 << 26  # bytes of a config or an index

PREFERRED = (
    "adapter_model.safetensors",
    "adapter_model.bin",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""What libraries call a checkpoint, the first that is there being the one meant."""
CONFIGS = ("config.json", "params.json")
ADAPTER_CONFIG = "adapter_config.json"
_INDICES = (".safetensors.index.json", ".bin.index.json")
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_OTHER = re.compile(r"training_args|optimizer|scheduler|scaler|rng_state|random_states", re.I)
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.\w+)")


@runtime_checkable
class Place(Protocol):
    """A folder somewhere."""

    name: str
    caveats: tuple[str, ...]

    def names(self) -> list[str]:
        """The files in it, as far as anybody can tell."""

    def has(self, name: str) -> bool:
        """Whether a file may be there; where nobody can tell, opening it will."""

    def open(self, name: str) -> ByteSource:
        """One of its files."""

    def path(self, name: str) -> Path | None:
        """Where a file is on this machine, if it is."""


class Folder:
    """A folder on this machine."""

    def __init__(self, path: Path, *, named: str | None = None) -> None:
        self.name = str(path)
        self.caveats: tuple[str, ...] = ()
        self._path = path
        self._named = named
        """The one file that was asked for by its own name: it may lie anywhere."""

    def names(self) -> list[str]:
        """The files in it."""
        try:
            return sorted(entry.name for entry in self._path.iterdir() if not entry.is_dir())
        except OSError as error:
            raise unreadable(self._path, error) from error

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
                self.caveats += (f"{name} is a link to {target}, outside of the folder",)
        return LocalFile(path)

    def path(self, name: str) -> Path:
        """Where a file is on this machine."""
        return self._path / name


@dataclass(frozen=True)
class Choice:
    """The files that make a checkpoint: shards and the index that names them, or one file."""

    files: tuple[str, ...]
    index: str | None = None


def choose(names: Sequence[str], place: str) -> Choice:
    """Find the checkpoint among the files of a folder; never guess between two.

    >>> choose(["config.json", "model.safetensors", "pytorch_model.bin"], "here").files
    ('model.safetensors',)
    """
    for name in PREFERRED:
        if name in names:
            return Choice((), name) if name.endswith(".json") else Choice((name,))
    indices = [name for name in names if name.endswith(_INDICES)]
    if len(indices) == 1:
        return Choice((), indices[0])
    found = [name for name in names if name.endswith(SUFFIXES) and not _OTHER.search(name)]
    shards = _complete_shards(found, place)
    if len(found) == 1 or shards:
        return Choice(tuple(shards or found))
    if found:
        shown = ", ".join(found[:8]) + (", …" if len(found) > 8 else "")
        raise LocaterError(
            f"{place} holds {len(found)} checkpoints: {shown}.",
            hint="give the path of the one that you mean.",
        )
    seen = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    raise LocaterError(
        f"{place} holds no checkpoint; it holds {seen or 'nothing'}.",
        hint="give a folder with model.safetensors, its index, pytorch_model.bin or a .gguf file; "
        "of a run, the folders of its checkpoints.",
    )


def _complete_shards(names: Iterable[str], place: str) -> list[str]:
    """The names, where they are all the shards of one checkpoint; else none."""
    matches = [_SHARD.fullmatch(name) for name in names]
    if not matches or not all(matches):
        return []
    parts = [match.groupdict() for match in matches if match]
    if len({(part["stem"], part["count"], part["suffix"]) for part in parts}) > 1:
        return []
    here = {int(part["number"]) for part in parts}
    missing = sorted(set(range(1, int(parts[0]["count"]) + 1)) - here)
    if missing:
        raise LocaterError(
            f"{place} lacks shard {missing[0]} of {int(parts[0]['count'])} of its checkpoint.",
            hint="download the missing shards.",
        )
    return sorted(match.string for match in matches if match)


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


def shard_name(name: object, index: str) -> str:
    """A shard's name as an index gives it, which must stay within the folder."""
    parts = name.split("/") if isinstance(name, str) else [".."]
    if any(part in ("", ".", "..") or "\\" in part or ":" in part for part in parts):
        raise LocaterError(
            f"{index} names the shard {name!r}, which is not a file of its folder.",
            hint="do not trust this checkpoint; download it again from its author.",
        )
    return "/".join(parts)
