"""`EngineCore`: the loop that every frontend and every executor uses."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

from quire.config.structured import GrammarSettings
from quire.engine.adapters import AdapterReader, Adapters
from quire.engine.executors.base import Executor, PendingResult
from quire.engine.memory_pressure import MemoryPressure
from quire.engine.monitor import Advisor, Monitor, StatusLog, Stopwatch
from quire.engine.structured_output.compiler import Compilation
from quire.engine.structured_output.grammar_source import Vocabulary
from quire.engine.structured_output.grammars import POLL_S, Grammars
from quire.metrics.engine import EngineMetrics, EngineStatistics
from quire.metrics.instruments import Readings
from quire.protocol.adapter import LoRARequest
from quire.protocol.errors import EngineDeadError, RequestError, StepMemoryError
from quire.protocol.expert_counts import ExpertCounts
from quire.protocol.messages import ID_SEPARATOR
from quire.protocol.output import DeviceMemory, EngineSnapshot, StepOutput
from quire.protocol.plan import StepPlan
from quire.protocol.request import KEY_BITS, NewRequest
from quire.scheduler.scheduler import Pause, Scheduler
from quire.scheduler.sequence import SchedulerLimits

logger = logging.getLogger(__name__)

MAX_CONSECUTIVE_FAILURES = 3
INTEGRITY_CHECK_INTERVAL_S = 10.0
"""Between two integrity checks of an idle engine, which single requests must not wait for often:
looking at all blocks takes milliseconds."""
LONGEST_SLEEP_S = 3600.0
"""A deadline may lie further off than the numbers of a system call reach."""
COMMANDS = (
    *("reset_prefix_cache", "read_metrics", "snapshot", "abort_named", "abort_client", "abort_all"),
    *("pause", "resume", "set_log_level", "set_vocabulary", "answer", "check_integrity"),
    *("expert_counts", "load_adapter", "unload_adapter", "list_adapters", "pin_adapter"),
)
"""Methods of `EngineCore` that a client may call by name, beside requests. Their arguments and
values cross a socket as they are."""


class StepFailed(Exception):
    """The executor could not do its part of a step; the requests of the step start over."""


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
        adapter_reader: AdapterReader | None = None,
    ) -> None:
        """At most `num_threads` threads make masks of grammars. `adapter_reader` is needed where
        `limits` allow adapters."""
        self.executor = executor
        self.metrics = EngineMetrics()
        self.monitor = Monitor(self.metrics)
        self.scheduler = Scheduler(limits, self.metrics)
        settings = grammar_settings or GrammarSettings()
        self.grammars = Grammars(self.scheduler, settings, num_threads, limits.num_stages)
        self.adapters: Adapters | None = None
        if limits.adapters is not None:
            slots = self.scheduler.adapters
            assert adapter_reader is not None and slots is not None
            self.adapters = Adapters(
                self.scheduler,
                slots,
                executor,
                limits.adapters,
                adapter_reader,
                self.metrics.adapters,
            )
        self.pressure = MemoryPressure(limits.max_num_batched_tokens)
        self.max_steps_in_flight = max_steps_in_flight
        self.clock = clock
        self.death: str | None = None
        """Why the engine stopped, once it has."""
        self.on_plan: Callable[[StepPlan], None] | None = None
        """Called with each plan before it runs, to see which sequence holds which blocks."""
        self._in_flight: deque[tuple[StepPlan, PendingResult]] = deque()
        self._num_failures = 0
        self._integrity_check_due = -math.inf

    @property
    def num_blocks(self) -> int:
        return self.scheduler.limits.num_blocks

    @property
    def has_rank_processes(self) -> bool:
        """Whether `free_workers` may be called while a step waits for them."""
        return self.executor.look_s is not None

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything. Where it would not, a loop may sleep for `wait_s`."""
        if self.executor.failure is not None and self.death is None:
            return True
        return self.scheduler.has_work or bool(self._in_flight) or self.wait_s == 0.0

    @property
    def wait_s(self) -> float | None:
        """How long a loop without work may sleep; None: until the next call."""
        waits, next_time = list[float](), self.scheduler.next_time
        if next_time is not None:
            waits.append(min(max(next_time - self.clock(), 0.0), LONGEST_SLEEP_S))
        if self.grammars.is_compiling or (self.adapters is not None and self.adapters.is_loading):
            waits.append(POLL_S)
        if self.executor.look_s is not None:
            waits.append(self.executor.look_s)
        return min(waits) if waits else None

    @property
    def host_time(self) -> Stopwatch:
        """Runs while the outputs of the last step are passed on."""
        return self.monitor.host

    @property
    def can_start_ahead(self) -> bool:
        """Whether the next step would be launched without waiting for any result."""
        return self.max_steps_in_flight > 1 and not self._in_flight and self.death is None

    def check(self, request: NewRequest) -> None:
        """Raise if the request would be refused; `add` takes it if nothing comes between."""
        if self.death is not None:
            raise EngineDeadError(f"the engine has stopped: {self.death}")
        if request.adapter is not None:
            self._check_has_adapters(f"lora_request {request.adapter.lora_name!r}")
        self.scheduler.check(request)

    def add(
        self, request: NewRequest, compilation: Compilation | None = None
    ) -> Future[None] | None:
        """Take a request in; `compilation` is that of its grammar if that has begun. Where a
        future is returned, it tells later whether the request is refused after all, once its
        grammar is compiled and its adapter loaded."""
        self.check(request)
        compilation, now = compilation or self.compile_grammar(request), self.clock()
        num_awaited = (compilation is not None) + (request.adapter is not None)
        self.scheduler.add(request, num_awaited, now)
        self.monitor.arrived(request)
        accepted: list[Future[None]] = []
        if compilation is not None and (one := self.grammars.add(request, compilation)) is not None:
            accepted.append(one)
        if request.adapter is not None and self.adapters is not None:
            accepted.append(self.adapters.add(request, now))
        return _all_of(accepted)

    def compile_grammar(self, request: NewRequest) -> Compilation | None:
        """Begin to compile a request's grammar before it is added; None where it has none."""
        return self.grammars.compile(request)

    def abort(self, request_id: str, reason: str = "abort", key: int | None = None) -> None:
        """End a request, or one sequence of it. Unknown ones are ignored: ends and aborts cross."""
        self.scheduler.abort(request_id, reason, key, now=self.clock())

    def abort_all(self, tenant: str | None = None) -> int:
        """End all requests, or those of a tenant; returns how many."""
        return self.scheduler.abort_where(
            lambda first: tenant is None or first.new.tenant == tenant, self.clock()
        )

    def abort_named(self, name: str) -> int:
        """End the requests that a caller knows by this name, whichever client they came through."""
        return self.scheduler.abort_where(
            lambda first: first.request_id.rpartition(ID_SEPARATOR)[0] == name, self.clock()
        )

    def abort_client(self, client_index: int) -> None:
        """End all requests of a client that is gone."""
        self.scheduler.abort_where(
            lambda first: first.key >> KEY_BITS == client_index, self.clock()
        )

    # --- the loop ---------------------------------------------------------------------------------

    def take_ended(self) -> StepOutput:
        """Terminal outputs that wait for no step (aborts without tokens in flight)."""
        return self._with_ended(StepOutput())

    def _with_ended(self, output: StepOutput) -> StepOutput:
        output.finished.extend(self.scheduler.take_ended())
        self.grammars.forget(output.finished)
        if self.adapters is not None:
            self.adapters.forget(output.finished)
        return output

    def step(self) -> StepOutput:
        """Schedule, execute, sample, apply. Results come `max_steps_in_flight - 1` steps later, and
        at most one is applied."""
        self.monitor.step_begins()
        output: StepOutput | None = None
        try:
            if self.executor.failure is not None:
                raise EngineDeadError(self.executor.failure)
            plan = self._schedule()
            with suppress(StepFailed):
                if plan is not None:
                    self._execute(plan)
                    if self._in_flight and self.grammars.need_tokens_in_flight(plan):
                        output = self._apply(plan)  # the device computes meanwhile
                    self._sample(plan)
                if output is None and self._is_result_due(plan):
                    output = self._apply(plan)
            output = self._end_step(plan, output or StepOutput())
        except EngineDeadError as error:
            self.die(str(error), error)
        except Exception as error:
            # Planning or applying broke off half-way: its state can no longer be trusted.
            self.die(f"a step could not be planned or applied: {error!r}", error)
        return self._with_ended(output or StepOutput())

    def _schedule(self) -> StepPlan | None:
        with self.monitor.host:
            self.grammars.poll()
            if self.adapters is not None:
                self.adapters.poll(self.clock())
            plan = self.scheduler.schedule(self.clock())
        if self.on_plan is not None and plan is not None:
            self.on_plan(plan)
        return plan

    def _execute(self, plan: StepPlan) -> None:
        with self._recovering(plan), self.monitor.launch:
            self.executor.execute(plan)

    def _sample(self, plan: StepPlan) -> None:
        with self._recovering(plan), self.monitor.launch:
            masks = self.grammars.masks(plan, self.executor)
            self._in_flight.append((plan, self.executor.sample(plan.step, masks)))
        self.monitor.launched()

    def _is_result_due(self, plan: StepPlan | None) -> bool:
        """Whether so many steps are in flight that the oldest is waited for."""
        most = 1 if plan is None or self.pressure.is_on else self.max_steps_in_flight
        return len(self._in_flight) >= most

    def _apply(self, plan: StepPlan | None) -> StepOutput:
        """Wait for the oldest step in flight and apply its result. `plan` was executed last."""
        oldest, pending = self._in_flight[0]
        with self._recovering(plan or oldest), self.monitor.wait:
            result = pending.result()
        self.monitor.waited()
        self._in_flight.popleft()
        with self.monitor.host:
            complete = self.grammars.consume(oldest, result, self.clock())
            output = self.scheduler.apply(oldest, result, self.clock(), complete)
            self.grammars.advance(output, self.clock())
            self._num_failures = 0
            self.pressure.step_done(oldest)
            self.scheduler.max_step_tokens = self.pressure.max_step_tokens
        return output

    def _end_step(self, plan: StepPlan | None, output: StepOutput) -> StepOutput:
        with self.monitor.host:
            output.progress = self.scheduler.progress.collect(self.clock())
            self.monitor.step_ends(self.clock(), has_plan=plan is not None)
        if not self.has_work and self.clock() >= self._integrity_check_due:
            self.scheduler.check_integrity()
            self._integrity_check_due = self.clock() + INTEGRITY_CHECK_INTERVAL_S
        return output

    # --- failures ---------------------------------------------------------------------------------

    @contextmanager
    def _recovering(self, plan: StepPlan) -> Iterator[None]:
        """Around a call of the executor. If it fails, the steps in flight and that of `plan` are
        started over."""
        try:
            yield
        except BaseException as error:
            self._recover(plan, error)
            if not isinstance(error, Exception):
                raise
            raise StepFailed from error

    def _recover(self, plan: StepPlan, error: BaseException) -> None:
        """A step failed: start its requests over, or give up if steps keep failing."""
        first_lost = self._in_flight[0][0] if self._in_flight else plan
        self._in_flight.clear()
        suspects = self.scheduler.request_ids(plan.rows)
        self.scheduler.recover(first_lost.step)
        if isinstance(error, StepMemoryError):
            if self.pressure.step_failed(plan.num_tokens, error):
                for request_id in suspects:
                    logger.error("request %r ends: out of memory: %s", request_id, error)
                    self.scheduler.fail_request(request_id, f"out of memory: {error}")
            self.scheduler.max_step_tokens = self.pressure.max_step_tokens
            return
        if not isinstance(error, Exception):
            return  # an interrupt says nothing about the step
        if isinstance(error, EngineDeadError):
            self.die(str(error), error)
            return
        self._num_failures += 1
        logger.error("step %d failed: %s", plan.step, error, exc_info=error)
        if self._num_failures >= MAX_CONSECUTIVE_FAILURES:
            count = self._num_failures
            self.die(f"{count} steps in a row failed, the last with: {error}", error)

    def die(self, reason: str, error: BaseException) -> None:
        """Stop for good: everything that is open ends with an error."""
        if self.death is None:
            trace = None if isinstance(error, EngineDeadError) else error
            logger.error("the engine stops: %s", reason, exc_info=trace)
            self.death = reason
        self._in_flight.clear()
        self.scheduler.fail_all(self.death)
        if self.adapters is not None:
            self.adapters.shutdown()

    def shutdown(self) -> None:
        """End what is left and free the workers; harmless if called again."""
        self.death = self.death or "it was shut down"
        self.scheduler.fail_all(self.death)
        self._in_flight.clear()
        self.grammars.shutdown()
        if self.adapters is not None:
            self.adapters.shutdown()
        self.free_workers()

    def free_workers(self, failure: str = "") -> None:
        """End the processes of ranks, after a failure if any, and give devices' memory back."""
        self.executor.shutdown(failure)

    # --- operating --------------------------------------------------------------------------------

    def watch(self, logs_status: bool) -> None:
        """From now on give advice about settings and, if wanted, log a line while busy."""
        self.monitor.advisor = Advisor(self.scheduler, self.scheduler.limits)
        self.monitor.status = StatusLog(self.scheduler) if logs_status else None

    def run_command(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call one of `COMMANDS` for a client. Its value may be a future."""
        if name not in COMMANDS:
            raise RequestError(f"command {name!r} is unknown; use one of {', '.join(COMMANDS)}.")
        return getattr(self, name)(**arguments)

    def pause(self, mode: Pause | str = Pause.DRAIN) -> None:
        """Begin no further request; `Pause.HOLD` stops the running ones too, where they are.

        Requests are still taken in, and wait. Deadlines and aborts count as ever.
        """
        self.scheduler.set_pause(Pause(mode))

    def resume(self) -> None:
        self.scheduler.set_pause(Pause.NONE)

    def reset_prefix_cache(self) -> bool:
        self.scheduler.reset_prefix_cache()
        return True

    def check_integrity(self) -> int:
        """Raise unless every block is accounted for; returns how many are in use."""
        return self.scheduler.check_integrity()

    def set_vocabulary(
        self, tokenizer_json: str, vocab_size: int, eos_token_ids: list[int]
    ) -> None:
        """What grammars must know of the tokenizer. Clients of one engine all say the same."""
        if not self.grammars.compiler.has_vocabulary:
            given = Vocabulary(tokenizer_json, vocab_size, tuple(eos_token_ids))
            self.read_vocabulary_by(lambda: given)
            self.grammars.compiler.prepare()

    def read_vocabulary_by(self, read: Callable[[], Vocabulary]) -> None:
        """As `set_vocabulary`, where the first grammar needs it."""
        self.grammars.compiler.set_vocabulary(read)

    def load_adapter(
        self, lora_name: str, lora_int_id: int, lora_path: str, load_inplace: bool = False
    ) -> Future[None]:
        """Bring an adapter into host memory; the future tells whether it can be used."""
        adapters = self._check_has_adapters(f"adapter {lora_name!r}")
        if self.death is not None:
            raise EngineDeadError(f"the engine has stopped: {self.death}")
        reference = LoRARequest(lora_name, lora_int_id, lora_path, load_inplace=load_inplace)
        return adapters.load(reference, self.clock())

    def unload_adapter(self, lora_int_id: int) -> bool:
        """Forget an adapter; requests that use it go on. Whether there was one."""
        return self._check_has_adapters(f"lora_int_id={lora_int_id}").remove(lora_int_id)

    def list_adapters(self) -> list[int]:
        """Numbers of the adapters in host memory."""
        return self._check_has_adapters("list_loras").numbers()

    def pin_adapter(self, lora_int_id: int) -> bool:
        """Evict an adapter last."""
        return self._check_has_adapters(f"lora_int_id={lora_int_id}").pin(lora_int_id)

    def _check_has_adapters(self, what: str) -> Adapters:
        if self.adapters is None:
            raise RequestError(
                f"{what} needs an engine that serves adapters; start it with enable_lora=True."
            )
        return self.adapters

    @staticmethod
    def set_log_level(level: str) -> None:
        logging.getLogger("quire").setLevel(level)

    def answer(self) -> None:
        """Do nothing. That it returns shows that steps end: commands run between two of them."""

    # --- looking at it ----------------------------------------------------------------------------

    def statistics(self) -> EngineStatistics:
        limits = self.scheduler.limits
        counts = self.expert_counts()
        return self.metrics.statistics(limits.num_blocks, limits.block_size, counts)

    def expert_counts(self) -> ExpertCounts:
        """How tokens were shared out among experts since the start; none once the engine has
        stopped."""
        return self.executor.expert_counts() if self.death is None else ExpertCounts.none()

    def read_metrics(self) -> Readings:
        self.monitor.keep_host_time()
        self.scheduler.set_gauges(self._device_memory())
        self.metrics.experts.set(self.expert_counts())
        if self.adapters is not None:
            self.adapters.set_gauges(time.time())
        return Readings.of(self.metrics.read())

    def snapshot(
        self, max_waiting: int = 256, tables_of: Collection[int] | None = None
    ) -> EngineSnapshot:
        """The engine at this moment; of the waiting sequences no more than `max_waiting`, and block
        tables of all sequences or of those that `tables_of` names."""
        memory = self._device_memory()
        snapshot = self.scheduler.snapshot(self.clock(), memory, max_waiting, tables_of)
        snapshot.advice = self.monitor.advice
        return snapshot

    def _device_memory(self) -> DeviceMemory:
        """All zeros once the engine has stopped: its executor may be gone."""
        return self.executor.memory() if self.death is None else DeviceMemory(0, 0, 0, 0)


def _all_of(futures: list[Future[None]]) -> Future[None] | None:
    """Fails with the first that fails, and is done when all are; None where there are none."""
    if len(futures) < 2:
        return futures[0] if futures else None
    both: Future[None] = Future()
    both.set_running_or_notify_cancel()  # a waiting caller may not cancel it

    def one_done(done: Future[None]) -> None:
        if both.done():
            return
        if (error := done.exception()) is not None:
            both.set_exception(error)
        elif all(future.done() for future in futures):
            both.set_result(None)

    for future in futures:
        future.add_done_callback(one_done)
    return both
