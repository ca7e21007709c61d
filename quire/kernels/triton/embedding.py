"""Rows of a table by index: the embeddings of sampled tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.hopper.overlap import launch_options, wait_for_inputs


@triton.jit
def _embedding_kernel(
    ids_ptr, table_ptr, out_ptr, dim, WIDTH: tl.constexpr, OVERLAPS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = columns < dim
    wait_for_inputs(OVERLAPS)
    row = tl.load(ids_ptr + token).to(tl.int64)
    tl.store(out_ptr + token * dim + columns, tl.load(table_ptr + row * dim + columns, mask), mask)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """table[ids] for ids [tokens] and a contiguous table [rows, dim]."""
    assert table.is_contiguous() and ids.is_contiguous()
    dim = table.shape[1]
    out = torch.empty((len(ids), dim), dtype=table.dtype, device=table.device)
    width = min(1024, 1 << (dim - 1).bit_length())
    _embedding_kernel[(len(ids), -(-dim // width))](
        ids, table, out, dim, WIDTH=width, num_warps=4, **launch_options(out)
    )
    return out
