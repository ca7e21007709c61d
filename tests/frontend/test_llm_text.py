"""Text as it comes: stop strings, output kinds, and outputs that only repeat themselves."""

from __future__ import annotations

from typing import Any

import pytest

from quire import (
    LLM,
    CompletionOutput,
    RepetitionDetectionParams,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from tests.frontend.conftest import Tiny
from tests.tiny import ascii_tokenizer, assert_at_rest, tiny_llm

PROMPTS = ["The quick brown fox", "def main():", "import os, sys", "A block holds"]
STEPS = 40


def greedy(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": STEPS, "ignore_eos": True, **values})


def complete(llm: LLM, prompt: str, params: SamplingParams) -> CompletionOutput:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


def pieces(tokens: list[int]) -> list[str]:
    """The text of each token; all of them are ASCII, so nothing is lost by looking at one alone."""
    return [ascii_tokenizer().decode([token]) for token in tokens]


def stop_across(tokens: list[int], index: int, length: int) -> tuple[str, str, int]:
    """A stop string that begins with the last character of token `index`.

    Also the text before its first occurrence, and the tokens needed to complete it.
    """
    parts = pieces(tokens)
    text, start = "".join(parts), len("".join(parts[: index + 1])) - 1
    stop = text[start : start + length]
    found = text.find(stop)
    count = next(n for n in range(1, len(parts) + 1) if len("".join(parts[:n])) >= found + length)
    return stop, text[:found], count


# --- stop strings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("length", [1, 3, 7])
def test_text_ends_before_a_stop_string(llm: LLM, prompt: str, length: int) -> None:
    """Wherever in a token it begins and ends; tokens stop with the one that completes it."""
    free = complete(llm, prompt, greedy())
    assert free.text == "".join(pieces(free.token_ids))
    for index in (1, 11, 22):
        stop, before, count = stop_across(free.token_ids, index, length)
        for includes in (False, True):
            wanted = greedy(stop=["never ever", stop], include_stop_str_in_output=includes)
            found = complete(llm, prompt, wanted)
            assert found.text == before + (stop if includes else "")
            assert found.token_ids == free.token_ids[:count]
            assert (found.finish_reason, found.stop_reason) == ("stop", stop)
    assert_at_rest(llm)


def test_a_stop_string_at_the_last_token(llm: LLM) -> None:
    """The token that completes it also fills max_tokens: it is a stop, not a length."""
    free = complete(llm, PROMPTS[0], greedy())
    parts = pieces(free.token_ids)
    count = next(n for n in range(20, STEPS) if parts[n - 1] not in "".join(parts[: n - 1]))
    found = complete(llm, PROMPTS[0], greedy(stop=parts[count - 1], max_tokens=count))
    assert found.finish_reason == "stop" and found.text == "".join(parts[: count - 1])
    assert complete(llm, PROMPTS[0], greedy(stop="#never#")).finish_reason == "length"


def test_streams_never_show_part_of_a_stop_string(llm: LLM) -> None:
    """Whatever is shown stays: every text is a prefix of the next, and of the final one."""
    free = complete(llm, PROMPTS[1], greedy())
    stop, before, _ = stop_across(free.token_ids, 17, 9)
    shown = ""
    for output in llm.stream(PROMPTS[1], greedy(stop=stop)):
        text = output.outputs[0].text
        assert text.startswith(shown) and before.startswith(text)
        shown = text
    assert shown == before
    deltas = [
        output.outputs[0].text
        for output in llm.stream(PROMPTS[1], greedy(stop=stop, output_kind=RequestOutputKind.DELTA))
    ]
    assert "".join(deltas) == before
    assert len([delta for delta in deltas if delta]) > 3, "text is shown as it comes"


def test_some_completions_stop_before_others(tiny: Tiny) -> None:
    """Each of n completions is cut at its own stop string; the others go on."""
    wanted = {"n": 6, "seed": 3, "max_tokens": STEPS, "ignore_eos": True}
    with tiny_llm(tiny.folder, max_steps_in_flight=2) as llm:
        (free,) = llm.generate(PROMPTS[0], SamplingParams(**wanted), use_tqdm=False)
        (cut,) = llm.generate(PROMPTS[0], SamplingParams(**wanted, stop="e"), use_tqdm=False)
        for whole, part in zip(free.outputs, cut.outputs, strict=True):
            assert part.text == whole.text.partition("e")[0]
            assert part.finish_reason == ("stop" if "e" in whole.text else "length")
        assert len({len(completion.token_ids) for completion in cut.outputs}) > 1
        assert_at_rest(llm)


def test_stop_strings_wait_for_min_tokens(llm: LLM) -> None:
    free = complete(llm, PROMPTS[2], greedy())
    first = pieces(free.token_ids)[0]
    found = complete(llm, PROMPTS[2], greedy(stop=first, min_tokens=5))
    assert len(found.token_ids) > 5 and found.text.startswith(first)


# --- output kinds ---------------------------------------------------------------------------------


def outputs_of(llm: LLM, **values: Any) -> list[RequestOutput]:
    return list(llm.stream(PROMPTS[3], greedy(max_tokens=12, logprobs=1, **values)))


def test_cumulative_outputs_hold_everything_so_far(llm: LLM) -> None:
    whole = complete(llm, PROMPTS[3], greedy(max_tokens=12, logprobs=1))
    outputs = outputs_of(llm, output_kind=RequestOutputKind.CUMULATIVE)
    assert len(outputs) == 12
    for count, output in enumerate(outputs, 1):
        (completion,) = output.outputs
        assert completion.token_ids == whole.token_ids[:count]
        assert completion.logprobs == (whole.logprobs or [])[:count]
        assert whole.text.startswith(completion.text)
        assert output.finished == (count == 12)
        assert completion.finish_reason == ("length" if count == 12 else None)
    assert outputs[-1].outputs[0] == whole


def test_deltas_add_up(llm: LLM) -> None:
    whole = complete(llm, PROMPTS[3], greedy(max_tokens=12, logprobs=1))
    outputs = outputs_of(llm, output_kind=RequestOutputKind.DELTA)
    parts = [output.outputs[0] for output in outputs]
    assert [token for part in parts for token in part.token_ids] == whole.token_ids
    assert "".join(part.text for part in parts) == whole.text
    assert [entry for part in parts for entry in part.logprobs or []] == whole.logprobs
    assert [part.finish_reason for part in parts] == [None] * 11 + ["length"]
    assert parts[-1].cumulative_logprob == whole.cumulative_logprob


def test_final_only_is_one_output(llm: LLM) -> None:
    (output,) = outputs_of(llm, output_kind=RequestOutputKind.FINAL_ONLY)
    assert output.finished
    assert output.outputs[0] == complete(llm, PROMPTS[3], greedy(max_tokens=12, logprobs=1))


def test_stream_interval(llm: LLM) -> None:
    """The first token at once, then every five, and the end."""
    outputs = outputs_of(llm, stream_interval=5, output_kind=RequestOutputKind.DELTA)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 5, 1]


def test_a_stream_without_parameters_gives_deltas(llm: LLM) -> None:
    outputs = list(llm.stream(PROMPTS[0]))
    assert all(len(output.outputs[0].token_ids) <= 1 for output in outputs)
    assert 1 <= sum(len(output.outputs[0].token_ids) for output in outputs) <= 16


def test_streams_of_several_completions(llm: LLM) -> None:
    wanted = SamplingParams(
        n=3, seed=9, max_tokens=8, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    texts = ["", "", ""]
    for output in llm.stream(PROMPTS[0], wanted):
        for completion in output.outputs:
            texts[completion.index] += completion.text
    whole = llm.generate(PROMPTS[0], wanted, use_tqdm=False)[0]
    assert texts == [completion.text for completion in whole.outputs]


def test_no_text_without_detokenize(llm: LLM) -> None:
    found = complete(llm, PROMPTS[0], greedy(detokenize=False))
    assert found.text == "" and len(found.token_ids) == STEPS


# --- repetition -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("smallest", "largest", "count"), [(1, 1, 4), (1, 3, 2), (2, 4, 3)])
def test_outputs_that_repeat_themselves_end(
    llm: LLM, smallest: int, largest: int, count: int
) -> None:
    """Ends at the first token after which some pattern of an allowed size stands `count` times."""
    detection = RepetitionDetectionParams(
        min_pattern_size=smallest, max_pattern_size=largest, min_count=count
    )
    free = SamplingParams(seed=4, max_tokens=60, allowed_token_ids=[5, 6], ignore_eos=True)
    made = complete(llm, PROMPTS[0], free).token_ids
    ends = [
        n
        for n in range(1, len(made) + 1)
        for size in range(smallest, largest + 1)
        if n >= size * count and made[n - size * count : n] == made[n - size : n] * count
    ]
    assert ends, "the case is empty otherwise"
    free.repetition_detection = detection
    found = complete(llm, PROMPTS[0], free)
    assert found.token_ids == made[: ends[0]]
    assert (found.finish_reason, found.stop_reason) == ("repetition", None)
