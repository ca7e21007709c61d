"""Adapters (LoRA) as the parts of an engine name them to each other.

A client gives a name and a folder; what the folder holds is known by the digest of its content.
Ranks of an adapter are given out in chunks, as the KV cache is in blocks: an adapter of rank 20
takes 3 chunks of 8 rows, anywhere in the pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CHUNK_ROWS = 8
"""Rank rows of a chunk."""


@dataclass(frozen=True)
class AdapterReference:
    """What a request asks for."""

    name: str
    folder: str
    number: int = 0
    """`lora_int_id` of the caller."""
    reloads: bool = False
    """Read the folder again, even if its files look as they did."""


@dataclass(frozen=True)
class AdapterLimits:
    """How many adapters there may be at once."""

    max_adapters: int
    """Of the largest rank, on the device."""
    max_rank: int
    max_host_adapters: int
    """In the memory of the host."""
    max_wait_s: float = 2.0
    """How long others may go ahead of a request that waits for an adapter's place."""

    @property
    def num_chunks(self) -> int:
        """As many slots are there, since each adapter has a chunk at least."""
        return self.max_adapters * chunks_for(self.max_rank)


@dataclass(frozen=True)
class AdapterContent:
    """What a folder holds, whatever its name."""

    digest: str
    num_chunks: int


@dataclass(slots=True)
class PlacedAdapter:
    """An adapter goes from the host's memory to a slot of the device."""

    digest: str
    slot: int
    chunks: NDArray[np.int32]


def chunks_for(rank: int) -> int:
    return max(-(-rank // CHUNK_ROWS), 1)
