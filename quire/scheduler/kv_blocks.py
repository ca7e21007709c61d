"""`KVBlocks`: which blocks hold whose KV. Joins block pool, prefix cache and block tables."""

from __future__ import annotations

import numpy as np

from quire.protocol.plan import Int32Array
from quire.scheduler.block_pool import BlockPool
from quire.scheduler.draft import PlanDraft
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.prefix_cache import PrefixCache, PrefixMatch
from quire.scheduler.request import Columns, Request, Status


class KVBlocks:
    def __init__(self, limits: SchedulerLimits, columns: Columns) -> None:
        self.limits = limits
        self.columns = columns
        self.pool = BlockPool(limits.num_blocks)
        self.cache = PrefixCache(self.pool, limits.block_size, limits.enable_prefix_caching)

    def blocks_for(self, num_tokens: Int32Array) -> Int32Array:
        return -(-num_tokens // self.limits.block_size)

    # --- admission ------------------------------------------------------------------------------

    def match(self, request: Request, step: int) -> tuple[PrefixMatch, int]:
        """The longest prefix that is already computed, and the row it is forked from (-1: none).

        It comes from the cache or from the row of the request's parent, and leaves out the last
        token, which must be computed to sample the next one.
        """
        match = PrefixMatch([], 0)
        if not self._skips_cache(request):
            match = self.cache.match(request.root, request.held_token_ids[:-1], step)
        parent, c = request.parent, self.columns
        # The tables and copies of a row that joins with this very plan are not there to take from.
        if (
            parent is not None
            and parent.status is Status.RUNNING
            and c.first_step[parent.row] < step
        ):
            row = parent.row
            computed = c.computed_before if c.last_step[row] == step else c.num_computed
            shared = min(request.num_shared, int(computed[row]))
            if shared > match.num_tokens:
                full, rest = divmod(shared, self.limits.block_size)
                partial = int(parent.blocks[full]) if rest else -1
                return PrefixMatch(parent.blocks[:full].tolist(), shared, partial), row
        return match, -1

    def _skips_cache(self, request: Request) -> bool:
        """Prompt logprobs need every prompt token computed, by the first sequence of a prompt; so
        does the mean of all hidden states, of which the cache keeps keys and values alone."""
        params = request.params
        scores_prompt = params.wants_prompt_logprobs and request.parent is None
        wants_all = scores_prompt or request.new.pooling == "mean"
        return wants_all or bool(params.skip_reading_prefix_cache)

    def num_promised(self, running: Int32Array) -> int:
        """Blocks that running requests still need for the tokens they have."""
        c = self.columns
        promised = self.blocks_for(c.num_tokens[running]) - c.num_blocks[running]
        return int(np.maximum(promised, 0).sum())

    def room_for(self, match: PrefixMatch, num_tokens: int, num_promised: int) -> bool:
        """Whether a whole request fits beside what is promised to running ones."""
        if self.limits.reserves_max_length:
            return self.limits.max_blocks_per_row <= self.pool.num_free
        most = self.limits.blocks_for(num_tokens) + 1
        if most + num_promised <= self.pool.num_free:
            return True  # even if nobody held any of the matched blocks
        revived = sum(self.pool.is_free(block) for block in match.blocks)
        need = most - 1 - len(match.blocks) + revived
        if match.partial_block >= 0 and self.pool.is_free(match.partial_block):
            need += 1  # the source of the copy must not be taken as its target
        return need + num_promised <= self.pool.num_free

    def admit(
        self, request: Request, match: PrefixMatch, fork_of: int, grant: int, draft: PlanDraft
    ) -> int:
        """Give a new row the matched blocks and further ones for `grant` tokens; returns how many.

        The block that is shared in part is copied. Full blocks become findable at once.
        """
        c, limits, row, shared = self.columns, self.limits, request.row, len(match.blocks)
        filled = match.num_tokens + grant
        self.pool.share(match.blocks)
        if match.partial_block >= 0:
            self.pool.share((match.partial_block,))
            draft.held_blocks.append(match.partial_block)
        reserve = limits.max_model_len if limits.reserves_max_length else filled
        added = self.pool.allocate(limits.blocks_for(reserve) - shared)
        blocks = match.blocks + added
        c.block_tables[0, row, : len(blocks)] = blocks
        c.num_blocks[row] = len(blocks)
        if fork_of < 0:
            published = shared
            draft.write_table(row, 0, blocks)
        else:  # the device copies the shared part of the table from the other row
            published = min(shared, int(c.num_published[fork_of]))
            draft.write_table(row, shared, added)
        if match.partial_block >= 0:
            draft.copy_block(match.partial_block, added[0])
        full = filled // limits.block_size
        tokens = request.held_token_ids[: full * limits.block_size]
        self.cache.publish(request.root, tokens, blocks[:full], published, draft.step)
        c.num_published[row] = max(full, published)
        return len(blocks)

    # --- while running --------------------------------------------------------------------------

    def shortfall(self, rows: Int32Array, num_tokens: Int32Array) -> Int32Array:
        """Blocks that each row lacks to hold `num_tokens` tokens."""
        need: Int32Array = self.blocks_for(num_tokens) - self.columns.num_blocks[rows]
        return need.clip(0)

    def grow(self, draft: PlanDraft, rows: Int32Array, need: Int32Array) -> None:
        """Append `need[i]` new blocks to the table of `rows[i]`."""
        total = int(need.sum())
        if not total:
            return
        c = self.columns
        ids = np.array(self.pool.allocate(total), np.int32)
        rows_of = np.repeat(rows, need)
        first = np.repeat(np.cumsum(need) - need, need)
        indices = (c.num_blocks[rows_of] + np.arange(total) - first).astype(np.int32)
        c.block_tables[0, rows_of, indices] = ids
        c.num_blocks[rows] += need
        draft.write_blocks(rows_of, indices, ids)

    def shrink(self, rows: Int32Array) -> None:
        """Free what rows hold beyond their computed tokens, which have become fewer."""
        c = self.columns
        keep = self.blocks_for(c.num_computed[rows])
        if self.limits.reserves_max_length:
            return
        for row, count in zip(rows.tolist(), keep.tolist(), strict=True):
            if count < c.num_blocks[row]:
                blocks = c.block_tables[0, row, count : c.num_blocks[row]]
                self.pool.free(blocks[::-1].tolist())
                c.num_blocks[row] = count

    def publish_prompts(self, rows: Int32Array, by_row: list[Request | None]) -> None:
        """Make prompt blocks findable as soon as a step is planned that fills them."""
        c = self.columns
        ready = np.minimum(c.num_computed[rows] // self.limits.block_size, c.num_held_blocks[rows])
        behind = ready > c.num_published[rows]
        for row, count in zip(rows[behind].tolist(), ready[behind].tolist(), strict=True):
            request = by_row[row]
            assert request is not None
            tokens = request.held_token_ids[: count * self.limits.block_size]
            blocks = request.blocks[:count].tolist()
            start, step = int(c.num_published[row]), int(c.last_step[row])
            self.cache.publish(request.root, tokens, blocks, start, step)
            c.num_published[row] = count

    # --- leaving --------------------------------------------------------------------------------

    def release(self, request: Request) -> None:
        """Publish what can be found again, then free the blocks, deepest first."""
        c, row = self.columns, request.row
        blocks: list[int] = request.blocks.tolist()
        filled = int(min(c.num_computed[row], c.num_known[row]))
        self.cache.publish(
            request.root,
            request.token_ids[:filled],
            blocks[: self.limits.blocks_for(filled)],
            int(c.num_published[row]),
            int(c.last_step[row]),
        )
        self.pool.free(reversed(blocks))
        c.num_blocks[row] = 0
        c.num_computed[row] = 0
