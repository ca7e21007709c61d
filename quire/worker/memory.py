"""How many KV blocks fit, and the line that says so."""

from __future__ import annotations

import logging

from quire.protocol.errors import OptionError
from quire.worker.kv_tensors import KVSpec

logger = logging.getLogger(__name__)

MIB = 1 << 20


def count_blocks(spec: KVSpec, cache_bytes: int, max_model_len: int, max_num_seqs: int) -> int:
    """Blocks that fit into `cache_bytes`, at most as many as all rows together could fill."""
    per_request = -(-max_model_len // spec.block_size)
    num_blocks = min(cache_bytes // spec.bytes_per_block, per_request * max_num_seqs)
    if num_blocks < per_request:
        fits = num_blocks * spec.block_size
        raise OptionError(
            f"the KV cache is too small for one request: max_model_len={max_model_len} needs "
            f"{per_request} blocks of {spec.block_size} tokens "
            f"({per_request * spec.bytes_per_block / MIB:.1f} MiB), but "
            f"{cache_bytes / MIB:.1f} MiB hold {num_blocks} blocks ({fits} tokens). Lower "
            f"max_model_len to at most {fits}, or raise kv_cache_memory_bytes or "
            "gpu_memory_utilization."
        )
    return num_blocks


def describe_cache(spec: KVSpec, num_blocks: int, max_model_len: int) -> str:
    tokens = num_blocks * spec.block_size
    return (
        f"KV cache: {num_blocks:,} blocks of {spec.block_size} tokens, "
        f"{spec.bytes_per_block / 1024:.1f} KiB each, {tokens:,} tokens fit "
        f"({num_blocks * spec.bytes_per_block / MIB:,.0f} MiB), "
        f"{tokens / max_model_len:.1f} requests at once at max_model_len={max_model_len}"
    )
