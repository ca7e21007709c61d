"""A request that is not ready waits beside the queue: it delays no other and can still end."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from quire.engine.structured_output.compiler import Compilation
from quire.engine.structured_output.matcher import Grammar
from quire.protocol.errors import OverloadedError, RequestError
from quire.protocol.request import NewRequest
from quire.protocol.sampling import SamplingParams
from tests.engine.driver import Engine, numbers


def held_back(engine: Engine, key: int = 5000, deadline: float | None = None) -> NewRequest:
    params = SamplingParams(max_tokens=3, seed=1, n=2, ignore_eos=True)
    prompt = np.array(numbers(9), np.int32)
    new = NewRequest(key, f"r{key}", prompt, params, arrival_time=0.0, deadline=deadline)
    engine.core.check(new)
    engine.core.scheduler.add(new, num_awaited=1)
    engine.requests[key] = new
    return new


def test_others_run_meanwhile() -> None:
    engine = Engine()
    held_back(engine)
    assert not engine.core.has_work, "a loop would spin until it is ready"
    key = engine.add(numbers(20))
    engine.finish()
    assert list(engine.ended) == [key]
    engine.core.scheduler.make_ready("r5000")
    engine.finish()
    assert set(engine.ended) == {key, 5000, 5001}


@pytest.mark.parametrize("how", ["abort", "deadline", "failure"])
def test_it_can_end(how: str) -> None:
    engine = Engine()
    held_back(engine, deadline=1.0)
    if how == "abort":
        engine.core.abort("r5000")
    elif how == "deadline":
        engine.now = 2.0
    else:
        engine.core.scheduler.fail_request("r5000", "its grammar is wrong")
    engine.step()
    reason = {"abort": "abort", "deadline": "timeout", "failure": "error"}[how]
    assert [engine.ended[key].finish_reason for key in (5000, 5001)] == [reason] * 2
    assert not engine.core.scheduler.waiting.held_back and not engine.core.has_work


@pytest.mark.parametrize("ends", ["ready", "abort"])
def test_it_takes_its_place_in_a_bounded_queue(ends: str) -> None:
    """As long as it is held back, and no longer."""
    engine = Engine(max_num_seqs=1, max_num_queued_reqs=1)
    engine.add(numbers(5))
    engine.step()
    held_back(engine)
    with pytest.raises(OverloadedError, match="1 requests are waiting"):
        engine.add(numbers(6))
    engine.requests.popitem()
    if ends == "abort":
        engine.core.abort("r5000")
        engine.add(numbers(6))
    else:
        engine.core.scheduler.make_ready("r5000")
        with pytest.raises(OverloadedError):
            engine.add(numbers(6))
        engine.requests.popitem()
    engine.finish()
    waiting = engine.core.scheduler.waiting
    assert (waiting.num_new, waiting.num_new_tokens, len(waiting.new_of)) == (0, 0, 0)


def test_a_grammar_that_proves_wrong_while_the_request_is_added() -> None:
    """Its thread may end at any moment, also between the two halves of `EngineCore.add`."""
    engine = Engine()
    new = held_back(engine)
    wrong: Future[Grammar] = Future()
    wrong.set_exception(RequestError("structured_outputs.regex is refused"))
    accepted = engine.core.grammars.add(new, Compilation(wrong))
    assert accepted is not None and isinstance(accepted.exception(), RequestError)
    engine.step()
    assert [engine.ended[key].finish_reason for key in (5000, 5001)] == ["error"] * 2
    assert not engine.core.scheduler.waiting.held_back and not engine.core.has_work


@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_loop_without_other_work_looks_for_its_grammar(is_aborted: bool) -> None:
    """What becomes of the grammar of a request that has ended meanwhile is told to no caller."""
    engine = Engine()
    compiled: Future[Grammar] = Future()
    accepted = engine.core.grammars.add(held_back(engine), Compilation(compiled))
    assert accepted is not None and not accepted.done()
    assert not engine.core.has_work and 0 < (engine.core.wait_s or 0) < 0.1
    if is_aborted:
        engine.core.abort("r5000")
    compiled.set_exception(RequestError("structured_outputs.regex is refused"))
    engine.step()
    assert engine.core.wait_s is None and engine.core.death is None
    assert (accepted.exception() is None) == is_aborted
    reason = "abort" if is_aborted else "error"
    assert [engine.ended[key].finish_reason for key in (5000, 5001)] == [reason] * 2
