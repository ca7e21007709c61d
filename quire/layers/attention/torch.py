"""Attention in plain torch, on any device: the specification, and the fallback."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from quire.config.latent import LatentConfig
from quire.kernels.torch.attention import paged_attention, write_kv
from quire.layers.attention.backend import (
    AttentionBackend,
    AttentionInputs,
    BackendSupport,
    KVScales,
)
from quire.layers.attention.layer import QKV, AttentionStep, LatentQKV
from quire.protocol.kv_spec import BLOCK_SIZES


class TorchBackend(AttentionBackend):
    """Works everywhere, one request at a time."""

    support: ClassVar[BackendSupport] = BackendSupport(
        name="torch",
        device_types=None,
        dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
        narrow_caches=(torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
        block_sizes=BLOCK_SIZES,
        head_dims=None,
        sliding_window=True,
        pairs=True,
        latent=True,
        batch_invariant=True,
        cuda_graphs=False,
    )

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
        self.layers = kv.unbind(0)
        self.scales = scales

    @classmethod
    def missing(cls) -> str | None:
        return None

    @classmethod
    def describe(cls) -> str:
        return "torch (plain torch, one request at a time)"

    def plan(self, inputs: AttentionInputs) -> TorchStep:
        # The reference reads lengths on the host: fetch them once, not in every layer.
        on_host = replace(
            inputs,
            query_start=inputs.query_start.cpu(),
            context_lens=inputs.context_lens.cpu(),
        )
        return TorchStep(self.layers, self.scales, on_host)


class TorchStep(AttentionStep):
    """A step over the layers of a cache."""

    def __init__(
        self, layers: tuple[Tensor, ...], scales: KVScales | None, inputs: AttentionInputs
    ) -> None:
        self.layers, self.scales = layers, scales
        self.inputs = inputs

    def attend(
        self,
        layer_index: int,
        qkv: QKV | LatentQKV,
        scale: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if isinstance(qkv, LatentQKV):
            mixed = self.attend(layer_index, qkv.absorbed(), scale, window, softcap)
            return qkv.expansion.from_latent(mixed)
        q, k, v = qkv.prepared()
        layer, inputs = self.layers[layer_index], self.inputs
        scales: Tensor | None = None
        given: Tensor | None = None
        if self.scales is not None:
            scales, given = self.scales.stored[layer_index], self.scales.given[layer_index]
        write_kv(layer, k, v, inputs.slots, scales, given)
        return paged_attention(
            q,
            layer,
            inputs.query_start,
            inputs.context_lens,
            inputs.block_tables,
            scale,
            window,
            scales,
            softcap,
            sinks,
            v.shape[-1],
        )
