"""Translates GGUF metadata into the configuration that transformers would write."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.files.gguf import LOADABLE_TYPES, GGUFFile
from quire.protocol.errors import ModelError

# GGUF architecture -> (transformers architecture, GGUF key -> transformers key)
_ROTARY_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_GPT2_KEYS = {
    "block_count": "n_layer",
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
GGUF_ARCHITECTURES: dict[str, tuple[str, dict[str, str]]] = {
    "llama": ("LlamaForCausalLM", _ROTARY_KEYS),
    "qwen2": ("Qwen2ForCausalLM", _ROTARY_KEYS),
    "qwen3": ("Qwen3ForCausalLM", _ROTARY_KEYS),
    "gpt2": ("GPT2LMHeadModel", _GPT2_KEYS),
}
WINDOWED_GGUF = {"llama": "MistralForCausalLM"}
"""What an architecture is where it has a window."""
FLOAT_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
END_OF_TEXT_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

# Llama 3.1 and later: GGUF keeps the finished frequency factors; these constants are behind them.
LLAMA3_LOW_FREQ_FACTOR = 1.0
LLAMA3_HIGH_FREQ_FACTOR = 4.0
LLAMA3_ORIGINAL_TOKENS = 8192


def gguf_architecture(file: GGUFFile) -> str:
    """GGUF's own name of the architecture, such as "llama"."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in GGUF_ARCHITECTURES:
        raise ModelError(
            f"{file.path}: architecture {name!r} is not supported; "
            f"in GGUF files Quire runs {', '.join(GGUF_ARCHITECTURES)}."
        )
    return name


def translate_gguf(file: GGUFFile) -> dict[str, Any]:
    """The file's metadata under transformers' names."""
    name = gguf_architecture(file)
    _check_whole(file)
    architecture, keys = GGUF_ARCHITECTURES[name]
    raw: dict[str, Any] = {"architectures": [architecture], "model_type": name}
    for key, translated in keys.items():
        raw[translated] = _required(file, f"{name}.{key}")
    raw["vocab_size"] = _embedding_rows(file)
    raw["tie_word_embeddings"] = "output.weight" not in file.tensors
    raw["dtype"] = _stored_dtype(file)
    raw.update(_token_ids(file))
    if name != "gpt2":
        raw.update(_attention(file, name))
    return raw


def _check_whole(file: GGUFFile) -> None:
    """Refuse what would only fail, or go wrong, while weights are loaded."""
    parts = _optional(file, "split.count", 1)
    if parts > 1:
        raise ModelError(
            f"{file.path} is one of {parts} parts of a split model; merge them with "
            "`llama-gguf-split --merge` and give the merged file."
        )
    for tensor in file.tensors.values():
        if tensor.type not in LOADABLE_TYPES:
            raise ModelError(
                f"{file.path}: tensor {tensor.name} has type {tensor.type}, which is not "
                f"supported; use a file with {', '.join(LOADABLE_TYPES)}."
            )


def _number(value: Any) -> Any:
    """Floats are stored with 32 bits; this gives the decimal number that was meant (1e-05)."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _required(file: GGUFFile, key: str) -> Any:
    value = file.metadata.get(key)
    if value is None:
        raise ModelError(
            f"{file.path}: metadata {key} is missing; convert the model again with a current "
            "llama.cpp."
        )
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ModelError(
            f"{file.path}: metadata {key} must be one number, got {value!r}; models whose layers "
            "differ in size are not supported."
        )
    return _number(value)


def _optional(file: GGUFFile, key: str, default: Any = None) -> Any:
    return _required(file, key) if key in file.metadata else default


def _embedding_rows(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(
            f"{file.path}: tensor token_embd.weight is missing; download or convert the file again."
        )
    return embedding.shape[0]


def _stored_dtype(file: GGUFFile) -> str:
    """The type of most weights. Quantised blocks count as float32, which holds them exactly."""
    matrices = [t for t in file.tensors.values() if len(t.shape) > 1]
    sizes: dict[str, int] = {}
    for tensor in matrices:
        sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.nbytes
    return FLOAT_TYPES.get(max(sizes, key=sizes.__getitem__, default="F32"), "float32")


def _token_ids(file: GGUFFile) -> dict[str, Any]:
    ids = [_optional(file, f"tokenizer.ggml.{key}") for key in END_OF_TEXT_KEYS]
    return {
        "bos_token_id": _optional(file, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(token for token in ids if token is not None)),
        "pad_token_id": _optional(file, "tokenizer.ggml.padding_token_id"),
    }


def _attention(file: GGUFFile, name: str) -> dict[str, Any]:
    experts = _optional(file, f"{name}.expert_count", 0)
    if experts:
        raise ModelError(
            f"{file.path}: metadata {name}.expert_count is {experts}; mixtures of experts are not "
            "supported, use a model without them."
        )
    heads = _required(file, f"{name}.attention.head_count")
    values: dict[str, Any] = {
        "num_key_value_heads": _optional(file, f"{name}.attention.head_count_kv", heads),
        "head_dim": _optional(file, f"{name}.attention.key_length"),
        "rope_theta": _optional(file, f"{name}.rope.freq_base", 10000.0),
    }
    if values["head_dim"] is None and heads > 0:
        values["head_dim"] = _required(file, f"{name}.embedding_length") // heads
    values["rope_scaling"] = _rope_scaling(file, name, values)
    window = _optional(file, f"{name}.attention.sliding_window")
    if name in WINDOWED_GGUF and window:
        values.update(architectures=[WINDOWED_GGUF[name]], model_type="mistral")
        values["sliding_window"] = window
    if name == "llama":
        values["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        values["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    return values


def _rope_scaling(file: GGUFFile, name: str, values: dict[str, Any]) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:
        return _llama3_scaling(file, values)
    kind = file.metadata.get(f"{name}.rope.scaling.type", "none")
    if isinstance(kind, str) and kind == "none":
        return None
    scaling = {"rope_type": kind}
    for key, translated in (
        ("factor", "factor"),
        ("original_context_length", "original_max_position_embeddings"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        value = _optional(file, f"{name}.rope.scaling.{key}")
        if value is not None:
            scaling[translated] = value
    return scaling


def _llama3_scaling(file: GGUFFile, values: dict[str, Any]) -> dict[str, Any] | None:
    """Recover the rule behind `rope_freqs.weight`, and check that it gives these factors."""
    tensor = file.tensors["rope_freqs.weight"]
    head_dim = values["head_dim"] or 0
    if tensor.type != "F32" or tensor.shape != (head_dim // 2,):
        raise ModelError(
            f"{file.path}: tensor rope_freqs.weight is {tensor.type} {list(tensor.shape)} but "
            f"head size {head_dim} needs F32 [{head_dim // 2}]; convert the model again."
        )
    stored = file.data("rope_freqs.weight").view(np.float32)
    largest = float(stored.max())
    if largest == 1.0:
        return None
    powers = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    wavelengths = 2 * np.pi * values["rope_theta"] ** powers
    low, high = LLAMA3_LOW_FREQ_FACTOR, LLAMA3_HIGH_FREQ_FACTOR
    smooth = np.clip((LLAMA3_ORIGINAL_TOKENS / wavelengths - low) / (high - low), 0.0, 1.0)
    if not np.allclose(stored, 1 / ((1 - smooth) / largest + smooth), rtol=1e-3):
        raise ModelError(
            f"{file.path}: tensor rope_freqs.weight does not follow Llama 3.1's rule, the only one "
            "that is supported; use the model's safetensors version."
        )
    return {
        "rope_type": "llama3",
        "factor": _number(largest),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": LLAMA3_ORIGINAL_TOKENS,
    }
