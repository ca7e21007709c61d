"""Instruments against plain reckoning, request histograms against a known schedule, and the text
against prometheus_client's own parser."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from quire.metrics.engine import EngineMetrics
from quire.metrics.instruments import Histogram, HistogramReading, RecentRate
from quire.metrics.prometheus import render
from tests.engine.driver import Engine, numbers

BOUNDS = (0.1, 0.5, 1.0, 5.0)


@given(st.lists(st.floats(0, 10), max_size=50))
def test_a_histogram_counts_one_by_one_as_it_does_in_bulk(values: list[float]) -> None:
    single, bulk = Histogram("a", "", BOUNDS), Histogram("a", "", BOUNDS)
    for value in values:
        single.observe(value)
    bulk.observe_many(np.array(values, np.float64))
    one, many = single.read(), bulk.read()
    assert one.buckets == many.buckets
    assert one.buckets == {
        **{f"{b:g}": sum(v <= b for v in values) for b in BOUNDS},
        "+Inf": len(values),
    }
    assert many.sum == pytest.approx(sum(values)) and many.max == max(values, default=0.0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 100)), max_size=40))
def test_a_recent_rate_is_the_mean_of_the_last_five_seconds(moves: list[tuple[int, int]]) -> None:
    rate, now, seen = RecentRate(), 1000, []
    for wait, amount in moves:
        now += wait
        rate.add(now + 0.3, amount)
        seen.append((now, amount))
    expected = sum(a for t, a in seen if now - 5 <= t < now) / 5
    assert rate.per_second(now + 0.9) == pytest.approx(expected)
    assert rate.per_second(now + 100) == 0.0


def histograms(engine: Engine) -> dict[str, HistogramReading]:
    return {
        reading.name.removeprefix("quire:"): reading
        for reading in engine.core.read_metrics().all
        if isinstance(reading, HistogramReading)
    }


def test_times_of_a_request() -> None:
    """Steps are 1 s apart: the second request waits for the first one's five, then computes its
    prompt in two steps and generates four tokens."""
    engine = Engine(max_num_seqs=1, max_num_batched_tokens=8, enable_prefix_caching=False)
    engine.now = 1.0
    for i in range(2):
        engine.add(numbers(16, start=i), max_tokens=4)
    for request in engine.requests.values():
        request.arrival_time = 1.0
    while engine.core.has_work:
        engine.step()
        engine.now += 1.0
    found = histograms(engine)
    sums = {name: reading.sum for name, reading in found.items()}
    # Seconds at which: first steps 1 and 6, first tokens 2 and 7, ends 5 and 10.
    assert sums["time_to_first_token_seconds"] == 1 + 6
    assert sums["request_queue_time_seconds"] == 0 + 5
    assert sums["request_prefill_time_seconds"] == 1 + 1
    assert sums["request_decode_time_seconds"] == 3 + 3
    assert sums["request_inference_time_seconds"] == 4 + 4
    assert sums["e2e_request_latency_seconds"] == 4 + 9
    assert sums["request_time_per_output_token_seconds"] == 1 + 1
    assert (found["inter_token_latency_seconds"].count, sums["inter_token_latency_seconds"]) == (
        6,
        6.0,
    )
    assert sums["request_prompt_tokens"] == sums["request_prefill_kv_computed_tokens"] == 32
    assert sums["request_generation_tokens"] == sums["request_params_max_tokens"] == 8


def test_gaps_between_tokens_include_preemption() -> None:
    engine = Engine(13, enable_prefix_caching=False)
    for i in range(2):
        engine.add(numbers(20, start=i), max_tokens=20)
    while engine.core.has_work:
        engine.now += 1.0
        engine.step()
    assert engine.core.statistics().num_preemptions
    gaps = histograms(engine)["inter_token_latency_seconds"]
    assert gaps.count == 2 * 19
    ends = [
        sequence.finished_time - sequence.first_token_time for sequence in engine.ended.values()
    ]
    assert gaps.sum == sum(ends)
    assert gaps.max > 5


def test_several_sequences_of_one_request() -> None:
    engine = Engine()
    engine.add(numbers(8), max_tokens=6, n=3)
    engine.core.step()
    engine.core.abort("r0", key=1)
    engine.finish()
    found = histograms(engine)
    assert (found["request_params_n"].count, found["request_params_n"].sum) == (1, 3)
    assert (found["request_max_num_generation_tokens"].count) == 1
    assert found["request_max_num_generation_tokens"].sum == 6
    assert found["request_generation_tokens"].count == 3


def test_a_request_that_never_ran_has_no_times() -> None:
    engine = Engine(max_num_seqs=1)
    engine.now = 5.0
    engine.add(numbers(5), deadline=6.0)
    engine.now = 7.0
    engine.step()
    found = histograms(engine)
    assert found["e2e_request_latency_seconds"].count == 1
    for name in ("queue", "prefill", "decode", "inference"):
        assert found[f"request_{name}_time_seconds"].count == 0
    assert found["request_prefill_kv_computed_tokens"].count == 0


VLLM_NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "kv_cache_usage_perc",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "prompt_tokens_by_source",
    "generation_tokens",
    "request_success",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "request_prefill_kv_computed_tokens",
    "iteration_tokens_total",
]


@pytest.mark.parametrize("prefix", ["quire", "vllm"])
def test_prometheus_text(prefix: str) -> None:
    engine = Engine()
    for i in range(3):
        engine.add(numbers(8, start=i), max_tokens=4)
    engine.finish()
    labels = {"model_name": 'a "model"', "engine": "0"}
    text = render(engine.core.read_metrics().all, prefix, labels).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert not {f"{prefix}:{name}" for name in VLLM_NAMES} - set(families)
    assert all(name.startswith(f"{prefix}:") for name in families)
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    own = (("engine", "0"), ("model_name", 'a "model"'))
    assert samples[(f"{prefix}:generation_tokens_total", *own)] == 12
    by_reason = (own[0], ("finished_reason", "length"), own[1])
    assert samples[(f"{prefix}:request_success_total", *by_reason)] == 3
    assert samples[(f"{prefix}:request_generation_tokens_count", *own)] == 3
    assert samples[(f"{prefix}:request_generation_tokens_sum", *own)] == 12
    below = (own[0], ("le", "5"), own[1])
    assert samples[(f"{prefix}:request_generation_tokens_bucket", *below)] == 3


def test_each_instrument_is_read_once() -> None:
    readings = EngineMetrics().read()
    names = [(reading.name, *reading.labels.items()) for reading in readings]
    assert len(set(names)) == len(names)
