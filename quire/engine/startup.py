"""From options to a running engine: find the model, resolve the options, start the workers."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace

from quire.config.device import DeviceInfo, cpu_memory
from quire.config.draft import settle_speculation
from quire.config.model import DRAFT_ARCHITECTURES, ModelConfig, read_model
from quire.config.options import EngineOptions
from quire.config.resolve import check_options, resolve
from quire.config.structured import GrammarSettings
from quire.engine.adapter_folders import AdapterFolders
from quire.engine.core import EngineCore
from quire.engine.executors.base import Executor
from quire.protocol.adapter import AdapterLimits
from quire.protocol.errors import OptionError
from quire.scheduler.sequence import SchedulerLimits

logger = logging.getLogger(__name__)

ADAPTERS_SHARE = 1 / 8
"""Of the host's memory, for adapters where max_cpu_loras is left out."""
FREE_BYTES = 256 << 20
"""Of a GPU, that whole weights of adapters leave free."""


@dataclass(frozen=True)
class Engine:
    """A started engine and what it was started with."""

    core: EngineCore
    model: ModelConfig
    options: EngineOptions


def find_model(options: EngineOptions) -> ModelConfig:
    """The model that is asked for; its weights stay untouched. Where they have to be fetched, a
    model that devices have no room for is refused before."""
    check_options(options)

    def check(model: ModelConfig) -> None:
        from quire.engine.executors.local import LocalExecutor

        device = LocalExecutor.device(options)
        LocalExecutor.check_before_fetch(resolve(options, model, device).options, model, device)

    model = read_model(options.model, check)
    if model.architecture in DRAFT_ARCHITECTURES:
        raise OptionError(
            f"{model.source.name} is an EAGLE-3 head, which drafts for another model; name that "
            "one, and the head in speculative_config['model']."
        )
    return model


def start_engine(options: EngineOptions, model: ModelConfig) -> Engine:
    """An engine for `model`, which `find_model` has found."""
    if options.parallel.node_rank > 0:
        raise OptionError(
            f"node_rank={options.parallel.node_rank}: the engine runs on host 0. On this host run "
            "`quire serve` with the same options, which then has ranks alone."
        )
    # Imported here: the executor brings torch, which `quire --help` must not wait for.
    from quire.engine.executors.local import LocalExecutor

    device = LocalExecutor.device(options)
    resolved = resolve(settle_speculation(options, model), model, device)
    for note in resolved.notes:
        logger.debug("%s", note)
    for warning in resolved.warnings:
        logger.warning("%s", warning)
    logger.info("model: %s", _description(resolved.options, model, device))
    fits = resolved.fits_max_model_len
    executor = _start_executor(resolved.options, options, model, device, fits)
    final = resolved.options.replace(max_model_len=executor.max_model_len)
    core = EngineCore(
        executor,
        _scheduler_limits(final, model, executor),
        max_steps_in_flight=final.scheduler.max_steps_in_flight or 1,
        grammar_settings=GrammarSettings.from_config(final.decoding.structured_outputs_config),
        num_threads=_mask_threads(final),
        adapter_reader=None if final.adapters.limits is None else AdapterFolders(),
    )
    return Engine(core, model, final)


def _start_executor(
    options: EngineOptions,
    given: EngineOptions,
    model: ModelConfig,
    device: DeviceInfo,
    fits_max_model_len: bool,
) -> Executor:
    from quire.engine.executors.local import LocalExecutor

    if not options.parallel.has_rank_processes:
        return LocalExecutor(options, model, device, fits_max_model_len=fits_max_model_len)
    from quire.engine.executors.distributed import DistributedExecutor

    return DistributedExecutor(options, given, fits_max_model_len=fits_max_model_len)


def _description(options: EngineOptions, model: ModelConfig, device: DeviceInfo) -> str:
    """The model and what it runs on, in a line."""
    parts = [f"{model.source.name} on {device.name}"]
    if device.type == "cpu":
        count = options.device.num_threads
        parts.append(f"{count} thread" if count == 1 else f"{count} threads")
    parts.append(f"dtype {options.model.dtype}")
    if options.model.quantization is not None:
        parts.append(f"quantization {options.model.quantization}")
    return ", ".join(parts)


def _mask_threads(options: EngineOptions) -> int:
    """Threads that make masks of grammars. On a CPU, those that ran the model stay up for a moment
    more, to be there for the next piece of work."""
    num_threads = options.device.num_threads or 1
    return num_threads if options.device.device != "cpu" else max(num_threads // 2, 1)


def _scheduler_limits(
    options: EngineOptions, model: ModelConfig, executor: Executor
) -> SchedulerLimits:
    """What the scheduler needs of fully resolved options."""
    wanted = options.scheduler
    assert options.model.max_model_len is not None
    assert wanted.max_num_seqs is not None and wanted.max_num_batched_tokens is not None
    identity = (
        model.source.name,
        options.model.revision or "",
        json.dumps(options.model.hf_overrides or {}, sort_keys=True, default=str),
        f"dummy {options.model.seed}" if options.model.load_format == "dummy" else "",
        options.model.dtype,
        options.model.quantization or "",
        options.cache.kv_cache_dtype,
        str(options.cache.block_size),
        str(executor.kv_windows),
    )
    return SchedulerLimits(
        num_blocks=executor.num_blocks,
        block_size=options.cache.block_size,
        max_model_len=options.model.max_model_len,
        max_num_seqs=wanted.max_num_seqs,
        max_num_batched_tokens=wanted.max_num_batched_tokens,
        windows=executor.kv_windows,
        policy=wanted.scheduling_policy,
        enable_prefix_caching=options.cache.enable_prefix_caching,
        enable_chunked_prefill=wanted.enable_chunked_prefill,
        long_prefill_token_threshold=wanted.long_prefill_token_threshold,
        target_itl_s=None if wanted.target_itl_ms is None else wanted.target_itl_ms / 1000,
        max_num_queued_reqs=wanted.max_num_queued_reqs or 0,
        max_num_queued_tokens=wanted.max_num_queued_tokens or 0,
        reserves_max_length=wanted.reservation == "max_length",
        groups_prefixes=executor.groups_prefixes,
        speculation=options.decoding.speculation,
        num_stages=options.parallel.pipeline_parallel_size,
        graph_tokens=executor.graph_tokens,
        adapters=_adapter_limits(options, executor),
        seed=options.model.seed,
        cache_identity=identity,
    )


def _adapter_limits(options: EngineOptions, executor: Executor) -> AdapterLimits | None:
    limits = options.adapters.limits
    if limits is None:
        return None
    if limits.max_host_adapters is None:
        limits = replace(limits, max_host_bytes=int(ADAPTERS_SHARE * cpu_memory()[0]))
    memory = executor.memory()
    if memory.is_host:
        return limits
    # Ranks of tensor parallelism share embeddings and output heads out among each other.
    free = max(memory.total - memory.used - FREE_BYTES, 0)
    return replace(limits, max_saved_bytes=free * options.parallel.tensor_parallel_size)
