"""The books of the KV cache: every block is free or owned, and reference counts add up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from quire.scheduler.scheduler import Scheduler


def check_books(scheduler: Scheduler) -> None:
    """Raise AssertionError if a block is leaked, lost or counted wrongly."""
    pool, c = scheduler.kv.pool, scheduler.columns
    references = np.zeros(pool.num_blocks, np.int32)
    for request in scheduler.by_row:
        if request is not None:
            blocks = np.concatenate(request.tables)
            assert len(np.unique(blocks)) == len(blocks), f"{request.request_id} owns a block twice"
            np.add.at(references, blocks, 1)
    wrong = np.flatnonzero(references != np.asarray(pool.ref_counts))
    assert not len(wrong), f"reference counts of blocks {wrong[:8].tolist()} do not add up"
    free = pool.free_blocks()
    assert len(free) == (references == 0).sum(), "a block is neither free nor owned"
    assert not references[free].any(), "a block is both free and owned"
    rows = sum(request is not None for request in scheduler.by_row)
    assert rows + len(scheduler.free_rows) == len(scheduler.by_row), (
        "a row is neither free nor owned"
    )
    waste = c.num_blocks * scheduler.limits.block_size - c.num_computed
    if not scheduler.limits.reserves_max_length:
        assert (waste[c.running] < scheduler.limits.block_size).all(), "a row wastes a whole block"
