"""Latent attention (MLA) over a paged cache, launched as the engine does it: norm, rotation and the
cache, absorbing or expanding, and attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_cases.case import BLOCK_SIZE, DEVICE, DTYPE, Call, Case, Sides, check_close, copies_of
from kernel_cases.case import random as random_tensor
from quire.config.latent import LatentConfig
from quire.kernels.torch.attention import gather_kv
from quire.layers.attention.backend import AttentionInputs
from quire.layers.attention.layer import LatentQKV, Rotation
from quire.layers.attention.mla import LatentBackend
from quire.layers.attention.torch import TorchBackend
from quire.layers.linear import LatentLinear
from quire.protocol.kv_spec import KVSpec
from quire.worker.rows import Staging

LATENT = LatentConfig(q_rank=None, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
"""Sizes that all released models have."""
SCALE = LATENT.query_dim**-0.5
EXPANDED = LATENT.nope_dim + LATENT.value_dim


class Expansion:
    """The matrix of a `LatentLinear`, without a loader."""

    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads
        self.dense_weight = random_tensor(num_heads * EXPANDED, LATENT.kv_rank) / 22
        by_head = self.dense_weight.view(num_heads, EXPANDED, LATENT.kv_rank)
        self.halves = by_head.split_with_sizes((LATENT.nope_dim, LATENT.value_dim), dim=1)

    native = None
    to_latent, from_latent = LatentLinear.to_latent, LatentLinear.from_latent


def latent_attention(
    num_requests: int,
    queries: int,
    context: int,
    num_heads: int = 16,
    decode_queries: int = 1,
    expands: bool = False,
) -> Case:
    """`queries` new tokens of each request over `context` cached ones, the new ones included. Up to
    `decode_queries` new tokens are for the decode kernel; `expands` leaves the choice to the
    backend, as a step that is no graph does. The arithmetic is that of the cheaper way."""
    size = f"{num_requests:,} x {context:,}"
    if queries > 1:
        size = f"{num_requests:,} x {queries:,} ({context:,})"
    tokens, past = num_requests * queries, context - queries
    weights = num_heads * EXPANDED * LATENT.kv_rank
    kept = (
        num_requests
        * context
        * KVSpec(1, LATENT.cached_dim, "bfloat16", is_latent=True).bytes_per_token
    )
    num_bytes = kept + 2 * weights + 2 * tokens * num_heads * (LATENT.query_dim + LATENT.value_dim)
    pairs = num_requests * (queries * past + queries * (queries + 1) // 2)
    absorbed = pairs * num_heads * (2 * LATENT.kv_rank + LATENT.rope_dim) + tokens * weights
    expanded = pairs * num_heads * (LATENT.query_dim + LATENT.value_dim)
    expanded += num_requests * context * weights
    make = partial(_sides, num_requests, queries, context, num_heads, decode_queries, expands, kept)
    return Case(f"{size}, {num_heads} heads", num_bytes, 2 * min(absorbed, expanded), False, make)


def _sides(
    num_requests: int,
    queries: int,
    context: int,
    num_heads: int,
    decode_queries: int,
    expands: bool,
    num_bytes: int,
) -> Sides:
    blocks, copies = -(-context // BLOCK_SIZE), copies_of(num_bytes)
    kv = random_tensor(1, 1, copies * num_requests * blocks, 1, BLOCK_SIZE, LATENT.cached_dim)
    order = torch.randperm(kv.shape[2], device=DEVICE, dtype=torch.int32)
    tables = order.view(copies, num_requests, blocks)
    places = torch.arange(context - queries, context, device=DEVICE)
    positions = places.repeat(num_requests)
    expansion: Any = Expansion(num_heads)
    angles = torch.randn(context, LATENT.rope_dim // 2, device=DEVICE)
    rotation = Rotation(angles.cos(), angles.sin(), positions, True)
    qkv = LatentQKV(
        random_tensor(len(positions), num_heads, LATENT.query_dim),
        random_tensor(len(positions), LATENT.cached_dim),
        random_tensor(LATENT.kv_rank),
        1e-6,
        rotation,
        expansion,
    )
    starts = torch.arange(0, len(positions) + 1, queries, dtype=torch.int32, device=DEVICE)
    lens = torch.full((num_requests,), context, dtype=torch.int32, device=DEVICE)
    arguments = (kv, num_heads, 1, LATENT.cached_dim, BLOCK_SIZE, None, LATENT)
    backend, reference = LatentBackend(*arguments), TorchBackend(*arguments)

    def inputs(copy: int) -> AttentionInputs:
        found = tables[copy][:, places // BLOCK_SIZE].long() * BLOCK_SIZE + places % BLOCK_SIZE
        counts = np.full(num_requests, context, np.int32)
        return AttentionInputs(
            query_start=starts,
            context_lens=lens,
            block_tables=tables[copy],
            slots=found.flatten(),
            query_lens=np.full(num_requests, queries, np.int32),
            send=Staging(DEVICE).send,
            decode_queries=decode_queries,
            max_context_lens=counts if expands else None,
        )

    def ours(copy: int) -> Call:
        step = backend.plan(inputs(copy))
        return lambda: step.attend(0, qkv, SCALE, None)

    def torchs(copy: int) -> Call:
        """On contiguous latents, absorbed for one new token, else expanded; attention alone."""
        latents = torch.stack([gather_kv(kv[0], table, 0, context)[0][0] for table in tables[copy]])
        if queries == 1:
            q = random_tensor(num_requests, num_heads, LATENT.cached_dim)

            def absorbed() -> Tensor:
                weights = (q @ latents.transpose(1, 2) * SCALE).softmax(-1)
                return weights @ latents[..., : LATENT.kv_rank]

            return absorbed
        c, rope = latents.split_with_sizes((LATENT.kv_rank, LATENT.rope_dim), dim=-1)
        q = random_tensor(num_requests, num_heads, queries, LATENT.query_dim)
        position = places[:, None] >= torch.arange(context, device=DEVICE)

        def expanded() -> Tensor:
            by_head = F.linear(c, expansion.dense_weight).unflatten(-1, (num_heads, EXPANDED))
            nope, v = by_head.transpose(1, 2).split_with_sizes(
                (LATENT.nope_dim, LATENT.value_dim), dim=-1
            )
            shared = rope.unsqueeze(1).expand(-1, num_heads, -1, -1)
            k, mask = torch.cat((nope, shared), -1), None if queries == context else position
            return F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=queries == context, scale=SCALE
            )

        return expanded

    def check() -> None:
        found = ours(0)()
        assert isinstance(found, Tensor) and found.dtype == DTYPE
        check_close(found, reference.plan(inputs(0)).attend(0, qkv, SCALE, None))

    return Sides([ours(i) for i in range(copies)], [torchs(i) for i in range(copies)], check)
