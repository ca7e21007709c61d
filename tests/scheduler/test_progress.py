"""Progress reports: for those who ask, while they wait or their prompts are computed."""

from __future__ import annotations

import pytest

from quire.protocol.output import RequestProgress
from tests.engine.driver import Engine, numbers


def advance(engine: Engine, steps: int, seconds: float = 1.0) -> list[RequestProgress]:
    """Step the engine, `seconds` apart, and gather the reports."""
    reports = []
    for _ in range(steps):
        engine.now += seconds
        reports += engine.step()
    return reports


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_prompt_reports_after_each_of_its_steps(steps_in_flight: int) -> None:
    engine = Engine(steps_in_flight=steps_in_flight, max_num_batched_tokens=10)
    key = engine.add(numbers(45), wants_progress=True)
    engine.add(numbers(5))
    reports = [r for r in advance(engine, 12) if r.processed_tokens]
    assert {(r.key, r.prompt_tokens, r.cached_tokens) for r in reports} == {(key, 45, 0)}
    assert [r.processed_tokens for r in reports] == [10, 20, 30, 40]
    assert [r.eta_s for r in reports[1:]] == pytest.approx([2.5, 1.5, 0.5], abs=0.2)
    engine.finish()


def test_cached_tokens_count_as_processed() -> None:
    engine = Engine(max_num_batched_tokens=10)
    engine.add(numbers(24), max_tokens=1)
    engine.finish()
    engine.add(numbers(24) + numbers(30, start=5), wants_progress=True)
    report = advance(engine, 1)[-1]
    assert (report.cached_tokens, report.processed_tokens) == (24, 34)


def test_who_waits_hears_twice_a_second() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add(numbers(5), max_tokens=60)
    engine.step()
    waiting = engine.add(numbers(5, start=1), wants_progress=True)
    reports = advance(engine, 40, seconds=0.1)
    assert 8 <= len(reports) <= 9
    assert {(r.key, r.processed_tokens) for r in reports} == {(waiting, 0)}


def test_the_estimate_includes_the_queue() -> None:
    """Each prompt of 10 tokens takes the only row for 5 s; the estimate for the tenth in the queue
    is about 45 s, and it shrinks as the queue does."""
    engine = Engine(max_num_seqs=1, enable_prefix_caching=False)
    for i in range(40):
        engine.add(numbers(10, start=i), max_tokens=5)
    advance(engine, 100)
    ahead = engine.core.scheduler.waiting.num_new
    engine.add(numbers(10), wants_progress=True)
    first = advance(engine, 1)[0].eta_s
    assert first == pytest.approx(5 * ahead, rel=0.25)
    later = advance(engine, 51)[-1].eta_s
    assert later == pytest.approx(5 * (ahead - 10), rel=0.25)


def test_another_tenants_queue_is_not_ahead() -> None:
    engine = Engine(max_num_seqs=1, enable_prefix_caching=False)
    for i in range(200):
        engine.add(numbers(10, start=i), max_tokens=5, tenant="a")
    advance(engine, 48)
    engine.add(numbers(10), tenant="b", wants_progress=True)
    estimate = advance(engine, 1)[0].eta_s
    assert estimate is not None and estimate < 10


def test_no_report_without_a_wish_for_it_or_after_the_first_text() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add(numbers(5), max_tokens=50)
    asked = engine.add([1, 2], max_tokens=50, wants_progress=True)
    assert not advance(engine, 0)
    while f"r{asked}" in engine.core.scheduler.requests:
        reports = advance(engine, 1)
        if engine.core.scheduler.requests[f"r{asked}"][0].num_known > 2:
            break
    assert not advance(engine, 5), reports
    engine.core.abort(f"r{asked}")
    engine.finish()
    assert engine.core.scheduler.progress.next_time is None


def test_an_estimate_that_cannot_be_made_is_none() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add(numbers(5))
    engine.add(numbers(5), wants_progress=True)
    (report,) = advance(engine, 1)
    assert report.eta_s is None
