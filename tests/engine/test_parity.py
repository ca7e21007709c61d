"""The whole engine against transformers: same weights, same tokens, same log-probabilities.

Greedy tokens are equal over 64 steps, and logprobs agree within 1e-4, for every model family and
whatever the engine does meanwhile: chunks, prefix hits, preemption, block size, overlap, company.
With keys and values in float16 they agree within 1e-2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import PreTrainedModel

from quire import LLM, RequestOutput, SamplingParams
from tests.models.reference import random_tokens
from tests.tiny import assert_at_rest, greedy, is_greedy, logprobs, save_tiny, tiny_llm

STEPS = 64
LENGTHS = (3, 18, 41, 75)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("llama", {}),
    "llama-mha-tied": ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-sharded": ("llama", {"num_key_value_heads": 1, "shards": True, "seed": 3}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3-sharded": ("qwen3", {"shards": True}),
    "mixtral": ("mixtral", {}),
    "qwen3-moe": ("qwen3_moe", {}),
    "qwen2-moe": ("qwen2_moe", {}),
    "granitemoe": ("granitemoe", {}),
    "glm4-moe": ("glm4_moe", {}),
    "deepseek-v2": ("deepseek_v2", {}),
    "deepseek-v3": ("deepseek_v3", {}),
    "opt": ("opt", {}),
    "gpt2": ("gpt2", {}),
    "granite": ("granite", {}),
    "smollm3": ("smollm3", {}),
    "phi3": ("phi3", {"sliding_window": None}),
    "olmo2": ("olmo2", {}),
    "glm4": ("glm4", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3", {}),
    "gpt-oss": ("gpt_oss", {}),
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2-yarn": (
        "deepseek_v2",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 24,
                "mscale": 0.8,
                "mscale_all_dim": 1.2,
            }
        },
    ),
    "deepseek-v3-dense": ("deepseek_v3", {"first_k_dense_replace": 3}),
    "phi3-window": ("phi3", {"sliding_window": 24}),
    "phi3-longrope": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0],
                "long_factor": [1.5, 2.0, 4.0, 7.0, 11.0, 13.0],
                "original_max_position_embeddings": 2,
                "attention_factor": 1.3,
            },
            # transformers chooses factors by the length so far: here the long ones for any.
            "original_max_position_embeddings": 2,
            "sliding_window": None,
        },
    ),
    "smollm3-hybrid": ("smollm3", {"use_sliding_window": True, "sliding_window": 24}),
}
"""What families have in some models, in the setting that does most at once."""
CASES |= VARIANTS

HYBRIDS = ("gemma2", "gemma3", "gpt-oss", "smollm3-hybrid")
"""Families with a group of full layers and two of layers with a window."""

EXPERTS = (
    *("mixtral", "qwen2-moe", "qwen3-moe", "granitemoe", "glm4-moe"),
    *("deepseek-v2", "deepseek-v3"),
)
"""Families whose tokens choose experts: a rounded cache may turn a choice that is close to even."""

# What the engine runs with, and whether it then must preempt. The pool of a preempting engine has
# room for the longest request and little more.
SETTINGS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({"block_size": 16}, False),
    "chunks": ({"block_size": 8, "max_num_batched_tokens": 37, "max_num_seqs": 9}, False),
    "pool4": ({"block_size": 4, "num_gpu_blocks_override": 56}, True),
    "pool8-chunks-overlap": (
        {
            "block_size": 8,
            "num_gpu_blocks_override": 26,
            "max_num_batched_tokens": 23,
            "max_steps_in_flight": 2,
        },
        True,
    ),
    "pool32-overlap": (
        {"block_size": 32, "num_gpu_blocks_override": 9, "max_steps_in_flight": 2},
        True,
    ),
    "overlap64": ({"block_size": 64, "max_steps_in_flight": 2}, False),
    "pool128": ({"block_size": 128, "num_gpu_blocks_override": 3}, True),
    "pool16-uncached": (
        {"block_size": 16, "num_gpu_blocks_override": 16, "enable_prefix_caching": False},
        True,
    ),
    "pool8-halves": (
        {"block_size": 8, "num_gpu_blocks_override": 26, "kv_cache_dtype": "float16"},
        True,
    ),
    "torch-kernel-halves": (
        {"block_size": 16, "attention_backend": "torch", "kv_cache_dtype": "float16"},
        False,
    ),
    "pool8-torch-kernel-8-bits": (
        {
            "block_size": 8,
            "num_gpu_blocks_override": 26,
            "attention_backend": "torch",
            "kv_cache_dtype": "fp8",
        },
        True,
    ),
    "torch-kernel": (
        {"block_size": 4, "attention_backend": "torch", "max_num_batched_tokens": 50},
        False,
    ),
}

# Pairs of families and settings: the first family meets all, the others three each, and every
# setting meets several families.
_NAMES = list(SETTINGS)
PAIRS = [("llama-gqa", name) for name in _NAMES] + [
    (case, _NAMES[(3 * i + j) % len(_NAMES)])
    for i, case in enumerate(list(CASES)[1:])
    for j in range(3)
    if case not in (*HYBRIDS, *EXPERTS, *VARIANTS)
]
PAIRS += [(case, "pool8-chunks-overlap") for case in VARIANTS]
PAIRS.append(("deepseek-v3-dense", "pool8-torch-kernel-8-bits"))  # latents in 8 bits
PAIRS += [
    (case, name)
    for case in (*HYBRIDS, *EXPERTS)
    if case not in VARIANTS
    for name in ("chunks", "pool4", "pool8-chunks-overlap", "torch-kernel")
]

WHOLE_EXPERTS: dict[str, Any] = {
    "block_size": 8,
    "num_gpu_blocks_override": 26,
    "enable_expert_parallel": True,
}
RANKS: dict[str, tuple[dict[str, Any], bool]] = {
    "ranks2-pool8": ({**WHOLE_EXPERTS, "tensor_parallel_size": 2}, True),
    "ranks3-pool8": ({**WHOLE_EXPERTS, "tensor_parallel_size": 3}, True),
    "ranks2-stages2-pool8": (
        {**WHOLE_EXPERTS, "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        True,
    ),
}
"""Processes that have whole experts each; 2 or 3 do not divide 5 and 7 experts."""
PAIRS += [pytest.param(case, name, marks=pytest.mark.slow) for case in EXPERTS for name in RANKS]


def make_prompts() -> list[list[int]]:
    """32 prompts of four lengths. Those of a length agree in their first half, or in all but the
    last few tokens, so that blocks are shared whole and in part."""
    prompts = []
    for i in range(32):
        length = LENGTHS[i % 4]
        shared = length // 2 if i % 8 < 4 else length - 2
        prompts.append(
            random_tokens(shared, seed=length) + random_tokens(length - shared, seed=100 + i)
        )
    return prompts


@dataclass
class Family:
    folder: Path
    model: PreTrainedModel
    prompts: list[list[int]]
    expected: list[list[int]]
    """transformers' greedy tokens."""
    logprobs: list[NDArray[np.float64]]
    """Of all tokens but the first, prompt and expected."""


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(case: str) -> Family:
        name, changes = CASES[case]
        folder = tmp_path_factory.mktemp(case)
        model = save_tiny(folder, name, **changes)
        prompts = make_prompts()
        expected = greedy(model, prompts, STEPS)
        lines = [
            logprobs(model, prompt + made)[:-1].numpy()
            for prompt, made in zip(prompts, expected, strict=True)
        ]
        return Family(folder, model, prompts, expected, lines)

    return make


GREEDY = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True, logprobs=3)


def assert_equal(family: Family, index: int, output: RequestOutput, bound: float = 1e-4) -> None:
    prompt, expected = family.prompts[index], family.expected[index]
    (completion,) = output.outputs
    made = completion.token_ids
    lines = family.logprobs[index][len(prompt) - 1 :]
    if made != expected:
        tie = max(1e-3, 2 * bound)
        assert is_greedy(family.model, prompt, made, tie), f"prompt {index} differs beyond ties"
        lines = logprobs(family.model, prompt + made)[len(prompt) - 1 : -1].numpy()
    assert len(made) == STEPS and completion.finish_reason == "length"
    assert completion.logprobs is not None
    for token, line, entry in zip(made, lines, completion.logprobs, strict=True):
        assert token in entry and 3 <= len(entry) <= 4
        for candidate, logprob in entry.items():
            assert abs(logprob.logprob - line[candidate]) < bound


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)


@pytest.mark.parametrize(("case", "setting"), PAIRS)
def test_greedy_tokens_are_those_of_transformers(case: str, setting: str, family: Any) -> None:
    """All 32 together (fewer where they preempt each other), then one alone, and that one again."""
    options, must_preempt = (SETTINGS | RANKS)[setting]
    if "window" in case and must_preempt:  # what is behind the window is free
        options = {**options, "num_gpu_blocks_override": -(-160 // options["block_size"])}
    if case in HYBRIDS and must_preempt:
        options = {**options, "num_gpu_blocks_override": 3 * -(-160 // options["block_size"])}
    reference: Family = family(case)
    bound = {"float16": 1e-2, "fp8": 0.8}.get(options.get("kv_cache_dtype", ""), 1e-4)
    with tiny_llm(reference.folder, max_model_len=160, **options) as llm:
        together = reference.prompts[:12] if must_preempt else reference.prompts
        for i, output in enumerate(generate(llm, together, GREEDY)):
            assert_equal(reference, i, output, bound)
        assert (llm.statistics().num_preemptions > 0) == must_preempt
        for _ in range(2):
            (again,) = generate(llm, [reference.prompts[3]], GREEDY)
            assert_equal(reference, 3, again, bound)
        caching = options.get("enable_prefix_caching", True)
        if case in HYBRIDS:
            assert again.num_cached_tokens >= LENGTHS[3] - options["block_size"] or must_preempt
        elif "window" not in case or not must_preempt:  # else its own blocks were reused
            assert again.num_cached_tokens == (LENGTHS[3] - 1 if caching else 0)
        assert_at_rest(llm)


@pytest.mark.parametrize("case", CASES)
def test_prompt_logprobs_are_those_of_transformers(case: str, family: Any) -> None:
    """In several chunks, beside other requests, and although the cache knows the prompt."""
    reference: Family = family(case)
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=2)
    plain = SamplingParams(temperature=0.0, max_tokens=8)
    chosen = [3, 6, 1, 7]
    with tiny_llm(reference.folder, max_num_batched_tokens=29, block_size=8) as llm:
        generate(llm, [reference.prompts[3]], plain)
        prompts = [reference.prompts[i] for i in (*chosen, *range(4))]
        outputs = generate(llm, prompts, [params] * len(chosen) + [plain] * 4)
        for index, output in zip(chosen, outputs, strict=False):
            assert output.prompt_logprobs is not None
            first, *entries = output.prompt_logprobs
            prompt = reference.prompts[index]
            assert first is None and len(entries) == len(prompt) - 1
            for token, line, entry in zip(
                prompt[1:], reference.logprobs[index], entries, strict=False
            ):
                assert {*line.argsort()[-2:].tolist(), token} == set(entry)
                rank = int((line > line[token]).sum()) + 1
                assert entry[token].rank == rank
                for candidate, logprob in entry.items():
                    assert abs(logprob.logprob - line[candidate]) < 1e-4
        assert outputs[-1].prompt_logprobs is None
