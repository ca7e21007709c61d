"""`PrefixCache` against a list of everything that was published and not reused since."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire.scheduler.block_pool import BlockPool
from quire.scheduler.prefix_cache import PrefixCache, chain_root

SIZE = 4
NUM_BLOCKS = 40
ROOTS = [chain_root("a"), chain_root("b")]
LATER = 1_000_000

Tokens = tuple[int, ...]


class Reference:
    """Block -> root, tokens before it, its own tokens. Looks at all of it for every question."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[bytes, Tokens, Tokens]] = {}

    def publish(self, root: bytes, tokens: Tokens, blocks: list[int]) -> None:
        for i, block in enumerate(blocks):
            self.blocks[block] = (root, tokens[: i * SIZE], tokens[i * SIZE : (i + 1) * SIZE])

    def num_found(self, root: bytes, tokens: Tokens) -> tuple[int, int]:
        """Full blocks that hold the beginning of `tokens`, and tokens found in all."""
        full = 0
        for i in range(len(tokens) // SIZE):
            if tokens[i * SIZE : (i + 1) * SIZE] not in self._after(root, tokens[: i * SIZE]):
                break
            full += 1
        rest = tokens[full * SIZE :]
        followers = self._after(root, tokens[: full * SIZE])
        return full, full * SIZE + max((agreement(held, rest) for held in followers), default=0)

    def _after(self, root: bytes, before: Tokens) -> list[Tokens]:
        return [own for r, b, own in self.blocks.values() if (r, b) == (root, before)]


def agreement(a: Tokens, b: Tokens) -> int:
    return next((i for i in range(min(len(a), len(b))) if a[i] != b[i]), min(len(a), len(b)))


class Traffic:
    """Sequences that come, share what they find, grow and go, as under the scheduler."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.pool = BlockPool(NUM_BLOCKS)
        self.cache = PrefixCache(self.pool, SIZE)
        self.reference = Reference()
        self.running: list[tuple[bytes, Tokens, list[int], int]] = []
        self.num_come = 0

    def prompt(self) -> tuple[bytes, Tokens]:
        """Few different tokens, so that beginnings often agree, or more of an older sequence."""
        root, length = self.dice.choice(ROOTS), self.dice.randint(1, 14)
        tokens: Tokens = tuple(self.dice.choice((1, 1, 1, 2)) for _ in range(length))
        if self.reference.blocks and self.dice.random() < 0.4:
            root, before, own = self.dice.choice(list(self.reference.blocks.values()))
            tokens = before + own + tokens[: self.dice.randint(0, 3)]
        return root, tokens

    def allocate(self, count: int) -> list[int]:
        taken = self.pool.allocate(count)
        for block in taken:
            self.reference.blocks.pop(block, None)
        return taken

    def come(self) -> None:
        root, tokens = self.prompt()
        if self.pool.num_free < len(tokens) // SIZE + 8:
            return self.go()
        self.num_come += 1
        found = self.cache.match(root, np.array(tokens, np.int32), LATER).blocks
        self.pool.share(found)
        full = len(tokens) // SIZE
        blocks = found + self.allocate(full - len(found))
        self.publish(root, tokens[: full * SIZE], blocks, len(found))
        self.running.append((root, tokens, blocks, full))

    def go(self) -> None:
        """Generate tokens that nobody else generates, publish everything, leave."""
        if not self.running:
            return
        index = self.dice.randrange(len(self.running))
        root, tokens, blocks, published = self.running.pop(index)
        tokens += (100 + self.num_come, *(self.dice.choice((1, 2)) for _ in range(5)))
        missing = -(-len(tokens) // SIZE) - len(blocks)
        if missing <= self.pool.num_free:
            blocks = blocks + self.allocate(missing)
            self.publish(root, tokens, blocks, published)
        self.pool.free(reversed(blocks))
        self.num_come += 1

    def publish(self, root: bytes, tokens: Tokens, blocks: list[int], start: int) -> None:
        self.cache.publish(root, np.array(tokens, np.int32), blocks, start, step=0)
        self.reference.publish(root, tokens, blocks)

    def check(self) -> None:
        root, tokens = self.prompt()
        match = self.cache.match(root, np.array(tokens, np.int32), LATER)
        assert (len(match.blocks), match.num_tokens) == self.reference.num_found(root, tokens)
        for i, block in enumerate(match.blocks):
            held = (root, tokens[: i * SIZE], tokens[i * SIZE : (i + 1) * SIZE])
            assert self.reference.blocks[block] == held
        if match.partial_block >= 0:
            _, before, own = self.reference.blocks[match.partial_block]
            assert agreement(before + own, tokens) == match.num_tokens
        assert len(self.cache) == sum(self.pool.cached)


@pytest.mark.parametrize("seed", range(12))
def test_the_longest_known_beginning_is_found(seed: int) -> None:
    traffic = Traffic(seed)
    for _ in range(400):
        traffic.dice.choice((traffic.come, traffic.come, traffic.go))()
        traffic.check()
    assert traffic.pool.num_allocated_total > 4 * NUM_BLOCKS, "blocks were reused many times"
    while traffic.running:
        traffic.go()
    traffic.cache.reset()
    assert len(traffic.cache) == 0 and not any(traffic.pool.cached)
    assert traffic.pool.num_free == NUM_BLOCKS


def test_a_failed_step_takes_back_what_it_was_to_write() -> None:
    """Of a run that several steps wrote, what came before the failed one stays."""
    pool = BlockPool(8)
    cache = PrefixCache(pool, SIZE)
    blocks, tokens = pool.allocate(5), np.arange(5 * SIZE, dtype=np.int32)
    for start, stop, step in ((0, 2, 7), (2, 3, 8), (3, 5, 9)):
        cache.publish(ROOTS[0], tokens[: stop * SIZE], blocks[:stop], start, step)
    assert cache.match(ROOTS[0], tokens, LATER).blocks == blocks
    cache.withdraw(8)
    assert cache.match(ROOTS[0], tokens, LATER) == (blocks[:2], 2 * SIZE, -1)
    assert [block for block in range(8) if pool.cached[block]] == sorted(blocks[:2])
