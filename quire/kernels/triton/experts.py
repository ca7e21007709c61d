"""Networks of experts on a GPU, without waiting for the host: all shapes follow from the numbers of
tokens and experts, so a CUDA graph can hold them.

- Few tokens: they seldom have experts in common, so each reads the weights of its own as a
  matrix-vector product, in two kernels.
- More: pairs of a token and an expert are sorted by expert and cut into tiles (`expert_tiles`).
  One kernel multiplies gate and up and applies the gate, one multiplies down and by the weights of
  the routing, and one sums up the results of a token, always in the same order.

Results are computed as W x^T, as in `grouped_product`: with few tokens the weights fill the rows of
a tensor core. Weights of 8 bits are widened in registers, and inputs are taken as they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.config.experts import ClampedGate
from quire.kernels.expert_matrices import ExpertMatrices, ExpertTiles
from quire.kernels.hopper.overlap import launch_options, wait_for_inputs
from quire.kernels.torch.experts import Routing
from quire.kernels.triton.expert_tiles import (
    PAIRS_AT_ONCE,
    tile_at,
    tiles_by_expert,
    tiles_by_pair,
)
from quire.kernels.triton.gemv import widen
from quire.kernels.triton.grouped_matrix import shared_bytes

MAX_UNSORTED_TOKENS = 4
"""Up to here each token reads the weights of its experts for itself."""
TILE_SIZES = (16, 32, 64, 128)
"""Pairs of a tile."""
FILLING = 0.75
"""Of a tile by the pairs that an expert has on average, before the next size is taken: they are
not divided evenly, and a second tile reads the weights again."""
SIDE_BY_SIDE = 8
"""Tiles that are computed one after the other for the same outputs, so that the weights of an
expert that has several are found in the L2 cache."""
SUM_WIDTH = 1024


@triton.jit
def apply_gate(gate, up, SLOPE: tl.constexpr, LIMIT: tl.constexpr):
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
    return gate / (1.0 + tl.exp(-SLOPE * gate)) * up


def gate_options(gate: ClampedGate | None) -> dict[str, Any]:
    """For a launch of a kernel that calls `apply_gate`; None: silu(gate) * up."""
    if gate is None:
        return {"SLOPE": 1.0, "LIMIT": None}
    return {"SLOPE": gate.slope, "LIMIT": gate.limit}


@triton.jit
def place_of_program(num_tiles, num_outputs, OUTPUTS: tl.constexpr, SIDE_BY_SIDE: tl.constexpr):
    """The tile of a program and its first output."""
    together = SIDE_BY_SIDE * tl.cdiv(num_outputs, OUTPUTS)
    before = tl.program_id(0) // together * SIDE_BY_SIDE
    side_by_side = min(num_tiles - before, SIDE_BY_SIDE)
    inside = tl.program_id(0) % together
    return before + inside % side_by_side, inside // side_by_side * OUTPUTS


@triton.jit
def pairs_of_tile(pairs_ptr, start, end, PAIRS: tl.constexpr):
    """Where the pairs of a tile lie, which of them there are, and their numbers."""
    places = start + tl.arange(0, PAIRS)
    exist = places < end
    pairs = places
    if pairs_ptr is not None:
        pairs = tl.load(pairs_ptr + places, exist, 0)
    return places, exist, pairs


@triton.jit
def store_tile(
    total, out_ptr, stride_out, rows, outputs, num_outputs, exist, pair_weights_ptr, pairs
):
    """Writes total [OUTPUTS, PAIRS] into rows, times the weights of the routing if given."""
    if pair_weights_ptr is not None:
        total *= tl.load(pair_weights_ptr + pairs, exist, 0.0)[None, :]
    targets = out_ptr + rows.to(tl.int64)[None, :] * stride_out + outputs[:, None]
    mask = (outputs < num_outputs)[:, None] & exist[None, :]
    tl.store(targets, total.to(out_ptr.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["num_tiles", "first_expert", "num_experts"])
def _tile_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
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
    stride_x,
    stride_expert,
    stride_weight,
    stride_expert_scales,
    stride_scales,
    stride_bias,
    stride_out,
    TOP_K: tl.constexpr,
    IS_GATED: tl.constexpr,
    SLOPE: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    PAIRS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    SIDE_BY_SIDE: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    tile, first = place_of_program(num_tiles, num_outputs, OUTPUTS, SIDE_BY_SIDE)
    wait_for_inputs(OVERLAPS)
    expert, start, end, is_used = tile_at(
        tiles_ptr, tile, num_tiles, first_expert, num_experts, pairs_ptr is not None
    )
    places, exist, pairs = pairs_of_tile(pairs_ptr, start, end, PAIRS)
    x_rows = pairs // TOP_K if IS_GATED else places
    outputs = first + tl.arange(0, OUTPUTS)
    columns = tl.arange(0, INPUTS)
    in_outputs = outputs < num_outputs
    x_from = x_ptr + x_rows.to(tl.int64)[:, None] * stride_x + columns[None, :]
    rows = weight_ptr + expert * stride_expert + outputs.to(tl.int64)[:, None] * stride_weight
    rows += columns[None, :]
    up_rows = rows + num_outputs.to(tl.int64) * stride_weight
    scales = scales_ptr
    if scales_ptr is not None:
        scales += expert * stride_expert_scales
    total = tl.zeros([OUTPUTS, PAIRS], tl.float32)
    total_up = total
    for at in tl.range(0, tl.where(is_used, num_inputs, 0), INPUTS, num_stages=STAGES):
        in_columns = columns < num_inputs - at
        x = tl.load(x_from + at, exist[:, None] & in_columns[None, :], 0.0).trans()
        mask = in_outputs[:, None] & in_columns[None, :]
        weight = tl.load(rows + at, mask, 0.0)
        if scales_ptr is not None:
            weight = widen(weight).to(x.dtype)
        if BLOCK_INPUTS > 0:
            block = scales + outputs // BLOCK_OUTPUTS * stride_scales + at // BLOCK_INPUTS
            scale = tl.load(block, in_outputs, 0.0)
            total += tl.dot(weight, x, input_precision="ieee") * scale[:, None]
        else:
            total = tl.dot(weight, x, total, input_precision="ieee")
        if IS_GATED:
            up = tl.load(up_rows + at, mask, 0.0)
            if scales_ptr is not None:
                up = widen(up).to(x.dtype)
            if BLOCK_INPUTS > 0:
                up_block = (num_outputs + outputs) // BLOCK_OUTPUTS * stride_scales
                scale = tl.load(scales + up_block + at // BLOCK_INPUTS, in_outputs, 0.0)
                total_up += tl.dot(up, x, input_precision="ieee") * scale[:, None]
            else:
                total_up = tl.dot(up, x, total_up, input_precision="ieee")
    if scales_ptr is not None and BLOCK_INPUTS == 0:
        total *= tl.load(scales + outputs, in_outputs, 0.0)[:, None]
        if IS_GATED:
            total_up *= tl.load(scales + num_outputs + outputs, in_outputs, 0.0)[:, None]
    if bias_ptr is not None:
        bias = bias_ptr + expert * stride_bias + outputs
        total += tl.load(bias, in_outputs, 0.0).to(tl.float32)[:, None]
        if IS_GATED:
            total_up += tl.load(bias + num_outputs, in_outputs, 0.0).to(tl.float32)[:, None]
    if IS_GATED:
        total = apply_gate(total, total_up, SLOPE, LIMIT)
    out_rows = places if IS_GATED else pairs
    store_tile(
        total, out_ptr, stride_out, out_rows, outputs, num_outputs, exist, pair_weights_ptr, pairs
    )


@triton.jit(do_not_specialize=["first_expert", "num_experts"])
def _gate_vectors_kernel(
    x_ptr,
    experts_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    first_expert,
    num_experts,
    num_outputs,
    num_inputs,
    stride_x,
    stride_expert,
    stride_weight,
    stride_expert_scales,
    stride_scales,
    stride_bias,
    TOP_K: tl.constexpr,
    SLOPE: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    chunks = tl.cdiv(num_outputs, OUTPUTS)
    pair = tl.program_id(0) // chunks
    outputs = tl.program_id(0) % chunks * OUTPUTS + tl.arange(0, OUTPUTS)
    in_outputs = outputs < num_outputs
    columns = tl.arange(0, INPUTS)
    wait_for_inputs(OVERLAPS)
    expert, _, _, is_used = tile_at(experts_ptr, pair, 0, first_expert, num_experts, False)
    x_row = x_ptr + (pair // TOP_K).to(tl.int64) * stride_x
    rows = weight_ptr + expert * stride_expert + outputs.to(tl.int64)[:, None] * stride_weight
    up_rows = rows + num_outputs.to(tl.int64) * stride_weight
    scales = scales_ptr
    if scales_ptr is not None:
        scales += expert * stride_expert_scales
    acc = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    acc_up = acc
    for start in tl.range(0, tl.where(is_used, num_inputs, 0), INPUTS, num_stages=STAGES):
        at = start + columns
        in_columns = at < num_inputs
        mask = in_outputs[:, None] & in_columns[None, :]
        gate = tl.load(rows + at[None, :], mask, 0.0)
        up = tl.load(up_rows + at[None, :], mask, 0.0)
        x = tl.load(x_row + at, in_columns, 0.0).to(tl.float32)[None, :]
        if BLOCK_INPUTS > 0:
            block = scales + start // BLOCK_INPUTS
            of_gate = outputs // BLOCK_OUTPUTS * stride_scales
            of_up = (num_outputs + outputs) // BLOCK_OUTPUTS * stride_scales
            acc += widen(gate) * (x * tl.load(block + of_gate, in_outputs, 0.0)[:, None])
            acc_up += widen(up) * (x * tl.load(block + of_up, in_outputs, 0.0)[:, None])
        else:
            acc += widen(gate) * x
            acc_up += widen(up) * x
    total = tl.sum(acc, 1)
    total_up = tl.sum(acc_up, 1)
    if scales_ptr is not None and BLOCK_INPUTS == 0:
        total *= tl.load(scales + outputs, in_outputs, 0.0)
        total_up *= tl.load(scales + num_outputs + outputs, in_outputs, 0.0)
    if bias_ptr is not None:
        bias = bias_ptr + expert * stride_bias + outputs
        total += tl.load(bias, in_outputs, 0.0).to(tl.float32)
        total_up += tl.load(bias + num_outputs, in_outputs, 0.0).to(tl.float32)
    total = apply_gate(total, total_up, SLOPE, LIMIT)
    target = out_ptr + pair.to(tl.int64) * num_outputs + outputs
    kept = tl.where(is_used, num_outputs, 0)
    tl.store(target, total.to(out_ptr.dtype.element_ty), outputs < kept)


@triton.jit(do_not_specialize=["first_expert", "num_experts"])
def _sum_vectors_kernel(
    x_ptr,
    experts_ptr,
    pair_weights_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    first_expert,
    num_experts,
    num_outputs,
    num_inputs,
    stride_expert,
    stride_weight,
    stride_expert_scales,
    stride_scales,
    stride_bias,
    TOP_K: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    SLOTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    chunks = tl.cdiv(num_outputs, OUTPUTS)
    token = (tl.program_id(0) // chunks).to(tl.int64)
    outputs = tl.program_id(0) % chunks * OUTPUTS + tl.arange(0, OUTPUTS)
    in_outputs = outputs < num_outputs
    columns = tl.arange(0, INPUTS)
    slots = tl.arange(0, SLOTS)
    pairs = token * TOP_K + slots
    wait_for_inputs(OVERLAPS)
    # All experts of the token side by side, so that the loads of none wait for another's.
    experts = tl.load(experts_ptr + pairs, slots < TOP_K, -1) - first_expert
    is_used = (slots < TOP_K) & (experts >= 0) & (experts < num_experts)
    pair_weights = tl.load(pair_weights_ptr + pairs, is_used, 0.0)
    experts = tl.where(is_used, experts, 0).to(tl.int64)
    x_rows = x_ptr + (pairs * num_inputs)[:, None, None]
    rows = weight_ptr + (experts * stride_expert)[:, None, None]
    rows += (outputs.to(tl.int64) * stride_weight)[None, :, None]
    both = is_used[:, None] & in_outputs[None, :]
    acc = tl.zeros([SLOTS, OUTPUTS, INPUTS], tl.float32)
    for start in tl.range(0, num_inputs, INPUTS, num_stages=STAGES):
        at = (start + columns)[None, None, :]
        in_columns = at < num_inputs
        weight = tl.load(rows + at, both[:, :, None] & in_columns, 0.0)
        x = tl.load(x_rows + at, is_used[:, None, None] & in_columns, 0.0).to(tl.float32)
        if BLOCK_INPUTS > 0:
            of_outputs = outputs // BLOCK_OUTPUTS * stride_scales + start // BLOCK_INPUTS
            places = (experts * stride_expert_scales)[:, None] + of_outputs[None, :]
            x = x * tl.load(scales_ptr + places, both, 0.0)[:, :, None]
        acc += widen(weight) * x
    total = tl.sum(acc, 2)
    if scales_ptr is not None and BLOCK_INPUTS == 0:
        places = (experts * stride_expert_scales)[:, None] + outputs[None, :]
        total *= tl.load(scales_ptr + places, both, 0.0)
    if bias_ptr is not None:
        places = (experts * stride_bias)[:, None] + outputs[None, :]
        total += tl.load(bias_ptr + places, both, 0.0).to(tl.float32)
    summed = tl.sum(total * pair_weights[:, None], 0)
    target = out_ptr + token * num_outputs + outputs
    tl.store(target, summed.to(out_ptr.dtype.element_ty), in_outputs)


@triton.jit(do_not_specialize=["first_expert", "num_experts"])
def _sum_kernel(
    results_ptr,
    experts_ptr,
    out_ptr,
    first_expert,
    num_experts,
    num_outputs,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    chunks = tl.cdiv(num_outputs, WIDTH)
    token = (tl.program_id(0) // chunks).to(tl.int64)
    columns = tl.program_id(0) % chunks * WIDTH + tl.arange(0, WIDTH)
    mask = columns < num_outputs
    total = tl.zeros([WIDTH], tl.float32)
    wait_for_inputs(OVERLAPS)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        expert = tl.load(experts_ptr + pair) - first_expert
        is_used = (expert >= 0) & (expert < num_experts)
        kept = tl.where(is_used, num_outputs, 0)
        result = tl.load(results_ptr + pair * num_outputs + columns, columns < kept, 0.0)
        total += result.to(tl.float32)
    tl.store(out_ptr + token * num_outputs + columns, total.to(out_ptr.dtype.element_ty), mask)


def sum_results(results: Tensor, routing: Routing, num_experts: int, first_expert: int) -> Tensor:
    """[tokens * top_k, hidden] of experts of this rank -> [tokens, hidden]."""
    num_tokens, top_k = routing.experts.shape
    num_outputs = results.shape[1]
    out = torch.empty((num_tokens, num_outputs), dtype=results.dtype, device=results.device)
    width = min(SUM_WIDTH, triton.next_power_of_2(num_outputs))
    _sum_kernel[(num_tokens * triton.cdiv(num_outputs, width),)](
        results,
        routing.experts,
        out,
        first_expert,
        num_experts,
        num_outputs,
        TOP_K=top_k,
        WIDTH=width,
        num_warps=4,
        **launch_options(out),
    )
    return out


class _Tile(NamedTuple):
    """What a program multiplies at a time, and with how many warps."""

    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


def _gate_tile() -> _Tile:
    """Of vectors."""
    return _Tile(4, 256, 1, 4)


def _sum_tile(is_narrow: bool) -> _Tile:
    """Of vectors, with as many times these outputs as a token has experts."""
    return _Tile(4 if is_narrow else 2, 256, 4, 2)


class DenseExperts:
    """Matrices of floats, or of 8 bits with scales of their outputs or blocks."""

    max_tile = TILE_SIZES[-1]
    takes_vectors = True

    def __init__(
        self,
        weight: Tensor,
        scales: Tensor | None = None,
        block: tuple[int, int] | None = None,
    ) -> None:
        """`weight` [experts, outputs, inputs]; float32 `scales` [experts, outputs] or, of blocks
        of outputs and inputs, [experts, blocks, blocks]."""
        self._weight, self._scales, self._block = weight, scales, block

    @property
    def num_experts(self) -> int:
        return len(self._weight)

    @property
    def num_outputs(self) -> int:
        return self._weight.shape[1]

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes + (0 if self._scales is None else self._scales.nbytes)

    @property
    def layout(self) -> object:
        return self._weight.shape, self._weight.dtype, self._scales is None, self._block

    def gate_vectors(
        self,
        x: Tensor,
        routing: Routing,
        first_expert: int,
        gate: ClampedGate | None,
        bias: Tensor | None,
    ) -> Tensor:
        num_pairs, width = routing.experts.numel(), self.num_outputs // 2
        out = torch.empty((num_pairs, width), dtype=x.dtype, device=x.device)
        tile = _gate_tile()
        _gate_vectors_kernel[(num_pairs * triton.cdiv(width, tile.outputs),)](
            x,
            routing.experts,
            self._weight,
            self._scales,
            bias,
            out,
            first_expert,
            self.num_experts,
            width,
            self._weight.shape[2],
            x.stride(0),
            *self._strides(bias),
            TOP_K=routing.experts.shape[1],
            OUTPUTS=tile.outputs,
            INPUTS=self._inputs_of(tile.inputs),
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
            **gate_options(gate),
            **self._blocks(),
            **launch_options(out),
        )
        return out

    def sum_vectors(
        self, inner: Tensor, routing: Routing, first_expert: int, bias: Tensor | None
    ) -> Tensor:
        num_tokens, top_k = routing.experts.shape
        out = torch.empty((num_tokens, self.num_outputs), dtype=inner.dtype, device=inner.device)
        tile = _sum_tile(self._scales is not None)
        _sum_vectors_kernel[(num_tokens * triton.cdiv(self.num_outputs, tile.outputs),)](
            inner,
            routing.experts,
            routing.weights,
            self._weight,
            self._scales,
            bias,
            out,
            first_expert,
            self.num_experts,
            self.num_outputs,
            self._weight.shape[2],
            *self._strides(bias),
            TOP_K=top_k,
            SLOTS=triton.next_power_of_2(top_k),
            OUTPUTS=tile.outputs,
            INPUTS=self._inputs_of(tile.inputs),
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
            **self._blocks(),
            **launch_options(out),
        )
        return out

    def gate_tiles(
        self,
        x: Tensor,
        top_k: int,
        tiles: ExpertTiles,
        gate: ClampedGate | None,
        bias: Tensor | None,
    ) -> Tensor:
        width = self.num_outputs // 2
        out = torch.empty((tiles.num_pairs, width), dtype=x.dtype, device=x.device)
        tile = self._tile(tiles.size, x.element_size(), True)
        self._multiply_tiles(x, top_k, tiles, None, bias, out, tile, gate)
        return out

    def weigh_tiles(
        self, inner: Tensor, routing: Routing, tiles: ExpertTiles, bias: Tensor | None
    ) -> Tensor:
        shape = tiles.num_pairs, self.num_outputs
        out = torch.empty(shape, dtype=inner.dtype, device=inner.device)
        tile = self._tile(tiles.size, inner.element_size(), False)
        top_k = routing.experts.shape[1]
        self._multiply_tiles(inner, top_k, tiles, routing.weights, bias, out, tile, None)
        return out

    def _multiply_tiles(
        self,
        x: Tensor,
        top_k: int,
        tiles: ExpertTiles,
        pair_weights: Tensor | None,
        bias: Tensor | None,
        out: Tensor,
        tile: _Tile,
        gate: ClampedGate | None,
    ) -> None:
        num_outputs = out.shape[1]
        _tile_kernel[(tiles.count * triton.cdiv(num_outputs, tile.outputs),)](
            x,
            self._weight,
            self._scales,
            bias,
            tiles.tiles,
            tiles.pairs,
            pair_weights,
            out,
            tiles.count,
            tiles.first_expert,
            self.num_experts,
            num_outputs,
            self._weight.shape[2],
            x.stride(0),
            *self._strides(bias),
            out.stride(0),
            TOP_K=top_k,
            IS_GATED=pair_weights is None,
            PAIRS=tiles.size,
            OUTPUTS=tile.outputs,
            INPUTS=self._inputs_of(tile.inputs),
            SIDE_BY_SIDE=SIDE_BY_SIDE,
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
            **gate_options(gate),
            **self._blocks(),
            **launch_options(out),
        )

    def _tile(self, num_pairs: int, x_bytes: int, gated: bool) -> _Tile:
        outputs = 64 if gated or num_pairs <= 32 else 128
        inputs = 128 if self._scales is not None and num_pairs <= 32 else 64
        is_large = num_pairs >= 128 and not (gated and self._scales is None)
        warps = 8 if is_large else 4
        rows = outputs * (2 if gated else 1)
        stage = inputs * (rows * self._weight.element_size() + num_pairs * x_bytes)
        stages = min(4, shared_bytes(self._weight.device) // stage)
        return _Tile(outputs, inputs, warps, max(stages, 1))

    def _inputs_of(self, inputs: int) -> int:
        """Inputs at a time: in one block."""
        return inputs if self._block is None else min(inputs, self._block[1])

    def _strides(self, bias: Tensor | None) -> tuple[int, ...]:
        scales = self._scales
        return (
            self._weight.stride(0),
            self._weight.stride(1),
            0 if scales is None else scales.stride(0),
            0 if scales is None else scales.stride(1),
            0 if bias is None else bias.stride(0),
        )

    def _blocks(self) -> dict[str, int]:
        outputs, inputs = self._block or (0, 0)
        return {"BLOCK_OUTPUTS": outputs, "BLOCK_INPUTS": inputs}


def expert_mlp(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor | ExpertMatrices,
    down: Tensor | ExpertMatrices,
    first_expert: int = 0,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    gate: ClampedGate | None = None,
) -> Tensor:
    """As the reference says."""
    gate_up = DenseExperts(gate_up) if isinstance(gate_up, Tensor) else gate_up
    down = DenseExperts(down) if isinstance(down, Tensor) else down
    num_tokens, top_k = routing.experts.shape
    is_unsorted = num_tokens <= MAX_UNSORTED_TOKENS
    if is_unsorted and gate_up.takes_vectors and down.takes_vectors:
        inner = gate_up.gate_vectors(x, routing, first_expert, gate, gate_up_bias)
        return down.sum_vectors(inner, routing, first_expert, down_bias)
    num_experts = gate_up.num_experts
    if is_unsorted:
        tiles = tiles_by_pair(routing.experts, first_expert, TILE_SIZES[0])
    else:
        size = min(tile_size(num_tokens * top_k, num_experts), gate_up.max_tile, down.max_tile)
        tiles = tiles_by_expert(routing.experts, num_experts, first_expert, size)
    inner = gate_up.gate_tiles(x, top_k, tiles, gate, gate_up_bias)
    results = down.weigh_tiles(inner, routing, tiles, down_bias)
    return sum_results(results, routing, num_experts, first_expert)


def expert_product(
    x: Tensor,
    matrices: ExpertMatrices,
    expert: int,
    first_expert: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    """x W^T + bias of one expert, without gates and weights of a routing; `bias` is that of all."""
    experts = torch.full((len(x), 1), expert, dtype=torch.int32, device=x.device)
    routing = Routing(experts, torch.ones((len(x), 1), device=x.device))
    tiles = tiles_by_expert(experts, matrices.num_experts, first_expert, TILE_SIZES[0])
    return matrices.weigh_tiles(x, routing, tiles, bias)


def kernel_changes(num_experts: int, top_k: int) -> list[int]:
    """Numbers of tokens with which each of the kernels is met, the smallest first."""
    most = [int(FILLING * size * num_experts) for size in TILE_SIZES[:-1]] + list(PAIRS_AT_ONCE)
    last = {MAX_UNSORTED_TOKENS, *(num_pairs // top_k for num_pairs in most)}
    return sorted({count for one in last for count in (one, one + 1) if count > 0})


def tile_size(num_pairs: int, num_experts: int) -> int:
    """Pairs of a tile."""
    for size in TILE_SIZES[:-1]:
        if num_pairs <= FILLING * size * num_experts:
            return size
    return TILE_SIZES[-1]
