"""Host arrays to the device in one asynchronous copy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.protocol.plan import Int32Array

ALIGNMENT = 4
"""Integers; Triton compiles a kernel anew for pointers that are not at multiples of 16 bytes."""


def aligned(count: int) -> int:
    """`count` integers and what must follow them before others may begin."""
    return -(-count // ALIGNMENT) * ALIGNMENT


class Staging:
    """Packs arrays into pinned memory and sends them together; on a CPU nothing is copied."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def send(self, *arrays: Int32Array) -> list[Tensor]:
        if self.device.type == "cpu":
            return [torch.from_numpy(np.ascontiguousarray(array).ravel()) for array in arrays]
        starts, end = [], 0
        for array in arrays:
            starts.append(end)
            end += aligned(array.size)
        packed = torch.empty(end, dtype=torch.int32, pin_memory=True)
        host = packed.numpy()
        for start, array in zip(starts, arrays, strict=True):
            host[start : start + array.size] = array.ravel()
        # The allocator of pinned memory reuses it only after the copy is done.
        sent = packed.to(self.device, non_blocking=True)
        return [
            sent[start : start + array.size] for start, array in zip(starts, arrays, strict=True)
        ]
