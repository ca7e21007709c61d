"""Tenants over HTTP: a thousand requests of one do not keep another waiting, or out."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import ADMIN, TINY, HttpReply, RunningServer, eventually, gauge

NUM_REQUESTS = 1000


@pytest.fixture(scope="module")
def shared(tiny_model: Path) -> Iterator[RunningServer]:
    """One request runs at a time; A's thousand fill the queue."""
    keys = ("--api-key", "key-a", "--api-key", "key-b")
    limits = ("--max-num-seqs", "1", "--max-num-queued-reqs", str(NUM_REQUESTS))
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
    """A's thousand requests, in a few HTTP requests whose replies nobody waits for; A calls itself
    a new tenant in each of them."""
    body = {"prompt": [f"{i} is a number" for i in range(100)], "max_tokens": 500}
    return [
        server.send(body | {"ignore_eos": True}, headers=bearer("a", **{"X-Tenant": f"part-{i}"}))
        for i in range(NUM_REQUESTS // 100)
    ]


def test_a_thousand_requests_starve_nobody(shared: RunningServer) -> None:
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
def unguarded(tiny_model: Path) -> Iterator[RunningServer]:
    limits = ("--max-num-seqs", "1", "--max-num-queued-reqs", "4")
    server = RunningServer.start("--model", str(tiny_model), *TINY, *limits)
    assert server.url, "".join(server.lines)
    yield server
    assert server.stop() == 0


def test_without_keys_the_header_tells_tenants_apart(unguarded: RunningServer) -> None:
    """A's four fill the queue; B, who has a share of two, is still taken."""
    assert unguarded.request("POST", "/admin/pause", {"mode": "drain"}, ADMIN).status == 200
    body = {"prompt": "Hi", "max_tokens": 1}
    held = [unguarded.send(body, headers={"X-Tenant": "a"}) for _ in range(5)]
    eventually(lambda: gauge(unguarded, "num_requests_waiting") == 5, "the queue")
    assert ask(unguarded, {"X-Tenant": "a"}).status == 503
    held += [unguarded.send(body, headers={"X-Tenant": "b"}) for _ in range(2)]
    eventually(lambda: gauge(unguarded, "num_requests_waiting") == 7, "B's requests")
    assert ask(unguarded, {"X-Tenant": "b"}).status == 503
    assert unguarded.request("POST", "/admin/resume", None, ADMIN).status == 200
    for connection in held:
        assert connection.recv(20).startswith(b"HTTP/1.1 200 ")
        connection.close()
    unguarded.assert_at_rest()
