"""Queries, keys and values on their way into attention."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from quire.kernels.torch.heads import rms_norm, rotate


@dataclass(frozen=True)
class Rotation:
    """Rotary positions of a step's tokens; cos and sin are tables [max_positions, head_dim / 2]."""

    cos: Tensor
    sin: Tensor
    positions: Tensor

    @cached_property
    def angles(self) -> tuple[Tensor, Tensor]:
        """cos and sin of each token, [T, 1, head_dim / 2]."""
        return self.cos[self.positions].unsqueeze(1), self.sin[self.positions].unsqueeze(1)


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorm of queries and keys per head, before the rotation."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


@dataclass(frozen=True)
class Heads:
    """q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim] as projected, and what is
    still to be done to them before they meet."""

    q: Tensor
    k: Tensor
    v: Tensor
    rotation: Rotation | None = None
    norms: HeadNorms | None = None

    def prepared(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v ready for attention, in plain torch."""
        q, k = self.q, self.k
        if self.norms is not None:
            q = rms_norm(q, self.norms.q_weight, self.norms.eps)
            k = rms_norm(k, self.norms.k_weight, self.norms.eps)
        if self.rotation is not None:
            q, k = rotate(q, *self.rotation.angles), rotate(k, *self.rotation.angles)
        return q, k, self.v
