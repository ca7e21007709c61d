"""`LazyHeap`: a priority queue from which anything can be removed at once."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from itertools import count
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class LazyHeap(Generic[T]):
    """Smallest key first; among equal keys the first to come. An entry that was removed is skipped
    when it comes up, and all such entries are dropped once they outnumber the others."""

    def __init__(self) -> None:
        self._entries: list[tuple[Any, int, T]] = []
        self._tickets: dict[T, int] = {}
        self._next_ticket = count()

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, item: T) -> bool:
        return item in self._tickets

    def __iter__(self) -> Iterator[T]:
        """Everything in it, in the order in which it came."""
        return iter(self._tickets)

    def push(self, key: Any, item: T) -> None:
        ticket = next(self._next_ticket)
        self._tickets[item] = ticket
        heapq.heappush(self._entries, (key, ticket, item))

    def first(self) -> tuple[Any, T]:
        """The smallest key and its item."""
        entries, tickets = self._entries, self._tickets
        while tickets.get(entries[0][2]) != entries[0][1]:
            heapq.heappop(entries)
        return entries[0][0], entries[0][2]

    def pop(self) -> T:
        item = self.first()[1]
        heapq.heappop(self._entries)
        del self._tickets[item]
        return item

    def remove(self, item: T) -> bool:
        """Forget an item; returns whether it was there."""
        if self._tickets.pop(item, None) is None:
            return False
        if len(self._entries) > 2 * len(self._tickets) + 16:
            self._entries = [e for e in self._entries if self._tickets.get(e[2]) == e[1]]
            heapq.heapify(self._entries)
        return True
