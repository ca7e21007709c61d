"""Chat completions as the official client sees them, over a real socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from quire import LLM, SamplingParams
from tests.server.running import RunningServer

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


def test_streamed_text_equals_whole_text(client: openai.OpenAI, model: str) -> None:
    settings: Any = {"model": model, "messages": QUESTION, "max_tokens": 24, "seed": 7}
    whole = client.chat.completions.create(**settings)
    options: Any = {"include_usage": True}
    chunks = list(client.chat.completions.create(**settings, stream=True, stream_options=options))
    *middle, last = chunks
    assert middle[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in middle)
    assert text == whole.choices[0].message.content
    assert middle[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == [] and last.usage is not None and whole.usage is not None
    for usage in (last.usage, whole.usage):
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_greedy_answer(client: openai.OpenAI, model: str) -> None:
    reply = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
    assert reply.choices[0].message.content == "The capital of France is Paris."
    assert reply.choices[0].finish_reason == "stop"


def test_logprobs(client: openai.OpenAI, model: str, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=2)
    (expected,) = llm.chat(QUESTION, params, use_tqdm=False)
    settings: Any = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 5}
    settings |= {"logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**settings).choices[0].logprobs
    assert whole is not None and whole.content is not None
    streamed = [
        one
        for chunk in client.chat.completions.create(**settings, stream=True)
        if chunk.choices[0].logprobs
        for one in chunk.choices[0].logprobs.content or ()
    ]
    output = expected.outputs[0]
    for content in (whole.content, streamed):
        for one, token, entry in zip(content, output.token_ids, output.logprobs or (), strict=True):
            assert one.token == entry[token].decoded_token
            assert one.logprob == pytest.approx(entry[token].logprob, abs=1e-4)
            assert bytes(one.bytes or ()).decode() == one.token
            best = sorted(entry.values(), key=lambda value: -value.logprob)[:2]
            assert [top.token for top in one.top_logprobs] == [b.decoded_token for b in best]


def test_continue_final_message(client: openai.OpenAI, model: str, llm: LLM) -> None:
    messages: Any = [*QUESTION, {"role": "assistant", "content": "The capital"}]
    (expected,) = llm.chat(
        messages,
        SamplingParams(temperature=0, max_tokens=6),
        use_tqdm=False,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    reply = client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        max_completion_tokens=6,
        extra_body={"continue_final_message": True, "return_token_ids": True},
    )
    assert reply.choices[0].message.content == expected.outputs[0].text == " of France is Paris."
    assert reply.prompt_token_ids == expected.prompt_token_ids  # type: ignore[attr-defined]


def test_several_choices_each_open_with_a_role(client: openai.OpenAI, model: str) -> None:
    chunks = list(
        client.chat.completions.create(
            model=model, messages=QUESTION, n=2, seed=5, max_tokens=6, stream=True
        )
    )
    opened = [chunk.choices[0].index for chunk in chunks if chunk.choices[0].delta.role]
    ended = sorted(c.choices[0].index for c in chunks if c.choices[0].finish_reason)
    assert opened == [0, 1] and ended == [0, 1]


def test_continuous_usage(client: openai.OpenAI, model: str) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        client.chat.completions.create(
            model=model, messages=QUESTION, max_tokens=5, stream=True, stream_options=options
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert counts == sorted(counts) and counts[-1] == 5 and len(counts) > 3


async def test_async_client_and_many_at_once(server: RunningServer, model: str) -> None:
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    async def ask(seed: int) -> str:
        stream = await client.chat.completions.create(
            model=model, messages=QUESTION, seed=seed, max_tokens=8, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    together = await asyncio.gather(*(ask(seed) for seed in range(6)))
    alone = [await ask(seed) for seed in range(6)]
    assert together == alone


def test_raw_events(server: RunningServer, model: str) -> None:
    """Other clients read the events themselves."""
    body = {"model": model, "messages": QUESTION, "max_tokens": 3, "stream": True}
    reply = server.request("POST", "/v1/chat/completions", body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = reply.body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        assert event.startswith("data: ")
        chunk = json.loads(event.removeprefix("data: "))
        assert chunk["object"] == "chat.completion.chunk" and len(chunk["choices"]) == 1
