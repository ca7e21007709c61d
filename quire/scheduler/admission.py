"""Admission: waiting requests get rows as long as rows, blocks and the step's tokens allow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.protocol.plan import Int32Array
from quire.scheduler.draft import PlanDraft
from quire.scheduler.pause import Pause
from quire.scheduler.radix_tree import PrefixMatch
from quire.scheduler.request import Request, Status

if TYPE_CHECKING:
    from quire.scheduler.scheduler import Scheduler


def admit_waiting(scheduler: Scheduler, draft: PlanDraft, now: float) -> None:
    """Give rows to waiting requests in the queue's order, until the first that does not fit."""
    waiting, free_rows, kv = scheduler.waiting, scheduler.free_rows, scheduler.kv
    if draft.preempted or not waiting or not free_rows:
        return
    limits, promised = scheduler.limits, kv.num_promised(scheduler.ranked_rows())
    while draft.room > 0 and free_rows and waiting:
        request = waiting.first_begun() if scheduler.pause is Pause.DRAIN else waiting.first()
        if request is None:
            return
        num_known = len(request.held_token_ids)
        match, fork_of = kv.match(request, draft.step)
        if not kv.room_for(match, num_known, promised):
            match, fork_of = kv.without_partial(match, fork_of)
            if not kv.room_for(match, num_known, promised):
                return
        want = num_known - match.num_tokens
        if want > draft.room and not _may_divide_prompts(scheduler):
            return
        waiting.remove(request)
        grant = min(want, draft.room, limits.long_prefill_token_threshold or want)
        if request.num_cached < 0:
            _begin(scheduler, request, match.num_tokens, now)
        promised += _admit(scheduler, request, match, fork_of, grant, draft)


def _may_divide_prompts(scheduler: Scheduler) -> bool:
    """Where memory is short, prompts that should stay whole may fit in no step."""
    full = scheduler.max_step_tokens == scheduler.limits.max_num_batched_tokens
    return scheduler.limits.enable_chunked_prefill or not full


def _begin(scheduler: Scheduler, request: Request, num_cached: int, now: float) -> None:
    """A request gets its first row."""
    if request.parent is None:
        # From now on it ranks by admission: those of a tenant that came late but went ahead of
        # others' queues must not be the first to be preempted for ever.
        scheduler.num_admissions += 1
        request.rank = (request.rank[0], scheduler.num_admissions)
        for follower in request.followers:
            follower.rank = request.rank
        scheduler.pace.admitted(request.num_prompt)
        scheduler.progress.begin(request)
    request.num_cached = min(num_cached, request.num_prompt)
    request.first_scheduled_time = now
    scheduler.metrics.admitted(request.num_prompt, request.num_cached)


def _admit(
    scheduler: Scheduler,
    request: Request,
    match: PrefixMatch,
    fork_of: int,
    grant: int,
    draft: PlanDraft,
) -> int:
    """Start a request on a row; returns how many blocks more its tokens will need."""
    row = scheduler.free_rows.pop()
    samples = match.num_tokens + grant == len(request.held_token_ids)
    draft.admit(request.added_row(row, match.num_tokens, fork_of), grant, samples)
    scheduler.by_row[row] = request
    request.row, request.status = row, Status.RUNNING
    tenant = scheduler.tenants.slot(request.new.tenant)
    scheduler.tenants.admitted(request.new.tenant, grant)
    num_tokens = scheduler.columns.fill(request, draft.step, match.num_tokens, grant, tenant)
    num_blocks = scheduler.kv.admit(request, match, fork_of, grant, draft)
    scheduler.forget_order()
    missing = scheduler.limits.blocks_for(num_tokens) - num_blocks
    return max(missing, 0) * len(scheduler.limits.windows)


def release_followers(scheduler: Scheduler, rows: Int32Array) -> None:
    """Queue the other sequences of a prompt once the first one's prompt is on its way."""
    c = scheduler.columns
    for row in rows[c.has_followers[rows] & (c.num_computed[rows] >= c.num_prompt[rows])]:
        leader = scheduler.by_row[row]
        assert leader is not None
        for follower in leader.followers:
            if follower.status is Status.WAITING:
                scheduler.waiting.push(follower)
        leader.followers = []
        c.has_followers[row] = False
