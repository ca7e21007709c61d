"""Collectives among the processes of one host, through memory that they share (see
src/collectives.cpp)."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

from quire.kernels.cpu.library import native

SLOT_BYTES = 1 << 18
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Meeting(ctypes.Structure):
    """Mirrors `Meeting` in src/collectives.cpp."""

    _fields_ = (
        ("region", ctypes.c_void_p),
        ("slot_bytes", ctypes.c_int64),
        ("timeout", ctypes.c_int64),
        ("rank", ctypes.c_int32),
        ("num_ranks", ctypes.c_int32),
    )


class RankMissing(RuntimeError):
    """A rank did not take part in a collective in time."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        super().__init__(f"rank {rank} did not take part in a collective within {timeout_s:g} s")
        self.rank = rank


def region_bytes(num_ranks: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Size of the memory that `num_ranks` share."""
    return int(native().quire_region_bytes(num_ranks, slot_bytes))


class SharedMemoryGroup:
    """One rank's view of the memory that a group shares. All ranks call the same collectives in the
    same order, each from one thread at a time."""

    def __init__(
        self,
        fd: int,
        rank: int,
        size: int,
        timeout_s: float,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        """`fd` is an open file of at least `region_bytes`, which was zeros when the ranks began."""
        self.rank, self.size, self._timeout_s = rank, size, timeout_s
        self._memory = mmap.mmap(fd, region_bytes(size, slot_bytes))
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._meeting = ctypes.pointer(
            Meeting(address, slot_bytes, int(1e9 * timeout_s), rank, size)
        )
        self._library = native()

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, in place; the same bits on all ranks."""
        assert x.is_contiguous() and x.device.type == "cpu"
        arguments = x.data_ptr(), x.numel(), DTYPES.index(x.dtype)
        self._check(self._library.quire_all_reduce(self._meeting, *arguments))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' `x`, stacked in rank order."""
        assert x.device.type == "cpu"
        x = x.contiguous()
        out = torch.empty((self.size, *x.shape), dtype=x.dtype)
        arguments = x.data_ptr(), out.data_ptr(), x.nbytes
        self._check(self._library.quire_all_gather(self._meeting, *arguments))
        return out

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """The `x` of rank `source`, written into that of the others."""
        assert x.is_contiguous() and x.device.type == "cpu"
        arguments = x.data_ptr(), x.nbytes, source
        self._check(self._library.quire_broadcast(self._meeting, *arguments))
        return x

    def _check(self, missing: int) -> None:
        if missing:
            raise RankMissing(missing - 1, self._timeout_s)
