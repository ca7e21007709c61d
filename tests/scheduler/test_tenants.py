"""Tenants share the engine by the tokens computed for them, however many requests they queue."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.scheduler.queue import MAX_IDLE_TENANTS, MAX_KNOWN_TENANTS, LazyHeap, Tenants
from quire.scheduler.sequence import derive_seed
from tests.engine.driver import Engine, numbers


def admissions(engine: Engine) -> list[int]:
    """Keys of sequences in the order in which they first got a row (their seed is their key)."""
    seeds = [added.seed for plan in engine.plans for added in plan.added_rows]
    return list(dict.fromkeys(seeds))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("started", [True, False])
def test_a_single_request_passes_a_thousand_of_another_tenant(policy: str, started: bool) -> None:
    engine = Engine(max_num_seqs=2, policy=policy)
    for i in range(1000):
        engine.add(numbers(5, start=i), max_tokens=3, tenant="a")
    if started:
        engine.step(4)
    before = len(admissions(engine))
    single = engine.add(numbers(9), tenant="b")
    while single not in engine.ended:
        engine.step()
    assert admissions(engine).index(single) <= before + (0 if started else 1)


def test_a_priority_counts_before_the_tenant() -> None:
    engine = Engine(max_num_seqs=1, policy="priority")
    late = engine.add(numbers(5), tenant="b", priority=1)
    urgent = [engine.add(numbers(5, start=i), tenant="a", priority=0) for i in range(3)]
    engine.finish()
    assert engine.order == [*urgent, late]


def test_tenants_take_turns_within_a_priority() -> None:
    engine = Engine(max_num_seqs=1, policy="priority", enable_prefix_caching=False)
    keys = {
        (tenant, i): engine.add(numbers(8, start=i), tenant=tenant, priority=3)
        for tenant in "abc"
        for i in range(2)
    }
    engine.finish()
    assert engine.order == [keys[tenant, i] for i in range(2) for tenant in "abc"]


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(60, 21), (16, 65)])
def test_short_requests_get_more_turns_than_long_ones(num_prompt: int, max_tokens: int) -> None:
    """Tokens count, not requests, those of prompts as those of answers: one tenant's requests
    compute 80 tokens each (the last one is only sampled), the other's 20. With equal service it is
    the turn of the tenant that was served longer ago."""
    engine = Engine(max_num_seqs=1, enable_prefix_caching=False)
    long = [
        engine.add(numbers(num_prompt, start=i), max_tokens=max_tokens, tenant="long")
        for i in range(3)
    ]
    short = [engine.add(numbers(16, start=i), max_tokens=5, tenant="short") for i in range(12)]
    engine.finish()
    turns = [engine.order.index(key) for key in long]
    assert turns == [0, 5, 10], engine.order
    assert [key for key in engine.order if key in short] == short


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.booleans())
def test_backlogged_tenants_get_equal_service(
    seed: int, max_num_seqs: int, steps_in_flight: int, caching: bool
) -> None:
    """While two tenants both have waiting requests, neither gets ahead by more than what the
    running requests of one moment can cost. Service is counted from the plans."""
    random = Random(seed)
    engine = Engine(60, steps_in_flight, max_num_seqs=max_num_seqs, enable_prefix_caching=caching)
    tenant_of: dict[int, str] = {}
    for tenant, size in (("a", random.randint(4, 40)), ("b", random.randint(4, 40))):
        for _ in range(25):
            prompt = numbers(random.randint(1, size), start=random.randint(0, 90))
            key = engine.add(prompt, max_tokens=random.randint(1, 10), tenant=tenant)
            tenant_of[key] = tenant
    service = {"a": 0, "b": 0}
    owner: dict[int, str] = {}
    waiting = {"a": 25, "b": 25}
    seen: set[int] = set()
    while engine.core.has_work:
        planned = len(engine.plans)
        engine.step()
        for plan in engine.plans[planned:]:
            for added in plan.added_rows:
                owner[added.row] = tenant_of[added.seed]
                if added.seed not in seen:
                    seen.add(added.seed)
                    waiting[tenant_of[added.seed]] -= 1
            for row, count in zip(plan.rows.tolist(), plan.num_new_tokens.tolist(), strict=True):
                service[owner[row]] += count
        if min(waiting.values()) > 0:
            assert abs(service["a"] - service["b"]) <= 2 * max_num_seqs * 50
    for tenant in "ab":
        keys = [key for key in tenant_of if tenant_of[key] == tenant]
        assert [key for key in admissions(engine) if key in keys] == keys


def test_who_comes_late_cannot_claim_the_past() -> None:
    """A tenant that joins after others have had much does not get all turns to make up for it."""
    engine = Engine(max_num_seqs=1, enable_prefix_caching=False)
    for tenant in "ab":
        for i in range(20):
            engine.add(numbers(8, start=i), tenant=tenant)
    engine.step(40)
    late = [engine.add(numbers(8, start=i), tenant="c") for i in range(8)]
    before = len(admissions(engine))
    engine.finish()
    turns = [admissions(engine).index(key) - before for key in late]
    assert turns == [3 * i for i in range(8)]


@pytest.mark.parametrize("others_stay", [True, False])
def test_a_tenant_that_returns_has_its_past(others_stay: bool) -> None:
    """A computed 90 tokens and left. Where B stays, A comes back behind it until B had as many (10
    for each of its requests); where all have gone meanwhile, nothing is left to compare."""
    engine = Engine(max_num_seqs=1, enable_prefix_caching=False)
    engine.add(numbers(8), max_tokens=3, tenant="b")
    engine.step()
    engine.add(numbers(60), max_tokens=31, tenant="a")
    waiting = [engine.add(numbers(8, start=i), max_tokens=3, tenant="b") for i in range(3)]
    while any(request.new.tenant == "a" for (request,) in engine.core.scheduler.requests.values()):
        engine.step()
    if not others_stay:
        engine.finish()
    back = engine.add(numbers(8, start=50), max_tokens=3, tenant="a")
    waiting = [engine.add(numbers(8, start=i), max_tokens=3, tenant="b") for i in range(12)]
    engine.finish()
    before = [key for key in engine.order[: engine.order.index(back)] if key in waiting]
    if others_stay:
        assert 3 <= len(before) <= 8, engine.order
    else:
        assert not before, engine.order


def test_a_preempted_request_keeps_its_place() -> None:
    """It returns before any request that has not run, whatever its tenant has had meanwhile."""
    engine = Engine(14, enable_prefix_caching=False, max_num_seqs=2)
    first = engine.add(numbers(20), max_tokens=20, tenant="a")
    second = engine.add(numbers(20, start=1), max_tokens=20, tenant="a")
    engine.step()
    others = [engine.add(numbers(20, start=2 + i), max_tokens=20, tenant="b") for i in range(3)]
    engine.finish()
    assert engine.core.statistics().num_preemptions >= 1
    assert admissions(engine) == [first, second, *others]
    returned = [added.seed for plan in engine.plans for added in plan.added_rows]
    assert returned[2] == second


def test_the_last_admitted_is_preempted_not_the_last_to_arrive() -> None:
    """Else a late tenant's request, once it has gone ahead, would lose its blocks to every one of
    the queue it passed."""
    engine = Engine(14, enable_prefix_caching=False, max_num_seqs=2)
    first = [engine.add(numbers(4, start=i), max_tokens=2, tenant="a") for i in range(2)]
    engine.step()
    queued = [engine.add(numbers(20, start=2 + i), max_tokens=20, tenant="a") for i in range(3)]
    single = engine.add(numbers(20, start=9), max_tokens=20, tenant="b")
    engine.finish()
    rows = [added.seed for plan in engine.plans for added in plan.added_rows]
    assert rows[:4] == [*first, single, queued[0]]
    assert rows.count(single) == 1 and rows.count(queued[0]) > 1


def test_all_sequences_of_a_prompt_rank_by_its_admission() -> None:
    """Those that follow the first are admitted with it, whenever their request came."""
    engine = Engine(20, enable_prefix_caching=False, max_num_seqs=3)
    for i in range(2):
        engine.add(numbers(4, start=i), max_tokens=2, tenant="a")
    engine.step()
    queued = [engine.add(numbers(20, start=2 + i), max_tokens=20, tenant="a") for i in range(3)]
    several = engine.add(numbers(20, start=9), max_tokens=20, n=2, tenant="b")
    engine.finish()
    rows = [added.seed for plan in engine.plans for added in plan.added_rows]
    assert rows.count(derive_seed(several, 1)) == 1 and rows.count(queued[0]) > 1


def test_tenants_without_requests_are_forgotten() -> None:
    """Names come from clients and must not fill the memory."""
    engine = Engine(max_num_seqs=1)
    engine.add(numbers(8), max_tokens=100, tenant="stays")
    for i in range(3 * MAX_IDLE_TENANTS):
        engine.add([1, 2, 3], max_tokens=1, tenant=f"t{i}")
        engine.core.abort(f"r{100 * (i + 1)}")
    tenants, waiting = engine.core.scheduler.tenants, engine.core.scheduler.waiting
    assert len(tenants) == 1
    assert len(tenants._idle) <= MAX_IDLE_TENANTS
    assert list(tenants._ages) == ["stays"]
    assert len(tenants._service) <= 3
    assert len(waiting._order._entries) < 20
    engine.finish()
    assert not len(tenants) and not tenants._idle


def test_a_pause_is_no_way_to_lose_past_service() -> None:
    """What a tenant has had counts when it comes back, again and again, while others are there; of
    more names than are kept those that left first are forgotten."""
    tenants = Tenants()
    tenants.join("stays")
    for i in range(MAX_IDLE_TENANTS):
        tenants.join(f"t{i}")
        tenants.leave(f"t{i}")
    for visits in range(1, 4):
        tenants.join("returns")
        tenants.admitted("returns", 10)
        assert tenants.standing(tenants.slot("returns"))[0] == 10 * visits
        tenants.leave("returns")
    for i in range(MAX_IDLE_TENANTS):
        tenants.join(f"u{i}")
        tenants.leave(f"u{i}")
    assert tenants.standing(tenants.join("returns"))[0] == 0


def test_each_row_of_a_tenant_is_charged() -> None:
    tenants = Tenants()
    a, b = tenants.join("a"), tenants.join("b")
    tenants.charge(np.array([a, b, a], np.int32), np.array([3, 4, 5], np.int32))
    assert [tenants.standing(slot)[0] for slot in (a, b)] == [8, 4]


def test_old_tenants_keep_their_age_however_many_come_after() -> None:
    tenants = Tenants()
    for i in range(2 * MAX_KNOWN_TENANTS):
        tenants.join(f"t{i}")
        tenants.admitted(f"t{i}", 1)
        tenants.leave(f"t{i}")
    assert len(tenants._ages) == MAX_KNOWN_TENANTS
    assert tenants.age("t0") == 1 and tenants.age("t9") == 10
    assert tenants.age(f"t{MAX_KNOWN_TENANTS}") == tenants.age("unknown")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("pprx"), st.integers(0, 9), st.integers(0, 30))))
def test_a_lazy_heap_is_a_sorted_list(moves: list[tuple[str, int, int]]) -> None:
    heap: LazyHeap[int] = LazyHeap()
    reference: dict[int, tuple[int, int]] = {}
    for time, (move, key, item) in enumerate(moves):
        if move == "p":
            heap.push(key, item)
            reference[item] = (key, time)
        elif move == "r":
            assert heap.remove(item) == (reference.pop(item, None) is not None)
        elif reference:
            first = min(reference, key=lambda i: reference[i])
            assert heap.first() == (reference[first][0], first)
            assert heap.pop() == first
            del reference[first]
        assert len(heap) == len(reference)
        assert set(heap) == set(reference)
        assert len(heap._entries) <= 2 * len(reference) + 17 + time
