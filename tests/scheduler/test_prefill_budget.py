"""Long prompts beside streams: gaps between tokens stay near their target, and nothing starves."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.protocol.plan import StepPlan
from quire.scheduler.prefill_budget import AUTOMATIC_TARGET_S, MIN_TOKENS, PrefillBudget
from tests.engine.driver import Engine, numbers


class Clocked(Engine):
    """An engine whose steps take `base_s` and `token_s` for each token of a prompt."""

    def __init__(self, base_s: float, token_s: float, steps_in_flight: int = 1, **limits) -> None:
        self.base_s, self.token_s = base_s, token_s
        self.gaps: list[float] = []
        """Seconds that each step with a stream took."""
        super().__init__(1_000, steps_in_flight, max_model_len=1_000, block_size=16, **limits)
        self.toy.sample = self._timed(self.toy.sample)

    def _timed(self, sample):
        """Time passes while a result is waited for, step by step."""

        def timed(step, masks=None):
            plan, pending = self.plans[-1], sample(step, masks)
            seconds = self.base_s + self.token_s * prompt_tokens(plan)

            def result(take=pending.result):
                self.now += seconds
                if (plan.num_new_tokens == 1).any():
                    self.gaps.append(seconds)
                return take()

            pending.result = result
            return pending

        return timed


def prompt_tokens(plan: StepPlan) -> int:
    return int(plan.num_new_tokens[plan.num_new_tokens > 1].sum())


def streaming(engine: Engine) -> int:
    """A stream that has got some tokens."""
    key = engine.add(numbers(20), max_tokens=300, streams=True, interactive=True)
    engine.step(5)
    return key


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize(
    ("target_s", "base_s", "token_s", "bound"),
    [
        (None, 0.004, 0.0002, 0.050),
        (None, 0.100, 0.010, 0.300),  # slow steps: two of them, plus what one misjudges
        (0.100, 0.004, 0.0010, 0.130),
        (0.010, 0.020, 0.0010, 0.040),  # less than a decode step: prompts get a share of it
    ],
)
def test_gaps_stay_near_the_target(target_s, base_s, token_s, bound, steps_in_flight) -> None:
    engine = Clocked(
        base_s, token_s, steps_in_flight, max_num_batched_tokens=900, target_itl_s=target_s
    )
    streaming(engine)
    engine.gaps.clear()
    for start in range(3):
        engine.add(numbers(900, start))
    engine.finish()
    assert max(engine.gaps) <= bound
    assert 0.9 * max(engine.gaps) > base_s  # prompts were computed in steps of the stream


def test_a_step_uses_most_of_its_target() -> None:
    engine = Clocked(0.004, 0.0002, max_num_batched_tokens=900, target_itl_s=0.064)
    streaming(engine)
    engine.add(numbers(900))
    engine.add(numbers(900, 1))
    engine.finish()
    assert max(engine.gaps) >= 0.8 * 0.064


@pytest.mark.parametrize(
    "request_kind", [{"streams": True}, {"streams": True, "interactive": True}]
)
def test_only_streams_that_are_read_along_limit_prompts(request_kind) -> None:
    engine = Clocked(0.004, 0.001, max_num_batched_tokens=900)
    engine.add(numbers(20), max_tokens=300, **request_kind)
    engine.step(5)
    engine.add(numbers(800, 1))
    engine.step()
    limited = prompt_tokens(engine.plans[-1]) < 800
    assert limited == request_kind.get("interactive", False)


@pytest.mark.parametrize("limits", [{"target_itl_s": 0.0}, {"enable_chunked_prefill": False}])
def test_no_limit(limits) -> None:
    engine = Clocked(0.004, 0.001, max_num_batched_tokens=1_000, **limits)
    streaming(engine)
    engine.add(numbers(800, 1))
    engine.step()
    assert prompt_tokens(engine.plans[-1]) == 800


@pytest.mark.parametrize("num_stages", [2, 3])
def test_the_steps_of_a_pipeline_share_a_gap(num_stages: int) -> None:
    """Between two tokens of a stream as many steps end as there are stages, all with prompts."""
    limits = {"num_stages": num_stages, "target_itl_s": 0.1}
    engine = Clocked(0.004, 0.001, num_stages, max_num_batched_tokens=1_000, **limits)
    (sequence,) = engine.core.scheduler.requests[f"r{streaming(engine)}"]
    for i in range(4):
        engine.add(numbers(800, i + 1), max_tokens=1)
    times = [engine.now]
    while engine.core.scheduler.num_running > 1 or engine.core.scheduler.waiting:
        num_known = sequence.num_known
        engine.step()
        if sequence.num_known > num_known:
            times.append(engine.now)
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) <= 0.13
    assert sum(gaps) / len(gaps) >= 0.06


def test_a_prompt_first_in_rank_leaves_no_stream_out() -> None:
    """Tokens of prompts are limited to what the streams leave of a step: 12 of 20."""
    engine = Clocked(1.0, 0.0, policy="priority", max_num_batched_tokens=20, target_itl_s=1_000.0)
    for i in range(8):
        engine.add(numbers(2, i), max_tokens=60, priority=1, streams=True, interactive=True)
    engine.step()
    engine.add(numbers(400))
    engine.step(20)
    for plan in engine.plans[1:]:
        assert sorted(plan.num_new_tokens.tolist()) == [1] * 8 + [12]


steps = st.tuples(st.sampled_from([0, 1, 16, 300, 5_000]), st.floats(0.0, 1e3))


@given(st.lists(steps, max_size=40), st.sampled_from([None, 0.001, 0.05, 10.0]))
@settings(max_examples=100, deadline=None)
def test_prompts_never_starve_whatever_was_measured(measured, target_s) -> None:
    """Clock jumps, stalls and steps of no time at all included."""
    budget, now = PrefillBudget(target_s), 0.0
    for step, (tokens, seconds) in enumerate(measured):
        budget.planned(step, now, tokens)
        now += seconds
        budget.applied(step, now)
    for num_decoding in (1, 7, 500, 1_024):
        assert budget.tokens(num_decoding) >= MIN_TOKENS


@given(
    st.floats(1e-4, 0.2),
    st.floats(1e-6, 0.02),
    st.lists(st.integers(1, 900), min_size=1, max_size=6),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([None, 0.001, 0.05]),
)
@settings(max_examples=15, deadline=None)
def test_every_request_ends(base_s, token_s, lengths, steps_in_flight, target_s) -> None:
    """And prompts advance in every step while one waits."""
    engine = Clocked(
        base_s, token_s, steps_in_flight, max_num_batched_tokens=600, target_itl_s=target_s
    )
    streaming(engine)
    keys = [engine.add(numbers(n, i), max_tokens=2) for i, n in enumerate(lengths)]
    scheduler = engine.core.scheduler
    for _ in range(2_000):
        waits = bool(scheduler.waiting) or any(
            c < p
            for c, p in zip(
                scheduler.columns.num_computed[scheduler.columns.running],
                scheduler.columns.num_prompt[scheduler.columns.running],
                strict=True,
            )
        )
        num_plans, before = len(engine.plans), engine.toy.num_tokens_computed
        engine.step()
        if waits and len(engine.plans) > num_plans:
            assert engine.toy.num_tokens_computed - before > 1
        if all(key in engine.ended for key in keys):
            break
    assert all(key in engine.ended for key in keys)
    engine.finish()


def test_one_stall_is_forgotten() -> None:
    """A step that was slow for reasons of its own does not make chunks small for long."""
    budget, now = PrefillBudget(None), 0.0
    for step in range(100):
        tokens = min(budget.tokens(0), 4_000)
        seconds = 5.0 if step == 50 else 0.004 + 2e-5 * tokens
        budget.planned(step, now, tokens)
        now += seconds
        budget.applied(step, now)
    assert 0.004 + 2e-5 * budget.tokens(0) >= 0.8 * AUTOMATIC_TARGET_S


@pytest.mark.parametrize(
    ("num_decoding", "graph_tokens", "fits"),
    [(200, 1_023, 823), (200, 0, 1_600), (200, 600, 1_600), (700, 1_023, 1_600)],
)
def test_steps_fit_a_graph_where_that_costs_little(num_decoding, graph_tokens, fits) -> None:
    """Where a graph leaves less than half of the tokens that fit the target, they count."""
    budget, now = PrefillBudget(0.036, graph_tokens), 0.0
    for step in range(60):
        budget.planned(step, now, step % 2 * 1_500)
        now += 0.004 + step % 2 * 1_500 * 2e-5
        budget.applied(step, now)
    assert budget.tokens(num_decoding) == pytest.approx(fits, rel=0.02)


def test_steps_that_failed_are_left_out() -> None:
    """No result comes of them; those after them are measured as ever."""
    tokens = []
    for lost in ((), (0,), (3, 4, 9)):
        budget = PrefillBudget(0.05)
        for step in range(20):
            budget.planned(step, float(step), 64)
            if step not in lost:
                budget.applied(step, step + 0.01)
        tokens.append(budget.tokens(1))
    assert tokens == tokens[:1] * 3


def test_prompts_get_their_share_of_slow_steps() -> None:
    """Steps without prompts take 100 ms already, and the target is 1 ms: a quarter of their time
    goes to prompts all the same, 250 tokens."""
    budget, now = PrefillBudget(0.001), 0.0
    for step in range(60):
        num_tokens = 400 * (step % 2)
        budget.planned(step, now, num_tokens)
        now += 0.1 + 0.0001 * num_tokens
        budget.applied(step, now)
    assert budget.tokens(1) == pytest.approx(250, rel=0.1)
