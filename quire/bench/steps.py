"""What every slot of the KV cache is doing at every step, sampled from the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np

from quire.protocol.plan import Int32Array, Int64Array, StepPlan


@dataclass(frozen=True)
class StepSample:
    """Who holds how many blocks while a step runs. Arrays have one entry per running sequence."""

    keys: Int64Array
    num_tokens: Int32Array
    """Tokens whose KV is in the blocks, this step's included."""
    num_blocks: Int32Array
    num_used: int
    """Blocks in use in the pool; those that several sequences share count once."""
    num_waiting: int


@dataclass
class StepLog:
    """The samples of one run, in order. A recorder for `EngineCore.on_plan`."""

    scheduler: Any
    samples: list[StepSample] = field(default_factory=list)

    def __call__(self, plan: StepPlan) -> None:
        columns = self.scheduler.columns
        rows = np.flatnonzero(columns.running)
        self.samples.append(
            StepSample(
                keys=columns.keys[rows],
                num_tokens=columns.num_computed[rows],
                num_blocks=columns.num_blocks[rows],
                num_used=self.scheduler.kv.pool.num_used,
                num_waiting=len(self.scheduler.waiting),
            )
        )

    @property
    def block_size(self) -> int:
        return self.scheduler.limits.block_size

    @property
    def num_running(self) -> list[int]:
        return [len(sample.keys) for sample in self.samples]

    @property
    def peak_blocks(self) -> int:
        return max(sample.num_used for sample in self.samples)

    @property
    def waste(self) -> float:
        """Share of the slots held by sequences that hold no token, over all steps."""
        slots = sum(int(sample.num_blocks.sum()) for sample in self.samples) * self.block_size
        tokens = sum(int(sample.num_tokens.sum()) for sample in self.samples)
        return 1.0 - tokens / slots

    @property
    def max_unused_slots(self) -> int:
        """The most slots without a token that any sequence held at any step."""
        return max(
            int((sample.num_blocks * self.block_size - sample.num_tokens).max())
            for sample in self.samples
        )

    def memory_steps(self, blocks_per_reservation: int) -> list[MemoryStep]:
        """What the slots of the whole cache were doing.

        Free blocks that are fewer than `blocks_per_reservation` can hold no further request.
        """
        size, num_blocks = self.block_size, self.scheduler.limits.num_blocks
        final = self._final_lengths()
        steps = []
        for sample in self.samples:
            in_use = _blocks_for(sample.num_tokens, size)
            lengths = np.array([final[key] for key in sample.keys.tolist()], np.int64)
            needed = np.minimum(_blocks_for(lengths, size), sample.num_blocks)
            free = num_blocks - sample.num_used
            slots = Slots(
                used=int(sample.num_tokens.sum()),
                internal=int((in_use * size - sample.num_tokens).sum()),
                not_yet_used=int((needed - in_use).sum()) * size,
                never_used=int((sample.num_blocks - needed).sum()) * size,
                **{"external" if free < blocks_per_reservation else "free": free * size},
            )
            steps.append(MemoryStep(slots, len(sample.keys), sample.num_waiting))
        return steps

    def _final_lengths(self) -> dict[int, int]:
        """Tokens each sequence had in the cache in the end; its last token never gets there."""
        final: dict[int, int] = {}
        for sample in self.samples:
            for key, count in zip(sample.keys.tolist(), sample.num_tokens.tolist(), strict=True):
                final[key] = max(final.get(key, 0), count)
        return final


@dataclass(frozen=True)
class Slots:
    """Every slot of the cache is one of these. Counts, or shares that add up to 1."""

    used: float = 0
    """Holds a token of a request that still runs."""
    internal: float = 0
    """Unused slots of the last block in use of each sequence."""
    not_yet_used: float = 0
    """Reserved for tokens that came later."""
    never_used: float = 0
    """Reserved for tokens that never came."""
    padding: float = 0
    """Beside shorter prompts in a static batch."""
    ended: float = 0
    """Held for ended requests until the last one of a static batch ends."""
    external: float = 0
    """Free, but too little to hold a further reservation."""
    free: float = 0
    """Free, and of use to the next request."""

    @property
    def waste(self) -> float:
        """What holds no token, as a share of all that is not free."""
        taken = sum(astuple(self)) - self.free
        return 1.0 - self.used / taken if taken else 0.0


@dataclass(frozen=True)
class MemoryStep:
    """The whole cache during one step."""

    slots: Slots
    num_running: int
    num_waiting: int


def under_load(steps: Sequence[MemoryStep]) -> Sequence[MemoryStep]:
    """The steps during which requests waited for memory; all of them if none ever did."""
    return [step for step in steps if step.num_waiting] or steps


def mean_shares(steps: Sequence[MemoryStep]) -> Slots:
    counts = np.array([astuple(step.slots) for step in steps], np.float64)
    return Slots(*(counts.sum(axis=0) / counts.sum()).tolist())


def _blocks_for(num_tokens: Any, block_size: int) -> Any:
    return -(-num_tokens // block_size)
