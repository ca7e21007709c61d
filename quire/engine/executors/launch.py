"""Starting the processes of ranks: `Launcher`, and `LocalProcesses` on this host."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Protocol

from quire.config.device import core_shares
from quire.config.log import is_server
from quire.config.options import EngineOptions
from quire.engine.executors.channel import Channel
from quire.protocol.codec import line
from quire.protocol.processes import exit_cause
from quire.protocol.ranks import MISSES_OTHERS, Connected, Inherited, StartRank
from quire.worker.groups import new_store, share_memory, shared_files, stage_files
from quire.worker.ring import OrderWriter, new_ring

PROGRAM = "import sys; sys.path[:] = {path!r}; from quire.engine.executors.rank import main; main()"
LOOPBACK = "127.0.0.1"
END_S = 2.0
"""How long a process may take to end by itself."""


class Launcher(Protocol):
    """Processes of all ranks, which are being started. The first message of each is `Hello`."""

    channels: dict[int, Channel]
    """By rank; more may come while ranks are being started."""

    def send(self, order: bytes, deadline: float) -> None:
        """To all ranks; raises `ReadersLate` where some take nothing in, `OSError` where one is
        gone, or once it is told to stop."""

    def ended(self) -> dict[int, str]:
        """Ranks whose process is known to have ended, and how."""

    def missing(self) -> str:
        """What has not come yet, and what to look at."""

    def stop(self, failure: str = "", was_in_service: bool = False) -> None:
        """End all processes. Hosts that were started by hand are told why, unless it was meant."""


class LocalProcesses:
    """All ranks on this host. Orders go through memory that they share."""

    def __init__(self, options: EngineOptions) -> None:
        parallel = options.parallel
        size, num_ranks = parallel.tensor_parallel_size, parallel.num_ranks
        lines = [socket.socketpair() for _ in range(num_ranks)]
        self.channels = {rank: Channel(ours) for rank, (ours, _) in enumerate(lines)}
        self._processes = RankProcesses()
        shared = [orders := new_ring()]
        self._writer = OrderWriter(orders, [ours for ours, _ in lines])
        group_fds: list[int] = []
        link_fds: list[list[int]] = []
        store: tuple[str, int] | None = None
        try:
            if share_memory(options.device.device):
                group_fds, link_fds = shared_files(size, parallel.pipeline_parallel_size)
                shared += [*group_fds, *(fd for fds in link_fds for fd in fds)]
            elif num_ranks > 1:
                self._store = new_store(LOOPBACK, parallel.timeout_s)
                store = LOOPBACK, self._store.port
            starts = rank_starts(options, range(num_ranks))
            for start, (_, theirs) in zip(starts, lines, strict=True):
                start.channel = Inherited(orders, theirs.fileno(), group_fds, link_fds)
                start.store = store
                self._processes.start(start, [*shared, theirs.fileno()])
        except BaseException:
            self.stop()
            raise
        finally:
            for fd in shared:
                os.close(fd)
            for _, theirs in lines:
                theirs.close()

    def send(self, order: bytes, deadline: float) -> None:
        self._writer.write(order, deadline)

    def ended(self) -> dict[int, str]:
        return self._processes.ended()

    def missing(self) -> str:
        return "What their processes wrote may say more."

    def stop(self, failure: str = "", was_in_service: bool = False) -> None:
        self._writer.close()
        for channel in self.channels.values():
            channel.close()
        self._processes.stop()


class RankProcesses:
    """The processes of some ranks on this host."""

    def __init__(self) -> None:
        self._by_rank: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, start: StartRank, fds: Sequence[int] = ()) -> None:
        path = [entry for entry in sys.path if isinstance(entry, str)]
        # Not by `multiprocessing`, which would run the user's own script again.
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(path=path)],
            stdin=subprocess.PIPE,
            pass_fds=fds,
            start_new_session=True,  # so that Ctrl-C reaches the engine alone
        )
        assert process.stdin is not None
        process.stdin.write(line(start))
        process.stdin.flush()
        self._by_rank[start.rank] = process

    def start_all(self, starts: Sequence[StartRank], size: int) -> None:
        """Those of one of several hosts; `size` of them are a stage if it has all of its ranks."""
        is_whole = len(starts) >= size > 1 and len(starts) % size == 0
        shares = is_whole and share_memory(starts[0].options["device"])
        fds = stage_files(size, len(starts) // size) if shares else []
        try:
            for i, start in enumerate(starts):
                start.group_fd = fds[i // size] if shares else None
                self.start(start, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def ended(self) -> dict[int, str]:
        return {
            rank: exit_cause(f"process {process.pid}", process.returncode)
            for rank, process in self._by_rank.items()
            if process.poll() not in (None, MISSES_OTHERS)
        }

    def stop(self) -> None:
        """They end as soon as their orders do; one that does not is killed."""
        deadline = time.monotonic() + END_S
        for process in self._by_rank.values():
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()


def rank_starts(options: EngineOptions, ranks: Sequence[int]) -> list[StartRank]:
    """How the ranks of one host begin, each with its share of this host; their channels are still
    to be set."""
    num_local = len(ranks)
    level = logging.getLogger("quire").getEffectiveLevel()
    quiet = logging.getLevelName(max(level, logging.WARNING))
    starts = [
        StartRank(
            rank,
            options.flat(),
            Connected("", 0, ""),
            device_index=place,
            num_local=num_local,
            log_level=quiet if rank else None,
            logs_as_server=is_server(),
        )
        for place, rank in enumerate(ranks)
    ]
    for start in starts:
        fit_to_host(start, options.device.num_threads or 1)
    return starts


def fit_to_host(start: StartRank, num_threads: int) -> None:
    """Give a rank its share of this host's processors, and of `num_threads` for all ranks here."""
    if start.options["device"] != "cpu":
        return
    num_local = start.num_local
    start.stays_awake = max(num_threads, num_local) < len(os.sched_getaffinity(0))
    start.processors = core_shares(num_local)[start.device_index] if num_local > 1 else []
    start.options["num_threads"] = max(num_threads // num_local, 1)
