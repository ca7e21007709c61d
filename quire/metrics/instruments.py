"""Counters, gauges and histograms over plain numbers and arrays, and the records a reader gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike


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
    """Observations counted by bucket; takes single numbers and whole arrays."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name, self.help = name, help
        self.bounds = np.array(bounds, np.float64)
        self._counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum = 0.0
        self._max = 0.0

    def observe(self, values: ArrayLike) -> None:
        array = np.atleast_1d(np.asarray(values, np.float64))
        if not len(array):
            return
        places = np.searchsorted(self.bounds, array)
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._sum += float(array.sum())
        self._max = max(self._max, float(array.max()))

    def read(self) -> HistogramReading:
        names = [*(f"{bound:g}" for bound in self.bounds), "+Inf"]
        buckets = dict(zip(names, np.cumsum(self._counts).tolist(), strict=True))
        count = int(self._counts.sum())
        return HistogramReading(self.name, self.help, {}, count, self._sum, self._max, buckets)
