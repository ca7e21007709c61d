"""Which kernel attends with the queries of prompts, and in tiles of which size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


@dataclass(frozen=True)
class PrefillKernel:
    """A kernel and the number of queries that one of its tiles has."""

    attend: Callable[..., None]
    """Called with (q, kv_layer, query_start, context_lens, block_tables, tile_requests,
    tile_indices, scale, window, out), `scales` of a cache in 8 bits, `softcap`, and `sinks`."""
    queries: int
    name: str


def choose_prefill(kv: Tensor, num_heads: int, num_kv_heads: int) -> PrefillKernel:
    """The kernel for a cache [layers, 2, blocks, num_kv_heads, block_size, head_dim]."""
    hopper = is_hopper(kv.device) and kv.element_size() <= 2
    if hopper and fits_hopper_kernel(kv):
        from quire.kernels.hopper import prefill_attention as kernel

        queries = kernel.TILE_ROWS // kernel.packed_heads(num_heads, num_kv_heads)
        return PrefillKernel(kernel.prefill_attention, queries, "the kernel for Hopper")
    from quire.kernels.triton.prefill_attention import PrefillTiles, prefill_attention

    row_bytes = tile_row_bytes(kv)
    if hopper and row_bytes <= 256 and kv.element_size() == 1:
        tiles = PrefillTiles(64, 128, num_warps=4, num_stages=2)
    elif hopper and row_bytes <= 256:
        tiles = PrefillTiles(128, 64, num_warps=8, num_stages=3, max_registers=128)
    elif hopper and row_bytes <= 512:
        tiles = PrefillTiles(128, 64, num_warps=8, num_stages=2)
    elif row_bytes <= 512:
        tiles = PrefillTiles(64, 32, num_warps=4, num_stages=2)
    else:
        tiles = PrefillTiles(32, 16, num_warps=4, num_stages=2)
    attend = partial(prefill_attention, tiles=tiles)
    return PrefillKernel(attend, tiles.queries, "the portable kernel")


def tile_row_bytes(kv: Tensor) -> int:
    """Bytes of a row of the cache, by which tiles of many queries get their size; numbers of 8 bits
    are widened to 16. On Turing, where a program has 64 KiB of shared memory and not 96 or more, a
    row counts twice."""
    return kv.shape[-1] * max(kv.element_size(), 2) * (2 if is_turing(kv.device) else 1)


def is_hopper(device: torch.device) -> bool:
    return _has_capability(device, (9, 0))


def is_turing(device: torch.device) -> bool:
    return _has_capability(device, (7, 5))


def _has_capability(device: torch.device, capability: tuple[int, int]) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) == capability


def fits_hopper_kernel(kv: Tensor) -> bool:
    """It copies whole blocks of 16-bit numbers, of at least 8 slots and rows of a multiple of 16
    bytes, holds results of up to 128 values a row, and is written in Gluon as it is since Triton
    3.6."""
    import triton

    block_size, head_dim = kv.shape[-2:]
    is_known = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)
    has_size = 64 <= head_dim <= 128 and head_dim % 8 == 0 and block_size >= 8
    return is_known and has_size and kv.element_size() == 2
