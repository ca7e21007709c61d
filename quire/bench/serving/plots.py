"""Plots of one load, and of latency against throughput over several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.bench.report import INK
from quire.bench.serving.runner import LoadRun
from quire.bench.serving.statistics import TIMES

BINS = 60


def draw_run(figure: Any, run: LoadRun) -> None:
    """How times spread, and tokens and requests in flight over time."""
    left, right = figure.subplots(1, 2)
    good = [record for record in run.records if record.failure is None]
    series: dict[str, list[float]] = {
        "ttft": [record.times[0] - record.sent_s for record in good],
        "itl": [gap for record in good for gap in np.diff(record.times)],
        "e2e": [record.end_s - record.sent_s for record in good],
    }
    for (name, values), ink in zip(series.items(), INK, strict=False):
        if len(values):
            ordered = np.sort(values)
            shares = np.arange(1, len(ordered) + 1) * 100 / len(ordered)
            left.plot(1000 * ordered, shares, color=ink, label=TIMES[name])
    left.set(xlabel="ms", ylabel="% at most", title="Times", xscale="log", ylim=(0, 101))
    left.legend(frameon=False, loc="lower right")
    start = min(record.sent_s for record in run.records)
    edges = np.linspace(0, run.seconds, BINS + 1)
    pieces = [time - start for record in good for time in record.times]
    counts, _ = np.histogram(pieces, edges)
    right.plot(edges[1:], counts / np.diff(edges), color=INK[0])
    right.set(xlabel="s", ylabel="pieces/s", title="Stream over time", ylim=(0, None))
    sent = np.array([record.sent_s - start for record in run.records])
    ended = np.array([record.end_s - start for record in run.records])
    in_flight = [(sent <= edge).sum() - (ended <= edge).sum() for edge in edges]
    other = right.twinx()
    other.plot(edges, in_flight, color=INK[1], linestyle="--")
    other.set(ylabel="requests in flight (dashed)", ylim=(0, None))


def draw_sweep(figure: Any, results: Sequence[dict[str, Any]]) -> None:
    """Latency against throughput, one point per load."""
    panels = figure.subplots(1, 2)
    for axes, name in zip(panels, ("ttft", "tpot"), strict=True):
        for part, ink in (("p50", INK[0]), ("p99", INK[1])):
            points = [
                (result["output_tokens_per_s"], 1000 * result[f"{name}_s"][part])
                for result in results
                if result[f"{name}_s"] is not None
            ]
            axes.plot(*zip(*points, strict=True), "o-", color=ink, label=part) if points else None
        for result in results:
            if result[f"{name}_s"] is not None:
                place = (result["output_tokens_per_s"], 1000 * result[f"{name}_s"]["p50"])
                label = f"{result['load']['value']:g}"
                axes.annotate(label, place, (3, 4), textcoords="offset points", fontsize=7)
        axes.set(xlabel="output tokens/s", ylabel="ms", title=TIMES[name])
        axes.set(ylim=(0, None), xlim=(0, None))
        axes.legend(frameon=False, title=f"by {results[0]['load']['kind']}")
