"""Running sequences that share leading blocks: attention can read those once for a whole group."""

from __future__ import annotations

import numpy as np

from quire.protocol.plan import MIN_PREFIX_GROUP, Int32Array, StepPlan
from quire.scheduler.sequence import Columns

MIN_SAVED_TOKENS = 8192
"""Reads of cached tokens that sharing must save in a step to be worth its extra kernel."""

MAX_FORKS = 16
"""Forks of the tree of shared beginnings that are followed one below the other."""

Group = tuple[Int32Array, int]
"""Rows, and the leading blocks that they have in common."""


class PrefixGroups:
    """Kept until a sequence joins or leaves: leading blocks are shared from a row's first step on,
    and never change while it runs."""

    def __init__(self, columns: Columns, block_size: int, group: int) -> None:
        """Blocks are compared in the tables of one KV group, which keeps all of them."""
        self.columns = columns
        self._table = columns.block_tables[group]
        self.block_size = block_size
        self._running: Int32Array | None = None
        self._group_of = np.full(len(columns.running), -1, np.int32)
        self._blocks = np.empty(0, np.int32)

    def mark(self, plan: StepPlan, running: Int32Array) -> None:
        """Add the groups to a plan. `running` is a new array whenever the running rows change."""
        if running is not self._running:
            self._find(running)
        if len(self._blocks):
            plan.prefix_groups = self._group_of[plan.rows]
            plan.prefix_blocks = self._blocks

    def _find(self, running: Int32Array) -> None:
        self._running = running
        computed = self.columns.num_computed[running] // self.block_size
        groups = best_groups(self._table, running, computed)
        saved = sum((len(rows) - 1) * blocks for rows, blocks in groups) * self.block_size
        if saved < MIN_SAVED_TOKENS:
            groups = []
        self._group_of[:] = -1
        for index, (rows, _) in enumerate(groups):
            self._group_of[rows] = index
        self._blocks = np.array([blocks for _, blocks in groups], np.int32)


def best_groups(tables: Int32Array, rows: Int32Array, num_blocks: Int32Array) -> list[Group]:
    """Disjoint groups of rows that save the most block reads; a row's first `num_blocks` count.

    Tables form a tree of shared beginnings. At each fork of it, either all rows below it are one
    group that shares what leads there, or the branches are looked at on their own.
    """
    return _best_below(tables, rows, num_blocks, 0, MAX_FORKS)[1]


def _best_below(
    tables: Int32Array, rows: Int32Array, num_blocks: Int32Array, depth: int, forks_left: int
) -> tuple[int, list[Group]]:
    """Block reads saved, and how, among rows that agree on their first `depth` blocks."""
    if len(rows) < MIN_PREFIX_GROUP:
        return 0, []
    if depth:
        depth = _common(tables, rows, depth, int(num_blocks.min()))
    saved, groups = 0, list[Group]()
    longer = num_blocks > depth
    if forks_left and longer.any():
        rows_on, blocks_on = rows[longer], num_blocks[longer]
        _, branch_of, sizes = np.unique(
            tables[rows_on, depth], return_inverse=True, return_counts=True
        )
        for branch in np.flatnonzero(sizes >= MIN_PREFIX_GROUP):
            on = branch_of == branch
            more, found = _best_below(tables, rows_on[on], blocks_on[on], depth + 1, forks_left - 1)
            saved += more
            groups += found
    together = (len(rows) - 1) * depth
    return (together, [(rows, depth)]) if together > saved else (saved, groups)


def _common(tables: Int32Array, rows: Int32Array, depth: int, shortest: int) -> int:
    """How many blocks the rows have in common, at least `depth` and at most `shortest`.

    Pieces grow, so that tables which part soon are not compared to their ends.
    """
    size = 16
    while depth < shortest:
        piece = slice(depth, min(depth + size, shortest))
        agree = (tables[rows, piece] == tables[rows[0], piece]).all(axis=0)
        if not agree.all():
            return depth + int(agree.argmin())
        depth, size = piece.stop, 2 * size
    return shortest
