"""`KVSpec` and `KVGroup`: what each layer keeps of a token, and which layers share a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PAD_LAYER = -1
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Types of weights, activations, keys and values."""
FLOAT8 = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""Types of keys and values alone: as options name them, and as torch does. Each token and KV head
has two scales with them."""
SCALE_BYTES = 2
BLOCK_SIZES = (4, 8, 16, 32, 64, 128)
"""Tokens per block; an attention backend may have fewer of them."""


@dataclass(frozen=True)
class KVSpec:
    """Keys and values of one layer."""

    num_kv_heads: int
    head_dim: int
    dtype: str
    window: int | None = None
    """Tokens that a query sees, itself included; None: all before it."""
    is_latent: bool = False
    """Whether values are the keys, or the first numbers of them: kept once."""

    @property
    def num_parts(self) -> int:
        """Keys and values, or what is both."""
        return 1 if self.is_latent else 2

    @property
    def has_scales(self) -> bool:
        return self.dtype in FLOAT8

    @property
    def torch_dtype(self) -> str:
        """The name of the type in torch."""
        return FLOAT8.get(self.dtype, self.dtype)

    @property
    def bytes_per_token(self) -> int:
        head_bytes = self.head_dim * ITEM_BYTES.get(self.dtype, 1)
        if self.has_scales:
            head_bytes += SCALE_BYTES
        return self.num_parts * self.num_kv_heads * head_bytes


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


def stage_groups(
    groups: Sequence[KVGroup], specs: Sequence[KVSpec], layers: range
) -> tuple[KVGroup, ...]:
    """The same groups with the layers that a stage of the model has, which need not be those of
    the whole model's groups: each group of one window takes its share, so that a block has few
    slots. All stages have the same tables; a group may have no layer on some of them.
    """
    own: list[KVGroup] = []
    for group in groups:
        siblings = [other for other in groups if other.window == group.window]
        mine = [layer for layer in layers if specs[layer].window == group.window]
        length = -(-len(mine) // len(siblings))
        start = siblings.index(group) * length
        own.append(KVGroup(group.window, tuple(mine[start : start + length])))
    return tuple(own)


def held_blocks(window: int, block_size: int, max_step_tokens: int) -> int:
    """Most blocks of a sequence in a group with a window: that and the tokens of one step."""
    return -(-(window + max_step_tokens) // block_size) + 1


@dataclass(frozen=True)
class KVLayout:
    """The KV groups of a model, and what a block is."""

    specs: tuple[KVSpec, ...]
    """Of each layer."""
    groups: tuple[KVGroup, ...]
    block_size: int

    @classmethod
    def of(cls, specs: Sequence[KVSpec], block_size: int, layers: range | None = None) -> KVLayout:
        """That of a stage which has `layers`, or of all."""
        groups = kv_groups(specs)
        if layers is not None and len(layers) < len(specs):
            groups = stage_groups(groups, specs, layers)
        return cls(tuple(specs), groups, block_size)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(group.window for group in self.groups)

    @property
    def num_slots(self) -> int:
        """Layers of a group, with padding."""
        return max(len(group.layers) for group in self.groups)

    @property
    def bytes_per_block(self) -> int:
        """A slot has room for the largest of the layers that use it."""
        sizes = [0] * self.num_slots
        for group in self.groups:
            for slot, layer in enumerate(group.layers):
                if layer != PAD_LAYER:
                    sizes[slot] = max(sizes[slot], self.specs[layer].bytes_per_token)
        return self.block_size * sum(sizes)

    def most_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """Most blocks of a sequence of so many tokens, in all groups."""
        total, blocks = 0, -(-num_tokens // self.block_size)
        for window in self.windows:
            if window is None:
                total += blocks
            else:
                total += min(blocks, held_blocks(window, self.block_size, max_step_tokens))
        return total
