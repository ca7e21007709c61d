"""A quantisation method of 4 bits for tests, like those of GPTQ's kind: eight weights of a row in a
word, a scale for each group of inputs, a scale for the whole tensor."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.layers.weights import Axis, Build, MatrixLayer, NormWeight, Shard, ShardKey

GROUP = 16
WORD = 8


def quantize(weight: Tensor) -> dict[str, Tensor]:
    """Checkpoint tensors of a weight [outputs, inputs]."""
    groups = weight.view(len(weight), -1, GROUP)
    scales = groups.abs().amax(-1, keepdim=True) / 7
    whole = ((groups / scales).round() + 8).clamp(0, 15).view(len(weight), -1, WORD).long()
    words = (whole << 4 * torch.arange(WORD)).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return {
        "qweight": words.int(),
        "scales": (scales.squeeze(-1) * 4).half(),
        "global_scale": torch.tensor(0.25),
    }


def dequantize(words: Tensor, scales: Tensor) -> Tensor:
    whole = (words.unsqueeze(-1) >> 4 * torch.arange(WORD, dtype=torch.int32)) & 15
    groups = (whole - 8).view(len(words), -1, GROUP) * scales.float().unsqueeze(-1)
    return groups.view(len(words), -1)


def counted_in(axis: Axis, unit: int) -> Axis:
    """The same dimension with one entry for every `unit` of it."""
    return tuple(
        replace(shard, full=shard.full // unit, start=shard.start // unit, size=shard.size // unit)
        for shard in axis
    )


class FourBits:
    reads_blocks = False
    adapters = None
    tokens = None

    def extra_bytes(self, layer: MatrixLayer, shard_key: ShardKey, stored: str | None) -> int:
        return 0

    def create_weights(self, layer: MatrixLayer, outputs: Axis, inputs: Axis, build: Build) -> None:
        words, groups = counted_in(inputs, WORD), counted_in(inputs, GROUP)
        layer.add_weight("qweight", (outputs, words), build, torch.int32)
        layer.add_weight("scales", (outputs, groups), build, torch.float16)
        by_shard = tuple(Shard(1, 0, 1, shard.name) for shard in outputs)
        layer.add_weight("global_scale", (by_shard,), build, torch.float32)

    def finish_loading(self, layer: MatrixLayer) -> None:
        """Applies the scale of each shard to those of its groups."""
        outputs, scales = layer.axes["qweight"][0], layer.get_parameter("scales")
        shards = scales.split([shard.size for shard in outputs])
        for shard, factor in zip(shards, layer.get_parameter("global_scale"), strict=True):
            shard.mul_(factor)

    def apply(
        self, layer: MatrixLayer, x: Tensor, bias: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        weight = dequantize(layer.get_parameter("qweight"), layer.get_parameter("scales"))
        result = F.linear(x, weight.to(x.dtype), bias)
        return result if out is None else out.copy_(result)

    def rows(self, layer: MatrixLayer, ids: Tensor) -> Tensor:
        words, scales = layer.get_parameter("qweight"), layer.get_parameter("scales")
        return dequantize(words[ids], scales[ids])

    def apply_after_norm(
        self,
        layer: MatrixLayer,
        x: Tensor,
        residual: Tensor | None,
        norm: NormWeight,
        bias: Tensor | None,
        gated: bool,
    ) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        out = self.apply(layer, F.rms_norm(total, total.shape[-1:], norm.weight, norm.eps), bias)
        if gated:
            gate, up = out.chunk(2, dim=-1)
            out = F.silu(gate) * up
        return out, total
