"""`RadixTree` against a list of everything that was inserted and not reused since."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire.scheduler.kv_cache import NO_BLOCK, BlockPool, PrefixMatch, RadixTree, chain_root

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
        self.tree = RadixTree(self.pool, SIZE)
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
        found = self.tree.match(root, np.array(tokens, np.int32), LATER).blocks[0]
        self.pool.share(found)
        full = len(tokens) // SIZE
        blocks = found + self.allocate(full - len(found))
        self.publish(root, tokens[: full * SIZE], blocks, len(found))
        self.running.append((root, tokens, blocks, full))

    def go(self) -> None:
        """Generate tokens that no other generates, publish everything, leave."""
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
        self.tree.insert(root, np.array(tokens, np.int32), [blocks], start, step=0)
        self.reference.publish(root, tokens, blocks)

    def check(self) -> None:
        root, tokens = self.prompt()
        match = self.tree.match(root, np.array(tokens, np.int32), LATER)
        assert (match.num_blocks, match.num_tokens) == self.reference.num_found(root, tokens)
        for i, block in enumerate(match.blocks[0]):
            held = (root, tokens[: i * SIZE], tokens[i * SIZE : (i + 1) * SIZE])
            assert self.reference.blocks[block] == held
        for block in match.partial:
            _, before, own = self.reference.blocks[block]
            assert agreement(before + own, tokens) == match.num_tokens
        assert len(self.tree) == sum(self.pool.cached)


@pytest.mark.parametrize("seed", range(12))
def test_the_longest_known_beginning_is_found(seed: int) -> None:
    traffic = Traffic(seed)
    for _ in range(400):
        traffic.dice.choice((traffic.come, traffic.come, traffic.go))()
        traffic.check()
    assert traffic.pool.num_allocated_total > 4 * NUM_BLOCKS, "blocks were reused many times"
    while traffic.running:
        traffic.go()
    traffic.tree.reset()
    assert len(traffic.tree) == 0 and not any(traffic.pool.cached)
    assert traffic.pool.num_free == NUM_BLOCKS


def test_a_failed_step_takes_back_what_it_was_to_write() -> None:
    """Of a run that several steps wrote, what came before the failed one stays."""
    pool = BlockPool(8)
    tree = RadixTree(pool, SIZE)
    blocks, tokens = pool.allocate(5), np.arange(5 * SIZE, dtype=np.int32)
    for start, stop, step in ((0, 2, 7), (2, 3, 8), (3, 5, 9)):
        tree.insert(ROOTS[0], tokens[: stop * SIZE], [blocks[:stop]], start, step)
    assert tree.match(ROOTS[0], tokens, LATER).blocks == [blocks]
    tree.withdraw(8)
    assert tree.match(ROOTS[0], tokens, LATER) == PrefixMatch([blocks[:2]], [0], 2, 2 * SIZE, [])
    assert [block for block in range(8) if pool.cached[block]] == sorted(blocks[:2])


def test_a_window_needs_the_blocks_of_the_last_window_only() -> None:
    """One group keeps everything, the other sees 6 tokens. A prefix whose last window is not whole
    is shortened to one whose last window is."""
    pool = BlockPool(24)
    tree = RadixTree(pool, SIZE, windows=(None, 6))
    full, near = pool.allocate(6), pool.allocate(6)
    tokens = np.arange(6 * SIZE, dtype=np.int32)
    tree.insert(ROOTS[0], tokens, [full, near], 0, step=0)
    # The 21st token sees those from the 16th on.
    match = tree.match(ROOTS[0], tokens[:20], LATER)
    assert match == PrefixMatch([full[:5], near[:5]], [0, 3], 5, 20, [])
    tree.evict(near[:2])
    assert list(tree.match(ROOTS[0], tokens[:20], LATER).held()) == list(match.held())
    tree.evict([near[3]])
    # The 13th token sees the third block, which is there, and the second, which is not.
    assert tree.match(ROOTS[0], tokens[:20], LATER).num_tokens == 0
    found = tree.match(ROOTS[0], tokens, LATER)
    assert (found.num_tokens, list(found.held())) == (6 * SIZE, full + near[4:])
    again = pool.allocate(3)
    tree.insert(ROOTS[0], tokens[:16], [full[:4], [NO_BLOCK, *again]], 0, step=0)
    found = tree.match(ROOTS[0], tokens[:16], LATER)
    assert list(found.held()) == [*full[:4], near[2], again[2]]
    tree.evict(full)
    assert tree.match(ROOTS[0], tokens, LATER).num_tokens == 0
    tree.evict(again + near)
    assert len(tree) == 0 and not tree._roots and not any(pool.cached)


def test_a_window_that_begins_with_a_block_needs_none_before_it() -> None:
    """The 21st token sees itself and the last block's four."""
    pool = BlockPool(8)
    tree = RadixTree(pool, SIZE, windows=(5,))
    blocks, tokens = pool.allocate(5), np.arange(5 * SIZE, dtype=np.int32)
    tree.insert(ROOTS[0], tokens, [[NO_BLOCK] * 4 + blocks[4:]], 0, step=0)
    found = tree.match(ROOTS[0], tokens, LATER)
    assert (found.num_tokens, list(found.held())) == (20, blocks[4:])


def test_nodes_without_blocks_go_when_nothing_below_them_is_left() -> None:
    """With windows alone, blocks at the beginning go first and the tree stays whole."""
    pool = BlockPool(12)
    tree = RadixTree(pool, SIZE, windows=(4,))
    blocks, tokens = pool.allocate(6), np.arange(6 * SIZE, dtype=np.int32)
    tree.insert(ROOTS[0], tokens, [blocks], 0, step=0)
    other = pool.allocate(1)
    tree.insert(
        ROOTS[0], np.append(tokens[:16], [99] * 4).astype(np.int32), [blocks[:4] + other], 4, 0
    )
    tree.evict(blocks[:4])
    found = tree.match(ROOTS[0], tokens, LATER)
    assert (found.num_tokens, list(found.held())) == (24, blocks[5:])
    tree.evict(blocks[4:])
    assert tree._roots, "the other sequence's block lies below what was evicted"
    tree.evict(other)
    assert not tree._roots and len(tree) == 0


def test_equal_placeholders_of_different_media_do_not_match() -> None:
    """Neither as blocks, nor inside of a block, nor by name."""
    pool = BlockPool(12)
    tree = RadixTree(pool, SIZE)
    tokens = np.array([1, 2, 3, 4, 9, 9, 9, 9, 5, 6, 7, 8], np.int32)
    cat, dog = {1: b"cat"}, {1: b"dog"}
    first, second = pool.allocate(3), pool.allocate(2)
    tree.insert(ROOTS[0], tokens, [first], 0, 0, cat)
    assert tree.match(ROOTS[0], tokens, LATER, cat).blocks == [first]
    assert tree.match(ROOTS[0], tokens, LATER, dog) == PrefixMatch([first[:1]], [0], 1, 4, [])
    assert tree.match(ROOTS[0], tokens, LATER).num_tokens == 4
    tree.insert(ROOTS[0], tokens, [first[:1] + second], 1, 0, dog)
    assert tree.match(ROOTS[0], tokens, LATER, dog).blocks == [first[:1] + second]
    assert tree.match(ROOTS[0], tokens, LATER, cat).blocks == [first]
    names = {tree.name_of(block) for block in first + second}
    assert len(names) == 5 and None not in names


def test_names_do_not_depend_on_how_the_tree_came_about() -> None:
    """One sequence at once, in pieces, or after another that parts from it: the same names."""
    tokens = np.arange(5 * SIZE, dtype=np.int32)
    other = np.append(tokens[: 2 * SIZE], [7] * SIZE).astype(np.int32)

    def names(*parts: int, split: bool = False) -> list[bytes | None]:
        pool = BlockPool(16)
        tree = RadixTree(pool, SIZE)
        blocks, start = pool.allocate(5), 0
        for stop in parts:
            tree.insert(ROOTS[0], tokens[: stop * SIZE], [blocks[:stop]], start, 0)
            start = stop
        if split:
            tree.insert(ROOTS[0], other, [blocks[:2] + pool.allocate(1)], 2, 0)
        return [tree.name_of(block) for block in blocks]

    assert names(5) == names(2, 3, 5) == names(5, split=True)
    assert len(set(names(5))) == 5


def test_a_block_that_is_filled_in_part_has_no_name() -> None:
    """Its content, and so its name, would change."""
    pool = BlockPool(2)
    tree = RadixTree(pool, SIZE)
    whole, part = blocks = pool.allocate(2)
    tree.insert(ROOTS[0], np.arange(SIZE + 1, dtype=np.int32), [blocks], 0, step=0)
    assert tree.name_of(whole) is not None and tree.name_of(part) is None


def test_blocks_of_different_groups_have_different_names() -> None:
    """They hold the keys and values of different layers."""
    pool = BlockPool(8)
    tree = RadixTree(pool, SIZE, windows=(None, 8, 16))
    tables = [pool.allocate(2) for _ in range(3)]
    tree.insert(ROOTS[0], np.arange(2 * SIZE, dtype=np.int32), tables, 0, step=0)
    assert len({tree.name_of(block) for table in tables for block in table}) == 6
