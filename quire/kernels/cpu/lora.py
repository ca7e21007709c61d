"""Low-rank adapters in the native library: for the outputs of one layer, or within the calls of
linear layers and decoders."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from quire.kernels.adapter_pool import AdapterPool, AdapterSlice, AdapterTokens, LayerAdapters
from quire.kernels.cpu.library import native, num_threads, require_column, require_rows


class NativeSlice(ctypes.Structure):
    """Mirrors `AdapterSlice` in src/adapters.h."""

    _fields_ = (
        ("counts", ctypes.c_void_p),
        ("vectors", ctypes.c_void_p),
        ("a_offset", ctypes.c_int64),
        ("a_stride", ctypes.c_int64),
        ("b_offset", ctypes.c_int64),
        ("b_stride", ctypes.c_int64),
        ("bias_offset", ctypes.c_int64),
        ("gains_offset", ctypes.c_int64),
        ("first", ctypes.c_int32),
        ("num_outputs", ctypes.c_int32),
    )


class NativeLayer(ctypes.Structure):
    """Mirrors `Adapters` in src/adapters.h."""

    _fields_ = (
        ("slices", ctypes.c_void_p),
        ("chunks", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("chunk_stride", ctypes.c_int64),
        ("slot_stride", ctypes.c_int64),
        ("num_slices", ctypes.c_int32),
        ("max_chunks", ctypes.c_int32),
        ("num_inputs", ctypes.c_int32),
    )


class NativeAdapters:
    """The adapters of a layer as the library takes them. It holds addresses of their pool."""

    def __init__(self, pool: AdapterPool, slices: Sequence[AdapterSlice]) -> None:
        assert pool.chunks.dtype == torch.float32 and pool.tables.dtype == torch.int32
        self.slots = len(pool.tables)
        self._slices = (NativeSlice * len(slices))(*map(_native_slice, slices))
        self._layer = NativeLayer(
            ctypes.addressof(self._slices),
            pool.chunks.data_ptr(),
            pool.tables.data_ptr(),
            pool.chunks.stride(0),
            pool.tables.stride(0),
            len(slices),
            pool.max_chunks,
            slices[0].num_inputs,
        )
        self.address = ctypes.addressof(self._layer)


def _native_slice(one: AdapterSlice) -> NativeSlice:
    return NativeSlice(
        one.counts.data_ptr(),
        one.vectors.data_ptr(),
        one.a_offset,
        one.a_stride,
        one.b_offset,
        one.b_stride,
        one.bias_offset,
        one.gains_offset,
        one.first,
        one.num_outputs,
    )


_native_adapters: WeakKeyDictionary[LayerAdapters, NativeAdapters] = WeakKeyDictionary()


def native_adapters(adapters: LayerAdapters) -> NativeAdapters:
    """The same for each call."""
    found = _native_adapters.get(adapters)
    if found is None:
        found = _native_adapters[adapters] = NativeAdapters(adapters.pool, adapters.slices)
    return found


def slots_address(tokens: AdapterTokens, num_tokens: int) -> int:
    require_column("slots", tokens.slots, torch.int32, num_tokens)
    return tokens.slots.data_ptr()


def add_adapters(
    x: Tensor, out: Tensor, bias: Tensor | None, adapters: LayerAdapters, tokens: AdapterTokens
) -> None:
    """Adds to out [tokens, outputs] = x W^T + bias what the adapters of the tokens add to it. Each
    token gets the same bits in any company."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    x_stride = require_rows("x", x, adapters.slices[0].num_inputs)
    num_tokens, num_outputs = out.shape
    status = _entry()(
        native_adapters(adapters).address,
        slots_address(tokens, num_tokens),
        x.data_ptr(),
        x_stride,
        num_tokens,
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        require_rows("out", out, num_outputs),
        num_outputs,
        num_threads(),
    )
    if status != 0:
        raise MemoryError("no memory for the working space of adapters")


@cache
def _entry() -> ctypes._NamedFuncPointer:
    return native().quire_add_adapters
