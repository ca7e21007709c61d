"""Anthropic's messages as its official client sees them; every reply is validated by its types."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import jsonschema
import pytest

from quire import LLM, SamplingParams
from tests.server.running import RunningServer

PATH = "/v1/messages"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: Any = {"extra_body": {"temperature": 0}}
"""Newer versions of the client have no argument for it."""
ANSWER = "The capital of France is Paris."


def settings(server: RunningServer) -> dict[str, Any]:
    return {
        "base_url": server.url,
        "api_key": "none",
        "max_retries": 0,
        "timeout": 120,
        "_strict_response_validation": True,
    }


@pytest.fixture(scope="module")
def claude(server: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(**settings(server))


def reference(llm: LLM, messages: Any, **more: Any) -> Any:
    (output,) = llm.chat(
        messages, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False, **more
    )
    return output


def text_of(message: Any) -> str:
    (block,) = message.content
    assert block.type == "text"
    return str(block.text)


def test_whole_message(claude: anthropic.Anthropic, model: str, llm: LLM) -> None:
    expected = reference(llm, QUESTION)
    reply = claude.messages.create(model=model, max_tokens=50, messages=QUESTION, **GREEDY)
    assert text_of(reply) == expected.outputs[0].text == ANSWER
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    assert reply.model == model and reply.id.startswith("msg_") and reply._request_id
    usage = reply.usage
    assert usage.cache_read_input_tokens is not None
    assert usage.input_tokens + usage.cache_read_input_tokens == len(expected.prompt_token_ids)
    assert usage.output_tokens == len(expected.outputs[0].token_ids)


def test_streamed_text_equals_whole_text(claude: anthropic.Anthropic, model: str) -> None:
    body: Any = {"model": model, "max_tokens": 20, "messages": QUESTION}
    body["extra_body"] = {"seed": 3, "ignore_eos": True}
    whole = claude.messages.create(**body)
    with claude.messages.stream(**body) as stream:
        deltas = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(deltas) == text_of(final) == text_of(whole) and len(deltas) > 5
    assert final.stop_reason == whole.stop_reason == "max_tokens"
    assert final.usage.output_tokens == whole.usage.output_tokens == 20
    for usage in (final.usage, whole.usage):
        usage.input_tokens += usage.cache_read_input_tokens or 0
    assert final.usage.input_tokens == whole.usage.input_tokens


def test_events_in_order(server: RunningServer) -> None:
    body = {"max_tokens": 4, "messages": QUESTION, "stream": True, "ignore_eos": True}
    reply = server.request("POST", PATH, body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    names, contents = [], []
    for event in reply.body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        names.append(name.removeprefix("event: "))
        contents.append(json.loads(data.removeprefix("data: ")))
    assert names == [content["type"] for content in contents]
    assert list(dict.fromkeys(names)) == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start, end = contents[0]["message"], contents[-2]
    assert start["content"] == [] and start["stop_reason"] is None
    assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    total = end["usage"]["input_tokens"] + end["usage"]["cache_read_input_tokens"]
    assert start["usage"]["input_tokens"] == total and end["usage"]["output_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequences(claude: anthropic.Anthropic, model: str, stream: bool) -> None:
    body: Any = {"model": model, "max_tokens": 50, "messages": QUESTION, **GREEDY}
    body["stop_sequences"] = [" is", "never"]
    if stream:
        with claude.messages.stream(**body) as events:
            reply: Any = events.get_final_message()
    else:
        reply = claude.messages.create(**body)
    assert text_of(reply) == "The capital of France"
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", " is")


def test_system_turns_and_token_counts(claude: anthropic.Anthropic, model: str, llm: LLM) -> None:
    """Blocks of a turn, and turns of the same role, are one message to the template."""
    system: Any = [{"type": "text", "text": "You know cities.", "cache_control": None}]
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Hello."}]},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "One question:"},
        *QUESTION,
    ]
    plain = [
        {"role": "system", "content": "You know cities."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": f"One question:\n{QUESTION[0]['content']}"},
    ]
    expected = reference(llm, plain)
    body: Any = {"model": model, "messages": messages, "system": system}
    reply = claude.messages.create(**body, max_tokens=12, **GREEDY)
    assert text_of(reply) == expected.outputs[0].text
    count = claude.messages.count_tokens(**body)
    assert count.input_tokens == len(expected.prompt_token_ids)
    usage = reply.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count.input_tokens


def test_the_last_turn_of_the_assistant_goes_on(
    claude: anthropic.Anthropic, model: str, llm: LLM
) -> None:
    messages: Any = [*QUESTION, {"role": "assistant", "content": "The capital"}]
    more: Any = {"add_generation_prompt": False, "continue_final_message": True}
    expected = reference(llm, messages, **more)
    reply = claude.messages.create(model=model, max_tokens=12, messages=messages, **GREEDY)
    assert text_of(reply) == expected.outputs[0].text == " of France is Paris."


async def test_async_client(server: RunningServer, model: str) -> None:
    client = anthropic.AsyncAnthropic(**settings(server))
    body: Any = {"model": model, "max_tokens": 50, "messages": QUESTION, **GREEDY}
    assert text_of(await client.messages.create(**body)) == ANSWER
    async with client.messages.stream(**body) as stream:
        assert "".join([text async for text in stream.text_stream]) == ANSWER
    raw = await client.messages.create(**body, stream=True)
    assert [event.type async for event in raw][-1] == "message_stop"


TOOL = {"name": "f", "input_schema": {"type": "object"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 5000}, "max_tokens"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ({"thinking": {"type": "deep"}}, "thinking"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config"),
    ({"n": 2}, "n"),
    ({"stop": "a", "stop_sequences": ["b"]}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop"),
    ({"temperature": 3}, "temperature"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"system": [IMAGE]}, "system[0]"),
]


@pytest.mark.parametrize(("body", "named"), REFUSED)
def test_refusals(server: RunningServer, body: dict[str, Any], named: str) -> None:
    for stream in (False, True):
        whole = {"max_tokens": 1, "messages": QUESTION, **body, "stream": stream}
        reply = server.request("POST", PATH, whole)
        assert reply.status == 400 and reply.json["type"] == "error"
        assert reply.json["error"]["type"] == "invalid_request_error"
        assert named in reply.json["error"]["message"]
        assert reply.headers["request-id"] == reply.headers["x-request-id"]


def test_errors_become_the_clients_exceptions(claude: anthropic.Anthropic, model: str) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        claude.messages.create(model="claude", max_tokens=1, messages=QUESTION)
    with pytest.raises(anthropic.BadRequestError, match=r"exceed context limit: \d+ \+ 5000 >"):
        claude.messages.stream(model=model, max_tokens=5000, messages=QUESTION).__enter__()
    tools: Any = [TOOL]
    with_tools = claude.messages.count_tokens(model=model, messages=QUESTION, tools=tools)
    plain = claude.messages.count_tokens(model=model, messages=QUESTION)
    assert with_tools.input_tokens > plain.input_tokens + 10


def test_other_faults_have_the_same_format(server: RunningServer) -> None:
    for method, path, body, status in (
        ("POST", PATH, b"{", 400),
        ("GET", PATH, None, 405),
        ("POST", f"{PATH}/batches", {}, 404),
    ):
        reply = server.request(method, path, body)
        assert reply.status == status and reply.json["type"] == "error"


def test_tool_use(claude: anthropic.Anthropic, model: str) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a"],
    }
    arguments: Any = {"model": model, "messages": QUESTION, "max_tokens": 80}
    arguments |= {"extra_body": {"temperature": 0}}
    arguments |= {"tools": [{"name": "square", "input_schema": schema}]}
    arguments |= {"tool_choice": {"type": "tool", "name": "square"}}
    whole = claude.messages.create(**arguments)
    (block,) = whole.content
    assert whole.stop_reason == "tool_use" and block.type == "tool_use" and block.name == "square"
    jsonschema.validate(block.input, schema)
    with claude.messages.stream(**arguments) as stream:
        streamed = stream.get_final_message()
    (again,) = streamed.content
    assert again.type == "tool_use" and again.input == block.input
    assert streamed.stop_reason == "tool_use"
    result: Any = {"type": "tool_result", "tool_use_id": block.id, "content": "144"}
    arguments["messages"] = [
        *QUESTION,
        {"role": "assistant", "content": [{"type": "text", "text": "Well."}, block]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    arguments["tool_choice"] = {"type": "none"}
    assert claude.messages.create(**arguments).content[0].type == "text"


def test_output_format(claude: anthropic.Anthropic, model: str) -> None:
    schema = {"type": "object", "properties": {"mood": {"enum": ["glad", "sad"]}}}
    schema |= {"required": ["mood"], "additionalProperties": False}
    config: Any = {"format": {"type": "json_schema", "schema": schema}}
    reply = claude.messages.create(
        model=model, max_tokens=60, messages=QUESTION, output_config=config
    )
    assert reply.stop_reason == "end_turn"
    jsonschema.validate(json.loads(text_of(reply)), schema)
