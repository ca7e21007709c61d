"""Paged attention in plain torch, for any device and floating-point type; a cache may be in float16
where activations are in float32, or in float8.

A layer's cache is `kv_layer [2, num_blocks, num_kv_heads, block_size, head_dim]`: keys and values,
or [1, ...] in latent layers, where values are the first numbers of keys.
The token at position p of a request lies in block `block_tables[request, p // block_size]`.

A cache in float8 has `scales [num_blocks, num_kv_heads, block_size, 2]` in bfloat16: what is stored
times its scale is the key or value. In latent layers the last dimension is 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_HALF = torch.finfo(torch.float16).max
SMALLEST_SCALE = 2.0**-100
"""Of a head of zeros; small enough for any activation, and no trouble to divide by."""
DROPPED_BITS = (16, 23)
"""Scales of keys are bfloat16; those of values are powers of 2, which cost kernels less."""
# Bounds the score matrix of a long prefill; the result does not depend on it.
MAX_QUERIES_AT_ONCE = 256


def write_kv(
    kv_layer: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    scales: Tensor | None = None,
    given: Tensor | None = None,
) -> None:
    """Stores `k`, `v` [tokens, num_kv_heads, head_dim]; a slot is block * block_size + offset.

    `given` [2, num_kv_heads] are scales of keys and values that the model prescribes; where they
    are 0 or there are none, each token and head has the one that fits it.
    """
    block_size = kv_layer.shape[3]
    blocks, offsets = slots // block_size, slots % block_size
    for part, x in enumerate((k, v)[: len(kv_layer)]):
        if scales is None:
            stored = as_stored(x, kv_layer.dtype)
        else:
            fixed = None if given is None else given[part]
            stored, scale = quantize_heads(x, kv_layer.dtype, DROPPED_BITS[part], fixed)
            scales[blocks, :, offsets, part] = scale
        kv_layer[part, blocks, :, offsets] = stored


def quantize_heads(
    x: Tensor, dtype: torch.dtype, dropped_bits: int, given: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`x` [tokens, heads, head_dim] in a type of 8 bits, and scales [tokens, heads] in bfloat16.

    A scale is rounded up to one without the last `dropped_bits` of float32, so that the largest
    number of a head never overflows. What does with a `given` scale becomes the largest number that
    the type has.
    """
    largest = torch.finfo(dtype).max
    x = x.float()
    scale = (x.abs().amax(-1) / largest).clamp(min=SMALLEST_SCALE)
    if given is not None:
        scale = torch.where(given > 0, given, scale)
    last = (1 << dropped_bits) - 1
    rounded = (scale.view(torch.int32) + last) & ~last
    scale = rounded.view(torch.float32)
    stored = (x / scale.unsqueeze(-1)).clamp(-largest, largest).to(dtype)
    return stored, scale.bfloat16()


def as_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in the cache's type; what is beyond the range of float16 becomes its largest number."""
    if dtype == torch.float16 and x.dtype != dtype:
        x = x.clamp(-LARGEST_HALF, LARGEST_HALF)
    return x.to(dtype)


def paged_attention(
    q: Tensor,
    kv_layer: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None = None,
    scales: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    value_dim: int | None = None,
) -> Tensor:
    """Causal attention of every request's new tokens over its cache.

    Request r owns the rows `query_start[r]` to `query_start[r + 1]` of `q` [tokens, num_heads,
    head_dim]; they are the last of its `context_lens[r]` tokens, all of which are in the cache. A
    query at position p sees the keys in (p - window, p]. Scores and softmax are in float32; with a
    `softcap` scores become softcap * tanh(score / softcap). `sinks` [num_heads] are one more score
    of each head, of a key without a value. Values may be cut to `value_dim`, as those of latents
    are.
    """
    out = q.new_empty(*q.shape[:2], value_dim or q.shape[2])
    starts, contexts = query_start.tolist(), context_lens.tolist()
    for request, context in enumerate(contexts):
        first, end = starts[request], starts[request + 1]
        for begin in range(first, end, MAX_QUERIES_AT_ONCE):
            chunk_end = min(begin + MAX_QUERIES_AT_ONCE, end)
            end_key = context - (end - chunk_end)
            first_key = 0 if window is None else max(0, end_key - (chunk_end - begin) + 1 - window)
            k, v = gather_kv(kv_layer, block_tables[request], first_key, end_key, scales)
            v = v[..., : out.shape[2]]
            out[begin:chunk_end] = attend(q[begin:chunk_end], k, v, scale, window, softcap, sinks)
    return out


def gather_kv(
    kv_layer: Tensor,
    block_table: Tensor,
    first_key: int,
    end_key: int,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The keys and values of positions first_key to end_key, as [num_kv_heads, keys, head_dim]."""
    block_size = kv_layer.shape[3]
    first_block, end_block = first_key // block_size, -(-end_key // block_size)
    blocks = block_table[first_block:end_block].long()
    skipped = first_block * block_size
    pages = kv_layer[:, blocks]
    if scales is not None:
        pages = pages.float() * scales[blocks].movedim(-1, 0).unsqueeze(-1)
    pages = pages.transpose(1, 2).flatten(2, 3)
    parts = pages[:, :, first_key - skipped : end_key - skipped].unbind(0)
    return parts[0], parts[-1]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of the queries [n, num_heads, head_dim] that belong to the last n keys."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, num_keys, _ = k.shape
    group = num_heads // num_kv_heads
    compute = torch.promote_types(q.dtype, torch.float32)
    rows = q.to(compute).view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    scores = rows @ k.to(compute).transpose(1, 2).unsqueeze(1) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    position = torch.arange(num_keys - num_queries, num_keys, device=q.device).unsqueeze(1)
    key = torch.arange(num_keys, device=q.device)
    hidden = key > position
    if window is not None:
        hidden |= key <= position - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        by_row = sinks.to(compute).view(num_kv_heads, group, 1, 1).expand(-1, -1, num_queries, 1)
        scores = torch.cat((scores, by_row), -1)
    probabilities = scores.softmax(-1)[..., :num_keys]
    out = probabilities @ v.to(compute).unsqueeze(1)
    return out.permute(2, 0, 1, 3).reshape(num_queries, num_heads, -1).to(q.dtype)
