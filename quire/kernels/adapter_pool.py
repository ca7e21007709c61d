"""The memory of adapters as kernels read it.

A low-rank adapter adds B A x to the outputs of linear layers. Its rank rows come in chunks of
`CHUNK_ROWS`; a chunk has so many rows of A and of B for every layer, side by side, and so an
adapter is placed with one copy for each chunk, anywhere in the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.expert_matrices import ExpertTiles
from quire.protocol.adapter import CHUNK_ROWS as CHUNK_ROWS

HAS_BIAS, HAS_GAINS = 1, 2
"""Bits of `AdapterSlice.vectors`."""


@dataclass(frozen=True)
class AdapterPool:
    chunks: Tensor
    """[chunks, numbers of a chunk]"""
    tables: Tensor
    """int32 [slots, most chunks of an adapter]: the chunks of the adapter in a slot, in the order
    of its rank rows."""

    @property
    def max_chunks(self) -> int:
        return self.tables.shape[1]


@dataclass(frozen=True)
class AdapterSlice:
    """Outputs of a layer to which one pair of A and B adds: all of them, or those of q, of k and of
    v. Offsets are those in a chunk."""

    first: int
    """Its first output."""
    num_outputs: int
    num_inputs: int
    a_offset: int
    """Of A [CHUNK_ROWS, inputs]."""
    a_stride: int
    b_offset: int
    """Of B [CHUNK_ROWS, outputs], with the adapter's scaling."""
    b_stride: int
    bias_offset: int
    """Of what is added to the outputs, [outputs], in the first chunk of an adapter."""
    gains_offset: int
    """The same for factors less one, by which products with the weight are multiplied (DoRA)."""
    counts: Tensor
    """int32 [slots]: chunks that the adapter has for these outputs; 0: it leaves them alone."""
    vectors: Tensor
    """int32 [slots]: whether it has a bias and gains, as bits."""


@dataclass(frozen=True, eq=False)
class LayerAdapters:
    """What all adapters add to the outputs of one layer."""

    pool: AdapterPool
    slices: Sequence[AdapterSlice]
    layout: Tensor
    """int64 on the pool's device, for kernels. Of each slice: offset and stride of A and of B, the
    first output, the number of outputs, and the columns of counts and vectors beside those of
    `AdapterPool.tables`. Then, of each slice, the offsets of bias and gains."""

    @classmethod
    def of(cls, pool: AdapterPool, slices: Sequence[AdapterSlice]) -> LayerAdapters:
        numbers: list[int] = []
        for one in slices:
            numbers += [one.a_offset, one.a_stride, one.b_offset, one.b_stride]
            numbers += [one.first, one.num_outputs]
            for column in (one.counts, one.vectors):
                numbers.append(int(column.storage_offset() - pool.tables.storage_offset()))
        for one in slices:
            numbers += [one.bias_offset, one.gains_offset]
        return cls(pool, slices, torch.tensor(numbers, device=pool.chunks.device))


@dataclass(frozen=True)
class AdapterTokens:
    """Which adapter each token of a step uses."""

    slots: Tensor
    """int32 [tokens]; -1: none."""
    tiles: ExpertTiles | None = None
    """The tokens brought together by adapter, where kernels want it."""
