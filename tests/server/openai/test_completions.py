"""Completions as the official client sees them, next to what `LLM` says about the same prompts."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from quire import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time"]


def complete(client: openai.OpenAI, model: str, **settings: Any) -> Any:
    extra = settings.pop("extra", None)
    return client.completions.create(model=model, extra_body=extra, **settings)


def test_batched_prompts_answer_in_order(client: openai.OpenAI, model: str, llm: LLM) -> None:
    expected = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    reply = complete(client, model, prompt=PROMPTS, temperature=0, max_tokens=8)
    assert [choice.text for choice in reply.choices] == [o.outputs[0].text for o in expected]
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert reply.usage.prompt_tokens == sum(len(o.prompt_token_ids) for o in expected)
    assert reply.usage.completion_tokens == 16


def test_token_ids_in_and_out(client: openai.OpenAI, model: str, llm: LLM) -> None:
    (expected,) = llm.generate(
        PROMPTS[0], SamplingParams(temperature=0, max_tokens=6), use_tqdm=False
    )
    ids = expected.prompt_token_ids
    for prompt in (ids, [ids]):
        reply = complete(
            client,
            model,
            prompt=prompt,
            temperature=0,
            max_tokens=6,
            extra={"return_token_ids": True},
        )
        (choice,) = reply.choices
        assert choice.token_ids == expected.outputs[0].token_ids
        assert choice.prompt_token_ids == ids
        assert choice.text == expected.outputs[0].text


def test_every_completion_of_n_streams_its_own_text(client: openai.OpenAI, model: str) -> None:
    settings: Any = {"prompt": PROMPTS, "n": 3, "seed": 11, "max_tokens": 10}
    whole = complete(client, model, **settings)
    assert [choice.index for choice in whole.choices] == list(range(6))
    texts = [""] * 6
    reasons: list[Any] = [None] * 6
    for chunk in complete(client, model, stream=True, **settings):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert len(set(texts)) > 2


def test_logprobs_and_echo(client: openai.OpenAI, model: str, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=2)
    (expected,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    reply = complete(
        client, model, prompt=PROMPTS[0], temperature=0, max_tokens=4, logprobs=2, echo=True
    )
    (choice,) = reply.choices
    assert choice.text == PROMPTS[0] + expected.outputs[0].text
    ids = expected.prompt_token_ids + expected.outputs[0].token_ids
    known = [*(expected.prompt_logprobs or ()), *(expected.outputs[0].logprobs or ())]
    assert choice.logprobs.token_logprobs[0] is None
    for token, entry, value, top in zip(
        ids[1:],
        known[1:],
        choice.logprobs.token_logprobs[1:],
        choice.logprobs.top_logprobs[1:],
        strict=True,
    ):
        assert entry is not None
        assert value == pytest.approx(entry[token].logprob, abs=1e-4)
        assert top == pytest.approx(
            {one.decoded_token: one.logprob for one in entry.values()}, abs=1e-4
        )
    starts = choice.logprobs.text_offset
    for token, start in zip(choice.logprobs.tokens, starts, strict=True):
        assert choice.text[start : start + len(token)] == token


def test_echo_of_the_prompt_alone(client: openai.OpenAI, model: str) -> None:
    reply = complete(client, model, prompt=PROMPTS[0], max_tokens=0, echo=True, logprobs=1)
    (choice,) = reply.choices
    assert choice.text == PROMPTS[0]
    assert "".join(choice.logprobs.tokens) == PROMPTS[0]
    assert reply.usage.completion_tokens == 0


@pytest.mark.parametrize("more", [{}, {"echo": True, "n": 2}, {"echo": True, "max_tokens": 0}])
def test_streamed_logprobs_are_the_whole_ones(
    client: openai.OpenAI, model: str, more: dict[str, Any]
) -> None:
    settings: Any = {"prompt": PROMPTS, "seed": 5, "max_tokens": 6, "logprobs": 1, **more}
    whole = complete(client, model, **settings).choices
    chunks: list[list[Any]] = [[] for _ in whole]
    for chunk in complete(client, model, stream=True, **settings):
        chunks[chunk.choices[0].index].append(chunk.choices[0])
    for choice, parts in zip(whole, chunks, strict=True):
        assert "".join(part.text for part in parts) == choice.text
        for name in ("tokens", "token_logprobs", "text_offset"):
            told = [part.logprobs for part in parts if part.logprobs]
            joined = [value for part in told for value in getattr(part, name)]
            # What else is in a batch changes how sums are rounded.
            assert joined == pytest.approx(getattr(choice.logprobs, name), abs=1e-4), name


def test_stop_strings_and_default_length(client: openai.OpenAI, model: str, llm: LLM) -> None:
    (free,) = llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
    text = free.outputs[0].text
    reply = complete(client, model, prompt=PROMPTS[1], temperature=0)
    assert reply.choices[0].text == text and reply.choices[0].finish_reason == "length"
    stop = text[10:14]
    for include in (False, True):
        streamed = "".join(
            chunk.choices[0].text
            for chunk in complete(
                client,
                model,
                prompt=PROMPTS[1],
                temperature=0,
                stop=[stop],
                stream=True,
                extra={"include_stop_str_in_output": include},
            )
        )
        end = text.index(stop) + (len(stop) if include else 0)
        assert streamed == text[:end]


def test_sampling_fields_reach_the_sampler(client: openai.OpenAI, model: str, llm: LLM) -> None:
    """Each of these changes what is generated, and must do so as it does in Python."""
    space: Any = {"temperature": 0, "max_tokens": 5}
    settings: list[dict[str, Any]] = [
        {"allowed_token_ids": [28, 30, 260]},
        {"bad_words": [" Paris"]},
        {"logit_bias": {"260": 50.0}},
        {"min_tokens": 5, "stop_token_ids": [30]},
        {"repetition_penalty": 1.8},
        {"temperature": 1.3, "top_k": 3, "top_p": 0.9, "min_p": 0.05, "seed": 3},
        {"presence_penalty": 1.5, "frequency_penalty": 1.5, "ignore_eos": True},
    ]
    for extra in settings:
        values = {**space, **extra}
        (expected,) = llm.generate(PROMPTS[0], SamplingParams(**values), use_tqdm=False)
        reply = complete(client, model, prompt=PROMPTS[0], extra=values)
        assert reply.choices[0].text == expected.outputs[0].text, extra
        assert reply.choices[0].finish_reason == expected.outputs[0].finish_reason, extra
