"""Functions of tests that run in processes of their own, several at a time."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from typing import Any

import torch

WAIT_S = 200.0
# Processes are forked from one that has imported all that takes long, and has no threads.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch.distributed", "quire.worker.groups"])


@dataclass(frozen=True)
class Failed:
    """What a process raised."""

    kind: str
    message: str


class Started:
    """A process that runs `work(*arguments)`."""

    def __init__(self, work: Callable[..., Any], *arguments: Any) -> None:
        self._results, theirs = CONTEXT.Pipe(duplex=False)
        self.process = CONTEXT.Process(target=_run, args=(work, arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def result(self) -> Any:
        """What it returns, or `Failed`; None if it was killed."""
        try:
            if not self._results.poll(WAIT_S):
                raise AssertionError(f"a process said nothing for {WAIT_S:g} s")
            return self._results.recv()
        except EOFError:
            return None
        finally:
            self.process.kill()
            self.process.join()


def _run(work: Callable[..., Any], arguments: tuple[Any, ...], results: Connection) -> None:
    torch.set_num_threads(1)
    try:
        result = work(*arguments)
    except Exception as error:
        traceback.print_exc()
        result = Failed(type(error).__name__, str(error))
    results.send(result)
    os._exit(0)


def results(started: Sequence[Started]) -> list[Any]:
    return [one.result() for one in started]


def given(fd: int | None) -> DupFd | None:
    """An open file, as an argument of `work`, which opens it by `taken`."""
    return None if fd is None else DupFd(fd)


def taken(file: DupFd | None) -> int | None:
    return None if file is None else file.detach()


def free_port() -> int:
    """For a program that has to be told one. The system gives out higher ones by itself, so that
    nothing takes it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue  # something listens there
        return port


@contextmanager
def closed_port() -> Iterator[int]:
    """One at which nothing listens meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]
