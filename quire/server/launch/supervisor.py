"""`Supervisor`: starts the engine and the API processes, restarts what dies, stops on signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import time
from typing import Any

import msgspec

from quire.config.log import configure_logging
from quire.config.options import EngineOptions
from quire.config.server import ServerOptions
from quire.frontend.socket_client import SocketEngineClient
from quire.protocol.errors import EngineDeadError
from quire.protocol.messages import (
    Answered,
    Ask,
    Drain,
    EngineDown,
    EngineReady,
    Failed,
    FromApi,
    FromEngineProcess,
    LogLevel,
    StartApi,
    StartEngine,
)
from quire.protocol.processes import exit_cause
from quire.server.launch.child import Child, until_silent
from quire.server.launch.listening import (
    ServerStopped,
    allow_many_connections,
    bind,
    check_tls,
)
from quire.server.launch.socket_folder import SOCKET_NAME_BYTES, SocketFolder
from quire.server.tracing import check_tracing

logger = logging.getLogger(__name__)

STEADY_S = 600.0
"""An engine that lived this long has earned its restarts back."""
MAX_API_FAILURES = 3


class Supervisor:
    """The parent of all processes. It speaks no HTTP and loads no model."""

    def __init__(
        self, engine_options: dict[str, Any], options: ServerOptions, listener: socket.socket
    ) -> None:
        self._engine_options = engine_options
        self._options = options
        self._listener = listener
        self._folder = SocketFolder(options.serving.api_server_count)
        self._log_level: str | None = engine_options.get("log_level")
        self._started = time.monotonic()
        self._was_ready = False
        self._engine: Child | None = None
        self._ready: EngineReady | None = None
        self._apis: dict[int, Child] = {}
        self._client = SocketEngineClient(client_index=0)
        self._next_client = 1
        self._num_listening = 0
        self._num_signals = 0
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Serve until a signal; raises `ServerStopped` if that is not why it ended."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        count = self._options.serving.api_server_count
        keepers = [asyncio.create_task(self._keep_engine())]
        keepers += [asyncio.create_task(self._keep_api(place)) for place in range(count)]
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([*keepers, stop], return_when=asyncio.FIRST_COMPLETED)
            for keeper in keepers:
                if keeper.done():
                    keeper.result()
            await self._drain(keepers[1:])
        finally:
            for task in (*keepers, stop):
                task.cancel()
            await asyncio.gather(*keepers, stop, return_exceptions=True)
            await self._end_children()
            self._folder.remove()

    # --- the engine -------------------------------------------------------------------------------

    async def _keep_engine(self) -> None:
        num_restarts = 0
        while True:
            started = time.monotonic()
            engine = self._engine = await Child.spawn("quire.engine.process")
            cause = await self._run_engine(engine)
            if self._num_signals > 1:
                return
            if self._ready is None and num_restarts == 0:
                raise ServerStopped(cause)
            if time.monotonic() - started > STEADY_S:
                num_restarts = 0
            restarts = num_restarts < self._options.serving.max_engine_restarts
            self._ready = None
            self._client.disconnect(cause)
            self._tell_apis(EngineDown(cause, restarts))
            if not restarts:
                raise ServerStopped(f"the engine died {num_restarts + 1} times, last: {cause}")
            num_restarts += 1
            logger.error("the engine died and is started again (%d): %s", num_restarts, cause)
            await engine.wait()  # one that hung holds its memory until it is gone

    async def _run_engine(self, engine: Child) -> str:
        """Run one engine process until it ends or hangs; returns why it serves nothing more."""
        # A new name each time: it cannot be guessed, and no old message reaches a new engine.
        address = f"ipc://{self._folder.path}/{secrets.token_hex(SOCKET_NAME_BYTES)}"
        engine.send(StartEngine(self._engine_options, address, self._log_level))
        ready = asyncio.Event()
        ending = asyncio.create_task(self._follow_engine(engine, ready))
        silence = asyncio.create_task(self._await_silence(ready))
        try:
            await asyncio.wait({ending, silence}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                return ending.result()
            engine.kill()
            return silence.result()
        finally:
            ending.cancel()
            silence.cancel()

    async def _follow_engine(self, engine: Child, ready: asyncio.Event) -> str:
        cause = None
        async for report in engine.reports(FromEngineProcess):
            if isinstance(report, Failed):
                cause = report.cause
            else:
                self._ready = report
                if self._was_ready:
                    logger.info("the engine is back")
                self._client.connect(report.address)
                self._tell_apis(report)
                ready.set()
        return cause or exit_cause("the engine process", await engine.wait())

    async def _await_silence(self, ready: asyncio.Event) -> str:
        """A start may take any time; from then on the engine must answer."""
        await ready.wait()
        serving = self._options.serving
        timeout_s = serving.silence_s(EngineOptions().replace(**self._engine_options).parallel)
        await until_silent(lambda: self._client.command("answer", type(None)), timeout_s)
        return (
            f"the engine process hung: it answered nothing for {timeout_s:g} s "
            f"(engine_timeout_s={serving.engine_timeout_s:g}). If a step may take that "
            "long here, raise --engine-timeout-s."
        )

    # --- API processes ----------------------------------------------------------------------------

    async def _keep_api(self, place: int) -> None:
        num_failures = 0
        while True:
            index, self._next_client = self._next_client, self._next_client + 1
            api = await self._start_api(index, place)
            listened, hung = await self._run_api(api)
            del self._apis[index]
            cause = hung or exit_cause("an API process", await api.wait())
            if self._num_signals:
                return
            num_failures = 0 if listened else num_failures + 1
            if num_failures == MAX_API_FAILURES:
                raise ServerStopped(f"{num_failures} API processes failed to start, last: {cause}")
            logger.error("%s It is started again.", cause)
            self._num_listening -= listened
            with contextlib.suppress(EngineDeadError):  # then its requests have ended anyway
                await self._client.command("abort_client", type(None), client_index=index)

    async def _run_api(self, api: Child) -> tuple[bool, str | None]:
        """Run one API process until it ends or hangs. Whether it listened, and why it was ended."""
        listening, answered = asyncio.Event(), asyncio.Event()
        silence = asyncio.create_task(self._await_api_silence(api, listening, answered))
        try:
            async for report in api.reports(FromApi):
                if isinstance(report, Failed):
                    raise ServerStopped(report.cause)
                if isinstance(report, LogLevel):
                    self._set_log_level(report)
                elif isinstance(report, Answered):
                    answered.set()
                else:
                    listening.set()
                    self._api_listens()
            return listening.is_set(), silence.result() if silence.done() else None
        finally:
            silence.cancel()

    async def _await_api_silence(
        self, api: Child, listening: asyncio.Event, answered: asyncio.Event
    ) -> str:
        """End a process that no longer answers; returns why."""

        async def ask() -> None:
            answered.clear()
            api.send(Ask())
            await answered.wait()

        await listening.wait()
        timeout_s = self._options.serving.api_timeout_s
        await until_silent(ask, timeout_s)
        api.kill()
        return f"an API process hung: it answered nothing for api_timeout_s={timeout_s:g}."

    async def _start_api(self, index: int, place: int) -> Child:
        fd = self._listener.fileno()
        api = await Child.spawn("quire.server.launch.api_process", [fd])
        options = self._options.flat()
        folder = self._folder
        level = self._log_level
        api.send(StartApi(index, fd, options, folder.load_file, place, level, folder.adapters_file))
        if self._ready is not None:
            api.send(self._ready)
        self._apis[index] = api
        if self._num_signals:  # it came while this one was being started
            api.send(Drain())
        return api

    def _set_log_level(self, message: LogLevel) -> None:
        self._log_level = message.level
        logging.getLogger("quire").setLevel(message.level)
        self._tell_apis(message)

    def _api_listens(self) -> None:
        self._num_listening += 1
        if self._num_listening == self._options.serving.api_server_count:
            passed = time.monotonic() - self._started
            text = "serving again" if self._was_ready else f"ready in {passed:.1f} s, serving"
            logger.info("%s on %s", text, self.url)
            self._was_ready = True

    @property
    def url(self) -> str:
        scheme = "https" if self._options.network.ssl_keyfile else "http"
        host, port = self._listener.getsockname()[:2]
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def _tell_apis(self, message: msgspec.Struct) -> None:
        for api in self._apis.values():
            api.send(message)

    # --- the end ----------------------------------------------------------------------------------

    def _signalled(self) -> None:
        self._num_signals += 1
        self._stop.set()
        if self._num_signals == 1:
            logger.info("stopping: open requests are finished first; a second signal stops now")
        else:
            for child in self._children():
                child.kill()

    def _children(self) -> list[Child]:
        return [*self._apis.values(), *([self._engine] if self._engine else [])]

    async def _drain(self, apis: list[asyncio.Task[None]]) -> None:
        self._tell_apis(Drain())
        self._listener.close()  # with the last one of those, so that who comes now is refused
        resuming = asyncio.create_task(self._resume())
        timeout = self._options.serving.drain_timeout_s
        _, slow = await asyncio.wait(apis, timeout=timeout)
        resuming.cancel()
        if slow:
            logger.warning("open requests were ended after drain_timeout_s=%g", timeout)

    async def _resume(self) -> None:
        """A paused engine would never finish what is open."""
        with contextlib.suppress(EngineDeadError):
            await self._client.command("resume", type(None))

    async def _end_children(self) -> None:
        for child in self._children():
            child.end()
        waits = [asyncio.create_task(child.wait()) for child in self._children()]
        if waits:
            _, slow = await asyncio.wait(waits, timeout=5)
            if slow:
                for child in self._children():
                    child.kill()
                await asyncio.wait(waits)


def serve(engine_options: dict[str, Any], options: ServerOptions) -> int:
    """Run a server until it is told to stop."""
    configure_logging(engine_options.get("log_level"), for_server=True)
    if options.logging.otlp_traces_endpoint is not None:
        check_tracing(options.logging.otlp_traces_endpoint)
    check_tls(options.network)
    allow_many_connections()
    listener = bind(options)

    async def supervise() -> None:
        await Supervisor(engine_options, options, listener).run()

    try:
        asyncio.run(supervise())
    finally:
        listener.close()
    return 0
