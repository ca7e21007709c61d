"""Routes whose bodies are read, checked and tokenised before they run, and off their event loop."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from quire.server.generation import state_of, unless_disconnected
from quire.server.http.event_stream import CLIENT_LEFT
from quire.server.preparation.bodies import RequestBody
from quire.server.preparation.context import Preparation, Prepare, Prepared, PreparedKind
from quire.server.preparation.reading import check_content_type, prepare
from quire.server.tool_use import log_parsers

SMALL_BYTES = 8 << 10
"""A body below this is read here if nothing runs a template for it: that takes a few
milliseconds at most, whatever it says."""

PREPARED_KINDS: dict[str, PreparedKind] = {}
"""By path."""


def _log_parsers(preparation: Preparation, body: RequestBody) -> bytes:
    log_parsers(preparation)
    return b""


PARSERS = PREPARED_KINDS[""] = PreparedKind("", RequestBody, _log_parsers, uses_template=True)
"""No route: says at start-up what the chat template asks for, since even that reads it."""

Answer = Callable[[Prepared, Request], Awaitable[Response]]


class PreparedRoute(APIRoute):
    """A route that gets what was prepared. FastAPI only describes its body."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        kind: PreparedKind = self.endpoint.kind  # type: ignore[attr-defined]
        answer: Answer = self.endpoint.answer  # type: ignore[attr-defined]

        async def handle(request: Request) -> Response:
            made = await _prepared(kind, request)
            if made is None:
                return Response(status_code=CLIENT_LEFT)
            if isinstance(made, bytes):
                return Response(made, media_type="application/json")
            request.state.form_fields = made.form_fields  # for errors
            return await answer(made, request)

        return handle


async def _prepared(kind: PreparedKind, request: Request) -> Prepared | bytes | None:
    """None if the client left."""
    state = state_of(request)
    with state.pool.holding() as held:
        pieces: list[bytes] = []
        try:
            async for piece in request.stream():
                held.add(len(piece))
                pieces.append(piece)
        except ClientDisconnect:
            return None
        check_content_type(request)
        if not kind.uses_template and held.num_bytes < SMALL_BYTES:
            return prepare(state.preparation, kind, b"".join(pieces))
        return await unless_disconnected(request.receive, state.pool.run(kind, pieces))


def prepared_route(
    router: APIRouter,
    path: str,
    body: type[BaseModel],
    prepare: Prepare,
    *,
    uses_template: bool = True,
    **described: Any,
) -> Callable[[Answer], Answer]:
    """Registers a function that answers what `prepare` makes of a body. A `prepare` that returns
    bytes has answered already."""
    kind = PREPARED_KINDS[path] = PreparedKind(path, body, prepare, uses_template)

    def register(answer: Answer) -> Answer:
        async def endpoint(**arguments: Any) -> Response:
            raise AssertionError("PreparedRoute answers in its place")

        endpoint.__name__, endpoint.__doc__ = answer.__name__, answer.__doc__
        endpoint.kind, endpoint.answer = kind, answer  # type: ignore[attr-defined]
        field = inspect.Parameter("body", inspect.Parameter.KEYWORD_ONLY, annotation=body)
        endpoint.__signature__ = inspect.Signature([field], return_annotation=Response)  # type: ignore[attr-defined]
        router.add_api_route(
            path, endpoint, methods=["POST"], route_class_override=PreparedRoute, **described
        )
        return answer

    return register


async def answered_already(made: Prepared, request: Request) -> Response:
    """For routes whose `prepare` returns bytes."""
    raise AssertionError("nothing is left to answer")
