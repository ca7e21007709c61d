"""`/v1/models`, in the format of the client's protocol."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from fastapi import APIRouter, Request

from quire.protocol.errors import EngineDeadError, RequestError
from quire.server.http.errors import ANTHROPIC
from quire.server.state import state_of

router = APIRouter()

DEFAULT_PAGE = 20
MAX_PAGE = 1000


@router.get("/v1/models")
async def models(
    request: Request,
    limit: int = DEFAULT_PAGE,
    after_id: str | None = None,
    before_id: str | None = None,
) -> dict[str, Any]:
    """In the format of the client's protocol; the parameters are those of Anthropic's."""
    _check_serving(request)
    state = state_of(request)
    names = [*state.model_names, *(module.name for module in state.preparation.adapters.all())]
    records = [_record(request, name) for name in names]
    if request.state.dialect is ANTHROPIC:
        return _anthropic_page(records, limit, after_id, before_id)
    return {"object": "list", "data": records}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    _check_serving(request)
    return _record(request, state_of(request).preparation.check_model(name))


def _check_serving(request: Request) -> None:
    """Clients take a list of models for a sign that these are served."""
    death = state_of(request).llm.client.death
    if death is not None:
        raise EngineDeadError(f"the engine serves nothing now: {death}")


def _record(request: Request, name: str) -> dict[str, Any]:
    state = state_of(request)
    if request.state.dialect is ANTHROPIC:
        return _anthropic_record(name, state.created, state.llm.session.inputs.max_model_len)
    root, parent = state.llm.model_config.source.name, None
    if name not in state.model_names:
        module = state.preparation.adapters.find(name)
        if module is not None:
            root, parent = module.path, module.base_model_name or state.model_names[0]
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "quire",
        "root": root,
        "parent": parent,
        "max_model_len": state.llm.session.inputs.max_model_len,
    }


def _anthropic_record(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
    }


def _anthropic_page(
    records: Sequence[dict[str, Any]], limit: int, after_id: str | None, before_id: str | None
) -> dict[str, Any]:
    """The part of a list that is asked for: what follows, or what comes before, one of its ids."""
    if not 1 <= limit <= MAX_PAGE:
        raise RequestError(f"limit must be from 1 to {MAX_PAGE}, got {limit}.")
    names = [record["id"] for record in records]
    for field, name in (("after_id", after_id), ("before_id", before_id)):
        if name is not None and name not in names:
            raise RequestError(f"{field} is {name!r:.200}, which is no model here; leave it out.")
    start = 0 if after_id is None else names.index(after_id) + 1
    end = len(names) if before_id is None else names.index(before_id)
    found = list(records[start:end])
    shown = found[-limit:] if before_id is not None else found[:limit]
    return {
        "data": shown,
        "has_more": len(shown) < len(found),
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
    }
