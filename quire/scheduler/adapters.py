"""`AdapterSlots`: which adapters lie on the devices, in which slots and chunks.

A second resource at admission. A sequence with a row uses its adapter's slot; adapters that none
uses stay, and give way to others, the least recently used first. Requests that find no room wait
without blocking others (`WaitingQueue.block`). Once the oldest of them has waited `max_wait_s`, no
further request of its priority or a lower one begins with the adapters that must make way for its
own, so none starves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from quire.protocol.adapter import AdapterContent, AdapterLimits, PlacedAdapter
from quire.protocol.plan import Int32Array


class Waiting(Protocol):
    """Requests for one adapter, of one priority."""

    priority: int


Wanted = Mapping[str, Iterable[Waiting]]
"""What waits for each adapter, by digest. There are no entries for adapters that none wants."""


@dataclass(slots=True)
class Resident:
    """An adapter on the devices."""

    content: AdapterContent
    slot: int
    chunks: list[int]
    num_users: int = 0
    """Sequences with a row that use it."""


class AdapterSlots:
    def __init__(self, limits: AdapterLimits) -> None:
        self.num_chunks = limits.num_chunks
        self._max_saved_bytes = limits.max_saved_bytes or 0
        self._max_wait_s = limits.max_wait_s
        self._free_slots = list(range(self.num_chunks))[::-1]
        self._free_chunks = list(range(self.num_chunks))[::-1]
        self.residents: dict[str, Resident] = {}
        """By digest, as all below."""
        self._idle: OrderedDict[str, Resident] = OrderedDict()
        """Those without users, the least recently used first."""
        self._num_idle_chunks = 0
        self._pinned: set[str] = set()
        self._was_used: set[str] = set()
        """Those that a sequence had a row with since they were forgotten last."""
        self._since: dict[str, float] = {}
        """Since when requests wait for an adapter's place, the oldest first."""
        self._blocked: dict[str, AdapterContent] = {}
        """Those of them that are out of the queue's order."""
        self._due: AdapterContent | None = None
        """That of the request that has waited too long."""
        self._due_priority = 0
        """The best of the requests for it. Those of better priority go ahead of them."""
        self._is_outranked = False
        """Whether one of better priority waits for the place of another adapter."""
        self._leaving: set[str] = set()
        """What makes way for it: no further request of its priority begins with these."""
        self._has_changed = False
        """Whether what is blocked may find room now."""
        # Changes since the last plan that the next one will carry:
        self._cleared: list[int] = []
        self._placed: list[PlacedAdapter] = []

    # --- admission --------------------------------------------------------------------------------

    def has_room(self, adapter: AdapterContent, has_begun: bool, priority: int = 0) -> bool:
        """Whether a sequence may get a row with this adapter; one that `has_begun` need not give
        way, since others may wait for its end: beams, or a pause."""
        gives_way = not has_begun and priority >= self._due_priority
        if adapter.digest in self.residents:
            return not gives_way or adapter.digest not in self._leaving
        need = adapter.num_chunks
        if gives_way and self._due is not None and self._due != adapter:
            need += self._due.num_chunks  # what gets free is kept for that one
            if adapter.saved_bytes and self._due.saved_bytes:
                return False
        return need <= self._num_available(adapter) and self._has_room_beside(adapter)

    def _has_room_beside(self, adapter: AdapterContent) -> bool:
        """Whether an adapter's whole weights would fit, were all idle ones gone."""
        if not adapter.saved_bytes:
            return True
        used = sum(one.content.saved_bytes for one in self.residents.values() if one.num_users)
        return used + adapter.saved_bytes <= self._max_saved_bytes

    def _fits(self, adapter: AdapterContent) -> bool:
        """Whether an adapter fits beside all that lie there."""
        if len(self._free_chunks) < adapter.num_chunks:
            return False
        used = sum(one.content.saved_bytes for one in self.residents.values())
        return not adapter.saved_bytes or used + adapter.saved_bytes <= self._max_saved_bytes

    def acquire(self, adapter: AdapterContent) -> tuple[int, bool]:
        """The slot of an adapter for which there is room, and whether it lay there already."""
        found = self.residents.get(adapter.digest)
        was_there = found is not None
        if found is None:
            found = self._place(adapter)
        if self._idle.pop(adapter.digest, None) is not None:
            self._num_idle_chunks -= len(found.chunks)
        found.num_users += 1
        self._was_used.add(adapter.digest)
        if adapter.digest in self._blocked:  # others can follow
            self._has_changed = True
        else:
            self._since.pop(adapter.digest, None)
        if self._due == adapter:
            self._stop_waiting()
        elif self._due is not None and not was_there:
            self._make_way(self._due)  # it may lie where that one was to go
        return found.slot, was_there

    def release(self, digest: str) -> None:
        """A sequence gives its row up."""
        resident = self.residents[digest]
        resident.num_users -= 1
        if not resident.num_users:
            self._idle[digest] = resident
            self._num_idle_chunks += len(resident.chunks)
            self._has_changed = True

    def _place(self, adapter: AdapterContent) -> Resident:
        """Give an adapter a slot, and those that are in its way up."""
        while not self._fits(adapter):
            unpinned = (digest for digest in self._idle if digest not in self._pinned)
            self.evict(next(unpinned, None) or next(iter(self._idle)))
        chunks = [self._free_chunks.pop() for _ in range(adapter.num_chunks)]
        placed = Resident(adapter, self._free_slots.pop(), chunks)
        self.residents[adapter.digest] = placed
        numbers = np.array(chunks, np.int32)
        self._placed.append(PlacedAdapter(adapter.digest, placed.slot, numbers))
        return placed

    def _num_available(self, adapter: AdapterContent) -> int:
        """Chunks that are free, or held by adapters that may be evicted for this one. Pinned ones
        are only where it could never run otherwise."""
        available = len(self._free_chunks) + self._num_idle_chunks
        pinned = [self.residents[one] for one in self._pinned if one in self.residents]
        if self.num_chunks - sum(len(one.chunks) for one in pinned) < adapter.num_chunks:
            return available
        return available - sum(len(one.chunks) for one in pinned if not one.num_users)

    # --- waiting ----------------------------------------------------------------------------------

    def block(self, adapter: AdapterContent, now: float, priority: int = 0) -> None:
        """A request found no room."""
        self._is_outranked |= self._due is not None and priority < self._due_priority
        self._blocked[adapter.digest] = adapter
        self._since.setdefault(adapter.digest, now)

    def unblock(self, now: float, wanted: Wanted) -> list[str]:
        """Adapters that may find room now, those first for which requests have waited longest."""
        if self._due is not None and self._due.digest not in wanted:
            self._stop_waiting()
        self._choose_due(now, wanted)
        if not self._has_changed:
            return []
        self._has_changed = False
        found: list[str] = []
        num_taken = 0
        for digest in self._since:
            adapter = self._blocked.get(digest)
            if adapter is None or digest not in wanted:
                continue
            need = 0 if digest in self.residents else adapter.num_chunks
            has_room = self.has_room(adapter, False, _best(wanted[digest]))
            if has_room and need + num_taken <= self._num_available(adapter):
                num_taken += need
                del self._blocked[digest]
                found.append(digest)
        return found

    def _choose_due(self, now: float, wanted: Wanted) -> None:
        """Of what has waited too long, what others make way for: of the best priority, then the
        oldest. Forgets on the way what only requests that have ended waited for."""
        if self._due is not None:
            best = _best(wanted[self._due.digest])
            self._has_changed |= best != self._due_priority
            self._due_priority = best
            if not self._is_outranked:
                return
        chosen, is_outranked = None, False
        for digest in list(self._since):
            if digest not in wanted:
                del self._since[digest]
                self._blocked.pop(digest, None)
            elif digest in self._blocked:
                priority = _best(wanted[digest])
                is_first = self._due is None and chosen is None
                if now - self._since[digest] >= self._max_wait_s:
                    if is_first or priority < self._due_priority:
                        chosen, self._due_priority = digest, priority
                elif is_first:
                    break
                elif priority < self._due_priority:
                    is_outranked = True
        self._is_outranked = is_outranked
        if chosen is not None:
            self._leaving.clear()
            self._make_way(self._blocked[chosen])

    def _make_way(self, adapter: AdapterContent) -> None:
        """For a request that has waited too long: choose what is evicted for it, once it is idle.
        What has the fewest users is soonest."""
        self._due = adapter
        available = len(self._free_chunks)
        available += sum(len(self.residents[one].chunks) for one in self._leaving)
        by_users = sorted(self.residents.values(), key=lambda one: one.num_users)
        in_turn = sorted(by_users, key=lambda one: one.content.digest in self._pinned)
        staying = [one for one in in_turn if one.content.digest not in self._leaving]
        saved = sum(one.content.saved_bytes for one in staying)
        for resident in staying:
            lacks_saved = (
                adapter.saved_bytes and saved + adapter.saved_bytes > self._max_saved_bytes
            )
            if available >= adapter.num_chunks and not lacks_saved:
                break
            if available < adapter.num_chunks or resident.content.saved_bytes:
                available += len(resident.chunks)
                saved -= resident.content.saved_bytes
                self._leaving.add(resident.content.digest)
        self._has_changed = True

    def _stop_waiting(self) -> None:
        """It has got its place, or needs none any more."""
        self._due = None
        self._leaving.clear()
        self._has_changed = True

    # --- operating --------------------------------------------------------------------------------

    def was_used(self, digest: str) -> bool:
        """Whether a sequence had a row with an adapter since it was forgotten last."""
        return digest in self._was_used

    def forget(self, digest: str) -> None:
        """The hosts have it no more; no sequence may use it."""
        self.evict(digest)
        self._was_used.discard(digest)

    def evict(self, digest: str) -> None:
        """Forget an adapter that no sequence uses, if it is here."""
        if (resident := self._idle.pop(digest, None)) is None:
            return
        self._num_idle_chunks -= len(resident.chunks)
        del self.residents[digest]
        self._leaving.discard(digest)
        self._free_slots.append(resident.slot)
        self._free_chunks += resident.chunks
        self._cleared.append(resident.slot)
        self._placed = [one for one in self._placed if one.slot != resident.slot]
        self._has_changed = True

    def pin(self, digest: str) -> None:
        """Evict it only where another could never run otherwise."""
        self._pinned.add(digest)

    def unpin(self, digest: str) -> None:
        self._pinned.discard(digest)
        self._has_changed = True

    def reset(self) -> None:
        """After a failed step devices may lack what plans have placed: place all anew. No sequence
        may have a row."""
        for digest in list(self._idle):
            self.evict(digest)

    def take_changes(self) -> tuple[Int32Array, list[PlacedAdapter]]:
        """Slots to clear, then adapters to place, since the last plan."""
        cleared, placed = np.array(self._cleared, np.int32), self._placed
        self._cleared, self._placed = [], []
        return cleared, placed

    @property
    def num_used_chunks(self) -> int:
        return self.num_chunks - len(self._free_chunks)

    @property
    def waiting(self) -> list[str]:
        """Adapters for whose place requests wait."""
        return list(self._since)

    def check_integrity(self, num_users: dict[str, int]) -> None:
        """Raise AssertionError if a slot or a chunk is leaked or held twice; `num_users` counts the
        rows of each adapter."""
        residents = self.residents.values()
        slots = sorted([*self._free_slots, *(one.slot for one in residents)])
        chunks = sorted([*self._free_chunks, *(i for one in residents for i in one.chunks)])
        assert slots == list(range(self.num_chunks)), "an adapter slot is lost or held twice"
        assert chunks == list(range(self.num_chunks)), "an adapter chunk is lost or held twice"
        counted = {digest: one.num_users for digest, one in self.residents.items()}
        idle = {digest for digest, count in counted.items() if not count}
        assert idle == set(self._idle), "an adapter's users are counted wrongly"
        used = {digest: count for digest, count in counted.items() if count}
        assert used == num_users, "an adapter's users are counted wrongly"


def _best(waiting: Iterable[Waiting]) -> int:
    return min(one.priority for one in waiting)
