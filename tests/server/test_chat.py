"""Chat completions as the official client sees them, over a real socket."""

from __future__ import annotations

from typing import Any

import openai

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
