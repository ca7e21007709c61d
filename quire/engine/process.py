"""The engine in a process of its own: `python -m quire.engine.process`, started by the server.

Clients talk to it over a local socket (`protocol/messages.py`), the supervisor over pipes
(`protocol/messages.py`). It ends when its standard input does, and so dies with its parent.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import BinaryIO

import msgspec
import zmq

from quire.config.log import configure_logging
from quire.config.options import EngineOptions
from quire.engine.core import EngineCore
from quire.engine.startup import find_model, start_engine
from quire.protocol.codec import Decoder, encode, line, read_line
from quire.protocol.errors import QuireError
from quire.protocol.messages import (
    NOTHING,
    AbortRequest,
    AddRequest,
    EngineReady,
    ErrorRecord,
    Failed,
    Outputs,
    Reply,
    StartEngine,
    ToEngine,
    client_identity,
)
from quire.protocol.output import StepOutput

logger = logging.getLogger(__name__)

LAST_S = 3.0
"""How long the end of ranks may take."""


class EngineLoop:
    """Steps the engine while there is work, looking at the socket in between; waits on the socket
    while there is none."""

    def __init__(self, core: EngineCore, socket: zmq.Socket[bytes]) -> None:
        self._core = core
        self._socket = socket
        self._decoder: Decoder[ToEngine] = Decoder(ToEngine)

    def run(self) -> str:
        """Serve until the engine dies; returns why it did."""
        while self._core.death is None:
            self._take_in()
            output = self._core.step()
            if not output.empty:
                with self._core.host_time:
                    self._send(output)
        return self._core.death

    def _take_in(self) -> None:
        if not self._core.has_work:
            wait_s = self._core.wait_s
            self._socket.poll(None if wait_s is None else math.ceil(wait_s * 1000))
        while True:
            try:
                client, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handle(client, data)

    def _handle(self, client: bytes, data: bytes) -> None:
        try:
            message = self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            logger.error("a message of %s was dropped: %s", client.decode(), error)
            return
        if isinstance(message, AbortRequest):
            self._core.abort(message.request_id, message.reason, message.key)
            return
        reply = Reply(message.call)
        try:
            if isinstance(message, AddRequest):
                accepted = self._core.add(message.request)
                if accepted is not None:
                    accepted.add_done_callback(lambda done: self._reply(client, reply, done))
                    return
            else:
                value = self._core.run_command(message.name, message.arguments)
                if isinstance(value, Future):
                    value.add_done_callback(lambda done: self._reply(client, reply, done))
                    return
                reply.value = NOTHING if value is None else msgspec.Raw(encode(value))
        except Exception as error:
            if not isinstance(error, QuireError):
                logger.exception("a call of %s failed", client.decode())
            reply.error = ErrorRecord.of(error)
        self._socket.send_multipart([client, encode(reply)])

    def _reply(self, client: bytes, reply: Reply, done: Future[None]) -> None:
        error = done.exception()
        if error is not None:
            assert isinstance(error, Exception)
            reply.error = ErrorRecord.of(error)
        self._socket.send_multipart([client, encode(reply)])

    def _send(self, output: StepOutput) -> None:
        for client, part in output.split_by_client().items():
            self._socket.send_multipart(
                [client_identity(client), encode(Outputs(part, self._core.death))]
            )


def main() -> int:
    reports = _claim_stdout()
    _leave_signals_to_parent()
    start: StartEngine = read_line(sys.stdin.buffer.readline(), StartEngine)
    at_end: list[Callable[[], None]] = []
    watch = threading.Thread(target=_die_with_parent, args=(at_end,), daemon=True)
    watch.start()
    configure_logging(start.log_level, for_server=True)
    try:
        options = EngineOptions().replace(**start.options)
        engine = start_engine(options, find_model(options))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = open_engine_socket(context, start.address)
    except Exception as error:
        level = logging.DEBUG if isinstance(error, QuireError) else logging.ERROR
        logger.log(level, "the engine failed to start", exc_info=error)
        reports.write(line(Failed(start_failure(error))))
        return 1
    core = engine.core
    core.watch(logs_status=not engine.options.observability.disable_log_stats)
    # Whatever exists now lives as long as the engine: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    if core.has_rank_processes:
        at_end.append(core.free_workers)  # ranks of other hosts need not wait
    ready = EngineReady(start.address, engine.options.flat(), core.num_blocks)
    reports.write(line(ready))
    death = EngineLoop(core, socket).run()
    reports.write(line(Failed(death)))
    context.destroy(linger=1000)  # last outputs are on their way
    core.free_workers(death)  # ranks are gone before others take their place
    return 1


def open_engine_socket(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
    socket.sndhwm = socket.rcvhwm = 0  # nothing is dropped; clients bound what they ask for
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.bind(address)
    return socket


def start_failure(error: Exception) -> str:
    if isinstance(error, QuireError):
        return str(error)
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first} (the lines above say where)"


def _claim_stdout() -> BinaryIO:
    """Reports go to the supervisor alone; whatever else prints goes to standard error."""
    reports = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return reports


def _leave_signals_to_parent() -> None:
    """A service manager may signal all of its processes at once, as systemd does; open
    requests are finished even so, and the supervisor says when that is done."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # No SIG_IGN, which the compilers that this process starts would inherit.
        signal.signal(number, lambda number, frame: None)


def _die_with_parent(at_end: list[Callable[[], None]]) -> None:
    # Raw reads: a buffered reader would hold a lock that Python wants when it ends.
    while os.read(0, 4096):
        pass
    threading.Timer(LAST_S, os._exit, (0,)).start()
    logging.disable()  # what is cut off has nothing to say
    for end in at_end:
        end()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
