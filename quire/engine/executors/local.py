"""`LocalExecutor`: one worker in this process. Launches return at once; on a CPU they are done."""

from __future__ import annotations

from quire.config.device import DeviceInfo
from quire.config.model import ModelConfig
from quire.config.options import EngineOptions
from quire.engine.executors.base import PendingResult, TokenMasks
from quire.protocol.plan import StepPlan
from quire.worker.device import detect_device
from quire.worker.memory import return_free_memory
from quire.worker.model_runner import ModelRunner
from quire.worker.worker import Worker


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
        self.groups_prefixes = self._worker.groups_prefixes

    @staticmethod
    def device(options: EngineOptions) -> DeviceInfo:
        """The device that a worker would get."""
        return detect_device(options.device.device)

    @property
    def runner(self) -> ModelRunner:
        assert self._worker is not None, "the executor was shut down"
        return self._worker.runner

    def execute(self, plan: StepPlan) -> None:
        self.runner.execute(plan)

    def sample(self, step: int, masks: TokenMasks | None = None) -> PendingResult:
        assert masks is None, "grammars arrive with structured output"
        return self.runner.sample()

    def shutdown(self) -> None:
        """Free weights and KV cache."""
        if self._worker is not None:
            self._worker = None
            return_free_memory()
