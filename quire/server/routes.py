"""What the routes of all protocols do: have a body read, checked and tokenised off their event
loop, hand it to the engine, and send the protocol's reply."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol, TypeVar

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from quire.frontend.async_llm import OutputStream
from quire.frontend.outputs import RequestOutput
from quire.protocol.errors import QuireError
from quire.server.http.errors import InvalidBodyError
from quire.server.http.reply import (
    CLIENT_LEFT,
    EventStream,
    encoded,
    num_values,
    off_loop,
    unless_disconnected,
)
from quire.server.preparation.bodies import RequestBody
from quire.server.preparation.prepare import Preparation, Prepare, Prepared, PreparedKind
from quire.server.state import state_of

T = TypeVar("T")

SMALL_BYTES = 8 << 10
"""A body below this is read here if nothing runs a template for it: that takes a few
milliseconds at most, whatever it says."""

PREPARED_KINDS: dict[str, PreparedKind] = {}
"""By path."""


PARSERS = PREPARED_KINDS[""] = PreparedKind(
    "", RequestBody, Preparation.log_parsers, uses_template=True
)
"""No route: says at start-up what the chat template asks for, since even that reads it."""


class Reply(Protocol):
    """Writes what the engine generates in the format of its protocol."""

    id: str
    wants_progress: bool
    last: bytes
    """The end of a stream of events."""

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """All of it at once."""

    def events(self, stream: OutputStream) -> AsyncIterator[bytes]:
        """Server-sent events as it comes."""

    def failure(self, error: QuireError) -> bytes:
        """The event that tells of an error in mid-stream."""


Answer = Callable[[Prepared, Request], Awaitable[Response | Reply]]


def prepared_route(
    router: APIRouter,
    path: str,
    body: type[BaseModel],
    prepare: Prepare,
    *,
    uses_template: bool = True,
) -> Callable[[Answer], Answer]:
    """Registers a function that answers what `prepare` makes of a body, or says how the engine's
    outputs are written. A `prepare` that returns bytes has answered already."""
    kind = PREPARED_KINDS[path] = PreparedKind(path, body, prepare, uses_template)

    def register(answer: Answer) -> Answer:
        async def handle(request: Request) -> Response:
            made = await _prepared(kind, request)
            if made is None:
                return Response(status_code=CLIENT_LEFT)
            if isinstance(made, bytes):
                return Response(made, media_type="application/json")
            request.state.structured_fields = made.structured_fields  # for errors
            answered = await answer(made, request)
            if isinstance(answered, Response):
                return answered
            return await _generate(request, made, answered)

        class PreparedRoute(APIRoute):
            def get_route_handler(self) -> Callable[[Request], Any]:
                return handle

        async def endpoint(**arguments: Any) -> Response:
            raise AssertionError("PreparedRoute answers in its place")  # this one is described

        endpoint.__name__, endpoint.__doc__ = answer.__name__, answer.__doc__
        field = inspect.Parameter("body", inspect.Parameter.KEYWORD_ONLY, annotation=body)
        endpoint.__signature__ = inspect.Signature([field], return_annotation=Response)  # type: ignore[attr-defined]
        router.add_api_route(path, endpoint, methods=["POST"], route_class_override=PreparedRoute)
        return answer

    return register


async def _prepared(kind: PreparedKind, request: Request) -> Prepared | bytes | None:
    """None if the client left."""
    state = state_of(request)
    with state.body_memory.holding() as held:
        try:
            async for piece in request.stream():
                held.add(piece)
        except ClientDisconnect:
            return None
        check_content_type(request)
        if not kind.uses_template and held.num_bytes < SMALL_BYTES:
            return state.preparation.prepare(kind, b"".join(held.pieces))
        return await unless_disconnected(request.receive, state.pool.run(kind, held.pieces))


async def _generate(request: Request, made: Prepared, reply: Reply) -> Response:
    """The status of a stream waits for the first outputs, unless these are progress: a request that
    fails before has a status of its own instead of an event."""
    stream = await open_stream(request, made, reply.id, reply.wants_progress)
    if not made.body.stream:
        outputs = await read_to_end(request, stream, stream.outputs())
        if outputs is None:
            return Response(status_code=CLIENT_LEFT)
        data = await off_loop(num_values(outputs), lambda: encoded(reply.whole(outputs)))
        return Response(data, media_type="application/json")
    has_begun: bool | None = reply.wants_progress
    try:
        has_begun = has_begun or await unless_disconnected(request.receive, stream.begin())
    finally:
        if not has_begun:
            stream.close()
    if not has_begun:
        return Response(status_code=CLIENT_LEFT)
    return EventStream(reply.events(stream), stream.close, reply.last, reply.failure)


async def open_stream(
    request: Request, made: Prepared, name: str, wants_progress: bool = False
) -> OutputStream:
    """Hand prompts to the engine; returns once it has accepted them all."""
    state = state_of(request)
    terms = made.body.terms(request.state.tenant, wants_progress)
    if (adapter := state.preparation.adapter_named(made.model)) is not None:
        terms = dataclasses.replace(terms, adapter=adapter)
    llm = state.llm
    stream = await llm.open_stream(made.prompts, made.params, name, terms)
    stream.reads_lazily = True
    request.state.made = stream.requests  # for what watches requests
    return stream


async def read_to_end(request: Request, stream: OutputStream, work: Awaitable[T]) -> T | None:
    """What `work` makes of all that a stream has; None if the client left, which aborts it."""
    try:
        return await unless_disconnected(request.receive, work)
    finally:
        stream.close()


async def answered_already(made: Prepared, request: Request) -> Response:
    """For routes whose `prepare` returns bytes."""
    raise AssertionError("nothing is left to answer")


def check_content_type(request: Request) -> None:
    """Bodies of another type than JSON are not looked at."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_variant = kind.startswith("application/") and kind.endswith("+json")
    if kind != "application/json" and not is_variant:
        raise InvalidBodyError(
            "the body is not a JSON object; send one, with 'Content-Type: application/json'."
        )
