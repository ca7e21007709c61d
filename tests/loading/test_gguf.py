"""GGUF weights: exact dequantisation, names, and layout.

References: the gguf package for numbers, transformers' models for names and layout, transformers'
own GGUF loader for the embedded model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor, load_gguf_checkpoint

from quire.config.embedded import embedded_model_path
from quire.config.locate import ModelSource
from quire.config.model import load_model_config
from quire.files.gguf import LOADABLE_TYPES
from quire.kernels.cpu.dequantize import DEQUANTIZED
from quire.loading.gguf import dequantize, transformers_name, unpermute
from quire.loading.weights import iter_weights, read_weights
from quire.protocol.errors import ModelError
from tests.loading.converted import convert, permute

# Where the float16 scales of a block lie; all other bytes may have any value.
SCALE_OFFSETS = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2_SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}


def assert_bitwise(found: Tensor, expected: np.ndarray) -> None:
    assert found.dtype == torch.float32
    assert np.array_equal(found.numpy().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(
    ("name", "by"),
    [(name, "the reference") for name in SCALE_OFFSETS]
    + [(name, "native") for name in DEQUANTIZED],
)
@pytest.mark.parametrize("num_blocks", [1, 37, 9000])
def test_random_blocks_are_dequantised_exactly(
    name: str, by: str, num_blocks: int, request: pytest.FixtureRequest
) -> None:
    """Every bit pattern of a block, in tensors below and above the size of a working chunk."""
    if by == "native":
        request.getfixturevalue("native")
    else:
        patch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
        patch.setattr("quire.loading.gguf.DEQUANTIZED", ())
    kind = gguf.GGMLQuantizationType[name]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(num_blocks)
    blocks = generator.integers(0, 256, (num_blocks, size), np.uint8)
    for offset in SCALE_OFFSETS[name]:
        scales = generator.normal(size=(num_blocks, 1)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8)
    found = dequantize(blocks.reshape(-1), name, (num_blocks, elements))
    assert_bitwise(found, gguf.quants.dequantize(blocks, kind))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_values_come_back(name: str) -> None:
    """Values that gguf quantised: right order and close to what went in."""
    kind = gguf.GGMLQuantizationType[name]
    values = np.random.default_rng(1).normal(size=(24, 64)).astype(np.float32)
    stored = gguf.quants.quantize(values, kind)
    found = dequantize(stored.reshape(-1), name, (24, 64))
    assert_bitwise(found, gguf.quants.dequantize(stored, kind))
    assert np.abs(found.numpy() - values).max() < 0.5


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_floating_types_keep_their_values(name: str) -> None:
    values = torch.randn(6, 8)
    dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
    stored = values.to(dtype).view(torch.uint8).numpy().reshape(-1)
    stored.flags.writeable = False
    found = dequantize(stored, name, (6, 8))
    assert found.dtype == dtype
    assert torch.equal(found, values.to(dtype))


def test_unsupported_type_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"IQ2_XS.*Q6_K") as caught:
        dequantize(np.zeros(74, np.uint8), "IQ2_XS", (1, 256))
    assert all(name in str(caught.value) for name in LOADABLE_TYPES)


@pytest.mark.parametrize(("heads", "shape"), [(4, (64, 24)), (2, (32, 24)), (3, (24,))])
def test_unpermute_undoes_the_converter(heads: int, shape: tuple[int, ...]) -> None:
    original = torch.randn(shape)
    permuted = torch.from_numpy(permute(original.numpy(), heads))
    assert torch.equal(unpermute(permuted, heads), original)


@pytest.mark.parametrize(
    ("arch", "class_name", "settings"),
    [
        ("llama", "Llama", SIZES),
        ("llama", "Llama", {**SIZES, "tie_word_embeddings": True, "attention_bias": True}),
        ("llama", "Mistral", {**SIZES, "head_dim": 32, "sliding_window": None}),
        ("qwen2", "Qwen2", SIZES),
        ("qwen3", "Qwen3", {**SIZES, "head_dim": 32}),
        ("gpt2", "GPT2", GPT2_SIZES),
        ("gpt2", "GPT2", {**GPT2_SIZES, "tie_word_embeddings": False}),
    ],
)
def test_converted_models_come_back(
    tmp_path: Path, arch: str, class_name: str, settings: dict[str, Any]
) -> None:
    """Names, rows and orientation of every tensor are again those of transformers."""
    reference_config = getattr(transformers, f"{class_name}Config")(**settings)
    model = transformers.AutoModelForCausalLM.from_config(reference_config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    path = convert(model, arch, tmp_path / "model.gguf")
    expected = dict(model.state_dict())
    if reference_config.tie_word_embeddings:
        del expected["lm_head.weight"]
    found = read_weights(ModelSource("m", "gguf", path))
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name

    config = load_model_config(str(path))
    assert config.num_heads == reference_config.num_attention_heads
    assert config.tie_word_embeddings == reference_config.tie_word_embeddings
    assert config.vocab_size == reference_config.vocab_size
    assert config.head_dim == (
        getattr(reference_config, "head_dim", None)
        or reference_config.hidden_size // reference_config.num_attention_heads
    )
    has_bias = class_name in ("Qwen2", "GPT2") or getattr(reference_config, "attention_bias", False)
    assert config.attention_bias == has_bias


def test_names_of_experts() -> None:
    """In a stack, and one by one as in the first files."""
    stack = transformers_name("llama", "blk.2.ffn_up_exps.weight")
    assert stack == "model.layers.2.block_sparse_moe.experts.{}.w3.weight"
    assert transformers_name("llama", "blk.2.ffn_up.7.weight") == stack.format(7)
    assert transformers_name("qwen2", "blk.2.ffn_up.7.weight") is None
    bias = transformers_name("deepseek2", "blk.3.exp_probs_b.bias")
    assert bias == "model.layers.3.mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize(
    ("shapes", "problem"),
    [
        ({"ffn_gate_exps": (4, 8)}, r"ffn_gate_exps.weight has shape \[4, 8\]"),
        ({"attn_k_b": (2, 4, 8)}, "must both be there"),
        ({"attn_k_b": (2, 4, 8), "attn_v_b": (8, 4)}, "three dimensions"),
        ({"attn_k_b": (2, 4, 8), "attn_v_b": (2, 8, 6)}, "differ in heads or rank"),
    ],
)
def test_stacks_that_do_not_fit(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], problem: str
) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "deepseek2")
    for name, shape in shapes.items():
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=problem):
        iter_weights(ModelSource("m", "gguf", path))


def test_names_outside_the_architecture() -> None:
    assert transformers_name("llama", "blk.0.attn_qkv.weight") is None
    assert transformers_name("gpt2", "blk.0.attn_q.weight") is None
    assert transformers_name("llama", "mm.0.weight") is None


def test_a_tensor_without_a_place_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("rope_freqs.weight", np.ones(4, np.float32))
    writer.add_tensor("blk.0.surprise.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"m\.gguf: tensor blk\.0\.surprise\.weight has no place"):
        iter_weights(ModelSource("m", "gguf", path))


def test_embedded_model_samples() -> None:
    """Some tensors of the embedded model: values by the gguf package, rows by transformers."""
    path = embedded_model_path()
    found = read_weights(ModelSource("m", "gguf", path))
    assert len(found) == 272
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    layout = LlamaTensorProcessor(config=heads)
    for theirs, ours in (
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("blk.0.attn_k.weight", "model.layers.0.self_attn.k_proj.weight"),
        ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight"),
        ("blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj.weight"),
        ("blk.29.ffn_down.weight", "model.layers.29.mlp.down_proj.weight"),
        ("blk.29.ffn_norm.weight", "model.layers.29.post_attention_layernorm.weight"),
    ):
        values = gguf.quants.dequantize(stored[theirs].data, stored[theirs].tensor_type)
        assert_bitwise(found[ours], np.ascontiguousarray(layout.process(values, theirs).weights))


@pytest.mark.slow
def test_embedded_model_against_transformers() -> None:
    """All tensors of the embedded model equal what transformers' own GGUF loader makes of them."""
    path = embedded_model_path()
    config = transformers.LlamaConfig(
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    expected = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    found = read_weights(ModelSource("m", "gguf", path))
    assert set(found) == set(expected)
    for name, tensor in found.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected[name]), name
