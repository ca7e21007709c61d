"""Counters, gauges and histograms over plain numbers, and the records a reader gets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray


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


@dataclass(frozen=True)
class Readings:
    """All readings of an engine, by kind, so that they can cross a process boundary."""

    counters: list[CounterReading]
    gauges: list[GaugeReading]
    histograms: list[HistogramReading]

    @classmethod
    def of(cls, metrics: Sequence[Metric]) -> Readings:
        return cls(
            [m for m in metrics if isinstance(m, CounterReading)],
            [m for m in metrics if isinstance(m, GaugeReading)],
            [m for m in metrics if isinstance(m, HistogramReading)],
        )

    @property
    def all(self) -> list[Metric]:
        return [*self.counters, *self.gauges, *self.histograms]


class Counter:
    def __init__(self, name: str, help: str, labels: dict[str, str] | None = None) -> None:
        self.name, self.help, self.labels = name, help, labels or {}
        self.value = 0

    def add(self, amount: int) -> None:
        self.value += amount

    def read(self) -> CounterReading:
        return CounterReading(self.name, self.help, self.labels, self.value)


class Gauge:
    def __init__(self, name: str, help: str, labels: dict[str, str] | None = None) -> None:
        self.name, self.help, self.labels = name, help, labels or {}
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = value

    def read(self) -> GaugeReading:
        return GaugeReading(self.name, self.help, self.labels, self.value)


class Histogram:
    """Observations counted by bucket."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name, self.help = name, help
        self.bounds = list(bounds)
        self._bound_array = np.array(bounds, np.float64)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._max = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self._sum += value
        self._max = max(self._max, value)

    def observe_many(self, values: NDArray[np.float64]) -> None:
        """All at once: an array costs little more than one value."""
        if not len(values):
            return
        least, most = float(values.min()), float(values.max())
        first = bisect_left(self.bounds, least)
        if first == len(self.bounds) or most <= self.bounds[first]:  # all of a kind, as often
            self._counts[first] += len(values)
        else:
            places = np.bincount(np.searchsorted(self._bound_array, values))
            for place in np.flatnonzero(places).tolist():
                self._counts[place] += int(places[place])
        self._sum += float(values.sum())
        self._max = max(self._max, most)

    def read(self) -> HistogramReading:
        names = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]
        buckets = dict(zip(names, accumulate(self._counts), strict=True))
        count = sum(self._counts)
        return HistogramReading(self.name, self.help, {}, count, self._sum, self._max, buckets)


class RecentRate:
    """Events per second over the last few seconds, counted in whole seconds."""

    SPAN_S = 5

    def __init__(self) -> None:
        self._counts = [0] * (self.SPAN_S + 1)
        self._second = 0

    def add(self, now: float, amount: int) -> None:
        self._turn_to(int(now))
        self._counts[self._second % len(self._counts)] += amount

    def per_second(self, now: float) -> float:
        """Over the whole seconds before this one."""
        self._turn_to(int(now))
        current = self._second % len(self._counts)
        return (sum(self._counts) - self._counts[current]) / self.SPAN_S

    def _turn_to(self, second: int) -> None:
        for passed in range(min(second - self._second, len(self._counts))):
            self._counts[(second - passed) % len(self._counts)] = 0
        self._second = max(second, self._second)
