"""The process that prepares requests: `python -m quire.server.preparation.process`.

It loads the tokenizer once and forks. A fork does one job at a time, whatever that costs: it can be
killed in the middle of any of them, and what a job took of memory goes with it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from quire.config.device import tokenise_on_one_thread
from quire.protocol.codec import Decoder, encode
from quire.protocol.errors import QuireError, RequestError
from quire.server import app  # its routes register what they prepare
from quire.server.preparation.prepare import Preparation, PreparationSettings
from quire.server.preparation.wire import (
    DONE,
    ENDED,
    FORK,
    FRAME,
    HEAD,
    JOB,
    MAX_TEMPLATE_S,
    ORDER,
    READY,
    TOO_MUCH_MEMORY,
    End,
    Log,
    Refusal,
    frame,
    result_frames,
)
from quire.server.routes import PREPARED_KINDS

assert app

CONTROL = 0
"""The file that orders come from; a socket, as files come with them."""
MAX_BYTES = 2 << 30
"""Of address space, for one job beyond what the process has at its start."""
MAX_GROWTH_BYTES = 128 << 20
"""A fork that has needed so much more memory than at its start is replaced."""
MAX_WAIT = 4
"""Times as long may pass, where others take the cores."""
MAX_LABEL = 1000
NICENESS = 10
"""Of large jobs: streams come first."""


@dataclass
class Fork:
    pid: int
    label: mmap.mmap
    """What it is doing that has a limit, as text that ends with a zero byte."""


class ForkServer:
    """Forks when it is told to, and ends forks when it is told to, or with itself."""

    def __init__(self, control: socket.socket, preparation: Preparation) -> None:
        self._control = control
        self._preparation = preparation
        self._forks: dict[int, Fork] = {}

    def run(self) -> None:
        self._control.sendall(ENDED.pack(READY, 0, 0))
        try:
            while order := self._next_order():
                kind, number, files = order
                if kind == FORK:
                    self._fork(number, files[0])
                else:
                    self._answer_end(number)
        finally:
            for fork in self._forks.values():
                os.kill(fork.pid, signal.SIGKILL)

    def _next_order(self) -> tuple[bytes, int, list[int]] | None:
        data, files = b"", list[int]()
        while len(data) < ORDER.size:
            part, found, _, _ = socket.recv_fds(self._control, ORDER.size - len(data), 1)
            if not part:
                return None
            data += part
            files += found
        kind, number = ORDER.unpack(data)
        return kind, number, files

    def _fork(self, number: int, file: int) -> None:
        label = mmap.mmap(-1, MAX_LABEL)
        pid = os.fork()
        if pid == 0:
            self._control.close()
            _serve_and_exit(socket.socket(fileno=file), self._preparation, label)
        os.close(file)
        self._forks[number] = Fork(pid, label)

    def _answer_end(self, number: int) -> None:
        fork = self._forks.pop(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(fork.pid, signal.SIGKILL)  # does nothing to one that has ended by itself
        status = os.waitstatus_to_exitcode(os.waitpid(fork.pid, 0)[1])
        label = fork.label[:].partition(b"\0")[0]
        fork.label.close()
        self._control.sendall(ENDED.pack(number, status, len(label)) + label)


# --- in a fork --------------------------------------------------------------------------------


def _serve_and_exit(jobs: socket.socket, preparation: Preparation, label: mmap.mmap) -> NoReturn:
    try:
        preparation.limited = _TimeLimit(label).on
        _limit_memory()
        logs = _CollectedLogs()
        _Worker(jobs, preparation, logs).run()
        os._exit(0)
    except (BrokenPipeError, ConnectionResetError):  # the API process is gone
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


class _TimeLimit:
    """Ends the process if what runs inside takes too long: nothing else ends a long calculation."""

    def __init__(self, label: mmap.mmap) -> None:
        self._label = label

    @contextlib.contextmanager
    def on(self, what: str) -> Iterator[None]:
        data = what.encode("utf-8", "replace")[: MAX_LABEL - 1] + b"\0"
        self._label[: len(data)] = data
        signal.setitimer(signal.ITIMER_PROF, MAX_TEMPLATE_S)
        signal.setitimer(signal.ITIMER_REAL, MAX_WAIT * MAX_TEMPLATE_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._label[:1] = b"\0"


class _CollectedLogs(logging.Handler):
    """Messages go to the API process, which knows what it has said before."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Log] = []
        logger = logging.getLogger("quire")
        logger.handlers, logger.propagate = [self], False
        logger.setLevel(logging.DEBUG)  # the API process leaves out what it is not to show

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.records) < 20:
            self.records.append(Log(record.levelno, record.getMessage()))

    def take(self) -> list[Log]:
        taken, self.records = self.records, []
        return taken


class _Worker:
    def __init__(self, jobs: socket.socket, preparation: Preparation, logs: _CollectedLogs) -> None:
        self._jobs = jobs
        self._preparation = preparation
        self._logs = logs
        self._size_at_start = _peak_bytes()

    def run(self) -> None:
        while head := _read(self._jobs, JOB.size):
            path_size, body_size, is_large = JOB.unpack(head)
            if is_large:
                os.nice(NICENESS)
                gc.disable()  # it would look through millions of lists again and again
            path = bytes(_read(self._jobs, path_size)).decode()
            data = _read(self._jobs, body_size)
            for part in self._answer(path, data):
                self._jobs.sendall(part)
            is_spent = _peak_bytes() - self._size_at_start > MAX_GROWTH_BYTES
            self._jobs.sendall(frame(DONE, encode(End(self._logs.take(), is_spent))))

    def _answer(self, path: str, data: bytearray) -> Iterator[bytes]:
        try:
            made = self._preparation.prepare(PREPARED_KINDS[path], bytes(data))
            frames = list(result_frames(made))
        except (QuireError, RecursionError) as error:
            refusal = Refusal.of(error)
        except MemoryError:
            refusal = Refusal.of(RequestError(TOO_MUCH_MEMORY))
        except Exception:
            refusal = Refusal("", traceback.format_exc())
        else:
            yield from frames
            return
        yield frame(HEAD, encode(refusal))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def _limit_memory() -> None:
    with contextlib.suppress(OSError, ValueError, IndexError):  # systems without /proc, or macOS
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        allowed = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = used + MAX_BYTES
        if allowed != resource.RLIM_INFINITY:
            limit = min(limit, allowed)
        resource.setrlimit(resource.RLIMIT_AS, (limit, allowed))


def _read(source: socket.socket, size: int) -> bytearray:
    """Exactly so many bytes, or none if there are no more."""
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = source.recv_into(view[done:])
        if not count:
            return bytearray()
        done += count
    return data


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # it ends with the API process, not before
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGPROF, signal.SIGALRM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF, signal.SIGALRM])
    tokenise_on_one_thread()
    control = socket.socket(fileno=CONTROL)
    head = _read(control, FRAME.size)
    if not head:
        return
    _, size = FRAME.unpack(head)
    data: Any = _read(control, size)
    settings: Decoder[PreparationSettings] = Decoder(PreparationSettings)
    server = ForkServer(control, settings.decode(bytes(data)).preparation())
    del data
    gc.collect()
    gc.freeze()  # so that forks share what is there
    with contextlib.suppress(ConnectionError, struct.error):
        server.run()


if __name__ == "__main__":
    main()
