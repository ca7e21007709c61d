"""Attention on a GPU by Triton kernels: one for rows with one new token, one for longer ones."""

from __future__ import annotations

from importlib.util import find_spec
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from quire.layers.attention.backend import BLOCK_SIZES, AttentionInputs, BackendSupport
from quire.layers.attention.heads import Heads
from quire.layers.attention.triton_prefill import choose_prefill, is_hopper, tile_row_bytes
from quire.protocol.plan import Int32Array

PROGRAMS_WANTED = 512
"""Decode programs that fill a large GPU; contexts are split until there are about as many."""
PROGRAMS_UNSPLIT = 768
"""From here on whole contexts, the longest first, are read at full speed; below, pieces even out
their lengths."""
MIN_SPLITS, MAX_SPLITS = 4, 64
PREFIX_PROGRAMS_WANTED = 256
MAX_PREFIX_PIECES = 2048
"""Bounds requests times splits of a shared prefix, and so its workspace."""


class TritonBackend:
    """Keys and values are written, and attention computed, where the cache lies."""

    support: ClassVar[BackendSupport] = BackendSupport(
        name="triton",
        device_types=("cuda",),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        narrow_caches=(),
        block_sizes=BLOCK_SIZES,
        head_dims=None,
        sliding_window=True,
        batch_invariant=False,
        cuda_graphs=True,
    )

    max_prefix_rows: ClassVar[int] = MAX_PREFIX_PIECES

    def __init__(
        self, kv: Tensor, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
    ) -> None:
        from quire.kernels.triton.decode_attention import DecodeWorkspace

        self.layers = kv.unbind(0)
        self.num_kv_heads = num_kv_heads
        row_bytes = head_dim * kv.element_size()
        self.tile = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
        self.prefill = choose_prefill(kv, num_heads, num_kv_heads)
        self.tile_queries = self.prefill.queries
        self.prefill_name: str | None = self.prefill.name
        self.stages = 3 if row_bytes <= 256 else 2
        # Requests times splits never exceeds this.
        pieces = max(MAX_SPLITS, MIN_SPLITS * PROGRAMS_UNSPLIT // num_kv_heads)
        self.workspace = DecodeWorkspace(pieces, num_heads, head_dim, kv.device)
        # Query rows of a tile that attends to a shared prefix: requests times heads of a KV head.
        tile_bytes = tile_row_bytes(kv)
        prefix_rows = 128 if tile_bytes <= 256 else 64 if tile_bytes <= 512 else 32
        heads_per_kv_head = 1 << (num_heads // num_kv_heads - 1).bit_length()
        self.prefix_members = max(1, prefix_rows // heads_per_kv_head)
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

    def num_warps(self, num_requests: int) -> int:
        return 2 if num_requests * self.num_kv_heads >= PROGRAMS_WANTED // 2 else 4

    def num_prefix_splits(self, num_requests: int) -> int:
        """Pieces of a prefix that all requests share, so that few tiles still fill the GPU."""
        programs = -(-num_requests // self.prefix_members) * self.num_kv_heads
        wanted = min(PREFIX_PROGRAMS_WANTED // programs, MAX_PREFIX_PIECES // num_requests, 16)
        return 1 << max(wanted, 1).bit_length() - 1

    def plan(self, inputs: AttentionInputs) -> TritonStep:
        return TritonStep(self, inputs)


class TritonStep:
    """A step over the layers of a cache."""

    def __init__(self, backend: TritonBackend, inputs: AttentionInputs) -> None:
        self.backend = backend
        self.slots = inputs.slots
        self.inputs = inputs
        self.decode: tuple[Tensor, Tensor, Tensor] | None = None
        self.tiles: tuple[Tensor, Tensor] | None = None
        if inputs.divided is not None:
            rows = inputs.divided
            tables = inputs.block_tables[: len(rows.single_lens)]
            self.decode = (rows.single_tokens, rows.single_lens, tables)
            self.tiles = (rows.tile_requests, rows.tile_indices)
        elif int(inputs.query_lens.max()) == 1:
            tokens = inputs.query_start[: len(inputs.context_lens)]
            self.decode = (tokens, inputs.context_lens, inputs.block_tables)
        else:
            self._divide(inputs)

    def _divide(self, inputs: AttentionInputs) -> None:
        """Send rows with one new token to the decode kernel and cut the others into tiles."""
        lens = inputs.query_lens
        single = np.flatnonzero(lens == 1).astype(np.int32)
        requests, indices = query_tiles(lens, self.backend.tile_queries)
        sent = inputs.send(single, requests, indices)
        self.tiles = (sent[1], sent[2])
        if len(single):
            self.decode = (
                inputs.query_start[sent[0]],
                inputs.context_lens[sent[0]],
                inputs.block_tables[sent[0]],
            )

    def attend(self, layer_index: int, heads: Heads, scale: float, window: int | None) -> Tensor:
        layer = self.backend.layers[layer_index]
        q = _prepare_and_write(heads, layer, self.slots)
        return self.attend_prepared(layer, q, scale, window)

    def attend_prepared(self, layer: Tensor, q: Tensor, scale: float, window: int | None) -> Tensor:
        """Attention alone: the queries are ready, and the cache holds the step's tokens."""
        from quire.kernels.triton.decode_attention import PrefixPieces, decode_attention
        from quire.kernels.triton.prefix_attention import prefix_attention

        backend, inputs = self.backend, self.inputs
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
                backend.workspace,
                out,
                tile=backend.tile,
                num_warps=backend.num_warps(len(lens)),
                num_stages=backend.stages,
                prefix=pieces,
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
            )
        return out


def query_tiles(query_lens: Int32Array, size: int) -> tuple[Int32Array, Int32Array]:
    """(request, tile of it) for all requests with several new tokens, costly tiles first."""
    counts = np.where(query_lens > 1, -(-query_lens // size), 0)
    requests = np.repeat(np.arange(len(query_lens), dtype=np.int32), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    indices = (np.arange(len(requests)) - first).astype(np.int32)
    order = np.argsort(-indices, kind="stable")
    return requests[order], indices[order]


def _prepare_and_write(heads: Heads, layer: Tensor, slots: Tensor) -> Tensor:
    """Normalise, rotate and store as the heads ask; returns the queries."""
    from quire.kernels.triton.rotary_cache import rotate_and_write

    rotation, norms = heads.rotation, heads.norms
    q, k, v = heads.q, heads.k, heads.v
    if rotation is None:
        assert norms is None, "the kernel normalises heads only where it rotates them"
        return rotate_and_write(q, k, v, layer, slots)
    return rotate_and_write(
        q,
        k,
        v,
        layer,
        slots,
        rotation.positions,
        rotation.cos,
        rotation.sin,
        norms.q_weight if norms is not None else None,
        norms.k_weight if norms is not None else None,
        norms.eps if norms is not None else 0.0,
    )
