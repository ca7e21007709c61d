"""Looking at an engine from outside: blocks, requests, memory."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.protocol.plan import empty_ints
from quire.protocol.snapshot import (
    BlockState,
    DeviceMemory,
    EngineSnapshot,
    MemorySplit,
    SequenceSnapshot,
)
from quire.scheduler.block_pool import BlockPool
from quire.scheduler.scheduler import Pause
from quire.scheduler.sequence import Sequence, Status

if TYPE_CHECKING:
    from quire.engine.core import EngineCore


def take_snapshot(
    core: EngineCore, max_waiting: int, tables_of: Collection[int] | None = None
) -> EngineSnapshot:
    """`tables_of` names the sequences whose block tables are wanted; None: all."""
    scheduler, now = core.scheduler, core.clock()
    rows = scheduler.ranked_rows().tolist()
    held = [scheduler.by_row[row] for row in rows]
    held += [r for r in scheduler.by_row if r is not None and r.status is Status.DRAINING]
    blocks = block_states(scheduler.kv.pool)
    return EngineSnapshot(
        time=now,
        block_size=scheduler.limits.block_size,
        blocks=blocks,
        running=[_sequence(request, blocks, tables_of) for request in held if request is not None],
        waiting=[_sequence(r, blocks, tables_of) for r in islice(scheduler.waiting, max_waiting)],
        num_waiting=len(scheduler.waiting),
        prompt_tokens_per_s=core.metrics.recent_prompt_tokens.per_second(now),
        generation_tokens_per_s=core.metrics.recent_generation_tokens.per_second(now),
        memory=split_memory(_device_memory(core), blocks),
        paused=scheduler.pause is not Pause.NONE,
        advice=[a.message for a in core.advisor.current] if core.advisor is not None else [],
    )


def set_gauges(core: EngineCore) -> None:
    """What metrics say of this moment."""
    scheduler, metrics = core.scheduler, core.metrics
    blocks = block_states(scheduler.kv.pool)
    metrics.running.set(scheduler.num_running)
    metrics.waiting.set(len(scheduler.waiting))
    metrics.waiting_by_reason["capacity"].set(len(scheduler.waiting))
    metrics.cache_usage.set(scheduler.kv.pool.num_used / len(blocks))
    metrics.shared_blocks.set(int((blocks == BlockState.SHARED).sum()))
    metrics.cached_blocks.set(int((blocks == BlockState.CACHED).sum()))
    columns, rows = scheduler.columns, scheduler.ranked_rows()
    slots = int(columns.held_blocks[rows].sum()) * scheduler.limits.block_size
    metrics.waste.set(1.0 - int(columns.held_tokens[rows].sum()) / slots if slots else 0.0)
    split = split_memory(_device_memory(core), blocks)
    for kind, gauge in metrics.memory.items():
        gauge.set(getattr(split, kind))


def _device_memory(core: EngineCore) -> DeviceMemory:
    """All zeros once the engine has stopped: its executor may be gone."""
    return core.executor.memory() if core.death is None else DeviceMemory(0, 0, 0, 0)


def block_states(pool: BlockPool) -> NDArray[np.uint8]:
    counts = np.array(pool.ref_counts, copy=True)
    cached = np.frombuffer(pool.cached, np.bool_)
    states = np.where(cached, BlockState.CACHED, BlockState.FREE)
    states[counts == 1] = BlockState.OWNED
    states[counts > 1] = BlockState.SHARED
    return states.astype(np.uint8)


def split_memory(memory: DeviceMemory, blocks: NDArray[np.uint8]) -> MemorySplit:
    free, cached, owned, shared = np.bincount(blocks, minlength=len(BlockState)).tolist()
    size, known = memory.kv_block, memory.weights
    # A CPU gives pages to a block when it is first written, so free ones need not be counted.
    known += (owned + shared + cached) * size if memory.is_host else len(blocks) * size
    return MemorySplit(
        total=memory.total,
        weights=memory.weights,
        kv_used=(owned + shared) * size,
        kv_cached=cached * size,
        kv_free=free * size,
        other=max(memory.used - known, 0),
    )


def _sequence(
    request: Sequence, blocks: NDArray[np.uint8], tables_of: Collection[int] | None
) -> SequenceSnapshot:
    row = request.row
    held = np.concatenate(request.tables) if row >= 0 else empty_ints()
    has_table = row >= 0 and (tables_of is None or request.key in tables_of)
    return SequenceSnapshot(
        key=request.key,
        request_id=request.request_id,
        tenant=request.new.tenant,
        state=request.status.name.lower(),
        num_prompt_tokens=request.num_prompt,
        num_tokens=request.num_known,
        num_computed_tokens=int(request.columns.num_computed[row]) if row >= 0 else 0,
        arrival_time=request.new.arrival_time,
        num_blocks=len(held),
        num_owned_blocks=int((blocks[held] == BlockState.OWNED).sum()),
        block_table=held.copy() if has_table else empty_ints(),
    )
