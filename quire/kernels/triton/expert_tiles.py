"""Which expert computes which tokens, found on the GPU: nothing waits for the host, and all shapes
follow from the numbers of tokens and experts.

A pair is a token and one of its experts; pairs are numbered token by token. Pairs of an expert are
brought together, in their order, and cut into tiles of at most so many; what tokens have chosen
beyond the experts of this rank is left out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.expert_matrices import ExpertTiles
from quire.kernels.hopper.overlap import launch_options, wait_for_inputs

PAIRS_AT_ONCE = (64, 512, 4096)
"""Of a program: few sizes, each of which is a kernel to compile. With more pairs than the largest
a kernel of its own counts, which is then quicker than a histogram."""
TILES_AT_ONCE = tl.constexpr(32)


@triton.jit(do_not_specialize=["num_pairs", "first_expert"])
def _count_kernel(
    experts_ptr,
    counts_ptr,
    num_pairs,
    first_expert,
    PAIRS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    expert = tl.program_id(0)
    wait_for_inputs(OVERLAPS)
    found = tl.zeros([PAIRS], tl.int32)
    for start in range(0, num_pairs, PAIRS):
        at = start + tl.arange(0, PAIRS)
        chosen = tl.load(experts_ptr + at, at < num_pairs, -1)
        found += (chosen == expert + first_expert).to(tl.int32)
    count = tl.sum(found, 0)
    tl.store(counts_ptr + expert, count)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles", "num_experts", "first_expert"])
def _sort_kernel(
    experts_ptr,
    counts_ptr,
    pairs_ptr,
    tiles_ptr,
    num_pairs,
    num_tiles,
    num_experts,
    first_expert,
    BINS: tl.constexpr,
    PAIRS: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    wait_for_inputs(OVERLAPS)
    if counts_ptr is not None:
        counts = tl.load(counts_ptr + bins, bins < num_experts, 0)
    else:
        # What is left out goes into a bin behind those of the experts.
        at = tl.arange(0, PAIRS)
        chosen = tl.load(experts_ptr + at, at < num_pairs, -1) - first_expert
        is_kept = (at < num_pairs) & (chosen >= 0) & (chosen < num_experts)
        counts = tl.histogram(tl.where(is_kept, chosen, num_experts), BINS)
        counts = tl.where(bins < num_experts, counts, 0)
    tiles = (counts + TILE - 1) // TILE
    count = tl.sum(tl.where(bins == expert, counts, 0), 0)
    first = tl.sum(tl.where(bins < expert, counts, 0), 0)
    end = first + count
    place = first
    for start in range(0, num_pairs, PAIRS):
        at = start + tl.arange(0, PAIRS)
        chosen = tl.load(experts_ptr + at, at < num_pairs, -1)
        is_own = ((chosen == expert + first_expert) & (at < num_pairs)).to(tl.int32)
        rank = tl.cumsum(is_own, 0) - is_own
        tl.store(pairs_ptr + place + rank, at, is_own > 0)
        place += tl.sum(is_own, 0)
    steps = tl.arange(0, TILES_AT_ONCE)
    first_tile = tl.sum(tl.where(bins < expert, tiles, 0), 0)
    own_tiles = tl.sum(tl.where(bins == expert, tiles, 0), 0)
    for start in range(0, own_tiles, TILES_AT_ONCE):
        step = start + steps
        tile = tiles_ptr + first_tile + step
        is_there = step < own_tiles
        tl.store(tile, expert + steps * 0, is_there)
        tl.store(tile + num_tiles, first + step * TILE, is_there)
        tl.store(tile + 2 * num_tiles, tl.minimum(first + step * TILE + TILE, end), is_there)
    # The last program has those that no expert needs.
    unused = tl.where(expert == num_experts - 1, num_tiles, 0)
    for start in range(first_tile + own_tiles, unused, TILES_AT_ONCE):
        tile = start + steps
        tl.store(tiles_ptr + tile, steps * 0 - 1, tile < num_tiles)


@triton.jit
def tile_at(
    tiles_ptr,
    tile,
    num_tiles,
    first_expert,
    num_experts,
    IS_SORTED: tl.constexpr,
):
    """The expert of a tile, its first pair and the end of its pairs, and whether there is anything
    to do; if not, the others are 0."""
    expert = tl.load(tiles_ptr + tile)
    if IS_SORTED:
        start = tl.load(tiles_ptr + num_tiles + tile)
        end = tl.load(tiles_ptr + 2 * num_tiles + tile)
    else:
        expert -= first_expert
        start = tile
        end = tile + 1
    is_used = (expert >= 0) & (expert < num_experts)
    expert = tl.where(is_used, expert, 0).to(tl.int64)
    return expert, tl.where(is_used, start, 0), tl.where(is_used, end, 0), is_used


def tiles_by_pair(experts: Tensor, first_expert: int, size: int) -> ExpertTiles:
    """Where few tokens seldom have an expert in common: nothing is sorted."""
    return ExpertTiles(experts.view(-1), None, experts.numel(), first_expert, size)


def most_tiles(num_pairs: int, num_experts: int, size: int) -> int:
    """Of any choice of experts."""
    return min(num_pairs, (num_pairs + num_experts * (size - 1)) // size)


def tiles_by_expert(experts: Tensor, num_experts: int, first_expert: int, size: int) -> ExpertTiles:
    """The pairs of `experts` [tokens, top_k] for a rank that has `num_experts` from number
    `first_expert` on."""
    num_pairs = experts.numel()
    num_tiles = most_tiles(num_pairs, num_experts, size)
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=experts.device)
    tiles = torch.empty((3, num_tiles), dtype=torch.int32, device=experts.device)
    counts = None
    if num_pairs > PAIRS_AT_ONCE[-1]:
        counts = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
        _count(experts, counts, first_expert)
    _sort_kernel[(num_experts,)](
        experts,
        counts,
        pairs,
        tiles,
        num_pairs,
        num_tiles,
        num_experts,
        first_expert,
        BINS=triton.next_power_of_2(num_experts + 1),
        PAIRS=pairs_at_once(num_pairs),
        TILE=size,
        num_warps=4,
        **launch_options(experts),
    )
    return ExpertTiles(tiles, pairs, num_pairs, first_expert, size)


def _count(experts: Tensor, counts: Tensor, first_expert: int) -> None:
    _count_kernel[(len(counts),)](
        experts,
        counts,
        experts.numel(),
        first_expert,
        PAIRS=pairs_at_once(experts.numel()),
        num_warps=4,
        **launch_options(experts),
    )


def pairs_at_once(num_pairs: int) -> int:
    return next((size for size in PAIRS_AT_ONCE if num_pairs <= size), PAIRS_AT_ONCE[-1])
