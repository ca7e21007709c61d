"""The `memory` part of `structured.py`: what a server's processes hold after many grammars."""

from __future__ import annotations

import http.client
import json
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harness import markdown_table, say
from server_systems import System, start_embedded

NUM_CLIENTS = 16
NUM_SAMPLES = 40
MAX_SLOPE_MB = 1.0
"""Per 1,000 grammars."""
FLAGS = ("--max-model-len", "1024", "--kv-cache-memory-bytes", "32MiB")
"""A small cache, since its memory counts once it is written: it is full after 3,000 requests."""


def schema(number: int) -> dict[str, Any]:
    """A tool's arguments, as clients send them; no two are equal."""
    properties = {
        f"name_{number}": {"type": "string", "maxLength": 20},
        f"count_{number}": {"type": "integer", "minimum": 0},
        "unit": {"enum": ["km", "miles", f"unit {number}"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
    }
    return {"type": "object", "properties": properties, "required": list(properties)}


def ask(url: str, numbers: range) -> None:
    """Send a request for each schema over one connection."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    for number in numbers:
        grammar = {"json": schema(number)}
        body = {"prompt": "In JSON: ", "max_tokens": 4, "structured_outputs": grammar}
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        text = reply.read()
        if reply.status != 200:
            sys.exit(f"schema {number} got status {reply.status}: {text[:300]!r}")
    connection.close()


def resident_mb(system: System) -> dict[str, float]:
    """Resident memory of the server's processes, by module."""
    found = {}
    for name, folder in system.children().items():
        lines = (folder / "status").read_text().splitlines()
        (size,) = (line.split()[1] for line in lines if line.startswith("VmRSS:"))
        found[name] = int(size) / 1024
    return found


def measure_memory(count: int) -> dict[str, Any]:
    """The slope of each process's memory over the second half of `count` grammars."""
    step = max(count // NUM_SAMPLES, NUM_CLIENTS)
    sent: list[int] = []
    sizes: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(NUM_CLIENTS) as clients:
        system = start_embedded(Path(folder), FLAGS)
        try:
            for first in range(0, count, step):
                last = min(first + step, count)
                parts = [range(first + i, last, NUM_CLIENTS) for i in range(NUM_CLIENTS)]
                list(clients.map(lambda numbers: ask(system.url, numbers), parts))
                sent.append(last)
                sizes.append(resident_mb(system))
                say(
                    f"{last} grammars: {', '.join(f'{k} {v:.1f} MB' for k, v in sizes[-1].items())}"
                )
        finally:
            system.close()
    half = len(sent) // 2
    rows, slopes = [], {}
    for name in sizes[-1]:
        values = [one[name] for one in sizes]
        slope, _ = statistics.linear_regression(sent[half:], values[half:])
        slopes[name] = slope * 1000
        shown = (values[0], values[half], values[-1], slopes[name])
        rows.append([name, *(f"{value:.1f}" for value in shown)])
    head = ["MB", f"{sent[0]} grammars", str(sent[half]), str(sent[-1]), "slope per 1,000"]
    print(markdown_table(head, rows))
    return {"slopes_mb": slopes, "met": max(slopes.values()) < MAX_SLOPE_MB}
