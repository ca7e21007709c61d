"""`Worker`: everything one device holds, built from the resolved options."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quire.config.device import DeviceInfo, resident_bytes
from quire.config.model import ModelConfig
from quire.config.options import EngineOptions
from quire.config.speculative import AUTO_BEYOND
from quire.decoding.sampler import Sampler
from quire.decoding.speculative.ngram import NgramDrafter
from quire.kernels import cpu
from quire.kernels.torch.ngrams import NgramSettings
from quire.layers.attention.backend import (
    AttentionBackend,
    GroupedAttention,
    KVScales,
    select_backend,
)
from quire.layers.attention.kv_scales import describe_kv_scales, given_kv_scales
from quire.layers.attention.layer import bind_kv_groups
from quire.layers.experts import Experts
from quire.layers.lora import AdapterLayers
from quire.layers.parallel import Parallel
from quire.models.loader import ONE_RANK, held_weight_bytes, load_model
from quire.protocol.adapter import CHUNK_ROWS
from quire.protocol.errors import ModelError, OptionError
from quire.protocol.expert_counts import ExpertCounts
from quire.protocol.kv_spec import KVGroup, KVLayout
from quire.protocol.output import DeviceMemory
from quire.worker.adapters import HostAdapters
from quire.worker.draft_head import HeadSource
from quire.worker.draft_model import DraftModel, DraftSource
from quire.worker.fitting import check_model_fits, kv_specs
from quire.worker.kv_tensors import KVTensors
from quire.worker.memory import (
    MIB,
    MemoryProfile,
    available_cache_bytes,
    count_blocks,
    describe_cache,
    device_memory,
    explaining,
    longest_that_fits,
    return_free_memory,
    used_bytes,
)
from quire.worker.model_runner import ModelRunner
from quire.worker.rows import RowTable
from quire.worker.warm_up import largest_step

logger = logging.getLogger(__name__)

MAX_LOADING_THREADS = 8
LOWER_CACHE = "gpu_memory_utilization, kv_cache_memory_bytes or num_gpu_blocks_override"


class Worker:
    """Starts in phases, which an executor calls one after the other: `load`, `profile`,
    `size_cache`, `allocate` with the least that any rank can have, and `capture`. After that it
    runs steps. All ranks do the phases in this order: they meet in them."""

    runner: ModelRunner

    def __init__(
        self,
        options: EngineOptions,
        model_config: ModelConfig,
        device: DeviceInfo,
        parallel: Parallel = ONE_RANK,
    ) -> None:
        """Refuses what no phase could do; nothing is read yet."""
        self.device = torch_device(device)
        assert options.device.num_threads is not None
        self._options, self._config, self._device_info = options, model_config, device
        self._parallel = parallel
        self._speculation = options.decoding.speculation
        self._draft: DraftSource | HeadSource | None = None
        self.adapters: HostAdapters | None = None
        """None: requests have none."""
        self._max_queries = 1 + self._speculation_tokens
        """Tokens of a row that a step samples after: one more than its most drafts."""
        heads = parallel.heads(model_config.num_heads, model_config.num_kv_heads)
        self._num_heads = heads.count
        self.layout = KVLayout.of(
            kv_specs(options, model_config, parallel),
            options.cache.block_size,
            parallel.stage.layers(model_config.num_layers),
        )
        self._check_layout()
        wanted = self._speculation
        if wanted is not None and wanted.uses_head:
            self._draft = HeadSource.of(options, model_config, self.layout, wanted, parallel)
        elif wanted is not None and wanted.model is not None:
            self._draft = DraftSource.of(options, model_config, self.layout, wanted, parallel)
        self._backends = [self._select_backend(group) for group in self.layout.groups]
        self._num_threads = options.device.num_threads
        names = {backend.support.name for backend in self._backends}
        if len(names) > 1:
            raise OptionError(
                f"the model's KV groups (windows {self.layout.windows}) would use different "
                f"attention backends ({', '.join(sorted(names))}); set attention_backend to one "
                "that can do them all."
            )
        self._is_native = all(backend.support.name == "cpu" for backend in self._backends)
        """Whether the native library computes the layers, and not torch."""
        obstacle = self._obstacle_to_sharing()
        self.groups_prefixes = obstacle is None
        if obstacle is not None and self.device.type == "cuda":
            # Windows are the model's own; the other reasons were asked for.
            level = logging.DEBUG if self.layout.windows == (None,) else logging.INFO
            logger.log(
                level, "requests that share a prefix each read it for themselves: %s", obstacle
            )
        self.graph_tokens = 0
        """Most tokens of a step with prompts that runs as one CUDA graph."""

    def _check_layout(self) -> None:
        shapes = {(spec.num_kv_heads, spec.head_dim, spec.dtype) for spec in self.layout.specs}
        if len(shapes) > 1:
            raise ModelError(
                f"layers of different KV shapes are not supported yet: {sorted(shapes)} "
                "(heads, head size, dtype)."
            )
        if self._options.scheduler.reservation == "max_length" and self.layout.windows != (None,):
            raise OptionError(
                "reservation='max_length' keeps all tokens of a sequence, but the model has layers "
                f"with windows ({self.layout.windows}); use reservation='paged'."
            )

    def _select_backend(self, group: KVGroup) -> type[AttentionBackend]:
        spec = self.layout.specs[0]  # all have the same shape
        backend, skipped = select_backend(
            self.device.type,
            getattr(torch, self._options.model.dtype),
            spec.head_dim,
            self.layout.block_size,
            group.window,
            self._options.device.attention_backend,
            getattr(torch, spec.torch_dtype),
            spec.is_latent,
        )
        reasons = "".join(f"; not {reason}" for reason in skipped)
        which = "" if group.window is None else f" (window of {group.window} tokens)"
        numbers = "independent of" if backend.support.batch_invariant else "may depend on"
        logger.debug(
            "attention%s: %s, numbers of a request %s the rest of its batch%s",
            which,
            backend.describe(),
            numbers,
            reasons,
        )
        if self.device.type == "cuda" and not backend.support.cuda_graphs:
            logger.debug("no CUDA graphs: attention by %s cannot be captured", backend.support.name)
        return backend

    # --- phases -----------------------------------------------------------------------------------

    def load(self) -> None:
        """Read the weights, or this rank's share of them."""
        options, config, device = self._options, self._config, self._device_info
        dtype = getattr(torch, options.model.dtype)
        draft_bytes = (
            0 if self._draft is None else self._draft.count_weight_bytes(dtype, self.device)
        )
        check_model_fits(options, config, device, self._parallel, draft_bytes=draft_bytes)
        remedy = "Use a smaller model, or free the memory that other programs hold."
        with explaining("loading the weights", remedy, device):
            self._model = load_model(
                config,
                dtype=dtype,
                device=self.device,
                load_format=options.model.load_format,
                parallel=self._parallel,
                seed=options.model.seed,
                quantization=options.model.quantization,
                max_model_len=options.model.max_model_len,
            )
        if isinstance(self._draft, HeadSource):
            self._draft.load(dtype, self.device, self._model)
        elif self._draft is not None:
            self._draft.load(dtype, self.device)
        bind_kv_groups(self._model, self.layout.groups)
        if (limits := options.adapters.limits) is not None:
            remedy = "Lower max_loras or max_lora_rank."
            with explaining("reserving memory for adapters", remedy, device):
                layers = AdapterLayers.of(
                    self._model, limits.num_chunks, limits.num_chunks, limits.max_rank
                )
            experts = self._config.experts
            alternates = experts is not None and experts.alternates
            self.adapters = HostAdapters(layers, alternates)
            logger.info(
                "adapters: %.1f MiB for %d of rank %d, or more of lower rank (%.2f MiB for each)",
                layers.nbytes / MIB,
                limits.max_adapters,
                limits.max_rank,
                layers.pool.chunks[0].nbytes / CHUNK_ROWS / MIB,
            )
        return_free_memory()
        self._weight_bytes = held_weight_bytes(self._model)

    def profile(self) -> int:
        """Bytes that the KV cache may have, by a memory profile on a GPU."""
        profile = self._profile_memory() if self.device.type == "cuda" else None
        drafts = 0 if self._draft is None else self._draft.layout.bytes_per_block
        return available_cache_bytes(self._options, self.layout, self._device_info, profile, drafts)

    def size_cache(self, cache_bytes: int, fits_max_model_len: bool) -> tuple[int, int]:
        """The longest request and the number of blocks that this rank has room for. Blocks of
        different stages have different bytes; the least of each number over all ranks is what all
        of them can have."""
        max_len = self._max_len
        if self._draft is not None and self._options.cache.num_gpu_blocks_override is None:
            max_rows = self._options.scheduler.max_num_seqs
            assert max_rows is not None
            cache_bytes = max(cache_bytes - self._draft.count_ahead_bytes(max_rows), 0)
            both = self.layout.bytes_per_block + self._draft.layout.bytes_per_block
            cache_bytes = cache_bytes * self.layout.bytes_per_block // both
        if fits_max_model_len:
            num_blocks = cache_bytes // self.layout.bytes_per_block
            fits = longest_that_fits(self.layout, num_blocks, max_len, self._max_tokens)
            max_len = max(fits, 1)
        return max_len, count_blocks(self.layout, cache_bytes, max_len, self._max_tokens)

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        """Make the KV cache and the rows."""
        logger.info("%s", describe_cache(self.layout, num_blocks, max_model_len, self._max_tokens))
        if isinstance(self._draft, DraftSource):
            logger.info("%s", self._draft.describe(num_blocks))
        if self.layout.specs[0].has_scales:
            logger.info("keys and values in 8 bits have %s", describe_kv_scales(self._model))
        with explaining("allocating the KV cache", f"Lower {LOWER_CACHE}.", self._device_info):
            kv = KVTensors(self.layout, num_blocks, self.device)
            self.runner = self._build_runner(kv, max_model_len)
        for name in self.runner.attention.prefill_names:
            logger.debug("attention of prompts: %s", name)

    def capture(self) -> None:
        """Capture CUDA graphs and run steps of each kind, so that nothing compiles later."""
        if self._has_graphs:
            remedy = f"Lower {LOWER_CACHE} or max_num_seqs, or set enforce_eager=True."
            with explaining("capturing CUDA graphs", remedy, self._device_info):
                self._capture_graphs()
        if self.device.type == "cuda":
            remedy = f"Lower {LOWER_CACHE} or max_num_seqs."
            with explaining("warming up", remedy, self._device_info):
                self.runner.warm_up(self._max_tokens)
        if self.runner.expert_counter is not None:
            self.runner.expert_counter.reset()

    # ----------------------------------------------------------------------------------------------

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Around any work for the device, on any thread. The threads of this engine (a process may
        have several engines) go to what computes the layers: the native library or torch.

        Torch gets one beside the library: after a parallel operation its threads wait awake for
        many milliseconds, on cores that the library needs.
        """
        if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:
            torch.cuda.set_device(self.device)
        cpu.set_num_threads(self._num_threads if self._is_native else None)
        with torch_threads(1 if self._is_native else self._num_threads):
            yield

    def memory(self) -> DeviceMemory:
        kind = self.device.type
        total, free = device_memory(self._device_info)
        return DeviceMemory(
            total=total,
            used=resident_bytes() if kind == "cpu" else total - free,
            weights=self._weight_bytes,
            kv_block=self.layout.bytes_per_block,
            is_host=kind == "cpu",
        )

    def expert_counts(self) -> ExpertCounts:
        """Of this rank's layers, all that was launched included."""
        counter = self.runner.expert_counter
        return ExpertCounts.none() if counter is None else counter.read()

    def _obstacle_to_sharing(self) -> str | None:
        """Why a prefix that running requests share cannot be read once for all of them."""
        wanted = self._options.scheduler.max_num_seqs or 0
        if self._options.device.disable_cascade_attn:
            return "disable_cascade_attn is set"
        for window in self.layout.windows:
            if window is not None:
                return f"layers with a window of {window} tokens do not read a prefix as a whole"
        for backend in self._backends:
            if backend.max_prefix_rows == 0:
                return f"attention by {backend.support.name} cannot"
            if wanted > backend.max_prefix_rows:
                return f"max_num_seqs={wanted} is above {backend.max_prefix_rows}"
        return None

    @property
    def _speculation_tokens(self) -> int:
        """Most drafts of a row."""
        return 0 if self._speculation is None else self._speculation.num_tokens

    @property
    def _max_len(self) -> int:
        max_len = self._options.model.max_model_len
        assert max_len is not None
        return max_len

    @property
    def _max_tokens(self) -> int:
        """Most tokens of a step."""
        num_tokens = self._options.scheduler.max_num_batched_tokens
        assert num_tokens is not None
        return num_tokens

    @property
    def _has_graphs(self) -> bool:
        captured = all(backend.support.cuda_graphs for backend in self._backends)
        has_ranks = self._parallel.is_capturable
        layers = self._model.modules()
        waits = any(isinstance(one, Experts) and one.waits_for_device for one in layers)
        return captured and has_ranks and not waits and not self._options.device.enforce_eager

    def _capture_graphs(self) -> None:
        graphs = self.runner.build_graphs(self._max_tokens)
        started, before = time.perf_counter(), used_bytes()
        graphs.capture(graphs.keys)
        logger.debug(
            "captured %d graphs in %.1f s, %.0f MiB",
            len(graphs.keys),
            time.perf_counter() - started,
            (used_bytes() - before) / MIB,
        )
        self.runner.graphs = graphs
        self.graph_tokens = graphs.max_mixed_tokens
        drafter = self.runner.drafter
        if isinstance(drafter, DraftModel) and drafter.is_capturable:
            drafter.capture(self._max_tokens)

    def _profile_memory(self) -> MemoryProfile:
        """Measure with a runner that has all it will have, but a cache of one block, which all rows
        share: what they compute is of no use."""
        num_rows, num_tokens = self._options.scheduler.max_num_seqs, self._max_tokens
        max_len = self._max_len
        assert num_rows is not None
        remedy = (
            f"Lower max_num_batched_tokens ({num_tokens}), max_num_seqs ({num_rows}) or "
            f"max_model_len ({max_len}), or use a smaller model."
        )
        with explaining("profiling the memory of the largest step", remedy, self._device_info):
            used = used_bytes()
            runner = self._build_runner(KVTensors(self.layout, 1, self.device), max_len)
            graphs = runner.build_graphs(num_tokens) if self._has_graphs else None
            runner.compile_kernels(graphs, self._num_threads, num_tokens)
            slot = -1 if self.adapters is None else 0
            runner.execute(largest_step(num_rows, num_tokens, max_len, self._max_queries, slot))
            runner.sample().result()
            torch.cuda.synchronize()
            # What torch has cached shows how far the memory was filled.
            free, total = torch.cuda.mem_get_info()
            step = total - free - used
            for_graphs = graphs.measure() if graphs is not None else 0
            drafter = runner.drafter
            if graphs is not None and isinstance(drafter, DraftModel) and drafter.is_capturable:
                for_graphs += drafter.measure(num_tokens)
            del runner, graphs, drafter
            used_bytes()
            return MemoryProfile(total, used, step, for_graphs)

    def _build_runner(self, kv: KVTensors, max_len: int) -> ModelRunner:
        max_rows, layout = self._options.scheduler.max_num_seqs, self.layout
        assert max_rows is not None
        max_blocks = -(-max_len // layout.block_size)
        table = RowTable(
            max_rows, max_len, max_blocks, layout.block_size, self.device, len(layout.groups)
        )
        runner = ModelRunner(
            model=self._model,
            attention=GroupedAttention(
                [
                    self._build_backend(backend, kv_group, kv)
                    for kv_group, backend in enumerate(self._backends)
                ]
            ),
            kv=kv,
            table=table,
            sampler=Sampler(
                self._config.vocab_size, max_rows, self.device, table.token_ids, table.num_tokens
            ),
            shares_prefixes=self.groups_prefixes,
            max_queries=self._max_queries,
            parallel=self._parallel,
        )
        runner.adapters = self.adapters
        wanted, text = self._speculation, None
        if wanted is not None and wanted.reads_text:
            beyond = AUTO_BEYOND if wanted.is_measured else wanted.num_tokens
            settings = NgramSettings(wanted.num_tokens, wanted.min_ngram, wanted.max_ngram, beyond)
            text = NgramDrafter(settings, table.token_ids, table.num_tokens)
        if self._draft is not None:
            drafter = self._draft.build(table, runner.sampler, kv.num_blocks)
            runner.drafter, runner.draft_kv = drafter, drafter.kv
            if isinstance(drafter, DraftModel):
                drafter.text = text
        elif self._parallel.stage.is_last:
            runner.drafter = text
        return runner

    def _build_backend(
        self, backend: type[AttentionBackend], kv_group: int, kv: KVTensors
    ) -> AttentionBackend:
        num_slots, _, _, num_kv_heads, block_size, head_dim = kv.data.shape
        scales: KVScales | None = None
        if kv.scales is not None:
            heads = self._parallel.heads(self._config.num_heads, self._config.num_kv_heads)
            given = given_kv_scales(self._model, kv_group, num_slots, heads, self.device)
            scales = KVScales(kv.scales, given)
        return backend(
            kv.data,
            self._num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            scales,
            self._config.latent,
        )


def torch_device(device: DeviceInfo) -> torch.device:
    """A GPU becomes the one that this thread computes on."""
    if device.type != "cuda":
        return torch.device(device.type)
    torch.cuda.set_device(device.index)
    return torch.device("cuda", device.index)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Torch computes with `count` threads, and afterwards with as many as before: it belongs to the
    program, not to the engine."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def num_loading_threads(device_type: str, count: int) -> int:
    """How many of `count` threads torch is given to load a model.

    On a CPU, loading is many small operations: where other programs keep the cores busy, waiting
    for a second thread at each of them takes many times longer than one thread does.
    """
    return min(1 if device_type == "cpu" else MAX_LOADING_THREADS, count)
