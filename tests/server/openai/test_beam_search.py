"""Beam search over HTTP finds what `LLM.beam_search` finds."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from quire import LLM, BeamSearchParams
from tests.server.running import RunningServer

PROMPTS = ["The capital of France is", "Once upon a time"]
WIDTH, LENGTH = 3, 8


def body(**more: Any) -> dict[str, Any]:
    extra = {"use_beam_search": True, "return_token_ids": True, **more.pop("extra", {})}
    return {"n": WIDTH, "max_tokens": LENGTH, "temperature": 0, "extra_body": extra, **more}


def found(llm: LLM, prompts: list[Any], **more: Any) -> list[list[list[int]]]:
    """Tokens of the hypotheses for each prompt, best first."""
    outputs = llm.beam_search(prompts, BeamSearchParams(WIDTH, LENGTH, **more))
    ids = [llm.get_tokenizer().encode(p) if isinstance(p, str) else p for p in prompts]
    return [
        [sequence.tokens[len(start) :] for sequence in output.sequences]
        for output, start in zip(outputs, ids, strict=True)
    ]


@pytest.mark.parametrize("length_penalty", [1.0, -2.0])
def test_completions(client: openai.OpenAI, model: str, llm: LLM, length_penalty: float) -> None:
    expected = found(llm, PROMPTS, length_penalty=length_penalty)
    settings = body(prompt=PROMPTS, extra={"length_penalty": length_penalty})
    reply: Any = client.completions.create(model=model, **settings)
    assert [choice.index for choice in reply.choices] == list(range(len(PROMPTS) * WIDTH))
    tokens = [choice.token_ids for choice in reply.choices]
    assert tokens == [beam for beams in expected for beam in beams]
    decode = llm.get_tokenizer().decode
    assert [choice.text for choice in reply.choices] == [decode(ids) for ids in tokens]
    assert reply.usage.completion_tokens == sum(map(len, tokens))
    streamed: Any = client.completions.create(model=model, stream=True, **settings)
    chunks = {chunk.choices[0].index: chunk.choices[0] for chunk in streamed}
    assert [chunks[i].text for i in range(len(tokens))] == [one.text for one in reply.choices]
    assert all(chunk.finish_reason in ("length", "stop") for chunk in chunks.values())


def test_chat(client: openai.OpenAI, model: str, llm: LLM) -> None:
    settings = body(messages=[{"role": "user", "content": "Hi"}])
    reply: Any = client.chat.completions.create(model=model, **settings)
    (expected,) = found(llm, [reply.prompt_token_ids])
    assert [choice.token_ids for choice in reply.choices] == expected
    texts = [""] * WIDTH
    streamed: Any = client.chat.completions.create(model=model, stream=True, **settings)
    for chunk in streamed:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content
    assert texts == [choice.message.content for choice in reply.choices]


@pytest.mark.parametrize(
    ("path", "more", "named"),
    [
        ("/v1/completions", {"prompt": "Hi", "logprobs": 1}, "logprobs"),
        ("/v1/completions", {"prompt": "Hi", "stop": ["a"]}, "stop"),
        ("/v1/completions", {"prompt": "Hi", "top_k": 5}, "top_k"),
        ("/v1/completions", {"prompt": "Hi", "n": 5000}, "n"),
        ("/v1/completions", {"prompt": "Hi", "length_penalty": 1e9}, "length_penalty"),
        ("/v1/responses", {"input": "Hi"}, "use_beam_search"),
    ],
)
def test_what_a_search_cannot_do(
    server: RunningServer, path: str, more: dict[str, Any], named: str
) -> None:
    reply = server.request("POST", path, {"use_beam_search": True, **more})
    assert reply.status == 400 and reply.error["param"] == named, reply.error
