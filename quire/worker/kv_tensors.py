"""`KVTensors`: the memory behind the block ids."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.protocol.kv_spec import KVLayout

MAX_COPIED_AT_ONCE = 32
"""Blocks. A copy passes through memory of its own: for a thousand forks it would be gigabytes."""


class KVTensors:
    """Keys and values: [slot, key or value, block, kv head, place in the block, head_dim]. Layers
    of different groups that have the same slot share its memory, in blocks of their own."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        ((num_heads, head_dim, dtype),) = {
            (spec.num_kv_heads, spec.head_dim, spec.dtype) for spec in layout.specs
        }
        shape = (layout.num_slots, 2, num_blocks, num_heads, layout.block_size, head_dim)
        # Uninitialised on purpose: on a CPU pages are then taken when first written.
        self.data: Tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks in all slots. A target is never also a source."""
        for some, places in zip(
            sources.split(MAX_COPIED_AT_ONCE), targets.split(MAX_COPIED_AT_ONCE), strict=True
        ):
            self.data[:, :, places] = self.data[:, :, some]
