"""Pausing, aborting everything, commands, and advice, as an operator uses them."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from quire.engine.core import COMMANDS
from quire.engine.monitor import Advisor
from quire.protocol.errors import RequestError
from quire.protocol.messages import ID_SEPARATOR
from quire.protocol.request import KEY_BITS, NewRequest
from quire.protocol.sampling import SamplingParams
from quire.scheduler.scheduler import Pause
from tests.engine.driver import Engine, numbers

# --- pausing --------------------------------------------------------------------------------------


def run_until_idle(engine: Engine) -> None:
    """As a server's loop does: steps only where there is work."""
    for _ in range(1000):
        if not engine.core.has_work:
            return
        engine.step()
    raise AssertionError("the engine did not come to rest")


@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
def test_a_pause_lets_running_requests_end_and_begins_none(steps_in_flight: int) -> None:
    engine = Engine(steps_in_flight=steps_in_flight, max_num_seqs=2)
    keys = [engine.add(numbers(9, start=i), max_tokens=6, n=1 + i) for i in range(4)]
    engine.step()
    engine.core.pause()
    late = engine.add(numbers(5), max_tokens=2)
    run_until_idle(engine)
    begun = {keys[0], keys[1], keys[1] + 1}
    assert set(engine.ended) == begun
    assert engine.core.snapshot().paused
    engine.core.resume()
    engine.finish()
    assert set(engine.ended) >= {*begun, keys[2], keys[3], late}


def test_preempted_requests_have_begun_and_come_back_in_a_pause() -> None:
    engine = Engine(13, enable_prefix_caching=False, policy="priority")
    first, second = (engine.add(numbers(20, start=i), max_tokens=20, priority=1) for i in range(2))
    engine.step()
    engine.core.pause()
    urgent = engine.add(numbers(5), priority=0)
    run_until_idle(engine)
    assert engine.core.statistics().num_preemptions
    assert set(engine.ended) == {first, second}
    engine.core.resume()
    engine.finish()
    assert urgent in engine.ended


def test_preempted_requests_come_back_by_priority_in_a_pause() -> None:
    """Three requests of 10 blocks each: the last in rank loses its blocks, then the second."""
    engine = Engine(18, enable_prefix_caching=False, policy="priority")
    keys = [engine.add(numbers(20, start=i), max_tokens=20, priority=i) for i in range(3)]
    engine.step()
    engine.core.pause()
    run_until_idle(engine)
    assert engine.core.statistics().num_preemptions == 2
    assert [added.seed for plan in engine.plans for added in plan.added_rows] == [*keys, *keys[1:]]


@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
def test_held_requests_stay_where_they_are(steps_in_flight: int) -> None:
    engine = Engine(steps_in_flight=steps_in_flight)
    key = engine.add(numbers(9), max_tokens=20)
    engine.step(5)
    engine.core.pause(Pause.HOLD)
    run_until_idle(engine)
    used, steps = engine.core.scheduler.kv.pool.num_used, engine.core.statistics().num_steps
    assert used > 0 and not engine.ended
    engine.step(3)
    assert engine.core.statistics().num_steps == steps
    engine.core.resume()
    engine.finish()
    assert engine.ended[key].finish_reason == "length"
    assert engine.core.statistics().num_preemptions == 0


def test_deadlines_and_aborts_count_in_a_pause() -> None:
    engine = Engine()
    engine.core.pause(Pause.HOLD)
    late = engine.add(numbers(5), deadline=8.0)
    gone = engine.add(numbers(5))
    assert not engine.core.has_work and engine.core.wait_s == 8.0
    engine.core.abort(f"r{gone}")
    engine.now = 9.0
    assert engine.core.has_work and engine.core.wait_s == 0.0
    engine.step()
    assert engine.ended[late].finish_reason == "timeout"
    assert engine.ended[gone].finish_reason == "abort"
    assert not engine.core.has_work and engine.core.wait_s is None


def test_who_waits_in_a_pause_hears_of_it_without_a_busy_loop() -> None:
    engine = Engine()
    engine.core.pause(Pause.HOLD)
    engine.add(numbers(5), wants_progress=True)
    reports = engine.step()
    assert len(reports) == 1 and not engine.core.has_work
    assert engine.core.wait_s == pytest.approx(0.5)


def test_all_requests_or_those_of_a_tenant_can_be_aborted() -> None:
    engine = Engine(max_num_seqs=2)
    mine = [engine.add(numbers(5, start=i), tenant="a") for i in range(3)]
    others = [engine.add(numbers(5, start=i), tenant="b") for i in range(3)]
    engine.step()
    assert engine.core.abort_all(tenant="a") == 3
    engine.step()
    assert set(mine) <= set(engine.ended)
    assert engine.core.abort_all() == 3
    engine.finish()
    assert {engine.ended[key].finish_reason for key in mine + others} == {"abort"}


def test_requests_are_aborted_by_their_name_or_client() -> None:
    """A caller's name comes with a suffix, which tells apart those who chose the same one."""
    engine = Engine()
    prompt = np.array(numbers(5), np.int32)
    names = ("a", "b", "a", f"a{ID_SEPARATOR}b")
    for i, name in enumerate(names):
        key = (i << KEY_BITS) + 1
        request_id = f"{name}{ID_SEPARATOR}{i}"
        engine.core.add(NewRequest(key, request_id, prompt, SamplingParams(max_tokens=9), 0.0))
    assert engine.core.abort_named("a") == 2
    assert engine.core.abort_named("c") == 0
    assert sorted(one.key >> KEY_BITS for one in engine.core.take_ended().finished) == [0, 2]
    engine.core.abort_client(1)
    assert [one.key >> KEY_BITS for one in engine.core.take_ended().finished] == [1]


def test_a_shutdown_ends_what_is_open() -> None:
    engine = Engine(steps_in_flight=2, max_num_seqs=1)
    keys = [engine.add(numbers(5, start=i), max_tokens=9) for i in range(3)]
    engine.step(3)
    engine.core.shutdown()
    ended = engine.core.take_ended().finished
    assert sorted(one.key for one in ended) == keys
    assert {one.finish_reason for one in ended} == {"error"}


def test_an_idle_engine_checks_its_blocks() -> None:
    engine = Engine()
    engine.add(numbers(5))
    engine.core.scheduler.kv.pool.allocate(1)
    while engine.core.has_work:
        engine.core.step()
    assert engine.core.death is not None and "do not add up" in engine.core.death


def test_no_sleep_is_too_long_for_the_system() -> None:
    engine = Engine()
    engine.core.pause(Pause.HOLD)
    engine.add(numbers(5), deadline=1e30)
    assert engine.core.wait_s == 3600.0


def test_commands_are_run_by_name() -> None:
    engine = Engine(max_num_seqs=2)
    engine.add(numbers(5), max_tokens=50)
    engine.step()
    assert (
        engine.core.run_command("check_integrity", {}) == engine.core.scheduler.kv.pool.num_used > 0
    )
    engine.core.run_command("pause", {"mode": "hold"})
    assert engine.core.scheduler.pause is Pause.HOLD
    engine.core.run_command("resume", {})
    assert engine.core.scheduler.pause is Pause.NONE
    assert engine.core.run_command("snapshot", {"max_waiting": 0}).num_waiting == 0
    assert engine.core.run_command("abort_all", {}) == 1
    assert all(callable(getattr(engine.core, name)) for name in COMMANDS)
    for name in ("shutdown", "die", "unknown"):
        with pytest.raises(RequestError, match=f"command '{name}' is unknown; use one of"):
            engine.core.run_command(name, {})


# --- advice ---------------------------------------------------------------------------------------


class Advised:
    """An engine whose advisor looks every 10 s and repeats itself every 100 s."""

    def __init__(self, **limits: object) -> None:
        self.engine = Engine(**limits)  # type: ignore[arg-type]
        scheduler = self.engine.core.scheduler
        self.advisor = Advisor(scheduler, scheduler.limits, interval_s=10.0, repeat_s=100.0)
        self.engine.core.monitor.advisor = self.advisor

    def run(self, seconds: float, step_s: float = 0.1) -> set[str]:
        """Let time pass; returns the kinds of advice at the last look."""
        end = self.engine.now + seconds
        while self.engine.now < end:
            self.engine.now += step_s
            self.engine.step()
        return {advice.kind for advice in self.advisor.current}


def send_similar(advised: Advised, count: int = 30) -> None:
    for i in range(count):
        advised.engine.add(numbers(70) + numbers(20, start=i), max_tokens=1)


def test_repeated_prompts_without_hits() -> None:
    without = Advised(enable_prefix_caching=False, block_size=4)
    send_similar(without)
    assert "prefix_hits" in without.run(12)
    (advice,) = [a for a in without.advisor.current if a.kind == "prefix_hits"]
    assert "enable_prefix_caching=True" in advice.message
    with_cache = Advised()
    send_similar(with_cache)
    assert "prefix_hits" not in with_cache.run(12)


def test_repeated_prompts_that_were_evicted() -> None:
    """Ten long prompts in turn, in a cache that holds two of them."""
    advised = Advised(num_blocks=62, max_num_seqs=1)
    for i in range(60):
        advised.engine.add(numbers(100, start=i % 10), max_tokens=1)
    assert "prefix_hits" in advised.run(12)
    assert "gpu_memory_utilization" in advised.advisor.current[0].message


def test_prompts_that_do_not_repeat_need_no_hits() -> None:
    advised = Advised(enable_prefix_caching=False)
    for i in range(60):
        advised.engine.add(numbers(90, start=i), max_tokens=1)
    assert "prefix_hits" not in advised.run(12)


@pytest.mark.parametrize(("block_size", "wasteful"), [(64, True), (4, False)])
def test_waste(block_size: int, wasteful: bool) -> None:
    """66 to 116 tokens in blocks of 64 leave a third of the slots empty."""
    advised = Advised(block_size=block_size, num_blocks=400)
    advised.engine.add(numbers(66), max_tokens=50)
    advised.engine.step(60)
    advised.engine.add(numbers(66, start=1), max_tokens=50)
    assert ("waste" in advised.run(12)) == wasteful


@pytest.mark.parametrize(("num_blocks", "small"), [(40, True), (2000, False)])
def test_a_pool_too_small_for_its_rows(num_blocks: int, small: bool) -> None:
    advised = Advised(num_blocks=num_blocks, max_num_seqs=16, enable_prefix_caching=False)
    for i in range(100):
        advised.engine.add(numbers(60, start=i), max_tokens=60)
    assert ("pool" in advised.run(10.5)) == small


@pytest.mark.parametrize(("num_blocks", "storm"), [(60, True), (2000, False)])
def test_preemption_storms(num_blocks: int, storm: bool) -> None:
    advised = Advised(num_blocks=num_blocks, max_num_seqs=16, enable_prefix_caching=False)
    for i in range(40):
        advised.engine.add(numbers(4, start=i), max_tokens=100)
    assert ("preemptions" in advised.run(10.5)) == storm


def test_the_same_advice_is_given_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    advised = Advised(enable_prefix_caching=False)
    times = []
    with caplog.at_level(logging.WARNING, logger="quire.engine.monitor"):
        for _ in range(25):
            send_similar(advised)
            before = len(caplog.records)
            advised.run(10.0, step_s=0.25)
            times += [advised.engine.now] * (len(caplog.records) - before)
    assert len(times) == 3, times


def test_an_idle_engine_gets_no_advice() -> None:
    advised = Advised(enable_prefix_caching=False)
    send_similar(advised)
    advised.run(12)
    assert advised.run(20) == set()
    assert len(advised.advisor._prefixes) <= 4096
