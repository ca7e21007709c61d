"""`/admin/...`: for the operator of the server. Without an admin key it is not there."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from quire.protocol.errors import EngineDeadError
from quire.protocol.messages import LogLevel
from quire.server.state import state_of

router = APIRouter(prefix="/admin")


class AbortBody(BaseModel):
    request_id: str | None = None
    """The `id` of a reply; without it all requests are ended."""


class PauseBody(BaseModel):
    mode: Literal["drain", "hold"] = "drain"
    """drain: no request begins, running ones go on; hold: nothing is computed."""


class LogLevelBody(BaseModel):
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"]


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> dict[str, Any]:
    return {"reset": await state_of(request).llm.reset_prefix_cache()}


@router.post("/abort")
async def abort(body: AbortBody, request: Request) -> dict[str, Any]:
    client = state_of(request).llm.client
    if body.request_id is None:
        return {"aborted": await client.command("abort_all", int)}
    return {"aborted": await client.command("abort_named", int, name=body.request_id)}


@router.post("/pause")
async def pause(body: PauseBody, request: Request) -> dict[str, Any]:
    """Requests are still taken in, and wait."""
    await state_of(request).llm.client.command("pause", type(None), mode=body.mode)
    return {"paused": body.mode}


@router.post("/resume")
async def resume(request: Request) -> dict[str, Any]:
    await state_of(request).llm.client.command("resume", type(None))
    return {"paused": None}


@router.post("/check_books", include_in_schema=False)  # older name
@router.post("/check_integrity")
async def check_integrity(request: Request) -> dict[str, Any]:
    """Whether every block of the KV cache is accounted for; an error if not. Requests are those
    whose outputs the API process that answers still keeps."""
    llm = state_of(request).llm
    used = await llm.client.command("check_integrity", int)
    return {"used_blocks": used, "open_requests": llm.num_open}


@router.post("/drain")
async def drain() -> dict[str, Any]:
    """As SIGTERM: take no new requests, finish the open ones, then stop."""
    os.kill(os.getppid(), signal.SIGTERM)
    return {"draining": True}


@router.post("/log_level")
async def log_level(body: LogLevelBody, request: Request) -> dict[str, Any]:
    """Of all processes, and of those that take their place."""
    state = state_of(request)
    state.report(LogLevel(body.level))
    with contextlib.suppress(EngineDeadError):  # the next one is told when it starts
        await state.llm.client.command("set_log_level", type(None), level=body.level)
    return {"level": body.level}
