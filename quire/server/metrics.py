"""`/metrics`: the engine's readings as Prometheus text."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.metrics.prometheus import CONTENT_TYPE, render
from quire.server.state import state_of

router = APIRouter()


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
