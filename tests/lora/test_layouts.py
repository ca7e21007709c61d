"""Adapters of every layout that peft writes, through `LLM`: the texts are those of peft."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import SamplingParams
from quire.lora.request import LoRARequest
from quire.protocol.errors import AdapterError
from tests.adapters import LAYOUTS, make_adapter
from tests.models.reference import random_tokens
from tests.tiny import is_greedy, save_tiny, tiny_llm

PROMPTS = [random_tokens(9, seed) for seed in range(2)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
REFUSED = {"ends_dora": "is an embedding with DoRA"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_texts_are_those_of_peft(layout: str, tmp_path: Path) -> None:
    """In one batch with the base, which is not changed. A second adapter is there as well, so that
    each has its own place."""
    family, config = LAYOUTS[layout]
    base = save_tiny(tmp_path / "base", family)
    requests, models = [], []
    for number in (1, 2):
        folder = tmp_path / str(number)
        models.append(make_adapter(base, folder, seed=number, **config))
        requests.append(LoRARequest(str(number), number, str(folder)))
    adapters = [requests[0], None, requests[1], requests[0]]
    prompts = [{"prompt_token_ids": PROMPTS[i]} for i in (0, 0, 0, 1)]
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 32, "dtype": "float32"}
    with tiny_llm(tmp_path / "base", **options) as llm:
        if layout in REFUSED:
            with pytest.raises(AdapterError, match=REFUSED[layout]):
                llm.generate(prompts, GREEDY, lora_request=adapters, use_tqdm=False)
            return
        outputs = llm.generate(prompts, GREEDY, lora_request=adapters, use_tqdm=False)
    made = [list(output.outputs[0].token_ids) for output in outputs]
    computed = [models[0], base, models[1], models[0]]
    for model, prompt, ids in zip(computed, prompts, made, strict=True):
        assert is_greedy(model, prompt["prompt_token_ids"], ids)
