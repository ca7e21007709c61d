"""Steps for a pipeline of several stages: which rows they have, and how tokens reach all stages.

What comes out is compared with each request's tokens alone (`Engine.finish`), and the toy
executor's stages compare their rows.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from quire.protocol.plan import StepPlan
from quire.scheduler.sequence import Status
from tests.engine.driver import Engine, numbers

STAGES = pytest.mark.parametrize("num_stages", [2, 3])


def pipeline(num_stages: int, **options: Any) -> Engine:
    return Engine(**{"steps_in_flight": num_stages, "num_stages": num_stages, **options})


def appended(plans: list[StepPlan]) -> list[tuple[int, int]]:
    """Rows and tokens that plans have told of."""
    return [
        (int(row), int(token))
        for plan in plans
        for row, token in zip(plan.append_rows, plan.append_tokens, strict=True)
    ]


@STAGES
@pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 12])
def test_rows_that_decode_are_divided_among_the_steps_in_flight(
    num_stages: int, count: int
) -> None:
    """Every step has its share, so that every stage has work, and every row is in every
    `num_stages`-th step."""
    engine = pipeline(num_stages)
    for i in range(count):
        engine.add(numbers(9, start=i), max_tokens=40)
    engine.step(20)
    sizes, share = [], -(-count // num_stages)
    before = len(engine.plans)
    while len(engine.plans) < before + 6 * num_stages:
        engine.step()
        assert len(engine.core._in_flight) <= num_stages
    for plan in engine.plans[before : before + 6 * num_stages]:
        assert plan.samples.all() and (plan.num_new_tokens == 1).all()
        sizes.append(len(plan.rows))
    num_steps = -(-count // share)
    expected = [share] * (num_steps - 1) + [count - share * (num_steps - 1)]
    assert Counter(sizes) == Counter(
        {size: 6 * num_stages // num_steps * expected.count(size) for size in expected}
    )
    for first in range(before, before + 5 * num_stages):
        turns = np.concatenate([one.rows for one in engine.plans[first : first + num_steps]])
        assert sorted(turns.tolist()) == list(range(count))
    engine.finish()


@STAGES
def test_as_many_steps_as_stages_are_launched_before_a_result_is_waited_for(
    num_stages: int,
) -> None:
    """Chunks of one prompt follow each other without waiting. Once nothing is left to plan, each
    call takes a result in: none is spent on looking."""
    engine = pipeline(num_stages, max_num_batched_tokens=8)
    engine.add(numbers(8 * num_stages), max_tokens=5)
    engine.step(num_stages - 1)
    assert len(engine.core._in_flight) == num_stages - 1
    launched = []
    execute = engine.toy.execute

    def note(plan: StepPlan) -> None:
        execute(plan)
        launched.append(len(engine.core._in_flight) + 1)

    engine.toy.execute = note  # type: ignore[method-assign]
    engine.step()
    assert launched == [num_stages]
    num_calls = 0
    while engine.core.has_work:
        before = engine.core._in_flight.copy()
        engine.step()
        num_calls += 1
        assert engine.core._in_flight != before
    assert num_calls == (num_stages - 1) + 2 * 4
    engine.finish()


@STAGES
def test_chunks_of_a_prompt_for_beams_do_not_wait_either(num_stages: int) -> None:
    """The host needs what beams sample, and nothing of their prompt."""
    engine = pipeline(num_stages, max_num_batched_tokens=8)
    engine.add(numbers(8 * num_stages), max_tokens=5, beam_width=2)
    engine.step(num_stages - 1)
    assert len(engine.core._in_flight) == num_stages - 1
    engine.run()


@STAGES
def test_tokens_are_told_once_and_only_where_they_are_needed(num_stages: int) -> None:
    """Of each sequence all tokens but the last, which nothing is computed from."""
    engine = pipeline(num_stages)
    keys = [engine.add(numbers(5 + i, start=i), max_tokens=3 + i) for i in range(5)]
    rows: dict[int, int] = {}
    while engine.core.has_work:
        engine.step()
        running = [one for one in engine.core.scheduler.by_row if one is not None]
        rows |= {one.key: one.row for one in running if one.status is Status.RUNNING}
    engine.finish()
    assert not any(one.appends_sampled for plan in engine.plans for one in plan.added_rows)
    expected = [
        (rows[key], token) for key in keys for token in engine.ended[key].token_ids[:-1].tolist()
    ]
    assert Counter(appended(engine.plans)) == Counter(expected)
    for plan in engine.plans:
        assert set(plan.append_rows.tolist()) <= set(plan.rows.tolist())


@STAGES
def test_tokens_are_those_of_one_stage(num_stages: int) -> None:
    """With preemption, forks, prefix hits, beams and tokens of several priorities."""
    outputs = []
    for engine in (Engine(40), pipeline(num_stages, num_blocks=40)):
        for i in range(8):
            engine.add(numbers(10) + numbers(4, start=i), max_tokens=20, n=1 + i % 3)
            engine.add(numbers(12, start=i), max_tokens=6, beam_width=2 + i % 2)
            engine.step()
        engine.run()
        assert engine.core.metrics.preemptions.value > 0
        ended = engine.ended.items()
        outputs.append({key: (one.token_ids.tolist(), one.finish_reason) for key, one in ended})
    assert outputs[0] == outputs[1]


@STAGES
def test_no_row_starves_where_one_step_is_in_flight(num_stages: int) -> None:
    """As while memory is short: steps still take a share of the rows, and so they take turns."""
    engine = pipeline(num_stages, steps_in_flight=1)
    for i in range(6):
        engine.add(numbers(5, start=i), max_tokens=30)
    engine.step(1 + 5 * num_stages)
    columns = engine.core.scheduler.columns
    assert columns.num_known[:6].tolist() == [5 + 1 + 5] * 6
    engine.finish()


@STAGES
@pytest.mark.parametrize("num_cut", [0, 1, 2])
@pytest.mark.parametrize("is_told", [True, False])
def test_a_row_is_cut_back(num_stages: int, is_told: bool, num_cut: int) -> None:
    """To tokens that the stages have, or that they are only going to be told of."""
    engine = pipeline(num_stages)
    key = engine.add(numbers(6), max_tokens=12)
    scheduler = engine.core.scheduler
    (sequence,) = scheduler.requests[f"r{key}"]
    while sequence.num_known < 10:
        engine.step()
    if is_told:
        engine.step()
    assert sequence.has_tokens_in_flight == is_told
    scheduler.cut_back(sequence, sequence.num_known - num_cut)
    engine.finish()
    assert len(engine.ended[key].token_ids) == 12


@STAGES
def test_a_token_in_flight_has_its_block(num_stages: int) -> None:
    """A prompt that would take it waits, and is not preempted right after it was admitted."""
    engine = pipeline(num_stages, num_blocks=4, block_size=4)
    engine.add(numbers(4), max_tokens=8)
    engine.add(numbers(12, start=1), max_tokens=1)
    engine.finish()
    assert engine.core.metrics.preemptions.value == 0


@STAGES
def test_masks_wait_for_no_prompt(num_stages: int) -> None:
    """A row with a grammar that samples has all its tokens; a chunk before may be in flight."""
    engine = pipeline(num_stages, max_num_batched_tokens=8)
    engine.add(numbers(16), max_tokens=3)
    engine.step()
    scheduler = engine.core.scheduler
    scheduler.columns.constrained[engine.plans[0].rows] = True
    plan = scheduler.schedule(0.0)
    assert plan is not None and plan.samples.all()
    assert scheduler.columns.in_flight[plan.rows].tolist() == [2]
    assert not scheduler.awaits_constrained(plan)


def test_a_pipeline_verifies_no_drafts() -> None:
    """They would have to wait in the rows of all stages."""
    engine = pipeline(2)
    engine.core.scheduler.speculation.num_drafts = 2
    engine.add(numbers(6), max_tokens=12)
    engine.run()
    assert "drafts wait in the row" in (engine.core.death or "")


@STAGES
def test_a_token_in_flight_counts_at_a_deadline(num_stages: int) -> None:
    """A request whose first token is on its way ends with it; one that waits ends without."""
    engine = pipeline(num_stages, max_num_seqs=1)
    begun, waits = (engine.add(numbers(5, start=i), max_tokens=9, deadline=1.0) for i in range(2))
    engine.step()
    engine.now = 2.0
    engine.finish()
    assert [engine.ended[key].finish_reason for key in (begun, waits)] == ["abort", "timeout"]
    assert [len(engine.ended[key].token_ids) for key in (begun, waits)] == [1, 0]
