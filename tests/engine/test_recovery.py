"""Steps that fail: requests start over and get the tokens they would have got, or all get an error.

The failures are made by an executor around the real one; everything else is the real engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, AsyncLLM, BeamSearchParams, EngineDeadError, RequestOutput, SamplingParams
from quire.engine.executors.base import Executor, PendingResult
from quire.protocol.plan import StepPlan, StepResult, TokenMasks
from quire.protocol.request import NewRequest
from tests.engine.driver import VOCAB, Engine, numbers
from tests.engine.toy import entries_of, next_token
from tests.models.reference import random_tokens
from tests.tiny import assert_at_rest, save_tiny, tiny_llm

MOMENTS = ("before execute", "after execute", "after sample", "in result")


class _FailedResult:
    def result(self) -> StepResult:
        raise RuntimeError("injected: the device is gone")


class FlakyExecutor:
    """Passes plans on, except that some steps fail at a chosen moment."""

    failure: str | None = None
    look_s: float | None = None

    def __init__(self, executor: Executor, steps: Collection[int], moment: str) -> None:
        self.executor = executor
        self.num_blocks = executor.num_blocks
        self.steps, self.moment = steps, moment
        self.num_failed = 0

    def _fail(self, step: int, moment: str) -> bool:
        fails = self.moment == moment and step in self.steps
        self.num_failed += fails
        return fails

    def execute(self, plan: StepPlan) -> None:
        if self._fail(plan.step, "before execute"):
            raise RuntimeError("injected: before execute")
        self.executor.execute(plan)
        if self._fail(plan.step, "after execute"):
            raise RuntimeError("injected: after execute")

    def sample(self, step: int, masks: TokenMasks | None = None) -> PendingResult:
        pending = self.executor.sample(step, masks)
        if self._fail(step, "after sample"):
            raise RuntimeError("injected: after sample")
        return _FailedResult() if self._fail(step, "in result") else pending

    def shutdown(self, failure: str = "") -> None:
        self.executor.shutdown()


class Always:
    """All steps from a first one on."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __contains__(self, step: object) -> bool:
        return isinstance(step, int) and step >= self.first

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Any:
        return iter(())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path)
    return path


PROMPTS = [random_tokens(n, seed=n) for n in (5, 33, 20, 60)]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20, logprobs=2, ignore_eos=True),
    SamplingParams(seed=1, max_tokens=20, n=3, top_p=0.9, presence_penalty=0.5, ignore_eos=True),
    SamplingParams(seed=2, max_tokens=20, repetition_penalty=1.3, bad_words=["e"]),
    SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=1, min_tokens=4),
]


def generate(llm: LLM) -> list[RequestOutput]:
    return llm.generate(PROMPTS, PARAMS, use_tqdm=False)


def essence(outputs: list[RequestOutput]) -> list[Any]:
    """Everything that must not depend on what went wrong meanwhile."""
    found = []
    for output in outputs:
        scores = [
            {token: round(entry.logprob, 3) for token, entry in entries.items()}
            for entries in (output.prompt_logprobs or [])
            if entries
        ]
        for completion in output.outputs:
            scores += [
                {token: round(entry.logprob, 3) for token, entry in entries.items()}
                for entries in (completion.logprobs or [])
            ]
            found.append((completion.token_ids, completion.text, completion.finish_reason, scores))
    return found


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[Any]:
    with tiny_llm(folder) as llm:
        return essence(generate(llm))


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("moment", MOMENTS)
def test_failed_steps_do_not_show(
    moment: str, steps_in_flight: int, folder: Path, undisturbed: list[Any]
) -> None:
    """In prefill, in decode, twice in a row, in a row's last step: the same outputs."""
    with tiny_llm(
        folder, max_num_batched_tokens=40, max_steps_in_flight=steps_in_flight, block_size=4
    ) as llm:
        flaky = FlakyExecutor(llm._core.executor, {0, 3, 4, 9, 10, 17, 25, 26}, moment)
        llm._core.executor = flaky
        assert essence(generate(llm)) == undisturbed
        assert flaky.num_failed >= 6
        assert_at_rest(llm)
        # What was published by steps that failed is not served from the cache.
        assert essence(generate(llm)) == undisturbed


def test_beams_survive_failed_steps(folder: Path) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=12)
    with tiny_llm(folder) as llm:
        expected = [b.tokens for o in llm.beam_search(PROMPTS, params) for b in o.sequences]
        llm.reset_prefix_cache()
        first = llm.statistics().num_steps
        llm._core.executor = FlakyExecutor(
            llm._core.executor, {first + i for i in (0, 1, 5, 8, 9)}, "in result"
        )
        assert [b.tokens for o in llm.beam_search(PROMPTS, params) for b in o.sequences] == expected


def test_three_failures_in_a_row_end_the_engine(folder: Path) -> None:
    """`generate` raises and says why, and so does everything after it; nothing is left running."""
    llm = tiny_llm(folder)
    llm._core.executor = FlakyExecutor(llm._core.executor, Always(5), "in result")
    with pytest.raises(EngineDeadError, match=r"3 steps in a row failed.*the device is gone"):
        generate(llm)
    assert_at_rest(llm)
    for call in (
        lambda: llm.generate("again", use_tqdm=False),
        lambda: next(llm.stream("again")),
        lambda: llm.enqueue("again"),
        lambda: llm.beam_search("again", BeamSearchParams(beam_width=2, max_tokens=3)),
    ):
        with pytest.raises(EngineDeadError, match="the engine has stopped: 3 steps"):
            call()
    llm.shutdown()


def test_every_request_gets_its_terminal_error() -> None:
    """Running, waiting, forked and beam requests alike, each exactly once."""
    engine = Engine(max_num_seqs=4)
    engine.toy.failing_steps = Always(3)  # type: ignore[assignment]
    for i in range(3):
        engine.add(numbers(9, start=i), max_tokens=30)
    engine.add(numbers(30), n=3)
    engine.add(numbers(12), beam_width=2, max_tokens=9)
    engine.finish()
    assert len(engine.ended) == 3 + 3 + 1
    assert {s.finish_reason for s in engine.ended.values()} == {"error"}
    assert all("3 steps in a row" in (s.error or "") for s in engine.ended.values())
    assert engine.core.death is not None
    with pytest.raises(EngineDeadError):
        engine.add([1])


def test_what_a_lost_step_was_to_write_is_not_served() -> None:
    """A request stops while its next step is in flight. That step fails, so the last token's KV is
    nowhere, although the block that was to hold it had been offered to others."""
    engine = Engine(steps_in_flight=2)
    tokens = numbers(8)
    while len(tokens) < 11:
        tokens.append(next_token(entries_of(tokens), 0, VOCAB))
    params = SamplingParams(seed=0, max_tokens=20, stop_token_ids=[tokens[-1]], ignore_eos=True)
    prompt = np.array(tokens[:8], np.int32)
    engine.core.add(NewRequest(1, "stops", prompt, params, arrival_time=0.0))
    engine.toy.failing_steps = frozenset({3})
    while engine.core.has_work:
        engine.core.step()
    assert len(engine.plans) == 4, "the step after the stop was planned, and failed"
    key = engine.add([*tokens, 1, 2, 3])
    engine.finish()
    assert engine.cached(key) == 8


def test_failures_apart_from_each_other_do_not_add_up() -> None:
    engine = Engine()
    engine.toy.failing_steps = frozenset(range(1, 60, 3)) | frozenset(range(2, 60, 3))
    engine.add(numbers(9), max_tokens=10)
    engine.finish()
    assert engine.core.death is None
    assert [s.finish_reason for s in engine.ended.values()] == ["length"]


def test_an_interrupt_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reaches the caller, as often as it comes, and the requests go on."""
    engine = Engine(steps_in_flight=2)
    key = engine.add(numbers(9), max_tokens=10)
    engine.step(3)

    def interrupted(plan: StepPlan) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine.toy, "execute", interrupted)
        for _ in range(4):
            with pytest.raises(KeyboardInterrupt):
                engine.core.step()
    engine.finish()
    assert engine.core.death is None
    assert engine.ended[key].finish_reason == "length"


def test_an_open_stream_ends_with_the_engine(folder: Path) -> None:
    llm = tiny_llm(folder)
    llm._core.executor = FlakyExecutor(llm._core.executor, Always(4), "before execute")
    tokens = 0
    with pytest.raises(EngineDeadError):
        for output in llm.stream(PROMPTS[0], SamplingParams(max_tokens=50, ignore_eos=True)):
            tokens = len(output.outputs[0].token_ids)
    assert tokens == 4


async def test_async_callers_are_told(folder: Path) -> None:
    """All open iterators raise; later requests are refused; no reader waits for ever."""
    llm = AsyncLLM(str(folder), num_threads=1, kv_cache_memory_bytes="16MiB")
    core = llm.client.core
    core.executor = FlakyExecutor(core.executor, Always(6), "after sample")

    async def consume(prompt: list[int]) -> None:
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        async for _ in llm.generate(prompt, params):
            pass

    results = await asyncio.gather(*map(consume, PROMPTS), return_exceptions=True)
    assert [type(result) for result in results] == [EngineDeadError] * len(PROMPTS)
    with pytest.raises(EngineDeadError):
        await consume(PROMPTS[0])
    with pytest.raises(EngineDeadError):
        await llm.check_health()
    llm.shutdown()
