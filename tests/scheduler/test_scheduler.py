"""What the scheduler promises about order, leaving, refusal and overlap, one promise per test.

Outputs are compared with a reference in every test: see `Engine.finish`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from quire.protocol.errors import RequestError
from quire.protocol.request import NewRequest
from quire.protocol.sampling import SamplingParams
from quire.scheduler.sequence import Status
from tests.engine.driver import MAX_LEN, VOCAB, Engine, numbers
from tests.engine.toy import entries_of, next_token

# --- order ----------------------------------------------------------------------------------------


def test_first_come_first_served() -> None:
    engine = Engine(max_num_seqs=1)
    keys = [engine.add(numbers(5, start=i), max_tokens=3 - i) for i in range(3)]
    engine.finish()
    assert engine.order == keys


def test_lower_priority_values_go_first() -> None:
    engine = Engine(max_num_seqs=1, policy="priority")
    keys = [engine.add(numbers(5, start=i), priority=p) for i, p in enumerate((1, 0, -3, 0))]
    engine.finish()
    assert engine.order == [keys[2], keys[1], keys[3], keys[0]]


def test_fcfs_ignores_priorities() -> None:
    engine = Engine(max_num_seqs=1)
    keys = [engine.add(numbers(5, start=i), priority=-i) for i in range(3)]
    engine.finish()
    assert engine.order == keys


@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
@pytest.mark.parametrize(("policy", "first"), [("fcfs", 0), ("priority", 1)])
def test_the_last_in_rank_is_preempted(policy: str, first: int, steps_in_flight: int) -> None:
    """Two requests that fit only one at a time: the one of better rank never loses its blocks, and
    the other none of its tokens, those in flight included."""
    engine = Engine(13, steps_in_flight, policy=policy, enable_prefix_caching=False)
    keys = [
        engine.add(numbers(20), max_tokens=20, priority=5),
        engine.add(numbers(20, start=1), max_tokens=20, priority=-5),
    ]
    engine.finish()
    assert engine.core.statistics().num_preemptions >= 1
    assert engine.order == [keys[first], keys[1 - first]]
    again = [added for plan in engine.plans for added in plan.added_rows]
    assert sum(added.seed == keys[first] for added in again) == 1, "it kept its row"
    assert sum(int(plan.num_samples.sum()) for plan in engine.plans) == 40, "none is sampled again"


@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
def test_a_row_drains_before_its_blocks_are_given_away(steps_in_flight: int) -> None:
    """Workers hear of it with the plan that gives them away, at the latest: what a drafter has put
    off goes into these blocks."""
    engine = Engine(13, steps_in_flight, enable_prefix_caching=False)
    keys = [engine.add(numbers(20, start=i), max_tokens=20) for i in range(3)]
    for _ in range(5):
        engine.step()
    engine.core.abort(f"r{keys[0]}")
    engine.finish()
    assert engine.core.statistics().num_preemptions >= 1
    held: dict[int, set[int]] = {}
    for plan in engine.plans:
        for row in (*plan.freed_rows.tolist(), *plan.drained_rows.tolist()):
            held.pop(row, None)
        for row, block in zip(plan.block_rows.tolist(), plan.block_ids.tolist(), strict=True):
            assert not any(block in blocks for blocks in held.values()), plan.step
            held.setdefault(row, set()).add(block)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_among_equals_the_last_to_arrive_is_preempted(policy: str) -> None:
    """Whatever rows they have: the late one has the row that the first one left."""
    engine = Engine(13, policy=policy, enable_prefix_caching=False)
    engine.add([1, 2], max_tokens=1)
    early = engine.add(numbers(20), max_tokens=20)
    engine.step()
    late = engine.add(numbers(20, start=1), max_tokens=20)
    engine.step()
    rows = engine.core.scheduler.requests
    assert rows[f"r{late}"][0].row < rows[f"r{early}"][0].row
    engine.finish()
    assert engine.core.statistics().num_preemptions == 1
    assert engine.order[-2:] == [early, late]


@pytest.mark.parametrize("num_groups", [1, 2])
def test_blocks_that_a_running_prompt_will_need_are_not_given_away(num_groups: int) -> None:
    """A prompt in mid-prefill has 6 blocks to come in each KV group; the 8 free ones have no room
    for 3 more."""
    windows = (None,) * num_groups
    engine = Engine(10 * num_groups, windows=windows, long_prefill_token_threshold=8)
    engine.add(numbers(32), max_tokens=1)
    engine.step()
    engine.add(numbers(9, start=1), max_tokens=3)
    engine.step(3)
    assert [len(plan.added_rows) for plan in engine.plans] == [1, 0, 0, 0]
    engine.finish()
    assert engine.core.statistics().num_preemptions == 0


def test_a_step_that_preempts_admits_none() -> None:
    """What it frees is for those that run; a row is given away with the next step."""
    engine = Engine(13, policy="priority", enable_prefix_caching=False, max_num_seqs=2)
    for priority in (0, 5):
        engine.add(numbers(20, start=priority), max_tokens=20, priority=priority)
    engine.step()
    waits = engine.add(numbers(4), priority=1)
    while not engine.core.statistics().num_preemptions:
        engine.step()
    engine.step()
    assert [[one.seed for one in plan.added_rows] for plan in engine.plans[-2:]] == [[], [waits]]
    engine.finish()


def test_running_requests_go_on_beside_a_long_prompt() -> None:
    """A long prompt is spread over steps, and each of these also generates for the others."""
    engine = Engine(max_num_batched_tokens=10)
    short = engine.add([1, 2], max_tokens=12)
    engine.step()
    long = engine.add(numbers(60))
    engine.step(7)
    counts = [sorted(plan.num_new_tokens.tolist()) for plan in engine.plans[1:8]]
    assert counts == [[1, 9]] * 6 + [[1, 6]]
    engine.finish()
    assert set(engine.ended) == {short, long}


def test_long_contexts_come_first_in_a_step() -> None:
    """A device that computes rows in this order has short ones left for the end."""
    engine = Engine()
    for length in (5, 40, 9, 23, 9):
        engine.add(numbers(length, start=length), max_tokens=3)
    engine.step(2)
    columns = engine.core.scheduler.columns
    assert columns.num_computed[engine.plans[1].rows].tolist() == [41, 24, 10, 10, 6]
    engine.finish()


def test_one_prompt_takes_no_more_than_the_threshold() -> None:
    engine = Engine(long_prefill_token_threshold=8)
    engine.add(numbers(30))
    engine.add(numbers(5, start=2))
    engine.finish()
    first = [plan.num_new_tokens.tolist() for plan in engine.plans[:4]]
    assert first == [[8, 5], [8, 1], [8, 1], [6, 1]]


def test_whole_prompts_without_chunked_prefill() -> None:
    engine = Engine(max_num_batched_tokens=MAX_LEN, enable_chunked_prefill=False)
    for i in range(3):
        engine.add(numbers(70, start=i), max_tokens=2)
    engine.finish()
    prefills = [n for plan in engine.plans for n in plan.num_new_tokens.tolist() if n > 1]
    assert prefills == [70, 70, 70]


def test_reserving_the_longest_length_limits_company() -> None:
    """The comparison mode: 64 blocks are two requests of 128 tokens, however short they are."""
    engine = Engine(64, reserves_max_length=True)
    for i in range(5):
        engine.add(numbers(4, start=i), max_tokens=3)
    engine.finish()
    assert max(len(plan.rows) for plan in engine.plans) == 2
    assert engine.core.statistics().waste > 0.9


# --- requests that leave, and late results --------------------------------------------------------


@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
def test_an_aborted_request_ends_once_and_its_late_tokens_fall_away(steps_in_flight: int) -> None:
    """Its blocks are free at once; it ends with the tokens that were on their way, and a request
    that gets its row is not fed them."""
    engine = Engine(200, steps_in_flight, max_num_seqs=2)
    gone = engine.add(numbers(9), max_tokens=30)
    stays = engine.add(numbers(9, start=1), max_tokens=30)
    waits = engine.add(numbers(9, start=2), max_tokens=5)
    engine.step(6)
    used = engine.core.scheduler.kv.pool.num_used
    engine.core.abort("r0")
    engine.core.abort("r0")
    assert engine.core.scheduler.kv.pool.num_used < used
    engine.finish()
    assert engine.ended[gone].finish_reason == "abort"
    assert len(engine.ended[gone].token_ids) == 6
    assert {stays, waits} < set(engine.ended)
    engine.core.abort("r0")
    engine.core.abort("unknown")
    assert not engine.core.step().finished


def test_a_waiting_request_can_be_aborted() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add(numbers(5), max_tokens=3)
    waits = engine.add(numbers(5))
    engine.step()
    engine.core.abort(f"r{waits}")
    engine.finish()
    assert engine.ended[waits].finish_reason == "abort" and not len(engine.ended[waits].token_ids)


def test_a_preempted_request_can_be_aborted_before_its_tokens_are_there() -> None:
    engine = Engine(13, steps_in_flight=4, enable_prefix_caching=False)
    engine.add(numbers(20), max_tokens=20)
    gone = engine.add(numbers(20, start=1), max_tokens=20)
    (sequence,) = engine.core.scheduler.requests[f"r{gone}"]
    while sequence.status is not Status.DRAINING:
        engine.step()
    engine.core.abort(f"r{gone}")
    engine.finish()
    assert engine.ended[gone].finish_reason == "abort"


def test_one_of_several_sequences_can_be_stopped() -> None:
    engine = Engine()
    key = engine.add(numbers(9), max_tokens=10, n=3)
    engine.step(4)
    engine.core.abort(f"r{key}", "stop", key + 1)
    engine.finish()
    reasons = [engine.ended[key + i].finish_reason for i in range(3)]
    assert reasons == ["length", "stop", "length"]


def test_a_leader_that_is_aborted_takes_followers_along() -> None:
    """Followers that were not released yet end too, and nothing is left behind."""
    engine = Engine(max_num_batched_tokens=4)
    key = engine.add(numbers(20), n=3)
    engine.step(2)
    engine.core.abort(f"r{key}")
    engine.finish()
    assert [s.finish_reason for s in engine.ended.values()] == ["abort"] * 3


def test_a_follower_that_is_stopped_before_it_starts_stays_stopped() -> None:
    engine = Engine(max_num_batched_tokens=4)
    key = engine.add(numbers(20), n=3)
    engine.step(2)
    engine.core.abort(f"r{key}", "stop", key + 1)
    engine.finish()
    reasons = [engine.ended[key + i].finish_reason for i in range(3)]
    assert reasons == ["length", "stop", "length"]


def test_stop_tokens_do_not_outlive_their_request() -> None:
    """A row forgets them when the next request takes it."""
    engine = Engine(max_num_seqs=1)
    first = engine.add(numbers(7), max_tokens=6)
    engine.finish()
    made = engine.ended[first].token_ids.tolist()
    params = SamplingParams(max_tokens=1, stop_token_ids=sorted(set(made)))
    request = NewRequest(50, "stops", np.array([1], np.int32), params, arrival_time=0.0)
    engine.core.add(request)
    engine.run()
    again = NewRequest(
        60, "again", engine.requests[first].prompt_token_ids, engine.requests[first].params, 0.0
    )
    engine.core.add(again)
    engine.run()
    assert engine.ended[60].token_ids.tolist() == made


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_stop_tokens_count_only_after_min_tokens(num_drafts: int) -> None:
    """The token that would end the request at once is taken as any other until then, also where it
    comes with others before it and after it."""
    tokens = numbers(7)
    made: list[int] = []
    while len(made) < 8:
        made.append(next_token(entries_of(tokens + made), 0, VOCAB))
    stop = made[3]
    assert made.count(stop) == 1
    for min_tokens, expected in ((0, made[:4]), (4, made[:4]), (5, made)):
        engine = Engine()
        engine.toy.last.num_drafts = engine.core.scheduler.speculation.num_drafts = num_drafts
        engine.toy.last.drafts_are_right = True
        params = SamplingParams(
            seed=0, max_tokens=8, min_tokens=min_tokens, stop_token_ids=[stop], ignore_eos=True
        )
        request = NewRequest(0, "r0", np.array(tokens, np.int32), params, arrival_time=0.0)
        engine.core.add(request)
        engine.run()
        ended = engine.ended[0]
        assert ended.token_ids.tolist() == expected
        assert ended.stop_reason == (stop if expected != made else None)


# --- what is shown --------------------------------------------------------------------------------


def test_logprobs_are_numbered_as_the_tokens_that_are_shown() -> None:
    """Between them are tokens of requests that do not stream, and tokens without logprobs."""
    engine = Engine(steps_in_flight=2)
    for i, (num_logprobs, streams) in enumerate([(2, False), (None, True), (2, True), (1, True)]):
        params = SamplingParams(seed=i, max_tokens=4, logprobs=num_logprobs, ignore_eos=True)
        prompt = np.array(numbers(6, start=i), np.int32)
        engine.core.add(NewRequest(i, f"r{i}", prompt, params, arrival_time=0.0, streams=streams))
    outputs = [engine.core.step() for _ in range(6)]
    assert not engine.core.has_work
    shown = [output for output in outputs if len(output.tokens)]
    assert len(shown) == 4
    for output in shown:
        assert output.logprobs is not None
        assert sorted(output.keys.tolist()) == [1, 2, 3]
        assert sorted(output.keys[output.logprobs.index].tolist()) == [2, 3]
        chosen = output.logprobs.token_ids[:, 0]
        assert chosen.tolist() == output.tokens[output.logprobs.index].tolist()


# --- what is refused ------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused() -> None:
    """Also beams, each of which may come to need blocks of its own; the engine takes the next."""
    engine = Engine(num_blocks=8, max_num_seqs=4)
    with pytest.raises(RequestError, match=r"9 KV blocks .* has 8.*max_tokens"):
        engine.add(numbers(30), max_tokens=4)
    with pytest.raises(RequestError, match=r"9 KV blocks .*beam_width"):
        engine.add(numbers(5), max_tokens=4, beam_width=3)
    key = engine.add(numbers(28), max_tokens=4)
    with pytest.raises(RequestError, match="already in use"):
        engine.core.add(engine.requests[key])
    engine.finish()
    assert set(engine.ended) == {key}


def test_more_beams_than_rows_are_refused() -> None:
    engine = Engine(max_num_seqs=3)
    with pytest.raises(RequestError, match=r"beam_width=4 exceeds max_num_seqs=3"):
        engine.add(numbers(5), beam_width=4)


def test_the_context_ends_a_request() -> None:
    engine = Engine()
    key = engine.add(numbers(120), max_tokens=1000)
    while engine.core.has_work:
        engine.step()
    assert len(engine.ended[key].token_ids) == MAX_LEN - 120
    assert engine.ended[key].finish_reason == "length"


def test_nothing_to_do() -> None:
    engine = Engine()
    assert engine.core.step().empty and not engine.plans
    assert engine.core.scheduler.schedule(0.0) is None


# --- overlap --------------------------------------------------------------------------------------


def test_steps_are_planned_before_results_are_read() -> None:
    """With 3 steps in flight the first result is read after the third launch."""
    engine = Engine(steps_in_flight=3)
    key = engine.add(numbers(6), max_tokens=6, streams=True)
    seen = []
    for _ in range(4):
        output = engine.core.step()
        seen.append((len(engine.plans), len(output.tokens)))
    assert seen == [(1, 0), (2, 0), (3, 1), (4, 1)]
    engine.finish()
    assert len(engine.ended[key].token_ids) == 6
    assert len(engine.plans) == 6, "no step beyond max_tokens is planned"


def test_the_hosts_time_is_kept_for_every_step() -> None:
    engine = Engine(steps_in_flight=2)
    engine.add(numbers(6), max_tokens=6)
    engine.finish()
    engine.core.read_metrics()
    metrics = engine.core.metrics
    for histogram in (metrics.step_host, metrics.step_launch, metrics.step_wait):
        assert histogram.read().count == metrics.steps.value == 6


def test_a_cut_goes_on_in_its_row_or_from_the_queue() -> None:
    """Tokens that it made since it got its row are cut there. Those that it came with lie in blocks
    that others may share: it gives them up and starts again."""
    engine = Engine()
    key = engine.add(numbers(20), max_tokens=20)
    engine.step(8)
    scheduler = engine.core.scheduler
    (request,) = scheduler.requests[f"r{key}"]
    scheduler.cut_back(request, 22)
    assert request.status is Status.RUNNING and request.num_known == 22
    engine.step(3)
    scheduler.requeue(request)
    engine.step(2)
    assert len(request.held_token_ids) == 25 and request.num_known == 27
    scheduler.cut_back(request, 24)
    assert request.status is Status.WAITING and request.num_known == 24
    engine.finish()
    assert engine.ended[key].finish_reason == "length"


def test_drafts_take_what_tokens_leave() -> None:
    """Steps with room for one token of each row leave no row out for drafts of another: there are
    no more of them than without drafts."""
    steps = {}
    for num_drafts in (0, 5):
        engine = Engine(max_num_batched_tokens=8)
        engine.toy.last.num_drafts = engine.core.scheduler.speculation.num_drafts = num_drafts
        for i in range(8):
            engine.add(numbers(4, start=i), max_tokens=12)
        engine.finish()
        steps[num_drafts] = len(engine.plans)
    assert steps[5] <= steps[0]


def test_drafts_that_are_right_save_steps() -> None:
    """The first token comes alone, after a prompt in two parts; those after it come by four, up to
    the last that the row may have."""
    engine = Engine(long_prefill_token_threshold=3)
    engine.toy.last.num_drafts = engine.core.scheduler.speculation.num_drafts = 3
    engine.toy.last.drafts_are_right = True
    engine.add(numbers(5), max_tokens=9)
    engine.finish()
    assert [plan.num_samples.tolist() for plan in engine.plans] == [[0], [1], [4], [4]]


def test_a_cut_row_has_no_drafts_until_it_samples_again() -> None:
    engine = Engine()
    engine.toy.last.num_drafts = engine.core.scheduler.speculation.num_drafts = 3
    key = engine.add(numbers(5), max_tokens=20)
    engine.step(3)
    (sequence,) = engine.core.scheduler.requests[f"r{key}"]
    engine.core.scheduler.cut_back(sequence, sequence.num_known - 1)
    engine.step(2)
    assert [plan.num_samples.tolist() for plan in engine.plans[-2:]] == [[1], [4]]
    engine.finish()


@pytest.mark.parametrize(("ends", "reason"), [(range(VOCAB), "stop"), ((), "length")])
def test_why_a_beam_search_ends(ends: Iterable[int], reason: str) -> None:
    """Where every continuation is an end, no beam is left; else beams get as long as they may."""
    engine, prompt = Engine(), np.array(numbers(5), np.int32)
    params = SamplingParams(max_tokens=3)
    engine.core.add(NewRequest(0, "r0", prompt, params, 0.0, tuple(ends), beam_width=2))
    while engine.core.has_work:
        engine.step()
    assert engine.ended[0].finish_reason == reason and len(engine.ended[0].beams or ()) == 2
