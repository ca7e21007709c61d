"""Models on packed weights: the numbers of the exact ones up to rounding, in any mix of formats."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from quire.config.embedded import embedded_model_path
from quire.config.model import load_model_config
from quire.kernels.cpu.linear import FloatMatrix
from quire.kernels.torch.gguf_blocks import BlockRows
from quire.layers.linear import QKVLinear
from quire.layers.parallel import Parallel
from quire.layers.quantization.packed import (
    PackBlocks,
    Packed,
    Packer,
    PackFloats,
    PackInt8,
)
from quire.layers.weights import Build, Matrix
from quire.models.loader import load_model
from tests.models.reference import PagedRun, random_tokens

INPUTS = 256
PARTS = {"q": 64, "k": 32, "v": 32}


def qkv_layer(packer: Packer) -> QKVLinear:
    build = Build(torch.float32, torch.device("cpu"), Parallel(), lambda path: Packed(packer))
    return QKVLinear(INPUTS, 16, 4, 2, False, build)


def stored(weight: torch.Tensor, kind: str) -> tuple[BlockRows, torch.Tensor]:
    """Random blocks of a kind, and the numbers they stand for by the gguf package."""
    number = gguf.GGMLQuantizationType[kind]
    if kind in ("Q8_0", "Q4_0", "Q4_1"):
        blocks = gguf.quants.quantize(weight.numpy(), number)
    else:
        elements, size = gguf.GGML_QUANT_SIZES[number]
        shape = (len(weight), INPUTS // elements, size)
        blocks = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        for offset in {"Q4_K": (0, 2), "Q6_K": (208,)}[kind]:
            blocks[..., offset : offset + 2] = np.full(1, 1e-3, np.float16).view(np.uint8)
        blocks = blocks.reshape(len(weight), -1)
    rows = BlockRows(kind, torch.from_numpy(blocks.copy()), INPUTS)
    return rows, torch.from_numpy(gguf.quants.dequantize(blocks, number))


@pytest.mark.parametrize(
    ("kinds", "num_matrices"),
    [
        (("Q4_K", "Q4_K", "Q6_K"), 2),
        (("Q4_1", "Q4_1", "Q4_1"), 1),
        (("Q8_0", "F32", "Q4_0"), 3),
    ],
)
def test_shards_of_a_layer_may_differ(kinds: tuple[str, ...], num_matrices: int) -> None:
    """As in files that keep values more exactly than keys; parts arrive in any order."""
    layer = qkv_layer(PackBlocks())
    exact = {}
    for (name, outputs), kind in reversed(list(zip(PARTS.items(), kinds, strict=True))):
        weight = torch.randn(outputs, INPUTS) / 16
        if kind == "F32":
            layer.load("weight", (name,), weight)
            exact[name] = weight
        else:
            rows, exact[name] = stored(weight, kind)
            layer.load("weight", (name,), rows)
    assert len(layer.matrices) == num_matrices
    x = torch.randn(5, INPUTS)
    for name, part in zip(PARTS, layer(x), strict=True):
        expected = x @ exact[name].t()
        error = (part.flatten(1) - expected).norm() / expected.norm()
        assert error < (1e-5 if kinds[list(PARTS).index(name)] == "F32" else 2e-2)


def test_rows_that_blocks_do_not_divide_stay_exact() -> None:
    """8 bits need 32 inputs at a time; a layer of 40 is kept in float32."""
    weight = torch.randn(8, 40)
    (matrix,) = PackInt8().pack([weight])
    assert isinstance(matrix, FloatMatrix)
    assert torch.equal(matrix.rows(torch.arange(8)), weight)


@pytest.mark.parametrize("packer", [PackFloats(), PackInt8()])
def test_embedding_rows(packer: Packer) -> None:
    weight, ids = torch.randn(50, 64), torch.tensor([3, 49, 0, 17, 3])
    (matrix,) = packer.pack([weight[:20], weight[20:]])
    bound = 0 if isinstance(packer, PackFloats) else weight.abs().max() / 120
    assert (matrix.rows(ids) - weight[ids]).abs().max() <= bound


Logits = dict[tuple[str | None, torch.dtype], torch.Tensor]


@pytest.fixture(scope="module")
def embedded() -> Logits:
    """Logits of the embedded model for one prompt, by quantization and type of the cache; their
    mean is 0."""
    config = load_model_config(str(embedded_model_path()))
    tokens, logits = random_tokens(40, vocab=config.vocab_size), {}
    for quantization in (None, "int8", "gguf", "gguf-a16"):
        model = load_model(config, dtype=torch.float32, device="cpu", quantization=quantization)
        for cache in (torch.float32, torch.float16):
            run = PagedRun(model, config, [tokens], dtype=cache)
            run.step({0: 33})
            for _ in range(7):
                run.step({0: 1})
            found = run.all_logits()[0].double()
            logits[quantization, cache] = found - found.mean(-1, keepdim=True)
    return logits


@pytest.mark.parametrize("cache", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("quantization", "bound"), [("int8", 0.1), ("gguf", 0.1), ("gguf-a16", 2e-3)]
)
def test_logits_stay_close_to_exact_ones(
    embedded: Logits, quantization: str, bound: float, cache: torch.dtype
) -> None:
    exact, found = embedded[None, torch.float32], embedded[quantization, cache]
    assert 0 < (found - exact).norm() / exact.norm() < bound


@pytest.mark.parametrize(("quantization", "bound"), [(None, 1e-3), ("int8", 0.1), ("gguf", 0.1)])
def test_halves_in_the_cache_change_little(
    embedded: Logits, quantization: str | None, bound: float
) -> None:
    """Where activations are rounded to 8 bits, any difference becomes as large as that rounding."""
    exact, found = embedded[quantization, torch.float32], embedded[quantization, torch.float16]
    assert 0 < (found - exact).norm() / exact.norm() < bound


def test_memory_is_that_of_the_file(tmp_path: Path) -> None:
    """Packed weights take about what their blocks take, not what float32 would."""
    path = embedded_model_path()
    config = load_model_config(str(path))
    model = load_model(config, dtype=torch.float32, device="cpu", quantization="gguf")
    packed = sum(m.nbytes for m in _matrices(model))
    assert packed < 1.1 * path.stat().st_size
    assert sum(parameter.nbytes for parameter in model.parameters()) < 1 << 20


def _matrices(model: torch.nn.Module) -> list[Matrix]:
    return [m for layer in model.modules() for m in getattr(layer, "matrices", ())]
