"""`EngineSnapshot`: the engine at one moment, for people to look at."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from quire.protocol.plan import Int32Array


class BlockState(IntEnum):
    FREE = 0
    CACHED = 1
    """Free, but a prompt that begins like its content would find it."""
    OWNED = 2
    """By one sequence."""
    SHARED = 3
    """By several."""


@dataclass(slots=True, frozen=True)
class DeviceMemory:
    """What an executor knows of its device's memory, in bytes."""

    total: int
    used: int
    """Of a GPU, by all programs; of a CPU, by this process."""
    weights: int
    kv_block: int
    """Keys and values of one block."""
    is_host: bool = False
    """Whether it is a CPU's."""


@dataclass(slots=True, frozen=True)
class MemorySplit:
    """Where the device's memory went, in bytes."""

    total: int
    weights: int
    kv_used: int
    kv_cached: int
    kv_free: int
    other: int
    """Activations, CUDA graphs, libraries, other programs; on a CPU, the rest of this process."""

    @classmethod
    def of(cls, memory: DeviceMemory, blocks: NDArray[np.uint8]) -> MemorySplit:
        """`blocks` are the `BlockState` of each physical block."""
        free, cached, owned, shared = np.bincount(blocks, minlength=len(BlockState)).tolist()
        size, known = memory.kv_block, memory.weights
        # A CPU gives pages to a block when it is first written, so free ones need not be counted.
        known += (owned + shared + cached) * size if memory.is_host else len(blocks) * size
        return cls(
            total=memory.total,
            weights=memory.weights,
            kv_used=(owned + shared) * size,
            kv_cached=cached * size,
            kv_free=free * size,
            other=max(memory.used - known, 0),
        )


@dataclass(slots=True)
class SequenceSnapshot:
    """One sequence that waits or runs."""

    key: int
    request_id: str
    tenant: str
    state: str
    """waiting, running or draining (its blocks are gone, its last tokens still on their way)."""
    num_prompt_tokens: int
    num_tokens: int
    """Prompt and generated tokens that the host knows."""
    num_computed_tokens: int
    arrival_time: float
    num_blocks: int
    num_owned_blocks: int
    """Of these, the blocks that no other sequence holds."""
    block_table: Int32Array
    """Logical to physical: the n-th entry is the block of the n-th `block_size` tokens; empty if
    it was not asked for."""


@dataclass(slots=True)
class EngineSnapshot:
    time: float
    """On the engine's clock."""
    block_size: int
    blocks: NDArray[np.uint8]
    """`BlockState` of each physical block."""
    running: list[SequenceSnapshot]
    """In the order of their rank."""
    waiting: list[SequenceSnapshot]
    """At most as many as were asked for."""
    num_waiting: int
    prompt_tokens_per_s: float
    """Of requests admitted in the last few seconds, tokens found in the cache included."""
    generation_tokens_per_s: float
    memory: MemorySplit
    paused: bool = False
    advice: list[str] = field(default_factory=list)
    """Warnings about settings that do not suit the recent load, with remedies."""
