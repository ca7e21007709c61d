"""What the GPU at hand can do at best: memory bandwidth and bf16 matrix products, measured.

Kernels are timed inside CUDA graphs. Needs triton; import it where a GPU is known to be there.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.testing import do_bench_cudagraph

GRAPH_MS = 10
"""About how long a graph runs that is timed. It is replayed ten times."""
STREAM_BYTES = 4 << 30
MATMUL_SIZE = 8192
STREAMS = ((1024, 1, 4), (4096, 1, 8), (2048, 4, 4), (4096, 4, 8), (8192, 4, 8))
"""Ways to read and copy: elements at a time, times per program, warps. The fastest counts."""


@dataclass(frozen=True)
class Ceilings:
    copy_bytes_per_s: float
    """Bytes read plus bytes written."""
    read_bytes_per_s: float
    matmul_flops_per_s: float

    def describe(self) -> str:
        copy, read = self.copy_bytes_per_s / 1e12, self.read_bytes_per_s / 1e12
        matmul = self.matmul_flops_per_s / 1e12
        return f"copy {copy:.2f} TB/s, read {read:.2f} TB/s, bf16 matmul {matmul:.0f} TFLOP/s"


def seconds_of(calls: Sequence[Callable[[], object]]) -> float:
    """Mean time of one of the calls, which run one after the other in a graph."""

    def run_all() -> None:
        for call in calls:
            call()

    torch.cuda.synchronize()
    milliseconds = do_bench_cudagraph(run_all, rep=GRAPH_MS, return_mode="all")
    return statistics.median(milliseconds) / 1000 / len(calls)


@triton.jit
def _read_kernel(x_ptr, out_ptr, WIDTH: tl.constexpr, STEPS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * WIDTH * STEPS
    total = tl.zeros([WIDTH], tl.int32)
    for step in range(STEPS):
        total += tl.load(x_ptr + first + step * WIDTH + tl.arange(0, WIDTH))
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _copy_kernel(x_ptr, out_ptr, WIDTH: tl.constexpr, STEPS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * WIDTH * STEPS
    for step in range(STEPS):
        place = first + step * WIDTH + tl.arange(0, WIDTH)
        tl.store(out_ptr + place, tl.load(x_ptr + place))


def _stream(kernel: Any, x: Tensor, out: Tensor, width: int, steps: int, num_warps: int) -> None:
    programs = x.numel() // (width * steps)
    kernel[(programs,)](x, out, WIDTH=width, STEPS=steps, num_warps=num_warps)


def measure_ceilings() -> Ceilings:
    """Takes 8 GB of GPU memory for about a second, and gives it back."""
    ceilings = Ceilings(*_measure_bandwidth(), _measure_matmul())
    torch.cuda.empty_cache()
    return ceilings


def _measure_bandwidth() -> tuple[float, float]:
    x = torch.randint(-(2**31), 2**31 - 1, (STREAM_BYTES // 4,), dtype=torch.int32, device="cuda")
    target = torch.zeros_like(x)
    total = x.sum(dtype=torch.int32)
    copy_s, read_s = [], []
    for stream in STREAMS:
        # A copy by `copy_` would be left to the copy engine, which is slower than a kernel.
        copy_s.append(seconds_of([partial(_stream, _copy_kernel, x, target, *stream)]))
        assert torch.equal(x, target), "the copy kernel is wrong"
        target.zero_()
        read_s.append(seconds_of([partial(_stream, _read_kernel, x, target, *stream)]))
        assert target.sum(dtype=torch.int32) == total, "the read kernel is wrong"
        target.zero_()
    return 2 * STREAM_BYTES / min(copy_s), STREAM_BYTES / min(read_s)


def _measure_matmul() -> float:
    size = MATMUL_SIZE
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds_of([partial(torch.matmul, a, b)])
