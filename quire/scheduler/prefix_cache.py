"""`PrefixCache`: finds blocks whose KV a prompt can reuse, whole or in part.

Blocks are kept in runs: consecutive blocks of one sequence. A block is named by a chain hash over
its parent's name and its own tokens, so equal names mean equal content from the first token on;
names are the same in every process and after a restart. The root stands for whatever else decides
the KV: model, dtype, layout, adapter, salt. A run is found by the name of its first block and
compared token by token from there on, so only blocks at which sequences part are ever hashed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

import numpy as np

from quire.protocol.plan import Int32Array
from quire.scheduler.block_pool import BlockPool

HASH_BYTES = 16
MAX_PARTIAL_CANDIDATES = 16  # newest runs compared when a prompt diverges inside a block


def chain_root(*parts: str) -> bytes:
    """Root of a hash chain. Every part that changes the KV of equal tokens belongs here."""
    digest = blake2b(digest_size=HASH_BYTES)
    for part in parts:
        data = part.encode(errors="surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def block_hash(parent: bytes, token_ids: Int32Array, extra: bytes = b"") -> bytes:
    return blake2b(token_ids.tobytes() + extra, digest_size=HASH_BYTES, key=parent).digest()


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

    blocks: list[int]
    num_tokens: int
    partial_block: int = -1

    def without_partial(self, block_size: int) -> PrefixMatch:
        return PrefixMatch(self.blocks, len(self.blocks) * block_size)


class Run:
    """Findable blocks that follow each other. The last may be filled in part."""

    __slots__ = ("blocks", "end", "name", "parent", "steps", "token_ids")

    def __init__(
        self, parent: bytes, token_ids: Int32Array, blocks: list[int], steps: list[int]
    ) -> None:
        self.parent = parent
        """Name of the block before the first, or the root."""
        self.name: bytes | None = None
        """Name of the first block; None if it is filled in part."""
        self.end: bytes | None = None
        """Name of the last block, once other runs follow it."""
        self.token_ids = token_ids
        self.blocks = blocks
        self.steps = steps
        """The step that writes each block's last token; from the next on it may be copied."""


class PrefixCache:
    def __init__(self, pool: BlockPool, block_size: int, enabled: bool = True) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enabled = enabled
        self._run_of: list[Run | None] = [None] * pool.num_blocks
        self._by_name: dict[bytes, Run] = {}
        # (parent, first token) -> runs in order of publication
        self._children: dict[tuple[bytes, int], dict[Run, None]] = {}
        pool.on_evict = self.forget

    def __len__(self) -> int:
        return sum(run is not None for run in self._run_of)

    # --- looking up -----------------------------------------------------------------------------

    def match(self, root: bytes, token_ids: Int32Array, step: int) -> PrefixMatch:
        """Longest reusable prefix of `token_ids` for a plan of the given step."""
        if not self.enabled:
            return PrefixMatch([], 0)
        blocks, run, at = self._walk(root, token_ids)
        num_tokens = len(blocks) * self.block_size
        block, extra = self._match_inside(root, run, at, token_ids[num_tokens:], step)
        return PrefixMatch(blocks, num_tokens + extra, block)

    def _walk(self, root: bytes, token_ids: Int32Array) -> tuple[list[int], Run | None, int]:
        """The blocks that hold the beginning of `token_ids`, as far as full blocks are found.

        Also the run in which they end, if any, and how many blocks of it they are.
        """
        size = self.block_size
        blocks: list[int] = []
        run, at, parent = None, 0, root
        while (len(blocks) + 1) * size <= len(token_ids):
            rest = token_ids[len(blocks) * size :]
            if (parent, int(rest[0])) not in self._children:
                break
            found = self._by_name.get(block_hash(parent, rest[:size]))
            if found is None:
                break
            run, at = found, common_prefix(found.token_ids, rest) // size
            blocks += run.blocks[:at]
            if at < len(run.blocks) or run.end is None:
                break
            parent = run.end
        return blocks, run, at

    def _match_inside(
        self, root: bytes, run: Run | None, at: int, rest: Int32Array, step: int
    ) -> tuple[int, int]:
        """The block after those of a walk that agrees longest with `rest`, and how long."""
        size = self.block_size
        tokens = rest[:size].tolist()
        best, best_length = -1, 0
        candidates: Sequence[Run]
        if not tokens:
            return best, best_length
        if run is not None and at < len(run.blocks):
            candidates = [run]
        else:
            at, parent = 0, root if run is None else run.end
            siblings = self._children.get((parent, tokens[0]), {}) if parent is not None else {}
            candidates = list(islice(reversed(siblings), MAX_PARTIAL_CANDIDATES))
        for candidate in candidates:
            if candidate.steps[at] < step:
                held = candidate.token_ids[at * size : (at + 1) * size].tolist()
                length = _agreement(held, tokens)
                if length > best_length:
                    best, best_length = candidate.blocks[at], length
        return best, best_length

    # --- coming and going -----------------------------------------------------------------------

    def publish(
        self, root: bytes, token_ids: Int32Array, blocks: list[int], start: int, step: int
    ) -> None:
        """Make `blocks[start:]` findable; those before were found or published earlier.

        `blocks` hold `token_ids` from the first on; the last of them may be filled in part.
        """
        size = self.block_size
        if not self.enabled or len(token_ids) <= start * size:
            return
        own = self._run_of[blocks[start - 1]] if start else None
        if own is not None and own.end is None and own.blocks[-1] == blocks[start - 1]:
            own.token_ids = np.concatenate([own.token_ids, token_ids[start * size :]])
            self._append(own, blocks[start:], [step] * (len(blocks) - start))
            return
        known, run, at = self._walk(root, token_ids)
        first = len(known)
        rest = token_ids[first * size :]
        if first < start or not len(rest):
            return  # what comes before is forgotten, or all of it is findable already
        if len(rest) < size:
            held = self._match_inside(root, run, at, rest, step + 1)[1]
            if held == len(rest):
                return  # another block holds these tokens too
        parent = root if run is None else self._cut(run, at)
        self._add(Run(parent, rest.copy(), [], []), blocks[first:], [step] * (len(blocks) - first))

    def _cut(self, run: Run, at: int) -> bytes:
        """Let a run end after `at` blocks, so that others can follow; returns the last's name."""
        if run.end is not None and at == len(run.blocks):
            return run.end
        assert run.name is not None
        size, name = self.block_size, run.name
        for i in range(1, at):
            name = block_hash(name, run.token_ids[i * size : (i + 1) * size])
        if at < len(run.blocks):
            back = Run(name, run.token_ids[at * size :], [], [])
            back.end = run.end
            blocks, steps = run.blocks[at:], run.steps[at:]
            self._truncate(run, at)
            self._add(back, blocks, steps)
        run.end = name
        return name

    def _add(self, run: Run, blocks: list[int], steps: list[int]) -> None:
        size = self.block_size
        if len(run.token_ids) >= size:
            run.name = block_hash(run.parent, run.token_ids[:size])
            if run.name in self._by_name:
                return  # the same content is findable already
            self._by_name[run.name] = run
        self._children.setdefault((run.parent, int(run.token_ids[0])), {})[run] = None
        self._append(run, blocks, steps)

    def _append(self, run: Run, blocks: list[int], steps: list[int]) -> None:
        run.blocks += blocks
        run.steps += steps
        run_of, cached = self._run_of, self.pool.cached
        for block in blocks:
            run_of[block] = run
            cached[block] = True

    def forget(self, blocks: Iterable[int]) -> None:
        """Forget blocks, and those that follow them in their runs: these cannot be found either."""
        run_of, cached = self._run_of, self.pool.cached
        shortened: dict[Run, None] = {}
        for block in blocks:
            run = run_of[block]
            if run is None:
                continue  # it went with one before it
            if run.blocks[-1] == block:  # the rule: blocks are evicted deepest first
                run.blocks.pop()
                run.steps.pop()
                run_of[block] = None
                cached[block] = False
            else:
                self._drop(run, run.blocks.index(block))
            shortened[run] = None
        for run in shortened:
            self._settle(run)

    def _drop(self, run: Run, length: int) -> None:
        """Take the blocks after the first `length` from a run, to be settled after that."""
        run_of, cached = self._run_of, self.pool.cached
        for block in run.blocks[length:]:
            run_of[block] = None
            cached[block] = False
        del run.blocks[length:], run.steps[length:]

    def _settle(self, run: Run) -> None:
        """Let tokens and names follow the blocks of a run that became shorter."""
        if not run.blocks:
            self._remove(run, int(run.token_ids[0]))
        run.token_ids = run.token_ids[: len(run.blocks) * self.block_size]
        run.end = None

    def _truncate(self, run: Run, length: int) -> None:
        self._drop(run, length)
        self._settle(run)

    def _remove(self, run: Run, first_token: int) -> None:
        if run.name is not None:
            del self._by_name[run.name]
        siblings = self._children[run.parent, first_token]
        del siblings[run]
        if not siblings:
            del self._children[run.parent, first_token]

    def withdraw(self, step: int) -> None:
        """Forget blocks that a failed step, or any later one, was to write."""
        for run in self._runs():
            if run.steps[-1] >= step:
                self._truncate(run, next(i for i, s in enumerate(run.steps) if s >= step))

    def reset(self) -> None:
        """Forget everything; blocks in use stay with their owners."""
        for run in self._runs():
            self._truncate(run, 0)

    def _runs(self) -> set[Run]:
        return {run for run in self._run_of if run is not None}
