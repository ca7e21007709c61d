"""What fits on a device: weights, then KV blocks; and the messages where something does not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from quire.config.device import DeviceInfo, cpu_memory, trim_heap
from quire.config.model import ModelConfig
from quire.config.options import EngineOptions
from quire.config.resolve import cpu_cache_bytes
from quire.protocol.errors import OptionError
from quire.protocol.kv_spec import KVLayout

MIB = 1 << 20
GIB = 1 << 30
LEAST_FREE_BYTES = 128 * MIB

_OUT_OF_MEMORY = re.compile(
    r"out of memory|can(no|')t allocate memory|STATUS_ALLOC_FAILED|std::bad_alloc", re.IGNORECASE
)


@dataclass(frozen=True)
class MemoryProfile:
    """Memory of a GPU, weights loaded, and what will be needed beside weights and KV cache."""

    total: int
    used: int
    """By all programs, before the measured step."""
    step: int
    """Rows and the largest step: activations, logits, sampling, libraries, kernels; inputs and
    logits of CUDA graphs."""
    graphs: int
    """What capturing all CUDA graphs adds."""


def used_bytes() -> int:
    """Memory of the GPU that is in use by any program; cached blocks are given back first."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def is_out_of_memory(error: BaseException, device: torch.device) -> bool:
    """torch's allocators, cuBLAS, the driver and the C library each say it in their own way."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    # Libraries that cannot load their code on a full device just say that they failed.
    unclear = "CUDA" in str(error) or "CUBLAS" in str(error)
    return bool(_OUT_OF_MEMORY.search(str(error))) or (unclear and is_exhausted(device))


def is_exhausted(device: torch.device) -> bool:
    """Whether a device has so little memory left that nothing can be counted on to run."""
    if device.type == "cpu":
        return False
    try:
        return torch.cuda.mem_get_info(device)[0] < LEAST_FREE_BYTES
    except RuntimeError:  # the device is beyond use, for another reason
        return False


@contextmanager
def explaining(what: str, remedy: str, device: DeviceInfo) -> Iterator[None]:
    """Running out of memory inside becomes an error that says what was free and what to change."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error, torch.device(device.type)):
            raise
        tried = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        needed = f" ({tried[1]} more were needed)" if tried else ""
        total, free = device_memory(device)
        raise OptionError(
            f"out of memory while {what}{needed}: {free / GIB:.2f} of {total / GIB:.2f} GiB are "
            f"free on {device.name}. {remedy}"
        ) from error


def device_memory(device: DeviceInfo) -> tuple[int, int]:
    """Bytes of memory in all, and how many of them are free now."""
    if device.type == "cpu":
        return cpu_memory()
    free, total = torch.cuda.mem_get_info(device.index)
    return total, free


@dataclass(frozen=True)
class Remedies:
    """What is said of a model that does not fit."""

    kv_token_bytes: int
    enough_ranks: Callable[[int], tuple[int, int] | None]
    """How many ranks have room, each on a device with so much memory for weights, and the weights
    of one; None if no number of them that divides heads."""


def check_weights_fit(
    weight_bytes: int,
    options: EngineOptions,
    config: ModelConfig,
    device: DeviceInfo,
    remedies: Remedies | None = None,
    memory: tuple[int, int] | None = None,
) -> None:
    """Refuse, before anything is read, a model whose weights alone are too large. `memory` is all
    of the device and what is free, if known."""
    total, free = device_memory(device) if memory is None else memory
    share, allowed = options.cache.gpu_memory_utilization, free
    if share is not None:
        allowed = min(free, int(share * total) - (total - free))
    if weight_bytes <= allowed:
        return
    ways = []
    if remedies is not None and device.type != "cpu":
        ways.append(_more_devices(weight_bytes, int((share or 1) * total), device, remedies))
    ways += _smaller_weights(options, config, device)
    if weight_bytes < free:
        ways.append("raise gpu_memory_utilization")
    elif weight_bytes < total:
        ways.append("free the memory that other programs hold")
    ways.append("use a smaller model")
    limit = "" if share is None else f", of which gpu_memory_utilization={share:g} allows "
    limit += "" if share is None else f"{max(allowed, 0) / GIB:.2f} GiB"
    dtype = options.model.quantization or options.model.dtype
    ranks = options.parallel.num_ranks
    where = f" on each of {ranks} ranks" if ranks > 1 and device.num_sharing == 1 else ""
    cache = ""
    if remedies is not None:
        cache = f" A token of the KV cache takes {remedies.kv_token_bytes:,} bytes{where}."
    raise OptionError(
        f"the weights of {config.source.name} take {weight_bytes / GIB:.2f} GiB{where} in {dtype}, "
        f"but {device.name} has {free / GIB:.2f} of {total / GIB:.2f} GiB free{limit}.{cache} "
        f"To run it, {', or '.join(ways)}."
    )


def _more_devices(weight_bytes: int, allowed: int, device: DeviceInfo, remedies: Remedies) -> str:
    found = remedies.enough_ranks(allowed)
    if found is None:
        count = -(-weight_bytes // max(allowed, 1)) + 1
        return f"spread its layers over {count} or more such devices (pipeline_parallel_size)"
    size, each = found
    here = f", of which this host has {device.count}" if size > device.count else ""
    return (
        f"use {size} such devices{here} (tensor_parallel_size={size}: {each / GIB:.2f} GiB of "
        "weights on each)"
    )


def _smaller_weights(
    options: EngineOptions, config: ModelConfig, device: DeviceInfo
) -> Iterator[str]:
    if options.model.quantization is not None or config.source.kind == "gguf":
        return
    if options.model.dtype == "float32":
        yield "set dtype='bfloat16' or 'float16', which halves them"
        if device.type == "cpu":
            yield "round them with quantization='int8', which leaves about a quarter"
        return
    yield "round them with quantization='fp8' or 'int4', which leaves about a half or a quarter"


def available_cache_bytes(
    options: EngineOptions,
    layout: KVLayout,
    device: DeviceInfo,
    profile: MemoryProfile | None,
    drafts_block_bytes: int = 0,
) -> int:
    """Memory for the KV cache, once the weights are loaded; `profile` is what a GPU needs too. A
    number of blocks is that of the target's, with `drafts_block_bytes` beside each."""
    cache = options.cache
    wanted = cache.kv_cache_memory_bytes
    if cache.num_gpu_blocks_override is not None:
        wanted = cache.num_gpu_blocks_override * layout.bytes_per_block
    if profile is None:
        total, available = cpu_memory()
        default = cpu_cache_bytes(cache, available, total) // device.num_sharing
        return wanted if wanted is not None else default
    if wanted is not None:
        beside = (cache.num_gpu_blocks_override or 0) * drafts_block_bytes
        _check_wanted(wanted + beside, options, profile)
        return wanted
    share = cache.gpu_memory_utilization
    assert share is not None
    left = int(share * profile.total) - profile.used - profile.step - profile.graphs
    if left < layout.bytes_per_block:
        raise OptionError(
            f"gpu_memory_utilization={share:g} of {profile.total / GIB:.2f} GiB leaves no memory "
            f"for the KV cache: {profile.used / GIB:.2f} GiB are in use (weights included), "
            f"{_needs(profile)}. Raise gpu_memory_utilization, {_smaller_steps(options)}."
        )
    return left


def _check_wanted(wanted: int, options: EngineOptions, profile: MemoryProfile) -> None:
    free = profile.total - profile.used
    if wanted + profile.step + profile.graphs <= free:
        return
    name = "kv_cache_memory_bytes"
    if options.cache.num_gpu_blocks_override is not None:
        name = "num_gpu_blocks_override"
    raise OptionError(
        f"{name}={getattr(options.cache, name)} asks for a KV cache of {wanted / GIB:.2f} GiB, but "
        f"{free / GIB:.2f} of {profile.total / GIB:.2f} GiB are free beside the weights, and "
        f"{_needs(profile)}. Lower {name}, {_smaller_steps(options)}."
    )


def _needs(profile: MemoryProfile) -> str:
    graphs = f" and the CUDA graphs {profile.graphs / GIB:.2f} GiB" if profile.graphs else ""
    return f"the largest step takes {profile.step / GIB:.2f} GiB{graphs}"


def _smaller_steps(options: EngineOptions) -> str:
    wanted = options.scheduler
    eager = "" if options.device.enforce_eager else " or set enforce_eager=True"
    return (
        f"lower max_num_batched_tokens ({wanted.max_num_batched_tokens}), max_num_seqs "
        f"({wanted.max_num_seqs}) or max_model_len ({options.model.max_model_len}){eager}"
    )


def longest_that_fits(layout: KVLayout, num_blocks: int, most: int, max_step_tokens: int) -> int:
    """The longest request, of at most `most` tokens, that a cache of so many blocks holds."""
    fits, too_long = 0, most + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if layout.most_blocks(middle, max_step_tokens) <= num_blocks:
            fits = middle
        else:
            too_long = middle
    return fits


def count_blocks(
    layout: KVLayout, cache_bytes: int, max_model_len: int, max_step_tokens: int
) -> int:
    """Blocks that fit into `cache_bytes`; what running requests leave serves the prefix cache."""
    per_request = layout.most_blocks(max_model_len, max_step_tokens)
    num_blocks = cache_bytes // layout.bytes_per_block
    if num_blocks < per_request:
        fits = longest_that_fits(layout, num_blocks, max_model_len, max_step_tokens)
        shorter = f"Lower max_model_len to at most {fits}, or " if fits else "To run it at all, "
        raise OptionError(
            f"the KV cache is too small for one request: max_model_len={max_model_len} needs "
            f"{per_request} blocks of {layout.block_size} tokens "
            f"({per_request * layout.bytes_per_block / MIB:.1f} MiB), but "
            f"{cache_bytes / MIB:.1f} MiB hold {num_blocks} blocks ({fits} tokens). "
            f"{shorter}raise kv_cache_memory_bytes or gpu_memory_utilization."
        )
    return num_blocks


def describe_cache(
    layout: KVLayout, num_blocks: int, max_model_len: int, max_step_tokens: int
) -> str:
    num_requests = num_blocks / layout.most_blocks(max_model_len, max_step_tokens)
    tokens = num_blocks * layout.block_size // len(layout.groups)
    held = f"{tokens:,} tokens in " if layout.windows == (None,) else ""
    cache_bytes, dtype = num_blocks * layout.bytes_per_block, layout.specs[0].dtype
    return (
        f"KV cache: {held}{num_blocks:,} blocks of {layout.block_size}, "
        f"{cache_bytes / MIB:,.0f} MiB of {dtype}; room for "
        f"{num_requests:.1f} requests of max_model_len={max_model_len} at once"
    )


def return_free_memory() -> None:
    """Hand freed memory back to the device and the system."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim_heap()
