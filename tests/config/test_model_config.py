"""`load_model_config`: config.json of every family, its variants over the years, and damaged ones.

transformers' own configuration classes are the reference for what a config.json means.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from safetensors.numpy import save_file

from quire.config.model import SUPPORTED_ARCHITECTURES, load_model_config
from quire.protocol.errors import ModelError, OptionError

SIZES = {
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 200,
    "vocab_size": 311,
    "max_position_embeddings": 512,
}
OPT_SIZES = {
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "ffn_dim": 200,
    "vocab_size": 311,
    "max_position_embeddings": 512,
}
GPT2_SIZES = {"n_embd": 96, "n_layer": 4, "n_head": 6, "n_positions": 512, "vocab_size": 311}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES}


def write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return str(folder)


@pytest.mark.parametrize(
    ("class_name", "architecture", "settings"),
    [
        (
            "LlamaConfig",
            "LlamaForCausalLM",
            {**SIZES, "rms_norm_eps": 1e-5, "attention_bias": True},
        ),
        ("LlamaConfig", "LlamaForCausalLM", {**SIZES, "head_dim": 32, "tie_word_embeddings": True}),
        ("MistralConfig", "MistralForCausalLM", {**SIZES, "sliding_window": 128}),
        ("MistralConfig", "MistralForCausalLM", {**SIZES, "sliding_window": None}),
        ("Qwen2Config", "Qwen2ForCausalLM", {**SIZES, "eos_token_id": [5, 7]}),
        ("Qwen3Config", "Qwen3ForCausalLM", SIZES),
        ("Qwen3Config", "Qwen3ForCausalLM", {**SIZES, "head_dim": 48, "dtype": "bfloat16"}),
        ("OPTConfig", "OPTForCausalLM", {**OPT_SIZES, "dtype": "float16"}),
        ("OPTConfig", "OPTForCausalLM", {**OPT_SIZES, "activation_function": "gelu"}),
        ("GPT2Config", "GPT2LMHeadModel", {**GPT2_SIZES, "layer_norm_epsilon": 1e-6}),
        ("GPT2Config", "GPT2LMHeadModel", {**GPT2_SIZES, "n_inner": 100}),
    ],
)
def test_reads_what_transformers_writes(
    tmp_path: Path, class_name: str, architecture: str, settings: dict[str, Any]
) -> None:
    """A configuration saved by transformers gives the numbers transformers itself would use."""
    reference = getattr(transformers, class_name)(**settings)
    reference.architectures = [architecture]
    reference.save_pretrained(tmp_path)
    config = load_model_config(str(tmp_path))

    heads = reference.num_attention_heads
    eos = reference.eos_token_id
    assert config.architecture == architecture
    assert config.model_type == SUPPORTED_ARCHITECTURES[architecture] == reference.model_type
    assert config.hidden_size == reference.hidden_size
    assert config.num_layers == reference.num_hidden_layers
    assert config.num_heads == heads
    assert config.num_kv_heads == (getattr(reference, "num_key_value_heads", None) or heads)
    assert config.head_dim == (
        getattr(reference, "head_dim", None) or reference.hidden_size // heads
    )
    assert config.vocab_size == reference.vocab_size
    assert config.max_position_tokens == reference.max_position_embeddings
    assert config.tie_word_embeddings == reference.tie_word_embeddings
    assert config.bos_token_id == reference.bos_token_id
    assert config.eos_token_ids == tuple([eos] if isinstance(eos, int) else eos or ())
    assert config.dtype == settings.get("dtype", "float32")
    assert config.source.path == tmp_path
    assert config.source.kind == "folder"
    for ours, theirs in (
        ("intermediate_size", ("intermediate_size", "ffn_dim", "n_inner")),
        ("norm_eps", ("rms_norm_eps", "layer_norm_epsilon")),
        ("hidden_act", ("hidden_act", "activation_function")),
        ("attention_bias", ("attention_bias", "enable_bias")),
    ):
        values = [v for name in theirs if (v := getattr(reference, name, None)) is not None]
        if values:
            assert getattr(config, ours) == values[0]
    if architecture == "GPT2LMHeadModel":
        assert config.intermediate_size == (reference.n_inner or 4 * reference.n_embd)
    if hasattr(reference, "rope_parameters"):
        assert config.rope_theta == reference.rope_parameters["rope_theta"]
        assert config.rope_scaling is None
        windows = [config.layer_window(i) for i in range(config.num_layers)]
        assert windows == [reference.sliding_window if "Mistral" in class_name else None] * 4


def test_type_of_weights_that_config_json_does_not_name(tmp_path: Path) -> None:
    """That of most of what is stored as floats, in all files."""
    folder = write(tmp_path, LLAMA)
    assert load_model_config(folder).dtype == "float32"
    few, many = (np.zeros((size, 64)) for size in (150, 200))
    codes = np.zeros((500, 64), np.uint8)
    save_file({"a": few.astype(np.float32), "b": codes}, tmp_path / "model-1.safetensors")
    save_file({"c": many.astype(np.float16)}, tmp_path / "model-2.safetensors")
    assert load_model_config(folder).dtype == "float16"
    write(tmp_path, {**LLAMA, "torch_dtype": "bfloat16"})
    assert load_model_config(folder).dtype == "bfloat16"
    write(tmp_path, {**LLAMA, "dtype": None})
    (tmp_path / "model-2.safetensors").write_bytes(bytes(30000))
    assert load_model_config(folder).dtype == "float32"


PUBLISHED: dict[str, dict[str, Any]] = {
    "opt-125m": {
        "activation_function": "relu",
        "architectures": ["OPTForCausalLM"],
        "bos_token_id": 2,
        "eos_token_id": 2,
        "ffn_dim": 3072,
        "hidden_size": 768,
        "max_position_embeddings": 2048,
        "model_type": "opt",
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "prefix": "</s>",
        "torch_dtype": "float16",
        "vocab_size": 50272,
        "word_embed_proj_dim": 768,
    },
    "Llama-2-70b-hf": {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vocab_size": 32000,
    },
    "Mistral-7B-v0.1": {
        "architectures": ["MistralForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
    },
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("opt-125m", ("opt", 768, 12, 12, 12, 64, 3072, 2048, True, None, "float16", 1e-5)),
        (
            "Llama-2-70b-hf",
            ("llama", 8192, 80, 64, 8, 128, 28672, 4096, False, None, "float16", 1e-5),
        ),
        (
            "Mistral-7B-v0.1",
            ("mistral", 4096, 32, 32, 8, 128, 14336, 32768, False, 4096, "bfloat16", 1e-5),
        ),
    ],
)
def test_published_configurations(tmp_path: Path, name: str, expected: tuple[Any, ...]) -> None:
    """The files as their publishers wrote them, with the keys they leave out."""
    config = load_model_config(write(tmp_path, PUBLISHED[name]))
    assert (
        config.model_type,
        config.hidden_size,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.intermediate_size,
        config.max_position_tokens,
        config.tie_word_embeddings,
        config.sliding_window,
        config.dtype,
        config.norm_eps,
    ) == expected
    assert config.eos_token_ids == (2,)


@pytest.mark.parametrize("max_window_layers", [0, 2, 4])
@pytest.mark.parametrize("with_layer_types", [True, False])
def test_qwen_windows_start_at_a_layer(
    tmp_path: Path, max_window_layers: int, with_layer_types: bool
) -> None:
    """Qwen's window applies only where use_sliding_window and max_window_layers say so."""
    window = {"use_sliding_window": True, "sliding_window": 64}
    reference = transformers.Qwen2Config(**SIZES, **window, max_window_layers=max_window_layers)
    reference.architectures = ["Qwen2ForCausalLM"]
    saved = reference.to_dict()
    if not with_layer_types:
        del saved["layer_types"]
    config = load_model_config(write(tmp_path, saved))
    expected = [64 if kind == "sliding_attention" else None for kind in reference.layer_types]
    assert [config.layer_window(i) for i in range(4)] == expected
    assert config.sliding_window == (64 if any(expected) else None)

    saved["use_sliding_window"] = False
    config = load_model_config(write(tmp_path, saved))
    assert config.sliding_window is None


def test_families_without_windows_have_no_kinds_of_layers(tmp_path: Path) -> None:
    """Where they are filled in, transformers asks a folder with this configuration for a window."""
    deep = LLAMA | {"num_hidden_layers": 40}
    assert "layer_types" not in load_model_config(write(tmp_path, deep)).raw


def test_mistral_without_the_key_has_the_first_mistrals_window(tmp_path: Path) -> None:
    config = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **SIZES}
    assert load_model_config(write(tmp_path, config)).sliding_window == 4096


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING},
        {"rope_theta": 500000.0, "rope_parameters": LLAMA3_SCALING},
        {"rope_parameters": {**LLAMA3_SCALING, "rope_theta": 500000.0}},
    ],
)
def test_old_and_new_spellings_of_rope_agree(tmp_path: Path, rope: dict[str, Any]) -> None:
    """transformers 4 and 5 write rope settings in different places; both mean the same."""
    config = load_model_config(write(tmp_path, {**LLAMA, **rope}))
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == LLAMA3_SCALING
    assert config.max_position_tokens == 512


def test_other_scalings_stretch_the_context(tmp_path: Path) -> None:
    """Scalings stated relative to the original length lengthen the context; `type` is accepted."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    config = load_model_config(write(tmp_path, {**LLAMA, "rope_scaling": scaling}))
    assert config.max_position_tokens == 2048
    assert config.rope_scaling is not None
    assert config.rope_scaling["rope_type"] == "yarn"


def test_overrides_replace_values(tmp_path: Path) -> None:
    """hf_overrides win over the file, also where the file uses the other spelling of rope."""
    rope = {"rope_parameters": {**LLAMA3_SCALING, "rope_theta": 500000.0}}
    folder = write(tmp_path, {**LLAMA, **rope})
    changes = {"max_position_embeddings": 64, "rope_scaling": None, "rope_theta": 7.0}
    config = load_model_config(folder, hf_overrides=changes)
    assert (config.max_position_tokens, config.rope_scaling, config.rope_theta) == (64, None, 7.0)
    config = load_model_config(folder, hf_overrides={"rope_parameters": {"rope_theta": 9.0}})
    assert (config.rope_scaling, config.rope_theta) == (None, 9.0)
    with pytest.raises(OptionError, match="hf_overrides"):
        load_model_config(folder, hf_overrides="x")  # type: ignore[arg-type]


def test_end_of_sequence_ids(tmp_path: Path) -> None:
    """generation_config.json's ids come before those of config.json; lists are taken whole."""
    config = {**LLAMA, "eos_token_id": 2}
    assert load_model_config(write(tmp_path / "a", config)).eos_token_ids == (2,)
    generation = {"eos_token_id": [128001, 128008, 128001], "temperature": 0.6}
    loaded = load_model_config(write(tmp_path / "b", config, generation))
    assert loaded.eos_token_ids == (128001, 128008)
    assert loaded.generation == generation
    assert load_model_config(write(tmp_path / "c", LLAMA, {"top_p": 0.9})).eos_token_ids == ()
    assert load_model_config(write(tmp_path / "d", config, {"top_p": 0.9})).eos_token_ids == (2,)


def test_quantization_may_be_in_a_file_of_its_own(tmp_path: Path) -> None:
    quantization = {"quant_method": "awq", "bits": 4}
    folder = write(tmp_path / "a", {**LLAMA, "quantization_config": quantization})
    found = load_model_config(folder).quantization
    assert found is not None and found.method == "awq" and found.file.name == "config.json"
    for name, content, method in (
        ("quantize_config.json", {"bits": 4, "group_size": 64}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 64, "zero_point": True}, "awq"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "modelopt"),
    ):
        folder = write(tmp_path / name, LLAMA)
        (tmp_path / name / name).write_text(json.dumps(content))
        found = load_model_config(folder).quantization
        assert found is not None and found.method == method and found.file.name == name
    assert load_model_config(write(tmp_path / "none", LLAMA)).quantization is None


@pytest.mark.parametrize("name", ["Llama4ForCausalLM", "LlamaForSequenceClassification"])
def test_unsupported_architectures_are_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=name) as caught:
        load_model_config(write(tmp_path, {**LLAMA, "architectures": [name]}))
    assert all(supported in str(caught.value) for supported in SUPPORTED_ARCHITECTURES)


def test_architecture_from_model_type_alone(tmp_path: Path) -> None:
    folder = write(tmp_path, {"model_type": "llama", **SIZES})
    assert load_model_config(folder).architecture == "LlamaForCausalLM"
    with pytest.raises(ModelError, match="mamba"):
        load_model_config(write(tmp_path, {"model_type": "mamba", **SIZES}))


DROP = object()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", DROP),
        ("hidden_size", None),
        ("hidden_size", "96"),
        ("hidden_size", -96),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", True),
        ("num_attention_heads", 7),
        ("num_attention_heads", 2.5),
        ("num_key_value_heads", 4),
        ("num_key_value_heads", []),
        ("intermediate_size", DROP),
        ("vocab_size", {}),
        ("max_position_embeddings", "long"),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", -1),
        ("rope_theta", "10000"),
        ("rope_scaling", "linear"),
        ("rope_scaling", {"factor": 2.0}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_parameters", {"full_attention": {"rope_theta": 1.0}}),
        ("tie_word_embeddings", "yes"),
        ("eos_token_id", "</s>"),
        ("torch_dtype", "float8"),
        ("torch_dtype", 16),
        ("hidden_act", 3),
        ("architectures", "LlamaForCausalLM"),
        ("quantization_config", "awq"),
        ("head_dim", 0),
    ],
)
def test_damaged_values_name_file_key_value_and_remedy(
    tmp_path: Path, key: str, value: object
) -> None:
    config = {**LLAMA, key: value}
    if value is DROP:
        del config[key]
    with pytest.raises(ModelError) as caught:
        load_model_config(write(tmp_path, config))
    message = str(caught.value)
    assert str(tmp_path / "config.json") in message
    assert key in message
    assert "download the model again" in message
    if isinstance(value, (str, int, float)) and value is not None:
        assert repr(value) in message


DEEPSEEK_V3 = {
    **LLAMA,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("n_routed_experts", 0, "a positive integer"),
        ("num_experts_per_tok", 9, "at most 8"),
        ("num_experts_per_tok", 5, "at most 4"),
        ("n_group", 3, "a divisor of 8"),
        ("topk_group", 5, "at most 4"),
        ("first_k_dense_replace", -1, "a number of layers"),
        ("hidden_act", "gelu", "silu, the only activation of experts"),
        ("scoring_func", "softmax", "sigmoid"),
        ("topk_method", "greedy", "noaux_tc"),
        ("moe_layer_freq", 2, "1, as in all released checkpoints"),
        ("qk_rope_head_dim", 7, "an even number"),
        ("rope_interleave", False, "true"),
    ],
)
def test_what_experts_and_latents_cannot_be(
    tmp_path: Path, key: str, value: object, expected: str
) -> None:
    """Refused, and not read as if it were something else."""
    assert load_model_config(write(tmp_path, DEEPSEEK_V3)).experts is not None
    with pytest.raises(ModelError, match=f"{key} must be {expected}.*, got {value!r}"):
        load_model_config(write(tmp_path, {**DEEPSEEK_V3, key: value}))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not valid JSON"),
        (b'{"hidden_size": 96,', "line 1"),
        (b"[1, 2]", "JSON object"),
        (b'{"a": "\xff\xfe"}', "UTF-8"),
    ],
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_unreadable_json(tmp_path: Path, content: bytes, problem: str, file: str) -> None:
    write(tmp_path, LLAMA)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ModelError, match=problem) as caught:
        load_model_config(str(tmp_path))
    assert str(tmp_path / file) in str(caught.value)


def test_a_configuration_cannot_be_changed(tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path, LLAMA))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden_size = 1  # type: ignore[misc]


def test_reading_a_configuration_does_not_import_torch(tmp_path: Path) -> None:
    """Options are checked and errors shown before torch's seconds of import are spent."""
    write(tmp_path, LLAMA)
    code = (
        "import sys; from quire.config.model import load_model_config\n"
        f"load_model_config({str(tmp_path)!r})\n"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": _repository()})


def _repository() -> str:
    import quire.config.model

    return str(Path(quire.config.model.__file__).parents[2])
