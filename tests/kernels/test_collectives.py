"""Collectives through shared memory between real processes, against plain torch.

Turns red if ranks read a slot before it is written, or write one before all have read it; if a
message longer than the shared memory is cut; if a rank that is gone is waited for without end.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from multiprocessing.reduction import DupFd

import pytest
import torch

from quire.kernels.cpu.collectives import (
    SharedMemoryGroup,
    SharedMemoryLink,
    region_bytes,
    ring_bytes,
)
from quire.protocol.errors import RankMissing
from tests.processes import Started, given, results, taken

pytestmark = pytest.mark.usefixtures("native")

SLOT = 4096
RING = 4096
LONG_S = 100.0
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COUNTS = (0, 1, 3, 257, 1024, 1025, 2048, 2049, 10007)


def values_of(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Random ones, after some that are special."""
    generator = torch.Generator().manual_seed(100 * rank + count)
    x = torch.randn(count, generator=generator)
    special = [float("inf"), -0.0, 6e-8, 60000.0, 1.0 if rank else float("nan"), 1 / 3]
    few = min(count, len(special))
    x[:few] = torch.tensor(special[:few])
    if rank == 1:
        x[:1] *= -1
    return x.to(dtype)


def bits(x: torch.Tensor) -> bytes:
    """Those of NaN are torch's choice or ours."""
    if x.is_floating_point():
        x = torch.where(x.isnan(), torch.full_like(x, float("nan")), x)
    return bytes(x.contiguous().view(torch.uint8).numpy()) if x.numel() else b""


def new_region() -> int:
    fd = os.memfd_create("test")
    os.ftruncate(fd, max(region_bytes(4, SLOT), 2 * ring_bytes(RING)))
    return fd


@pytest.fixture
def region() -> Iterator[int]:
    fd = new_region()
    yield fd
    os.close(fd)


def group_of(file: DupFd, rank: int, size: int, timeout_s: float = LONG_S) -> SharedMemoryGroup:
    fd = taken(file)
    assert fd is not None
    return SharedMemoryGroup(fd, rank, size, timeout_s, SLOT)


def compute(file: DupFd, rank: int, size: int) -> list[bytes]:
    group, found = group_of(file, rank, size), []
    delays = random.Random(rank)
    for count in COUNTS:
        for dtype in DTYPES:
            x = values_of(rank, count, dtype)
            found.append(bits(group.all_reduce(x.clone())))
            if delays.random() < 0.1:
                time.sleep(0.001)
            found.append(bits(group.all_gather(x)))
            found += [bits(group.broadcast(x.clone(), source)) for source in range(size)]
    every_second = torch.arange(40).view(5, 8)[:, ::2] + rank
    found.append(bits(group.all_gather(every_second)))
    return found


def expected(size: int) -> list[bytes]:
    found = []
    for count in COUNTS:
        for dtype in DTYPES:
            every = [values_of(rank, count, dtype) for rank in range(size)]
            total = every[0].float()
            for x in every[1:]:
                total = total + x.float()
            found += [bits(total.to(dtype)), bits(torch.stack(every))]
            found += [bits(x) for x in every]
    every_second = torch.arange(40).view(5, 8)[:, ::2]
    found.append(bits(torch.stack([every_second + rank for rank in range(size)])))
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_collectives(size: int, region: int) -> None:
    """Sums have the bits of a sum in float32 in the order of ranks, on every rank."""
    ranks = [Started(compute, given(region), rank, size) for rank in range(size)]
    wanted = expected(size)
    for rank, found in enumerate(results(ranks)):
        assert found == wanted, rank


def test_one_rank(region: int) -> None:
    group = SharedMemoryGroup(region, 0, 1, LONG_S, SLOT)
    x = values_of(0, 2000, torch.bfloat16)
    assert bits(group.all_reduce(x.clone())) == bits(x) == bits(group.all_gather(x))


def wait_for_lost(start: DupFd, file: DupFd, rank: int, stalls: bool) -> tuple[list[str], float]:
    group_of(start, rank, 3).all_reduce(torch.ones(1))  # processes may take long to start
    group = group_of(file, rank, 3, 2.0)
    for _ in range(3):
        group.all_reduce(torch.ones(2000))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP if stalls else signal.SIGKILL)
    messages = []
    started = time.process_time()
    for _ in range(50):
        try:
            group.all_reduce(torch.ones(2000))
        except RankMissing as error:
            messages.append(str(error))
    return messages, time.process_time() - started


@pytest.mark.parametrize("stalls", [False, True], ids=["dies", "stalls"])
def test_rank_that_is_gone(stalls: bool, region: int) -> None:
    """The others name it after their timeout, sleep until then, and fail at once from then on."""
    start = new_region()
    ranks = [Started(wait_for_lost, given(start), given(region), rank, stalls) for rank in range(3)]
    for rank in ranks[:2]:
        messages, busy_s = rank.result()
        assert messages[0].startswith("rank 2 did not take part in a collective within 2 s")
        assert len(messages) == 50 and len(set(messages)) == 1
        assert busy_s < 1.0
    ranks[2].process.kill()
    os.close(start)


# --- links --------------------------------------------------------------------------------------

SIZES = [0, 1, 1000, RING - 8, RING - 7, RING, 3 * RING + 5]


def message(index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    size = SIZES[index % len(SIZES)]
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)


def pass_on(files: tuple[DupFd | None, DupFd | None], stage: int, count: int) -> list[bytes]:
    """The first of three stages sends messages, and each of the others adds one to each byte."""
    receive_fd, send_fd = map(taken, files)
    link = SharedMemoryLink(receive_fd, send_fd, stage, LONG_S, RING)
    found = []
    for index in range(count):
        x = message(index)
        if stage:
            x = link.receive(torch.zeros_like(x)) + 1
        if send_fd is not None:
            link.send(x)
            x.zero_()  # it has left
        else:
            found.append(bits(x))
    return found


def new_ring() -> int:
    fd = os.memfd_create("test")
    os.ftruncate(fd, ring_bytes(RING))
    return fd


def test_links() -> None:
    """Messages of all sizes, longer than the ring too, arrive in order."""
    first, second = new_ring(), new_ring()
    ends = [(None, first), (first, second), (second, None)]
    stages = [
        Started(pass_on, (given(receive), given(send)), stage, 300)
        for stage, (receive, send) in enumerate(ends)
    ]
    *_, found = results(stages)
    assert found == [bits(message(index) + 2) for index in range(300)]
    os.close(first)
    os.close(second)


def test_first_stage_runs_ahead() -> None:
    """What fits into the ring is sent without a receiver."""
    ring = new_ring()
    sender = SharedMemoryLink(None, ring, 0, LONG_S, RING)
    receiver = SharedMemoryLink(ring, None, 1, LONG_S, RING)
    for turn in range(50):
        for i in range(4):
            sender.send(torch.full((100,), float(turn + i)))
        for i in range(4):
            assert (receiver.receive(torch.zeros(100)) == turn + i).all()
    os.close(ring)


def test_silent_stages_are_named() -> None:
    ring = new_ring()
    sender = SharedMemoryLink(None, ring, 0, 0.1, RING)
    receiver = SharedMemoryLink(ring, None, 1, 0.1, RING)
    with pytest.raises(TimeoutError, match=r"stage 0 sent nothing for 0\.1 s"):
        receiver.receive(torch.zeros(1))
    sender.send(torch.zeros(10))
    with pytest.raises(RuntimeError, match="stage 0 did not send the 36 bytes that stage 1 expect"):
        receiver.receive(torch.zeros(9))
    with pytest.raises(TimeoutError, match=r"stage 1 took nothing for 0\.1 s"):
        sender.send(torch.zeros(RING))
    os.close(ring)


def send_half(file: DupFd) -> None:
    fd = taken(file)
    link = SharedMemoryLink(None, fd, 0, LONG_S, RING)
    link.send(torch.zeros(10))
    link.send(torch.zeros(RING))  # does not fit


def test_sender_that_is_killed() -> None:
    """In the middle of a message."""
    ring = new_ring()
    sender = Started(send_half, given(ring))
    # The process may take long to start; what was read is noted in the memory that links share.
    SharedMemoryLink(ring, None, 1, LONG_S, RING).receive(torch.zeros(10))
    sender.process.kill()
    with pytest.raises(RankMissing, match=r"stage 0 sent nothing for 0\.1 s"):
        SharedMemoryLink(ring, None, 1, 0.1, RING).receive(torch.zeros(RING))
    assert sender.result() is None
    os.close(ring)
