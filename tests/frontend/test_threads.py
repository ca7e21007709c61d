"""One engine, many threads: their calls share its steps, and none waits for ever.

Without the sharing a call that another thread's step finished would step an idle engine for ever.
All waits here have a bound far beyond what the work takes.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from quire import LLM, AsyncLLM, BeamSearchParams, EngineDeadError, RequestError, SamplingParams
from quire.protocol.plan import StepPlan
from tests.frontend.conftest import Tiny
from tests.models.reference import random_tokens
from tests.tiny import assert_at_rest, tiny_llm

WAIT_S = 120.0
PROMPTS = [random_tokens(3 + i % 17, seed=i) for i in range(24)]


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **values})


LONG = params(max_tokens=200)


def run_all(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Results of the jobs, each on a thread of its own, begun together."""
    gate = threading.Barrier(len(jobs))

    def run(job: Callable[[], Any]) -> Any:
        gate.wait(WAIT_S)
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        futures = [pool.submit(run, job) for job in jobs]
        return [future.result(WAIT_S) for future in futures]


class Calls:
    """The calls that a user may make, with what each must return when it is made alone."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.kinds = [self.generate, self.one, self.stream, self.chat, self.beams, self.embed]
        self.kinds += [self.leave_stream, self.refused, self.stopped]
        self._alone: dict[tuple[str, int], Any] = {}

    def expected(self, kind: Callable[[int], Any], i: int) -> Any:
        if (kind.__name__, i) not in self._alone:
            self._alone[kind.__name__, i] = kind(i)
        return self._alone[kind.__name__, i]

    def generate(self, i: int) -> Any:
        prompts = [PROMPTS[(i + k) % len(PROMPTS)] for k in range(3)]
        outputs = self.llm.generate(prompts, params(n=1, max_tokens=5 + i), use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def one(self, i: int) -> Any:
        (output,) = self.llm.generate([PROMPTS[i]], params(max_tokens=1 + i), use_tqdm=True)
        return output.outputs[0].token_ids

    def stream(self, i: int) -> Any:
        stream = self.llm.stream({"prompt_token_ids": PROMPTS[i]}, params())
        # Outputs hold all tokens so far; a reader that falls behind gets fewer of them.
        return list(stream)[-1].outputs[0].token_ids

    def chat(self, i: int) -> Any:
        messages = [{"role": "user", "content": f"number {i}"}]
        return self.llm.chat(messages, params(), use_tqdm=False)[0].outputs[0].text

    def beams(self, i: int) -> Any:
        wanted = BeamSearchParams(beam_width=2, max_tokens=4 + i % 3, ignore_eos=True)
        (found,) = self.llm.beam_search([{"prompt_token_ids": PROMPTS[i]}], wanted)
        return [beam.tokens for beam in found.sequences]

    def embed(self, i: int) -> Any:
        outputs = self.llm.embed(PROMPTS[i : i + 2], use_tqdm=False)
        vectors = [output.outputs.embedding for output in outputs]
        return [vector.index(max(vector)) for vector in vectors]

    def leave_stream(self, i: int) -> Any:
        stream = self.llm.stream({"prompt_token_ids": PROMPTS[i]}, LONG)
        # A reader that falls behind gets several tokens at once.
        return next(iter(stream)).outputs[0].token_ids[0]

    def refused(self, i: int) -> Any:
        with pytest.raises(RequestError, match=r"prompts\[1\]"):
            self.llm.generate([PROMPTS[i], [-1]], params(), use_tqdm=False)

    def stopped(self, i: int) -> Any:
        wanted = params(stop=["e", "a"], max_tokens=40)
        (output,) = self.llm.generate([PROMPTS[i]], wanted, use_tqdm=False)
        return output.outputs[0].text


@pytest.mark.parametrize("seed", range(3))
def test_any_mix_of_calls_answers_as_if_alone(llm: LLM, seed: int) -> None:
    """Twelve threads with five calls of random kinds each; some leave early, some are refused."""
    calls, dice = Calls(llm), random.Random(seed)
    plans = [[(dice.choice(calls.kinds), dice.randrange(8)) for _ in range(5)] for _ in range(12)]
    expected = [[calls.expected(kind, i) for kind, i in plan] for plan in plans]

    def job(plan: list[tuple[Callable[[int], Any], int]]) -> Callable[[], Any]:
        return lambda: [kind(i) for kind, i in plan]

    assert run_all([job(plan) for plan in plans]) == expected
    gc.collect()
    llm.generate([PROMPTS[0]], params(), use_tqdm=False)  # takes in ends that no call waits for
    assert_at_rest(llm)


def test_calls_share_batches(llm: LLM) -> None:
    """Two threads' requests are in the same steps: two long calls cost the steps of one."""
    sizes: list[int] = []

    def note(plan: StepPlan) -> None:
        sizes.append(len(plan.rows))

    llm._core.on_plan = note
    try:
        run_all([lambda: llm.generate([PROMPTS[0]], LONG, use_tqdm=False)] * 2)
    finally:
        llm._core.on_plan = None
    # They may begin a few steps apart, since threads start as the system pleases.
    assert sizes.count(2) > 50, sizes


def test_enqueued_requests_of_all_threads_come_back(llm: LLM) -> None:
    ids = run_all([lambda: llm.enqueue(PROMPTS[:3], params())] * 6)
    got = run_all([lambda: llm.wait_for_completion(use_tqdm=False)] * 2)
    names = [output.request_id for outputs in got for output in outputs]
    assert sorted(names) == sorted(name for part in ids for name in part)
    assert_at_rest(llm)


def test_asking_while_others_generate(llm: LLM) -> None:
    def ask() -> int:
        for _ in range(20):
            llm.get_metrics()
            llm.reset_prefix_cache()
        return llm.statistics().num_steps

    outputs, *_ = run_all([lambda: llm.generate(PROMPTS, params(), use_tqdm=False), ask, ask])
    assert len(outputs) == len(PROMPTS)


@pytest.mark.parametrize("kind", ["generate", "stream", "embed", "beams", "structured"])
def test_shutdown_ends_the_calls_of_other_threads(tiny: Tiny, kind: str) -> None:
    llm = tiny_llm(tiny.folder, kv_cache_memory_bytes="16MiB")
    started = threading.Event()
    llm._core.on_plan = lambda plan: started.set()

    def call() -> None:
        while True:  # the shutdown may find the thread in any part of a call
            if kind == "generate":
                llm.generate(PROMPTS, LONG, use_tqdm=False)
            elif kind == "stream":
                list(llm.stream({"prompt_token_ids": PROMPTS[0]}, LONG))
            elif kind == "embed":
                llm.embed(PROMPTS, use_tqdm=False)
            elif kind == "beams":
                wanted = BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True)
                llm.beam_search([{"prompt_token_ids": PROMPTS[0]}], wanted)
            else:
                started.set()
                grammar = {"json": {"type": "array", "maxItems": random.randrange(10**6)}}
                llm.generate(
                    [PROMPTS[0]],
                    SamplingParams(structured_outputs=grammar, max_tokens=8),
                    use_tqdm=False,
                )

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(call) for _ in range(3)]
        assert started.wait(WAIT_S)
        llm.shutdown()
        for future in futures:
            with pytest.raises(EngineDeadError):
                future.result(WAIT_S)


def test_an_exception_in_the_driver_leaves_the_others_running(llm: LLM) -> None:
    """A thread that leaves its stream by an exception passes the steps on to one that waits."""
    expected = llm.generate(PROMPTS[:4], LONG, use_tqdm=False)

    def raise_early() -> None:
        with pytest.raises(ZeroDivisionError):
            for i, _ in enumerate(llm.stream({"prompt_token_ids": PROMPTS[5]}, LONG)):
                1 / (3 - i)

    jobs: list[Callable[[], Any]] = [raise_early] * 4
    jobs += [lambda: llm.generate(PROMPTS[:4], LONG, use_tqdm=False)] * 2
    for outputs in run_all(jobs)[-2:]:
        assert [o.outputs[0].token_ids for o in outputs] == [
            o.outputs[0].token_ids for o in expected
        ]


def test_outputs_that_cannot_be_passed_on_end_all_calls(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step brought is lost then, so every call gets an error and none waits on."""
    llm = tiny_llm(tiny.folder, kv_cache_memory_bytes="16MiB")
    steps = iter(range(20))
    take_in = llm._loop.take_in

    def broken(output: Any) -> None:
        if next(steps, None) is None:
            raise ValueError("broken")
        take_in(output)

    monkeypatch.setattr(llm._loop, "take_in", broken)

    def call() -> None:
        with pytest.raises(EngineDeadError, match="broken"):
            llm.generate(PROMPTS[:2], LONG, use_tqdm=False)

    run_all([call] * 4)
    llm.shutdown()


@pytest.fixture
def interrupt_soon() -> Iterator[Callable[[], None]]:
    timers: list[threading.Timer] = []

    def interrupt() -> None:
        timers.append(threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)))
        timers[-1].start()

    yield interrupt
    for timer in timers:
        timer.join()


@pytest.mark.parametrize("waits", [False, True])
def test_an_interrupt_ends_the_main_threads_call_alone(
    llm: LLM, interrupt_soon: Callable[[], None], waits: bool
) -> None:
    """Ctrl-C, whether the main thread drives or waits for another that does."""
    alone = llm.generate(PROMPTS[:2], LONG, use_tqdm=False)
    leave = threading.Event()

    def other() -> Any:
        while True:
            outputs = llm.generate(PROMPTS[:2], LONG, use_tqdm=False)
            if leave.is_set():
                return outputs

    with ThreadPoolExecutor(1) as pool:
        future: Future[Any] | None = pool.submit(other) if waits else None
        deadline = time.monotonic() + WAIT_S
        while waits and llm._loop._driver is None and time.monotonic() < deadline:
            time.sleep(0.001)
        interrupt_soon()
        try:
            with pytest.raises(KeyboardInterrupt):
                for _ in range(1000):
                    llm.generate(PROMPTS[2:4], LONG, use_tqdm=False)
        finally:
            leave.set()
        if future is None:
            future = pool.submit(other)
        outputs = future.result(WAIT_S)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in alone]
    assert_at_rest(llm)


def test_a_stream_collected_in_mid_step_waits_for_no_lock(llm: LLM) -> None:
    """Garbage is collected at any moment, also while its thread holds the engine."""
    stream = llm.stream({"prompt_token_ids": PROMPTS[0]}, LONG)
    next(stream)
    streams = [stream]
    del stream

    def collect(plan: StepPlan) -> None:
        streams.clear()

    llm._core.on_plan = collect
    try:
        run_all([lambda: llm.generate([PROMPTS[1]], params(), use_tqdm=False)])
    finally:
        llm._core.on_plan = None
    assert not streams
    llm.generate([PROMPTS[1]], params(), use_tqdm=False)
    assert_at_rest(llm)


def test_event_loops_share_an_engine(tiny: Tiny) -> None:
    """`AsyncLLM` from several loops, each in a thread; the next ones come after they are closed."""
    engine = AsyncLLM(str(tiny.folder), num_threads=1, kv_cache_memory_bytes="16MiB", block_size=4)

    async def one(i: int) -> list[int]:
        last = None
        async for output in engine.generate(PROMPTS[i], params(max_tokens=20)):
            last = output
        assert last is not None
        vector = await engine.embed(PROMPTS[i])
        assert len(vector.outputs.embedding) == engine.model_config.hidden_size
        return last.outputs[0].token_ids

    async def several() -> list[list[int]]:
        return await asyncio.gather(*(one(i) for i in range(6)))

    async def leave_early() -> None:
        stream = engine.generate(PROMPTS[7], LONG)
        await anext(aiter(stream))  # the loop is closed over it

    try:
        alone = asyncio.run(several())
        for _ in range(2):
            results = run_all([lambda: asyncio.run(several())] * 6)
            assert results == [alone] * 6
            run_all([lambda: asyncio.run(leave_early())] * 3)
        asyncio.run(several())
        assert engine.num_open == 0
    finally:
        engine.shutdown()


def test_shutdown_reaches_every_event_loop(tiny: Tiny) -> None:
    engine = AsyncLLM(str(tiny.folder), num_threads=1, kv_cache_memory_bytes="16MiB", block_size=4)
    started = threading.Barrier(4)

    async def call() -> None:
        with pytest.raises(EngineDeadError):
            first = True
            while True:
                async for _ in engine.generate(PROMPTS[0], LONG):
                    if first:
                        started.wait(WAIT_S)
                        first = False

    def stop() -> None:
        started.wait(WAIT_S)
        engine.shutdown()

    run_all([lambda: asyncio.run(call())] * 3 + [stop])
