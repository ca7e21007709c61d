"""`ThreadEngineClient`: the engine on a thread of its own, for callers that must not block."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from quire.engine.core import EngineCore
from quire.protocol.errors import EngineDeadError
from quire.protocol.output import StepOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ThreadEngineClient:
    """Steps the engine while there is work and sleeps while there is none.

    Only the thread touches the engine: others pass it functions through `call`. Outputs are handed
    to `on_output` on the engine's thread, and `on_death` is told there should the loop itself fail.
    """

    def __init__(
        self,
        core: EngineCore,
        on_output: Callable[[StepOutput], None],
        on_death: Callable[[str], None],
    ) -> None:
        self._core = core
        self._on_output = on_output
        self._on_death = on_death
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="quire-engine", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[EngineCore], T]) -> Future[T]:
        """Run a function on the engine's thread, between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # the caller has gone; what it asked for is not done
            try:
                future.set_result(function(self._core))
            except BaseException as error:
                future.set_exception(error)

        with self._wake:
            if not self._stopping:
                self._calls.append(run)
                self._wake.notify()
                return future
        reason = self._core.death or "it was shut down"
        future.set_exception(EngineDeadError(f"the engine has stopped: {reason}"))
        return future

    def _refuse_calls(self) -> None:
        """The thread is about to end: run what was passed to it, take nothing more."""
        with self._wake:
            self._stopping = True
            calls, self._calls = self._calls, deque()
        for run in calls:
            run()

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._calls or self._core.has_work or self._stopping):
                    self._wake.wait(self._core.wait_s)
                calls, self._calls = self._calls, deque()
                stopping = self._stopping
            for run in calls:
                run()
            try:
                if stopping:
                    self._core.shutdown()
                output = self._core.take_ended() if stopping else self._core.step()
                if not output.empty:
                    self._on_output(output)
            except Exception as error:
                logger.exception("the engine loop failed")
                self._core.death = f"the engine loop failed: {error}"
                self._on_death(self._core.death)
                self._refuse_calls()
                return
            if stopping:
                return

    def shutdown(self) -> None:
        """End all requests, free the engine and wait for the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()
        self._core.executor.shutdown()  # for a loop that failed
