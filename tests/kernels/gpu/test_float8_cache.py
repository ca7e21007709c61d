"""A KV cache in 8 bits: what kernels write and read, against torch's own types of 8 bits.

A wrong code, a scale of another token, head or part, a slot that is not a request's own (all others
are NaN), or a weight lost to the small range of float16 turns these red.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

from quire.kernels.triton.decode_attention import (  # noqa: E402
    DecodeWorkspace,
    PrefixPieces,
    decode_attention,
)
from quire.kernels.triton.prefill_attention import PrefillTiles, prefill_attention  # noqa: E402
from quire.kernels.triton.prefix_attention import prefix_attention  # noqa: E402
from quire.kernels.triton.rotary_cache import rotate_and_write  # noqa: E402
from quire.layers.attention.shared_prefix import prefix_tiles  # noqa: E402
from quire.layers.attention.triton import query_tiles  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter has no arithmetic in bfloat16; on a GPU both half types are run.
BFLOAT16 = torch.bfloat16 if ON_GPU else torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 5e-3}

pytestmark = pytest.mark.skipif(
    not ON_GPU and not triton.knobs.runtime.interpret,
    reason="needs a GPU, or TRITON_INTERPRET=1 (see tests/kernels/test_triton_interpreter.py)",
)

SOFTCAP = 0.7


def close(found: Tensor, expected: Tensor) -> None:
    assert torch.isfinite(found).all()
    error = (found.double().cpu() - expected).norm() / expected.norm()
    assert error < TOLERANCE[found.dtype], f"relative error {error:.2e}"


def quantized(x: Tensor, kind: torch.dtype, given: Tensor, part: int) -> tuple[Tensor, Tensor]:
    """Codes of keys (0) or values (1) [..., dim], and scales that fit them where `given` is 0."""
    largest = torch.finfo(kind).max
    scale = torch.where(given > 0, given, x.abs().amax(-1) / largest).clamp(min=1e-30)
    rounded = scale.bfloat16()
    up = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
    rounded = torch.where(rounded.float() < scale, up, rounded)
    if part == 1:
        rounded = torch.exp2(scale.log2().ceil()).bfloat16()
    return (x / rounded.float()[..., None]).clamp(-largest, largest).to(kind), rounded


@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype", "given", "rotates"),
    [
        (4, 2, 64, torch.float32, [[0.0, 0.0], [0.0, 0.0]], True),
        (3, 3, 80, BFLOAT16, [[0.02, 0.01, 0.004]] * 2, True),
        (8, 1, 128, torch.float16, [[0.0], [0.03]], False),
        (6, 2, 96, torch.float32, [[0.0, 0.5], [0.25, 0.0]], False),
    ],
    ids=str,
)
def test_written_codes_and_scales(
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    given: list[list[float]],
    rotates: bool,
    kind: torch.dtype,
) -> None:
    """Small, large and vanishing heads; slots of no token stay as they are."""
    size, num_blocks, generator = 8, 5, torch.Generator().manual_seed(dim)
    slots = torch.tensor([3, 17, -1, 39, 16, 0, 8])
    magnitude = torch.logspace(-3, 3, len(slots))[:, None, None]
    joined = torch.randn(len(slots), heads + 2 * kv_heads, dim, generator=generator) * magnitude
    q, k, v = joined.to(DEVICE, dtype).split([heads, kv_heads, kv_heads], 1)
    v[4, 0] = 0
    layer = torch.empty(2, num_blocks, kv_heads, size, dim, dtype=kind, device=DEVICE)
    layer.view(torch.uint8).fill_(0x7F)
    scales = torch.full((num_blocks, kv_heads, size, 2), torch.nan, device=DEVICE).bfloat16()
    angles = torch.randn(20, dim // 2, generator=generator).to(DEVICE)
    positions = torch.arange(len(slots), device=DEVICE) * 2
    rotation = (positions, angles.cos(), angles.sin()) if rotates else ()
    prescribed = torch.tensor(given, device=DEVICE)
    rotate_and_write(q, k, v, layer, slots.to(DEVICE), *rotation, scales=scales, given=prescribed)
    if rotates:
        cos, sin = (angles[positions].unsqueeze(1).cos(), angles[positions].unsqueeze(1).sin())
        a, b = k.float().chunk(2, -1)
        k = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(dtype)
    found = layer.float().cpu() * scales.float().cpu().movedim(-1, 0)[..., None]
    untouched = torch.ones(num_blocks * size, dtype=torch.bool)
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        untouched[slot] = False
        for part, x in enumerate((k, v)):
            heads_of_token = x[token].float()
            codes, scale = quantized(heads_of_token, kind, prescribed[part], part)
            expected = codes.float() * scale.float()[:, None]
            expected = torch.where(heads_of_token == 0, 0.0, expected).cpu()
            stored = found[part, slot // size, :, slot % size]
            # A sum that is rounded another way may be rounded to the next code.
            close_enough = (stored - expected).abs() <= 0.25 * expected.abs() + 1e-3 * scale.cpu()[
                :, None
            ].float()
            assert close_enough.all()
            assert (stored == expected).float().mean() > (0.99 if ON_GPU else 0.999)
    pages = layer.view(torch.uint8).cpu().transpose(2, 3).flatten(1, 2)
    assert (pages[:, untouched] == 0x7F).all()
    assert scales.cpu().transpose(1, 2).flatten(0, 1)[untouched].isnan().all()


class Cache:
    """One layer in shuffled blocks, codes and scales drawn at random; NaN where no context is."""

    def __init__(
        self, contexts: list[int], kv_heads: int, size: int, dim: int, kind: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        per_row = [-(-context // size) for context in contexts]
        total = sum(per_row) + 3
        order = torch.randperm(total, generator=generator)
        self.tables = torch.full((len(contexts), max(per_row)), 2**30, dtype=torch.int32)
        self.kv = torch.full((2, total, kv_heads, size, dim), torch.nan).to(kind)
        self.scales = torch.full((total, kv_heads, size, 2), torch.nan).bfloat16()
        first = 0
        for row, (context, count) in enumerate(zip(contexts, per_row, strict=True)):
            blocks = order[first : first + count]
            self.tables[row, :count] = blocks
            for position in range(context):
                block, place = blocks[position // size], position % size
                codes = torch.randn(2, kv_heads, dim, generator=generator) * 50
                self.kv[:, block, :, place] = codes.to(kind)
                # Keys that matter; values of very different sizes.
                exponent = torch.rand(kv_heads, 2, generator=generator) * 6 - 5
                exponent[:, 0] = torch.rand(kv_heads, generator=generator) - 2
                self.scales[block, :, place] = (10**exponent).bfloat16()
                powers = torch.exp2((exponent[:, 1] * 3.3).round()).bfloat16()
                self.scales[block, :, place, 1] = powers
            first += count
        self.lens = contexts

    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """The layer, context lengths and tables."""
        lens = torch.tensor(self.lens, dtype=torch.int32, device=DEVICE)
        return self.kv.to(DEVICE), lens, self.tables.to(DEVICE)

    def expected(
        self,
        q: Tensor,
        query_lens: list[int],
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Dense attention in float64, request by request."""
        size, dim = self.kv.shape[3:]
        outs, first = [], 0
        for row, (count, context) in enumerate(zip(query_lens, self.lens, strict=True)):
            position = torch.arange(context)
            blocks, places = self.tables[row, position // size].long(), position % size
            if window is not None:  # what no query sees may be freed
                blocks = torch.where(position > context - count - window, blocks, 0)
            scales = self.scales[blocks, :, places].double()
            k, v = self.kv.double()[:, blocks, :, places].unbind(1)
            k, v = k * scales[..., :1], v * scales[..., 1:]
            lines = q[first : first + count].double().cpu()
            group = lines.shape[1] // k.shape[1]
            scores = torch.einsum("qhd,khd->hqk", lines, k.repeat_interleave(group, 1)) * dim**-0.5
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            own = torch.arange(context - count, context)[:, None]
            seen = position <= own
            if window is not None:
                seen &= position > own - window
            weights = scores.masked_fill(~seen, -torch.inf).exp()
            total = weights.sum(-1, keepdim=True)
            if sinks is not None:
                total += sinks.double().cpu().exp()[:, None, None]
            weights /= total
            v = v.masked_fill(~seen.any(0)[:, None, None], 0.0).repeat_interleave(group, 1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, v))
            first += count
        return torch.cat(outs)


def make_sinks(heads: int) -> Tensor:
    return 3 * torch.randn(heads, device=DEVICE)


DECODE_CASES = [
    # contexts, heads, kv heads, block size, head size, dtype, window, splits, kind
    ([70, 1, 33], 8, 2, 16, 64, torch.float32, None, 1, E4M3),
    ([100, 17], 4, 4, 8, 80, torch.float32, 30, 2, E5M2),
    ([130, 64, 5], 6, 2, 32, 96, BFLOAT16, None, 4, E4M3),
    ([90], 16, 1, 4, 128, torch.float16, None, 8, E5M2),
    ([40, 129], 2, 1, 128, 256, torch.float32, 20, 3, E4M3),
]


@pytest.mark.parametrize("case", DECODE_CASES, ids=str)
def test_decode_attention(case: tuple) -> None:
    contexts, heads, kv_heads, size, dim, dtype, window, splits, kind = case
    cache = Cache(contexts, kv_heads, size, dim, kind)
    kv, lens, tables = cache.arguments()
    q = torch.randn(len(contexts), heads, dim, device=DEVICE).to(dtype)
    if dtype == torch.bfloat16:
        q[0] *= 1e5  # beyond float16
    tokens = torch.arange(len(contexts), dtype=torch.int32, device=DEVICE)
    out = torch.full_like(q, float("nan"))
    workspace = DecodeWorkspace(len(contexts) * splits, heads, dim, DEVICE)
    arguments = (tokens, lens, tables, dim**-0.5, window, splits, workspace, out)
    scales, softcap = cache.scales.to(DEVICE), SOFTCAP if window is None else None
    sinks = make_sinks(heads) if splits != 2 else None
    decode_attention(q, kv, *arguments, tile=32, scales=scales, softcap=softcap, sinks=sinks)
    expected = cache.expected(q, [1] * len(contexts), window, softcap, sinks)
    for line in range(len(contexts)):
        close(out[line], expected[line])


FEW_QUERY_CASES = [
    # (query tokens, context) of each request, queries of the kernel, heads, kv heads, block size,
    # head size, dtype, window, splits, kind
    ([(2, 70), (1, 1), (5, 60), (2, 2)], 2, 8, 2, 16, 64, torch.float32, None, 1, E5M2),
    ([(4, 100), (3, 17), (1, 90), (4, 5)], 4, 4, 4, 32, 80, torch.float32, 30, 2, E4M3),
    ([(8, 130), (5, 5), (8, 65)], 8, 6, 2, 32, 96, BFLOAT16, None, 4, E4M3),
]


@pytest.mark.parametrize("case", FEW_QUERY_CASES, ids=str)
def test_decode_attention_with_few_queries(case: tuple) -> None:
    pairs, queries, heads, kv_heads, size, dim, dtype, window, splits, kind = case
    counts = [pair[0] for pair in pairs]
    cache = Cache([pair[1] for pair in pairs], kv_heads, size, dim, kind)
    kv, lens, tables = cache.arguments()
    q = torch.randn(sum(counts), heads, dim, device=DEVICE).to(dtype)
    starts = torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32, device=DEVICE)
    out = torch.full_like(q, float("nan"))
    workspace = DecodeWorkspace(len(pairs) * queries * splits, heads, dim, DEVICE)
    arguments = (starts, lens, tables, dim**-0.5, window, splits, workspace, out)
    scales = cache.scales.to(DEVICE)
    sinks = make_sinks(heads) if splits != 2 else None
    decode_attention(q, kv, *arguments, tile=32, queries=queries, scales=scales, sinks=sinks)
    expected = cache.expected(q, counts, window, sinks=sinks)
    for start, count in zip(starts.tolist(), counts, strict=False):
        for line in range(start, start + count) if count <= queries else ():
            close(out[line], expected[line])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "dim", "dtype", "kind"),
    [(8, 2, 16, 64, torch.float32, E4M3), (6, 2, 8, 96, BFLOAT16, E5M2)],
    ids=str,
)
def test_shared_prefix_attention(
    heads: int, kv_heads: int, size: int, dim: int, dtype: torch.dtype, kind: torch.dtype
) -> None:
    """The prefix of five requests is read once; a sixth has none."""
    shared, contexts = 3 * size, [3 * size + 1, 3 * size, 3 * size + 9, 3 * size + 30]
    contexts = [*contexts, 3 * size + 5, 20]
    cache = Cache(contexts, kv_heads, size, dim, kind)
    cache.tables[1:5, :3] = cache.tables[0, :3]
    kv, lens, tables = cache.arguments()
    groups = np.array([0, 0, 0, 0, 0, -1], np.int32)
    tiles = prefix_tiles(groups, np.array([shared], np.int32), width=4)
    starts, prefix_lens, members = (torch.from_numpy(part).to(DEVICE) for part in tiles)
    q = torch.randn(len(contexts), heads, dim, device=DEVICE).to(dtype)
    tokens = torch.arange(len(contexts), dtype=torch.int32, device=DEVICE)
    scales, out = cache.scales.to(DEVICE), torch.full_like(q, float("nan"))
    workspaces = [DecodeWorkspace(len(contexts) * 2, heads, dim, DEVICE) for _ in range(2)]
    prefix_attention(
        q, kv, tokens, tables, members, prefix_lens, dim**-0.5, 2, workspaces[0], tile=32,
        scales=scales, softcap=SOFTCAP,
    )  # fmt: skip
    pieces = PrefixPieces(starts, workspaces[0], 2)
    arguments = (tokens, lens, tables, dim**-0.5, None, 2, workspaces[1], out)
    decode_attention(q, kv, *arguments, tile=32, prefix=pieces, scales=scales, softcap=SOFTCAP)
    expected = cache.expected(q, [1] * len(contexts), None, SOFTCAP)
    for line in range(len(contexts)):
        close(out[line], expected[line])


PREFILL_CASES = [
    # (query tokens, context) of each request, heads, kv heads, block size, head size, dtype,
    # window, kind
    ([(40, 70), (1, 9), (20, 20)], 4, 2, 16, 64, torch.float32, None, E4M3),
    ([(33, 33)], 2, 2, 4, 80, torch.float32, 10, E5M2),
    ([(17, 100), (50, 50)], 4, 1, 32, 96, BFLOAT16, None, E4M3),
    ([(40, 64)], 2, 1, 128, 128, torch.float16, 30, E4M3),
]


@pytest.mark.parametrize("case", PREFILL_CASES, ids=str)
def test_prefill_attention(case: tuple) -> None:
    pairs, heads, kv_heads, size, dim, dtype, window, kind = case
    counts = [pair[0] for pair in pairs]
    cache = Cache([pair[1] for pair in pairs], kv_heads, size, dim, kind)
    kv, lens, tables = cache.arguments()
    q = torch.randn(sum(counts), heads, dim, device=DEVICE).to(dtype)
    out = torch.full_like(q, float("nan"))
    starts = torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32, device=DEVICE)
    tiles = query_tiles(np.array(counts, np.int32), 16)
    requests, indices = (torch.from_numpy(part).to(DEVICE) for part in tiles)
    shape = PrefillTiles(queries=16, keys=16, num_warps=4, num_stages=2)
    arguments = (starts, lens, tables, requests, indices, dim**-0.5, window, out, shape)
    softcap = SOFTCAP if window is None else None
    sinks = make_sinks(heads) if heads == 2 else None
    scales = cache.scales.to(DEVICE)
    prefill_attention(q, kv, *arguments, scales=scales, softcap=softcap, sinks=sinks)
    expected, first = cache.expected(q, counts, window, softcap, sinks), 0
    for count in counts:
        if count > 1:  # single tokens belong to the decode kernel
            close(out[first : first + count], expected[first : first + count])
        first += count
