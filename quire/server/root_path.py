"""`RootPath`: serves all routes under `--root-path` too, as a proxy shows them."""

from __future__ import annotations

from quire.server.http.middleware import Application, Receive, Scope, Send


class RootPath:
    """Some proxies take the prefix off and some leave it on: both find their routes."""

    def __init__(self, app: Application, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path, prefix = scope["path"], self._prefix
            has_prefix = path == prefix or path.startswith(prefix + "/")
            scope["root_path"] = prefix
            scope["path"] = path if has_prefix else prefix + path
        await self._app(scope, receive, send)
