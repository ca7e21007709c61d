"""Latent attention (MLA) by Triton kernels: against plain loops in float64 over what heads have of
their own, and as a backend against the plain-torch one.

Slots that no context covers hold NaN; a scale, weight or position that goes wrong in one head, an
early query that sees a later key, or a chunk that is merged twice turns these red.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

from quire.config.latent import LatentConfig  # noqa: E402
from quire.kernels.torch.attention import paged_attention, write_kv  # noqa: E402
from quire.kernels.torch.qkv import rms_norm, rotate  # noqa: E402
from quire.kernels.triton.decode_attention import DecodeWorkspace  # noqa: E402
from quire.kernels.triton.latent_attention import (  # noqa: E402
    LatentTiles,
    latent_attention,
    latent_prefill,
)
from quire.kernels.triton.latent_cache import GATHERED_KEYS, gather_latents, write_latents  # noqa: E402
from quire.layers.attention import mla  # noqa: E402
from quire.layers.attention.backend import AttentionInputs, KVScales  # noqa: E402
from quire.layers.attention.layer import LatentQKV, Rotation  # noqa: E402
from quire.layers.attention.mla import LatentBackend, plan_chunks  # noqa: E402
from quire.layers.attention.torch import TorchBackend  # noqa: E402
from quire.layers.attention.triton import query_tiles  # noqa: E402
from quire.layers.linear import LatentLinear  # noqa: E402
from quire.worker.rows import Staging  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter has no arithmetic in bfloat16; on a GPU both half types are run.
BFLOAT16 = torch.bfloat16 if ON_GPU else torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
TILES = LatentTiles(rows=32, keys=32, num_warps=4, num_stages=2)

pytestmark = pytest.mark.skipif(
    not ON_GPU and not triton.knobs.runtime.interpret,
    reason="needs a GPU, or TRITON_INTERPRET=1 (see tests/kernels/test_triton_interpreter.py)",
)


class Cache:
    """One layer of a paged cache of latents with shuffled blocks; slots that no context covers hold
    NaN. In 8 bits all codes and scales are drawn at random."""

    def __init__(self, contexts: list[int], size: int, dim: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        per_row = [-(-context // size) for context in contexts]
        total = sum(per_row) + 3
        order = torch.randperm(total, generator=generator)
        self.tables = torch.full((len(contexts), max(per_row)), 2**30, dtype=torch.int32)
        kv = torch.full((1, total, 1, size, dim), float("nan"))
        scales = torch.full((total, 1, size, 1), float("nan"))
        first = 0
        for row, (context, count) in enumerate(zip(contexts, per_row, strict=True)):
            blocks = order[first : first + count]
            self.tables[row, :count] = blocks
            for position in range(context):
                block, place = blocks[position // size], position % size
                kv[0, block, 0, place] = torch.randn(dim, generator=generator)
                scales[block, 0, place] = 2 * torch.rand(1, generator=generator) + 0.1
            first += count
        self.kv, self.tables = kv.to(DEVICE, dtype), self.tables.to(DEVICE)
        self.scales = scales.to(DEVICE).bfloat16() if dtype.itemsize == 1 else None
        self.lens = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)

    def reference(self, q: Tensor, query_lens: list[int], scale: float, rank: int) -> Tensor:
        starts = torch.tensor(np.cumsum([0, *query_lens]), dtype=torch.int32)
        where = starts, self.lens.cpu(), self.tables
        return paged_attention(q, self.kv, *where, scale, scales=self.scales, value_dim=rank)


def close(found: Tensor, expected: Tensor) -> None:
    assert torch.isfinite(found).all()
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error < TOLERANCE[found.dtype], f"relative error {error:.2e}"


CASES = [
    # (query tokens, context) of each request, queries of the kernel, heads, block size, rank, rope
    # size, dtype of queries, of the cache, splits
    ([(1, 70), (1, 1), (1, 33)], 1, 4, 16, 36, 12, torch.float32, None, 1),
    ([(1, 100), (1, 17)], 1, 3, 4, 36, 12, BFLOAT16, None, 3),
    ([(1, 130), (1, 64), (1, 5)], 1, 40, 128, 64, 16, BFLOAT16, None, 4),
    ([(1, 90)], 1, 16, 64, 512, 64, torch.float16, None, 2),
    ([(2, 70), (1, 1), (5, 60), (2, 2), (0, 33)], 2, 5, 8, 36, 12, torch.float32, None, 1),
    ([(8, 97), (3, 40), (6, 66), (9, 30)], 8, 7, 32, 48, 8, BFLOAT16, None, 4),
    ([(1, 90), (1, 33)], 1, 4, 16, 36, 12, torch.float32, E4M3, 1),
    ([(1, 77), (1, 3)], 1, 16, 4, 64, 16, BFLOAT16, E5M2, 3),
    ([(4, 70), (3, 33)], 4, 3, 16, 36, 12, torch.float16, E4M3, 2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_absorbed_decode(case: tuple) -> None:
    """Each query sees what precedes it, whatever the split; requests that have more queries than
    the kernel, or none, are not touched, and nothing of an unwritten slot is read."""
    pairs, queries, heads, size, rank, rope, dtype, kept, splits = case
    lens = [pair[0] for pair in pairs]
    cache = Cache([pair[1] for pair in pairs], size, rank + rope, kept or dtype)
    first = 2
    joined = torch.randn(first + sum(lens) + 1, heads, rank + rope, device=DEVICE).to(dtype)
    q, q_rope = joined.split([rank, rope], -1)
    starts = torch.tensor(first + np.cumsum([0, *lens]), dtype=torch.int32, device=DEVICE)
    out = torch.full(q.shape, float("nan"), dtype=dtype, device=DEVICE)
    workspace = DecodeWorkspace(len(pairs) * queries * splits, heads, rank, DEVICE)
    workspace.partial.fill_(float("nan"))
    workspace.lse.fill_(float("nan"))
    latent_attention(
        q,
        q_rope.contiguous(),
        cache.kv,
        starts if queries > 1 else starts[:-1],
        cache.lens,
        cache.tables,
        0.3 * rank**-0.5,
        splits,
        workspace,
        out,
        TILES,
        queries=queries,
        scales=cache.scales,
    )
    expected = cache.reference(joined[first:-1], lens, 0.3 * rank**-0.5, rank)
    written = torch.zeros(len(q), dtype=torch.bool, device=DEVICE)
    for start, count in zip(starts.tolist(), lens, strict=False):
        if count <= queries:
            written[start : start + count] = True
            for line in range(start, start + count):  # each: a large one must not hide a small one
                close(out[line], expected[line - first])
    assert out[~written].isnan().all(), "only the lines of requests with few queries are written"


def test_padding_gives_zeros() -> None:
    """Padding rows of a graph have a context of 0; they must not produce NaN."""
    cache = Cache([20], 16, 48, torch.float32)
    q, q_rope = torch.randn(1, 4, 36, device=DEVICE), torch.randn(1, 4, 12, device=DEVICE)
    zero = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    for splits in (1, 2):
        out, workspace = torch.full_like(q, torch.nan), DecodeWorkspace(splits, 4, 36, DEVICE)
        where = cache.kv, zero, zero, cache.tables
        latent_attention(q, q_rope, *where, 0.1, splits, workspace, out, TILES)
        assert (out == 0).all()


PREFILL_CASES = [
    # (query tokens, context) of each request, tokens of a tile, heads, block size, rank, rope size,
    # dtype of queries, of the cache
    ([(33, 70), (5, 5), (1, 40)], 8, 4, 16, 36, 12, torch.float32, None),
    ([(19, 130), (2, 64)], 16, 3, 4, 36, 12, BFLOAT16, None),
    ([(40, 40)], 32, 40, 128, 64, 16, BFLOAT16, None),
    ([(17, 61), (6, 9)], 8, 3, 8, 36, 12, torch.float16, E4M3),
]


@pytest.mark.parametrize("case", PREFILL_CASES, ids=str)
def test_absorbed_prefill(case: tuple) -> None:
    """Tiles of tokens, among them one for no request, as captured steps have; requests with one
    token are left alone."""
    pairs, queries, heads, size, rank, rope, dtype, kept = case
    lens = [pair[0] for pair in pairs]
    cache = Cache([pair[1] for pair in pairs], size, rank + rope, kept or dtype)
    joined = torch.randn(sum(lens), heads, rank + rope, device=DEVICE).to(dtype)
    q, q_rope = joined.split([rank, rope], -1)
    requests, indices = query_tiles(np.array(lens, np.int32), queries)
    starts = np.append(np.cumsum([0, *lens]), sum(lens))
    sent = [
        torch.tensor(array, dtype=torch.int32, device=DEVICE)
        for array in (starts, np.append(requests, len(lens)), np.append(indices, 0))
    ]
    out = torch.full(q.shape, float("nan"), dtype=dtype, device=DEVICE)
    latent_prefill(
        q,
        q_rope.contiguous(),
        cache.kv,
        sent[0],
        torch.cat([cache.lens, torch.ones_like(cache.lens[:1])]),
        torch.cat([cache.tables, torch.zeros_like(cache.tables[:1])]),
        *sent[1:],
        rank**-0.5,
        out,
        TILES,
        queries,
        scales=cache.scales,
    )
    expected = cache.reference(joined, lens, rank**-0.5, rank)
    several = torch.tensor(np.repeat(np.array(lens) > 1, lens), device=DEVICE)
    close(out[several], expected[several])
    assert out[~several].isnan().all()


@pytest.mark.parametrize("kept", [None, E4M3, E5M2], ids=str)
@pytest.mark.parametrize(
    ("heads", "rank", "rope", "dtype", "interleaved", "given"),
    [
        (3, 36, 12, torch.float32, True, 0.0),
        (16, 512, 64, BFLOAT16, True, 0.0),
        (5, 48, 8, torch.float16, False, 0.0625),
    ],
)
def test_written_latents(
    heads: int,
    rank: int,
    rope: int,
    dtype: torch.dtype,
    interleaved: bool,
    given: float,
    kept: torch.dtype | None,
) -> None:
    """Latents are normalised, keys rotated and stored behind them, at the slots of their tokens and
    nowhere else; queries are rotated."""
    size, num_blocks, generator = 8, 5, torch.Generator().manual_seed(rank)
    slots = torch.tensor([3, 17, -1, 39, 16, 0], device=DEVICE)
    count = len(slots)
    queries = torch.randn(count, heads, 20 + rope, generator=generator).to(DEVICE, dtype)
    q_rope = queries[..., 20:]
    joined = torch.randn(count, 4 + rank + rope, generator=generator).to(DEVICE, dtype)
    compressed = joined[:, 4:]
    weight = 1 + 0.2 * torch.randn(rank, generator=generator).to(DEVICE, dtype)
    angles = torch.randn(20, rope // 2, generator=generator).to(DEVICE)
    positions = torch.arange(count, device=DEVICE) * 3
    layer = torch.full((1, num_blocks, 1, size, rank + rope), float("nan"), device=DEVICE)
    layer = layer.to(kept or dtype)
    scales: Tensor | None = None
    prescribed = torch.tensor([[given], [9.0]], device=DEVICE)
    if kept is not None:
        scales = torch.full((num_blocks, 1, size, 1), float("nan"), device=DEVICE).bfloat16()
    expected_layer = layer.clone()
    expected_scales = None if scales is None else scales.clone()
    rotated = write_latents(
        q_rope,
        compressed,
        weight,
        1e-6,
        layer,
        slots,
        positions,
        angles.cos(),
        angles.sin(),
        interleaved,
        scales,
        prescribed,
    )
    cos, sin = (x[positions].unsqueeze(1) for x in (angles.cos(), angles.sin()))
    close(rotated, rotate(q_rope, cos, sin, interleaved))
    c, k_rope = compressed.split([rank, rope], -1)
    k = torch.cat(
        (rms_norm(c, weight, 1e-6), rotate(k_rope[:, None], cos, sin, interleaved)[:, 0]), -1
    )
    used = slots >= 0
    write_kv(expected_layer, k[used, None], k[used, None], slots[used], expected_scales, prescribed)
    found, expected = (x.view(torch.uint8) if kept else x.float() for x in (layer, expected_layer))
    if kept is None:
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3, equal_nan=True)
    else:
        assert scales is not None and expected_scales is not None
        # A sum that is rounded another way may be rounded to the next code.
        assert (found == expected).float().mean() > 0.99
        torch.testing.assert_close(scales, expected_scales, rtol=1e-2, atol=0, equal_nan=True)
        assert torch.equal(scales.isnan(), expected_scales.isnan())


@pytest.mark.parametrize("kept", [torch.float32, E4M3, E5M2], ids=str)
def test_gathered_latents(kept: torch.dtype) -> None:
    """Wherever pieces begin; rows behind a context are 0, and its table is not followed there."""
    rank, rope, cache = 36, 12, Cache([21, 50], 8, 48, kept)
    pieces = ((1, 32, 16), (0, 16, 0), (1, 3, 32))  # request, position, row
    latents, k_rope = (torch.full((48, n), float("nan"), device=DEVICE) for n in (rank, rope))
    listed = torch.tensor(pieces, dtype=torch.int32, device=DEVICE).T.contiguous()
    where = cache.tables, cache.lens
    gather_latents(cache.kv, latents, k_rope, *where, *listed, scales=cache.scales)
    found = torch.cat((latents, k_rope), -1)
    for request, position, row in pieces:
        for offset in range(GATHERED_KEYS):
            place = position + offset
            expected = torch.zeros(48, device=DEVICE)
            if place < int(cache.lens[request]):
                block = cache.tables[request, place // 8]
                expected = cache.kv[0, block, 0, place % 8].float()
                if cache.scales is not None:
                    expected = expected * cache.scales[block, 0, place % 8].float()
            assert torch.equal(found[row + offset], expected)


def test_chunks() -> None:
    """Contexts that fit into a chunk are not cut, others are; each position is gathered once, and
    each tile sees each chunk of its context in which something precedes its last query."""
    requests = np.array([3, 0, 5], np.int32)
    lens, contexts = np.array([10, 70, 33], np.int32), np.array([40, 150, 60], np.int32)
    chunks = plan_chunks(requests, lens, contexts, 64, 32, 16)
    seen: dict[int, list[int]] = {request: [] for request in requests.tolist()}
    tiles: set[tuple[int, int, int]] = set()
    for num_rows, (owners, positions, rows, *listed) in chunks:
        assert num_rows <= 64 and sorted(rows.tolist()) == list(range(0, num_rows, 16))
        for owner, position in zip(owners.tolist(), positions.tolist(), strict=True):
            seen[owner].append(position)
        place = dict(zip(zip(owners.tolist(), positions.tolist(), strict=True), rows, strict=True))
        for owner, index, begin, end, row in zip(*map(np.ndarray.tolist, listed), strict=True):
            assert place[owner, begin] == row and end - begin <= num_rows - row
            tiles.add((owner, index, begin))
    assert {request: sorted(found) for request, found in seen.items()} == {
        request: list(range(0, context, 16))
        for request, context in zip(requests.tolist(), contexts.tolist(), strict=True)
    }
    assert {begin for owner, _, begin in tiles if owner in (3, 5)} == {0}
    begins = sorted({begin for owner, _, begin in tiles if owner == 0})
    assert {(index, begin) for owner, index, begin in tiles if owner == 0} == {
        (index, begin)
        for index, last in enumerate((112, 144, 150))
        for begin in begins
        if begin < last
    }


LATENT = LatentConfig(q_rank=None, kv_rank=36, nope_dim=20, rope_dim=12, value_dim=16)


class Expansion:
    """What `LatentLinear` is, without a loader."""

    sizes = (LATENT.nope_dim, LATENT.value_dim)

    def __init__(self, num_heads: int, dtype: torch.dtype) -> None:
        rows = num_heads * sum(self.sizes)
        generator = torch.Generator().manual_seed(2)
        self.num_heads = num_heads
        weight = torch.randn(rows, LATENT.kv_rank, generator=generator) * LATENT.kv_rank**-0.5
        self.dense_weight = weight.to(DEVICE, dtype)
        by_head = self.dense_weight.view(num_heads, sum(self.sizes), -1)
        self.halves = by_head.split_with_sizes(self.sizes, dim=1)

    native = None
    to_latent, from_latent = LatentLinear.to_latent, LatentLinear.from_latent


STEPS = [
    # New tokens of each request in steps one after the other, drafts among them, the dtype of
    # activations and of the cache, block size, whether latents are expanded
    ([(60, 5, 0), (50, 1, 70), (1, 1, 1)], 1, torch.float32, None, 16, False),
    ([(45, 40, 1), (4, 60, 2)], 8, BFLOAT16, None, 4, True),
    ([(50, 1, 3), (1, 37, 64)], 1, torch.float32, E4M3, 32, True),
]


@pytest.mark.parametrize("case", STEPS, ids=lambda case: str(case)[-40:])
def test_steps_equal_those_in_plain_torch(case: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks beside requests that decode, with and without expanding latents, some of
    them in several chunks."""
    news, max_queries, dtype, kept, size, expands = case
    monkeypatch.setattr(mla, "PROGRAMS_WANTED", 8)  # each program takes the interpreter a while
    heads, layers, num_requests = 2, 2, 3
    expansion: Any = Expansion(heads, dtype)
    generator = torch.Generator().manual_seed(1)
    blocks = -(-160 // size)
    order = torch.randperm(num_requests * blocks, generator=generator)
    tables = order.view(num_requests, blocks).int().to(DEVICE)
    shape = (layers, 1, num_requests * blocks, 1, size, LATENT.cached_dim)
    backends = []
    for kind in (LatentBackend, TorchBackend):
        kv = torch.full(shape, float("nan"), device=DEVICE).to(kept or dtype)
        scales: KVScales | None = None
        if kept is not None:
            stored = torch.full((*shape[:1], *shape[2:5], 1), float("nan"), device=DEVICE)
            scales = KVScales(stored.bfloat16(), torch.zeros(layers, 2, 1, device=DEVICE))
        backends.append(kind(kv, heads, 1, LATENT.cached_dim, size, scales, LATENT))
    ours, _ = backends
    assert ours.expanded_queries == 37 and ours.num_splits(3, 1) > 1
    ours.chunk_rows = 64
    angles = torch.randn(160, LATENT.rope_dim // 2, generator=generator).to(DEVICE)
    weight = (1 + 0.2 * torch.randn(LATENT.kv_rank, generator=generator)).to(DEVICE, dtype)
    computed = np.zeros(num_requests, np.int32)
    for new in news:
        active = np.flatnonzero(new)
        lens = np.array(new, np.int32)[active]
        positions = np.concatenate(
            [np.arange(computed[r], computed[r] + new[r], dtype=np.int64) for r in active]
        )
        computed[active] += lens
        owners = torch.tensor(np.repeat(active, lens), device=DEVICE)
        places = torch.tensor(positions, device=DEVICE)
        slots = tables[owners, places // size].long() * size + places % size
        inputs = AttentionInputs(
            query_start=torch.tensor(np.cumsum([0, *lens]), dtype=torch.int32, device=DEVICE),
            context_lens=torch.tensor(computed[active], device=DEVICE),
            block_tables=tables[torch.tensor(active, device=DEVICE)],
            slots=slots,
            query_lens=lens,
            send=Staging(DEVICE).send,
            decode_queries=max_queries,
            # Bounds of rows with drafts may be too high.
            max_context_lens=computed[active] + 9 if expands else None,
        )
        steps = [backend.plan(inputs) for backend in backends]
        assert bool(steps[0].chunks) == (expands and max(new) >= 37)
        rotation = Rotation(angles.cos(), angles.sin(), places, True)
        for layer in range(layers):
            q, compressed = (
                torch.randn(*shape, generator=generator).to(DEVICE, dtype)
                for shape in (
                    (len(places), heads, LATENT.query_dim),
                    (len(places), LATENT.cached_dim),
                )
            )
            latent = LatentQKV(q, compressed, weight, 1e-6, rotation, expansion)
            found, expected = (step.attend(layer, latent, 0.2, None) for step in steps)
            assert found.shape == expected.shape
            for line, other in zip(found, expected, strict=True):
                close(line, other)


def test_queries_from_which_on_latents_are_expanded() -> None:
    """With the sizes of all released models: 2 * 512 + 64 - 192 - 128 = 768 numbers fewer for each
    query, 512 * 256 more for each key."""
    released = LatentConfig(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    assert mla.profitable_queries(released) == 171
    assert mla.chunk_rows(16 * 256 * 2) == 16384 and mla.chunk_rows(128 * 256 * 2) == 4096
