"""Quantised checkpoints from the Python API to tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import SamplingParams
from quire.protocol.errors import OptionError
from tests.models.packers import CASES, save_quantized
from tests.models.reference import random_tokens
from tests.tiny import greedy, save_tiny, tiny_llm

PROMPTS = [random_tokens(9), random_tokens(5, seed=1)]


@pytest.mark.parametrize(("name", "method"), [("awq", "awq_marlin"), ("w4a16", None)])
def test_tokens_are_those_of_the_dequantised_model(
    name: str, method: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = save_tiny(tmp_path)
    save_quantized(model, tmp_path, CASES[name])
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    settings = {"quantization": method, "kv_cache_dtype": "float32"}
    with tiny_llm(tmp_path, **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [list(one.outputs[0].token_ids) for one in outputs] == greedy(model, PROMPTS, 8)


def test_random_weights_and_a_name_that_contradicts(tmp_path: Path) -> None:
    save_quantized(save_tiny(tmp_path), tmp_path, CASES["fp8"])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(OptionError, match=r"quantization='gptq' contradicts .*'fp8'"):
        tiny_llm(tmp_path, load_format="dummy", quantization="gptq")
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    with tiny_llm(tmp_path, load_format="dummy") as llm:
        (output,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3
