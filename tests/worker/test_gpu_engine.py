"""The engine on a GPU: the same tokens as transformers, with and without graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from quire import LLM, SamplingParams

pytestmark = pytest.mark.gpu

SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "head_dim": 64,
    "eos_token_id": None,
    "bos_token_id": None,
}
CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config}


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model. Large weights spread the logits, so that rounding rarely decides."""
    torch.manual_seed(0)
    config = CONFIGS[request.param](**SIZES, initializer_range=0.2)
    path = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(5, 500, int(n)).tolist() for n in rng.integers(3, 200, count)]


def generate(folder: Path, work: list[list[int]], **options: object) -> list[list[int]]:
    greedy = SamplingParams(temperature=0.0, max_tokens=32, detokenize=False)
    settings = {"kv_cache_memory_bytes": 1 << 28, "max_num_seqs": 64, **options}
    with LLM(str(folder), skip_tokenizer_init=True, **settings) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in work], greedy, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_tokens_match_transformers_in_float32(folder: Path) -> None:
    """Kernels, graphs and overlap change nothing: greedy tokens equal the reference's."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    work = prompts(12)
    found = generate(folder, work, dtype="float32")
    for prompt, tokens in zip(work, found, strict=True):
        ids = torch.tensor([prompt + tokens], device="cuda")
        with torch.inference_mode():
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        best = logits.max(-1).values
        chosen = logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
        assert (best - chosen < 1e-2).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_of_half_precision_are_close(folder: Path, dtype: str) -> None:
    """Top choices agree with transformers in the same precision wherever the margin allows."""
    work = prompts(12)
    found = generate(folder, work, dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).cuda()
    agree = total = 0
    for prompt, tokens in zip(work, found, strict=True):
        ids = torch.tensor([prompt + tokens], device="cuda")
        with torch.inference_mode():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        top = logits.topk(2).values
        clear = top[:, 0] - top[:, 1] > 0.05 * top[:, 0].abs()
        expected = logits.argmax(-1)
        agree += int((expected == torch.tensor(tokens, device="cuda"))[clear].sum())
        total += int(clear.sum())
    assert total > 50
    assert agree / total > 0.99


@pytest.mark.parametrize(
    "options",
    [
        {"enforce_eager": True},
        {"max_num_batched_tokens": 48},
        {"num_gpu_blocks_override": 70, "max_model_len": 512},
        {"block_size": 4},
        {"block_size": 128},
        {"max_steps_in_flight": 1},
        {"max_steps_in_flight": 4},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_settings_do_not_change_tokens(folder: Path, options: dict[str, object]) -> None:
    """Graph or eager, chunked, preempted, any block size, any overlap: equal tokens in float32."""
    work = prompts(30)
    assert generate(folder, work, dtype="float32", **options) == generate(
        folder, work, dtype="float32"
    )


def scored(folder: Path, work: list[list[int]], **options: object) -> list[tuple[list[int], Any]]:
    """Greedy tokens and the logits [tokens, vocab] they were chosen from, less each line's mean."""
    params = SamplingParams(temperature=0.0, max_tokens=16, detokenize=False, logprobs=-1)
    limits = {"kv_cache_memory_bytes": 1 << 28, "max_num_seqs": 64, "max_logprobs": -1}
    with LLM(str(folder), skip_tokenizer_init=True, **{**limits, **options}) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in work], params, use_tqdm=False)
    found = []
    for output in outputs:
        made = output.outputs[0]
        lines = [[entries[i].logprob for i in range(512)] for entries in made.logprobs]
        centred = np.array(lines) - np.mean(lines, -1, keepdims=True)
        found.append((list(made.token_ids), centred))
    return found


def assert_close(found: list[Any], expected: list[Any], bound: float) -> None:
    """Relative errors of logits for as long as both runs have chosen the same tokens."""
    compared = 0
    for (tokens, logits), (other_tokens, others) in zip(found, expected, strict=True):
        same = 0
        while same < len(tokens) and tokens[:same] == other_tokens[:same]:
            error = np.linalg.norm(logits[same] - others[same]) / np.linalg.norm(others[same])
            assert error < bound, f"token {same}: relative error {error:.1e}"
            same += 1
        compared += same
    assert compared > 100


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("bfloat16", 4e-2)])
def test_logits_do_not_depend_on_the_way(folder: Path, dtype: str, bound: float) -> None:
    """Graphs and eager steps, many requests at once and one by one: the same up to rounding."""
    work = prompts(12)
    expected = scored(folder, work, dtype=dtype)
    assert_close(scored(folder, work, dtype=dtype, enforce_eager=True), expected, bound)
    assert_close(scored(folder, work, dtype=dtype, max_num_seqs=1), expected, bound)
    if dtype == "float32":
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
        for prompt, (tokens, logits) in zip(work, expected, strict=True):
            with torch.inference_mode():
                ids = torch.tensor([prompt + tokens], device="cuda")
                theirs = model(ids).logits[0, len(prompt) - 1 : -1]
            theirs = (theirs - theirs.mean(-1, keepdim=True)).cpu().numpy()
            assert np.linalg.norm(logits - theirs) / np.linalg.norm(theirs) < bound
