"""What callers do to an engine: interrupt it, cancel, ask for the impossible. It must go on."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from quire import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    EngineDeadError,
    OptionError,
    RequestError,
    SamplingParams,
)
from quire.frontend import step_loop
from tests.frontend.conftest import Tiny
from tests.models.reference import random_tokens
from tests.tiny import assert_at_rest, tiny_llm

PROMPTS = [random_tokens(5 + i, seed=i) for i in range(4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def generate(llm: LLM) -> list[list[int]]:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def interrupting(function: Callable[..., Any], call: int) -> Callable[..., Any]:
    """The function, raising a real SIGINT in the middle of its n-th call."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        result = function(*args, **kwargs)
        if calls == call:
            signal.raise_signal(signal.SIGINT)
        return result

    return wrapped


@pytest.mark.parametrize("call", [1, 4])
@pytest.mark.parametrize("place", ["schedule", "execute", "apply", "add"])
def test_ctrl_c_inside_a_step_does_no_harm(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, place: str, call: int
) -> None:
    """A signal that arrives anywhere inside a step ends the call; the next one is as ever."""
    with tiny_llm(tiny.folder, max_num_seqs=2) as llm:
        expected = generate(llm)
        owner = llm._core.executor if place == "execute" else llm._core.scheduler
        with monkeypatch.context() as patch:
            patch.setattr(owner, place, interrupting(getattr(owner, place), call))
            with pytest.raises(KeyboardInterrupt):
                generate(llm)
        while llm._core.has_work:  # what was in flight drains
            llm._core.step()
        assert_at_rest(llm)
        assert generate(llm) == expected


def test_a_scheduler_that_fails_ends_everything_with_an_error(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should planning itself fail, no call waits for ever and shutdown still frees the model."""
    with tiny_llm(tiny.folder) as llm:

        def broken(now: float) -> None:
            raise RuntimeError("injected")

        monkeypatch.setattr(llm._core.scheduler, "schedule", broken)
        with pytest.raises(EngineDeadError, match="injected"):
            generate(llm)
        assert not llm._core.has_work
        with pytest.raises(EngineDeadError, match="injected"):
            generate(llm)
        llm.shutdown()
        assert llm._core.executor._worker is None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"min_tokens": 10**12, "max_tokens": None}, "1000000000000 in the completion.*min_tokens"),
        ({"stop_token_ids": [10**12]}, "stop_token_ids holds 1000000000000"),
    ],
)
def test_numbers_beyond_the_model_are_refused(llm: LLM, values: dict[str, Any], said: str) -> None:
    """They would not fit the engine's columns; the error comes before anything is queued."""
    with pytest.raises(RequestError, match=said):
        llm.generate([PROMPTS[0]], SamplingParams(**values), use_tqdm=False)
    assert_at_rest(llm)


def test_a_huge_top_k_keeps_everything(llm: LLM) -> None:
    tokens = [
        llm.generate(
            [PROMPTS[0]], SamplingParams(top_k=top_k, seed=1, max_tokens=8), use_tqdm=False
        )[0]
        .outputs[0]
        .token_ids
        for top_k in (0, 10**12)
    ]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("penalty", [1e9, -11.0])
def test_length_penalty_has_bounds(penalty: float) -> None:
    """A length to that power is no number any more."""
    with pytest.raises(RequestError, match="length_penalty must be in"):
        BeamSearchParams(beam_width=2, max_tokens=2, length_penalty=penalty)


def test_any_text_can_be_a_salt(llm: LLM) -> None:
    """Also text that is no valid Unicode."""
    prompt = {"prompt_token_ids": PROMPTS[0], "cache_salt": "\ud800"}
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].finished


def test_prompt_logprobs_are_complete_whatever_the_cache_holds(llm: LLM) -> None:
    """They need every prompt token computed, even if reading the cache is asked for."""
    params = SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=1, skip_reading_prefix_cache=False
    )
    for _ in range(2):
        (output,) = llm.generate([PROMPTS[3]], params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        assert all(entry for entry in output.prompt_logprobs[1:])


def test_options_are_checked_before_a_model_is_looked_for() -> None:
    """A 140 GB download must not precede the news that the ranks cannot be placed."""
    with pytest.raises(OptionError, match=r"tensor_parallel_size=3 .*nnodes=2 hosts"):
        LLM(model="meta-llama/Llama-2-70b-hf", tensor_parallel_size=3, nnodes=2)
    with pytest.raises(OptionError, match="quantization='hqq' is not supported"):
        LLM(model="meta-llama/Llama-2-70b-hf", quantization="hqq")


async def test_cancelling_while_a_request_is_handed_over(tiny: Tiny) -> None:
    """A caller that leaves before the engine has its request ends no other one."""
    engine = AsyncLLM(str(tiny.folder), num_threads=1, kv_cache_memory_bytes="16MiB", block_size=4)

    async def run(prompt: list[int]) -> list[int]:
        tokens: list[int] = []
        async for output in engine.generate({"prompt_token_ids": prompt}, GREEDY):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    try:
        expected = await run(PROMPTS[0])
        others = [asyncio.create_task(run(PROMPTS[0])) for _ in range(3)]
        for hops in range(6):
            task = asyncio.create_task(run(PROMPTS[1]))
            for _ in range(hops):
                await asyncio.sleep(0)
            task.cancel()
        assert await asyncio.gather(*others) == [expected] * 3
        assert await run(PROMPTS[0]) == expected
        await engine.check_health()
    finally:
        engine.shutdown()


def test_stopped_requests_have_an_end_time(llm: LLM) -> None:
    """A request that a stop string ends counts in the latency metrics like any other."""
    free = llm.generate([PROMPTS[0]], GREEDY, use_tqdm=False)[0].outputs[0].text
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=free[3:5])
    (output,) = llm.generate([PROMPTS[0]], params, use_tqdm=False)
    assert output.outputs[0].stop_reason == free[3:5]
    assert output.metrics is not None
    assert output.metrics.finished_time >= output.metrics.first_token_time > 0


def test_second_interrupt_of_a_step_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first waits for the step's end; a later one does not, and is the only one raised."""
    monkeypatch.setattr(step_loop, "PATIENCE_S", 0.05)
    with pytest.raises(KeyboardInterrupt), step_loop.deferred_interrupts() as held:
        signal.raise_signal(signal.SIGINT)
        assert held == [signal.SIGINT]
        time.sleep(0.2)
        signal.raise_signal(signal.SIGINT)
        time.sleep(5)
        pytest.fail("it was held back")
