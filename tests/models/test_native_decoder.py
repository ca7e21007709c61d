"""All layers in one call of the native library: to the bit what they give one by one, and in
float32 what transformers gives. A layer whose cache, bias, norm or window goes astray shows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.model import load_model_config
from quire.layers.attention.backend import AttentionBackend
from quire.layers.attention.cpu import CpuBackend
from quire.layers.attention.torch import TorchBackend
from quire.layers.decoder import FusedLayers
from quire.models.llama import LlamaForCausalLM
from quire.models.loader import load_model
from tests.models.reference import (
    PagedRun,
    random_model,
    random_tokens,
    reference_logits,
    save_safetensors,
)

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "intermediate_size": 80}),
    ("mistral", {"sliding_window": 9}),
    ("qwen2", {}),
    ("qwen3", {}),
]
SEQUENCES = [random_tokens(40), random_tokens(25, seed=1), random_tokens(7, seed=2)]
STEPS = [{0: 33, 1: 10}, {0: 1, 1: 15, 2: 6}, {0: 6, 2: 1}]


def run(
    model: LlamaForCausalLM,
    config: Any,
    backend: type[AttentionBackend],
    cache: torch.dtype = torch.float32,
) -> list[Any]:
    paged = PagedRun(model, config, SEQUENCES, backend, dtype=cache)
    for work in STEPS:
        paged.step(work)
    return paged.all_logits()


@pytest.mark.parametrize("cache", [torch.float32, torch.float16])
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize(("family", "changes"), CASES)
def test_equals_layers_one_by_one(
    family: str,
    changes: dict[str, Any],
    quantization: str | None,
    cache: torch.dtype,
    tmp_path: Path,
    native: None,
) -> None:
    reference = random_model(family, **changes)
    save_safetensors(reference, tmp_path)
    config = load_model_config(str(tmp_path))
    model = load_model(config, dtype=torch.float32, device="cpu", quantization=quantization)
    assert isinstance(model, LlamaForCausalLM) and isinstance(model.model.layers, FusedLayers)
    (one_run,) = model.model.layers.runs
    assert one_run.decoder is not None
    together = run(model, config, CpuBackend, cache)
    one_by_one = [dataclasses.replace(one_run, decoder=None)]
    model.model.layers.__dict__["runs"] = one_by_one  # the cached property
    for found, expected in zip(together, run(model, config, CpuBackend, cache), strict=True):
        assert torch.equal(found, expected)
    if quantization is None:
        bound = 1e-3 if cache == torch.float32 else 1e-2
        for found, tokens in zip(together, SEQUENCES, strict=True):
            expected = reference_logits(reference, tokens)
            torch.testing.assert_close(found, expected, rtol=bound, atol=bound)


def test_other_backends_go_layer_by_layer(tmp_path: Path) -> None:
    """They could not be called from within the library."""
    reference = random_model("llama")
    save_safetensors(reference, tmp_path)
    config = load_model_config(str(tmp_path))
    model = load_model(config, dtype=torch.float32, device="cpu")
    for found, tokens in zip(run(model, config, TorchBackend), SEQUENCES, strict=True):  # type: ignore[arg-type]
        expected = reference_logits(reference, tokens)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
