"""uvloop where it is installed, else asyncio's own loop: clients see no difference.

Slow clients and HTTPS have files of their own, which run on both loops too.
"""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.running import TINY, OnLoop, RunningServer, eventually, gauge

BODY = {"prompt": "Once upon a time", "ignore_eos": True}
NUM_CLIENTS = 8


def assert_whole(reply: bytes, num_tokens: int) -> None:
    """A stream that broke off nowhere, and whose pieces hold all tokens."""
    assert reply.endswith(b"data: [DONE]\n\n")
    pieces = re.findall(rb'"token_ids":\[([\d,]+)\]', reply)
    assert sum(len(piece.split(b",")) for piece in pieces) == num_tokens


def leave_while_answered(server: RunningServer) -> None:
    """A client of a stream and one of a whole reply are gone before the end of either."""
    for stream in (True, False):
        with server.send({**BODY, "max_tokens": 2000, "stream": stream}) as connection:
            eventually(lambda: gauge(server, "num_requests_running") == 1, "the request")
            if stream:
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        server.assert_at_rest()


@pytest.mark.slow
def test_streams_clients_that_leave_and_a_drain(on_loop: OnLoop, tiny_model: Path) -> None:
    """Streams are whole, who leaves frees what it held, and a signal to all processes ends the
    server after the last token of what is open."""
    server = on_loop.start("--model", str(tiny_model), *TINY)
    try:
        leave_while_answered(server)
        wanted = {**BODY, "max_tokens": 500, "stream": True, "return_token_ids": True}
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            replies = [
                pool.submit(server.request, "POST", "/v1/completions", wanted)
                for _ in range(NUM_CLIENTS)
            ]
            eventually(lambda: gauge(server, "num_requests_running") == NUM_CLIENTS, "all of them")
            for pid in (*server.child_pids("quire"), server.process.pid):
                os.kill(pid, signal.SIGTERM)
            for reply in replies:
                assert_whole(reply.result().body, 500)
        assert server.process.wait(60) == 0
        assert "Traceback" not in "".join(server.lines)
    finally:
        server.stop()
