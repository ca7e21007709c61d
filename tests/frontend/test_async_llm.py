"""`AsyncLLM`: many callers of one event loop, some of whom leave early, misbehave or come late."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest

from quire import (
    LLM,
    AsyncLLM,
    EngineDeadError,
    PoolingParams,
    QuireError,
    RequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from quire.frontend.inputs import TokenizationOptions, parse_prompts
from tests.frontend.conftest import Tiny
from tests.models.reference import VOCAB, random_tokens

PROMPTS = [random_tokens(3 + i, seed=i) for i in range(24)]


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **values})


LONG = params(max_tokens=150)


@pytest.fixture
async def engine(tiny: Tiny) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM(str(tiny.folder), num_threads=1, kv_cache_memory_bytes="16MiB", block_size=4)
    yield llm
    llm.shutdown()


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    outputs = [output async for output in stream]
    assert outputs, "a stream yields at least once"
    return outputs[-1]


async def settled(llm: AsyncLLM) -> None:
    """Nothing runs or waits, no block is in use, and the integrity check passes."""

    def check(core: Any) -> bool:
        core.scheduler.check_integrity()
        return bool(core.has_work) or core.scheduler.kv.pool.num_used > 0

    for _ in range(1000):
        if not await asyncio.wrap_future(llm.client._call(lambda: check(llm.client.core))):
            break
    else:
        raise AssertionError("the engine does not come to rest")
    assert not llm.num_open


async def steps(llm: AsyncLLM) -> int:
    statistics = asyncio.wrap_future(llm.client._call(llm.client.core.statistics))
    count: int = (await statistics).num_steps
    return count


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params(), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


async def test_many_callers_at_once(engine: AsyncLLM, expected: list[list[int]]) -> None:
    """Each gets what it would get alone, whole and in order."""
    outputs = await asyncio.gather(*(last(engine.generate(p, params())) for p in PROMPTS))
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert all(output.finished for output in outputs)
    await settled(engine)


async def test_output_kinds(engine: AsyncLLM, expected: list[list[int]]) -> None:
    prompt, tokens = PROMPTS[5], expected[5]
    wanted = params(output_kind=RequestOutputKind.DELTA)
    deltas = [output async for output in engine.generate(prompt, wanted)]
    assert [t for output in deltas for t in output.outputs[0].token_ids] == tokens
    assert [output.finished for output in deltas] == [False] * (len(deltas) - 1) + [True]
    seen = [output async for output in engine.generate(prompt, params())]
    for before, after in pairwise(seen):
        count = len(before.outputs[0].token_ids)
        assert after.outputs[0].token_ids[:count] == before.outputs[0].token_ids
        assert after.outputs[0].text.startswith(before.outputs[0].text)
    assert seen[-1].outputs[0].token_ids == tokens
    wanted = params(output_kind=RequestOutputKind.FINAL_ONLY)
    (final,) = [output async for output in engine.generate(prompt, wanted)]
    assert final.finished and final.outputs[0].token_ids == tokens


async def test_a_slow_reader_misses_nothing(engine: AsyncLLM, expected: list[list[int]]) -> None:
    """The request may end while its reader is busy elsewhere; the end is still delivered."""
    tokens, finished = [], False
    stream = engine.generate(PROMPTS[1], params(output_kind=RequestOutputKind.DELTA))
    async for output in stream:
        tokens += output.outputs[0].token_ids
        finished = output.finished
        await last(engine.generate(PROMPTS[2], params(max_tokens=40)))
    assert finished and tokens == expected[1]


async def test_abort_in_mid_run(engine: AsyncLLM, expected: list[list[int]]) -> None:
    """The iterator ends with what there is and finish_reason "abort"; others do not notice."""
    others = [asyncio.ensure_future(last(engine.generate(p, params()))) for p in PROMPTS[:4]]
    output = None
    async for output in engine.generate(PROMPTS[4], LONG, request_id="mine"):
        if len(output.outputs[0].token_ids) >= 3:
            await engine.abort("mine")
    assert output is not None and output.request_id == "mine" and output.finished
    assert output.outputs[0].finish_reason == "abort"
    assert 3 <= len(output.outputs[0].token_ids) < 150
    results = await asyncio.gather(*others)
    assert [result.outputs[0].token_ids for result in results] == expected[:4]
    await engine.abort("mine")
    await engine.abort("never heard of")
    await settled(engine)


async def test_a_reader_that_leaves_frees_its_blocks(engine: AsyncLLM) -> None:
    """By closing the iterator, by an exception in its loop, or by cancelling its task."""
    stream = engine.generate(PROMPTS[0], LONG)
    await anext(stream)
    await stream.aclose()
    await settled(engine)

    with pytest.raises(KeyError):
        async for _ in engine.generate(PROMPTS[0], LONG):
            raise KeyError
    started = asyncio.Event()

    async def read() -> None:
        async for _ in engine.generate(PROMPTS[1], params(max_tokens=150, n=1)):
            started.set()

    tasks = [asyncio.create_task(read()) for _ in range(5)]
    await started.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    # The iterator whose loop raised is closed by the event loop once it is collected.
    gc.collect()
    await asyncio.sleep(0)
    await settled(engine)


async def test_a_bad_request_hurts_no_other(engine: AsyncLLM, expected: list[list[int]]) -> None:
    good = [asyncio.ensure_future(last(engine.generate(p, params()))) for p in PROMPTS[:3]]
    for prompt, wanted, message in (
        ("", params(), "prompt is empty"),
        ([VOCAB], params(), "vocabulary"),
        (["a", "b"], params(), "generate takes one prompt, got 2"),
        ([1] * 500, params(), "max_model_len"),
        ([1], params(allowed_token_ids=[VOCAB]), "allowed_token_ids"),
    ):
        with pytest.raises(RequestError, match=message):
            await last(engine.generate(prompt, wanted))
    with pytest.raises(RequestError, match="priority=1"):
        await last(engine.generate([1], params(), priority=1))
    results = await asyncio.gather(*good)
    assert [result.outputs[0].token_ids for result in results] == expected[:3]
    await settled(engine)


async def test_request_ids_are_unique_while_open(tiny: Tiny) -> None:
    """One that was left can be used again at once, although its last step is still in flight."""
    engine = AsyncLLM(
        str(tiny.folder), num_threads=1, kv_cache_memory_bytes="16MiB", max_steps_in_flight=2
    )
    stream = engine.generate(PROMPTS[0], LONG, request_id="a")
    await anext(stream)
    with pytest.raises(RequestError, match="'a' is already in use"):
        await last(engine.generate(PROMPTS[1], params(), request_id="a"))
    await stream.aclose()
    output = await last(engine.generate(PROMPTS[1], params(), request_id="a"))
    assert output.request_id == "a"
    named = [last(engine.generate(PROMPTS[i], params(), request_id=str(i))) for i in range(6)]
    free = [last(engine.generate(PROMPTS[i], params())) for i in range(6)]
    outputs = await asyncio.gather(*named, *free)
    assert len({output.request_id for output in outputs}) == 12
    await settled(engine)
    engine.shutdown()


async def test_stop_strings_and_several_completions(engine: AsyncLLM, llm: LLM) -> None:
    wanted = params(n=3, temperature=1.0, seed=4, stop="e", max_tokens=40)
    (whole,) = llm.generate([PROMPTS[7]], wanted, use_tqdm=False)
    output = await last(engine.generate(PROMPTS[7], wanted))
    for ours, theirs in zip(output.outputs, whole.outputs, strict=True):
        assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason)
        assert ours.token_ids == theirs.token_ids
    await settled(engine)


async def test_an_idle_engine_takes_no_steps(engine: AsyncLLM) -> None:
    """Its thread sleeps until it is called."""
    await last(engine.generate(PROMPTS[0], params()))
    await settled(engine)
    before = await steps(engine)
    calls = []
    step = engine.client.core.step
    engine.client.core.step = lambda: calls.append(1) or step()  # type: ignore[method-assign]
    for _ in range(20):
        assert await steps(engine) == before
    # One look for work after each call, and none of its own accord.
    assert len(calls) <= 21
    await last(engine.generate(PROMPTS[0], params()))
    assert await steps(engine) > before


async def test_prefixes_metrics_and_health(engine: AsyncLLM) -> None:
    first = await last(engine.generate(PROMPTS[20], params()))
    second = await last(engine.generate(PROMPTS[20], params()))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, len(PROMPTS[20]) - 1)
    assert await engine.reset_prefix_cache()
    third = await last(engine.generate(PROMPTS[20], params()))
    assert third.num_cached_tokens == 0
    names = {metric.name for metric in await engine.get_metrics()}
    assert "quire:generation_tokens" in names
    assert (await engine.get_tokenizer()).encode("a")
    assert engine.get_default_sampling_params() == SamplingParams()
    await engine.check_health()


async def test_shutdown_ends_open_iterators(tiny: Tiny) -> None:
    """No reader waits for ever: open streams raise, and so do later calls."""
    llm = AsyncLLM(str(tiny.folder), num_threads=1, kv_cache_memory_bytes="16MiB")
    tasks = [asyncio.create_task(last(llm.generate(p, LONG))) for p in PROMPTS[:6]]
    stream = llm.generate(PROMPTS[7], LONG)
    await anext(stream)
    llm.shutdown()
    results = await asyncio.gather(*tasks, last(stream), return_exceptions=True)
    assert {type(result) for result in results} <= {EngineDeadError, RequestOutput}
    assert isinstance(results[-1], EngineDeadError)
    with pytest.raises(EngineDeadError, match="shut down"):
        await last(llm.generate(PROMPTS[0], params()))
    with pytest.raises(EngineDeadError, match="shut down"):
        await llm.check_health()
    llm.shutdown()


async def test_a_fault_of_the_engine_itself_reaches_all_callers(tiny: Tiny) -> None:
    """If planning itself breaks, open iterators raise instead of waiting for a dead thread."""
    llm = AsyncLLM(str(tiny.folder), num_threads=1, kv_cache_memory_bytes="16MiB")

    def broken(now: float) -> Any:
        raise ZeroDivisionError("a fault in the scheduler")

    stream = llm.generate(PROMPTS[0], LONG)
    await anext(stream)
    llm.client.core.scheduler.schedule = broken  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError, match="a fault in the scheduler"):
        await last(stream)
    with pytest.raises(QuireError, match="the engine has stopped"):
        await last(llm.generate(PROMPTS[1], params()))
    llm.shutdown()


async def test_a_loop_that_fails_tells_all_callers(
    tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    """If outputs cannot be passed on, readers raise, and the engine is freed; the log says so
    once."""
    llm = AsyncLLM(str(tiny.folder), num_threads=1, kv_cache_memory_bytes="16MiB")

    def broken(output: Any) -> None:
        raise ZeroDivisionError("a fault in the loop")

    stream = llm.generate(PROMPTS[0], LONG)
    await anext(stream)
    llm.client._report = broken  # type: ignore[attr-defined]
    with pytest.raises(EngineDeadError, match="the engine loop failed: a fault in the loop"):
        await last(stream)
    with pytest.raises(EngineDeadError, match="a fault in the loop"):
        await last(llm.generate(PROMPTS[1], params()))
    llm.shutdown()
    core = llm.client.core  # type: ignore[attr-defined]
    assert not core.scheduler.requests and core.executor._worker is None
    (told,) = [one for one in caplog.records if one.levelno >= logging.ERROR]
    assert "a fault in the loop" in told.getMessage() and told.exc_info


async def test_refused_arguments(engine: AsyncLLM) -> None:
    with pytest.raises(RequestError, match="lora_request"):
        await last(engine.generate([1], params(), lora_request="x"))
    with pytest.raises(QuireError, match="Did you mean block_size"):
        AsyncLLM(blok_size=4)


async def test_embeddings_beside_generation(engine: AsyncLLM, llm: LLM) -> None:
    prompts = PROMPTS[4:6]
    wanted = llm.embed(prompts, pooling_params=PoolingParams(pooling="mean"), use_tqdm=False)
    running = asyncio.create_task(last(engine.generate("hello", params(max_tokens=8))))
    mean = PoolingParams(pooling="mean")
    found = await asyncio.gather(*(engine.embed(prompt, mean) for prompt in prompts))
    for one, other in zip(found, wanted, strict=True):
        assert one.prompt_token_ids == other.prompt_token_ids
        assert one.outputs.embedding == pytest.approx(other.outputs.embedding, abs=2e-5)
    assert (await running).finished
    with pytest.raises(RequestError, match="embed takes one prompt, got 2"):
        await engine.embed(prompts)
    with pytest.raises(RequestError, match="dimensions=65 is more"):
        await engine.embed("x", PoolingParams(dimensions=65))
    await settled(engine)


async def test_many_prompts_leave_turns_to_others(engine: AsyncLLM) -> None:
    """However many prompts are handed over at once, the event loop runs in between."""
    prompts = parse_prompts([PROMPTS[0]] * 200)
    engine.session.inputs.tokenize(prompts, TokenizationOptions())
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    opening = asyncio.create_task(engine.open_stream(prompts, params(max_tokens=1)))
    while not engine.num_open:
        await asyncio.sleep(0)
    first = turns
    assert 0 < engine.num_open < len(prompts)
    while engine.num_open < len(prompts):
        await asyncio.sleep(0)
    assert turns > first
    stream = await opening
    while await stream.read():
        pass
    stream.close()
    counting.cancel()
    await settled(engine)


LEAVING = """
import atexit, sys, threading
atexit.register(lambda: print([one.name for one in threading.enumerate()]))  # runs last
import asyncio
from quire import AsyncLLM, SamplingParams

async def begin():
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    stream = llm.generate({"prompt_token_ids": [1, 2, 3]}, params, request_id="long")
    await anext(stream)
    return stream

llm = AsyncLLM(sys.argv[1], num_threads=1, kv_cache_memory_bytes="16MiB")
loop = asyncio.new_event_loop()
stream = loop.run_until_complete(begin())
"""


def test_a_program_that_just_ends(tiny: Tiny) -> None:
    """In the middle of a request: an engine inside torch would abort the process at its end."""
    words = [sys.executable, "-c", LEAVING, str(tiny.folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['MainThread']\n"
