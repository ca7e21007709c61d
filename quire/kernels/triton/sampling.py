"""Sampling: of each line of logits the highest token, or the highest after temperature and noise.

A line is cut into chunks, so that a single one keeps many processors busy. Each program finds the
best token of its chunk and merges it into the line's best by an atomic maximum; the last one to
arrive writes the token and leaves the scratch as it was. So a greedy step is one launch.

What a launch costs the host matters where batches are small: each global constant that a kernel
names costs 1 to 2 us per launch, as much as an argument, and `triton.cdiv` 4. Hence the literals.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.torch.sampling import Kinds, RowSettings
from quire.kernels.triton.cutoff_search import divide
from quire.kernels.triton.cutoffs import token_cutoffs

CHUNK = 4096
CHUNK_WITH_NOISE = 2048
"""Noise takes many registers; smaller chunks leave room for more of them at a time."""


@triton.jit
def _mix(x, key):
    """`mix` of the noise's specification, on uint32, with `key` injected (0 leaves it plain)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) ^ key
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _gumbel(tokens, key0, key1):
    """The noise of `tokens`, as `kernels/torch/noise.py` specifies it."""
    hashed = _mix(tokens.to(tl.uint32) + 0x9E3779B9, 0)
    bits = _mix(hashed ^ key0, key1) & 0x7FFFFFFF
    w = tl.minimum(bits.to(tl.int32).to(tl.float32) * 2.0**-31 + 2.0**-32, 1.0 - 2.0**-24)
    # log1p(-w): the logarithm of 1 - w as rounded, and what the rounding lost.
    rounded = 1.0 - w
    lost = (1.0 - rounded) - w
    exponential = -(tl.log(rounded) + (lost + lost * w))
    return -tl.log(exponential)


@triton.jit
def _choose_kernel(
    logits_ptr,
    rows_ptr,
    positions_ptr,
    temperature_ptr,
    seed_low_ptr,
    seed_high_ptr,
    cutoffs_ptr,
    scratch_ptr,
    out_ptr,
    vocab_size,
    stride,
    max_lines,
    DRAWS: tl.constexpr,
    FILTERS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    line = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + line * stride + tokens, tokens < vocab_size, float("-inf"))
    x = x.to(tl.float32)
    if DRAWS:
        row = tl.load(rows_ptr + line)
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0:
            x = divide(x, temperature)
            possible = True
            if FILTERS:
                x = tl.where(x >= tl.load(cutoffs_ptr + line), x, float("-inf"))
                possible = tl.max(x, 0) > float("-inf")
            if possible:
                position = tl.load(positions_ptr + row).to(tl.uint32)
                low = tl.load(seed_low_ptr + row).to(tl.uint32, bitcast=True)
                high = tl.load(seed_high_ptr + row).to(tl.uint32, bitcast=True)
                key0 = _mix(low ^ _mix(position + 0x9E3779B9, 0), 0)
                key1 = _mix(high ^ _mix(position + key0, 0), 0)
                x += _gumbel(tokens, key0, key1)
    # NaN must not become a token id that does not exist; no logit may be a negative zero, whose
    # bits would rank below those of the positive one.
    x = tl.where(x == x, x, float("-inf"))
    top = tl.max(x, 0)
    token = tl.min(tl.where(x == top, tokens, 0x7FFFFFFF), 0)
    bits = tl.where(top == 0, 0.0, top).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    # The lower token id wins among equal logits.
    packed = (ordered.to(tl.int64) << 32) | (token ^ 0x7FFFFFFF).to(tl.int64)
    tl.atomic_max(scratch_ptr + line, packed, sem="relaxed")
    # Releases the maximum before it, and for the last one acquires those of all others.
    arrived = tl.atomic_add(scratch_ptr + max_lines + line, 1, sem="acq_rel")
    if arrived == tl.num_programs(0) - 1:
        best = tl.atomic_xchg(scratch_ptr + line, -0x7FFFFFFFFFFFFFFF)
        tl.store(out_ptr + line, ((best & 0x7FFFFFFF) ^ 0x7FFFFFFF).to(tl.int32))
        tl.store(scratch_ptr + max_lines + line, 0)


def sample_tokens(
    logits: Tensor, rows: Tensor, positions: Tensor, settings: RowSettings, kinds: Kinds
) -> Tensor:
    """As the reference; the noise and the masses of top_p may differ from its in the last place."""
    num_lines, vocab_size = logits.shape
    out = torch.empty(num_lines, dtype=torch.int32, device=logits.device)
    if num_lines == 0:
        return out
    max_lines = settings.scratch.shape[1]
    assert logits.stride(1) == 1 and num_lines <= max_lines
    chunk = CHUNK_WITH_NOISE if kinds.draws else CHUNK
    cutoffs = token_cutoffs(logits, rows, settings, kinds) if kinds.filters else settings.top_p
    _choose_kernel[(-(-vocab_size // chunk), num_lines)](
        logits,
        rows,
        positions,
        settings.temperature,
        settings.seed_low,
        settings.seed_high,
        cutoffs,
        settings.scratch,
        out,
        vocab_size,
        logits.stride(0),
        max_lines,
        DRAWS=kinds.draws,
        FILTERS=kinds.filters,
        CHUNK=chunk,
        num_warps=4,
    )
    return out
