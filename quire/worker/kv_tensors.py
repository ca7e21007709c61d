"""`KVTensors`: the memory behind the block ids."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.protocol.kv_spec import KVLayout

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
        # Uninitialised on purpose: on a CPU pages are then taken when first written.
        self.data: Tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        self._blocks = self.data  # as a type that torch copies on any device
        self.scales: Tensor | None = None
        if layout.specs[0].has_scales:
            self._blocks = self.data.view(torch.uint8)
            self.scales = torch.empty(
                (layout.num_slots, num_blocks, num_heads, layout.block_size, num_parts),
                dtype=torch.bfloat16,
                device=device,
            )

    def clear(self) -> None:
        """Make all keys and values 0."""
        self._blocks.zero_()
        if self.scales is not None:
            self.scales.fill_(1.0)

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks in all slots. A target is never also a source."""
        for some, places in zip(
            sources.split(MAX_COPIED_AT_ONCE), targets.split(MAX_COPIED_AT_ONCE), strict=True
        ):
            self._blocks[:, :, places] = self._blocks[:, :, some]
            if self.scales is not None:
                self.scales[:, places] = self.scales[:, some]
