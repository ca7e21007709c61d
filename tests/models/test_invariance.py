"""On a CPU a token's logits depend on the tokens before it alone, to the bit: not on how a prompt
is cut into chunks, on what else is in the batch, on the number of threads, or on what the cache
knows.

A sum whose order follows the shape of the batch turns these red.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config.embedded import embedded_model_path
from quire.config.model import ModelConfig, load_model_config
from quire.kernels import cpu
from quire.kernels.cpu.attention import STORED
from quire.kernels.cpu.library import ISAS
from quire.layers.attention.cpu import CpuBackend
from quire.models.loader import load_model
from quire.models.registry import CausalLM
from tests.models.reference import PagedRun, random_model, random_tokens, save_safetensors

LONG = {"max_position_embeddings": 700}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "three-heads-each": (
        "llama",
        LONG | {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 192},
    ),
    "odd-head-size": ("llama", LONG | {"head_dim": 20, "num_key_value_heads": 4}),
    "window": ("mistral", LONG | {"sliding_window": 37}),
    "head-norms": ("qwen3", LONG),
    "sinks": ("gpt_oss", LONG | {"sliding_window": 300}),
    "opt": ("opt", LONG),
    "gpt2": ("gpt2", {"n_positions": 700}),
    "experts": ("qwen3_moe", LONG | {"moe_intermediate_size": 32}),
    "experts-by-sigmoid": ("glm4_moe", LONG | {"moe_intermediate_size": 32}),
    "gated-shared-expert": ("qwen2_moe", LONG),
    "latents": ("deepseek_v2", LONG | {"q_lora_rank": 28, "attention_bias": True}),
    "latents-and-groups": ("deepseek_v3", LONG),
}
LENGTHS = (600, 150, 40, 7)
CHUNKS = (1, 1, 2, 3, 5, 17, 60, 300)


@pytest.fixture(autouse=True)
def restored_threads(native: None) -> Iterator[None]:
    yield
    cpu.set_num_threads(None)
    cpu.set_isa(None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def save(case: str) -> Path:
        family, changes = CASES[case]
        return save_safetensors(random_model(family, **changes), tmp_path_factory.mktemp(case))

    return save


def logits(
    model: CausalLM,
    config: ModelConfig,
    sequences: list[list[int]],
    stored: torch.dtype,
    rng: random.Random | None,
) -> list[torch.Tensor]:
    """Each sequence whole and alone, or all together in chunks of random sizes."""
    paged = PagedRun(model, config, sequences, CpuBackend, block_size=8, dtype=stored)
    if rng is None:
        for index, tokens in enumerate(sequences):
            paged.step({index: len(tokens)})
        return paged.all_logits()
    while True:
        left = [len(tokens) - done for tokens, done in zip(sequences, paged.computed, strict=True)]
        if not any(left):
            return paged.all_logits()
        chosen = [i for i, count in enumerate(left) if count and rng.random() < 0.7]
        if chosen:
            paged.step({i: min(rng.choice(CHUNKS), left[i]) for i in chosen})


def check(model: CausalLM, config: ModelConfig, stored: torch.dtype, seed: int) -> None:
    vocab = config.vocab_size
    sequences = [random_tokens(length, length, vocab) for length in LENGTHS]
    cpu.set_num_threads(1)
    expected = logits(model, config, sequences, stored, None)
    for threads in (1, 2):
        cpu.set_num_threads(threads)
        found = logits(model, config, sequences, stored, random.Random(seed + threads))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# Pairs: every instruction set meets every family, kind of weights and type of keys and values.
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("case", CASES)
def test_chunks_and_company_change_no_bit(case: str, isa: str, folder: Any) -> None:
    if isa not in cpu.isas():
        pytest.skip(f"this processor has no {isa}")
    cpu.set_isa(isa)
    index = list(CASES).index(case) + ISAS.index(isa)
    quantization = (None, "int8")[index % 2]
    stored = STORED[index // 2 % 2]
    config = load_model_config(str(folder(case)))
    model = load_model(config, dtype=torch.float32, device="cpu", quantization=quantization)
    check(model, config, stored, seed=index)


PROMPTS = [
    "The quick brown fox jumps over the lazy dog. " * 30,
    "The quick brown fox jumps over the lazy dog. " * 30 + "What",
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "1, 2, 3, 4, 5,",
]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, logprobs=3, ignore_eos=True)
Answer = tuple[list[int], list[dict[int, float]]]


def answers(llm: LLM, prompts: list[str]) -> list[Answer]:
    found = []
    for output in llm.generate(prompts, PARAMS, use_tqdm=False):
        (completion,) = output.outputs
        assert completion.logprobs is not None
        lines = [
            {token: entry.logprob for token, entry in line.items()} for line in completion.logprobs
        ]
        found.append((list(completion.token_ids), lines))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"quantization": "int8"}, {"dtype": "float32"}, {"kv_cache_dtype": "float32"}]
)
def test_embedded_model_answers_the_same_each_time(options: dict[str, Any], native: None) -> None:
    """Tokens and logprobs to the bit: alone and computed whole; then in a batch, with two threads,
    with prefixes from the cache, in small chunks."""
    settings = {"kv_cache_memory_bytes": "256MiB", "max_model_len": 1024, **options}
    with LLM(num_threads=1, enable_prefix_caching=False, **settings) as llm:
        expected = [answers(llm, [prompt])[0] for prompt in PROMPTS]
    with LLM(num_threads=2, **settings) as llm:
        for _ in range(2):
            assert answers(llm, PROMPTS) == expected
        assert [answers(llm, [prompt])[0] for prompt in PROMPTS] == expected
    with LLM(num_threads=1, max_num_batched_tokens=23, max_num_seqs=4, **settings) as llm:
        for _ in range(2):
            assert answers(llm, PROMPTS) == expected


@pytest.mark.slow
def test_layers_of_the_embedded_model(native: None) -> None:
    """Packed weights of several formats, with float16 keys and values."""
    config = load_model_config(str(embedded_model_path()))
    model = load_model(config, dtype=torch.float32, device="cpu", quantization="gguf")
    for isa in cpu.isas():
        cpu.set_isa(isa)
        check(model, config, torch.float16, seed=7)
