"""Ranks on a GPU: in another process with CUDA graphs, and two on one device, whose tensors pass
through the host. Several GPUs are not needed, and so NCCL between two is not shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from quire import LLM, SamplingParams

pytestmark = pytest.mark.gpu

SIZES = {
    "vocab_size": 1003,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "eos_token_id": None,
    "bos_token_id": None,
}


def tokens_of(folder: Path, **changes: Any) -> list[list[int]]:
    """Of greedy and sampled requests with shared prefixes, more than one step's worth."""
    options: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "kv_cache_memory_bytes": 64 << 20,
        **changes,
    }
    shared = [i * 7 % 1000 for i in range(40)]
    prompts: Any = [{"prompt_token_ids": [*shared, i, i + 1]} for i in range(24)]
    kinds = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=8, logprobs=2, ignore_eos=True),
        SamplingParams(temperature=0.8, top_k=5, seed=3, max_tokens=16, ignore_eos=True),
    ]
    with LLM(model=str(folder), **options) as llm:
        outputs = llm.generate(prompts, [kinds[i % 3] for i in range(24)], use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large weights spread the logits, so that rounding rarely decides."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("model")
    config = LlamaConfig(**SIZES, initializer_range=0.2)
    AutoModelForCausalLM.from_config(config).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return tokens_of(folder)


@pytest.mark.parametrize("eager", [False, True])
def test_one_rank_in_another_process(eager: bool, folder: Path, expected: list[list[int]]) -> None:
    """With graphs and without: results come by a thread of their own."""
    found = tokens_of(folder, distributed_executor_backend="mp", enforce_eager=eager)
    assert found == expected


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_on_one_device(
    tp: int,
    pp: int,
    folder: Path,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUIRE_RANKS_SHARE_DEVICES", "1")
    assert tokens_of(folder, tensor_parallel_size=tp, pipeline_parallel_size=pp) == expected


@pytest.mark.multi_gpu
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_ranks_on_devices_of_their_own(
    tp: int, pp: int, folder: Path, expected: list[list[int]]
) -> None:
    """By NCCL, whose collectives are inside the graphs."""
    assert tokens_of(folder, tensor_parallel_size=tp, pipeline_parallel_size=pp) == expected
