"""What a server, or the way to it, answered instead of a result."""

from __future__ import annotations

import json
from typing import Any

from quire.protocol.errors import OverloadedError, QuireError, RequestError, ServerError


def no_answer(where: object, error: BaseException) -> ServerError:
    """For a connection that could not be made or broke."""
    if isinstance(error, ConnectionRefusedError):
        return ServerError(
            f"no server listens at {where}; start one with `quire serve`, or give its address with "
            "--url."
        )
    if isinstance(error, TimeoutError):
        return ServerError(f"the server at {where} did not answer in time.")
    return ServerError(f"the server at {where} cannot be reached ({reason(error)}).")


def reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def refused(where: object, status: int, body: bytes) -> QuireError:
    """For an answer whose status is not 200."""
    message = error_message(body) or "no explanation"
    if status == 401:
        return RequestError(f"{where} wants a key that it knows ({message}); give --api-key.")
    if status == 503:
        return OverloadedError(f"{where} takes no more requests now: {message}")
    if status == 404 or 400 <= status < 500:
        return RequestError(f"{where} refused the request ({status}): {message}")
    return ServerError(f"{where} failed ({status}): {message}")


def error_message(body: bytes) -> str:
    """What an error says, whichever of the usual formats it has."""
    try:
        content: Any = json.loads(body)
    except ValueError:
        return " ".join(body.decode("utf-8", "replace").split())[:200]
    for name in ("error", "message", "detail"):
        if isinstance(content, dict) and content.get(name):
            content = content[name]
    return content if isinstance(content, str) else json.dumps(content)[:200]
