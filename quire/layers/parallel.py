"""A rank: its peers, which share each layer with it, and its stage of the layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch


class ProcessGroup(Protocol):
    """Ranks that do the same collectives in the same order."""

    @property
    def is_capturable(self) -> bool:
        """Whether CUDA graphs may have its collectives in them."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, which may be overwritten; the same bits on all ranks."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' `x`, stacked in rank order."""

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """The `x` of rank `source`, written into that of the others."""


class Link(Protocol):
    """From the stage before to this one, and from this one to the next."""

    def send(self, x: torch.Tensor) -> None:
        """To the next stage; may return before it is received, after which `x` may change."""

    def receive(self, out: torch.Tensor) -> torch.Tensor:
        """What the stage before sent, in the order of sending, written into `out`."""


@dataclass(frozen=True)
class Stage:
    """One of `count` stages that a step passes in order."""

    index: int = 0
    count: int = 1
    link: Link | None = None

    @cached_property
    def is_first(self) -> bool:
        return self.index == 0

    @cached_property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def has_embedding(self, is_tied: bool) -> bool:
        """Whether the stage has token embeddings, which an output head may be tied to."""
        return self.is_first or (self.is_last and is_tied)

    def receive(self, out: torch.Tensor) -> None:
        """Fill `out` with what the stage before sent. Nothing is sent of a step without tokens."""
        if len(out):
            self._neighbours.receive(out)

    def send(self, x: torch.Tensor) -> None:
        if len(x):
            self._neighbours.send(x)

    @property
    def _neighbours(self) -> Link:
        assert self.link is not None, "stages of one model need a link"
        return self.link

    def layers(self, num_layers: int) -> range:
        """Those of this stage. What is left over goes to the stages in the middle, then to the
        first: the last one has the output head."""
        few, more = divmod(num_layers, self.count)
        order = sorted(range(self.count), key=lambda one: (one == self.count - 1, one == 0))
        sizes = [few + (stage in order[:more]) for stage in range(self.count)]
        first = sum(sizes[: self.index])
        return range(first, first + sizes[self.index])


ONE_STAGE = Stage()


@dataclass(frozen=True)
class HeadShare:
    """Attention heads that a rank keeps; those beyond the model's are padding."""

    first: int
    count: int
    kv_first: int
    kv_count: int
    copies: int = 1
    """Ranks that keep the same KV heads."""


@dataclass(frozen=True)
class Parallel:
    """One rank of the `size` that share each layer of a stage. Collectives do nothing where there
    is one rank."""

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None
    stage: Stage = ONE_STAGE
    all_answer: bool = False
    """Whether all ranks want the results of a step, and not the first alone."""
    expert_parallel: bool = False
    """Whether ranks keep whole experts, and not a part of each."""

    @property
    def answers(self) -> bool:
        return self.rank == 0 or self.all_answer

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`; may reuse `x`."""
        return x if self.size == 1 else self._peers.all_reduce(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' `x`, joined along the last dimension in rank order."""
        return x if self.size == 1 else torch.cat(list(self._peers.all_gather(x)), dim=-1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """The first rank's `x`, written into that of the others."""
        return x if self.size == 1 else self._peers.broadcast(x, 0)

    @property
    def is_capturable(self) -> bool:
        """Whether CUDA graphs may have its collectives in them."""
        return self.group is None or self.group.is_capturable

    @property
    def _peers(self) -> ProcessGroup:
        assert self.group is not None, "ranks of one model need a process group"
        return self.group

    def share(self, total: int, block: int = 1) -> int:
        """A rank's share of `total` things. All have the same; what is too much is padding. Shares
        do not cut blocks of `block` things, or of half as many and so on, where that leaves none of
        them more than an eighth larger."""
        least = -(-total // self.size)
        while block > 1:
            share = -(-least // block) * block
            if total % block == 0 and share <= least + least // 8:
                return share
            block //= 2
        return least

    def experts(self, count: int) -> range:
        """Of `count` experts those that this rank keeps, whole or in part."""
        if not self.expert_parallel:
            return range(count)
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def heads(self, num_heads: int, num_kv_heads: int) -> HeadShare:
        """The heads of this rank. Each KV head is with all of its query heads, or is kept by
        several ranks where there are fewer of them than ranks: one KV head, or the latent that
        stands for all, is kept by each of them."""
        group, size, rank = num_heads // num_kv_heads, self.size, self.rank
        is_even = num_heads % size == 0 and size % num_kv_heads == 0
        if is_even or num_kv_heads == 1:
            count = self.share(num_heads)
            first = rank * num_kv_heads // size
            return HeadShare(rank * count, count, first, 1, size // num_kv_heads)
        count = self.share(num_kv_heads)
        return HeadShare(rank * count * group, count * group, rank * count, count)
