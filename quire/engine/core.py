"""`EngineCore`: the loop that every frontend and every executor uses."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future

from quire.config.structured import GrammarSettings
from quire.engine.advice import Advisor
from quire.engine.executors.base import Executor, PendingResult
from quire.engine.memory_pressure import MemoryPressure
from quire.engine.snapshot import set_gauges, take_snapshot
from quire.engine.structured_output.compiler import Compilation
from quire.engine.structured_output.grammars import POLL_S, Grammars
from quire.metrics.engine import EngineMetrics, EngineStatistics
from quire.metrics.instruments import Metric
from quire.protocol.errors import EngineDeadError, OverloadedError, StepMemoryError
from quire.protocol.output import StepOutput
from quire.protocol.plan import StepPlan, StepResult
from quire.protocol.request import NewRequest
from quire.protocol.snapshot import EngineSnapshot
from quire.scheduler.limits import SchedulerLimits
from quire.scheduler.scheduler import Pause, Scheduler

logger = logging.getLogger(__name__)

MAX_CONSECUTIVE_FAILURES = 3
BOOKS_INTERVAL_S = 10.0
"""An idle engine checks its books, but not so often that single requests wait for it: looking at
all blocks takes milliseconds."""
DRAIN_RETRY_S = 30.0
LONGEST_SLEEP_S = 3600.0
"""A deadline may lie further off than the numbers of a system call reach."""


class EngineCore:
    """Plans steps ahead of their results: up to `max_steps_in_flight` are under way at once."""

    def __init__(
        self,
        executor: Executor,
        limits: SchedulerLimits,
        max_steps_in_flight: int = 1,
        clock: Callable[[], float] = time.monotonic,
        grammar_settings: GrammarSettings | None = None,
        num_threads: int = 1,
    ) -> None:
        """`num_threads` make masks of grammars at most."""
        self.executor = executor
        self.metrics = EngineMetrics()
        self.scheduler = Scheduler(limits, self.metrics)
        self.grammars = Grammars(self.scheduler, grammar_settings or GrammarSettings(), num_threads)
        self.pressure = MemoryPressure(self.scheduler)
        self.max_steps_in_flight = max_steps_in_flight
        self.clock = clock
        self.death: str | None = None
        """Why the engine stopped, once it has."""
        self.on_plan: Callable[[StepPlan], None] | None = None
        """Called with each plan before it runs: the moment to look at who holds which blocks."""
        self.draining = False
        """Whether no further request is taken, for the engine is to stop."""
        self.advisor: Advisor | None = None
        """Warns of settings that do not suit the load, if there is one."""
        self._in_flight: deque[tuple[StepPlan, PendingResult]] = deque()
        self._num_failures = 0
        self._books_due = -math.inf
        self._host_s: float | None = None
        """What the host did for the last step, until all of it is known."""
        self._apply_s = 0.0
        """What of it went into taking in a result."""

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything. Where it would not, a loop may sleep for `wait_s`."""
        return self.scheduler.has_work or bool(self._in_flight) or self.wait_s == 0.0

    @property
    def wait_s(self) -> float | None:
        """How long a loop without work may sleep; None: until the next call."""
        waits, next_time = list[float](), self.scheduler.next_time
        if next_time is not None:
            waits.append(min(max(next_time - self.clock(), 0.0), LONGEST_SLEEP_S))
        if self.grammars.is_compiling:
            waits.append(POLL_S)
        return min(waits) if waits else None

    @property
    def can_start_ahead(self) -> bool:
        """Whether the next step would be launched without waiting for any result."""
        return self.max_steps_in_flight > 1 and not self._in_flight and self.death is None

    def check(self, request: NewRequest) -> None:
        """Raise if the request would be refused; `add` takes it if nothing comes between."""
        if self.death is not None:
            raise EngineDeadError(f"the engine has stopped: {self.death}")
        if self.draining:
            raise OverloadedError(
                "the engine takes no more requests: it finishes those it has and then stops. "
                "Try again once it has been restarted.",
                retry_after_s=DRAIN_RETRY_S,
            )
        self.scheduler.check(request)

    def add(
        self, request: NewRequest, compilation: Compilation | None = None
    ) -> Future[None] | None:
        """Take a request in; `compilation` is that of its form if that has begun. Where a
        future is returned, it tells later whether the request is refused after all, once its
        grammar is compiled."""
        self.check(request)
        compilation = compilation or self.grammars.compile(request)
        self.scheduler.add(request, is_ready=compilation is None, now=self.clock())
        if self.advisor is not None:
            self.advisor.arrived(request)
        return None if compilation is None else self.grammars.add(request, compilation)

    def abort(self, request_id: str, reason: str = "abort", key: int | None = None) -> None:
        """End a request, or one sequence of it. Unknown ones are ignored: ends and aborts cross."""
        self.scheduler.abort(request_id, reason, key, now=self.clock())

    def abort_all(self, tenant: str | None = None) -> int:
        """End all requests, or those of a tenant; returns how many."""
        found = [
            request_id
            for request_id, (first, *_) in self.scheduler.requests.items()
            if tenant is None or first.new.tenant == tenant
        ]
        for request_id in found:
            self.abort(request_id)
        return len(found)

    # --- operating --------------------------------------------------------------------------------

    def pause(self, pause: Pause = Pause.DRAIN) -> None:
        """Begin no further request; `Pause.HOLD` stops the running ones too, where they are.

        Requests are still taken in, and wait. Deadlines and aborts count as ever.
        """
        self.scheduler.pause = pause
        self.scheduler.pace.rested()

    def resume(self) -> None:
        """Undo `pause` and `drain`."""
        self.scheduler.pause, self.draining = Pause.NONE, False

    def drain(self) -> None:
        """Take no further request; the queued and running ones go on to their end, also where
        they were paused."""
        self.scheduler.pause, self.draining = Pause.NONE, True

    @property
    def is_drained(self) -> bool:
        return self.draining and not self.has_work and not self.scheduler.waiting.held_back

    # --- the loop ---------------------------------------------------------------------------------

    def take_ended(self) -> StepOutput:
        """Terminal outputs that wait for no step (aborts without tokens in flight)."""
        output = StepOutput(finished=self.scheduler.take_ended())
        self.grammars.forget(output.finished)
        return output

    def step(self) -> StepOutput:
        """Schedule, execute, apply. Results come `max_steps_in_flight - 1` steps later."""
        self._keep_host_time()
        output = StepOutput()
        try:
            started = time.perf_counter()
            self.grammars.poll()
            plan = self.scheduler.schedule(self.clock())
            self._apply_s, host_s = 0.0, time.perf_counter() - started
            if self.on_plan is not None and plan is not None:
                self.on_plan(plan)
            output = self._run(plan) or output
            started = time.perf_counter()
            output.progress = self.scheduler.progress.collect(self.clock())
            if self.advisor is not None:
                self.advisor.look(self.clock())
            if plan is not None:
                self._host_s = host_s + self._apply_s + time.perf_counter() - started
            if not self.has_work and self.clock() >= self._books_due:
                self.scheduler.check_books()
                self._books_due = self.clock() + BOOKS_INTERVAL_S
        except Exception as error:
            # Planning or applying broke off half-way: the books can no longer be trusted.
            self.die(f"the engine's bookkeeping failed: {error!r}", error)
        output.finished.extend(self.scheduler.take_ended())
        self.grammars.forget(output.finished)
        return output

    def add_host_time(self, seconds: float) -> None:
        """Add the time that making outputs of the last step took."""
        if self._host_s is not None:
            self._host_s += seconds

    def _keep_host_time(self) -> None:
        if self._host_s is not None:
            self.metrics.step_host.observe(self._host_s)
            self._host_s = None

    def _run(self, plan: StepPlan | None) -> StepOutput | None:
        """Launch a step and, once enough are in flight, take in the oldest one. Where a mask waits
        for that one's tokens, it is taken in between: the device computes meanwhile."""
        if plan is None:
            return self._take_in(None) if self._in_flight else None
        started = time.perf_counter()
        if not self._attempt(plan, lambda: self.executor.execute(plan)):
            return None
        launch_s = time.perf_counter() - started
        output: StepOutput | None = None
        if self._in_flight and self.grammars.need_tokens_in_flight(plan):
            output = self._take_in(plan)
            if output is None:
                return None
        started = time.perf_counter()
        if not self._attempt(plan, lambda: self._sample(plan)):
            return output
        self.metrics.step_launch.observe(launch_s + time.perf_counter() - started)
        return self._take_in(plan) if output is None and self._is_full else output

    def _sample(self, plan: StepPlan) -> None:
        masks = self.grammars.masks(plan, self.executor)
        self._in_flight.append((plan, self.executor.sample(plan.step, masks)))

    def _take_in(self, plan: StepPlan | None) -> StepOutput | None:
        """Wait for the oldest step in flight and apply its result; None if it failed."""
        oldest, pending = self._in_flight[0]
        results: list[StepResult] = []
        waiting = time.perf_counter()
        if not self._attempt(plan or oldest, lambda: results.append(pending.result())):
            return None
        self._in_flight.popleft()
        applying = time.perf_counter()
        self.metrics.step_wait.observe(applying - waiting)
        complete = self.grammars.consume(oldest, results[0], self.clock())
        output = self.scheduler.apply(oldest, results[0], self.clock(), complete)
        self.grammars.advance(output, self.clock())
        self._num_failures = 0
        self.pressure.step_done(oldest)
        self._apply_s = time.perf_counter() - applying
        return output

    def _attempt(self, plan: StepPlan, action: Callable[[], None]) -> bool:
        """Do what the executor may fail at. If it does, the steps in flight and that of `plan` are
        started over."""
        try:
            action()
        except BaseException as error:
            first = self._in_flight[0][0] if self._in_flight else plan
            self._recover(first.step, plan, error)
            if not isinstance(error, Exception):
                raise
            return False
        return True

    @property
    def _is_full(self) -> bool:
        return len(self._in_flight) >= (1 if self.pressure.is_on else self.max_steps_in_flight)

    def _recover(self, first_lost: int, plan: StepPlan, error: BaseException) -> None:
        """A step failed: start its requests over, or give up if steps keep failing."""
        self._in_flight.clear()
        suspects = [r for r in map(self.scheduler.by_row.__getitem__, plan.rows) if r is not None]
        self.scheduler.recover(first_lost)
        if isinstance(error, StepMemoryError):
            self.pressure.step_failed(plan.num_tokens, suspects, error)
            return
        if not isinstance(error, Exception):
            return  # an interrupt says nothing about the step
        self._num_failures += 1
        logger.error("step %d failed: %s", plan.step, error, exc_info=error)
        if self._num_failures >= MAX_CONSECUTIVE_FAILURES:
            count = self._num_failures
            self.die(f"{count} steps in a row failed, the last with: {error}", error)

    def die(self, reason: str, error: BaseException) -> None:
        """Stop for good: everything that is open ends with an error."""
        if self.death is None:
            logger.error("the engine stops: %s", reason, exc_info=error)
            self.death = reason
        self._in_flight.clear()
        self.scheduler.fail_all(self.death)

    def read_metrics(self) -> list[Metric]:
        self._keep_host_time()
        set_gauges(self)
        return self.metrics.read()

    def snapshot(
        self, max_waiting: int = 256, tables_of: Collection[int] | None = None
    ) -> EngineSnapshot:
        """The engine at this moment; of the waiting requests no more than `max_waiting`, and block
        tables of all sequences or of those that `tables_of` names."""
        return take_snapshot(self, max_waiting, tables_of)

    def statistics(self) -> EngineStatistics:
        limits = self.scheduler.limits
        return self.metrics.statistics(limits.num_blocks, limits.block_size)

    def shutdown(self) -> None:
        """End what is left and free the workers; harmless if called again."""
        self.death = self.death or "it was shut down"
        self.scheduler.fail_all(self.death)
        self._in_flight.clear()
        self.grammars.shutdown()
        self.executor.shutdown()
