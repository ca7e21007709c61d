"""Everything between the projections and latent attention (MLA) in one kernel, and the way back out
of the cache.

Per token: the latent is normalised, the part of the keys that all heads share is rotated, both are
written into the cache side by side, and the rotated part of the queries is made.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.hopper.overlap import launch_options, wait_for_inputs
from quire.kernels.triton.float8 import choose_scale, float8_options, narrow, widen

GATHERED_KEYS = 16
"""Tokens that a program of `gather_latents` copies."""


@triton.jit
def _latent_cache_kernel(
    q_ptr,
    latent_ptr,
    out_ptr,
    cache_ptr,
    scales_ptr,
    given_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    slots_ptr,
    eps,
    stride_q,
    stride_q_head,
    stride_latent,
    NUM_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FLOAT8: tl.constexpr,
    E4M3: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    ROPE: tl.constexpr = 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED_RANK)
    in_rank = dims < RANK
    pairs = tl.arange(0, PADDED_HALF)
    in_half = pairs < HALF
    if INTERLEAVED:
        first_at, second_at = 2 * pairs, 2 * pairs + 1
    else:
        first_at, second_at = pairs, pairs + HALF
    weight = tl.load(weight_ptr + dims, in_rank, 0.0)
    wait_for_inputs(OVERLAPS)
    slot = tl.load(slots_ptr + token)
    position = tl.load(positions_ptr + token)
    cos = tl.load(cos_ptr + position * HALF + pairs, in_half, 1.0)
    sin = tl.load(sin_ptr + position * HALF + pairs, in_half, 0.0)

    heads = tl.arange(0, PADDED_HEADS)[:, None]
    mask = (heads < NUM_HEADS) & in_half[None, :]
    queries = q_ptr + token * stride_q + heads * stride_q_head
    q_first = tl.load(queries + first_at[None, :], mask, 0.0)
    q_second = tl.load(queries + second_at[None, :], mask, 0.0)
    a, b = q_first.to(tl.float32), q_second.to(tl.float32)
    target = out_ptr + (token * NUM_HEADS + heads) * ROPE
    rotated = (a * cos[None, :] - b * sin[None, :]).to(q_first.dtype)
    tl.store(target + first_at[None, :], rotated, mask)
    rotated = (b * cos[None, :] + a * sin[None, :]).to(q_first.dtype)
    tl.store(target + second_at[None, :], rotated, mask)

    if slot >= 0:
        source = latent_ptr + token * stride_latent
        latent = tl.load(source + dims, in_rank, 0.0)
        wide = latent.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, 0) / RANK + eps)
        # Rounds as the reference does.
        if weight.dtype == tl.float32:
            c = (wide * inverse * weight).to(latent.dtype)
        else:
            c = ((wide * inverse).to(latent.dtype) * weight).to(latent.dtype)
        d = tl.load(source + RANK + first_at, in_half, 0.0).to(tl.float32)
        e = tl.load(source + RANK + second_at, in_half, 0.0).to(tl.float32)
        k_first = (d * cos - e * sin).to(latent.dtype)
        k_second = (e * cos + d * sin).to(latent.dtype)
        place = cache_ptr + slot * (RANK + ROPE)
        if FLOAT8:
            wide_c = c.to(tl.float32)
            wide_first, wide_second = k_first.to(tl.float32), k_second.to(tl.float32)
            largest = tl.max(tl.maximum(tl.abs(wide_first), tl.abs(wide_second)), 0)
            largest = tl.maximum(largest, tl.max(tl.abs(wide_c), 0))
            scale = choose_scale(largest, tl.load(given_ptr), E4M3, False)
            tl.store(scales_ptr + slot, scale.to(tl.bfloat16))
            tl.store(place + dims, narrow(wide_c / scale, E4M3), in_rank)
            tl.store(place + RANK + first_at, narrow(wide_first / scale, E4M3), in_half)
            tl.store(place + RANK + second_at, narrow(wide_second / scale, E4M3), in_half)
        else:
            tl.store(place + dims, c, in_rank)
            tl.store(place + RANK + first_at, k_first, in_half)
            tl.store(place + RANK + second_at, k_second, in_half)


def write_latents(
    q_rope: Tensor,
    compressed: Tensor,
    norm_weight: Tensor,
    eps: float,
    kv_layer: Tensor,
    slots: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    scales: Tensor | None = None,
    given: Tensor | None = None,
) -> Tensor:
    """Normalises and rotates `compressed` [tokens, rank + rope_dim] into `slots` of the cache, and
    returns the rotated `q_rope` [tokens, num_heads, rope_dim].

    cos and sin are [max_positions, rope_dim / 2]; neighbours make pairs where `interleaved`. A slot
    of -1 writes nothing. A cache in 8 bits has `scales` [num_blocks, 1, block_size, 1], and in
    `given` [2, 1] a scale that the model prescribes: 0 where it leaves the choice.
    """
    num_tokens, num_heads, rope_dim = q_rope.shape
    rank = compressed.shape[1] - rope_dim
    assert kv_layer.is_contiguous() and kv_layer.shape[-1] == rank + rope_dim
    out = torch.empty(q_rope.shape, dtype=q_rope.dtype, device=q_rope.device)
    _latent_cache_kernel[(num_tokens,)](
        q_rope,
        compressed,
        out,
        kv_layer if scales is None else kv_layer.view(torch.uint8),
        scales,
        given,
        norm_weight,
        cos,
        sin,
        positions,
        slots,
        eps,
        q_rope.stride(0),
        q_rope.stride(1),
        compressed.stride(0),
        NUM_HEADS=num_heads,
        PADDED_HEADS=triton.next_power_of_2(num_heads),
        RANK=rank,
        PADDED_RANK=triton.next_power_of_2(rank),
        HALF=rope_dim // 2,
        PADDED_HALF=triton.next_power_of_2(rope_dim // 2),
        INTERLEAVED=interleaved,
        FLOAT8=scales is not None,
        E4M3=kv_layer.dtype == torch.float8_e4m3fn,
        num_warps=4,
        **launch_options(out),
    )
    return out


@triton.jit
def _gather_kernel(
    cache_ptr,
    scales_ptr,
    latents_ptr,
    rope_ptr,
    tables_ptr,
    lens_ptr,
    requests_ptr,
    positions_ptr,
    rows_ptr,
    stride_table,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PADDED_ROPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    FLOAT8: tl.constexpr,
    E4M3: tl.constexpr,
    NATIVE: tl.constexpr,
):
    piece = tl.program_id(0)
    request = tl.load(requests_ptr + piece).to(tl.int64)
    position = tl.load(positions_ptr + piece) + tl.arange(0, KEYS)
    target = (tl.load(rows_ptr + piece) + tl.arange(0, KEYS)).to(tl.int64)[:, None]
    valid = position < tl.load(lens_ptr + request)
    block = tl.load(tables_ptr + request * stride_table + position // BLOCK_SIZE, valid, 0)
    row = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    dims = tl.arange(0, PADDED_RANK)[None, :]
    rope_dims = tl.arange(0, PADDED_ROPE)[None, :]
    place = cache_ptr + row[:, None] * (RANK + ROPE)
    # Behind the context there may be anything; zeros stay finite when they are expanded.
    c = tl.load(place + dims, valid[:, None] & (dims < RANK), 0)
    r = tl.load(place + RANK + rope_dims, valid[:, None] & (rope_dims < ROPE), 0)
    if FLOAT8:
        scale = tl.load(scales_ptr + row, valid, 0.0).to(tl.float32)[:, None]
        if E4M3 and not NATIVE:
            scale = scale * 256.0
        c = widen(c, E4M3, NATIVE).to(tl.float32) * scale
        r = widen(r, E4M3, NATIVE).to(tl.float32) * scale
    tl.store(latents_ptr + target * RANK + dims, c.to(latents_ptr.dtype.element_ty), dims < RANK)
    tl.store(
        rope_ptr + target * ROPE + rope_dims, r.to(rope_ptr.dtype.element_ty), rope_dims < ROPE
    )


def gather_latents(
    kv_layer: Tensor,
    latents: Tensor,
    rope: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    requests: Tensor,
    positions: Tensor,
    rows: Tensor,
    scales: Tensor | None = None,
) -> None:
    """Copies tokens from the cache to `latents` [rows, rank] and `rope` [rows, rope_dim]: for each
    piece, `GATHERED_KEYS` tokens of a request from a position on, to a row and those behind it.
    Rows of tokens beyond the context become 0."""
    rank, rope_dim = latents.shape[1], rope.shape[1]
    _gather_kernel[(len(requests),)](
        kv_layer if scales is None else kv_layer.view(torch.uint8),
        scales,
        latents,
        rope,
        block_tables,
        context_lens,
        requests,
        positions,
        rows,
        block_tables.stride(0),
        RANK=rank,
        PADDED_RANK=triton.next_power_of_2(rank),
        ROPE=rope_dim,
        PADDED_ROPE=triton.next_power_of_2(rope_dim),
        BLOCK_SIZE=kv_layer.shape[-2],
        KEYS=GATHERED_KEYS,
        num_warps=4,
        **float8_options(kv_layer),
    )
