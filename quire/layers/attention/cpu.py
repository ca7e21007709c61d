"""Attention on a CPU in float32, by the native library."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from quire.config.latent import LatentConfig
from quire.kernels import cpu
from quire.kernels.adapter_pool import AdapterTokens
from quire.kernels.cpu.attention import QKVStep, kv_addresses
from quire.kernels.cpu.decoder import Decoder
from quire.layers.attention.backend import (
    AttentionBackend,
    AttentionInputs,
    BackendSupport,
    KVScales,
)
from quire.layers.attention.layer import QKV, AttentionStep, LatentQKV, Rotation
from quire.protocol.kv_spec import BLOCK_SIZES


class CpuBackend(AttentionBackend):
    """All rows of a step in one call, shared among the library's threads."""

    support: ClassVar[BackendSupport] = BackendSupport(
        name="cpu",
        device_types=("cpu",),
        dtypes=(torch.float32,),
        narrow_caches=(torch.float16,),
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
        assert scales is None, "no type of 8 bits is declared"
        self.layers = kv.unbind(0)
        self.caches = [kv_addresses(layer) for layer in self.layers]
        addresses = [address for layer in self.caches for address in layer]
        self.cache_array = (ctypes.c_void_p * len(addresses))(*addresses)

    @classmethod
    def missing(cls) -> str | None:
        is_there, description = cpu.available()
        return None if is_there else description

    @classmethod
    def describe(cls) -> str:
        return f"cpu ({cpu.available()[1]})"

    def plan(self, inputs: AttentionInputs) -> CpuStep:
        return CpuStep(self.layers[0], self.caches, self.cache_array, inputs)


class CpuStep(AttentionStep):
    """A step over the layers of a cache."""

    def __init__(
        self,
        kv_layer: Tensor,
        caches: list[tuple[int, int]],
        cache_array: ctypes.Array[ctypes.c_void_p],
        inputs: AttentionInputs,
    ) -> None:
        self.caches, self.cache_array = caches, cache_array
        self.inputs = inputs  # the step holds addresses of these tensors
        self.step = QKVStep(
            kv_layer, inputs.slots, inputs.query_start, inputs.context_lens, inputs.block_tables
        )

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
            absorbed = qkv.absorbed()
            # The library has values as long as keys: what it makes of the last ones is cut away.
            whole = replace(absorbed, v=absorbed.k)
            mixed = self.attend(layer_index, whole, scale, window, softcap)
            return qkv.expansion.from_latent(mixed[..., : qkv.kv_rank])
        rotation, norms = qkv.rotation, qkv.norms
        if rotation is not None:
            self._set_rotation(rotation)
        else:
            self.step.clear_rotation()
        if norms is not None:
            self.step.set_norms(norms.q_weight, norms.k_weight, norms.eps)
        else:
            self.step.set_norms(None, None, 0.0)
        caches = self.caches[layer_index]
        return self.step.attend(caches, qkv.q, qkv.k, qkv.v, scale, window, softcap, sinks)

    def _set_rotation(self, rotation: Rotation) -> None:
        self.step.set_rotation(rotation.cos, rotation.sin, rotation.positions, rotation.interleaved)

    def decode(
        self,
        decoder: Decoder,
        x: Tensor,
        rotation: Rotation,
        first_slot: int,
        adapters: AdapterTokens | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Layers in consecutive slots at once; see `Decoder.run`."""
        self._set_rotation(rotation)
        caches = self.cache_array
        if decoder.num_layers != len(self.caches):
            assert first_slot + decoder.num_layers <= len(self.caches)
            address = ctypes.addressof(caches) + 2 * first_slot * ctypes.sizeof(ctypes.c_void_p)
            caches = (ctypes.c_void_p * (2 * decoder.num_layers)).from_address(address)
        return decoder.run(x, self.step, caches, adapters)
