"""Snapshots and gauges: blocks, requests and memory as they are at one moment."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quire.metrics.instruments import GaugeReading
from quire.protocol.output import BlockState
from tests.engine.driver import Engine, numbers


def gauges(engine: Engine) -> dict[tuple[str, ...], float]:
    return {
        (reading.name.removeprefix("quire:"), *reading.labels.values()): reading.value
        for reading in engine.core.read_metrics().all
        if isinstance(reading, GaugeReading)
    }


def test_waiting_requests_count_by_what_they_wait_for() -> None:
    engine = Engine(32, max_num_seqs=1)
    for start in range(3):
        engine.add(numbers(5, start=start), max_tokens=20)
    engine.step()
    new = replace(engine.requests[0], key=5000, request_id="r5000")
    engine.core.scheduler.add(new, num_awaited=1)
    values = gauges(engine)
    assert values["num_requests_running",] == 1 and values["num_requests_waiting",] == 3
    assert values["num_requests_waiting_by_reason", "capacity"] == 2
    assert values["num_requests_waiting_by_reason", "deferred"] == 1
    engine.core.scheduler.make_ready("r5000")
    assert gauges(engine)["num_requests_waiting_by_reason", "deferred"] == 0


def test_blocks_requests_and_memory() -> None:
    """8 tokens are shared by two requests; an ended one left three findable blocks."""
    engine = Engine(32, max_num_seqs=2)
    engine.add(numbers(11, start=50), max_tokens=1)
    engine.finish()
    first = engine.add(numbers(10), max_tokens=20, tenant="a", shares_prefixes=True)
    engine.step()
    second = engine.add([*numbers(8), 90, 91, 92], max_tokens=20, tenant="b", shares_prefixes=True)
    engine.step()
    third = engine.add(numbers(5), max_tokens=3, tenant="b")
    snapshot = engine.core.snapshot()
    counts = np.bincount(snapshot.blocks, minlength=4).tolist()
    one, two = snapshot.running
    assert (one.key, one.tenant, one.state, one.num_prompt_tokens) == (first, "a", "running", 10)
    assert (two.key, two.tenant, two.num_prompt_tokens) == (second, "b", 11)
    assert (one.num_tokens, one.num_computed_tokens) == (12, 11)
    shared = set(one.block_table.tolist()) & set(two.block_table.tolist())
    assert len(shared) == 2
    assert {i for i, s in enumerate(snapshot.blocks) if s == BlockState.SHARED} == shared
    owned = set(one.block_table.tolist()) ^ set(two.block_table.tolist())
    assert {i for i, s in enumerate(snapshot.blocks) if s == BlockState.OWNED} == owned
    for each in (one, two):
        table = set(each.block_table.tolist())
        assert (each.num_blocks, each.num_owned_blocks) == (len(table), len(table - shared))
    assert counts[BlockState.CACHED] == 3
    assert sum(counts) == 32
    (waiting,) = snapshot.waiting
    assert (waiting.key, waiting.state, len(waiting.block_table)) == (third, "waiting", 0)
    assert (waiting.num_blocks, waiting.num_owned_blocks) == (0, 0)
    memory = snapshot.memory
    assert memory.kv_used == 1000 * (len(shared) + len(owned))
    assert memory.kv_cached == 3000
    assert memory.kv_used + memory.kv_cached + memory.kv_free == memory.weights == 32_000
    assert memory.other == 32_000
    values = gauges(engine)
    assert values["kv_blocks_shared",] == 2 and values["kv_blocks_cached",] == 3
    assert values["device_memory_bytes", "kv_used"] == memory.kv_used
    assert values["num_requests_waiting_by_reason", "capacity"] == 1
    slots = 4 * (len(one.block_table) + len(two.block_table))
    tokens = one.num_computed_tokens + two.num_computed_tokens
    assert values["kv_cache_waste_perc",] == pytest.approx(1 - tokens / slots)
    engine.finish()


def test_what_a_window_let_go_is_neither_held_nor_waste() -> None:
    """42 tokens leave 2 of a block's 4 slots empty in each of the two KV groups."""
    engine = Engine(windows=(None, 6))
    engine.add(numbers(40), max_tokens=9)
    engine.step(3)
    (sequence,) = engine.core.snapshot().running
    num_blocks = engine.core.scheduler.kv.pool.num_used
    assert sequence.num_blocks == num_blocks == 11 + 2
    assert gauges(engine)["kv_cache_waste_perc",] == pytest.approx(4 / (4 * num_blocks))
    engine.finish()


def test_a_long_queue_is_cut() -> None:
    engine = Engine(max_num_seqs=1)
    for i in range(30):
        engine.add(numbers(5, start=i))
    snapshot = engine.core.snapshot(max_waiting=7)
    assert len(snapshot.waiting) == 7 and snapshot.num_waiting == 30


def test_tokens_per_second_are_those_of_the_last_seconds() -> None:
    engine = Engine(max_num_seqs=4)
    engine.now = 100.0
    for i in range(4):
        engine.add(numbers(10, start=i), max_tokens=80)
    for _ in range(60):
        engine.now += 0.25
        engine.step()
    assert engine.core.snapshot().generation_tokens_per_s == pytest.approx(16.0)
    engine.now += 1000.0
    assert engine.core.snapshot().generation_tokens_per_s == 0.0


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_what_is_preempted_is_counted_once(steps_in_flight: int) -> None:
    """A prompt is looked up once and has one first token, and each further token comes some time
    after the one before it, also where its sequence lost its row between them."""
    engine = Engine(13, steps_in_flight, enable_prefix_caching=False)
    for start in range(2):
        engine.add(numbers(20, start=start), max_tokens=20)
    while engine.core.has_work:
        engine.now += 1.0
        engine.step()
    metrics = engine.core.metrics
    assert metrics.preemptions.value
    assert metrics.queries.value == metrics.prompt_tokens.value == 40
    assert metrics.generation_tokens.value == 40
    gaps, firsts = metrics.inter_token.read(), metrics.time_to_first_token.read()
    assert (gaps.count, firsts.count) == (38, 2)
    ended = engine.ended.values()
    assert gaps.sum == sum(one.finished_time - one.first_token_time for one in ended)
    assert firsts.sum == sum(one.first_token_time for one in ended)


def test_a_request_that_is_cut_back_to_its_prompt_has_one_first_token() -> None:
    engine = Engine()
    engine.now = 1.0
    key = engine.add(numbers(20), max_tokens=5)
    engine.step(3)
    (sequence,) = engine.core.scheduler.requests[f"r{key}"]
    engine.core.scheduler.cut_back(sequence, 20)
    engine.finish()
    assert engine.core.metrics.time_to_first_token.read().count == 1


def test_a_sequence_that_waits_for_its_last_tokens_is_shown() -> None:
    engine = Engine(steps_in_flight=2)
    key = engine.add(numbers(9), max_tokens=20)
    engine.step(3)
    engine.core.abort(f"r{key}")
    (shown,) = engine.core.snapshot().running
    assert (shown.key, shown.state, shown.num_blocks) == (key, "draining", 0)
    engine.finish()


def test_a_stopped_engine_can_be_looked_at() -> None:
    engine = Engine()
    engine.core.shutdown()
    assert engine.core.snapshot().memory.total == 0
    assert gauges(engine)["num_requests_running",] == 0
