"""The process behind `Sandbox`. Each grammar is compiled in a fork that the clock ends: the
vocabulary stays, whatever becomes of the grammar."""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NoReturn

from quire.engine.structured_output.grammar_source import (
    STACK_BYTES,
    build,
    grammar_text,
    make_tokenizer,
    submit,
    where,
)
from quire.engine.structured_output.sandbox import Case, StartSandbox, Verdict
from quire.protocol.codec import line, read_line
from quire.protocol.errors import RequestError

MAX_COMPILE_S = 0.7
"""So that an answer about a grammar that costs too much comes within a second."""
MAX_BYTES = STACK_BYTES + (1 << 30)
"""Of address space."""
ORDERS = 0
"""The file that orders come from."""
ANSWERS = 1
"""The file that verdicts go to."""


@dataclass
class Fork:
    """A process that compiles a grammar; it writes its verdict into a pipe."""

    case: Case
    pid: int
    written: bytes = b""

    def verdict(self) -> Verdict:
        """Once it has ended."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if code == 0:
            verdict: Verdict = read_line(self.written, Verdict)
            return verdict
        limit = f"{MAX_COMPILE_S:g} s" if code == -signal.SIGALRM else "the memory there is for it"
        name = where(self.case.wanted)
        return Verdict(
            self.case.number,
            refusal=f"{name} takes more than {limit} to compile; use a simpler one.",
        )


class SandboxProcess:
    def __init__(self, start: StartSandbox) -> None:
        self._tokenizer = make_tokenizer(start.vocabulary)
        self._settings = start.settings

    def run(self, orders: bytes) -> None:
        """Judge grammars until no more can come. `orders` are the bytes that were read already."""
        with selectors.DefaultSelector() as sources:
            sources.register(ORDERS, selectors.EVENT_READ)
            while True:
                *cases, orders = orders.split(b"\n")
                for case in cases:
                    pipe, fork = self._fork(read_line(case, Case))
                    sources.register(pipe, selectors.EVENT_READ, fork)
                for key, _ in sources.select():
                    data = os.read(key.fd, 1 << 20)
                    if key.fd == ORDERS:
                        if not data:
                            return
                        orders += data
                    elif data:
                        key.data.written += data
                    else:
                        sources.unregister(key.fd)
                        os.close(key.fd)
                        _answer(key.data.verdict())

    def _fork(self, case: Case) -> tuple[int, Fork]:
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._compile_and_exit(case, write_end)
        os.close(write_end)
        return read_end, Fork(case, pid)

    # --- in a fork ------------------------------------------------------------------------------

    def _compile_and_exit(self, case: Case, pipe: int) -> NoReturn:
        """Write a verdict and end. A grammar that takes too much time or memory ends it before."""
        try:
            signal.setitimer(signal.ITIMER_REAL, MAX_COMPILE_S)
            _limit_memory()
            nowhere = os.open(os.devnull, os.O_RDWR)
            for file in (0, 1, 2):  # a panic would be printed, and pipes must end with this process
                os.dup2(nowhere, file)
            verdict = submit(ThreadPoolExecutor(1), self._verdict, case).result()
            with open(pipe, "wb") as answer:
                answer.write(line(verdict))
            os._exit(0)
        finally:
            os._exit(1)

    def _verdict(self, case: Case) -> Verdict:
        name = where(case.wanted)
        try:
            text = grammar_text(case.wanted, self._settings)
            build(self._tokenizer, text, name)
        except RequestError as error:
            refusal = str(error)
        except (ValueError, RecursionError) as error:
            refusal = f"{name} cannot be read: {error}."
        except BaseException as error:  # also a panic of llguidance, which is no Exception
            refusal = f"{name} cannot be compiled: {error!r:.200}"
        else:
            return Verdict(case.number, text)
        return Verdict(case.number, refusal=refusal)


def _limit_memory() -> None:
    allowed = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = MAX_BYTES if allowed == resource.RLIM_INFINITY else min(MAX_BYTES, allowed)
    with contextlib.suppress(ValueError):  # macOS takes no limit below what is mapped already
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _answer(verdict: Verdict) -> None:
    data = memoryview(line(verdict))
    while data:
        data = data[os.write(ANSWERS, data) :]


def _first_order() -> tuple[bytes, bytes]:
    """And what came after it; empty if the engine ended before it gave one."""
    parts: list[bytes] = []
    while not parts or b"\n" not in parts[-1]:
        parts.append(os.read(ORDERS, 1 << 20))
        if not parts[-1]:
            return b"", b""
    first, rest = b"".join(parts).split(b"\n", 1)
    return first, rest


def main() -> None:
    # A program may ignore signals, and the processes that it starts then do.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    first, rest = _first_order()
    if not first:
        return
    try:
        process = SandboxProcess(read_line(first, StartSandbox))
    except RequestError:
        return  # the engine, which makes a tokenizer too, says what is wrong
    with contextlib.suppress(BrokenPipeError):  # the engine ended meanwhile
        process.run(rest)
