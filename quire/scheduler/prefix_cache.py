"""`PrefixCache`: finds blocks whose KV a prompt can reuse, whole or in part.

A block is named by a chain hash over its parent's hash, its own tokens and extra keys, so equal
names mean equal content from the first token on. Hashes are the same in every process and after a
restart. The root stands for whatever else decides the KV: model, dtype, layout, adapter, salt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

import numpy as np

from quire.protocol.plan import Int32Array
from quire.scheduler.block_pool import BlockPool

HASH_BYTES = 16
MAX_PARTIAL_CANDIDATES = 16  # newest blocks compared when a prompt diverges inside a block


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
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length


@dataclass(slots=True)
class CachedBlock:
    """What a findable block holds. `hash` is None while it is only partly filled."""

    hash: bytes | None
    parent: bytes
    token_ids: Int32Array
    step: int
    """The step that writes its last token; from the next step on it may be copied."""


@dataclass(slots=True)
class PrefixMatch:
    """A reusable prefix: whole blocks to share and, beyond them, part of one block to copy."""

    blocks: list[int]
    num_tokens: int
    partial_block: int = -1

    def without_partial(self, block_size: int) -> PrefixMatch:
        return PrefixMatch(self.blocks, len(self.blocks) * block_size)


class PrefixCache:
    def __init__(self, pool: BlockPool, block_size: int, enabled: bool = True) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enabled = enabled
        self._entries: dict[int, CachedBlock] = {}
        self._by_hash: dict[bytes, int] = {}
        # (parent hash, first token) -> blocks in order of publication
        self._children: dict[tuple[bytes, int], dict[int, None]] = {}
        pool.on_evict = self.forget

    def __len__(self) -> int:
        return len(self._entries)

    def chain(self, root: bytes, hashes: list[bytes], token_ids: Int32Array) -> list[bytes]:
        """Extend `hashes` in place to cover all full blocks of `token_ids`."""
        if self.enabled:
            size = self.block_size
            for i in range(len(hashes), len(token_ids) // size):
                parent = hashes[-1] if hashes else root
                hashes.append(block_hash(parent, token_ids[i * size : (i + 1) * size]))
        return hashes

    def match(
        self, root: bytes, hashes: Sequence[bytes], token_ids: Int32Array, step: int
    ) -> PrefixMatch:
        """Longest reusable prefix of `token_ids` for a plan of the given step."""
        blocks: list[int] = []
        if not self.enabled:
            return PrefixMatch(blocks, 0)
        for name in hashes[: len(token_ids) // self.block_size]:
            block = self._by_hash.get(name)
            if block is None:
                break
            blocks.append(block)
        num_tokens = len(blocks) * self.block_size
        parent = hashes[len(blocks) - 1] if blocks else root
        block, extra = self._match_inside(parent, token_ids[num_tokens:], step)
        return PrefixMatch(blocks, num_tokens + extra, block)

    def _match_inside(self, parent: bytes, rest: Int32Array, step: int) -> tuple[int, int]:
        """The block under `parent` that agrees longest with `rest`, and for how many tokens."""
        best, best_length = -1, 0
        if len(rest):
            siblings = self._children.get((parent, int(rest[0])), {})
            for block in islice(reversed(siblings), MAX_PARTIAL_CANDIDATES):
                entry = self._entries[block]
                if entry.step < step:
                    length = common_prefix(entry.token_ids, rest)
                    if length > best_length:
                        best, best_length = block, length
        return best, best_length

    def publish(
        self, block: int, parent: bytes, name: bytes | None, token_ids: Int32Array, step: int
    ) -> None:
        """Make a block findable. `name` is its hash, or None if it is only partly filled."""
        if not self.enabled or not len(token_ids):
            return
        if name is not None and self._by_hash.get(name, block) != block:
            return  # the same content is findable already
        if name is None and self._match_inside(parent, token_ids, step + 1)[1] == len(token_ids):
            return  # another block holds these tokens too
        if block in self._entries:
            self.forget(block)
        self._entries[block] = CachedBlock(name, parent, token_ids.copy(), step)
        if name is not None:
            self._by_hash[name] = block
        self._children.setdefault((parent, int(token_ids[0])), {})[block] = None
        self.pool.cached[block] = True

    def forget(self, block: int) -> None:
        entry = self._entries.pop(block)
        if entry.hash is not None:
            del self._by_hash[entry.hash]
        key = (entry.parent, int(entry.token_ids[0]))
        siblings = self._children[key]
        del siblings[block]
        if not siblings:
            del self._children[key]
        self.pool.cached[block] = False

    def withdraw(self, step: int) -> None:
        """Forget blocks that a failed step, or any later one, was to write."""
        for block in [b for b, entry in self._entries.items() if entry.step >= step]:
            self.forget(block)

    def reset(self) -> None:
        """Forget everything; blocks in use stay with their owners."""
        for block in list(self._entries):
            self.forget(block)
