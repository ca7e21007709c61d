"""The host's part of an engine by itself: an executor without a model, and times of each step."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from quire.bench.runs import inputs
from quire.bench.workload import BenchRequest
from quire.protocol.expert_counts import ExpertCounts
from quire.protocol.output import DeviceMemory, StepOutput
from quire.protocol.plan import Int32Array, StepPlan, StepResult

if TYPE_CHECKING:
    from quire import LLM

STAGES = ("schedule", "plan", "apply", "outputs")


@dataclass
class StepTimes:
    """What one step did, and seconds of it by stage."""

    num_added: int = 0
    num_finished: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    @property
    def kind(self) -> str:
        if self.num_finished:
            return "finish"
        return "admission" if self.num_added else "decode"

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class HostRun:
    """One call of `generate`."""

    submit_s: float
    """Until the first step: parsing, checks, queueing."""
    steps: list[StepTimes]
    read_s: float
    """After the last step: texts and output objects."""


class InstantExecutor:
    """Brings the rows of a worker up to date, as for a real step; the tokens are there at once."""

    failure: str | None = None
    look_s: float | None = None

    def __init__(self, llm: LLM) -> None:
        local: Any = llm._core.executor
        self.num_blocks: int = local.num_blocks
        self.max_model_len: int = local.max_model_len
        self.kv_windows: tuple[int | None, ...] = local.kv_windows
        self.groups_prefixes: bool = local.groups_prefixes
        self.graph_tokens: int = local.graph_tokens
        self._local = local
        vocab_size, max_rows = llm.model_config.vocab_size, llm._core.scheduler.limits.max_num_seqs
        self._tokens = np.random.default_rng(0).integers(0, vocab_size, max_rows, np.int32)
        self._ones = np.ones(max_rows, np.int32)
        self._num_samples = 0

    def execute(self, plan: StepPlan) -> None:
        self._local.runner.update_rows(plan)
        self._num_samples = int(plan.samples.sum())

    def token_masks(self, lines: Int32Array, num_words: int) -> NoReturn:
        raise NotImplementedError("the host's work is measured without grammars")

    def sample(self, step: int, masks: Any = None) -> Ready:
        count = self._num_samples
        return Ready(StepResult(step, self._tokens[:count], self._ones[:count]))

    def memory(self) -> DeviceMemory:
        memory: DeviceMemory = self._local.memory()
        return memory

    def expert_counts(self) -> ExpertCounts:
        return ExpertCounts.none()

    def load_adapter(self, name: str, folder: str, digest: str) -> Future[None]:
        loading: Future[None] = self._local.load_adapter(name, folder, digest)
        return loading

    def drop_adapter(self, digest: str) -> None:
        self._local.drop_adapter(digest)

    def listen(self) -> None:
        self._local.listen()

    def shutdown(self, failure: str = "") -> None:
        self._local.shutdown()


@dataclass
class Ready:
    """A result that is there."""

    value: StepResult

    def result(self) -> StepResult:
        return self.value


class Stopwatch:
    """Replaces the executor of an engine by an instant one and times the stages of its steps."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._steps: list[StepTimes] = []
        self._starts: list[float] = []
        self._ended = 0.0
        core = llm._core
        core.executor = InstantExecutor(llm)
        core.on_plan = self._note_plan
        self._time(core.scheduler, "schedule", "schedule")
        self._time(core.executor, "execute", "plan")
        self._time(core.scheduler, "apply", "apply")
        self._time(llm._loop, "take_in", "outputs")
        self._core_step = core.step
        core.step = self._step  # type: ignore[method-assign]

    def measure(self, requests: Sequence[BenchRequest]) -> HostRun:
        self._steps, self._starts = [], []
        prompts, params = inputs(requests)
        started = perf_counter()
        self._llm.generate(prompts, params, use_tqdm=False)
        returned = perf_counter()
        return HostRun(self._starts[0] - started, self._steps, returned - self._ended)

    def _time(self, owner: Any, name: str, stage: str) -> None:
        function = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            started = perf_counter()
            result = function(*arguments)
            self._ended = perf_counter()
            self._steps[-1].seconds[stage] += self._ended - started
            return result

        setattr(owner, name, timed)

    def _step(self) -> StepOutput:
        self._starts.append(perf_counter())
        self._steps.append(StepTimes())
        output = self._core_step()
        self._steps[-1].num_finished = len(output.finished)
        return output

    def _note_plan(self, plan: StepPlan) -> None:
        self._steps[-1].num_added = len(plan.added_rows)
