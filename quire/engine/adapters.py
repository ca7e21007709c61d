"""`Adapters`: everything the engine does for requests with adapters before they can run.

A request waits, not ready, until its folder is read, which says what content it has, and until all
ranks hold that content in the memory of their hosts. Both happen on other threads; steps go on
meanwhile. The scheduler then gives adapters places on the devices.

The host keeps `max_host_adapters` of them, and lets those go that no request uses, the least
recently used first. Requests that find it full wait in the order in which they came; once the first
of them has waited too long, others wait behind it, whatever is there for them.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from quire.engine.executors.base import Executor
from quire.files.adapter import AdapterFile, adapter_folder
from quire.metrics.engine import AdapterMetrics
from quire.protocol.adapter import AdapterContent, AdapterLimits, LoRARequest, chunks_for
from quire.protocol.errors import AdapterError, EngineDeadError, QuireError
from quire.protocol.output import FinishedSequence
from quire.protocol.request import NewRequest
from quire.scheduler.adapters import AdapterSlots
from quire.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)


class AdapterReader(Protocol):
    """Reads what folders hold, on other threads."""

    def read(self, reference: LoRARequest) -> Future[AdapterFile]: ...

    def shutdown(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Call:
    """A request, or a caller, that awaits an adapter."""

    reference: LoRARequest
    accepted: Future[None]
    since: float
    new: NewRequest | None = None
    """None: the adapter is only to be loaded."""


@dataclass(slots=True)
class _Hosted:
    """An adapter in the memory of the hosts, or on its way there."""

    file: AdapterFile
    is_loaded: bool = False
    num_users: int = 0
    """Sequences that may still need it."""
    calls: list[_Call] = field(default_factory=list)
    """Those that await it."""
    names: dict[str, int] = field(default_factory=dict)
    """Under which callers know it, with their numbers. Without any, it goes once it is unused."""


@dataclass(slots=True)
class _Queued:
    """An adapter for which the host has no room yet, or which has to wait its turn."""

    file: AdapterFile
    calls: list[_Call]


class Adapters:
    def __init__(
        self,
        scheduler: Scheduler,
        slots: AdapterSlots,
        executor: Executor,
        limits: AdapterLimits,
        reader: AdapterReader,
        metrics: AdapterMetrics,
    ) -> None:
        self._scheduler, self._slots, self._executor = scheduler, slots, executor
        self._limits, self._reader, self._metrics = limits, reader, metrics
        self._open: dict[_Call, None] = {}
        """What is not answered yet."""
        self._num_awaited = 0
        """Folders that are being read and adapters that load."""
        self._read: deque[tuple[_Call, Future[AdapterFile]]] = deque()
        """Filled by other threads, as the next one."""
        self._loaded: deque[tuple[str, float, Future[None]]] = deque()
        self._hosted: OrderedDict[str, _Hosted] = OrderedDict()
        """By the digest of their content, the least recently used first."""
        self._queue: dict[str, _Queued] = {}
        """In the order in which their first requests came."""
        self._used: dict[int, str] = {}
        """What sequences use, by their keys."""
        self._pinned: set[str] = set()

    # --- requests come and go -------------------------------------------------------------------

    def add(self, new: NewRequest, now: float) -> Future[None]:
        """Take in a request that the scheduler holds back. The future tells whether its adapter can
        be used."""
        assert new.adapter is not None
        return self._begin(_Call(new.adapter, _running_future(), now, new))

    def load(self, reference: LoRARequest, now: float) -> Future[None]:
        """Bring an adapter into the memory of the hosts, without a request for it."""
        return self._begin(_Call(reference, _running_future(), now))

    def _begin(self, call: _Call) -> Future[None]:
        self._open[call] = None
        self._read_folder(call)
        self.poll(call.since)
        return call.accepted

    def _read_folder(self, call: _Call) -> None:
        self._num_awaited += 1
        reading = self._reader.read(call.reference)
        reading.add_done_callback(lambda done: self._read.append((call, done)))

    def _settle(self, call: _Call, error: Exception | None = None) -> None:
        """A call is answered."""
        del self._open[call]
        if error is None:
            call.accepted.set_result(None)
        else:
            call.accepted.set_exception(error)

    def forget(self, finished: Iterable[FinishedSequence]) -> None:
        """Sequences have ended."""
        if not self._used:
            return
        for sequence in finished:
            if (digest := self._used.pop(sequence.key, None)) is not None:
                hosted = self._hosted[digest]
                hosted.num_users -= 1
                if not hosted.num_users and not hosted.names:
                    self._drop(digest)

    @property
    def is_loading(self) -> bool:
        return self._num_awaited > 0 or bool(self._queue)

    def shutdown(self) -> None:
        ended = EngineDeadError("the engine has stopped, and loads no adapters any more.")
        for call in list(self._open):
            # What became of a request its last output says.
            self._settle(call, ended if call.new is None else None)
        self._reader.shutdown()

    # --- loading --------------------------------------------------------------------------------

    def poll(self, now: float) -> None:
        """Let requests run whose adapters are there; refuse those whose adapters cannot be used."""
        if not self.is_loading:
            return
        self._executor.listen()
        while self._read:
            self._num_awaited -= 1
            self._take_file(*self._read.popleft(), now)
        while self._loaded:
            self._num_awaited -= 1
            digest, since, done = self._loaded.popleft()
            self._take_loaded(digest, done, now - since)
        for digest, queued in list(self._queue.items()):
            queued.calls = [call for call in queued.calls if self._is_wanted(call)]
            if queued.calls and digest not in self._hosted and not self._make_room():
                break
            del self._queue[digest]
            if queued.calls:
                self._host(digest, queued.file, queued.calls, now)

    def _take_file(self, call: _Call, done: Future[AdapterFile], now: float) -> None:
        """A folder was read."""
        if not self._is_wanted(call):
            return
        try:
            file = done.result()
            self._check_rank(file, call.reference)
        except Exception as error:
            self._refuse(call, error)
            return
        digest = file.digest
        hosted = self._hosted.get(digest)
        if call.new is not None:
            self._metrics.host_queries.add(1)
            self._metrics.host_hits.add(hosted is not None and hosted.is_loaded)
        if digest in self._queue:
            self._queue[digest].calls.append(call)
        elif hosted is not None and not self._is_late(now):
            self._host(digest, file, [call], now)
        elif self._queue or not self._make_room():
            self._queue[digest] = _Queued(file, [call])
        else:
            self._host(digest, file, [call], now)

    def _check_rank(self, file: AdapterFile, reference: LoRARequest) -> None:
        if file.rank > self._limits.max_rank:
            raise AdapterError(
                f"adapter {reference.lora_name!r} has rank {file.rank}, but max_lora_rank is "
                f"{self._limits.max_rank}. Start the engine with max_lora_rank={file.rank}."
            )

    def _is_late(self, now: float) -> bool:
        """Whether the first in the queue has waited so long that others wait behind it."""
        if not self._queue:
            return False
        first = next(iter(self._queue.values())).calls[0]
        return now - first.since >= self._limits.max_wait_s

    def _make_room(self) -> bool:
        """For one more adapter in the memory of the hosts."""
        if len(self._hosted) < self._limits.max_host_adapters:
            return True
        in_turn = sorted(self._hosted, key=lambda digest: digest in self._pinned)
        return any(self._drop(digest) for digest in in_turn)

    def _drop(self, digest: str) -> bool:
        """Let an adapter go that no request uses, from hosts and devices."""
        hosted = self._hosted[digest]
        if hosted.num_users or hosted.calls or not hosted.is_loaded:
            return False
        del self._hosted[digest]
        self._slots.evict(digest)
        self._executor.drop_adapter(digest)
        self._metrics.host_evictions.add(1)
        return True

    def _host(self, digest: str, file: AdapterFile, calls: list[_Call], now: float) -> None:
        """Let requests use an adapter, now or once it is loaded."""
        hosted = self._hosted.get(digest)
        if hosted is None:
            hosted = self._hosted[digest] = _Hosted(file)
            self._num_awaited += 1
            loading = self._executor.load_adapter(file.name, file.folder, digest)
            loading.add_done_callback(lambda done: self._loaded.append((digest, now, done)))
        hosted.calls += calls
        self._hosted.move_to_end(digest)
        if hosted.is_loaded:
            self._accept(hosted)

    def _take_loaded(self, digest: str, done: Future[None], seconds: float) -> None:
        """All ranks hold an adapter, or one of them cannot."""
        hosted = self._hosted[digest]
        error = done.exception()
        if error is None:
            hosted.is_loaded = True
            self._metrics.load_time.observe(seconds)
            self._accept(hosted)
            return
        assert isinstance(error, Exception)
        del self._hosted[digest]
        self._executor.drop_adapter(digest)  # others may have it
        for call in hosted.calls:
            if not self._is_wanted(call):
                continue
            if str(adapter_folder(call.reference.lora_path)) == hosted.file.folder:
                self._refuse(call, error)
            else:
                self._read_folder(call)  # its own folder holds the same, and may be all right

    def _accept(self, hosted: _Hosted) -> None:
        content = AdapterContent(hosted.file.digest, chunks_for(hosted.file.rank))
        calls, hosted.calls = hosted.calls, []
        for call in calls:
            if not self._is_wanted(call):
                continue
            reference, new = call.reference, call.new
            self._rename(hosted, reference)
            if new is not None:
                keys = range(new.key, new.key + new.params.n)
                self._used.update(dict.fromkeys(keys, content.digest))
                hosted.num_users += len(keys)
                self._scheduler.set_adapter(new.request_id, content)
                self._scheduler.make_ready(new.request_id)
            self._settle(call)

    def _is_wanted(self, call: _Call) -> bool:
        """Whether the request is still there; it may have been aborted, or out of time."""
        if call not in self._open:
            return False
        if call.new is None or self._scheduler.is_held_back(call.new.request_id):
            return True
        self._settle(call)
        return False

    def _refuse(self, call: _Call, error: Exception) -> None:
        if not isinstance(error, QuireError):
            logger.error("adapter %r cannot be loaded", call.reference.lora_name, exc_info=error)
            error = AdapterError(
                f"adapter {call.reference.lora_name!r} cannot be loaded: {error!r}"
            )
        if call.new is not None:
            self._scheduler.fail_request(call.new.request_id, str(error), is_own_fault=True)
        self._settle(call, error)

    # --- operating --------------------------------------------------------------------------------

    def remove(self, number: int) -> bool:
        """Forget what callers have loaded under a number; requests that use it go on to their end.
        Whether there was something."""
        found = [digest for digest, one in self._hosted.items() if number in one.names.values()]
        for digest in found:
            names = self._hosted[digest].names
            for name in [name for name, other in names.items() if other == number]:
                self._forget_name(digest, name)
        return bool(found)

    def _rename(self, hosted: _Hosted, reference: LoRARequest) -> None:
        """A name stands for this content from now on."""
        for digest, other in list(self._hosted.items()):
            if other is not hosted and reference.lora_name in other.names:
                self._forget_name(digest, reference.lora_name)
        hosted.names[reference.lora_name] = reference.lora_int_id

    def _forget_name(self, digest: str, name: str) -> None:
        hosted = self._hosted[digest]
        del hosted.names[name]
        if not hosted.names:
            self._pinned.discard(digest)
            self._slots.unpin(digest)
            self._drop(digest)

    def numbers(self) -> list[int]:
        """Callers' numbers of what is in the memory of the hosts."""
        return sorted({number for one in self._hosted.values() for number in one.names.values()})

    def pin(self, number: int) -> bool:
        """Keep an adapter on hosts and devices as long as there is another way to serve others."""
        found = [digest for digest, one in self._hosted.items() if number in one.names.values()]
        if not found:
            raise AdapterError(
                f"lora_int_id={number} cannot be pinned: no adapter is loaded under it. Load it "
                "with add_lora first."
            )
        for digest in found:
            self._pinned.add(digest)
            self._slots.pin(digest)
        return True

    def set_gauges(self, time_s: float) -> None:
        """What metrics say of this moment."""
        metrics, slots = self._metrics, self._slots
        metrics.hosted.set(len(self._hosted))
        metrics.resident.set(len(slots.residents))
        metrics.pool_usage.set(slots.num_used_chunks / slots.num_chunks)
        running, waiting = self._scheduler.adapter_names()
        metrics.set_names(running, waiting, self._limits.max_adapters, time_s)


def _running_future() -> Future[None]:
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()  # a waiting caller may not cancel it
    return future
