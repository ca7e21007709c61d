"""How many KV blocks fit, and the line that says so."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from quire.config.device import DeviceInfo, cpu_memory
from quire.config.model import ModelConfig
from quire.config.options import EngineOptions
from quire.config.resolve import cpu_cache_bytes
from quire.layers.attention.backend import AttentionBackend, AttentionInputs
from quire.models.registry import CausalLM
from quire.protocol.errors import OptionError
from quire.worker.kv_tensors import KVSpec, KVTensors
from quire.worker.staging import Staging

MIB = 1 << 20
GIB = 1 << 30


def available_cache_bytes(
    options: EngineOptions,
    config: ModelConfig,
    model: CausalLM,
    backend: type[AttentionBackend],
    spec: KVSpec,
    device: DeviceInfo,
) -> int:
    """Memory for the KV cache, once the weights are loaded."""
    cache = options.cache
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override * spec.bytes_per_block
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes
    if device.type == "cpu":
        total, available = cpu_memory()
        return cpu_cache_bytes(cache, available, total)
    utilization = cache.gpu_memory_utilization
    assert utilization is not None
    step_bytes = measure_step_bytes(options, config, model, backend, spec)
    free, total = torch.cuda.mem_get_info()
    left = int(utilization * total) - (total - free) - step_bytes
    if left < spec.bytes_per_block:
        raise OptionError(
            f"gpu_memory_utilization={utilization:g} of {total / GIB:.1f} GiB leaves no memory for "
            f"the KV cache: {(total - free) / GIB:.1f} GiB are in use (weights included) and a "
            f"step needs {step_bytes / GIB:.1f} GiB. Raise gpu_memory_utilization, or lower "
            "max_num_batched_tokens or max_num_seqs."
        )
    return left


@torch.inference_mode()
def measure_step_bytes(
    options: EngineOptions,
    config: ModelConfig,
    model: CausalLM,
    backend: type[AttentionBackend],
    spec: KVSpec,
) -> int:
    """Peak memory of the largest step beside weights and cache, from a dummy pass.

    Each token stands for a request with an empty context, so no cache is needed.
    """
    num_tokens, num_rows = options.scheduler.max_num_batched_tokens, options.scheduler.max_num_seqs
    assert num_tokens is not None and num_rows is not None
    device = torch.device("cuda")
    zeros = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    attention = backend(
        KVTensors(spec, 1, device).data,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        spec.block_size,
    )
    inputs = AttentionInputs(
        query_start=torch.arange(num_tokens + 1, dtype=torch.int32, device=device)[:-1],
        context_lens=zeros.int(),
        block_tables=zeros.int()[:, None],
        slots=zeros - 1,
        query_lens=np.ones(num_tokens, np.int32),
        send=Staging(device).send,
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    hidden = model(zeros, zeros, attention.plan(inputs))
    logits = model.logits(hidden[:num_rows])
    scores = torch.empty(logits.shape, dtype=torch.float32, device=device)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    # Captured graphs keep their own activations and logits for up to `num_rows` tokens.
    graphs = (
        0 if options.device.enforce_eager else 2 * logits.nbytes + peak * num_rows // num_tokens
    )
    del hidden, logits, scores, attention
    torch.cuda.empty_cache()
    return peak + graphs


def count_blocks(spec: KVSpec, cache_bytes: int, max_model_len: int) -> int:
    """Blocks that fit into `cache_bytes`; what running requests leave serves the prefix cache."""
    per_request = -(-max_model_len // spec.block_size)
    num_blocks = cache_bytes // spec.bytes_per_block
    if num_blocks < per_request:
        fits = num_blocks * spec.block_size
        shorter = f"Lower max_model_len to at most {fits}, or " if fits else "To run it at all, "
        raise OptionError(
            f"the KV cache is too small for one request: max_model_len={max_model_len} needs "
            f"{per_request} blocks of {spec.block_size} tokens "
            f"({per_request * spec.bytes_per_block / MIB:.1f} MiB), but "
            f"{cache_bytes / MIB:.1f} MiB hold {num_blocks} blocks ({fits} tokens). "
            f"{shorter}raise kv_cache_memory_bytes or gpu_memory_utilization."
        )
    return num_blocks


def describe_cache(spec: KVSpec, num_blocks: int, max_model_len: int) -> str:
    tokens = num_blocks * spec.block_size
    return (
        f"KV cache: {num_blocks:,} blocks of {spec.block_size} tokens, "
        f"{spec.bytes_per_block / 1024:.1f} KiB each, {tokens:,} tokens fit "
        f"({num_blocks * spec.bytes_per_block / MIB:,.0f} MiB), "
        f"{tokens / max_model_len:.1f} requests at once at max_model_len={max_model_len}"
    )


def return_free_memory() -> None:
    """Hand freed memory back to the system; the C library would keep most of it for later."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
