"""Tensors from the host to where a model lies."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

CHUNK_BYTES = 8 << 20
NUM_BUFFERS = 4


class Upload:
    """Carries tensors to a GPU through a few pinned buffers, filling one while others are on their
    way. It pays with several threads to fill them (docs/lab/gpu.md).

    The result is valid on the current stream; host memory holds the buffers and no more.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = deque(
            (torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
            for _ in range(NUM_BUFFERS)
        )

    def __call__(self, tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        result = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source, target = (x.view(-1).view(torch.uint8) for x in (tensor, result))
        for piece, place in zip(source.split(CHUNK_BYTES), target.split(CHUNK_BYTES), strict=True):
            buffer, sent = self._buffers[0]
            self._buffers.rotate(-1)
            sent.synchronize()
            place.copy_(buffer[: len(piece)].copy_(piece), non_blocking=True)
            sent.record()
        return result


def stays_here(tensor: Tensor) -> Tensor:
    """The way to a model on a CPU."""
    return tensor
