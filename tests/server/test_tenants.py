"""What a reply says about the prefix cache: nothing about the prompts of other tenants."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import ADMIN, TINY, RunningServer, gauge

KEYS = ("--api-key", "key-a", "--api-key", "key-b")
TEXT = "the launch code of this quarter is 7341 and not to be told to others at all"
A, B = ({"Authorization": f"Bearer key-{name}"} for name in "ab")


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 1}


ROUTES: dict[str, Any] = {
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 1},
    "/v1/chat/completions": chat,
    "/v1/messages": chat,
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 1},
}


def cached(usage: dict[str, Any]) -> int:
    """Prompt tokens from the cache, as the protocol of the usage has them."""
    if "cache_read_input_tokens" in usage:
        number: int = usage["cache_read_input_tokens"]
        return number
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    count: int = details["cached_tokens"]
    return count


def ask(server: RunningServer, path: str, text: str, headers: dict[str, str]) -> int:
    """How much of a prompt a reply says was cached; the stream must say the same."""
    body = ROUTES[path](text)
    reply = server.request("POST", path, body, headers)
    assert reply.status == 200, reply.body
    return cached(reply.json["usage"])


def ask_stream(server: RunningServer, path: str, text: str, headers: dict[str, str]) -> int:
    body = {**ROUTES[path](text), "stream": True}
    if "completions" in path:
        body["stream_options"] = {"include_usage": True}
    reply = server.request("POST", path, body, headers)
    lines = [line[6:] for line in reply.body.decode().splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    parts = [event.get("response", event) for event in events]
    return [cached(part["usage"]) for part in parts if part.get("usage")][-1]


@pytest.fixture(scope="module", params=["keys", "header"])
def apart(
    tiny_model: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[RunningServer, dict[str, str], dict[str, str]]]:
    """A server with two tenants, and the headers of both."""
    by_key = request.param == "keys"
    flags = KEYS if by_key else ("--trust-tenant-header",)
    server = RunningServer.start("--model", str(tiny_model), *TINY, *flags)
    assert server.url, "".join(server.lines)
    yield server, *((A, B) if by_key else ({"X-Tenant": "a"}, {"X-Tenant": "b"}))
    assert server.stop() == 0


@pytest.mark.parametrize("path", ROUTES)
def test_tenants_have_caches_of_their_own(
    apart: tuple[RunningServer, dict[str, str], dict[str, str]], path: str
) -> None:
    """B guesses A's prompt to the letter and learns nothing; within a tenant all is shared, also
    between protocols' streams and replies, and into blocks."""
    server, a, b = apart
    text = f"{path} {TEXT}"
    assert ask(server, path, text, a) < 20, "what the template puts before each message"
    whole = ask(server, path, text, a)
    assert whole > 60
    assert ask_stream(server, path, text, a) == whole
    assert ask(server, path, text[:-7] + "guessed", b) < 20
    assert ask_stream(server, path, text, b) >= whole - 8, "its own guess"
    assert ask(server, path, text, b) == whole
    salted = {**ROUTES[path](text), "cache_salt": path}
    for headers, expected in ((a, 0), (a, whole), (b, 0), (b, whole)):
        reply = server.request("POST", path, salted, headers)
        assert cached(reply.json["usage"]) == expected


@pytest.fixture(scope="module")
def sharing(tiny_model: Path) -> Iterator[RunningServer]:
    flags = (*KEYS, "--share-prefix-cache", "--enable-log-requests")
    server = RunningServer.start("--model", str(tiny_model), *TINY, *flags)
    assert server.url, "".join(server.lines)
    yield server
    assert server.stop() == 0


def test_a_shared_cache_is_used_and_not_told(sharing: RunningServer) -> None:
    """What A computed serves B, and neither hears of it: also not of its own, for whether that was
    evicted depends on the other."""
    for path in ROUTES:
        hits = gauge(sharing, "prefix_cache_hits_total", ADMIN)
        for headers in (A, B, A):
            assert ask(sharing, path, f"{path} {TEXT}", headers) == 0
            assert ask_stream(sharing, path, f"{path} {TEXT}", headers) == 0
        assert gauge(sharing, "prefix_cache_hits_total", ADMIN) > hits + 5 * 60
    found = re.findall(r'"cached_tokens":(\d+)', "".join(sharing.lines))
    assert max(map(int, found)) > 60, "the log is the operator's"


def test_no_progress_where_it_would_tell(sharing: RunningServer) -> None:
    options = {"include_progress": True}
    body = {"prompt": TEXT, "max_tokens": 1, "stream": True, "stream_options": options}
    reply = sharing.request("POST", "/v1/completions", body, B)
    assert reply.status == 200 and b"cached_tokens" not in reply.body


@pytest.mark.parametrize("path", ["/metrics", "/dashboard/state", "/dashboard/experts"])
def test_the_engines_counts_are_for_the_admin(sharing: RunningServer, path: str) -> None:
    assert sharing.request("GET", path, headers=ADMIN).status == 200
    refused = sharing.request("GET", path, headers=B)
    assert refused.status == 401 and "admin key" in refused.error["message"]
