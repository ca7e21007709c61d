"""Experts with weights of a few bits: `GroupedMatrix` for each, stacked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.config.experts import ClampedGate
from quire.kernels.expert_matrices import ExpertTiles
from quire.kernels.hopper.overlap import launch_options, wait_for_inputs
from quire.kernels.torch.experts import Routing
from quire.kernels.triton.expert_tiles import tile_at
from quire.kernels.triton.experts import (
    SIDE_BY_SIDE,
    apply_gate,
    gate_options,
    pairs_of_tile,
    place_of_program,
    store_tile,
)
from quire.kernels.triton.grouped_matrix import GroupedMatrix, Tile, shared_bytes
from quire.kernels.triton.grouped_product import multiply_rows

STAGES = (3, 2)
"""Of a tile, as many as fit into shared memory."""
SCRATCH_BYTES = 16 << 10
"""Of shared memory beside what is on its way."""


@triton.jit(do_not_specialize=["num_tiles", "first_expert", "num_experts"])
def _grouped_tile_kernel(
    x_ptr,
    order_ptr,
    low_ptr,
    high_ptr,
    scales_ptr,
    zeros_ptr,
    minima_ptr,
    bias_ptr,
    tiles_ptr,
    pairs_ptr,
    pair_weights_ptr,
    out_ptr,
    num_tiles,
    first_expert,
    num_experts,
    num_outputs,
    num_inputs,
    num_spans,
    num_groups,
    num_rows,
    stride_x,
    stride_bias,
    stride_out,
    TOP_K: tl.constexpr,
    IS_GATED: tl.constexpr,
    SLOPE: tl.constexpr,
    LIMIT: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    IS_E2M1: tl.constexpr,
    ZERO: tl.constexpr,
    RUN: tl.constexpr,
    GROUP_RUNS: tl.constexpr,
    PAIRS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    NATIVE: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    tile, first = place_of_program(num_tiles, num_outputs, OUTPUTS, SIDE_BY_SIDE)
    wait_for_inputs(OVERLAPS)
    expert, start, end, is_used = tile_at(
        tiles_ptr, tile, num_tiles, first_expert, num_experts, pairs_ptr is not None
    )
    places, exist, pairs = pairs_of_tile(pairs_ptr, start, end, PAIRS)
    x_places = pairs // TOP_K if IS_GATED else places
    x_rows = x_ptr + x_places.to(tl.int64)[None, :] * stride_x
    outputs = first + tl.arange(0, OUTPUTS)
    in_outputs = outputs < num_outputs
    spans = tl.where(is_used, num_spans, 0)
    order = order_ptr
    if order_ptr is not None:
        order += expert * num_inputs
    elements = expert * num_spans * num_rows * RUN
    scales = expert * num_groups * num_rows
    high = high_ptr
    if high_ptr is not None:
        high += elements
    zeros = zeros_ptr
    if zeros_ptr is not None:
        zeros += scales
    minima = minima_ptr
    if minima_ptr is not None:
        minima += scales
    # Gate, then up, by one loop: two of them would both have room in shared memory.
    gate = tl.zeros([OUTPUTS, PAIRS], tl.float32)
    total = gate
    for half in range(2 if IS_GATED else 1):
        gate = total
        rows = half * num_outputs + outputs
        total = multiply_rows(
            x_rows,
            exist,
            order,
            low_ptr + elements,
            high,
            scales_ptr + scales,
            zeros,
            minima,
            rows,
            in_outputs,
            num_rows,
            num_inputs,
            spans,
            LOW_BITS,
            HIGH_BITS,
            IS_E2M1,
            ZERO,
            RUN,
            GROUP_RUNS,
            OUTPUTS,
            PAIRS,
            NATIVE,
        )
        if bias_ptr is not None:
            bias = bias_ptr + expert * stride_bias + rows
            total += tl.load(bias, in_outputs, 0.0).to(tl.float32)[:, None]
    if IS_GATED:
        total = apply_gate(gate, total, SLOPE, LIMIT)
    out_rows = places if IS_GATED else pairs
    store_tile(
        total, out_ptr, stride_out, out_rows, outputs, num_outputs, exist, pair_weights_ptr, pairs
    )


@dataclass(frozen=True)
class GroupedExperts:
    """Tensors as in a `GroupedMatrix`, with a dimension of experts in front."""

    stack: GroupedMatrix
    """The layout of each matrix, and the tensors of all."""

    max_tile = 64
    takes_vectors = False

    @property
    def num_experts(self) -> int:
        return len(self.stack.low)

    @property
    def num_outputs(self) -> int:
        return self.stack.num_outputs

    @property
    def nbytes(self) -> int:
        return self.stack.nbytes

    @property
    def layout(self) -> object:
        tensors = (self.stack.scales, self.stack.zeros, self.stack.minima)
        return _packing(self.stack), tuple(None if one is None else one.dtype for one in tensors)

    def gate_vectors(
        self,
        x: Tensor,
        routing: Routing,
        first_expert: int,
        gate: ClampedGate | None,
        bias: Tensor | None,
    ) -> Tensor:
        raise NotImplementedError("tiles of one pair do it")

    def sum_vectors(
        self, inner: Tensor, routing: Routing, first_expert: int, bias: Tensor | None
    ) -> Tensor:
        raise NotImplementedError("tiles of one pair do it")

    def gate_tiles(
        self,
        x: Tensor,
        top_k: int,
        tiles: ExpertTiles,
        gate: ClampedGate | None,
        bias: Tensor | None,
    ) -> Tensor:
        shape = tiles.num_pairs, self.num_outputs // 2
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
        self._multiply_tiles(x, top_k, tiles, None, bias, out, gate)
        return out

    def weigh_tiles(
        self, inner: Tensor, routing: Routing, tiles: ExpertTiles, bias: Tensor | None
    ) -> Tensor:
        shape = tiles.num_pairs, self.num_outputs
        out = torch.empty(shape, dtype=inner.dtype, device=inner.device)
        top_k = routing.experts.shape[1]
        self._multiply_tiles(inner, top_k, tiles, routing.weights, bias, out, None)
        return out

    def _multiply_tiles(
        self,
        x: Tensor,
        top_k: int,
        tiles: ExpertTiles,
        pair_weights: Tensor | None,
        bias: Tensor | None,
        out: Tensor,
        gate: ClampedGate | None,
    ) -> None:
        stack, num_outputs = self.stack, out.shape[1]
        tile = self._tile(tiles.size)
        _grouped_tile_kernel[(tiles.count * triton.cdiv(num_outputs, tile.outputs),)](
            x,
            stack.order,
            stack.low,
            stack.high,
            stack.scales,
            stack.zeros,
            stack.minima,
            bias,
            tiles.tiles,
            tiles.pairs,
            pair_weights,
            out,
            tiles.count,
            tiles.first_expert,
            self.num_experts,
            num_outputs,
            stack.num_inputs,
            stack.low.shape[1],
            stack.scales.shape[1],
            stack.num_outputs,
            x.stride(0),
            0 if bias is None else bias.stride(0),
            out.stride(0),
            TOP_K=top_k,
            IS_GATED=pair_weights is None,
            PAIRS=tiles.size,
            OUTPUTS=tile.outputs,
            NATIVE=stack.unpacks_natively(x.dtype),
            SIDE_BY_SIDE=SIDE_BY_SIDE,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **gate_options(gate),
            **stack.options(),
            **launch_options(out),
        )

    def _tile(self, num_pairs: int) -> Tile:
        available = shared_bytes(self.stack.low.device) - SCRATCH_BYTES
        # With 64 pairs four warps would have no registers left.
        warps = 4 if num_pairs < self.max_tile else 8
        tiles = [Tile(64, num_pairs, warps, stages) for stages in STAGES]
        return next((one for one in tiles if self.stack.buffer_bytes(one) <= available), tiles[-1])


def stack_grouped(matrices: Sequence[GroupedMatrix]) -> GroupedExperts | None:
    """The matrices of a layer's experts; None where they are not packed alike."""
    first = matrices[0]
    if any(_packing(one) != _packing(first) for one in matrices):
        return None
    has_zeros = any(one.zeros is not None for one in matrices)
    stacked = replace(
        first,
        low=torch.stack([one.low for one in matrices]),
        high=_stacked([one.high for one in matrices]),
        scales=_stacked([one.scales for one in matrices]),
        zeros=torch.stack([_zeros(one) for one in matrices]) if has_zeros else None,
        minima=_stacked([one.minima for one in matrices]),
        order=_stacked([one.order for one in matrices]),
    )
    return GroupedExperts(stacked)


def _packing(matrix: GroupedMatrix) -> tuple[object, ...]:
    """What must be equal."""
    return (
        (matrix.num_outputs, matrix.num_inputs, matrix.run, matrix.group_runs),
        (matrix.low_bits, matrix.high_bits, matrix.zero, matrix.is_e2m1),
        (matrix.minima is None, matrix.order is None),
    )


def _zeros(matrix: GroupedMatrix) -> Tensor:
    if matrix.zeros is not None:
        return matrix.zeros
    return torch.full_like(matrix.scales, matrix.zero, dtype=torch.uint8)


def _stacked(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """In a type that keeps the numbers of all: each may have been narrowed in its own way."""
    known = [one for one in tensors if one is not None]
    if not known:
        return None
    dtypes = {one.dtype for one in known}
    dtype = known[0].dtype if len(dtypes) == 1 else torch.float32
    return torch.stack([one.to(dtype) for one in known])
