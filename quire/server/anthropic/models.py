"""Models as Anthropic's clients list them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from quire.protocol.errors import RequestError

DEFAULT_PAGE = 20
MAX_PAGE = 1000


def model_record(name: str, created: int, max_model_len: int) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
    }


def page(
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
