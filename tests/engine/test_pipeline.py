"""Plans of a pipeline on a real worker: whatever a request asks for, it gets what it gets without.

The worker is one rank with all layers, so that only what the host does differs. Penalties are left
out: they count tokens as a stage of several does, or as a single one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams, StructuredOutputs
from quire.engine import startup
from quire.engine.structured_output import grammars
from quire.engine.structured_output.matcher import Batch
from quire.protocol.sampling import BeamSearchParams
from quire.scheduler.sequence import SchedulerLimits
from tests.frontend.grammars import TIGHT
from tests.tiny import assert_at_rest, save_tiny, tiny_llm

PROMPTS = ["of the", "def main(argument):", "return", "of the people and", "import", "a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tiny")
    save_tiny(folder)
    return folder


CASES: dict[str, dict[str, Any]] = {
    "several": {"n": 3},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
    "min_tokens": {"min_tokens": 12, "stop_token_ids": [5, 6, 7, 8]},
    "stop": {"stop": ["e", "th", "1"]},
    "grammar": {"structured_outputs": StructuredOutputs(regex="([a-f][0-9]){4,12}")},
    "jumps": {"structured_outputs": TIGHT, "max_tokens": 100},
}


def answers(llm: LLM, params: list[SamplingParams]) -> list[Any]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [
        (one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs)
        for output in outputs
        for one in output.outputs
    ] + [output.prompt_logprobs for output in outputs]


def pipeline(monkeypatch: pytest.MonkeyPatch, folder: Path, **options: Any) -> LLM:
    """An engine that plans for three stages."""
    plain = startup._scheduler_limits

    def limits(*given: Any) -> SchedulerLimits:
        return replace(plain(*given), num_stages=3)

    with monkeypatch.context() as patched:
        patched.setattr(startup, "_scheduler_limits", limits)
        return tiny_llm(folder, max_steps_in_flight=3, **options)


def test_answers_are_those_of_one_stage(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """In chunks, with short blocks, so that requests are preempted."""
    short = {"num_gpu_blocks_override": 40, "block_size": 4, "max_num_batched_tokens": 16}
    with (
        tiny_llm(folder) as llm,
        pipeline(monkeypatch, folder, max_model_len=128, **short) as piped,
    ):
        for case, given in CASES.items():
            values = {"max_tokens": 16, "ignore_eos": True, **given}
            params = [SamplingParams(seed=i, **values) for i in range(len(PROMPTS))]
            assert answers(piped, params) == answers(llm, params), case
        beams = BeamSearchParams(beam_width=3, max_tokens=9)
        assert piped.beam_search(PROMPTS, beams) == llm.beam_search(PROMPTS, beams)
        vectors = [[one.outputs.embedding for one in x.embed(PROMPTS)] for x in (piped, llm)]
        assert vectors[0] == vectors[1]
        assert piped._core.metrics.preemptions.value > 0
        assert_at_rest(piped)


def test_what_masks_need_is_gathered_once_for_rows_that_take_turns(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    batches: list[Batch] = []

    def gather(*given: Any) -> Batch:
        batches.append(Batch(*given))
        return batches[-1]

    monkeypatch.setattr(grammars, "Batch", gather)
    params = SamplingParams(
        max_tokens=40, seed=1, structured_outputs=StructuredOutputs(regex="[a-f]{150}")
    )
    with pipeline(monkeypatch, folder) as piped:
        piped.generate(PROMPTS, params, use_tqdm=False)
        assert piped._core.scheduler._next_step >= 3 * 39
    assert len(batches) < 12
