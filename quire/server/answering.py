"""How every route that generates begins and ends; what lies between is its protocol's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

from starlette.responses import Response

from quire.frontend.outputs import RequestOutput
from quire.server.generation import Generation
from quire.server.http.event_stream import CLIENT_LEFT, EventStream
from quire.server.http.reply_json import encoded, num_values, off_loop


class Reply(Protocol):
    """Writes what came of a generation in the form of its protocol."""

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """All of it at once."""

    def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """Server-sent events as it comes."""


async def answer(
    generation: Generation,
    reply: Reply,
    streams: bool | None,
    *,
    begins_first: bool = True,
    **ending: Any,
) -> Response:
    """The response to a request. `begins_first`: a stream's status waits for its first news;
    `ending` is what `EventStream` must know about its protocol."""
    if streams:
        if begins_first and not await generation.begin():
            return Response(status_code=CLIENT_LEFT)
        return EventStream(reply.events(generation), generation.close, **ending)
    outputs = await generation.outputs()
    if outputs is None:
        return Response(status_code=CLIENT_LEFT)
    data = await off_loop(num_values(outputs), lambda: encoded(reply.whole(outputs)))
    return Response(data, media_type="application/json")
