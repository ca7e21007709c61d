"""Whatever is sent, the server says in its status whose fault it is, and forgets it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.hostile import VALID, hostile_requests, routes_with_bodies
from tests.server.running import ADMIN, TINY, RunningServer

CHAT = '{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}'
EXPECTED = {200, 400, 404, 408, 413}


@pytest.fixture(scope="module")
def target(tiny_model: Path) -> Iterator[RunningServer]:
    flags = ("--model", str(tiny_model), *TINY, "--max-model-len", "192")
    server = RunningServer.start(*flags)
    assert server.url, "".join(server.lines)
    yield server
    assert server.stop() == 0
    assert "Traceback" not in "".join(server.lines)


def bombard(target: RunningServer, count: int, seed: int) -> None:
    document = target.request("GET", "/openapi.json").json
    assert set(routes_with_bodies(document)) == set(VALID), "a route that is never asked"
    statuses = set()
    for path, data, body in hostile_requests(document, count, seed):
        reply = target.request("POST", path, data, ADMIN)
        assert reply.status in EXPECTED, (path, data[:500], reply.body[:500])
        statuses.add(reply.status)
        if reply.status == 200 and body.get("stream") and reply.body.startswith(b"data: "):
            assert reply.body.endswith(b"\n\n") and b'"error"' not in reply.body
        elif reply.status == 200 and not reply.body.startswith(b"event: "):
            json.loads(reply.body, parse_constant=pytest.fail)
        elif reply.status != 200:
            error = reply.json["error"]
            assert error["message"] and len(error["message"]) < 3000
    assert {200, 400} <= statuses


def test_nasty_values_in_bodies(target: RunningServer) -> None:
    bombard(target, 400, seed=1)
    target.assert_at_rest()


@pytest.mark.parametrize("depth", [100, 400, 900, 3000, 100_000])
@pytest.mark.parametrize(("opening", "closing"), ["[]", ('{"a":', "}")])
def test_deep_nesting(target: RunningServer, depth: int, opening: str, closing: str) -> None:
    deep = opening * depth + "1" + closing * depth
    for path, body in (
        ("/v1/completions", '{"prompt": "Hi", "max_tokens": 1, "vllm_xargs": {"a": %s}}'),
        ("/v1/completions", '{"prompt": %s}'),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": %s}]}'),
        ("/v1/chat/completions", f"{CHAT[:-1]}, " + '"tools": [{"a": %s}]}'),
    ):
        reply = target.request("POST", path, (body % deep).encode())
        assert reply.status in (200, 400), (path, depth)


def test_the_body_must_be_an_object_that_says_so(target: RunningServer) -> None:
    body = b'{"prompt": "Hi", "max_tokens": 1}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        reply = target.request("POST", "/v1/completions", body, {"Content-Type": kind})
        assert reply.status == 400 and "Content-Type: application/json" in reply.error["message"]
    for broken in (b'{"prompt": "\xff"}', b'{"seed": ' + b"1" * 5000 + b"}"):
        reply = target.request("POST", "/v1/completions", broken)
        assert reply.status == 400 and "the body is not JSON" in reply.error["message"]


@pytest.mark.slow
def test_memory_stays_as_it_was(target: RunningServer) -> None:
    sizes = []
    for seed in range(4):
        bombard(target, 1500, seed)
        target.assert_at_rest()
        sizes.append(target.memory_bytes())
    for name in sizes[0]:
        assert sizes[-1][name] < sizes[1][name] + (16 << 20), sizes


@pytest.mark.slow
def test_schemathesis_finds_no_server_error(target: RunningServer, tmp_path: Path) -> None:
    """It reads our own description of the API and sends what that allows, and what it does not."""
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{target.url}/openapi.json"),
        *("--checks", "not_a_server_error,status_code_conformance", "--seed", "1"),
        *("--max-examples", "60", "--phases", "coverage,fuzzing", "--suppress-health-check", "all"),
        *("--exclude-path-regex", "^/admin/(drain|pause)", "-H", "Authorization: Bearer admin"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-20_000:]
    target.request("POST", "/admin/log_level", {"level": "INFO"}, {"Authorization": "Bearer admin"})
    target.assert_at_rest()
