"""When requests are sent: at a rate, so many at a time, or as a trace has them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import isinf

from quire.bench.serving.workload import LoadRequest

LOAD_KINDS = {
    "rate": "requests/s",
    "concurrency": "at a time",
    "speed": "x the trace's speed",
}


@dataclass(frozen=True)
class Load:
    """One setting of how hard the server is pressed."""

    kind: str
    """A key of LOAD_KINDS."""
    value: float
    burstiness: float = 1.0
    """At a rate: the shape of the gamma distribution of intervals; 1 is a Poisson process, less
    comes in bursts, more comes evenly, infinity at fixed intervals."""

    def __str__(self) -> str:
        if self.kind == "rate" and isinf(self.value):
            return "all at once"
        return f"{self.value:g} {LOAD_KINDS[self.kind]}"

    def schedule(self, requests: Sequence[LoadRequest], seed: int) -> list[float] | None:
        """Seconds from the start at which to send each request; none if answers make room."""
        if self.kind == "concurrency":
            return None
        if self.kind == "speed":
            return [(request.arrival_s or 0.0) / self.value for request in requests]
        return arrival_times(len(requests), self.value, self.burstiness, seed)


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """The first request is sent at once; the others follow at `rate` per second on average."""
    if isinf(rate):
        return [0.0] * count
    if isinf(burstiness):
        gaps = [1 / rate] * (count - 1)
    else:
        dice = random.Random(f"{seed}/arrivals")
        scale = 1 / (rate * burstiness)
        gaps = [dice.gammavariate(burstiness, scale) for _ in range(count - 1)]
    return [0.0, *itertools.accumulate(gaps)]
