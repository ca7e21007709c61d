"""Mixtures of experts in the native library: routing, and the experts of a layer that are in use,
all in one call.

`quire.kernels.torch.experts` has the references.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from quire.config.experts import ClampedGate, ExpertsConfig
from quire.kernels.cpu.library import (
    MatrixHandle,
    NativeMatrix,
    native,
    num_threads,
    require_column,
    require_rows,
)
from quire.kernels.torch.experts import Routing

SCORINGS = ("softmax", "softmax_of_chosen", "sigmoid")
"""`Scoring` in src/routing.h."""


class RoutingCall(ctypes.Structure):
    """Mirrors `RoutingCall` in src/routing.h."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("chosen", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("num_experts", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("num_groups", ctypes.c_int32),
        ("top_groups", ctypes.c_int32),
        ("scoring", ctypes.c_int32),
        ("normalizes", ctypes.c_int32),
        ("factor", ctypes.c_float),
        ("num_threads", ctypes.c_int32),
    )


class ExpertsCall(ctypes.Structure):
    """Mirrors `ExpertsCall` in src/experts.h."""

    _fields_ = (
        ("gate_up", ctypes.POINTER(NativeMatrix)),
        ("down", ctypes.POINTER(NativeMatrix)),
        ("gate_up_bias", ctypes.c_void_p),
        ("down_bias", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("chosen", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("first_expert", ctypes.c_int32),
        ("num_experts", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
        ("limit", ctypes.c_float),
        ("slope", ctypes.c_float),
        ("num_threads", ctypes.c_int32),
    )


class NativeExperts:
    """Experts number `first_expert` and up: silu(x G^T) * (x U^T) times D^T, with the rows of G and
    then those of U in `gate_up`. It holds addresses: the matrices must outlive it.

    `gate_up_bias` and `down_bias` [experts, outputs] are added to the products; the gate may be
    another one.
    """

    def __init__(
        self,
        gate_up: Sequence[MatrixHandle],
        down: Sequence[MatrixHandle],
        first_expert: int = 0,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        gate: ClampedGate | None = None,
    ) -> None:
        self._gate_up = (NativeMatrix * len(gate_up))(*(one.contents for one in gate_up))
        self._down = (NativeMatrix * len(down))(*(one.contents for one in down))
        self._first_expert = first_expert
        self._gate = (0.0, 0.0) if gate is None else (gate.limit, gate.slope)
        self._hidden, inner = self._gate_up[0].num_inputs, self._down[0].num_inputs
        for wide, narrow in zip(self._gate_up, self._down, strict=True):
            shapes = (wide.num_outputs, wide.num_inputs), (narrow.num_outputs, narrow.num_inputs)
            if shapes != ((2 * inner, self._hidden), (self._hidden, inner)):
                raise ValueError(
                    f"experts must be alike, [{2 * inner}, {self._hidden}] and "
                    f"[{self._hidden}, {inner}]; got {list(shapes[0])} and {list(shapes[1])}"
                )
        self._biases = gate_up_bias, down_bias
        for bias, width in ((gate_up_bias, 2 * inner), (down_bias, self._hidden)):
            if bias is not None and (
                require_rows("bias", bias, width) != width or len(bias) != len(gate_up)
            ):
                raise ValueError(f"biases must be contiguous, with {len(gate_up)} rows")

    def run(self, x: Tensor, routing: Routing) -> Tensor:
        """The weighted sum over a token's experts, for x [tokens, hidden] in float32; experts of
        other numbers are left out."""
        x_stride = require_rows("x", x, self._hidden)
        chosen, weights = routing.experts.contiguous(), routing.weights.contiguous()
        if chosen.dtype != torch.int32 or weights.dtype != torch.float32:
            raise ValueError(
                f"experts must be int32 and weights float32; got {chosen.dtype}, {weights.dtype}"
            )
        num_tokens, top_k = chosen.shape
        if weights.shape != chosen.shape or num_tokens != len(x):
            raise ValueError(
                f"experts and weights must be [{len(x)}, top_k]; got {list(chosen.shape)} and "
                f"{list(weights.shape)}"
            )
        out = torch.empty(num_tokens, self._hidden)
        call = ExpertsCall(
            self._gate_up,
            self._down,
            *(None if bias is None else bias.data_ptr() for bias in self._biases),
            x.data_ptr(),
            chosen.data_ptr(),
            weights.data_ptr(),
            out.data_ptr(),
            x_stride,
            num_tokens,
            self._first_expert,
            len(self._gate_up),
            top_k,
            *self._gate,
            num_threads(),
        )
        if _experts_entry()(call) != 0:
            raise MemoryError("no memory for the working space of experts")
        return out


def route(logits: Tensor, config: ExpertsConfig, bias: Tensor | None = None) -> Routing:
    """The experts of each token by its router logits [tokens, experts] in float32; `bias` [experts]
    is the score correction of sigmoid routers. Of equals the first is chosen."""
    stride = require_rows("logits", logits, config.count)
    if (bias is None) == (config.scoring == "sigmoid"):
        raise ValueError(f"sigmoid routers alone have a bias; scoring is {config.scoring!r}")
    if bias is not None:
        require_column("bias", bias, torch.float32, config.count)
    shape = (len(logits), config.top_k)
    chosen, weights = torch.empty(shape, dtype=torch.int32), torch.empty(shape)
    call = RoutingCall(
        logits.data_ptr(),
        None if bias is None else bias.data_ptr(),
        chosen.data_ptr(),
        weights.data_ptr(),
        stride,
        shape[0],
        config.count,
        config.top_k,
        config.num_groups,
        config.top_groups,
        SCORINGS.index(config.scoring),
        config.normalizes,
        config.factor,
        num_threads(),
    )
    if _route_entry()(call) != 0:
        raise MemoryError("no memory for the working space of a router")
    return Routing(chosen, weights)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) in float32, the same for a number wherever it is; torch computes the last
    ones of a tensor otherwise."""
    if x.dtype != torch.float32 or not x.is_cpu or not x.is_contiguous():
        raise ValueError(f"x must be contiguous float32 on the CPU; got {x.dtype} on {x.device}")
    out = torch.empty(x.shape)
    _sigmoid_entry()(x.data_ptr(), x.numel(), out.data_ptr())
    return out


# To look a function of the library up takes longer than to call it.


@cache
def _experts_entry() -> ctypes._NamedFuncPointer:
    entry = native().quire_experts
    entry.argtypes = (ctypes.POINTER(ExpertsCall),)
    return entry


@cache
def _route_entry() -> ctypes._NamedFuncPointer:
    entry = native().quire_route
    entry.argtypes = (ctypes.POINTER(RoutingCall),)
    return entry


@cache
def _sigmoid_entry() -> ctypes._NamedFuncPointer:
    entry = native().quire_sigmoid
    entry.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
    entry.restype = None
    return entry
