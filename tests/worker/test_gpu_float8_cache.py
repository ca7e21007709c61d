"""The engine on a GPU with keys and values in 8 bits: nearly the likelihoods of a 16-bit cache."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams

pytestmark = pytest.mark.gpu

SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "head_dim": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
ROUNDING = {"fp8_e4m3": 0.08, "fp8_e5m2": 0.16}
"""Root of the mean square of what it changes in log-probabilities, as a share of their spread."""


@cache
def prompts() -> list[list[int]]:
    """They have their first tokens in common."""
    rng = np.random.default_rng(1)
    shared = rng.integers(5, 8000, 300).tolist()
    return [shared + rng.integers(5, 8000, int(n)).tolist() for n in rng.integers(3, 600, 16)]


def measure(folder: Path, **options: Any) -> tuple[torch.Tensor, list[list[int]], int]:
    """Log-probabilities of the prompts' tokens, greedy tokens, and how often rows were preempted.
    All prompts come twice, the second time from the prefix cache."""
    settings = {"kv_cache_memory_bytes": 1 << 28, "max_num_seqs": 32, **options}
    params = SamplingParams(
        temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False, prompt_logprobs=0
    )
    tokens = [{"prompt_token_ids": prompt} for prompt in prompts()]
    with LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, **settings) as llm:
        outputs = llm.generate(tokens, params, use_tqdm=False)
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        again = llm.generate(tokens, params, use_tqdm=False)
        preempted = llm.statistics().num_preemptions
    assert all(output.num_cached_tokens >= 288 for output in again)
    firsts = [
        one.outputs[0].token_ids[0] == two.outputs[0].token_ids[0]
        for one, two in zip(outputs, again, strict=True)
    ]
    assert sum(firsts) >= 0.7 * len(firsts), "what the cache has is what was computed, but for ties"
    lines = [
        entry[token].logprob
        for prompt, output in zip(prompts(), outputs, strict=True)
        for token, entry in zip(prompt, output.prompt_logprobs or [], strict=True)
        if entry
    ]
    return torch.tensor(lines), [list(o.outputs[0].token_ids) for o in outputs], preempted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(SIZES))
    return path


@pytest.fixture(scope="module")
def exact(folder: Path) -> tuple[torch.Tensor, list[list[int]]]:
    lines, tokens, _ = measure(folder)
    return lines, tokens


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("fp8_e4m3", {}),
        ("fp8_e5m2", {}),
        ("fp8_e4m3", {"num_gpu_blocks_override": 130, "max_model_len": 1024}),
        ("fp8_e4m3", {"enforce_eager": True, "block_size": 64}),
    ],
    ids=["e4m3", "e5m2", "preempting", "eager"],
)
def test_likelihoods_are_nearly_the_same(
    folder: Path, exact: tuple[torch.Tensor, list[list[int]]], kind: str, options: dict[str, Any]
) -> None:
    lines, tokens, preempted = measure(folder, kv_cache_dtype=kind, **options)
    error = ((lines - exact[0]).pow(2).mean().sqrt() / exact[0].std()).item()
    assert 0 < error < ROUNDING[kind]
    firsts = [one[0] == two[0] for one, two in zip(tokens, exact[1], strict=True)]
    assert sum(firsts) >= 0.6 * len(firsts)
    assert (preempted > 0) == ("num_gpu_blocks_override" in options)
