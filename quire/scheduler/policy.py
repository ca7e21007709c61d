"""Scheduling policies: the order in which requests are served; the last is preempted first."""

from __future__ import annotations

from collections.abc import Callable

from quire.protocol.errors import OptionError

Rank = tuple[int, int]

POLICIES: dict[str, Callable[[int, int], Rank]] = {
    "fcfs": lambda priority, arrival: (0, arrival),
    "priority": lambda priority, arrival: (priority, arrival),
}


def rank_function(name: str) -> Callable[[int, int], Rank]:
    """(priority, arrival number) -> rank; smaller ranks go first."""
    if name not in POLICIES:
        raise OptionError(f"scheduling_policy must be one of {sorted(POLICIES)}, got {name!r}.")
    return POLICIES[name]
