"""`Watch`: tells listeners of each POST request, once it is answered."""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.frontend.output_processor import OpenRequest, OpenSequence
from quire.server.http.middleware import Application, Receive, Scope, Send


@dataclass(frozen=True)
class FinishedRequest:
    """An HTTP request that was answered, refused or left by its client."""

    request_id: str
    path: str
    headers: dict[str, str]
    status: int | None
    """Of the reply; None if there was none."""
    started: float
    """On the monotonic clock."""
    made: Sequence[OpenRequest]
    """What the engine was asked for, empty if the request was refused before."""


def end_of(sequence: OpenSequence) -> str:
    """Why a sequence ended, also where the engine could not say so."""
    failed = sequence.request.error is not None
    return sequence.finish_reason or ("error" if failed else "disconnect")


Observer = Callable[[FinishedRequest], None]


class Watch:
    """Stands before the gate, so that those who are turned away there are seen too."""

    def __init__(self, app: Application, observers: Sequence[Observer]) -> None:
        self._app = app
        self._observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        started, status = time.monotonic(), None

        async def watched(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            self._tell(scope, status, started)

    def _tell(self, scope: Scope, status: int | None, started: float) -> None:
        state = scope.get("state", {})
        finished = FinishedRequest(
            request_id=state.get("request_id", ""),
            path=scope["path"],
            headers={k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]},
            status=status,
            started=started,
            made=state.get("made", ()),
        )
        for observer in self._observers:
            observer(finished)
