"""One HTTP request of the soak and its answer, which has exactly one end and nothing after it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 120.0


class WrongAnswerError(Exception):
    """An answer that no request should get."""


class LostAnswerError(WrongAnswerError):
    """The connection ended without an answer, or before the answer did."""


class DoubledAnswerError(WrongAnswerError):
    """More than one end, or something after it."""


class FailedRequestError(Exception):
    """An error in the declared format that asks for another try: the engine was down."""


def check(condition: bool, what: str) -> None:
    if not condition:
        raise WrongAnswerError(what)


@dataclass
class Exchange:
    """A server's address, and what can be asked there."""

    host: str
    port: int
    key: str
    headers: dict[str, str] = field(default_factory=dict)

    def post(self, path: str, body: Any, expected: int = 200) -> Any:
        """The JSON of a whole answer."""
        connection = self._send("POST", path, body)
        try:
            reply = connection.getresponse()
            data = reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise LostAnswerError(f"{path}: {error!r}") from error
        finally:
            connection.close()
        value = json.loads(data)
        if reply.status == 503:
            raise FailedRequestError(_message(value))
        check(reply.status == expected, f"{path}: status {reply.status}: {data[:300]!r}")
        return value

    def get(self, path: str) -> tuple[int, bytes]:
        connection = self._send("GET", path, None)
        try:
            reply = connection.getresponse()
            return reply.status, reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise LostAnswerError(f"{path}: {error!r}") from error
        finally:
            connection.close()

    def stream(self, path: str, body: Any, leave_after: int | None = None) -> list[Any]:
        """The events of a streamed answer; `leave_after` so many the connection is closed."""
        connection = self._send("POST", path, {**body, "stream": True})
        try:
            reply = connection.getresponse()
            if reply.status != 200:
                data = reply.read()
                if reply.status == 503:
                    raise FailedRequestError(_message(json.loads(data)))
                raise WrongAnswerError(f"{path}: status {reply.status}: {data[:300]!r}")
            events = []
            for event in _events(reply):
                events.append(event)
                if len(events) == leave_after:
                    return events
            return events
        except (OSError, http.client.HTTPException) as error:
            raise LostAnswerError(f"{path}: {error!r}") from error
        finally:
            connection.close()

    def send_and_leave(self, path: str, body: Any) -> None:
        """Ask, and close the connection without reading."""
        self._send("POST", path, body).close()

    def _send(self, method: str, path: str, body: Any) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)
        data = None if body is None else json.dumps(body)
        fields = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        try:
            connection.request(method, path, data, fields)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise LostAnswerError(f"{path}: {error!r}") from error
        return connection


def _message(value: Any) -> str:
    error = value.get("error")
    check(isinstance(error, dict) and bool(error.get("message")), f"no error in {value!r:.300}")
    return str(error["message"])


def _events(reply: http.client.HTTPResponse) -> Iterator[Any]:
    """What the events of a stream carry: JSON, or the word at the end."""
    lines: list[bytes] = []
    while line := reply.readline():
        if line.strip():
            lines.append(line.strip())
            continue
        data = [one[6:] for one in lines if one.startswith(b"data: ")]
        lines = []
        if data:
            text = b"\n".join(data).decode()
            yield text if text == "[DONE]" else json.loads(text)
    check(not lines, f"a stream ends inside an event: {lines!r:.200}")


def one_end(events: list[Any], ends: list[bool], what: str) -> None:
    """The last event of a stream is its end, and no other is."""
    if not any(ends):
        raise LostAnswerError(f"{what} ends without its last event: {events[-1:]!r:.300}")
    if ends.index(True) != len(ends) - 1:
        raise DoubledAnswerError(
            f"{what} goes on after its end: {events[ends.index(True) :]!r:.300}"
        )


def openai_chunks(events: list[Any], num_choices: int = 1) -> list[dict[str, Any]]:
    """The chunks of a stream that has ended as it should, with one end for each choice."""
    one_end(events, [event == "[DONE]" for event in events], "a stream")
    chunks = [event for event in events if isinstance(event, dict)]
    errors = [chunk for chunk in chunks if "error" in chunk]
    if errors:
        if len(errors) > 1 or chunks[-1] is not errors[0]:
            raise DoubledAnswerError(f"a stream goes on after its error: {chunks[-2:]!r:.300}")
        raise FailedRequestError(str(errors[0]["error"].get("message")))
    ended: set[int] = set()
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] in ended:
                raise DoubledAnswerError(f"choice {choice['index']} goes on after its end")
            if choice["finish_reason"] is not None:
                ended.add(choice["index"])
    if ended != set(range(num_choices)):
        raise LostAnswerError(f"{num_choices} choices were asked for, {sorted(ended)} have ended")
    return chunks


def typed_events(events: list[Any], ends: tuple[str, ...], failures: tuple[str, ...]) -> list[Any]:
    """The events of a stream whose kinds are named in them."""
    kinds = [event.get("type") for event in events if isinstance(event, dict)]
    events = [event for event in events if isinstance(event, dict)]
    one_end(events, [kind in (*ends, *failures) for kind in kinds], "a stream")
    if kinds[-1] in failures:
        raise FailedRequestError(f"{events[-1]!r:.300}")
    return events
