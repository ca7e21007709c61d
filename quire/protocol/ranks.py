"""Messages between an executor and its rank processes.

Orders go to all ranks at once, through memory that they share (`engine/executors/ring.py`); answers
come back from each over a socket of its own.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.protocol.messages import ErrorRecord
from quire.protocol.plan import Int32Array, StepPlan, StepResult


class StartRank(msgspec.Struct, tag=True):
    """The first line to a rank process; numbers of files are inherited."""

    rank: int
    size: int
    options: dict[str, Any]
    """Resolved, by flat names."""
    orders_fd: int
    answers_fd: int
    collectives_fd: int
    timeout_s: float
    log_level: str | None = None


class Call(msgspec.Struct, tag=True):
    """Have all workers do something in the order of calls; each answers with `Returned`."""

    name: str
    arguments: dict[str, Any] = {}


class Execute(msgspec.Struct, tag=True):
    """Begin a step; nothing is answered."""

    plan: StepPlan


class Sample(msgspec.Struct, tag=True):
    """Sample for the step that was begun; the first rank answers with `Sampled`."""

    step: int
    mask_lines: Int32Array | None = None
    mask_bits: Int32Array | None = None


class Returned(msgspec.Struct, tag=True):
    value: Any = None


class Sampled(msgspec.Struct, tag=True):
    result: StepResult


class RankFailed(msgspec.Struct, tag=True):
    """A rank cannot go on, and ends."""

    error: ErrorRecord


Order = Call | Execute | Sample
Answer = Returned | Sampled | RankFailed
