"""`Adapters`: everything the engine does for requests with adapters before they can run.

A request waits, not ready, until its folder is read, which says what content it has, and until all
ranks hold that content in the memory of their hosts. Both happen on other threads; steps go on
meanwhile. The scheduler then gives adapters places on the devices.

The host keeps as many of them as its bound allows, and lets those go that no request uses, the
least recently used first. Requests that find it full wait for their turn, as in the scheduler's
queue: by priority, then the least served tenant, then arrival. What has waited too long, or has a
better priority than all that waits for an adapter which is there, has that one make way: its
requests that have not begun are held back again, and it goes once those that have begun end.
"""

from __future__ import annotations

import logging
import math
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

GIB = 1 << 30
LOOK_S = 0.1
"""Between two looks for what may make way in full hosts."""


class AdapterReader(Protocol):
    """Reads what folders hold, on other threads."""

    def read(self, reference: LoRARequest) -> Future[AdapterFile]: ...

    def poll(self) -> None:
        """Called now and then while a folder is read."""
        ...

    def shutdown(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Call:
    """A request, or a caller, that awaits an adapter."""

    reference: LoRARequest
    accepted: Future[None]
    since: float
    new: NewRequest | None = None
    """None: the adapter is only to be loaded."""
    has_lost_place: bool = False
    """Whether it was held back again: its folder may have changed since it was read."""


@dataclass(slots=True)
class _Hosted:
    """An adapter in the memory of the hosts, or on its way there."""

    file: AdapterFile
    is_loaded: bool = False
    num_users: int = 0
    """Sequences that may still need it."""
    is_leaving: bool = False
    """It goes for another once requests that have begun have ended; no further one begins."""
    calls: list[_Call] = field(default_factory=list)
    """Those that await it."""
    accepted: dict[int, _Call] = field(default_factory=dict)
    """Requests that may use it, by the keys of their first sequences, until these end."""
    names: dict[str, int] = field(default_factory=dict)
    """Under which callers know it, with their numbers. Without any, it goes once it is unused."""


@dataclass(slots=True)
class _Queued:
    """An adapter for which the host has no room yet, or which has to wait its turn."""

    file: AdapterFile
    since: float
    calls: list[_Call]


_Turn = tuple[float, tuple[int, int], int]
"""Priority, standing of the tenant, number of arrival: the smallest comes first."""
FIRST_TURN: _Turn = (0, (0, 0), 0)
"""Of callers that only load an adapter."""


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
        """In the order in which they came."""
        self._due: str | None = None
        """That for which others make way."""
        self._next_look = -math.inf
        """When to look again for what may make way, which takes a look at all that waits."""
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
        if call.accepted.done():  # a request that has lost its place
            return
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
                hosted.accepted.pop(sequence.key, None)
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
        self._reader.poll()
        while self._read:
            self._num_awaited -= 1
            self._take_file(*self._read.popleft(), now)
        while self._loaded:
            self._num_awaited -= 1
            digest, since, done = self._loaded.popleft()
            self._take_loaded(digest, done, now - since)
        self._serve_queue(now)

    def _take_file(self, call: _Call, done: Future[AdapterFile], now: float) -> None:
        """A folder was read."""
        if not self._is_wanted(call):
            return
        try:
            file = done.result()
            self._check_rank(file, call.reference)
            self._check_saved(file, call.reference)
        except Exception as error:
            self._refuse(call, error)
            return
        digest = file.digest
        hosted = self._hosted.get(digest)
        if call.new is not None:
            self._metrics.host_queries.add(1)
            self._metrics.host_hits.add(hosted is not None and hosted.is_loaded)
        if hosted is not None and not (hosted.is_leaving and self._is_queued_behind(call)):
            self._host(digest, file, [call], now)
        else:
            self._enqueue(digest, file, [call], now)

    def _check_rank(self, file: AdapterFile, reference: LoRARequest) -> None:
        if file.rank > self._limits.max_rank:
            raise AdapterError(
                f"adapter {reference.lora_name!r} has rank {file.rank}, but max_lora_rank is "
                f"{self._limits.max_rank}. Start the engine with max_lora_rank={file.rank}."
            )

    # --- who comes to the hosts, and who goes -----------------------------------------------------

    def _enqueue(self, digest: str, file: AdapterFile, calls: list[_Call], now: float) -> None:
        queued = self._queue.setdefault(digest, _Queued(file, now, []))
        queued.calls += calls

    def _serve_queue(self, now: float) -> None:
        """Host what there is room for, in turn; then see to it that there will be room for what
        must not wait any longer."""
        while self._queue:
            if self._due not in self._queue:
                self._stop_leaving()
            due = self._due
            if due is None and self._can_make_room():
                due = min(self._queue, key=self._turn_of)
            if due is None:
                break
            queued = self._queue[due]
            queued.calls = [call for call in queued.calls if self._is_wanted(call)]
            if queued.calls and due not in self._hosted and not self._make_room(queued.file):
                break
            del self._queue[due]
            if queued.calls:
                self._host(due, queued.file, queued.calls, now)
        if self._queue and now >= self._next_look:
            self._next_look = now + LOOK_S
            self._choose_due(now)
        elif not self._queue:
            self._stop_leaving()

    def _stop_leaving(self) -> None:
        """What was to be hosted is, or is wanted no more: those on their way out may stay."""
        if self._due is None:
            return
        self._due = None
        for digest, hosted in self._hosted.items():
            if hosted.is_leaving:
                hosted.is_leaving = False
                if (queued := self._queue.pop(digest, None)) is not None:
                    hosted.calls += [call for call in queued.calls if self._is_wanted(call)]
                    self._accept(hosted)

    def _turn_of(self, digest: str) -> _Turn:
        """The first turn that a request for a queued adapter has."""
        turns = (self._turn_of_call(call) for call in self._queue[digest].calls)
        return min(turns, default=FIRST_TURN)

    def _turn_of_call(self, call: _Call) -> _Turn:
        if call.new is None or not self._scheduler.is_held_back(call.new.request_id):
            return FIRST_TURN
        return self._scheduler.turn(call.new.request_id)

    def _is_queued_behind(self, call: _Call) -> bool:
        """Whether a request has no better priority than those for which its adapter makes way."""
        assert self._due is not None
        return self._turn_of_call(call)[0] >= self._turn_of(self._due)[0]

    def _choose_due(self, now: float) -> None:
        """Of what waits in the queue, what others make way for: what has waited too long, or has a
        better priority than all that waits for one of them."""
        for digest, queued in list(self._queue.items()):
            queued.calls = [call for call in queued.calls if self._is_wanted(call)]
            if not queued.calls:
                del self._queue[digest]
        if self._due not in self._queue:
            self._stop_leaving()
        if not self._queue:
            return
        turns = {digest: self._turn_of(digest) for digest in self._queue}
        first = min(turns, key=turns.__getitem__)
        if self._due is not None and turns[first][0] < turns[self._due][0]:
            self._stop_leaving()
            if first not in self._queue:
                return
        if self._due is not None and any(one.is_leaving for one in self._hosted.values()):
            return
        late = [
            digest
            for digest, queued in self._queue.items()
            if now - queued.since >= self._limits.max_wait_s
        ]
        chosen = min(late, key=turns.__getitem__, default=first)
        if turns[first][0] < turns[chosen][0]:
            chosen = first
        if self._due is not None:  # for which one alone was not enough
            chosen = self._due
        found = self._to_make_way(turns[chosen][0], chosen in late)
        if found is not None:
            self._due = chosen
            self._make_way(found, now)

    def _to_make_way(self, priority: float, is_late: bool) -> str | None:
        """The adapter that goes for one with this priority. What waits for it must have a worse one
        or, if the other is late, no better one and have been served: so each has its turn."""
        found: list[tuple[bool, int, str]] = []
        for digest, hosted in self._hosted.items():
            if hosted.calls or not hosted.is_loaded:
                continue
            waiting = [
                call.new
                for call in hosted.accepted.values()
                if call.new is not None and self._scheduler.is_queued(call.new)
            ]
            best = min((self._scheduler.priority(new) for new in waiting), default=math.inf)
            is_served = self._slots.was_used(digest)
            if (waiting and best > priority) or (is_late and best >= priority and is_served):
                num_begun = hosted.num_users - sum(new.params.n for new in waiting)
                found.append((digest in self._pinned, num_begun, digest))
        return min(found)[2] if found else None

    def _make_way(self, digest: str, now: float) -> None:
        """Hold the requests back that have not begun with an adapter. It goes once those end that
        have."""
        hosted = self._hosted[digest]
        hosted.is_leaving = True
        held: list[_Call] = []
        for key, call in list(hosted.accepted.items()):
            new = call.new
            if new is None or not self._scheduler.is_queued(new):
                continue
            self._scheduler.hold_back(new)
            del hosted.accepted[key]
            for one in range(key, key + new.params.n):
                del self._used[one]
            hosted.num_users -= new.params.n
            call.has_lost_place = True
            self._open[call] = None
            held.append(call)
        if held:
            self._enqueue(digest, hosted.file, held, now)

    def _can_make_room(self) -> bool:
        """Whether a further adapter would find room on the hosts, for all that is known."""
        return self._has_room(0) or any(map(self._is_idle, self._hosted))

    def _has_room(self, nbytes: int) -> bool:
        limits, hosted = self._limits, self._hosted
        if limits.max_host_adapters is not None:
            return len(hosted) < limits.max_host_adapters
        used = sum(one.file.nbytes for one in hosted.values())
        return not hosted or used + nbytes <= limits.max_host_bytes

    def _check_saved(self, file: AdapterFile, reference: LoRARequest) -> None:
        most = self._limits.max_saved_bytes
        if most is not None and file.saved_nbytes > most:
            raise AdapterError(
                f"adapter {reference.lora_name!r} has {file.saved_nbytes / GIB:.2f} GiB of whole "
                f"weights (modules_to_save), and {most / GIB:.2f} GiB of the devices are free "
                "beside the KV cache. Lower gpu_memory_utilization or kv_cache_memory_bytes by as "
                "much, or merge the adapter (`quire lora merge`)."
            )

    def _make_room(self, file: AdapterFile) -> bool:
        """For one more adapter in the memory of the hosts."""
        while not self._has_room(file.nbytes):
            in_turn = sorted(self._hosted, key=lambda digest: digest in self._pinned)
            if not any(self._drop(digest) for digest in in_turn):
                return False
        return True

    def _is_idle(self, digest: str) -> bool:
        hosted = self._hosted[digest]
        return hosted.is_loaded and not hosted.num_users and not hosted.calls

    def _drop(self, digest: str) -> bool:
        """Let an adapter go that no request uses, from hosts and devices."""
        if not self._is_idle(digest):
            return False
        del self._hosted[digest]
        self._unpin(digest)
        self._slots.forget(digest)
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
            is_same = str(adapter_folder(call.reference.lora_path)) == hosted.file.folder
            if is_same and not call.has_lost_place:
                self._refuse(call, error)
            else:  # its own folder holds the same, and may be all right
                call.has_lost_place = False
                self._read_folder(call)

    def _accept(self, hosted: _Hosted) -> None:
        file = hosted.file
        saved_bytes = 0 if self._limits.max_saved_bytes is None else file.saved_nbytes
        content = AdapterContent(file.digest, chunks_for(file.rank), saved_bytes)
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
                hosted.accepted[new.key] = call
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
            self._unpin(digest)
            self._drop(digest)

    def _unpin(self, digest: str) -> None:
        if digest in self._pinned:
            self._pinned.remove(digest)
            self._slots.unpin(digest)

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
