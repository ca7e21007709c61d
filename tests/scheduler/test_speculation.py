"""How many drafts are verified: by schedule, and by what they bring and cost."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import numpy as np
import pytest

from quire.config.speculative import SpeculativeConfig
from quire.protocol.plan import StepPlan, StepResult
from quire.scheduler.sequence import Columns, SchedulerLimits
from quire.scheduler.speculation import MAX_BEHIND, DraftValue, Speculation, StepCosts
from tests.engine.driver import Engine, numbers

RUNS = itertools.count()
"""One clock for all of them."""


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def plan_of(step: int, num_lines: np.ndarray) -> StepPlan:
    rows = np.arange(len(num_lines), dtype=np.int32)
    return StepPlan(step, rows=rows, num_new_tokens=num_lines, num_samples=num_lines)


def run(
    value: DraftValue,
    accepted_of: dict[int, float],
    cost: float,
    num_steps: int,
    seed: int = 0,
    verifying: float = 0.0,
) -> tuple[float, float]:
    """(tokens, seconds) of steps in which each row's drafts are accepted with a probability, and a
    step takes 1 + `cost` for each line beyond one a row, `verifying` more if there is any."""
    dice = np.random.default_rng(seed)
    rows = ints(*accepted_of)
    most = np.full(len(rows), 4, np.int32)
    now = start = 1e6 * next(RUNS)
    tokens = 0.0
    for step in range(num_steps):
        drafts = value.worthwhile(rows, most, len(rows))
        plan = plan_of(step, drafts + 1)
        value.costs.planned(plan, now)
        now += 1.0 + cost * int(drafts.sum()) + verifying * bool(drafts.any())
        counts = np.ones(len(rows), np.int32)
        for i, row in enumerate(rows.tolist()):
            while counts[i] <= drafts[i] and dice.random() < accepted_of[row]:
                counts[i] += 1
        result = StepResult(step, np.zeros(int(counts.sum()), np.int32), counts)
        value.costs.applied(step, now)
        if plan.has_drafts:
            value.verified(plan, drafts, result, np.ones(len(rows), np.bool_))
        tokens += float(counts.sum())
    return tokens, now - start


def test_drafts_that_are_accepted_and_cheap_are_verified() -> None:
    tokens, seconds = run(DraftValue(8, 4), {0: 0.9}, cost=0.05, num_steps=300)
    assert tokens / seconds > 3.0  # 4.1 a step with 4 drafts, which takes 1.2


@pytest.mark.parametrize("num_rows", [1, 8])
@pytest.mark.parametrize("cost", [0.02, 0.15, 0.5])
def test_drafts_that_are_never_accepted_cost_one_percent_at_most(
    num_rows: int, cost: float
) -> None:
    value = DraftValue(8, 4)
    run(value, dict.fromkeys(range(num_rows), 0.0), cost, 100)
    tokens, seconds = run(value, dict.fromkeys(range(num_rows), 0.0), cost, 2000)
    assert tokens / num_rows / seconds > 0.99


@pytest.mark.parametrize("num_rows", [1, 64, 256])
@pytest.mark.parametrize("verifying", [0.05, 0.4, 3.0])
def test_a_step_that_takes_longer_with_any_draft_at_all(num_rows: int, verifying: float) -> None:
    """As where it is computed in another way. One draft in many rows is hardly a line more, and
    yet not the price of a line."""
    value = DraftValue(num_rows, 4)
    accepted = dict.fromkeys(range(num_rows), 0.0)
    run(value, accepted, 0.3 / num_rows, 200, verifying=verifying)
    tokens, seconds = run(value, accepted, 0.3 / num_rows, 1000, verifying=verifying)
    assert tokens / num_rows / seconds > 0.99


@pytest.mark.parametrize("num_rows", [1, 64, 256])
def test_drafts_that_pay_for_such_a_step_are_verified(num_rows: int) -> None:
    value, accepted = DraftValue(num_rows, 4), dict.fromkeys(range(num_rows), 0.9)
    run(value, accepted, 0.02 / num_rows, 200, verifying=0.2)
    tokens, seconds = run(value, accepted, 0.02 / num_rows, 200, verifying=0.2)
    assert tokens / num_rows / seconds > 3.0  # 4.1 a step, which takes 1.28


def test_drafts_that_cost_as_much_as_steps_are_left_alone() -> None:
    """Half of them accepted, each as dear as a step of its own."""
    value = DraftValue(8, 4)
    run(value, {0: 0.5}, 1.0, 200)
    tokens, seconds = run(value, {0: 0.5}, 1.0, 1000)
    assert tokens / seconds > 0.98


def test_each_row_gets_what_its_own_drafts_are_worth() -> None:
    value = DraftValue(8, 4)
    run(value, {0: 0.95, 1: 0.02}, 0.1, 400)
    drafts = value.worthwhile(ints(0, 1), ints(4, 4), 2)
    assert drafts[0] >= 3 and drafts[1] == 0


def test_rows_whose_drafts_become_right_are_found_again() -> None:
    value = DraftValue(8, 4)
    run(value, {0: 0.0}, 0.1, 1000)
    tokens, seconds = run(value, {0: 1.0}, 0.1, 1500)
    assert tokens / seconds > 2.0


def test_a_step_with_prompts_says_nothing_of_drafts() -> None:
    costs = StepCosts()
    costs.planned(StepPlan(0, rows=ints(0), num_new_tokens=ints(9), num_samples=ints(1)), 0.0)
    costs.applied(0, 100.0)
    costs.planned(plan_of(1, ints(1)), 100.0)
    costs.applied(1, 101.0)
    assert costs.plain(1) == pytest.approx(1.0)


def test_steps_that_overlap_begin_when_the_one_before_ends() -> None:
    costs = StepCosts()
    for step in range(3):
        costs.planned(plan_of(step, ints(1)), 0.1 * step)
    for step in range(3):
        costs.applied(step, 1.0 + step)
    assert costs.plain(1) == pytest.approx(1.0)


def test_failed_steps_are_forgotten() -> None:
    costs = StepCosts()
    costs.planned(plan_of(0, ints(1)), 0.0)
    costs.planned(plan_of(1, ints(1)), 50.0)
    costs.applied(1, 52.0)
    assert costs.plain(1) == pytest.approx(2.0)


def test_the_schedule_bounds_drafts_by_rows() -> None:
    limits = SchedulerLimits(
        num_blocks=64, block_size=4, max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64
    )
    columns = Columns(limits)
    rows = ints(0, 1, 2)
    columns.has_sampled[rows] = columns.speculates[rows] = True
    columns.max_total[rows], columns.num_tokens[rows] = 60, 10
    columns.num_waiting_drafts[rows] = 3
    config = SpeculativeConfig("ngram", 3, 1, 1, ((1, 2, 3), (3, 4, 1), (5, 9, 0)))
    speculation = Speculation(columns, config)
    assert speculation.drafts(rows, 2).tolist() == [3, 3, 3]
    assert speculation.drafts(rows, 3).tolist() == [1, 1, 1]
    assert speculation.drafts(rows, 9).tolist() == [0, 0, 0]
    columns.num_waiting_drafts[rows] = [0, 2, 3]
    assert speculation.drafts(rows, 2).tolist() == [0, 2, 3]
    columns.speculates[1], columns.num_tokens[2] = False, 58
    assert speculation.drafts(rows, 2).tolist() == [0, 0, 1]


def engine_with(config: SpeculativeConfig, steps_in_flight: int) -> Engine:
    """Its drafts are right wherever there are any."""
    engine = Engine(steps_in_flight=steps_in_flight, speculation=config)
    engine.toy.last.num_drafts, engine.toy.last.drafts_are_right = config.num_tokens, True
    return engine


def num_planned(engine: Engine) -> int:
    """Lines beyond one of each row that samples."""
    return sum(int((plan.num_samples[plan.samples] - 1).sum()) for plan in engine.plans)


@pytest.mark.parametrize("method", ["ngram", "auto"])
@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
def test_no_draft_is_verified_where_none_is_proposed(method: str, steps_in_flight: int) -> None:
    engine = engine_with(SpeculativeConfig(method, 4, 1, 1), steps_in_flight)
    engine.toy.last.num_proposed = lambda _: 0
    for i in range(4):
        engine.add(numbers(6, start=i), max_tokens=30)
    engine.finish()
    assert num_planned(engine) == engine.core.metrics.draft_tokens.value == 0


@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
def test_drafts_count_as_far_as_they_were_there(steps_in_flight: int) -> None:
    """In a text that repeats itself here and there, steps in flight are planned before it is known
    whether it still does."""
    engine = engine_with(SpeculativeConfig("ngram", 4, 1, 1), steps_in_flight)
    engine.toy.last.num_proposed = lambda num_tokens: 4 if num_tokens // 40 % 2 else 0
    for i in range(4):
        engine.add(numbers(6, start=i), max_tokens=100)
    engine.finish()
    metrics, verified = engine.core.metrics, engine.toy.last.num_verified
    assert metrics.draft_tokens.value == metrics.accepted_tokens.value == verified > 50
    # Each of four texts begins to repeat itself once and ends it once.
    assert num_planned(engine) - verified <= 4 * 4 * (steps_in_flight - 1)


@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
def test_a_model_drafts_from_the_first_token_to_its_longest_text(steps_in_flight: int) -> None:
    config = SpeculativeConfig("draft_model", 3, 0, 0, model="drafts", max_model_len=40)
    engine = engine_with(config, steps_in_flight)
    engine.toy.last.num_proposed = lambda num_tokens: 3 if num_tokens < 40 else 0
    engine.add(numbers(6), max_tokens=100)
    engine.step(2)
    assert engine.plans[1].num_samples.tolist() == [4]
    engine.run()
    drafted = [plan for plan in engine.plans if plan.has_drafts]
    assert len(drafted) < 9 + steps_in_flight
    computing = [plan.num_blocks[0] > 0 for plan in engine.plans]
    assert computing == sorted(computing, reverse=True)
    assert len(drafted) <= sum(computing) <= len(drafted) + steps_in_flight + 1
    engine.plans.clear()
    key = engine.add(numbers(60, start=5), max_tokens=20)
    engine.finish()
    assert engine.ended[key].finish_reason == "length"
    assert engine.plans[0].num_blocks[0] > 0 and not any(p.num_blocks[0] for p in engine.plans[2:])


def test_drafts_that_were_not_there_were_not_rejected() -> None:
    limits = SchedulerLimits(
        num_blocks=64, block_size=4, max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64
    )
    columns = Columns(limits)
    speculation = Speculation(columns, SpeculativeConfig("auto", 3, 1, 1))
    columns.num_waiting_drafts[:3] = [0, 1, 3]
    plan = plan_of(0, ints(4, 4, 2))
    assert speculation.num_verified(plan).tolist() == [0, 1, 1]
    result = StepResult(0, ints(*range(4)), ints(1, 2, 1), num_drafts=ints(2, 0, 3))
    speculation.planned(plan, 0.0)
    speculation.applied(plan, result, np.array([True, True, False]), 1.0)
    assert columns.num_waiting_drafts[:3].tolist() == [2, 0, 3]
    value = speculation._value
    assert value is not None
    assert value._verified[:3].tolist() == [0, 1, 0] and value._accepted[:3].tolist() == [0, 1, 0]


class Drafting:
    """Rows that decode with drafts of the text and of a model. Of each row it is set how likely its
    drafts are right. A step takes 1 + 0.02 for each line beyond one a row, and `passes` where the
    model drafts."""

    def __init__(self, num_rows: int, passes: float, steps_in_flight: int = 1) -> None:
        limits = SchedulerLimits(
            num_blocks=64,
            block_size=4,
            max_model_len=64,
            max_num_seqs=num_rows,
            max_num_batched_tokens=1 << 14,
        )
        self.columns, self.passes = Columns(limits), passes
        self.columns.speculates[:] = self.columns.has_sampled[:] = True
        self.columns.max_total[:], self.columns.num_blocks[:] = 1 << 20, 1
        config = SpeculativeConfig("auto", 4, 2, 12, model="drafts")
        self.speculation = Speculation(self.columns, config)
        self.of_model = np.zeros(num_rows)
        """How likely drafts of the model are right; text gives some where `repeats` says so, and
        these are."""
        self.repeats = np.zeros(num_rows, np.bool_)
        self.num_used = np.zeros(num_rows, np.int64)
        """Steps behind which the model drafted."""
        self._dice, self._now, self._step = np.random.default_rng(0), 0.0, 0
        self._num_lost = np.zeros(num_rows, np.int64)
        self._right, self._waiting = np.zeros(num_rows), np.zeros(num_rows, np.int32)
        """Of the drafts that wait, and how many these are."""
        self._steps_in_flight, self._in_flight = steps_in_flight, deque[Any]()
        for row in range(num_rows):
            self.speculation.joined(row)

    def run(self, num_steps: int) -> float:
        """Tokens of a row in the time of a step without drafts."""
        rows = np.arange(len(self._right), dtype=np.int32)
        before, tokens = self._now, 0
        for _ in range(num_steps):
            drafts = self.speculation.drafts(rows, len(rows))
            plan = plan_of(self._step, drafts + 1)
            plan.num_blocks = self.speculation.blocks_for_drafts(plan)
            used = plan.num_blocks > 0
            self.speculation.planned(plan, self._now)
            made_up = int(self._num_lost[used].sum())
            seconds = 1.0 + 0.02 * int(drafts.sum()) + self.passes * bool(used.any())
            seconds += 0.002 * self.passes * made_up
            self._num_lost = np.where(used, 0, self._num_lost + drafts + 1)
            self.num_used += used
            right = self._dice.random((len(rows), 4)) < self._right[:, None]
            verified = np.minimum(drafts, self._waiting)
            counts = 1 + np.minimum(right.cumprod(1).sum(1), verified).astype(np.int32)
            self._right = np.where(used, self.of_model, 1.0)
            result = StepResult(self._step, ints(*[0] * int(counts.sum())), counts)
            result.num_repeated = np.where(self.repeats, 4, 0).astype(np.int32)
            self._waiting = np.where(used, 4, result.num_repeated).astype(np.int32)
            result.num_drafts = self._waiting
            self._in_flight.append((plan, result, seconds))
            if len(self._in_flight) == self._steps_in_flight:
                plan, result, seconds = self._in_flight.popleft()
                self._now += seconds
                live = np.ones(len(rows), np.bool_)
                self.speculation.applied(plan, result, live, self._now)
                tokens += int(result.counts.sum())
            self._step += 1
        return tokens / len(rows) / (self._now - before)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 8])
def test_a_model_drafts_where_that_pays(num_rows: int, steps_in_flight: int) -> None:
    drafting = Drafting(num_rows, 0.4, steps_in_flight)
    drafting.of_model[:] = 0.9
    drafting.run(50)
    assert drafting.run(200) > (2.4 if num_rows == 1 else 1.9)


@pytest.mark.parametrize(
    ("num_rows", "right", "passes", "steps_in_flight"),
    [(1, 0.0, 0.2, 1), (1, 0.0, 0.2, 2), (8, 0.0, 0.2, 1), (8, 0.3, 1.0, 1)],
)
def test_a_model_that_cannot_win_costs_one_percent_at_most(
    num_rows: int, right: float, passes: float, steps_in_flight: int
) -> None:
    drafting = Drafting(num_rows, passes, steps_in_flight)
    drafting.of_model[:] = right
    drafting.run(100)
    assert drafting.run(4000) > 0.99


def test_a_model_does_not_draft_for_rows_whose_drafts_are_wrong() -> None:
    drafting = Drafting(4, passes=0.2)
    drafting.of_model[:] = [0.95, 0.0, 0.95, 0.0]
    drafting.run(100)
    drafting.num_used[:] = 0
    drafting.run(200)
    assert min(drafting.num_used[[0, 2]]) > 180 and max(drafting.num_used[[1, 3]]) < 120


def test_a_model_does_not_draft_what_the_text_repeats() -> None:
    drafting = Drafting(2, passes=0.4)
    drafting.of_model[:], drafting.repeats[:] = 0.9, [True, False]
    drafting.run(100)
    drafting.num_used[:] = 0
    drafting.run(60)
    assert drafting.num_used[0] == 0 and drafting.num_used[1] > 50
    drafting.repeats[:] = [False, False]
    drafting.run(20)
    assert drafting.num_used[0] > 15


def test_drafts_of_a_model_that_become_right_are_found_again() -> None:
    drafting = Drafting(1, passes=0.2)
    drafting.run(300)
    drafting.of_model[:] = 1.0
    for _ in range(15):  # one text after the other
        drafting.speculation.joined(0)
        drafting.run(200)
    assert drafting.run(100) > 2.5


def test_what_a_model_lacks_is_bounded() -> None:
    drafting = Drafting(1, passes=5.0)
    drafting.run(MAX_BEHIND + 200)
    drafting.num_used[:] = 0
    drafting.passes, drafting.of_model[:] = 0.1, 1.0
    drafting.speculation._passes._credit_s = 1e6  # type: ignore[union-attr]
    drafting.run(50)
    assert drafting.num_used[0] == 0
    drafting.speculation.joined(0)
    drafting.run(50)
    assert drafting.num_used[0] > 10
