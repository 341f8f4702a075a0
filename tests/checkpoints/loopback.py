"""Web servers on this machine that behave, or misbehave, as servers do."""

from __future__ import annotations

import json
import re
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Server:
    """What a server does, and what it has seen."""

    folder: Path
    ranges: bool = True
    drops: int = 0
    """So many answers to come break off half way."""
    busy: int = 0
    """So many answers to come are 503."""
    headers: dict[str, str] = field(default_factory=dict)
    """What answers to ranges say in place of the truth."""
    lie_after: int = 0
    """So many answers are true before those headers come."""
    announced: int | None = None
    """The length that an answer without ranges announces in place of the true one."""
    token: str | None = None
    redirect: str | None = None
    """Where files are really kept, as with a hub and its storage."""
    commit: str = "0123abc"
    etag: str | None = '"1"'
    password: str | None = None
    """What a request must bring as `user:password`."""
    trickle: float = 0.0
    """Seconds between two bytes of an answer to a range."""
    url: str = ""
    sent: int = 0
    requests: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    """Path, range and authorization of each request."""


class Handler(BaseHTTPRequestHandler):
    """Serves one folder, as `Server` says."""

    state: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        state, path = self.state, unquote(urlsplit(self.path).path)
        asked = self.headers.get("Range")
        state.requests.append((path, asked, self.headers.get("Authorization")))
        if state.busy:
            state.busy -= 1
            self.answer(503, b"", {"Retry-After": "0"})
        elif not self.may():
            self.answer(401, b"", {})
        elif path.startswith("/api/models/"):
            self.repository(path)
        elif state.redirect:
            self.answer(302, b"", {"Location": f"{state.redirect}{path}?signature=secret"})
        else:
            file = state.folder / re.sub(r"^/?[^/]+/[^/]+/resolve/[^/]+/", "", path).lstrip("/")
            if file.is_file():
                self.file(file.read_bytes(), asked)
            else:
                self.answer(404, b"nothing here", {})

    def may(self) -> bool:
        """Whether the request brings what the server wants."""
        state, brought = self.state, self.headers.get("Authorization")
        if state.token and brought != f"Bearer {state.token}":
            return False
        return not state.password or brought == basic(state.password)

    def repository(self, path: str) -> None:
        """What a hub says of a repository."""
        if "/org/name/" not in path:
            self.answer(404, b"", {})
            return
        files = [{"rfilename": file.name} for file in sorted(self.state.folder.iterdir())]
        said = {"id": "org/name", "sha": self.state.commit, "siblings": files}
        self.answer(200, json.dumps(said).encode(), {})

    def file(self, data: bytes, asked: str | None) -> None:
        """A file, or the range of it that was asked for."""
        state = self.state
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", asked or "")
        if not match or not state.ranges:
            length = len(data) if state.announced is None else state.announced
            self.answer(200, data, {"Content-Length": str(length)})
            return
        start, stop = int(match[1]), min(int(match[2]) + 1, len(data))
        if start >= len(data):
            self.answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return
        headers = {
            "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}",
            **({"ETag": state.etag} if state.etag else {}),
        }
        if state.lie_after:
            state.lie_after -= 1
        else:
            headers |= state.headers
        self.answer(206, data[start:stop], headers)

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        state = self.state
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if state.drops and status == 206 and len(body) > 64:
            state.drops -= 1
            body = body[: len(body) // 2]
            self.close_connection = True
        state.sent += len(body)
        if state.trickle and status == 206 and len(body) > 64:
            for place in range(len(body)):
                self.wfile.write(body[place : place + 1])
                self.wfile.flush()
                time.sleep(state.trickle)
        self.wfile.write(b"" if state.trickle and status == 206 and len(body) > 64 else body)


def basic(password: str) -> str:
    """How a request carries it."""
    return f"Basic {b64encode(password.encode()).decode()}"


@contextmanager
def serving(folder: Path, **behavior: Any) -> Iterator[Server]:
    """A server for a folder, at `server.url`."""
    state = Server(folder, **behavior)
    handler = type("Handler", (Handler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
