"""One HTTP process: `python -m quire.server.launch.api_process`, started by the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator
from typing import Any, BinaryIO

import msgspec
import uvicorn

from quire.config.log import configure_logging
from quire.config.model import read_model
from quire.config.options import EngineOptions
from quire.config.server import ServerOptions
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.event_loop import run_on_event_loop
from quire.frontend.session import Session, session_tokenizer
from quire.frontend.socket_client import SocketEngineClient
from quire.protocol.codec import line, read_line
from quire.protocol.errors import QuireError
from quire.protocol.messages import (
    Answered,
    Ask,
    Drain,
    EngineDown,
    EngineReady,
    Failed,
    Listening,
    LogLevel,
    StartApi,
    ToApi,
)
from quire.server.app import build_app
from quire.server.http.connection import bounded_connections
from quire.server.http.middleware import Load
from quire.server.launch.child import MAX_LINE_BYTES
from quire.server.preparation.pool import ForkServer
from quire.server.routes import PARSERS
from quire.server.state import ServerState

logger = logging.getLogger(__name__)


class Orders:
    """What the supervisor says, line by line; None once it is gone."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    @classmethod
    async def on_stdin(cls) -> Orders:
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
        return cls(reader)

    async def next(self) -> Any:
        data = await self._reader.readline()
        return read_line(data, ToApi) if data else None


class HttpServer(uvicorn.Server):
    """Says when it listens, and ends when the supervisor says so."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], Any]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_listening()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are the supervisor's, also where all processes get them; uvicorn would pass them
        on at its end, and so leave no time to send the last spans."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, lambda: None)
        yield


class ApiProcess:
    def __init__(self, orders: Orders, start: StartApi, reports: BinaryIO) -> None:
        self._orders = orders
        self._start = start
        self._reports = reports
        self._options = ServerOptions.from_flat(start.server_options)
        self._client = SocketEngineClient(start.client_index)
        self._telling: asyncio.Task[None] | None = None
        self._fork_server = ForkServer()  # loads while the engine does

    async def run(self) -> None:
        """Answer until told to drain, or until the supervisor is gone."""
        order = await self._orders.next()
        while not isinstance(order, EngineReady):
            if order is None or isinstance(order, Drain):
                return
            order = await self._orders.next()
        state = self._connect(order)
        if self._start.client_index == 1:
            await state.load_adapters()
        state.pool.start()
        if self._start.client_index == 1:  # all API processes would say the same
            self._describing = asyncio.create_task(self._log_parsers(state))
        config = uvicorn_config(build_app(state), self._options)
        server = HttpServer(config, lambda: self._report(Listening()))
        listener = socket.socket(fileno=self._start.socket_fd)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        following = asyncio.create_task(self._follow(server, state))
        await asyncio.wait({serving, following}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():  # else the supervisor is gone: nothing would stop the engine's clients
            await serving
        if state.tracer is not None:
            state.tracer.shutdown()

    def _connect(self, ready: EngineReady) -> ServerState:
        options = EngineOptions().replace(**ready.options)
        model = read_model(options.model)
        tokenizer = session_tokenizer(model, options)
        session = Session(model, options, tokenizer, self._start.client_index)
        self._llm = AsyncLLM.connected(session, self._client)
        self._attach(ready)
        return ServerState(
            self._llm,
            self._options,
            fork_server=self._fork_server,
            load=Load.shared(self._start.load_file, self._start.place),
            adapters_file=self._start.adapters_file,
            report=self._report,
        )

    async def _log_parsers(self, state: ServerState) -> None:
        try:
            await state.pool.run(PARSERS, [b"{}"])
        except QuireError as error:  # chats will say so too
            logger.warning("%s", error)

    def _report(self, message: msgspec.Struct) -> None:
        self._reports.write(line(message))

    def _attach(self, ready: EngineReady) -> None:
        """Connect to an engine that has just started, and tell it the vocabulary first of all."""
        self._client.connect(ready.address)
        if self._llm.session.has_tokenizer:
            self._telling = asyncio.create_task(self._llm.tell_vocabulary())

    async def _follow(self, server: uvicorn.Server, state: ServerState) -> None:
        while (order := await self._orders.next()) is not None:
            if isinstance(order, EngineReady):
                self._attach(order)
            elif isinstance(order, EngineDown):
                state.restarting = order.restarts
                self._client.disconnect(order.cause)
            elif isinstance(order, LogLevel):
                logging.getLogger("quire").setLevel(order.level)
            elif isinstance(order, Drain):
                server.should_exit = True
            elif isinstance(order, Ask):
                self._report(Answered())


def uvicorn_config(app: Any, options: ServerOptions) -> uvicorn.Config:
    network = options.network
    return uvicorn.Config(
        app,
        http=bounded_connections(network.client_timeout_s),
        ws="none",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        ssl_keyfile=network.ssl_keyfile,
        ssl_certfile=network.ssl_certfile,
        ssl_ca_certs=network.ssl_ca_certs,
        ssl_cert_reqs=2 if network.ssl_ca_certs else 0,
        timeout_graceful_shutdown=int(options.serving.drain_timeout_s) or 1,
    )


async def main() -> int:
    reports = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    orders = await Orders.on_stdin()
    start = await orders.next()
    if not isinstance(start, StartApi):
        return 1
    configure_logging(start.log_level, for_server=True)
    try:
        await ApiProcess(orders, start, reports).run()
    except QuireError as error:
        reports.write(line(Failed(str(error))))
        return 1
    return 0


if __name__ == "__main__":
    code = run_on_event_loop(main())
    os._exit(code)  # threads of libraries must not hold up the end
