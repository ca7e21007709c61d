"""Collectives and links among the processes of one host, through memory that they share (see
src/collectives.cpp)."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

from quire.kernels.cpu.library import native
from quire.protocol.errors import RankMissing

SLOT_BYTES = 1 << 18
RING_BYTES = 1 << 25
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DONE, TIMED_OUT, OTHER_SIZE = range(3)


class Meeting(ctypes.Structure):
    """Mirrors `Meeting` in src/collectives.cpp."""

    _fields_ = (
        ("region", ctypes.c_void_p),
        ("slot_bytes", ctypes.c_int64),
        ("timeout", ctypes.c_int64),
        ("rank", ctypes.c_int32),
        ("num_ranks", ctypes.c_int32),
    )


class Ring(ctypes.Structure):
    """Mirrors `Ring` in src/collectives.cpp."""

    _fields_ = (
        ("region", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
        ("timeout", ctypes.c_int64),
    )


def region_bytes(num_ranks: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Size of the memory that a group of `num_ranks` shares."""
    return int(native().quire_region_bytes(num_ranks, slot_bytes))


def ring_bytes(capacity: int = RING_BYTES) -> int:
    """Size of the memory that the two ends of a link share."""
    return int(native().quire_ring_bytes(capacity))


class _Region:
    """Shared memory at an address of this process."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._memory = mmap.mmap(fd, num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))


class SharedMemoryGroup:
    """One rank's view of the memory that a group shares. All ranks call the same collectives in the
    same order, each from one thread at a time."""

    is_capturable = False

    def __init__(
        self,
        fd: int,
        rank: int,
        size: int,
        timeout_s: float,
        slot_bytes: int = SLOT_BYTES,
        first_rank: int = 0,
    ) -> None:
        """`fd` is an open file of at least `region_bytes`, which was zeros when the ranks began;
        errors count ranks from `first_rank`."""
        self.rank, self.size = rank, size
        self._timeout_s, self._first_rank = timeout_s, first_rank
        self._region = _Region(fd, region_bytes(size, slot_bytes))
        self._meeting = ctypes.pointer(
            Meeting(self._region.address, slot_bytes, int(1e9 * timeout_s), rank, size)
        )
        self._library = native()
        self._missing = 0
        """Ranks are out of step once one was late: 1 + that one."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, in place, accumulated in float32; the same bits on all."""
        assert x.is_contiguous() and x.device.type == "cpu"
        arguments = x.data_ptr(), x.numel(), DTYPES.index(x.dtype)
        self._check(self._missing or self._library.quire_all_reduce(self._meeting, *arguments))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' `x`, stacked in rank order."""
        assert x.device.type == "cpu"
        x = x.contiguous()
        out = torch.empty((self.size, *x.shape), dtype=x.dtype)
        arguments = x.data_ptr(), out.data_ptr(), x.nbytes
        self._check(self._missing or self._library.quire_all_gather(self._meeting, *arguments))
        return out

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """The `x` of rank `source`, written into that of the others."""
        assert x.is_contiguous() and x.device.type == "cpu"
        arguments = x.data_ptr(), x.nbytes, source
        self._check(self._missing or self._library.quire_broadcast(self._meeting, *arguments))
        return x

    def _check(self, missing: int) -> None:
        self._missing = missing
        if missing:
            raise RankMissing(
                f"rank {self._first_rank + missing - 1} did not take part in a collective within "
                f"{self._timeout_s:g} s (distributed_timeout_seconds)."
            )


class SharedMemoryLink:
    """From the stage before to this one and from this one to the next, each through a ring."""

    def __init__(
        self,
        receive_fd: int | None,
        send_fd: int | None,
        stage: int,
        timeout_s: float,
        capacity: int = RING_BYTES,
    ) -> None:
        """An open file of at least `ring_bytes`, which was zeros when the ranks began, for each end
        that this stage has."""
        self._stage, self._timeout_s = stage, timeout_s
        self._regions = [
            None if fd is None else _Region(fd, ring_bytes(capacity))
            for fd in (receive_fd, send_fd)
        ]
        self._receiving, self._sending = (
            None
            if region is None
            else ctypes.pointer(Ring(region.address, capacity, int(1e9 * timeout_s)))
            for region in self._regions
        )
        self._library = native()

    def send(self, x: Tensor) -> None:
        """To the next stage, which is not waited for while the ring has room."""
        assert self._sending is not None and x.device.type == "cpu"
        x = x.contiguous()
        if self._library.quire_send(self._sending, x.data_ptr(), x.nbytes) != DONE:
            self._fail(self._stage + 1, "took nothing")

    def receive(self, out: Tensor) -> Tensor:
        """What the stage before sent, in the order of sending."""
        assert self._receiving is not None and out.device.type == "cpu" and out.is_contiguous()
        outcome = self._library.quire_receive(self._receiving, out.data_ptr(), out.nbytes)
        if outcome == OTHER_SIZE:
            raise RuntimeError(
                f"stage {self._stage - 1} did not send the {out.nbytes} bytes that stage "
                f"{self._stage} expects: the stages do not compute the same step"
            )
        if outcome == TIMED_OUT:
            self._fail(self._stage - 1, "sent nothing")
        return out

    def _fail(self, stage: int, what: str) -> None:
        raise RankMissing(
            f"stage {stage} {what} for {self._timeout_s:g} s (distributed_timeout_seconds)."
        )
