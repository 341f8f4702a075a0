"""Repositories of the Hugging Face hub: files from its cache where they are, else by ranges."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from locater.checkpoints.places import CONFIGS, PREFERRED
from locater.checkpoints.remote import AbsentError, RemoteFile, UnreachableError, fetch
from locater.checkpoints.source import ByteSource, LocalFile, json_object
from locater.errors import LocaterError, MissingExtraError


class HubRepository:
    """One commit of a repository; `HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE` are honored."""

    def __init__(self, repository: str, revision: str | None = None) -> None:
        try:
            from huggingface_hub import constants, get_token
        except ImportError as error:
            raise MissingExtraError("huggingface_hub", extra="hub") from error
        self.name = repository
        self.caveats: tuple[str, ...] = ()
        self._repository = repository
        self._revision = revision or constants.DEFAULT_REVISION
        self._snapshot: Path | None = None
        self._files: list[str] = []
        token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        if constants.HF_HUB_OFFLINE:
            self._use_cache("HF_HUB_OFFLINE is set", None)
            return
        try:
            self._ask(constants.ENDPOINT)
        except UnreachableError as error:
            self._use_cache("the hub could not be reached", error)

    def _ask(self, endpoint: str) -> None:
        """Ask the hub which commit is meant and which files it has."""
        revision = quote(self._revision, safe="")
        url = f"{endpoint}/api/models/{self._repository}/revision/{revision}"
        try:
            info = json_object(fetch(url, self._headers), url)
        except AbsentError as error:
            raise LocaterError(
                f"{self._repository} at {self._revision} is neither a path here nor on {endpoint}.",
                hint="check the spelling (org/name or org/name@revision).",
            ) from error
        listed = info.get("siblings")
        files = listed if isinstance(listed, list) else []
        names = [file.get("rfilename") for file in files if isinstance(file, dict)]
        self._files = [name for name in names if isinstance(name, str)]
        self._revision = str(info.get("sha") or self._revision)

    def _use_cache(self, why: str, cause: Exception | None) -> None:
        """Take what was downloaded before."""
        for name in (*CONFIGS, *PREFERRED):
            found = self._cached(name)
            if found is not None:
                self._snapshot = found.parent
                self.caveats = (f"{why}: {self._repository} is what was downloaded before",)
                return
        raise LocaterError(
            f"{self._repository} is neither a path here nor in the hub's local cache, and {why}.",
            hint=f"check the path; for a model of the hub, run: hf download {self._repository}",
        ) from cause

    def _cached(self, name: str) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self._repository, name, revision=self._revision)
        return Path(found) if isinstance(found, str) else None

    def names(self) -> list[str]:
        """The files at the top of the repository."""
        if self._snapshot is not None:
            return sorted(entry.name for entry in self._snapshot.iterdir() if entry.is_file())
        return [name for name in self._files if "/" not in name]

    def has(self, name: str) -> bool:
        """Whether the repository has this file."""
        return name in self._files if self._snapshot is None else self.path(name) is not None

    def open(self, name: str) -> ByteSource:
        """One of its files, from the cache if it is there."""
        from huggingface_hub import hf_hub_url

        cached = self.path(name)
        if cached is not None:
            return LocalFile(cached)
        if self._snapshot is not None:
            raise LocaterError(
                f"{self._repository}/{name} is not in the local cache.",
                hint=f"run: hf download {self._repository}",
            )
        url = hf_hub_url(self._repository, name, revision=self._revision)
        return RemoteFile(url, headers=self._headers)

    def path(self, name: str) -> Path | None:
        """Where the cache keeps a file, if it does."""
        return self._cached(name)
