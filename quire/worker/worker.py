"""`Worker`: everything one device holds, built from the resolved options."""

from __future__ import annotations

import logging
import time

import torch

from quire.config.device import DeviceInfo, resident_bytes
from quire.config.model import ModelConfig
from quire.config.options import EngineOptions
from quire.decoding.sampler import Sampler
from quire.layers.attention.backend import select_backend
from quire.models.loader import count_weight_bytes, held_weight_bytes, load_model
from quire.models.registry import CausalLM
from quire.protocol.snapshot import DeviceMemory
from quire.worker.kv_tensors import KVSpec, KVTensors
from quire.worker.memory import (
    MIB,
    available_cache_bytes,
    check_weights_fit,
    count_blocks,
    describe_cache,
    device_memory,
    explaining,
    return_free_memory,
)
from quire.worker.model_runner import ModelRunner
from quire.worker.request_table import RequestTable
from quire.worker.threads import ComputingThreads
from quire.worker.trial import TrialBytes, run_trial, used_bytes
from quire.worker.warm_up import warm_up

logger = logging.getLogger(__name__)


class Worker:
    """Loads the model, sizes and allocates the KV cache, and owns the runner."""

    def __init__(
        self,
        options: EngineOptions,
        model_config: ModelConfig,
        device: DeviceInfo,
        *,
        fits_max_model_len: bool = False,
        max_queries: int = 1,
    ) -> None:
        """`max_queries` is 1 and the most drafts of a row."""
        self.device = torch.device(device.type)
        dtype = getattr(torch, options.model.dtype)
        assert options.device.num_threads is not None
        spec = KVSpec(
            num_layers=model_config.num_layers,
            num_kv_heads=model_config.num_kv_heads,
            head_dim=model_config.head_dim,
            block_size=options.cache.block_size,
            dtype=getattr(torch, options.cache.kv_cache_dtype),
        )
        backend, skipped = select_backend(
            self.device.type,
            dtype,
            spec.head_dim,
            spec.block_size,
            model_config.sliding_window,
            options.device.attention_backend,
            spec.dtype,
        )
        reasons = "".join(f"; not {reason}" for reason in skipped)
        logger.debug("attention: %s%s", backend.describe(), reasons)
        if self.device.type == "cuda" and not backend.support.cuda_graphs:
            logger.debug("no CUDA graphs: attention by %s cannot be captured", backend.support.name)
        weight_bytes = count_weight_bytes(
            model_config,
            dtype=dtype,
            device=self.device,
            load_format=options.model.load_format,
            quantization=options.model.quantization,
        )
        check_weights_fit(weight_bytes, options, model_config, device)
        remedy = "Use a smaller model, or free the memory that other programs hold."
        with explaining("loading the weights", remedy, device):
            model = load_model(
                model_config,
                dtype=dtype,
                device=self.device,
                load_format=options.model.load_format,
                seed=options.model.seed,
                quantization=options.model.quantization,
            )
        return_free_memory()
        is_native = backend.support.name == "cpu"
        self.threads = ComputingThreads(options.device.num_threads, is_native)
        self._options, self._config, self._backend = options, model_config, backend
        self._device_info, self._weight_bytes = device, held_weight_bytes(model)
        self._max_queries = max_queries
        obstacle = self._obstacle_to_sharing()
        self.groups_prefixes = obstacle is None
        if obstacle is not None and self.device.type == "cuda":
            logger.debug("requests that share a prefix each read it for themselves: %s", obstacle)
        self.max_model_len, self.num_blocks = self._size_cache(
            model, spec, device, fits_max_model_len
        )
        logger.info("%s", describe_cache(spec, self.num_blocks, self.max_model_len))
        lower = "gpu_memory_utilization, kv_cache_memory_bytes or num_gpu_blocks_override"
        with explaining("allocating the KV cache", f"Lower {lower}.", device):
            kv = KVTensors(spec, self.num_blocks, self.device)
            self.runner = self._build_runner(model, kv, self.max_model_len)
        prefill = self.runner.attention.prefill_name
        if prefill is not None:
            logger.debug("attention of prompts: %s", prefill)
        self.graph_tokens = 0
        if self._has_graphs:
            remedy = f"Lower {lower} or max_num_seqs, or set enforce_eager=True."
            with explaining("capturing CUDA graphs", remedy, device):
                self._capture_graphs()
        if self.device.type == "cuda":
            with explaining("warming up", f"Lower {lower} or max_num_seqs.", device):
                warm_up(self.runner, self.groups_prefixes, max_queries)

    def memory(self) -> DeviceMemory:
        kind = self.device.type
        total, free = device_memory(self._device_info)
        return DeviceMemory(
            total=total,
            used=resident_bytes() if kind == "cpu" else total - free,
            weights=self._weight_bytes,
            kv_block=self.runner.kv.spec.bytes_per_block,
            is_host=kind == "cpu",
        )

    def _obstacle_to_sharing(self) -> str | None:
        """Why a prefix that running requests share cannot be read once for all of them."""
        limit, wanted = self._backend.max_prefix_rows, self._options.scheduler.max_num_seqs or 0
        if self._options.device.disable_cascade_attn:
            return "disable_cascade_attn is set"
        if self._config.sliding_window is not None:
            return f"the model has a sliding window of {self._config.sliding_window} tokens"
        if limit == 0:
            return f"attention by {self._backend.support.name} cannot"
        if wanted > limit:
            return f"max_num_seqs={wanted} is above {limit}"
        return None

    @property
    def _has_graphs(self) -> bool:
        return self._backend.support.cuda_graphs and not self._options.device.enforce_eager

    def _capture_graphs(self) -> None:
        from quire.worker.graphs import StepGraphs

        runner, limits = self.runner, self._options.scheduler
        assert limits.max_num_seqs is not None and limits.max_num_batched_tokens is not None
        graphs = StepGraphs(
            runner.model,
            runner.attention,
            runner.table,
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            self.groups_prefixes,
            self._max_queries,
        )
        started, before = time.perf_counter(), used_bytes()
        with torch.inference_mode():
            graphs.capture(graphs.keys)
        logger.debug(
            "captured %d graphs in %.1f s, %.0f MiB",
            len(graphs.keys),
            time.perf_counter() - started,
            (used_bytes() - before) / MIB,
        )
        runner.graphs = graphs
        self.graph_tokens = graphs.max_mixed_tokens

    def _size_cache(
        self, model: CausalLM, spec: KVSpec, device: DeviceInfo, fits_max_model_len: bool
    ) -> tuple[int, int]:
        """The longest request and the number of blocks."""
        max_len = self._options.model.max_model_len
        assert max_len is not None
        trial = self._try(model, spec, device, max_len) if self.device.type == "cuda" else None
        cache_bytes = available_cache_bytes(self._options, spec, device, trial)
        if fits_max_model_len:
            fits = cache_bytes // spec.bytes_per_block * spec.block_size
            max_len = max(min(max_len, fits), 1)
        return max_len, count_blocks(spec, cache_bytes, max_len)

    def _try(self, model: CausalLM, spec: KVSpec, device: DeviceInfo, max_len: int) -> TrialBytes:
        num_rows = self._options.scheduler.max_num_seqs
        num_tokens = self._options.scheduler.max_num_batched_tokens
        assert num_rows is not None and num_tokens is not None
        remedy = (
            f"Lower max_num_batched_tokens ({num_tokens}), max_num_seqs ({num_rows}) or "
            f"max_model_len ({max_len}), or use a smaller model."
        )
        with explaining("trying the largest step", remedy, device):
            return run_trial(
                lambda: self._build_runner(model, KVTensors(spec, 1, self.device), max_len),
                num_rows,
                num_tokens,
                with_graphs=self._has_graphs,
                shares_prefixes=self.groups_prefixes,
                num_threads=self._options.device.num_threads or 1,
                max_queries=self._max_queries,
            )

    def _build_runner(self, model: CausalLM, kv: KVTensors, max_len: int) -> ModelRunner:
        max_rows, config = self._options.scheduler.max_num_seqs, self._config
        assert max_rows is not None
        max_blocks = -(-max_len // kv.spec.block_size)
        table = RequestTable(max_rows, max_len, max_blocks, kv.spec.block_size, self.device)
        return ModelRunner(
            model=model,
            attention=self._backend(
                kv.data, config.num_heads, config.num_kv_heads, config.head_dim, kv.spec.block_size
            ),
            kv=kv,
            table=table,
            sampler=Sampler(
                config.vocab_size, max_rows, self.device, table.token_ids, table.num_tokens
            ),
        )
