"""Warm-up steps meet every kernel that a step of a running engine can need."""

from __future__ import annotations

import pytest
import torch

from quire.worker.warm_up import batch_sizes

pytest.importorskip("triton", reason="triton is not installed")

from quire.kernels.triton.decode_attention import padded_splits
from quire.layers.attention.triton import TritonBackend


@pytest.mark.parametrize("max_rows", [1, 5, 16, 200, 1024])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 8, 32])
def test_all_decode_variants_are_met(max_rows: int, num_kv_heads: int) -> None:
    """Splits and warps are compiled into the decode kernels and follow from the number of rows."""
    kv = torch.empty(1, 2, 1, num_kv_heads, 16, 64)
    backend = TritonBackend(kv, num_kv_heads, num_kv_heads, 64, 16)

    def variant(num_rows: int) -> tuple[bool, int, int]:
        splits = backend.num_splits(num_rows)
        padded = padded_splits(splits) if splits > 1 else 0
        return splits > 1, padded, backend.num_warps(num_rows)

    sizes = batch_sizes(max_rows, has_graphs=False)
    assert max(sizes) <= max_rows
    assert {variant(size) for size in sizes} == {variant(n) for n in range(1, max_rows + 1)}
