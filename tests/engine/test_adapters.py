"""Requests with adapters, through the toy executor: who waits for whom, what is evicted, and which
prefixes are shared. Outputs are compared with a reference in every test: see `Engine.finish`, and
tests/scheduler/test_properties.py for random load."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from quire.protocol.adapter import AdapterContent, AdapterLimits, LoRARequest
from quire.protocol.errors import EngineDeadError, RequestError
from quire.protocol.request import NewRequest
from quire.protocol.sampling import SamplingParams
from quire.scheduler.adapters import AdapterSlots
from quire.scheduler.queue import Lane
from tests.engine.driver import Engine, numbers


def engine(
    max_adapters: int = 1, max_rank: int = 8, max_host: int = 8, wait_s: float = 1e9, **more: object
) -> Engine:
    return Engine(adapters=AdapterLimits(max_adapters, max_rank, max_host, wait_s), **more)


def slots_of(engine: Engine) -> AdapterSlots:
    slots = engine.core.scheduler.adapters
    assert slots is not None
    return slots


def lanes(**priorities: int) -> dict[str, list[Lane]]:
    """What waits for adapters."""
    return {name: [Lane(priority, 0, name)] for name, priority in priorities.items()}


def test_without_adapters_a_request_for_one_is_refused() -> None:
    one = Engine()
    with pytest.raises(RequestError, match="enable_lora=True"):
        one.add(numbers(5), adapter="a-8")


def test_a_request_that_waits_for_a_slot_lets_others_go_ahead() -> None:
    one = engine()
    first = one.add(numbers(9), max_tokens=20, adapter="a-8")
    one.step()
    waits = [one.add(numbers(9), max_tokens=1, adapter=f"b{i}-8") for i in range(3)]
    behind = [one.add(numbers(9, i), max_tokens=2) for i in (1, 2)]
    behind.append(one.add(numbers(12), max_tokens=2, adapter="a-8"))
    one.step()
    assert one.core.scheduler.num_running == 4, "at once, however many wait before them"
    one.finish()
    assert set(one.order[:3]) == set(behind) and one.order[3:] == [first, *waits]


@pytest.mark.parametrize("wait_s", [10.0, 1e9])
def test_none_starves(wait_s: float) -> None:
    """Requests for other adapters come all the time, so that these are never idle by themselves."""
    one = engine(2, wait_s=wait_s)
    for i in range(2):
        one.add(numbers(5, i), max_tokens=9, adapter=f"hot{i}-8")
    one.step()
    cold = one.add(numbers(6), max_tokens=1, adapter="cold-8")
    base = one.add(numbers(7), max_tokens=60)
    for step in range(60):
        one.now += 1.0
        one.add(numbers(5, step), max_tokens=9, adapter=f"hot{step % 2}-8")
        one.step()
    assert (cold in one.ended) == (wait_s == 10.0)
    if cold in one.ended:
        # The second hot adapter went on meanwhile: only one had to make way.
        before = one.order[: one.order.index(cold)]
        assert any(one.digests.get(key) == "hot1-8" for key in before[-6:])
    one.finish()
    assert cold in one.ended and base in one.ended


def test_what_waited_too_long_does_not_hold_up_better_priorities() -> None:
    """It may never get a row, as long as there are enough of these."""
    one = engine(1, wait_s=5.0, policy="priority", max_num_seqs=2)
    first = one.add(numbers(5), max_tokens=20, adapter="hot-8")
    one.step()
    cold = one.add(numbers(6), max_tokens=1, adapter="cold-8", priority=5)
    one.step()
    equal = one.add(numbers(6), max_tokens=1, adapter="hot-8", priority=5)
    base, hot = [], []
    for step in range(60):
        one.now += 1.0
        while sum(key not in one.ended for key in base) < 4:
            base.append(one.add(numbers(5, step), max_tokens=5))
        if step % 10 == 9:
            hot.append(one.add(numbers(5, step), max_tokens=4, adapter="hot-8"))
        one.step()
    assert slots_of(one)._due is not None and first in one.ended
    assert set(hot[:4]) <= one.ended.keys() and cold not in one.ended and equal not in one.ended
    one.finish()
    assert cold in one.ended and equal in one.ended


def test_of_what_waited_too_long_the_best_priority_gets_its_place_first() -> None:
    slots = AdapterSlots(AdapterLimits(2, 8, 8, 5.0))
    low, high, a = (AdapterContent(name, 1) for name in ("low", "high", "a"))
    for one in (a, AdapterContent("b", 1)):
        slots.acquire(one)
    slots.acquire(a)
    slots.block(low, 0.0, 5)
    assert slots.unblock(6.0, lanes(low=5)) == []
    assert not slots.has_room(AdapterContent("b", 1), False, 5), "it has fewer users, and leaves"
    slots.block(high, 6.0, 1)
    assert slots.unblock(7.0, lanes(low=5, high=1)) == []
    assert slots._due == low and slots.has_room(a, False, 1)
    slots.unblock(12.0, lanes(low=5, high=1))
    assert slots._due == high
    slots.release("b")
    assert slots.unblock(13.0, lanes(low=5, high=1)) == ["high"]
    slots.acquire(high)
    slots.unblock(14.0, lanes(low=5))
    assert slots._due == low


def test_what_waited_too_long_keeps_its_place_free() -> None:
    """A small adapter does not take the chunk that a large one waits for."""
    one = engine(1, 16, wait_s=5.0)
    small = one.add(numbers(5), max_tokens=12, adapter="a-8")
    one.step()
    large = one.add(numbers(6), max_tokens=1, adapter="large-16")
    others = []
    for step in range(30):
        one.now += 1.0
        others.append(one.add(numbers(7, step), max_tokens=3, adapter=f"s{step % 3}-8"))
        one.step()
    one.finish()
    assert one.order.index(small) < one.order.index(large) < one.order.index(others[8])


def test_what_makes_way_is_chosen_again_when_another_took_its_place() -> None:
    slots, large = AdapterSlots(AdapterLimits(6, 8, 8, 5.0)), AdapterContent("large", 2)
    a, b, c, other = (AdapterContent(name, 2) for name in ("a", "b", "c", "other"))
    for one in (a, b, c):
        slots.acquire(one)
    slots.block(large, 0.0)
    assert slots.unblock(9.0, lanes(large=0)) == [] and not slots.has_room(a, False)
    slots.release("a")
    slots.release("b")
    assert slots.unblock(9.0, lanes(large=0)) == ["large"]
    slots.acquire(other)  # whose turn comes first, and for which `a` goes
    assert not slots.has_room(b, False), "nothing would be left for the one that waits"
    assert slots.has_room(large, False)


def test_what_is_wanted_no_more_takes_no_place() -> None:
    slots = AdapterSlots(AdapterLimits(2, 8, 8, 5.0))
    large, gone, small = (
        AdapterContent("large", 2),
        AdapterContent("gone", 1),
        AdapterContent("s", 1),
    )
    for name in "ab":
        slots.acquire(AdapterContent(name, 1))
    for one in (large, gone, small):
        slots.block(one, 0.0)
    slots.release("a")
    assert slots.unblock(0.0, lanes(large=0, s=0)) == ["s"]


def test_a_pause_does_not_wait_for_ever() -> None:
    """A preempted request gets its adapter's place back, though older ones wait for it that may not
    begin."""
    one = engine(1, num_blocks=10, policy="priority")
    first = one.add(numbers(9), max_tokens=20, adapter="a-8", priority=3)
    base = one.add(numbers(9, 1), max_tokens=20)
    one.step()
    second = one.add(numbers(5, 2), max_tokens=4, adapter="b-8", priority=1)
    later = one.add(numbers(5, 3), max_tokens=4, adapter="c-8", priority=2)
    for _ in range(40):
        one.step()
        if "b-8" in slots_of(one).residents:
            break
    assert one.core.scheduler.waiting.has_begun and second not in one.ended
    one.core.pause()
    one.finish()
    assert set(one.ended) == {first, base, second}
    one.core.resume()
    one.finish()
    assert later in one.ended


def test_many_small_adapters_fit_where_few_large_ones_would() -> None:
    one = engine(2, 32)
    for i in range(8):
        one.add(numbers(5, i), max_tokens=4, adapter=f"a{i}-8")
    one.step()
    assert one.core.scheduler.num_running == 8
    one.finish()
    for i in range(3):
        one.add(numbers(5, i), max_tokens=4, adapter=f"b{i}-32")
    one.step()
    assert one.core.scheduler.num_running == 2
    one.finish()


def test_the_least_recently_used_makes_way_and_what_is_in_use_stays() -> None:
    one = engine(3)
    for name in ("a-8", "b-8", "c-8", "a-8"):
        one.add(numbers(5), max_tokens=2, adapter=name)
        one.finish()
    one.add(numbers(5), max_tokens=2, adapter="d-8")
    one.finish()
    assert slots_of(one).residents.keys() == {"a-8", "c-8", "d-8"}
    metrics = one.core.metrics.adapters
    assert (metrics.device_queries.value, metrics.device_hits.value) == (5, 1)
    assert (metrics.host_queries.value, metrics.host_hits.value) == (5, 1)


def test_a_pinned_adapter_goes_last() -> None:
    one = engine(2)
    for name in ("a-8", "b-8"):
        one.add(numbers(5), max_tokens=2, adapter=name)
        one.finish()
    assert one.core.adapters is not None
    one.core.adapters._hosted["a-8"].names["a-8"] = 7
    assert one.core.pin_adapter(7)
    for name in ("c-8", "d-8"):
        one.add(numbers(5), max_tokens=2, adapter=name)
        one.finish()
    assert slots_of(one).residents.keys() == {"a-8", "d-8"}
    with pytest.raises(RequestError, match="lora_int_id=99 cannot be pinned"):
        one.core.pin_adapter(99)


def test_a_pinned_adapter_does_not_keep_others_from_running() -> None:
    one = engine(1)
    one.add(numbers(5), adapter="a-8")
    one.finish()
    one.core.pin_adapter(1)
    key = one.add(numbers(5), adapter="b-8")
    one.finish()
    assert one.ended[key].finish_reason == "length"


def test_what_is_evicted_is_pinned_no_more() -> None:
    one = engine(1, max_host=1)
    one.add(numbers(5), adapter="a-8")
    one.finish()
    one.core.pin_adapter(1)
    for name in ("b-8", "a-8", "b-8"):
        one.add(numbers(5), adapter=name)
        one.finish()
    assert one.core.adapters is not None
    assert not one.core.adapters._pinned and not slots_of(one)._pinned


def test_others_run_while_an_adapter_loads() -> None:
    one = engine(load_polls=8)
    loads = one.add(numbers(5), max_tokens=1, adapter="a-8")
    base = one.add(numbers(5), max_tokens=4)
    one.step(6)
    assert one.order == [base]
    assert not one.core.has_work and 0 < (one.core.wait_s or 0) < 0.1, "a loop looks for it"
    for _ in range(8):
        one.step()
    one.finish()
    assert one.order == [base, loads]


@pytest.mark.parametrize("n", [1, 3])
def test_prefixes_are_shared_by_content_and_not_by_name(n: int) -> None:
    """The same weights under another name do; new weights under the same name do not."""
    one = engine()
    one.folders.holds = {"sql": "v1-8", "alias": "v1-8"}
    prompt = numbers(24)
    keys = []
    for folder in ("sql", "alias", None):
        keys.append(one.add(prompt, n=n, **({} if folder is None else {"adapter": folder})))
        one.finish()
    one.folders.holds["sql"] = "v2-8"
    for folder in ("sql", "sql", "alias"):
        keys.append(one.add(prompt, n=n, adapter=folder))
        one.finish()
    assert [one.cached(key) for key in keys] == [0, 23, 0, 0, 23, 23]


def test_a_reload_while_requests_run_leaves_them_their_weights() -> None:
    one = engine(2)
    one.folders.holds["sql"] = "v1-8"
    old = one.add(numbers(9), max_tokens=12, adapter="sql")
    one.step(3)
    one.folders.holds["sql"] = "v2-8"
    new = one.add(numbers(9), max_tokens=3, adapter="sql")
    one.finish()
    assert one.order == [new, old]


def test_unloading_lets_requests_go_on() -> None:
    one = engine()
    key = one.add(numbers(9), max_tokens=6, adapter="a-8")
    one.step(2)
    assert one.core.list_adapters() == [1]
    assert one.core.unload_adapter(1) and not one.core.unload_adapter(1)
    assert one.core.list_adapters() == []
    one.finish()
    assert one.ended[key].finish_reason == "length"
    assert not one.toy.hosted and not slots_of(one).residents, "it went with its last request"


@pytest.mark.parametrize("fault", ["broken", "vanished", "large-64"])
def test_a_fault_costs_its_own_request_alone(fault: str) -> None:
    one = engine()
    one.folders.holds["vanished"] = "gone-8"
    one.folders.broken.add("broken")
    one.toy.vanished.add("vanished")
    good = [one.add(numbers(9), adapter="a-8"), one.add(numbers(9))]
    bad = one.add(numbers(9), n=2, adapter=fault)
    one.finish()
    assert {one.ended[bad + i].finish_reason for i in range(2)} == {"error"}
    assert all(one.ended[bad + i].is_own_fault for i in range(2))
    assert [one.ended[key].finish_reason for key in good] == ["length"] * 2
    if fault == "large-64":
        assert "max_lora_rank is 8" in (one.ended[bad].error or "")


def test_of_two_folders_with_the_same_content_one_may_vanish() -> None:
    one = engine(load_polls=2)
    one.folders.holds = {"vanished": "v-8", "there": "v-8"}
    one.toy.vanished.add("vanished")
    keys = [one.add(numbers(9), adapter=folder) for folder in ("vanished", "there")]
    one.step(6)
    one.finish()
    assert [one.ended[key].finish_reason for key in keys] == ["error", "length"]


@pytest.mark.parametrize("how", ["death", "shutdown"])
def test_callers_learn_of_the_end_of_the_engine(how: str) -> None:
    one = engine(load_polls=100)
    loading = one.core.load_adapter("a", 1, "a-8")
    params = SamplingParams(max_tokens=1)
    new = NewRequest(
        7, "r", np.array([1, 2], np.int32), params, 0.0, adapter=LoRARequest("b", 2, "b-8")
    )
    accepted = one.core.add(new)
    one.step()
    assert accepted is not None and not accepted.done() and not loading.done()
    if how == "death":
        one.core.die("a fault", RuntimeError("a fault"))
    else:
        one.core.shutdown()
    assert isinstance(loading.exception(), EngineDeadError) and accepted.exception() is None
    assert one.core.take_ended().finished[0].finish_reason == "error"
    with pytest.raises(EngineDeadError):
        one.core.load_adapter("c", 3, "c-8")


def test_the_host_holds_no_more_than_it_may_and_all_get_their_turn() -> None:
    one = engine(4, max_host=4, load_polls=1)
    keys = [one.add(numbers(5, i), max_tokens=5, adapter=f"a{i}-8") for i in range(12)]
    for _ in range(200):
        one.step()
        assert len(one.toy.hosted) <= 4
    one.finish()
    assert one.order == keys
    assert one.core.metrics.adapters.host_evictions.value == 8


def test_on_the_host_none_starves_either() -> None:
    one = engine(2, max_host=2, wait_s=10.0)
    for step in range(60):
        if step == 2:
            cold = one.add(numbers(6), max_tokens=1, adapter="cold-8")
        one.add(numbers(5, step), max_tokens=9, adapter=f"hot{step % 2}-8")
        one.now += 1.0
        one.step()
    assert cold in one.ended
    one.finish()


@pytest.mark.parametrize("load_polls", [0, 3])
@pytest.mark.parametrize("by_tenant", [False, True], ids=["priorities", "tenants"])
def test_requests_that_only_wait_hold_no_place_on_the_host(
    by_tenant: bool, load_polls: int
) -> None:
    """Two adapters have many requests, and one comes for a third: of a better priority, or of a
    tenant that has had nothing yet."""
    policy = "fcfs" if by_tenant else "priority"
    one = Engine(
        adapters=AdapterLimits(2, 8, 2, 2.0), policy=policy, max_num_seqs=2, load_polls=load_polls
    )
    low, high = ({"tenant": "a"}, {"tenant": "b"}) if by_tenant else ({"priority": 5}, {})
    many = [one.add(numbers(5, i), max_tokens=8, adapter=f"a{i % 2}-8", **low) for i in range(30)]
    one.step(10)
    base: list[int] = []
    key = one.add(numbers(6), max_tokens=2, adapter="c-8", **high)
    for step in range(60):
        one.now += 0.1
        while not by_tenant and sum(other not in one.ended for other in base) < 4:
            base.append(one.add(numbers(5, step), max_tokens=5, priority=1))
        one.step()
        assert len(one.toy.hosted) <= 2
    assert key in one.ended and not set(many) <= one.ended.keys()
    for _ in range(600):
        one.now += 0.1
        one.step()
    one.finish()
    assert {ended.finish_reason for ended in one.ended.values()} == {"length"}
    assert set(many) <= one.ended.keys()


def test_on_a_full_host_adapters_take_turns_and_requests_in_work_end() -> None:
    """Each has been used before it makes way, however short the patience of the others."""
    one = engine(2, max_host=2, wait_s=0.0, load_polls=2, max_num_seqs=2)
    keys = [one.add(numbers(5, i), max_tokens=4, adapter=f"a{i % 5}-8") for i in range(25)]
    for _ in range(400):
        one.now += 1.0
        one.step()
        assert len(one.toy.hosted) <= 2
    assert set(keys) == one.ended.keys()
    assert one.core.metrics.adapters.host_evictions.value <= 25
    one.finish()


def test_a_request_that_lost_its_place_reads_its_folder_again() -> None:
    one = engine(1, max_host=1, wait_s=0.0, max_num_seqs=1)
    one.folders.holds["sql"] = "v1-8"
    keys = [one.add(numbers(5, i), max_tokens=6, adapter="sql") for i in range(2)]
    one.step(2)
    other = one.add(numbers(6), max_tokens=2, adapter="b-8")
    for _ in range(3):
        one.now += 1.0
        one.step()
    one.folders.holds["sql"] = "v2-8"
    one.toy.vanished.add("v1-8")
    one.digests[keys[1]] = "v2-8"
    for _ in range(20):
        one.now += 1.0
        one.step()
    one.finish()
    assert one.order == [keys[0], other, keys[1]]
    assert {ended.finish_reason for ended in one.ended.values()} == {"length"}


def test_the_host_is_bounded_by_bytes_too() -> None:
    one = Engine(adapters=AdapterLimits(2, 16, None, 1e9, max_host_bytes=40))
    for i, rank in enumerate([16, 8, 16, 8, 8, 8, 16]):
        one.add(numbers(5, i), max_tokens=2, adapter=f"a{i}-{rank}")
        one.finish()
        held = sum(int(name.rpartition("-")[2]) for name in one.toy.hosted)
        assert held <= 40
    assert one.toy.hosted == {"a3-8", "a4-8", "a5-8", "a6-16"}
    tiny = Engine(adapters=AdapterLimits(1, 16, None, 1e9, max_host_bytes=1))
    for name in ("a-16", "b-16"):  # one is always held
        tiny.add(numbers(5), adapter=name)
        tiny.finish()
    assert len(tiny.ended) == 2


def test_several_make_way_for_a_large_one() -> None:
    one = Engine(adapters=AdapterLimits(4, 32, None, 2.0, max_host_bytes=32))
    for name in ("a-16", "b-16"):
        one.add(numbers(5), max_tokens=4, adapter=name)
    one.step(2)
    large = one.add(numbers(6), max_tokens=2, adapter="large-32")
    gone = one.add(numbers(6), max_tokens=2, adapter="gone-32")
    for step in range(100):
        one.now += 0.5
        if step == 3:
            one.core.abort(f"r{gone}")
        for name in ("a-16", "b-16"):
            if step < 60:
                one.add(numbers(5, step), max_tokens=4, adapter=name)
        one.step()
    one.finish()
    assert one.ended[gone].finish_reason == "abort" and one.order.index(large) < 60
    assert one.core.adapters is not None and not one.core.adapters.is_loading


def test_whole_weights_have_a_bound_of_their_own() -> None:
    """They lie beside the chunks: of two adapters that have both room there, one waits."""
    one = Engine(adapters=AdapterLimits(4, 8, 8, 5.0, max_saved_bytes=100))
    one.folders.saved = {"a-8": 60, "b-8": 60, "c-8": 40, "large-8": 101}
    large = one.add(numbers(5), adapter="large-8")
    a = one.add(numbers(5, 1), max_tokens=30, adapter="a-8")
    b = one.add(numbers(5, 2), max_tokens=3, adapter="b-8")
    c = one.add(numbers(5, 3), max_tokens=3, adapter="c-8")
    plain = one.add(numbers(5, 4), max_tokens=3, adapter="d-8")
    for step in range(200):
        one.now += 0.5
        one.step()
        if step % 4 == 0 and step < 100:  # so that a is never idle by itself
            one.add(numbers(5, step), max_tokens=9, adapter="a-8")
        residents = slots_of(one).residents
        assert sum(resident.content.saved_bytes for resident in residents.values()) <= 100
    one.finish()
    assert one.order[0] == large and set(one.order[1:3]) == {c, plain}
    assert one.order.index(b) < len(one.order) - 5, "others make way for it"
    assert a in one.ended
    assert "0.00 GiB of the devices are free" in (one.ended[large].error or "")


def test_metrics_name_the_adapters_of_requests() -> None:
    one = engine(2)
    for name in ("b-8", "a-8", "b-8"):
        one.add(numbers(9), max_tokens=20, adapter=name)
    one.step(2)
    one.add(numbers(9), adapter="c-8")
    one.add(numbers(9), max_tokens=20)
    one.step()

    def names() -> tuple[str, str, str]:
        one.core.read_metrics()
        (info,) = one.core.metrics.adapters.info
        labels = info.labels
        kinds = ("running_lora_adapters", "waiting_lora_adapters", "max_lora")
        return labels[kinds[0]], labels[kinds[1]], labels[kinds[2]]

    assert names() == ("a-8,b-8", "c-8", "2")
    one.finish()
    assert names() == ("", "", "2")


def test_an_adapter_and_a_preempted_row() -> None:
    """A row that is added again finds its adapter in another slot."""
    one = engine(2, num_blocks=10, policy="priority")
    first = one.add(numbers(9), max_tokens=20, adapter="a-8", priority=3)
    one.step(3)
    one.add(numbers(9, 1), max_tokens=14, adapter="b-8", priority=1)
    one.step(3)
    one.add(numbers(9, 2), max_tokens=20, adapter="c-8", priority=2)
    one.finish()
    rows = [row for plan in one.plans for row in plan.added_rows if row.params.seed == first]
    assert len({row.adapter_slot for row in rows}) == 2


def test_a_thousand_adapters() -> None:
    """Requests drawn by Zipf over a thousand folders: all are served, and soon."""
    random = Random(0)
    one = engine(4, 16, max_host=64, wait_s=50.0, max_num_seqs=16)
    weights = [1 / (i + 1) for i in range(1000)]
    names = random.choices([f"a{i}-8" for i in range(1000)], weights, k=600)
    for i, name in enumerate(names):
        one.add(numbers(5, i), max_tokens=3, adapter=name)
        one.now += 1.0
        one.step()
    one.finish()
    assert len(one.ended) == 600
    assert {ended.finish_reason for ended in one.ended.values()} == {"length"}
    metrics = one.core.metrics.adapters
    assert metrics.device_queries.value == 600 and metrics.device_hits.value > 100
    assert metrics.host_hits.value > 250
