"""Adapters on quantised checkpoints, against adapters on models of the numbers that they stand
for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.config.model import load_model_config
from quire.layers.attention.cpu import CpuBackend
from quire.layers.lora import AdapterLayers
from quire.models.loader import load_model
from tests.models.adapters import AdaptedRun, Weights, place, random_adapter
from tests.models.packers import CASES, save_quantized
from tests.models.reference import random_model, random_tokens, reference_logits
from tests.models.test_adapters import with_experts
from tests.models.test_quantized_checkpoints import small_model
from tests.models.test_quantized_experts import FORMATS, SIZES, save_as_on_the_hub

TOKENS = random_tokens(19)


def logits(folder: Path, weights: Mapping[str, Weights]) -> tuple[Tensor, Tensor]:
    """With the adapter, and beside it without."""
    config = load_model_config(str(folder))
    model = load_model(config, dtype=torch.float32, device="cpu")
    layers = AdapterLayers.of(model, max_adapters=1, num_chunks=1)
    place(layers, [weights])
    run = AdaptedRun(layers, [0, -1], model, config, [TOKENS, TOKENS], CpuBackend)
    run.step({0: 13, 1: 19})
    run.step({0: 6})
    with_adapter, without = run.all_logits()
    return with_adapter, without


def check(adapted: Any, base: Any, found: tuple[Tensor, Tensor], rounds_inputs: bool) -> None:
    expected = reference_logits(adapted, TOKENS)
    change = expected - reference_logits(base, TOKENS)
    if rounds_inputs:
        # Inputs of the base's layers are rounded, those of the adapter are not.
        assert (found[0] - expected).std() < 0.2 * change.std()
    else:
        torch.testing.assert_close(found[0], expected, rtol=0, atol=2e-3)
    assert change.std() > 0.1, "the adapter does something"


@pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("name", ["awq", "fp8", "fp8 static", "fp8 block", "w8 without inputs"])
def test_quantised_bases(name: str, use_dora: bool, tmp_path: Path) -> None:
    model = small_model(name)
    save_quantized(model, tmp_path, CASES[name])
    targets = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
    adapted, weights = random_adapter(model, 3, r=5, target_modules=targets, use_dora=use_dora)
    rounds_inputs = CASES[name].rounding is not None
    check(adapted, model, logits(tmp_path, weights), rounds_inputs)


@pytest.mark.parametrize("name", ["mixtral awq", "qwen3 gptq", "qwen3 w4a16"])
def test_experts_of_quantised_mixtures(name: str, tmp_path: Path) -> None:
    family = FORMATS[name][0]
    model = random_model(family, **{**SIZES[family], "num_hidden_layers": 4})
    save_as_on_the_hub(model, tmp_path, name)
    adapted, weights = with_experts(model, family, 1)
    check(adapted, model, logits(tmp_path, weights), rounds_inputs=False)
