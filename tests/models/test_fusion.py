"""Fused layers: used where they can be, under the same names, with the numbers of the model's file.

A model that is loaded without them is the reference, and itself gives transformers' logits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.config.model import ModelConfig, load_model_config
from quire.kernels import dispatch
from quire.kernels.cpu.decoder import Decoder
from quire.layers.attention.backend import AttentionBackend
from quire.layers.attention.cpu import CpuBackend
from quire.layers.attention.torch import TorchBackend
from quire.layers.decoder import DecoderLayers, FusedLayers
from quire.layers.quantization.packed import Packed
from quire.models.fusion import fuse
from quire.models.llama import LlamaForCausalLM, LlamaLayer
from quire.models.loader import load_model
from quire.models.registry import CausalLM
from tests.models.reference import (
    PagedRun,
    random_model,
    random_tokens,
    reference_logits,
    save_safetensors,
)

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    ("mistral", {"sliding_window": 9}),
    ("qwen2", {}),
    ("qwen3", {}),
]
SEQUENCES = [random_tokens(30), random_tokens(17, seed=1)]
STEPS = [{0: 20, 1: 10}, {0: 1, 1: 1}, {0: 1}, {0: 8, 1: 6}]


def saved(folder: Path, family: str = "llama", **changes: Any) -> tuple[Any, ModelConfig]:
    reference = random_model(family, **changes)
    save_safetensors(reference, folder)
    return reference, load_model_config(str(folder))


def logits(
    model: CausalLM, config: ModelConfig, backend: type[AttentionBackend] = TorchBackend, **run: Any
) -> list[Tensor]:
    paged = PagedRun(model, config, SEQUENCES, backend, **run)
    for work in STEPS:
        paged.step(work)
    return paged.all_logits()


def close(found: list[Tensor], expected: list[Tensor], bound: float = 1e-4) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=bound)


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[None]:
    """One entry for each call from now on; the calls go through."""
    calls: list[None] = []
    original = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return calls


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_layers_are_fused_and_give_the_same(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    reference, config = saved(tmp_path, family, **changes)
    plain = load_model(config, dtype=torch.float32, device="cpu", fused=False)
    fused = load_model(config, dtype=torch.float32, device="cpu")
    assert type(plain.get_submodule("model.layers")) is DecoderLayers
    assert isinstance(fused.get_submodule("model.layers"), FusedLayers)
    assert [name for name, _ in plain.named_modules()] == [
        name for name, _ in fused.named_modules()
    ]
    expected = logits(plain, config)
    close(expected, [reference_logits(reference, tokens) for tokens in SEQUENCES])
    close(logits(fused, config), expected)
    if CpuBackend.missing() is None:
        close(logits(fused, config, CpuBackend), expected)


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_other_models_stay_as_they_are(family: str, tmp_path: Path) -> None:
    _, config = saved(tmp_path, family)
    model = load_model(config, dtype=torch.float32, device="cpu")
    assert not any(isinstance(module, DecoderLayers) for module in model.modules())


def test_norms_go_into_linear_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: None
) -> None:
    """Two for each layer. A model in bfloat16 has the weights that it would have on a GPU, where
    `dispatch.norm_linear` is one kernel for one token."""
    _, config = saved(tmp_path)
    num_pairs = 2 * config.num_layers * len(STEPS)
    model = load_model(config, dtype=torch.bfloat16, device="cpu")
    calls = count_calls(monkeypatch, dispatch, "norm_linear")
    logits(model, config, dtype=torch.bfloat16)
    assert len(calls) == num_pairs
    model = load_model(config, dtype=torch.float32, device="cpu")
    calls = count_calls(monkeypatch, Packed, "apply_after_norm")
    logits(model, config)
    assert len(calls) == num_pairs


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_all_layers_are_one_call(
    quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: None
) -> None:
    _, config = saved(tmp_path)
    model = load_model(config, dtype=torch.float32, device="cpu", quantization=quantization)
    whole = count_calls(monkeypatch, Decoder, "run")
    pairs = count_calls(monkeypatch, Packed, "apply_after_norm")
    logits(model, config, CpuBackend)
    assert len(whole) == len(STEPS) and not pairs


def test_other_gates_go_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: None
) -> None:
    """The library knows silu(gate) * up alone."""
    _, config = saved(tmp_path, hidden_act="gelu_pytorch_tanh")
    model = load_model(config, dtype=torch.float32, device="cpu")
    whole = count_calls(monkeypatch, Decoder, "run")
    pairs = count_calls(monkeypatch, Packed, "apply_after_norm")
    logits(model, config, CpuBackend)
    assert not whole and len(pairs) == config.num_layers * len(STEPS)


class DoublingLayer(LlamaLayer):
    def forward(self, *args: Any) -> Tensor:
        return 2 * super().forward(*args)


def test_layers_of_another_class_are_left_alone(tmp_path: Path) -> None:
    """One that only inherits from a known layer may compute something else."""
    _, config = saved(tmp_path)
    model = load_model(config, dtype=torch.float32, device="cpu", fused=False)
    assert isinstance(model, LlamaForCausalLM)
    model.model.layers[1].__class__ = DoublingLayer
    expected = logits(model, config)
    fuse(model)
    assert type(model.model.layers) is DecoderLayers
    close(logits(model, config), expected, bound=0)


@pytest.mark.gpu
def test_one_token_on_a_gpu_takes_a_kernel_for_each_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norm, and the gates of the network, are done by the kernel that reads the weights."""
    from quire.kernels.triton import gemv, norm

    _, config = saved(tmp_path)
    model = load_model(config, dtype=torch.bfloat16, device="cuda")
    run = PagedRun(model, config, SEQUENCES, dtype=torch.bfloat16)
    run.step({0: 8})
    kernels = count_calls(monkeypatch, gemv, "gemv")
    norms = count_calls(monkeypatch, norm, "rms_norm")
    run.step({0: 1})
    # Four linear layers each, and the head; the last norm alone is a kernel of its own.
    assert len(kernels) == 4 * config.num_layers + 1
    assert len(norms) == 1
