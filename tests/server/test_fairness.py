"""Tenants over HTTP: a thousand requests of one do not keep another waiting, or out."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import ADMIN, TINY, HttpReply, RunningServer, eventually, gauge

NUM_REQUESTS = 1000


@pytest.fixture(scope="module")
def shared(tiny_model: Path) -> Iterator[RunningServer]:
    """One request runs at a time; A's thousand fill its place and the queue."""
    keys = ("--api-key", "key-a", "--api-key", "key-b")
    limits = ("--max-num-seqs", "1", "--max-num-queued-reqs", str(NUM_REQUESTS - 1))
    server = RunningServer.start("--model", str(tiny_model), *TINY, *keys, *limits)
    assert server.url, "".join(server.lines)
    yield server
    assert server.stop() == 0


def bearer(name: str, **more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer key-{name}", **more}


def ask(server: RunningServer, headers: dict[str, str], **values: Any) -> HttpReply:
    body = {"prompt": "Hi", "max_tokens": 1, "ignore_eos": True, **values}
    return server.request("POST", "/v1/completions", body, headers)


def num_waiting(server: RunningServer) -> float:
    return gauge(server, "num_requests_waiting", bearer("a"))


def fill_queue(server: RunningServer) -> list[socket.socket]:
    """A's thousand requests, in a few HTTP requests whose replies are not read; in each of them it
    is a new tenant."""
    body = {"prompt": [f"{i} is a number" for i in range(100)], "max_tokens": 50}
    return [
        server.send(body | {"ignore_eos": True}, headers=bearer("a", **{"X-Tenant": f"part-{i}"}))
        for i in range(NUM_REQUESTS // 100)
    ]


def test_a_thousand_requests_starve_no_other(shared: RunningServer) -> None:
    """A's requests fill the queue: A's next gets 503, B's is taken, and is admitted next."""
    paused = shared.request("POST", "/admin/pause", {"mode": "drain"}, ADMIN)
    assert paused.status == 200
    connections = fill_queue(shared)
    eventually(lambda: num_waiting(shared) == NUM_REQUESTS, "the queue")
    refused = ask(shared, bearer("a", **{"X-Tenant": "another"}))
    assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1
    assert shared.request("POST", "/admin/resume", None, ADMIN).status == 200
    for _ in range(3):
        answer = ask(shared, bearer("b"))
        assert answer.status == 200 and answer.json["usage"]["completion_tokens"] == 1
        assert num_waiting(shared) > NUM_REQUESTS - 50, "A's requests went first"
    for connection in connections:
        connection.close()
    shared.assert_at_rest(bearer("a"))


@pytest.fixture(scope="module")
def gateway(tiny_model: Path) -> Iterator[RunningServer]:
    """Behind a gateway that says whose requests it passes on."""
    limits = ("--max-num-seqs", "1", "--max-num-queued-reqs", "4", "--trust-tenant-header")
    server = RunningServer.start("--model", str(tiny_model), *TINY, *limits)
    assert server.url, "".join(server.lines)
    yield server
    assert server.stop() == 0


def test_a_trusted_header_tells_tenants_apart(gateway: RunningServer) -> None:
    """A's five fill the row and the queue; B, who has a share of two, is still taken."""
    assert gateway.request("POST", "/admin/pause", {"mode": "drain"}, ADMIN).status == 200
    body = {"prompt": "Hi", "max_tokens": 1}
    held = [gateway.send(body, headers={"X-Tenant": "a"}) for _ in range(5)]
    eventually(lambda: gauge(gateway, "num_requests_waiting") == 5, "the queue")
    assert ask(gateway, {"X-Tenant": "a"}).status == 503
    held += [gateway.send(body, headers={"X-Tenant": "b"}) for _ in range(2)]
    eventually(lambda: gauge(gateway, "num_requests_waiting") == 7, "B's requests")
    assert ask(gateway, {"X-Tenant": "b"}).status == 503
    assert gateway.request("POST", "/admin/resume", None, ADMIN).status == 200
    for connection in held:
        assert connection.recv(20).startswith(b"HTTP/1.1 200 ")
        connection.close()
    gateway.assert_at_rest()


def test_forged_names_push_no_one_out(gateway: RunningServer) -> None:
    """A was served before. 100 new names, some with several requests, fill the queue to its limit
    of eight (one more finds a row); A's four are taken all the same, and those that must go for
    them get a 503 that says when to come back."""
    assert ask(gateway, {"X-Tenant": "a"}).status == 200
    assert gateway.request("POST", "/admin/pause", {"mode": "drain"}, ADMIN).status == 200
    body = {"prompt": "Hi", "max_tokens": 1}
    forged = []
    for number, total in ((0, 5), (1, 7), (2, 8), (3, 9)):
        while len(forged) < total:
            forged.append(gateway.send(body, headers={"X-Tenant": f"new-{number}"}))
        eventually(lambda: gauge(gateway, "num_requests_waiting") == len(forged), "the queue")
    forged += [gateway.send(body, headers={"X-Tenant": f"new-{i}"}) for i in range(4, 100)]
    own = [gateway.send(body, headers={"X-Tenant": "a"}) for _ in range(4)]
    eventually(lambda: num_waiting_of(gateway) == 4, "A's requests")
    assert gateway.request("POST", "/admin/resume", None, ADMIN).status == 200
    for connection in own:
        assert connection.recv(20).startswith(b"HTTP/1.1 200 ")
    answers = []
    for connection in forged:
        answers.append(connection.recv(4096))
        connection.close()
    refused = [answer for answer in answers if answer.startswith(b"HTTP/1.1 503 ")]
    assert all(b"retry-after: " in answer.lower() for answer in refused)
    assert any(b"were there before" in answer for answer in refused), "none had to go"
    assert all(answer.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 503 ")) for answer in answers)
    gateway.assert_at_rest()


def num_waiting_of(server: RunningServer) -> int:
    """How many requests of A wait, which alone may know their names."""
    state = server.request("GET", "/dashboard/state", headers={"X-Tenant": "a"}).json
    return sum(one["request_id"] is not None for one in state["waiting"])


@pytest.fixture(scope="module")
def unguarded(tiny_model: Path) -> Iterator[RunningServer]:
    limits = ("--max-num-seqs", "1", "--max-num-queued-reqs", "4")
    server = RunningServer.start("--model", str(tiny_model), *TINY, *limits)
    assert server.url, "".join(server.lines)
    yield server
    assert server.stop() == 0


def test_a_header_that_is_not_trusted_does_not_count(unguarded: RunningServer) -> None:
    assert unguarded.request("POST", "/admin/pause", {"mode": "drain"}, ADMIN).status == 200
    body = {"prompt": "Hi", "max_tokens": 1}
    held = [unguarded.send(body, headers={"X-Tenant": f"name-{i}"}) for i in range(5)]
    eventually(lambda: gauge(unguarded, "num_requests_waiting") == 5, "the queue")
    assert ask(unguarded, {"X-Tenant": "another"}).status == 503
    assert unguarded.request("POST", "/admin/resume", None, ADMIN).status == 200
    for connection in held:
        assert connection.recv(20).startswith(b"HTTP/1.1 200 ")
        connection.close()
    unguarded.assert_at_rest()


def test_a_paused_server_finishes_what_is_open_when_it_is_told_to_stop(
    unguarded: RunningServer,
) -> None:
    assert unguarded.request("POST", "/admin/pause", {"mode": "hold"}, ADMIN).status == 200
    with unguarded.send({"prompt": "Hi", "max_tokens": 1}) as waiting:
        eventually(lambda: gauge(unguarded, "num_requests_waiting") == 1, "the request")
        unguarded.process.send_signal(signal.SIGTERM)
        assert waiting.recv(20).startswith(b"HTTP/1.1 200 ")
    assert unguarded.process.wait(60) == 0
