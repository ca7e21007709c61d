"""Memory for weights: what an arena gives out overlaps with nothing, is whole for as long as
anything holds it, and costs nothing before it is written to."""

from __future__ import annotations

import gc
import sys

import pytest
import torch

from quire.config.device import resident_bytes
from quire.kernels.cpu.memory import (
    CACHE_LINE,
    CHUNK,
    LARGE_PAGE,
    Arena,
    map_bytes,
    move_to_large_pages,
)

SHAPES = [(3, 5), (1,), (1000, 1000), (7, 64, 16), (CHUNK // 8,), (CHUNK // 4 + 1,), (0, 4), (9,)]


@pytest.mark.parametrize("wait", [False, True])
def test_tensors_do_not_overlap(wait: bool) -> None:
    """Neither before nor after the system has moved them to large pages."""
    arena = Arena()
    made = []
    for number, shape in enumerate(SHAPES * 2):
        dtype = (torch.float32, torch.uint8)[number % 2]
        tensor = arena.empty(shape, dtype=dtype)
        assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
        assert tensor.data_ptr() % CACHE_LINE == 0
        made.append(tensor.fill_(number))
    moving = arena.settle()
    assert moving is not None and arena.settle() is None
    if wait:
        moving.join()
    del arena
    gc.collect()
    for number, tensor in enumerate(made):
        assert bool((tensor == number).all())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_takes_memory_when_it_is_written_to() -> None:
    size = 256 * LARGE_PAGE
    before = resident_bytes()
    memory = map_bytes(size)
    assert memory.data_ptr() % LARGE_PAGE == 0 and len(memory) == size
    assert resident_bytes() - before < 4 * LARGE_PAGE
    memory[::4096] = 1
    move_to_large_pages(memory)
    assert resident_bytes() - before > size - 4 * LARGE_PAGE
    del memory
    assert resident_bytes() - before < 4 * LARGE_PAGE


def test_too_much_is_named() -> None:
    with pytest.raises(MemoryError, match="tried to allocate 1099511627776 MiB"):
        map_bytes(1 << 60)
