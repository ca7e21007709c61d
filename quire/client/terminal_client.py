"""A server as a person at a terminal uses it: one request at a time, text as it comes.

It needs the standard library alone, so `quire chat --url` works wherever Quire is installed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any

from quire.client.address import Address, request_headers
from quire.client.errors import error_message, no_answer, refused
from quire.protocol.errors import ServerError

CONNECT_S = 10.0
SILENCE_S = 600.0
"""A long prompt may keep a server silent for minutes."""

Message = dict[str, str]


class TerminalClient:
    """Streams completions of one server."""

    def __init__(self, url: str, api_key: str | None = None, model: str | None = None) -> None:
        self.address = Address.parse(url)
        self._headers = request_headers(api_key)
        self.model = model or self._first_model()

    def stream_chat(self, messages: list[Message], options: dict[str, Any]) -> Iterator[str]:
        """The reply to a conversation, piece by piece. Leaving the loop gives the request up."""
        body = {"model": self.model, "messages": messages, "stream": True, **options}
        for event in self._events("/v1/chat/completions", body):
            for choice in event.get("choices") or ():
                yield (choice.get("delta") or {}).get("content") or ""

    def stream_completion(self, prompt: str, options: dict[str, Any]) -> Iterator[str]:
        body = {"model": self.model, "prompt": prompt, "stream": True, **options}
        for event in self._events("/v1/completions", body):
            for choice in event.get("choices") or ():
                yield choice.get("text") or ""

    def _first_model(self) -> str:
        with self._answer("GET", "/v1/models") as response:
            body = response.read()
        try:
            return str(json.loads(body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ServerError(
                f"{self.address} names no model in /v1/models; name it with --model."
            ) from None

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self._answer("POST", path, json.dumps(body).encode()) as response:
            while line := response.readline():
                name, _, data = line.strip().partition(b":")
                if name != b"data":
                    continue
                if data.strip() == b"[DONE]":
                    return
                yield self._read_event(data)
        raise ServerError(f"{self.address} broke off before the end of the text.")

    def _read_event(self, data: bytes) -> dict[str, Any]:
        try:
            event: dict[str, Any] = json.loads(data)
        except ValueError:
            raise ServerError(
                f"{self.address} sent an event that is no JSON: {data[:60]!r}."
            ) from None
        if event.get("error"):
            raise ServerError(f"{self.address} failed: {error_message(data)}")
        return event

    @contextlib.contextmanager
    def _answer(self, method: str, path: str, body: bytes | None = None) -> Iterator[HTTPResponse]:
        """An answer with status 200; the connection is closed afterwards."""
        address = self.address
        if address.is_secure:
            tls = address.tls()
            connection: HTTPConnection = HTTPSConnection(
                address.host, address.port, timeout=CONNECT_S, context=tls
            )
        else:
            connection = HTTPConnection(address.host, address.port, timeout=CONNECT_S)
        try:
            connection.connect()
            connection.sock.settimeout(SILENCE_S)
            connection.request(method, address.route(path), body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise refused(address, response.status, response.read())
            yield response
        except (OSError, HTTPException) as error:
            raise no_answer(address, error) from None
        finally:
            connection.close()
