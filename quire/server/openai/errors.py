"""Errors as OpenAI's clients expect them: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

from typing import Any

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


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = TYPES.get(status, "APIError")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or status}}
