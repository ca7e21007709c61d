"""Beam search against a plain one over transformers' logits, with vLLM's rules.

Each step takes the `2 * width` likeliest continuations of every live hypothesis; those that end
with the end token are set aside, the best `width` of the others live on. In the end all compete by
cumulative log-probability over length, the end token not counted.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from quire import LLM, BeamSearchParams, QuireError, SamplingParams
from quire.frontend.outputs import BeamSearchSequence
from tests.frontend.conftest import Tiny
from tests.models.reference import random_tokens
from tests.text.tokenizer_samples import write_json
from tests.tiny import END_ID, MAX_LEN, ascii_tokenizer, assert_at_rest, logprobs, tiny_llm

PROMPTS = [random_tokens(n, seed=n) for n in (4, 21, 50)]


@dataclass
class Hypothesis:
    tokens: list[int]
    logprob: float
    ended: bool = False

    def score(self, penalty: float) -> float:
        return self.logprob / (len(self.tokens) - self.ended) ** penalty


def reference_beams(
    model: PreTrainedModel,
    prompt: list[int],
    width: int,
    max_tokens: int,
    *,
    eos: tuple[int, ...] = (END_ID,),
    penalty: float = 1.0,
) -> list[Hypothesis]:
    live, ended = [Hypothesis(prompt, 0.0)], []
    for _ in range(min(max_tokens, MAX_LEN - len(prompt))):
        found = []
        for beam in live:
            values, ids = logprobs(model, beam.tokens)[-1].topk(2 * width)
            for token, value in zip(ids.tolist(), values.tolist(), strict=True):
                new = Hypothesis([*beam.tokens, token], beam.logprob + value, token in eos)
                (ended if new.ended else found).append(new)
        live = sorted(found, key=lambda beam: -beam.logprob)[:width]
    return sorted(ended + live, key=lambda beam: -beam.score(penalty))[:width]


def assert_equal(found: list[BeamSearchSequence], expected: list[Hypothesis]) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.cum_logprob == pytest.approx(theirs.logprob, abs=1e-3)
        assert ours.tokens == theirs.tokens
        assert ours.finish_reason == ("stop" if theirs.ended else "length")
        assert ours.text == ascii_tokenizer().decode(theirs.tokens, skip_special_tokens=False)


def search(llm: LLM, prompts: Any, width: int, max_tokens: int, **more: Any) -> list[Any]:
    more = {"include_stop_str_in_output": True, **more}
    params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, **more)
    return [output.sequences for output in llm.beam_search(prompts, params)]


@pytest.fixture(scope="module")
def with_eos(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[int, ...]]:
    """The same model with so many end tokens that many hypotheses end."""
    folder = Path(shutil.copytree(tiny.folder, tmp_path_factory.mktemp("eos") / "model"))
    eos = tuple(range(0, 160, 9))
    write_json(folder / "generation_config.json", {"eos_token_id": list(eos)})
    return folder, eos


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_hypotheses_are_those_of_the_reference(llm: LLM, tiny: Tiny, width: int) -> None:
    found = search(llm, PROMPTS, width, 10)
    for prompt, sequences in zip(PROMPTS, found, strict=True):
        assert_equal(sequences, reference_beams(tiny.model, prompt, width, 10))
    assert_at_rest(llm)


def test_a_single_beam_is_greedy(llm: LLM) -> None:
    ((beam,),) = search(llm, [PROMPTS[0]], 1, 12, ignore_eos=True)
    wanted = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate([PROMPTS[0]], wanted, use_tqdm=False)
    assert beam.tokens == PROMPTS[0] + output.outputs[0].token_ids


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 4, "num_gpu_blocks_override": 60},
        {"block_size": 4, "num_gpu_blocks_override": 60, "enable_prefix_caching": False},
        {"block_size": 8, "max_num_seqs": 5, "max_num_batched_tokens": 9},
    ],
    ids=["roomy", "tiny pool", "tiny pool without caching", "few rows and small steps"],
)
@pytest.mark.parametrize("width", [2, 4])
def test_ends_and_little_room(
    with_eos: tuple[Path, tuple[int, ...]], tiny: Tiny, options: dict[str, Any], width: int
) -> None:
    """Hypotheses end early while others go on; the pool holds little more than one group."""
    folder, eos = with_eos
    expected = [reference_beams(tiny.model, p, width, 9, eos=eos) for p in PROMPTS]
    assert any(beam.ended for beams in expected for beam in beams)
    with tiny_llm(folder, max_model_len=MAX_LEN, **options) as llm:
        plain = SamplingParams(temperature=0.0, max_tokens=30)
        before = llm.generate(PROMPTS, plain, use_tqdm=False)
        llm.enqueue(PROMPTS, plain)  # company that also wants blocks
        for sequences, beams in zip(search(llm, PROMPTS, width, 9), expected, strict=True):
            assert_equal(sequences, beams)
        after = llm.wait_for_completion(use_tqdm=False)
        assert [o.outputs[0].token_ids for o in after] == [o.outputs[0].token_ids for o in before]
        assert_at_rest(llm)
        llm.reset_prefix_cache()
        for sequences, beams in zip(search(llm, PROMPTS, width, 9), expected, strict=True):
            assert_equal(sequences, beams)
        assert_at_rest(llm)


@pytest.mark.parametrize("penalty", [0.0, 0.6, 2.5])
def test_length_penalty(with_eos: tuple[Path, tuple[int, ...]], tiny: Tiny, penalty: float) -> None:
    folder, eos = with_eos
    with tiny_llm(folder) as llm:
        for prompt in PROMPTS[:2]:
            (found,) = search(llm, [prompt], 3, 8, length_penalty=penalty)
            assert_equal(found, reference_beams(tiny.model, prompt, 3, 8, eos=eos, penalty=penalty))


def test_end_tokens_can_be_ignored(with_eos: tuple[Path, tuple[int, ...]], tiny: Tiny) -> None:
    with tiny_llm(with_eos[0]) as llm:
        (found,) = search(llm, [PROMPTS[1]], 3, 8, ignore_eos=True)
        assert_equal(found, reference_beams(tiny.model, PROMPTS[1], 3, 8, eos=()))


def test_temperature_has_no_effect(llm: LLM) -> None:
    cold, warm = (search(llm, PROMPTS, 3, 6, temperature=t) for t in (0.0, 1.7))
    assert [[one.tokens for one in found] for found in cold] == [
        [one.tokens for one in found] for found in warm
    ]
    scores = [[one.cum_logprob for found in beams for one in found] for beams in (cold, warm)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)


def test_the_context_ends_all_hypotheses(llm: LLM, tiny: Tiny) -> None:
    prompt = random_tokens(MAX_LEN - 3)
    (found,) = search(llm, [prompt], 2, 50)
    assert_equal(found, reference_beams(tiny.model, prompt, 2, 50))


def test_more_candidates_than_tokens(llm: LLM) -> None:
    """Width 100 asks for 200 of 160 continuations."""
    (found,) = search(llm, [PROMPTS[0]], 100, 2)
    assert len(found) == 100 and len({tuple(beam.tokens) for beam in found}) == 100


@pytest.mark.parametrize("limit", [1, 2, None])
def test_concurrency_limit_changes_nothing(llm: LLM, limit: int | None) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=6)
    expected = [sequences[0].tokens for sequences in search(llm, PROMPTS, 2, 6)]
    outputs = llm.beam_search(PROMPTS, params, concurrency_limit=limit)
    assert [output.sequences[0].tokens for output in outputs] == expected


def test_hypotheses_share_blocks(tiny: Tiny) -> None:
    """Four hypotheses of a 100-token prompt hold its 25 full blocks once."""
    with tiny_llm(tiny.folder, block_size=4, enable_prefix_caching=False) as llm:
        search(llm, [random_tokens(100)], 4, 8)
        # Each may also hold the blocks of its own 8 tokens, and losers leave only with the winner.
        assert llm.statistics().peak_blocks <= 25 + 8 * 3
        assert_at_rest(llm)


def test_an_interrupted_search_leaves_nothing_behind(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = iter(range(4))
    step = llm._core.step

    def interrupted() -> Any:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm._core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        search(llm, PROMPTS, 3, 20)
    monkeypatch.undo()
    llm.generate([PROMPTS[0]], SamplingParams(max_tokens=1), use_tqdm=False)
    assert_at_rest(llm)


def test_stop_strings_of_others_are_heeded_meanwhile(llm: LLM) -> None:
    """A stream that is open during a beam search still stops where it should."""
    free = llm.generate("A block", SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    text = free[0].outputs[0].text
    stop = text[4:6]
    wanted = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop=stop)
    stream = llm.stream("A block", wanted)
    next(stream)
    search(llm, PROMPTS, 2, 12)
    last = list(stream)[-1].outputs[0]
    assert last.text == text[: text.find(stop)] and last.finish_reason == "stop"
    assert len(last.token_ids) < 30


def test_no_prompts(llm: LLM) -> None:
    assert search(llm, [], 2, 3) == []
    with pytest.raises(QuireError, match=r"prompts\[0\]: prompt is empty"):
        search(llm, [""], 2, 3)


def test_end_token_is_left_out_unless_wanted(
    with_eos: tuple[Path, tuple[int, ...]], tiny: Tiny
) -> None:
    """By default neither tokens nor text show the end-of-sequence token; scores do not change."""
    with tiny_llm(with_eos[0]) as llm:
        (whole,) = search(llm, [PROMPTS[1]], 3, 8)
        (cut,) = search(llm, [PROMPTS[1]], 3, 8, include_stop_str_in_output=False)
    assert any(beam.finish_reason == "stop" for beam in whole)
    for ours, theirs in zip(cut, whole, strict=True):
        ended = theirs.finish_reason == "stop"
        assert ours.tokens == (theirs.tokens[:-1] if ended else theirs.tokens)
        assert ours.cum_logprob == pytest.approx(theirs.cum_logprob, abs=1e-5)
