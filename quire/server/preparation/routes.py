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

from quire.server.http.errors import InvalidBodyError
from quire.server.http.reply import CLIENT_LEFT, unless_disconnected
from quire.server.preparation.bodies import RequestBody
from quire.server.preparation.prepare import Preparation, Prepare, Prepared, PreparedKind
from quire.server.state import state_of

SMALL_BYTES = 8 << 10
"""A body below this is read here if nothing runs a template for it: that takes a few
milliseconds at most, whatever it says."""

PREPARED_KINDS: dict[str, PreparedKind] = {}
"""By path."""


PARSERS = PREPARED_KINDS[""] = PreparedKind(
    "", RequestBody, Preparation.log_parsers, uses_template=True
)
"""No route: says at start-up what the chat template asks for, since even that reads it."""

Answer = Callable[[Prepared, Request], Awaitable[Response]]


def prepared_route(
    router: APIRouter,
    path: str,
    body: type[BaseModel],
    prepare: Prepare,
    *,
    uses_template: bool = True,
) -> Callable[[Answer], Answer]:
    """Registers a function that answers what `prepare` makes of a body. A `prepare` that returns
    bytes has answered already."""
    kind = PREPARED_KINDS[path] = PreparedKind(path, body, prepare, uses_template)

    def register(answer: Answer) -> Answer:
        async def handle(request: Request) -> Response:
            made = await _prepared(kind, request)
            if made is None:
                return Response(status_code=CLIENT_LEFT)
            if isinstance(made, bytes):
                return Response(made, media_type="application/json")
            request.state.structured_fields = made.structured_fields  # for errors
            return await answer(made, request)

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
