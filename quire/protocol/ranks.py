"""Messages between an executor and the processes of its ranks.

Orders go to all ranks; answers come back from each over a channel of its own. On one host orders
are written once, into memory that the ranks share; elsewhere each rank has a TCP connection.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.protocol.messages import ErrorRecord
from quire.protocol.plan import Int32Array, StepPlan, StepResult

MISSES_OTHERS = 3
"""Exit status of a rank that waited for another one in vain, and has said so: not the cause."""


class Inherited(msgspec.Struct, tag=True):
    """The files of a rank that its executor has started itself, by number."""

    orders_fd: int
    """A ring of orders."""
    answers_fd: int
    """A socket."""
    group_fds: list[int]
    """Of each stage, what its ranks share for collectives on CPUs."""
    link_fds: list[list[int]]
    """Of each stage but the last, and each of its ranks: what it sends to the next one, on CPUs."""


class Connected(msgspec.Struct, tag=True):
    """Where a rank that was started elsewhere finds its executor."""

    host: str
    port: int
    secret: str
    """Says that it is one of this executor's."""


class StartRank(msgspec.Struct, tag=True):
    """What a rank's process is told first."""

    rank: int
    """Among all: stages follow each other, each with all of its tensor-parallel ranks."""
    options: dict[str, Any]
    """Resolved, by flat names."""
    channel: Inherited | Connected
    store: tuple[str, int] | None = None
    """Host and port of a store of torch.distributed's, where ranks meet that share no memory."""
    group_fd: int | None = None
    """What the ranks of its stage share for collectives on CPUs, where its host has all of them but
    not those of other stages."""
    device_index: int = 0
    processors: list[int] = []
    """Those that it keeps to; none: all."""
    stays_awake: bool = False
    """Whether there are cores to spare: then it looks for orders for a moment before it sleeps, and
    announces results, so that the engine looks for them."""
    num_local: int = 1
    """Ranks of its host."""
    log_level: str | None = None
    logs_as_server: bool = False


class Hello(msgspec.Struct, tag=True):
    """The first message of a rank over TCP; what it says of itself, in any case."""

    rank: int
    host: str
    pid: int
    version: str
    """Of Quire."""
    device: str = ""
    model: dict[str, str] = {}
    """Digests of the model's files, as this rank reads them."""
    secret: str = ""


class Call(msgspec.Struct, tag=True):
    """Have all workers do something in the order of calls; each answers with `Returned`."""

    name: str
    arguments: dict[str, Any] = {}


class Execute(msgspec.Struct, tag=True):
    """Begin a step; nothing is answered."""

    plan: StepPlan


class Sample(msgspec.Struct, tag=True):
    """Sample for the step that was begun; the last stage's first rank answers with `Sampled`."""

    step: int
    mask_lines: Int32Array | None = None
    mask_bits: Int32Array | None = None


class LoadAdapter(msgspec.Struct, tag=True):
    """Read this rank's share of an adapter into host memory, beside its steps; each rank answers
    with `AdapterLoaded`."""

    number: int
    name: str
    folder: str
    digest: str


class DropAdapter(msgspec.Struct, tag=True):
    """Forget an adapter; nothing is answered."""

    digest: str


class AdapterLoaded(msgspec.Struct, tag=True):
    number: int
    """Of the order."""
    error: ErrorRecord | None = None


class Returned(msgspec.Struct, tag=True):
    value: Any = None


class Sampling(msgspec.Struct, tag=True):
    """The forward pass of a step is done: `Sampled` follows soon, for which it pays to stay
    awake."""


class Sampled(msgspec.Struct, tag=True):
    result: StepResult


class Alive(msgspec.Struct, tag=True):
    """Sent all the time by a thread of its own: the process is not stopped."""


class RankFailed(msgspec.Struct, tag=True):
    """A rank cannot go on, and ends."""

    error: ErrorRecord


Order = Call | Execute | Sample | LoadAdapter | DropAdapter
Answer = Hello | Returned | AdapterLoaded | Sampling | Sampled | Alive | RankFailed


# --- hosts of one engine ------------------------------------------------------------------------


class JoinNode(msgspec.Struct, tag=True):
    """A host says that it is there, with the options that it was started with."""

    node_rank: int
    host: str
    version: str
    options: dict[str, Any]


class StartRanks(msgspec.Struct, tag=True):
    """What host 0 answers: the ranks to start there."""

    ranks: list[StartRank]


class Refused(msgspec.Struct, tag=True):
    """Why a host cannot join."""

    reason: str


class RankEnded(msgspec.Struct, tag=True):
    """A process has ended on a host."""

    rank: int
    cause: str


FromNode = JoinNode | RankEnded | Alive


class EngineEnded(msgspec.Struct, tag=True):
    """Without a reason it was meant to, and hosts need not wait for another one."""

    reason: str = ""
    was_in_service: bool = False
    """Then a server starts another one."""


ToNode = StartRanks | Refused | EngineEnded
