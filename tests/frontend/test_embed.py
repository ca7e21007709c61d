"""`LLM.embed` against transformers' hidden states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from quire import LLM, PoolingParams, RequestError, SamplingParams
from tests.models.reference import random_tokens
from tests.tiny import assert_at_rest, save_tiny, text_ids, tiny_llm

LENGTHS = (1, 5, 16, 17, 40, 90)
PROMPTS = [random_tokens(length, seed=length) for length in LENGTHS]


@torch.no_grad()
def reference(model: PreTrainedModel, tokens: list[int], pooling: str) -> NDArray[np.float32]:
    """The pooled output of the model without its head, normalised."""
    states = model.base_model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
    vector = states[-1] if pooling == "last" else states.mean(0)
    array: NDArray[np.float32] = torch.nn.functional.normalize(vector, dim=0).numpy()
    return array


def vectors(llm: LLM, prompts: Any, **params: Any) -> list[NDArray[np.float64]]:
    outputs = llm.embed(prompts, pooling_params=PoolingParams(**params), use_tqdm=False)
    return [np.array(output.outputs.embedding) for output in outputs]


@pytest.mark.parametrize("family", ["llama", "qwen3", "opt", "gpt2"])
def test_vectors_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Whole prompts, prompts in chunks, and prompts that find all but their end in the cache."""
    model = save_tiny(tmp_path, family)
    with tiny_llm(tmp_path, max_num_batched_tokens=24, max_num_seqs=3) as llm:
        for pooling in ("mean", "last", "last"):
            found = vectors(llm, PROMPTS, pooling=pooling)
            for tokens, vector in zip(PROMPTS, found, strict=True):
                expected = reference(model, tokens, pooling)
                np.testing.assert_allclose(vector, expected, atol=2e-5)
        assert_at_rest(llm)


def test_an_odd_opt_has_its_output_projection(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "opt", word_embed_proj_dim=48)
    with tiny_llm(tmp_path) as llm:
        (vector,) = vectors(llm, [PROMPTS[3]])
        np.testing.assert_allclose(vector, reference(model, PROMPTS[3], "last"), atol=2e-5)


def test_last_tokens_use_the_cache_and_means_do_not(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = random_tokens(50, seed=99)
    cached = []
    for pooling in ("last", "last", "mean"):
        (output,) = llm.embed(
            [prompt], pooling_params=PoolingParams(pooling=pooling), use_tqdm=False
        )
        cached.append(output.num_cached_tokens)
    assert cached == [0, 49, 0]


def test_texts_beside_other_requests(llm: LLM, tiny: Any) -> None:
    """Generation that is under way goes on with the tokens it would have had."""
    wanted = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    (alone,) = llm.generate("the quick brown", wanted, use_tqdm=False)
    llm.reset_prefix_cache()
    llm.enqueue(["the quick brown"], wanted)
    texts = ["hello", "the lazy dog", "a b c d e f g"]
    outputs = llm.embed(texts, use_tqdm=False)
    for text, output in zip(texts, outputs, strict=True):
        assert output.finished and output.prompt_token_ids == text_ids(text)
        assert output.outputs.hidden_size == 64
        expected = reference(tiny.model, text_ids(text), "last")
        np.testing.assert_allclose(output.outputs.embedding, expected, atol=2e-5)
    (beside,) = llm.wait_for_completion(use_tqdm=False)
    assert beside.outputs[0].token_ids == alone.outputs[0].token_ids


def test_dimensions_and_length(llm: LLM) -> None:
    """Cut, then scaled to length 1 unless that is not wanted."""
    (whole,) = vectors(llm, [PROMPTS[4]], normalize=False)
    (cut,) = vectors(llm, [PROMPTS[4]], dimensions=10)
    np.testing.assert_allclose(cut, whole[:10] / np.linalg.norm(whole[:10]), atol=1e-6)
    assert np.linalg.norm(whole) != pytest.approx(1.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pooling": "cls"}, "pooling must be one of last, mean, got 'cls'"),
        ({"dimensions": 0}, "dimensions must be at least 1, got 0"),
        ({"dimensions": 65}, "dimensions=65 is more than the model's 64"),
    ],
)
def test_bad_parameters_are_named(llm: LLM, values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        vectors(llm, [PROMPTS[0]], **values)


def test_bad_prompts_are_named(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"prompts\[1\].*200 in the prompt"):
        llm.embed([PROMPTS[0], random_tokens(200)], use_tqdm=False)
    with pytest.raises(RequestError, match="priority has 1 entries for 2 prompts"):
        llm.embed(PROMPTS[:2], priority=[1], use_tqdm=False)
    with pytest.raises(RequestError, match="pooling_params must be PoolingParams"):
        llm.embed(PROMPTS[:2], pooling_params={"pooling": "mean"}, use_tqdm=False)  # type: ignore[arg-type]
