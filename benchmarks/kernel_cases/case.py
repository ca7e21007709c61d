"""A kernel at one size: how much work it is, how to call it, what torch has instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from harness import SHAPES

SHAPE = SHAPES["llama-8b"]
"""Dimensions are those of an 8B Llama unless a case says otherwise."""
HEADS, KV_HEADS, DIM = SHAPE.heads, SHAPE.kv_heads, SHAPE.head_dim
BLOCK_SIZE = 16
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# Without a GPU the cases can be checked by Triton's interpreter, which has no bfloat16.
DTYPE = torch.bfloat16 if ON_GPU else torch.float16
ROTATED_BYTES = 256 << 20
"""Inputs change from call to call until this much was touched: several times a large L2 cache."""
MAX_COPIES = 32
"""Small inputs stay in that cache nevertheless, as they do between the kernels of an engine."""
TOLERANCE = 2e-2

Call = Callable[[], object]


@dataclass(frozen=True)
class Sides:
    """Calls over different inputs: of the kernel, and of what torch offers for the same."""

    ours: list[Call]
    torchs: list[Call]
    check: Callable[[], None]
    """Raises unless the kernel computes what its reference does."""


@dataclass(frozen=True)
class Case:
    size: str
    num_bytes: int
    """Read and written at least."""
    flops: int
    writes: bool
    """Whether a good part of the bytes is written; else they count against the read bandwidth."""
    make: Callable[[], Sides]


def copies_of(num_bytes: int) -> int:
    return min(MAX_COPIES, -(-ROTATED_BYTES // num_bytes))


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def check_close(found: Tensor, expected: Tensor) -> None:
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error < TOLERANCE, f"differs from the reference by {error:.2e}"
