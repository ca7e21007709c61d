"""`LocalExecutor`: one worker in this process. On a CPU a step is done when `sample` returns."""

from __future__ import annotations

from quire.config.device import DeviceInfo
from quire.config.model import ModelConfig
from quire.config.options import EngineOptions
from quire.engine.executors.base import PendingResult, TokenMasks
from quire.protocol.plan import StepPlan, StepResult
from quire.worker.worker import Worker


class ReadyResult:
    """A result that is there already."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class LocalExecutor:
    def __init__(
        self,
        options: EngineOptions,
        model_config: ModelConfig,
        device: DeviceInfo,
        *,
        fits_max_model_len: bool = False,
    ) -> None:
        self._worker: Worker | None = Worker(
            options, model_config, device, fits_max_model_len=fits_max_model_len
        )
        self.num_blocks = self._worker.num_blocks
        self.max_model_len = self._worker.max_model_len

    def execute(self, plan: StepPlan) -> None:
        assert self._worker is not None, "the executor was shut down"
        self._worker.runner.execute(plan)

    def sample(self, step: int, masks: TokenMasks | None = None) -> PendingResult:
        assert self._worker is not None, "the executor was shut down"
        assert masks is None, "grammars arrive with structured output"
        return ReadyResult(self._worker.runner.sample())

    def shutdown(self) -> None:
        """Free weights and KV cache."""
        self._worker = None
