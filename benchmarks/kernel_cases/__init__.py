"""All kernels that `kernels.py` measures, at which sizes. Importing it needs triton."""

from __future__ import annotations

from harness import SHAPES, SPARSE_SHAPES
from kernel_cases.attention import attention
from kernel_cases.case import Case
from kernel_cases.experts import experts, routing, sparse_layer
from kernel_cases.latent import latent_attention
from kernel_cases.layers import (
    embedding,
    fused_linear,
    gated_activation,
    linear,
    norm_with_residual,
    rotation_and_write,
)
from kernel_cases.rows import appending, gathering
from kernel_cases.sampling import DRAWN, FILTERED, GREEDY, sampling

MAX_CACHED_TOKENS = 1 << 20
"""What a GPU of 141 GB holds next to an 8B model, rounded up."""
BATCHES = (1, 4, 16, 64, 256, 1024)
CONTEXTS = (256, 1024, 4096, 8192, 32768)
PREFILLS = (
    # requests, new tokens of each, context
    (1, 512, 512),
    (1, 2048, 2048),
    (8, 2048, 2048),
    (16, 1024, 1024),
    (64, 256, 256),
    (2, 8192, 8192),
    (8, 512, 4096),
    (1, 2048, 32768),
)
SHARED_PREFIXES = (
    # requests, context, how much of it they share
    (16, 2112, 2048),
    (256, 2112, 2048),
    (256, 1024, 512),
    (1024, 1088, 1024),
)
EXPERT_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 8192)
DRAFTED = (
    # requests, tokens of each with drafts, context
    (1, 4, 2048),
    (8, 8, 2048),
    (64, 2, 2048),
    (64, 4, 2048),
    (64, 8, 2048),
    (256, 4, 2048),
    (16, 4, 32768),
)
LATENT_DECODES = ((1, 1024), (1, 8192), (16, 4096), (64, 1024), (256, 1024), (1024, 256))
"""Requests and their contexts."""
LATENT_PREFILLS = ((1, 512, 512), (8, 2048, 2048), (64, 256, 256), (1, 2048, 32768))
ROWS = (1, 16, 256, 1024, 8192)
LINEAR_BATCHES = (16, 64, 256, 1024)


def linears(model: str, batch: int) -> list[Case]:
    return [
        linear(batch, outputs, inputs) for outputs, inputs, _ in SHAPES[model].linears().values()
    ]


def fused_linears(model: str) -> list[Case]:
    """Those that follow a norm inside a layer."""
    layers = SHAPES[model].linears()
    return [
        fused_linear(*layers[name][:2], gated=name == "gate and up")
        for name in ("qkv", "gate and up")
    ]


KERNELS: dict[str, list[Case]] = {
    "decode attention": [
        attention(batch, 1, context)
        for batch in BATCHES
        for context in CONTEXTS
        if batch * context <= MAX_CACHED_TOKENS
    ],
    "decode attention, 8-bit cache": [
        attention(batch, 1, context, float8=True)
        for batch in BATCHES
        for context in CONTEXTS
        if batch * context <= MAX_CACHED_TOKENS
    ],
    "shared-prefix attention": [
        attention(batch, 1, context, shared) for batch, context, shared in SHARED_PREFIXES
    ],
    "attention with drafts": [attention(*one, decode_queries=one[1]) for one in DRAFTED],
    "attention with drafts, in prefill tiles": [attention(*one) for one in DRAFTED],
    "prefill attention": [attention(*prefill) for prefill in PREFILLS],
    "prefill attention, 8-bit cache": [attention(*prefill, float8=True) for prefill in PREFILLS],
    "latent attention": [
        latent_attention(batch, 1, context, heads)
        for heads in (16, 128)
        for batch, context in LATENT_DECODES
    ],
    "latent attention with drafts": [
        latent_attention(*one, decode_queries=one[1]) for one in DRAFTED
    ],
    "latent attention of prompts, absorbed": [latent_attention(*one) for one in LATENT_PREFILLS],
    "latent attention of prompts": [
        latent_attention(*one, expands=True) for one in LATENT_PREFILLS
    ],
    "rotation and cache write": [rotation_and_write(count) for count in ROWS],
    "norm with residual": [norm_with_residual(count) for count in ROWS],
    "gated activation": [gated_activation(count) for count in ROWS],
    "linear of one token": [case for model in SHAPES for case in linears(model, 1)],
    "norm and linear of one token": [case for model in SHAPES for case in fused_linears(model)],
    "linear of a batch": [case for batch in LINEAR_BATCHES for case in linears("llama-8b", batch)],
    "embedding": [embedding(count) for count in ROWS],
    "gather the batch": [gathering(count) for count in BATCHES],
    "append tokens": [appending(count) for count in BATCHES],
    "router": [
        routing(sparse_layer(model)[1], count) for model in SPARSE_SHAPES for count in EXPERT_TOKENS
    ],
    "experts": [
        experts(sparse, hidden, count)
        for hidden, sparse in map(sparse_layer, SPARSE_SHAPES)
        for count in EXPERT_TOKENS
    ],
    "sampling": [
        sampling(way, lines) for way in (GREEDY, DRAWN, FILTERED) for lines in (1, 256, 1024)
    ],
}
