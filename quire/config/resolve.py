"""Turns what the user wrote into what the engine runs with, and says why."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.device import DeviceInfo, ranks_share_devices
from quire.config.model import ModelConfig
from quire.config.options import AUTO_LENGTH, CacheOptions, EngineOptions
from quire.config.quantization import METHODS, SAME_METHODS
from quire.protocol.errors import OptionError
from quire.protocol.kv_spec import FLOAT8

GIB = 1 << 30
DEFAULT_MEMORY_UTILIZATION = 0.9
MAX_DEFAULT_CPU_CACHE_BYTES = 4 * GIB
TOY_WEIGHTS = 500_000
"""A served model of 150,000 gave less with two threads than with one to one client and to many
(docs/lab/server.md); one of a million gave more to one client."""

GGUF_BLOCKS = ("gguf", "gguf-a16")
"""Ways to compute from the blocks of a GGUF file."""
WHILE_LOADING = ("fp8", "int8", "int4")
"""Formats that weights of 16 bits are rounded to."""
QUANTIZATIONS = tuple(dict.fromkeys((*GGUF_BLOCKS, *WHILE_LOADING, *METHODS, *SAME_METHODS)))
# Tokens and sequences per step.
_CPU_LIMITS = (4096, 256)
_LARGE_GPU_LIMITS = (16384, 1024)
_SMALL_GPU_LIMITS = (8192, 256)
_LARGE_GPU_BYTES = 70 * GIB


@dataclass(frozen=True)
class Resolved:
    """The final options and how they came about."""

    options: EngineOptions
    notes: list[str]
    """Sentences such as "X became Y because Z"."""
    warnings: list[str]
    """What works, but is hardly meant."""
    fits_max_model_len: bool = False
    """Whether max_model_len is an upper bound, to be lowered to what fits in the KV cache."""


def resolve(options: EngineOptions, model: ModelConfig, device: DeviceInfo) -> Resolved:
    """Fill in every option that depends on the model or the device.

    What stays None has no default to fill in (names, revisions, memory that must be measured).
    """
    notes: list[str] = []
    warnings: list[str] = []
    check_options(options)
    _check_device(options, device)
    _check_device_count(options, device)
    _check_sizes(options, model, notes, warnings)
    _check_quantization(options, model, device)
    fits = options.model.max_model_len == AUTO_LENGTH
    options = options.replace(
        quantization=_quantization(options, model, device, notes),
        device=device.type,
        dtype=_dtype(options, model, device, notes),
        max_model_len=_max_model_len(options, model, notes),
        num_threads=_num_threads(options, model, device, notes),
    )
    options = options.replace(max_steps_in_flight=_max_steps_in_flight(options, device, notes))
    if device.type != "cpu" and options.cache.gpu_memory_utilization is None:
        options = options.replace(gpu_memory_utilization=DEFAULT_MEMORY_UTILIZATION)
    options = options.replace(kv_cache_dtype=_kv_cache_dtype(options, notes, warnings))
    options = _with_step_limits(options, device, notes)
    if options.parallel.is_launched_outside and options.scheduler.target_itl_ms is None:
        options = options.replace(target_itl_ms=0.0)
        notes.append("target_itl_ms became 0 because engines of an external launcher plan alike")
    return Resolved(options, notes, warnings, fits)


def cpu_cache_bytes(cache: CacheOptions, available_bytes: int, total_bytes: int) -> int:
    """Memory for the KV cache on a CPU, given what is free once the weights are loaded."""
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes
    if cache.gpu_memory_utilization is None:
        return min(MAX_DEFAULT_CPU_CACHE_BYTES, available_bytes // 4)
    used = total_bytes - available_bytes
    left = int(cache.gpu_memory_utilization * total_bytes) - used
    if left <= 0:
        raise OptionError(
            f"gpu_memory_utilization={cache.gpu_memory_utilization:g} of {_gib(total_bytes)} "
            f"leaves no memory for the KV cache: {_gib(used)} are in use. Raise it, free memory, "
            "or set kv_cache_memory_bytes."
        )
    return left


def _check_device(options: EngineOptions, device: DeviceInfo) -> None:
    if options.device.device not in ("auto", device.type):
        raise OptionError(
            f"device={options.device.device!r} was not found: torch offers only {device.type!r} "
            f"({device.name}). Check the driver and that torch was installed with CUDA, or leave "
            "device unset."
        )


def check_options(options: EngineOptions) -> None:
    """Refuse what can be refused before a model is looked for, and maybe downloaded."""
    _check_parallel(options)
    wanted, speculation = options.model.quantization, options.decoding.speculation
    _check_is_known("quantization", wanted)
    if speculation is not None:
        _check_is_known("speculative_config['quantization']", speculation.quantization)
    if wanted in GGUF_BLOCKS and options.model.dtype == "float32":
        raise OptionError(
            f"quantization={wanted!r} computes from packed weights, dtype='float32' from exact "
            "ones. Leave one of them unset."
        )
    if speculation and options.parallel.pipeline_parallel_size > 1:
        raise OptionError(
            "speculative_config: drafts wait on one device, but pipeline_parallel_size="
            f"{options.parallel.pipeline_parallel_size} has a model on several; use "
            "tensor_parallel_size instead, or leave speculative_config unset."
        )
    steps, stages = options.scheduler.max_steps_in_flight, options.parallel.pipeline_parallel_size
    if stages > 1 and steps not in (None, stages):
        raise OptionError(
            f"max_steps_in_flight={steps}, but pipeline_parallel_size={stages}: each stage of a "
            "pipeline works on a step of its own. Leave max_steps_in_flight unset."
        )


def _check_is_known(name: str, quantization: str | None) -> None:
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise OptionError(
            f"{name}={quantization!r} is not supported; supported are {', '.join(QUANTIZATIONS)}. "
            "Leave it unset for a quantised checkpoint or a GGUF file; for an unquantised one use "
            "'fp8', 'int8' or 'int4', or quantise it once with `quire quantize`."
        )


def check_quantization(
    wanted: str | None, model: ModelConfig, name: str = "quantization", model_name: str = "model"
) -> None:
    """Refuse a format that contradicts the checkpoint. The options are called as the user wrote
    them."""
    quantized = model.quantization
    if wanted in GGUF_BLOCKS and model.source.kind != "gguf":
        raise OptionError(
            f"{name}={wanted!r} needs a .gguf file, but {model_name}={model.source.name!r} has "
            f"none. Leave {name} unset, or use 'int8'."
        )
    method = None if wanted is None else SAME_METHODS.get(wanted, wanted)
    if quantized is not None and method not in (None, quantized.method):
        raise OptionError(
            f"{name}={wanted!r} contradicts {quantized.file}, which says that the weights of "
            f"{model.source.name!r} are quantised by {quantized.method!r}. Leave {name} unset."
        )
    if quantized is None and method in METHODS and method not in WHILE_LOADING:
        raise OptionError(
            f"{name}={wanted!r} needs a checkpoint in this format, but "
            f"{model_name}={model.source.name!r} says nothing of it in config.json. Leave {name} "
            "unset, or use 'fp8', 'int8' or 'int4' to quantise the weights while they are loaded."
        )


def _max_steps_in_flight(options: EngineOptions, device: DeviceInfo, notes: list[str]) -> int:
    """Of options whose threads are final."""
    wanted, parallel = options.scheduler.max_steps_in_flight, options.parallel
    if parallel.pipeline_parallel_size > 1:
        return parallel.pipeline_parallel_size
    if wanted is not None or device.type != "cpu":
        return wanted or 2
    num_busy = max(options.device.num_threads or 1, parallel.num_ranks // parallel.nnodes)
    if not parallel.has_rank_processes or num_busy >= device.num_processors:
        return 1
    notes.append(
        f"max_steps_in_flight became 2 because the ranks' threads leave some of "
        f"{device.num_processors} processors free, on which the engine plans the next step"
    )
    return 2


def _check_parallel(options: EngineOptions) -> None:
    parallel = options.parallel
    backend, nnodes = parallel.distributed_executor_backend, parallel.nnodes
    if backend == "uni" and parallel.num_ranks > 1:
        raise OptionError(
            f"distributed_executor_backend='uni' runs one rank, but {_sizes(options)} are "
            f"{parallel.num_ranks}; leave distributed_executor_backend unset."
        )
    if parallel.is_launched_outside:
        _check_plans_alike(options)
    if nnodes > 1 and backend not in (None, "mp"):
        raise OptionError(
            f"nnodes={nnodes} is for distributed_executor_backend='mp', got {backend!r}, which "
            "finds its hosts by itself; leave nnodes unset."
        )
    if nnodes > 1 and parallel.master_addr in ("", "*", "0.0.0.0", "::"):
        raise OptionError(
            f"master_addr={parallel.master_addr!r} stands for all addresses of a host; give the "
            "one of host 0 that the others reach."
        )
    if parallel.node_rank >= nnodes:
        raise OptionError(
            f"node_rank={parallel.node_rank} must be below nnodes={nnodes}; hosts count from 0."
        )
    if parallel.num_ranks % nnodes:
        raise OptionError(
            f"{_sizes(options)} are {parallel.num_ranks} ranks, which nnodes={nnodes} hosts cannot "
            "have equally many of; choose sizes whose product is a multiple of nnodes."
        )


def _check_plans_alike(options: EngineOptions) -> None:
    """Each rank has an engine, whose plans must follow from the requests alone."""
    stages, speculation = options.parallel.pipeline_parallel_size, options.decoding.speculation
    if options.adapters.enable_lora:
        raise OptionError(
            "enable_lora=True is not supported with distributed_executor_backend="
            "'external_launcher': each of its engines would have an adapter loaded at another "
            "time. Use 'mp' or 'ray'."
        )
    if stages > 1:
        raise OptionError(
            "distributed_executor_backend='external_launcher' has no stages, but "
            f"pipeline_parallel_size={stages}; set it to 1, or use 'mp' or 'ray'."
        )
    if speculation is not None and speculation.is_measured:
        raise OptionError(
            f"speculative_config: method {speculation.method!r} measures how many drafts pay off, "
            "and each engine of distributed_executor_backend='external_launcher' would measure "
            "something else. Use method 'ngram' or a model that drafts, or 'mp' or 'ray'."
        )
    if options.scheduler.target_itl_ms:
        raise OptionError(
            f"target_itl_ms={options.scheduler.target_itl_ms:g} follows a clock, and each engine "
            "of distributed_executor_backend='external_launcher' has its own. Leave it unset, or "
            "use 'mp' or 'ray'."
        )


def refuse_launched_outside(backend: object, what: str) -> None:
    """Where requests come at times of their own."""
    if backend == "external_launcher":
        raise OptionError(
            f"distributed_executor_backend='external_launcher' is for LLM alone: {what} has "
            "requests that come at other times to each of its engines, which must all plan alike. "
            "Use 'mp' or 'ray'."
        )


def _sizes(options: EngineOptions) -> str:
    parallel = options.parallel
    return (
        f"tensor_parallel_size={parallel.tensor_parallel_size} times "
        f"pipeline_parallel_size={parallel.pipeline_parallel_size}"
    )


def even_sizes(model: ModelConfig) -> list[int]:
    """Numbers of ranks that divide the heads of a model, so that none computes padding."""
    heads, kv_heads = model.num_heads, model.num_kv_heads
    return [
        count
        for count in range(1, heads + 1)
        if heads % count == 0 and (kv_heads % count == 0 or count % kv_heads == 0)
    ]


def _check_sizes(
    options: EngineOptions, model: ModelConfig, notes: list[str], warnings: list[str]
) -> None:
    """Ranks and stages that would have nothing of the model."""
    size, num_stages = (
        options.parallel.tensor_parallel_size,
        options.parallel.pipeline_parallel_size,
    )
    if num_stages > model.num_layers:
        raise OptionError(
            f"pipeline_parallel_size={num_stages} is more than the {model.num_layers} layers of "
            f"{model.source.name!r}, and a stage has at least one. Use at most {model.num_layers}."
        )
    heads, kv_heads = model.num_heads, model.num_kv_heads
    even = even_sizes(model)
    listed = ", ".join(map(str, even))
    if size > heads:
        raise OptionError(
            f"tensor_parallel_size={size} is more than the {heads} attention heads of "
            f"{model.source.name!r}, so that ranks would have none. Use at most {heads}; without "
            f"padding: {listed}. More devices serve as stages (pipeline_parallel_size)."
        )
    if size not in even:
        units = heads if kv_heads == 1 else kv_heads  # what is divided: see `Parallel.heads`
        num_idle = size - -(-units // -(-units // size))
        what = "the last rank computes some padding"
        if num_idle:
            what = f"{num_idle} of the ranks compute nothing but padding in attention"
        of_kv = "" if kv_heads == 1 else f" and {kv_heads} KV heads"
        (warnings if num_idle else notes).append(
            f"tensor_parallel_size={size} does not divide {heads} attention heads{of_kv}: "
            f"{what}. Without padding: {listed}."
        )
    if options.parallel.enable_expert_parallel and size > 1:
        _check_experts(size, model, notes, warnings)


def _check_experts(size: int, model: ModelConfig, notes: list[str], warnings: list[str]) -> None:
    """Ranks that keep whole experts."""
    if model.experts is None:
        notes.append(f"enable_expert_parallel does nothing: {model.source.name!r} has no experts")
        return
    count = model.experts.count
    if size > count:
        warnings.append(
            f"enable_expert_parallel leaves {size - count} of tensor_parallel_size={size} ranks "
            f"without any of the {count} experts of {model.source.name!r}. Leave it unset, and "
            "each rank has a part of every expert."
        )
    elif count % size:
        notes.append(
            f"enable_expert_parallel: ranks have {count // size} or {count // size + 1} of "
            f"{count} experts, as tensor_parallel_size={size} does not divide these"
        )


def _check_device_count(options: EngineOptions, device: DeviceInfo) -> None:
    parallel = options.parallel
    num_local = parallel.num_ranks // parallel.nnodes
    if parallel.distributed_executor_backend not in (None, "mp") or device.type != "cuda":
        return
    if num_local > device.count and not ranks_share_devices():
        raise OptionError(
            f"{_sizes(options)} need {num_local} GPUs on this host, but {device.count} can be "
            "seen (CUDA_VISIBLE_DEVICES). Choose smaller sizes, or use several hosts (nnodes, or "
            "distributed_executor_backend='ray')."
        )


def _check_quantization(options: EngineOptions, model: ModelConfig, device: DeviceInfo) -> None:
    wanted, quantized = options.model.quantization, model.quantization
    check_quantization(wanted, model)
    name = wanted if quantized is None else quantized.method
    is_float32, is_cpu = options.model.dtype == "float32", device.type == "cpu"
    if name is not None and options.model.dtype != "auto" and is_float32 != is_cpu:
        computed = "float32 on a CPU" if is_cpu else "16 bits on a GPU"
        raise OptionError(
            f"quantization={name!r} computes activations in {computed}; leave dtype unset instead "
            f"of {options.model.dtype!r}."
        )


def _num_threads(
    options: EngineOptions, model: ModelConfig, device: DeviceInfo, notes: list[str]
) -> int:
    if options.device.num_threads is not None:
        return options.device.num_threads
    num_weights = 12 * model.num_layers * model.hidden_size**2  # roughly, of a usual transformer
    is_toy = device.type == "cpu" and num_weights < TOY_WEIGHTS
    if is_toy and device.num_threads > 1 and not device.is_num_threads_wanted:
        notes.append("1 thread: in layers as small as these, more would only wait for one another")
        return 1
    if device.type == "cpu":
        threads = "thread" if device.num_threads == 1 else "threads"
        notes.append(f"{device.num_threads} {threads}: {device.why_num_threads}")
    return device.num_threads


def _quantization(
    options: EngineOptions, model: ModelConfig, device: DeviceInfo, notes: list[str]
) -> str | None:
    wanted = options.model.quantization
    if model.quantization is not None:
        return model.quantization.method
    if device.type != "cpu" and model.source.kind == "gguf":
        return _gguf_on_gpu(options, notes)
    if wanted is not None or device.type != "cpu" or options.model.dtype != "auto":
        return wanted
    if model.source.kind != "gguf" or not device.has_native_kernels:
        return None
    # Alone, a sequence waits for weights from memory, and finer activations cost next to nothing.
    # The embedded model is there for a first answer, which matters more than its batches.
    is_fine = options.scheduler.max_num_seqs == 1 or model.source.is_embedded
    chosen = "gguf-a16" if is_fine else "gguf"
    notes.append(
        f"quantization became {chosen} because weights are computed fastest as the file stores "
        "them"
        + (", and one sequence pays little for finer activations" if is_fine else "")
        + "; dtype='float32' uses their exact values"
    )
    return chosen


def _gguf_on_gpu(options: EngineOptions, notes: list[str]) -> str | None:
    wanted = options.model.quantization
    if wanted == "gguf-a16":
        notes.append("quantization became gguf because a GPU does not round activations of blocks")
        return "gguf"
    if wanted is not None or options.model.dtype == "float32":
        return wanted
    notes.append(
        "quantization became gguf because weights take the least memory as the file stores them"
    )
    return "gguf"


def _dtype(options: EngineOptions, model: ModelConfig, device: DeviceInfo, notes: list[str]) -> str:
    wanted = options.model.dtype
    if wanted == "bfloat16" and not device.supports_bfloat16:
        raise OptionError(
            f"dtype='bfloat16' is not supported by {device.name}. Use 'float16' or 'float32'."
        )
    if wanted != "auto":
        return wanted
    if device.type == "cpu":
        if model.dtype != "float32":
            notes.append(
                f"dtype became float32 because CPUs compute slowly in {model.dtype}, "
                "the stored type"
            )
        return "float32"
    if model.dtype == "float32":
        chosen = "bfloat16" if device.supports_bfloat16 else "float16"
        notes.append(f"dtype became {chosen} because float32, the stored type, is slow on a GPU")
        return chosen
    if model.dtype == "bfloat16" and not device.supports_bfloat16:
        notes.append(f"dtype became float16 because {device.name} cannot compute in bfloat16")
        return "float16"
    return model.dtype


def _kv_cache_dtype(options: EngineOptions, notes: list[str], warnings: list[str]) -> str:
    """Of options whose device, dtype and quantisation are final."""
    wanted, dtype = options.cache.kv_cache_dtype, options.model.dtype
    narrows = options.device.device == "cpu" and dtype == "float32"
    if wanted == "auto":
        if options.model.quantization is None or not narrows:
            return dtype
        notes.append(
            "kv_cache_dtype became float16 because with such weights reading keys and values takes "
            "much of a step of many requests; kv_cache_dtype='float32' keeps them as computed"
        )
        return "float16"
    if wanted in FLOAT8:
        if not narrows or options.device.attention_backend == "torch":
            return wanted
        warnings.append(
            f"kv_cache_dtype became float16 because the CPU library has no {wanted}; "
            "attention_backend='torch' has it, and is slow"
        )
        return "float16"
    if wanted == dtype or (narrows and wanted == "float16"):
        return wanted
    allowed = "'float32' or 'float16'" if narrows else f"{dtype!r}, the type of activations"
    allowed += f", or {' or '.join(map(repr, FLOAT8))}"
    raise OptionError(
        f"kv_cache_dtype={wanted!r} is not supported with dtype={dtype!r} on "
        f"{options.device.device!r}: it can be {allowed}. Leave it unset, or use one of these."
    )


def _max_model_len(options: EngineOptions, model: ModelConfig, notes: list[str]) -> int:
    wanted, longest = options.model.max_model_len, model.max_position_tokens
    if wanted == AUTO_LENGTH:
        return longest
    if wanted is None:
        notes.append(f"max_model_len became {longest} because the model was made for that length")
        return longest
    if wanted > longest:
        raise OptionError(
            f"max_model_len={wanted} is longer than the {longest} tokens that "
            f"{model.source.name!r} was made for. Use at most {longest}, or raise the limit of the "
            f"model itself with hf_overrides={{'max_position_embeddings': {wanted}}}."
        )
    return wanted


def _with_step_limits(
    options: EngineOptions, device: DeviceInfo, notes: list[str]
) -> EngineOptions:
    wanted, length = options.scheduler, options.model.max_model_len
    assert length is not None
    usual_tokens, usual_seqs = _usual_step_limits(device)
    seqs = wanted.max_num_seqs or usual_seqs
    if wanted.max_num_batched_tokens is None:
        tokens = max(usual_tokens, seqs)
        if not wanted.enable_chunked_prefill:
            tokens = max(tokens, length)
        if tokens != usual_tokens:
            notes.append(
                f"max_num_batched_tokens became {tokens} because a step must have room for "
                f"{seqs} sequences"
                + ("" if wanted.enable_chunked_prefill else " and whole prompts")
            )
    else:
        tokens = wanted.max_num_batched_tokens
    if not wanted.enable_chunked_prefill and tokens < length:
        raise OptionError(
            f"max_num_batched_tokens={tokens} is less than max_model_len={length} while "
            "enable_chunked_prefill=False, so long prompts would never fit in a step. Raise it, "
            "lower max_model_len, or enable chunked prefill."
        )
    if seqs > tokens:
        notes.append(
            f"max_num_seqs became {tokens} because no more than {tokens} tokens "
            "(max_num_batched_tokens) run in a step"
        )
        seqs = tokens
    return options.replace(max_num_seqs=seqs, max_num_batched_tokens=tokens)


def _usual_step_limits(device: DeviceInfo) -> tuple[int, int]:
    if device.type == "cpu":
        return _CPU_LIMITS
    large = device.total_memory_bytes >= _LARGE_GPU_BYTES and "A100" not in device.name
    return _LARGE_GPU_LIMITS if large else _SMALL_GPU_LIMITS


def _gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
