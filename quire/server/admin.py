"""`/admin/...`: what only whoever runs the server may do. Without an admin key it is not there."""

from __future__ import annotations

import logging
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from quire.server.generation import state_of

router = APIRouter(prefix="/admin")


class AbortBody(BaseModel):
    request_id: str
    """The `id` of a reply."""


class LogLevelBody(BaseModel):
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"]


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> dict[str, Any]:
    return {"reset": await state_of(request).llm.reset_prefix_cache()}


@router.post("/abort")
async def abort(body: AbortBody, request: Request) -> dict[str, Any]:
    client = state_of(request).llm.client
    return {"aborted": await client.command("abort_named", int, name=body.request_id)}


@router.post("/log_level")
async def log_level(body: LogLevelBody, request: Request) -> dict[str, Any]:
    """Of the engine and of the API process that answers."""
    await state_of(request).llm.client.command("set_log_level", type(None), level=body.level)
    logging.getLogger("quire").setLevel(body.level)
    return {"level": body.level}
