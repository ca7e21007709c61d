"""`MultiprocessExecutor`: one worker process for each rank on this host."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from typing import Any

from quire.config.model import ModelConfig
from quire.config.options import EngineOptions
from quire.engine.executors.ring import OrderWriter, new_ring
from quire.kernels.cpu.collectives import region_bytes
from quire.protocol.codec import Decoder, encode, line
from quire.protocol.errors import EngineDeadError
from quire.protocol.output import DeviceMemory
from quire.protocol.plan import Int32Array, StepPlan, StepResult, TokenMasks
from quire.protocol.ranks import (
    Answer,
    Call,
    Execute,
    Order,
    RankFailed,
    Returned,
    Sample,
    Sampled,
    StartRank,
)

logger = logging.getLogger(__name__)

PROGRAM = "import sys; sys.path[:] = {path!r}; from quire.engine.executors.rank import main; main()"
SILENCE_S = 5.0


class _Rank:
    """A process and what it has answered."""

    def __init__(self, process: subprocess.Popen[bytes], line: socket.socket) -> None:
        self.process, self.line = process, line
        self._buffer = bytearray()

    def receive(self) -> list[bytes]:
        """Complete messages of what has arrived; raises `EOFError` at the end."""
        data = self.line.recv(1 << 20)
        if not data:
            raise EOFError
        self._buffer += data
        found = []
        while len(self._buffer) >= 8:
            end = 8 + int.from_bytes(self._buffer[:8], "little")
            if len(self._buffer) < end:
                break
            found.append(bytes(self._buffer[8:end]))
            del self._buffer[:end]
        return found


class MultiprocessExecutor:
    def __init__(
        self, options: EngineOptions, model_config: ModelConfig, *, fits_max_model_len: bool = False
    ) -> None:
        size = options.parallel.tensor_parallel_size
        self._timeout_s = 600.0
        self._decoder: Decoder[Answer] = Decoder(Answer)
        self._results: deque[StepResult] = deque()
        self._returned: list[deque[Any]] = [deque() for _ in range(size)]
        self._failure: str | None = None
        self._ranks: list[_Rank] = []
        self._start(options, size)
        self._call("load")
        cache_bytes = min(self._call("profile"))
        arguments = {"cache_bytes": cache_bytes, "fits_max_model_len": fits_max_model_len}
        self.max_model_len, self.num_blocks = self._call("size_cache", **arguments)[0]
        self._call("allocate", num_blocks=self.num_blocks, max_model_len=self.max_model_len)
        windows, self.groups_prefixes, self.graph_tokens = self._call("capture")[0]
        self.kv_windows: tuple[int | None, ...] = tuple(windows)

    def _start(self, options: EngineOptions, size: int) -> None:
        orders, collectives = new_ring(), os.memfd_create("quire-collectives")
        os.ftruncate(collectives, region_bytes(size))
        path = [entry for entry in sys.path if isinstance(entry, str)]
        self._selector = selectors.DefaultSelector()
        for rank in range(size):
            ours, theirs = socket.socketpair()
            fds = (orders, collectives, theirs.fileno())
            # Not by `multiprocessing`, which would run the user's own script again.
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM.format(path=path)],
                stdin=subprocess.PIPE,
                pass_fds=fds,
                start_new_session=True,
            )
            theirs.close()
            assert process.stdin is not None
            level = logging.getLogger("quire").getEffectiveLevel()
            start = StartRank(
                rank,
                size,
                options.flat(),
                orders,
                fds[2],
                collectives,
                self._timeout_s,
                logging.getLevelName(max(level, logging.WARNING)) if rank else None,
            )
            process.stdin.write(line(start))
            process.stdin.flush()
            self._ranks.append(_Rank(process, ours))
            self._selector.register(ours, selectors.EVENT_READ, rank)
        self._writer = OrderWriter(orders, [one.line for one in self._ranks])

    def execute(self, plan: StepPlan) -> None:
        self._send(Execute(plan))

    def token_masks(self, lines: Int32Array, num_words: int) -> TokenMasks:
        import numpy as np

        return TokenMasks(lines, np.empty((len(lines), num_words), np.int32))

    def sample(self, step: int, masks: TokenMasks | None = None) -> _PendingResult:
        given = () if masks is None else (masks.lines, masks.bits)
        self._send(Sample(step, *given))
        return _PendingResult(self)

    def result(self) -> StepResult:
        while not self._results:
            self._receive(time.monotonic() + self._timeout_s)
        return self._results.popleft()

    def memory(self) -> DeviceMemory:
        import msgspec

        return msgspec.convert(self._call("memory")[0], DeviceMemory)

    def shutdown(self) -> None:
        for rank in self._ranks:
            rank.line.close()
        for rank in self._ranks:
            try:
                rank.process.wait(5)
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
        self._ranks = []

    def _call(self, name: str, **arguments: Any) -> list[Any]:
        """What each rank returns."""
        self._send(Call(name, arguments))
        deadline = time.monotonic() + self._timeout_s
        while not all(self._returned):
            self._receive(deadline)
        return [values.popleft() for values in self._returned]

    def _send(self, order: Order) -> None:
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        self._writer.write(encode(order), time.monotonic() + self._timeout_s)

    def _receive(self, deadline: float) -> None:
        """Wait for the next answers."""
        events = self._selector.select(1.0)
        for key, _ in events:
            rank = key.data
            try:
                messages = self._ranks[rank].receive()
            except (EOFError, OSError):
                self._fail(f"rank {rank} ended with status {self._ranks[rank].process.wait()}")
            for data in messages:
                answer = self._decoder.decode(data)
                if isinstance(answer, Sampled):
                    self._results.append(answer.result)
                elif isinstance(answer, Returned):
                    self._returned[rank].append(answer.value)
                else:
                    assert isinstance(answer, RankFailed)
                    raise answer.error.to_error()
        if events:
            return
        silent = [rank for rank, s in enumerate(self._writer.silence_s()) if s > SILENCE_S]
        if silent:
            self._fail(f"rank {silent[0]} has not been heard of for {SILENCE_S:g} s")
        if time.monotonic() > deadline:
            self._fail(f"no rank answered within {self._timeout_s:g} s")

    def _fail(self, cause: str) -> None:
        self._failure = cause
        for rank in self._ranks:
            rank.process.kill()
        raise EngineDeadError(cause)


class _PendingResult:
    def __init__(self, executor: MultiprocessExecutor) -> None:
        self._executor = executor

    def result(self) -> StepResult:
        return self._executor.result()
