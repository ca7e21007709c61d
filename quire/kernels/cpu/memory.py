"""Memory for float32 weights, which a step reads from end to end: in large pages two threads read a
quarter more of it in the same time. Of smaller weights other things bound the speed.

Weights are loaded into pages of the usual size and moved by the system afterwards, beside the first
steps: to find large pages that are free may take it longer than to load the model.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import weakref
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20
"""Bytes on most processors; where pages are larger, nothing is moved."""
CHUNK = 64 << 20
CACHE_LINE = 64
MADV_COLLAPSE = 25
"""Linux 6.1 and later; Python has no name for it."""
DELAY_S = 1.0
"""Until memory is moved, so that the first token need not wait for it."""

Empty: TypeAlias = Callable[..., Tensor]
"""`torch.empty` or the like, called with a shape and a dtype."""


def map_bytes(count: int) -> Tensor:
    """uint8 [count] from the system, at the beginning of a large page. What is not written to takes
    no memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        mapped = mmap.mmap(-1, count + LARGE_PAGE, flags=flags)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"tried to allocate {count / (1 << 20):.0f} MiB") from error
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    start = -whole.data_ptr() % LARGE_PAGE
    return whole[start : start + count]


def move_to_large_pages(memory: Tensor) -> None:
    """Asks the system to; it may refuse. Only whole pages are moved, and it shows only in the
    clock."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    # One at a time: meanwhile no other thread gets memory.
    for start in range(0, memory.nbytes - LARGE_PAGE + 1, LARGE_PAGE):
        if madvise(memory.data_ptr() + start, LARGE_PAGE, MADV_COLLAPSE) != 0:
            return


class Arena:
    """Tensors that live as long as one another, laid one after the other."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._taken = 0
        self._full: list[Tensor] = []
        self._settled: list[Tensor] = []

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
        """As `torch.empty`."""
        count = math.prod(shape) * dtype.itemsize
        if count > CHUNK // 2:
            self._full.append(map_bytes(count))
            return self._full[-1].view(dtype).view(shape)
        if self._taken + count > len(self._chunk):
            self._close_chunk()
            self._chunk = map_bytes(CHUNK)
        found = self._chunk[self._taken : self._taken + count]
        self._taken += -(-count // CACHE_LINE) * CACHE_LINE
        return found.view(dtype).view(shape)

    def settle(self) -> threading.Thread | None:
        """What was given out is written: moves it to large pages, in a thread of its own and only
        while the arena is in use."""
        self._close_chunk()
        full, self._full = self._full, []
        if sum(memory.nbytes for memory in full) < LARGE_PAGE:
            return None
        self._settled += full
        timer = threading.Timer(DELAY_S, _move_all, [[weakref.ref(memory) for memory in full]])
        timer.daemon = True
        timer.start()
        return timer

    def _close_chunk(self) -> None:
        self._full.append(self._chunk[: self._taken])
        self._chunk, self._taken = self._chunk[:0], 0


def _move_all(memories: list[weakref.ref[Tensor]]) -> None:
    for reference in memories:
        memory = reference()
        if memory is not None:
            move_to_large_pages(memory)
