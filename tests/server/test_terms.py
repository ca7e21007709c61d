"""Deadlines, progress, overload and admin routes, on one server that can hold little."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.running import ADMIN, ENGINE, RunningServer, eventually, gauge

LONG = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def small() -> Iterator[RunningServer]:
    """One request runs, two may wait."""
    limits = ("--max-num-seqs", "1", "--max-num-queued-reqs", "2", "--admin-key", "admin")
    limits += ("--enable-log-requests",)
    server = RunningServer.start(*limits, "--max-num-batched-tokens", "32", *ENGINE)
    assert server.url, "".join(server.lines)
    yield server
    assert server.stop() == 0


def abort(server: RunningServer, name: str) -> int:
    reply = server.request("POST", "/admin/abort", {"request_id": f"cmpl-{name}"}, ADMIN)
    assert reply.status == 200
    count: int = reply.json["aborted"]
    return count


def test_time_is_up_while_waiting_and_while_writing(small: RunningServer) -> None:
    with ThreadPoolExecutor() as pool:
        named = {"X-Request-Id": "runs"}
        running = pool.submit(small.request, "POST", "/v1/completions", LONG, named)
        eventually(lambda: gauge(small, "num_requests_running") == 1, "the first request")
        for stream in (False, True):
            body = {**LONG, "timeout_s": 0.2, "stream": stream}
            reply = small.request("POST", "/v1/completions", body)
            assert reply.status == 408 and "timeout_s" in reply.error["message"]
        assert abort(small, "unknown") == 0
        assert abort(small, "runs") == 1
        ended = running.result()
    assert ended.status == 200 and ended.json["choices"][0]["finish_reason"] == "abort"
    begun = small.request("POST", "/v1/completions", {**LONG, "timeout_s": 1.5})
    assert begun.json["choices"][0]["finish_reason"] == "abort"
    assert 0 < begun.json["usage"]["completion_tokens"] < 900


def test_time_is_up_for_one_of_two_prompts(small: RunningServer) -> None:
    """The one that has begun keeps its text; the other, which still waits, is aborted too."""
    body = {**LONG, "prompt": [LONG["prompt"]] * 2, "timeout_s": 1.5}
    reply = small.request("POST", "/v1/completions", body)
    assert reply.status == 200
    assert [one["finish_reason"] for one in reply.json["choices"]] == ["abort", "abort"]
    first, second = (one["text"] for one in reply.json["choices"])
    assert first and not second


def test_full_queue(small: RunningServer) -> None:
    body = {**LONG, "stream": True}
    with ThreadPoolExecutor() as pool:
        held = []
        for i in range(3):
            named = {"X-Request-Id": f"held-{i}"}
            held.append(pool.submit(small.request, "POST", "/v1/completions", body, named))
            eventually(
                lambda i=i: (
                    gauge(small, "num_requests_running")  # type: ignore[misc]
                    + gauge(small, "num_requests_waiting")
                    == i + 1
                ),
                "the queue",
            )
        refused = small.request("POST", "/v1/completions", body)
        assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1
        assert "max_num_queued_reqs" in refused.error["message"]
        for i in range(3):
            assert abort(small, f"held-{i}") == 1
        assert [reply.result().status for reply in held] == [200, 200, 200]
    many = small.request("POST", "/v1/completions", {**LONG, "prompt": ["a", "b", "c"]})
    assert many.status == 400 and "max_num_queued_reqs" in many.error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_progress_of_a_long_prompt(small: RunningServer, path: str) -> None:
    text = " ".join(f"{path} {i}" for i in range(60))
    body: dict[str, Any] = {"prompt": text, "max_tokens": 4, "stream": True}
    if "chat" in path:
        body = {**body, "messages": [{"role": "user", "content": body.pop("prompt")}]}
    body["stream_options"] = {"include_progress": True, "include_usage": True}
    events = small.request("POST", path, body).body.decode().split("\n\n")[:-2]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    steps = [chunk["progress"] for chunk in chunks if "progress" in chunk]
    assert len(steps) >= 3
    assert all(chunk["choices"] == [] for chunk in chunks if "progress" in chunk)
    done = [step["processed_tokens"] for step in steps]
    assert done == sorted(done) and done[-1] > 32
    assert {step["prompt_tokens"] for step in steps} == {chunks[-1]["usage"]["prompt_tokens"]}
    assert steps[-1]["eta_s"] is None or steps[-1]["eta_s"] >= 0
    last = max(i for i, chunk in enumerate(chunks) if "progress" in chunk)
    first = min(i for i, chunk in enumerate(chunks) if chunk["choices"])
    assert last < first


def test_pause_and_resume(small: RunningServer) -> None:
    assert small.request("POST", "/admin/pause", {"mode": "hold"}, ADMIN).json["paused"] == "hold"
    with ThreadPoolExecutor() as pool:
        body = {"prompt": "Hi", "max_tokens": 2, "ignore_eos": True}
        # A deadline beyond all clocks, at which the engine would have to wake up.
        patient = {**body, "timeout_s": 1e300}
        waiting = pool.submit(small.request, "POST", "/v1/completions", patient)
        eventually(lambda: gauge(small, "num_requests_waiting") == 1, "the request")
        timed = small.request("POST", "/v1/completions", {**body, "timeout_s": 0.1})
        assert timed.status == 408
        assert not waiting.done()
        assert small.request("POST", "/admin/resume", None, ADMIN).status == 200
        assert waiting.result().json["usage"]["completion_tokens"] == 2


def test_admin_routes(small: RunningServer) -> None:
    for headers in ({}, {"Authorization": "Bearer other"}):
        assert small.request("POST", "/admin/reset_prefix_cache", None, headers).status == 401
    body = {"prompt": "The quick brown fox jumps over the lazy dog", "max_tokens": 1}

    def cached() -> int:
        usage = small.request("POST", "/v1/completions", body).json["usage"]
        count: int = usage["prompt_tokens_details"]["cached_tokens"]
        return count

    cached()
    assert cached() > 0
    reply = small.request("POST", "/admin/reset_prefix_cache", None, ADMIN)
    assert reply.json == {"reset": True}
    assert cached() == 0
    level = small.request("POST", "/admin/log_level", {"level": "LOUD"}, ADMIN)
    assert level.status == 400
    assert small.request("POST", "/admin/log_level", {"level": "ERROR"}, ADMIN).status == 200


def test_one_line_per_request_without_its_text(small: RunningServer) -> None:
    small.request("POST", "/admin/log_level", {"level": "INFO"}, ADMIN)
    body = {"prompt": "A secret of mine", "max_tokens": 3, "n": 2, "seed": 1, "ignore_eos": True}
    small.request("POST", "/v1/completions", body, {"X-Request-Id": "logged"})

    def lines() -> list[str]:
        return [line for line in small.lines if '"logged"' in line]

    eventually(lambda: bool(lines()), "the line")
    (line,) = lines()
    record = json.loads(line[line.index("{") :])
    assert record["completion_tokens"] == 6 and record["finish_reasons"] == ["length", "length"]
    assert 0 < record["first_token_s"] <= record["total_s"]
    assert "secret" not in "".join(small.lines)
