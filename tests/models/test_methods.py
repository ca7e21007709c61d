"""Layers with quantisation methods of their own: each is asked for by path, and a model with
several of them computes as one whose weights are those that its methods stand for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import safetensors.torch
import torch

from quire.config.embedded import embedded_model_path
from quire.config.model import ModelConfig, load_model_config
from quire.kernels.cpu.linear import BlockMatrix
from quire.layers.attention.cpu import CpuBackend
from quire.layers.parallel import Parallel
from quire.layers.quantization.packed import PackBlocks, Packed, PackInt8
from quire.layers.quantization.unquantized import Unquantized
from quire.layers.weights import MatrixLayer, QuantizationMethod, WeightedLayer
from quire.models.loader import load_model
from quire.models.registry import CausalLM
from quire.protocol.errors import ModelError
from tests.layers.ranks import on_ranks
from tests.models.four_bits import FourBits, dequantize, quantize
from tests.models.reference import (
    PagedRun,
    random_model,
    random_tokens,
    reference_logits,
    save_safetensors,
)

TOKENS = random_tokens(21)


def logits(model: CausalLM, config: ModelConfig, num_ranks: int = 1) -> torch.Tensor:
    paged = PagedRun(model, config, [TOKENS], num_ranks=num_ranks)
    for count in (15, 1, 5):
        paged.step({0: count})
    return paged.all_logits()[0]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "opt", "gpt2"])
def test_every_layer_knows_its_path(family: str, tied: bool, tmp_path: Path) -> None:
    save_safetensors(random_model(family, tie_word_embeddings=tied), tmp_path)
    asked: Counter[str] = Counter()

    def method_for(path: str) -> QuantizationMethod:
        asked[path] += 1
        return Unquantized()

    config = load_model_config(str(tmp_path))
    model = load_model(config, dtype=torch.float32, device="cpu", method_for=method_for)
    for path, layer in model.named_modules():
        if isinstance(layer, WeightedLayer):
            assert layer.path == path
    matrices = [layer.path for layer in model.modules() if isinstance(layer, MatrixLayer)]
    assert asked == Counter(matrices)


def test_the_head_may_be_exact_beside_8_bits(tmp_path: Path, native: None) -> None:
    reference = random_model("llama")
    save_safetensors(reference, tmp_path)
    config = load_model_config(str(tmp_path))
    int8, exact = Packed(PackInt8()), Unquantized()
    model = load_model(
        config,
        dtype=torch.float32,
        device="cpu",
        method_for=lambda path: exact if path == "lm_head" else int8,
    )
    head = model.lm_head
    assert torch.equal(head.get_parameter("weight"), reference.lm_head.weight)
    assert not head.matrices
    layer = model.get_submodule("model.layers.1.mlp.down_proj")
    assert isinstance(layer, MatrixLayer) and isinstance(layer.matrices[0], BlockMatrix)
    # The reference in 8 bits all over, but for its head.
    rounded = load_model(config, dtype=torch.float32, device="cpu", quantization="int8")
    paged, all_rounded = (PagedRun(m, config, [TOKENS], CpuBackend) for m in (model, rounded))
    hidden: list[torch.Tensor] = []
    rounded.lm_head.register_forward_pre_hook(lambda _, args: hidden.append(args[0].clone()))
    for run in (paged, all_rounded):
        run.step({0: len(TOKENS)})
    expected = hidden[0] @ reference.lm_head.weight.detach().t()
    torch.testing.assert_close(paged.all_logits()[0], expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(all_rounded.all_logits()[0], expected, rtol=1e-4, atol=1e-4)


def save_four_bits(family: str, folder: Path) -> torch.nn.Module:
    """A folder in which the layers' matrices are in 4 bits; the model with the numbers of these."""
    reference = random_model(family)
    save_safetensors(reference, folder)
    state = reference.state_dict()
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if ".layers." not in name or not name.endswith("proj.weight"):
            stored[name] = tensor
            continue
        shards = quantize(tensor)
        stored |= {name.removesuffix("weight") + key: value for key, value in shards.items()}
        tensor.copy_(dequantize(shards["qweight"], (shards["scales"] * 0.25)))
    safetensors.torch.save_file(stored, folder / "model.safetensors")
    return reference


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_four_bits_beside_exact_embeddings(family: str, size: int, tmp_path: Path) -> None:
    """Parameters of three types, packed words, groups and a scale for each shard, on each rank."""
    reference = save_four_bits(family, tmp_path)
    config = load_model_config(str(tmp_path))
    packed, exact = FourBits(), Unquantized()

    def run(parallel: Parallel) -> torch.Tensor:
        model = load_model(
            config,
            dtype=torch.float32,
            device="cpu",
            parallel=parallel,
            method_for=lambda path: packed if ".layers." in path else exact,
        )
        return logits(model, config, parallel.size)

    for found in on_ranks(size, run):
        expected = reference_logits(reference, TOKENS)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def test_dummy_weights_in_four_bits(tmp_path: Path) -> None:
    save_four_bits("llama", tmp_path)
    config = load_model_config(str(tmp_path))
    packed, exact = FourBits(), Unquantized()

    def run(parallel: Parallel) -> torch.Tensor:
        model = load_model(
            config,
            dtype=torch.float32,
            device="cpu",
            load_format="dummy",
            parallel=parallel,
            method_for=lambda path: packed if ".layers." in path else exact,
        )
        return logits(model, config, parallel.size)

    (expected,) = on_ranks(1, run)
    assert expected.isfinite().all() and expected.std() > 0
    for found in on_ranks(2, run):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_numbers_with_fractions_do_not_become_words(tmp_path: Path) -> None:
    """A folder of another format must not load as noise."""
    save_four_bits("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    name = "model.layers.0.mlp.down_proj.qweight"
    tensors[name] = tensors[name].float()
    safetensors.torch.save_file(tensors, file)
    packed, exact = FourBits(), Unquantized()
    with pytest.raises(ModelError, match=rf"1 tensor of the wrong type: {name} .*torch.int32"):
        load_model(
            load_model_config(str(tmp_path)),
            dtype=torch.float32,
            device="cpu",
            method_for=lambda path: packed if ".layers." in path else exact,
        )


def test_a_gguf_file_may_be_dequantised_in_part(native: None) -> None:
    """Blocks are kept for the layers whose method computes with them."""
    config = load_model_config(str(embedded_model_path()))
    blocks, exact = Packed(PackBlocks(input_planes=2)), Unquantized()
    model = load_model(
        config,
        dtype=torch.float32,
        device="cpu",
        method_for=lambda path: exact if "layers.0." in path else blocks,
    )
    whole = load_model(config, dtype=torch.float32, device="cpu", quantization="gguf-a16")
    first = model.get_submodule("model.layers.0.mlp.down_proj")
    second = model.get_submodule("model.layers.1.mlp.down_proj")
    assert isinstance(first, MatrixLayer) and first.get_parameter("weight").is_floating_point()
    assert isinstance(second, MatrixLayer) and isinstance(second.matrices[0], BlockMatrix)
    found, expected = logits(model, config), logits(whole, config)
    expected = expected - expected.mean(-1, keepdim=True)
    assert 0 < (found - found.mean(-1, keepdim=True) - expected).norm() / expected.norm() < 2e-3
