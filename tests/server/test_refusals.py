"""What a server says no to, and how: always the same form, never a 500."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.running import RunningServer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
PROMPT = {"prompt": "Hi", "max_tokens": 1}

REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    (TEXT, {**PROMPT, "max_tokens": 5000}, 400, "max_tokens"),
    (CHAT, {**HELLO, "max_completion_tokens": 5000}, 400, "max_completion_tokens"),
    (TEXT, {**PROMPT, "temperature": 3}, 400, "temperature"),
    (TEXT, {**PROMPT, "temperature": "hot"}, 400, "temperature"),
    (TEXT, {**PROMPT, "suffix": "end"}, 400, "suffix"),
    (TEXT, {**PROMPT, "best_of": 2}, 400, "best_of"),
    (TEXT, {**PROMPT, "n": 0}, 400, "n"),
    (TEXT, {**PROMPT, "logprobs": 21}, 400, "logprobs"),
    (TEXT, {**PROMPT, "stop": [""]}, 400, "stop"),
    (TEXT, {**PROMPT, "priority": 1}, 400, "priority"),
    (TEXT, {**PROMPT, "max_tokens": 0}, 400, "max_tokens"),
    (CHAT, {**HELLO, "max_completion_tokens": 0}, 400, "max_completion_tokens"),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 0}, 400, "max_output_tokens"),
    (TEXT, {**PROMPT, "response_format": {"type": "xml"}}, 400, "response_format.type"),
    (TEXT, {**PROMPT, "structured_outputs": {"regex": "["}}, 400, "structured_outputs.regex"),
    (TEXT, {**PROMPT, "stream_interval": 10**30}, 400, "stream_interval"),
    (TEXT, {**PROMPT, "seed": 2**64}, 400, "seed"),
    (CHAT, {**HELLO, "seed": -(2**63) - 1}, 400, "seed"),
    ("/v1/embeddings", {"input": [True]}, 400, "input"),
    ("/v1/embeddings", {"input": [["1"]]}, 400, "input"),
    ("/v1/embeddings", {"input": "Hi", "dimensions": "5"}, 400, "dimensions"),
    ("/v1/embeddings", {"input": "Hi", "normalize": 1}, 400, "normalize"),
    (TEXT, {**PROMPT, "prompt": [True]}, 400, "prompt"),
    ("/detokenize", {"tokens": [True]}, 400, "tokens"),
    ("/detokenize", {"tokens": ["1"]}, 400, "tokens"),
    (TEXT, {**PROMPT, "stop": "\ud800"}, 400, "a value of the request"),
    (TEXT, {"max_tokens": 1}, 400, "prompt"),
    (TEXT, {"prompt": []}, 400, "prompt"),
    (TEXT, {"prompt": [[]]}, 400, "prompt"),
    (TEXT, {"prompt": [10**12]}, 400, "prompt_token_ids"),
    (TEXT, {"prompt": "\ud800"}, 400, "lone surrogate"),
    (TEXT, {"prompt": "word " * 3000}, 400, "prompt"),
    (TEXT, {**PROMPT, "request_id": "a b"}, 400, "request_id"),
    (TEXT, {**PROMPT, "model": "gpt-4"}, 404, "model"),
    (CHAT, {**HELLO, "model": "\ud800" * 9999}, 404, "model"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
    (CHAT, {"messages": [{"content": "who?"}]}, 400, "messages"),
    (CHAT, {**HELLO, "top_logprobs": 2}, 400, "top_logprobs"),
    (CHAT, {**HELLO, "tool_choice": "required"}, 400, "tool_choice"),
    (CHAT, {**HELLO, "chat_template": "{{ 1 }}"}, 400, "--trust-request-chat-template"),
    (CHAT, {**HELLO, "chat_template_kwargs": {"tokenize": True}}, 400, "chat_template_kwargs"),
    (CHAT, {**HELLO, "chat_template_kwargs": {"self": 1}}, 400, "chat_template"),
    (CHAT, {"messages": [{"role": "tool"}, {"role": "user", "tool_calls": 5}]}, 400, "tool_calls"),
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"messages": HELLO["messages"], "tools": [{}]}, 400, "tools"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "status", "named"), REFUSED)
def test_refusals_name_the_field(
    server: RunningServer, path: str, body: dict[str, Any], status: int, named: str
) -> None:
    for stream in (False, True):
        reply = server.request("POST", path, {**body, "stream": stream})
        assert reply.status == status
        assert named in reply.error["message"]
        assert len(reply.error["message"]) < 3000
        if named in body:
            assert reply.error["param"] == named


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": NaN}', b"[" * 100_000, b"null"]
)
def test_what_is_not_a_body(server: RunningServer, body: bytes) -> None:
    reply = server.request("POST", TEXT, body)
    assert reply.status == 400 and reply.error["type"] == "BadRequestError"


def test_unknown_routes_and_methods(server: RunningServer) -> None:
    assert server.request("GET", "/v1/nothing").error["type"] == "NotFoundError"
    wrong_method = server.request("GET", TEXT)
    assert wrong_method.error["code"] == 405 and wrong_method.headers["allow"] == "POST"
    assert server.request("GET", "/admin/pause").status == 404


def test_errors_become_the_clients_exceptions(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="top_p must be") as caught:
        client.completions.create(model=model, prompt="Hi", top_p=2)
    assert caught.value.param == "top_p"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="Hi")


def test_unknown_fields_are_ignored_and_logged_once(server: RunningServer) -> None:
    for _ in range(2):
        reply = server.request("POST", TEXT, {**PROMPT, "flux_capacitor": 1.21})
        assert reply.status == 200
    server.request("GET", "/health")
    assert "".join(server.lines).count("flux_capacitor") == 1
