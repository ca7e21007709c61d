"""Linear layers: loading of fused checkpoint tensors, and equal results for any number of ranks.

The reference is F.linear on the unsplit checkpoint tensors.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from quire.layers.linear import (
    ColumnLinear,
    Linear,
    MergedLinear,
    OutputLinear,
    QKVLinear,
    RowLinear,
)
from quire.layers.parallel import Parallel
from quire.layers.weights import whole
from tests.layers.ranks import build_for, on_ranks

HIDDEN, HEAD_DIM, TOKENS = 12, 8, 5
SIZES = [1, 2, 4]


def randoms(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_column_linear_gives_each_rank_its_outputs(size: int) -> None:
    x, weight, bias = randoms((TOKENS, HIDDEN), (16, HIDDEN), (16,))

    def work(parallel: Parallel) -> torch.Tensor:
        layer = ColumnLinear(HIDDEN, 16, True, build_for(parallel))
        layer.load("weight", (), weight)
        layer.load("bias", (), bias)
        return layer(x)

    close(torch.cat(on_ranks(size, work), dim=-1), F.linear(x, weight, bias))


@pytest.mark.parametrize("size", SIZES)
def test_row_linear_sums_ranks_and_adds_its_bias_once(size: int) -> None:
    x, weight, bias = randoms((TOKENS, 16), (HIDDEN, 16), (HIDDEN,))

    def work(parallel: Parallel) -> torch.Tensor:
        layer = RowLinear(16, HIDDEN, True, build_for(parallel))
        layer.load("weight", (), weight)
        layer.load("bias", (), bias)
        share = 16 // parallel.size
        return layer(x[:, parallel.rank * share :][:, :share])

    for result in on_ranks(size, work):
        close(result, F.linear(x, weight, bias))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("joined", [False, True], ids=["separate", "joined"])
def test_merged_linear_keeps_gate_and_up_apart(size: int, joined: bool) -> None:
    """A rank's output is its share of gate, then its share of up, not a slice of the join."""
    x, gate, up = randoms((TOKENS, HIDDEN), (16, HIDDEN), (16, HIDDEN))

    def work(parallel: Parallel) -> torch.Tensor:
        layer = MergedLinear(HIDDEN, {"gate": 16, "up": 16}, False, build_for(parallel))
        if joined:
            layer.load("weight", (), torch.cat((gate, up)))
        else:
            layer.load("weight", ("up",), up)
            layer.load("weight", ("gate",), gate)
        return layer(x)

    gates, ups = zip(*(y.chunk(2, dim=-1) for y in on_ranks(size, work)), strict=True)
    close(torch.cat(gates, dim=-1), F.linear(x, gate))
    close(torch.cat(ups, dim=-1), F.linear(x, up))


@pytest.mark.parametrize("joined", [False, True], ids=["separate", "joined"])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("size", SIZES)
def test_qkv_linear_divides_heads_and_repeats_kv_heads(
    size: int, num_kv_heads: int, joined: bool
) -> None:
    """Each rank's query heads must meet the KV heads of their own group on the same rank."""
    num_heads = 4
    shapes = [(n * HEAD_DIM, HIDDEN) for n in (num_heads, num_kv_heads, num_kv_heads)]
    x, *weights = randoms((TOKENS, HIDDEN), *shapes)
    biases = randoms(*((shape[0],) for shape in shapes))

    def work(parallel: Parallel) -> tuple[torch.Tensor, ...]:
        layer = QKVLinear(HIDDEN, HEAD_DIM, num_heads, num_kv_heads, True, build_for(parallel))
        if joined:
            layer.load("weight", (), torch.cat(weights))
            layer.load("bias", (), torch.cat(biases))
        else:
            for shard_key, weight, bias in zip("qkv", weights, biases, strict=True):
                layer.load("weight", (shard_key,), weight)
                layer.load("bias", (shard_key,), bias)
        return layer(x)

    q, k, v = (
        F.linear(x, weight, bias).view(TOKENS, -1, HEAD_DIM)
        for weight, bias in zip(weights, biases, strict=True)
    )
    group = num_heads // num_kv_heads
    for rank, (rank_q, rank_k, rank_v) in enumerate(on_ranks(size, work)):
        heads = range(rank * num_heads // size, (rank + 1) * num_heads // size)
        close(rank_q, q[:, heads])
        rank_group = rank_q.shape[1] // rank_k.shape[1]
        for index, head in enumerate(heads):
            close(rank_k[:, index // rank_group], k[:, head // group])
            close(rank_v[:, index // rank_group], v[:, head // group])


def test_checkpoint_shapes_are_those_of_the_whole_model() -> None:
    """The loader compares them with what it reads, whatever the rank keeps."""
    layer = QKVLinear(HIDDEN, HEAD_DIM, 4, 2, True, build_for(Parallel(1, 2)))
    assert layer.checkpoint_shape("weight", ("q",)) == (4 * HEAD_DIM, HIDDEN)
    assert layer.checkpoint_shape("weight", ("k",)) == (2 * HEAD_DIM, HIDDEN)
    assert layer.checkpoint_shape("weight", ()) == (8 * HEAD_DIM, HIDDEN)
    assert layer.checkpoint_shape("bias", ("v",)) == (2 * HEAD_DIM,)
    assert tuple(layer.weight.shape) == (4 * HEAD_DIM, HIDDEN)


def test_loading_casts_to_the_models_dtype() -> None:
    layer = Linear(whole(4), whole(3), False, build_for())
    weight = torch.randn(3, 4).to(torch.bfloat16)
    layer.load("weight", (), weight)
    assert layer.weight.dtype == torch.float32
    assert torch.equal(layer.weight, weight.float())


@pytest.mark.parametrize("size", [3, 5])
def test_widths_that_ranks_do_not_divide_are_padded(size: int) -> None:
    """A network of 16 on 3 or 5 ranks, through a squashing that is 0.5 of the padding's zeros: what
    padding gives must meet zeros behind it."""
    x, up, up_bias, down = randoms((TOKENS, HIDDEN), (16, HIDDEN), (16,), (HIDDEN, 16))

    def work(parallel: Parallel) -> torch.Tensor:
        first = ColumnLinear(HIDDEN, 16, True, build_for(parallel))
        second = RowLinear(16, HIDDEN, False, build_for(parallel))
        first.load("weight", (), up)
        first.load("bias", (), up_bias)
        second.load("weight", (), down)
        return second(first(x).sigmoid())

    expected = F.linear(F.linear(x, up, up_bias).sigmoid(), down)
    for result in on_ranks(size, work):
        close(result, expected)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (4, 4), (9, 3), (6, 1), (5, 5)])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_heads_that_ranks_do_not_divide_are_padded(
    size: int, num_heads: int, num_kv_heads: int
) -> None:
    """All heads are somewhere, each with the KV head of its group, and the ranks' outputs add up to
    those of the whole layer."""
    width, kv_width = num_heads * HEAD_DIM, num_kv_heads * HEAD_DIM
    shapes = [(width, HIDDEN), (kv_width, HIDDEN), (kv_width, HIDDEN)]
    x, *weights, output = randoms((TOKENS, HIDDEN), *shapes, (HIDDEN, width))

    def mixed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Something of each head and of the KV head of its group, which is not 0 of padding."""
        k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
        return (q * k + v).flatten(1).sigmoid()

    def work(parallel: Parallel) -> torch.Tensor:
        heads = HEAD_DIM, num_heads, num_kv_heads
        qkv = QKVLinear(HIDDEN, *heads, False, build_for(parallel))
        projection = OutputLinear(*heads, HIDDEN, False, build_for(parallel))
        for shard_key, weight in zip("qkv", weights, strict=True):
            qkv.load("weight", (shard_key,), weight)
        projection.load("weight", (), output)
        return projection(mixed(*qkv(x)))

    by_head = (F.linear(x, weight).view(TOKENS, -1, HEAD_DIM) for weight in weights)
    expected = F.linear(mixed(*by_head), output)
    for result in on_ranks(size, work):
        close(result, expected)
