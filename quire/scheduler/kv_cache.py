"""`KVCache`: which blocks hold whose KV. Joins block pool, radix tree and block tables.

Every KV group has a table of its own. All tables of a row are equally long; a group with a window
has let go of the blocks that no further token sees, and what it had there is not read any more.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from hashlib import blake2b
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.protocol.output import BlockState
from quire.protocol.plan import Int32Array, PlanBuilder
from quire.scheduler.sequence import Columns, SchedulerLimits, Sequence, Status


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

    def states(self) -> NDArray[np.uint8]:
        """`BlockState` of each block."""
        counts = np.array(self.ref_counts, copy=True)
        cached = np.frombuffer(self.cached, np.bool_)
        states = np.where(cached, BlockState.CACHED, BlockState.FREE)
        states[counts == 1] = BlockState.OWNED
        states[counts > 1] = BlockState.SHARED
        return states.astype(np.uint8)

    def free_blocks(self) -> Int32Array:
        """Free blocks, in the order in which they are reused."""
        return np.fromiter(self._free, np.int32, len(self._free))


HASH_BYTES = 16
MAX_PARTIAL_CANDIDATES = 16  # newest nodes compared when a prompt diverges inside a block
NO_BLOCK = -1

Digests = Mapping[int, bytes]
"""Block index -> digest of the media whose placeholder tokens lie in it."""


@lru_cache(maxsize=1024)  # most requests have the same
def chain_root(*parts: str) -> bytes:
    """Root of a hash chain. Every part that changes the KV of equal tokens belongs here."""
    digest = blake2b(digest_size=HASH_BYTES)
    for part in parts:
        data = part.encode(errors="surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def chain_hash(parent: bytes, token_ids: Int32Array, digest: bytes = b"") -> bytes:
    """Name of a block: equal names mean equal content from the first token on."""
    return blake2b(token_ids.tobytes() + digest, digest_size=HASH_BYTES, key=parent).digest()


def common_prefix(a: Int32Array, b: Int32Array) -> int:
    """Length of the longest common prefix of two token arrays."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _agreement(a: list[int], b: list[int]) -> int:
    """`common_prefix` of short lists that mostly differ early."""
    length = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        length += 1
    return length


class PrefixMatch(NamedTuple):
    """A reusable prefix: whole blocks to share and, beyond them, part of one block to copy."""

    blocks: list[list[int]]
    """Of each group."""
    firsts: list[int]
    """Of each group, where the blocks begin that the next token sees; those before are not used."""
    num_blocks: int
    """Whole blocks, in each group."""
    num_tokens: int
    partial: list[int]
    """A block of each group, or nothing."""

    def held(self) -> Iterator[int]:
        """All blocks to share."""
        return chain.from_iterable(
            table[first:] for table, first in zip(self.blocks, self.firsts, strict=True)
        )


class Node:
    """Blocks that follow each other. The last may be filled in part."""

    __slots__ = (
        "blocks",
        "by_token",
        "children",
        "digests",
        "key",
        "name",
        "parent",
        "steps",
        "token_ids",
    )

    def __init__(
        self,
        parent: Node | None,
        token_ids: Int32Array,
        blocks: list[list[int]],
        steps: list[int],
    ) -> None:
        self.parent = parent
        self.token_ids = token_ids
        self.blocks = blocks
        """Of each group."""
        self.steps = steps
        """The step that writes each block's last token; from the next on it may be copied."""
        self.digests: dict[int, bytes] = {}
        self.children: dict[bytes, Node] = {}
        """By the first block, where that is full."""
        self.by_token: dict[int, dict[Node, None]] = {}
        """All children by their first token, in order of insertion."""
        self.key = b""
        """Where its parent has it among its children; nothing where the first block is not full."""
        self.name = b""
        """Chain root, of a root node."""

    @property
    def num_blocks(self) -> int:
        return len(self.steps)

    def matching(self, token_ids: Int32Array, digests: Digests, start: int, size: int) -> int:
        """How many of its blocks hold the beginning of `token_ids`, whose blocks count from
        `start`."""
        count = common_prefix(self.token_ids, token_ids) // size
        if self.digests or digests:
            for i in range(count):
                if self.digests.get(i, b"") != digests.get(start + i, b""):
                    return i
        return count


class RadixTree:
    """Finds blocks whose KV a prompt can reuse, whole or in part.

    A node holds consecutive blocks of one sequence; sequences that part have a node each below the
    one that they share. An edge is keyed by the tokens of the node's first block and by the digests
    of the media in it. A node has a block in each KV group, or none where that block was reused: a
    group with a window needs the blocks of the last window only, and the tree stays whole without
    the others.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        enabled: bool = True,
        windows: tuple[int | None, ...] = (None,),
    ) -> None:
        """`windows` has an entry for each KV group."""
        self.pool = pool
        self.block_size = block_size
        self.enabled = enabled
        self.windows = windows
        self._roots: dict[bytes, Node] = {}
        self._node_of: list[Node | None] = [None] * pool.num_blocks
        self._has_windows = any(window is not None for window in self.windows)
        self._nothing = self.bounded([[] for _ in self.windows], 0)
        pool.on_evict = self.evict

    def __len__(self) -> int:
        return sum(node is not None for node in self._node_of)

    # --- matching -------------------------------------------------------------------------------

    def match(
        self, root: bytes, token_ids: Int32Array, step: int, digests: Digests | None = None
    ) -> PrefixMatch:
        """Longest reusable prefix of `token_ids` for a plan of the given step."""
        if not self.enabled or root not in self._roots:
            return self._nothing
        digests = digests or {}
        path, found = self._walk(root, token_ids, digests)
        if not path and not (len(token_ids) and int(token_ids[0]) in self._roots[root].by_token):
            return self._nothing
        tables: list[list[int]] = [[] for _ in self.windows]
        for node, count in path:
            for table, blocks in zip(tables, node.blocks, strict=True):
                table += blocks[:count]
        num_blocks = self._longest_whole(tables, found) if found else 0
        partial: list[int] = []
        extra = 0
        if num_blocks == found:
            rest = token_ids[found * self.block_size :]
            partial, extra = self._match_inside(root, path, rest, digests.get(found, b""), step)
        else:
            tables = [table[:num_blocks] for table in tables]
        return self.bounded(tables, num_blocks * self.block_size + extra, partial)

    def bounded(
        self, tables: list[list[int]], num_tokens: int, partial: list[int] | None = None
    ) -> PrefixMatch:
        """These blocks, as far as the token after the first `num_tokens` sees them."""
        num_blocks = num_tokens // self.block_size
        firsts = [0] * len(tables)
        if self._has_windows:
            firsts = [min(self.first_needed(one, num_tokens), num_blocks) for one in self.windows]
        return PrefixMatch(tables, firsts, num_blocks, num_tokens, partial or [])

    def first_needed(self, window: int | None, num_tokens: int) -> int:
        """First block that the token after the first `num_tokens` sees; it sees itself too."""
        return 0 if window is None else max(num_tokens - window + 1, 0) // self.block_size

    def _longest_whole(self, tables: list[list[int]], longest: int) -> int:
        """Most leading blocks, up to `longest`, of which no group lacks one that the next token
        sees."""
        while True:
            shorter = longest
            for table, window in zip(tables, self.windows, strict=True):
                first = self.first_needed(window, longest * self.block_size)
                # What is missing is missing for every shorter prefix that does not end before it.
                with contextlib.suppress(ValueError):
                    shorter = min(shorter, table.index(NO_BLOCK, first, longest))
            if shorter == longest:
                return longest
            longest = shorter

    def _walk(
        self, root: bytes, token_ids: Int32Array, digests: Digests
    ) -> tuple[list[tuple[Node, int]], int]:
        """Nodes that hold the beginning of `token_ids`, and how many blocks of each, all of every
        node but the last; and how many blocks in all."""
        size, node, start = self.block_size, self._roots.get(root), 0
        path: list[tuple[Node, int]] = []
        while node is not None and (start + 1) * size <= len(token_ids):
            rest = token_ids[start * size :]
            child = node.children.get(rest[:size].tobytes() + digests.get(start, b""))
            if child is None:
                break
            count = child.matching(rest, digests, start, size)
            path.append((child, count))
            start += count
            node = child if count == child.num_blocks else None
        return path, start

    def _match_inside(
        self,
        root: bytes,
        path: list[tuple[Node, int]],
        rest: Int32Array,
        digest: bytes,
        step: int,
    ) -> tuple[list[int], int]:
        """The block after those of a walk that agrees longest with `rest`, and how long."""
        size = self.block_size
        best: list[int] = []
        best_length = 0
        if not len(rest):
            return best, best_length
        node, at = path[-1] if path else (self._roots.get(root), 0)
        if node is None:
            return best, best_length
        candidates: Iterable[Node]
        if path and at < node.num_blocks:
            candidates = (node,)
        else:
            at, siblings = 0, node.by_token.get(int(rest[0]))
            if siblings is None:
                return best, best_length
            candidates = islice(reversed(siblings), MAX_PARTIAL_CANDIDATES)
        tokens = rest[:size].tolist()
        for one in candidates:
            blocks = [table[at] for table in one.blocks]
            if (
                one.steps[at] < step
                and NO_BLOCK not in blocks
                and one.digests.get(at, b"") == digest
            ):
                held = one.token_ids[at * size : (at + 1) * size].tolist()
                length = _agreement(held, tokens)
                if length > best_length:
                    best, best_length = blocks, length
        return best, best_length

    # --- inserting ------------------------------------------------------------------------------

    def insert(
        self,
        root: bytes,
        token_ids: Int32Array,
        tables: list[list[int]],
        start: int,
        step: int,
        digests: Digests | None = None,
    ) -> None:
        """Make the blocks from `start` on findable; those before were found or inserted earlier.

        Each group's table holds `token_ids` from the first on, with `NO_BLOCK` where the group has
        let go; the last block may be filled in part.
        """
        size, digests = self.block_size, digests or {}
        if not self.enabled or len(token_ids) <= start * size:
            return
        node, known = self._own_end(tables, start) if start else None, start
        if node is None:
            path, known = self._walk(root, token_ids, digests)
            if known < start:
                return  # what comes before was forgotten
            if known > start:
                self._fill_gaps(path, tables, start, step)
            rest = token_ids[known * size :]
            if len(rest) < size:
                digest = digests.get(known, b"")
                if self._match_inside(root, path, rest, digest, step + 1)[1] == len(rest):
                    return  # other blocks hold all of these tokens too
            node = self._end_of(root, path)
        rest = token_ids[known * size :]
        stop = known + -(-len(rest) // size)
        added = [table[known:stop] for table in tables]
        steps = [step] * (stop - known)
        if node.parent is None or node.by_token:
            first, node = 0, Node(node, rest.copy(), added, steps)
        else:
            first = len(node.steps)
            node.token_ids = np.concatenate([node.token_ids, rest])
            node.steps += steps
            for blocks, more in zip(node.blocks, added, strict=True):
                blocks += more
        for index in range(known, stop) if digests else ():
            if index in digests:
                node.digests[first + index - known] = digests[index]
        for blocks in added:
            self._place(node, blocks)
        if first == 0:
            self._attach(node)
        if self._has_windows:
            self._prune(node)  # all groups may have let go of the last blocks

    def _own_end(self, tables: list[list[int]], start: int) -> Node | None:
        """The node that ends with the sequence's own block before `start`, if nothing follows."""
        for group, table in enumerate(tables):
            block = table[start - 1]
            node = self._node_of[block] if block >= 0 else None
            if (
                node is not None
                and not node.by_token
                and node.blocks[group][-1] == block
                and len(node.token_ids) == node.num_blocks * self.block_size
            ):
                return node
        return None

    def _fill_gaps(
        self,
        path: list[tuple[Node, int]],
        tables: list[list[int]],
        start: int,
        step: int,
    ) -> None:
        """Blocks from `start` on take the place of those that were reused meanwhile."""
        position = 0
        for node, count in path:
            if position + count > start:
                for group, blocks in enumerate(node.blocks):
                    if NO_BLOCK not in blocks:
                        continue
                    for i in range(max(start - position, 0), count):
                        if blocks[i] == NO_BLOCK and tables[group][position + i] != NO_BLOCK:
                            blocks[i] = tables[group][position + i]
                            node.steps[i] = max(node.steps[i], step)
                            self._place(node, blocks[i : i + 1])
            position += count

    def _end_of(self, root: bytes, path: list[tuple[Node, int]]) -> Node:
        """The node that ends where a walk does; one that goes on is split there."""
        if not path:
            if root not in self._roots:
                self._roots[root] = Node(
                    None, np.empty(0, np.int32), [[] for _ in self.windows], []
                )
                self._roots[root].name = root
            return self._roots[root]
        node, count = path[-1]
        if count < node.num_blocks:
            self._split(node, count)
        return node

    def _split(self, node: Node, at: int) -> None:
        """Let a node end after `at` blocks; a child of it holds the others."""
        size = self.block_size
        blocks = [table[at:] for table in node.blocks]
        back = Node(node, node.token_ids[at * size :], blocks, node.steps[at:])
        node.token_ids = node.token_ids[: at * size]
        del node.steps[at:]
        back.children, node.children = node.children, {}
        back.by_token, node.by_token = node.by_token, {}
        back.digests = {i - at: one for i, one in node.digests.items() if i >= at}
        node.digests = {i: one for i, one in node.digests.items() if i < at}
        for siblings in back.by_token.values():
            for child in siblings:
                child.parent = back
        for table, moved in zip(node.blocks, back.blocks, strict=True):
            del table[at:]
            self._place(back, moved)
        self._attach(back)

    def _attach(self, node: Node) -> None:
        parent, size, tokens = node.parent, self.block_size, node.token_ids
        assert parent is not None
        if len(tokens) >= size:
            node.key = tokens[:size].tobytes() + node.digests.get(0, b"")
            parent.children[node.key] = node
        parent.by_token.setdefault(int(tokens[0]), {})[node] = None

    def _place(self, node: Node, blocks: list[int]) -> None:
        """Note which node these blocks are in."""
        node_of, cached = self._node_of, self.pool.cached
        for block in blocks:
            if block >= 0:
                node_of[block] = node
                cached[block] = True

    # --- evicting -------------------------------------------------------------------------------

    def evict(self, blocks: Iterable[int]) -> None:
        """Forget blocks that are reused."""
        node_of, cached = self._node_of, self.pool.cached
        touched: dict[Node, int] = {}
        for block in blocks:
            node = node_of[block]
            if node is not None:
                node_of[block] = None
                cached[block] = False
                touched[node] = touched.get(node, 0) + 1
        for node, count in touched.items():
            self._drop_blocks(node, count)
            self._prune(node)

    def _drop_blocks(self, node: Node, count: int) -> None:
        """Take `count` blocks out of a node that are not noted as its own any more."""
        node_of = self._node_of
        if len(node.blocks) == 1 and not node.by_token:
            table = node.blocks[0]
            ends = table[-count:]
            if NO_BLOCK not in ends and not any(map(node_of.__getitem__, ends)):
                del table[-count:], node.steps[-count:]  # the rule: deepest first
                return
        for table in node.blocks:
            for i, block in enumerate(table):
                if block >= 0 and node_of[block] is not node:
                    table[i] = NO_BLOCK

    def _prune(self, node: Node) -> None:
        """Cut off what has no block left, at the ends of the tree."""
        size = self.block_size
        while node.parent is not None and not node.by_token:
            length = node.num_blocks
            for table in node.blocks:
                if length and table[length - 1] >= 0:
                    break  # as nearly always
            else:
                while length and all(table[length - 1] < 0 for table in node.blocks):
                    length -= 1
            if length:
                if length < node.num_blocks:
                    del node.steps[length:]
                    for table in node.blocks:
                        del table[length:]
                if len(node.token_ids) > length * size:
                    node.token_ids = node.token_ids[: length * size]
                    if node.digests:
                        node.digests = {i: one for i, one in node.digests.items() if i < length}
                return
            parent = node.parent
            self._detach(node, parent)
            node.parent, node = None, parent
        if node.parent is None and node.name and not node.by_token:
            del self._roots[node.name]

    def _detach(self, node: Node, parent: Node) -> None:
        if node.key:
            del parent.children[node.key]
        first = int(node.token_ids[0])
        siblings = parent.by_token[first]
        del siblings[node]
        if not siblings:
            del parent.by_token[first]

    def withdraw(self, step: int) -> None:
        """Forget blocks that a failed step, or any later one, was to write."""
        for node in self._nodes():
            if not any(one >= step for one in node.steps):
                continue
            for i, one in enumerate(node.steps):
                for table in node.blocks if one >= step else ():
                    if table[i] >= 0:
                        self._node_of[table[i]] = None
                        self.pool.cached[table[i]] = False
                        table[i] = NO_BLOCK
            self._prune(node)

    def reset(self) -> None:
        """Forget everything; blocks in use stay with their owners."""
        for block, node in enumerate(self._node_of):
            if node is not None:
                self._node_of[block] = None
                self.pool.cached[block] = False
        self._roots.clear()

    def _nodes(self) -> set[Node]:
        return {node for node in self._node_of if node is not None}

    # --- names ----------------------------------------------------------------------------------

    def name_of(self, block: int) -> bytes | None:
        """What the block is called outside of this process, if it is findable and full: the same
        in every process and after a restart."""
        node = self._node_of[block]
        if node is None:
            return None
        group = next(group for group, table in enumerate(node.blocks) if block in table)
        index = node.blocks[group].index(block)
        if (index + 1) * self.block_size > len(node.token_ids):
            return None
        path = [node]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        name, size = path[-1].name, self.block_size
        for one in path[-2::-1]:
            for i in range(index + 1 if one is node else one.num_blocks):
                tokens = one.token_ids[i * size : (i + 1) * size]
                name = chain_hash(name, tokens, one.digests.get(i, b""))
        return blake2b(b"%d" % group, digest_size=HASH_BYTES, key=name).digest() if group else name


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

    # --- admission ------------------------------------------------------------------------------

    def match(self, sequence: Sequence, step: int) -> tuple[PrefixMatch, int]:
        """The longest prefix that is already computed, and the row it is forked from (-1: none).

        It comes from the tree or from the row of the sequence's parent, and leaves out the last
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
        partial = tables[:, full].tolist() if rest else []
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
        """Blocks that running sequences still need for the tokens they have."""
        c = self.columns
        num_tokens = c.num_tokens[running]
        if c.has_stages:  # which counts no token that is sampled in a step in flight
            num_tokens = np.maximum(num_tokens, c.num_computed[running] + 1)
        growth = np.maximum(self.limits.blocks_for(num_tokens) - c.num_blocks[running], 0)
        total = int(growth.sum()) * (self._num_groups - len(self._windowed))
        for group, _ in self._windowed:
            held = c.num_blocks[running] - c.first_blocks[group, running]
            most = self.limits.max_held_blocks(group)
            total += int(np.minimum(growth, np.maximum(most - held, 0)).sum())
        return total

    def room_for(self, match: PrefixMatch, num_tokens: int, num_promised: int) -> bool:
        """Whether a whole sequence fits beside what is promised to running ones."""
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
        if match.num_tokens:
            self.pool.share(match.held())
            self.pool.share(match.partial)
            plan.held_blocks += match.partial
        reserve = min(filled + limits.num_ahead, max(filled, sequence.max_total))
        reserve = limits.max_model_len if limits.reserves_max_length else reserve
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
        need: Int32Array = self.limits.blocks_for(num_tokens) - self.columns.num_blocks[rows]
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
        """Free what rows hold beyond their computed tokens, which have become fewer, and those that
        they should have blocks for ahead."""
        c = self.columns
        if self.limits.reserves_max_length:
            return
        ahead = np.minimum(c.num_computed[rows] + self.limits.num_ahead, c.max_total[rows])
        keep = self.limits.blocks_for(ahead)
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

    def check_integrity(self, sequences: list[Sequence]) -> None:
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
            most = limits.block_size + limits.num_ahead
            assert (waste[c.running] < most).all(), "a row wastes a whole block"
