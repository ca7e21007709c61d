"""Everything between the QKV projection and attention in one kernel.

Per token: queries and keys are normalised per head (where the model does that), rotated by their
position, and keys and values are written into the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.hopper.overlap import launch_options, wait_for_inputs
from quire.kernels.triton.float8 import choose_scale, narrow


@triton.jit
def _normalized(
    first, second, weight_ptr, first_at, second_at, in_half, eps, HEAD_DIM: tl.constexpr
):
    """RMSNorm of heads given as halves [heads, half]; rounds as the reference does."""
    a, b = first.to(tl.float32), second.to(tl.float32)
    scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / HEAD_DIM + eps)[:, None]
    weight_a = tl.load(weight_ptr + first_at, in_half[None, :], 0.0)
    weight_b = tl.load(weight_ptr + second_at, in_half[None, :], 0.0)
    if weight_a.dtype == tl.float32:
        a, b = a * scale * weight_a, b * scale * weight_b
        return a.to(first.dtype), b.to(second.dtype)
    return (a * scale).to(first.dtype) * weight_a, (b * scale).to(second.dtype) * weight_b


@triton.jit
def _store_codes(
    codes_ptr, place, first_at, second_at, first, second, mask, given_ptr, kv_heads, in_heads,
    E4M3: tl.constexpr, OF_VALUES: tl.constexpr,
):  # fmt: skip
    """Stores heads given as halves [heads, half] in 8 bits, and returns their scales [heads]."""
    a, b = first.to(tl.float32), second.to(tl.float32)
    largest = tl.max(tl.maximum(tl.abs(a), tl.abs(b)), 1)[:, None]
    scale = choose_scale(largest, tl.load(given_ptr + kv_heads, in_heads, 0.0), E4M3, OF_VALUES)
    tl.store(codes_ptr + place + first_at, narrow(a / scale, E4M3), mask)
    tl.store(codes_ptr + place + second_at, narrow(b / scale, E4M3), mask)
    return scale


@triton.jit
def _rotary_cache_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    keys_ptr,
    values_ptr,
    scales_ptr,
    given_ptr,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    slots_ptr,
    q_weight_ptr,
    k_weight_ptr,
    eps,
    stride_q,
    stride_k,
    stride_v,
    stride_block,
    stride_head,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    ROTARY_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROTATES: tl.constexpr,
    NORMALIZES: tl.constexpr,
    FLOAT8: tl.constexpr,
    E4M3: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    wait_for_inputs(OVERLAPS)
    slot = tl.load(slots_ptr + token)
    dims = tl.arange(0, PADDED_HALF)
    in_half = dims < HALF
    # Where the two elements of each pair lie in a head; those that are not rotated come last.
    if INTERLEAVED:
        first_at, second_at = 2 * dims, 2 * dims + 1
    else:
        first_at, second_at = dims, dims + ROTARY_HALF
    if ROTARY_HALF < HALF:
        first_at = tl.where(dims < ROTARY_HALF, first_at, dims + ROTARY_HALF)
        second_at = tl.where(dims < ROTARY_HALF, second_at, dims + HALF)
    first_at, second_at = first_at[None, :], second_at[None, :]
    if ROTATES:
        position = tl.load(positions_ptr + token)
        rotated = dims < ROTARY_HALF
        cos = tl.load(cos_ptr + position * ROTARY_HALF + dims, rotated, 1.0)[None, :]
        sin = tl.load(sin_ptr + position * ROTARY_HALF + dims, rotated, 0.0)[None, :]
        heads = tl.arange(0, PADDED_HEADS)[:, None]
        mask = (heads < NUM_HEADS) & in_half[None, :]
        offset = heads * HEAD_DIM
        q_first = tl.load(q_ptr + token * stride_q + offset + first_at, mask, 0.0)
        q_second = tl.load(q_ptr + token * stride_q + offset + second_at, mask, 0.0)
        if NORMALIZES:
            q_first, q_second = _normalized(
                q_first, q_second, q_weight_ptr, first_at, second_at, in_half, eps, HEAD_DIM
            )
        a, b = q_first.to(tl.float32), q_second.to(tl.float32)
        target = out_ptr + token * NUM_HEADS * HEAD_DIM + offset
        tl.store(target + first_at, (a * cos - b * sin).to(q_first.dtype), mask)
        tl.store(target + second_at, (b * cos + a * sin).to(q_first.dtype), mask)
    if slot >= 0:
        kv_heads = tl.arange(0, PADDED_KV_HEADS)[:, None]
        in_heads = kv_heads < NUM_KV_HEADS
        kv_mask = in_heads & in_half[None, :]
        source = kv_heads * HEAD_DIM
        place = (slot // BLOCK_SIZE).to(tl.int64) * stride_block + kv_heads * stride_head
        place += (slot % BLOCK_SIZE) * HEAD_DIM
        k_first = tl.load(k_ptr + token * stride_k + source + first_at, kv_mask, 0.0)
        k_second = tl.load(k_ptr + token * stride_k + source + second_at, kv_mask, 0.0)
        if NORMALIZES:
            k_first, k_second = _normalized(
                k_first, k_second, k_weight_ptr, first_at, second_at, in_half, eps, HEAD_DIM
            )
        if ROTATES:
            c, d = k_first.to(tl.float32), k_second.to(tl.float32)
            k_first = (c * cos - d * sin).to(k_first.dtype)
            k_second = (d * cos + c * sin).to(k_second.dtype)
        v_first = tl.load(v_ptr + token * stride_v + source + first_at, kv_mask, 0.0)
        v_second = tl.load(v_ptr + token * stride_v + source + second_at, kv_mask, 0.0)
        if FLOAT8:
            k_scale = _store_codes(
                keys_ptr, place, first_at, second_at, k_first, k_second, kv_mask, given_ptr,
                kv_heads, in_heads, E4M3, False,
            )  # fmt: skip
            v_scale = _store_codes(
                values_ptr, place, first_at, second_at, v_first, v_second, kv_mask,
                given_ptr + NUM_KV_HEADS, kv_heads, in_heads, E4M3, True,
            )  # fmt: skip
            # Both are bfloat16 already.
            word = (k_scale.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
            word = word | v_scale.to(tl.int32, bitcast=True)
            row = (slot // BLOCK_SIZE).to(tl.int64) * NUM_KV_HEADS * BLOCK_SIZE
            row += kv_heads * BLOCK_SIZE + slot % BLOCK_SIZE
            tl.store(scales_ptr + row, word, in_heads)
        else:
            tl.store(keys_ptr + place + first_at, k_first, kv_mask)
            tl.store(keys_ptr + place + second_at, k_second, kv_mask)
            tl.store(values_ptr + place + first_at, v_first, kv_mask)
            tl.store(values_ptr + place + second_at, v_second, kv_mask)


def rotate_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_layer: Tensor,
    slots: Tensor,
    positions: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    scales: Tensor | None = None,
    given: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Normalises and rotates q and k where asked, writes k and v to `slots`, returns q.

    q [tokens, num_heads, head_dim], k and v [tokens, num_kv_heads, head_dim] may be views of one
    tensor; cos and sin are [max_positions, rotary_dim / 2], for the first dimensions of a head, of
    which neighbours make pairs where `interleaved`. Without `positions` q and k are used as they
    are. A slot of -1 writes nothing.

    A cache in 8 bits has `scales` [num_blocks, num_kv_heads, block_size, 2], and scales that the
    model prescribes in `given` [2, num_kv_heads]: 0 where it leaves the choice.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_layer.shape[2], kv_layer.shape[3]
    rotates = positions is not None
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if rotates else q
    pages = kv_layer if scales is None else kv_layer.view(torch.uint8)
    _rotary_cache_kernel[(num_tokens,)](
        q,
        k,
        v,
        out,
        pages[0],
        pages[1],
        None if scales is None else scales.view(torch.int32),
        given,
        cos if rotates else q,
        sin if rotates else q,
        positions if rotates else slots,
        slots,
        q if q_weight is None else q_weight,
        k if k_weight is None else k_weight,
        eps,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        kv_layer.stride(1),
        kv_layer.stride(2),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        PADDED_HEADS=triton.next_power_of_2(num_heads),
        PADDED_KV_HEADS=triton.next_power_of_2(num_kv_heads),
        HEAD_DIM=head_dim,
        PADDED_HALF=triton.next_power_of_2(head_dim // 2),
        ROTARY_HALF=head_dim // 2 if cos is None else cos.shape[1],
        INTERLEAVED=interleaved,
        BLOCK_SIZE=block_size,
        ROTATES=rotates,
        NORMALIZES=q_weight is not None,
        FLOAT8=scales is not None,
        E4M3=kv_layer.dtype == torch.float8_e4m3fn,
        num_warps=4,
        **launch_options(out),
    )
    return out
