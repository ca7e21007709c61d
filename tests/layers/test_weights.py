"""Parameters of layers: types, packed words and groups, stacked experts, scales; for each rank.

A tensor as a checkpoint holds it, and plain slices of it, are the reference.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.layers.linear import QKVLinear
from quire.layers.parallel import Parallel
from quire.layers.quantization.unquantized import Unquantized
from quire.layers.weights import Shard, WeightedLayer, alternating, divided, stacked, whole
from tests.layers.ranks import build_for

RANKS = [Parallel(0, 1), Parallel(0, 2), Parallel(1, 2)]


def share(tensor: torch.Tensor, dim: int, parallel: Parallel) -> torch.Tensor:
    return tensor.chunk(parallel.size, dim)[parallel.rank]


def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)


def test_paths_grow_as_modules_nest() -> None:
    build = build_for() / "model" / "layers.3"
    assert build.path == "model.layers.3"
    assert (build / "mlp" / "down_proj").path == "model.layers.3.mlp.down_proj"
    assert WeightedLayer(build / "mlp").path == "model.layers.3.mlp"


def test_a_layer_asks_for_the_method_of_its_path() -> None:
    known = {"a.qkv_proj": Unquantized(), "b.qkv_proj": Unquantized()}
    build = replace(build_for(), method_for=known.__getitem__)
    for parent in "ab":
        layer = QKVLinear(8, 4, 2, 1, False, build / parent / "qkv_proj")
        assert layer.method is known[f"{parent}.qkv_proj"]


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float16, torch.float8_e4m3fn])
def test_parameters_have_types_of_their_own(dtype: torch.dtype) -> None:
    layer = WeightedLayer(build_for())
    layer.add_weight("packed", (whole(2), whole(3)), build_for(), dtype)
    layer.add_weight("bias", (whole(2),), build_for())
    values = numbers(2, 3, dtype=dtype)
    layer.load("packed", (), values)
    layer.load("bias", (), torch.ones(2, dtype=torch.bfloat16))
    assert layer.weight_dtype("packed") == dtype and layer.weight_dtype("bias") == torch.float32
    assert torch.equal(layer.get_parameter("packed").float(), values.float())
    assert torch.equal(layer.get_parameter("bias"), torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float16, torch.float8_e4m3fn])
def test_dummy_values_of_any_type(dtype: torch.dtype) -> None:
    tensor = torch.zeros(64, 64, dtype=dtype)
    WeightedLayer(build_for()).fill_dummy("packed", tensor, torch.Generator().manual_seed(0))
    spread = tensor.double().std()
    assert spread > 10 if not dtype.is_floating_point else 0.018 < spread < 0.022


@pytest.mark.parametrize("parallel", RANKS)
def test_words_and_groups_of_inputs_are_divided_with_them(parallel: Parallel) -> None:
    """64 inputs are 8 words of 8 weights and 4 groups of 16."""
    build, outputs = build_for(parallel), whole(6)
    words_axis, groups = (divided(64 // unit, parallel) for unit in (8, 16))
    layer = WeightedLayer(build)
    layer.add_weight("qweight", (outputs, words_axis), build, torch.int32)
    layer.add_weight("scales", (outputs, groups), build, torch.float16)
    words, scales = numbers(6, 8), numbers(6, 4, dtype=torch.float16)
    assert layer.checkpoint_shape("qweight") == words.shape
    assert layer.checkpoint_shape("scales") == scales.shape
    layer.load("qweight", (), words)
    layer.load("scales", (), scales)
    assert torch.equal(layer.get_parameter("qweight"), share(words, 1, parallel))
    assert torch.equal(layer.get_parameter("scales"), share(scales, 1, parallel))


@pytest.mark.parametrize("parallel", RANKS)
def test_words_of_joined_outputs(parallel: Parallel) -> None:
    """As where 8 outputs of gate and of up are packed into a word each."""
    build, outputs = build_for(parallel), ()
    for name, size in (("gate", 32), ("up", 64)):
        outputs += divided(size // 8, parallel, name)
    layer = WeightedLayer(build)
    layer.add_weight("qweight", (outputs, whole(3)), build, torch.int32)
    gate, up = numbers(4, 3), -numbers(8, 3)
    layer.load("qweight", ("up",), up)
    layer.load("qweight", ("gate",), gate)
    expected = torch.cat((share(gate, 0, parallel), share(up, 0, parallel)))
    assert torch.equal(layer.get_parameter("qweight"), expected)


@pytest.mark.parametrize("parallel", RANKS)
def test_experts_are_stacked_by_number_and_shard(parallel: Parallel) -> None:
    """A checkpoint has a matrix for each expert and shard; all of them are one parameter."""
    build, outputs = build_for(parallel), ()
    for name in ("gate", "up"):
        outputs += divided(4, parallel, name)
    layer = WeightedLayer(build)
    layer.add_weight("weight", (stacked(3), outputs, whole(5)), build)
    tensors = {(e, p): torch.randn(4, 5) for e in (2, 0, 1) for p in ("up", "gate")}
    for shard_key, tensor in tensors.items():
        assert layer.checkpoint_shape("weight", shard_key) == (4, 5)
        layer.load("weight", shard_key, tensor)
    expected = torch.stack(
        [
            torch.cat([share(tensors[expert, shard], 0, parallel) for shard in ("gate", "up")])
            for expert in range(3)
        ]
    )
    assert torch.equal(layer.get_parameter("weight"), expected)
    # Other checkpoints hold a shard of all experts, or all of them, in one tensor.
    assert layer.checkpoint_shape("weight", ("up",)) == (3, 4, 5)
    again = torch.cat([tensors[e, p][None] for p in ("gate", "up") for e in range(3)])
    layer.get_parameter("weight").zero_()
    for shard, tensor in zip(("gate", "up"), again.split(3), strict=True):
        layer.load("weight", (shard,), tensor)
    assert torch.equal(layer.get_parameter("weight"), expected)


@pytest.mark.parametrize("parallel", RANKS)
def test_rows_that_take_turns_are_put_one_behind_the_other(parallel: Parallel) -> None:
    """As checkpoints of gpt-oss have gate, up, gate, up; 5 rows of each leave a rank padding."""
    build = build_for(parallel)
    outputs = alternating(divided(5, parallel, "gate") + divided(5, parallel, "up"))
    layer = WeightedLayer(build)
    layer.add_weight("weight", (stacked(3), outputs, whole(4)), build)
    gate, up = torch.randn(3, 5, 4), torch.randn(3, 5, 4)
    joined = torch.stack((gate, up), 2).flatten(1, 2)
    assert layer.checkpoint_shape("weight") == joined.shape
    layer.load("weight", (), joined)
    padded = (torch.nn.functional.pad(one, (0, 0, 0, -5 % parallel.size)) for one in (gate, up))
    expected = torch.cat([share(one, 1, parallel) for one in padded], 1)
    assert torch.equal(layer.get_parameter("weight"), expected)


def test_a_rank_may_keep_some_experts_only() -> None:
    layer = WeightedLayer(build_for())
    layer.add_weight("weight", (stacked(4, kept=range(2, 4)), whole(2)), build_for())
    for expert in range(4):
        layer.load("weight", (expert,), torch.full((2,), float(expert)))
    assert layer.get_parameter("weight").tolist() == [[2.0, 2.0], [3.0, 3.0]]


def test_unknown_shards_are_refused() -> None:
    """Not loaded into every place."""
    layer = QKVLinear(8, 4, 2, 1, False, build_for())
    with pytest.raises(AssertionError, match="no shard"):
        layer.load("weight", ("gate",), torch.zeros(8, 8))


@pytest.mark.parametrize("stored", [torch.tensor(0.5), torch.tensor([0.5])])
def test_scales_load_with_and_without_a_dimension(stored: torch.Tensor) -> None:
    layer = WeightedLayer(build_for())
    layer.add_weight("scalar", (), build_for(), torch.float32)
    layer.add_weight("single", (whole(1),), build_for(), torch.float32)
    layer.add_weight("by_shard", (tuple(Shard(1, 0, 1, name) for name in "qkv"),), build_for())
    layer.load("scalar", (), stored)
    layer.load("single", (), stored)
    for factor, name in enumerate("qkv"):
        layer.load("by_shard", (name,), factor * stored)
    assert layer.get_parameter("scalar").item() == layer.get_parameter("single").item() == 0.5
    assert layer.get_parameter("by_shard").tolist() == [0.0, 0.5, 1.0]
