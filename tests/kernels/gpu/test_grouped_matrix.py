"""Products with grouped weights of few bits, against the weights' own meaning in plain torch."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from quire.kernels.torch.quantized_weights import GroupedWeights  # noqa: E402
from quire.kernels.triton import grouped_matrix  # noqa: E402
from quire.kernels.triton.grouped_matrix import (  # noqa: E402
    WORKSPACE_BYTES,
    GroupedMatrix,
    Tile,
    _hopper_tile,
    can_pack,
    pack_grouped,
)

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter has no arithmetic in bfloat16; on a GPU both half types are run.
BFLOAT16 = torch.bfloat16 if ON_GPU else torch.float16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

pytestmark = pytest.mark.skipif(
    not ON_GPU and not triton.knobs.runtime.interpret,
    reason="needs a GPU, or TRITON_INTERPRET=1 (see tests/kernels/test_triton_interpreter.py)",
)


def make_weights(
    outputs: int,
    inputs: int,
    bits: int = 4,
    group_size: int = 128,
    offset: str | None = None,
    ordered: bool = False,
    is_e2m1: bool = False,
    scale_dtype: torch.dtype = torch.float16,
) -> GroupedWeights:
    """Random codes, in which every value of `bits` bits occurs."""
    size = group_size if group_size > 0 else inputs
    groups = -(-inputs // size)
    codes = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8, device=DEVICE)
    scales = (torch.rand(outputs, groups, device=DEVICE) + 0.5).div(2**bits).to(scale_dtype)
    zeros = minima = None
    if offset == "zeros":
        zeros = torch.randint(0, 2**bits, (outputs, groups), dtype=torch.uint8, device=DEVICE)
    elif offset == "minima":
        minima = -torch.rand(outputs, groups, device=DEVICE).to(scale_dtype)
    order = torch.randperm(inputs, device=DEVICE).int() if ordered else None
    return GroupedWeights(codes, bits, scales, size, zeros, minima, order, is_e2m1)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < TOLERANCE[found.dtype], f"differs by {error:.2e}"


def check(
    weights: GroupedWeights, tokens: int, dtype: torch.dtype, tile: Tile | None = None
) -> None:
    assert can_pack(weights)
    matrix = pack_grouped(weights, dtype)
    outputs, inputs = weights.shape
    assert matrix.num_outputs == outputs
    x = torch.randn(tokens, inputs, device=DEVICE).to(dtype)
    bias = torch.randn(outputs, device=DEVICE).to(dtype)
    expected = torch.nn.functional.linear(x.double(), weights.dequantize().double(), bias.double())
    out = torch.full((tokens, outputs + 3), torch.nan, dtype=dtype, device=DEVICE)
    if tile is None:
        close(matrix.multiply(x, bias, out[:, :outputs]), expected)
    else:
        matrix.multiply_tiled(x if matrix.order is None else x[:, matrix.order], bias, out, tile)
        matrix.multiply_tiled(x if matrix.order is None else x[:, matrix.order], bias, out, tile)
    close(out[:, :outputs], expected)
    assert out[:, outputs:].isnan().all()


@pytest.mark.parametrize(
    ("bits", "group_size", "offset", "ordered"),
    [
        (4, 128, None, False),
        (4, 128, "zeros", True),
        (4, 32, "minima", False),
        (8, 32, None, False),
        (3, 64, "zeros", False),
        (2, -1, None, True),
        (6, 16, None, False),
        (4, -1, "zeros", False),
        (4, 48, None, False),
        (8, 512, "zeros", False),
        (4, 192, "minima", False),
    ],
)
def test_formats(bits: int, group_size: int, offset: str | None, ordered: bool) -> None:
    """All bits, groups and offsets, with sizes that no tile divides and a group that is cut."""
    check(make_weights(21, 656, bits, group_size, offset, ordered), 3, torch.float16)
    check(make_weights(66, 264, bits, group_size, offset, ordered), 19, BFLOAT16)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_floats_of_4_bits(scale_dtype: torch.dtype) -> None:
    """MXFP4: every code has its number, scales are powers of two of any size."""
    weights = make_weights(40, 288, 4, 32, is_e2m1=True)
    scales = torch.exp2(torch.randint(-20, 3, weights.scales.shape, device=DEVICE).float())
    weights = GroupedWeights(weights.codes, 4, scales.to(scale_dtype), 32, is_e2m1=True)
    check(weights, 5, torch.float16)


@pytest.mark.parametrize(
    ("tokens", "tile"),
    [
        (1, Tile(16, 8, 1, 2)),
        (20, Tile(32, 16, 2, 2)),
        (70, Tile(64, 64, 4, 3)),
        (7, Tile(64, 16, 4, 2)),
    ],
)
@pytest.mark.parametrize("offset", [None, "zeros", "minima"])
def test_tiles(tokens: int, tile: Tile, offset: str | None) -> None:
    """Those that GPUs with less shared memory get, and that of Hopper."""
    check(make_weights(40, 1300, 4, 128, offset), tokens, torch.float16, tile)


def test_float32() -> None:
    check(make_weights(30, 300), 4, torch.float32)


def test_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large batches are multiplied by dequantised weights, of a few outputs at a time."""
    monkeypatch.setattr(grouped_matrix, "MAX_TOKENS_IN_REGISTERS", 16)
    monkeypatch.setattr(grouped_matrix, "WORKSPACE_BYTES", 12 * 272 * 2)
    monkeypatch.setattr(GroupedMatrix, "multiply_tiled", None)
    check(make_weights(33, 272, 4, 128, "zeros", True), 20, torch.float16)


@pytest.mark.parametrize(("bits", "offset", "ordered"), [(4, "minima", False), (6, None, True)])
def test_rows(bits: int, offset: str | None, ordered: bool) -> None:
    """The rows of an embedding, some of them twice."""
    weights = make_weights(50, 300, bits, 32, offset, ordered)
    ids = torch.tensor([3, 49, 0, 3], dtype=torch.int32, device=DEVICE)
    found = pack_grouped(weights, torch.float16).rows(ids)
    expected = weights.dequantize()[ids.long()]
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), expected, rtol=2e-3, atol=1e-6)


@pytest.mark.parametrize("tokens", [129, 300, 700, 1024])
@pytest.mark.parametrize("outputs", [16384, 36864, 73728, 131072])
@pytest.mark.parametrize("spans", [28, 56, 104])
def test_sums_of_splits_fit_into_the_workspace(tokens: int, outputs: int, spans: int) -> None:
    tile = _hopper_tile(tokens, outputs, spans)
    if tile.splits > 1:
        rows = -(-tokens // tile.tokens) * tile.tokens
        columns = -(-outputs // (64 * tile.groups)) * 64 * tile.groups
        assert 4 * tile.splits * rows * columns <= WORKSPACE_BYTES
