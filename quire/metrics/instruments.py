"""Counters, gauges and histograms over plain numbers, and the records a reader gets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate


@dataclass(frozen=True)
class Metric:
    """A reading. `name` is stable and documented."""

    name: str
    help: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CounterReading(Metric):
    value: int = 0


@dataclass(frozen=True)
class GaugeReading(Metric):
    value: float = 0.0


@dataclass(frozen=True)
class HistogramReading(Metric):
    count: int = 0
    sum: float = 0.0
    max: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)
    """Upper bound -> observations at or below it (cumulative, as Prometheus has it)."""

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else 0.0


class Counter:
    def __init__(self, name: str, help: str, labels: dict[str, str] | None = None) -> None:
        self.name, self.help, self.labels = name, help, labels or {}
        self.value = 0

    def add(self, amount: int) -> None:
        self.value += amount

    def read(self) -> CounterReading:
        return CounterReading(self.name, self.help, self.labels, self.value)


class Gauge:
    def __init__(self, name: str, help: str) -> None:
        self.name, self.help = name, help
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = value

    def read(self) -> GaugeReading:
        return GaugeReading(self.name, self.help, {}, self.value)


class Histogram:
    """Observations counted by bucket."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name, self.help = name, help
        self.bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._max = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self._sum += value
        self._max = max(self._max, value)

    def read(self) -> HistogramReading:
        names = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]
        buckets = dict(zip(names, accumulate(self._counts), strict=True))
        count = sum(self._counts)
        return HistogramReading(self.name, self.help, {}, count, self._sum, self._max, buckets)
