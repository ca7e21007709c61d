"""`Scheduler`: decides, step by step, which sequences compute how many tokens.

There are no phases: a sequence has known tokens and computed tokens, and a step lets sequences
catch up within a token budget. `schedule` plans a step from upper bounds, before the steps in
flight have reported; `apply` takes a step's tokens in. Work over all rows is array operations;
Python loops run only over what changed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from itertools import islice

import numpy as np

from quire.metrics.engine import EngineMetrics
from quire.protocol.adapter import AdapterContent
from quire.protocol.errors import RequestError
from quire.protocol.output import (
    BlockState,
    DeviceMemory,
    EngineSnapshot,
    FinishedSequence,
    MemorySplit,
    SequenceSnapshot,
    StepOutput,
)
from quire.protocol.plan import (
    BoolArray,
    Float32Array,
    Int32Array,
    PlanBuilder,
    StepPlan,
    StepResult,
)
from quire.protocol.request import NewRequest, SchedulingPolicy
from quire.scheduler.adapters import AdapterSlots
from quire.scheduler.beam_search import BeamGroup
from quire.scheduler.kv_cache import KVCache, PrefixMatch, chain_root
from quire.scheduler.prefill_budget import PrefillBudget
from quire.scheduler.prefix_groups import PrefixGroups
from quire.scheduler.queue import LazyHeap, ProgressReports, WaitingQueue
from quire.scheduler.sequence import (
    AcceptedTokens,
    Columns,
    SchedulerLimits,
    Sequence,
    Status,
    make_sequences,
    random_seed,
)
from quire.scheduler.speculation import Speculation

logger = logging.getLogger(__name__)

DISPLACED = "overloaded"
"""Why a request ended that had to make room in the queue for one of an older tenant."""


class Pause(Enum):
    """What the engine does not do while an operator has paused it."""

    NONE = "none"
    DRAIN = "drain"
    """No request begins; those that have begun go on to their end."""
    HOLD = "hold"
    """Nothing is computed; running sequences keep their rows and blocks."""


@dataclass(frozen=True)
class Load:
    """How full a scheduler is."""

    num_running: int
    num_waiting: int
    num_free_rows: int
    cache_usage: float
    """Share of the KV blocks in use."""
    blocks_each: float
    """Blocks of a running sequence, on average."""
    waits_for_blocks: bool
    """Whether the next in the queue would have a row, and finds too few blocks."""


class Scheduler:
    def __init__(self, limits: SchedulerLimits, metrics: EngineMetrics | None = None) -> None:
        self.limits = limits
        self.max_step_tokens = limits.max_num_batched_tokens
        """Most tokens in a step; less than the limit while memory is short."""
        self.metrics = metrics or EngineMetrics()
        self.columns = Columns(limits)
        self.kv = KVCache(limits, self.columns)
        self.prefix_groups: PrefixGroups | None = None
        if limits.groups_prefixes:
            full = limits.windows.index(None)
            self.prefix_groups = PrefixGroups(self.columns, limits.block_size, full)
        self.speculation = Speculation(
            self.columns, limits.speculation, limits.max_num_batched_tokens
        )
        self.prefill_budget = PrefillBudget(
            limits.target_itl_s, limits.graph_tokens, limits.num_stages
        )
        self.waiting = WaitingQueue(limits)
        self.tenants = self.waiting.tenants
        self.pace = self.waiting.pace
        self.progress = ProgressReports(self.waiting)
        self.adapters = None if limits.adapters is None else AdapterSlots(limits.adapters)
        self.deadlines: LazyHeap[str] = LazyHeap()
        """Requests that end by themselves, by time."""
        self.pause = Pause.NONE
        self.requests: dict[str, list[Sequence]] = {}
        """Sequences without a terminal output, by request id."""
        self._beams: dict[str, BeamGroup] = {}
        """Of requests that are searched with beams."""
        self.by_row: list[Sequence | None] = [None] * limits.max_num_seqs
        self.free_rows = list(range(limits.max_num_seqs))[::-1]
        self.num_steps_in_flight = 0
        self._ranked: Int32Array | None = None
        self._draining: set[Sequence] = set()
        self.ended: list[FinishedSequence] = []
        # Changes since the last plan that the next one will carry:
        self._freed_rows: list[int] = []
        self._drained_rows: list[int] = []
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
            return self.num_running > 0 or self.waiting.has_begun
        return len(self.requests) > len(self.waiting.held_back) and self.pause is Pause.NONE

    @property
    def num_running(self) -> int:
        return len(self.ranked_rows())

    @property
    def next_time(self) -> float | None:
        """When there is something to do without a step: a deadline, or a report of progress."""
        times = [self.deadlines.first()[0]] if self.deadlines else []
        if self.progress.next_time is not None:
            times.append(self.progress.next_time)
        return min(times, default=None)

    def load(self) -> Load:
        rows, pool = self.ranked_rows(), self.kv.pool
        waits_for_blocks = False
        if self.free_rows and (first := self.waiting.first()) is not None:
            wanted = self.limits.blocks_held(len(first.held_token_ids))
            waits_for_blocks = wanted > pool.num_free - self.kv.num_promised(rows)
        return Load(
            num_running=len(rows),
            num_waiting=len(self.waiting),
            num_free_rows=len(self.free_rows),
            cache_usage=pool.num_used / self.limits.num_blocks,
            blocks_each=float(self.columns.held_blocks[rows].mean()) if len(rows) else 0.0,
            waits_for_blocks=waits_for_blocks,
        )

    def set_gauges(self, memory: DeviceMemory) -> None:
        """What metrics say of this moment."""
        metrics, pool, blocks = self.metrics, self.kv.pool, self.kv.pool.states()
        metrics.running.set(self.num_running)
        num_held_back = len(self.waiting.held_back)
        metrics.waiting.set(len(self.waiting) + num_held_back)
        metrics.waiting_by_reason["capacity"].set(len(self.waiting))
        metrics.waiting_by_reason["deferred"].set(num_held_back)
        metrics.cache_usage.set(pool.num_used / pool.num_blocks)
        metrics.shared_blocks.set(int((blocks == BlockState.SHARED).sum()))
        metrics.cached_blocks.set(int((blocks == BlockState.CACHED).sum()))
        c, rows = self.columns, self.ranked_rows()
        slots = int(c.held_blocks[rows].sum()) * self.limits.block_size
        metrics.waste.set(1.0 - int(c.held_tokens[rows].sum()) / slots if slots else 0.0)
        split = MemorySplit.of(memory, blocks)
        for kind, gauge in metrics.memory.items():
            gauge.set(getattr(split, kind))

    def snapshot(
        self,
        now: float,
        memory: DeviceMemory,
        max_waiting: int,
        tables_of: Collection[int] | None,
    ) -> EngineSnapshot:
        """The scheduler's part of `EngineCore.snapshot`."""
        blocks = self.kv.pool.states()
        held = [self._at(row) for row in self.ranked_rows().tolist()]
        held += [one for one in self.by_row if one is not None and one.status is Status.DRAINING]

        def shown(sequence: Sequence) -> SequenceSnapshot:
            has_table = tables_of is None or sequence.key in tables_of
            return sequence.snapshot(blocks, has_table)

        return EngineSnapshot(
            time=now,
            block_size=self.limits.block_size,
            blocks=blocks,
            running=[shown(one) for one in held],
            waiting=[shown(one) for one in islice(self.waiting, max_waiting)],
            num_waiting=len(self.waiting),
            prompt_tokens_per_s=self.metrics.recent_prompt_tokens.per_second(now),
            generation_tokens_per_s=self.metrics.recent_generation_tokens.per_second(now),
            memory=MemorySplit.of(memory, blocks),
            paused=self.pause is not Pause.NONE,
        )

    # --- requests come and go -------------------------------------------------------------------

    def check(self, new: NewRequest) -> None:
        """Refuse a request that could never run, or that finds the queue full."""
        if new.request_id in self.requests:
            raise RequestError(f"request_id {new.request_id!r} is already in use.")
        self.limits.check_fits(new)
        self.waiting.make_room(new, len(self.free_rows))

    def add(self, new: NewRequest, num_awaited: int = 0, now: float = 0.0) -> None:
        """Queue a request that has passed `check`, or hold it back until `make_ready` was called as
        often as there are things that it awaits."""
        for request_id in self.waiting.make_room(new, len(self.free_rows)):
            self.abort(request_id, DISPLACED, now=now)
        self._num_arrivals += 1
        sequences = make_sequences(
            new,
            rank=(self.priority(new), self._num_arrivals),
            unseeded=random_seed(self.limits.seed, self._num_arrivals),
            max_total=self.limits.max_total(new),
            root=self._root_of(new),
            columns=self.columns,
        )
        leader = sequences[0]
        if new.beam_width:
            self._beams[new.request_id] = BeamGroup(leader)
        self.requests[new.request_id] = sequences
        self.tenants.join(new.tenant)
        if new.deadline is not None:
            self.deadlines.push(new.deadline, new.request_id)
        self.metrics.prompt_tokens.add(leader.num_prompt)
        if num_awaited:
            self.waiting.hold_back(leader, num_awaited)
        else:
            self._enqueue(leader)

    def is_held_back(self, request_id: str) -> bool:
        return request_id in self.waiting.held_back

    def is_queued(self, new: NewRequest) -> bool:
        """Whether a request waits in the queue and has not begun."""
        first, *_ = self.requests.get(new.request_id, [None])
        if first is None or first.new is not new or first.has_begun:
            return False
        return not self.is_held_back(new.request_id)

    def hold_back(self, new: NewRequest) -> None:
        """Take a request out of the queue, where it has not begun, until `make_ready`."""
        leader = self.requests[new.request_id][0]
        self.waiting.remove(leader)
        if new.wants_progress:
            self.progress.remove(leader)
        self.waiting.hold_back(leader, 1)

    def priority(self, new: NewRequest) -> int:
        """As the policy has it; smaller is better."""
        return new.priority if self.limits.policy == SchedulingPolicy.PRIORITY else 0

    def turn(self, request_id: str) -> tuple[int, tuple[int, int], int]:
        """When a request that has not begun has its turn: of two, that with the smaller value is
        first."""
        leader = self.requests[request_id][0]
        standing = self.tenants.standing(self.tenants.slot(leader.new.tenant))
        return leader.rank[0], standing, leader.rank[1]

    def make_ready(self, request_id: str) -> None:
        """One of the things that a request awaits is there; after the last it is queued."""
        leader = self.waiting.held_back[request_id]
        if not self.waiting.still_awaits(leader):
            self._enqueue(leader)

    def set_adapter(self, request_id: str, adapter: AdapterContent) -> None:
        """What the folder of a request's adapter holds. The request must be held back still."""
        assert self.adapters is not None and request_id in self.waiting.held_back
        for sequence in self.requests[request_id]:
            sequence.adapter = adapter
            sequence.root = self._root_of(sequence.new, adapter.digest)

    def adapter_names(self) -> tuple[list[str], list[str]]:
        """Of adapters whose requests have begun, and of those whose requests have not."""
        running, waiting = set[str](), set[str]()
        for first, *_ in self.requests.values():
            if first.new.adapter is not None:
                names = running if first.has_begun else waiting
                names.add(first.new.adapter.lora_name)
        return sorted(running), sorted(waiting)

    def _root_of(self, new: NewRequest, adapter_digest: str = "") -> bytes:
        return chain_root(*self.limits.cache_identity, *new.cache_scope(adapter_digest))

    def _enqueue(self, leader: Sequence) -> None:
        self.waiting.push(leader)
        if leader.new.wants_progress:
            self.progress.add(leader)

    def abort(
        self, request_id: str, reason: str = "abort", key: int | None = None, now: float = 0.0
    ) -> None:
        """End all sequences of a request, or the one named by `key`; those with tokens in flight
        end once these are applied."""
        for sequence in list(self.requests.get(request_id, ())):
            if key is not None and sequence.key != key:
                continue
            self.waiting.remove(sequence)
            draining = sequence.status is Status.DRAINING
            if not sequence.is_beam and (draining or sequence.has_tokens_in_flight):
                sequence.finish_reason = reason
                if not draining:
                    self._drain(sequence)
            else:
                self.end(sequence, reason, now)

    def abort_where(self, chosen: Callable[[Sequence], bool], now: float) -> int:
        """End the requests whose first sequence is chosen; returns how many."""
        found = [name for name, (first, *_) in self.requests.items() if chosen(first)]
        for request_id in found:
            self.abort(request_id, now=now)
        return len(found)

    def set_pause(self, pause: Pause) -> None:
        self.pause = pause
        if pause is not Pause.NONE:
            self.pace.rested()

    def take_ended(self) -> list[FinishedSequence]:
        """Terminal outputs that no `apply` has reported yet (aborts, failures)."""
        ended, self.ended = self.ended, []
        return ended

    # --- planning a step ------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step, or return None if nothing can be computed before an `apply`."""
        self._expire(now)
        if not self.has_work:
            return None
        builder = PlanBuilder(self._next_step, self.max_step_tokens)
        while True:
            self._continue_running(builder)
            self._admit_waiting(builder, now)
            if not builder.empty or not self.waiting or self.num_steps_in_flight:
                break
            if not self.num_running:
                break
            # What the queue needs is held by rows that cannot go on (beams awaiting a sibling).
            self._preempt(int(self.ranked_rows()[-1]), builder)
            builder.preempted = False
        if builder.empty:
            return None
        if self.adapters is not None:
            builder.cleared_slots, builder.placed_adapters = self.adapters.take_changes()
        plan = builder.build(self._freed_rows, self._cuts, self._appends)
        plan.drained_rows = np.array(self._drained_rows, np.int32)
        plan.epochs = self.columns.epoch[plan.rows]
        if self.limits.num_ahead:
            plan.num_blocks = self.speculation.blocks_for_drafts(plan)
        if self.prefix_groups is not None:
            self.prefix_groups.mark(plan, self.ranked_rows())
        if self.columns.has_stages:
            plan.append_rows, plan.append_tokens = self.columns.take_unsent(plan.rows)
        self._freed_rows, self._drained_rows, self._cuts, self._appends = [], [], {}, []
        self.kv.pool.free(builder.held_blocks)
        self._release_followers(plan.rows)
        self._next_step += 1
        self.num_steps_in_flight += 1
        self.pace.planned(now, self.max_step_tokens - builder.budget)
        is_prompt = plan.num_new_tokens > plan.num_samples
        num_prompt_tokens = int(plan.num_new_tokens[is_prompt].sum())
        self.prefill_budget.planned(plan.step, now, num_prompt_tokens)
        if self.speculation.num_drafts:
            self.speculation.planned(plan, now)
        c = self.columns
        self.metrics.planned(plan, self.kv.pool.num_used, c.held_blocks, c.held_tokens, now)
        return plan

    def _expire(self, now: float) -> None:
        """End the requests whose time is up: by "timeout" where no token was on its way, else by
        "abort", with the tokens they have."""
        while self.deadlines and self.deadlines.first()[0] <= now:
            request_id = self.deadlines.pop()
            begun = any(sequence.num_generated > 0 for sequence in self.requests[request_id])
            self.abort(request_id, "abort" if begun else "timeout", now=now)

    def _continue_running(self, plan: PlanBuilder) -> None:
        """Let running sequences catch up, preempting the last in rank while blocks are short."""
        c = self.columns
        self.kv.free_behind_windows(self.ranked_rows())
        while True:
            rows = self.ranked_rows()
            if not len(rows):
                return
            num_tokens, num_computed = c.num_tokens[rows], c.num_computed[rows]
            want = np.minimum(num_tokens, c.max_total[rows] - 1) - num_computed
            if c.has_stages:
                self._divide_among_stages(rows, want)
            else:
                want[c.awaits_tokens(rows, self.num_steps_in_flight)] = 0
            if self.limits.long_prefill_token_threshold:
                np.minimum(want, self.limits.long_prefill_token_threshold, out=want)
            self._limit_prompts(plan, rows, want)
            grant = _share(plan.budget, want)
            need = self.kv.shortfall(rows, num_computed + grant)
            if self.kv.can_grow(need):
                break
            self._preempt(int(rows[-1]), plan)
        if self.speculation.num_drafts:
            grant, need = self._with_drafts(plan, rows, grant, need)
        if self.limits.num_ahead:
            ahead = np.minimum(num_computed + grant + self.limits.num_ahead, c.max_total[rows])
            more = np.maximum(self.kv.shortfall(rows, ahead), need)
            need = more if self.kv.can_grow(more) else need
        self.kv.grow(plan, rows, need)
        longest = np.argsort(-num_tokens, kind="stable")  # first, so that all end together
        if len(computing := longest[grant[longest] > 0]):
            self._compute(plan, rows[computing], grant[computing])

    def _with_drafts(
        self, plan: PlanBuilder, rows: Int32Array, grant: Int32Array, need: Int32Array
    ) -> tuple[Int32Array, Int32Array]:
        """Drafts take what the tokens of all rows and the next prompt in the queue leave of the
        budget, and of the free blocks."""
        c = self.columns
        assert not c.has_stages, "drafts wait in the row of one device alone"
        if not c.num_waiting_drafts[rows].any():  # as where a text does not repeat itself
            return grant, need
        left = plan.budget - int(grant.sum())
        if self.free_rows and (first := self.waiting.first()) is not None:
            left = max(left - len(first.held_token_ids), 0)
        catches_up = (grant > 0) & (c.num_computed[rows] + grant == c.num_tokens[rows])
        num_decoding = int(np.count_nonzero(catches_up))
        want = np.zeros_like(grant)
        want[catches_up] = self.speculation.drafts(rows[catches_up], num_decoding)
        if not want.any():
            return grant, need
        with_drafts = grant + _share(left, want)
        more = self.kv.shortfall(rows, c.num_computed[rows] + with_drafts)
        return (with_drafts, more) if self.kv.can_grow(more) else (grant, need)

    def _divide_among_stages(self, rows: Int32Array, want: Int32Array) -> None:
        """A row that decodes is in one of the steps in flight at most, so a step gets its share of
        these rows and leaves the others to the steps that keep the other stages busy. Those come
        first that have waited longest."""
        most = -(-np.count_nonzero(want <= 1) // self.limits.num_stages)
        ready = np.flatnonzero(want == 1)
        if len(ready) > most:
            by_turn = np.argsort(self.columns.last_step[rows[ready]], kind="stable")
            want[ready[by_turn[most:]]] = 0

    def _limit_prompts(self, plan: PlanBuilder, rows: Int32Array, want: Int32Array) -> None:
        """While clients read streams as they are made, bound the prompt tokens of a step: the gap
        between two tokens stays near its target, and every stream gets its token."""
        c, limits = self.columns, self.limits
        reads = c.interactive[rows] & (c.num_tokens[rows] > c.num_prompt[rows])
        if limits.target_itl_s == 0 or not limits.enable_chunked_prefill or not reads.any():
            return
        is_prompt = want > 1
        num_decoding = int(np.count_nonzero(want == 1))
        tokens = min(self.prefill_budget.tokens(num_decoding), plan.budget - num_decoding)
        plan.prompt_budget = max(tokens, 0)
        prompts = want[is_prompt]
        before = np.cumsum(prompts) - prompts
        want[is_prompt] = np.clip(plan.prompt_budget - before, 0, prompts)

    def ranked_rows(self) -> Int32Array:
        """Running rows in the policy's order, kept until a sequence joins or leaves."""
        if self._ranked is None:
            rows = np.flatnonzero(self.columns.running).astype(np.int32)
            priority, arrival = self.columns.rank[:, rows]
            self._ranked = rows[np.lexsort((arrival, priority))]
        return self._ranked

    def _compute(self, plan: PlanBuilder, rows: Int32Array, counts: Int32Array) -> None:
        """Let `rows` compute `counts` tokens. Rows that reach their last token sample the next;
        what they compute beyond it are drafts, of which the result says how many were accepted."""
        c = self.columns
        before = c.num_computed[rows]
        c.computed_before[rows] = before
        c.num_computed[rows] = computed = before + counts
        ahead = computed - c.num_tokens[rows]  # drafts, if not below 0
        samples = np.maximum(ahead + 1, 0)
        if not c.has_stages:
            by_sampler = (ahead >= 0) & ~c.host_chooses[rows]
            c.num_tokens[rows[by_sampler]] = computed[by_sampler] + 1
        if c.has_windows:
            c.num_certain[rows] += counts - np.maximum(ahead, 0)
        if self.speculation.num_drafts:
            c.has_sampled[rows] |= ahead >= 0
        c.in_flight[rows] += 1
        if len(self.tenants) > 1:
            self.tenants.charge(c.tenant[rows], counts)
        c.last_step[rows] = plan.step
        self.kv.publish_prompts(rows, self.by_row)
        plan.compute(rows, counts, samples)

    def _preempt(self, row: int, plan: PlanBuilder) -> None:
        """Take a sequence's blocks away; it is recomputed later."""
        self.metrics.preemptions.add(1)
        plan.preempted = True
        sequence = self._at(row)
        if self.columns.in_flight[row]:
            self._drain(sequence)
        else:
            self.requeue(sequence)

    # --- admission ------------------------------------------------------------------------------

    def _admit_waiting(self, plan: PlanBuilder, now: float) -> None:
        """Give rows to waiting sequences in the queue's order, until the first that does not fit:
        as long as rows, blocks and the step's tokens allow."""
        waiting, kv = self.waiting, self.kv
        if plan.preempted or not waiting or not self.free_rows:
            return
        if self.adapters is not None:
            for digest in self.adapters.unblock(now, waiting.lanes_of):
                waiting.unblock(digest)
            if self.pause is Pause.DRAIN:  # what is unblocked may be older and not begin
                waiting.unblock_begun()
        promised = kv.num_promised(self.ranked_rows())
        while plan.room > 0 and self.free_rows and waiting:
            sequence = waiting.first_begun() if self.pause is Pause.DRAIN else waiting.first()
            if sequence is None:
                return
            if not self._has_adapter(sequence, now):
                continue
            num_known = len(sequence.held_token_ids)
            num_held = min(num_known + self.limits.num_ahead, max(num_known, sequence.max_total))
            match, fork_of = kv.match(sequence, plan.step)
            if not kv.room_for(match, num_held, promised):
                match, fork_of = kv.without_partial(match, fork_of)
                if not kv.room_for(match, num_held, promised):
                    return
            want = num_known - match.num_tokens
            if want > plan.room and not self._may_divide_prompts:
                return
            waiting.remove(sequence)
            grant = min(want, plan.room, self.limits.long_prefill_token_threshold or want)
            if sequence.num_cached < 0:
                self._begin(sequence, match.num_tokens, now)
            promised += self._admit(sequence, match, fork_of, grant, plan)

    def _has_adapter(self, sequence: Sequence, now: float) -> bool:
        """Whether there is room for a sequence's adapter. If not, it waits beside the queue's
        order, and those behind it go ahead."""
        adapter = sequence.adapter
        if adapter is None or self.adapters is None:
            return True
        priority = sequence.rank[0]
        if self.adapters.has_room(adapter, sequence.has_begun, priority):
            return True
        self.adapters.block(adapter, now, priority)
        self.waiting.block(sequence)
        return False

    def _acquire_adapter(self, sequence: Sequence) -> int:
        """The slot of its adapter, -1 for none."""
        if sequence.adapter is None or self.adapters is None:
            return -1
        slot, was_there = self.adapters.acquire(sequence.adapter)
        self.metrics.adapters.acquired(was_there)
        return slot

    @property
    def _may_divide_prompts(self) -> bool:
        """Where memory is short, prompts that should stay whole may fit in no step."""
        full = self.max_step_tokens == self.limits.max_num_batched_tokens
        return self.limits.enable_chunked_prefill or not full

    def _begin(self, sequence: Sequence, num_cached: int, now: float) -> None:
        """A sequence gets its first row."""
        if sequence.parent is None:
            # From now on it ranks by admission. By arrival, requests of a tenant that came late and
            # went ahead of others' queues would be preempted first, again and again.
            self.num_admissions += 1
            sequence.rank = (sequence.rank[0], self.num_admissions)
            for follower in sequence.followers:
                follower.rank = sequence.rank
            self.pace.admitted(sequence.num_prompt)
            self.progress.begin(sequence)
        sequence.num_cached = min(num_cached, sequence.num_prompt)
        sequence.first_scheduled_time = now
        self.metrics.admitted(sequence.num_prompt, sequence.num_cached)

    def _admit(
        self, sequence: Sequence, match: PrefixMatch, fork_of: int, grant: int, plan: PlanBuilder
    ) -> int:
        """Start a sequence on a row; returns how many blocks more its tokens will need."""
        row = self.free_rows.pop()
        samples = match.num_tokens + grant == len(sequence.held_token_ids)
        slot = self._acquire_adapter(sequence)
        plan.admit(sequence.added_row(row, match.num_tokens, fork_of, slot), grant, samples)
        self.by_row[row] = sequence
        sequence.row, sequence.status = row, Status.RUNNING
        tenant = self.tenants.admitted(sequence.new.tenant, grant)
        num_tokens = self.columns.fill(sequence, plan.step, match.num_tokens, grant, tenant)
        if self.speculation.num_drafts:
            self.speculation.joined(row)
        num_blocks = self.kv.admit(sequence, match, fork_of, grant, plan)
        self._ranked = None
        missing = self.limits.blocks_for(num_tokens) - num_blocks
        return max(missing, 0) * len(self.limits.windows)

    def _release_followers(self, rows: Int32Array) -> None:
        """Queue the other sequences of a prompt once the first one's prompt is on its way."""
        c = self.columns
        for row in rows[c.has_followers[rows] & (c.num_computed[rows] >= c.num_prompt[rows])]:
            leader = self._at(row)
            for follower in leader.followers:
                if follower.status is Status.WAITING:
                    self.waiting.push(follower)
            leader.followers = []
            c.has_followers[row] = False

    # --- taking results in ----------------------------------------------------------------------

    def apply(
        self, plan: StepPlan, result: StepResult, now: float, complete: BoolArray | None = None
    ) -> StepOutput:
        """Take in the tokens of a step, end what is done, and report what clients want to see.
        `complete` says of each token whether none can follow it."""
        c = self.columns
        self.num_steps_in_flight -= 1
        self.prefill_budget.applied(plan.step, now)
        live = c.epoch[plan.rows] == plan.epochs
        c.in_flight[plan.rows[live]] -= 1
        if plan.has_drafts:
            self._give_back(plan, result, live)
            num_verified = self.speculation.num_verified(plan)
            self.metrics.verified(num_verified, result, live[plan.samples])
        if self.speculation.num_drafts:
            self.speculation.applied(plan, result, live, now)
        accepted = c.accept(plan, result, live, complete)
        output = c.output(plan, result, live, accepted)
        if len(accepted.rows) < len(result.counts):
            self._advance_beams(plan, result, live)
        if result.pooled is not None:  # what rows have that changed hands is dropped below
            self._pooled = dict(
                zip(result.pooled.rows.tolist(), result.pooled.vectors, strict=True)
            )
        self._append(accepted, now)
        for sequence in [one for one in self._draining if c.in_flight[one.row] == 0]:
            if sequence.finish_reason is not None:
                self.end(sequence, sequence.finish_reason, now)
            else:
                self.requeue(sequence)
        self._pooled.clear()
        if not self.requests:
            self.pace.rested()
        output.finished = self.take_ended()
        return output

    def _give_back(self, plan: StepPlan, result: StepResult, live: BoolArray) -> None:
        """Rejected drafts were counted as tokens, and blocks were allocated for them."""
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
        """Hand a step's candidates to the groups of their members; complete groups move on."""
        rows = plan.rows[plan.samples]
        by_host = live[plan.samples] & self.columns.host_chooses[rows]
        if not by_host.any():
            return
        logprobs = result.logprobs
        assert logprobs is not None
        places = (np.cumsum(result.counts) - result.counts)[by_host]
        groups: dict[str, BeamGroup] = {}
        for row, place in zip(rows[by_host], places, strict=True):
            member = self._at(row)
            group = groups[member.request_id] = self._beams[member.request_id]
            line = int(np.flatnonzero(logprobs.index == place)[0])
            group.report(member, logprobs.token_ids[line, 1:], logprobs.logprobs[line, 1:])
        for group in groups.values():
            if group.complete:
                self._advance(group)

    def _advance(self, group: BeamGroup) -> None:
        moves = group.advance()
        for fork in moves.forks:
            self.waiting.push(fork)
        for member, token in moves.extended:
            if member.row >= 0:
                self._append_known(member, [token])
            else:
                member.held_token_ids = np.append(member.held_token_ids, np.int32(token))
                self.waiting.push(member)
        for loser in moves.losers:
            self._drop(loser)
        if not group.members:
            self._end_beams(group, "stop")
        elif group.is_full:
            self._end_beams(group, "length")

    def _end_beams(self, group: BeamGroup, reason: str, error: str = "") -> FinishedSequence:
        """Give a group its one terminal output and free all members."""
        beams = group.finish()
        for member in group.members:
            self._drop(member)
        tokens = np.array(beams[0].token_ids if beams else [], np.int32)
        ended = self._finish(group.leader, tokens, reason, error=error)
        ended.beams = beams
        return ended

    def _append(self, accepted: AcceptedTokens, now: float) -> None:
        """Append sampled tokens and end the sequences that stop or are full."""
        c, rows, counts = self.columns, accepted.rows, accepted.counts
        at = c.num_known[rows]
        if len(accepted.tokens) == len(rows):
            c.token_ids[rows, at] = accepted.tokens
        else:
            first = np.repeat(at - (np.cumsum(counts) - counts), counts)
            places = first + np.arange(len(accepted.tokens))
            c.token_ids[np.repeat(rows, counts), places] = accepted.tokens
        c.num_known[rows] = at + counts
        if c.has_stages:
            c.num_tokens[rows] = c.num_known[rows]
        is_first = at == c.num_prompt[rows]
        gaps = now - c.last_token_time[rows[~is_first]]
        self.metrics.generated(len(accepted.tokens), gaps, now)
        c.last_token_time[rows] = now
        for row in rows[is_first]:
            sequence = self._at(row)
            if sequence.first_token_time:  # it was cut back to its prompt
                continue
            sequence.first_token_time = now
            if sequence.new.wants_progress:
                self.progress.remove(sequence)
            self.metrics.time_to_first_token.observe(now - sequence.new.arrival_time)
        ends = accepted.ends
        for row, by_stop in zip(rows[ends], accepted.stops[ends], strict=True):
            self.end(self._at(row), "stop" if by_stop else "length", now)

    def cut_back(self, sequence: Sequence, num_tokens: int) -> None:
        """Let a running sequence go on from its first `num_tokens` tokens. What is in flight of it
        is dropped when it comes."""
        c, row = self.columns, sequence.row
        assert sequence.status is Status.RUNNING and not sequence.is_beam
        assert not c.constrained[row], "a grammar has matched the tokens already"
        assert sequence.num_prompt <= num_tokens <= c.num_known[row]
        c.num_known[row] = c.num_tokens[row] = num_tokens
        c.num_computed[row] = min(c.num_computed[row], num_tokens - 1)
        c.num_certain[row] = c.num_computed[row]
        if num_tokens < len(sequence.held_token_ids) or not self.kv.keeps(row, num_tokens - 1):
            # Blocks of tokens that it came with are in the tree: it must not write to them.
            self.requeue(sequence)
            return
        c.epoch[row] += 1
        c.in_flight[row] = 0
        c.has_sampled[row] = False
        self.kv.shrink(np.array([row], np.int32))
        self._appends = [append for append in self._appends if append[0] != row]
        if c.has_stages and num_tokens > c.num_sent[row]:
            return  # the devices have no token too many
        c.num_sent[row] = num_tokens
        self._cuts[row] = num_tokens

    def _append_known(self, sequence: Sequence, tokens: list[int]) -> None:
        """Append tokens that the host knows, to a sequence with nothing in flight."""
        c, row, at = self.columns, sequence.row, sequence.num_known
        c.has_sampled[row] = False
        c.token_ids[row, at : at + len(tokens)] = tokens
        c.num_known[row] += len(tokens)
        c.num_tokens[row] += len(tokens)
        if not c.has_stages:  # else they are sent when the row computes them
            self._appends += [(row, token) for token in tokens]

    # --- structured output ----------------------------------------------------------------------

    def constrained(self, plan: StepPlan) -> tuple[Int32Array, list[Sequence]]:
        """The sequences with a grammar that a plan samples for, those that still run, and their
        places among the rows that sample."""
        c, rows = self.columns, plan.rows[plan.samples]
        live = (c.epoch[rows] == plan.epochs[plan.samples]) & c.constrained[rows]
        places = np.flatnonzero(live).astype(np.int32)
        return places, [self._at(row) for row in rows[places]]

    def awaits_constrained(self, plan: StepPlan) -> bool:
        """Whether a row with a grammar that a plan samples for has a token of a step before it in
        flight."""
        c, rows = self.columns, plan.rows[plan.samples]
        if c.has_stages:  # what is in flight of such a row is the prompt before its last chunk
            return False
        return bool((c.constrained[rows] & (c.in_flight[rows] > 1)).any())

    def epochs(self, rows: Int32Array) -> Int32Array:
        """A row's epoch changes whenever what is in flight of it no longer counts."""
        return self.columns.epoch[rows]

    def keep_drafts(self, sequence: Sequence, count: int) -> None:
        """Verify at most `count` of the drafts that wait in a row with nothing in flight."""
        c, row = self.columns, sequence.row
        c.num_waiting_drafts[row] = min(c.num_waiting_drafts[row], count)

    def set_synchronous(self, rows: Int32Array, flags: BoolArray) -> None:
        """Whether rows go on only once the token before is known."""
        self.columns.synchronous[rows] = flags

    def append_forced(
        self, sequence: Sequence, tokens: list[int], is_complete: bool, now: float
    ) -> list[int]:
        """Append tokens that alone can follow, as far as they fit and no stop token comes; returns
        them. The sequence ends there, or where nothing can follow them."""
        room = sequence.max_total - sequence.num_known
        num_before_stop = sequence.num_before_stop
        for place, token in enumerate(tokens):
            if token in sequence.stop_ids and place >= num_before_stop:
                tokens, is_complete = tokens[: place + 1], True
                break
        if len(tokens) > room:
            tokens, is_complete = tokens[:room], False
        self._append_known(sequence, tokens)
        self.metrics.generated(len(tokens), np.zeros(0), now)
        if is_complete:
            self.end(sequence, "stop", now)
        elif len(tokens) == room:
            self.end(sequence, "length", now)
        return tokens

    # --- leaving --------------------------------------------------------------------------------

    def _drain(self, sequence: Sequence) -> None:
        """Give the blocks up now; keep the row until the tokens in flight have arrived."""
        self.kv.release(sequence)
        self.columns.running[sequence.row] = False
        self._ranked = None
        sequence.status = Status.DRAINING
        self._draining.add(sequence)
        self._drained_rows.append(sequence.row)

    def requeue(self, sequence: Sequence) -> None:
        self._release_row(sequence)
        sequence.status = Status.WAITING
        if not sequence.is_beam or self._beams[sequence.request_id].awaits(sequence):
            self.waiting.push(sequence)

    def _release_row(self, sequence: Sequence) -> None:
        """Free a sequence's row and blocks; its tokens stay with it."""
        row = sequence.row
        self._draining.discard(sequence)
        if sequence.status is Status.RUNNING:
            self.kv.release(sequence)
        sequence.hold()
        if sequence.adapter is not None and self.adapters is not None:
            self.adapters.release(sequence.adapter.digest)
        self.columns.running[row] = False
        self.columns.epoch[row] += 1
        self.by_row[row] = None
        self.free_rows.append(row)
        self._freed_rows.append(row)
        self._appends = [append for append in self._appends if append[0] != row]
        self._cuts.pop(row, None)
        self._ranked = None

    def _drop(self, sequence: Sequence) -> None:
        """Forget a sequence that gets no output of its own (a beam that lost)."""
        self.waiting.remove(sequence)
        if sequence.row >= 0:
            self._release_row(sequence)
        sequence.status = Status.FINISHED

    def end(
        self, sequence: Sequence, reason: str, now: float = 0.0, error: str = ""
    ) -> FinishedSequence:
        """Free everything a sequence has and give it its one terminal output."""
        if sequence.is_beam:
            return self._end_beams(self._beams[sequence.request_id], reason, error)
        row = sequence.row
        if row >= 0:
            self._release_row(sequence)
        tokens = sequence.held_token_ids[sequence.num_prompt :]
        if sequence.new.pooling is None:
            return self._finish(sequence, tokens, reason, now=now, error=error)
        # The token that was sampled after the prompt only says that the prompt is complete.
        reason = "stop" if reason == "length" else reason
        ended = self._finish(sequence, tokens[:0], reason, now=now, error=error)
        ended.embedding = self._pooled.pop(row, None)
        return ended

    def _finish(
        self,
        sequence: Sequence,
        tokens: Int32Array,
        reason: str,
        *,
        now: float = 0.0,
        error: str = "",
    ) -> FinishedSequence:
        """Record the terminal output of a sequence (or of a beam group, through its leader)."""
        sequence.status, sequence.finish_reason = Status.FINISHED, reason
        new = sequence.new
        siblings = self.requests[new.request_id]
        siblings.remove(sequence)
        is_last = not siblings
        if new.wants_progress:
            self.progress.remove(sequence)
        if is_last:
            del self.requests[new.request_id]
            self._beams.pop(new.request_id, None)
            self.tenants.leave(new.tenant)
            if new.deadline is not None:
                self.deadlines.remove(new.request_id)
        ended = sequence.finished(tokens, reason, now, error)
        self.ended.append(ended)
        self.metrics.finished(ended, new, is_last)
        return ended

    # --- failures -------------------------------------------------------------------------------

    def request_ids(self, rows: Int32Array) -> list[str]:
        """Of the requests whose sequences have these rows."""
        found = (self.by_row[row] for row in rows)
        return list(dict.fromkeys(one.request_id for one in found if one is not None))

    def recover(self, failed_step: int) -> None:
        """After a failed step nothing from it on is computed: every running sequence starts over
        from its known tokens, and draws the same random numbers again."""
        self.kv.tree.withdraw(failed_step)
        self.num_steps_in_flight = 0
        for sequence in [one for one in self.by_row if one is not None]:
            # Nothing of a row whose last step is lost may be published on release.
            self.columns.num_computed[sequence.row] = 0
            if sequence.finish_reason is not None:
                self.end(sequence, sequence.finish_reason)
            else:
                self.requeue(sequence)
        if self.adapters is not None:
            self.adapters.reset()

    def fail_request(self, request_id: str, error: str, *, is_own_fault: bool = False) -> None:
        """End all sequences of a request with an error. Nothing may be in flight (see
        `recover`)."""
        for sequence in list(self.requests.get(request_id, ())):
            self.waiting.remove(sequence)
            self.end(sequence, "error", error=error).is_own_fault = is_own_fault

    def fail_all(self, error: str) -> None:
        """End everything with an error, whatever state it is in: the engine is dead."""
        for sequence in [one for sequences in self.requests.values() for one in sequences]:
            try:
                self.waiting.remove(sequence)
                self.end(sequence, "error", error=error)
            except Exception:
                logger.exception("request %r could not be ended in order", sequence.request_id)
                tokens = np.empty(0, np.int32)
                self.ended.append(FinishedSequence(sequence.key, tokens, "error", error=error))
        self.requests.clear()

    # --- maintenance ----------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        self.kv.tree.reset()

    def check_integrity(self) -> int:
        """Raise AssertionError if a block or a row is leaked, lost or counted wrongly; returns how
        many blocks are in use."""
        held = [sequence for sequence in self.by_row if sequence is not None]
        self.kv.check_integrity(held)
        assert len(held) + len(self.free_rows) == len(self.by_row), (
            "a row is neither free nor owned"
        )
        if self.adapters is not None:
            used = Counter(one.adapter.digest for one in held if one.adapter is not None)
            self.adapters.check_integrity(used)
        return self.kv.pool.num_used

    def _at(self, row: int | np.int32) -> Sequence:
        sequence = self.by_row[row]
        assert sequence is not None, f"row {row} has no sequence"
        return sequence


def _share(budget: int, want: Int32Array) -> Int32Array:
    """What each gets of a budget, the first ones first."""
    given: Int32Array = np.clip(budget - (np.cumsum(want) - want), 0, want).astype(np.int32)
    return given
