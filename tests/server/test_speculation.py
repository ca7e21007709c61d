"""Speculation over HTTP: a server that drafts, and requests that do without."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import ADMIN, TINY, RunningServer


@pytest.fixture(scope="module")
def drafting(tiny_model: Path) -> Iterator[RunningServer]:
    config = {"model": str(tiny_model), "num_speculative_tokens": 2}
    flags = ("--speculative-config", json.dumps(config))
    server = RunningServer.start("--model", str(tiny_model), *TINY, *flags)
    assert server.url, "".join(server.lines)
    yield server
    assert server.stop() == 0


def num_drafts(server: RunningServer) -> float:
    text = server.request("GET", "/metrics", None, ADMIN).body.decode()
    found = re.findall(
        r"^quire:spec_decode_num_draft_tokens_total\{.*\} (\S+)$", text, re.MULTILINE
    )
    return sum(map(float, found))


@pytest.mark.parametrize("wish", [{"speculation": False}, {"vllm_xargs": {"speculation": False}}])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_body_may_do_without_drafts(
    drafting: RunningServer, path: str, wish: dict[str, Any]
) -> None:
    """The text is the same, and the engine has drafted nothing for it."""
    body: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    body |= {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    counts, texts = [num_drafts(drafting)], []
    for more in (wish, {}):
        (choice,) = drafting.request("POST", path, {**body, **more}).json["choices"]
        texts.append(choice["message"]["content"] if "chat" in path else choice["text"])
        counts.append(num_drafts(drafting))
    assert texts[0] == texts[1] and texts[0]
    assert counts[0] == counts[1] < counts[2]


def test_a_wish_is_true_or_false(drafting: RunningServer) -> None:
    body = {"prompt": "a", "max_tokens": 1, "speculation": "maybe"}
    reply = drafting.request("POST", "/v1/completions", body)
    assert reply.status == 400 and "speculation" in reply.error["message"]
