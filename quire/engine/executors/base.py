"""`Executor`: what the engine needs from whatever runs its plans."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from quire.protocol.expert_counts import ExpertCounts
from quire.protocol.output import DeviceMemory
from quire.protocol.plan import Int32Array, StepPlan, StepResult, TokenMasks


class PendingResult(Protocol):
    """A result that may be on its way; `result` waits for it, or raises if the step failed."""

    def result(self) -> StepResult: ...


class Executor(Protocol):
    """Runs plans in order. `execute` and `sample` return at once; failures surface in `result`,
    or at once as `StepMemoryError` where memory ran out."""

    num_blocks: int
    """KV blocks the workers have room for."""
    max_model_len: int
    """Longest request that they have rows for."""
    kv_windows: tuple[int | None, ...]
    """Of each KV group, how many tokens a query sees; None: all."""
    groups_prefixes: bool
    """Whether plans should say which rows share leading blocks."""
    graph_tokens: int
    """Most tokens of a step with prompts that runs as one CUDA graph; 0 without graphs."""

    failure: str | None
    """Why it cannot go on, once it cannot."""
    look_s: float | None
    """How often an engine without work should look whether it has failed; None: it cannot fail
    then."""

    def execute(self, plan: StepPlan) -> None:
        """Start the forward pass of a step."""

    def token_masks(self, lines: Int32Array, num_words: int) -> TokenMasks:
        """Masks to fill in and to give to `sample` of the executed step, where the device can copy
        them from without waiting."""

    def sample(self, step: int, masks: TokenMasks | None = None) -> PendingResult:
        """Start sampling for the executed step, among the tokens that `masks` allow."""

    def memory(self) -> DeviceMemory:
        """What the device's memory holds now."""

    def expert_counts(self) -> ExpertCounts:
        """What experts did in all layers of the model; may wait for the steps that were
        launched."""

    def load_adapter(self, name: str, folder: str, digest: str) -> Future[None]:
        """Have all ranks read their share of an adapter into host memory, beside their steps;
        fails if one of them cannot."""

    def drop_adapter(self, digest: str) -> None:
        """Have all ranks forget it. No plan from now on may place it."""

    def listen(self) -> None:
        """Take in what ranks have said meanwhile; returns at once."""

    def shutdown(self, failure: str = "") -> None:
        """End the ranks: because of a failure of the engine, or because all is done."""
