"""Triton kernels against their plain-torch references: on the GPU, or by Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

from quire.kernels.torch.attention import paged_attention, write_kv  # noqa: E402
from quire.kernels.torch.qkv import rms_norm as rms_norm_reference  # noqa: E402
from quire.kernels.torch.qkv import rotate  # noqa: E402
from quire.kernels.triton.activation import silu_and_mul  # noqa: E402
from quire.kernels.triton.decode_attention import (  # noqa: E402
    DecodeWorkspace,
    PrefixPieces,
    decode_attention,
)
from quire.kernels.triton.embedding import embedding  # noqa: E402
from quire.kernels.triton.gemv import NormInput, gemv  # noqa: E402
from quire.kernels.triton.norm import rms_norm  # noqa: E402
from quire.kernels.triton.prefill_attention import PrefillTiles, prefill_attention  # noqa: E402
from quire.kernels.triton.prefix_attention import prefix_attention  # noqa: E402
from quire.kernels.triton.rotary_cache import rotate_and_write  # noqa: E402
from quire.kernels.triton.rows import (  # noqa: E402
    RowTensors,
    TokenTensors,
    append_tokens,
    gather_decode,
    gather_mixed,
)
from quire.layers.attention.shared_prefix import prefix_tiles  # noqa: E402
from quire.layers.attention.triton import query_tiles  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter has no arithmetic in bfloat16; on a GPU both half types are run.
BFLOAT16 = torch.bfloat16 if ON_GPU else torch.float16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}

pytestmark = pytest.mark.skipif(
    not ON_GPU and not triton.knobs.runtime.interpret,
    reason="needs a GPU, or TRITON_INTERPRET=1 (see tests/kernels/test_triton_interpreter.py)",
)


class Cache:
    """One layer of a paged cache with shuffled blocks; slots that no context covers hold NaN."""

    def __init__(
        self, contexts: list[int], kv_heads: int, size: int, dim: int, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        per_row = [-(-context // size) for context in contexts]
        total = sum(per_row) + 3
        order = torch.randperm(total, generator=generator)
        self.tables = torch.zeros(len(contexts), max(per_row), dtype=torch.int32)
        self.kv = torch.full((2, total, kv_heads, size, dim), float("nan"))
        first = 0
        for row, (context, count) in enumerate(zip(contexts, per_row, strict=True)):
            blocks = order[first : first + count]
            self.tables[row, :count] = blocks
            self.tables[row, count:] = 2**30  # never to be followed
            for position in range(context):
                slot = self.kv[:, blocks[position // size], :, position % size]
                slot.copy_(torch.randn(slot.shape, generator=generator))
            first += count
        self.kv = self.kv.to(DEVICE, dtype)
        self.tables = self.tables.to(DEVICE)
        self.lens = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)

    def reference(
        self, q: Tensor, query_lens: list[int], window: int | None, sinks: Tensor | None = None
    ) -> Tensor:
        starts = torch.tensor(np.cumsum([0, *query_lens]), dtype=torch.int32)
        scale = q.shape[-1] ** -0.5
        return paged_attention(
            q, self.kv, starts, self.lens.cpu(), self.tables, scale, window, sinks=sinks
        )


def make_sinks(heads: int) -> Tensor:
    return 3 * torch.randn(heads, device=DEVICE)


def close(found: Tensor, expected: Tensor) -> None:
    assert torch.isfinite(found).all()
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error < TOLERANCE[found.dtype], f"relative error {error:.2e}"


DECODE_CASES = [
    # contexts, heads, kv heads, block size, head size, dtype, window, splits,
    # sinks
    ([70, 1, 33], 8, 2, 16, 64, torch.float32, None, 1, True),
    ([100, 17], 4, 4, 8, 80, torch.float32, 30, 2, False),
    ([130, 64, 5], 6, 2, 32, 96, BFLOAT16, None, 4, True),
    ([90], 16, 1, 4, 128, torch.float16, None, 8, False),
    ([40, 129], 2, 1, 128, 256, torch.float32, 20, 3, True),
]


@pytest.mark.parametrize("case", DECODE_CASES, ids=str)
def test_decode_attention(case: tuple) -> None:
    """One query per row, whatever the split; unwritten slots and foreign blocks are never read."""
    contexts, heads, kv_heads, size, dim, dtype, window, splits, has_sinks = case
    sinks = make_sinks(heads) if has_sinks else None
    cache = Cache(contexts, kv_heads, size, dim, dtype)
    q = torch.randn(len(contexts) + 2, heads, dim, device=DEVICE).to(dtype)
    tokens = torch.arange(1, len(contexts) + 1, dtype=torch.int32, device=DEVICE)
    out = torch.full_like(q, float("nan"))
    workspace = DecodeWorkspace(len(contexts) * splits, heads, dim, DEVICE)
    decode_attention(
        q,
        cache.kv,
        tokens,
        cache.lens,
        cache.tables,
        dim**-0.5,
        window,
        splits,
        workspace,
        out,
        tile=32,
        sinks=sinks,
    )
    picked = q[1 : len(contexts) + 1]
    close(out[1 : len(contexts) + 1], cache.reference(picked, [1] * len(contexts), window, sinks))
    assert out[0].isnan().all() and out[-1].isnan().all(), "only the named tokens are written"


def test_decode_attention_of_padding_gives_zeros() -> None:
    """Padding rows of a graph have a context of 0; they must not produce NaN."""
    cache = Cache([20], 1, 16, 64, torch.float32)
    q = torch.randn(1, 4, 64, device=DEVICE)
    zero = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for splits, sinks in ((1, None), (2, None), (1, make_sinks(4)), (2, make_sinks(4))):
        out = torch.full_like(q, float("nan"))
        workspace = DecodeWorkspace(splits, 4, 64, DEVICE)
        decode_attention(
            q, cache.kv, zero, zero, cache.tables, 0.1, None, splits, workspace, out, tile=32,
            sinks=sinks,
        )  # fmt: skip
        assert (out == 0).all()


FEW_QUERY_CASES = [
    # (query tokens, context) of each request, queries of the kernel, heads, kv heads, block size,
    # head size, dtype, window, splits, sinks
    ([(2, 70), (1, 1), (5, 60), (2, 2), (1, 33)], 2, 8, 2, 16, 64, torch.float32, None, 1, True),
    ([(4, 100), (3, 17), (9, 40), (1, 90), (4, 5)], 4, 4, 4, 32, 80, torch.float32, 30, 2, False),
    ([(8, 130), (64, 64), (5, 5), (8, 65)], 8, 6, 2, 32, 96, BFLOAT16, None, 4, True),
    ([(3, 90), (0, 50), (4, 34)], 4, 8, 1, 16, 128, torch.float16, None, 8, False),
    ([(7, 40), (2, 129), (8, 8)], 8, 2, 1, 16, 256, torch.float32, 20, 3, True),
    ([(8, 97), (1, 33), (6, 66)], 8, 7, 1, 16, 64, torch.float32, 3, 4, False),
    ([(2, 66), (2, 65), (1, 64)], 2, 3, 3, 16, 64, torch.float32, 1, 3, True),
]


@pytest.mark.parametrize("case", FEW_QUERY_CASES, ids=str)
def test_decode_attention_with_few_queries(case: tuple) -> None:
    """Each query sees what precedes it, whatever the split; requests that have more queries than
    the kernel, or none, are not touched, and nothing of an unwritten slot is read."""
    pairs, queries, heads, kv_heads, size, dim, dtype, window, splits, has_sinks = case
    sinks = make_sinks(heads) if has_sinks else None
    lens = [pair[0] for pair in pairs]
    cache = Cache([pair[1] for pair in pairs], kv_heads, size, dim, dtype)
    if window is not None:
        for row, (count, context) in enumerate(pairs):  # what no query sees may be freed
            cache.tables[row, : max(0, context - count + 1 - window) // size] = 2**30
    first = 2
    q = torch.randn(first + sum(lens) + 1, heads, dim, device=DEVICE).to(dtype)
    starts = torch.tensor(first + np.cumsum([0, *lens]), dtype=torch.int32, device=DEVICE)
    out = torch.full_like(q, float("nan"))
    workspace = DecodeWorkspace(len(pairs) * queries * splits, heads, dim, DEVICE)
    workspace.partial.fill_(float("nan"))
    workspace.lse.fill_(float("nan"))
    decode_attention(
        q,
        cache.kv,
        starts,
        cache.lens,
        cache.tables,
        dim**-0.5,
        window,
        splits,
        workspace,
        out,
        tile=32,
        queries=queries,
        sinks=sinks,
    )
    expected = cache.reference(q[first:-1], lens, window, sinks)
    written = torch.zeros(len(q), dtype=torch.bool, device=DEVICE)
    for start, count in zip(starts.tolist(), lens, strict=False):
        if count <= queries:
            written[start : start + count] = True
            for line in range(start, start + count):  # each: a large one must not hide a small one
                close(out[line], expected[line - first])
    assert out[~written].isnan().all(), "only the lines of requests with few queries are written"


def test_few_queries_in_random_batches() -> None:
    """Ragged batches of many contexts, group sizes, windows and splits, in blocks of both sizes,
    with requests of more queries among them and padding behind."""
    rng = np.random.default_rng(5)
    for attempt in range(40 if ON_GPU else 4):
        queries, group = int(rng.choice([2, 4, 8])), int(rng.integers(1, 9))
        kv_heads, size, dim = int(rng.integers(1, 3)), (16, 32)[attempt % 2], 64
        count = int(rng.integers(2, 40 if ON_GPU else 6))
        lens = rng.integers(1, queries + 1, count)
        lens[rng.integers(count)] = queries + rng.integers(1, 20)
        lens = [*lens.tolist(), 0]
        contexts = [n + int(rng.integers(1, 1000 if ON_GPU else 150)) for n in lens]
        window = None if attempt % 3 else int(rng.integers(1, 60))
        splits = int(rng.integers(1, 6))
        cache = Cache(contexts, kv_heads, size, dim, torch.float32)
        q = torch.randn(sum(lens), group * kv_heads, dim, device=DEVICE)
        starts = torch.tensor(np.cumsum([0, *lens]), dtype=torch.int32, device=DEVICE)
        out = torch.full_like(q, float("nan"))
        workspace = DecodeWorkspace(len(lens) * queries * splits, group * kv_heads, dim, DEVICE)
        arguments = (cache.kv, starts, cache.lens, cache.tables, dim**-0.5, window, splits)
        decode_attention(q, *arguments, workspace, out, tile=32, queries=queries)
        few = torch.tensor(np.repeat(np.array(lens) <= queries, lens), device=DEVICE)
        close(out[few], cache.reference(q, lens, window)[few])
        assert out[~few].isnan().all()


PREFIX_CASES = [
    # shared blocks and members of each group, heads, kv heads, block size, head size, dtype,
    # splits of the prefix, splits of the rest, sinks
    ([(3, 5)], 8, 2, 16, 64, torch.float32, 1, 1, True),
    ([(5, 7), (1, 4)], 4, 4, 16, 80, torch.float32, 4, 2, False),
    ([(9, 9), (2, 4)], 6, 2, 8, 96, BFLOAT16, 2, 1, True),
    ([(4, 6)], 16, 1, 32, 128, torch.float16, 2, 4, True),
    ([(1, 4)], 2, 1, 128, 256, torch.float32, 1, 1, False),
]


@pytest.mark.parametrize("case", PREFIX_CASES, ids=str)
def test_shared_prefix_attention(case: tuple) -> None:
    """Reading a shared prefix once changes nothing, whatever else is in the batch."""
    groups, heads, kv_heads, size, dim, dtype, prefix_splits, splits, has_sinks = case
    sinks = make_sinks(heads) if has_sinks else None
    num_shared = [0, *(blocks for blocks, members in groups for _ in range(members)), 0]
    group_of = [-1, *(g for g, (_, members) in enumerate(groups) for _ in range(members)), -1]
    order = np.random.default_rng(0).permutation(len(group_of))
    num_shared, group_of = np.array(num_shared)[order], np.array(group_of, np.int32)[order]
    contexts = [int(n) * size + 1 + 7 * (i % 5) for i, n in enumerate(num_shared)]
    # A row that has just computed the last token of what it shares has nothing of its own.
    alone = int(np.flatnonzero(group_of == 0)[1])
    contexts[alone] = int(num_shared[alone]) * size
    cache = Cache(contexts, kv_heads, size, dim, dtype)
    for group, (blocks, _) in enumerate(groups):
        first, *others = np.flatnonzero(group_of == group)
        for other in others:
            cache.tables[other, :blocks] = cache.tables[first, :blocks]
    lens = np.array([blocks * size for blocks, _ in groups], np.int32)
    tiles = [torch.from_numpy(t).to(DEVICE) for t in prefix_tiles(group_of, lens, width=4)]
    starts, prefix_lens, members = tiles
    # One tile that is not used, as in a captured graph.
    prefix_lens = torch.cat([prefix_lens, prefix_lens.new_zeros(1)])
    members = torch.cat([members, torch.full_like(members[:1], -1)])
    q = torch.randn(len(contexts) + 1, heads, dim, device=DEVICE).to(dtype)
    tokens = torch.arange(1, len(contexts) + 1, dtype=torch.int32, device=DEVICE)
    pieces = PrefixPieces(
        starts, DecodeWorkspace(len(contexts) * prefix_splits, heads, dim, DEVICE), prefix_splits
    )
    pieces.workspace.partial.fill_(float("nan"))
    workspace = DecodeWorkspace(len(contexts) * splits, heads, dim, DEVICE)
    workspace.partial.fill_(float("nan"))
    out = torch.full_like(q, float("nan"))
    arguments = (dim**-0.5, prefix_splits, pieces.workspace)
    prefix_attention(
        q, cache.kv, tokens, cache.tables, members, prefix_lens, *arguments, tile=32, num_stages=2
    )
    decode_attention(
        q,
        cache.kv,
        tokens,
        cache.lens,
        cache.tables,
        dim**-0.5,
        None,
        splits,
        workspace,
        out,
        tile=32,
        prefix=pieces,
        sinks=sinks,
    )
    expected = cache.reference(q[1:], [1] * len(contexts), None, sinks)
    close(out[1:], expected)
    close(out[1 + alone], expected[alone])


PREFILL_CASES = [
    # (query tokens, context) of each request, heads, kv heads, block size, head size, dtype,
    # window, sinks
    ([(40, 70), (1, 9), (20, 20)], 4, 2, 16, 64, torch.float32, None, True),
    ([(33, 33)], 2, 2, 4, 80, torch.float32, 10, True),
    ([(17, 100), (50, 50)], 4, 1, 32, 96, BFLOAT16, None, False),
    ([(64, 64)], 2, 1, 128, 128, torch.float16, None, True),
]


@pytest.mark.parametrize("case", PREFILL_CASES, ids=str)
def test_prefill_attention(case: tuple) -> None:
    """Chunks of prompts, with and without earlier context, causal and windowed."""
    pairs, heads, kv_heads, size, dim, dtype, window, has_sinks = case
    sinks = make_sinks(heads) if has_sinks else None
    lens = [pair[0] for pair in pairs]
    cache = Cache([pair[1] for pair in pairs], kv_heads, size, dim, dtype)
    q = torch.randn(sum(lens), heads, dim, device=DEVICE).to(dtype)
    out = torch.full_like(q, float("nan"))
    starts = torch.tensor(np.cumsum([0, *lens]), dtype=torch.int32, device=DEVICE)
    requests, indices = query_tiles(np.array(lens, np.int32), 16)
    prefill_attention(
        q,
        cache.kv,
        starts,
        cache.lens,
        cache.tables,
        torch.from_numpy(requests).to(DEVICE),
        torch.from_numpy(indices).to(DEVICE),
        dim**-0.5,
        window,
        out,
        PrefillTiles(queries=16, keys=16, num_warps=4, num_stages=2),
        sinks=sinks,
    )
    expected = cache.reference(q, lens, window, sinks)
    first = 0
    for count in lens:
        if count > 1:  # single tokens belong to the decode kernel
            close(out[first : first + count], expected[first : first + count])
        first += count


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float32), (80, BFLOAT16)])
def test_rotate_and_write(dim: int, dtype: torch.dtype, with_norms: bool) -> None:
    """Queries and keys as the references make them, and the cache as `write_kv` leaves it."""
    heads, kv_heads, size, count = 3, 2, 8, 5
    joined = torch.randn(count, heads + 2 * kv_heads, dim, device=DEVICE).to(dtype)
    q, k, v = joined.split([heads, kv_heads, kv_heads], 1)
    positions = torch.tensor([3, 0, 7, 1, 9], device=DEVICE)
    angles = torch.randn(12, dim // 2, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()
    weights = [torch.randn(dim, device=DEVICE).to(dtype) for _ in range(2)] if with_norms else []
    slots = torch.tensor([5, 17, -1, 0, 23], device=DEVICE)
    found = torch.zeros(2, 3, kv_heads, size, dim, dtype=dtype, device=DEVICE)
    expected = found.clone()
    out = rotate_and_write(q, k, v, found, slots, positions, cos, sin, *weights, eps=1e-6)
    if with_norms:
        q, k = rms_norm_reference(q, weights[0], 1e-6), rms_norm_reference(k, weights[1], 1e-6)
    table = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    close(out, rotate(q, *table))
    used = slots >= 0
    write_kv(expected, rotate(k, *table)[used], v[used], slots[used])
    close(found, expected)


@pytest.mark.parametrize(("dim", "dtype"), [(96, torch.float32), (257, BFLOAT16)])
def test_rms_norm(dim: int, dtype: torch.dtype) -> None:
    """Equal to the reference bit for bit, and the residual holds the sum."""
    x = torch.randn(7, dim, device=DEVICE).to(dtype)
    residual = torch.randn(7, dim, device=DEVICE).to(dtype)
    weight = torch.randn(dim, device=DEVICE).to(dtype)
    close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
    total = x + residual
    close(rms_norm(x, weight, 1e-5, residual), rms_norm_reference(total, weight, 1e-5))
    assert torch.equal(residual, total)


@pytest.mark.parametrize(
    ("rows", "inner", "dtype"),
    [(3, 130, torch.float32), (2, 1100, BFLOAT16), *([(70_000, 8, BFLOAT16)] if ON_GPU else [])],
)
def test_silu_and_mul(rows: int, inner: int, dtype: torch.dtype) -> None:
    """silu(gate) * up, with widths that no tile divides, and more rows than an axis of a grid."""
    x = torch.randn(rows, 2 * inner, device=DEVICE).to(dtype)
    gate, up = x.chunk(2, -1)
    close(silu_and_mul(x), torch.nn.functional.silu(gate) * up)


def test_gather_decode_and_append() -> None:
    """The inputs of a decode step follow from the rows; padding touches nothing."""
    size = 4
    token_ids = torch.arange(60, dtype=torch.int32, device=DEVICE).view(5, 12).contiguous()
    computed = torch.tensor([3, 0, 7, 5, 2], dtype=torch.int32, device=DEVICE)
    tables = torch.arange(15, dtype=torch.int32, device=DEVICE).view(5, 3).contiguous() + 40
    rows = torch.tensor([2, 0, -1, 4], dtype=torch.int32, device=DEVICE)
    found = TokenTensors(*(torch.full((4,), 99, device=DEVICE) for _ in range(3)))
    lens = torch.full((4,), 99, dtype=torch.int32, device=DEVICE)
    before = computed.clone()
    gather_decode(rows, RowTensors(token_ids, computed, tables), size, found, lens)
    assert found.positions.tolist() == [7, 3, 0, 2]
    expected = [int(token_ids[2, 7]), int(token_ids[0, 3]), 0, int(token_ids[4, 2])]
    assert found.ids.tolist() == expected
    assert found.slots.tolist() == [47 * size + 3, 40 * size + 3, -1, 52 * size + 2]
    assert lens.tolist() == [8, 4, 0, 3]
    assert (computed - before).tolist() == [1, 0, 1, 0, 1]

    lengths = torch.tensor([4, 1, 8, 6, 3], dtype=torch.int32, device=DEVICE)
    appends = torch.tensor([True, True, False, True, True], device=DEVICE)
    chosen = torch.tensor([7, 8, 9], dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([2, 0, 4], dtype=torch.int32, device=DEVICE)
    append_tokens(rows, chosen, token_ids, lengths, appends)
    assert lengths.tolist() == [5, 1, 8, 6, 4]
    assert int(token_ids[0, 4]) == 8 and int(token_ids[4, 3]) == 9
    assert int(token_ids[2, 8]) == 2 * 12 + 8, "the host chooses for this row"


def test_gather_mixed() -> None:
    """Rows with one and with several new tokens; padding touches nothing."""
    size = 4
    token_ids = torch.arange(200, dtype=torch.int32, device=DEVICE).view(5, 40).contiguous()
    computed = torch.tensor([3, 0, 7, 5, 2], dtype=torch.int32, device=DEVICE)
    tables = torch.arange(50, dtype=torch.int32, device=DEVICE).view(5, 10).contiguous() + 40
    rows = torch.tensor([2, 0, 4, -1], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 1, 31, 34, 34, 34], dtype=torch.int32, device=DEVICE)
    found = TokenTensors(*(torch.full((40,), 99, device=DEVICE) for _ in range(3)))
    lens, single_tokens, single_lens = (
        torch.full((8,), 99, dtype=torch.int32, device=DEVICE) for _ in range(3)
    )
    before = computed.clone()
    table = RowTensors(token_ids, computed, tables)
    gather_mixed(rows, starts, table, size, found, lens, (single_tokens, single_lens))
    tokens, positions, slots = found
    expected = [(2, 7), *((0, 3 + i) for i in range(30)), *((4, 2 + i) for i in range(3))]
    for i, (row, position) in enumerate(expected):
        assert int(positions[i]) == position
        assert int(tokens[i]) == int(token_ids[row, position])
        assert int(slots[i]) == int(tables[row, position // size]) * size + position % size
    assert tokens[34:].tolist() == positions[34:].tolist() == [0] * 6
    assert slots[34:].tolist() == [-1] * 6
    assert lens.tolist() == [8, 33, 5, 1, 1, 99, 99, 99]
    assert single_tokens.tolist() == [0, 39, 39, 39, 99, 99, 99, 99]
    assert single_lens.tolist() == [8, 0, 0, 0, 99, 99, 99, 99]
    assert (computed - before).tolist() == [30, 0, 1, 0, 3]
    # Without those of single tokens, and with no token left over.
    computed.copy_(before)
    again = TokenTensors(*(torch.full((34,), 99, device=DEVICE) for _ in range(3)))
    lens.fill_(99)
    gather_mixed(rows, starts, table, size, again, lens, None)
    assert all(torch.equal(a, b[:34]) for a, b in zip(again, found, strict=True))
    assert lens.tolist() == [8, 33, 5, 1, 1, 99, 99, 99]
    assert (computed - before).tolist() == [30, 0, 1, 0, 3]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("outputs", "inputs", "dtype"), [(7, 40, torch.float32), (33, 2100, BFLOAT16)]
)
def test_gemv(outputs: int, inputs: int, dtype: torch.dtype, with_bias: bool) -> None:
    """A linear layer of one token, with sizes that no tile divides."""
    x = torch.randn(1, inputs, device=DEVICE).to(dtype)
    weight = torch.randn(outputs, inputs, device=DEVICE).to(dtype)
    bias = torch.randn(outputs, device=DEVICE).to(dtype) if with_bias else None
    wide = None if bias is None else bias.float()
    expected = torch.nn.functional.linear(x.float(), weight.float(), wide)
    found, total = gemv(x, weight, bias)
    close(found, expected)
    assert total is x


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize(
    ("outputs", "inputs", "dtype"), [(6, 40, torch.float32), (34, 2100, BFLOAT16)]
)
def test_gemv_after_norm(
    outputs: int, inputs: int, dtype: torch.dtype, with_residual: bool, gated: bool
) -> None:
    """Residual, norm, linear layer and gate in one kernel equal the four one after another."""
    x, residual = torch.randn(2, 1, inputs, device=DEVICE).to(dtype)
    norm_weight = torch.rand(inputs, device=DEVICE).to(dtype)
    weight = (torch.randn(outputs, inputs, device=DEVICE) / inputs**0.5).to(dtype)
    bias = torch.randn(outputs, device=DEVICE).to(dtype)
    before = residual.clone()
    norm = NormInput(norm_weight, 1e-5, residual if with_residual else None)
    found, total = gemv(x, weight, bias, norm, gated)
    expected_total = x + residual if with_residual else x
    assert torch.equal(total, expected_total) and torch.equal(residual, before)
    normal = rms_norm_reference(expected_total, norm_weight, 1e-5).float()
    expected = torch.nn.functional.linear(normal, weight.float(), bias.float())
    if gated:
        gate, up = expected.chunk(2, dim=-1)
        expected = torch.nn.functional.silu(gate) * up
    close(found, expected)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("dim", "dtype"), [(96, torch.float32), (1300, BFLOAT16)])
def test_embedding(dim: int, dtype: torch.dtype, ids_dtype: torch.dtype) -> None:
    """The very rows, with a width that no tile divides."""
    table = torch.randn(11, dim, device=DEVICE).to(dtype)
    ids = torch.tensor([3, 0, 10, 3], dtype=ids_dtype, device=DEVICE)
    assert torch.equal(embedding(ids, table), torch.nn.functional.embedding(ids, table))
