"""`EngineClient`: how the asyncio API reaches an engine: on a thread here, over a socket, ..."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from quire.engine.core import EngineCore
from quire.protocol.errors import EngineDeadError
from quire.protocol.output import StepOutput
from quire.protocol.request import NewRequest

T = TypeVar("T")

LEAVE_S = 10.0
"""How long a program that does not shut its engine down waits for the end of a step at its own."""


class EngineListener(Protocol):
    """Told on its event loop what the engine reports."""

    def receive(self, output: StepOutput) -> None: ...

    def engine_died(self, reason: str) -> None: ...


class EngineClient(Protocol):
    """An engine as the event loops that use it see it."""

    @property
    def death(self) -> str | None:
        """Why the engine serves nothing, if so."""

    def listen(
        self, listener: EngineListener, loop: asyncio.AbstractEventLoop, index: int = 0
    ) -> None:
        """From now on reports go to this listener on this loop: those about sequences whose keys
        begin with the index (`key >> KEY_BITS`), if there are several loops."""

    async def add(self, request: NewRequest) -> None:
        """Hand a request over; raises if the engine refuses it."""

    def abort(self, request_id: str, reason: str = "abort", key: int | None = None) -> None:
        """End a request, or one sequence of it; returns at once, unknown ones are ignored."""

    async def command(self, name: str, reply: type[T], /, **arguments: Any) -> T:
        """Run one of `COMMANDS` in `engine/core.py`, whose value is of type `reply`."""

    def shutdown(self) -> None: ...


class ThreadEngineClient:
    """Steps the engine while there is work and sleeps while there is none.

    Only the thread touches the engine: others pass it functions through `_call`.
    """

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._listeners: dict[int, tuple[EngineListener, asyncio.AbstractEventLoop]] = {}
        """By index. Replaced, never changed, since the thread reads it at any time."""
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()
        atexit.register(self._leave)

    @property
    def death(self) -> str | None:
        return self.core.death

    def listen(
        self, listener: EngineListener, loop: asyncio.AbstractEventLoop, index: int = 0
    ) -> None:
        with self._wake:
            self._listeners = {**self._listeners, index: (listener, loop)}

    async def add(self, request: NewRequest) -> None:
        accepted = await asyncio.wrap_future(self._call(lambda: self.core.add(request)))
        if accepted is not None:
            await asyncio.wrap_future(accepted)

    def abort(self, request_id: str, reason: str = "abort", key: int | None = None) -> None:
        self._call(lambda: self.core.abort(request_id, reason, key))

    async def command(self, name: str, reply: type[T], /, **arguments: Any) -> T:
        call = self._call(lambda: self.core.run_command(name, arguments))
        value: T | Future[T] = await asyncio.wrap_future(call)
        return await asyncio.wrap_future(value) if isinstance(value, Future) else value

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
                if not output.empty:
                    self._report(output)
            except Exception as error:
                reason = f"the engine loop failed: {error}"
                self.core.die(reason, error)
                for listener, loop in self._listeners.values():
                    _tell(loop, listener.engine_died, reason)
                self._refuse_calls()
                atexit.unregister(self._leave)
                return
            if stopping:
                return

    def _report(self, output: StepOutput) -> None:
        """To each loop what is about its sequences; those of a closed loop are ended."""
        for index, part in output.split_by_client().items():
            listener, loop = self._listeners.get(index, (None, None))
            if listener is None or loop is None:
                continue  # it was closed, and its requests are being ended
            if not _tell(loop, listener.receive, part):
                self.core.abort_client(index)
                with self._wake:
                    if self._listeners.get(index) == (listener, loop):
                        others = self._listeners.items()
                        self._listeners = {key: item for key, item in others if key != index}

    def shutdown(self) -> None:
        """End all requests, free the engine and wait for the thread."""
        atexit.unregister(self._leave)
        self._leave(None)
        self.core.shutdown()  # for a loop that failed

    def _leave(self, timeout_s: float | None = LEAVE_S) -> None:
        """End the thread: inside torch it would abort a process whose interpreter ends."""
        if not self._thread.is_alive():
            return  # as in a forked child
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)


def _tell(loop: asyncio.AbstractEventLoop, function: Callable[[T], None], argument: T) -> bool:
    """Call a function on its loop; False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, argument)
    except RuntimeError:
        return False
    return True
