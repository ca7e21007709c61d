"""Residual streams that a target leaves for heads: those of transformers, however layers run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.config.model import load_model_config
from quire.layers.attention.cpu import CpuBackend
from quire.layers.attention.torch import TorchBackend
from quire.layers.decoder import BEHIND_NORM, FusedLayers, KeptStreams
from quire.models.draft_head import keep_streams
from quire.models.loader import load_model
from quire.models.registry import CausalLM
from tests.draft_heads import target_states
from tests.models.reference import FAMILIES, PagedRun, random_model, random_tokens, save_safetensors

WITHOUT = ("opt", "gpt2")
"""Refused with heads."""
TOKENS = random_tokens(23)
LAYERS = (2, 0, 1, BEHIND_NORM)


def streams_of(model: CausalLM, folder: Path, backend: Any, steps: tuple[int, ...]) -> Tensor:
    """Of all tokens, [T, places, H]."""
    config = load_model_config(str(folder))
    streams = KeptStreams(LAYERS, config.hidden_size, 32, torch.float32, torch.device("cpu"))
    keep_streams(model, streams)
    run = PagedRun(model, config, [TOKENS], backend)
    found = []
    for count in steps:
        run.step({0: count})
        found.append(streams.first(count).clone())
    return torch.cat(found).view(len(TOKENS), len(LAYERS), -1)


def load(folder: Path, **options: Any) -> CausalLM:
    config = load_model_config(str(folder))
    return load_model(config, dtype=torch.float32, device="cpu", **options)


@pytest.mark.parametrize("family", [one for one in FAMILIES if one not in WITHOUT])
def test_streams_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    reference = random_model(family)
    save_safetensors(reference, tmp_path)
    states = target_states(reference, TOKENS)
    found = streams_of(load(tmp_path), tmp_path, TorchBackend, (9, 1, 13))
    for place, layer in enumerate(LAYERS):
        torch.testing.assert_close(found[:, place], states[layer], atol=2e-4, rtol=1e-3)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_fused_layers_leave_the_same(tmp_path: Path, quantization: str | None) -> None:
    """Packed weights are carried out by the library, in one call between two streams."""
    save_safetensors(random_model("llama", num_hidden_layers=5), tmp_path)
    fused = load(tmp_path, quantization=quantization)
    found = streams_of(fused, tmp_path, CpuBackend, (9, 1, 13))
    (layers,) = (one for one in fused.modules() if isinstance(one, FusedLayers))
    assert [len(run.layers) for run in layers.runs] == [1, 1, 3]
    assert all(run.decoder is not None for run in layers.runs)
    plain = load(tmp_path, quantization=quantization, fused=False)
    torch.testing.assert_close(found, streams_of(plain, tmp_path, CpuBackend, (9, 1, 13)))
