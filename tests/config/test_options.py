"""Options: checked once with helpful errors, named as in vLLM, resolved by one pure function."""

from __future__ import annotations

import warnings
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.config import arguments
from quire.config.device import DeviceInfo, cpu_device, cpu_memory
from quire.config.experts import ExpertsConfig
from quire.config.locate import ModelSource
from quire.config.model import ModelConfig, load_model_config
from quire.config.options import CacheOptions, EngineOptions, option_groups
from quire.config.quantization import parse_quantization
from quire.config.resolve import GIB, cpu_cache_bytes, resolve
from quire.config.server import ServingOptions
from quire.files.json_file import CheckedValues
from quire.layers.parallel import Parallel
from quire.protocol.errors import OptionError, QuireError

CPU = DeviceInfo("cpu", "a CPU", 16 * GIB, num_threads=8)
GPU = DeviceInfo("cuda", "NVIDIA H200", 140 * GIB, num_threads=16)

MODEL = ModelConfig(
    source=ModelSource("some/model", "folder", Path("model")),
    architecture="LlamaForCausalLM",
    model_type="llama",
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=256,
    max_position_tokens=2048,
    norm_eps=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    tie_word_embeddings=False,
    sliding_window=None,
    attention_bias=False,
    mlp_bias=False,
    hidden_act="silu",
    dtype="bfloat16",
    bos_token_id=1,
    eos_token_ids=(2,),
    quantization=None,
    generation={},
    raw={},
)


def options(**values: Any) -> EngineOptions:
    return EngineOptions.from_arguments(**values)


def resolved(
    device: DeviceInfo = CPU, model: ModelConfig = MODEL, /, **values: Any
) -> dict[str, Any]:
    return resolve(options(**values), model, device).options.flat()


# Checks


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 3),
        ("block_size", 256),
        ("block_size", "16"),
        ("block_size", True),
        ("block_size", 16.0),
        ("gpu_memory_utilization", float("nan")),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", "most"),
        ("kv_cache_memory_bytes", 0),
        ("kv_cache_memory_bytes", "2 apples"),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", -1),
        ("max_model_len", 0),
        ("max_model_len", -2),
        ("max_model_len", "long"),
        ("tensor_parallel_size", 0),
        ("dtype", "int8"),
        ("device", "tpu"),
        ("load_format", "zip"),
        ("scheduling_policy", "random"),
        ("enable_prefix_caching", "yes"),
        ("hf_overrides", [1]),
        ("model", 7),
        ("seed", 0.5),
    ],
)
def test_a_bad_value_is_named_with_its_option(name: str, value: object) -> None:
    """Nothing unchecked reaches the engine, and the message says what to change."""
    with pytest.raises(OptionError) as raised:
        options(**{name: value})
    assert name in str(raised.value)
    assert repr(value) in str(raised.value)
    assert isinstance(raised.value, QuireError) and isinstance(raised.value, ValueError)


@pytest.mark.parametrize("size", [4, 8, 16, 32, 64, 128, np.int64(32)])
def test_every_promised_block_size_is_accepted(size: int) -> None:
    """Powers of two from 4 to 128; integers of numpy are integers."""
    stored = options(block_size=size).cache.block_size
    assert stored == size and type(stored) is int


@pytest.mark.parametrize(
    ("name", "given", "stored"),
    [
        ("max_model_len", "auto", -1),
        ("max_model_len", "4096", 4096),
        ("kv_cache_memory_bytes", "2GiB", 2 << 30),
        ("kv_cache_memory_bytes", "1.5g", 3 << 29),
        ("kv_cache_memory_bytes", "500 MB", 500_000_000),
        ("dtype", "half", "float16"),
        ("dtype", "float", "float32"),
        ("device", "cuda:0", "cuda"),
        ("model", Path("a/b"), "a/b"),
        ("gpu_memory_utilization", 1, 1.0),
        ("hf_token", True, None),
    ],
)
def test_accepted_spellings_are_stored_as_one(name: str, given: Any, stored: Any) -> None:
    """Code that reads options never has to know how the user wrote them."""
    assert options(**{name: given}).flat()[name] == stored


def test_torch_dtypes_are_accepted() -> None:
    """Scripts pass torch.float16 as often as "float16"."""
    import torch

    assert options(dtype=torch.bfloat16).model.dtype == "bfloat16"


def test_options_are_frozen_and_replaced_by_flat_name() -> None:
    """Options that change after they were checked are how such code goes bad."""
    before = options(block_size=8)
    with pytest.raises(FrozenInstanceError):
        before.cache.block_size = 16  # type: ignore[misc]
    after = before.replace(block_size=32, max_num_seqs=5)
    assert (before.cache.block_size, after.cache.block_size) == (8, 32)
    assert after.scheduler.max_num_seqs == 5
    with pytest.raises(OptionError, match="block_size"):
        before.replace(block_size=3)


def test_the_hub_token_is_not_shown() -> None:
    """Options are logged; secrets are not."""
    assert "hf_secret" not in repr(options(hf_token="hf_secret"))


# vLLM's arguments


def test_none_means_the_default() -> None:
    """vLLM's signatures are full of None for "not given"."""
    assert options(**dict.fromkeys(option_groups())) == EngineOptions()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("swap_space", 4),
        ("disable_custom_all_reduce", True),
        ("compilation_config", {"level": 3}),
        ("max_seq_len_to_capture", 8192),
        ("trust_remote_code", True),
    ],
)
def test_harmless_arguments_warn_once(name: str, value: object) -> None:
    """A script for vLLM runs, and says what had no effect."""
    with pytest.warns(UserWarning, match=name) as caught:
        assert options(**{name: value}) == EngineOptions()
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("enable_prompt_adapter", True, False),
        ("num_speculative_tokens", 3, None),
        ("spec_method", "eagle", None),
        ("cpu_offload_gb", 4, 0.0),
        ("data_parallel_size", 2, 1),
        ("runner", "pooling", "auto"),
        ("task", "embed", "generate"),
        ("logits_processors", [object], None),
        ("quantization_config", {"a": 1}, None),
        ("mm_processor_kwargs", {"a": 1}, {}),
        ("kv_transfer_config", object(), None),
        ("logprobs_mode", "raw_logits", "raw_logprobs"),
        ("tokenizer_mode", "mistral", "slow"),
    ],
)
def test_arguments_that_change_results_are_refused(name: str, value: Any, neutral: Any) -> None:
    """Ignoring them would give other outputs in silence; vLLM's own default is fine."""
    with pytest.raises(OptionError, match=f"{name}.*refused"):
        options(**{name: value})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert options(**{name: neutral}) == EngineOptions()


def test_an_unknown_name_suggests_the_nearest() -> None:
    """A typo must not become a default in silence."""
    with pytest.raises(OptionError, match=r"gpu_memory_utilisation.*Did you mean gpu_memory_util"):
        options(gpu_memory_utilisation=0.5)
    with pytest.raises(OptionError, match="zzzzzz is not an option"):
        options(zzzzzz=1)


def test_each_argument_is_in_one_class() -> None:
    """A name in two classes would be treated by whichever is looked up first."""
    classes = [set(option_groups()), set(arguments.IGNORED), set(arguments.REFUSED)]
    assert sum(map(len, classes)) == len(set().union(*classes))


# Resolution


def test_resolution_fills_what_depends_on_the_device() -> None:
    """The defaults a CPU and a large GPU get."""
    cpu = resolved(CPU)
    assert cpu["device"] == "cpu" and cpu["dtype"] == "float32"
    assert (cpu["max_num_batched_tokens"], cpu["max_num_seqs"]) == (4096, 256)
    assert cpu["max_steps_in_flight"] == 1
    assert cpu["max_model_len"] == 2048
    gpu = resolved(GPU)
    assert gpu["dtype"] == "bfloat16" and gpu["gpu_memory_utilization"] == 0.9
    assert (gpu["max_num_batched_tokens"], gpu["max_num_seqs"]) == (16384, 1024)
    assert gpu["max_steps_in_flight"] == 2
    small = resolved(replace(GPU, total_memory_bytes=24 * GIB))
    assert (small["max_num_batched_tokens"], small["max_num_seqs"]) == (8192, 256)


@pytest.mark.parametrize(
    ("num_processors", "values", "steps"),
    [
        (9, {"tensor_parallel_size": 2}, 2),
        (9, {"distributed_executor_backend": "mp"}, 2),
        (9, {"tensor_parallel_size": 2, "max_steps_in_flight": 1}, 1),
        (8, {"tensor_parallel_size": 2, "num_threads": 8}, 1),
        (2, {"tensor_parallel_size": 2, "num_threads": 1}, 1),
        (9, {}, 1),
        (9, {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}, 1),
    ],
)
def test_ranks_that_leave_cores_free_have_two_steps_in_flight(
    num_processors: int, values: dict[str, Any], steps: int
) -> None:
    """The engine then plans the next step while ranks compute; on their own cores it would hold
    them up."""
    device = replace(CPU, num_processors=num_processors)
    assert resolved(device, **values)["max_steps_in_flight"] == steps


def test_engines_of_a_launcher_follow_no_clock() -> None:
    """Each of them would bound prompts by times of its own."""
    wanted = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
    result = resolve(options(**wanted), MODEL, CPU)
    assert result.options.scheduler.target_itl_ms == 0
    assert "target_itl_ms became 0" in "".join(result.notes)
    assert resolve(result.options, MODEL, CPU).options == result.options
    assert resolved(CPU, tensor_parallel_size=2)["target_itl_ms"] is None


def test_a_pipeline_has_as_many_steps_in_flight_as_stages() -> None:
    """With fewer a stage would be idle, and there are no rows for more."""
    model = replace(MODEL, num_layers=3)
    given = resolve(options(pipeline_parallel_size=3), model, CPU).options
    assert given.scheduler.max_steps_in_flight == 3
    assert resolve(given, model, CPU).options == given
    for steps in (1, 4):
        with pytest.raises(OptionError, match=f"max_steps_in_flight={steps}.*Leave"):
            resolved(CPU, model, pipeline_parallel_size=3, max_steps_in_flight=steps)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"pipeline_parallel_size": 5},
            r"pipeline_parallel_size=5 is more than the 4 layers of .*at most 4",
        ),
        (
            {"tensor_parallel_size": 16},
            r"tensor_parallel_size=16 is more than the 12 attention heads of .*at most 12; "
            r"without padding: 1, 2, 3, 6, 12\.",
        ),
    ],
)
def test_ranks_that_would_have_nothing_are_refused(values: dict[str, Any], message: str) -> None:
    model = replace(MODEL, num_heads=12, num_kv_heads=6, num_layers=4)
    with pytest.raises(OptionError, match=message):
        resolve(options(**values), model, CPU)


def test_ranks_that_need_padding_are_told_of_sizes_that_do_not() -> None:
    """By a warning where some have nothing else."""
    model = replace(MODEL, num_heads=12, num_kv_heads=6)
    for size in (1, 2, 3, 6, 12):
        found = resolve(options(tensor_parallel_size=size), model, CPU)
        assert "padding" not in " ".join(found.notes + found.warnings)
    for size, num_idle in ((4, 1), (5, 2), (7, 1), (8, 2)):
        (said,) = resolve(options(tensor_parallel_size=size), model, CPU).warnings
        assert f"tensor_parallel_size={size} does not divide 12 attention heads and 6 KV" in said
        assert f"{num_idle} of the ranks compute nothing but padding" in said
        assert "Without padding: 1, 2, 3, 6, 12." in said
        shares = [Parallel(rank, size).heads(12, 6) for rank in range(size)]
        assert sum(share.kv_first >= 6 for share in shares) == num_idle
    model = replace(MODEL, num_heads=15, num_kv_heads=5)
    other = resolve(options(tensor_parallel_size=3), model, CPU)
    assert not other.warnings and "the last rank computes some padding" in " ".join(other.notes)


def test_a_single_kv_head_is_kept_by_all_ranks() -> None:
    """As is the latent of latent attention: query heads are what is divided."""
    model = replace(MODEL, num_heads=16, num_kv_heads=1)
    for size, num_idle in ((3, 0), (5, 1), (6, 0), (9, 1)):
        found = resolve(options(tensor_parallel_size=size), model, CPU)
        (said,) = (one for one in found.warnings + found.notes if "does not divide" in one)
        assert f"does not divide 16 attention heads: {num_idle or 'the last'}" in said
        assert (said in found.warnings) == bool(num_idle)
        shares = [Parallel(rank, size).heads(16, 1) for rank in range(size)]
        assert sum(share.first >= 16 for share in shares) == num_idle


def test_whole_experts_that_do_not_divide() -> None:
    """A rank without any is warned of; without expert parallelism nothing is said."""
    experts = ExpertsConfig(5, 2, 96, (True, True))
    model = replace(MODEL, num_heads=8, num_kv_heads=8, experts=experts)

    def said(size: int, is_whole: bool, model: ModelConfig = model) -> tuple[str, str]:
        wanted = options(tensor_parallel_size=size, enable_expert_parallel=is_whole)
        found = resolve(wanted, model, CPU)
        about = [one for one in found.notes if "expert" in one]
        return " ".join(found.warnings), " ".join(about)

    assert said(8, True)[0].startswith(
        "enable_expert_parallel leaves 3 of tensor_parallel_size=8 ranks without any of the 5"
    )
    assert said(2, True) == (
        "",
        "enable_expert_parallel: ranks have 2 or 3 of 5 experts, as tensor_parallel_size=2 does "
        "not divide these",
    )
    assert said(8, False) == said(1, True) == ("", "")
    assert "does nothing: 'some/model' has no experts" in said(2, True, MODEL)[1]


def test_toy_models_get_one_thread_unless_more_are_asked_for() -> None:
    model = replace(MODEL, hidden_size=576, num_layers=30)
    assert resolved(CPU, model)["num_threads"] == 8
    assert resolved(CPU, MODEL)["num_threads"] == 1
    assert resolved(CPU, MODEL, num_threads=4)["num_threads"] == 4
    assert resolved(replace(CPU, is_num_threads_wanted=True), MODEL)["num_threads"] == 8
    assert "1 thread" in " ".join(resolve(options(), MODEL, CPU).notes)


def test_resolution_keeps_what_the_user_chose_and_changes_nothing_else() -> None:
    """Resolving twice is resolving once, and the given options are not touched."""
    given = options(dtype="float16", max_num_seqs=7, max_model_len=100, max_steps_in_flight=4)
    first = resolve(given, MODEL, CPU)
    flat = first.options.flat()
    assert (flat["dtype"], flat["max_num_seqs"], flat["max_model_len"]) == ("float16", 7, 100)
    assert flat["max_steps_in_flight"] == 4
    assert given.scheduler.max_num_batched_tokens is None
    assert resolve(first.options, MODEL, CPU).options == first.options


def test_resolution_says_why() -> None:
    """Start-up logs these lines; a changed value without a reason is a mystery."""
    notes = "\n".join(resolve(options(max_num_batched_tokens=64), MODEL, CPU).notes)
    assert "dtype became float32 because" in notes
    assert "max_num_seqs became 64 because" in notes


def test_float32_weights_on_a_gpu() -> None:
    """auto never computes in float32 on a GPU, nor in a type it does not have."""
    model = replace(MODEL, dtype="float32")
    assert resolved(GPU, model)["dtype"] == "bfloat16"
    old = replace(GPU, supports_bfloat16=False)
    assert resolved(old, model)["dtype"] == "float16"
    assert resolved(GPU, model, dtype="float32")["dtype"] == "float32"
    with pytest.raises(OptionError, match="dtype='bfloat16'"):
        resolved(old, model, dtype="bfloat16")


def test_context_length() -> None:
    """-1 asks for what fits, up to the model's length; more than that is refused."""
    result = resolve(options(max_model_len="auto"), MODEL, CPU)
    assert result.fits_max_model_len and result.options.model.max_model_len == 2048
    assert not resolve(options(), MODEL, CPU).fits_max_model_len
    with pytest.raises(OptionError, match=r"max_model_len=4096.*2048.*hf_overrides"):
        resolved(max_model_len=4096)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quantization": "bitsandbytes"}, "'bitsandbytes' is not supported.*`quire quantize`"),
        ({"quantization": "awq"}, "'awq' needs a checkpoint in this format.*'some/model'.*'int4'"),
        ({"quantization": "gguf"}, "quantization='gguf' needs a .gguf file.*'some/model'"),
        ({"quantization": "gguf-a16"}, "quantization='gguf-a16' needs a .gguf file"),
        ({"quantization": "gguf", "dtype": "float32"}, "Leave one of them unset"),
        ({"quantization": "int8", "dtype": "bfloat16"}, "dtype.*'bfloat16'"),
        ({"device": "cuda"}, "device='cuda' was not found"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
            "max_num_batched_tokens=64.*max_model_len=2048",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(values: dict[str, Any], message: str) -> None:
    """Before any weights are read."""
    with pytest.raises(OptionError, match=message):
        resolved(**values)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "gguf"),
        ({"max_num_seqs": 1}, "gguf-a16"),
        ({"quantization": "gguf-a16"}, "gguf-a16"),
        ({"max_num_seqs": 1, "quantization": "gguf"}, "gguf"),
        ({"dtype": "float32"}, None),
        ({"quantization": "int8"}, "int8"),
    ],
)
def test_a_gguf_file_is_computed_from_its_blocks(
    changes: dict[str, Any], expected: str | None
) -> None:
    """Unless dtype asks for exact weights, or something else is wanted."""
    model = replace(MODEL, source=replace(MODEL.source, kind="gguf"))
    device = replace(CPU, has_native_kernels=True)
    found = resolve(options(**changes), model, device)
    assert found.options.model.quantization == expected
    chosen = not {"quantization", "dtype"} & changes.keys()
    assert any(f"became {expected} because" in note for note in found.notes) == chosen
    without = resolve(options(**changes), model, CPU)
    assert without.options.model.quantization == (None if chosen else expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "gguf"),
        ({"dtype": "bfloat16"}, "gguf"),
        ({"dtype": "float32"}, None),
        ({"quantization": "gguf-a16"}, "gguf"),
        ({"quantization": "fp8"}, "fp8"),
    ],
)
def test_a_gguf_file_stays_packed_on_a_gpu(changes: dict[str, Any], expected: str | None) -> None:
    model = replace(MODEL, source=replace(MODEL.source, kind="gguf"))
    found = resolve(options(**changes), model, GPU)
    assert found.options.model.quantization == expected
    said = any("quantization became gguf because" in note for note in found.notes)
    assert said == (expected == "gguf")


def test_the_embedded_model_answers_first_and_is_quick_second() -> None:
    """Its activations are fine even where many sequences run."""
    model = load_model_config(None)
    found = resolve(options(max_num_seqs=64), model, replace(CPU, has_native_kernels=True))
    assert found.options.model.quantization == "gguf-a16"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "float32"),
        ({"quantization": "int8"}, "float16"),
        ({"quantization": "int8", "dtype": "float32"}, "float16"),
        ({"quantization": "int8", "kv_cache_dtype": "float"}, "float32"),
        ({"kv_cache_dtype": "half"}, "float16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_keys_and_values_are_halves_beside_packed_weights(
    changes: dict[str, Any], expected: str
) -> None:
    """Unless a user chooses; float32 stays exact by default, and start-up says what is not."""
    found = resolve(options(**changes), MODEL, CPU)
    assert found.options.cache.kv_cache_dtype == expected
    said = any("kv_cache_dtype became float16 because" in note for note in found.notes)
    assert said == ("quantization" in changes and "kv_cache_dtype" not in changes)
    packed = replace(MODEL, source=replace(MODEL.source, kind="gguf"))
    auto = resolve(options(), packed, replace(CPU, has_native_kernels=True))
    assert auto.options.cache.kv_cache_dtype == "float16"


@pytest.mark.parametrize(
    ("device", "changes", "expected"),
    [
        (GPU, {"kv_cache_dtype": "fp8"}, "fp8_e4m3"),
        (GPU, {"kv_cache_dtype": "fp8_e5m2", "dtype": "float16"}, "fp8_e5m2"),
        (GPU, {"kv_cache_dtype": "torch.float8_e4m3fn"}, "fp8_e4m3"),
        (CPU, {"kv_cache_dtype": "fp8", "dtype": "bfloat16"}, "fp8_e4m3"),
        (CPU, {"kv_cache_dtype": "fp8_e5m2", "attention_backend": "torch"}, "fp8_e5m2"),
        (CPU, {"kv_cache_dtype": "fp8"}, "float16"),
    ],
)
def test_keys_and_values_in_8_bits(
    device: DeviceInfo, changes: dict[str, Any], expected: str
) -> None:
    """The library of a CPU has none: float16 takes their place, and start-up says so."""
    found = resolve(options(**changes), MODEL, device)
    assert found.options.cache.kv_cache_dtype == expected
    said = any("became float16 because the CPU library has no fp8" in one for one in found.warnings)
    assert said == (expected == "float16")


@pytest.mark.parametrize(
    ("device", "changes", "message"),
    [
        (CPU, {"kv_cache_dtype": "bfloat16"}, "'bfloat16' .*dtype='float32'.*or 'float16'"),
        (CPU, {"kv_cache_dtype": "float16", "dtype": "bfloat16"}, "it can be 'bfloat16'"),
        (GPU, {"kv_cache_dtype": "float16"}, "dtype='bfloat16' on 'cuda'"),
        (GPU, {"kv_cache_dtype": "fp8_e3m4"}, "kv_cache_dtype must be one of .*'fp8_e3m4'"),
    ],
)
def test_other_types_of_keys_and_values_are_refused(
    device: DeviceInfo, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        resolved(device, **changes)


def test_a_quantised_checkpoint_names_its_method() -> None:
    described = CheckedValues(Path("model/config.json"), {"quant_method": "gptq", "bits": 4})
    model = replace(MODEL, quantization=parse_quantization(described), dtype="float16")
    for wanted in (None, "gptq", "gptq_marlin"):
        assert resolved(CPU, model, quantization=wanted)["quantization"] == "gptq"
    found = resolved(GPU, model)
    assert (found["quantization"], found["dtype"]) == ("gptq", "float16")
    with pytest.raises(OptionError, match=r"'gptq' computes activations in 16 bits.*'float32'"):
        resolved(GPU, model, dtype="float32")
    for other in ("awq", "fp8", "int8"):
        message = rf"quantization='{other}' contradicts model/config.json.*'gptq'"
        with pytest.raises(OptionError, match=message):
            resolved(CPU, model, quantization=other)


def test_whole_prompts_make_room_for_themselves() -> None:
    """Without chunked prefill a step must hold the longest prompt."""
    long = replace(MODEL, max_position_tokens=9000)
    flat = resolved(CPU, long, enable_chunked_prefill=False)
    assert flat["max_num_batched_tokens"] == 9000


def test_cache_memory_on_a_cpu() -> None:
    """4 GiB or a quarter of what is free, unless the user gives a size or a share of memory."""
    assert cpu_cache_bytes(CacheOptions(), 8 * GIB, 64 * GIB) == 2 * GIB
    assert cpu_cache_bytes(CacheOptions(), 60 * GIB, 64 * GIB) == 4 * GIB
    assert cpu_cache_bytes(CacheOptions(kv_cache_memory_bytes=5), 60 * GIB, 64 * GIB) == 5
    half = CacheOptions(gpu_memory_utilization=0.5)
    assert cpu_cache_bytes(half, 60 * GIB, 64 * GIB) == 28 * GIB
    with pytest.raises(OptionError, match=r"gpu_memory_utilization=0.5.*40.0 GiB are in use"):
        cpu_cache_bytes(half, 24 * GIB, 64 * GIB)


# The machine


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {12 * GIB // 1024} kB\n"


def test_memory_without_limits(tmp_path: Path) -> None:
    """The machine's own numbers."""
    assert cpu_memory(machine(tmp_path, {"proc/meminfo": MEMINFO})) == (16 * GIB, 12 * GIB)


@pytest.mark.parametrize("prefix", ["", "my-app", "9", "a b", "quire:"])
def test_metric_names_that_prometheus_cannot_read(prefix: str) -> None:
    with pytest.raises(OptionError, match=r"metrics_prefix must be a name of letters.*'quire'"):
        ServingOptions(metrics_prefix=prefix)


def test_memory_within_a_version_2_group(tmp_path: Path) -> None:
    """The tightest limit on the way up counts; cached files are free memory."""
    group = "sys/fs/cgroup/jobs/mine"
    root = machine(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/jobs/mine\n",
            f"{group}/memory.max": "max\n",
            f"{group}/memory.current": "1\n",
            "sys/fs/cgroup/jobs/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/jobs/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/jobs/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        },
    )
    assert cpu_memory(root) == (4 * GIB, 2 * GIB)


def test_memory_within_a_version_1_group(tmp_path: Path) -> None:
    """Inside a container the path is the host's, and only the mount point is there."""
    root = machine(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
        },
    )
    assert cpu_memory(root) == (2 * GIB, GIB)


def test_this_machine() -> None:
    """The real /proc and /sys can be read."""
    device = cpu_device()
    assert device.type == "cpu" and device.num_threads >= 1
    assert device.total_memory_bytes > 0


def test_ranks_are_late_before_their_engine_is() -> None:
    """The engine says which rank is late; one that is killed before could not."""
    served, alone = ServingOptions(), options().parallel
    ranks = options(tensor_parallel_size=2, distributed_timeout_seconds=900).parallel
    assert served.silence_s(alone) == 300
    assert served.silence_s(ranks) > 900
    assert served.silence_s(options(tensor_parallel_size=2).parallel) > 600
    assert ServingOptions(engine_timeout_s=5000).silence_s(ranks) == 5000
    assert ServingOptions(engine_timeout_s=0).silence_s(ranks) == 0
