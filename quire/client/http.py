"""A small HTTP/1.1 client for many requests at once, made to cost little per piece of a stream.

A benchmark's client shares the machine with the server it measures; what it spends, it takes away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from quire.client.address import Address, request_headers
from quire.protocol.errors import OptionError

try:
    import httptools
except ImportError:
    raise OptionError(
        "httptools is not installed, and requests to a server need it; run `pip install httptools`."
    ) from None

Receiver = Callable[[bytes], None]
"""Takes a piece of a body; it must not raise."""


class BrokenAnswer(ConnectionError):
    """The connection ended before the answer did."""


@dataclass
class Answer:
    """What came back. The body is kept unless a receiver took it."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    """By lower-case name."""
    body: bytes = b""


class HttpClient:
    """Sends requests to one server, and keeps connections open for the next ones."""

    def __init__(
        self, address: Address, api_key: str | None = None, timeout_s: float | None = None
    ) -> None:
        self.address = address
        self._tls = address.tls()
        self._timeout_s = timeout_s
        headers = {"Host": address.authority, **request_headers(api_key)}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()

    async def post(self, path: str, body: bytes, receive: Receiver | None = None) -> Answer:
        """Send a request. Pieces of an answer with status 200 go to `receive` as they arrive."""
        return await self._send("POST", path, body, receive)

    async def get(self, path: str) -> Answer:
        return await self._send("GET", path, b"", None)

    def close(self) -> None:
        for connection in list(self._all):
            connection.close()
        self._all.clear()
        self._idle.clear()

    async def _send(self, method: str, path: str, body: bytes, receive: Receiver | None) -> Answer:
        request = (
            f"{method} {self.address.route(path)} HTTP/1.1\r\n{self._head}"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        while True:
            connection = self._take_idle()
            was_idle = connection is not None
            try:
                if connection is None:
                    connection = await self._connect()
                return await self._exchange(connection, request, receive)
            except BrokenAnswer:
                # Servers close idle connections; such a request was never read.
                if not (was_idle and connection is not None and not connection.has_answer_begun):
                    raise

    async def _exchange(
        self, connection: _Connection, request: bytes, receive: Receiver | None
    ) -> Answer:
        try:
            answer = await connection.exchange(request, receive, self._timeout_s)
        except BaseException:
            self._all.discard(connection)
            connection.close()
            raise
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            self._all.discard(connection)
            connection.close()
        return answer

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
            self._all.discard(connection)
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        address = self.address
        opening = loop.create_connection(_Connection, address.host, address.port, ssl=self._tls)
        try:
            _, connection = await asyncio.wait_for(opening, self._timeout_s)
        except asyncio.TimeoutError:
            raise TimeoutError("connecting took too long") from None
        self._all.add(connection)
        return connection


class _Connection(asyncio.Protocol):
    """One connection with one request at a time; its upper half are callbacks of the parser."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer = Answer()
        self._pieces: list[bytes] = []
        self._receive: Receiver | None = None
        self._done: asyncio.Future[Answer] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.has_answer_begun = False
        self.is_reusable = False

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(
        self, request: bytes, receive: Receiver | None, timeout_s: float | None
    ) -> Answer:
        loop = asyncio.get_running_loop()
        self._answer, self._pieces, self._receive = Answer(), [], receive
        self.has_answer_begun = self.is_reusable = False
        done = self._done = loop.create_future()
        timer = None if timeout_s is None else loop.call_later(timeout_s, self._expire)
        try:
            assert self._transport is not None
            self._transport.write(request)
            return await done
        finally:
            self._done = None
            if timer is not None:
                timer.cancel()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        if self._receive is not None and self._answer.status == 200:
            self._receive(piece)
        else:
            self._pieces.append(piece)

    def on_message_complete(self) -> None:
        if 100 <= self._answer.status < 200:  # an interim answer; the real one follows
            self._answer = Answer()
            return
        self.is_reusable = self._parser.should_keep_alive()
        self._finish()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.has_answer_begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(BrokenAnswer(f"the answer is not HTTP ({error})"))

    def connection_lost(self, error: Exception | None) -> None:
        headers = self._answer.headers
        if (
            error is None
            and self._answer.status
            and not headers.keys() & {"content-length", "transfer-encoding"}
        ):
            self._finish()  # such a body ends with the connection
        else:
            self._fail(BrokenAnswer("the server closed the connection"))

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._answer.body = b"".join(self._pieces)
            self._done.set_result(self._answer)

    def _expire(self) -> None:
        self._fail(TimeoutError("the answer took too long"))

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.close()
