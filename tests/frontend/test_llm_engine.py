"""`LLMEngine` and `AsyncLLMEngine`, used as vLLM's examples do."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import quire.inputs
from quire import (
    LLM,
    AsyncEngineArgs,
    AsyncLLMEngine,
    EngineArgs,
    EngineDeadError,
    LLMEngine,
    PoolingParams,
    RequestError,
    RequestOutputKind,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from tests.frontend.conftest import Tiny
from tests.models.reference import random_tokens
from tests.tiny import assert_at_rest

PROMPTS = [random_tokens(3 + i, seed=i) for i in range(6)]
SETTINGS: dict[str, Any] = {"num_threads": 1, "kv_cache_memory_bytes": "16MiB"}


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **values})


def run(engine: LLMEngine) -> dict[str, list[int]]:
    finished = {}
    for _ in range(1000):
        if not engine.has_unfinished_requests():
            return finished
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output.outputs[0].token_ids
    raise AssertionError("the engine does not finish")


def test_requests_are_added_between_steps(llm: LLM) -> None:
    engine = llm.llm_engine
    assert engine is llm.llm_engine and engine.get_tokenizer() is llm.get_tokenizer()
    expected = llm.generate(PROMPTS, params(), use_tqdm=False)
    left, outputs = list(enumerate(PROMPTS)), []
    while left or engine.has_unfinished_requests():
        if left:
            i, prompt = left.pop(0)
            engine.add_request(f"r{i}", TokensPrompt(prompt_token_ids=prompt), params())
        outputs += engine.step()
    for i, alone in enumerate(expected):
        mine = [output for output in outputs if output.request_id == f"r{i}"]
        tokens = [output.outputs[0].token_ids for output in mine]
        assert tokens == [alone.outputs[0].token_ids[: k + 1] for k in range(8)], "cumulative"
        assert [output.finished for output in mine] == [False] * 7 + [True]
    assert engine.step() == [] and engine.get_num_unfinished_requests() == 0
    assert_at_rest(llm)


def test_output_kinds_and_several_completions(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("final", "a text", params(output_kind=RequestOutputKind.FINAL_ONLY))
    engine.add_request("stop", TextPrompt(prompt="a text"), params(stop=["e"], max_tokens=50))
    engine.add_request("two", PROMPTS[0], SamplingParams(n=2, max_tokens=5, ignore_eos=True))
    seen: dict[str, int] = {}
    last = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen[output.request_id] = seen.get(output.request_id, 0) + 1
            last[output.request_id] = output
    assert seen["final"] == 1 and seen["two"] >= 5
    assert len(last["two"].outputs) == 2
    assert last["stop"].finished
    assert_at_rest(llm)


def test_an_aborted_request_is_gone(llm: LLM) -> None:
    engine = llm.llm_engine
    for name in ("a", "b", "c"):
        engine.add_request(name, PROMPTS[0], params(max_tokens=100))
    engine.step()
    engine.abort_request("a")
    engine.abort_request(["b", "unknown"])
    assert engine.get_num_unfinished_requests() == 1
    engine.add_request("a", PROMPTS[1], params())
    assert run(engine).keys() == {"a", "c"}
    assert_at_rest(llm)


def test_mistakes(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("a", PROMPTS[0], params())
    bad: list[tuple[Any, Any, Any, str]] = [
        ("a", PROMPTS[0], params(), "request_id 'a' is already in use"),
        (7, PROMPTS[0], params(), "request_id must be a string"),
        ("b", "", params(), "prompt is empty"),
        ("b", ["x", "y"], params(), "add_request takes one prompt, got 2"),
        ("b", "x", PoolingParams(), "LLM.embed takes PoolingParams"),
        ("b", quire.inputs.TokensPrompt(prompt_token_ids=[-1]), params(), "vocabulary"),
    ]
    for name, prompt, wanted, message in bad:
        with pytest.raises(RequestError, match=message):
            engine.add_request(name, prompt, wanted)
    assert run(engine).keys() == {"a"}


def test_it_shares_the_engine_with_other_callers(llm: LLM) -> None:
    """Another thread's `generate` may make the steps: no output of either is lost."""
    expected = llm.generate(PROMPTS, params(), use_tqdm=False)
    engine, got = llm.llm_engine, []
    thread = threading.Thread(
        target=lambda: got.append(llm.generate(PROMPTS, params(), use_tqdm=False))
    )
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, params())
    thread.start()
    mine = run(engine)
    thread.join(120)
    tokens = [output.outputs[0].token_ids for output in expected]
    assert [mine[str(i)] for i in range(len(PROMPTS))] == tokens
    assert [output.outputs[0].token_ids for output in got[0]] == tokens


def test_from_engine_args(tiny: Tiny) -> None:
    args = EngineArgs(model=str(tiny.folder), **SETTINGS)
    engine = LLMEngine.from_engine_args(args)
    engine.add_request("a", PROMPTS[0], params())
    assert len(run(engine)["a"]) == 8
    engine.add_request("b", PROMPTS[0], params())
    engine.shutdown()
    with pytest.raises(EngineDeadError):
        engine.step()


async def test_async_engine(tiny: Tiny) -> None:
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=str(tiny.folder), **SETTINGS))
    try:
        last = None
        async for output in engine.generate(PROMPTS[0], params(), request_id="a"):
            last = output
        assert last is not None and last.finished and last.request_id == "a"
        assert len(last.outputs[0].token_ids) == 8
    finally:
        engine.shutdown()
