"""Errors as Anthropic's clients expect them: `{"type": "error", "error": {type, message}}`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from quire.protocol.errors import ContextLengthError, QuireError

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


class MessageErrorDetail(BaseModel):
    type: str
    message: str


class MessageError(BaseModel):
    type: Literal["error"]
    error: MessageErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": MessageError, "description": "The request cannot be answered as it is."},
    "503": {"model": MessageError, "description": "Overloaded, or the engine is down."},
}
"""Of every route of this protocol, as the description of the API has them."""


def message_of(error: QuireError) -> str:
    """Clients know a conversation that is too long by these words."""
    if not isinstance(error, ContextLengthError):
        return str(error)
    prompt, limit = error.prompt_tokens, error.max_model_len
    if prompt >= limit:
        return f"prompt is too long: {prompt} tokens > {limit - 1} maximum"
    return (
        f"input length and `{error.field}` exceed context limit: {prompt} + "
        f"{error.completion_tokens} > {limit}, decrease input length or `{error.field}` and try "
        "again"
    )


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = TYPES.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}
