"""The Responses API as the official client sees it; every reply is validated by its types."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from quire import LLM, SamplingParams
from tests.server.running import RunningServer

PATH = "/v1/responses"
QUESTION = "What is the capital of France?"
ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


@pytest.fixture(scope="module")
def strict(server: RunningServer) -> openai.OpenAI:
    return server.client(_strict_response_validation=True)


def reference(llm: LLM, messages: Any, **params: Any) -> Any:
    (output,) = llm.chat(messages, SamplingParams(temperature=0, **params), use_tqdm=False)
    return output


def test_whole_answer(strict: openai.OpenAI, model: str, llm: LLM) -> None:
    expected = reference(llm, [{"role": "user", "content": QUESTION}], max_tokens=50)
    reply = strict.responses.create(
        model=model, input=QUESTION, temperature=0, max_output_tokens=50, metadata={"a": "b"}
    )
    assert reply.output_text == expected.outputs[0].text == "The capital of France is Paris."
    assert (reply.status, reply.error, reply.incomplete_details) == ("completed", None, None)
    assert (reply.store, reply.temperature, reply.max_output_tokens) == (False, 0, 50)
    assert reply.metadata == {"a": "b"} and reply.model == model and reply.id.startswith("resp_")
    (item,) = reply.output
    assert item.type == "message" and item.status == "completed"
    usage = reply.usage
    assert usage is not None and usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens == len(expected.prompt_token_ids)
    assert usage.output_tokens == len(expected.outputs[0].token_ids)


def test_streamed_text_equals_whole_text(strict: openai.OpenAI, model: str) -> None:
    settings: Any = {"model": model, "input": QUESTION, "max_output_tokens": 20}
    settings["extra_body"] = {"seed": 3, "ignore_eos": True}
    whole = strict.responses.create(**settings)
    events = list(strict.responses.create(**settings, stream=True))
    kinds = [event.type for event in events]
    assert list(dict.fromkeys(kinds)) == [*ORDER, "response.incomplete"]
    assert kinds.count("response.output_text.delta") > 5
    assert len(kinds) == len(ORDER) + kinds.count("response.output_text.delta")
    assert [event.sequence_number for event in events] == list(range(len(events)))  # type: ignore[union-attr]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    done: Any = [event for event in events if event.type == "response.output_text.done"]
    assert done[0].text == text
    last: Any = events[-1]
    assert last.response.output_text == text and last.response.status == whole.status
    assert last.response.incomplete_details == whole.incomplete_details
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert last.response.usage.output_tokens == whole.usage.output_tokens == 20  # type: ignore[union-attr]
    ids = {event.item_id for event in events if hasattr(event, "item_id")}
    assert ids == {last.response.output[0].id}


def test_stream_helper(strict: openai.OpenAI, model: str) -> None:
    with strict.responses.stream(model=model, input=QUESTION, temperature=0) as stream:
        snapshots = [e.snapshot for e in stream if e.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_text == snapshots[-1] == "The capital of France is Paris."
    assert final.status == "completed" and final.usage is not None


def test_conversation_goes_on_from_output_items(
    strict: openai.OpenAI, model: str, llm: LLM
) -> None:
    """Without state a client sends back what it got."""
    first = strict.responses.create(
        model=model, instructions="You know cities.", input=QUESTION, temperature=0
    )
    follow_up = {"role": "user", "content": [{"type": "input_text", "text": "And of Italy?"}]}
    items: Any = [
        {"type": "message", "role": "user", "content": QUESTION},
        *[item.model_dump() for item in first.output],
        follow_up,
    ]
    second = strict.responses.create(
        model=model,
        instructions="You know cities.",
        input=items,
        temperature=0,
        max_output_tokens=12,
    )
    messages = [
        {"role": "system", "content": "You know cities."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And of Italy?"},
    ]
    expected = reference(llm, messages, max_tokens=12)
    assert second.output_text == expected.outputs[0].text
    assert second.usage is not None
    assert second.usage.input_tokens == len(expected.prompt_token_ids)
    assert second.usage.input_tokens_details.cached_tokens > 0
    developer: Any = [{"role": "developer", "content": "You know cities."}, items[0]]
    again = strict.responses.create(model=model, input=developer, temperature=0)
    assert again.output_text == first.output_text


def test_logprobs(strict: openai.OpenAI, model: str, llm: LLM) -> None:
    expected = reference(llm, [{"role": "user", "content": QUESTION}], max_tokens=4, logprobs=2)
    settings: Any = {"model": model, "input": QUESTION, "temperature": 0, "max_output_tokens": 4}
    settings |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole: Any = strict.responses.create(**settings).output[0]
    events = strict.responses.create(**settings, stream=True)
    streamed = [
        one
        for event in events
        if event.type == "response.output_text.delta"
        for one in event.logprobs
    ]
    output = expected.outputs[0]
    for found in (whole.content[0].logprobs, streamed):
        for one, token, entry in zip(found, output.token_ids, output.logprobs, strict=True):
            assert one.token == entry[token].decoded_token
            assert one.logprob == pytest.approx(entry[token].logprob, abs=1e-4)
            assert len(one.top_logprobs) == 2


async def test_async_client(server: RunningServer, model: str) -> None:
    client = openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", _strict_response_validation=True
    )
    async with client.responses.stream(model=model, input=QUESTION, temperature=0) as stream:
        final = await stream.get_final_response()
    assert final.output_text == "The capital of France is Paris."


def test_half_characters_are_repeated_as_whole_ones(server: RunningServer) -> None:
    body = {"input": "Hi", "max_output_tokens": 1, "metadata": {"k": "\ud800"}, "user": "\udfff"}
    reply = server.request("POST", PATH, body)
    assert reply.status == 200 and reply.json["metadata"] == {"k": "?"}


IMAGE = {"type": "input_image", "image_url": "data:,"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"reasoning": {"summary": "auto"}}, "reasoning"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"truncation": "auto"}, "truncation"),
    ({"n": 2}, "n"),
    ({"max_output_tokens": 5000}, "max_output_tokens"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"top_logprobs": 21}, "logprobs"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"input": []}, "input"),
    ({"input": [{"role": ["user"], "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": {}, "content": "x"}]}, "input[0]"),
    ({"input": [{"type": "function_call_output", "output": "1"}]}, "input[0]"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
    ({"input": "\ud800"}, "lone surrogate"),
]


@pytest.mark.parametrize(("body", "named"), REFUSED)
def test_refusals(server: RunningServer, body: dict[str, Any], named: str) -> None:
    for stream in (False, True):
        reply = server.request("POST", PATH, {"input": "Hi", **body, "stream": stream})
        assert reply.status == 400 and named in reply.error["message"]
        if named in body:
            assert reply.error["param"] == named
