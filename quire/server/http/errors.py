"""From what goes wrong to a status and a body in the format of the client's protocol."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from quire.protocol.errors import (
    ContextLengthError,
    EngineDeadError,
    OverloadedError,
    QuireError,
    RequestError,
    RequestTimeoutError,
)

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 5.0
"""When to come back after the engine died: about what a small model takes to start."""
MAX_MESSAGE = 2000
ANTHROPIC_VERSION = b"anthropic-version"
"""A header that all requests of Anthropic's clients have."""
OPENAI_TYPES = {
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
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


@dataclass(frozen=True)
class Dialect:
    """What protocols say differently where no route of theirs has run yet."""

    error_body: Callable[[int, str, str | None, str | None], dict[str, Any]]
    """From status, message, the field it is about, and a code if the error has one."""
    message_of: Callable[[QuireError], str]
    """What an error says to this protocol's clients."""
    id_headers: tuple[bytes, ...]
    """Headers of a reply that hold the request's id."""


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: int | str


class ErrorReply(BaseModel):
    """An error as OpenAI's clients expect it."""

    error: ErrorDetail


class MessageErrorDetail(BaseModel):
    type: str
    message: str


class MessageError(BaseModel):
    """An error as Anthropic's clients expect it."""

    type: Literal["error"]
    error: MessageErrorDetail


def described_errors(body: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Errors of every route of a protocol, as the description of the API has them."""
    return {
        "4XX": {"model": body, "description": "The request cannot be answered as it is."},
        "503": {"model": body, "description": "Overloaded, or the engine is down."},
    }


def _openai_body(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    kind = OPENAI_TYPES.get(status, "APIError")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or status}}


def _anthropic_body(
    status: int, message: str, param: str | None, code: str | None
) -> dict[str, Any]:
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _anthropic_message(error: QuireError) -> str:
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


OPENAI = Dialect(_openai_body, str, (b"x-request-id",))
ANTHROPIC = Dialect(_anthropic_body, _anthropic_message, (b"x-request-id", b"request-id"))


def dialect_of(path: str, headers: Mapping[bytes, bytes]) -> Dialect:
    """What the client of a route speaks: OpenAI's, unless the route is another protocol's, or both
    have it and the client says so."""
    if _is_under("/v1/messages", path):
        return ANTHROPIC
    says_so = ANTHROPIC_VERSION in headers
    return ANTHROPIC if says_so and _is_under("/v1/models", path) else OPENAI


def _is_under(route: str, path: str) -> bool:
    return path == route or path.startswith(route + "/")


_LINE = re.compile(r"structured_outputs\.grammar is refused: line (\d+): ")
_WHOLE = re.compile(r"structured_outputs(\.[a-z_]+)?")


@dataclass(frozen=True)
class StructuredFields:
    """Where a client wrote what the engine calls `structured_outputs`: names for errors."""

    whole: str | None = None
    """Of all of it; None: the name that the engine has."""
    lines: Mapping[int, str] = field(default_factory=dict)
    """Of the schemas in a grammar that was made here, by its lines."""

    def named(self, message: str) -> str:
        """An error of the engine with the client's name for what it is about."""
        line = _LINE.match(message)
        if line is not None and int(line[1]) in self.lines:
            return f"{self.lines[int(line[1])]} is refused: {message[line.end() :]}"
        whole = _WHOLE.match(message)
        if whole is None or self.whole is None:
            return message
        return self.whole + message[whole.end() :]


class UnknownModelError(RequestError):
    """A request names a model that is not served (HTTP 404)."""


class InvalidBodyError(RequestError):
    """A body is not what its route takes; `param` is the field that is wrong, if it is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def error_body(
    status: int,
    message: str,
    param: str | None = None,
    dialect: Dialect = OPENAI,
    code: str | None = None,
) -> dict[str, Any]:
    # Messages repeat what the client sent, however long, and even half a character.
    if len(message) > MAX_MESSAGE:
        message = f"{message[:MAX_MESSAGE]}... ({len(message)} characters)"
    message = message.encode("utf-8", "replace").decode()
    return dialect.error_body(status, message, param, code)


def error_response(
    status: int,
    message: str,
    param: str | None = None,
    retry_after_s: float | None = None,
    dialect: Dialect = OPENAI,
    code: str | None = None,
) -> Response:
    headers = (
        {} if retry_after_s is None else {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
    )
    body = msgspec.json.encode(error_body(status, message, param, dialect, code))
    return Response(body, status, headers, "application/json")


def status_of(error: QuireError) -> int:
    if isinstance(error, UnknownModelError):
        return 404
    if isinstance(error, RequestTimeoutError):
        return 408
    return 503 if isinstance(error, OverloadedError | EngineDeadError) else 400


def quire_error_response(
    error: QuireError, dialect: Dialect, structured_fields: StructuredFields | None = None
) -> Response:
    status, text = status_of(error), dialect.message_of(error)
    if structured_fields is not None:
        text = structured_fields.named(text)
    retry = RETRY_AFTER_S if isinstance(error, EngineDeadError) else None
    if isinstance(error, OverloadedError):
        retry = error.retry_after_s
    return error_response(status, text, _param_of(error, text), retry, dialect, code_of(error))


def code_of(error: QuireError) -> str | None:
    """The code that clients act on, where there is one beside the status."""
    return "context_length_exceeded" if isinstance(error, ContextLengthError) else None


def _param_of(error: QuireError, text: str) -> str | None:
    if isinstance(error, UnknownModelError):
        return "model"
    if isinstance(error, InvalidBodyError):
        return error.param
    return error.field if isinstance(error, ContextLengthError) else field_of(text)


def field_of(message: str) -> str | None:
    """The field that a message is about: messages begin with its name."""
    match = re.match(
        r"(?:prompts\[\d+\]: )?([a-z][a-z_]*)(?:\[[^\]]*\]|\.[a-z_]+)*"
        r"(?:=| (?:must|holds|is|has|takes|names|needs|cannot)\b)",
        message,
    )
    return match[1] if match else None


def _methods_of(app: FastAPI, request: Request) -> list[str]:
    """Of all routes with this path: each knows but its own."""
    return [
        method
        for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
        if any(r.matches({**request.scope, "method": method})[0] == Match.FULL for r in app.routes)
    ]


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(QuireError)
    async def on_quire_error(request: Request, error: QuireError) -> Response:
        structured_fields = getattr(request.state, "structured_fields", None)
        if isinstance(
            field := getattr(error, "structured_field", None), str
        ):  # there was no more yet
            structured_fields = StructuredFields(field)
        return quire_error_response(error, request.state.dialect, structured_fields)

    @app.exception_handler(RequestValidationError)
    async def on_invalid_body(request: Request, error: RequestValidationError) -> Response:
        return validation_response(error, request.state.dialect)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        text, dialect = str(error.detail), request.state.dialect
        cause = error.__cause__
        if error.status_code == 400 and isinstance(cause, ValueError | RecursionError):
            text = f"the body is not JSON that can be read: {cause}."
        response = error_response(error.status_code, text, dialect=dialect)
        response.headers.update(error.headers or {})
        if error.status_code == 405:
            response.headers["Allow"] = ", ".join(_methods_of(app, request))
        return response

    @app.exception_handler(RecursionError)
    async def on_deep_body(request: Request, error: RecursionError) -> Response:
        text = "the body is nested too deeply; send a flatter one."
        return error_response(400, text, dialect=request.state.dialect)

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> Response:
        logger.error("%s %r failed", request.method, request.url.path, exc_info=error)
        text = "The server failed on this request; its log says why."
        return error_response(500, text, dialect=request.state.dialect)


def validation_response(error: RequestValidationError, dialect: Dialect) -> Response:
    first = error.errors()[0]
    where = [str(part) for part in first.get("loc", ()) if part not in ("body", "query")]
    if first.get("type") == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        text = f"the body is not JSON: {reason} (at character {where[0]})."
        return error_response(400, text, dialect=dialect)
    if not where and first.get("type") == "model_attributes_type":
        text = "the body is not a JSON object; send one, with 'Content-Type: application/json'."
        return error_response(400, text, dialect=dialect)
    path = ".".join(where)
    name = where[0] if where else None
    text = f"{path or 'the body'}: {first.get('msg', 'is not valid')}."
    return error_response(400, text, name, dialect=dialect)
