"""Errors as Anthropic's clients expect them: `{"type": "error", "error": {type, message}}`."""

from __future__ import annotations

from typing import Any

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    kind = TYPES.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
