"""`StepLoop`: the engine of an `LLM`, shared by all threads that call it.

One thread at a time drives: it steps the engine until its own call has outputs, and the requests of
all calls are in these steps. The other threads sleep until there are outputs for them. A driver
that leaves, by whatever way, wakes one of them to drive.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from threading import Lock, RLock

from quire.engine.core import EngineCore
from quire.frontend.output_processor import OpenRequest, OutputProcessor
from quire.frontend.outputs import RequestOutput
from quire.protocol.errors import EngineDeadError
from quire.protocol.output import StepOutput
from quire.protocol.request import NewRequest
from quire.protocol.sampling import RequestOutputKind

NEVER = 1 << 30
MAX_REST_S = 0.002
PATIENCE_S = 5.0
"""Collections of the youngest objects before one of the oldest."""
_lock = Lock()
_num_blocks = 0
_usual = NEVER


@contextlib.contextmanager
def no_full_collections() -> Iterator[None]:
    """Put off collections of the oldest objects until the end of the block, or of all blocks where
    engines in several threads overlap.

    One takes 0.1 s where torch is loaded, and the device would wait for it; many requests at once
    are reason enough for Python to start one. Young objects are collected as ever.
    """
    global _num_blocks, _usual
    with _lock:
        first, second, third = gc.get_threshold()
        if _num_blocks == 0:
            _usual = third
            gc.set_threshold(first, second, NEVER)
        _num_blocks += 1
    try:
        yield
    finally:
        with _lock:
            _num_blocks -= 1
            if _num_blocks == 0:
                gc.set_threshold(*gc.get_threshold()[:2], _usual)


@contextlib.contextmanager
def deferred_interrupts(notify: Callable[[], None] | None = None) -> Iterator[list[int]]:
    """Hold SIGINT back until the end of the block, then pass it on to the handler before: Ctrl-C
    takes effect between engine steps, never inside one. One that comes `PATIENCE_S` after another
    does not wait any more: a step with ranks may stand still for minutes.

    Yields the signals held back so far. `notify` is called when one comes, to end a wait; it runs
    between any two instructions of the main thread, and so must not take a lock.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    previous = signal.getsignal(signal.SIGINT) if on_main_thread else None
    caught: list[int] = []
    if previous is None:  # signals reach other threads never, foreign handlers cannot be restored
        yield caught
        return

    first_at = 0.0

    def hold_back(number: int, frame: object) -> None:
        nonlocal first_at
        if caught and time.monotonic() - first_at > PATIENCE_S:
            caught.clear()
            raise KeyboardInterrupt
        first_at = first_at if caught else time.monotonic()
        caught.append(number)
        if notify is not None:
            notify()

    signal.signal(signal.SIGINT, hold_back)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, previous)
        if caught:
            os.kill(os.getpid(), signal.SIGINT)


class FairLock:
    """A lock that goes from thread to thread in the order in which they ask for it. A driver, which
    takes it again for each step, keeps no other thread out."""

    def __init__(self) -> None:
        self._state = Lock()
        self._is_held = False
        self._queue: deque[Lock] = deque()

    def acquire(self) -> None:
        turn = Lock()
        turn.acquire()
        with self._state:
            if not self._is_held:
                self._is_held = True
                return
            self._queue.append(turn)
        turn.acquire()

    def try_acquire(self) -> bool:
        """Never waits, and so is safe in code that runs at any moment, such as a finaliser."""
        if not self._state.acquire(blocking=False):
            return False
        try:
            taken, self._is_held = not self._is_held, True
            return taken
        finally:
            self._state.release()

    def release(self) -> None:
        with self._state:
            if self._queue:
                self._queue.popleft().release()
            else:
                self._is_held = False


class Call:
    """One call of the API, which waits for its requests on one thread."""

    def __init__(self) -> None:
        self.changed: dict[str, OpenRequest] = {}
        """Requests with outputs that the call has not taken yet, by their names in the engine."""
        self._wakeup = Lock()
        self._wakeup.acquire()

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # it was woken before
            self._wakeup.release()

    def sleep(self) -> None:
        """Until the next `wake`, or not at all if one came since the last `sleep`."""
        self._wakeup.acquire()


class StepLoop:
    def __init__(self, core: EngineCore, processor: OutputProcessor) -> None:
        self.core = core
        self._processor = processor
        self._engine = FairLock()
        """Guards the engine. Who holds it may take `_outputs` too, never the other way round."""
        self._outputs = RLock()
        """Guards open requests and the fields below, and is held for no longer than it takes to
        pass on what a step brought."""
        self._calls: dict[str, Call] = {}
        """Who waits for a request, by its name in the engine."""
        self._driver: Call | None = None
        self._sleeping: dict[Call, None] = {}
        """In the order in which they fell asleep. If any, there is a driver, or one was woken."""
        self._abandoned: deque[OpenRequest] = deque()
        """Requests to end, by the thread that uses the engine or the next one that does."""

    # --- the engine -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def engine(self) -> Iterator[EngineCore]:
        """The engine for this thread alone, between two steps."""
        with deferred_interrupts(), self._held():
            yield self.core

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        self._engine.acquire()
        try:
            yield
        finally:
            self._engine.release()
            if self._abandoned:
                self._end_abandoned()

    def step(self) -> None:
        """One step of the engine; its outputs go to the calls that wait for them."""
        with self.engine():
            self.step_held()

    def rest(self) -> None:
        """Where the engine has nothing to do before something is loaded, leave the processor to the
        threads that load it."""
        if not self.core.has_work and (wait_s := self.core.wait_s) is not None:
            time.sleep(min(wait_s, MAX_REST_S))

    def step_held(self) -> None:
        """A step for a thread that holds the engine."""
        try:
            output = self.core.step()
            with self.core.host_time:
                self.take_in(output)
        except Exception as error:
            # What the step brought may be lost for any call, so none may go on waiting for it.
            self.core.die(f"its outputs could not be passed on: {error!r}", error)
            with self._outputs:
                self._tell(self._processor.fail_all(str(self.core.death)))
            raise EngineDeadError(f"the engine has stopped: {self.core.death}") from error

    def take_in(self, output: StepOutput) -> None:
        """Pass on what a step brought. The engine must be held."""
        with self._outputs:
            changed, stopped = self._processor.process(output)
            for sequence in stopped:
                reason = sequence.finish_reason or "stop"
                self.core.abort(sequence.request.engine_id, reason, sequence.key)
            if stopped:
                changed += self._processor.process(self.core.take_ended())[0]
            self._tell(changed)

    def shutdown(self) -> None:
        """Free the engine; calls that wait get an error."""
        with self.engine() as core:
            core.shutdown()
            with self._outputs:
                self._tell(self._processor.fail_all(str(core.death)))

    # --- requests ---------------------------------------------------------------------------------

    def open(self, new: NewRequest, prompt: str | None, kind: RequestOutputKind) -> OpenRequest:
        """Listen for a request that was added to the engine, which must still be held."""
        with self._outputs:
            return self._processor.open(new, prompt, kind)

    def follow(self, requests: Iterable[OpenRequest], call: Call | None = None) -> Call:
        """A call that waits for these requests, or the given one, which from now on does so too."""
        call = call or Call()
        with self._outputs:
            for request in requests:
                self._calls[request.engine_id] = call
                if request.has_output:
                    call.changed[request.engine_id] = request
        return call

    def next_changes(self, call: Call) -> list[OpenRequest]:
        """Wait until requests of a call have outputs, and return these; nothing after an interrupt
        whose handler does not raise. This thread steps the engine unless another one does."""
        with deferred_interrupts(notify=call.wake) as interrupts:
            try:
                while not interrupts:
                    with self._outputs:
                        self._sleeping.pop(call, None)
                        if call.changed:
                            changed, call.changed = call.changed, {}
                            return list(changed.values())
                        self._driver = self._driver or call
                        drives = self._driver is call
                        if not drives:
                            self._sleeping[call] = None
                    if drives:
                        with self._held():
                            if not call.changed:
                                self.step_held()
                        if not call.changed:
                            self.rest()
                    else:
                        call.sleep()
                return []
            finally:
                self._leave(call)

    def step_for(self, call: Call) -> list[OpenRequest]:
        """One step, unless the requests of a call have outputs already; returns those that have."""
        if not call.changed:
            self.step()
        with self._outputs:
            changed, call.changed = call.changed, {}
            return list(changed.values())

    def raise_failure(self, requests: Iterable[OpenRequest]) -> None:
        """If one of the requests has failed."""
        for request in requests:
            if request.error is not None:
                raise request.failure(self.core.death)

    def raise_if_dead(self, requests: Iterable[OpenRequest]) -> None:
        """The same where the engine has stopped. Where it lives on, one request's failure must not
        cost the others their outputs: its own says finish_reason="error"."""
        if self.core.death is not None:
            self.raise_failure(requests)

    def read(self, request: OpenRequest) -> RequestOutput | None:
        """What is new of a request that may still grow, if anything."""
        with self._outputs:
            return request.read() if request.has_output else None

    def forget(self, requests: Collection[OpenRequest], call: Call | None = None) -> None:
        """Listen no longer, and end what is unfinished. It may be called at any moment (a stream
        is closed when it is collected), and so waits for no lock. `call`, if it goes on."""
        with deferred_interrupts():
            if call is not None:
                for request in requests:
                    call.changed.pop(request.engine_id, None)
            self._abandoned.extend(requests)
            self._end_abandoned()

    # --- inside -----------------------------------------------------------------------------------

    def _leave(self, call: Call) -> None:
        with self._outputs:
            self._sleeping.pop(call, None)
            if self._driver is call:
                self._driver = None
            if self._driver is None and self._sleeping:
                next(iter(self._sleeping)).wake()

    def _tell(self, changed: Iterable[OpenRequest]) -> None:
        for request in changed:
            call = self._calls.get(request.engine_id)
            if call is not None and request.has_output:
                call.changed[request.engine_id] = request
                call.wake()

    def _end_abandoned(self) -> None:
        # If another thread holds the engine, it comes here once it has released it.
        while self._abandoned and self._engine.try_acquire():
            try:
                while self._abandoned:
                    request = self._abandoned.popleft()
                    if not request.finished:
                        self.core.abort(request.engine_id)
                    with self._outputs:
                        self._processor.close(request)
                        self._calls.pop(request.engine_id, None)
            finally:
                self._engine.release()
