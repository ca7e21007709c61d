"""How many blocks the KV cache gets."""

from __future__ import annotations

import pytest
import torch

from quire.protocol.errors import OptionError
from quire.worker.kv_tensors import KVSpec
from quire.worker.memory import count_blocks

SPEC = KVSpec(num_layers=2, num_kv_heads=3, head_dim=8, block_size=16, dtype=torch.float32)


def test_all_memory_becomes_blocks() -> None:
    """Also beyond what one request can fill: the rest serves the prefix cache."""
    assert SPEC.bytes_per_block == 2 * 2 * 3 * 8 * 4 * 16
    assert count_blocks(SPEC, 10 * SPEC.bytes_per_block + 5, max_model_len=20) == 10


def test_too_little_for_one_request_names_what_would_fit() -> None:
    with pytest.raises(OptionError, match=r"needs 3 blocks .* max_model_len to at most 32"):
        count_blocks(SPEC, 2 * SPEC.bytes_per_block, max_model_len=33)
    with pytest.raises(OptionError, match="To run it at all, raise kv_cache_memory_bytes"):
        count_blocks(SPEC, SPEC.bytes_per_block - 1, max_model_len=33)
