"""Ranks of a model as threads of one process; collectives and links are written out by hand."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from quire.layers.parallel import Parallel, Stage
from quire.layers.quantization.unquantized import Unquantized
from quire.layers.weights import Build

T = TypeVar("T")
TIMEOUT_S = 120


class ThreadGroup:
    """Where the ranks of a stage swap tensors: each brings one and leaves with all of them."""

    is_capturable = False

    def __init__(self, barrier: threading.Barrier, brought: list[torch.Tensor], rank: int) -> None:
        self.barrier, self.brought, self.rank = barrier, brought, rank
        self.num_gathered = 0
        """Numbers that this rank has given to `all_gather`."""

    def exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.brought[self.rank] = x.clone()
        self.barrier.wait()
        everything = list(self.brought)
        self.barrier.wait()
        return everything

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.exchange(x)).sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.num_gathered += x.numel()
        return torch.stack(self.exchange(x))

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        return x.copy_(self.exchange(x)[source])


class ThreadLink:
    """Queues from the stage before, and to the next."""

    def __init__(
        self, before: queue.Queue[torch.Tensor], behind: queue.Queue[torch.Tensor]
    ) -> None:
        self.before, self.behind = before, behind

    def send(self, x: torch.Tensor) -> None:
        self.behind.put(x.clone())

    def receive(self, out: torch.Tensor) -> torch.Tensor:
        given = self.before.get(timeout=TIMEOUT_S)
        assert given.shape == out.shape and given.dtype == out.dtype
        return out.copy_(given)


def on_ranks(size: int, work: Callable[[Parallel], T], num_stages: int = 1) -> list[T]:
    """Runs `work` once per rank, all at the same time; returns the results in the order of stages
    and, within each, of ranks."""
    queues = [[queue.Queue[torch.Tensor]() for _ in range(size)] for _ in range(num_stages + 1)]
    parallels: list[Parallel] = []
    barriers = [threading.Barrier(size, timeout=TIMEOUT_S) for _ in range(num_stages)]
    for index, barrier in enumerate(barriers):
        brought = [torch.empty(0)] * size
        for rank in range(size):
            link = ThreadLink(queues[index][rank], queues[index + 1][rank])
            stage = Stage(index, num_stages, link if num_stages > 1 else None)
            group = ThreadGroup(barrier, brought, rank)
            parallels.append(Parallel(rank, size, group if size > 1 else None, stage))

    def run(parallel: Parallel) -> T:
        try:
            return work(parallel)
        except BaseException:
            for barrier in barriers:
                barrier.abort()  # the others need not wait for one that failed
            raise

    with ThreadPoolExecutor(len(parallels)) as pool:
        futures = [pool.submit(run, parallel) for parallel in parallels]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, (threading.BrokenBarrierError, queue.Empty)):
            raise error
    return [future.result() for future in futures]


def build_for(parallel: Parallel | None = None) -> Build:
    """Unquantised layers in float32."""
    cpu, method = torch.device("cpu"), Unquantized()
    return Build(torch.float32, cpu, parallel or Parallel(0, 1), lambda path: method)
