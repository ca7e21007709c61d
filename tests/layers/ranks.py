"""Tensor-parallel ranks as threads of one process, whose collectives are written out by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from quire.layers.parallel import Parallel
from quire.layers.quantization.unquantized import Unquantized
from quire.layers.weights import Build

T = TypeVar("T")


class Meeting:
    """Where the ranks swap tensors: each rank brings one and leaves with all of them."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30)
        self.brought: list[torch.Tensor | None] = [None] * size

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self.brought[rank] = x.clone()
        self.barrier.wait()
        everything = list(self.brought)
        self.barrier.wait()
        return everything


@dataclass(frozen=True)
class ThreadRank(Parallel):
    meeting: Meeting | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.meeting.exchange(self.rank, x)).sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.meeting.exchange(self.rank, x), dim=-1)


def on_ranks(size: int, work: Callable[[Parallel], T]) -> list[T]:
    """Runs `work` once per rank, all at the same time; returns the results in rank order."""
    meeting = Meeting(size)

    def run(rank: int) -> T:
        return work(ThreadRank(rank, size, meeting=meeting))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def build_for(parallel: Parallel | None = None) -> Build:
    """Unquantised layers in float32."""
    cpu, method = torch.device("cpu"), Unquantized()
    return Build(torch.float32, cpu, parallel or Parallel(0, 1), lambda path: method)
