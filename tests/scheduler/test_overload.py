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


def test_a_tenant_that_fills_the_queue_keeps_no_other_out() -> None:
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


def test_a_queue_never_gets_longer_than_twice_its_bound() -> None:
    """Also for tenants within their share: E's would be one of six."""
    engine = Engine(max_num_seqs=1, max_num_queued_reqs=6)
    engine.add(numbers(5), max_tokens=2, tenant="a")
    engine.step()
    for tenant, room in (("a", 6), ("b", 3), ("c", 2), ("d", 1)):
        for i in range(room):
            engine.add(numbers(5, start=i), max_tokens=2, tenant=tenant)
    with pytest.raises(OverloadedError, match="12 requests are waiting"):
        engine.add(numbers(5), tenant="e")
    engine.requests.popitem()
    engine.core.abort("r100")
    engine.add(numbers(5), tenant="e")


def test_a_queue_never_holds_more_than_twice_its_bound_of_tokens() -> None:
    engine = Engine(max_num_seqs=1, max_num_queued_tokens=60)
    engine.add(numbers(5), tenant="a")
    engine.step()
    for tenant, length in (("a", 60), ("b", 30), ("c", 20)):
        engine.add(numbers(length), tenant=tenant)
    with pytest.raises(OverloadedError, match="110 prompt tokens"):
        engine.add(numbers(11), tenant="d")
    engine.requests.popitem()
    engine.add(numbers(10), tenant="d")


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("held_back", [False, True])
def test_a_flood_of_names_takes_no_place_of_an_older_tenant(
    is_known: bool, held_back: bool
) -> None:
    """300 new names meet a queue of 20. Who was served before, or waits already, gets all of its
    share; new ones that are in the way are sent away, and the queue stays within its limit."""
    engine = Engine(max_num_seqs=1, max_num_queued_reqs=20)
    scheduler = engine.core.scheduler
    if is_known:
        engine.add(numbers(5), tenant="victim")
        engine.finish()
    engine.add(numbers(5), max_tokens=100, tenant="busy")
    engine.step()
    own = [] if is_known else [engine.add(numbers(5), tenant="victim")]

    def flood(first: int) -> None:
        for i in range(first, first + 150):
            try:
                key = engine.add(numbers(5, start=i), tenant=f"forged-{i}")
            except OverloadedError:
                engine.requests.popitem()
                continue
            if held_back:
                request = scheduler.requests[f"r{key}"][0]
                scheduler.waiting.remove(request)
                scheduler.waiting.hold_back(request, 1)

    flood(0)
    while len(own) < 20:
        own.append(engine.add(numbers(5, start=len(own)), tenant="victim"))
        assert scheduler.waiting.num_new <= 40
    with pytest.raises(OverloadedError):
        engine.add(numbers(5), tenant="victim")
    engine.requests.popitem()
    flood(150)
    ended = {key: one.finish_reason for key, one in engine.ended.items()}
    for one in scheduler.take_ended():
        ended[one.key] = one.finish_reason
    assert all(ended.get(key) is None for key in own)
    displaced = [key for key, reason in ended.items() if reason == "overloaded"]
    assert all(engine.requests[key].tenant.startswith("forged") for key in displaced)
    assert scheduler.waiting.new_of["victim"][0] == 20


def test_just_enough_makes_room_for_an_older_tenant() -> None:
    """N1 to N3 have 70 prompt tokens in a queue for 40. For 30 more of an older tenant 20 must go,
    and for another 10 as many: the newest tenants' last requests first, and none within the share
    that its tenant has beside four (a third of 40 for N2, half for N1)."""
    engine = Engine(max_num_seqs=1, max_num_queued_reqs=100, max_num_queued_tokens=40)
    engine.add(numbers(5), max_tokens=100, tenant="old")
    engine.step()
    keys = {
        tenant: [engine.add(numbers(10), tenant=tenant) for _ in range(room)]
        for tenant, room in (("n1", 4), ("n2", 2), ("n3", 1))
    }
    for length, gone in ((30, [keys["n2"][1], keys["n1"][3]]), (10, [keys["n1"][2]])):
        engine.add(numbers(length), tenant="old")
        displaced = [(one.key, one.finish_reason) for one in engine.core.scheduler.take_ended()]
        assert displaced == [(key, "overloaded") for key in gone]
    with pytest.raises(OverloadedError):
        engine.add(numbers(1), tenant="old")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 7), st.integers(1, 12), st.sampled_from("aaas")), max_size=80
    ),
    st.sampled_from([(5, 0), (0, 40), (4, 30)]),
)
def test_who_makes_room_for_whom(
    moves: list[tuple[int, int, str]], bounds: tuple[int, int]
) -> None:
    """Only newer tenants for older ones, only what is beyond their share, and no more than the
    limit asks for; every request gets its one terminal output."""
    most, most_tokens = bounds
    engine = Engine(max_num_seqs=1, max_num_queued_reqs=most, max_num_queued_tokens=most_tokens)
    scheduler = engine.core.scheduler
    taken = []
    for number, length, move in moves:
        if move == "s":
            engine.step()
            continue
        tenant, waiting = f"t{number}", scheduler.waiting
        age_of = {f"t{i}": scheduler.tenants.age(f"t{i}") for i in range(8)}
        before = dict(waiting.new_of)
        was_kept = waiting.num_new < 5
        try:
            taken.append(engine.add(numbers(length), max_tokens=3, tenant=tenant))
        except OverloadedError:
            assert not was_kept or most_tokens
            engine.requests.popitem()
            continue
        queued = waiting.num_new - len(scheduler.free_rows)
        assert not most or queued <= 2 * most
        gone = [one for one in scheduler.ended if one.finish_reason == "overloaded"]
        for one in gone:
            theirs = engine.requests[one.key].tenant
            assert age_of[theirs] > age_of[tenant]
            older = sum(age_of[name] < age_of[theirs] for name in {*before, tenant})
            counts, limits = before[theirs], (most, most_tokens)
            assert any(
                limit and count > limit // (older + 1)
                for count, limit in zip(counts, limits, strict=True)
            )
        for one in scheduler.take_ended():
            engine.ended[one.key] = one
    engine.finish()
    assert set(engine.ended) == set(taken)


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
    assert not engine.core.scheduler.deadlines


def test_a_finished_request_leaves_no_deadline_behind() -> None:
    engine = Engine()
    for i in range(50):
        engine.add(numbers(5, start=i), max_tokens=1, deadline=1e9)
    engine.finish()
    assert not engine.core.scheduler.deadlines
    assert len(engine.core.scheduler.deadlines._entries) <= 16
