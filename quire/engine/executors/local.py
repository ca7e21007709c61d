"""`LocalExecutor`: one worker in this process. Launches return at once; on a CPU they are done."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from traceback import clear_frames

import torch

from quire.config.device import DeviceInfo, launched_as
from quire.config.model import ModelConfig
from quire.config.options import EngineOptions
from quire.engine.executors.base import PendingResult
from quire.protocol.errors import StepMemoryError
from quire.protocol.expert_counts import ExpertCounts
from quire.protocol.output import DeviceMemory
from quire.protocol.plan import Int32Array, StepPlan, TokenMasks
from quire.worker.adapters import HostAdapters
from quire.worker.device import detect_device
from quire.worker.fitting import check_before_fetch
from quire.worker.groups import own_place
from quire.worker.memory import is_exhausted, is_out_of_memory, return_free_memory
from quire.worker.model_runner import ModelRunner
from quire.worker.worker import Worker, num_loading_threads, torch_threads


class LocalExecutor:
    failure: str | None = None
    look_s: float | None = None

    def __init__(
        self,
        options: EngineOptions,
        model_config: ModelConfig,
        device: DeviceInfo,
        *,
        fits_max_model_len: bool = False,
    ) -> None:
        assert options.device.num_threads is not None
        parallel = own_place(options, model_config, device)
        with torch_threads(num_loading_threads(device.type, options.device.num_threads)):
            worker = Worker(options, model_config, device, parallel)
            worker.load()
            sizes = torch.tensor(worker.size_cache(worker.profile(), fits_max_model_len))
            # Every rank has an engine, and all plan alike.
            smallest = parallel.all_gather(sizes.to(worker.device)).view(-1, 2).amin(0)
            self.max_model_len, self.num_blocks = smallest.tolist()
            worker.allocate(self.num_blocks, self.max_model_len)
            worker.capture()
        self._worker: Worker | None = worker
        self._was_short = False
        self.kv_windows = worker.layout.windows
        self.groups_prefixes = worker.groups_prefixes
        self.graph_tokens = worker.graph_tokens

    @staticmethod
    def device(options: EngineOptions) -> DeviceInfo:
        """The device that a worker would get."""
        place: int | None = None
        if options.parallel.is_launched_outside:
            place = launched_as("LOCAL_RANK")
        return detect_device(options.device.device, place)

    check_before_fetch = staticmethod(check_before_fetch)

    @property
    def worker(self) -> Worker:
        assert self._worker is not None, "the executor was shut down"
        return self._worker

    @property
    def runner(self) -> ModelRunner:
        return self.worker.runner

    def execute(self, plan: StepPlan) -> None:
        # Libraries load code when it is first used. Where that fails for want of memory, it fails
        # from then on; so nothing is launched before some memory is free.
        if self._was_short:
            return_free_memory()  # what this process freed since then
            if is_exhausted(self.worker.device):
                raise StepMemoryError("next to no memory is free", is_exhausted=True)
        with self.worker.at_work(), self._reporting_memory():
            self.runner.execute(plan)

    def token_masks(self, lines: Int32Array, num_words: int) -> TokenMasks:
        return self.runner.token_masks(lines, num_words)

    def sample(self, step: int, masks: TokenMasks | None = None) -> PendingResult:
        assert self.runner.executed_step == step, "steps are sampled in the order of execution"
        with self.worker.at_work(), self._reporting_memory():
            pending = self.runner.sample(masks)
            self._was_short = False
            return pending

    def memory(self) -> DeviceMemory:
        return self.worker.memory()

    def expert_counts(self) -> ExpertCounts:
        return self.worker.expert_counts()

    def load_adapter(self, name: str, folder: str, digest: str) -> Future[None]:
        return self._adapters.load(name, folder, digest)

    def drop_adapter(self, digest: str) -> None:
        self._adapters.drop(digest)

    @property
    def _adapters(self) -> HostAdapters:
        adapters = self.worker.adapters
        assert adapters is not None, "the engine was started without adapters"
        return adapters

    def listen(self) -> None:
        pass

    def shutdown(self, failure: str = "") -> None:
        """Free weights and KV cache."""
        if self._worker is not None:
            if self._worker.adapters is not None:
                self._worker.adapters.shutdown()
            self._worker = None
            return_free_memory()

    @contextmanager
    def _reporting_memory(self) -> Iterator[None]:
        """Turns whatever says that memory ran out into the one error that the engine knows."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error, self.worker.device):
                raise
            reason = str(error).strip().partition("\n")[0]
            clear_frames(error.__traceback__)  # they hold the failed step's tensors
            return_free_memory()
            self._was_short = True
            exhausted = is_exhausted(self.worker.device)
            raise StepMemoryError(reason or "no memory", is_exhausted=exhausted) from None
