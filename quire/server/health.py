"""`/health`, `/ping`, `/version`, `/load` and `/metrics`: how the server and its engine are."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.metrics.prometheus import CONTENT_TYPE, render
from quire.protocol import __version__
from quire.server.http.errors import RETRY_AFTER_S, error_response
from quire.server.state import state_of

router = APIRouter()
BODILESS: Any = {"response_class": Response, "response_description": "The engine serves requests."}


@router.get("/health", **BODILESS)
@router.head("/health", include_in_schema=False)  # load balancers ask so
@router.get("/ping", **BODILESS)
@router.head("/ping", include_in_schema=False)
@router.post("/ping", **BODILESS)
async def health(request: Request) -> Response:
    state = state_of(request)
    death = state.llm.client.death
    if death is None:
        return Response(status_code=200)
    after = RETRY_AFTER_S if state.restarting else None
    return error_response(503, f"the engine serves nothing now: {death}", retry_after_s=after)


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/load")
async def load(request: Request) -> dict[str, int]:
    """Requests that are being answered, by whichever API process."""
    return {"server_load": state_of(request).load.num_requests}


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request) -> Response:
    state = state_of(request)
    readings = await state.llm.get_metrics()
    labels = {"model_name": state.model_names[0], "engine": "0"}
    text = render(readings, state.options.serving.metrics_prefix, labels)
    return Response(text, media_type=CONTENT_TYPE)
