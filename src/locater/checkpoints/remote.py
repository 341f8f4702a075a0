"""Files on web servers and the hub, by byte ranges: what is asked for travels, and nothing else.

A dropped connection is taken up where it broke; a server that ignores ranges, or whose sizes
contradict each other, is refused before it can send a whole model.
"""

from __future__ import annotations

import re
import ssl
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from functools import cache
from http.client import HTTPException, HTTPMessage, HTTPResponse
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote, urlsplit, urlunsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, Request, build_opener

from locater.checkpoints.source import (
    ADAPTER_CONFIG,
    CHUNK,
    CONFIGS,
    PREFERRED,
    ByteSource,
    Folder,
    LocalFile,
    Place,
    Say,
    json_object,
    silent,
)
from locater.errors import LocaterError, needing

HEAD = 64  # bytes that the first request asks for
LARGEST_WHOLE = 1 << 26  # bytes taken from a server that cannot send less
RETRIES = 5
BACKOFF = 0.5  # seconds before the second attempt, doubled for each further one
LONGEST_PAUSE = 60.0
TIMEOUT = 30.0
PATIENCE = 60.0  # seconds for any request, and more for a long one
SLOWEST = 1 << 14  # bytes a second
Result = TypeVar("Result")
_BUSY = (408, 425, 429, 500, 502, 503, 504)
_RANGE = re.compile(r"bytes (?:(\d{1,19})-(\d{1,19})|\*)/(\d{1,19})")


class UnreachableError(LocaterError):
    """No answer, in spite of repeated attempts."""


class AbsentError(LocaterError):
    """The server has no such file."""


class RemoteFile:
    """A file on a web server."""

    def __init__(
        self, url: str, *, headers: Mapping[str, str] | None = None, say: Say = silent
    ) -> None:
        self.name = shown(url)
        self.bytes_read = 0
        self._url = url
        self._headers = dict(headers or {})
        self._say = say
        self._mark: tuple[str | None, str | None] = (None, None)
        self._whole: bytes | None = None
        self.size = -1
        self._head = b""
        _patiently(self._begin, self.name, say)

    @property
    def is_pinned(self) -> bool:
        """Whether a change of the file on the server would be noticed."""
        return self._whole is not None or any(self._mark)

    def _begin(self) -> None:
        """Ask for the first bytes, and with them for the size."""
        try:
            response = _answer(self._url, {**self._headers, "Range": f"bytes=0-{HEAD - 1}"})
        except HTTPError as error:
            match = _RANGE.fullmatch(error.headers.get("Content-Range") or "")
            error.close()
            if error.code != 416 or not match or int(match[3]):
                raise _refusal(error, self.name) from error
            self.size = 0
            return
        with response:
            if response.status == 206:
                first, last, self.size = self._said_range(response)
                if (first, last) != (0, min(HEAD, self.size) - 1):
                    raise self._lie(f"bytes {first} to {last} for the first {HEAD}")
                self._check_length(response, last + 1)
                self._mark = _mark(response)
                self._head = _body(response, last + 1)
                self.bytes_read += len(self._head)
                return
            self._whole = _whole_body(response, self.name)
            self.size = len(self._whole)
            self.bytes_read += self.size

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill the buffer with the bytes from `start` on, or raise."""
        here = self._head if self._whole is None else self._whole
        done = len(here[start : start + len(buffer)])
        buffer[:done] = here[start : start + done]
        failures, clock = 0, _Clock(self.name, len(buffer) - done)
        while done < len(buffer):
            before = done
            try:
                with self._response(start + done, start + len(buffer)) as response:
                    while done < len(buffer):
                        arrived = _part(response, buffer[done : done + CHUNK])
                        done += arrived
                        self.bytes_read += arrived
                        clock.check(len(buffer) - done)
            except _BrokenError as broken:
                failures = 0 if done - before >= CHUNK else failures + 1
                broken.wait(failures, clock, self._say)

    def _response(self, start: int, stop: int) -> HTTPResponse:
        """An answer that holds these bytes, checked before any of them is read."""
        try:
            response = _answer(self._url, {**self._headers, "Range": f"bytes={start}-{stop - 1}"})
        except HTTPError as error:
            error.close()
            if error.code == 416:
                raise self._lie(f"no bytes {start:,} to {stop - 1:,} after all") from error
            raise _refusal(error, self.name) from error
        try:
            if response.status != 206:
                raise LocaterError(
                    f"{self.name}: the server stopped answering byte ranges.", hint="try again."
                )
            if self._said_range(response) != (start, stop - 1, self.size):
                raise self._lie(
                    f"{response.headers['Content-Range']!r} for bytes {start} to {stop - 1} "
                    f"of {self.size}"
                )
            self._check_length(response, stop - start)
            if _mark(response) != self._mark:
                raise LocaterError(
                    f"{self.name} was replaced on the server while it was being read.",
                    hint="start again.",
                )
        except BaseException:
            response.close()
            raise
        return response

    def _said_range(self, response: HTTPResponse) -> tuple[int, int, int]:
        said = response.headers.get("Content-Range") or ""
        match = _RANGE.fullmatch(said)
        if not match or match[1] is None:
            raise self._lie(f"the Content-Range {said!r}")
        return int(match[1]), int(match[2]), int(match[3])

    def _check_length(self, response: HTTPResponse, expected: int) -> None:
        said = response.headers.get("Content-Length")
        if said is not None and said != str(expected):
            raise self._lie(f"a Content-Length of {said} for {expected} bytes")

    def _lie(self, what: str) -> LocaterError:
        return LocaterError(
            f"{self.name}: the server's sizes contradict each other; it gave {what}.",
            hint="download the file by other means and give its path.",
        )

    def close(self) -> None:
        """Nothing to let go of: every answer is closed when it was read."""


class WebFolder(Place):
    """A folder on a web server, of which only well-known names can be tried."""

    def __init__(self, url: str, *, last: str = "", say: Say = silent) -> None:
        super().__init__(shown(url).rstrip("/"))
        self._say = say
        self._known = (ADAPTER_CONFIG, *CONFIGS) if last else (ADAPTER_CONFIG, *CONFIGS, *PREFERRED)
        parts = urlsplit(url)
        self._parts = parts._replace(path=parts.path.rstrip("/"))
        self._found: list[str] | None = None

    def names(self) -> list[str]:
        """Those well-known names that the server has."""
        if self._found is None:
            self._found = [name for name in self._known if self._answers(name)]
        return self._found

    def _answers(self, name: str) -> bool:
        url = self._url(name)
        try:
            _patiently(lambda: _opened(url, {"Range": "bytes=0-0"}), shown(url), self._say).close()
        except AbsentError:
            return False
        return True

    def _url(self, name: str) -> str:
        return urlunsplit(self._parts._replace(path=f"{self._parts.path}/{name}"))

    def open(self, name: str) -> ByteSource:
        """One of its files."""
        file = RemoteFile(self._url(name), say=self._say)
        if not file.is_pinned:
            self._said += (f"{name} could change while it is read: no ETag, no Last-Modified",)
        return file


def fetch(url: str, headers: Mapping[str, str] | None = None, say: Say = silent) -> bytes:
    """A small document from a web server."""

    def whole() -> bytes:
        with _opened(url, headers or {}) as response:
            return _whole_body(response, shown(url))

    return _patiently(whole, shown(url), say)


def shown(url: str) -> str:
    """A URL without what may be secret in it: user, password, signature."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


class _BrokenError(Exception):
    """An attempt failed in a way that may pass."""

    def __init__(self, reason: object, pause: float = 0.0) -> None:
        super().__init__(str(reason) or type(reason).__name__)
        self.pause = pause

    def wait(self, failures: int, clock: _Clock, say: Say) -> None:
        """Wait before the next attempt; longer each time, and not for ever."""
        pause = min(max(self.pause, BACKOFF * 2**failures), LONGEST_PAUSE)
        if failures >= RETRIES or clock.left < pause:
            raise UnreachableError(
                f"{clock.name} could not be read in {failures + 1} attempts; the last one: {self}.",
                hint="check the address and the network, and try again.",
            ) from self
        say(f"waiting for {clock.name}: {self}; trying again in {pause:.0f} s")
        time.sleep(pause)


class _Clock:
    """How long somebody may still wait for so many bytes of a server."""

    def __init__(self, name: str, length: int = 0) -> None:
        self.name, self._began = name, time.monotonic()
        self._limit = PATIENCE + length / SLOWEST

    @property
    def left(self) -> float:
        """Seconds until patience ends."""
        return self._began + self._limit - time.monotonic()

    def check(self, missing: int) -> None:
        """Give up on a server that sends next to nothing."""
        if missing and self.left < 0:
            raise UnreachableError(
                f"{self.name}: the server is too slow; {missing:,} bytes are missing after "
                f"{self._limit:.0f} seconds.",
                hint="download the file by other means and give its path.",
            )


def _mark(response: HTTPResponse) -> tuple[str | None, str | None]:
    """What tells this version of a file from another: its ETag, else the time of its change."""
    mark = response.headers.get("ETag")
    return mark, None if mark else response.headers.get("Last-Modified")


def _patiently(work: Callable[[], Result], name: str, say: Say = silent) -> Result:
    """Do it, again and again where that may help."""
    clock = _Clock(name)
    for failures in count():
        try:
            return work()
        except _BrokenError as broken:
            broken.wait(failures, clock, say)
    raise AssertionError  # the count does not end


class _Redirects(HTTPRedirectHandler):
    """Follows to another host without the credentials of the first."""

    def redirect_request(
        self, req: Request, fp: Any, code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        """The next request of a redirected one."""
        if urlsplit(newurl).scheme not in ("http", "https"):
            raise LocaterError(f"{shown(req.full_url)} redirects to {newurl}, which is not HTTP.")
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        if following and urlsplit(newurl)[:2] != urlsplit(req.full_url)[:2]:
            for name in ("Authorization", "Cookie"):
                following.remove_header(name)
        return following


@cache
def _opener() -> OpenerDirector:
    return build_opener(_Redirects)


def _answer(url: str, headers: Mapping[str, str]) -> HTTPResponse:
    """One request; raises `_BrokenError` where another attempt may succeed, else HTTPError."""
    url, own = _without_password(url)
    request = Request(url, headers={"Accept-Encoding": "identity", **own, **headers})
    try:
        response: HTTPResponse = _opener().open(request, timeout=TIMEOUT)
    except HTTPError as error:
        if error.code in _BUSY:
            error.close()
            pause = _retry_after(error.headers.get("Retry-After"))
            raise _BrokenError(f"HTTP {error.code}", pause) from error
        raise
    except URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise LocaterError(
                f"{shown(url)}: its certificate cannot be trusted: {error.reason}.",
                hint="set SSL_CERT_FILE to your organization's certificates.",
            ) from error
        raise _BrokenError(error.reason) from error
    except (OSError, HTTPException) as error:
        raise _BrokenError(error) from error
    except ValueError as error:  # a host, port or path that no request can have
        raise LocaterError(f"{shown(url)} is no address: {error}.", hint="check it.") from error
    if response.headers.get("Content-Encoding", "identity") != "identity":
        response.close()
        raise LocaterError(
            f"{shown(url)}: the server compresses what it sends, so its byte ranges mean nothing.",
            hint="download the file by other means and give its path.",
        )
    return response


def _without_password(url: str) -> tuple[str, dict[str, str]]:
    """`http://user:password@host` as a URL without them and the header that carries them."""
    parts = urlsplit(url)
    told, _, host = parts.netloc.rpartition("@")
    if not told:
        return url, {}
    token = b64encode(unquote(told).encode()).decode()
    return urlunsplit(parts._replace(netloc=host)), {"Authorization": f"Basic {token}"}


def _opened(url: str, headers: Mapping[str, str]) -> HTTPResponse:
    try:
        return _answer(url, headers)
    except HTTPError as error:
        error.close()
        raise _refusal(error, shown(url)) from error


def _retry_after(said: str | None) -> float:
    """The seconds that a busy server asks for, as a number or a date."""
    if said is None:
        return 0.0
    try:
        if said.isdigit():
            return float(said)
        return parsedate_to_datetime(said).timestamp() - time.time()
    except ValueError:
        return 0.0


def _refusal(error: HTTPError, name: str) -> LocaterError:
    """What to say of an answer that will not change."""
    if error.code in (404, 410):
        return AbsentError(f"{name} does not exist (HTTP {error.code}).", hint="check the address.")
    if error.code in (401, 403):
        return LocaterError(
            f"{name} may not be read (HTTP {error.code}).",
            hint="for a gated or private hub repository, accept its terms and set HF_TOKEN.",
        )
    return LocaterError(f"{name}: the server answered HTTP {error.code}.", hint="try again later.")


def _part(response: HTTPResponse, buffer: memoryview) -> int:
    """Read some bytes; none at all is a broken connection."""
    try:
        arrived = response.read1(len(buffer))  # what is there: readinto would wait for all of it
    except (OSError, HTTPException) as error:
        raise _BrokenError(error) from error
    if not arrived:
        raise _BrokenError("the connection was closed early")
    buffer[: len(arrived)] = arrived
    return len(arrived)


def _body(response: HTTPResponse, length: int) -> bytes:
    buffer, done = memoryview(bytearray(length)), 0
    while done < length:
        done += _part(response, buffer[done:])
    return bytes(buffer)


def _whole_body(response: HTTPResponse, name: str) -> bytes:
    """All of an answer that is small; a large one is refused unread."""
    said: Any = response.headers.get("Content-Length")
    expected = int(said) if said and said.isdigit() else None
    if expected is None or expected <= LARGEST_WHOLE:
        try:
            data = response.read(LARGEST_WHOLE + 1)
        except (OSError, HTTPException) as error:
            raise _BrokenError(error) from error
        if expected is not None and len(data) < expected:
            raise _BrokenError("the connection was closed early")
        if len(data) <= LARGEST_WHOLE:
            return data
    size = "more" if expected is None else f"{expected:,}"
    raise LocaterError(
        f"{name}: the server ignores byte ranges, and would send {size} bytes; "
        f"at most {LARGEST_WHOLE:,} are taken whole.",
        hint="download the file and give its path, or use a server that honors ranges.",
    )


class HubRepository(Place):
    """One commit of a repository; `HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE` are honored."""

    def __init__(self, repository: str, revision: str | None = None, *, say: Say = silent) -> None:
        with needing("huggingface_hub", extra="hub"):
            from huggingface_hub import constants, get_token
        super().__init__(repository)
        self._repository, self._say = repository, say
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
            info = json_object(fetch(url, self._headers, self._say), url)
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
            found = self.path(name)
            if found is not None:
                self._snapshot = found.parent
                self._said = (f"{why}: {self._repository} is what was downloaded before",)
                return
        raise LocaterError(
            f"{self._repository} is neither a path here nor in the hub's local cache, and {why}.",
            hint=f"check the path; for a model of the hub, run: hf download {self._repository}",
        ) from cause

    def path(self, name: str) -> Path | None:
        """Where the cache keeps a file, if it does."""
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            found = try_to_load_from_cache(self._repository, name, revision=self._revision)
        except HFValidationError as error:
            raise LocaterError(
                f"{self._repository} is neither a path here nor a name that the hub can have.",
                hint="check the spelling (org/name or org/name@revision).",
            ) from error
        return Path(found) if isinstance(found, str) else None

    def names(self) -> list[str]:
        """The files at the top of the repository."""
        if self._snapshot is not None:
            return sorted(entry.name for entry in self._snapshot.iterdir() if entry.is_file())
        return [name for name in self._files if "/" not in name]

    def below(self) -> list[str]:
        """The files in its folders."""
        if self._snapshot is not None:
            return Folder(self._snapshot).below()
        return [name for name in self._files if "/" in name]

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
        return RemoteFile(url, headers=self._headers, say=self._say)
