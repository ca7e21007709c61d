"""Replies as the schemas of OpenAI and Anthropic have them: every required field is there, also
those that may be null, and every value is of its type. Their own clients read them over a real
socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.server.running import TINY, RunningServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 6,
    "temperature": 0,
}
PROMPT: dict[str, Any] = {"prompt": "The capital of", "max_tokens": 6, "temperature": 0}
SQUARE = {"name": "square", "parameters": {"type": "object", "properties": {}}}
LONG = "word " * 3000


def chunks(reply: Any) -> list[Any]:
    lines = reply.body.decode().splitlines()
    return [json.loads(line[6:]) for line in lines if line[:6] == "data: " and line[6:] != "[DONE]"]


def needs(record: dict[str, Any], *names: str) -> None:
    assert set(names) <= set(record), set(names) - set(record)


# --- required fields ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": True, "top_logprobs": 2},
        {"tools": [{"type": "function", "function": SQUARE}], "tool_choice": "required"},
        {"tools": [{"type": "function", "function": SQUARE}]},
        {"response_format": {"type": "json_object"}},
    ],
    ids=["plain", "logprobs", "call", "auto", "json"],
)
def test_chat(server: RunningServer, fields: dict[str, Any]) -> None:
    reply = server.request("POST", CHAT, {**HELLO, **fields}).json
    TypeAdapter(ChatCompletion).validate_python(reply, strict=True)
    needs(reply, "id", "choices", "created", "model", "object")
    (choice,) = reply["choices"]
    needs(choice, "finish_reason", "index", "message", "logprobs")
    needs(choice["message"], "role", "content", "refusal")
    if "logprobs" in fields:
        needs(choice["logprobs"], "content", "refusal")
        for record in choice["logprobs"]["content"]:
            needs(record, "token", "logprob", "bytes", "top_logprobs")
    streamed = server.request("POST", CHAT, {**HELLO, **fields, "stream": True})
    for chunk in chunks(streamed):
        TypeAdapter(ChatCompletionChunk).validate_python(chunk, strict=True)
        needs(chunk, "id", "choices", "created", "model", "object")
        for choice in chunk["choices"]:
            needs(choice, "delta", "finish_reason", "index")


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}, {"echo": True, "logprobs": 1}])
def test_completions(server: RunningServer, fields: dict[str, Any]) -> None:
    reply = server.request("POST", TEXT, {**PROMPT, **fields}).json
    streamed = chunks(server.request("POST", TEXT, {**PROMPT, **fields, "stream": True}))
    for record in (reply, *streamed):
        needs(record, "id", "choices", "created", "model", "object")
        needs(record["choices"][0], "finish_reason", "index", "logprobs", "text")
    if "echo" not in fields:  # nothing predicts the first token of a prompt: null, as OpenAI had it
        TypeAdapter(Completion).validate_python(reply, strict=True)


def test_embeddings(server: RunningServer) -> None:
    reply = server.request("POST", "/v1/embeddings", {"input": ["a", "b"]}).json
    TypeAdapter(CreateEmbeddingResponse).validate_python(reply, strict=True)


@pytest.mark.parametrize("fields", [{}, {"top_logprobs": 1}, {"tool_choice": "required"}])
def test_responses(server: RunningServer, fields: dict[str, Any]) -> None:
    body = {"input": "Hi", "max_output_tokens": 8, "temperature": 0, **fields}
    if "tool_choice" in fields:
        body["tools"] = [{"type": "function", "strict": True, **SQUARE}]
    reply = server.request("POST", "/v1/responses", body).json
    TypeAdapter(Response).validate_python(reply, strict=True)
    needs(reply, "id", "object", "created_at", "error", "incomplete_details", "instructions")
    needs(reply, "model", "tools", "output", "parallel_tool_calls", "metadata", "tool_choice")
    needs(reply, "temperature", "top_p", "usage")
    needs(reply["usage"], "input_tokens_details", "output_tokens_details")
    streamed = server.request("POST", "/v1/responses", {**body, "stream": True})
    for event in chunks(streamed):
        TypeAdapter(ResponseStreamEvent).validate_python(event, strict=True)


# --- context length -----------------------------------------------------------------------------

TOO_LONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": LONG}]}, "messages"),
    "completion": (TEXT, {"prompt": LONG}, "prompt"),
    "one of several": (TEXT, {"prompt": ["a", LONG]}, "prompt"),
    "response": ("/v1/responses", {"input": LONG}, "input"),
    "embedding": ("/v1/embeddings", {"input": LONG}, "input"),
    "max_tokens": (TEXT, {"prompt": "a", "max_tokens": 5000}, "max_tokens"),
    "max_completion_tokens": (
        CHAT,
        {"messages": HELLO["messages"], "max_completion_tokens": 5000},
        "max_completion_tokens",
    ),
    "max_output_tokens": (
        "/v1/responses",
        {"input": "a", "max_output_tokens": 5000},
        "max_output_tokens",
    ),
}


@pytest.mark.parametrize(("path", "body", "param"), TOO_LONG.values(), ids=TOO_LONG)
def test_context_length(server: RunningServer, path: str, body: Any, param: str) -> None:
    """By the code OpenAI has, and by the words that LiteLLM and LangChain look for."""
    for stream in [{}] if "embeddings" in path else [{}, {"stream": True}]:
        reply = server.request("POST", path, {**body, **stream})
        error = reply.json["error"]
        assert (reply.status, error["code"], error["param"]) == (
            400,
            "context_length_exceeded",
            param,
        )
        assert (
            "This model's maximum context length is 1024 tokens. However, you requested "
            in (error["message"])
        )


def test_context_length_for_the_openai_client(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=model, prompt=LONG)
    assert refused.value.code == "context_length_exceeded"
    assert "context_length_exceeded" in str(refused.value)


# --- Anthropic's client -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def claude(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_models(claude: anthropic.Anthropic, client: openai.OpenAI, model: str) -> None:
    (found,) = claude.models.list()
    assert (found.id, found.type, found.display_name) == (model, "model", model)
    assert found.created_at.year > 2000
    assert claude.models.retrieve(model) == found
    page = claude.models.list(limit=1, after_id=model)
    assert page.data == [] and page.has_more is False
    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.models.retrieve("claude")
    assert unknown.value.body["type"] == "error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="limit must be"):
        claude.models.list(limit=0)
    assert client.models.list().data[0].object == "model"


def test_context_length_for_anthropics_client(claude: anthropic.Anthropic, model: str) -> None:
    ask: Any = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": LONG}]}
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 1023"):
        claude.messages.create(**ask)
    ask |= {"max_tokens": 5000, "messages": HELLO["messages"]}
    with pytest.raises(anthropic.BadRequestError, match="exceed context limit: "):
        claude.messages.create(**ask)


# --- the rest -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_usage_in_every_chunk(server: RunningServer, path: str, tools: bool) -> None:
    body = {**(HELLO if path == CHAT else PROMPT), "stream": True}
    if tools and path == CHAT:
        body["tools"] = [{"type": "function", "function": SQUARE}]
        body |= {"tool_choice": "required", "max_tokens": 40}
    server.request("POST", path, body)  # from now on the cache has the prompt
    counts = {}
    for continuous in (False, True):
        options = {"include_usage": True, "continuous_usage_stats": continuous}
        found = chunks(server.request("POST", path, {**body, "stream_options": options}))
        assert all("usage" in chunk for chunk in found)
        counts[continuous] = [chunk["usage"] for chunk in found]
    assert counts[False][:-1] == [None] * (len(counts[False]) - 1)
    running = [usage["completion_tokens"] for usage in counts[True]]
    assert running == sorted(running)
    assert counts[True][-1] == counts[False][-1] and counts[True][-1]["completion_tokens"] > 1


@pytest.mark.parametrize(
    ("path", "body"), [(TEXT, PROMPT), (CHAT, HELLO), ("/v1/responses", {"input": "Hi"})]
)
def test_stream_options_are_for_streams(server: RunningServer, path: str, body: Any) -> None:
    for options in ({}, {"include_usage": True}):
        for stream in ({}, {"stream": False}, {"stream": None}):
            reply = server.request("POST", path, {**body, **stream, "stream_options": options})
            assert (reply.status, reply.error["param"]) == (400, "stream_options")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_given_ids(server: RunningServer, stream: bool) -> None:
    """All of them, with nothing else to ask for."""
    ids = [100, 200, 300, 400]
    more = {"logprob_token_ids": ids, "return_tokens_as_token_ids": True, "stream": stream}
    names = {f"token_id:{token}" for token in ids}

    def parts(path: str, body: dict[str, Any]) -> list[Any]:
        reply = server.request("POST", path, {**body, **more})
        assert reply.status == 200, reply.body
        found = chunks(reply) if stream else [reply.json]
        return [one["choices"][0]["logprobs"] for one in found if one["choices"][0]["logprobs"]]

    records = [record for part in parts(CHAT, HELLO) for record in part["content"]]
    assert len(records) == HELLO["max_tokens"]
    for record in records:
        assert {one["token"] for one in record["top_logprobs"]} == names
    for body in (PROMPT, {**PROMPT, "echo": True}):
        tops = [top for part in parts(TEXT, body) for top in part["top_logprobs"]]
        assert len(tops) >= PROMPT["max_tokens"]
        assert all(top is None or names <= set(top) for top in tops)


def test_tokens_of_one_text_are_all_there(server: RunningServer) -> None:
    """Bytes of longer characters have no text of their own."""
    parts = server.request("POST", "/tokenize", {"prompt": "\U00012000\U00013000"}).json["tokens"]
    tokens = [token for token in dict.fromkeys(parts) if _text(server, [token]) == "\ufffd"]
    assert len(tokens) > 1
    reply = server.request("POST", TEXT, {**PROMPT, "max_tokens": 1, "logprob_token_ids": tokens})
    (top,) = reply.json["choices"][0]["logprobs"]["top_logprobs"]
    assert len(top) == len(tokens) + 1


def _text(server: RunningServer, tokens: list[int]) -> str:
    text: str = server.request("POST", "/detokenize", {"tokens": tokens}).json["prompt"]
    return text


INPUTS: dict[str, list[Any]] = {
    "null content": [{"role": "assistant", "content": None}],
    "null content, then a call": [
        {"role": "assistant", "content": None},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ],
    "empty reasoning": [{"type": "reasoning", "id": "rs_1", "summary": []}],
    "summary": [
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "Hm."}],
            "content": None,
            "encrypted_content": None,
            "status": None,
        }
    ],
    "reasoning and text": [
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Hello.", "annotations": []}],
        },
    ],
    "refusal": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
}


@pytest.mark.parametrize("items", INPUTS.values(), ids=INPUTS)
def test_items_of_earlier_responses(client: openai.OpenAI, model: str, items: list[Any]) -> None:
    said: Any = [{"role": "user", "content": "Hi"}, *items, {"role": "user", "content": "And now?"}]
    for conversation in (said, said[:-1]):
        reply = client.responses.create(
            model=model, input=conversation, max_output_tokens=4, extra_body={"min_tokens": 4}
        )
        assert reply.output_text


def test_assistants_without_content(server: RunningServer) -> None:
    for message in (
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "assistant", "content": None, "refusal": "No."},
    ):
        messages = [*HELLO["messages"], message, *HELLO["messages"]]
        tokens = server.request("POST", "/tokenize", {"messages": messages}).json["tokens"]
        told = _text(server, tokens)
        assert "None" not in told and ("No." in told) == ("refusal" in message)
        assert server.request("POST", CHAT, {**HELLO, "messages": messages}).status == 200


def test_methods_that_a_path_has(server: RunningServer) -> None:
    for path, methods in (
        ("/health", "GET, HEAD"),
        ("/ping", "GET, HEAD, POST"),
        ("/metrics", "GET"),
        ("/v1/models", "GET"),
        (CHAT, "POST"),
    ):
        reply = server.request("DELETE", path)
        assert (reply.status, reply.headers["allow"]) == (405, methods), path


def test_the_description_of_the_api(server: RunningServer) -> None:
    document = server.request("GET", "/openapi.json").json

    def contents(path: str, method: str, status: str) -> dict[str, Any]:
        found: dict[str, Any] = document["paths"][path][method]["responses"][status]
        return dict(found.get("content", {}))

    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        for status in ("4XX", "503"):
            schema = contents(path, "post", status)["application/json"]["schema"]
            assert schema["$ref"].endswith("/MessageError")
    assert contents("/health", "get", "200") == {}
    assert server.request("GET", "/health").body == b""
    assert contents("/metrics", "get", "200") == {"text/plain": {"schema": {"type": "string"}}}
    assert set(contents("/metrics", "get", "503")) == {"application/json"}


def test_root_path(tiny_model: Path) -> None:
    """Routes with the prefix, as some proxies send them, and without it, as others do."""
    where = ("--root-path", "/llm", "--api-key", "key")
    running = RunningServer.start(str(tiny_model), *TINY, *where)
    try:
        key = {"Authorization": "Bearer key"}
        for prefix in ("", "/llm"):
            assert running.request("GET", f"{prefix}/v1/models", None, key).status == 200
            assert running.request("GET", f"{prefix}/v1/models").status == 401
            assert running.request("GET", f"{prefix}/health").status == 200
            assert running.request("GET", f"{prefix}/static/main.js").status == 200
            body = {"prompt": "a", "max_tokens": 1}
            assert running.request("POST", f"{prefix}{TEXT}", body, key).status == 200
        for path in ("/llmx/v1/models", "/llm/llm/v1/models"):
            assert running.request("GET", path, None, key).status == 404
        client = openai.OpenAI(base_url=f"{running.url}/llm/v1", api_key="key", max_retries=0)
        assert client.models.list().data
    finally:
        assert running.stop() == 0
