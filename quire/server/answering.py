"""How every route that generates begins and ends; what lies between is its protocol's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec
from fastapi import Request
from starlette.responses import Response

from quire.frontend.outputs import RequestOutput
from quire.server.bodies import GenerationBody, RequestBody
from quire.server.event_stream import CLIENT_LEFT, EventStream
from quire.server.form_fields import FormFields
from quire.server.generation import Generation, state_of
from quire.server.openai.response_format import form_field
from quire.server.state import ServerState


class Reply(Protocol):
    """Writes what came of a generation in the form of its protocol."""

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """All of it at once."""

    def events(self, generation: Generation) -> AsyncIterator[bytes]:
        """Server-sent events as it comes."""


def check_body(body: RequestBody, request: Request) -> tuple[ServerState, str]:
    """The server's state, and the name of the model to answer with."""
    state = state_of(request)
    model = state.check_model(body.model)
    body.note_unknown_fields()
    body.refuse_unsupported()
    if isinstance(body, GenerationBody):
        request.state.form_fields = FormFields(form_field(body))  # for errors
    return state, model


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
    return Response(msgspec.json.encode(reply.whole(outputs)), media_type="application/json")
