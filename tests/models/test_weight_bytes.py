"""Weights are counted as they will lie in memory, before anything is read or allocated."""

from __future__ import annotations

import json
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from quire.config.device import DeviceInfo, cpu_memory
from quire.config.embedded import embedded_model_path
from quire.config.model import ModelConfig, load_model_config
from quire.config.options import EngineOptions
from quire.files.gguf import GGUFFile
from quire.layers.quantization.unquantized import Unquantized
from quire.models.loader import count_weight_bytes, held_weight_bytes, load_model
from quire.protocol.errors import OptionError
from quire.worker.memory import check_weights_fit
from tests.models.four_bits import GROUP, FourBits
from tests.models.reference import random_model, save_safetensors

GIB = 1 << 30
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
LAYER = 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672)
"""Weights in the matrices of a layer."""


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, "int8")],
)
@pytest.mark.parametrize("family", ["llama", "qwen3", "opt", "gpt2"])
def test_the_count_is_what_a_model_holds(
    family: str, dtype: torch.dtype, quantization: str | None, tmp_path: Path
) -> None:
    save_safetensors(random_model(family), tmp_path)
    config = load_model_config(str(tmp_path))
    model = load_model(config, dtype=dtype, device="cpu", quantization=quantization)
    counted = count_weight_bytes(config, dtype=dtype, device="cpu", quantization=quantization)
    assert counted == held_weight_bytes(model)


@pytest.mark.parametrize("quantization", [None, "int8", "gguf", "gguf-a16"])
def test_a_gguf_file_counts_as_it_is_kept(quantization: str | None) -> None:
    config = load_model_config(str(embedded_model_path()))
    options = {"dtype": torch.float32, "device": "cpu", "quantization": quantization}
    counted = count_weight_bytes(config, **options)  # type: ignore[arg-type]
    assert counted == held_weight_bytes(load_model(config, **options))  # type: ignore[arg-type]


@pytest.fixture
def large(tmp_path: Path) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    return load_model_config(str(tmp_path))


def test_a_large_model_in_several_formats(large: ModelConfig) -> None:
    ends = 2 * 128256 * 8192
    whole = count_weight_bytes(large, dtype=torch.bfloat16, device="cuda")
    assert 2 * (80 * LAYER + ends) < whole < 2.001 * (80 * LAYER + ends)
    int8 = count_weight_bytes(large, dtype=torch.float32, device="cpu", quantization="int8")
    # A scale of two bytes for every 32.
    assert 1.0625 * (80 * LAYER + ends) < int8 < 1.064 * (80 * LAYER + ends)
    packed, exact = FourBits(), Unquantized()
    four_bits = count_weight_bytes(
        large,
        dtype=torch.bfloat16,
        device="cuda",
        method_for=lambda path: packed if ".layers." in path else exact,
    )
    expected = (0.5 + 2 / GROUP) * 80 * LAYER + 2 * ends
    assert expected < four_bits < 1.001 * expected
    assert four_bits < 46 * GIB < 130 * GIB < whole


def save_header(path: Path, num_layers: int) -> Path:
    """A GGUF file with layers of Llama 70B in Q4_K; its tensors are a hole in the file."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(num_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(8192)
    writer.add_feed_forward_length(28672)
    writer.add_head_count(64)
    writer.add_head_count_kv(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list([f"<{i}>" for i in range(1024)])
    kind = gguf.GGMLQuantizationType.Q4_K
    elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]

    def add(name: str, *shape: int) -> None:
        if len(shape) == 1:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * shape[0])
        else:
            stored = (shape[0], shape[1] // elements * block_bytes)
            num_bytes = stored[0] * stored[1]
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), num_bytes, kind)

    add("token_embd.weight", 1024, 8192)
    add("output.weight", 1024, 8192)
    add("output_norm.weight", 8192)
    for layer in range(num_layers):
        add(f"blk.{layer}.attn_norm.weight", 8192)
        add(f"blk.{layer}.attn_q.weight", 8192, 8192)
        add(f"blk.{layer}.attn_k.weight", 1024, 8192)
        add(f"blk.{layer}.attn_v.weight", 1024, 8192)
        add(f"blk.{layer}.attn_output.weight", 8192, 8192)
        add(f"blk.{layer}.ffn_norm.weight", 8192)
        add(f"blk.{layer}.ffn_gate.weight", 28672, 8192)
        add(f"blk.{layer}.ffn_up.weight", 28672, 8192)
        add(f"blk.{layer}.ffn_down.weight", 8192, 28672)
    infos = list(writer.tensors[0].values())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    size = path.stat().st_size + sum(info.nbytes + 32 for info in infos)
    os.truncate(path, size)
    return path


def test_four_bits_that_fit_are_not_refused_as_floats(tmp_path: Path) -> None:
    """As many layers as fill half of the free memory in 4 bits, and several times it in float32."""
    _, free = cpu_memory()
    num_layers = max(1, int(0.5 * free / (LAYER * 144 / 256)))
    config = load_model_config(str(save_header(tmp_path / "large.gguf", num_layers)))
    device = DeviceInfo("cpu", "this machine", cpu_memory()[0], 1)

    def check(quantization: str | None) -> int:
        options = EngineOptions().replace(dtype="float32", quantization=quantization)
        counted = count_weight_bytes(
            config, dtype=torch.float32, device="cpu", quantization=quantization
        )
        check_weights_fit(counted, options, config, device)
        return counted

    stored = sum(tensor.nbytes for tensor in GGUFFile(config.source.path).tensors.values())
    # Scales of groups are unpacked to whole bytes.
    assert stored < check("gguf") < 1.04 * stored
    with pytest.raises(OptionError, match=r"GiB in float32, but this machine"):
        check(None)
    with pytest.raises(OptionError) as caught:
        check_weights_fit(
            4 * stored,
            EngineOptions().replace(dtype="float32", quantization="gguf"),
            config,
            device,
        )
    assert "GiB in gguf" in str(caught.value) and "halves" not in str(caught.value)
