"""Quantised checkpoints against the models of the numbers that they stand for."""

from __future__ import annotations

import gc
import json
import logging
import re
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.utils.match import match_targets
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from quire.config.model import load_model_config
from quire.config.quantization import PRESETS, GroupFormat, parse_quantization
from quire.files.json_file import CheckedValues
from quire.files.safetensors import TensorInfo
from quire.kernels.torch.linear import FloatMatrix
from quire.kernels.torch.quantized_weights import QuantizedWeights, ReferenceMatrix
from quire.layers.linear import ColumnLinear, RowLinear
from quire.layers.parallel import Parallel, Stage
from quire.layers.quantization.packed import Packed, PackQuantized
from quire.layers.quantization.readers import join_alike, unpack_bits
from quire.layers.weights import Build, Matrix, MatrixLayer, Share
from quire.models import loader
from quire.models.loader import count_weight_bytes, held_weight_bytes, load_model
from quire.protocol.errors import ModelError
from tests.layers.ranks import on_ranks
from tests.models import packers
from tests.models.packers import CASES, Case, save_quantized, words
from tests.models.reference import (
    PagedRun,
    random_model,
    random_tokens,
    reference_logits,
    save_safetensors,
)

TOKENS = random_tokens(19)
WIDE = {"hidden_size": 160, "intermediate_size": 224, "num_attention_heads": 5, "head_dim": 32}


def small_model(name: str) -> PreTrainedModel:
    # Blocks of 128 need matrices with more than one of them, and with edges.
    sizes = {**WIDE, "num_key_value_heads": 5} if "block" in name else {}
    return random_model("llama", num_hidden_layers=2, **sizes)


def round_inputs(model: PreTrainedModel, one: Case) -> None:
    """As the format says of the layers that it has quantised."""
    for name, module in model.named_modules():
        rounding = one.rounding_for(f"{name}.weight")
        if rounding is not None:
            module.register_forward_pre_hook(lambda _, given, rounding=rounding: rounding(given[0]))


def logits(
    folder: Path,
    parallel: Parallel = Parallel(),  # noqa: B008
    fused: bool = True,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    config = load_model_config(str(folder))
    model = load_model(config, dtype=dtype, device=device, parallel=parallel, fused=fused)
    run = PagedRun(model, config, [TOKENS], num_ranks=parallel.size, dtype=dtype)
    for count in (13, 1, 5):
        run.step({0: count})
    return run.all_logits()[0]


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_numbers(name: str, tmp_path: Path) -> None:
    one, model = CASES[name], small_model(name)
    original = reference_logits(model, TOKENS)
    save_quantized(model, tmp_path, one)
    numbers = reference_logits(model, TOKENS)
    assert (numbers - original).abs().max() > 1e-2
    round_inputs(model, one)
    expected = reference_logits(model, TOKENS)
    noise = float((expected - numbers).std())

    def check(found: Tensor, share: float) -> None:
        if one.rounding is None:
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
            return
        # The native library rounds inputs in blocks of 32, mostly finer than the format does.
        assert (found - expected).std() < share * noise or (found - numbers).std() < 1.2 * noise

    # Now and then an input is rounded to a neighbour of what the reference has.
    check(logits(tmp_path), 0.5)
    check(logits(tmp_path, fused=False), 0.5)
    if "block" not in name:  # its heads are not for two
        for part in on_ranks(2, lambda parallel: logits(tmp_path, parallel)):
            check(part, 1.5)  # a rank rounds by the largest of its own inputs


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_zero_points_beside_floats_may_only_be_zeros(dtype: torch.dtype, tmp_path: Path) -> None:
    """Some writers store them."""
    stored = save_quantized(small_model(""), tmp_path, CASES["fp8 channel"])
    expected = logits(tmp_path)
    scales = [name for name in stored if name.endswith("weight_scale")]
    names = [name.replace("weight_scale", "weight_zero_point") for name in scales]
    for name, scale in zip(names, scales, strict=True):
        stored[name] = torch.zeros_like(stored[scale]).to(dtype)
    save_file(stored, tmp_path / "model.safetensors")
    assert torch.equal(logits(tmp_path), expected)
    stored[names[0]] = torch.ones_like(stored[scales[0]]).to(dtype)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="has values, but float8_e4m3fn has none") as caught:
        logits(tmp_path)
    assert names[0] in str(caught.value) and str(tmp_path) in str(caught.value)


class PackReferences(PackQuantized):
    """The numbers themselves, whatever kernels would make of them."""

    def pack(self, weights: Sequence[Share | QuantizedWeights]) -> list[Matrix]:
        return [
            FloatMatrix(one) if isinstance(one, Tensor) else ReferenceMatrix(one)
            for one in join_alike(weights)
        ]


def make_layer(
    name: str, parallel: Parallel, by_rows: bool, block: int, shape: tuple[int, int] = (96, 96)
) -> tuple[Any, Tensor]:
    """A layer with this rank's share of a random matrix, and the whole matrix."""
    one = CASES[name]
    num_outputs, num_inputs = shape
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    packer = one.packer_for("model.layers.0.self_attn.q_proj.weight")
    assert packer is not None
    tensors, exact = packer(weight)
    described = CheckedValues(Path("config.json"), {"quant_method": "modelopt", **one.config})
    if one.file == "quantize_config.json":
        described.values["quant_method"] = "gptq"
    if one.file == "quant_config.json":
        described.values["quant_method"] = "awq"
    infos = {key: info_of(tensor) for key, tensor in tensors.items()}
    config = parse_quantization(described)
    module = "model.layers.0.self_attn.q_proj"
    formats = {(): (module, config.format_of(module, infos))}
    method = Packed(PackReferences(torch.float32, torch.device("cpu")), formats=formats)
    build = Build(torch.float32, torch.device("cpu"), parallel, lambda path: method, block)
    make = RowLinear if by_rows else ColumnLinear
    layer = make(num_inputs, num_outputs, False, build)
    for key, tensor in tensors.items():
        layer.load(key, (), tensor)
    return layer, exact


def info_of(tensor: Tensor) -> TensorInfo:
    names = {torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8"}
    return TensorInfo(names.get(tensor.dtype, "F16"), tuple(tensor.shape))


def matrix_of(layer: MatrixLayer) -> Tensor:
    """What it multiplies with; inputs that are powers of two are not changed by rounding."""
    width = sum(shard.size for shard in layer.axes["weight"][1])
    return layer.method.apply(layer, torch.eye(width), None).t()


def check_shares(name: str, size: int, block: int, by_rows: bool, shape: tuple[int, int]) -> int:
    """That what all ranks keep is the matrix, and zeros; returns how many columns, or rows, of
    these there are."""
    shares = []
    for rank in range(size):
        layer, exact = make_layer(name, Parallel(rank, size), by_rows, block, shape)
        parts = [one.rows(torch.arange(one.num_outputs)) for one in layer.matrices]
        shares.append(torch.cat(parts) if by_rows else torch.cat(parts).t())
    joined, whole = torch.cat(shares, 1), exact if by_rows else exact.t()
    width = whole.shape[1]
    torch.testing.assert_close(joined[:, :width], whole, rtol=1e-5, atol=1e-6)
    assert not joined[:, width:].any()
    return joined.shape[1] - width


@pytest.mark.parametrize("name", CASES)
def test_ranks_have_their_shares_and_padding_is_zero(name: str) -> None:
    """Where words, groups and blocks are cut, where there is padding, and nothing but that."""
    for size, block, by_rows in ((5, 1, True), (5, 8, True), (2, 1, True), (5, 1, False)):
        padding = check_shares(name, size, block, by_rows, (96, 96))
        assert padding or size == 2


@pytest.mark.parametrize("shape", [(576, 320), (192, 448)], ids=str)
@pytest.mark.parametrize("name", ["fp8 block", "fp8 block of others", "fp8 block of one row"])
def test_ranks_have_several_blocks(name: str, shape: tuple[int, int]) -> None:
    """Whole ones as far as possible, and cut ones at the edges."""
    for size in (2, 3):
        for block in (1, 128):
            for by_rows in (True, False):
                check_shares(name, size, block, by_rows, shape)


def test_shards_that_differ_stay_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_quantized(small_model(""), tmp_path, CASES["gptq dynamic"])
    caplog.set_level(logging.INFO)
    model = load_model(load_model_config(str(tmp_path)), dtype=torch.float32, device="cpu")
    sizes = {
        path: [matrix.num_outputs for matrix in layer.matrices]
        for path, layer in model.named_modules()
        if isinstance(layer, MatrixLayer)
    }
    assert sizes["model.layers.0.self_attn.qkv_proj"] == [128]
    assert sizes["model.layers.1.self_attn.qkv_proj"] == [96, 32]
    assert sizes["model.layers.0.mlp.gate_up_proj"] == [96, 96]
    assert "layers.*.mlp.gate_up_proj (2 layers): 2 matrices, because" in caplog.text
    assert "layers.*.self_attn.qkv_proj (1 layer): 2 matrices, because" in caplog.text
    assert "down_proj (2 layers): 2 matrices" not in caplog.text
    save_quantized(small_model(""), tmp_path, CASES["fp8 static"])
    model = load_model(load_model_config(str(tmp_path)), dtype=torch.float32, device="cpu")
    qkv = model.get_submodule("model.layers.0.self_attn.qkv_proj")
    # Scales of q and k differ, and each row keeps its own; inputs of v are rounded otherwise.
    assert isinstance(qkv, MatrixLayer)
    assert [matrix.num_outputs for matrix in qkv.matrices] == [96, 32]
    caplog.clear()
    save_quantized(small_model(""), tmp_path, CASES["gptq asym order"])
    config = load_model_config(str(tmp_path))
    load_model(config, dtype=torch.float32, device="cpu", parallel=Parallel(0, 2))
    assert "layers.*.mlp.down_proj (2 layers): kept as floats, because ranks cut" in caplog.text


@pytest.mark.parametrize("name", CASES)
def test_random_weights_are_like_those_of_a_model(name: str, tmp_path: Path) -> None:
    """Without files the configuration decides."""
    one, base = CASES[name], small_model(name)
    save_quantized(base, tmp_path, one)
    (tmp_path / "model.safetensors").unlink()
    config = load_model_config(str(tmp_path), load_format="dummy")
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "load_format": "dummy"}
    model = load_model(config, **options)
    quantized = 0
    for path, layer in model.named_modules():
        if isinstance(layer, MatrixLayer):
            found = matrix_of(layer)
            if layer.path != "model.embed_tokens":
                assert 0.01 < found.std() < 0.04 and found.mean().abs() < 0.01, path
            is_exact = len(layer.matrices) == 1 and hasattr(layer.matrices[0], "weight")
            quantized += not is_exact and "layers" in path
    assert quantized >= 6
    held, counted = held_weight_bytes(model), count_weight_bytes(config, **options)
    assert counted == pytest.approx(held, rel=0.03)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["gptq", "gptq asym order", "w4a16 asym order", "fp8 block"])
def test_what_a_rank_keeps_is_counted(name: str, size: int, tmp_path: Path) -> None:
    """Also where it is floats, because inputs of a group lie apart, and in smaller groups."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 192}
    model = random_model("llama", num_hidden_layers=1, **sizes, intermediate_size=288)
    one = CASES[name]
    save_quantized(model, tmp_path, one)
    for load_format in ("auto", "dummy"):
        config = load_model_config(str(tmp_path), load_format=load_format)
        options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
        options |= {"load_format": load_format, "parallel": Parallel(0, size)}
        held = held_weight_bytes(load_model(config, **options))
        counted = count_weight_bytes(config, **options)
        assert counted == pytest.approx(held, rel=0.03)


@pytest.mark.parametrize(
    ("name", "tensor", "change", "message"),
    [
        ("gptq", "scales", lambda x: x.mul_(float("nan")), "infinite or no numbers"),
        ("awq", "scales", lambda x: x.fill_(float("inf")), "infinite or no numbers"),
        ("w4a16", "weight_scale", lambda x: x.mul_(float("nan")), "infinite or no numbers"),
        ("fp8", "weight_scale", lambda x: x.mul_(float("nan")), "infinite or no numbers"),
        ("fp8", "weight", lambda x: (x.view(torch.uint8) | 0x7F).view(x.dtype), "are no numbers"),
        ("fp8 static", "input_scale", lambda x: x.mul_(float("nan")), "infinite or no numbers"),
        ("fp8 static", "input_scale", lambda x: x.zero_(), "is 0, but inputs are divided by it"),
        ("fp8 static", "input_scale", lambda x: x.neg_(), "is -0.03, but inputs are divided by it"),
        ("mxfp4", "weight_scale", lambda x: x.fill_(255), "infinite or no numbers"),
        ("gptq", "g_idx", lambda x: x.add_(1), "names groups from 1 to 2, but there are 2"),
        ("gptq", "g_idx", lambda x: x.sub_(1), "names groups from -1 to 0, but there are 2"),
        ("w4a16", "weight_shape", lambda x: x.add_(1), r"is \[65, 65\], but the layer is"),
        ("gptq", "qzeros", lambda x: x[:1].clone(), r"expected \[2, 8\], found \[1, 8\]"),
        ("gptq", "qweight", lambda x: x[:6].clone(), r"expected \[8, 64\], found \[6, 64\]"),
        ("awq", "scales", lambda x: x[:, :8].clone(), r"expected \[2, 64\], found \[2, 8\]"),
        ("gptq", "scales", lambda x: x.int(), "expected torch.float16, found torch.int32"),
        ("awq", "qweight", lambda x: x.float(), "expected torch.int32, found torch.float32"),
        ("gptq", "scales", None, "1 tensor missing"),
        ("awq", "qzeros", None, "1 tensor missing"),
        ("w4a16", "weight_scale", None, "1 tensor missing"),
        ("gptq asym order", "g_idx", None, "is missing, but .* groups by their activations"),
        ("w4a16 asym order", "weight_g_idx", None, "is missing, but .* by their activations"),
        ("fp8", "weight_scale", None, "is missing"),
        ("fp8 static", "input_scale", None, "is missing"),
        ("fp8 block", "weight_scale_inv", lambda x: x[:1].clone(), r"expected \[2, 2\]"),
    ],
)
def test_damage_is_named_with_its_tensor(
    name: str, tensor: str, change: Any, message: str, tmp_path: Path
) -> None:
    stored = save_quantized(small_model(name), tmp_path, CASES[name])
    damaged = f"model.layers.1.self_attn.q_proj.{tensor}"
    if change is None:
        del stored[damaged]
    else:
        stored[damaged] = change(stored[damaged])
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=message) as caught:
        load_model(load_model_config(str(tmp_path)), dtype=torch.float32, device="cpu")
    assert damaged in str(caught.value) and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method='bitsandbytes'.*`quire quantize`"),
        ({"quant_method": "aqlm"}, "quant_method='aqlm', which is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo='NVFP4'"),
        ({**packers.GPTQ, "bits": 5}, "bits must be 2 or 3 or 4 or 8, got 5"),
        ({**packers.GPTQ, "group_size": 12}, "group_size must be a multiple of 8"),
        ({**packers.GPTQ, "group_size": "128"}, "group_size must be a positive integer"),
        ({**packers.GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format must be gptq"),
        ({**packers.GPTQ, "is_marlin_format": True}, "is_marlin_format must be false"),
        ({**packers.GPTQ, "pack_dtype": "int16"}, "pack_dtype must be int32"),
        ({**packers.GPTQ, "dynamic": {"+:(": {}}}, "regular expression"),
        ({**packers.AWQ, "bits": 8}, "bits must be 4, got 8"),
        ({**packers.AWQ, "version": "gemv"}, "version must be gemm"),
        ({"quant_method": "fp8", "activation_scheme": "half"}, "activation_scheme must be"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt must be e4m3"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two"),
        (
            packers.compressed({**packers.INT4, "num_bits": 5}, format="pack-quantized"),
            "weights is int of 5 bits, which is not supported.*`quire quantize`",
        ),
        (
            packers.compressed({**packers.INT4, "strategy": "tensor"}, format="pack-quantized"),
            "strategy is tensor, which is not supported.*channel.*`quire quantize`",
        ),
        (
            packers.compressed({**packers.INT8, "num_bits": 16}, format="int-quantized"),
            "weights is int of 16 bits, which is not supported.*`quire quantize`",
        ),
        (
            packers.compressed({**packers.FP8, "num_bits": 4}, format="float-quantized"),
            r"supported: MXFP4 \(groups of 32\).*`quire quantize`",
        ),
        (
            packers.compressed(packers.INT8, {**packers.FP8_TOKENS, "dynamic": False}),
            "static scales of inputs of another type than int",
        ),
        (
            packers.compressed(packers.INT4, format="nvfp4-pack-quantized"),
            "format is nvfp4-pack-quantized, which is not supported.*`quire quantize`",
        ),
        ({"quant_method": "compressed-tensors"}, "config_groups must be an object"),
        (
            packers.compressed(packers.INT4, sparsity_config={"format": "sparse-24-bitmask"}),
            "sparsity_config must be of format dense",
        ),
        (
            packers.compressed(packers.INT4, transform_config={"config_groups": {"R1": {}}}),
            "transform_config must be empty",
        ),
        ({**packers.compressed({}), "config_groups": {"NVFP4": ["Linear"]}}, "one of W4A16"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_safetensors(small_model(""), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}))
    with pytest.raises(ModelError, match=message) as caught:
        load_model_config(str(tmp_path))
    assert str(file) in str(caught.value)


KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
OF_ATTENTION = {
    "targets": ["LlamaAttention"],
    "weights": None,
    "input_activations": KV_SCHEME,
    "format": None,
}


@pytest.mark.parametrize("groups", [{}, {"group_0": OF_ATTENTION}])
def test_a_scheme_of_the_cache_alone(groups: dict[str, Any], tmp_path: Path) -> None:
    """As compressed-tensors writes it: nothing else is quantised."""
    model = small_model("")
    save_safetensors(model, tmp_path)
    file = tmp_path / "config.json"
    described = {
        **packers.compressed({}),
        "config_groups": groups,
        "format": "dense",
        "kv_cache_scheme": KV_SCHEME,
    }
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": described}))
    expected = reference_logits(model, TOKENS)
    torch.testing.assert_close(logits(tmp_path), expected, rtol=0, atol=1e-3)
    config = load_model_config(str(tmp_path), load_format="dummy")
    load_model(config, dtype=torch.float32, device="cpu", load_format="dummy")


def test_a_group_of_attention_beside_others(tmp_path: Path) -> None:
    one, model = CASES["w4a16"], small_model("")
    save_quantized(model, tmp_path, one)
    file = tmp_path / "config.json"
    described = json.loads(file.read_text())
    described["quantization_config"]["config_groups"]["attention"] = OF_ATTENTION
    file.write_text(json.dumps(described))
    expected = reference_logits(model, TOKENS)
    torch.testing.assert_close(logits(tmp_path), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", PRESETS)
def test_schemes_that_have_a_name(name: str) -> None:
    written = preset_name_to_scheme(name, ["Linear"]).model_dump(mode="json")

    def parse(groups: dict[str, Any]) -> Any:
        config = {"quant_method": "compressed-tensors", "config_groups": groups}
        return parse_quantization(CheckedValues(Path("config.json"), config))

    assert parse({name: ["Linear"]}) == parse({"group_0": {**written, "format": None}})


@pytest.mark.parametrize(
    ("written", "same"),
    [
        ({**packers.INT4, "strategy": None}, packers.INT4),
        ({**packers.INT4, "strategy": None, "group_size": -1}, {**packers.INT8, "num_bits": 4}),
        (
            {**packers.FP8, "strategy": "block", "block_structure": "64x128"},
            {**packers.FP8, "strategy": "block", "block_structure": [64, 128]},
        ),
    ],
)
def test_what_older_versions_wrote(written: dict[str, Any], same: dict[str, Any]) -> None:
    found, expected = (
        parse_quantization(CheckedValues(Path("config.json"), packers.compressed(weights)))
        for weights in (written, same)
    )
    assert found == expected


def test_a_configuration_as_modelopt_writes_it(tmp_path: Path) -> None:
    """With its own file's contents in config.json, and no quant_method."""
    model, one = small_model(""), CASES["modelopt"]
    save_quantized(model, tmp_path, one)
    expected = logits(tmp_path)
    (tmp_path / "hf_quant_config.json").unlink()
    file = tmp_path / "config.json"
    described = {"producer": {"name": "modelopt", "version": "0.29"}, **one.config}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": described}))
    assert torch.equal(logits(tmp_path), expected)


@pytest.mark.parametrize("name", ["fp8", "w4a16", "gptq"])
def test_a_configuration_without_the_format(name: str, tmp_path: Path) -> None:
    save_quantized(small_model(""), tmp_path, CASES[name])
    file = tmp_path / "config.json"
    described = json.loads(file.read_text())
    del described["quantization_config"]
    file.write_text(json.dumps(described))
    with pytest.raises(ModelError, match=r"has no quantization_config that explains them"):
        load_model(load_model_config(str(tmp_path)), dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("is_reversed", [False, True])
def test_the_closest_target_counts(is_reversed: bool) -> None:
    """As in compressed-tensors, whatever the order of groups."""
    names = ["Linear", "re:.*down_proj", "model.layers.0.mlp.down_proj"]
    sizes = dict(zip(names, (32, 64, 128), strict=True))
    groups = {
        name: {"targets": [name], "weights": {**packers.INT4, "group_size": size}}
        for name, size in (reversed(sizes.items()) if is_reversed else sizes.items())
    }
    config = {"quant_method": "compressed-tensors", "config_groups": groups}
    parsed = parse_quantization(CheckedValues(Path("config.json"), config))
    for module in ("up_proj", "down_proj"):
        for layer in (0, 1):
            path = f"model.layers.{layer}.mlp.{module}"
            found = parsed.format_of(path, None)
            (closest, *_) = match_targets(path, torch.nn.Linear(1, 1), names)
            assert isinstance(found, GroupFormat) and found.group_size == sizes[closest]


def test_an_unexpected_tensor_is_named_with_what_the_configuration_says(tmp_path: Path) -> None:
    stored = save_quantized(small_model(""), tmp_path, CASES["gptq"])
    file = tmp_path / "config.json"
    described = {**json.loads(file.read_text()), "quantization_config": CASES["w4a16"].config}
    file.write_text(json.dumps(described))
    with pytest.raises(ModelError, match=r"'compressed-tensors' does not explain.*qweight"):
        load_model(load_model_config(str(tmp_path)), dtype=torch.float32, device="cpu")
    # A bias that says nothing is in many files of old, one that says something is not the model's.
    file.write_text(json.dumps({**described, "quantization_config": CASES["gptq"].config}))
    name = "model.layers.0.mlp.up_proj.bias"
    save_file({**stored, name: torch.zeros(96)}, tmp_path / "model.safetensors")
    load_model(load_model_config(str(tmp_path)), dtype=torch.float32, device="cpu")
    save_file({**stored, name: torch.ones(96)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"not part of the model: {re.escape(name)}"):
        load_model(load_model_config(str(tmp_path)), dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "opt", "gpt2"])
def test_other_families_and_stages(family: str, tmp_path: Path) -> None:
    """Biases, and matrices that an unquantised checkpoint has transposed."""
    model = random_model(family, tie_word_embeddings=family != "qwen2")
    one = CASES["gptq"]
    save_safetensors(model, tmp_path)
    stored: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        is_matrix = tensor.dim() == 2 and (".layers." in name or ".h." in name)
        if not is_matrix:
            if name != "lm_head.weight" or family == "qwen2":
                stored[name] = tensor.clone()
            continue
        matrix = tensor.t() if family == "gpt2" else tensor
        parts, exact = one.packer(matrix.contiguous())
        stored |= {name.removesuffix("weight") + key: part for key, part in parts.items()}
        tensor.copy_(exact.t() if family == "gpt2" else exact)
    save_file(stored, tmp_path / "model.safetensors")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": one.config}))
    expected = reference_logits(model, TOKENS)
    torch.testing.assert_close(logits(tmp_path), expected, rtol=0, atol=1e-3)
    config = load_model_config(str(tmp_path))
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    whole = held_weight_bytes(load_model(config, **options))
    parts_bytes = [
        held_weight_bytes(load_model(config, parallel=Parallel(stage=Stage(i, 2)), **options))
        for i in range(2)
    ]
    assert max(parts_bytes) < whole <= sum(parts_bytes)


@pytest.mark.parametrize(
    ("quantization", "step"), [("fp8", 1 / 16), ("int4", 1 / 15), ("int8", 1 / 254)]
)
@pytest.mark.parametrize("size", [1, 3])
def test_weights_are_rounded_while_they_load(
    quantization: str, step: float, size: int, tmp_path: Path
) -> None:
    """Each by half a step of its scale at most, also where groups of 128 do not divide the inputs;
    embeddings and head stay exact, but for 8 bits on a CPU."""
    reference = random_model("llama", num_hidden_layers=1, **WIDE, num_key_value_heads=5)
    save_safetensors(reference.to(torch.bfloat16), tmp_path)
    reference.float()
    config = load_model_config(str(tmp_path))
    whole = reference.model.layers[0].mlp.down_proj.weight
    shares = []
    for rank in range(size):
        model = load_model(
            config,
            dtype=torch.float32,
            device="cpu",
            quantization=quantization,
            parallel=Parallel(rank, size),
        )
        for path in ("lm_head", "model.layers.0.mlp.down_proj"):
            layer = model.get_submodule(path)
            assert isinstance(layer, MatrixLayer)
            found = numbers_of(layer)
            if path == "lm_head" and quantization != "int8":
                rows = reference.lm_head.weight[rank * len(found) :][: len(found)]
                assert torch.equal(found[: len(rows)], rows)
        shares.append(found)
    joined = torch.cat(shares, 1)
    assert not joined[:, whole.shape[1] :].any()
    error = (joined[:, : whole.shape[1]] - whole).abs()
    if quantization == "fp8":
        bound = whole.abs() * step + whole.abs().max() / 250  # integers of 8 bits in the end
    else:
        bound = whole.abs().amax(1, keepdim=True) * step * 1.1  # scales are rounded too
    assert (error <= bound).all()
    # Blocks of 8 bits that do not divide a rank's inputs are floats on a CPU.
    assert (error.max() > 0) == (quantization != "int8" or size == 1)


class LiveBytes:
    """How much memory of tensors that were made here is in use, and was at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def copy(self, tensor: Tensor) -> Tensor:
        # Every view of its memory keeps an array alive.
        array = np.empty(tensor.nbytes, dtype=np.uint8)
        self.now += array.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(array, self._drop, array.nbytes)
        return torch.from_numpy(array).view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _drop(self, nbytes: int) -> None:
        self.now -= nbytes


@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8"])
def test_a_rounded_model_is_never_there_whole(
    quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither as read from files nor as brought to the device: one layer at a time at most."""
    model = random_model("llama", num_hidden_layers=8).to(torch.bfloat16)
    save_safetensors(model, tmp_path)
    tensors = model.state_dict()
    on_host, on_device = LiveBytes(), LiveBytes()
    read = ((name, on_host.copy(tensor)) for name, tensor in tensors.items())
    monkeypatch.setattr(loader, "iter_weights", lambda *given: read)
    monkeypatch.setattr(loader, "stays_here", on_device.copy)
    config = load_model_config(str(tmp_path))
    loaded = load_model(config, dtype=torch.float32, device="cpu", quantization=quantization)
    up = tensors["model.layers.0.mlp.up_proj.weight"].nbytes
    largest = max(2 * up, tensors["lm_head.weight"].nbytes)
    whole = sum(tensor.nbytes for tensor in tensors.values())
    assert 0 < on_host.most <= largest + up < whole / 6
    assert 0 < on_device.most <= largest
    assert on_host.now == on_device.now == 0, "the model keeps nothing of it"
    assert held_weight_bytes(loaded)


@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("name", ["mlp.down_proj", "mlp.up_proj", "self_attn.k_proj"])
def test_what_cannot_be_rounded_is_named(quantization: str, name: str, tmp_path: Path) -> None:
    """By its name in the checkpoint and its place there, also where a rank has a part of it."""
    model = small_model("")
    module = f"model.layers.1.{name}"
    with torch.no_grad():
        model.get_submodule(module).weight[-1, -1] = float("nan")
        num_outputs, num_inputs = model.get_submodule(module).weight.shape
    save_safetensors(model, tmp_path)
    config = load_model_config(str(tmp_path))
    place = f"nan for output {num_outputs - 1} and input {num_inputs - 1}"
    for parallel in (Parallel(0, 1), Parallel(1, 2)):
        if quantization == "int8" and parallel.size == 2 and name == "mlp.down_proj":
            continue  # kept as floats
        with pytest.raises(ModelError, match=rf"tensor {module}\.weight has {place}") as caught:
            load_model(
                config,
                dtype=torch.float32,
                device="cpu",
                quantization=quantization,
                parallel=parallel,
            )
        assert str(tmp_path / "model.safetensors") in str(caught.value)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_outputs_that_awq_cannot_pack(load_format: str, tmp_path: Path) -> None:
    save_quantized(small_model(""), tmp_path, CASES["awq"])
    changed = {"intermediate_size": 100}
    config = load_model_config(str(tmp_path), hf_overrides=changed, load_format=load_format)
    message = r"layers\.0\.mlp\.gate_proj\.qweight would have 100 outputs.* 8, such as 104; check"
    with pytest.raises(ModelError, match=message) as caught:
        load_model(config, dtype=torch.float32, device="cpu", load_format=load_format)
    assert str(tmp_path / "config.json") in str(caught.value)


def numbers_of(layer: MatrixLayer) -> Tensor:
    (matrix,) = layer.matrices
    return matrix.rows(torch.arange(matrix.num_outputs))


def test_a_model_goes_when_it_is_dropped(tmp_path: Path) -> None:
    """Without waiting for the garbage collector, which does not know how full a device is."""
    save_quantized(small_model(""), tmp_path, CASES["gptq"])
    model = load_model(load_model_config(str(tmp_path)), dtype=torch.float32, device="cpu")
    matrix = weakref.ref(model.get_submodule("model.layers.0.mlp.down_proj").matrices[0])  # type: ignore[union-attr,index,arg-type]
    gc.disable()
    try:
        del model
        assert matrix() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["shards", "bin"])
def test_tensors_of_a_matrix_may_be_in_several_files(kind: str, tmp_path: Path) -> None:
    model = small_model("")
    stored = save_quantized(model, tmp_path, CASES["gptq asym order"])
    (tmp_path / "model.safetensors").unlink()
    if kind == "bin":
        torch.save(stored, tmp_path / "pytorch_model.bin")
    else:
        files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
        weight_map = {name: files[i % 2] for i, name in enumerate(sorted(stored))}
        for file in files:
            part = {name: stored[name] for name, where in weight_map.items() if where == file}
            save_file(part, tmp_path / file)
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    torch.testing.assert_close(logits(tmp_path), reference_logits(model, TOKENS), rtol=0, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_computes_the_same(name: str, fused: bool, tmp_path: Path) -> None:
    one, model = CASES[name], small_model(name)
    save_quantized(model, tmp_path, one)
    numbers = reference_logits(model, TOKENS)
    round_inputs(model, one)
    noise = (reference_logits(model, TOKENS) - numbers).std()
    found = logits(tmp_path, fused=fused, device="cuda", dtype=torch.float16).float().cpu()
    # Kernels may leave inputs as they are, or round them as the format says.
    assert (found - numbers).std() < 5e-3 * numbers.std() + 1.5 * noise


@pytest.mark.parametrize("count", [8, 40, 64, 100])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_that_do_not_fill_their_words(bits: int, count: int) -> None:
    codes = torch.randint(2**bits, (3, count), dtype=torch.int32)
    assert torch.equal(unpack_bits(words(codes, bits), bits)[:, :count].int(), codes)
