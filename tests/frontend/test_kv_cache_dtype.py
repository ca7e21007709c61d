"""Keys and values in float16 beside 8-bit weights, or in 8 bits: more tokens in the same memory,
nearly the same logits.

That blocks of halves are shared, copied and computed again as others are is in
`tests/engine/test_parity.py`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import RequestOutput, SamplingParams
from tests.models.reference import random_tokens
from tests.tiny import save_tiny, tiny_llm

MEAN_DIFFERENCE, TIE = 0.06, 0.3
"""Of log-probabilities, which spread by 1.2: what 8-bit activations make of any difference."""
PROMPTS = [random_tokens(length, seed=length) for length in (3, 40, 100)]
ALL = SamplingParams(
    temperature=0.0, max_tokens=32, ignore_eos=True, prompt_logprobs=-1, logprobs=-1
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny(path)
    return path


def generate(folder: Path, **options: Any) -> list[RequestOutput]:
    options = {"max_logprobs": -1, **options}
    with tiny_llm(folder, **options) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        return llm.generate(prompts, ALL, use_tqdm=False)


def lines(output: RequestOutput) -> tuple[list[int], torch.Tensor]:
    """The tokens after the first, and log-probabilities of all tokens at their places."""
    completion = output.outputs[0]
    assert output.prompt_token_ids is not None and output.prompt_logprobs is not None
    assert completion.logprobs is not None
    entries = [*list(output.prompt_logprobs)[1:], *completion.logprobs]
    rows = [[entry[token].logprob for token in sorted(entry)] for entry in entries if entry]
    return [*output.prompt_token_ids[1:], *completion.token_ids], torch.tensor(rows)


@pytest.mark.parametrize(
    ("options", "narrow", "mean", "tie"),
    [
        ({"quantization": "int8"}, "float16", MEAN_DIFFERENCE, TIE),
        ({"attention_backend": "torch"}, "fp8_e4m3", 0.15, 0.5),
        ({"attention_backend": "torch"}, "fp8_e5m2", 0.3, 1.0),
    ],
    ids=["float16", "e4m3", "e5m2"],
)
def test_logits_agree(
    folder: Path, options: dict[str, Any], narrow: str, mean: float, tie: float
) -> None:
    """As far as the tokens are the same; they may part where two are nearly as likely."""
    exact = generate(folder, kv_cache_dtype="float32", **options)
    narrow = generate(folder, kv_cache_dtype=narrow, **options)
    differences = []
    for one, other in zip(map(lines, exact), map(lines, narrow), strict=True):
        same = 0
        while same < len(one[0]) and one[0][same] == other[0][same]:
            same += 1
        shown = min(same + 1, len(one[0]))  # where they part the logits still belong together
        differences.append((one[1][:shown] - other[1][:shown]).pow(2).mean().sqrt().item())
        if same < len(one[0]):
            parted = one[1][same]
            assert abs(parted[one[0][same]] - parted[other[0][same]]) < tie
    assert 0 < max(differences) < mean


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_same_memory_holds_twice_the_tokens(
    folder: Path, quantization: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """What is chosen by default is said, and counted in the cache that is there."""
    blocks = {}
    for wanted in ("auto", "float32", "float16"):
        caplog.clear()
        with (
            caplog.at_level(logging.DEBUG),
            tiny_llm(folder, quantization=quantization, kv_cache_dtype=wanted) as llm,
        ):
            runner = llm._core.executor.runner
            blocks[wanted] = llm._core.scheduler.kv.pool.num_blocks
            assert runner.kv.data.nbytes == blocks[wanted] * runner.kv.layout.bytes_per_block
            assert f"{blocks[wanted]:,} blocks" in caplog.text
            became = "kv_cache_dtype became float16 because" in caplog.text
            assert became == (wanted == "auto" and quantization is not None)
    assert blocks["float16"] // 2 == blocks["float32"]
    assert blocks["auto"] == blocks["float16" if quantization else "float32"]


def test_8_bits_and_their_scales_are_counted(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A head of 16 numbers takes 16 bytes, and two for its scale."""
    blocks = {}
    for wanted in ("float32", "fp8"):
        caplog.clear()
        options = {"kv_cache_dtype": wanted, "attention_backend": "torch"}
        with caplog.at_level(logging.INFO), tiny_llm(folder, **options) as llm:
            kv = llm._core.executor.runner.kv
            blocks[wanted] = llm._core.scheduler.kv.pool.num_blocks
            taken = kv.data.nbytes + (0 if kv.scales is None else kv.scales.nbytes)
            assert taken == blocks[wanted] * kv.layout.bytes_per_block
            assert f"{blocks[wanted]:,} blocks" in caplog.text
    assert "MiB of fp8_e4m3;" in caplog.text
    assert "8 bits have one scale for each token and KV head" in caplog.text
    num_layers, num_kv_heads, block_size = 3, 2, 16
    assert blocks["fp8"] == (32 << 20) // (num_layers * 2 * num_kv_heads * block_size * 18)
    assert blocks["fp8"] > 3.5 * blocks["float32"]


def test_blocks_of_other_weights_have_other_names(folder: Path) -> None:
    """Keys and values of 8-bit weights are not those of exact ones, even in the same type; nor are
    those of another rotation, or of random weights."""
    roots = set()
    changes: list[dict[str, Any]] = [
        {},
        {"quantization": "int8"},
        {"hf_overrides": {"rope_theta": 500.0}},
        {"load_format": "dummy"},
        {"load_format": "dummy", "seed": 1},
    ]
    for change in changes:
        with tiny_llm(folder, kv_cache_dtype="float32", **change) as llm:
            roots.add(llm._core.scheduler.limits.cache_identity)
    assert len(roots) == len(changes)
