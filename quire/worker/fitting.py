"""What a model needs of each device, and the refusal of one that devices have no room for, before
anything is read or fetched."""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.config.device import DeviceInfo
from quire.config.model import ModelConfig
from quire.config.options import EngineOptions
from quire.config.resolve import even_sizes
from quire.layers.parallel import Parallel, Stage
from quire.models.loader import ONE_RANK, count_weight_bytes
from quire.protocol.kv_spec import KVSpec
from quire.worker.memory import Remedies, check_weights_fit, device_memory

ROOM_FOR_STEPS = 1 / 16
"""Of the memory that is allowed: what steps and a small KV cache need beside weights."""


def kv_specs(
    options: EngineOptions, config: ModelConfig, parallel: Parallel = ONE_RANK
) -> list[KVSpec]:
    """What each layer keeps on one rank. A window that reaches over the longest request is none."""
    num_kv_heads = parallel.heads(config.num_heads, config.num_kv_heads).kv_count
    dtype = options.cache.kv_cache_dtype
    assert options.model.max_model_len is not None
    specs = []
    for layer in range(config.num_layers):
        window = config.layer_window(layer)
        if window is not None and window >= options.model.max_model_len:
            window = None
        is_latent = config.latent is not None
        specs.append(KVSpec(num_kv_heads, config.head_dim, dtype, window, is_latent))
    return specs


def kv_token_bytes(
    options: EngineOptions, config: ModelConfig, parallel: Parallel = ONE_RANK
) -> int:
    """KV cache of a token that all layers of a rank still see."""
    specs = kv_specs(options, config, parallel)
    return sum(specs[layer].bytes_per_token for layer in parallel.stage.layers(config.num_layers))


def check_before_fetch(options: EngineOptions, config: ModelConfig, device: DeviceInfo) -> None:
    """`check_model_fits` for the ranks that options ask for, by the configuration alone. What other
    programs hold of a GPU is left aside: they may be gone when weights are there."""
    wanted = options.parallel
    if wanted.distributed_executor_backend == "ray":
        return  # its devices are not known yet
    if device.type == "cpu":
        device = replace(device, num_sharing=wanted.num_ranks // wanted.nnodes)
    num_stages = wanted.pipeline_parallel_size
    for stage in sorted({0, num_stages // 2, num_stages - 1}):
        parallel = Parallel(
            0,
            wanted.tensor_parallel_size,
            stage=Stage(stage, num_stages),
            expert_parallel=wanted.enable_expert_parallel,
        )
        memory = None if device.type == "cpu" else (device.total_memory_bytes,) * 2
        check_model_fits(options.replace(load_format="dummy"), config, device, parallel, memory)


def check_model_fits(
    options: EngineOptions,
    config: ModelConfig,
    device: DeviceInfo,
    parallel: Parallel,
    memory: tuple[int, int] | None = None,
    draft_bytes: int = 0,
) -> None:
    """Refuse a model whose weights alone, with those of a draft model, are too large for a rank;
    `memory` is what its device has, and what of it is free."""

    def count(parallel: Parallel) -> int:
        return count_weight_bytes(
            config,
            dtype=getattr(torch, options.model.dtype),
            device=device.type,
            load_format=options.model.load_format,
            quantization=options.model.quantization,
            parallel=parallel,
        )

    def enough_ranks(allowed: int) -> tuple[int, int] | None:
        """How many ranks of which devices with so much memory have room, and the weights of each:
        of numbers that divide heads."""
        least = -(-weight_bytes * parallel.size // max(allowed, 1))
        for size in even_sizes(config):
            if size > parallel.size and size >= least:
                each = count(replace(parallel, rank=0, size=size, group=None))
                if each <= allowed * (1 - ROOM_FOR_STEPS):
                    return size, each
        return None

    weight_bytes = count(parallel)
    token_bytes = kv_token_bytes(options, config, parallel)
    check_weights_fit(
        (weight_bytes + draft_bytes) * device.num_sharing,
        options,
        config,
        device,
        Remedies(token_bytes, enough_ranks),
        memory or device_memory(device),
    )
