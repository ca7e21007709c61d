"""Masks of grammars on their way to the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.kernels import dispatch
from quire.protocol.plan import Int32Array, TokenMasks


class MaskTensors(TokenMasks):
    """Masks in memory that the device copies from: the host fills in `bits`, then `apply` sends
    them once. On a CPU they can be filled in again for another step that has the same lines."""

    def __init__(self, lines: Int32Array, num_words: int, device: torch.device) -> None:
        # One array, the lines last, so that one copy takes all. The allocator of pinned memory
        # hands it out again only after the copy is done.
        self._packed = torch.empty(
            (1 + num_words) * len(lines), dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._device = device
        packed: Int32Array = self._packed.numpy()
        packed[len(lines) * num_words :] = lines
        super().__init__(lines, packed[: len(lines) * num_words].reshape(len(lines), num_words))
        self._parts = self._split(self._packed) if device.type == "cpu" else None

    def serve(self, lines: Int32Array, num_words: int) -> bool:
        """Whether they can be filled in for these lines; on a GPU a copy may still be under way."""
        return (
            self._parts is not None
            and self.bits.shape[1] == num_words
            and (lines is self.lines or np.array_equal(lines, self.lines))
        )

    def apply(self, scores: Tensor) -> None:
        """Forbid what the masks do not allow."""
        parts = self._parts or self._split(self._packed.to(self._device, non_blocking=True))
        dispatch.apply_bitmask(scores, *parts)

    def _split(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """(lines, bits)."""
        bits, lines = packed.split([self.bits.size, len(self.bits)])
        return lines, bits.view(self.bits.shape)
