"""`/metrics`: the engine's readings as Prometheus text, under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from starlette.responses import Response

from quire.metrics.instruments import CounterReading, HistogramReading
from quire.metrics.instruments import Metric as Reading
from quire.server.generation import state_of

router = APIRouter()

OWN_PREFIX = "quire:"


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    state = state_of(request)
    readings = await state.llm.get_metrics()
    labels = {"model_name": state.model_names[0], "engine": "0"}
    text = prometheus_text(readings, state.options.serving.metrics_prefix, labels)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def prometheus_text(readings: Iterable[Reading], prefix: str, labels: dict[str, str]) -> bytes:
    """Readings in the exposition format. `labels` are added to their own."""
    families: dict[str, Any] = {}
    for reading in readings:
        name = f"{prefix}:{reading.name.removeprefix(OWN_PREFIX)}"
        own = {**labels, **reading.labels}
        if name not in families:
            kind = _family(reading)
            families[name] = kind(name, reading.help, labels=list(own))
        _add(families[name], reading, list(own.values()))
    return generate_latest(_Families(families.values()))


class _Families:
    """What prometheus_client wants of a registry."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _family(reading: Reading) -> Any:
    if isinstance(reading, HistogramReading):
        return HistogramMetricFamily
    return CounterMetricFamily if isinstance(reading, CounterReading) else GaugeMetricFamily


def _add(family: Any, reading: Any, labels: list[str]) -> None:
    if isinstance(reading, HistogramReading):
        family.add_metric(labels, list(reading.buckets.items()), reading.sum)
    else:
        family.add_metric(labels, reading.value)
