"""Requests to an ASGI application in this process: a server's routes without a socket."""

from __future__ import annotations

import asyncio
from typing import Any

from quire.client.batch import BatchAnswer


async def post_asgi(app: Any, path: str, body: bytes) -> BatchAnswer:
    length = str(len(body)).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", length),
        ],
        "client": None,
        "server": None,
    }
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    status, headers, pieces = 0, {}, []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()  # this client never disconnects
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], dict(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    request_id = headers.get(b"x-request-id")
    name = None if request_id is None else request_id.decode("latin-1")
    return BatchAnswer(status, b"".join(pieces), name)
