"""The kernel that streams weights of 4 bits, as it is compiled for Hopper, against the weights' own
meaning. There need be no such GPU: its instructions are computed by numpy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.test_compile import run

PROGRAM = """
import sys, torch
import torch.nn.functional as F
from quire.kernels.torch.quantized_weights import GroupedWeights
from quire.kernels.triton import grouped_matrix
from quire.kernels.triton.grouped_matrix import StreamTile, pack_grouped
from tests.kernels.ptx import pretend_hopper

case = eval(sys.argv[1])
outputs, inputs, group, tokens, offset, gated = case["sizes"]
dtype, tile = getattr(torch, case["dtype"]), StreamTile(*case["tile"])
pretend_hopper()
grouped_matrix.multiprocessors = lambda device: 1
grouped_matrix.launch_options = lambda out: {"OVERLAPS": True, "launch_pdl": True}
torch.manual_seed(1)
groups = -(-inputs // group)
codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
scales = (torch.rand(outputs, groups) + 0.5).div(16).half()
zeros = minima = None
if offset == "zeros":
    zeros = torch.randint(0, 16, (outputs, groups), dtype=torch.uint8)
if offset == "minima":
    minima = -torch.rand(outputs, groups).half()
weights = GroupedWeights(codes, 4, scales, group, zeros, minima)
matrix, exact = pack_grouped(weights, dtype), weights.dequantize().double()
assert matrix.run == 64
x, bias = torch.randn(tokens, inputs).to(dtype), torch.randn(outputs).to(dtype)
expected = F.linear(x.double(), exact, bias.double())
if gated:
    gate, up = expected.chunk(2, 1)
    expected = F.silu(gate) * up
out = torch.full((tokens, expected.shape[1] + 8), torch.nan, dtype=dtype)
matrix.multiply_streamed(x, bias, out, tile, gated)
assert out[:, expected.shape[1]:].isnan().all(), "writes beyond the outputs"
found = out[:, : expected.shape[1]].double()
error = float((found - expected).norm() / expected.norm())
assert error < (1e-3 if dtype == torch.float16 else 4e-3), error
print("done")
"""
CASES = {
    "several tiles and steps": ((72, 2048, 128, 1, None, False), "float16", (2, 3, 2)),
    "more stages than steps": ((24, 512, 64, 1, "zeros", False), "bfloat16", (1, 3, 1)),
    "inputs end within a step": ((40, 1480, 64, 3, "zeros", False), "float16", (2, 2, 1)),
    "gates": ((80, 1024, 128, 1, "zeros", True), "bfloat16", (2, 2, 2)),
    "gates of several tokens": ((48, 1024, 512, 8, None, True), "float16", (2, 2, 1, 128, 4)),
    "minima": ((32, 1024, 64, 2, "minima", False), "float16", (2, 2, 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_products(name: str, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    sizes, dtype, tile = CASES[name]
    run(PROGRAM, tmp_path, repr({"sizes": sizes, "dtype": dtype, "tile": tile}))
