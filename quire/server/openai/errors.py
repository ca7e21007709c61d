"""Errors as OpenAI's clients expect them: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "PayloadTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: int | str


class ErrorReply(BaseModel):
    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorReply, "description": "The request cannot be answered as it is."},
    "503": {"model": ErrorReply, "description": "Overloaded, or the engine is down."},
}
"""Of every route, as the description of the API has them."""


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = TYPES.get(status, "APIError")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or status}}
