"""Adapters on small models of each layout, against peft: batches of base tokens and several
adapters give what each gives alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.model import load_model_config
from quire.layers.attention.cpu import CpuBackend
from quire.layers.lora import AdapterLayers
from quire.models.loader import load_model
from tests.models.adapters import AdaptedRun, place, random_adapter
from tests.models.reference import random_model, random_tokens, reference_logits, save_safetensors

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "llama": (
        "llama",
        {},
        [
            {"r": 4, "lora_alpha": 8, "target_modules": LINEAR},
            {"r": 20, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
            {
                "r": 9,
                "target_modules": ["k_proj", "down_proj", "o_proj"],
                "rank_pattern": {"down_proj": 17},
                "alpha_pattern": {"k_proj": 3},
            },
        ],
    ),
    "bias": (
        "qwen2",
        {},
        [
            {"r": 4, "target_modules": LINEAR},
            {"r": 8, "target_modules": ["q_proj", "down_proj"], "lora_bias": True},
            {"r": 8, "target_modules": ["q_proj", "down_proj"], "bias": "lora_only"},
        ],
    ),
    "fused": (
        "phi3",
        {},
        [
            {"r": 4, "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
            {"r": 12, "target_modules": ["qkv_proj"]},
        ],
    ),
    "half-fused": (
        "glm4",
        {},
        [
            {"r": 4, "target_modules": ["q_proj", "v_proj", "gate_up_proj", "down_proj"]},
            {"r": 8, "target_modules": ["o_proj", "gate_up_proj"]},
        ],
    ),
    "gpt2": (
        "gpt2",
        {},
        [
            {"r": 4, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
            {"r": 8, "target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True},
        ],
    ),
    "opt": (
        "opt",
        {},
        [
            {"r": 4, "target_modules": ["q_proj", "out_proj", "fc1", "fc2"]},
            {"r": 8, "target_modules": ["k_proj", "fc1"], "use_dora": True},
        ],
    ),
    "dora": (
        "qwen2",
        {},
        [
            {"r": 8, "target_modules": LINEAR, "use_dora": True},
            {"r": 4, "target_modules": ["q_proj", "up_proj"], "use_dora": True},
        ],
    ),
    "ends": (
        "llama",
        {},
        [
            {"r": 8, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
            {"r": 8, "target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        ],
    ),
    "latent": (
        "deepseek_v3",
        {},
        [
            {"r": 4, "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]},
            {"r": 8, "target_modules": ["q_b_proj", "o_proj"]},
        ],
    ),
}
LENGTHS = (23, 40, 9, 31)


@pytest.mark.parametrize("case", CASES)
def test_as_peft(case: str, tmp_path: Path) -> None:
    family, changes, settings = CASES[case]
    base = random_model(family, **changes)
    config = load_model_config(str(save_safetensors(base, tmp_path)))
    model = load_model(config, dtype=torch.float32, device="cpu")
    adapted = [random_adapter(base, 7 + i, **one) for i, one in enumerate(settings)]
    layers = AdapterLayers.of(model, max_adapters=6, num_chunks=9, max_rank=32)
    place(layers, [weights for _, weights in adapted])
    slots = [-1, 0, 1, len(settings) - 1]
    sequences = [random_tokens(length, length) for length in LENGTHS]
    run = AdaptedRun(layers, slots, model, config, sequences, CpuBackend)
    run.step({0: 10, 1: 40, 2: 3})
    run.step({0: 13, 2: 6, 3: 20})
    run.step({3: 11})
    for slot, tokens, found in zip(slots, sequences, run.all_logits(), strict=True):
        reference = base if slot < 0 else adapted[slot][0]
        expected = reference_logits(reference, tokens)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        if slot >= 0:
            assert (expected - reference_logits(base, tokens)).abs().max() > 0.1
