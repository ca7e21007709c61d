"""`KVSpec` and `KVTensors`: the memory behind the block ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_COPIED_AT_ONCE = 32
"""Blocks. A copy passes through memory of its own: for a thousand forks it would be gigabytes."""


@dataclass(frozen=True)
class KVSpec:
    """What one group of layers with equal needs stores per block."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return per_token * self.block_size


class KVTensors:
    """Keys and values of all layers: [layer, key or value, block, kv head, slot, head_dim]."""

    def __init__(self, spec: KVSpec, num_blocks: int, device: torch.device) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        shape = (spec.num_layers, 2, num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
        # Uninitialised on purpose: on a CPU pages are then taken when first written.
        self.data: Tensor = torch.empty(shape, dtype=spec.dtype, device=device)

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks in all layers. A target is never also a source."""
        for some, places in zip(
            sources.split(MAX_COPIED_AT_ONCE), targets.split(MAX_COPIED_AT_ONCE), strict=True
        ):
            self.data[:, :, places] = self.data[:, :, some]
