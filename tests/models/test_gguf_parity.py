"""Models out of GGUF files compute what transformers computes with the numbers of the file.

The files are written by `tests.loading.converted`, with the gguf package's names and blocks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.model import load_model_config
from quire.kernels.cpu.linear import FloatMatrix
from quire.layers.parallel import Parallel
from quire.models.loader import ONE_RANK, count_weight_bytes, held_weight_bytes, load_model
from quire.models.registry import CausalLM
from tests.layers.ranks import on_ranks
from tests.loading.converted import convert
from tests.models.reference import PagedRun, random_model, random_tokens, reference_logits

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LATENT_YARN = {**YARN, "mscale": 0.8, "mscale_all_dim": 0.8}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0],
    "long_factor": [1.5, 2.0, 4.0, 7.0, 11.0, 13.0],
    "original_max_position_embeddings": 16,
    "attention_factor": 1.25,
}
# Blocks of 32 divide these sizes.
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
TWO_LAYERS = {"num_hidden_layers": 2}

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("llama", "mixtral", TWO_LAYERS),
    "qwen2-moe": ("qwen2moe", "qwen2_moe", TWO_LAYERS),
    "qwen3-moe": ("qwen3moe", "qwen3_moe", {"norm_topk_prob": True}),
    "gemma2": ("gemma2", "gemma2", {"query_pre_attn_scalar": 24}),
    "gemma3": ("gemma3", "gemma3", {"query_pre_attn_scalar": 24, "tie_word_embeddings": False}),
    "gemma3-capped": (
        "gemma3",
        "gemma3",
        {"query_pre_attn_scalar": 24, "final_logit_softcapping": 5.0},
    ),
    "phi3": ("phi3", "phi3", {}),
    "phi3-longrope": (
        "phi3",
        "phi3",
        {
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 16,
            "tie_word_embeddings": True,
            "sliding_window": None,
        },
    ),
    "deepseek-v2": ("deepseek2", "deepseek_v2", {"rope_parameters": LATENT_YARN}),
    "deepseek-v2-groups": (
        "deepseek2",
        "deepseek_v2",
        {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 28,
            "rope_parameters": YARN,
        },
    ),
    "deepseek-v3": ("deepseek2", "deepseek_v3", {}),
    "gpt-oss": ("gpt-oss", "gpt_oss", {"swiglu_limit": 7.0}),
}


def compare(
    path: Path,
    reference: torch.nn.Module,
    bound: float,
    parallel: Parallel = ONE_RANK,
    **options: Any,
) -> CausalLM:
    """Logits of a prompt in two chunks and some steps of decoding; gives the loaded model."""
    config = load_model_config(str(path))
    settings = {"dtype": torch.float32, "device": "cpu", **options}
    model = load_model(config, parallel=parallel, **settings)
    tokens = random_tokens(29, seed=1)
    run = PagedRun(model, config, [tokens], num_ranks=parallel.size)
    for count in (6, 20, 1, 1, 1):
        run.step({0: count})
    expected = reference_logits(reference, tokens)
    found = run.all_logits()[0]
    error = (found - expected).norm() / (expected - expected.mean(-1, keepdim=True)).norm()
    assert expected.std() > 0.5
    assert error < bound, error
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_of_a_converted_model(case: str, tmp_path: Path) -> None:
    arch, family, changes = CASES[case]
    reference = random_model(family, **changes)
    path = convert(reference, arch, tmp_path / "model.gguf")
    compare(path, reference, 1e-5)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_files_with_the_whole_matrix_of_latents(family: str, tmp_path: Path) -> None:
    """As llama.cpp wrote them before it stored the halves."""
    reference = random_model(family)
    path = convert(reference, "deepseek2", tmp_path / "model.gguf", split_latent=False)
    compare(path, reference, 1e-5)


QUANTIZED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("llama", "mixtral", {**WIDE, "num_local_experts": 3}),
    "qwen2-moe": (
        "qwen2moe",
        "qwen2_moe",
        {**WIDE, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256},
    ),
    "gemma3": ("gemma3", "gemma3", {**WIDE, "head_dim": 64, "query_pre_attn_scalar": 64}),
    "phi3": ("phi3", "phi3", {**WIDE, "sliding_window": None}),
    "deepseek-v3": (
        "deepseek2",
        "deepseek_v3",
        {**WIDE, **LATENT, "q_lora_rank": 32, "moe_intermediate_size": 256, "n_group": 2},
    ),
    "gpt-oss": ("gpt-oss", "gpt_oss", {**WIDE, "head_dim": 64, "swiglu_limit": 7.0}),
}


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *((case, "Q8_0") for case in QUANTIZED),
        *(("mixtral", "Q4_K"), ("qwen2-moe", "Q4_K"), ("gpt-oss", "MXFP4"), ("phi3", "MXFP4")),
    ],
)
def test_quantised_files(case: str, kind: str, tmp_path: Path) -> None:
    """As exact numbers, and from packed blocks, experts included."""
    arch, family, changes = QUANTIZED[case]
    reference = random_model(family, spread=0.08, **changes)
    path = convert(reference, arch, tmp_path / "model.gguf", kind)
    compare(path, reference, 1e-5)
    packed = compare(path, reference, 3e-2, quantization="gguf-a16")
    config = load_model_config(str(path))
    counted = count_weight_bytes(config, dtype=torch.float32, device="cpu", quantization="gguf-a16")
    assert counted == held_weight_bytes(packed)
    for layer in packed.modules():
        for matrix in getattr(layer, "by_expert", {}).values():
            assert not any(isinstance(one, FloatMatrix) for one in matrix)


@pytest.mark.parametrize(
    ("case", "is_whole"),
    [
        *(("mixtral", False), ("mixtral", True), ("phi3", False), ("deepseek-v3", True)),
        *(("gpt-oss", False), ("gpt-oss", True)),
    ],
)
def test_ranks_read_their_share_of_blocks(case: str, is_whole: bool, tmp_path: Path) -> None:
    """Of joined matrices, of the halves of latents, and of experts: a part of each, or some."""
    arch, family, changes = QUANTIZED[case]
    reference = random_model(family, spread=0.08, **changes)
    path = convert(reference, arch, tmp_path / "model.gguf", "Q8_0")

    def run(rank: Parallel) -> None:
        parallel = replace(rank, expert_parallel=is_whole)
        compare(path, reference, 3e-2, parallel, quantization="gguf-a16")

    on_ranks(2, run)
