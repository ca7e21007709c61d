"""Attention over a paged cache, launched as the engine does it."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from kernel_cases.case import (
    BLOCK_SIZE,
    DEVICE,
    DIM,
    DTYPE,
    HEADS,
    KV_HEADS,
    Call,
    Case,
    Sides,
    check_close,
    copies_of,
    random,
)
from quire.kernels.torch.attention import (
    DROPPED_BITS,
    gather_kv,
    paged_attention,
    quantize_heads,
)
from quire.layers.attention.backend import AttentionInputs, KVScales
from quire.layers.attention.shared_prefix import PrefixTiles, prefix_tiles
from quire.layers.attention.triton import TritonBackend
from quire.protocol.kv_spec import KVSpec
from quire.worker.rows import Staging

MAX_CHECKED = 16
"""Requests of a batch that are compared with the reference."""


def attention(
    num_requests: int,
    queries: int,
    context: int,
    shared: int = 0,
    decode_queries: int = 1,
    float8: bool = False,
) -> Case:
    """`queries` new tokens of each request over `context` cached ones, the new ones included; all
    requests have the first `shared` tokens in common. Up to `decode_queries` new tokens are for the
    decode kernel. With `float8` the cache is in e4m3; torch reads it in 16 bits."""
    past = context - queries
    size = f"{num_requests:,} x {context:,}"
    if queries > 1:
        size = f"{num_requests:,} x {queries:,} ({context:,})"
    if shared:
        size = f"{num_requests:,} x ({shared:,} shared + {context - shared:,})"
    num_bytes = _kv_bytes(num_requests, context, shared, float8)
    num_bytes += 2 * num_requests * queries * HEADS * DIM * 2
    pairs = num_requests * (queries * past + queries * (queries + 1) // 2)
    flops = 4 * HEADS * DIM * pairs
    make = partial(_attention_sides, num_requests, queries, context, shared, decode_queries, float8)
    return Case(size, num_bytes, flops, False, make)


def _kv_bytes(num_requests: int, context: int, shared: int, float8: bool) -> int:
    tokens = shared + num_requests * (context - shared)
    return tokens * KVSpec(KV_HEADS, DIM, "fp8_e4m3" if float8 else "bfloat16").bytes_per_token


def _attention_sides(
    num_requests: int,
    queries: int,
    context: int,
    shared: int,
    decode_queries: int,
    float8: bool,
) -> Sides:
    blocks = -(-context // BLOCK_SIZE)
    copies = copies_of(_kv_bytes(num_requests, context, shared, float8))
    kv = random(1, 2, copies * num_requests * blocks, KV_HEADS, BLOCK_SIZE, DIM)
    scales: KVScales | None = None
    words: Tensor | None = None
    if float8:
        kv, scale = quantize_heads(kv, torch.float8_e4m3fn, max(DROPPED_BITS))
        stored = scale.movedim(1, -1).contiguous()
        scales = KVScales(stored, torch.zeros(1, 2, KV_HEADS, device=DEVICE))
        words = stored[0]
    order = torch.randperm(kv.shape[2], device=DEVICE, dtype=torch.int32)
    tables = order.view(copies, num_requests, blocks)
    shared_blocks = shared // BLOCK_SIZE
    tables[:, :, :shared_blocks] = tables[:, :1, :shared_blocks].clone()
    q = random(copies, num_requests * queries, HEADS, DIM)
    starts = torch.arange(0, q.shape[1] + 1, queries, dtype=torch.int32, device=DEVICE)
    lens = torch.full((num_requests,), context, dtype=torch.int32, device=DEVICE)
    backend = TritonBackend(kv, HEADS, KV_HEADS, DIM, BLOCK_SIZE, scales)
    scale = DIM**-0.5
    prefixes = None
    if shared:
        groups, prefix_lens = np.zeros(num_requests, np.int32), np.array([shared], np.int32)
        tiles = prefix_tiles(groups, prefix_lens, backend.prefix_members)
        prefixes = PrefixTiles(*(torch.from_numpy(array).to(DEVICE) for array in tiles))

    def ours(copy: int) -> Call:
        inputs = AttentionInputs(
            query_start=starts,
            context_lens=lens,
            block_tables=tables[copy],
            slots=starts[:0].long(),
            query_lens=np.full(num_requests, queries, np.int32),
            send=Staging(DEVICE).send,
            prefixes=prefixes,
            decode_queries=decode_queries,
        )
        step = backend.plan(inputs)
        return lambda: step.attend_prepared(0, q[copy], scale, None)

    def torchs(copy: int) -> Call:
        contiguous = [gather_kv(kv[0], table, 0, context, words) for table in tables[copy]]
        k, v = (torch.stack(part).to(DTYPE) for part in zip(*contiguous, strict=True))
        rows = q[copy].view(num_requests, queries, HEADS, DIM).transpose(1, 2).contiguous()
        backends = [SDPBackend.FLASH_ATTENTION]
        if queries > 1:
            backends.insert(0, SDPBackend.CUDNN_ATTENTION)
        mask = causal_lower_right(queries, context) if 1 < queries < context else None
        causal = 1 < queries == context

        def call() -> Tensor:
            with sdpa_kernel(backends, set_priority=True):
                return F.scaled_dot_product_attention(
                    rows, k, v, mask, is_causal=causal, scale=scale, enable_gqa=True
                )

        return call

    def check() -> None:
        found = ours(0)()
        assert isinstance(found, Tensor)
        count = min(num_requests, MAX_CHECKED)
        requests = (starts[: count + 1], lens[:count], tables[0])
        expected = paged_attention(q[0], kv[0], *requests, scale, None, words)
        check_close(found[: count * queries], expected[: count * queries])

    return Sides([ours(i) for i in range(copies)], [torchs(i) for i in range(copies)], check)
