"""Readings as Prometheus text. Only servers need it: it brings prometheus_client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from quire.metrics.instruments import CounterReading, GaugeReading, HistogramReading, Metric

CONTENT_TYPE = CONTENT_TYPE_LATEST
OWN_PREFIX = "quire"


def render(
    readings: Iterable[Metric], prefix: str = OWN_PREFIX, labels: Mapping[str, str] | None = None
) -> bytes:
    """Text of some readings. `labels` are added to all, as vLLM's `model_name` and `engine` are;
    `prefix` replaces "quire" in their names."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Readings(list(readings), prefix, dict(labels or {})))
    return generate_latest(registry)


class _Readings(Collector):
    def __init__(self, readings: list[Metric], prefix: str, labels: dict[str, str]) -> None:
        self._readings, self._prefix, self._labels = readings, prefix, labels

    def collect(self) -> Iterator[Family]:
        """One family for each name; its readings differ in their labels."""
        groups: dict[str, list[Metric]] = {}
        for reading in self._readings:
            groups.setdefault(reading.name, []).append(reading)
        for name, group in groups.items():
            own, _, rest = name.partition(":")
            assert own == OWN_PREFIX, f"metric {name} has no {OWN_PREFIX}: before its name"
            yield self._family(f"{self._prefix}:{rest}", group)

    def _family(self, name: str, group: list[Metric]) -> Family:
        first = group[0]
        names = [*self._labels, *first.labels]
        kind = {
            CounterReading: CounterMetricFamily,
            GaugeReading: GaugeMetricFamily,
            HistogramReading: HistogramMetricFamily,
        }[type(first)]
        family: Family = kind(name, first.help, labels=names)
        for reading in group:
            values = [*self._labels.values(), *reading.labels.values()]
            if isinstance(reading, HistogramReading):
                family.add_metric(values, list(reading.buckets.items()), reading.sum)  # type: ignore[attr-defined]
            elif isinstance(reading, CounterReading | GaugeReading):
                family.add_metric(values, reading.value)  # type: ignore[attr-defined]
        return family
