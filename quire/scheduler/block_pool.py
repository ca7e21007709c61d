"""`BlockPool`: ids, reference counts and the free list of KV blocks."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np

from quire.protocol.plan import Int32Array


class BlockPool:
    """Hands out blocks one at a time. A freed block keeps its content until it is reused.

    The free list is ordered by future utility, lowest first: blocks that cannot be found again,
    then findable (cached) ones, least recently freed first. A sequence is freed with its
    deepest block first, so a block is always evicted before the one it depends on.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # As quick as lists where they are read and written one block at a time, unlike numpy's
        # arrays, and numpy can look at all of them at once.
        self.ref_counts = array("i", bytes(4 * num_blocks))
        self.cached = bytearray(num_blocks)
        """Whether the prefix cache can find the block; kept by the cache."""
        self.on_evict: Callable[[list[int]], None] = lambda blocks: None
        """Called with cached blocks that are about to be reused."""
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.num_allocated_total = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference. The caller has checked `num_free`."""
        take, cached, counts = self._free.popitem, self.cached, self.ref_counts
        blocks = [take(last=False)[0] for _ in range(count)]
        evicted = [block for block in blocks if cached[block]]
        if evicted:
            self.on_evict(evicted)
        for block in blocks:
            counts[block] = 1
        self.num_allocated_total += count
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block, reviving those that were free."""
        counts = self.ref_counts
        for block in blocks:
            if counts[block] == 0:
                del self._free[block]
            counts[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference from each block, deepest block of a sequence first."""
        free, cached, counts = self._free, self.cached, self.ref_counts
        for block in blocks:
            assert counts[block] > 0, f"block {block} freed twice"
            counts[block] -= 1
            if counts[block] == 0:
                free[block] = None
                if not cached[block]:
                    free.move_to_end(block, last=False)

    def is_free(self, block: int) -> bool:
        return block in self._free

    def free_blocks(self) -> Int32Array:
        """Free blocks, in the order in which they are reused."""
        return np.fromiter(self._free, np.int32, len(self._free))
