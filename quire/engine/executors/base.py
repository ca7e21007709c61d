"""`Executor`: what the engine needs from whatever runs its plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from quire.protocol.plan import BoolArray, StepPlan, StepResult
from quire.protocol.snapshot import DeviceMemory


class PendingResult(Protocol):
    """A result that may be on its way; `result` waits for it, or raises if the step failed."""

    def result(self) -> StepResult: ...


@dataclass(frozen=True)
class TokenMasks:
    """Tokens that grammars allow: `allowed[i]` covers the vocabulary for `samples[i]`."""

    samples: list[int]
    allowed: BoolArray


class Executor(Protocol):
    """Runs plans in order. `execute` and `sample` return at once; failures surface in `result`,
    or at once as `StepMemoryError` where memory ran out."""

    num_blocks: int
    """KV blocks the workers have room for."""
    groups_prefixes: bool
    """Whether plans should say which rows share leading blocks."""

    def execute(self, plan: StepPlan) -> None:
        """Start the forward pass of a step."""

    def sample(self, step: int, masks: TokenMasks | None = None) -> PendingResult:
        """Start sampling for the executed step."""

    def memory(self) -> DeviceMemory:
        """What the device's memory holds now."""

    def shutdown(self) -> None: ...
