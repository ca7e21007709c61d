"""Every model family on a GPU in bfloat16: the logits of transformers from the same weights.

Rounding alone separates the two, so the bounds are those of rounding: 2 % of the logits' norm, and
the same best token wherever the best two lie further apart than rounding moves them, which the
difference between transformers in bfloat16 and in float32 shows. Where tokens choose experts,
rounding sends a few of them to others; there the median of all positions counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from quire.config.model import load_model_config
from quire.layers.attention.backend import select_backend
from quire.models.loader import load_model
from tests.models.reference import (
    EAGER,
    PagedRun,
    random_model,
    random_tokens,
    reference_logits,
    save_safetensors,
)

pytestmark = pytest.mark.gpu

VOCAB = 8192
LAYERS = 4
LENGTHS = (9, 40, 130, 333, 600)
NUM_DECODED = 6

_LLAMA_LIKE = {
    "vocab_size": VOCAB,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
_LATENT = {
    "num_key_value_heads": 16,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": LAYERS,
}
_SHORT = {**_LLAMA_LIKE, "num_hidden_layers": 2}
_GRANITE = {
    **_SHORT,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.03,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.5,
}
_GEMMA = {**_SHORT, "head_dim": 128, "query_pre_attn_scalar": 128, "sliding_window": 64}
_LATENT_EXPERTS = {
    **_SHORT,
    **_LATENT,
    "kv_lora_rank": 512,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 256,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LLAMA_LIKE),
    "llama-heads-of-128": ("llama", {**_LLAMA_LIKE, "head_dim": 128}),
    "mistral-window": ("mistral", {**_LLAMA_LIKE, "sliding_window": 64}),
    "qwen2": ("qwen2", _LLAMA_LIKE),
    "qwen3": ("qwen3", {**_LLAMA_LIKE, "head_dim": 128, "tie_word_embeddings": True}),
    "gemma2": (
        "gemma2",
        {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": (
        "gemma3",
        {
            **_GEMMA,
            "query_pre_attn_scalar": 1024,  # norms double queries and keys
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
    ),
    "glm4-half-of-a-head": ("glm4", {**_SHORT, "head_dim": 128}),
    "granite": ("granite", _GRANITE),
    "olmo2": ("olmo2", {**_SHORT, "num_key_value_heads": 16}),
    "phi3-window": ("phi3", {**_SHORT, "sliding_window": 64}),
    "smollm3": ("smollm3", {**_SHORT, "no_rope_layers": [1, 0]}),
    # Every expert is chosen: rounding would choose others here and there.
    "gpt-oss": (
        "gpt_oss",
        {
            **_SHORT,
            "head_dim": 64,
            "intermediate_size": 512,
            "num_local_experts": 4,
            "num_experts_per_tok": 4,
            "sliding_window": 64,
            "swiglu_limit": 7.0,
        },
    ),
    "granitemoe": (
        "granitemoe",
        {**_GRANITE, "intermediate_size": 512, "num_local_experts": 4, "num_experts_per_tok": 4},
    ),
    "qwen2-moe": (
        "qwen2_moe",
        {
            **_SHORT,
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 704,
        },
    ),
    "qwen3-moe": (
        "qwen3_moe",
        {
            **_LLAMA_LIKE,
            "head_dim": 128,
            "num_experts": 8,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 704,
            "norm_topk_prob": True,
        },
    ),
    "deepseek-v2-without-experts": (
        "deepseek_v2",
        {**_LLAMA_LIKE, **_LATENT, "kv_lora_rank": 512, "q_lora_rank": None},
    ),
    "deepseek-v3-without-experts": (
        "deepseek_v3",
        {**_LLAMA_LIKE, **_LATENT, "kv_lora_rank": 384, "q_lora_rank": 256, "attention_bias": True},
    ),
    "deepseek-v2-chosen-experts": (
        "deepseek_v2",
        {**_LATENT_EXPERTS, "n_routed_experts": 16, "num_experts_per_tok": 4},
    ),
    "deepseek-v3-chosen-experts": (
        "deepseek_v3",
        {**_LATENT_EXPERTS, "n_routed_experts": 16, "num_experts_per_tok": 4, "q_lora_rank": 256},
    ),
    "glm4-moe-chosen-experts": (
        "glm4_moe",
        {
            **_SHORT,
            "head_dim": 128,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 256,
        },
    ),
    "mixtral-chosen-experts": (
        "mixtral",
        {**_SHORT, "intermediate_size": 512, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen3-moe-chosen-experts": (
        "qwen3_moe",
        {
            **_SHORT,
            "head_dim": 128,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 256,
            "norm_topk_prob": True,
        },
    ),
    "opt": (
        "opt",
        {
            "vocab_size": VOCAB,
            "hidden_size": 1024,
            "word_embed_proj_dim": 1024,
            "ffn_dim": 4096,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 16,
            "max_position_embeddings": 1024,
        },
    ),
    "gpt2-heads-of-80": (
        "gpt2",
        {"vocab_size": VOCAB, "n_embd": 960, "n_layer": LAYERS, "n_head": 12, "n_positions": 1024},
    ),
}


@dataclass
class Compared:
    """Logits of all positions of all sequences, [positions, vocab], in float32."""

    ours: Tensor
    theirs: Tensor
    exact: Tensor
    """transformers in float32, with the weights as they are in bfloat16."""
    decoded: Tensor
    """Which positions were computed alone in their request, as generated tokens are."""
    chooses: bool
    """Whether tokens choose among experts."""


@pytest.fixture(scope="module", params=CASES)
def compared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Compared]:
    family, settings = CASES[request.param]
    folder = tmp_path_factory.mktemp(family)
    # The spread that all of these models are initialised with.
    save_safetensors(random_model(family, spread=0.02, **settings).bfloat16(), folder)
    config = load_model_config(str(folder))
    model = load_model(config, dtype=torch.bfloat16, device="cuda")
    sequences = [random_tokens(n, seed=n, vocab=VOCAB) for n in LENGTHS]
    ours = torch.cat(run_paged(model, config, sequences))
    how = {"attn_implementation": "eager"} if family in EAGER else {}
    # Loaded, not cast: casting a model would round its rotary frequencies too.
    theirs, exact = (
        torch.cat([reference_logits(reference, tokens) for tokens in sequences])
        for reference in (
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **how).cuda().eval()
            for dtype in (torch.bfloat16, torch.float32)
        )
    )
    decoded = torch.cat([torch.arange(n) >= n - NUM_DECODED for n in LENGTHS])
    experts = config.experts
    chooses = experts is not None and any(experts.is_sparse) and experts.top_k < experts.count
    yield Compared(ours.float(), theirs.float(), exact, decoded.cuda(), chooses)
    torch.cuda.empty_cache()


def run_paged(model: Any, config: Any, sequences: list[list[int]]) -> list[Tensor]:
    """Prompts in two chunks, the second beside decoding rows; then all decode, then one alone."""
    backend, _ = select_backend(
        "cuda",
        torch.bfloat16,
        config.head_dim,
        16,
        config.sliding_window,
        is_latent=config.latent is not None,
    )
    assert backend.support.name == "triton"
    run = PagedRun(model, config, sequences, backend, block_size=16, dtype=torch.bfloat16)
    prompts = [len(tokens) - NUM_DECODED for tokens in sequences]
    run.step({0: prompts[0], 1: prompts[1], 2: prompts[2] // 2, 3: prompts[3] // 3})
    run.step({0: 1, 1: 1, **{i: prompts[i] - run.computed[i] for i in (2, 3, 4)}})
    for _ in range(NUM_DECODED - 1):
        run.step(dict.fromkeys(range(len(sequences)), 1))
    for i in (2, 3, 4):
        run.step({i: 1})
    assert run.computed == list(map(len, sequences))
    return run.all_logits()


def relative_error(found: Tensor, expected: Tensor, of_most: bool) -> float:
    """Of all positions together, or their median."""
    if of_most:
        return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median())
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("decoded", [False, True], ids=["prefill", "decode"])
def test_logits_are_those_of_transformers(compared: Compared, decoded: bool) -> None:
    chosen = compared.decoded == decoded
    ours, theirs, exact = (x[chosen] for x in (compared.ours, compared.theirs, compared.exact))
    assert exact.std() > 0.5, "logits that are all alike would prove nothing"
    error = partial(relative_error, of_most=compared.chooses)
    assert error(ours, theirs) < 2e-2
    # No worse than transformers itself rounds.
    assert error(ours, exact) < 1.25 * error(theirs, exact)


@pytest.mark.parametrize("decoded", [False, True], ids=["prefill", "decode"])
def test_best_tokens_agree(compared: Compared, decoded: bool) -> None:
    chosen = compared.decoded == decoded
    ours, theirs, exact = (x[chosen] for x in (compared.ours, compared.theirs, compared.exact))
    rounding = (theirs - exact).abs().amax(-1)
    best = theirs.topk(2).values
    clear = best[:, 0] - best[:, 1] > 2 * rounding
    assert clear.sum() > 0.3 * len(clear)
    agree = (ours.argmax(-1) == theirs.argmax(-1))[clear].float().mean()
    assert agree > (0.9 if compared.chooses else 0.99)
