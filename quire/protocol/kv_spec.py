"""`KVSpec` and `KVGroup`: what each layer keeps of a token, and which layers share a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PAD_LAYER = -1
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class KVSpec:
    """Keys and values of one layer."""

    num_kv_heads: int
    head_dim: int
    dtype: str
    window: int | None = None
    """Tokens that a query sees, itself included; None: all before it."""

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class KVGroup:
    """Layers whose KV lives equally long. They share a block table, whatever their bytes."""

    window: int | None
    layers: tuple[int, ...]
    """By number; the place of a layer is its slot in a block. `PAD_LAYER` where there is none."""


def kv_groups(specs: Sequence[KVSpec]) -> tuple[KVGroup, ...]:
    """Groups of the layers that have these specs, cut by lifetime.

    Where there are several lifetimes, all groups are as long as the shortest list of layers, padded
    at the end, so that a block has the same bytes in every group and one pool serves all.
    """
    by_window: dict[int | None, list[int]] = {}
    for layer, spec in enumerate(specs):
        by_window.setdefault(spec.window, []).append(layer)
    length = min(map(len, by_window.values()))
    groups = []
    for window, layers in by_window.items():
        for start in range(0, len(layers), length):
            part = layers[start : start + length]
            padding = [PAD_LAYER] * (length - len(part))
            groups.append(KVGroup(window, (*part, *padding)))
    return tuple(groups)


def slot_bytes(specs: Sequence[KVSpec], groups: Sequence[KVGroup], block_size: int) -> list[int]:
    """Bytes of each slot of a block: what the largest of the layers that have it needs."""
    return [
        max(specs[layer].bytes_per_token for layer in layers if layer != PAD_LAYER) * block_size
        for layers in zip(*(group.layers for group in groups), strict=True)
    ]
