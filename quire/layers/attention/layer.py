"""`Attention`: the layer between the projections of a model and the backend of its KV group."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from quire.layers.attention.heads import Heads
from quire.layers.step import StepContext
from quire.protocol.kv_spec import KVGroup


class Attention(nn.Module):
    """Keys and values of the layer lie in one slot of one KV group. Both are those of a model with
    a single group until the layer is bound to another."""

    def __init__(self, layer_index: int, scale: float, window: int | None = None) -> None:
        super().__init__()
        self.layer_index, self.scale, self.window = layer_index, scale, window
        self.kv_group, self.layer_slot = 0, layer_index

    def bind(self, kv_group: int, layer_slot: int, window: int | None) -> None:
        """Says where keys and values lie and how many of them a query sees, before the first
        step."""
        self.kv_group, self.layer_slot, self.window = kv_group, layer_slot, window

    def forward(self, heads: Heads, step: StepContext) -> Tensor:
        """[T, num_heads * head_dim]"""
        attention = step.attention[self.kv_group]
        return attention.attend(self.layer_slot, heads, self.scale, self.window).flatten(1)


def bind_kv_groups(model: nn.Module, groups: Sequence[KVGroup]) -> None:
    """Binds all attention layers of a model to their groups, before the first step."""
    places = {
        layer_index: (kv_group, layer_slot, group.window)
        for kv_group, group in enumerate(groups)
        for layer_slot, layer_index in enumerate(group.layers)
    }
    for module in model.modules():
        if isinstance(module, Attention):
            module.bind(*places[module.layer_index])
