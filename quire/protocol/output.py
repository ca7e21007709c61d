"""What the engine tells a client after a step: arrays; objects are made where they are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from quire.protocol.plan import BoolArray, Float32Array, Int32Array, Int64Array, LogprobArrays
from quire.protocol.request import KEY_BITS


@dataclass(slots=True)
class FinishedSequence:
    """The one terminal output of a sequence."""

    key: int
    token_ids: Int32Array
    """All generated tokens."""
    finish_reason: str
    """stop, length, abort, timeout, overloaded, error or repetition."""
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    is_own_fault: bool = False
    """Whether the error lies in what was asked for, so that trying again does not help."""
    beams: list[Beam] | None = None
    """For beam search, the best hypotheses, best first."""
    embedding: Float32Array | None = None
    """For pooling requests, the pooled hidden states, not normalised."""
    arrival_time: float = 0.0
    first_scheduled_time: float = 0.0
    first_token_time: float = 0.0
    finished_time: float = 0.0


@dataclass(slots=True)
class Beam:
    token_ids: list[int]
    cumulative_logprob: float
    score: float
    finished_by_eos: bool


@dataclass(slots=True)
class SequencePromptLogprobs:
    key: int
    arrays: LogprobArrays


@dataclass(slots=True)
class RequestProgress:
    """How far a prompt has come whose first token is not there yet."""

    key: int
    prompt_tokens: int
    processed_tokens: int
    """Those computed or found in the cache."""
    cached_tokens: int
    eta_s: float | None
    """Estimated time until the first token, queue included; None while there is no telling."""


@dataclass(slots=True)
class StepOutput:
    """New tokens of streaming sequences, and every sequence that ended."""

    keys: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))
    tokens: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: LogprobArrays | None = None
    """`index` points into `keys`."""
    prompt_logprobs: list[SequencePromptLogprobs] = field(default_factory=list)
    finished: list[FinishedSequence] = field(default_factory=list)
    progress: list[RequestProgress] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (len(self.keys) or self.finished or self.prompt_logprobs or self.progress)

    def split_by_client(self) -> dict[int, StepOutput]:
        """Client index -> what is about its sequences."""
        owners = self.keys >> KEY_BITS
        clients = set(np.unique(owners).tolist())
        clients.update(ended.key >> KEY_BITS for ended in self.finished)
        clients.update(part.key >> KEY_BITS for part in self.prompt_logprobs)
        clients.update(one.key >> KEY_BITS for one in self.progress)
        if len(clients) == 1:
            return {clients.pop(): self}
        return {client: self._of_client(client, owners == client) for client in clients}

    def _of_client(self, client: int, own: BoolArray) -> StepOutput:
        logprobs = None if self.logprobs is None else self.logprobs.select(own)
        return StepOutput(
            keys=self.keys[own],
            tokens=self.tokens[own],
            logprobs=logprobs if logprobs is not None and len(logprobs.index) else None,
            prompt_logprobs=[p for p in self.prompt_logprobs if p.key >> KEY_BITS == client],
            finished=[e for e in self.finished if e.key >> KEY_BITS == client],
            progress=[one for one in self.progress if one.key >> KEY_BITS == client],
        )


class BlockState(IntEnum):
    FREE = 0
    CACHED = 1
    """Free, but a prompt that begins like its content would find it."""
    OWNED = 2
    """By one sequence."""
    SHARED = 3
    """By several."""


@dataclass(slots=True, frozen=True)
class DeviceMemory:
    """What an executor knows of its device's memory, in bytes."""

    total: int
    used: int
    """Of a GPU, by all programs; of a CPU, by this process."""
    weights: int
    kv_block: int
    """Keys and values of one block."""
    is_host: bool = False
    """Whether it is a CPU's."""


@dataclass(slots=True, frozen=True)
class MemorySplit:
    """Where the device's memory went, in bytes."""

    total: int
    weights: int
    kv_used: int
    kv_cached: int
    kv_free: int
    other: int
    """Activations, CUDA graphs, libraries, other programs; on a CPU, the rest of this process."""

    @classmethod
    def of(cls, memory: DeviceMemory, blocks: NDArray[np.uint8]) -> MemorySplit:
        """`blocks` are the `BlockState` of each physical block."""
        free, cached, owned, shared = np.bincount(blocks, minlength=len(BlockState)).tolist()
        size, known = memory.kv_block, memory.weights
        # A CPU gives pages to a block when it is first written, so free ones need not be counted.
        known += (owned + shared + cached) * size if memory.is_host else len(blocks) * size
        return cls(
            total=memory.total,
            weights=memory.weights,
            kv_used=(owned + shared) * size,
            kv_cached=cached * size,
            kv_free=free * size,
            other=max(memory.used - known, 0),
        )


@dataclass(slots=True)
class SequenceSnapshot:
    """One sequence that waits or runs."""

    key: int
    request_id: str
    tenant: str
    state: str
    """waiting, running or draining (its blocks are gone, its last tokens still on their way)."""
    num_prompt_tokens: int
    num_tokens: int
    """Prompt and generated tokens that the host knows."""
    num_computed_tokens: int
    arrival_time: float
    num_blocks: int
    num_owned_blocks: int
    """Of these, the blocks that no other sequence holds."""
    block_table: Int32Array
    """Logical to physical: the n-th entry is the block of the n-th `block_size` tokens; empty if
    it was not asked for."""


@dataclass(slots=True)
class EngineSnapshot:
    time: float
    """On the engine's clock."""
    block_size: int
    blocks: NDArray[np.uint8]
    """`BlockState` of each physical block."""
    running: list[SequenceSnapshot]
    """In the order of their rank."""
    waiting: list[SequenceSnapshot]
    """At most as many as were asked for."""
    num_waiting: int
    prompt_tokens_per_s: float
    """Of requests admitted in the last few seconds, tokens found in the cache included."""
    generation_tokens_per_s: float
    memory: MemorySplit
    paused: bool = False
    advice: list[str] = field(default_factory=list)
    """Warnings about settings that do not suit the recent load, with remedies."""
