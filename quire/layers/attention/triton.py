"""Attention on a GPU by Triton kernels: one for requests with one new token, or a few where drafts
are verified, and one for those with more."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar, NamedTuple

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
from quire.layers.attention.triton_prefill import choose_prefill, is_hopper, tile_row_bytes
from quire.protocol.kv_spec import BLOCK_SIZES
from quire.protocol.plan import Int32Array

if TYPE_CHECKING:
    from quire.kernels.triton.decode_attention import DecodeWorkspace

PROGRAMS_WANTED = 512
"""Decode programs that fill a large GPU; contexts are split until there are about as many."""
PROGRAMS_UNSPLIT = 768
"""From here on whole contexts, the longest first, are read at full speed; below, pieces even out
their lengths."""
MIN_SPLITS, MAX_SPLITS = 4, 64
PREFIX_PROGRAMS_WANTED = 256
MAX_PREFIX_PIECES = 2048
"""Bounds requests times splits of a shared prefix, and so its workspace."""
MAX_DECODE_QUERIES = 8


class TritonBackend(AttentionBackend):
    """Keys and values are written, and attention computed, where the cache lies."""

    support: ClassVar[BackendSupport] = BackendSupport(
        name="triton",
        device_types=("cuda",),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        narrow_caches=(torch.float8_e4m3fn, torch.float8_e5m2),
        block_sizes=BLOCK_SIZES,
        head_dims=None,
        sliding_window=True,
        pairs=True,
        latent=False,
        batch_invariant=False,
        cuda_graphs=True,
    )

    max_prefix_rows: ClassVar[int] = MAX_PREFIX_PIECES

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
        assert latent is None, "latents are for another backend"
        from quire.kernels.triton.decode_attention import DecodeWorkspace

        self.layers = kv.unbind(0)
        self.scales = None if scales is None else scales.stored.unbind(0)
        self.given = None if scales is None else scales.given.unbind(0)
        self.num_kv_heads = num_kv_heads
        row_bytes = head_dim * kv.element_size()
        self.tile = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
        self.prefill = choose_prefill(kv, num_heads, num_kv_heads)
        self.tile_queries = self.prefill.queries
        self.prefill_name = self.prefill.name
        self.stages = 3 if row_bytes <= 256 else 2
        if is_hopper(kv.device) and row_bytes <= 128 and scales is not None:
            self.stages = 5  # tiles of half the bytes: more of them are on their way
        # Requests times splits never exceeds this.
        self._max_pieces = max(MAX_SPLITS, MIN_SPLITS * PROGRAMS_UNSPLIT // num_kv_heads)
        self._workspaces = {1: DecodeWorkspace(self._max_pieces, num_heads, head_dim, kv.device)}
        self._dims = (num_heads, head_dim)
        # Query rows of a tile that attends to a shared prefix: requests times heads of a KV head;
        # and of a request with several new tokens: those times heads.
        tile_bytes = tile_row_bytes(kv)
        max_rows = 128 if tile_bytes <= 256 else 64 if tile_bytes <= 512 else 32
        heads_per_kv_head = 1 << (num_heads // num_kv_heads - 1).bit_length()
        self.prefix_members = max(1, max_rows // heads_per_kv_head)
        self.max_decode_queries = min(MAX_DECODE_QUERIES, self.prefix_members)
        self.prefix_limits: dict[str, int] = {}
        if is_hopper(kv.device) and row_bytes <= 256:
            # As in `choose_prefill`: two programs share a multiprocessor.
            self.prefix_limits = {"num_warps": 8, "max_registers": 128}
        self.prefix_workspace = DecodeWorkspace(MAX_PREFIX_PIECES, num_heads, head_dim, kv.device)

    @classmethod
    def missing(cls) -> str | None:
        return None if find_spec("triton") else "the package triton is not installed"

    @classmethod
    def describe(cls) -> str:
        return "triton"

    def num_splits(self, num_requests: int) -> int:
        """Pieces of each context, so that a small batch still fills the GPU."""
        programs = num_requests * self.num_kv_heads
        if programs >= PROGRAMS_UNSPLIT:
            return 1
        wanted = PROGRAMS_WANTED // programs
        return min(max(MIN_SPLITS, 1 << max(wanted - 1, 0).bit_length()), MAX_SPLITS)

    def num_warps(self, num_requests: int, queries: int = 1) -> int:
        """Of a program of decode attention, at least one for 16 query rows."""
        is_full = num_requests * self.num_kv_heads >= PROGRAMS_WANTED // 2
        wanted = 2 if is_full or self.scales is not None else 4
        rows = queries * self._dims[0] // self.num_kv_heads
        return wanted if queries == 1 else max(wanted, 1 << (rows - 1).bit_length() >> 4)

    def workspace(self, queries: int) -> DecodeWorkspace:
        """For so many queries of each request; made when first asked for."""
        from quire.kernels.triton.decode_attention import DecodeWorkspace

        if queries not in self._workspaces:
            pieces, device = self._max_pieces * queries, self.layers[0].device
            self._workspaces[queries] = DecodeWorkspace(pieces, *self._dims, device)
        return self._workspaces[queries]

    def num_prefix_splits(self, num_requests: int) -> int:
        """Pieces of a prefix that all requests share, so that few tiles still fill the GPU."""
        programs = -(-num_requests // self.prefix_members) * self.num_kv_heads
        wanted = min(PREFIX_PROGRAMS_WANTED // programs, MAX_PREFIX_PIECES // num_requests, 16)
        return 1 << max(wanted, 1).bit_length() - 1

    def plan(self, inputs: AttentionInputs) -> TritonStep:
        return TritonStep(self, inputs)


class DecodeRows(NamedTuple):
    """What decode attention is given."""

    tokens: Tensor
    lens: Tensor
    tables: Tensor


class Division:
    """How the requests of a step are divided between decode attention and tiles."""

    def __init__(self, inputs: AttentionInputs, tile_queries: int, max_decode_queries: int) -> None:
        self.decode: DecodeRows | None = None
        self.tiles: tuple[Tensor, Tensor] | None = None
        # A power of two, as the kernel has it.
        most = min(inputs.decode_queries, max_decode_queries)
        self.queries = 1 << (most - 1).bit_length()
        self._tile_queries = tile_queries
        if inputs.divided is not None:
            rows = inputs.divided
            tables = inputs.block_tables[: len(rows.lens)]
            self.decode = DecodeRows(rows.tokens, rows.lens, tables)
            self.tiles = (rows.tile_requests, rows.tile_indices)
        elif self.queries > 1:
            self._divide_few(inputs)
        elif int(inputs.query_lens.max()) == 1:
            tokens = inputs.query_start[: len(inputs.context_lens)]
            self.decode = DecodeRows(tokens, inputs.context_lens, inputs.block_tables)
        else:
            self._divide(inputs)

    def _divide_few(self, inputs: AttentionInputs) -> None:
        """Cut requests into tiles that have too many new tokens for the decode kernel, which leaves
        them alone."""
        assert inputs.prefixes is None, "a shared prefix is read once for single tokens only"
        self.decode = DecodeRows(inputs.query_start, inputs.context_lens, inputs.block_tables)
        if int(inputs.query_lens.max()) > self.queries:
            tiles = query_tiles(inputs.query_lens, self._tile_queries, self.queries)
            requests, indices = inputs.send(*tiles)
            self.tiles = (requests, indices)

    def _divide(self, inputs: AttentionInputs) -> None:
        """Send requests with one new token to the decode kernel and cut the others into tiles."""
        lens = inputs.query_lens
        single = np.flatnonzero(lens == 1).astype(np.int32)
        requests, indices = query_tiles(lens, self._tile_queries)
        sent = inputs.send(single, requests, indices)
        self.tiles = (sent[1], sent[2])
        if len(single):
            self.decode = DecodeRows(
                inputs.query_start[sent[0]],
                inputs.context_lens[sent[0]],
                inputs.block_tables[sent[0]],
            )


class TritonStep(AttentionStep):
    """A step over the layers of a cache."""

    def __init__(self, backend: TritonBackend, inputs: AttentionInputs) -> None:
        self.backend = backend
        self.slots = inputs.slots
        self.inputs = inputs
        division = Division(inputs, backend.tile_queries, backend.max_decode_queries)
        self.decode, self.tiles, self.queries = division.decode, division.tiles, division.queries

    def attend(
        self,
        layer_index: int,
        qkv: QKV | LatentQKV,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(qkv, QKV), "latents are for another backend"
        q = self._prepare_and_write(layer_index, qkv)
        return self.attend_prepared(layer_index, q, scale, window, softcap, sinks)

    def _prepare_and_write(self, layer_index: int, qkv: QKV) -> Tensor:
        """Normalise, rotate and store as QKV asks; returns the queries."""
        from quire.kernels.triton.rotary_cache import rotate_and_write

        backend, rotation, norms = self.backend, qkv.rotation, qkv.norms
        assert norms is None or rotation is not None, "heads are normalised where they are rotated"
        return rotate_and_write(
            qkv.q,
            qkv.k,
            qkv.v,
            backend.layers[layer_index],
            self.slots,
            rotation.positions if rotation is not None else None,
            rotation.cos if rotation is not None else None,
            rotation.sin if rotation is not None else None,
            norms.q_weight if norms is not None else None,
            norms.k_weight if norms is not None else None,
            norms.eps if norms is not None else 0.0,
            backend.scales[layer_index] if backend.scales is not None else None,
            backend.given[layer_index] if backend.given is not None else None,
            rotation is not None and rotation.interleaved,
        )

    def attend_prepared(
        self,
        layer_index: int,
        q: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention alone: the queries are ready, and the cache holds the step's tokens."""
        from quire.kernels.triton.decode_attention import PrefixPieces, decode_attention
        from quire.kernels.triton.prefix_attention import prefix_attention

        backend, inputs = self.backend, self.inputs
        layer = backend.layers[layer_index]
        scales = backend.scales[layer_index] if backend.scales is not None else None
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if self.decode is not None:
            tokens, lens, tables = self.decode
            splits = backend.num_splits(len(lens))
            shared = inputs.prefixes
            pieces: PrefixPieces | None = None
            if shared is not None:
                assert window is None, "a prefix is shared only where all of it is seen"
                pieces = PrefixPieces(
                    shared.starts,
                    backend.prefix_workspace,
                    backend.num_prefix_splits(len(lens)),
                )
                prefix_attention(
                    q,
                    layer,
                    tokens,
                    tables,
                    shared.members,
                    shared.lens,
                    scale,
                    pieces.num_splits,
                    pieces.workspace,
                    tile=backend.tile,
                    **backend.prefix_limits,
                    scales=scales,
                    softcap=softcap,
                )
            decode_attention(
                q,
                layer,
                tokens,
                lens,
                tables,
                scale,
                window,
                splits,
                backend.workspace(self.queries),
                out,
                tile=backend.tile,
                num_warps=backend.num_warps(len(lens), self.queries),
                num_stages=backend.stages,
                prefix=pieces,
                queries=self.queries,
                scales=scales,
                softcap=softcap,
                sinks=sinks,
            )
        if self.tiles is not None:
            backend.prefill.attend(
                q,
                layer,
                inputs.query_start,
                inputs.context_lens,
                inputs.block_tables,
                *self.tiles,
                scale,
                window,
                out,
                scales=scales,
                softcap=softcap,
                sinks=sinks,
            )
        return out


def query_tiles(
    query_lens: Int32Array, size: int, decode_queries: int = 1
) -> tuple[Int32Array, Int32Array]:
    """(request, tile of it) for all requests with more new tokens than decode attention takes,
    costly tiles first."""
    counts = np.where(query_lens > decode_queries, -(-query_lens // size), 0)
    requests = np.repeat(np.arange(len(query_lens), dtype=np.int32), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    indices = (np.arange(len(requests)) - first).astype(np.int32)
    order = np.argsort(-indices, kind="stable")
    return requests[order], indices[order]
