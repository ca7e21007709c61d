"""Memory in large pages, for what a step reads from end to end: with small ones the processor
spends a good part of its time on finding out where they lie."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20
"""Bytes on most processors; where pages are larger, some are not used as such."""
CHUNK = 64 << 20
CACHE_LINE = 64


def map_bytes(count: int) -> Tensor:
    """uint8 [count] from the system, in large pages where it has them. What is not written to takes
    no memory; what is, takes whole pages."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        mapped = mmap.mmap(-1, count + LARGE_PAGE, flags=flags)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"tried to allocate {count / (1 << 20):.0f} MiB") from error
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with suppress(OSError):  # of a kernel without large pages
            mapped.madvise(advice)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    start = -whole.data_ptr() % LARGE_PAGE
    return whole[start : start + count]


class Arena:
    """Tensors that live as long as one another, laid one after the other."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
        """As `torch.empty`."""
        count = math.prod(shape) * dtype.itemsize
        room = -(-count // CACHE_LINE) * CACHE_LINE
        if room > CHUNK // 2:
            return map_bytes(count).view(dtype).view(shape)
        if room > len(self._free):
            self._free = map_bytes(CHUNK)
        taken, self._free = self._free[:count], self._free[room:]
        return taken.view(dtype).view(shape)
