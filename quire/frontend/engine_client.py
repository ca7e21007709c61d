"""`EngineClient`: how the asyncio API reaches an engine: on a thread here, over a socket, ..."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from quire.engine.commands import run_command
from quire.engine.core import EngineCore
from quire.protocol.errors import EngineDeadError
from quire.protocol.output import StepOutput
from quire.protocol.request import NewRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EngineListener(Protocol):
    """Told on its event loop what the engine reports."""

    def receive(self, output: StepOutput) -> None: ...

    def engine_died(self, reason: str) -> None: ...


class EngineClient(Protocol):
    """An engine as its one listener sees it."""

    @property
    def death(self) -> str | None:
        """Why the engine serves nothing, if so."""

    def listen(self, listener: EngineListener, loop: asyncio.AbstractEventLoop) -> None:
        """From now on reports go to this listener on this loop."""

    async def add(self, request: NewRequest) -> None:
        """Hand a request over; raises if the engine refuses it."""

    def abort(self, request_id: str, reason: str = "abort", key: int | None = None) -> None:
        """End a request, or one sequence of it; returns at once, unknown ones are ignored."""

    async def command(self, name: str, reply: type[T], /, **arguments: Any) -> T:
        """Run one of `engine/commands.py`, whose value is of type `reply`."""

    def shutdown(self) -> None: ...


class ThreadEngineClient:
    """Steps the engine while there is work and sleeps while there is none.

    Only the thread touches the engine: others pass it functions through `_call`.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._listener: EngineListener | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()

    @property
    def death(self) -> str | None:
        return self.core.death

    def listen(self, listener: EngineListener, loop: asyncio.AbstractEventLoop) -> None:
        self._listener, self._loop = listener, loop

    async def add(self, request: NewRequest) -> None:
        accepted = await asyncio.wrap_future(self._call(lambda: self.core.add(request)))
        if accepted is not None:
            await asyncio.wrap_future(accepted)

    def abort(self, request_id: str, reason: str = "abort", key: int | None = None) -> None:
        self._call(lambda: self.core.abort(request_id, reason, key))

    async def command(self, name: str, reply: type[T], /, **arguments: Any) -> T:
        call = self._call(lambda: run_command(self.core, name, arguments))
        value: T = await asyncio.wrap_future(call)
        return value

    def _call(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the engine's thread, between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # the caller has gone; what it asked for is not done
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        with self._wake:
            if not self._stopping:
                self._calls.append(run)
                self._wake.notify()
                return future
        reason = self.core.death or "it was shut down"
        future.set_exception(EngineDeadError(f"the engine has stopped: {reason}"))
        return future

    def _refuse_calls(self) -> None:
        """The thread is about to end: run what was passed to it, take nothing more."""
        with self._wake:
            self._stopping = True
            calls, self._calls = self._calls, deque()
        for run in calls:
            run()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._calls or self.core.has_work or self._stopping):
                    if not self._wake.wait(self.core.wait_s):
                        break  # something is due: a step looks what
                calls, self._calls = self._calls, deque()
                stopping = self._stopping
            for run in calls:
                run()
            try:
                if stopping:
                    self.core.shutdown()
                output = self.core.take_ended() if stopping else self.core.step()
                if not output.empty and self._listener is not None:
                    self._tell(self._listener.receive, output)
            except Exception as error:
                logger.exception("the engine loop failed")
                self.core.death = f"the engine loop failed: {error}"
                if self._listener is not None:
                    self._tell(self._listener.engine_died, self.core.death)
                self._refuse_calls()
                return
            if stopping:
                return

    def _tell(self, function: Callable[[T], None], argument: T) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            if self._loop is not None:
                self._loop.call_soon_threadsafe(function, argument)

    def shutdown(self) -> None:
        """End all requests, free the engine and wait for the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()
        self.core.executor.shutdown()  # for a loop that failed
