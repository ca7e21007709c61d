"""Adapters of a layer: the reference against plain sums, the native library against the
reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels import cpu
from quire.kernels.adapter_pool import (
    CHUNK_ROWS,
    HAS_BIAS,
    HAS_GAINS,
    AdapterPool,
    AdapterSlice,
    AdapterTokens,
    LayerAdapters,
)
from quire.kernels.cpu.library import ISAS
from quire.kernels.torch.lora import adapter_matrices, add_adapters

WIDTHS = (48, 16, 20)
SLOTS = 4


def random_layer(
    num_inputs: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> LayerAdapters:
    """Slot 0 has adapters of several ranks, slot 1 one of the first outputs, slot 2 bias and gains,
    slot 3 nothing."""
    generator = torch.Generator().manual_seed(0)
    widths = [-(-width // 16) * 16 for width in WIDTHS]
    inputs = -(-num_inputs // 16) * 16
    size = sum(CHUNK_ROWS * (inputs + width) + 2 * width for width in widths)
    chunks = torch.randn(9, size, generator=generator).to(dtype)
    state = torch.zeros(SLOTS, 3 + 2 * len(WIDTHS), dtype=torch.int32)
    state[:, :3] = torch.tensor([[7, 0, 3], [1, 0, 0], [5, 2, 0], [0, 0, 0]])
    state[:, 3:6] = torch.tensor([[3, 1, 2], [1, 0, 0], [1, 2, 2], [0, 0, 0]])
    state[2, 6:] = torch.tensor([HAS_BIAS, HAS_GAINS, HAS_BIAS | HAS_GAINS])
    chunks, state = chunks.to(device), state.to(device)
    pool = AdapterPool(chunks, state[:, :3])
    slices, at, first = [], 0, 0
    for index, (width, padded) in enumerate(zip(WIDTHS, widths, strict=True)):
        b_offset = at + CHUNK_ROWS * inputs
        vectors = b_offset + CHUNK_ROWS * padded
        slices.append(
            AdapterSlice(
                first,
                width,
                num_inputs,
                at,
                inputs,
                b_offset,
                padded,
                vectors,
                vectors + padded,
                state[:, 3 + index],
                state[:, 6 + index],
            )
        )
        at, first = vectors + 2 * padded, first + width
    return LayerAdapters.of(pool, slices)


def expected(x: Tensor, out: Tensor, bias: Tensor, layer: LayerAdapters, slots: Tensor) -> Tensor:
    """Token by token in double precision."""
    result = out.double().clone()
    for token, slot in enumerate(slots.tolist()):
        for one in layer.slices:
            if slot < 0 or not int(one.counts[slot]):
                continue
            columns = slice(one.first, one.first + one.num_outputs)
            a, b = adapter_matrices(layer.pool, one, slot)
            first = layer.pool.chunks[layer.pool.tables[slot, 0]].double()
            vectors = int(one.vectors[slot])
            if vectors & HAS_GAINS:
                gains = first[one.gains_offset : one.gains_offset + one.num_outputs]
                result[token, columns] += gains * (out[token, columns] - bias[columns]).double()
            if vectors & HAS_BIAS:
                result[token, columns] += first[one.bias_offset : one.bias_offset + one.num_outputs]
            result[token, columns] += b.double().t() @ (a.double() @ x[token].double())
    return result


def random_tokens(count: int, num_inputs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, num_inputs, generator=generator)
    out = torch.randn(count, sum(WIDTHS), generator=generator)
    bias = torch.randn(sum(WIDTHS), generator=generator)
    slots = torch.randint(-1, SLOTS, (count,), generator=generator, dtype=torch.int32)
    return x, out, bias, slots


@pytest.mark.parametrize("num_inputs", [64, 37])
def test_reference(num_inputs: int) -> None:
    layer = random_layer(num_inputs)
    x, out, bias, slots = random_tokens(30, num_inputs)
    wanted = expected(x, out, bias, layer, slots)
    add_adapters(x, out, bias, layer, AdapterTokens(slots))
    torch.testing.assert_close(out.double(), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("count", "num_inputs"), [(1, 64), (30, 64), (7, 37), (0, 64)])
def test_native(count: int, num_inputs: int, isa: str, native: None) -> None:
    from quire.kernels.cpu.lora import add_adapters as add_native

    if isa not in cpu.isas():
        pytest.skip(f"this processor has no {isa}")
    layer = random_layer(num_inputs)
    x, out, bias, slots = random_tokens(count, num_inputs)
    wanted = expected(x, out, bias, layer, slots)
    before, alone = out.clone(), out.clone()
    cpu.set_isa(isa)
    try:
        add_native(x, out, bias, layer, AdapterTokens(slots))
        for token in range(count):  # to the bit as in company
            one = slice(token, token + 1)
            add_native(x[one], alone[one], bias, layer, AdapterTokens(slots[one].contiguous()))
    finally:
        cpu.set_isa(None)
    torch.testing.assert_close(out.double(), wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(out, alone)
    assert torch.equal(out[slots < 0], before[slots < 0])
