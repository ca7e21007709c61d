"""Sampling through the whole engine, against a plain loop over transformers' logits.

The loop (`expected_tokens`) asks transformers for the logits of the sequence so far, applies
tests/decoding/reference.py, and appends; it knows nothing of batches, rows or caches.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from quire import LLM, RequestOutput, SamplingParams
from quire.scheduler.sequence import derive_seed
from tests.decoding import reference
from tests.frontend.conftest import Tiny
from tests.models.reference import VOCAB, random_tokens, reference_logits
from tests.text.tokenizer_samples import write_json
from tests.tiny import END_ID, MAX_LEN, ascii_tokenizer, text_ids, tiny_llm

PROMPT = text_ids("The quick brown fox jumps over the lazy dog.")
STEPS = 14


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": STEPS, "seed": 11, **values})


def generate(llm: LLM, prompts: Any, wanted: Any) -> list[RequestOutput]:
    return llm.generate(prompts, wanted, use_tqdm=False)


def expected_tokens(
    model: PreTrainedModel,
    prompt: Sequence[int],
    wanted: SamplingParams,
    *,
    eos: int = END_ID,
    child: int = 0,
) -> list[int]:
    ends = {*(wanted.stop_token_ids or ()), *(() if wanted.ignore_eos else (eos,))}
    seed = derive_seed(wanted.seed or 0, child)
    made: list[int] = []
    while len(made) < (wanted.max_tokens or MAX_LEN) and len(prompt) + len(made) < MAX_LEN:
        logits = reference_logits(model, [*prompt, *made])[-1].numpy()
        logits = reference.processed(logits, wanted, prompt, made, sorted(ends))
        made.append(reference.chosen(logits, wanted, seed, len(prompt) + len(made)))
        if made[-1] in ends and len(made) >= wanted.min_tokens:
            break
    return made


CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "hot": {"temperature": 1.9},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "all filters": {"top_k": 30, "top_p": 0.9, "min_p": 0.02, "temperature": 1.4},
    "presence": {"temperature": 0.0, "presence_penalty": 1.5},
    "frequency": {"temperature": 0.0, "frequency_penalty": 0.7},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.6},
    "penalties": {
        "presence_penalty": -1.0,
        "frequency_penalty": 0.5,
        "repetition_penalty": 0.8,
        "top_p": 0.8,
    },
    "bias": {"logit_bias": {7: 4.0, 9: 3.5, END_ID: -100.0}, "temperature": 0.8},
    "allowed": {"allowed_token_ids": [5, 6, 7, 50]},
    "allowed greedy": {"allowed_token_ids": [5, 6, 7, 50], "temperature": 0.0},
    "min_tokens": {"min_tokens": 9, "logit_bias": {END_ID: 30.0}, "temperature": 0.0},
    "stop ids": {"stop_token_ids": list(range(10, 40)), "temperature": 1.2},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {END_ID: 6.0}},
    "eos": {"logit_bias": {END_ID: 6.0}},
}


@pytest.fixture(scope="module")
def expected(tiny: Tiny) -> dict[str, list[int]]:
    return {name: expected_tokens(tiny.model, PROMPT, params(**CASES[name])) for name in CASES}


def test_every_parameter_does_what_the_reference_does(
    llm: LLM, expected: dict[str, list[int]]
) -> None:
    """One request at a time."""
    for name, values in CASES.items():
        (output,) = generate(llm, [PROMPT], params(**values))
        assert output.outputs[0].token_ids == expected[name], name
    assert len({tuple(tokens) for tokens in expected.values()}) > len(CASES) - 4


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 24, "max_steps_in_flight": 2, "block_size": 4},
        {"num_gpu_blocks_override": 50, "block_size": 4, "max_steps_in_flight": 2},
    ],
    ids=["one step", "chunks and overlap", "preemption"],
)
def test_a_batch_changes_no_tokens(
    tiny: Tiny, expected: dict[str, list[int]], options: dict[str, Any]
) -> None:
    """All of them at once among 32 requests, with other prompts between them."""
    names = list(CASES)
    wanted, prompts = [], []
    for i in range(32):
        if i < len(names):
            wanted.append(params(**CASES[names[i]]))
            prompts.append(PROMPT)
        else:
            wanted.append(params(seed=i, repetition_penalty=1.1, max_tokens=5 + i))
            prompts.append(random_tokens(i, seed=i))
    with tiny_llm(tiny.folder, **options) as llm:
        outputs = generate(llm, prompts, wanted)
        for name, output in zip(names, outputs, strict=False):
            assert output.outputs[0].token_ids == expected[name], name
        for i in range(len(names), 32):
            alone = generate(llm, [prompts[i]], wanted[i])
            assert alone[0].outputs[0].token_ids == outputs[i].outputs[0].token_ids
        preempts = "num_gpu_blocks_override" in options
        assert (llm.statistics().num_preemptions > 0) == preempts


def test_seeds_decide_and_nothing_else(llm: LLM) -> None:
    """Equal seeds give equal tokens; other seeds, and requests without one, give others."""
    one = [generate(llm, [PROMPT], params(seed=s))[0].outputs[0].token_ids for s in (1, 1, 2)]
    assert one[0] == one[1] != one[2]
    free = [generate(llm, [PROMPT], params(seed=None))[0].outputs[0].token_ids for _ in range(4)]
    assert len({tuple(tokens) for tokens in free}) == 4


def test_unseeded_requests_follow_the_engines_seed(tiny: Tiny) -> None:
    found = []
    for seed in (0, 0, 1):
        with tiny_llm(tiny.folder, seed=seed) as llm:
            outputs = generate(llm, [PROMPT] * 3, params(seed=None))
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("caching", [True, False])
def test_completions_of_one_prompt_have_seeds_of_their_own(tiny: Tiny, caching: bool) -> None:
    wanted = params(n=5, top_p=0.9)
    with tiny_llm(tiny.folder, enable_prefix_caching=caching, max_num_seqs=3) as llm:
        (output,) = generate(llm, [PROMPT], wanted)
        for child, completion in enumerate(output.outputs):
            assert completion.index == child
            alone = expected_tokens(tiny.model, PROMPT, wanted, child=child)
            assert completion.token_ids == alone
        (single,) = generate(llm, [PROMPT], params(top_p=0.9))
        assert single.outputs[0].token_ids == output.outputs[0].token_ids


def test_bad_words_are_blocked_at_their_last_token(llm: LLM, tiny: Tiny) -> None:
    """Words are tokenised with and without a space before them; a word of several tokens is
    blocked only where it would be completed."""
    (free,) = generate(llm, [PROMPT], params(temperature=0.0, ignore_eos=True))
    made = free.outputs[0].token_ids
    backend = ascii_tokenizer()
    words = [backend.decode([made[0]]).strip(), backend.decode(made[4:6]).strip()]
    assert all(words)
    wanted = params(temperature=0.0, ignore_eos=True, bad_words=words)
    (blocked,) = generate(llm, [PROMPT], wanted)
    reference_params = params(temperature=0.0, ignore_eos=True)
    reference_params.bad_words_token_ids = [
        ids for word in words for ids in {tuple(text_ids(word)), tuple(text_ids(" " + word))} if ids
    ]  # type: ignore[assignment]
    assert blocked.outputs[0].token_ids == expected_tokens(tiny.model, PROMPT, reference_params)
    assert blocked.outputs[0].token_ids != made


# --- ends -----------------------------------------------------------------------------------------


def _with_generation_config(tiny: Tiny, tmp_path: Path, **values: Any) -> Path:
    folder = Path(shutil.copytree(tiny.folder, tmp_path / "model"))
    write_json(folder / "generation_config.json", values)
    return folder


def test_end_of_sequence(tiny: Tiny, tmp_path: Path) -> None:
    """The model's own end token ends a request, leaves no text, and is no stop reason; but it can
    be ignored, forbidden for a while, or asked for by id."""
    greedy = {"temperature": 0.0}
    with tiny_llm(tiny.folder) as llm:
        (free,) = generate(llm, [PROMPT], params(**greedy, ignore_eos=True))
    made = free.outputs[0].token_ids
    eos = made[5]
    first = made.index(eos)
    with tiny_llm(_with_generation_config(tiny, tmp_path, eos_token_id=[eos, END_ID])) as llm:
        wanted = [
            params(**greedy),
            params(**greedy, ignore_eos=True),
            params(**greedy, min_tokens=9),
            params(**greedy, ignore_eos=True, stop_token_ids=[eos]),
            params(**greedy, stop_token_ids=[made[1]]),
        ]
        outputs = [output.outputs[0] for output in generate(llm, [PROMPT] * 5, wanted)]
        assert outputs[0].token_ids == made[: first + 1]
        assert (outputs[0].finish_reason, outputs[0].stop_reason) == ("stop", None)
        assert outputs[1].token_ids == made
        assert outputs[2].token_ids == expected_tokens(tiny.model, PROMPT, wanted[2], eos=eos)
        assert eos not in outputs[2].token_ids[:9]
        assert outputs[3].token_ids == made[: first + 1] and outputs[3].stop_reason == eos
        second = made.index(made[1])
        assert outputs[4].token_ids == made[: second + 1]
        assert (outputs[4].finish_reason, outputs[4].stop_reason) == ("stop", made[1])


def test_special_tokens_show_only_on_request(llm: LLM) -> None:
    forced = {"logit_bias": {END_ID: 100.0}, "temperature": 0.0}
    for skip, text in ((True, ""), (False, "<|end|>")):
        (output,) = generate(llm, [PROMPT], params(**forced, skip_special_tokens=skip))
        assert output.outputs[0].token_ids == [END_ID] and output.outputs[0].text == text


def test_the_context_ends_a_request(llm: LLM) -> None:
    """max_tokens beyond the context, or None, ends with "length" at max_model_len tokens."""
    long = random_tokens(MAX_LEN - 6)
    for max_tokens in (1000, None, 6):
        (output,) = generate(llm, [long], params(max_tokens=max_tokens, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 6
        assert output.outputs[0].finish_reason == "length"
    (last,) = generate(llm, [random_tokens(MAX_LEN - 1)], params(ignore_eos=True))
    assert len(last.outputs[0].token_ids) == 1


EXTREMES: list[dict[str, Any]] = [
    {"seed": 2**70},
    {"seed": -5},
    {"max_tokens": 2**70},
    {"top_k": 2**40},
    {"top_p": 1e-300},
    {"min_p": 1e-300},
    {"min_p": 1.0},
    {"repetition_penalty": 1e-30},
    {"allowed_token_ids": [END_ID], "min_tokens": 3},
    {"allowed_token_ids": [END_ID], "min_tokens": 3, "top_p": 0.5},
    {"allowed_token_ids": [END_ID], "min_tokens": 3, "temperature": 0.0},
    {"stop_token_ids": list(range(VOCAB)), "min_tokens": 3},
    {"stop": ["a" * 100_000, "\ud800"]},
    {"logit_bias": dict.fromkeys(range(VOCAB), -100)},
    {"stream_interval": 2**70},
    {"prompt_logprobs": 1, "prompt_logprob_start": 2**70},
    {"n": 300, "max_tokens": 2},
]


def test_extreme_values_harm_no_other_request(llm: LLM, expected: dict[str, list[int]]) -> None:
    """Each request ends, and the ones beside it get their tokens."""
    wanted = [params(**values) for values in EXTREMES]
    neighbour = params(temperature=0.0)
    outputs = generate(llm, [PROMPT] * (2 * len(wanted)), [*wanted, *[neighbour] * len(wanted)])
    for values, output in zip(EXTREMES, outputs, strict=False):
        assert output.finished and output.outputs[0].token_ids, values
    for output in outputs[len(wanted) :]:
        assert output.outputs[0].token_ids == expected["greedy"]


# --- defaults and priorities ----------------------------------------------------------------------


def test_defaults_come_from_generation_config(tiny: Tiny, tmp_path: Path) -> None:
    values = {"temperature": 0.5, "top_p": 0.7, "top_k": 9, "max_new_tokens": 7}
    values |= {"repetition_penalty": 1.2, "do_sample": True, "transformers_version": "5"}
    folder = _with_generation_config(tiny, tmp_path, **values)
    with tiny_llm(folder) as llm:
        found = llm.get_default_sampling_params()
        wanted = SamplingParams(
            temperature=0.5, top_p=0.7, top_k=9, max_tokens=7, repetition_penalty=1.2
        )
        assert found == wanted
        found.top_p = 0.1
        assert llm.get_default_sampling_params() == wanted, "a copy each time"
        (output,) = llm.generate([PROMPT], use_tqdm=False)
        assert len(output.outputs[0].token_ids) <= 7
        (given,) = generate(llm, [PROMPT], SamplingParams(max_tokens=9, ignore_eos=True))
        assert len(given.outputs[0].token_ids) == 9, "parameters given are not mixed with them"
    with tiny_llm(folder, generation_config="vllm") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    with tiny_llm(tiny.folder, generation_config=str(folder)) as llm:
        assert llm.get_default_sampling_params() == wanted


def test_priorities(tiny: Tiny) -> None:
    """Lower values first, then the order of the prompts; outputs keep the order of the prompts."""
    priorities = [3, 0, -2, 0, 7]
    with tiny_llm(tiny.folder, scheduling_policy="priority", max_num_seqs=1) as llm:
        prompts = [random_tokens(5, seed=i) for i in range(5)]
        outputs = llm.generate(prompts, params(), priority=priorities, use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == prompts
        starts = [output.metrics.first_scheduled_time for output in outputs if output.metrics]
        order = sorted(range(5), key=lambda i: starts[i])
        assert order == [2, 1, 3, 0, 4]
