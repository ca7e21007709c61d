"""`Gate`: what every HTTP request passes first: its id, host, key, and the size of its body."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException

from quire.server.dialect import dialect_of
from quire.server.http.auth import Access, AccessDenied
from quire.server.http.errors import error_response
from quire.server.http.hosts import Hosts

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Gate:
    def __init__(self, app: Application, hosts: Hosts, access: Access, max_body_bytes: int) -> None:
        self._app = app
        self._hosts = hosts
        self._access = access
        self._max_body_bytes = max_body_bytes
        self._too_large = f"the body is larger than max_body_bytes={max_body_bytes}; send less."

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = dict(scope["headers"]), _route(scope)
        request_id, dialect = _request_id(headers), dialect_of(path, headers)
        state = scope.setdefault("state", {})
        state |= {"request_id": request_id, "dialect": dialect}
        ids = [(name, request_id.encode()) for name in dialect.id_headers]

        async def answer(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *ids]
            await send(message)

        try:
            self._hosts.check(scope["headers"])
            state["tenant"] = self._access.admit(path, scope["headers"])
        except AccessDenied as denied:
            refused = error_response(denied.status, str(denied), dialect=dialect)
            await refused(scope, receive, answer)
            return
        if _content_length(headers) > self._max_body_bytes:
            too_large = error_response(413, self._too_large, dialect=dialect)
            await too_large(scope, receive, answer)
            return
        await self._app(scope, self._bounded(receive), answer)

    def _bounded(self, receive: Receive) -> Receive:
        size = 0

        async def bounded() -> MutableMapping[str, Any]:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_body_bytes:
                # FastAPI makes a 400 of other exceptions while it reads a body.
                raise HTTPException(413, self._too_large)
            return message

        return bounded


def _route(scope: Scope) -> str:
    """The path without the part under which a proxy shows this server."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _request_id(headers: dict[bytes, bytes]) -> str:
    given = headers.get(b"x-request-id", b"")
    if _REQUEST_ID.fullmatch(given):
        return given.decode("ascii")
    return secrets.token_hex(16)


def _content_length(headers: dict[bytes, bytes]) -> int:
    text = headers.get(b"content-length", b"")
    return int(text) if text.isdigit() else 0
