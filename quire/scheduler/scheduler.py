"""`Scheduler`: decides, step by step, which requests compute how many tokens.

There are no phases: a request has known tokens and computed tokens, and a step lets requests catch
up within a token budget. `schedule` plans a step from upper bounds, before the steps in flight have
reported; `apply` takes a step's tokens in. Work over all rows is array operations; Python loops run
only over what changed.
"""

from __future__ import annotations

import numpy as np

from quire.metrics.engine import EngineMetrics
from quire.protocol.errors import RequestError
from quire.protocol.output import FinishedSequence, StepOutput
from quire.protocol.plan import BoolArray, Float32Array, Int32Array, StepPlan, StepResult
from quire.protocol.request import NewRequest
from quire.protocol.seeds import random_seed
from quire.scheduler.admission import admit_waiting, release_followers
from quire.scheduler.beams import BeamGroup, report_candidates
from quire.scheduler.books import check_books
from quire.scheduler.deadlines import Deadlines
from quire.scheduler.draft import PlanDraft
from quire.scheduler.kv_blocks import KVBlocks
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.overload import DISPLACED, make_room_in_queue
from quire.scheduler.pace import Pace
from quire.scheduler.pause import Pause
from quire.scheduler.policy import rank_function
from quire.scheduler.prefill_budget import PrefillBudget
from quire.scheduler.prefix_groups import PrefixGroups
from quire.scheduler.progress import ProgressReports
from quire.scheduler.queue import WaitingQueue
from quire.scheduler.radix_tree import chain_root
from quire.scheduler.request import Columns, Request, Status, make_sequences
from quire.scheduler.results import AcceptedTokens, accept, collect_output
from quire.scheduler.speculation import Speculation
from quire.scheduler.tenants import Tenants


class Scheduler:
    def __init__(self, limits: SchedulerLimits, metrics: EngineMetrics | None = None) -> None:
        self.limits = limits
        self.max_step_tokens = limits.max_num_batched_tokens
        """Most tokens in a step; less than the limit while memory is short."""
        self.metrics = metrics or EngineMetrics()
        self.columns = Columns(
            limits.max_num_seqs, limits.max_model_len, limits.block_size, limits.windows
        )
        self.kv = KVBlocks(limits, self.columns)
        self.prefix_groups: PrefixGroups | None = None
        if limits.groups_prefixes:
            full = limits.windows.index(None)
            self.prefix_groups = PrefixGroups(self.columns, limits.block_size, full)
        self.speculation = Speculation(self.columns)
        self.pace = Pace()
        self.prefill_budget = PrefillBudget(limits.target_itl_s, limits.graph_tokens)
        self.deadlines = Deadlines()
        self.progress = ProgressReports()
        self.pause = Pause.NONE
        self.tenants = Tenants()
        self.waiting = WaitingQueue(self.tenants)
        self.requests: dict[str, list[Request]] = {}
        """Sequences without a terminal output, by request id."""
        self.unready: dict[str, Request] = {}
        """Leaders that wait for `make_ready`, outside the queue."""
        self.by_row: list[Request | None] = [None] * limits.max_num_seqs
        self.free_rows = list(range(limits.max_num_seqs))[::-1]
        self.num_steps_in_flight = 0
        self._rank = rank_function(limits.policy)
        self._ranked: Int32Array | None = None
        self._draining: set[Request] = set()
        self.ended: list[FinishedSequence] = []
        # Changes since the last plan that the next one will carry:
        self._freed_rows: list[int] = []
        self._pooled: dict[int, Float32Array] = {}
        self._appends: list[tuple[int, int]] = []
        self._cuts: dict[int, int] = {}
        self._next_step = 0
        self._num_arrivals = 0
        self.num_admissions = 0

    @property
    def has_work(self) -> bool:
        """Whether there is anything to compute, now or after results have come."""
        if self.pause is Pause.DRAIN:
            return self.num_running > 0 or self.waiting.first_begun() is not None
        return len(self.requests) > len(self.unready) and self.pause is Pause.NONE

    @property
    def num_running(self) -> int:
        return len(self.ranked_rows())

    # --- requests come and go -------------------------------------------------------------------

    def check(self, new: NewRequest) -> None:
        """Refuse a request that could never run, or that finds the queue full."""
        if new.request_id in self.requests:
            raise RequestError(f"request_id {new.request_id!r} is already in use.")
        self.limits.check_fits(new)
        make_room_in_queue(self, new)

    def add(self, new: NewRequest, is_ready: bool = True, now: float = 0.0) -> None:
        """Queue a request that has passed `check`, or hold it back until `make_ready`."""
        for request_id in make_room_in_queue(self, new):
            self.abort(request_id, DISPLACED, now=now)
        self._num_arrivals += 1
        sequences = make_sequences(
            new,
            rank=self._rank(new.priority, self._num_arrivals),
            unseeded=random_seed(self.limits.seed, self._num_arrivals),
            max_total=self.limits.max_total(new),
            root=chain_root(*self.limits.cache_identity, *new.cache_scope),
            columns=self.columns,
        )
        leader = sequences[0]
        if new.beam_width:
            leader.group = BeamGroup(leader, new.beam_width, new.length_penalty)
        self.requests[new.request_id] = sequences
        self.tenants.join(new.tenant)
        if new.deadline is not None:
            self.deadlines.add(new.request_id, new.deadline)
        self.metrics.prompt_tokens.add(leader.num_prompt)
        self.unready[new.request_id] = leader
        if is_ready:
            self.make_ready(new.request_id)
        else:
            self.waiting.hold_back(leader)

    def make_ready(self, request_id: str) -> None:
        """Queue a request that was held back."""
        leader = self.unready.pop(request_id)
        self.waiting.push(leader)
        if leader.new.wants_progress:
            self.progress.add(leader, self.waiting.lane_of(leader))

    def abort(
        self, request_id: str, reason: str = "abort", key: int | None = None, now: float = 0.0
    ) -> None:
        """End the sequences of a request, or the one named by `key`; those with tokens in flight
        end once these are applied."""
        for request in list(self.requests.get(request_id, ())):
            if key is not None and request.key != key:
                continue
            self.waiting.remove(request)
            draining = request.status is Status.DRAINING
            if request.group is None and (draining or request.has_tokens_in_flight):
                request.finish_reason = reason
                if not draining:
                    self._drain(request)
            else:
                self.end(request, reason, now)

    def take_ended(self) -> list[FinishedSequence]:
        """Terminal outputs that no `apply` has reported yet (aborts, failures)."""
        ended, self.ended = self.ended, []
        return ended

    # --- planning a step ------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step, or return None if nothing can be computed before an `apply`."""
        self.deadlines.expire(self, now)
        if not self.has_work:
            return None
        draft = PlanDraft(self._next_step, self.max_step_tokens)
        while True:
            self._continue_running(draft)
            admit_waiting(self, draft, now)
            if not draft.empty or not self.waiting or self.num_steps_in_flight:
                break
            # What the queue needs is held by rows that cannot go on (beams awaiting a sibling).
            self._preempt(int(self.ranked_rows()[-1]), draft)
            draft.preempted = False
        if draft.empty:
            return None
        plan = draft.finish(self._freed_rows, self._cuts, self._appends)
        plan.epochs = self.columns.epoch[plan.rows]
        if self.prefix_groups is not None:
            self.prefix_groups.mark(plan, self.ranked_rows())
        self._freed_rows, self._cuts, self._appends = [], {}, []
        self.kv.pool.free(draft.held_blocks)
        release_followers(self, plan.rows)
        self._next_step += 1
        self.num_steps_in_flight += 1
        self.pace.planned(now, self.max_step_tokens - draft.budget)
        is_prompt = plan.num_new_tokens > plan.num_samples
        num_prompt_tokens = int(plan.num_new_tokens[is_prompt].sum())
        self.prefill_budget.planned(plan.step, now, num_prompt_tokens)
        c = self.columns
        self.metrics.planned(plan, self.kv.pool.num_used, c.held_blocks, c.held_tokens, now)
        return plan

    def _continue_running(self, draft: PlanDraft) -> None:
        """Let running requests catch up, preempting the last in rank while blocks are short."""
        c = self.columns
        self.kv.free_behind_windows(self.ranked_rows())
        while True:
            rows = self.ranked_rows()
            if not len(rows):
                return
            want = np.minimum(c.num_tokens[rows], c.max_total[rows] - 1) - c.num_computed[rows]
            want[c.awaits_tokens(rows, self.num_steps_in_flight)] = 0
            if self.limits.long_prefill_token_threshold:
                np.minimum(want, self.limits.long_prefill_token_threshold, out=want)
            self._limit_prompts(draft, rows, want)
            grant = _share(draft.budget, want)
            need = self.kv.shortfall(rows, c.num_computed[rows] + grant)
            if self.kv.can_grow(need):
                break
            self._preempt(int(rows[-1]), draft)
        if self.speculation.num_drafts:
            grant, need = self._with_drafts(draft, rows, grant, need)
        self.kv.grow(draft, rows, need)
        longest = np.argsort(-c.num_tokens[rows], kind="stable")  # first, so that all end together
        if len(computing := longest[grant[longest] > 0]):
            self._compute(draft, rows[computing], grant[computing])

    def _with_drafts(
        self, draft: PlanDraft, rows: Int32Array, grant: Int32Array, need: Int32Array
    ) -> tuple[Int32Array, Int32Array]:
        """Drafts take what the tokens of all rows and the next prompt in the queue leave of the
        budget, and of the free blocks."""
        c, left = self.columns, draft.budget - int(grant.sum())
        if self.waiting and self.free_rows:
            left = max(left - len(self.waiting.first().held_token_ids), 0)
        catches_up = (grant > 0) & (c.num_computed[rows] + grant == c.num_tokens[rows])
        want = np.where(catches_up, self.speculation.drafts(rows), 0)
        with_drafts = grant + _share(left, want)
        more = self.kv.shortfall(rows, c.num_computed[rows] + with_drafts)
        return (with_drafts, more) if self.kv.can_grow(more) else (grant, need)

    def _limit_prompts(self, draft: PlanDraft, rows: Int32Array, want: Int32Array) -> None:
        """Beside streams that clients read along, compute no more prompt tokens than fit the
        target for the gap between two tokens, and leave none of the streams out."""
        c, limits = self.columns, self.limits
        reads = c.interactive[rows] & (c.num_tokens[rows] > c.num_prompt[rows])
        if limits.target_itl_s == 0 or not limits.enable_chunked_prefill or not reads.any():
            return
        is_prompt = want > 1
        num_decoding = int(np.count_nonzero(want == 1))
        tokens = min(self.prefill_budget.tokens(num_decoding), draft.budget - num_decoding)
        draft.prompt_budget = max(tokens, 0)
        prompts = want[is_prompt]
        before = np.cumsum(prompts) - prompts
        want[is_prompt] = np.clip(draft.prompt_budget - before, 0, prompts)

    def ranked_rows(self) -> Int32Array:
        """Running rows in the policy's order, kept until a sequence joins or leaves."""
        if self._ranked is None:
            rows = np.flatnonzero(self.columns.running).astype(np.int32)
            priority, arrival = self.columns.rank[:, rows]
            self._ranked = rows[np.lexsort((arrival, priority))]
        return self._ranked

    def forget_order(self) -> None:
        """A sequence has joined or left."""
        self._ranked = None

    def _compute(self, draft: PlanDraft, rows: Int32Array, counts: Int32Array) -> None:
        """Book `counts` tokens for `rows`. Rows that reach their last token sample the next; what
        they compute beyond it are drafts, of which the result says how many were accepted."""
        c = self.columns
        c.computed_before[rows] = c.num_computed[rows]
        c.num_computed[rows] += counts
        ahead = c.num_computed[rows] - c.num_tokens[rows]  # drafts, if not below 0
        samples = np.maximum(ahead + 1, 0)
        by_sampler = rows[(ahead >= 0) & ~c.host_chooses[rows]]
        c.num_tokens[by_sampler] = c.num_computed[by_sampler] + 1
        if c.has_windows:
            c.num_certain[rows] += counts - np.maximum(ahead, 0)
        if self.speculation.num_drafts:
            c.has_sampled[rows] |= ahead >= 0
        c.in_flight[rows] += 1
        if len(self.tenants) > 1:
            self.tenants.charge(c.tenant[rows], counts)
        c.last_step[rows] = draft.step
        self.kv.publish_prompts(rows, self.by_row)
        draft.compute(rows, counts, samples)

    def _preempt(self, row: int, draft: PlanDraft) -> None:
        """Take a request's blocks away; it is recomputed later."""
        self.metrics.preemptions.add(1)
        draft.preempted = True
        request = self._at(row)
        if self.columns.in_flight[row]:
            self._drain(request)
        else:
            self.requeue(request)

    # --- taking results in ----------------------------------------------------------------------

    def apply(
        self, plan: StepPlan, result: StepResult, now: float, complete: BoolArray | None = None
    ) -> StepOutput:
        """Take in the tokens of a step, end what is done, and report what clients want to see.
        `complete` says of each sample whether no token can follow it."""
        c = self.columns
        self.num_steps_in_flight -= 1
        self.prefill_budget.applied(plan.step, now)
        live = c.epoch[plan.rows] == plan.epochs
        c.in_flight[plan.rows[live]] -= 1
        if plan.has_drafts:
            self._give_back(plan, result, live)
        accepted = accept(c, plan, result, live, complete)
        output = collect_output(c, plan, result, live, accepted)
        if len(accepted.rows) < len(result.counts):
            self._advance_beams(plan, result, live)
        if result.pooled is not None:  # what rows have that changed hands is dropped below
            self._pooled = dict(
                zip(result.pooled.rows.tolist(), result.pooled.vectors, strict=True)
            )
        self._append(accepted, now)
        for request in [r for r in self._draining if c.in_flight[r.row] == 0]:
            if request.finish_reason is not None:
                self.end(request, request.finish_reason, now)
            else:
                self.requeue(request)
        self._pooled.clear()
        if not self.requests:
            self.pace.rested()
        output.finished = self.take_ended()
        return output

    def _give_back(self, plan: StepPlan, result: StepResult, live: BoolArray) -> None:
        """Rejected drafts were booked, and so were blocks for them."""
        c, samples = self.columns, plan.samples
        rows = plan.rows[samples]
        rejected = plan.num_samples[samples] - result.counts
        given = live[samples] & c.running[rows]
        if c.has_windows:
            c.num_certain[rows[given]] += result.counts[given] - 1
        given &= rejected > 0
        rows, rejected = rows[given], rejected[given]
        c.num_tokens[rows] -= rejected
        c.num_computed[rows] -= rejected
        self.kv.shrink(rows)

    def _advance_beams(self, plan: StepPlan, result: StepResult, live: BoolArray) -> None:
        rows = plan.rows[plan.samples]
        by_host = live[plan.samples] & self.columns.host_chooses[rows]
        if not by_host.any():
            return
        members = [self._at(row) for row in rows[by_host]]
        places = (np.cumsum(result.counts) - result.counts)[by_host]
        for group in report_candidates(members, places, result.logprobs):
            group.advance(self)

    def _append(self, accepted: AcceptedTokens, now: float) -> None:
        """Append sampled tokens and end the requests that stop or are full."""
        c, rows, counts = self.columns, accepted.rows, accepted.counts
        at = c.num_known[rows]
        if len(accepted.tokens) == len(rows):
            c.token_ids[rows, at] = accepted.tokens
        else:
            first = np.repeat(at - (np.cumsum(counts) - counts), counts)
            places = first + np.arange(len(accepted.tokens))
            c.token_ids[np.repeat(rows, counts), places] = accepted.tokens
        c.num_known[rows] = at + counts
        is_first = at == c.num_prompt[rows]
        gaps = now - c.last_token_time[rows[~is_first]]
        self.metrics.generated(len(accepted.tokens), gaps, now)
        c.last_token_time[rows] = now
        for row in rows[is_first]:
            request = self._at(row)
            if request.first_token_time:  # it was cut back to its prompt
                continue
            request.first_token_time = now
            if request.new.wants_progress:
                self.progress.remove(request)
            self.metrics.time_to_first_token.observe(now - request.new.arrival_time)
        ends = accepted.ends
        for row, by_stop in zip(rows[ends], accepted.stops[ends], strict=True):
            self.end(self._at(row), "stop" if by_stop else "length", now)

    def cut_back(self, request: Request, num_tokens: int) -> None:
        """Let a running sequence go on from its first `num_tokens` tokens. What is in flight of it
        is dropped when it comes."""
        c, row = self.columns, request.row
        assert request.status is Status.RUNNING and request.group is None
        assert not c.constrained[row], "a grammar has matched the tokens already"
        assert request.num_prompt <= num_tokens <= c.num_known[row]
        c.num_known[row] = c.num_tokens[row] = num_tokens
        c.num_computed[row] = min(c.num_computed[row], num_tokens - 1)
        c.num_certain[row] = c.num_computed[row]
        if num_tokens < len(request.held_token_ids) or not self.kv.keeps(row, num_tokens - 1):
            # Blocks of tokens that it came with are findable: it must not write to them.
            self.requeue(request)
            return
        c.epoch[row] += 1
        c.in_flight[row] = 0
        c.has_sampled[row] = False
        self.kv.shrink(np.array([row], np.int32))
        self._appends = [append for append in self._appends if append[0] != row]
        self._cuts[row] = num_tokens

    def append_tokens(self, request: Request, tokens: list[int]) -> None:
        """Append tokens that the host knows, to a request with nothing in flight."""
        c, row, at = self.columns, request.row, request.num_known
        c.token_ids[row, at : at + len(tokens)] = tokens
        c.num_known[row] += len(tokens)
        c.num_tokens[row] += len(tokens)
        self._appends += [(row, token) for token in tokens]

    # --- leaving --------------------------------------------------------------------------------

    def _drain(self, request: Request) -> None:
        """Give the blocks up now; keep the row until the tokens in flight have arrived."""
        self.kv.release(request)
        self.columns.running[request.row] = False
        self._ranked = None
        request.status = Status.DRAINING
        self._draining.add(request)

    def requeue(self, request: Request) -> None:
        self._release_row(request)
        request.status = Status.WAITING
        if request.group is None or request.group.awaits(request):
            self.waiting.push(request)

    def _release_row(self, request: Request) -> None:
        """Free a request's row and blocks; its tokens stay with it."""
        row = request.row
        self._draining.discard(request)
        if request.status is Status.RUNNING:
            self.kv.release(request)
        request.hold()
        self.columns.running[row] = False
        self.columns.epoch[row] += 1
        self.by_row[row] = None
        self.free_rows.append(row)
        self._freed_rows.append(row)
        self._appends = [append for append in self._appends if append[0] != row]
        self._cuts.pop(row, None)
        self._ranked = None

    def drop(self, request: Request) -> None:
        """Forget a sequence that gets no output of its own (a beam that lost)."""
        self.waiting.remove(request)
        if request.row >= 0:
            self._release_row(request)
        request.status = Status.FINISHED

    def end(
        self, request: Request, reason: str, now: float = 0.0, error: str = ""
    ) -> FinishedSequence:
        """Free everything a sequence has and give it its one terminal output."""
        if request.group is not None:
            return request.group.end(self, reason, error)
        row = request.row
        if row >= 0:
            self._release_row(request)
        tokens = request.held_token_ids[request.num_prompt :]
        if request.new.pooling is None:
            return self.finish(request, tokens, reason, now=now, error=error)
        # The token that was sampled after the prompt only says that the prompt is complete.
        reason = "stop" if reason == "length" else reason
        ended = self.finish(request, tokens[:0], reason, now=now, error=error)
        ended.embedding = self._pooled.pop(row, None)
        return ended

    def finish(
        self,
        request: Request,
        tokens: Int32Array,
        reason: str,
        *,
        now: float = 0.0,
        error: str = "",
    ) -> FinishedSequence:
        """Record the terminal output of a sequence (or of a beam group, through its leader)."""
        request.status, request.finish_reason = Status.FINISHED, reason
        new = request.new
        siblings = self.requests[new.request_id]
        siblings.remove(request)
        is_last = not siblings
        if new.wants_progress:
            self.progress.remove(request)
        if is_last:
            del self.requests[new.request_id]
            self.unready.pop(new.request_id, None)
            self.tenants.leave(new.tenant)
            if new.deadline is not None:
                self.deadlines.remove(new.request_id)
        ended = request.finished(tokens, reason, now, error)
        self.ended.append(ended)
        self.metrics.finished(ended, new, is_last)
        return ended

    # --- maintenance ----------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        self.kv.tree.reset()

    def check_books(self) -> None:
        check_books(self)

    def _at(self, row: int | np.int32) -> Request:
        request = self.by_row[row]
        assert request is not None, f"row {row} has no request"
        return request


def _share(budget: int, want: Int32Array) -> Int32Array:
    """What each gets of a budget, the first ones first."""
    given: Int32Array = np.clip(budget - (np.cumsum(want) - want), 0, want).astype(np.int32)
    return given
