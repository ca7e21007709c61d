"""A bounded queue and deadlines: who is sent away, when to come back, and what ends by itself."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config.options import EngineOptions
from quire.protocol.errors import OverloadedError
from tests.engine.driver import Engine, numbers

# --- bounds of the queue --------------------------------------------------------------------------


def test_a_full_queue_refuses_and_takes_again_later() -> None:
    engine = Engine(max_num_seqs=1, max_num_queued_reqs=2)
    first = engine.add(numbers(5), max_tokens=2)
    engine.step()
    keys = [engine.add(numbers(5, start=i)) for i in (1, 2)]
    with pytest.raises(OverloadedError, match="2 requests are waiting, and max_num_queued_reqs=2"):
        engine.add(numbers(5, start=3))
    del engine.requests[300]
    engine.step(2)
    assert first in engine.ended
    keys.append(engine.add(numbers(5, start=3)))
    engine.finish()
    assert set(engine.ended) == {first, *keys}


def test_requests_for_which_there_is_a_row_do_not_queue() -> None:
    """All arrive between two steps; 4 rows and a queue of 1 hold five of them."""
    engine = Engine(max_num_seqs=4, max_num_queued_reqs=1)
    for i in range(5):
        engine.add(numbers(5, start=i))
    with pytest.raises(OverloadedError):
        engine.add(numbers(5))
    engine.step()
    with pytest.raises(OverloadedError):
        engine.add(numbers(5))


def test_prompt_tokens_are_bounded_too() -> None:
    engine = Engine(max_num_seqs=1, max_num_queued_tokens=20)
    engine.add(numbers(5))
    engine.step()
    engine.add(numbers(30))  # alone it may wait, however long it is
    expected = "30 prompt tokens are waiting, and max_num_queued_tokens=20 leaves no room for 3"
    with pytest.raises(OverloadedError, match=expected):
        engine.add(numbers(3))
    engine.core.abort("r100")
    engine.add(numbers(20))
    with pytest.raises(OverloadedError):
        engine.add(numbers(1))


def test_who_fills_the_queue_keeps_nobody_else_out() -> None:
    """With A's four waiting the queue is full; B has a share of two and C of one, for a queue
    never gets longer than twice its bound."""
    engine = Engine(max_num_seqs=1, max_num_queued_reqs=4)
    engine.add(numbers(5), max_tokens=2, tenant="a")
    engine.step()
    starts = iter(range(100))

    def queue(tenant: str) -> int:
        return engine.add(numbers(5, start=next(starts)), max_tokens=2, tenant=tenant)

    def is_refused(tenant: str) -> bool:
        try:
            queue(tenant)
        except OverloadedError:
            engine.requests.popitem()
            return True
        return False

    keys = {tenant: [] for tenant in "abcdef"}
    for tenant, room in (("a", 4), ("b", 2), ("c", 1), ("d", 1)):
        keys[tenant] = [queue(tenant) for _ in range(room)]
        assert is_refused(tenant) and is_refused("a")
    assert is_refused("e"), "eight are waiting"
    engine.core.abort(f"r{keys['b'][1]}")
    assert is_refused("e"), "five tenants share four places"
    engine.finish()
    assert not is_refused("a")


def test_a_share_of_the_queued_tokens() -> None:
    engine = Engine(max_num_seqs=1, max_num_queued_tokens=20)
    engine.add(numbers(5), tenant="a")
    engine.step()
    engine.add(numbers(18), tenant="a")
    for tenant, length in (("a", 3), ("b", 11)):
        with pytest.raises(OverloadedError, match="18 prompt tokens"):
            engine.add(numbers(length), tenant=tenant)
        engine.requests.popitem()
    engine.add(numbers(10), tenant="b")
    with pytest.raises(OverloadedError):
        engine.add(numbers(1), tenant="b")


def test_preempted_requests_take_no_place_in_the_queue() -> None:
    engine = Engine(13, max_num_seqs=2, max_num_queued_reqs=1, enable_prefix_caching=False)
    engine.add(numbers(20), max_tokens=20)
    engine.add(numbers(20, start=1), max_tokens=20)
    while not engine.core.statistics().num_preemptions:
        engine.step()
    assert len(engine.core.scheduler.waiting) == 1
    engine.add(numbers(3))
    engine.add(numbers(3))
    with pytest.raises(OverloadedError):
        engine.add(numbers(3))


def test_when_to_come_back_follows_from_the_pace() -> None:
    """One prompt of 10 tokens leaves the queue every 8 s; half of 40 are 200 tokens."""
    engine = Engine(max_num_seqs=1, max_num_queued_reqs=40)
    for i in range(41):
        engine.add(numbers(10, start=i), max_tokens=4)
    with pytest.raises(OverloadedError) as unknown:
        engine.add(numbers(10))
    assert unknown.value.retry_after_s == 1
    for _ in range(81):
        engine.now += 2.0
        engine.step()
        while engine.core.scheduler.waiting.num_new < 40:
            engine.add(numbers(10), max_tokens=4)
    with pytest.raises(OverloadedError, match="Try again in about 1") as raised:
        engine.add(numbers(10))
    assert raised.value.retry_after_s == pytest.approx(160, rel=0.2)


def test_idle_time_does_not_slow_the_pace() -> None:
    engine = Engine(max_num_seqs=1)
    for _ in range(3):
        engine.add(numbers(10), max_tokens=10)
        while engine.core.has_work:
            engine.now += 0.1
            engine.step()
        engine.now += 1000.0
    assert engine.core.scheduler.pace.computed_per_s > 5


def test_only_a_server_has_a_bound_by_default() -> None:
    assert EngineOptions().scheduler.max_num_queued_reqs is None
    assert EngineOptions().for_server().scheduler.max_num_queued_reqs == 2048
    chosen = EngineOptions.from_arguments(max_num_queued_reqs=0)
    assert chosen.for_server().scheduler.max_num_queued_reqs == 0


# --- deadlines ------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
def test_a_deadline_ends_a_waiting_request_without_tokens(steps_in_flight: int) -> None:
    engine = Engine(steps_in_flight=steps_in_flight, max_num_seqs=1)
    running = engine.add(numbers(5), max_tokens=9)
    late = engine.add(numbers(5, start=1), deadline=3.0)
    for _ in range(20):
        engine.now += 1.0
        engine.step()
    assert engine.ended[late].finish_reason == "timeout"
    assert not len(engine.ended[late].token_ids)
    assert engine.ended[late].finished_time == 3.0
    assert engine.ended[running].finish_reason == "length"


@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
def test_a_deadline_leaves_a_running_request_its_tokens(steps_in_flight: int) -> None:
    engine = Engine(steps_in_flight=steps_in_flight)
    key = engine.add(numbers(5), max_tokens=50, deadline=10.0)
    other = engine.add(numbers(5), max_tokens=50, deadline=1000.0)
    for _ in range(15):
        engine.now += 1.0
        engine.step()
    assert engine.ended[key].finish_reason == "abort"
    assert len(engine.ended[key].token_ids) == 9
    engine.finish()
    assert engine.ended[other].finish_reason == "length"


def test_a_prompt_in_work_has_no_text_yet() -> None:
    engine = Engine(max_num_batched_tokens=4)
    key = engine.add(numbers(40), deadline=3.0)
    for _ in range(4):
        engine.now += 1.0
        engine.step()
    assert engine.ended[key].finish_reason == "timeout"


def test_all_sequences_of_a_request_have_its_deadline() -> None:
    engine = Engine(max_num_seqs=2)
    key = engine.add(numbers(5), max_tokens=50, n=3, deadline=5.0)
    for _ in range(8):
        engine.now += 1.0
        engine.step()
    assert [engine.ended[key + i].finish_reason for i in range(3)] == ["abort"] * 3
    assert not engine.core.has_work


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 30)), min_size=1, max_size=12),
    st.sampled_from([1, 2, 4]),
)
def test_nothing_outlives_its_deadline(jobs: list[tuple[int, int]], steps_in_flight: int) -> None:
    """Whatever a request is doing; what it has of tokens is what it would get alone."""
    engine = Engine(16, steps_in_flight, max_num_seqs=3, max_num_batched_tokens=20)
    deadlines = {
        engine.add(
            numbers(3 * length, start=length), max_tokens=20, deadline=float(deadline)
        ): deadline
        for length, deadline in jobs
    }
    for _ in range(40):
        engine.now += 1.0
        engine.step()
        left = {request.key for r in engine.core.scheduler.requests.values() for request in r}
        for key in left:
            assert deadlines[key] + steps_in_flight > engine.now
    engine.finish()
    assert set(engine.ended) == set(deadlines)
    for ended in engine.ended.values():
        if ended.finish_reason == "timeout":
            assert not len(ended.token_ids)
    assert engine.core.scheduler.deadlines.next is None


def test_a_finished_request_leaves_no_deadline_behind() -> None:
    engine = Engine()
    for i in range(50):
        engine.add(numbers(5, start=i), max_tokens=1, deadline=1e9)
    engine.finish()
    assert engine.core.scheduler.deadlines.next is None
    assert len(engine.core.scheduler.deadlines._request_ids._entries) <= 16
