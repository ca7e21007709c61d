"""Greedy texts with drafts against transformers' assisted generation, and what is counted."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from quire import SamplingParams
from quire.engine.monitor import StatusLog
from quire.metrics.prometheus import render
from tests.models.reference import VOCAB, random_tokens
from tests.tiny import END_ID, save_tiny, tiny_llm

pytestmark = pytest.mark.usefixtures("native")
NUM_TOKENS = 40
PROMPTS = [random_tokens(n, seed=n) * 2 for n in (3, 8, 15)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any, Any]:
    """A model and a smaller one that knows nothing of it, as folders and in transformers."""
    target, assistant = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("assistant")
    return (
        target,
        assistant,
        save_tiny(target),
        save_tiny(assistant, seed=5, num_hidden_layers=1),
    )


@torch.no_grad()
def assisted(model: PreTrainedModel, prompt: list[int], **how: Any) -> list[int]:
    ids = torch.tensor([prompt])
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        eos_token_id=VOCAB,
        pad_token_id=END_ID,
        **how,
    )
    tokens: list[int] = made[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("method", ["ngram", "auto", "draft_model"])
def test_greedy_texts_are_those_of_assisted_generation(
    models: tuple[Path, Path, Any, Any], method: str
) -> None:
    folder, other, target, assistant = models
    how: dict[str, Any] = {"prompt_lookup_num_tokens": 3}
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        how, config = {"assistant_model": assistant}, {**config, "model": str(other)}
    else:
        config["prompt_lookup_min"] = 1
    expected = [assisted(target, prompt, **how) for prompt in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with tiny_llm(folder, device="cpu", speculative_config=config) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert llm._core.metrics.draft_tokens.value > 0


def test_metrics_have_the_names_and_labels_of_vllm(
    models: tuple[Path, Path, Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """With the share that was accepted in the line of statistics."""
    folder, _, _, _ = models
    config = {"model": str(folder), "num_speculative_tokens": 3}  # it drafts for itself
    params = SamplingParams(temperature=0.0, max_tokens=1 + 2 * 4 + 2, ignore_eos=True)
    with tiny_llm(folder, device="cpu", speculative_config=config) as llm:
        status = StatusLog(llm._core.scheduler)
        for now in (0.0, 9.0):
            status.look(now)
        llm.generate([{"prompt_token_ids": PROMPTS[0]}], params, use_tqdm=False)
        caplog.set_level(logging.INFO, logger="quire")
        status.look(10.0)
        readings = llm._core.metrics.read()
    labels = {"model_name": "tiny", "engine": "0"}
    lines = render(readings, "vllm", labels).decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("vllm:spec_decode"))
    common = 'engine="0",model_name="tiny"'
    # One token after the prompt, then two steps of 1 + 3, then one of two with one draft.
    for name, value in (("drafts", 3), ("draft_tokens", 7), ("accepted_tokens", 7)):
        assert float(values[f"vllm:spec_decode_num_{name}_total{{{common}}}"]) == value
    by_position = [
        float(
            values[
                "vllm:spec_decode_num_accepted_tokens_per_pos_total"
                f'{{engine="0",model_name="tiny",position="{i}"}}'
            ]
        )
        for i in range(4)
    ]
    assert by_position == [3, 2, 2, 0]
    assert ", 100.0% of drafts accepted" in caplog.text
