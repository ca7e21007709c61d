"""What a benchmark hands over: a table for people, JSON for programs, and a plot."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from quire import __version__
from quire.bench.workload import BenchRequest
from quire.config.cli import Arguments
from quire.config.device import cpu_device
from quire.protocol.errors import OptionError

INK = ("#2f6f9f", "#d9822b", "#5b8c5a", "#a94f64", "#7a6c9d", "#8a8a8a")
"""Colours of plots, told apart also by most people who see few colours."""


@dataclass(frozen=True)
class Report:
    """The outcome of one benchmark."""

    benchmark: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]
    """Sentences under the table: what was run, what the columns mean."""
    figures: dict[str, Any]
    """Everything measured, with plain numbers."""
    draw: Callable[[Any], None]
    """Draws on an empty matplotlib figure."""
    size: tuple[float, float] = (8.0, 3.6)
    """Inches of the plot."""


class Subject(Protocol):
    """What was measured: the engines of a benchmark, or a server."""

    def described(self) -> dict[str, Any]: ...


def check_outputs(arguments: Arguments) -> None:
    """Refuse files that could not be written before anything is measured."""
    for name in ("json", "plot"):
        path = getattr(arguments, name)
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise OptionError(f"--{name} {path!r}: the folder does not exist; make it first.")
    if arguments.plot is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise OptionError(
            f"--plot {arguments.plot!r} needs matplotlib, which is not installed. Run "
            "`pip install matplotlib`, or leave --plot out."
        )
    formats = (".png", ".svg", ".pdf")
    if Path(arguments.plot).suffix.lower() not in formats:
        raise OptionError(f"--plot {arguments.plot!r} must end in one of {', '.join(formats)}.")


def publish(report: Report, arguments: Arguments, subject: Subject) -> None:
    """Print the table and write the files that were asked for."""
    for line in table_lines(report):
        print(line)
    if arguments.json is not None:
        document = {**_circumstances(report, subject), **report.figures}
        text = json.dumps(document, indent=1, default=_plain)
        Path(arguments.json).write_text(text + "\n", encoding="utf-8")
    if arguments.plot is not None:
        _plot(report, arguments.plot)


def table_lines(report: Report) -> list[str]:
    """The report as text: first columns begin in line, the others end in line."""
    rows = [list(report.header), *map(list, report.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return [report.title, "", line(rows[0]), rule, *map(line, rows[1:]), "", *report.notes]


def _circumstances(report: Report, subject: Subject) -> dict[str, Any]:
    """Where the figures come from."""
    device = cpu_device()
    return {
        "benchmark": report.benchmark,
        "quire": __version__,
        "machine": {
            "cpu": device.name,
            "threads": device.num_threads,
            "memory_bytes": device.total_memory_bytes,
            "system": platform.platform(),
            "python": platform.python_version(),
            "torch": importlib.metadata.version("torch"),
        },
        **subject.described(),
    }


def described(requests: Sequence[BenchRequest]) -> list[dict[str, int]]:
    """The lengths of requests, for JSON."""
    return [request.described() for request in requests]


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return str(value)


def _plot(report: Report, path: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=report.size, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(report.title, fontsize=11)
    report.draw(figure)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10)
    figure.savefig(path, dpi=150)


def median(values: Sequence[float]) -> float:
    return float(np.median(values))


def p90(values: Sequence[float]) -> float:
    return float(np.percentile(values, 90))


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
