"""The layers of a decoder one after the other: as their model says, or fused.

The model's own loop is the specification. `FusedLayers` gives the same with the norm before a
linear layer, and the gates behind it, in the call of that layer; and on a CPU, where Python between
layers costs as much as the arithmetic of one request, with all layers in one call of the library.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from quire.kernels.cpu import decoder as native
from quire.kernels.cpu.lora import native_adapters
from quire.layers.activation import GatedActivation
from quire.layers.attention.cpu import CpuStep
from quire.layers.attention.layer import QKV, Attention, QKNorms, Rotation, StepContext
from quire.layers.linear import Linear, QKVLinear, RowLinear
from quire.layers.norm import Norm, RMSNorm


class NumberedLayers(nn.Module):
    """Layers of one stage under their numbers in the model, as checkpoints name them."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self.numbers = tuple(layers)
        for number, layer in layers.items():
            self.add_module(str(number), layer)

    def __getitem__(self, number: int) -> nn.Module:
        return self.get_submodule(str(number))

    def __iter__(self) -> Iterator[nn.Module]:
        return self.children()

    def __len__(self) -> int:
        return len(self.numbers)


class KeptStreams:
    """What heads that draft read of a step: the residual streams that enter some layers, or what
    the final norm gives. It stays where it is, so that CUDA graphs leave it there too."""

    def __init__(
        self,
        layers: Sequence[int],
        hidden_size: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Of steps of up to `max_tokens`; `BEHIND_NORM` stands for what the final norm gives."""
        self.layers = tuple(layers)
        shape = (max_tokens, len(self.layers), hidden_size)
        self._data = torch.zeros(shape, dtype=dtype, device=device)

    def keep(self, layer: int, x: Tensor) -> None:
        """Takes a copy where `layer` is one of those that are wanted. What fills a graph up behind
        the tokens of a step may be more than there is room for."""
        for place, wanted in enumerate(self.layers):
            if wanted == layer:
                count = min(len(x), len(self._data))
                self._data[:count, place] = x[:count]

    def first(self, num_tokens: int) -> Tensor:
        """Of the last step's tokens, side by side: [T, layers * H]."""
        return self._data[:num_tokens].flatten(1)


BEHIND_NORM = -1


class DecoderLayers(NumberedLayers):
    """Layers that each add to the residual stream, and the norm of what they give; the stream
    itself where there is no norm, before another stage."""

    streams: KeptStreams | None = None

    def forward(
        self, x: Tensor, rotation: Rotation, step: StepContext, norm: Norm | None
    ) -> Tensor:
        for number, layer in zip(self.numbers, self, strict=True):
            self.keep(number, x)
            x = layer(x, rotation, step)
        if norm is None:
            return x
        x = norm(x)
        self.keep(BEHIND_NORM, x)
        return x

    def keep(self, layer: int, x: Tensor) -> None:
        if self.streams is not None:
            self.streams.keep(layer, x)

    def is_kept(self, layer: int) -> bool:
        """Whether the residual stream that enters a layer is wanted."""
        return self.streams is not None and layer in self.streams.layers


@dataclass(frozen=True)
class LayerParts:
    """A layer that adds attention to the residual stream, then a network of act(gate) * up, each
    of the stream's norm."""

    attention_norm: RMSNorm
    qkv: QKVLinear
    qk_norms: QKNorms | None
    attend: Attention
    output: Linear
    network_norm: RMSNorm
    gate_up: Linear
    activation: GatedActivation
    down: RowLinear

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, step: StepContext
    ) -> tuple[Tensor, Tensor]:
        """Adds `x` to the residual stream (None: starts it); returns the next addend and it."""
        joined, residual = self.qkv.after_norm(self.attention_norm, x, residual)
        qkv = QKV(*self.qkv.split(joined), rotation, self.qk_norms)
        x = self.output(self.attend(qkv, step))
        gated = self.down.gated_matrix(len(x)) if self.activation.is_silu else None
        if gated is not None:
            gate_up, residual = self.gate_up.after_norm(self.network_norm, x, residual)
            return self.down.after_gates(gated, gate_up), residual
        inner, residual = self.gate_up.after_norm(self.network_norm, x, residual, self.activation)
        return self.down(inner), residual


@dataclass(frozen=True)
class LayerRun:
    """Consecutive layers whose keys and values lie in consecutive slots of one KV group."""

    layers: Sequence[LayerParts]
    decoder: native.Decoder | None
    """All of them in one call of the library, where their weights allow it."""

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, step: StepContext
    ) -> tuple[Tensor, Tensor | None]:
        first = self.layers[0].attend
        attention = step.attention[first.kv_group]
        if self.decoder is not None and isinstance(attention, CpuStep):
            stream = x if residual is None else x + residual
            tokens = self.layers[0].qkv.method.tokens
            return attention.decode(self.decoder, stream, rotation, first.layer_slot, tokens)
        for layer in self.layers:
            x, residual = layer.forward(x, residual, rotation, step)
        return x, residual


class FusedLayers(DecoderLayers):
    """The same layers under the same names, carried out by their parts."""

    def __init__(self, layers: DecoderLayers, parts: Sequence[LayerParts]) -> None:
        super().__init__({number: layers[number] for number in layers.numbers})
        self.parts = parts

    def forward(
        self, x: Tensor, rotation: Rotation, step: StepContext, norm: Norm | None
    ) -> Tensor:
        residual = None
        for run in self.runs:
            first = run.layers[0].attend.layer_index
            if self.is_kept(first):
                self.keep(first, x if residual is None else x + residual)
            x, residual = run.forward(x, residual, rotation, step)
        if norm is None:
            return x if residual is None else x + residual
        x = norm.add_and_normalize(x, residual)[0]
        self.keep(BEHIND_NORM, x)
        return x

    def forget_runs(self) -> None:
        """The parts are not what they were."""
        self.__dict__.pop("runs", None)

    @cached_property
    def runs(self) -> list[LayerRun]:
        """Made at the first step: by then weights are loaded, layers bound to their groups, and it
        is known which streams are kept."""
        runs: list[list[LayerParts]] = []
        for layer in self.parts:
            place = (layer.attend.kv_group, layer.attend.layer_slot - 1)
            last = runs[-1][-1].attend if runs else None
            follows = last is not None and (last.kv_group, last.layer_slot) == place
            if not follows or self.is_kept(layer.attend.layer_index):
                runs.append([])
            runs[-1].append(layer)
        return [LayerRun(layers, _native_decoder(layers)) for layers in runs]


def _native_decoder(layers: Sequence[LayerParts]) -> native.Decoder | None:
    weights = [_weights(layer) for layer in layers]
    known = [one for one in weights if one is not None]
    return native.Decoder(known) if len(known) == len(weights) else None


def _weights(layer: LayerParts) -> native.LayerWeights | None:
    """A layer as the library takes it; None where a weight is not one packed matrix, or where the
    network has gates of another kind."""
    linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
    products = [_product(linear) for linear in linears]
    known = [product for product in products if product is not None]
    if len(known) < len(products) or not layer.activation.is_silu:
        return None
    if layer.output.parallel.size > 1:
        return None  # ranks meet within a layer
    qkv, output, gate_up, down = known
    norms = layer.qk_norms
    return native.LayerWeights(
        _norm(layer.attention_norm),
        qkv,
        None
        if norms is None
        else (native.Norm(norms.q_weight, norms.eps), native.Norm(norms.k_weight, norms.eps)),
        output,
        _norm(layer.network_norm),
        gate_up,
        down,
        layer.qkv.heads[0],
        layer.attend.scale,
        layer.attend.window,
        layer.attend.softcap,
    )


def _norm(norm: RMSNorm) -> native.Norm:
    return native.Norm(norm.weight, norm.eps)


def _product(linear: Linear) -> native.Product | None:
    if len(linear.matrices) != 1:
        return None
    handle = linear.matrices[0].handle
    if handle is None:
        return None
    adapters = linear.method.adapters
    return native.Product(
        handle, linear.bias, None if adapters is None else native_adapters(adapters)
    )
