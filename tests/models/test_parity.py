"""Every model family computes what transformers computes from the same files.

Logits agree within 1e-4 in fp32, for whole prompts at once, and for prompts in chunks that share
steps with other requests' decoding, through a block table in random order.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.model import load_model_config
from quire.layers.attention.backend import select_backend
from quire.layers.experts import ExpertLinear
from quire.layers.parallel import Parallel
from quire.layers.quantization.unquantized import Unquantized
from quire.models.loader import load_model
from tests.layers.ranks import on_ranks
from tests.models.reference import (
    PagedRun,
    random_model,
    random_tokens,
    reference_logits,
    save_bin,
    save_safetensors,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LATENT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.8,
    "mscale_all_dim": 1.2,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0],
    "long_factor": [1.5, 2.0, 4.0, 7.0, 11.0, 13.0],
    "original_max_position_embeddings": 16,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("llama", {}),
    "llama-mha-tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 24, "num_key_value_heads": 1}),
    "llama-rope-llama3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-rope-yarn": (
        "llama",
        {"rope_parameters": {**YARN, "original_max_position_embeddings": 16}},
    ),
    "llama-rope-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "mistral-no-window": ("mistral", {"head_dim": 32}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen2-some-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-tied-biased": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "granite": ("granite", {}),
    "granite-tied-biased": (
        "granite",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "smollm3": ("smollm3", {}),
    "smollm3-untied": ("smollm3", {"tie_word_embeddings": False, "no_rope_layers": [0, 1, 0]}),
    "smollm3-windows": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 5, "no_rope_layers": [1, 0, 1]},
    ),
    "phi3": ("phi3", {}),
    "phi3-longrope": (
        "phi3",
        {
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 16,
            "tie_word_embeddings": True,
            "sliding_window": None,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-biased": (
        "olmo2",
        {"attention_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "glm4": ("glm4", {}),
    "glm4-tied": (
        "glm4",
        {"attention_bias": False, "tie_word_embeddings": True, "head_dim": 32},
    ),
    "gemma2": ("gemma2", {}),
    "gemma2-no-caps": (
        "gemma2",
        {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "attention_bias": True,
        },
    ),
    "gemma3": ("gemma3", {}),
    "gemma3-capped-logits": (
        "gemma3",
        {"final_logit_softcapping": 5.0, "num_key_value_heads": 1, "tie_word_embeddings": False},
    ),
    "mixtral": ("mixtral", {}),
    "mixtral-window": ("mixtral", {"sliding_window": 7, "num_experts_per_tok": 1}),
    "qwen2-moe": ("qwen2_moe", {}),
    "qwen2-moe-dense-layers": (
        "qwen2_moe",
        {"decoder_sparse_step": 2, "norm_topk_prob": True, "qkv_bias": False},
    ),
    "qwen3-moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3-moe-dense-layers": ("qwen3_moe", {"mlp_only_layers": [0], "attention_bias": True}),
    "granitemoe": ("granitemoe", {}),
    "gpt-oss": ("gpt_oss", {}),
    "gpt-oss-other-windows": (
        "gpt_oss",
        {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "attention_bias": False,
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
            "num_experts_per_tok": 1,
        },
    ),
    "glm4-moe": ("glm4_moe", {}),
    "glm4-moe-norms": (
        "glm4_moe",
        {
            "use_qk_norm": True,
            "attention_bias": True,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
        },
    ),
    "deepseek-v2": ("deepseek_v2", {}),
    "deepseek-v2-groups": (
        "deepseek_v2",
        {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 28,
            "rms_norm_eps": 1e-2,  # but for norms of latents
        },
    ),
    "deepseek-v2-yarn": ("deepseek_v2", {"rope_parameters": LATENT_YARN, "attention_bias": True}),
    "deepseek-v3": ("deepseek_v3", {}),
    "deepseek-v3-yarn": ("deepseek_v3", {"rope_parameters": LATENT_YARN, "norm_topk_prob": False}),
    "opt": ("opt", {}),
    "opt-350m": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt-no-biases": (
        "opt",
        {
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "activation_function": "gelu",
        },
    ),
    "opt-no-final-norm": ("opt", {"_remove_final_layer_norm": True, "tie_word_embeddings": False}),
    "gpt2": ("gpt2", {}),
    "gpt2-odd": (
        "gpt2",
        {"n_inner": 80, "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False},
    ),
}


TENSOR_PARALLEL = [
    *("llama-gqa", "llama-biases", "qwen3-tied-biased", "granite", "smollm3", "opt", "gpt2"),
    *("phi3", "olmo2", "glm4", "gemma2", "gemma3"),
    *("deepseek-v2", "deepseek-v3-yarn", "gpt-oss"),
]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def compare(folder: Path, reference: torch.nn.Module, parallel: Parallel | None = None) -> None:
    """All logits of two sequences, in chunks and decode steps, against transformers'."""
    config = load_model_config(str(folder))
    parallel = parallel or Parallel(0, 1)
    model = load_model(config, dtype=torch.float32, device="cpu", parallel=parallel)
    sequences = [random_tokens(29, seed=1), random_tokens(18, seed=2)]
    run = PagedRun(model, config, sequences, num_ranks=parallel.size)
    for work in ({0: 6}, {1: 13, 0: 9}, {0: 11, 1: 1}, {1: 1, 0: 1}, {0: 1, 1: 2}, {0: 1, 1: 1}):
        run.step(work)
    for tokens, logits in zip(sequences, run.all_logits(), strict=True):
        close(logits, reference_logits(reference, tokens))


@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers(case: str, tmp_path: Path) -> None:
    family, changes = CASES[case]
    reference = random_model(family, **changes)
    save_safetensors(reference, tmp_path)
    compare(tmp_path, reference)

    config = load_model_config(str(tmp_path))
    model = load_model(config, dtype=torch.float32, device="cpu")
    prompt = random_tokens(40)
    fastest, _ = select_backend("cpu", torch.float32, config.head_dim, 16, config.sliding_window)
    whole = PagedRun(model, config, [prompt], fastest, block_size=16)
    whole.step({0: len(prompt)})
    expected = reference_logits(reference, prompt)
    close(whole.all_logits()[0], expected)
    # The comparison would be empty if logits were all alike.
    assert expected.std() > 0.5


@pytest.mark.parametrize(
    ("scaling", "positions"), [(LLAMA3_ROPE, 128), (YARN, 16)], ids=["llama3", "yarn"]
)
def test_rope_settings_of_older_files(
    scaling: dict[str, Any], positions: int, tmp_path: Path
) -> None:
    """The hub's files say `rope_scaling`; without an original length, that of the model counts."""
    reference = random_model(
        "llama", rope_parameters=dict(scaling), max_position_embeddings=positions
    )
    save_safetensors(reference, tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    del config["rope_parameters"]
    config["rope_theta"] = scaling["rope_theta"]
    config["rope_scaling"] = {key: scaling[key] for key in scaling if key != "rope_theta"}
    file.write_text(json.dumps(config))
    compare(tmp_path, reference)


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_sharded_files(family: str, tmp_path: Path) -> None:
    """Fused parameters may be filled from several files."""
    reference = random_model(family)
    save_safetensors(reference, tmp_path, shards=True)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    compare(tmp_path, reference)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_gemma3_beside_a_model_of_images(prefix: str, tmp_path: Path) -> None:
    """Released files nest the text's configuration, leave out what is usual, have RoPE in older
    keys, and hold the weights of other parts too."""
    reference = random_model("gemma3")
    tensors = {
        prefix + name.removeprefix("model."): tensor
        for name, tensor in reference.state_dict().items()
        if name.startswith("model.")
    }
    for other in ("vision_tower.vision_model.x.weight", "multi_modal_projector.norm.weight"):
        tensors["model." * prefix.startswith("model.") + other] = torch.ones(3)
    save_bin(reference, tmp_path, tensors)
    text = json.loads((tmp_path / "config.json").read_text())
    for key in ("architectures", "rope_parameters", "layer_types", "tie_word_embeddings"):
        del text[key]
    text |= {
        "rope_theta": 7000.0,
        "rope_local_base_freq": 300.0,
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
        "sliding_window_pattern": 2,
    }
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"hidden_size": 3},
        "eos_token_id": [1, 106],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = load_model_config(str(tmp_path))
    assert found.eos_token_ids == (1, 106)
    assert found.max_position_tokens == text["max_position_embeddings"]
    compare(tmp_path, reference)


def test_phi3_keeps_short_factors_within_the_original_length(tmp_path: Path) -> None:
    """Which factors apply follows from `max_model_len`, so that cached keys stay valid; hub files
    say "su", and have the original length beside the scaling."""
    changes = CASES["phi3-longrope"][1]
    reference = random_model("phi3", **changes)
    save_safetensors(reference, tmp_path)
    file = tmp_path / "config.json"
    saved = json.loads(file.read_text())
    scaling = dict(saved.pop("rope_parameters"))
    saved["rope_theta"] = scaling.pop("rope_theta")
    saved["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    scaling = {key: scaling[key] for key in ("short_factor", "long_factor")}
    saved["rope_scaling"] = {"type": "su", **scaling}
    file.write_text(json.dumps(saved))
    config = load_model_config(str(tmp_path))
    model = load_model(config, dtype=torch.float32, device="cpu", max_model_len=16)
    tokens = random_tokens(14)
    run = PagedRun(model, config, [tokens])
    run.step({0: 9})
    run.step({0: 5})
    close(run.all_logits()[0], reference_logits(reference, tokens))
    compare(tmp_path, reference)  # longer than the original length


@pytest.mark.parametrize("prefix", ["decoder.", "model.decoder."])
def test_opt_from_pickled_files(prefix: str, tmp_path: Path) -> None:
    """facebook/opt-125m names its tensors `decoder.`; later checkpoints say `model.decoder.`."""
    reference = random_model("opt")
    own = "model.decoder."
    tensors = {
        prefix + name.removeprefix(own): tensor
        for name, tensor in reference.state_dict().items()
        if name.startswith(own)
    }
    tensors["lm_head.weight"] = reference.lm_head.weight.detach().clone()
    compare(save_bin(reference, tmp_path, tensors), reference)


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_gpt2_with_and_without_prefix(prefix: str, tmp_path: Path) -> None:
    """The hub's gpt2 has no prefix and carries its causal masks as tensors."""
    reference = random_model("gpt2")
    own = "transformer."
    tensors = {
        prefix + name.removeprefix(own): tensor
        for name, tensor in reference.state_dict().items()
        if name.startswith(own)
    }
    for layer in range(3):
        tensors[f"{prefix}h.{layer}.attn.bias"] = torch.ones(1, 1, 128, 128).tril().bool()
        tensors[f"{prefix}h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    compare(save_bin(reference, tmp_path, tensors), reference)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", TENSOR_PARALLEL)
def test_tensor_parallel_ranks_compute_the_same(case: str, size: int, tmp_path: Path) -> None:
    """Each rank loads its share of the files; with 4 ranks, 2 KV heads are kept twice."""
    family, changes = CASES[case]
    reference = random_model(family, **changes)
    save_safetensors(reference, tmp_path)
    on_ranks(size, lambda parallel: compare(tmp_path, reference, parallel))


def compare_stacked(folder: Path, reference: torch.nn.Module, parallel: Parallel) -> None:
    """With one weight for all experts of a layer, as on a GPU."""
    config, tokens = load_model_config(str(folder)), random_tokens(23, seed=4)
    options: dict[str, Any] = {"device": "cpu", "parallel": parallel, "dtype": torch.float32}
    model = load_model(config, **options, method_for=lambda path: Unquantized())
    stacks = [layer.stack for layer in model.modules() if isinstance(layer, ExpertLinear)]
    assert stacks and all(stack is not None for stack in stacks)
    run = PagedRun(model, config, [tokens], num_ranks=parallel.size)
    run.step({0: 22})
    run.step({0: 1})
    close(run.all_logits()[0], reference_logits(reference, tokens))


@pytest.mark.parametrize("is_whole", [False, True], ids=["parts of experts", "whole experts"])
@pytest.mark.parametrize("case", ["mixtral", "gpt-oss"])
def test_experts_in_one_weight(case: str, is_whole: bool, tmp_path: Path) -> None:
    family, changes = CASES[case]
    reference = random_model(family, **changes)
    save_safetensors(reference, tmp_path)
    compare_stacked(tmp_path, reference, Parallel())
    on_ranks(
        2, lambda one: compare_stacked(tmp_path, reference, replace(one, expert_parallel=is_whole))
    )


@pytest.mark.parametrize("is_whole", [False, True], ids=["parts of experts", "whole experts"])
@pytest.mark.parametrize(
    "case",
    ["mixtral", "qwen2-moe", "qwen3-moe-dense-layers", "granitemoe", "glm4-moe", "gpt-oss"],
)
def test_ranks_share_experts(case: str, is_whole: bool, tmp_path: Path) -> None:
    """A part of each expert on each rank, or of 5, 6 and 7 experts those of two ranks."""
    family, changes = CASES[case]
    reference = random_model(family, **changes)
    save_safetensors(reference, tmp_path)
    on_ranks(2, lambda one: compare(tmp_path, reference, replace(one, expert_parallel=is_whole)))
