"""Numbers of a load: times with percentiles, throughput, failures by kind, cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.bench.serving.runner import LoadRun, Record

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

PERCENTILES = (50, 90, 95, 99)
TIMES = {
    "ttft": "TTFT",
    "itl": "ITL",
    "tpot": "TPOT",
    "e2e": "whole",
}
BUSY_CLIENT = 0.8
"""Share of one core above which the client may be what is measured."""


def summarize(
    run: LoadRun, tokenizer: Tokenizer | None = None, price_per_hour: float | None = None
) -> dict[str, Any]:
    """Everything about one load, with plain numbers."""
    good = [record for record in run.records if record.failure is None]
    counts = [output_tokens(record, tokenizer) for record in good]
    num_input = sum(input_tokens(record) for record in good)
    num_output = sum(counts)
    by_server = all(record.num_output_tokens is not None for record in good)
    throughput = {
        "requests_per_s": len(good) / run.seconds,
        "input_tokens_per_s": num_input / run.seconds,
        "output_tokens_per_s": num_output / run.seconds,
        "total_tokens_per_s": (num_input + num_output) / run.seconds,
    }
    return {
        "load": {"kind": run.load.kind, "value": run.load.value},
        "seconds": run.seconds,
        "requests": len(run.records),
        "completed": len(good),
        "failures": failures(run.records),
        "input_tokens": num_input,
        "output_tokens": num_output,
        "planned_output_tokens": sum(record.request.num_output_tokens for record in good),
        "counted_by_server": by_server,
        "counted_by_tokenizer": not by_server and tokenizer is not None,
        "pieces": sum(len(record.times) for record in good),
        **throughput,
        **_times(good, counts),
        "max_in_flight": most_in_flight(run.records),
        "late_s": _spread([record.late_s for record in run.records]),
        "client_cpu_share": run.cpu_s / run.seconds,
        "cost": cost(throughput, price_per_hour),
    }


def _times(records: Sequence[Record], counts: Sequence[int]) -> dict[str, Any]:
    gaps = [np.diff(record.times) for record in records]
    per_token = [
        (record.times[-1] - record.times[0]) / (count - 1)
        for record, count in zip(records, counts, strict=True)
        if count > 1
    ]
    return {
        "ttft_s": _spread([record.times[0] - record.sent_s for record in records]),
        "itl_s": _spread(np.concatenate(gaps) if gaps else []),
        "tpot_s": _spread(per_token),
        "e2e_s": _spread([record.end_s - record.sent_s for record in records]),
    }


def _spread(values: Any) -> dict[str, float] | None:
    """Mean, percentiles and extremes; nothing of nothing."""
    if len(values) == 0:
        return None
    found = np.percentile(values, PERCENTILES).tolist()
    return {
        "mean": float(np.mean(values)),
        "min": float(np.min(values)),
        **{f"p{number}": value for number, value in zip(PERCENTILES, found, strict=True)},
        "max": float(np.max(values)),
    }


def input_tokens(record: Record) -> int:
    if record.num_input_tokens is not None:
        return record.num_input_tokens
    return record.request.num_input_tokens


def output_tokens(record: Record, tokenizer: Tokenizer | None = None) -> int:
    """As the server counts them; else by the tokenizer; else one per piece."""
    if record.num_output_tokens is not None:
        return record.num_output_tokens
    if tokenizer is not None:
        return len(tokenizer.encode("".join(record.texts), add_special_tokens=False))
    return len(record.times)


def failures(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """By kind: how many there were, and what the first one said."""
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        if record.failure is not None:
            entry = found.setdefault(record.failure, {"count": 0, "example": record.detail})
            entry["count"] += 1
    return found


def most_in_flight(records: Sequence[Record]) -> int:
    changes = [(record.sent_s, 1) for record in records]
    changes += [(record.end_s, -1) for record in records]
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def cost(throughput: dict[str, float], price_per_hour: float | None) -> dict[str, float] | None:
    """What a million tokens cost at this load, in the currency of the price."""
    if price_per_hour is None:
        return None
    per_million = price_per_hour / 3600 * 1e6
    return {
        "price_per_hour": price_per_hour,
        **{
            f"per_million_{kind}_tokens": per_million / throughput[f"{kind}_tokens_per_s"]
            for kind in ("output", "total")
            if throughput[f"{kind}_tokens_per_s"]
        },
    }


def described(record: Record, started: float, tokenizer: Tokenizer | None = None) -> dict[str, Any]:
    """One request, for JSON."""
    row: dict[str, Any] = {
        "sent_s": record.sent_s - started,
        "input_tokens": input_tokens(record),
        "e2e_s": record.end_s - record.sent_s,
    }
    if record.failure is not None:
        return row | {"failure": record.failure, "detail": record.detail}
    return row | {
        "output_tokens": output_tokens(record, tokenizer),
        "ttft_s": record.times[0] - record.sent_s,
    }
