"""Layers of a decoder that the native library can carry out in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.kernels.cpu import decoder as native
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm


@dataclass(frozen=True)
class DecoderLayerParts:
    """A layer that normalises, attends, normalises and applies a network of silu(gate) * up."""

    attention_norm: RMSNorm
    qkv: Linear
    head_norms: tuple[RMSNorm, RMSNorm] | None
    output: Linear
    network_norm: RMSNorm
    gate_up: Linear
    down: Linear
    num_heads: int
    scale: float
    window: int | None


def native_decoder(layers: Sequence[DecoderLayerParts]) -> native.Decoder | None:
    """The layers as the library takes them; None where a weight is not one packed matrix."""
    weights = [_weights(layer) for layer in layers]
    known = [one for one in weights if one is not None]
    return native.Decoder(known) if known and len(known) == len(weights) else None


def _weights(layer: DecoderLayerParts) -> native.LayerWeights | None:
    linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
    products = [_product(linear) for linear in linears]
    known = [product for product in products if product is not None]
    if len(known) < len(products):
        return None
    qkv, output, gate_up, down = known
    norms = None
    if layer.head_norms is not None:
        norms = (_norm(layer.head_norms[0]), _norm(layer.head_norms[1]))
    return native.LayerWeights(
        _norm(layer.attention_norm),
        qkv,
        norms,
        output,
        _norm(layer.network_norm),
        gate_up,
        down,
        layer.num_heads,
        layer.scale,
        layer.window,
    )


def _norm(norm: RMSNorm) -> native.Norm:
    return native.Norm(norm.weight, norm.eps)


def _product(linear: Linear) -> native.Product | None:
    if len(linear.matrices) != 1:
        return None
    handle = linear.matrices[0].native_handle
    return None if handle is None else native.Product(handle, linear.bias)
