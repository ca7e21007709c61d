"""Whether a model fits is known from its config.json: bytes of weights, bytes of KV cache for a
token, and how many devices have room. The configurations are those of the releases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.device import DeviceInfo
from quire.config.model import ModelConfig, load_model_config
from quire.config.options import EngineOptions
from quire.config.resolve import resolve
from quire.layers.parallel import Parallel
from quire.models.loader import count_weight_bytes
from quire.protocol.errors import OptionError
from quire.worker.fitting import check_before_fetch, kv_token_bytes

GIB = 1 << 30
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
LLAMA_2_70B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
LLAMA_3_70B = {
    **LLAMA_2_70B,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
RELEASES: dict[str, tuple[dict[str, Any], float, float, int]] = {
    # Weights as published; bytes as they are kept; bytes of a token in 16 bits.
    "DeepSeek-V3": (DEEPSEEK_V3, 671.03e9, 674.1e9, 61 * (512 + 64) * 2),
    "Llama-2-70b": (LLAMA_2_70B, 68.97e9, 137.95e9, 80 * 2 * 8 * 128 * 2),
    "Llama-3-70B": (LLAMA_3_70B, 70.55e9, 141.1e9, 80 * 2 * 8 * 128 * 2),
}


def release(name: str, folder: Path) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(RELEASES[name][0]))
    return load_model_config(str(folder), load_format="dummy")


def gpu(gib: float, count: int = 8) -> DeviceInfo:
    return DeviceInfo("cuda", f"a GPU of {gib:g} GiB", int(gib * GIB), 4, count=count)


def resolved(config: ModelConfig, device: DeviceInfo, **changes: Any) -> EngineOptions:
    return resolve(EngineOptions().replace(**changes), config, device).options


@pytest.mark.parametrize("name", RELEASES)
def test_bytes_of_releases(name: str, tmp_path: Path) -> None:
    """The layers for drafts are not counted; scales, and what stays in 16 bits, are."""
    _, num_weights, num_bytes, token_bytes = RELEASES[name]
    config, device = release(name, tmp_path), gpu(141)
    assert config.num_weights == pytest.approx(num_weights, rel=1e-3)
    options = resolved(config, device)
    assert kv_token_bytes(options, config) == token_bytes
    counted = count_weight_bytes(config, dtype=torch.bfloat16, device="cuda", load_format="dummy")
    assert counted == pytest.approx(num_bytes, rel=1e-3)
    share = kv_token_bytes(options, config, Parallel(0, 8))
    assert share == (token_bytes if config.latent else token_bytes // 8)


@pytest.mark.parametrize(
    ("name", "gib", "count", "parts"),
    [
        (
            "DeepSeek-V3",
            139.8,
            8,
            (
                "take 627.81 GiB in fp8, but a GPU of 139.8 GiB has 139.80 of 139.80 GiB free",
                "gpu_memory_utilization=0.9 allows 125.82 GiB",
                "A token of the KV cache takes 70,272 bytes.",
                "use 8 such devices (tensor_parallel_size=8: 79.35 GiB of weights on each)",
            ),
        ),
        pytest.param(
            "DeepSeek-V3",
            79.1,
            8,
            ("use 16 such devices, of which this host has 8 (tensor_parallel_size=16",),
            marks=pytest.mark.slow,
        ),
        (
            "Llama-3-70B",
            79.1,
            1,
            (
                "131.4",
                "in bfloat16",
                "takes 327,680 bytes",
                "use 2 such devices, of which this host has 1 (tensor_parallel_size=2",
                "or round them with quantization='fp8' or 'int4'",
            ),
        ),
        ("Llama-2-70b", 39.5, 4, ("128.4", "in float16", "use 4 such devices (tensor_par")),
        ("Llama-2-70b", 1.5, 4, ("or more such devices (pipeline_parallel_size)",)),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers_and_remedies(
    name: str, gib: float, count: int, parts: tuple[str, ...], tmp_path: Path
) -> None:
    config, device = release(name, tmp_path), gpu(gib, count)
    with pytest.raises(OptionError) as caught:
        check_before_fetch(resolved(config, device), config, device)
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert ("quantization=" in message) == (name != "DeepSeek-V3")


def test_what_fits_on_ranks_or_rounded_is_not_refused(tmp_path: Path) -> None:
    config, device = release("Llama-3-70B", tmp_path), gpu(79.1)
    for changes in (
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"quantization": "int4"},
        {"distributed_executor_backend": "ray"},
    ):
        check_before_fetch(resolved(config, device, **changes), config, device)
    small = gpu(39.5)
    with pytest.raises(OptionError, match=r"on each of 2 ranks .*163,840 bytes on each of 2 ranks"):
        options = resolved(config, small, tensor_parallel_size=2)
        check_before_fetch(options, config, small)
