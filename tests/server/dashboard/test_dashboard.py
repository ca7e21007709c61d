"""The page at `/` and the route that it reads, over a real socket; test_page.py drives it in a
browser."""

from __future__ import annotations

import base64
import re

import numpy as np
import pytest

from quire.server.dashboard.page import FOLDER
from quire.server.dashboard.state import pack
from tests.server.launch.test_faults import LONG, eventually, gauge
from tests.server.running import RunningServer


def unpacked(text: str, count: int) -> list[int]:
    """Two bits for each block, the first in the lowest."""
    number = int.from_bytes(base64.b64decode(text), "little")
    return [number >> (2 * i) & 3 for i in range(count)]


@pytest.mark.parametrize("count", [1, 4, 7, 1001])
def test_packed_blocks(count: int) -> None:
    states = np.random.default_rng(count).integers(0, 4, count).astype(np.uint8)
    packed = pack(states)
    assert len(packed) == -(-count // 4)
    assert unpacked(base64.b64encode(packed).decode(), count) == states.tolist()


@pytest.mark.parametrize(("path", "script"), [("/", "main.js"), ("/docs", "docs.js")])
def test_files_and_their_headers(server: RunningServer, path: str, script: str) -> None:
    page = server.request("GET", path)
    assert page.status == 200 and page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    names = set(re.findall(r'(?:src|href)="static/([^"]+)"', page.body.decode()))
    assert names >= {"style.css", script, "icon.svg"}
    for file in FOLDER.iterdir():
        names |= set(re.findall(r'from "\./([^"]+)"', file.read_text()))
    for name in names:
        reply = server.request("GET", f"/static/{name}")
        assert reply.status == 200 and reply.body == (FOLDER / name).read_bytes()
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["content-security-policy"] == policy
    for name in ("..%2f__init__.py", "%2e%2e/page.py", "nothing.js", ""):
        assert server.request("GET", f"/static/{name}").status == 404


def test_pages_of_other_sites_that_name_themselves_after_this_machine(
    server: RunningServer,
) -> None:
    """DNS rebinding: the browser takes the server for the page's own site, but says which."""
    for path in ("/", "/docs", "/health", "/v1/models", "/dashboard/state", "/static/main.js"):
        for host in ("localhost:1", "[::1]", "127.0.0.1"):
            assert server.request("GET", path, headers={"Host": host}).status == 200
        refused = server.request("GET", path, headers={"Host": "evil.example:8000"})
        assert refused.status == 421 and "'evil.example:8000'" in refused.error["message"]
        assert "--allowed-hosts" in refused.error["message"]


def test_the_page_needs_nothing_from_elsewhere() -> None:
    """And never lets text become markup or code."""
    size = 0
    for path in FOLDER.iterdir():
        text = path.read_text()
        size += len(text)
        assert not re.findall(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)[a-z0-9]+\.[a-z]", text), (
            path
        )
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)
    assert size < 100_000


def test_experts_of_a_model_without_any(server: RunningServer) -> None:
    reply = server.request("GET", "/dashboard/experts")
    assert reply.status == 200
    assert reply.json == {"layers": [], "tokens": [], "used_per_step": [], "num_steps": 0}


def test_state_while_requests_run(server: RunningServer, model: str) -> None:
    client = server.client()
    streams = [
        client.completions.create(
            model=model, stream=True, extra_headers={"X-Request-Id": f"seen-{i}"}, **LONG
        )
        for i in range(2)
    ]
    for stream in streams:
        next(iter(stream))
    state = server.request("GET", "/dashboard/state").json
    assert {one["request_id"] for one in state["running"]} == {"cmpl-seen-0", "cmpl-seen-1"}
    assert state["num_running"] == 2 and state["num_waiting"] == 0 and state["waiting"] == []
    assert state["table"] is None and state["model"] == model
    one = state["running"][0]
    assert one["prompt_tokens"] < one["tokens"] <= state["max_model_len"] and one["age_s"] > 0
    again = server.request("GET", f"/dashboard/state?sequence={one['key']}").json
    table, blocks = again["table"]["blocks"], unpacked(again["blocks"], again["num_blocks"])
    (now,) = [other for other in again["running"] if other["key"] == one["key"]]
    assert len(table) == now["num_blocks"] == len(set(table))
    assert now["computed_tokens"] <= len(table) * again["block_size"]
    assert all(blocks[block] in (2, 3) for block in table)  # owned or shared
    assert blocks.count(2) + blocks.count(3) >= len(table)
    assert now["num_owned_blocks"] == sum(blocks[block] == 2 for block in table)
    assert again["time_to_first_token_seconds"]["count"] >= 2
    counts = again["inter_token_latency_seconds"]["counts"]
    assert counts == sorted(counts) and counts[-1] == again["inter_token_latency_seconds"]["count"]
    assert again["memory"]["weights"] > 0
    for stream in streams:
        stream.close()
    eventually(lambda: gauge(server, "num_requests_running") == 0, "the end")
    idle = server.request("GET", f"/dashboard/state?sequence={one['key']}").json
    assert idle["table"] is None and idle["running"] == []


@pytest.mark.parametrize("sequence", ["x", "1.5", "9" * 40])
def test_sequences_that_cannot_be(server: RunningServer, sequence: str) -> None:
    assert server.request("GET", f"/dashboard/state?sequence={sequence}").status == 400
