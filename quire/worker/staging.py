"""Host arrays to the device in one asynchronous copy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.protocol.plan import Int32Array


class Staging:
    """Packs arrays into pinned memory and sends them together; on a CPU nothing is copied."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(self, *arrays: Int32Array) -> list[Tensor]:
        if self.device.type == "cpu":
            return [torch.from_numpy(np.ascontiguousarray(array).ravel()) for array in arrays]
        sizes = [array.size for array in arrays]
        packed = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=True)
        np.concatenate([array.ravel() for array in arrays], out=packed.numpy())
        # The allocator of pinned memory reuses it only after the copy is done.
        return list(packed.to(self.device, non_blocking=True).split(sizes))
