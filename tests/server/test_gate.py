"""Which key a route needs does not depend on the path under which a proxy shows the server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.server.access import KeyRing
from quire.server.gate import Gate


@pytest.mark.parametrize("root", ["", "/llm"])
@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/health", "", 200),
        ("/static/main.js", "", 200),
        ("/v1/models", "", 401),
        ("/v1/models", "user", 200),
        ("/admin/abort", "user", 401),
        ("/admin/abort", "admin", 200),
    ],
)
def test_keys_behind_a_proxy(root: str, path: str, key: str, status: int) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            seen.append(message["status"])

    async def receive() -> Any:
        return {"type": "http.request"}

    seen: list[int] = []
    gate = Gate(app, KeyRing.of(["user"]), KeyRing.of(["admin"]), 1000)
    headers = [(b"authorization", f"Bearer {key}".encode())]
    scope = {"type": "http", "path": root + path, "root_path": root, "headers": headers}
    asyncio.run(gate(scope, receive, send))
    assert seen == [status]
