"""One rank of a model in a process of its own, which a `Launcher` starts. It ends when its orders
do, and so dies with the engine."""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from quire.config.digests import model_digests
from quire.config.log import configure_logging
from quire.config.model import read_model
from quire.config.options import EngineOptions
from quire.engine.executors.channel import CUT_S, Channel, notice_cut
from quire.protocol import __version__
from quire.protocol.codec import Decoder, encode, read_line
from quire.protocol.errors import QuireError, RankMissing
from quire.protocol.messages import ErrorRecord
from quire.protocol.plan import TokenMasks
from quire.protocol.ranks import (
    MISSES_OTHERS,
    AdapterLoaded,
    Alive,
    Answer,
    Call,
    DropAdapter,
    Execute,
    Hello,
    Inherited,
    LoadAdapter,
    Order,
    RankFailed,
    Returned,
    Sample,
    Sampled,
    Sampling,
    StartRank,
)
from quire.worker.adapters import HostAdapters
from quire.worker.device import detect_device
from quire.worker.groups import join, shown_address
from quire.worker.model_runner import PendingStep
from quire.worker.ring import OrderReader
from quire.worker.worker import Worker, num_loading_threads, torch_threads

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
AWAKE_S = 0.002
"""How long a rank looks for the next order before it sleeps: the engine needs a millisecond between
two steps of many requests, and waking up takes a tenth of one."""


class RankLoop:
    """Does what it is ordered to, in order."""

    def __init__(self, start: StartRank) -> None:
        self._start, self._parent = start, os.getppid()
        self._orders: OrderReader | Channel
        if isinstance(start.channel, Inherited):
            line = socket.socket(fileno=start.channel.answers_fd)
            self._channel = Channel(line)
            awake_s = AWAKE_S if start.stays_awake else 0.0
            self._orders = OrderReader(start.channel.orders_fd, start.rank, line, awake_s)
        else:
            line = socket.create_connection((start.channel.host, start.channel.port), CUT_S)
            line.settimeout(None)
            notice_cut(line, CUT_S, is_read=True)
            self._channel = self._orders = Channel(line)
        self._decoder: Decoder[Order] = Decoder(Order)
        self._pending: queue.SimpleQueue[PendingStep] = queue.SimpleQueue()

    def run(self) -> int:
        try:
            self._say_hello()
            threading.Thread(target=self._say_alive, name="quire-heartbeat", daemon=True).start()
            while (data := self._orders.read()) is not None:
                self._obey(self._decoder.decode(data))
        except Exception as error:
            logger.debug("rank %d fails", self._start.rank, exc_info=error)
            return self._say_failed(error)
        return 0

    def _say_failed(self, error: Exception) -> int:
        """Returns the exit status."""
        self._answer(RankFailed(ErrorRecord.of(error)))
        return MISSES_OTHERS if isinstance(error, RankMissing) else 1

    def _say_hello(self) -> None:
        self._options = EngineOptions().replace(**self._start.options)
        device = detect_device(self._options.device.device, self._start.device_index)
        if device.type == "cpu":
            device = replace(device, num_sharing=self._start.num_local)
        self._device, self._config = device, read_model(self._options.model)
        path, load_format = self._config.source.path, self._options.model.load_format
        channel = self._start.channel
        self._answer(
            Hello(
                self._start.rank,
                socket.gethostname(),
                os.getpid(),
                __version__,
                device.name,
                model_digests(self._config.raw, path, load_format),
                "" if isinstance(channel, Inherited) else channel.secret,
            )
        )

    def _obey(self, order: Order) -> None:
        if isinstance(order, Execute):
            with self._worker.at_work():
                self._worker.runner.execute(order.plan)
        elif isinstance(order, Sample):
            self._sample(order)
        elif isinstance(order, LoadAdapter):
            loading = self._adapters.load(order.name, order.folder, order.digest)
            loading.add_done_callback(lambda done: self._say_loaded(order.number, done))
        elif isinstance(order, DropAdapter):
            self._adapters.drop(order.digest)
        else:
            with torch_threads(self._num_loading_threads):
                self._answer(Returned(self._call(order)))

    @property
    def _adapters(self) -> HostAdapters:
        adapters = self._worker.adapters
        assert adapters is not None, "the ranks were started without adapters"
        return adapters

    def _say_loaded(self, number: int, done: Future[None]) -> None:
        error = done.exception()
        assert error is None or isinstance(error, Exception)
        self._answer(AdapterLoaded(number, None if error is None else ErrorRecord.of(error)))

    @property
    def _num_loading_threads(self) -> int:
        return num_loading_threads(self._device.type, self._options.device.num_threads or 1)

    def _sample(self, order: Sample) -> None:
        runner = self._worker.runner
        if self._samples and self._start.stays_awake:
            self._answer(Sampling())
        masks: TokenMasks | None = None
        if order.mask_lines is not None and order.mask_bits is not None and self._samples:
            masks = runner.token_masks(order.mask_lines, order.mask_bits.shape[1])
            masks.bits[:] = order.mask_bits
        with self._worker.at_work():
            pending = runner.sample(masks)
        if not self._samples:
            return
        if self._device.type == "cuda":
            self._pending.put(pending)  # the next step can be launched meanwhile
        else:
            self._answer(Sampled(pending.result()))

    def _call(self, order: Call) -> Any:
        """A phase of the worker's start, or a question."""
        if order.name == "join":
            return self._join()
        worker = self._worker
        if order.name == "load":
            worker.load()
            return worker.memory().weights
        if order.name == "profile":
            return worker.size_cache(worker.profile(), **order.arguments)
        if order.name == "allocate":
            worker.allocate(**order.arguments)
            return order.arguments["num_blocks"] * worker.layout.bytes_per_block
        if order.name == "capture":
            worker.capture()
            # Whatever exists now lives as long as the worker: the collector need not look at it.
            gc.collect()
            gc.freeze()
            windows = worker.layout.windows
            return windows, worker.groups_prefixes, worker.graph_tokens
        if order.name == "expert_counts":
            return worker.expert_counts()
        assert order.name == "memory", order.name
        return worker.memory()

    def _join(self) -> None:
        """Meet the other ranks."""
        parallel = join(self._start, self._options.parallel, self._device)
        self._samples = parallel.rank == 0 and parallel.stage.is_last
        self._worker = Worker(self._options, self._config, self._device, parallel)
        if self._samples and self._device.type == "cuda":
            threading.Thread(target=self._send_results, name="quire-results", daemon=True).start()

    def _send_results(self) -> None:
        try:
            while True:
                self._answer(Sampled(self._pending.get().result()))
        except Exception as error:
            os._exit(self._say_failed(error))

    def _answer(self, answer: Answer) -> None:
        try:
            self._channel.send(encode(answer))
        except OSError:
            os._exit(1)  # the engine is gone, and with it the reason to go on

    def _say_alive(self) -> None:
        # A process that the engine's has forked may keep the channel open after its end.
        while not self._channel.is_closed() and os.getppid() == self._parent:
            self._answer(Alive())
            time.sleep(HEARTBEAT_S)
        os._exit(1)  # a collective may keep the other thread from noticing


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: None)  # the engine says when to end
    start: StartRank = read_line(sys.stdin.buffer.readline(), StartRank)
    part = f"rank {start.rank}: " if start.rank else ""
    configure_logging(start.log_level, for_server=start.logs_as_server, part=part)
    code = serve_rank(start)
    sys.stderr.flush()
    os._exit(code)  # nothing is worth waiting for


def serve_rank(start: StartRank) -> int:
    if start.processors:
        os.sched_setaffinity(0, start.processors)
    try:
        loop = RankLoop(start)
    except OSError as error:
        raise QuireError(_not_reached(start, error)) from None
    return loop.run()


def _not_reached(start: StartRank, error: OSError) -> str:
    cause = f"rank {start.rank} on {socket.gethostname()} cannot reach its engine"
    if isinstance(start.channel, Inherited):
        return f"{cause}: {error}"
    address = shown_address(start.channel.host, start.channel.port)
    return (
        f"{cause} at {address}: {error}. Check that no firewall is between the hosts, and that "
        "master_addr is an address of host 0 that this one reaches."
    )


if __name__ == "__main__":
    sys.exit(main())
