"""One rank of a model in a process of its own: `python -m quire.engine.executors.rank`, started by
`MultiprocessExecutor`. It ends when its orders do, and so dies with its parent."""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import sys
import threading
from dataclasses import replace
from typing import Any

from quire.config.log import configure_logging
from quire.config.options import EngineOptions
from quire.engine.executors.ring import OrderReader
from quire.engine.startup import read_model
from quire.kernels.cpu.collectives import SharedMemoryGroup
from quire.layers.parallel import Parallel
from quire.protocol.codec import Decoder, encode, read_line
from quire.protocol.messages import ErrorRecord
from quire.protocol.plan import TokenMasks
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
from quire.worker.device import detect_device
from quire.worker.model_runner import PendingStep
from quire.worker.worker import Worker, num_loading_threads, torch_threads

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0


class RankLoop:
    """Does what it is ordered to, in order."""

    def __init__(self, start: StartRank) -> None:
        self._start = start
        self._answers = socket.socket(fileno=start.answers_fd)
        self._orders = OrderReader(start.orders_fd, start.rank, self._answers)
        self._decoder: Decoder[Order] = Decoder(Order)
        self._pending: queue.SimpleQueue[PendingStep] = queue.SimpleQueue()
        threading.Thread(target=self._say_alive, name="quire-heartbeat", daemon=True).start()

    def run(self) -> int:
        try:
            self._build()
            while (data := self._orders.read()) is not None:
                self._obey(self._decoder.decode(data))
        except Exception as error:
            logger.debug("rank %d fails", self._start.rank, exc_info=error)
            self._answer(RankFailed(ErrorRecord.of(error)))
            return 1
        return 0

    def _build(self) -> None:
        start = self._start
        options = EngineOptions().replace(**start.options)
        device = detect_device(options.device.device)
        if device.type == "cuda":
            device = replace(device, index=start.rank)
        group = SharedMemoryGroup(start.collectives_fd, start.rank, start.size, start.timeout_s)
        parallel = Parallel(start.rank, start.size, group)
        self._worker = Worker(options, read_model(options), device, parallel)
        self._loading = num_loading_threads(device.type, options.device.num_threads or 1)

    def _obey(self, order: Order) -> None:
        if isinstance(order, Execute):
            with self._worker.at_work():
                self._worker.runner.execute(order.plan)
        elif isinstance(order, Sample):
            self._sample(order)
        else:
            with torch_threads(self._loading):
                self._answer(Returned(self._call(order)))

    def _sample(self, order: Sample) -> None:
        runner = self._worker.runner
        masks: TokenMasks | None = None
        if order.mask_lines is not None and order.mask_bits is not None and self._start.rank == 0:
            masks = runner.token_masks(order.mask_lines, order.mask_bits.shape[1])
            masks.bits[:] = order.mask_bits
        with self._worker.at_work():
            pending = runner.sample(masks)
        if self._start.rank == 0:
            self._answer(Sampled(pending.result()))

    def _call(self, order: Call) -> Any:
        worker = self._worker
        if order.name == "load":
            worker.load()
            return None
        if order.name == "profile":
            return worker.profile()
        if order.name == "size_cache":
            return worker.size_cache(**order.arguments)
        if order.name == "allocate":
            worker.allocate(**order.arguments)
            return None
        if order.name == "capture":
            worker.capture()
            windows = worker.layout.windows
            return windows, worker.groups_prefixes, worker.graph_tokens
        assert order.name == "memory", order.name
        return worker.memory()

    def _answer(self, answer: Answer) -> None:
        data = encode(answer)
        self._answers.sendall(len(data).to_bytes(8, "little") + data)

    def _say_alive(self) -> None:
        while True:
            self._orders.say_alive()
            threading.Event().wait(HEARTBEAT_S)


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: None)  # the parent says when to end
    start: StartRank = read_line(sys.stdin.buffer.readline(), StartRank)
    configure_logging(start.log_level, for_server=True)
    code = RankLoop(start).run()
    sys.stderr.flush()
    os._exit(code)  # nothing is worth waiting for


if __name__ == "__main__":
    sys.exit(main())
