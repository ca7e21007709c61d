"""Masks of grammars on their way to the device."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels import dispatch
from quire.protocol.plan import Int32Array


class MaskTensors:
    """Masks for some lines of a step: the host fills in `host`, then `apply` sends it once."""

    def __init__(self, lines: Int32Array, num_words: int, device: torch.device) -> None:
        # One array, the lines last, so that one copy takes all. The allocator of pinned memory
        # hands it out again only after the copy is done.
        self._packed = torch.empty(
            (1 + num_words) * len(lines), dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._device = device
        packed: Int32Array = self._packed.numpy()
        packed[len(lines) * num_words :] = lines
        self.host = packed[: len(lines) * num_words].reshape(len(lines), num_words)

    def apply(self, scores: Tensor) -> None:
        """Forbid what the masks do not allow."""
        sent = self._packed.to(self._device, non_blocking=True)
        bits, lines = sent.split([self.host.size, len(self.host)])
        dispatch.apply_bitmask(scores, lines, bits.view(self.host.shape))
