"""Several API processes under load: what each of many clients sees when something ends."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.running import ADMIN, ROOT, TINY, HttpReply, RunningServer, eventually, gauge

NUM_CLIENTS = 16


@pytest.fixture
def crowded(tiny_model: Path) -> Iterator[RunningServer]:
    """Half of the clients run, half wait."""
    flags = ("--api-server-count", "3", "--max-num-seqs", str(NUM_CLIENTS // 2))
    server = RunningServer.start("--model", str(tiny_model), *TINY, *flags)
    assert server.url, "".join(server.lines)
    yield server
    server.stop()


@contextlib.contextmanager
def clients(server: RunningServer, max_tokens: int) -> Iterator[list[Future[HttpReply]]]:
    """Clients that stream (even ones) and that do not, all of whose requests the engine has."""
    body = {"prompt": "Once upon a time", "max_tokens": max_tokens, "ignore_eos": True}
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        replies = [
            pool.submit(server.request, "POST", "/v1/completions", {**body, "stream": not i % 2})
            for i in range(NUM_CLIENTS)
        ]

        def all_there() -> bool:
            names = ("num_requests_running", "num_requests_waiting")
            return sum(gauge(server, name) for name in names) == NUM_CLIENTS

        eventually(all_there, "all requests")
        yield replies


@pytest.mark.slow
def test_killed_engine_under_load(crowded: RunningServer) -> None:
    """Who waits for a first token or a whole reply gets 503 with Retry-After; a stream that has
    begun ends with an error event. All of them name the cause. Then all is as before."""
    with clients(crowded, 2000) as replies:
        os.kill(crowded.engine_pid(), signal.SIGKILL)
        for i, reply in enumerate(reply.result() for reply in replies):
            assert b"SIGKILL" in reply.body
            if reply.status == 200:
                assert i % 2 == 0 and reply.body.endswith(b"}\n\ndata: [DONE]\n\n")
            else:
                assert reply.status == reply.error["code"] == 503
                assert int(reply.headers["retry-after"]) >= 1
    eventually(
        lambda: all(crowded.request("GET", "/health").status == 200 for _ in range(9)),
        "the restart",
    )
    with clients(crowded, 400) as replies:
        assert {reply.result().status for reply in replies} == {200}
    crowded.assert_at_rest()


@pytest.mark.slow
def test_load_and_log_level_are_the_whole_servers(crowded: RunningServer) -> None:
    """Whichever process answers: every one of them knows all requests, and is told the level."""
    crowded.request("POST", "/admin/pause", {"mode": "hold"}, ADMIN)
    with clients(crowded, 1) as replies:
        loads = [crowded.request("GET", "/load").json["server_load"] for _ in range(20)]
        assert loads == [NUM_CLIENTS] * 20
        crowded.request("POST", "/admin/resume", None, ADMIN)
        assert {reply.result().status for reply in replies} == {200}
    crowded.assert_at_rest()
    reply = crowded.request("POST", "/admin/log_level", {"level": "ERROR"}, ADMIN)
    assert reply.json == {"level": "ERROR"}
    os.kill(crowded.engine_pid(), signal.SIGKILL)
    eventually(lambda: "started again" in crowded.lines[-1], "the end of the engine")
    num_lines = len(crowded.lines)
    eventually(lambda: crowded.request("GET", "/health").status == 200, "the restart")
    for i in range(20):  # an unknown field is worth a warning to each process, once
        body = {"prompt": "Hi", "max_tokens": 1, f"unknown_{i}": 1}
        crowded.request("POST", "/v1/completions", body)
    assert len(crowded.lines) == num_lines, crowded.lines[num_lines:]


@pytest.mark.slow
@pytest.mark.parametrize("by", ["signal", "route"])
def test_drain_under_load(crowded: RunningServer, by: str) -> None:
    """Everyone who is there gets all tokens, also those that wait; who comes then is refused a
    connection at once."""
    with clients(crowded, 1000) as replies:
        if by == "signal":
            crowded.process.send_signal(signal.SIGTERM)
        else:
            reply = crowded.request("POST", "/admin/drain", None, ADMIN)
            assert reply.json == {"draining": True}
        eventually(lambda: "stopping" in crowded.lines[-1], "the drain")

        def is_refused() -> bool:
            try:
                crowded.request("GET", "/version")
            except ConnectionRefusedError:
                return True
            except (OSError, http.client.HTTPException):  # it came while the doors closed
                return False
            return False

        eventually(is_refused, "closed doors")
        assert not all(reply.done() for reply in replies)
        for i, reply in enumerate(reply.result() for reply in replies):
            assert reply.status == 200
            if i % 2:
                assert reply.json["usage"]["completion_tokens"] == 1000
            else:
                reasons = re.findall(rb'"finish_reason":"(\w+)"', reply.body)
                assert reasons == [b"length"] and reply.body.endswith(b"data: [DONE]\n\n")
    assert crowded.process.wait(60) == 0


@pytest.mark.slow
def test_an_engine_that_is_stuck_in_its_start_can_be_stopped(tiny_model: Path) -> None:
    words = [sys.executable, "-m", "quire", "serve", str(tiny_model), "--port", "0", *TINY]
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    server = RunningServer(process)

    def has_engine() -> bool:
        with contextlib.suppress(AssertionError):
            return bool(server.engine_pid())
        return False

    eventually(has_engine, "the engine")
    engine = server.engine_pid()
    os.kill(engine, signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert not Path(f"/proc/{engine}").exists()
