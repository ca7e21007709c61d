"""`HostAdapters`: one rank's adapters in the memory of its host, and on its device as plans say."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from quire.files.adapter import read_adapter
from quire.layers.lora import AdapterLayers, HostAdapter
from quire.loading.adapters import adapter_shapes, load_adapter
from quire.protocol.errors import AdapterError
from quire.protocol.plan import StepPlan
from quire.worker.batch import Batch

logger = logging.getLogger(__name__)


class HostAdapters:
    def __init__(self, layers: AdapterLayers, alternates: bool = False) -> None:
        """`alternates`: whether checkpoints have the rows of experts' gates and ups in turns."""
        self.layers, self._alternates = layers, alternates
        self._held: dict[str, HostAdapter] = {}
        """By the digest of their content."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-adapters")

    def load(self, name: str, folder: str, digest: str) -> Future[None]:
        """Read this rank's share of an adapter, on another thread."""
        return self._thread.submit(self._load, name, folder, digest)

    def _load(self, name: str, folder: str, digest: str) -> None:
        try:
            file = read_adapter(folder, name)
            if file.digest != digest:
                # Prefixes are cached under the digest: other weights must not be used with them.
                raise AdapterError(
                    f"files in {folder} were changed while they were loaded; load the adapter when "
                    "they are complete."
                )
            # Before it takes memory: files of other bases may be of any size.
            self.layers.check(adapter_shapes(file, alternates=self._alternates))
            weights = load_adapter(file, alternates=self._alternates)
            try:
                held = self.layers.prepare(weights)
            except AdapterError as error:
                raise AdapterError(f"{file.file}: {error}") from None
        except AdapterError as error:
            raise AdapterError(f"adapter {name!r}: {error}") from None
        self._held[digest] = held
        logger.debug("adapter %r: %.1f MiB in host memory", name, held.nbytes / (1 << 20))

    def drop(self, digest: str) -> None:
        """Forget an adapter, if it is here. One that still loads is forgotten then."""
        self._thread.submit(self._held.pop, digest, None)

    def carry_out(self, plan: StepPlan) -> None:
        """Clear and fill slots."""
        for slot in plan.cleared_slots.tolist():
            self.layers.clear(slot)
        for placed in plan.placed_adapters:
            self.layers.place(placed.slot, placed.chunks.tolist(), self._held[placed.digest])

    def begin_step(self, batch: Batch, used: list[int]) -> None:
        """Say which adapters the tokens and lines of a step use, those in the slots `used`."""
        slots = batch.adapter_slots
        self.layers.begin_step(slots, None if slots is None else slots[batch.sample_indices], used)

    def begin_lines(self, slot: int, count: int) -> None:
        """Say that the next lines of logits use the adapter in `slot`, -1 for none."""
        slots = torch.full((count,), slot, dtype=torch.int32, device=self.layers.pool.chunks.device)
        self.layers.begin_lines(None if slot < 0 else slots)

    def shutdown(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
