"""Clients that are slow, rude or gone: they cost little, and others notice nothing.

Each test says what every client saw. The server gives its clients one second.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.running import (
    API_PROCESS,
    TINY,
    OnLoop,
    RunningServer,
    eventually,
    gauge,
    http_request,
)

BODY = {"prompt": "Hi", "max_tokens": 4, "ignore_eos": True}
CLOSED = (BrokenPipeError, ConnectionResetError)
"""What sending raises once the server has closed a connection."""


@pytest.fixture(scope="module")
def hasty(tiny_model: Path, on_loop: OnLoop) -> Iterator[RunningServer]:
    limits = ("--client-timeout-s", "1", "--max-body-bytes", "1MiB", "--max-num-seqs", "64")
    # A cache that is in memory soon: a larger one would look like a leak.
    limits += ("--kv-cache-memory-bytes", "2MiB")
    server = on_loop.start("--model", str(tiny_model), *TINY, *limits)
    yield server
    assert server.stop() == 0
    assert "Traceback" not in "".join(server.lines)


def answers(server: RunningServer) -> bool:
    reply = server.request("POST", "/v1/completions", BODY)
    return reply.status == 200 and bool(reply.json["usage"]["completion_tokens"] == 4)


def read_all(connection: socket.socket) -> bytes:
    """What the server says until it closes the connection."""
    data = b""
    try:
        while more := connection.recv(1 << 16):
            data += more
    except ConnectionResetError:
        pass
    return data


def test_clients_that_never_finish_a_request_are_sent_away(hasty: RunningServer) -> None:
    """Those that began get 408 and lose their connections; all others are answered meanwhile."""
    whole = http_request("/v1/completions", BODY)
    parts = [b"", b"POST /v1/comp", whole[: whole.index(b"\r\n\r\n") + 2], whole[:-5]]
    waiting = [hasty.connect() for _ in range(100) for _ in parts]
    for i, connection in enumerate(waiting):
        connection.sendall(parts[i % len(parts)])
    assert answers(hasty)
    replies = [read_all(connection) for connection in waiting]
    for i, reply in enumerate(replies):
        assert reply.startswith(b"HTTP/1.1 408 ") if i % len(parts) else reply == b"", reply
    hasty.assert_at_rest()


def test_a_trickle_is_not_enough(hasty: RunningServer) -> None:
    """A byte now and then keeps no connection open, neither in headers nor in a body."""
    whole = http_request("/v1/completions", {**BODY, "user": "x" * 1000})
    for begun in (10, 400):
        with hasty.connect() as connection:
            connection.sendall(whole[:begun])
            closed = threading.Event()
            reader = threading.Thread(target=lambda c=connection, e=closed: (read_all(c), e.set()))
            reader.start()
            deadline = time.monotonic() + 30
            for byte in whole[begun:-1]:
                if closed.wait(0.1):
                    break
                assert time.monotonic() < deadline, "the connection is still open"
                try:
                    connection.send(bytes([byte]))
                except OSError:
                    break
            reader.join()


def test_a_slow_but_steady_upload_is_fine(hasty: RunningServer) -> None:
    whole = http_request("/v1/completions", json.dumps(BODY).encode() + b" " * 700_000)
    with hasty.connect() as connection:
        for start in range(0, len(whole), 140_000):
            connection.sendall(whole[start : start + 140_000])
            time.sleep(0.3)
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "flood",
    [
        b"GET /version HTTP/1.1\r\nX: " + b"x" * (1 << 18),
        b"GET /version HTTP/1.1\r\n" + b"A: b\r\n" * (1 << 16),
        b"GET /" + b"x" * (1 << 18),
    ],
    ids=["value", "headers", "path"],
)
def test_endless_headers(hasty: RunningServer, flood: bytes) -> None:
    with hasty.connect() as connection:
        connection.settimeout(30)
        try:
            connection.sendall(flood)
        except CLOSED:  # before it had all of it
            return
        assert read_all(connection).startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))


def test_endless_trailers_and_chunk_extensions(hasty: RunningServer) -> None:
    """What comes between and after the chunks of a body is bounded like its headers."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    for flood in (b"2\r\n{}\r\n0\r\n" + b"A: b\r\n" * (1 << 17), b"2;" + b"x" * (1 << 19)):
        with hasty.connect() as connection:
            with contextlib.suppress(*CLOSED):
                connection.sendall(head + flood)
            read_all(connection)  # which has an end, or fails when its time is up
    assert answers(hasty)


def test_bodies_beyond_the_limit(hasty: RunningServer) -> None:
    """With a length or in chunks: 413, and the next request on a new connection is answered."""
    large = json.dumps({**BODY, "user": "x" * (1 << 20)}).encode()
    assert hasty.request("POST", "/v1/completions", large).error["code"] == 413
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with hasty.connect() as connection:
        connection.sendall(head + b"Content-Length: 99999999999999999999\r\n\r\n{")
        assert connection.recv(100).startswith((b"HTTP/1.1 413 ", b"HTTP/1.1 400 "))
    with hasty.connect() as connection:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        try:
            for _ in range(20):
                connection.sendall(b"%x\r\n%b\r\n" % (1 << 16, b"x" * (1 << 16)))
        except OSError:
            pass
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
    assert answers(hasty)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"BREW /pot HTTP/1.1\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /version HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"GET /version HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_is_not_http(hasty: RunningServer, garbage: bytes) -> None:
    with hasty.connect() as connection:
        connection.sendall(garbage)
        connection.shutdown(socket.SHUT_WR)
        reply = read_all(connection)
    assert reply == b"" or reply.startswith(b"HTTP/1.1 4"), reply


def test_websockets_are_not_spoken(hasty: RunningServer) -> None:
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    headers["Sec-WebSocket-Key"] = "dGhlIHNhbXBsZSBub25jZQ=="
    assert hasty.request("GET", "/version", None, headers).status == 200


@pytest.mark.slow
def test_a_client_that_never_reads(hasty: RunningServer) -> None:
    """It loses its connection and the engine its request, long before all is generated; a client
    beside it is answered, and the server does not keep what is not read."""
    before, generated = hasty.memory_bytes(), gauge(hasty, "generation_tokens_total")
    body = {**BODY, "max_tokens": 2000, "n": 8, "stream": True, "logprobs": 20}
    deaf = [hasty.connect() for _ in range(2)]
    for connection in deaf:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(http_request("/v1/completions", body))
    eventually(lambda: gauge(hasty, "num_requests_running") >= 16, "the requests")
    assert answers(hasty)
    hasty.assert_at_rest()
    assert gauge(hasty, "generation_tokens_total") - generated < 2 * 8 * 2000
    for connection in deaf:
        connection.close()
    after = hasty.memory_bytes()
    assert all(after[name] < before[name] + (64 << 20) for name in before), (before, after)


@pytest.mark.slow
def test_thousands_of_aborted_connections(hasty: RunningServer) -> None:
    """Clients that go away before, while or after they are answered leave nothing behind."""
    body = {**BODY, "max_tokens": 500}
    whole = [
        http_request("/v1/completions", {**body, "stream": stream}) for stream in (True, False)
    ]
    sizes = []
    api = hasty.child_pid(API_PROCESS)
    for _ in range(3):
        for i in range(1000):
            with hasty.connect() as connection:
                if i % 5:
                    connection.sendall(whole[i % 2][: None if i % 3 else 100])
                if i % 7 == 0:  # a reset instead of an end
                    linger = b"\x01\0\0\0\0\0\0\0"
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        hasty.assert_at_rest()
        sizes.append(hasty.memory_bytes())
        eventually(lambda: len(os.listdir(f"/proc/{api}/fd")) < 60, "the end of the connections")
    assert answers(hasty)
    for name in sizes[0]:
        assert sizes[-1][name] < sizes[0][name] + (8 << 20), sizes
