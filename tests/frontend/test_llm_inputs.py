"""Bad input: a clear error that names the field, its value and the remedy, before any work is done.

Each test also sees that nothing was started, that the integrity check passes, and that the engine
goes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quire import (
    LLM,
    BeamSearchParams,
    SamplingParams,
)
from quire.frontend.inputs import Prompt, TokenizationOptions
from quire.frontend.llm import TOKENS_TO_START_WITH
from tests.frontend.conftest import Tiny
from tests.frontend.refusals import refuses
from tests.models.reference import VOCAB
from tests.tiny import MAX_LEN, assert_at_rest, tiny_llm

GOOD = "A good prompt"
SHORT = SamplingParams(temperature=0.0, max_tokens=2)


@pytest.fixture(autouse=True)
def unharmed(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test that uses the shared engine: no step was taken for what was refused."""
    if "llm" not in request.fixturenames:
        yield
        return
    llm: LLM = request.getfixturevalue("llm")
    before = llm.statistics()
    yield
    after = llm.statistics()
    assert (after.num_steps, after.prompt_tokens) == (before.num_steps, before.prompt_tokens)
    assert_at_rest(llm)
    (output,) = llm.generate(GOOD, SHORT, use_tqdm=False)
    assert output.finished and len(output.outputs[0].token_ids) == 2


# --- prompts --------------------------------------------------------------------------------------

BAD_PROMPTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "empty text": ("", ("prompt is empty", "give at least one token")),
    "empty text in a dictionary": ({"prompt": ""}, ("prompt is empty",)),
    "no token ids": ({"prompt_token_ids": []}, ("prompt_token_ids is empty",)),
    "too long": (
        [5] * MAX_LEN,
        (f"{MAX_LEN} in the prompt", f"context length is {MAX_LEN} tokens", "max_model_len"),
    ),
    "id outside": ([1, VOCAB], (f"holds {VOCAB}", "outside the vocabulary", f"0 to {VOCAB - 1}")),
    "negative id": ({"prompt_token_ids": [3, -1]}, ("holds -1", "outside the vocabulary")),
    "huge id": ({"prompt_token_ids": [2**40]}, (f"holds {2**40}", "outside the vocabulary")),
    "ids that are no integers": (
        {"prompt_token_ids": [1.5, 2]},
        ("prompt_token_ids must be a list of integers", "1.5"),
    ),
    "nested ids": ({"prompt_token_ids": [[1], [2, 3]]}, ("must be a list of integers",)),
    "text as ids": ({"prompt_token_ids": "abc"}, ("prompt_token_ids must be", "'abc'")),
    "neither": ({}, ("'prompt' or 'prompt_token_ids'",)),
    "number": (3.5, ("prompt must be a string", "3.5")),
    "bytes": (b"abc", ("prompt must be a string", "b'abc'")),
    "None": (None, ("prompt must be a string", "None")),
    "text of a wrong type": ({"prompt": 7}, ("prompt must be a string, got 7",)),
    "salt of a wrong type": ({"prompt": "a", "cache_salt": 1}, ("cache_salt must be", "1")),
    "images": (
        {"prompt": "a", "multi_modal_data": {"image": 1}},
        ("multi_modal_data", "not supported"),
    ),
    "unknown key": ({"prompt": "a", "promt": "b"}, ("'promt' is unknown", "prompt_token_ids")),
    "lone surrogate": ("a\ud800", ("surrogate", "\\ud800")),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_a_bad_prompt_is_named_by_its_index(case: str, llm: LLM) -> None:
    prompt, parts = BAD_PROMPTS[case]
    prompts = [GOOD, prompt, GOOD]
    refuses(lambda: llm.generate(prompts, SHORT, use_tqdm=False), "prompts[1]", *parts)
    refuses(lambda: llm.enqueue(prompts, SHORT), "prompts[1]", *parts)
    params = BeamSearchParams(beam_width=2, max_tokens=2)
    refuses(lambda: llm.beam_search(prompts, params), "prompts[1]", *parts)


def test_what_is_no_prompt_at_all(llm: LLM) -> None:
    for prompts in (None, 5, b"bytes", 2.5):
        refuses(lambda given=prompts: llm.generate(given, SHORT), "prompts must be a string")
    refuses(lambda: llm.stream([GOOD, GOOD]), "stream takes one prompt, got 2")


@pytest.mark.parametrize(
    ("kwargs", "parts"),
    [
        ({"truncate_prompt_tokens": 0}, ("truncate_prompt_tokens", "got 0")),
        ({"truncate_prompt_tokens": -2}, ("truncate_prompt_tokens", "got -2")),
        ({"truncation_side": "middle"}, ("truncation_side", "'middle'")),
        ({"padding": True}, ("tokenization_kwargs['padding']", "not supported")),
    ],
)
def test_bad_tokenization_kwargs(kwargs: dict[str, Any], parts: tuple[str, ...], llm: LLM) -> None:
    refuses(lambda: llm.generate(GOOD, SHORT, tokenization_kwargs=kwargs), *parts)


# --- parameters -----------------------------------------------------------------------------------

BAD_PARAMS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"temperature": math.nan}, ("temperature", "finite", "nan")),
    ({"temperature": math.inf}, ("temperature", "inf")),
    ({"temperature": -0.5}, ("temperature", "[0, 2]", "-0.5")),
    ({"temperature": "hot"}, ("temperature", "number", "'hot'")),
    ({"top_p": 0}, ("top_p", "(0, 1]", "0")),
    ({"top_p": 1.1}, ("top_p", "(0, 1]", "1.1")),
    ({"top_k": -2}, ("top_k", "-2")),
    ({"min_p": 2}, ("min_p", "[0, 1]", "2")),
    ({"n": 0}, ("n must be", "from 1", "0")),
    ({"n": 2, "temperature": 0}, ("n must be 1", "greedy", "2")),
    ({"n": 1.5}, ("n must be an integer", "1.5")),
    ({"max_tokens": 0}, ("max_tokens", "at least 1", "0")),
    ({"min_tokens": 17}, ("min_tokens", "max_tokens (16)", "17")),
    ({"stop": 5}, ("stop", "string", "5")),
    ({"stop": ["ok", 5]}, ("stop[1]", "string", "5")),
    ({"stop": ["ok", b"x"]}, ("stop[1]", "string", "b'x'")),
    ({"stop": {"a": 1}}, ("stop", "string", "{'a': 1}")),
    ({"stop": ""}, ("stop[0]", "non-empty")),
    ({"stop": "x", "detokenize": False}, ("stop", "detokenize=True", "stop_token_ids")),
    ({"stop_token_ids": ["a"]}, ("stop_token_ids[0]", "integer", "'a'")),
    ({"stop_token_ids": [-4]}, ("stop_token_ids[0]", ">= 0", "-4")),
    ({"presence_penalty": 3}, ("presence_penalty", "[-2, 2]", "3")),
    ({"repetition_penalty": 0}, ("repetition_penalty", "> 0", "0")),
    ({"logprobs": -2}, ("logprobs", "-2")),
    ({"logit_bias": {"x": 1}}, ("logit_bias", "'x'")),
    ({"logit_bias": {1: math.nan}}, ("logit_bias[1]", "nan")),
    ({"allowed_token_ids": []}, ("allowed_token_ids", "non-empty")),
    ({"bad_words": [""]}, ("bad_words[0]", "non-empty")),
    ({"seed": "x"}, ("seed", "integer", "'x'")),
    ({"output_kind": 9}, ("output_kind", "9")),
    ({"structured_outputs": {}}, ("structured_outputs", "exactly one", "got none")),
    (
        {"structured_outputs": {"json": {}, "regex": "a"}},
        ("structured_outputs", "exactly one", "json, regex"),
    ),
    ({"structured_outputs": {"jsno": {}}}, ("structured_outputs['jsno']", "unknown")),
    ({"structured_outputs": 3}, ("structured_outputs", "3")),
    ({"structured_outputs": {"json": "{"}}, ("structured_outputs.json", "JSON")),
    ({"structured_outputs": {"json": "[" * 99999}}, ("structured_outputs.json", "deeply")),
    ({"structured_outputs": {"choice": []}}, ("structured_outputs.choice", "[]")),
    ({"structured_outputs": {"choice": ["a", 1]}}, ("structured_outputs.choice", "1")),
    ({"structured_outputs": {"regex": ""}}, ("structured_outputs.regex", "''")),
    ({"structured_outputs": {"grammar": "x" * (10 << 20)}}, ("grammar", "10485760 bytes")),
]


@pytest.mark.parametrize(("values", "parts"), BAD_PARAMS)
def test_bad_sampling_parameters(values: dict[str, Any], parts: tuple[str, ...]) -> None:
    refuses(lambda: SamplingParams(**values), *parts)


OUTSIDE: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"allowed_token_ids": [1, VOCAB]}, ("allowed_token_ids", f"{VOCAB}", "vocabulary")),
    ({"logit_bias": {VOCAB + 3: 1.0}}, ("logit_bias", f"{VOCAB + 3}", "vocabulary")),
    ({"logprob_token_ids": [VOCAB]}, ("logprob_token_ids", f"{VOCAB}", "vocabulary")),
    ({"stop_token_ids": [VOCAB]}, ("stop_token_ids", f"{VOCAB}", "vocabulary")),
    ({"stop_token_ids": [2**40]}, ("stop_token_ids", f"{2**40}", "vocabulary")),
    ({"logprobs": 21}, ("logprobs=21", "max_logprobs is 20")),
    ({"prompt_logprobs": -1}, ("prompt_logprobs=-1", "max_logprobs is 20")),
]


@pytest.mark.parametrize(("values", "parts"), OUTSIDE)
def test_parameters_that_do_not_suit_the_model(
    values: dict[str, Any], parts: tuple[str, ...], llm: LLM
) -> None:
    params = [SHORT, SamplingParams(**values)]
    refuses(lambda: llm.generate([GOOD, GOOD], params, use_tqdm=False), "prompts[1]", *parts)
    refuses(lambda: llm.stream(GOOD, params[1]), *parts)


def test_counts_of_parameters_and_priorities(llm: LLM) -> None:
    three = [SHORT] * 3
    refuses(lambda: llm.generate([GOOD] * 2, three), "sampling_params has 3", "2 prompts")
    refuses(
        lambda: llm.generate([GOOD] * 2, [SHORT, {"max_tokens": 2}]),  # type: ignore[list-item]
        "sampling_params[1]",
        "must be SamplingParams",
    )
    refuses(
        lambda: llm.generate(GOOD, {"max_tokens": 2}),  # type: ignore[arg-type]
        "sampling_params",
        "must be SamplingParams",
    )
    refuses(lambda: llm.generate([GOOD] * 2, SHORT, priority=[1]), "priority has 1", "2 prompts")
    refuses(lambda: llm.generate(GOOD, SHORT, priority=[1]), "priority=1", "scheduling_policy")
    refuses(
        lambda: llm.generate(GOOD, SHORT, priority=["x"]),  # type: ignore[list-item]
        "priority must be an integer",
        "'x'",
    )
    refuses(lambda: llm.generate(GOOD, SHORT, lora_request="a"), "lora_request", "LoRARequest")


def test_priorities_beyond_64_bits(tiny: Tiny) -> None:
    with tiny_llm(tiny.folder, scheduling_policy="priority") as llm:
        for value in (2**63, -(2**63) - 1):
            refuses(
                lambda given=value: llm.generate(GOOD, SHORT, priority=[given]),
                "priority",
                str(value),
            )
        assert llm.generate(GOOD, SHORT, priority=[-(2**63)], use_tqdm=False)[0].finished


def test_beam_search_parameters(llm: LLM) -> None:
    for values, parts in (
        ({"beam_width": 0, "max_tokens": 1}, ("beam_width", "at least 1", "0")),
        ({"beam_width": 1, "max_tokens": 0}, ("max_tokens", "at least 1", "0")),
        ({"beam_width": 1, "max_tokens": 1, "length_penalty": math.nan}, ("length_penalty",)),
        ({"beam_width": 1, "max_tokens": 1, "temperature": 3}, ("temperature", "3")),
    ):
        refuses(lambda given=values: BeamSearchParams(**given), *parts)
    good = BeamSearchParams(beam_width=2, max_tokens=2)
    refuses(lambda: llm.beam_search(GOOD, good, concurrency_limit=0), "concurrency_limit", "0")
    refuses(
        lambda: llm.beam_search(GOOD, SHORT),  # type: ignore[arg-type]
        "params must be BeamSearchParams",
    )
    wide = BeamSearchParams(beam_width=300, max_tokens=2)
    refuses(lambda: llm.beam_search([GOOD, GOOD], wide), "prompts[0]", "beam_width=300")


@pytest.mark.parametrize(
    ("messages", "parts"),
    [
        ([], ("non-empty list of messages",)),
        ("hello", ("non-empty list of messages", "'hello'")),
        ([{"content": "x"}], ("messages[0]", "'role'")),
        ([[{"role": "user", "content": "a"}], []], ("prompts[1]", "non-empty")),
        ([[{"role": "user", "content": "a"}], ["b"]], ("prompts[1]", "messages[0]", "'b'")),
    ],
)
def test_bad_conversations(messages: Any, parts: tuple[str, ...], llm: LLM) -> None:
    refuses(lambda: llm.chat(messages, SHORT, use_tqdm=False), *parts)


# --- requests that can never fit ------------------------------------------------------------------


def test_a_request_larger_than_the_cache(tiny: Tiny) -> None:
    """It is refused with its index, and the others are not started; smaller ones run."""
    with tiny_llm(tiny.folder, block_size=4, num_gpu_blocks_override=48, max_num_seqs=64) as llm:
        wide = BeamSearchParams(beam_width=4, max_tokens=80)
        refuses(
            lambda: llm.beam_search([[1] * 3, [1] * 50], wide),
            "prompts[0]",
            "KV blocks of 4 tokens",
            "the cache has 48",
            "beam_width",
        )
        assert_at_rest(llm)
        assert llm.statistics().num_steps == 0
        (output,) = llm.generate([[1] * 190], SamplingParams(max_tokens=None), use_tqdm=False)
        assert output.outputs[0].finish_reason in ("length", "stop")


def test_numpy_ids_are_checked_too(llm: LLM) -> None:
    refuses(lambda: llm.generate(np.array([1, VOCAB]), SHORT), "prompts[0]", "vocabulary")


def test_a_bad_prompt_after_the_first_step_has_begun(tiny: Tiny) -> None:
    """With several steps in flight the first requests run while later ones are checked."""
    long = [7] * (MAX_LEN // 2)
    good = [long] * (TOKENS_TO_START_WITH // len(long) + 1)
    with tiny_llm(tiny.folder, max_steps_in_flight=2) as llm:
        expected = llm.generate(GOOD, SHORT, use_tqdm=False)[0].outputs[0].token_ids
        begun = llm.statistics().num_steps
        refuses(lambda: llm.generate([*good, [VOCAB]], SHORT), f"prompts[{len(good)}]")
        assert llm.statistics().num_steps > begun
        assert llm.generate(GOOD, SHORT, use_tqdm=False)[0].outputs[0].token_ids == expected
        assert_at_rest(llm)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_that_is_truncated_is_not_tokenised_whole(llm: LLM, side: str) -> None:
    """And yet gives the tokens that the whole text would."""
    tokenizer = llm.get_tokenizer()
    text = " ".join(f"word{i % 977}" for i in range(200_000))
    ids = tokenizer.encode(text, add_special_tokens=False)
    options = TokenizationOptions(
        add_special_tokens=False, truncate_prompt_tokens=MAX_LEN // 2, truncation_side=side
    )
    prompt = Prompt(text=text, token_ids=None)
    llm._session.inputs.encode_texts([prompt], options)
    assert prompt.token_ids is not None and len(prompt.token_ids) < len(ids)
    llm._session.inputs.check_prompt(prompt, options)
    kept = ids[-MAX_LEN // 2 :] if side == "left" else ids[: MAX_LEN // 2]
    assert prompt.token_ids.tolist() == kept
