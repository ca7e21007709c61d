"""Scales of the KV cache that a checkpoint has: found under all their names, and cut by heads.

Taking those of another layer or head, of keys for values, or 1.0 where there are none turns these
red.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.config.model import load_model_config
from quire.layers.attention.kv_scales import describe_kv_scales, given_kv_scales
from quire.layers.attention.layer import bind_kv_groups
from quire.layers.parallel import Parallel, Stage
from quire.models.loader import load_model
from quire.protocol.errors import ModelError
from quire.protocol.kv_spec import KVLayout, KVSpec
from tests.models.reference import random_model, save_safetensors

CPU = torch.device("cpu")
NUM_LAYERS, KV_HEADS = 2, 2


def checkpoint(folder: Path, scales: dict[str, Tensor]) -> str:
    """A small model whose attention layers have these tensors, times their number plus one."""
    model = random_model("llama", num_hidden_layers=NUM_LAYERS, num_key_value_heads=KV_HEADS)
    save_safetensors(model, folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    for layer in range(NUM_LAYERS):
        for name, tensor in scales.items():
            tensors[f"model.layers.{layer}.self_attn.{name}"] = tensor * (layer + 1)
    save_file(tensors, file, {"format": "pt"})
    return str(folder)


def given(folder: str, parallel: Parallel | None = None) -> tuple[Tensor, str]:
    parallel = parallel or Parallel(0, 1)
    config = load_model_config(folder)
    model = load_model(config, dtype=torch.float32, device="cpu", parallel=parallel)
    specs = [KVSpec(KV_HEADS, config.head_dim, "fp8_e4m3")] * NUM_LAYERS
    layout = KVLayout.of(specs, 16, parallel.stage.layers(NUM_LAYERS))
    bind_kv_groups(model, layout.groups)
    heads = parallel.heads(config.num_heads, config.num_kv_heads)
    found = given_kv_scales(model, 0, layout.num_slots, heads, CPU)
    return found, describe_kv_scales(model)


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ({"k_scale": [0.25], "v_scale": [0.5]}, [[0.25, 0.25], [0.5, 0.5]]),
        ({"k_proj.k_scale": [0.25], "v_proj.v_scale": [0.5]}, [[0.25, 0.25], [0.5, 0.5]]),
        ({"k_proj.output_scale": 0.25, "v_proj.output_scale": 2.0}, [[0.25, 0.25], [2.0, 2.0]]),
        ({"kv_scale": 0.125, "q_scale": 9.0, "prob_scale": 9.0}, [[0.125] * 2, [0.125] * 2]),
        ({"k_scale": [[[1.0]], [[2.0]]], "v_scale": [[[3.0]], [[4.0]]]}, [[1.0, 2.0], [3.0, 4.0]]),
        # Of queries, which have more heads; they are not rounded.
        ({"kv_scale": 0.5, "q_scale": [[[1.0]]] * 4}, [[0.5] * 2, [0.5] * 2]),
        (
            {"kv_scale": 0.5, "k_zero_point": [0.0, 0.0], "v_proj.output_zero_point": 0.0},
            [[0.5] * 2, [0.5] * 2],
        ),
        ({"v_scale": [0.5]}, [[0.0, 0.0], [0.5, 0.5]]),
        ({}, [[0.0, 0.0], [0.0, 0.0]]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_scales_by_all_their_names(
    scales: dict[str, list[float]], expected: list[list[float]], tmp_path: Path
) -> None:
    folder = checkpoint(tmp_path, {name: torch.tensor(value) for name, value in scales.items()})
    found, described = given(folder)
    assert torch.equal(found, torch.tensor([1.0, 2.0])[:, None, None] * torch.tensor(expected))
    complete = all(any(part) for part in expected)
    assert (described == "scales of the checkpoint") == complete
    assert ("one scale for each token" in described) == (not complete)


def test_ranks_and_stages_have_their_own(tmp_path: Path) -> None:
    by_head = {"k_scale": torch.tensor([1.0, 2.0]), "v_scale": torch.tensor([3.0])}
    folder = checkpoint(tmp_path, by_head)
    for rank, key in enumerate((1.0, 2.0)):
        found, _ = given(folder, Parallel(rank, 2))
        assert found.tolist() == [[[key], [3.0]], [[2 * key], [6.0]]]
    for stage in range(2):
        found, _ = given(folder, Parallel(0, 1, stage=Stage(stage, 2)))
        layer = stage + 1
        assert found.tolist() == [[[layer, 2.0 * layer], [3.0 * layer, 3.0 * layer]]]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([0.0], "positive"),
        ([float("nan")], "positive"),
        ([1.0, -1.0], "positive"),
        ([1.0] * 3, "3"),
    ],
    ids=str,
)
def test_scales_that_cannot_be(value: list[float], said: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, {"k_scale": torch.tensor(value)})
    with pytest.raises(ModelError, match=rf"layers.0.self_attn.k_scale .*{said}") as caught:
        given(folder)
    assert str(tmp_path / "model.safetensors") in str(caught.value)


@pytest.mark.parametrize("name", ["k_zero_point", "v_proj.output_zero_point"])
def test_zero_points_other_than_0_are_refused(name: str, tmp_path: Path) -> None:
    zeros = torch.zeros(1, dtype=torch.int8)
    folder = checkpoint(tmp_path, {"kv_scale": torch.tensor(0.5), name: zeros + 3})
    with pytest.raises(ModelError, match=rf"attn.{name} has zero points.*quantise") as caught:
        given(folder)
    assert str(tmp_path / "model.safetensors") in str(caught.value)
