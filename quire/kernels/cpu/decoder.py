"""All layers of a decoder in one call of the library: what Python does between them would take a
third of a step with one request."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.adapter_pool import AdapterTokens
from quire.kernels.cpu.attention import NO_WINDOW, QKVStep
from quire.kernels.cpu.library import (
    AttentionCall,
    MatrixHandle,
    NativeMatrix,
    QKVCall,
    WriteCall,
    native,
    num_threads,
    require_rows,
)
from quire.kernels.cpu.lora import NativeAdapters, slots_address


class DecoderLayer(ctypes.Structure):
    """Mirrors `DecoderLayer` in src/decoder.h."""

    _fields_ = (
        ("qkv", NativeMatrix),
        ("output", NativeMatrix),
        ("gate_up", NativeMatrix),
        ("down", NativeMatrix),
        ("qkv_bias", ctypes.c_void_p),
        ("output_bias", ctypes.c_void_p),
        ("gate_up_bias", ctypes.c_void_p),
        ("down_bias", ctypes.c_void_p),
        ("attention_norm", ctypes.c_void_p),
        ("network_norm", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("qkv_adapters", ctypes.c_void_p),
        ("output_adapters", ctypes.c_void_p),
        ("gate_up_adapters", ctypes.c_void_p),
        ("down_adapters", ctypes.c_void_p),
        ("attention_eps", ctypes.c_float),
        ("network_eps", ctypes.c_float),
        ("head_eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int32),
    )


class DecoderCall(ctypes.Structure):
    """Mirrors `DecoderCall` in src/decoder.h."""

    _fields_ = (
        ("layers", ctypes.POINTER(DecoderLayer)),
        ("caches", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("addend", ctypes.c_void_p),
        ("qkv", ctypes.c_void_p),
        ("attended", ctypes.c_void_p),
        ("inner", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("num_tokens", ctypes.c_int64),
        ("num_layers", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )


@dataclass(frozen=True)
class Product:
    """A matrix in the library's format, with its bias."""

    matrix: MatrixHandle
    bias: Tensor | None
    adapters: NativeAdapters | None = None


@dataclass(frozen=True)
class Norm:
    weight: Tensor
    eps: float


@dataclass(frozen=True)
class LayerWeights:
    """One layer: attention and a network of silu(gate) * up, each after an RMSNorm."""

    attention_norm: Norm
    qkv: Product
    qk_norms: tuple[Norm, Norm] | None
    """Of queries and keys."""
    output: Product
    network_norm: Norm
    gate_up: Product
    down: Product
    num_heads: int
    scale: float
    window: int | None
    softcap: float | None


class Decoder:
    """Layers of equal shape. It holds addresses, and the weights with them."""

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        self._weights = layers
        self._layers = (DecoderLayer * len(layers))(*map(_native_layer, layers))
        self._entry = native().quire_decode
        calls = (DecoderCall, QKVCall, WriteCall, AttentionCall)
        self._entry.argtypes = tuple(ctypes.POINTER(call) for call in calls)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def run(
        self,
        x: Tensor,
        step: QKVStep,
        caches: ctypes.Array[ctypes.c_void_p],
        tokens: AdapterTokens | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The layers over x [tokens, hidden], which becomes the residual: what is still to be
        added to it, and it. `step` knows the rotation; `caches` are keys and values by layer;
        `tokens` the adapters in use, if any is."""
        first = self._layers[0]
        hidden, q_width = first.qkv.num_inputs, first.output.num_inputs
        if require_rows("x", x, hidden) != hidden or len(caches) != 2 * len(self._layers):
            raise ValueError(f"x must be contiguous, with a cache for each of {len(self._layers)}")
        num_tokens = x.shape[0]
        addend = torch.empty(num_tokens, hidden)
        widths = (first.qkv.num_outputs, q_width, first.down.num_inputs)
        qkv, attended, inner = (torch.empty(num_tokens, width) for width in widths)
        call = DecoderCall(
            self._layers,
            ctypes.addressof(caches),
            x.data_ptr(),
            addend.data_ptr(),
            qkv.data_ptr(),
            attended.data_ptr(),
            inner.data_ptr(),
            None if tokens is None else slots_address(tokens, num_tokens),
            num_tokens,
            len(self._layers),
            num_threads(),
        )
        if self._entry(call, *step.calls(self._weights[0].num_heads)) != 0:
            raise MemoryError("no memory for the working space of the layers")
        return addend, x


def _native_layer(layer: LayerWeights) -> DecoderLayer:
    q_norm, k_norm = layer.qk_norms or (None, None)
    products = (layer.qkv, layer.output, layer.gate_up, layer.down)
    return DecoderLayer(
        *(product.matrix.contents for product in products),
        *(_address(product.bias) for product in products),
        _address(layer.attention_norm.weight),
        _address(layer.network_norm.weight),
        None if q_norm is None else _address(q_norm.weight),
        None if k_norm is None else _address(k_norm.weight),
        *(None if one.adapters is None else one.adapters.address for one in products),
        layer.attention_norm.eps,
        layer.network_norm.eps,
        0.0 if q_norm is None else q_norm.eps,
        layer.scale,
        layer.softcap or 0.0,
        NO_WINDOW if layer.window is None else min(layer.window, NO_WINDOW),
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
