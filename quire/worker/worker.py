"""`Worker`: everything one device holds, built from the resolved options."""

from __future__ import annotations

import logging

import torch

from quire.config.device import DeviceInfo
from quire.config.model import ModelConfig
from quire.config.options import EngineOptions
from quire.decoding.sampler import Sampler
from quire.layers.attention.backend import select_backend
from quire.models.loader import load_model
from quire.models.registry import CausalLM
from quire.worker.kv_tensors import KVSpec, KVTensors
from quire.worker.memory import available_cache_bytes, count_blocks, describe_cache
from quire.worker.model_runner import ModelRunner
from quire.worker.request_table import RequestTable

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
    ) -> None:
        self.device = torch.device(device.type)
        dtype = getattr(torch, options.model.dtype)
        assert options.device.num_threads is not None
        # Loading is many small operations: where other programs keep the cores busy, waiting for a
        # second thread at each of them takes many times longer than one thread does.
        torch.set_num_threads(1)
        spec = KVSpec(
            num_layers=model_config.num_layers,
            num_kv_heads=model_config.num_kv_heads,
            head_dim=model_config.head_dim,
            block_size=options.cache.block_size,
            dtype=dtype,
        )
        backend, skipped = select_backend(
            self.device.type,
            dtype,
            spec.head_dim,
            spec.block_size,
            model_config.sliding_window,
            options.device.attention_backend,
        )
        reasons = "".join(f"; not {reason}" for reason in skipped)
        logger.info("attention: %s%s", backend.describe(), reasons)
        model = load_model(
            model_config,
            dtype=dtype,
            device=self.device,
            load_format=options.model.load_format,
            seed=options.model.seed,
        )
        torch.set_num_threads(options.device.num_threads)
        cache_bytes = available_cache_bytes(options, model_config, model, backend, spec, device)
        self.max_model_len, self.num_blocks = self._size_cache(
            options, spec, cache_bytes, fits_max_model_len
        )
        logger.info("%s", describe_cache(spec, self.num_blocks, self.max_model_len))
        kv = KVTensors(spec, self.num_blocks, self.device)
        self.runner = self._build_runner(options, model_config, model, backend, kv)
        if self.device.type == "cuda":
            self.runner.sampler.warm_up(dtype)
            if not options.device.enforce_eager:
                self._capture_graphs(options)

    def _capture_graphs(self, options: EngineOptions) -> None:
        from quire.worker.graphs import DecodeGraphs

        runner, max_rows = self.runner, options.scheduler.max_num_seqs
        assert max_rows is not None
        graphs = DecodeGraphs(runner.model, runner.attention, runner.table, max_rows)
        with torch.inference_mode():
            graphs.capture()
        runner.graphs = graphs

    def _size_cache(
        self, options: EngineOptions, spec: KVSpec, cache_bytes: int, fits_max_model_len: bool
    ) -> tuple[int, int]:
        """The longest request and the number of blocks."""
        max_len = options.model.max_model_len
        assert max_len is not None
        if fits_max_model_len:
            fits = cache_bytes // spec.bytes_per_block * spec.block_size
            max_len = max(min(max_len, fits), 1)
        return max_len, count_blocks(spec, cache_bytes, max_len)

    def _build_runner(
        self,
        options: EngineOptions,
        config: ModelConfig,
        model: CausalLM,
        backend: type,
        kv: KVTensors,
    ) -> ModelRunner:
        max_rows = options.scheduler.max_num_seqs
        assert max_rows is not None
        max_blocks = -(-self.max_model_len // kv.spec.block_size)
        table = RequestTable(
            max_rows, self.max_model_len, max_blocks, kv.spec.block_size, self.device
        )
        return ModelRunner(
            model=model,
            attention=backend(
                kv.data, config.num_heads, config.num_kv_heads, config.head_dim, kv.spec.block_size
            ),
            kv=kv,
            table=table,
            sampler=Sampler(
                config.vocab_size, max_rows, self.device, table.token_ids, table.num_tokens
            ),
        )
