"""Small adapters as peft writes them, and peft's answers for them."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import PreTrainedModel

from tests.models.reference import reference_logits

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": ["q_proj", "v_proj"]}),
    "all": ("llama", {"target_modules": "all-linear", "r": 20, "lora_alpha": 11}),
    "rslora": ("llama", {"target_modules": ATTENTION, "use_rslora": True}),
    "patterns": (
        "llama",
        {
            "target_modules": [*ATTENTION, *MLP],
            "rank_pattern": {"q_proj": 3, r"layers\.[12]\.mlp\.up_proj": 7, "1.mlp.down_proj": 2},
            "alpha_pattern": {
                "o_proj": 1,
                r".*\.0\.self_attn\.[qk]_proj": 5,
                "proj": 2,
                "k_proj": 9,
            },
        },
    ),
    "dora": ("qwen2", {"target_modules": [*ATTENTION, "down_proj"], "use_dora": True}),
    "lora_bias": ("qwen2", {"target_modules": ["q_proj", "v_proj"], "lora_bias": True}),
    "bias_all": ("qwen2", {"target_modules": ["q_proj"], "bias": "all"}),
    "bias_lora_only": ("qwen2", {"target_modules": ["k_proj"], "bias": "lora_only"}),
    "saved": (
        "llama",
        {"target_modules": ATTENTION, "modules_to_save": ["lm_head", "embed_tokens"]},
    ),
    "ends": ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "ends_dora": ("llama", {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True}),
    "some_layers": ("llama", {"target_modules": ATTENTION, "layers_to_transform": [1]}),
    "phi3": ("phi3", {"target_modules": "all-linear"}),
    "glm4": ("glm4", {"target_modules": ["gate_up_proj", "q_proj", "down_proj"]}),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "gpt2_dora": (
        "gpt2",
        {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True},
    ),
    "mixtral": ("mixtral", {"target_modules": ["q_proj", "w1", "w2", "w3", "gate"]}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "target_modules": ["q_proj"],
            "target_parameters": [*EXPERTS, "mlp.gate.weight"],
            "rank_pattern": {"experts.gate_up_proj": 2, r"1\.mlp\.experts\.down_proj": 3},
            "alpha_pattern": {"experts.down_proj": 5, "gate.weight": 3},
        },
    ),
    "down_alone": (
        "qwen3_moe",
        {"target_modules": ["q_proj"], "target_parameters": ["0.mlp.experts.down_proj"]},
    ),
    "granitemoe": ("granitemoe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "gpt_oss": ("gpt_oss", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
}
"""Families and what `LoraConfig` is given."""


def make_adapter(
    base: PreTrainedModel, folder: Path, seed: int = 1, *, safe: bool = True, **config: Any
) -> peft.PeftModel:
    """Writes a random adapter of a copy of `base` to `folder`; returns that copy with it."""
    torch.manual_seed(seed)
    settings = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, **config}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**settings))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                _randomise(name, parameter, base.config.model_type)
        model.save_pretrained(str(folder), safe_serialization=safe)
    return model.eval()


def _randomise(name: str, parameter: torch.nn.Parameter, model_type: str) -> None:
    """What training may have changed."""
    if "lora_magnitude" in name:
        parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
    elif "lora_" in name:
        parameter.normal_(0.0, 0.1)
    elif "modules_to_save" in name:
        parameter.add_(0.1 * torch.randn_like(parameter))
    elif name.endswith(".bias") and parameter.requires_grad:
        parameter.normal_(0.0, 0.3)


def layout(name: str) -> tuple[str, dict[str, Any]]:
    return LAYOUTS[name]


def unfuse_experts(folder: Path, prefix: str, names: Sequence[str]) -> None:
    """Rewrites an adapter whose tensors are those of all experts with one for each, as it was
    before transformers 5: "{prefix}.{e}.{name}" with the three `names` of gate, up and down."""
    from safetensors.torch import load_file, save_file

    file = folder / "adapter_model.safetensors"
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors, made = load_file(file), {}
    gate, up, down = names
    for key, b in tensors.items():
        if ".experts." not in key:
            made[key] = b
            continue
        if "lora_A" in key:
            continue
        root = key.split(".mlp.experts.")[0]
        a = tensors[key.replace("lora_B", "lora_A")]
        is_down = ".base_layer." not in key
        rank = config["r"]
        count = len(a) // rank
        for e in range(count):
            one_a = a.view(count, rank, -1)[e]
            one_b = b.view(len(b), rank, count)[:, :, e]
            halves = (
                {down: one_b} if is_down else dict(zip((gate, up), one_b.chunk(2), strict=True))
            )
            for own, half in halves.items():
                made[f"{root}.{prefix}.{e}.{own}.lora_A.weight"] = one_a.contiguous()
                made[f"{root}.{prefix}.{e}.{own}.lora_B.weight"] = half.contiguous()
    save_file({name: tensor.clone() for name, tensor in made.items()}, file)
    config["target_parameters"] = None
    config["target_modules"] = [*config["target_modules"], *names]
    (folder / "adapter_config.json").write_text(json.dumps(config))


def adapted_logits(model: peft.PeftModel, tokens: Sequence[int]) -> torch.Tensor:
    """[len, vocab] of the model with its adapter."""
    return reference_logits(model, tokens)
