"""The options of an engine: frozen, nested, each declared once. Flat names are vLLM's."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any

from quire.config.arguments import accepted_arguments
from quire.config.fields import check, option
from quire.config.log import LEVELS
from quire.config.speculative import SpeculativeConfig
from quire.config.structured import GrammarSettings
from quire.protocol.adapter import AdapterLimits
from quire.protocol.kv_spec import BLOCK_SIZES, FLOAT8, ITEM_BYTES
from quire.protocol.request import SchedulingPolicy

AUTO_LENGTH = -1
SERVED_MAX_QUEUED_REQS = 2048
DTYPES = ("auto", *ITEM_BYTES)
EXECUTOR_BACKENDS = ("uni", "mp", "ray", "external_launcher")
HOST_OPTIONS = frozenset(
    {
        *("node_rank", "num_threads", "hf_token", "download_dir", "log_level"),
        *("disable_log_stats", "master_addr", "tokenizer", "chat_template", "generation_config"),
    }
)
"""Those that hosts of one model may have different values of."""
DEFAULT_TIMEOUT_S = 600
LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf", "dummy")

_DTYPE_ALIASES = {"float": "float32", "half": "float16"}
_BYTE_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def as_text(value: Any) -> Any:
    return fspath(value) if isinstance(value, PathLike) else value


def _token(value: Any) -> Any:
    """True asks for the stored token, which is the default."""
    return None if value is True else value


def _dtype(value: Any) -> Any:
    """Names and torch.dtype objects alike, without importing torch."""
    name = str(value).removeprefix("torch.")
    return _DTYPE_ALIASES.get(name, name)


def _kv_cache_dtype(value: Any) -> Any:
    name = _dtype(value)
    names = {"fp8": "fp8_e4m3", **{torch_name: name for name, torch_name in FLOAT8.items()}}
    return names.get(name, name)


def _device(value: Any) -> Any:
    return value if value is None else str(value).removesuffix(":0")


def _length(value: Any) -> Any:
    if value == "auto":
        return AUTO_LENGTH
    return int(value) if isinstance(value, str) and value.lstrip("-").isdecimal() else value


def as_bytes(value: Any) -> Any:
    """Sizes such as 2GiB, 512MB or 1.5G; KB is 1000 bytes, K and KiB are 1024."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B)?", value.strip(), re.IGNORECASE)
    if match is None:
        return value
    number, prefix, suffix = match.groups()
    base = 1000 if (suffix or "").upper() == "B" else 1024
    return int(float(number) * base ** _BYTE_UNITS[prefix.upper()])


class CheckedOptions:
    """One group of options."""

    def __post_init__(self) -> None:
        check(self)


class OptionGroups:
    """All options of an engine or of a server, each group a field."""

    def flat(self) -> dict[str, Any]:
        """Every option by its flat name; secrets included."""
        return {
            name: getattr(getattr(self, group), name)
            for name, group in option_groups(type(self)).items()
        }


@dataclass(frozen=True)
class ModelOptions(CheckedOptions):
    """Which model, and how it is read."""

    model: str | None = option(
        None,
        "A folder, a .gguf file, or a name on the Hugging Face hub.",
        default_text="the embedded SmolLM2-135M-Instruct",
        convert=as_text,
    )
    tokenizer: str | None = option(
        None, "Folder or hub name of the tokenizer.", default_text="the model's", convert=as_text
    )
    skip_tokenizer_init: bool = option(
        False, "Load no tokenizer: prompts are token ids, outputs have no text."
    )
    revision: str | None = option(
        None, "Branch, tag or commit of the model on the hub.", default_text="the main branch"
    )
    tokenizer_revision: str | None = option(
        None, "Branch, tag or commit of the tokenizer on the hub.", default_text="as revision"
    )
    hf_token: str | None = option(
        None,
        "Access token for the hub.",
        default_text="the one that huggingface_hub has stored",
        convert=_token,
        secret=True,
    )
    download_dir: str | None = option(
        None,
        "Folder that files of the hub are kept in.",
        default_text="where huggingface_hub keeps them",
        convert=as_text,
    )
    hf_overrides: dict[str, Any] | None = option(
        None, "Values that replace those of config.json (JSON).", default_text="none"
    )
    chat_template: str | None = option(
        None, "A Jinja template or the path of one.", default_text="the model's", convert=as_text
    )
    dtype: str = option(
        "auto",
        "Type of weights and activations. auto: float32 on a CPU, as stored on a GPU.",
        choices=DTYPES,
        convert=_dtype,
    )
    quantization: str | None = option(
        None,
        "Round weights while they load (fp8, int8, int4), or compute from a GGUF file's blocks as "
        "they are stored: on a CPU with activations of 8 bits (gguf) or 15 (gguf-a16: slower in "
        "batches). The name of a checkpoint's format (awq, gptq, ...) may be given.",
        default_text="that of a quantised checkpoint; for GGUF files on a CPU, if dtype is unset: "
        "gguf-a16 for the embedded model and with max_num_seqs=1, else gguf; otherwise none",
    )
    load_format: str = option(
        "auto",
        "Which weight files to read; dummy makes random weights.",
        choices=LOAD_FORMATS,
    )
    seed: int = option(0, "Seeds requests that bring no seed, and dummy weights.")
    max_model_len: int | None = option(
        None,
        "Longest prompt plus output in tokens. -1 or auto: the longest that fits in memory.",
        default_text="the model's",
        accepts=lambda value: value == AUTO_LENGTH or value >= 1,
        rule="at least 1, or -1 or 'auto' for the longest that fits",
        convert=_length,
    )
    generation_config: str = option(
        "auto",
        "Where default sampling parameters come from. auto: the model's generation_config.json; "
        "vllm: nowhere; else a folder that holds such a file.",
        convert=as_text,
    )
    max_logprobs: int = option(
        20, "Most logprobs a request may ask for per token; -1: no limit.", minimum=-1
    )


@dataclass(frozen=True)
class CacheOptions(CheckedOptions):
    """How the KV cache is cut into blocks, and how much memory it takes."""

    block_size: int = option(
        16, "Tokens per block.", choices=BLOCK_SIZES, rule="a power of two from 4 to 128"
    )
    gpu_memory_utilization: float | None = option(
        None,
        "Share of the device's memory that the engine may use.",
        default_text="0.9; on a CPU the cache takes 4 GiB or a quarter of the memory available, "
        "whichever is less",
        accepts=lambda value: 0 < value <= 1,
        rule="above 0 and at most 1",
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "Memory for the KV cache, such as 2GiB; overrides gpu_memory_utilization.",
        default_text="measured",
        accepts=lambda value: value >= 1,
        rule="a number of bytes or a size such as 2GiB",
        convert=as_bytes,
    )
    num_gpu_blocks_override: int | None = option(
        None, "Number of KV blocks, whatever the memory.", default_text="measured", minimum=1
    )
    enable_prefix_caching: bool = option(True, "Share the blocks of common prompt prefixes.")
    kv_cache_dtype: str = option(
        "auto",
        "Type of keys and values. auto: as dtype, but float16 where a CPU computes from 8-bit or "
        "packed weights. fp8 is fp8_e4m3.",
        choices=(*DTYPES, *FLOAT8),
        convert=_kv_cache_dtype,
    )


@dataclass(frozen=True)
class SchedulerOptions(CheckedOptions):
    """What runs in a step."""

    max_num_seqs: int | None = option(
        None, "Most sequences in a step.", default_text="256; 1024 on large GPUs", minimum=1
    )
    max_num_batched_tokens: int | None = option(
        None,
        "Most tokens in a step.",
        default_text="4096 on a CPU, 8192 or 16384 on a GPU",
        minimum=1,
    )
    scheduling_policy: str = option(
        SchedulingPolicy.FCFS.value,
        "Order of waiting requests: first come first served, or lowest priority value first.",
        choices=tuple(one.value for one in SchedulingPolicy),
    )
    enable_chunked_prefill: bool = option(
        True, "Spread long prompts over several steps, between other requests' tokens."
    )
    max_steps_in_flight: int | None = option(
        None,
        "Steps launched before the first one's result is read.",
        default_text="2 on a GPU, and on a CPU whose ranks are processes that leave cores free; "
        "the stages of a pipeline; else 1",
        minimum=1,
    )
    long_prefill_token_threshold: int = option(
        0, "Most prompt tokens that one request may compute in a step; 0: no limit.", minimum=0
    )
    target_itl_ms: float | None = option(
        None,
        "Gap between two tokens of a running stream, in milliseconds, that prompts of others may "
        "cause: they are taken in chunks that keep to it. 0: any gap, for throughput alone.",
        default_text="automatic: 36, or twice the time of a decode step where that is more",
        minimum=0,
    )
    max_num_queued_reqs: int | None = option(
        None,
        "Most requests that may wait; more are refused with an OverloadedError. 0: no limit.",
        default_text=f"{SERVED_MAX_QUEUED_REQS} for a server, else no limit",
        minimum=0,
    )
    max_num_queued_tokens: int | None = option(
        None,
        "Most prompt tokens that may wait; more are refused with an OverloadedError. 0: no limit.",
        default_text="no limit",
        minimum=0,
    )
    reservation: str = option(
        "paged",
        "paged takes blocks as they are needed. max_length reserves each request's longest "
        "possible length up front and exists for comparison only.",
        choices=("paged", "max_length"),
    )


@dataclass(frozen=True)
class DeviceOptions(CheckedOptions):
    """Where the model runs."""

    device: str = option(
        "auto",
        "Where to run. auto: the first CUDA GPU if there is one, else the CPU.",
        choices=("auto", "cpu", "cuda"),
        convert=_device,
    )
    attention_backend: str | None = option(
        None,
        "Which attention kernel to use: triton (GPU), cpu (C++) or torch (slow, for comparison).",
        default_text="the fastest that can do the job",
    )
    enforce_eager: bool = option(False, "Run a GPU without CUDA graphs; a CPU has none.")
    disable_cascade_attn: bool = option(
        False,
        "Read a prefix that running requests share once for each of them instead of once for all.",
    )
    num_threads: int | None = option(
        None, "CPU threads.", default_text="the physical cores this process may use", minimum=1
    )


@dataclass(frozen=True)
class ParallelOptions(CheckedOptions):
    """How many devices share the model, and where their processes run."""

    tensor_parallel_size: int = option(1, "Ranks that share each layer, a device each.", minimum=1)
    pipeline_parallel_size: int = option(
        1, "Stages that have some of the layers each, on devices of their own.", minimum=1
    )
    enable_expert_parallel: bool = option(
        False,
        "Whole experts on each tensor-parallel rank, instead of a part of every expert. No effect "
        "on models without experts.",
    )
    distributed_executor_backend: str | None = option(
        None,
        "Where the ranks run. uni: one rank, in the engine's process; mp: processes of this host, "
        "or of nnodes; ray: on the nodes of a Ray cluster; external_launcher: in processes that "
        "torchrun or the like has started, each with an LLM of its own.",
        default_text="uni for one rank, else mp",
        choices=EXECUTOR_BACKENDS,
    )
    nnodes: int = option(1, "Hosts of the backend mp: each runs this command.", minimum=1)
    node_rank: int = option(0, "Which of the nnodes hosts this one is; 0 serves.", minimum=0)
    master_addr: str = option("127.0.0.1", "Address of host 0 that all hosts reach.")
    master_port: int = option(
        29501,
        "Port of host 0 at which the ranks meet.",
        accepts=lambda value: 1 <= value <= 65535,
        rule="a port from 1 to 65535",
    )
    distributed_timeout_seconds: int | None = option(
        None,
        "How long a rank may take for a start-up phase or a step before the engine stops.",
        default_text="600",
        minimum=1,
    )

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def has_rank_processes(self) -> bool:
        """Whether ranks run in other processes than the engine."""
        backend = self.distributed_executor_backend
        return backend in ("mp", "ray") or (backend is None and self.num_ranks > 1)

    @property
    def is_launched_outside(self) -> bool:
        """Whether each rank has an engine of its own, all of which plan alike."""
        return self.distributed_executor_backend == "external_launcher"

    @property
    def timeout_s(self) -> float:
        return float(self.distributed_timeout_seconds or DEFAULT_TIMEOUT_S)


@dataclass(frozen=True)
class DecodingOptions(CheckedOptions):
    """How tokens are sampled."""

    structured_outputs_config: dict[str, Any] | None = option(
        None,
        "Settings of structured output (JSON): jump_ahead, disable_any_whitespace (true: none, "
        "false: any), whitespace_pattern, disable_additional_properties.",
        default_text='{"jump_ahead": true}',
        accepts=lambda value: GrammarSettings.from_config(value) is not None,
    )
    speculative_config: dict[str, Any] | None = option(
        None,
        "Draft tokens and verify several in one step (JSON): method (ngram; auto, which drafts "
        "from the text, and by a model if one is named, only where that pays; draft_model; "
        "eagle3; mtp), num_speculative_tokens, "
        "prompt_lookup_min, prompt_lookup_max, model, quantization, "
        "num_speculative_tokens_per_batch_size. The text stays the same.",
        default_text="none are drafted",
        accepts=lambda value: bool(SpeculativeConfig.from_config(value)) or value == {},
    )

    @property
    def speculation(self) -> SpeculativeConfig | None:
        return SpeculativeConfig.from_config(self.speculative_config)


@dataclass(frozen=True)
class AdapterOptions(CheckedOptions):
    """Fine-tuned models that share the weights of this one."""

    enable_lora: bool = option(
        False, "Serve adapters (LoRA) of the model; memory for them is reserved at the start."
    )
    max_loras: int = option(
        1,
        "Adapters of the largest rank that steps may use at once; of lower rank there may be more.",
        minimum=1,
    )
    max_lora_rank: int = option(
        16,
        "Largest rank of an adapter.",
        accepts=lambda value: 1 <= value <= 4096,
        rule="from 1 to 4096",
    )
    max_cpu_loras: int | None = option(
        None,
        "Adapters in the memory of the host, from where they come to the device.",
        default_text="as many as fit into an eighth of its memory, by the size of their files",
        minimum=1,
    )

    @property
    def limits(self) -> AdapterLimits | None:
        """None: no adapters are served."""
        if not self.enable_lora:
            return None
        return AdapterLimits(self.max_loras, self.max_lora_rank, self.max_cpu_loras)


@dataclass(frozen=True)
class ObservabilityOptions(CheckedOptions):
    """What the engine tells about itself."""

    disable_log_stats: bool | None = option(
        None,
        "Do not log a line of statistics every 10 s while there is work.",
        default_text="yes in Python, no in a server",
    )
    log_level: str | None = option(
        None,
        "How much is said on standard error: at INFO three lines when an engine starts, at DEBUG "
        "every choice that was made. No effect where the application has set up logging itself.",
        default_text="that of QUIRE_LOG_LEVEL, else INFO",
        choices=LEVELS,
        convert=lambda value: value.upper() if isinstance(value, str) else value,
    )


@dataclass(frozen=True)
class EngineOptions(OptionGroups):
    """All options of one engine."""

    model: ModelOptions = field(default_factory=ModelOptions, metadata={"title": "model"})
    cache: CacheOptions = field(default_factory=CacheOptions, metadata={"title": "KV cache"})
    scheduler: SchedulerOptions = field(
        default_factory=SchedulerOptions, metadata={"title": "scheduler"}
    )
    device: DeviceOptions = field(default_factory=DeviceOptions, metadata={"title": "device"})
    parallel: ParallelOptions = field(
        default_factory=ParallelOptions, metadata={"title": "several devices"}
    )
    decoding: DecodingOptions = field(
        default_factory=DecodingOptions, metadata={"title": "decoding"}
    )
    adapters: AdapterOptions = field(
        default_factory=AdapterOptions, metadata={"title": "adapters (LoRA)"}
    )
    observability: ObservabilityOptions = field(
        default_factory=ObservabilityOptions, metadata={"title": "observability"}
    )

    @classmethod
    def from_arguments(cls, **arguments: Any) -> EngineOptions:
        """Options from flat keyword arguments, as `LLM` takes them; None means the default."""
        # Warnings point at the line that calls LLM or AsyncLLM.
        accepted = accepted_arguments(arguments, option_groups(), stacklevel=5)
        return cls().replace(**{k: v for k, v in accepted.items() if v is not None})

    def for_server(self) -> EngineOptions:
        """With a server's defaults: its clients can come back later, a program's prompts cannot."""
        defaults = {"max_num_queued_reqs": SERVED_MAX_QUEUED_REQS, "disable_log_stats": False}
        given = self.flat()
        return self.replace(**{k: v for k, v in defaults.items() if given[k] is None})

    def replace(self, **values: Any) -> EngineOptions:
        """A copy with some options changed, given by their flat names."""
        groups = option_groups()
        changes: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            changes.setdefault(groups[name], {})[name] = value
        return dataclasses.replace(
            self,
            **{
                group: dataclasses.replace(getattr(self, group), **changed)
                for group, changed in changes.items()
            },
        )


def option_groups(owner: Any = EngineOptions) -> dict[str, str]:
    """Flat option name -> the group that it belongs to."""
    return {
        item.name: group.name
        for group in dataclasses.fields(owner)
        for item in dataclasses.fields(group_class(group))
    }


def group_class(group: dataclasses.Field[Any]) -> type[Any]:
    """The dataclass of one group of options."""
    kind = group.default_factory
    assert isinstance(kind, type)
    return kind
