"""`Tenants`: how many tokens have been computed for whom, so that rows go to who had least."""

from __future__ import annotations

import numpy as np

from quire.protocol.plan import Int32Array, Int64Array

MAX_IDLE_TENANTS = 1024
MAX_KNOWN_TENANTS = 1024


class Tenants:
    """Tenants are numbered while they have requests in the engine.

    Service counts only in comparison: a newcomer starts level with the least served of those
    who are there (or above, where it had more before it paused), so that no thread can save up.

    Tenants are ordered by age, since the queue protects older ones from newer ones: names cost
    nothing, and a flood of new ones must not take the places of those who were there before. A
    tenant that has been admitted once keeps its age when it pauses. Where more names come than can
    be kept, the newest are forgotten.
    """

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._free_slots: list[int] = []
        self._num_requests: list[int] = []
        self._service: Int64Array = np.zeros(0, np.int64)
        self._turns: list[int] = []
        self._num_turns = 0
        self._idle: dict[str, int] = {}
        """Service of tenants without requests, while others have some."""
        self._ages: dict[str, int] = {}
        """The number of each tenant's arrival, oldest first."""
        self._num_arrivals = 0
        self._unproven: set[str] = set()
        """Those of them that were never admitted."""

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, name: str) -> bool:
        return name in self._slots

    def slot(self, name: str) -> int:
        """The number of a tenant that has requests."""
        return self._slots[name]

    def standing(self, slot: int) -> tuple[int, int]:
        """Smallest goes first: tokens of service, then the turn at which it last got a row."""
        return int(self._service[slot]), self._turns[slot]

    def join(self, name: str) -> int:
        """A tenant's request has come; returns the tenant's number."""
        slot = self._slots.get(name)
        if slot is None:
            level = self._least_service()
            slot = self._free_slots.pop() if self._free_slots else self._grow()
            self._slots[name] = slot
            self._service[slot] = max(level, self._idle.pop(name, 0))
            self._turns[slot] = 0
            if name not in self._ages:
                self._num_arrivals += 1
                self._ages[name] = self._num_arrivals
                self._unproven.add(name)
        self._num_requests[slot] += 1
        return slot

    def age(self, name: str) -> int:
        """Smaller is older; of a tenant that is not known, the age that it would get."""
        return self._ages.get(name, self._num_arrivals + 1)

    def leave(self, name: str) -> None:
        """A request of the tenant has ended."""
        slot = self._slots[name]
        self._num_requests[slot] -= 1
        if self._num_requests[slot]:
            return
        del self._slots[name]
        self._free_slots.append(slot)
        self._forget_newest(name)
        if not self._slots:
            self._idle.clear()  # there is no other left to be compared with
            return
        self._idle[name] = int(self._service[slot])
        if len(self._idle) > MAX_IDLE_TENANTS:
            del self._idle[next(iter(self._idle))]

    def _forget_newest(self, left: str) -> None:
        """Keep the ages of old tenants, not of all that ever sent something."""
        if left in self._unproven:
            self._unproven.remove(left)
            del self._ages[left]
        elif len(self._ages) > MAX_KNOWN_TENANTS:
            newest = next(name for name in reversed(self._ages) if name not in self._slots)
            del self._ages[newest]

    def admitted(self, name: str, num_tokens: int) -> int:
        """A request of the tenant got a row and computes its first tokens; returns the tenant's
        number."""
        slot = self._slots[name]
        self._unproven.discard(name)
        self._num_turns += 1
        self._turns[slot] = self._num_turns
        if len(self._slots) > 1:  # a tenant alone is compared with none
            self._service[slot] += num_tokens
        return slot

    def charge(self, slots: Int32Array, num_tokens: Int32Array) -> None:
        """Rows of these tenants compute tokens."""
        np.add.at(self._service, slots, num_tokens)

    def _least_service(self) -> int:
        active = list(self._slots.values())
        return int(self._service[active].min()) if active else 0

    def _grow(self) -> int:
        self._service = np.append(self._service, np.int64(0))
        self._turns.append(0)
        self._num_requests.append(0)
        return len(self._num_requests) - 1
