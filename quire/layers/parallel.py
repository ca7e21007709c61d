"""Tensor parallelism: a rank among its peers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from quire.protocol.errors import ModelError


@dataclass(frozen=True)
class Parallel:
    """One rank of the `size` that share a model. Collectives do nothing where there is one rank."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    """The ranks' process group; None: that of all processes."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`; may reuse `x`."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' `x`, joined along the last dimension in rank order."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)

    def share(self, total: int, what: str) -> int:
        """An equal share of `total` things, which must divide evenly."""
        if total % self.size:
            raise ModelError(
                f"tensor_parallel_size={self.size} does not divide the model's {what} ({total}); "
                f"choose a size that does."
            )
        return total // self.size

    def kv_heads(self, num_kv_heads: int) -> int:
        """KV heads on each rank. Where there are fewer than ranks, each is kept by several."""
        if num_kv_heads >= self.size:
            return self.share(num_kv_heads, "num_key_value_heads")
        if self.size % num_kv_heads:
            raise ModelError(
                f"tensor_parallel_size={self.size} is not a multiple of the model's "
                f"num_key_value_heads ({num_kv_heads}); choose a size that is, or a smaller one."
            )
        return 1
