"""`KVCache`: which blocks hold whose KV. Joins block pool, radix tree and block tables.

Every KV group has a table of its own. All tables of a row are equally long; a group with a window
has let go of the blocks that no further token sees, and what it had there is not read any more.
"""

from __future__ import annotations

import numpy as np

from quire.protocol.plan import Int32Array
from quire.scheduler.block_pool import BlockPool
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.plan_builder import PlanBuilder
from quire.scheduler.radix_tree import NO_BLOCK, PrefixMatch, RadixTree
from quire.scheduler.sequence import Columns, Sequence, Status


class KVCache:
    def __init__(self, limits: SchedulerLimits, columns: Columns) -> None:
        self.limits = limits
        self.columns = columns
        self.pool = BlockPool(limits.num_blocks)
        self.tree = RadixTree(
            self.pool, limits.block_size, limits.enable_prefix_caching, limits.windows
        )
        self._num_groups = len(limits.windows)
        self._windowed = [(g, w) for g, w in enumerate(limits.windows) if w is not None]

    def blocks_for(self, num_tokens: Int32Array) -> Int32Array:
        return -(-num_tokens // self.limits.block_size)

    # --- admission ------------------------------------------------------------------------------

    def match(self, sequence: Sequence, step: int) -> tuple[PrefixMatch, int]:
        """The longest prefix that is already computed, and the row it is forked from (-1: none).

        It comes from the tree or from the row of the request's parent, and leaves out the last
        token, which must be computed to sample the next one.
        """
        match = self.tree.bounded([[] for _ in self.limits.windows], 0)
        if not self._skips_cache(sequence):
            tokens = sequence.held_token_ids[:-1]
            match = self.tree.match(sequence.root, tokens, step, sequence.digests)
        parent, c = sequence.parent, self.columns
        # The tables and copies of a row that joins with this very plan are not there to take from.
        if (
            parent is not None
            and parent.status is Status.RUNNING
            and c.first_step[parent.row] < step
        ):
            row = parent.row
            computed = c.computed_before if c.last_step[row] == step else c.num_computed
            shared = min(sequence.num_shared, int(computed[row]))
            if shared > match.num_tokens:
                forked = self._match_row(row, shared)
                if forked is not None:
                    return forked, row
        return match, -1

    def _match_row(self, row: int, num_tokens: int) -> PrefixMatch | None:
        """The first `num_tokens` tokens of a row, if it has kept what the next one sees."""
        if not self.keeps(row, num_tokens):
            return None
        full, rest = divmod(num_tokens, self.limits.block_size)
        tables = self.columns.block_tables[:, row]
        partial = tables[:, full].tolist() if rest else ()
        return self.tree.bounded(tables[:, :full].tolist(), num_tokens, partial)

    def without_partial(self, match: PrefixMatch, fork_of: int) -> tuple[PrefixMatch, int]:
        """The whole blocks of a match: one block less is needed without the copy of another."""
        num_tokens = match.num_blocks * self.limits.block_size
        if fork_of >= 0 and not self.keeps(fork_of, num_tokens):
            return self.tree.bounded([[] for _ in self.limits.windows], 0), -1
        return self.tree.bounded(match.blocks, num_tokens), -1

    def _skips_cache(self, sequence: Sequence) -> bool:
        """Prompt logprobs need every prompt token computed, by the first sequence of a prompt; so
        does the mean of all hidden states, of which the cache keeps keys and values alone."""
        params = sequence.params
        scores_prompt = params.wants_prompt_logprobs and sequence.parent is None
        wants_all = scores_prompt or sequence.new.pooling == "mean"
        return wants_all or bool(params.skip_reading_prefix_cache)

    def num_promised(self, running: Int32Array) -> int:
        """Blocks that running requests still need for the tokens they have."""
        c = self.columns
        growth = np.maximum(self.blocks_for(c.num_tokens[running]) - c.num_blocks[running], 0)
        total = int(growth.sum()) * (self._num_groups - len(self._windowed))
        for group, _ in self._windowed:
            held = c.num_blocks[running] - c.first_blocks[group, running]
            most = self.limits.max_held_blocks(group)
            total += int(np.minimum(growth, np.maximum(most - held, 0)).sum())
        return total

    def room_for(self, match: PrefixMatch, num_tokens: int, num_promised: int) -> bool:
        """Whether a whole request fits beside what is promised to running ones."""
        if self.limits.reserves_max_length:
            return self.limits.max_blocks_per_row <= self.pool.num_free
        most = self.limits.blocks_held(num_tokens) + self._num_groups
        if most + num_promised <= self.pool.num_free:
            return True  # even if no sequence held any of the matched blocks
        shared = list(match.held())
        revived = sum(self.pool.is_free(block) for block in shared)
        need = most - self._num_groups - len(shared) + revived
        # The sources of a copy must not be taken as its targets.
        need += sum(self.pool.is_free(block) for block in match.partial)
        return need + num_promised <= self.pool.num_free

    def admit(
        self, sequence: Sequence, match: PrefixMatch, fork_of: int, grant: int, plan: PlanBuilder
    ) -> int:
        """Give a new row the matched blocks and further ones for `grant` tokens; returns how many
        blocks its tables have.

        The block that is shared in part is copied. Full blocks become findable at once.
        """
        c, limits, row, shared = self.columns, self.limits, sequence.row, match.num_blocks
        filled = match.num_tokens + grant
        self.pool.share(match.held())
        self.pool.share(match.partial)
        plan.held_blocks += match.partial
        reserve = limits.max_model_len if limits.reserves_max_length else filled
        num_added = limits.blocks_for(reserve) - shared
        added = self.pool.allocate(num_added * self._num_groups)
        tables = []
        for group, table in enumerate(match.blocks):
            own = added[group * num_added : (group + 1) * num_added]
            blocks = table + own
            c.first_blocks[group, row] = first = match.firsts[group]
            c.block_tables[group, row, : len(blocks)] = blocks
            if fork_of < 0:
                plan.write_table(group, row, first, blocks[first:])
            else:  # the device copies the shared part of the table from the other row
                plan.write_table(group, row, shared, own)
            if match.partial:
                plan.copy_block(match.partial[group], own[0])
            tables.append([NO_BLOCK] * first + blocks[first:] if first else blocks)
        c.num_blocks[row] = shared + num_added
        published = shared if fork_of < 0 else min(shared, int(c.num_published[fork_of]))
        full = filled // limits.block_size
        tokens = sequence.held_token_ids[: full * limits.block_size]
        self.tree.insert(sequence.root, tokens, tables, published, plan.step, sequence.digests)
        c.num_published[row] = max(full, published)
        return shared + num_added

    # --- while running --------------------------------------------------------------------------

    def shortfall(self, rows: Int32Array, num_tokens: Int32Array) -> Int32Array:
        """Blocks that each row lacks, in each group, to hold `num_tokens` tokens."""
        need: Int32Array = self.blocks_for(num_tokens) - self.columns.num_blocks[rows]
        return need.clip(0)

    def can_grow(self, need: Int32Array) -> bool:
        return int(need.sum()) * self._num_groups <= self.pool.num_free

    def grow(self, plan: PlanBuilder, rows: Int32Array, need: Int32Array) -> None:
        """Append `need[i]` new blocks to the tables of `rows[i]`."""
        total = int(need.sum())
        if not total:
            return
        c = self.columns
        rows_of = np.repeat(rows, need)
        first = np.repeat(np.cumsum(need) - need, need)
        indices = (c.num_blocks[rows_of] + np.arange(total) - first).astype(np.int32)
        for group in range(self._num_groups):
            ids = np.array(self.pool.allocate(total), np.int32)
            c.block_tables[group, rows_of, indices] = ids
            plan.write_blocks(group, rows_of, indices, ids)
        c.num_blocks[rows] += need

    def free_behind_windows(self, rows: Int32Array) -> None:
        """Free what no step from the next on reads. Steps in flight may still read it, and are done
        with it before a later one writes there."""
        c = self.columns
        for group, window in self._windowed:
            first = np.maximum(c.num_certain[rows] - window + 1, 0) // self.limits.block_size
            moved = first > c.first_blocks[group, rows]
            for row, stop in zip(rows[moved].tolist(), first[moved].tolist(), strict=True):
                start = int(c.first_blocks[group, row])
                self.pool.free(c.block_tables[group, row, start:stop][::-1].tolist())
                c.first_blocks[group, row] = stop

    def keeps(self, row: int, num_tokens: int) -> bool:
        """Whether a row still has all that the token after its first `num_tokens` sees."""
        return all(
            self.columns.first_blocks[group, row] <= self.tree.first_needed(window, num_tokens)
            for group, window in self._windowed
        )

    def shrink(self, rows: Int32Array) -> None:
        """Free what rows hold beyond their computed tokens, which have become fewer."""
        c = self.columns
        if self.limits.reserves_max_length:
            return
        keep = self.blocks_for(c.num_computed[rows])
        fewer = keep < c.num_blocks[rows]
        for row, count in zip(rows[fewer].tolist(), keep[fewer].tolist(), strict=True):
            for table in c.block_tables[:, row, count : c.num_blocks[row]]:
                self.pool.free(table[::-1].tolist())
            c.num_blocks[row] = count

    def publish_prompts(self, rows: Int32Array, by_row: list[Sequence | None]) -> None:
        """Make prompt blocks findable as soon as a step is planned that fills them."""
        c = self.columns
        ready = np.minimum(c.num_computed[rows] // self.limits.block_size, c.num_held_blocks[rows])
        behind = ready > c.num_published[rows]
        for row, count in zip(rows[behind].tolist(), ready[behind].tolist(), strict=True):
            sequence = by_row[row]
            assert sequence is not None
            tokens = sequence.held_token_ids[: count * self.limits.block_size]
            start, step = int(c.num_published[row]), int(c.last_step[row])
            self.tree.insert(
                sequence.root, tokens, self._tables(row, count), start, step, sequence.digests
            )
            c.num_published[row] = count

    def _tables(self, row: int, count: int) -> list[list[int]]:
        """The first blocks of a row in each group, `NO_BLOCK` for those it has let go of."""
        c = self.columns
        if not self._windowed:
            return c.block_tables[:, row, :count].tolist()  # type: ignore[no-any-return]
        tables: list[list[int]] = []
        for group in range(self._num_groups):
            first = min(int(c.first_blocks[group, row]), count)
            tables.append([NO_BLOCK] * first + c.block_tables[group, row, first:count].tolist())
        return tables

    # --- leaving --------------------------------------------------------------------------------

    def release(self, sequence: Sequence) -> None:
        """Insert what can be found again, then free the blocks, deepest first."""
        c, row = self.columns, sequence.row
        filled = int(min(c.num_computed[row], c.num_known[row]))
        tables = self._tables(row, int(c.num_blocks[row]))
        published, step = int(c.num_published[row]), int(c.last_step[row])
        tokens = sequence.token_ids[:filled]
        self.tree.insert(sequence.root, tokens, tables, published, step, sequence.digests)
        for group, table in enumerate(tables):
            if self._windowed:
                table = table[int(c.first_blocks[group, row]) :]
            self.pool.free(reversed(table))
        c.num_blocks[row] = 0
        c.first_blocks[:, row] = 0
        c.num_computed[row] = 0

    # --- integrity ------------------------------------------------------------------------------

    def check_books(self, sequences: list[Sequence]) -> None:
        """Every block is free or owned by one of these, and reference counts add up."""
        pool, c, limits = self.pool, self.columns, self.limits
        references = np.zeros(pool.num_blocks, np.int32)
        for sequence in sequences:
            blocks = np.concatenate(sequence.tables)
            assert len(np.unique(blocks)) == len(blocks), (
                f"{sequence.request_id} owns a block twice"
            )
            np.add.at(references, blocks, 1)
        wrong = np.flatnonzero(references != np.asarray(pool.ref_counts))
        assert not len(wrong), f"reference counts of blocks {wrong[:8].tolist()} do not add up"
        free = pool.free_blocks()
        assert len(free) == (references == 0).sum(), "a block is neither free nor owned"
        assert not references[free].any(), "a block is both free and owned"
        waste = c.num_blocks * limits.block_size - c.num_computed
        if not limits.reserves_max_length:
            assert (waste[c.running] < limits.block_size).all(), "a row wastes a whole block"
