"""Logprobs of generated and of prompt tokens: their shape, and their values by transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire import LLM, CompletionOutput, SamplingParams
from quire.frontend.outputs import FlatLogprobs
from tests.frontend.conftest import Tiny
from tests.models.reference import VOCAB
from tests.tiny import ascii_tokenizer, logprobs, text_ids, tiny_llm

PROMPT = text_ids("A paged cache holds blocks")


def complete(llm: LLM, **values: Any) -> CompletionOutput:
    wanted = SamplingParams(**{"max_tokens": 8, "seed": 5, "ignore_eos": True, **values})
    return llm.generate([PROMPT], wanted, use_tqdm=False)[0].outputs[0]


def lines_of(tiny: Tiny, tokens: list[int]) -> torch.Tensor:
    return logprobs(tiny.model, PROMPT + tokens)[len(PROMPT) - 1 : -1]


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_generated_tokens(llm: LLM, tiny: Tiny, count: int) -> None:
    """The sampled token first, whatever its rank, then the likeliest; values before temperature
    and filters."""
    found = complete(llm, logprobs=count, temperature=1.5, top_k=100)
    assert isinstance(found.logprobs, list) and len(found.logprobs) == 8
    total = 0.0
    for token, line, entry in zip(
        found.token_ids, lines_of(tiny, found.token_ids), found.logprobs, strict=True
    ):
        order = line.argsort(descending=True).tolist()
        assert next(iter(entry)) == token
        assert set(entry) == {token, *order[:count]}
        for candidate, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(line[candidate]), abs=1e-4)
            assert logprob.rank == order.index(candidate) + 1
            assert logprob.decoded_token == ascii_tokenizer().decode(
                [candidate], skip_special_tokens=False
            )
        total += entry[token].logprob
    assert found.cumulative_logprob == pytest.approx(total)


def test_the_whole_vocabulary(tiny: Tiny) -> None:
    with tiny_llm(tiny.folder, max_logprobs=-1) as llm:
        found = complete(llm, logprobs=-1, max_tokens=2)
        assert [len(entry) for entry in found.logprobs or []] == [VOCAB, VOCAB]


def test_chosen_ids(llm: LLM, tiny: Tiny) -> None:
    """`logprob_token_ids` reports these instead of the likeliest ones, without ranks."""
    ids = [3, 77, 150]
    found = complete(llm, logprob_token_ids=ids)
    for token, line, entry in zip(
        found.token_ids, lines_of(tiny, found.token_ids), found.logprobs or [], strict=True
    ):
        assert set(entry) == {token, *ids}
        for candidate in set(ids) - {token}:
            assert entry[candidate].rank is None
            assert entry[candidate].logprob == pytest.approx(float(line[candidate]), abs=1e-4)


def test_prompt_tokens(llm: LLM, tiny: Tiny) -> None:
    """From a given position on, by id, and beside other requests that want other things."""
    wanted = [
        SamplingParams(max_tokens=1, prompt_logprobs=0),
        SamplingParams(max_tokens=1, prompt_logprobs=2, prompt_logprob_start=4),
        SamplingParams(max_tokens=1, prompt_logprob_token_ids=[9, 10]),
        SamplingParams(max_tokens=4, n=2, seed=1, prompt_logprobs=1),
        SamplingParams(max_tokens=1),
    ]
    lines = logprobs(tiny.model, PROMPT)[:-1]
    for _ in range(2):  # the second time the cache has the prompt
        outputs = llm.generate([PROMPT] * 5, wanted, use_tqdm=False)
        plain, later, by_id, forked, none = (output.prompt_logprobs for output in outputs)
        assert none is None
        assert plain is not None and later is not None and by_id is not None and forked is not None
        assert all(len(entries) == len(PROMPT) for entries in (plain, later, by_id, forked))
        assert plain[0] is None and [entry is None for entry in later] == [
            position < 4 for position in range(len(PROMPT))
        ]
        for position in range(1, len(PROMPT)):
            token, line = PROMPT[position], lines[position - 1]
            best = line.argsort(descending=True).tolist()
            expected = [(plain, {token}), (by_id, {token, 9, 10}), (forked, {token, best[0]})]
            if position >= 4:
                expected.append((later, {token, *best[:2]}))
            for entries, ids in expected:
                entry = entries[position]
                assert entry is not None and set(entry) == ids
                for candidate, logprob in entry.items():
                    value = pytest.approx(float(line[candidate]), abs=1e-4)
                    assert logprob.logprob == value
                assert entry[token].rank == best.index(token) + 1
        assert outputs[0].num_cached_tokens == 0, "scoring a prompt means computing it"


def test_flat_logprobs_hold_the_same(llm: LLM) -> None:
    """`FlatLogprobs` reads like a list of dictionaries, sliced or not."""
    values = {"logprobs": 2, "prompt_logprobs": 1, "max_tokens": 6, "seed": 2}
    objects, flat = (
        llm.generate([PROMPT], SamplingParams(**values, flat_logprobs=is_flat), use_tqdm=False)[0]
        for is_flat in (False, True)
    )
    light, heavy = flat.outputs[0].logprobs, objects.outputs[0].logprobs
    assert isinstance(light, FlatLogprobs) and isinstance(heavy, list)
    assert list(light) == heavy and light[1] == heavy[1] and list(light[1:3]) == heavy[1:3]
    assert len(light.token_ids) == sum(len(entry) for entry in heavy)
    assert isinstance(flat.prompt_logprobs, FlatLogprobs) and objects.prompt_logprobs is not None
    assert list(flat.prompt_logprobs)[1:] == objects.prompt_logprobs[1:]
    assert flat.outputs[0].cumulative_logprob == objects.outputs[0].cumulative_logprob
