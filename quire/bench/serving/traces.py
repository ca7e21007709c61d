"""Recorded traffic: Azure's LLM inference traces (CSV) and Mooncake's (JSON lines).

Azure has times and lengths. Mooncake has the hashes of 512-token blocks as well: prompts that begin
with the same ids begin with the same text.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from quire.bench.serving.workload import LoadRequest, Segment
from quire.protocol.errors import RequestError

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_BLOCK_TOKENS = 512


def read_trace(path: str, limit: int | None = None) -> list[LoadRequest]:
    """The first requests of a trace, with arrival times that begin at 0. The format is told from
    the first line."""
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            if first.lstrip().startswith("{"):
                requests = list(islice(_read_mooncake(path, file), limit))
            else:
                requests = list(islice(_read_azure(path, file), limit))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"--trace {path!r} cannot be read ({error}).") from None
    if not requests:
        raise RequestError(f"--trace {path!r} has no requests.")
    return _from_start(requests)


def _read_azure(path: str, lines: Iterable[str]) -> Iterator[LoadRequest]:
    reader = csv.DictReader(lines)
    if not set(AZURE_COLUMNS) <= set(reader.fieldnames or ()):
        raise RequestError(
            f"--trace {path!r} must be a CSV file with the columns {', '.join(AZURE_COLUMNS)}, or "
            'JSON lines with "timestamp", "input_length" and "output_length".'
        )
    for number, row in enumerate(reader):
        try:
            time = _seconds(row["TIMESTAMP"])
            inputs, outputs = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (ValueError, TypeError):
            raise _bad_line(path, reader.line_num, row) from None
        yield LoadRequest((Segment(f"request {number}", max(inputs, 1)),), max(outputs, 1), time)


def _seconds(text: str) -> float:
    """Azure writes seven decimals, newer traces a time zone too; datetime may read neither."""
    match = re.match(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d+)?", text)
    if match is None:
        raise ValueError(text)
    whole = datetime.strptime(f"{match[1]} {match[2]}", "%Y-%m-%d %H:%M:%S")
    return (whole - datetime(1970, 1, 1)).total_seconds() + float(match[3] or 0)


def _read_mooncake(path: str, lines: Iterable[str]) -> Iterator[LoadRequest]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            time = float(row["timestamp"]) / 1000
            inputs, outputs = int(row["input_length"]), int(row["output_length"])
            ids = [int(one) for one in row.get("hash_ids") or ()]
        except (ValueError, TypeError, KeyError, AttributeError):
            raise _bad_line(path, number, line) from None
        segments = _segments(number, max(inputs, 1), ids)
        yield LoadRequest(segments, max(outputs, 1), time)


def _segments(number: int, num_tokens: int, hash_ids: list[int]) -> tuple[Segment, ...]:
    """One segment per hashed block, and one of the request's own for what they do not cover."""
    segments, left = [], num_tokens
    for one in hash_ids:
        if left > 0:
            segments.append(Segment(f"block {one}", min(left, MOONCAKE_BLOCK_TOKENS)))
            left -= MOONCAKE_BLOCK_TOKENS
    if left > 0:
        segments.append(Segment(f"request {number}", left))
    return tuple(segments)


def _bad_line(path: str, number: int, line: Any) -> RequestError:
    return RequestError(f"--trace {path!r}: line {number} is not understood: {str(line)[:80]!r}.")


def _from_start(requests: list[LoadRequest]) -> list[LoadRequest]:
    times = [request.arrival_s or 0.0 for request in requests]
    start = min(times)
    moved = [
        LoadRequest(request.segments, request.num_output_tokens, time - start)
        for request, time in zip(requests, times, strict=True)
    ]
    return sorted(moved, key=lambda request: request.arrival_s or 0.0)
