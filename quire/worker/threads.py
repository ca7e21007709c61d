"""Who computes with how many CPU threads, for as long as an engine computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from quire.kernels import cpu

MAX_LOADING_THREADS = 8


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Torch computes with `count` threads, and afterwards with as many as before: it belongs to the
    program, not to the engine."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def num_loading_threads(device_type: str, count: int) -> int:
    """How many of `count` threads torch is given to load a model.

    On a CPU, loading is many small operations: where other programs keep the cores busy, waiting
    for a second thread at each of them takes many times longer than one thread does.
    """
    return min(1 if device_type == "cpu" else MAX_LOADING_THREADS, count)


@dataclass(frozen=True)
class ComputingThreads:
    """The threads of one engine. Another one in the process may have others."""

    count: int
    is_native: bool
    """Whether the native library computes the layers, and not torch."""

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Gives the threads to what computes the layers, the native library or torch.

        Torch gets one beside the library: after a parallel operation its threads wait awake for
        many milliseconds, on the cores of the library's.
        """
        cpu.set_num_threads(self.count if self.is_native else None)
        with torch_threads(1 if self.is_native else self.count):
            yield
