"""Steps that find no memory: smaller ones are tried, and at worst one request ends, not the engine.

The toy executor checks every token; around it, memory is a number of tokens per step. The last test
takes memory away from a real engine, by the operating system's limit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire import AsyncLLM, BeamSearchParams, OverloadedError, SamplingParams
from quire.engine.executors.base import Executor, PendingResult
from quire.engine.memory_pressure import MAX_PAUSES, STEPS_BEFORE_GROWTH
from quire.protocol.errors import StepMemoryError
from quire.protocol.plan import StepPlan, TokenMasks
from tests.engine.driver import Engine, numbers
from tests.models.reference import random_model, random_tokens, save_safetensors
from tests.tiny import assert_at_rest, save_tiny, tiny_llm

CURSED = 96
"""A prompt that starts with this token needs more memory than there ever is."""


class ShortExecutor:
    """An executor whose memory holds steps of at most `room` tokens."""

    failure: str | None = None
    look_s: float | None = None

    def __init__(self, executor: Executor, room: int) -> None:
        self.executor, self.room = executor, room
        self.num_blocks = executor.num_blocks
        self.num_failed = 0
        self.is_exhausted = False
        self._cursed: set[int] = set()

    def execute(self, plan: StepPlan) -> None:
        self._cursed -= set(plan.freed_rows.tolist())
        self._cursed |= {one.row for one in plan.added_rows if one.token_ids[0] == CURSED}
        if plan.num_tokens > self.room or self._cursed & set(plan.rows.tolist()):
            self.num_failed += 1
            raise StepMemoryError("tried to allocate the moon", is_exhausted=self.is_exhausted)
        self.executor.execute(plan)

    def sample(self, step: int, masks: TokenMasks | None = None) -> PendingResult:
        return self.executor.sample(step, masks)

    def shutdown(self, failure: str = "") -> None:
        self.executor.shutdown()


def short_engine(room: int, **options: Any) -> tuple[Engine, ShortExecutor, list[float]]:
    engine = Engine(**options)
    short = ShortExecutor(engine.toy, room)
    engine.core.executor = short
    pauses: list[float] = []
    engine.core.pressure._sleep = pauses.append
    return engine, short, pauses


@pytest.mark.parametrize(("steps_in_flight", "num_stages"), [(1, 1), (2, 1), (3, 3)])
@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "whole"])
@pytest.mark.parametrize("room", [1, 7, 40])
def test_steps_shrink_until_they_fit(
    room: int, chunked: bool, steps_in_flight: int, num_stages: int
) -> None:
    """Every request gets the tokens it would have got, also where prompts should stay whole."""
    engine, short, pauses = short_engine(
        room,
        steps_in_flight=steps_in_flight,
        enable_chunked_prefill=chunked,
        num_stages=num_stages,
    )
    keys = [engine.add(numbers(60, start=i), max_tokens=5) for i in range(4)]
    keys.append(engine.add(numbers(30, start=9), max_tokens=6, n=3))
    engine.finish()
    assert {ended.finish_reason for ended in engine.ended.values()} == {"length"}
    assert short.num_failed and not pauses
    assert engine.core.death is None


def test_beams_go_on_in_small_steps() -> None:
    found = []
    for room in (1000, 3):
        engine, short, _ = short_engine(room)
        key = engine.add(numbers(12, start=3), max_tokens=8, beam_width=3)
        while engine.core.has_work:
            engine.step()
        found.append([beam.token_ids for beam in engine.ended[key].beams or ()])
        assert bool(short.num_failed) == (room == 3)
    assert found[0] == found[1] and len(found[0]) == 3


def test_step_size_grows_back() -> None:
    engine, short, _ = short_engine(10)
    limit = engine.limits.max_num_batched_tokens
    engine.add(numbers(60), max_tokens=60)
    engine.step(5)
    assert engine.core.scheduler.max_step_tokens <= 10
    short.room = 10_000
    for i in range(12):
        engine.add(numbers(50, start=i), max_tokens=2 * STEPS_BEFORE_GROWTH)
        engine.finish()
    assert engine.core.scheduler.max_step_tokens == limit


def test_one_step_at_a_time_while_memory_is_short() -> None:
    """The failure of a step would cost the tokens of those before it."""
    engine, short, _ = short_engine(10, steps_in_flight=4)
    engine.add(numbers(40), max_tokens=8)
    while engine.core.has_work:
        engine.step()
        assert short.num_failed and not engine.core.scheduler.num_steps_in_flight


def test_failed_growth_is_tried_less_and_less() -> None:
    """Else a long prompt that starts over after each failure would never get through."""
    engine, short, _ = short_engine(
        3, num_blocks=600, max_model_len=500, max_num_seqs=1, enable_prefix_caching=False
    )
    engine.add(numbers(400), max_tokens=20)
    engine.finish()
    (ended,) = engine.ended.values()
    assert ended.finish_reason == "length"
    # The first ones to get down to steps that fit, then one each time the wait has doubled.
    assert 4 <= short.num_failed < 15


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_request_too_large_for_any_step_ends_alone(steps_in_flight: int) -> None:
    engine, _, pauses = short_engine(50, steps_in_flight=steps_in_flight)
    others = [engine.add(numbers(20, start=i), max_tokens=8) for i in range(3)]
    cursed = engine.add([CURSED, *numbers(20)], n=2)
    others.append(engine.add(numbers(25, start=7), max_tokens=8))
    engine.finish()
    assert [engine.ended[key].finish_reason for key in others] == ["length"] * 4
    for key in (cursed, cursed + 1):
        assert engine.ended[key].finish_reason == "error"
        assert engine.ended[key].error == "out of memory: tried to allocate the moon"
    assert len(pauses) == MAX_PAUSES and pauses == sorted(pauses)
    assert engine.core.death is None


def test_no_memory_at_all_ends_requests_one_by_one() -> None:
    """The pauses are made once, not for each request; what comes later is served."""
    engine, short, pauses = short_engine(0)
    for i in range(5):
        engine.add(numbers(20, start=i))
    engine.add(numbers(9), beam_width=2)
    engine.finish()
    assert [ended.finish_reason for ended in engine.ended.values()] == ["error"] * 6
    assert len(pauses) == MAX_PAUSES
    short.room = 1000
    key = engine.add(numbers(20))
    engine.finish()
    assert engine.ended[key].finish_reason == "length"


def test_an_exhausted_device_is_given_time() -> None:
    """Smaller steps would not help: the same step is tried again until there is memory."""
    engine, short, pauses = short_engine(0)
    short.is_exhausted = True

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            short.room = 1000

    engine.core.pressure._sleep = pause
    for i in range(5):
        engine.add(numbers(20, start=i))
    engine.finish()
    assert {ended.finish_reason for ended in engine.ended.values()} == {"length"}
    assert len(pauses) == 3 and not engine.core.pressure.is_on


def test_a_prompt_that_gets_through_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps succeed, again and again, but the one that samples never does."""
    engine, short, pauses = short_engine(
        1000, max_num_batched_tokens=8, enable_prefix_caching=False
    )
    short.is_exhausted = True
    execute = short.execute

    def without_samples(plan: StepPlan) -> None:
        short.room = 0 if plan.samples.any() else 1000
        execute(plan)

    monkeypatch.setattr(short, "execute", without_samples)
    key = engine.add(numbers(20))
    engine.finish()
    assert engine.ended[key].finish_reason == "error" and len(pauses) == MAX_PAUSES


async def test_callers_learn_of_their_own_failure(tmp_path: Path) -> None:
    """A batch keeps the other outputs; streams raise; the engine serves what comes after."""
    save_tiny(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    good, bad = [3, 4, 5], [CURSED, 4, 5]
    with tiny_llm(tmp_path) as llm:
        llm._core.executor = ShortExecutor(llm._core.executor, 1000)
        llm._core.pressure._sleep = lambda _: None
        first, failed, last = llm.generate([good, bad, good], params, use_tqdm=False)
        assert failed.outputs[0].finish_reason == "error"
        assert failed.outputs[0].stop_reason == "out of memory: tried to allocate the moon"
        assert first.outputs[0].finish_reason == last.outputs[0].finish_reason == "length"
        assert first.outputs[0].token_ids == last.outputs[0].token_ids
        with pytest.raises(OverloadedError, match="out of memory"):
            list(llm.stream(bad, params))
        with pytest.raises(OverloadedError, match="out of memory"):
            llm.beam_search([{"prompt_token_ids": bad}], BeamSearchParams(2, max_tokens=3))
        assert_at_rest(llm)
    engine = AsyncLLM(str(tmp_path), num_threads=1, kv_cache_memory_bytes="16MiB")
    core = engine.client.core
    core.executor, core.pressure._sleep = ShortExecutor(core.executor, 1000), lambda _: None
    with pytest.raises(OverloadedError, match="out of memory"):
        async for _ in engine.generate(bad, params):
            pass
    await engine.check_health()
    outputs = [output async for output in engine.generate(good, params)]
    assert outputs[-1].outputs[0].finish_reason == "length"
    engine.shutdown()


# --- for real -------------------------------------------------------------------------------------

PROGRAM = """
import json, resource, sys, torch
from quire import LLM, SamplingParams
from quire.protocol.errors import StepMemoryError

folder, spare = sys.argv[1], int(sys.argv[2])
prompts = json.loads(sys.argv[3])
greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
llm = LLM(folder, skip_tokenizer_init=True, num_threads=1, kv_cache_memory_bytes="16MiB")
core = llm._core

def generate():
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], greedy, use_tqdm=False)
    return [[o.outputs[0].finish_reason, list(o.outputs[0].token_ids)] for o in outputs]

def data_bytes():
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith("VmData:")]
    return int(line.split()[1]) * 1024

def limit(count):
    resource.setrlimit(resource.RLIMIT_DATA, (count, resource.RLIM_INFINITY))

execute, failures, pauses = core.executor.execute, [], []

def execute_in_little_memory(plan):
    limit(data_bytes() + spare)
    try:
        execute(plan)
    except StepMemoryError as error:
        failures.append(str(error))
        raise
    finally:
        limit(resource.RLIM_INFINITY)

core.pressure._sleep = pauses.append
undisturbed = generate()
llm.reset_prefix_cache()
core.executor.execute = execute_in_little_memory
short = generate()
core.executor.execute = execute
llm.reset_prefix_cache()
after = generate()
print(json.dumps([undisturbed, short, after, failures, len(pauses), core.death]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
@pytest.mark.parametrize("spare_mib", [6, 0])
def test_a_real_engine_survives(spare_mib: int, tmp_path: Path) -> None:
    """With 6 MiB to spare, large steps fail and small ones do not: all tokens are as without the
    limit. With nothing to spare, requests end with an error, and the next ones are served."""
    model = random_model("llama", vocab_size=60_000, hidden_size=32, intermediate_size=64)
    save_safetensors(model, tmp_path)
    prompts = [random_tokens(n, seed=n, vocab=60_000) for n in (90, 40, 70, 55, 8, 33)]
    prompts *= 8 if spare_mib else 2
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(spare_mib << 20)]
    done = subprocess.run(
        [*command, json.dumps(prompts)],
        # Large allocations then always ask the system, and the limit shows.
        env={"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "PYTHONPATH": "."},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(done.stdout.splitlines()[-1])
    undisturbed, short, after, failures, num_pauses, death = report
    assert failures and "memory" in failures[0], done.stderr[-2000:]
    assert death is None
    assert after == undisturbed and all(reason == "length" for reason, _ in undisturbed)
    if spare_mib:
        assert short == undisturbed
        assert num_pauses == 0
    else:
        assert all(reason == "error" for reason, _ in short)
        assert num_pauses == MAX_PAUSES
