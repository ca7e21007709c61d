"""Latent attention (MLA) on a GPU by Triton kernels.

Few queries attend over latents as they lie in the cache (absorbed). Where a request has many new
tokens, and the step is not captured, latents are expanded to keys and values in chunks: that costs
a third of the arithmetic, and the work of expanding, which many queries share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from quire.config.latent import LatentConfig
from quire.layers.attention.backend import (
    AttentionBackend,
    AttentionInputs,
    BackendSupport,
    KVScales,
)
from quire.layers.attention.layer import QKV, AttentionStep, LatentQKV
from quire.layers.attention.triton import Division, TritonBackend
from quire.layers.attention.triton_prefill import is_hopper, is_turing
from quire.protocol.kv_spec import BLOCK_SIZES
from quire.protocol.plan import Int32Array

if TYPE_CHECKING:
    from quire.kernels.triton.expanded_attention import ExpandedTiles
    from quire.kernels.triton.latent_attention import LatentTiles
    from quire.kernels.triton.prefill_attention import PrefillTiles

PROGRAMS_WANTED = 256
"""Decode programs that fill a large GPU; contexts are split until there are about as many."""
PROGRAMS_UNSPLIT = 384
"""From here on contexts are left whole; below, pieces even out their lengths."""
MIN_SPLITS, MAX_SPLITS = 2, 64
TILE_QUERIES = 32
"""Tokens of a tile; several programs share it."""
MAX_DECODE_QUERIES = 8
MAX_CHUNK = 16384
MAX_CHUNK_BYTES = 256 << 20
"""Of keys and values that latents are expanded to at once, in tokens and for all heads."""


class LatentBackend(AttentionBackend):
    """Latents are written, and attention computed, where the cache lies."""

    support: ClassVar[BackendSupport] = BackendSupport(
        name="triton",
        device_types=("cuda",),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        narrow_caches=(torch.float8_e4m3fn, torch.float8_e5m2),
        block_sizes=BLOCK_SIZES,
        head_dims=None,
        sliding_window=False,
        pairs=False,
        latent=True,
        batch_invariant=False,
        cuda_graphs=True,
    )

    prefill_name = "latents, expanded where a request has many new tokens"
    tile_queries = TILE_QUERIES
    max_decode_queries = MAX_DECODE_QUERIES

    def __init__(
        self,
        kv: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        scales: KVScales | None = None,
        latent: LatentConfig | None = None,
    ) -> None:
        from quire.kernels.triton.decode_attention import DecodeWorkspace

        assert latent is not None and num_kv_heads == 1 and head_dim == latent.cached_dim
        self.layers = kv.unbind(0)
        self.scales = None if scales is None else scales.stored.unbind(0)
        self.given = None if scales is None else scales.given.unbind(0)
        self.num_heads = num_heads
        self.tiles = choose_tiles(kv, latent)
        self.expanded_tiles = choose_expanded_tiles(kv, latent)
        rows = [count * num_heads for count in (1, 2, 4, 8)]
        most = max(self.tiles.padded_rows(count) for count in rows)
        pieces = max(2 * PROGRAMS_WANTED, MIN_SPLITS * PROGRAMS_UNSPLIT)
        self.workspace = DecodeWorkspace(pieces * most, 1, latent.kv_rank, kv.device)
        self.expanded_queries = profitable_queries(latent)
        # Of activations that are in 16 bits, or as the cache is.
        item_bytes = max(kv.element_size(), 2)
        width = num_heads * (latent.nope_dim + latent.value_dim)
        self.chunk_rows = chunk_rows(width * item_bytes)
        self._chunk_widths = (latent.kv_rank, latent.rope_dim, width)
        self._chunk: ChunkWorkspace | None = None

    @classmethod
    def missing(cls) -> str | None:
        if torch.cuda.is_available() and is_turing(torch.device("cuda")):
            return "tiles of latents do not fit into this GPU's shared memory"
        return TritonBackend.missing()

    @classmethod
    def describe(cls) -> str:
        return "triton (latent)"

    def num_splits(self, num_requests: int, queries: int) -> int:
        """Pieces of each context, so that a small batch still fills the GPU."""
        programs = num_requests * self.tiles.programs(self.num_heads * queries)
        if programs >= PROGRAMS_UNSPLIT:
            return 1
        wanted = PROGRAMS_WANTED // programs
        return min(max(MIN_SPLITS, 1 << max(wanted - 1, 0).bit_length()), MAX_SPLITS)

    def chunk_workspace(self, dtype: torch.dtype) -> ChunkWorkspace:
        """For activations of this type; made when first asked for."""
        if self._chunk is None:
            device, rows = self.layers[0].device, self.chunk_rows
            parts = (
                torch.empty(rows, width, dtype=dtype, device=device) for width in self._chunk_widths
            )
            self._chunk = ChunkWorkspace(*parts)
        return self._chunk

    def plan(self, inputs: AttentionInputs) -> LatentStep:
        return LatentStep(self, inputs)


def profitable_queries(latent: LatentConfig) -> int:
    """New tokens from which on it is less arithmetic to expand latents than to attend to them. Per
    head and key: what each query costs, absorbed and expanded, and what it costs to expand."""
    absorbed = 2 * latent.kv_rank + latent.rope_dim
    expanded = latent.query_dim + latent.value_dim
    expanding = latent.kv_rank * (latent.nope_dim + latent.value_dim)
    return expanding // max(1, absorbed - expanded) + 1


def has_little_memory() -> bool:
    """Whether a program has 64 KiB of shared memory, as on GPUs of AMD, and not 96 or more."""
    return torch.version.hip is not None


def choose_tiles(kv: Tensor, latent: LatentConfig) -> LatentTiles:
    """Programs over latents: queries, and some tiles of keys on their way, in shared memory."""
    from quire.kernels.triton.latent_attention import LatentTiles

    row_bytes = latent.cached_dim * max(kv.element_size(), 2)
    if is_hopper(kv.device) and row_bytes <= 1280:
        return LatentTiles(rows=64, keys=32, num_warps=8, num_stages=5)
    if has_little_memory() or row_bytes > 1280:
        return LatentTiles(rows=16, keys=16, num_warps=4, num_stages=1)
    return LatentTiles(rows=32, keys=16, num_warps=4, num_stages=2)


def choose_expanded_tiles(kv: Tensor, latent: LatentConfig) -> PrefillTiles:
    from quire.kernels.triton.prefill_attention import PrefillTiles

    row_bytes = latent.query_dim * max(kv.element_size(), 2)
    if is_hopper(kv.device) and row_bytes <= 512:
        return PrefillTiles(128, 64, num_warps=8, num_stages=2)
    if row_bytes > 512 or has_little_memory():
        return PrefillTiles(32, 16, num_warps=4, num_stages=1)
    return PrefillTiles(64, 32, num_warps=4, num_stages=2)


@dataclass(frozen=True)
class ChunkWorkspace:
    """Where latents of a chunk of contexts are gathered and expanded, shared by all layers."""

    latents: Tensor
    """[rows, kv_rank]"""
    rope: Tensor
    """[rows, rope_dim]"""
    expanded: Tensor
    """[rows, num_heads * (nope_dim + value_dim)]"""


def chunk_rows(row_bytes: int) -> int:
    """Tokens of a chunk, each with so many bytes: a power of two."""
    rows = min(MAX_CHUNK, max(MAX_CHUNK_BYTES // row_bytes, 64))
    return 1 << rows.bit_length() - 1


@dataclass(frozen=True)
class Chunk:
    """Parts of contexts that are expanded at once, and the queries that see them."""

    num_rows: int
    pieces: tuple[Tensor, Tensor, Tensor]
    """What `gather_latents` copies: requests, positions, rows."""
    tiles: ExpandedTiles


def plan_chunks(
    requests: Int32Array,
    query_lens: Int32Array,
    context_lens: Int32Array,
    num_rows: int,
    tile_queries: int,
    piece: int,
) -> list[tuple[int, list[Int32Array]]]:
    """Rows of each chunk, and its arrays: requests, positions and rows of what is gathered in
    pieces; requests, indices, first and last positions and rows of tiles, costly ones first.

    Contexts that fit into a chunk are not cut. `context_lens` may be too long.
    """
    chunks: list[tuple[int, list[list[Int32Array]]]] = []
    used = num_rows
    for request, count, context in zip(
        requests.tolist(), query_lens.tolist(), context_lens.tolist(), strict=True
    ):
        position = 0
        while position < context:
            left = context - position
            if used == num_rows or (left > num_rows - used and left <= num_rows):
                chunks.append((0, []))
                used = 0
            end = position + min(left, num_rows - used)
            starts = np.arange(position, end, piece)
            # Tiles none of whose queries comes behind `position` see nothing here.
            indices = np.arange(-(-count // tile_queries))
            last = context - count + np.minimum((indices + 1) * tile_queries, count)
            indices = indices[last > position]
            fields = (starts, starts - position + used), (indices,)
            arrays = [
                np.full(len(starts), request),
                *fields[0],
                np.full(len(indices), request),
                *fields[1],
                *(np.full(len(indices), value) for value in (position, end, used)),
            ]
            used += len(starts) * piece
            chunks[-1] = (used, [*chunks[-1][1], [array.astype(np.int32) for array in arrays]])
            position = end
    joined = []
    for rows, parts in chunks:
        arrays = [np.concatenate(same) for same in zip(*parts, strict=True)]
        order = np.argsort(-arrays[4], kind="stable")
        joined.append((rows, [*arrays[:3], *(array[order] for array in arrays[3:])]))
    return joined


class LatentStep(AttentionStep):
    """A step over the layers of a cache."""

    def __init__(self, backend: LatentBackend, inputs: AttentionInputs) -> None:
        assert inputs.prefixes is None, "a shared prefix is not read once for all"
        self.backend, self.inputs = backend, inputs
        self.chunks: list[Chunk] = []
        self.chosen: Tensor | None = None
        """Tokens that attend over latents, where others do not."""
        self.absorbed: AttentionInputs | None = inputs
        """Of the requests that attend over latents, if any; tokens are numbered among them."""
        bounds, least = inputs.max_context_lens, backend.expanded_queries
        if bounds is not None and least is not None:
            many = inputs.query_lens >= least
            if many.any():
                self._expand(many, bounds)
        self.division: Division | None = None
        if self.absorbed is not None:
            self.division = Division(
                self.absorbed, backend.tile_queries, backend.max_decode_queries
            )

    def _expand(self, many: np.ndarray, bounds: Int32Array) -> None:
        """Have requests with many new tokens attend to expanded latents, and the others apart."""
        from quire.kernels.triton.expanded_attention import ExpandedTiles
        from quire.kernels.triton.latent_cache import GATHERED_KEYS

        inputs, lens = self.inputs, self.inputs.query_lens
        few = np.flatnonzero(~many).astype(np.int32)
        places = np.arange(lens.sum(), dtype=np.int32)[np.repeat(~many, lens)]
        starts = np.append(0, np.cumsum(lens[few])).astype(np.int32)
        expanded = np.flatnonzero(many).astype(np.int32)
        chunks = plan_chunks(
            expanded,
            lens[expanded],
            bounds[expanded],
            self.backend.chunk_rows,
            self.backend.expanded_tiles.queries,
            GATHERED_KEYS,
        )
        arrays = [array for _, parts in chunks for array in parts]
        chosen, start, own, *sent = inputs.send(places, starts, few, *arrays)
        for index, (num_rows, _) in enumerate(chunks):
            requests, positions, rows, *tiles = sent[8 * index : 8 * index + 8]
            pieces = (requests, positions, rows)
            self.chunks.append(Chunk(num_rows, pieces, ExpandedTiles(*tiles)))
        self.absorbed = None
        if len(few):
            self.chosen = chosen
            self.absorbed = replace(
                inputs,
                query_start=start,
                context_lens=inputs.context_lens[own],
                block_tables=inputs.block_tables[own],
                query_lens=lens[few],
            )

    def attend(
        self,
        layer_index: int,
        qkv: QKV | LatentQKV,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        from quire.kernels.triton.latent_cache import write_latents

        assert isinstance(qkv, LatentQKV), "keys and values of their own are for another backend"
        assert window is None and softcap is None and sinks is None, "latents have none of them"
        backend, rotation = self.backend, qkv.rotation
        q_nope, q_rope = qkv.split_queries()
        q_rope = write_latents(
            q_rope,
            qkv.compressed,
            qkv.norm_weight,
            qkv.eps,
            backend.layers[layer_index],
            self.inputs.slots,
            rotation.positions,
            rotation.cos,
            rotation.sin,
            rotation.interleaved,
            None if backend.scales is None else backend.scales[layer_index],
            None if backend.given is None else backend.given[layer_index],
        )
        if not self.chunks:
            return self._attend_absorbed(layer_index, qkv, q_nope, q_rope, scale)
        out = self._attend_expanded(layer_index, qkv, q_nope, q_rope, scale)
        if self.chosen is not None:
            q_nope, q_rope = (x.index_select(0, self.chosen) for x in (q_nope, q_rope))
            out[self.chosen] = self._attend_absorbed(layer_index, qkv, q_nope, q_rope, scale)
        return out

    def _attend_absorbed(
        self, layer_index: int, qkv: LatentQKV, q_nope: Tensor, q_rope: Tensor, scale: float
    ) -> Tensor:
        from quire.kernels.triton.latent_attention import latent_attention, latent_prefill

        backend, inputs, division = self.backend, self.absorbed, self.division
        assert inputs is not None and division is not None
        layer = backend.layers[layer_index]
        scales = None if backend.scales is None else backend.scales[layer_index]
        q = qkv.expansion.to_latent(q_nope)
        mixed = torch.empty_like(q)
        if division.decode is not None:
            tokens, lens, tables = division.decode
            latent_attention(
                q,
                q_rope,
                layer,
                tokens,
                lens,
                tables,
                scale,
                backend.num_splits(len(lens), division.queries),
                backend.workspace,
                mixed,
                backend.tiles,
                queries=division.queries,
                scales=scales,
            )
        if division.tiles is not None:
            latent_prefill(
                q,
                q_rope,
                layer,
                inputs.query_start,
                inputs.context_lens,
                inputs.block_tables,
                *division.tiles,
                scale,
                mixed,
                backend.tiles,
                backend.tile_queries,
                scales=scales,
            )
        return qkv.expansion.from_latent(mixed)

    def _attend_expanded(
        self, layer_index: int, qkv: LatentQKV, q_nope: Tensor, q_rope: Tensor, scale: float
    ) -> Tensor:
        from quire.kernels.triton.expanded_attention import expanded_attention
        from quire.kernels.triton.latent_cache import gather_latents

        backend, inputs = self.backend, self.inputs
        space = backend.chunk_workspace(q_nope.dtype)
        num_tokens, num_heads, nope_dim = q_nope.shape
        weight = qkv.expansion.dense_weight
        out = q_nope.new_empty(num_tokens, num_heads, len(weight) // num_heads - nope_dim)
        lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=out.device)
        for chunk in self.chunks:
            gather_latents(
                backend.layers[layer_index],
                space.latents,
                space.rope,
                inputs.block_tables,
                inputs.context_lens,
                *chunk.pieces,
                scales=None if backend.scales is None else backend.scales[layer_index],
            )
            expanded = space.expanded[: chunk.num_rows]
            torch.mm(space.latents[: chunk.num_rows], weight.t(), out=expanded)
            expanded_attention(
                q_nope,
                q_rope,
                expanded,
                space.rope,
                inputs.query_start,
                inputs.context_lens,
                chunk.tiles,
                scale,
                out,
                lse,
                backend.expanded_tiles,
            )
        return out
