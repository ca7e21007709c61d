"""Bodies are read, rendered and tokenised in processes that can be ended: no request can hold the
event loop of its API process up, whatever it says."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import API_PROCESS, TINY, RunningServer, eventually, http_request
from tests.tiny import save_tiny

HELLO: Any = [{"role": "user", "content": "Hi"}]
CHAT: Any = {"messages": HELLO, "max_tokens": 1}
HOSTILE = {
    "a number too large": "{{ 10**(10**8) }}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
}
CALM = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Its model's own template is hostile to those who say the word; its tokenizer has no limit,
    which is written as a number beyond 64 bits."""
    folder = tmp_path_factory.mktemp("hostile")
    boom = "{{ 10**(10**8 + messages|length) }}"  # which is not calculated when it is compiled
    template = "{% if messages[0]['content'] == 'boom' %}" + boom + "{% endif %}" + CALM
    config = {"chat_template": template, "model_max_length": int(1e30)}
    save_tiny(folder, tokenizer_config=config, max_position_embeddings=2048)
    running = RunningServer.start(
        "--model", str(folder), "--served-model-name", "m", *TINY, "--trust-request-chat-template"
    )
    assert running.url, "".join(running.lines)
    yield running
    assert running.stop() == 0, "".join(running.lines)


def pool_pids(server: RunningServer) -> list[int]:
    """The process that forks, and its forks."""
    api = server.child_pid(API_PROCESS)
    parents, found = {api}, []
    entries = [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit()]
    for pid in sorted(entries):
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent in parents:
            parents.add(pid)
            found.append(pid)
    return found


@pytest.mark.parametrize("template", HOSTILE.values(), ids=list(HOSTILE))
def test_templates_of_requests_are_limited(server: RunningServer, template: str) -> None:
    reply = server.request("POST", "/v1/chat/completions", {**CHAT, "chat_template": template})
    assert reply.status == 400 and reply.error["param"] == "chat_template"
    assert "that of the request takes more than 2 s" in reply.error["message"]
    assert server.request("POST", "/v1/chat/completions", CHAT).status == 200


def test_templates_of_models_are_limited(server: RunningServer) -> None:
    """Others are answered meanwhile."""
    boom: Any = [{"role": "user", "content": "boom"}]
    waiting = server.send({"messages": boom, "max_tokens": 1}, "/v1/messages")
    assert server.request("POST", "/v1/chat/completions", CHAT).status == 200
    assert server.request("GET", "/health").status == 200
    with waiting:
        reply = b""
        while not reply.endswith(b"}"):
            reply += waiting.recv(1 << 16)
        assert b" 400 " in reply and b"that of model 'm' takes more than 2 s" in reply


def test_memory_of_templates_is_limited(server: RunningServer) -> None:
    body = {**CHAT, "chat_template": "{{ 'a' * 10**10 }}"}
    reply = server.request("POST", "/v1/chat/completions", body)
    assert reply.status == 400 and "MemoryError" in reply.error["message"]


def test_large_bodies_say_the_same_as_small_ones(server: RunningServer) -> None:
    """The same request in this process and in another: what pads it changes nothing."""
    for path, body in (
        ("/v1/completions", {"prompt": [5, 6, 7], "temperature": 0, "echo": True, "logprobs": 1}),
        ("/v1/completions", {"prompt": ["ab", "cd"], "temperature": 0, "return_token_ids": True}),
        ("/v1/completions", {"prompt": "ab", "n": 2, "use_beam_search": True, "max_tokens": 3}),
        ("/v1/embeddings", {"input": [[5, 6], [7]], "encoding_format": "base64"}),
        ("/detokenize", {"tokens": [5, 6, 7]}),
        ("/v1/completions", {"prompt": [5], "stop_token_ids": [-1]}),
        ("/v1/completions", {"prompt": 5}),
        ("/v1/completions", {"prompt": [], "structured_outputs": {"json": 5}}),
        ("/v1/completions", {"prompt": "ab", "response_format": {"type": "json_schema"}}),
    ):
        small, large = (
            server.request("POST", path, {**body, "padding": "x" * size})
            for size in (1, 20_000)  # beyond what is read in the API process
        )
        assert small.status == large.status
        replies = [one.json for one in (small, large)]
        for reply in replies:
            for name in ("id", "created", "usage"):  # the second finds the first one's prompt
                reply.pop(name, None)
        assert replies[0] == replies[1]


def test_many_prompts_are_refused_before_they_are_read(server: RunningServer) -> None:
    for path, field in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
        for body in ({field: [[1]] * 60_000}, {field: ["a"] * 3000}):
            reply = server.request("POST", path, body)
            assert reply.status == 400 and reply.error["param"] == field
            assert "max_num_queued_reqs=2048" in reply.error["message"]


def test_texts_that_cannot_fit_are_refused_untokenised(server: RunningServer) -> None:
    text = "ab " * 1_000_000
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/embeddings", {"input": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/tokenize", {"prompt": text}),
    ):
        reply = server.request("POST", path, body)
        assert reply.status == 400 and "you requested at least" in reply.error["message"]
    cut = {"prompt": "ab " * 100_000, "truncate_prompt_tokens": 4, "max_tokens": 1}
    reply = server.request("POST", "/v1/completions", cut)
    assert reply.status == 200 and reply.json["usage"]["prompt_tokens"] == 4


def test_work_ends_when_the_client_leaves(server: RunningServer) -> None:
    """A text that takes minutes is no longer worked on once its client has left."""
    server.request("POST", "/v1/chat/completions", CHAT)
    before = set(pool_pids(server))
    cut = {"prompt": "ab " * 8_000_000, "truncate_prompt_tokens": 4, "max_tokens": 1}
    connection = server.connect()
    connection.sendall(http_request("/v1/completions", cut))
    eventually(lambda: bool(set(pool_pids(server)) - before), "a process for the large body")
    connection.close()
    eventually(lambda: set(pool_pids(server)) <= before, "its end")


def test_the_process_that_forks_is_replaced(server: RunningServer) -> None:
    assert server.request("POST", "/v1/chat/completions", CHAT).status == 200
    first = pool_pids(server)[0]
    os.kill(first, signal.SIGKILL)

    def is_replaced() -> bool:
        reply = server.request("POST", "/v1/chat/completions", CHAT)
        return reply.status == 200 and first not in pool_pids(server)

    eventually(is_replaced, "another one")


def test_idle_forks_that_are_killed_are_replaced(server: RunningServer) -> None:
    assert server.request("POST", "/v1/chat/completions", CHAT).status == 200
    for pid in pool_pids(server)[1:]:
        os.kill(pid, signal.SIGKILL)
    eventually(
        lambda: server.request("POST", "/v1/chat/completions", CHAT).status == 200, "another one"
    )


@pytest.mark.slow
def test_memory_is_given_back(server: RunningServer) -> None:
    """After many large bodies the server has what it had before."""
    bodies = [
        ("/v1/completions", json.dumps({"prompt": "ab " * 1_500_000}).encode()),
        ("/v1/completions", json.dumps({"prompt": [[1]] * 500_000}).encode()),
        ("/v1/chat/completions", json.dumps({"messages": HELLO * 50_000}).encode()),
        ("/detokenize", json.dumps({"tokens": [5] * 100_000}).encode()),
    ]

    def bytes_used() -> int:
        pids = [server.child_pid(API_PROCESS), *pool_pids(server)]
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
        return sum(pages) * os.sysconf("SC_PAGE_SIZE")

    for path, data in bodies:
        server.request("POST", path, data)
    before = bytes_used()
    for index in range(40):
        path, data = bodies[index % len(bodies)]
        assert server.request("POST", path, data).status in (200, 400)
    time.sleep(1)
    assert bytes_used() - before < 200 << 20
