"""Medians, spread and ratios of what `cpu.py` measured, as tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from harness import markdown_table

WORKLOADS = {
    "thr": "mixed requests, all there from the start",
    "prefix": "requests that share their first tokens, all at once",
    "lat": "one stream at a time",
}


def spread(values: Sequence[float], digits: int) -> str:
    """The median, and the least and the most if there is more than one value."""
    middle = f"{statistics.median(values):,.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"


def ratios(times: Sequence[float], base: Sequence[float]) -> list[float]:
    """How much faster than the base in each round; rounds are compared with themselves, so that
    what slows the whole machine down for a while counts little."""
    return [theirs / ours for ours, theirs in zip(times, base, strict=True)]


def workload_table(workload: str, systems: dict[str, dict[str, Any]], base: str) -> str:
    """One row per system; `systems` holds a list of rounds by workload."""
    speed_of = "seconds_per_token" if workload == "lat" else "seconds"
    header = ["system", *_columns(workload), f"speed, {base} = 1", "outputs equal to quire-fp32"]
    rows = []
    base_times = [one[speed_of] for one in systems[base]["rounds"][workload]]
    for name, system in systems.items():
        rounds = system["rounds"][workload]
        speed = ratios([one[speed_of] for one in rounds], base_times)
        rows.append([name, *_cells(workload, rounds), spread(speed, 2), _equal(rounds)])
    return markdown_table(header, rows)


def _columns(workload: str) -> list[str]:
    if workload == "lat":
        return ["ms per token after the first", "first token, ms"]
    return ["seconds", "output tokens/s"]


def _cells(workload: str, rounds: list[dict[str, Any]]) -> list[str]:
    if workload == "lat":
        return [
            spread([1000 * one["seconds_per_token"] for one in rounds], 1),
            spread([1000 * one["first_token_s"] for one in rounds], 0),
        ]
    return [
        spread([one["seconds"] for one in rounds], 2),
        spread([one["output_tokens"] / one["seconds"] for one in rounds], 1),
    ]


def _equal(rounds: list[dict[str, Any]]) -> str:
    """Of the first round; the others' prompts differ from it by one token."""
    equal = rounds[0].get("equal_outputs")
    return "" if equal is None else f"{equal} of {rounds[0]['requests']}"


def footprint_table(systems: dict[str, dict[str, Any]]) -> str:
    """Start-up, memory and disk."""
    header = [
        "system",
        "version",
        "start to first token, s",
        "memory at the first token, MB",
        "most memory after a workload, MB",
        "installed, MB",
        "without torch, triton, model, MB",
    ]
    rows = [
        [
            name,
            system["version"],
            spread(system["start_s"], 2),
            _mb(system["first_token_memory_bytes"]),
            _mb(system["most_memory_bytes"]),
            _mb(system["installed_bytes"]["all"]),
            _mb(system["installed_bytes"]["beyond"]),
        ]
        for name, system in systems.items()
    ]
    return markdown_table(header, rows)


def _mb(count: int) -> str:
    return f"{count / 1e6:,.0f}"
