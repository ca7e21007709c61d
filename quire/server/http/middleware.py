"""`Middleware`: what every HTTP request passes on its way to a route and back: its path behind a
proxy, id, host, key, the size of its body, the count of open requests, logs and traces."""

from __future__ import annotations

import contextlib
import mmap
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.config.server import NetworkOptions
from quire.server.http.auth import Access, AccessDenied, Hosts
from quire.server.http.errors import dialect_of, error_response
from quire.server.http.limits import BodyLimit
from quire.server.request_log import FinishedRequest, Observer

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Load:
    """How many requests the server is answering: the counts of all its API processes, one of which,
    at `place`, is this process's to write."""

    def __init__(self, counts: memoryview, place: int = 0) -> None:
        self._counts = counts.cast("q")
        self._place = place
        self._counts[place] = 0  # the process that had the place before is gone

    @classmethod
    def alone(cls) -> Load:
        """For an application that is served by one process."""
        return cls(memoryview(bytearray(8)))

    @classmethod
    def shared(cls, file: str, place: int) -> Load:
        with Path(file).open("r+b") as opened:
            return cls(memoryview(mmap.mmap(opened.fileno(), 0)), place)

    @property
    def num_requests(self) -> int:
        return sum(self._counts)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts a request between its arrival and the end of its reply."""
        self._counts[self._place] += 1
        try:
            yield
        finally:
            self._counts[self._place] -= 1


class Middleware:
    """POST requests are counted while they are open, and told to `observers` once answered."""

    def __init__(
        self,
        app: ASGIApp,
        network: NetworkOptions,
        access: Access,
        load: Load,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._app = app
        self._root_path = network.root_path
        self._hosts = Hosts.of(network)
        self._access = access
        self._body_limit = BodyLimit(network.max_body_bytes)
        self._load = load
        self._observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._root_path:
            self._find_under_root(scope)
        started, status = time.monotonic(), None
        headers, path = dict(scope["headers"]), _route(scope)
        request_id, dialect = _request_id(headers), dialect_of(path, headers)
        state = scope.setdefault("state", {})
        state |= {"request_id": request_id, "dialect": dialect}
        ids = [(name, request_id.encode()) for name in dialect.id_headers]

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *ids]
            await send(message)

        is_post = scope["method"] == "POST"
        try:
            refusal = self._refusal(scope, path, headers)
            if refusal is not None:
                await refusal(scope, receive, answer)
            else:
                with self._load.counted() if is_post else contextlib.nullcontext():
                    await self._app(scope, self._body_limit.bounded(receive), answer)
        finally:
            if is_post:
                self._tell_observers(scope, status, started)

    def _find_under_root(self, scope: Scope) -> None:
        """Some proxies take the prefix off and some leave it on: both find their routes."""
        path, prefix = scope["path"], self._root_path
        has_prefix = path == prefix or path.startswith(prefix + "/")
        scope["root_path"] = prefix
        scope["path"] = path if has_prefix else prefix + path

    def _refusal(self, scope: Scope, path: str, headers: dict[bytes, bytes]) -> Response | None:
        """The answer to a request that no route is to see; notes the tenant of others."""
        state = scope["state"]
        try:
            self._hosts.check(scope["headers"])
            state["tenant"] = self._access.admit(path, scope["headers"])
        except AccessDenied as denied:
            return error_response(denied.status, str(denied), dialect=state["dialect"])
        if self._body_limit.refuses(headers):
            return error_response(413, self._body_limit.message, dialect=state["dialect"])
        return None

    def _tell_observers(self, scope: Scope, status: int | None, started: float) -> None:
        if not self._observers:
            return
        state = scope["state"]
        finished = FinishedRequest(
            request_id=state["request_id"],
            path=scope["path"],
            headers={k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]},
            status=status,
            started=started,
            made=state.get("made", ()),
        )
        for observer in self._observers:
            observer(finished)


def _route(scope: Scope) -> str:
    """The path without the part under which a proxy shows this server."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _request_id(headers: dict[bytes, bytes]) -> str:
    given = headers.get(b"x-request-id", b"")
    if _REQUEST_ID.fullmatch(given):
        return given.decode("ascii")
    return secrets.token_hex(16)
