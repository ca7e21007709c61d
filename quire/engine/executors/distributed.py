"""`DistributedExecutor`: ranks in processes of their own, on this host or on several."""

from __future__ import annotations

import atexit
import logging
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import count
from typing import Any, NoReturn

import numpy as np

from quire.config.digests import different
from quire.config.options import EngineOptions
from quire.engine.executors.channel import Channel
from quire.engine.executors.launch import Launcher, LocalProcesses
from quire.engine.executors.nodes import NodeProcesses
from quire.protocol import __version__
from quire.protocol.codec import Decoder, convert, encode
from quire.protocol.errors import EngineDeadError, QuireError, RankMissing
from quire.protocol.expert_counts import ExpertCounts
from quire.protocol.messages import ErrorRecord
from quire.protocol.output import DeviceMemory
from quire.protocol.plan import Int32Array, StepPlan, StepResult, TokenMasks
from quire.protocol.ranks import (
    AdapterLoaded,
    Answer,
    Call,
    DropAdapter,
    Execute,
    Hello,
    LoadAdapter,
    Order,
    RankFailed,
    Returned,
    Sample,
    Sampled,
    Sampling,
)
from quire.worker.ring import ReadersLate

logger = logging.getLogger(__name__)

MIB = 1 << 20
SILENCE_S = 4.0
"""A rank in service says twice a second that its process runs."""
SILENT = (
    f" has not been heard of for {SILENCE_S:g} s: it is stopped, or its host cannot be reached."
)
SAYS_NOTHING = "Nothing has been heard of that process for a while: it is stopped or cut off. "
LOOK_S = 0.25
GRACE_S = 0.5
"""Between the first sign of a failure and the search for its cause: a rank that misses another one
may say so before that one's end is seen."""
LATER_S = 8.0
"""The engine waits so much longer than ranks do, who know which of them is missing."""
AWAKE_S = 0.002
"""For a result that is announced: longer than most take, and no loss where one does not."""
NETWORK = (
    "Ranks must reach each other: check the firewall, the interface (GLOO_SOCKET_IFNAME, "
    "NCCL_SOCKET_IFNAME), the size of /dev/shm, and what NCCL_DEBUG=INFO says."
)
REMEDIES = {
    "start": "",
    "join": NETWORK,
    "load": "Weights may lie on slow storage: raise distributed_timeout_seconds.",
}


class DistributedExecutor:
    look_s: float | None = 0.5

    def __init__(
        self, options: EngineOptions, given: EngineOptions, *, fits_max_model_len: bool = False
    ) -> None:
        """`given` are the options before they were resolved, which other hosts are given, too."""
        parallel = options.parallel
        self._num_ranks, self._timeout_s = parallel.num_ranks, parallel.timeout_s
        self.failure: str | None = None
        self._pid = os.getpid()
        self._results: deque[StepResult] = deque()
        self._loading: dict[int, _LoadingAdapter] = {}
        """By the number of the order."""
        self._load_numbers = count()
        self._returned: dict[int, Returned] = {}
        self._hellos: dict[int, Hello] = {}
        self._refusal: QuireError | None = None
        self._heard: dict[int, float] = {}
        self._in_service = False
        self._receiving = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._decoder: Decoder[Answer] = Decoder(Answer)
        self._look_due = 0.0
        self._awake_until = 0.0
        self._stopping = threading.Event()
        self._seconds: dict[str, float] = {}
        self._launcher = _launch(options, given)
        self._watch = threading.Thread(target=self._run_watch, name="quire-ranks", daemon=True)
        self._watch.start()
        atexit.register(self._end_watch)
        try:
            self._start_up(fits_max_model_len)
        except BaseException:
            self.shutdown()
            raise

    # --- start-up ---------------------------------------------------------------------------------

    def _start_up(self, fits_max_model_len: bool) -> None:
        self._await_hellos()
        self._phase("join")
        self._check_models_alike()
        weights = self._phase("load")
        sizes = self._phase("profile", fits_max_model_len=fits_max_model_len)
        self.max_model_len = min(max_model_len for max_model_len, _ in sizes)
        self.num_blocks = min(num_blocks for _, num_blocks in sizes)
        caches = self._phase(
            "allocate", num_blocks=self.num_blocks, max_model_len=self.max_model_len
        )
        windows, self.groups_prefixes, self.graph_tokens = self._phase("capture")[0]
        self.kv_windows: tuple[int | None, ...] = tuple(windows)
        self._in_service = True
        self._report(weights, caches, [num_blocks for _, num_blocks in sizes])

    def _await_hellos(self) -> None:
        """Every rank's process runs."""
        started = time.monotonic()
        self._wait_for(
            lambda: len(self._hellos) == self._num_ranks,
            lambda: self._lateness("start", set(self._hellos)),
            later_s=0.0,
        )
        self._seconds["start"] = time.monotonic() - started
        for hello in self._hellos.values():
            if hello.version != __version__:
                self._fail(
                    f"{self._name(hello.rank)} runs Quire {hello.version}, this process "
                    f"{__version__}; install the same version on all hosts."
                )

    def _phase(self, name: str, **arguments: Any) -> list[Any]:
        """Have all ranks do something; what each returns, in rank order."""
        started = time.monotonic()
        values = self._call(name, **arguments)
        self._seconds[name] = time.monotonic() - started
        logger.debug("ranks: %s took %.1f s", name, self._seconds[name])
        return values

    def _check_models_alike(self) -> None:
        first = self._hellos[0]
        for rank, hello in sorted(self._hellos.items()):
            if file := different(first.model, hello.model):
                self._fail(
                    f"{self._name(rank)} reads another model than {self._name(0)} under the same "
                    f"name: {file} is not the same on both. Copy the model's files from host "
                    f"{first.host} to host {hello.host}, or name a revision of the hub."
                )

    def _report(self, weights: list[int], caches: list[int], rooms: list[int]) -> None:
        """What each rank has, and where time went."""
        for rank, hello in sorted(self._hellos.items()):
            logger.debug(
                "%s: %s, %.1f MiB of weights, %.1f MiB of KV cache, room for %d blocks",
                self._name(rank),
                hello.device,
                weights[rank] / MIB,
                caches[rank] / MIB,
                rooms[rank],
            )
        hosts = len({hello.host for hello in self._hellos.values()})
        logger.info(
            "ranks: %d on %s; weights %s MiB; KV cache %s MiB; room for %s blocks, %d used; %s",
            self._num_ranks,
            "this host" if hosts == 1 else f"{hosts} hosts",
            ", ".join(f"{num_bytes / MIB:.1f}" for num_bytes in weights),
            ", ".join(f"{num_bytes / MIB:.1f}" for num_bytes in caches),
            ", ".join(map(str, rooms)),
            self.num_blocks,
            ", ".join(f"{name} {value:.1f} s" for name, value in self._seconds.items()),
        )

    # --- steps ------------------------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> None:
        self._send(Execute(plan))

    def token_masks(self, lines: Int32Array, num_words: int) -> TokenMasks:
        return TokenMasks(lines, np.empty((len(lines), num_words), np.int32))

    def sample(self, step: int, masks: TokenMasks | None = None) -> _PendingResult:
        given = () if masks is None else (masks.lines, masks.bits)
        self._send(Sample(step, *given))
        return _PendingResult(self, step)

    def result_of(self, step: int) -> StepResult:
        """Results of steps before it that were not asked for are dropped: an engine that recovers
        forgets the steps in flight."""
        self._wait_for(
            lambda: self._has_result(step),
            self._step_lateness,
        )
        return self._results.popleft()

    def _has_result(self, step: int) -> bool:
        while self._results and self._results[0].step < step:
            self._results.popleft()
        return bool(self._results)

    def memory(self) -> DeviceMemory:
        return convert(self._call("memory")[0], DeviceMemory)

    def expert_counts(self) -> ExpertCounts:
        values = self._call("expert_counts")
        return ExpertCounts.joined([convert(value, ExpertCounts) for value in values])

    def load_adapter(self, name: str, folder: str, digest: str) -> Future[None]:
        number = next(self._load_numbers)
        loading = self._loading[number] = _LoadingAdapter(self._num_ranks)
        self._send(LoadAdapter(number, name, folder, digest))
        return loading.done

    def drop_adapter(self, digest: str) -> None:
        self._send(DropAdapter(digest))

    def listen(self) -> None:
        self._receive(0.0)

    def shutdown(self, failure: str = "") -> None:
        if os.getpid() != self._pid:
            return  # a fork, which has the sockets too, but not the ranks
        if failure:
            self._note_failure(failure)
        atexit.unregister(self._end_watch)
        self._end_watch()
        self._launcher.stop()

    def _end_watch(self) -> None:
        """Before the interpreter ends, too: a thread that is inside a library then may abort it."""
        self._stopping.set()
        if self._watch is not threading.current_thread():  # where the collector may have run
            self._watch.join()

    def _call(self, name: str, **arguments: Any) -> list[Any]:
        self._send(Call(name, arguments))
        self._wait_for(
            lambda: len(self._returned) == self._num_ranks,
            lambda: self._lateness(name, set(self._returned)),
        )
        returned, self._returned = self._returned, {}
        return [returned[rank].value for rank in range(self._num_ranks)]

    def _send(self, order: Order) -> None:
        if self.failure is not None:
            self._raise_failure()
        try:
            self._launcher.send(encode(order), time.monotonic() + self._timeout_s + LATER_S)
        except ReadersLate as error:
            self._fail(
                f"{self._names(error.readers)} took in no orders for {self._timeout_s:g} s "
                f"(distributed_timeout_seconds). {NETWORK}"
            )
        except OSError as error:
            if self.failure is None:
                self._search_cause(f"a rank is gone: {error}")
            self._raise_failure()

    # --- failures ---------------------------------------------------------------------------------

    def _lateness(self, phase: str, done: set[int]) -> str:
        late = [rank for rank in range(self._num_ranks) if rank not in done]
        silent = [rank for rank in self._silent() if rank in late]
        remedy = REMEDIES.get(phase) or self._launcher.missing()
        return (
            f"{self._names(silent or late)} did not finish {phase!r} within {self._timeout_s:g} s "
            f"(distributed_timeout_seconds). {SAYS_NOTHING * bool(silent)}{remedy}"
        )

    def _step_lateness(self) -> str:
        silent = self._silent()
        return (
            f"{self._names(silent or range(self._num_ranks))} did not end a step within "
            f"{self._timeout_s:g} s (distributed_timeout_seconds). "
            f"{SAYS_NOTHING * bool(silent)}{NETWORK}"
        )

    def _silent(self) -> list[int]:
        """Ranks whose process ran once, and has said nothing for a while."""
        latest = time.monotonic() - SILENCE_S
        return [rank for rank in sorted(self._hellos) if self._heard[rank] < latest]

    def _name(self, rank: int) -> str:
        hello = self._hellos.get(rank)
        return f"rank {rank}" + (f" (host {hello.host}, process {hello.pid})" if hello else "")

    def _names(self, ranks: Iterable[int]) -> str:
        return ", ".join(map(self._name, ranks))

    def _fail(self, cause: str) -> NoReturn:
        self._note_failure(cause)
        self._raise_failure()

    def _raise_failure(self) -> NoReturn:
        if self._refusal is not None:
            raise self._refusal
        assert self.failure is not None
        raise EngineDeadError(self.failure)

    def _note_failure(self, cause: str) -> None:
        """The first cause counts: others follow from it."""
        if self.failure is None:
            self.failure = cause

    # --- answers ----------------------------------------------------------------------------------

    def _wait_for(
        self,
        arrived: Callable[[], bool],
        lateness: Callable[[], str],
        later_s: float | None = None,
    ) -> None:
        """Until something has arrived. The thread that waits takes answers in itself: no other has
        to wake up for it."""
        deadline = time.monotonic() + self._timeout_s + (LATER_S if later_s is None else later_s)
        while not arrived():
            if self.failure is not None:
                self._raise_failure()
            left = deadline - time.monotonic()
            if left <= 0:
                self._fail(lateness())
            self._receive(min(left, LOOK_S))

    def _run_watch(self) -> None:
        """A thread: notice what happens while no other waits for answers, and end the processes
        after a failure."""
        while self.failure is None and not self._stopping.wait(LOOK_S):
            self._receive(0.0)
        if self.failure is not None:
            self._launcher.stop(self.failure, self._in_service)

    def _receive(self, wait_s: float) -> None:
        """Take in what has come, or comes within `wait_s` and before the ranks are to be looked
        after, which is done then."""
        with self._receiving:
            if self.failure is not None:
                return
            try:
                self._listen_to_new_ones()
                until_look = max(self._look_due - time.monotonic(), 0.0)
                for key, _ in self._ready(min(wait_s, until_look)):
                    self._read(*key.data)
                if (now := time.monotonic()) >= self._look_due and self.failure is None:
                    self._look_due = now + LOOK_S
                    self._look(now)
            except Exception as error:
                logger.debug("ranks cannot be listened to", exc_info=error)
                self._note_failure(f"an answer of a rank could not be read: {error!r}")

    def _ready(self, wait_s: float) -> list[tuple[selectors.SelectorKey, int]]:
        while time.monotonic() < self._awake_until:
            if found := self._selector.select(0):
                return found
            os.sched_yield()
        return self._selector.select(wait_s)

    def _listen_to_new_ones(self) -> None:
        for rank, channel in list(self._launcher.channels.items()):
            if rank not in self._heard:
                self._selector.register(channel.line, selectors.EVENT_READ, (rank, channel))
                self._hear(rank, channel.read_buffered())

    def _read(self, rank: int, channel: Channel) -> None:
        try:
            messages = channel.read_ready()
        except EOFError:
            self._search_cause(f"{self._name(rank)} is gone")
        else:
            self._hear(rank, messages)

    def _hear(self, rank: int, messages: list[bytes]) -> None:
        self._heard[rank] = time.monotonic()
        for data in messages:
            self._take(rank, self._decoder.decode(data))

    def _take(self, rank: int, answer: Answer) -> None:
        if isinstance(answer, Sampled):
            self._results.append(answer.result)
            self._awake_until = 0.0
        elif isinstance(answer, Sampling):
            self._awake_until = time.monotonic() + AWAKE_S
        elif isinstance(answer, Returned):
            self._returned[rank] = answer
        elif isinstance(answer, AdapterLoaded):
            if self._loading[answer.number].answered(answer.error):
                del self._loading[answer.number]
        elif isinstance(answer, Hello):
            self._hellos[rank] = answer
        elif isinstance(answer, RankFailed):
            error = answer.error.to_error()
            if not self._in_service and type(error) is not QuireError:
                self._refusal = error  # such as a model that does not fit: it says what to do
            sign = f"{self._name(rank)} failed: {answer.error.message}"
            if isinstance(error, RankMissing):
                self._search_cause(sign)  # another one may have died
            else:
                self._note_failure(sign)

    def _look(self, now: float) -> None:
        """For ranks that have ended or stand still."""
        if self._launcher.ended():
            self._search_cause("a rank has ended")
        if not self._in_service:
            return
        for rank, heard in self._heard.items():
            if now - heard > SILENCE_S:
                self._note_failure(self._name(rank) + SILENT)

    def _search_cause(self, sign: str) -> None:
        """A process that ended says more than those that miss it."""
        self._stopping.wait(GRACE_S)
        for rank, cause in sorted(self._launcher.ended().items()):
            if self._refusal is None:
                self._note_failure(f"{self._name(rank)}: {cause}")
        if self._refusal is None and (silent := self._silent()):
            self._note_failure(self._name(silent[0]) + SILENT)
        self._note_failure(sign)


def _launch(options: EngineOptions, given: EngineOptions) -> Launcher:
    """Begin to start the processes of all ranks."""
    if options.parallel.distributed_executor_backend == "ray":
        from quire.engine.executors.ray import RayActors

        return RayActors(options)
    if options.parallel.nnodes > 1:
        return NodeProcesses(options, given)
    return LocalProcesses(options)


class _LoadingAdapter:
    """An adapter that ranks read."""

    def __init__(self, num_ranks: int) -> None:
        self.done: Future[None] = Future()
        self._num_left = num_ranks
        self._error: ErrorRecord | None = None

    def answered(self, error: ErrorRecord | None) -> bool:
        """By one rank; whether it was the last. The first error counts."""
        self._num_left -= 1
        self._error = self._error or error
        if self._num_left:
            return False
        if self._error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(self._error.to_error())
        return True


class _PendingResult:
    def __init__(self, executor: DistributedExecutor, step: int) -> None:
        self._executor, self._step = executor, step

    def result(self) -> StepResult:
        return self._executor.result_of(self._step)
