"""Warm-up steps meet every kernel that a step of a running engine can need."""

from __future__ import annotations

import pytest
import torch

from quire.worker.warm_up import warm_up_steps

pytest.importorskip("triton", reason="triton is not installed")

from quire.layers.attention.triton import PROGRAMS_WANTED, TritonBackend


@pytest.mark.parametrize("max_rows", [1, 5, 16, 200, 1024])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 8, 32])
def test_all_decode_variants_are_met(max_rows: int, num_kv_heads: int) -> None:
    """Splits and warps are compiled into the decode kernel and follow from the number of rows."""
    kv = torch.empty(1, 2, 1, num_kv_heads, 16, 64)
    backend = TritonBackend(kv, num_kv_heads, num_kv_heads, 64, 16)

    def variant(num_rows: int) -> tuple[int, bool]:
        return backend.num_splits(num_rows), num_rows * num_kv_heads >= PROGRAMS_WANTED

    steps = warm_up_steps(max_rows, with_decode=True)
    assert max(len(step) for step in steps) <= max_rows
    met = {variant(len(step)) for step in steps if step.max() == 1}
    assert met == {variant(num_rows) for num_rows in range(1, max_rows + 1)}


def test_prompts_are_met_with_graphs_too() -> None:
    (step,) = warm_up_steps(16, with_decode=False)
    assert step.max() > 1
