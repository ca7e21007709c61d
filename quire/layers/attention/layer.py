"""The attention layer of a model: heads in, heads out; the backend does the rest."""

from __future__ import annotations

from torch import Tensor, nn

from quire.layers.attention.backend import AttentionStep


class Attention(nn.Module):
    """Attention of one layer over its KV cache. It has no weights."""

    def __init__(
        self,
        layer_index: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float | None = None,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window = window

    def forward(self, q: Tensor, k: Tensor, v: Tensor, attention: AttentionStep) -> Tensor:
        """Takes q [tokens, num_heads * head_dim] and k, v [tokens, num_kv_heads * head_dim]."""
        out = attention.attend(
            self.layer_index,
            q.unflatten(-1, (self.num_heads, self.head_dim)),
            k.unflatten(-1, (self.num_kv_heads, self.head_dim)),
            v.unflatten(-1, (self.num_kv_heads, self.head_dim)),
            self.scale,
            self.window,
        )
        return out.flatten(-2)
