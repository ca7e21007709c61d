"""Kernels that stream weights, as they are compiled for Hopper, against the weights' own meaning.
There need be no such GPU: their instructions are computed by numpy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels.test_compile import run

GROUPED = """
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
GROUPED_CASES = {
    "several tiles and steps": ((72, 2048, 128, 1, None, False), "float16", (2, 3, 2)),
    "more stages than steps": ((24, 512, 64, 1, "zeros", False), "bfloat16", (1, 3, 1)),
    "inputs end within a step": ((40, 1480, 64, 3, "zeros", False), "float16", (2, 2, 1)),
    "gates": ((80, 1024, 128, 1, "zeros", True), "bfloat16", (2, 2, 2)),
    "gates of several tokens": ((48, 1024, 512, 8, None, True), "float16", (2, 2, 1, 128)),
    "minima": ((32, 1024, 64, 2, "minima", False), "float16", (2, 2, 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPED_CASES)
def test_weights_of_4_bits(name: str, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    sizes, dtype, tile = GROUPED_CASES[name]
    run(GROUPED, tmp_path, repr({"sizes": sizes, "dtype": dtype, "tile": tile}))


VECTORS = """
import sys, torch
import torch.nn.functional as F
from quire.kernels.hopper import vector_stream
from quire.kernels.torch.quantized_weights import ScaledWeights
from quire.kernels.triton.scaled_linear import _padded
from tests.kernels.ptx import pretend_hopper

case = eval(sys.argv[1])
(outputs, inputs), block, kind = case["shape"], case["block"], getattr(torch, case["dtype"])
pretend_hopper()
vector_stream.multiprocessors = lambda device: 1
vector_stream.launch_options = lambda out: {"OVERLAPS": True, "launch_pdl": True}
torch.manual_seed(1)
weight, scales = (torch.randn(outputs, inputs) * 30).clamp(-400, 400).to(kind), None
exact = weight.double()
dtype = kind if kind.itemsize == 2 else torch.bfloat16
if kind.itemsize == 1:
    height, width = block or (1, inputs)
    scales = torch.rand(-(-outputs // height), -(-inputs // width)) / 30
    weights = ScaledWeights(weight, scales if block else scales[:, 0].contiguous(), block)
    exact, scales = weights.dequantize().double(), _padded(scales) if block else weights.scales
    scales = scales._base if scales._base is not None else scales
x, bias = torch.randn(1, inputs).to(dtype), torch.randn(outputs).to(dtype)
expected = F.linear(x.double(), exact, bias.double())
out = torch.full((1, outputs + 8), torch.nan, dtype=dtype)
streams = vector_stream.Streams(*case["streams"])
reason = vector_stream.why_not(x, weight, block, streams)
assert reason is None, reason
vector_stream.multiply_vector(x, weight, bias, out, scales, block, streams)
assert out[:, outputs:].isnan().all(), "writes beyond the outputs"
error = float((out[:, :outputs].double() - expected).norm() / expected.norm())
assert error < 3e-3, error
print("done")
"""
VECTOR_CASES = {
    "a scale of an output": ((43, 4096), None, "float8_e4m3fn", (8, 3, 2)),
    "inputs end within a step": ((24, 1296), None, "float8_e4m3fn", (16, 2, 1)),
    "blocks": ((140, 2208), (128, 128), "float8_e4m3fn", (8, 4, 3)),
    "blocks that ranks have cut": ((72, 2048), (64, 32), "float8_e4m3fn", (8, 2, 99)),
    "16 bits": ((21, 2200), None, "bfloat16", (8, 3, 1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VECTOR_CASES)
def test_vectors(name: str, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    shape, block, dtype, streams = VECTOR_CASES[name]
    case = {"shape": shape, "block": block, "dtype": dtype, "streams": streams}
    run(VECTORS, tmp_path, repr(case))
