"""Translates GGUF metadata into the configuration that transformers would write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from quire.files.gguf import LOADABLE_TYPES, GGUFFile
from quire.files.safetensors import FLOATS
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
GGUF_ARCHITECTURES: dict[str, dict[str, str]] = {
    "llama": {
        "LlamaForCausalLM": "llama",
        "MistralForCausalLM": "mistral",
        "MixtralForCausalLM": "mixtral",
    },
    "qwen2": {"Qwen2ForCausalLM": "qwen2"},
    "qwen2moe": {"Qwen2MoeForCausalLM": "qwen2_moe"},
    "qwen3": {"Qwen3ForCausalLM": "qwen3"},
    "qwen3moe": {"Qwen3MoeForCausalLM": "qwen3_moe"},
    "gemma2": {"Gemma2ForCausalLM": "gemma2"},
    "gemma3": {"Gemma3ForCausalLM": "gemma3_text"},
    "phi3": {"Phi3ForCausalLM": "phi3"},
    "deepseek2": {
        "DeepseekV2ForCausalLM": "deepseek_v2",
        "DeepseekV3ForCausalLM": "deepseek_v3",
    },
    "gpt-oss": {"GptOssForCausalLM": "gpt_oss"},
    "gpt2": {"GPT2LMHeadModel": "gpt2"},
}
"""GGUF's name of an architecture -> those of transformers that are stored under it, each with its
`model_type`. The first is meant where the metadata says nothing else."""
MAX_LAYERS = 4096
END_OF_TEXT_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3
"""Values of `expert_gating_func`."""
LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the models of 27 billion weights. Their scores are scaled by width / heads, those of
others by the size of a head; the metadata does not say so."""
NEUTRAL: dict[str, tuple[float, ...]] = {
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "expert_gating_func": (0, SOFTMAX),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.yarn_attn_factor": (0, 1),
    "rope.scaling.yarn_ext_factor": (0, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "router_logit_softcapping": (0,),
}
"""Metadata that changes what a model computes, and the values that do not. Where an architecture
has no use for a key, others are refused."""
YARN_LOG_MULTIPLIER = 0.1
"""What `rope.scaling.yarn_log_multiplier` is of `mscale_all_dim`."""

# Llama 3.1 and later: GGUF keeps the finished frequency factors; these constants are behind them.
LLAMA3_LOW_FREQ_FACTOR = 1.0
LLAMA3_HIGH_FREQ_FACTOR = 4.0
LLAMA3_ORIGINAL_TOKENS = 8192


class _Metadata:
    """The numbers of a file's architecture; it remembers which were asked for."""

    def __init__(self, file: GGUFFile, name: str) -> None:
        self.file, self.name = file, name
        self._used: set[str] = set()

    def number(self, key: str) -> Any:
        self._used.add(key)
        return _required(self.file, f"{self.name}.{key}")

    def optional(self, key: str, default: Any = None) -> Any:
        self._used.add(key)
        return _optional(self.file, f"{self.name}.{key}", default)

    def flag(self, key: str, default: bool) -> bool:
        self._used.add(key)
        return bool(self.file.metadata.get(f"{self.name}.{key}", default))

    def text(self, key: str, default: str) -> str:
        value = self.file.metadata.get(f"{self.name}.{key}", default)
        if not isinstance(value, str):
            self.fail(key, "a string", value)
        return value

    def fail(self, key: str, rule: str, value: object) -> NoReturn:
        raise ModelError(
            f"{self.file.path}: metadata {self.name}.{key} must be {rule}, got {value!r}; use the "
            "model's safetensors version."
        )

    def check_all_used(self) -> None:
        """Refuse what would change the model's numbers, but has no place in its architecture."""
        for key, neutral in NEUTRAL.items():
            value = self.file.metadata.get(f"{self.name}.{key}")
            if value is None or key in self._used:
                continue
            if not isinstance(value, (int, float)) or value not in neutral:
                expected = " or ".join(map(str, neutral))
                self.fail(key, f"{expected} or absent, since {self.name} has no use for it", value)

    def rows(self, tensor: str) -> int:
        """Outputs of a matrix, or of one of a stack."""
        found = self.file.tensors.get(tensor)
        if found is None or len(found.shape) < 2:
            raise ModelError(
                f"{self.file.path}: tensor {tensor} is missing; download or convert the file again."
            )
        return found.shape[-2]


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
    values = _Metadata(file, name)
    keys = _GPT2_KEYS if name == "gpt2" else _ROTARY_KEYS
    raw: dict[str, Any] = {translated: values.number(key) for key, translated in keys.items()}
    raw["architectures"] = list(GGUF_ARCHITECTURES[name])[:1]
    raw["vocab_size"] = _embedding_rows(file)
    raw["tie_word_embeddings"] = "output.weight" not in file.tensors
    raw["dtype"] = _stored_dtype(file)
    raw.update(_token_ids(file))
    if name != "gpt2":
        raw.update(_latent(values) if name == "deepseek2" else _heads(values))
        raw["rope_theta"] = values.optional("rope.freq_base", 10000.0)
        raw["rope_scaling"] = _rope_scaling(values, raw)
    if name in _OWN_KEYS:
        raw.update(_OWN_KEYS[name](values, raw))
    values.check_all_used()
    raw["model_type"] = GGUF_ARCHITECTURES[name][raw["architectures"][0]]
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
    return FLOATS.get(max(sizes, key=sizes.__getitem__, default="F32"), "float32")


def _token_ids(file: GGUFFile) -> dict[str, Any]:
    ids = [_optional(file, f"tokenizer.ggml.{key}") for key in END_OF_TEXT_KEYS]
    return {
        "bos_token_id": _optional(file, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(token for token in ids if token is not None)),
        "pad_token_id": _optional(file, "tokenizer.ggml.padding_token_id"),
    }


def _heads(values: _Metadata) -> dict[str, Any]:
    heads = values.number("attention.head_count")
    head_dim = values.optional("attention.key_length")
    if head_dim is None and heads > 0:
        head_dim = values.number("embedding_length") // heads
    value_dim = values.optional("attention.value_length", head_dim)
    if value_dim != head_dim:
        values.fail("attention.value_length", f"{head_dim}, the length of keys", value_dim)
    found = {
        "num_key_value_heads": values.optional("attention.head_count_kv", heads),
        "head_dim": head_dim,
    }
    rotated = values.optional("rope.dimension_count", head_dim)
    if head_dim and rotated != head_dim:
        found["partial_rotary_factor"] = rotated / head_dim
    return found


def _latent(values: _Metadata) -> dict[str, Any]:
    """Files with `attn_kv_b` give the length of a head's keys and values, later ones that of the
    latents, and the former under other names."""
    key_dim = values.optional("attention.key_length_mla")
    value_dim = values.optional("attention.value_length_mla")
    if key_dim is None or value_dim is None:
        key_dim = values.number("attention.key_length")
        value_dim = values.number("attention.value_length")
    rope_dim = values.number("rope.dimension_count")
    return {
        "q_lora_rank": values.optional("attention.q_lora_rank"),
        "kv_lora_rank": values.number("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key_dim - rope_dim,
        "v_head_dim": value_dim,
    }


def _llama(values: _Metadata, raw: dict[str, Any]) -> dict[str, Any]:
    tensors, window = values.file.tensors, values.optional("attention.sliding_window")
    found: dict[str, Any] = {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
    if window:
        found.update(architectures=["MistralForCausalLM"], sliding_window=window)
    if values.optional("expert_count", 0):
        found.update(
            architectures=["MixtralForCausalLM"],
            num_local_experts=values.number("expert_count"),
            num_experts_per_tok=values.number("expert_used_count"),
        )
    return found


def _qwen_moe(values: _Metadata, raw: dict[str, Any]) -> dict[str, Any]:
    """All layers are sparse. The first files do not say how wide an expert is."""
    width = values.optional("expert_feed_forward_length")
    return {
        "num_experts": values.number("expert_count"),
        "num_experts_per_tok": values.number("expert_used_count"),
        "moe_intermediate_size": width or values.rows("blk.0.ffn_gate_exps.weight"),
        "norm_topk_prob": values.flag("expert_weights_norm", values.name == "qwen3moe"),
    }


def _qwen2moe(values: _Metadata, raw: dict[str, Any]) -> dict[str, Any]:
    width = values.optional("expert_shared_feed_forward_length")
    values.optional("expert_shared_count")  # they are one network, as wide as all of them
    return {
        **_qwen_moe(values, raw),
        "shared_expert_intermediate_size": width or values.rows("blk.0.ffn_up_shexp.weight"),
        "qkv_bias": "blk.0.attn_q.bias" in values.file.tensors,
    }


def _gemma(values: _Metadata, raw: dict[str, Any]) -> dict[str, Any]:
    scalar = raw["head_dim"]
    if raw["num_hidden_layers"] == LARGEST_GEMMA[values.name]:
        scalar = raw["hidden_size"] // raw["num_attention_heads"]
    return {"query_pre_attn_scalar": scalar}


def _gemma2(values: _Metadata, raw: dict[str, Any]) -> dict[str, Any]:
    return {
        **_gemma(values, raw),
        "sliding_window": values.number("attention.sliding_window"),
        "attn_logit_softcapping": values.optional("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": values.optional("final_logit_softcapping", 30.0) or None,
    }


def _gemma3(values: _Metadata, raw: dict[str, Any]) -> dict[str, Any]:
    """Without a window all layers are full."""
    window = values.optional("attention.sliding_window", 0)
    pattern = values.file.metadata.get("gemma3.attention.sliding_window_pattern", 6)
    if isinstance(pattern, np.ndarray):
        slides = [bool(one) for one in pattern]
    elif isinstance(pattern, int) and pattern > 0:
        count = min(raw["num_hidden_layers"], MAX_LAYERS)
        slides = [(layer + 1) % pattern != 0 for layer in range(count)]
    else:
        values.fail("attention.sliding_window_pattern", "a number of layers", pattern)
    return {
        **_gemma(values, raw),
        "sliding_window": window or None,
        "layer_types": [
            "sliding_attention" if one and window else "full_attention" for one in slides
        ],
        "rope_local_base_freq": values.optional("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": values.optional("final_logit_softcapping") or None,
    }


def _phi3(values: _Metadata, raw: dict[str, Any]) -> dict[str, Any]:
    """0 says that there is no window; where nothing says so, the model is too old to know."""
    original = values.optional("rope.scaling.original_context_length")
    found = {"sliding_window": values.number("attention.sliding_window") or None}
    return found if original is None else {**found, "original_max_position_embeddings": original}


def _deepseek2(values: _Metadata, raw: dict[str, Any]) -> dict[str, Any]:
    """Without groups in the metadata all experts are open, as llama.cpp reads such files."""
    func = values.optional("expert_gating_func", SOFTMAX) or SOFTMAX
    if func not in (SOFTMAX, SIGMOID):
        values.fail("expert_gating_func", f"{SOFTMAX} (softmax) or {SIGMOID} (sigmoid)", func)
    groups = values.optional("expert_group_count", 1) or 1
    v2, v3 = GGUF_ARCHITECTURES["deepseek2"]
    method = "noaux_tc" if func == SIGMOID else "group_limited_greedy" if groups > 1 else "greedy"
    return {
        "architectures": [v2 if func == SOFTMAX else v3],
        "n_routed_experts": values.number("expert_count"),
        "num_experts_per_tok": values.number("expert_used_count"),
        "moe_intermediate_size": values.number("expert_feed_forward_length"),
        "n_shared_experts": values.number("expert_shared_count"),
        "first_k_dense_replace": values.optional("leading_dense_block_count", 0),
        "routed_scaling_factor": values.optional("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": values.flag("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": values.optional("expert_group_used_count", groups) or groups,
        "topk_method": method,
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in values.file.tensors,
    }


def _gpt_oss(values: _Metadata, raw: dict[str, Any]) -> dict[str, Any]:
    """The metadata does not say how experts are chosen, nor which layers have a window."""
    func = values.optional("expert_gating_func", SOFTMAX_OF_CHOSEN) or SOFTMAX_OF_CHOSEN
    if func != SOFTMAX_OF_CHOSEN:
        values.fail("expert_gating_func", f"{SOFTMAX_OF_CHOSEN} (softmax of the chosen)", func)
    return {
        "num_local_experts": values.number("expert_count"),
        "num_experts_per_tok": values.number("expert_used_count"),
        "intermediate_size": values.number("expert_feed_forward_length"),
        "sliding_window": values.number("attention.sliding_window"),
        "attention_bias": "blk.0.attn_q.bias" in values.file.tensors,
    }


_OWN_KEYS: dict[str, Callable[[_Metadata, dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen_moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "deepseek2": _deepseek2,
    "gpt-oss": _gpt_oss,
}


def _rope_scaling(values: _Metadata, raw: dict[str, Any]) -> dict[str, Any] | None:
    if "rope_freqs.weight" in values.file.tensors:
        return _llama3_scaling(values.file, raw)
    if values.name == "phi3" and "rope_factors_long.weight" in values.file.tensors:
        return _longrope(values)
    kind = values.text("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        values.fail("rope.scaling.type", "none, linear or yarn", kind)
    scaling: dict[str, Any] = {"rope_type": kind}
    for key, translated in (
        ("factor", "factor"),
        ("original_context_length", "original_max_position_embeddings"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        value = values.optional(f"rope.scaling.{key}")
        if value is not None:
            scaling[translated] = value
    if values.name == "gpt-oss":
        scaling["truncate"] = False  # as the model was trained, which the metadata does not say
    if values.name == "deepseek2" and kind == "yarn":
        multiplier = values.optional("rope.scaling.yarn_log_multiplier")
        if multiplier:
            sharpening = _number(multiplier / YARN_LOG_MULTIPLIER)
            scaling.update(mscale=sharpening, mscale_all_dim=sharpening)
    return scaling


def _longrope(values: _Metadata) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": values.number("rope.scaling.original_context_length"),
    }
    factor = values.optional("rope.scaling.attn_factor")
    if factor:
        scaling["attention_factor"] = factor
    for kind in ("long", "short"):
        name = f"rope_factors_{kind}.weight"
        tensor = values.file.tensors.get(name)
        if tensor is None or tensor.type != "F32":
            raise ModelError(
                f"{values.file.path}: tensor {name} of type F32 is missing; download or convert "
                "the file again."
            )
        factors = values.file.data(name).view(np.float32).tolist()
        scaling[f"{kind}_factor"] = [_number(one) for one in factors]
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
