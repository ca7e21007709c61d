"""`KVTensors`: the memory behind the block ids."""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from torch import Tensor

from quire.protocol.kv_spec import KVLayout

ALIGNMENT = 64
"""Bytes, as torch aligns memory on a CPU."""
MAX_COPIED_AT_ONCE = 32
"""Blocks. A copy passes through memory of its own: for a thousand forks it would be gigabytes."""


class KVTensors:
    """Keys and values: [slot, key or value, block, kv head, place in the block, head_dim]. In
    latent layers the second dimension is 1, for both. Layers of different groups that have the same
    slot share its memory, in blocks of their own.

    Those in 8 bits have scales: [slot, block, kv head, place in the block, key or value]. The two
    of a token and head are one word, which a kernel reads at once; a latent has one. They are
    bfloat16, whose range is that of any activation; its few digits cost nothing, because what is
    stored was divided by the very number that it is multiplied by.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        ((num_parts, num_heads, head_dim, dtype),) = {
            (spec.num_parts, spec.num_kv_heads, spec.head_dim, spec.torch_dtype)
            for spec in layout.specs
        }
        shape = (layout.num_slots, num_parts, num_blocks, num_heads, layout.block_size, head_dim)
        self.data = _zeros(shape, getattr(torch, dtype), device)
        self._blocks = self.data  # as a type that torch copies on any device
        self.scales: Tensor | None = None
        if layout.specs[0].has_scales:
            self._blocks = self.data.view(torch.uint8)
            places = (layout.num_slots, num_blocks, num_heads, layout.block_size, num_parts)
            self.scales = _zeros(places, torch.bfloat16, device)

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks in all slots. A target is never also a source."""
        for some, places in zip(
            sources.split(MAX_COPIED_AT_ONCE), targets.split(MAX_COPIED_AT_ONCE), strict=True
        ):
            self._blocks[:, :, places] = self._blocks[:, :, some]
            if self.scales is not None:
                self.scales[:, places] = self.scales[:, some]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU pages are taken when they are first written: the system gives them out as zeros."""
    num_bytes = prod(shape) * dtype.itemsize
    if device.type == "cpu":
        pages = np.zeros(num_bytes + ALIGNMENT, np.uint8)
        start = -pages.ctypes.data % ALIGNMENT
        flat = torch.from_numpy(pages[start : start + num_bytes])
    else:
        flat = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return flat.view(dtype).view(shape)
