"""A checkpoint, wherever it lies: its tensors' names and shapes at once, their values when asked.

Nothing is built, cached or executed. Headers are read when a checkpoint is opened, and then only
the tensors that are asked for, so a model of any size is read layer by layer.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit, urlunsplit

from torch import Tensor

from locater.checkpoints.formats import (
    MAGIC,
    PICKLES,
    ZIP,
    DistributedTensors,
    GgufFile,
    MetaShards,
    PytorchFile,
    SafetensorsFile,
    refuse_foreign,
)
from locater.checkpoints.lora import LoraTensors, has_lora
from locater.checkpoints.packed import unpacked
from locater.checkpoints.remote import HubRepository, WebFolder
from locater.checkpoints.source import (
    ADAPTER_CONFIG,
    CONFIGS,
    PREFERRED,
    SUFFIXES,
    Folder,
    Inside,
    Place,
    Say,
    StoredTensors,
    Tensors,
    json_document,
    read_bytes,
    refuse_pointer,
    shard_name,
    silent,
    status,
)
from locater.errors import LocaterError, guarded
from locater.files import packaged
from locater.models.names import natural_order

Format = Literal["safetensors", "pytorch", "distributed", "gguf", "lora"]

NO_CONFIG = (
    "no config.json: the family and its settings are told by tensor names alone, "
    "unless --heads (config=) gives them"
)
_HUB_ID = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?P<file>)(?:@(?P<revision>[\w./-]+))?")
_HUB_URL = re.compile(
    r"https://huggingface\.co/(?P<repository>[\w.-]+/[\w.-]+)"
    r"(?:/(?:tree|blob|resolve)/(?P<revision>[^/?]+)(?:/(?P<file>[\w./-]+))?)?/?(?:\?.*)?"
)
_UNFORESEEN = "it may be damaged: download it again; if it is whole, please report this."
_INDICES = (".safetensors.index.json", ".bin.index.json")
_OTHER = re.compile(r"training_args|optimizer|scheduler|scaler|rng_state|random_states", re.I)
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.\w+)")
_META = re.compile(r"consolidated\.\d\d\.pth")
_DISTRIBUTED = ".metadata"
_OPENERS = 8  # shards of a remote checkpoint whose headers are fetched at the same time


class Checkpoint:
    """An open checkpoint; made by `open_checkpoint`, and closed by leaving its `with` block."""

    def __init__(
        self,
        name: str,
        format: Format,
        tensors: Tensors,
        *,
        config: Mapping[str, Any],
        caveats: Iterable[str] = (),
    ) -> None:
        self.name = name
        self.format: Format = format
        self.config = config
        self.caveats = tuple(dict.fromkeys(caveats))
        self.tensors = tensors

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's shape, by its name; known from headers alone."""
        return self.tensors.shapes

    @property
    def bytes_read(self) -> int:
        """How many bytes of its tensor files were read or came over the network so far."""
        return self.tensors.bytes_read

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read these tensors and no others; keep none of them."""
        wanted = list(dict.fromkeys(names))
        for name in wanted:
            if name not in self.shapes:
                raise LocaterError(
                    f"{self.name} holds no tensor {name!r}.",
                    hint=f"it holds {', '.join(list(self.shapes)[:6])}, …",
                )
        with guarded(self.name, hint=_UNFORESEEN):
            return self.tensors.read(wanted)

    def close(self) -> None:
        """Let go of files and connections."""
        self.tensors.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_checkpoint(
    source: str | Path,
    *,
    base: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
    say: Say = silent,
) -> Checkpoint:
    """Open a folder, a file, an HTTP(S) URL or a hub id (`org/name`, `org/name@revision`).

    `demo` is a small trained model that comes with this package.

    `base` is what a LoRA adapter stands on; a hub id in its own config serves where none is given.
    `config` adds to what the checkpoint says of itself, and wins: `config={"n_head": 12}` for a
    model without one.  `say` hears where somebody has to wait.
    """
    with guarded(f"{source!s:.200}", hint=_UNFORESEEN):
        place, choice = _find(source, say)
        if ADAPTER_CONFIG in place.names() and choice.is_adapter:
            return _adapted(str(source), place, choice, base, config or {}, say)
        found = _opened(str(source), place, choice, config or {})
        if base is not None:
            found.caveats += (f"a base was given and not used: {source} is not an adapter",)
        return found


def _find(source: str | Path, say: Say = silent) -> tuple[Place, Choice]:
    """The folder that a source speaks of, and the files in it that are meant."""
    source = packaged(source)
    text = str(source)
    page = _HUB_URL.fullmatch(text)
    if re.match("https?://", text) and not page:
        return _find_url(text, say)
    path = Path(source).expanduser()
    hub_id = page or (isinstance(source, str) and _named_on_the_hub(text))
    if hub_id:
        if not page:
            say(f"{text} is not found here; asking the hub")
        revision, file = hub_id["revision"], hub_id["file"]
        repository = HubRepository(hub_id["repository"], revision and unquote(revision), say=say)
        if file and not repository.has(file):
            return _chosen(Inside(repository, file.rstrip("/")))
        return (repository, _file_choice(file)) if file else _chosen(repository)
    if stat.S_ISDIR(status(path).st_mode):
        return _chosen(Folder(path))
    folder = Folder(path.parent, named=path.name)
    if _META.fullmatch(path.name) and len(list(filter(_META.fullmatch, folder.names()))) > 1:
        raise LocaterError(
            f"{path} is one of several parts of a model: each has some of its heads.",
            hint="give the folder of all of them.",
        )
    return folder, _file_choice(path.name)


def _chosen(place: Place) -> tuple[Place, Choice]:
    """The checkpoint of a folder, or of the one folder in it that has one."""
    try:
        return place, choose(place.names(), place.name)
    except _NoneHereError:
        inside: dict[str, Choice] = {}
        for folder in dict.fromkeys(name.rpartition("/")[0] for name in place.below()):
            with suppress(LocaterError):
                inside[folder] = choose(Inside(place, folder).names(), folder)
        if not inside:
            raise
    if len(inside) == 1:
        return Inside(place, folder := next(iter(inside))), inside[folder]
    names = sorted(inside, key=natural_order)
    shown = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
    raise LocaterError(
        f"{place.name} holds {len(names)} checkpoints in folders of their own: {shown}.",
        hint=f"give one of them ({place.name}/{names[0]}), or the checkpoints of a run together.",
    )


def _named_on_the_hub(text: str) -> re.Match[str] | None:
    """`org/name`, if nothing here is called so: what looks like a path is never asked for."""
    if text.startswith((".", "/", "~")) or os.path.lexists(text):
        return None
    return None if os.path.lexists(text.split("/")[0]) else _HUB_ID.fullmatch(text)


def _find_url(url: str, say: Say = silent) -> tuple[Place, Choice]:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise LocaterError(
            f"{url!r:.200} is no address: {error}.", hint="check host, port and brackets."
        ) from error
    folder, _, name = parts.path.rpartition("/")
    if name.endswith((*SUFFIXES, ".index.json")):
        above = urlunsplit(parts._replace(path=folder))
        return WebFolder(above, last=name, say=say), _file_choice(name)
    return _chosen(WebFolder(url, say=say))


@dataclass(frozen=True)
class Choice:
    """The files that make a checkpoint: shards and the index that names them, or one file."""

    files: tuple[str, ...]
    index: str | None = None

    @property
    def is_adapter(self) -> bool:
        """Whether the first file is one of PEFT's."""
        return bool(self.files) and self.files[0].startswith("adapter_model.")


class _NoneHereError(LocaterError):
    """A folder has no checkpoint itself."""


def choose(names: Sequence[str], place: str) -> Choice:
    """Find the checkpoint among the files of a folder; never guess between two.

    >>> choose(["config.json", "model.safetensors", "pytorch_model.bin"], "here").files
    ('model.safetensors',)
    """
    for name in PREFERRED:
        if name in names:
            return Choice((), name) if name.endswith(".json") else Choice((name,))
    if _DISTRIBUTED in names and any(name.endswith(".distcp") for name in names):
        return Choice((_DISTRIBUTED,))
    indices = [name for name in names if name.endswith(_INDICES)]
    if len(indices) == 1:
        return Choice((), indices[0])
    found = [name for name in names if name.endswith(SUFFIXES) and not _OTHER.search(name)]
    shards = [name for name in found if _META.fullmatch(name)] or _complete_shards(found, place)
    if len(found) == 1 or shards:
        return Choice(tuple(shards or found))
    if found:
        shown = ", ".join(found[:8]) + (", …" if len(found) > 8 else "")
        raise LocaterError(
            f"{place} holds {len(found)} checkpoints: {shown}.",
            hint="give the path of the one that you mean.",
        )
    for name in names:
        refuse_foreign(name, f"{place}/{name}")
    seen = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    raise _NoneHereError(
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


def _file_choice(name: str) -> Choice:
    return Choice((), name) if name.endswith(".index.json") else Choice((name,))


def _adapted(
    name: str,
    place: Place,
    choice: Choice,
    base: str | Path | None,
    given: Mapping[str, Any],
    say: Say,
) -> Checkpoint:
    """Open an adapter and what it stands on."""
    settings = json_document(place, ADAPTER_CONFIG)
    said = settings.get("base_model_name_or_path")
    stands_on = base or said
    if not stands_on:
        raise LocaterError(
            f"the adapter {name} does not say what it stands on.",
            hint="give it with --base (base=).",
        )
    if base is None and not (isinstance(said, str) and _named_on_the_hub(said)):
        raise LocaterError(
            f"the adapter {name} says that it stands on {said!r:.200}, which is not a hub id; a "
            "file does not decide what is opened here.",
            hint="if you trust it, give that with --base (base=).",
        )
    try:
        below, files = _find(stands_on, say)
        if files.is_adapter:
            raise LocaterError(f"{stands_on} is an adapter itself.")
        under = _opened(str(stands_on), below, files, given)
    except LocaterError as error:
        raise LocaterError(
            f"the base of the adapter {name} cannot be opened: {error.message}",
            hint="give the base's folder, file, URL or hub id with --base (base=).",
        ) from error
    merged = _merged(name, place, choice, under.tensors, settings)
    caveats = (*place.caveats, *under.caveats, *merged.caveats)
    return Checkpoint(name, "lora", merged, config=under.config, caveats=caveats)


def _merged(
    name: str, place: Place, choice: Choice, under: Tensors, settings: Mapping[str, Any]
) -> LoraTensors:
    """An adapter's tensors over those that it stands on."""
    with ExitStack() as stack:
        stack.callback(under.close)
        _, adapter = _tensors(place, choice)
        stack.callback(adapter.close)
        merged = LoraTensors(under, adapter, settings, name=name)
        stack.pop_all()  # all is well: they stay open
    return merged


def open_adapter(source: str | Path, base: Tensors, *, say: Say = silent) -> LoraTensors:
    """Open a LoRA adapter, as PEFT saves it, over tensors that are here: a running model's."""
    with guarded(f"{source!s:.200}", hint=_UNFORESEEN):
        place, choice = _find(source, say)
        if ADAPTER_CONFIG not in place.names() or not choice.is_adapter:
            raise LocaterError(
                f"{source} holds no LoRA adapter.",
                hint="give a folder or hub id with adapter_config.json and "
                "adapter_model.safetensors, as PEFT saves them.",
            )
        settings = json_document(place, ADAPTER_CONFIG)
        return _merged(str(source), place, choice, base, settings)


def _opened(name: str, place: Place, choice: Choice, given: Mapping[str, Any]) -> Checkpoint:
    """Open the chosen files of a place."""
    before = place.caveats
    format, tensors = _tensors(place, choice)
    try:
        beside = [name for name in CONFIGS if name in place.names()]
        stored = json_document(place, beside[0]) if beside else {}
        config = {**tensors.config, **stored, **given}
        caveats = [*before, *place.caveats]  # more are known when files are open
        if not config:
            caveats.append(NO_CONFIG)
        shard = (
            _SHARD.fullmatch(choice.files[0].rpartition("/")[2]) if len(choice.files) == 1 else None
        )
        if shard and int(shard["count"]) > 1:
            caveats.append(
                f"shard {int(shard['number'])} of {int(shard['count'])} alone: layers may lie in "
                "the others"
            )
        caveats += tensors.caveats
        plain = unpacked(tensors, config, name)
        if plain is not None:
            tensors = plain
            caveats += plain.caveats
        if has_lora(tensors.shapes):
            format, tensors = "lora", LoraTensors(tensors, tensors, config, name=name)
            caveats += tensors.caveats
    except BaseException:
        tensors.close()
        raise
    return Checkpoint(name, format, tensors, config=config, caveats=caveats)


def _tensors(place: Place, choice: Choice) -> tuple[Format, StoredTensors]:
    """The tensors of the chosen files, and the format of those."""
    if choice.index is None and len(choice.files) == 1:
        return _file(place, choice.files[0])
    if all(_META.fullmatch(name) for name in choice.files) and choice.files:
        return "pytorch", MetaShards([_pytorch(place, name) for name in choice.files])
    homes = None if choice.index is None else _weight_map(place, choice.index)
    shards = choice.files if homes is None else tuple(dict.fromkeys(homes.values()))
    with ThreadPoolExecutor(_OPENERS) as pool:
        pending = [pool.submit(_file, place, shard) for shard in shards]
    try:
        formats, files = zip(*(work.result() for work in pending), strict=True)
        return formats[0], ShardedTensors(
            dict(zip(shards, files, strict=True)), homes, choice.index
        )
    except BaseException:
        for work in pending:
            if work.exception() is None:
                work.result()[1].close()
        raise


def _weight_map(place: Place, index: str) -> dict[str, str]:
    """Which shard holds which tensor, as an index says; every shard must be there."""
    where = f"{place.name}/{index}"
    said = json_document(place, index).get("weight_map")
    if not isinstance(said, dict) or not said:
        raise LocaterError(f"{where} has no weight_map.", hint="download it again.")
    homes = {str(name): shard_name(shard, where) for name, shard in said.items()}
    missing = sorted(shard for shard in set(homes.values()) if not place.has(shard))
    if missing:
        raise LocaterError(
            f"{where} names {missing[0]}, which is not there"
            + (f", nor are {len(missing) - 1} other shards." if len(missing) > 1 else "."),
            hint="download the missing shards, or run: git lfs pull",
        )
    return homes


def _file(place: Place, name: str) -> tuple[Format, StoredTensors]:
    """Open one file by what it holds, whatever it is called."""
    if name == _DISTRIBUTED:
        return "distributed", DistributedTensors(place, name)
    refuse_foreign(name, f"{place.name}/{name}")
    source = place.open(name)
    try:
        head = read_bytes(source, 0, 64)
        refuse_pointer(head, source.name)
        if head.startswith(MAGIC):
            return "gguf", GgufFile(source)
        is_safetensors = head[8:9] == b"{"  # a header of 640 bytes opens as a pickle does
        if head.startswith((ZIP, *PICKLES)) and not is_safetensors:
            source.close()
            return "pytorch", _pytorch(place, name)
        if is_safetensors or name.endswith(".safetensors"):
            return "safetensors", SafetensorsFile(source)
        raise LocaterError(
            f"{source.name} is not a checkpoint.",
            hint="give a .safetensors, .bin, .pt, .pth or .gguf file, or the folder of one.",
        )
    except BaseException:
        source.close()
        raise


def _pytorch(place: Place, name: str) -> PytorchFile:
    path = place.path(name)
    if path is None:
        raise LocaterError(
            f"{place.name}/{name} is a pickle, which cannot be read by ranges.",
            hint="download it and give its path, or give a safetensors version of the model.",
        )
    return PytorchFile(path)


class ShardedTensors(StoredTensors):
    """Several files as one; where an index names a tensor's file, that is the file."""

    def __init__(
        self, files: Mapping[str, StoredTensors], homes: Mapping[str, str] | None, index: str | None
    ) -> None:
        self._files, self._parts = files, tuple(files.values())
        self.config = next(iter(files.values())).config
        self.caveats = tuple(caveat for file in files.values() for caveat in file.caveats)
        self._homes = {name: shard for shard, file in files.items() for name in file.shapes}
        for name, shard in (homes or {}).items():
            if name not in files[shard].shapes:
                raise LocaterError(
                    f"{index} says that {shard} holds {name}, and it does not.",
                    hint="index and shards are not of one checkpoint: download both again.",
                )
            self._homes[name] = shard
        self.shapes = {name: files[shard].shapes[name] for name, shard in self._homes.items()}

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Read these tensors, each from its own file."""
        found: dict[str, Tensor] = {}
        for shard, file in self._files.items():
            here = [name for name in names if self._homes[name] == shard]
            found |= file.read(here) if here else {}
        return found
