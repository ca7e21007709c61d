"""`Attention`, the layer between the projections of a model and the backend of its KV group, and
what a forward pass gives it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from quire.kernels.torch.qkv import rms_norm, rotate
from quire.layers.linear import LatentLinear
from quire.protocol.kv_spec import KVGroup


@dataclass(frozen=True)
class Rotation:
    """Rotary positions of a step's tokens; cos and sin are tables [max_positions, rotary_dim / 2]:
    the first dimensions of a head are rotated."""

    cos: Tensor
    sin: Tensor
    positions: Tensor
    interleaved: bool = False
    """Whether neighbours make a pair, and not elements of the two halves."""
    local: Rotation | None = None
    """Of layers with a window, where they have a base of their own."""

    @cached_property
    def angles(self) -> tuple[Tensor, Tensor]:
        """cos and sin of each token, [T, 1, rotary_dim / 2]."""
        return self.cos[self.positions].unsqueeze(1), self.sin[self.positions].unsqueeze(1)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotates [T, heads, head_dim], in plain torch."""
        return rotate(x, *self.angles, self.interleaved)


@dataclass(frozen=True)
class QKNorms:
    """RMSNorm of queries and keys per head, before the rotation."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


@dataclass(frozen=True)
class QKV:
    """q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim] as projected, and what is
    still to be done to them before they meet. Values of latents are the first numbers of keys."""

    q: Tensor
    k: Tensor
    v: Tensor
    rotation: Rotation | None = None
    norms: QKNorms | None = None

    def prepared(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v ready for attention, in plain torch."""
        q, k = self.q, self.k
        if self.norms is not None:
            q = rms_norm(q, self.norms.q_weight, self.norms.eps)
            k = rms_norm(k, self.norms.k_weight, self.norms.eps)
        if self.rotation is not None:
            q, k = self.rotation.rotate(q), self.rotation.rotate(k)
        return q, k, self.v


@dataclass(frozen=True)
class LatentQKV:
    """Queries and latents as projected, and what is still to be done to them before they meet. A
    backend may attend over latents (absorbed), or to the keys and values that they stand for
    (expanded): the first reads less, the second computes less where there are many queries."""

    q: Tensor
    """[T, num_heads, nope_dim + rope_dim]"""
    compressed: Tensor
    """[T, kv_rank + rope_dim]: latents, and the rotated part of keys, which all heads share."""
    norm_weight: Tensor
    """[kv_rank]: latents are normalised, and then kept."""
    eps: float
    rotation: Rotation
    """Of the last `rope_dim` numbers of queries and of what is projected with the latents."""
    expansion: LatentLinear

    @property
    def kv_rank(self) -> int:
        return len(self.norm_weight)

    @property
    def rope_dim(self) -> int:
        return self.compressed.shape[1] - self.kv_rank

    def split_queries(self) -> tuple[Tensor, Tensor]:
        """The part that meets what latents expand to, and the part that is rotated."""
        nope_dim = self.q.shape[-1] - self.rope_dim
        first, second = self.q.split_with_sizes((nope_dim, self.rope_dim), dim=-1)
        return first, second

    def absorbed(self) -> QKV:
        """The same as queries of all heads over the keys and values of one head, which is what the
        cache keeps, in plain torch. What comes of it is still to be expanded."""
        q_nope, q_rope = self.split_queries()
        c, k_rope = self.compressed.split_with_sizes((self.kv_rank, self.rope_dim), dim=-1)
        keys = (
            rms_norm(c, self.norm_weight, self.eps),
            self.rotation.rotate(k_rope.unsqueeze(1))[:, 0],
        )
        queries = (self.expansion.to_latent(q_nope), self.rotation.rotate(q_rope))
        k = torch.cat(keys, dim=-1).unsqueeze(1)
        return QKV(torch.cat(queries, dim=-1), k, k[..., : self.kv_rank])


class AttentionStep(Protocol):
    """A step that a backend has planned; called once per layer."""

    def attend(
        self,
        layer_index: int,
        qkv: QKV | LatentQKV,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Prepares q and k, stores k and v, then attends with q and returns [T, num_heads,
        value_dim]. A group keeps pairs of keys and values, or latents alone. A query at position p
        sees (p - window, p]; scores s become softcap * tanh(s / softcap) where there is one.
        `sinks`, float32 [num_heads], are one more score of each head in the sum of the softmax,
        without a value and as they are."""
        ...


@dataclass(frozen=True, slots=True)
class StepContext:
    """All that a forward pass is given beside the weights: one flat line of T tokens, which may
    belong to many requests."""

    positions: Tensor
    """int64 [T]"""
    attention: tuple[AttentionStep, ...]
    """The planned step of each KV group."""
    token_ids: Tensor | None = None
    """int64 [T]; None where there are `embeddings`."""
    embeddings: Tensor | None = None
    """[T, H], in place of what the model's own table has for the token ids; may be overwritten."""
    hidden: Tensor | None = None
    """[T, H], on a stage behind the first: what the layers before gave; may be overwritten."""
    adapter_slots: Tensor | None = None
    """int32 [T]: which loaded adapter each token uses, -1 for none; None: no token uses one."""

    def embed(self, table: Callable[[Tensor], Tensor] | None) -> Tensor:
        """Input embeddings [T, H]: those given, or the rows of `table` that the token ids name."""
        if self.embeddings is not None:
            return self.embeddings
        assert table is not None, "a stage behind the first is given hidden states"
        assert self.token_ids is not None, "a step has token ids or embeddings"
        return table(self.token_ids)


class Attention(nn.Module):
    """Keys and values of the layer lie in one slot of one KV group. Both are those of a model with
    a single group until the layer is bound to another."""

    def __init__(
        self,
        layer_index: int,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.layer_index, self.scale, self.window = layer_index, scale, window
        self.softcap = softcap
        self.kv_group, self.layer_slot = 0, layer_index
        self.kv_scales: dict[int, Tensor] = {}
        """Of keys (0) and values (1) in 8 bits, as far as the checkpoint has them: one, or one for
        each KV head."""

    def bind(self, kv_group: int, layer_slot: int, window: int | None) -> None:
        """Says where keys and values lie and how many of them a query sees, before the first
        step."""
        self.kv_group, self.layer_slot, self.window = kv_group, layer_slot, window

    def forward(
        self, qkv: QKV | LatentQKV, step: StepContext, sinks: Tensor | None = None
    ) -> Tensor:
        """[T, num_heads * value_dim]; `sinks` are those of `AttentionStep.attend`."""
        attention = step.attention[self.kv_group]
        attended = attention.attend(
            self.layer_slot, qkv, self.scale, self.window, self.softcap, sinks
        )
        return attended.flatten(1)


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
