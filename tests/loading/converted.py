"""GGUF files of transformers models, as llama.cpp's converter makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """The reordering that llama.cpp's converter applies, row by row."""
    head_dim = len(weights) // num_heads
    rows = [
        head * head_dim + half * head_dim // 2 + i
        for head in range(num_heads)
        for i in range(head_dim // 2)
        for half in (0, 1)
    ]
    return weights[rows]


def convert(model: Any, arch: str, path: Path, kind: str | None = None) -> Path:
    """Write a transformers model as llama.cpp's converter does, with gguf's own table of names;
    matrices in blocks of a kind, if any."""
    config = model.config
    number = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if arch == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        if getattr(config, "head_dim", None):
            writer.add_key_length(config.head_dim)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if arch == "gpt2" and values.ndim == 2 and (".attn." in name or ".mlp." in name):
            values = values.T
        for part, heads in (
            ("q_proj", config.num_attention_heads),
            ("k_proj", getattr(config, "num_key_value_heads", 0)),
        ):
            if arch == "llama" and part in name:
                values = permute(values, heads)
        translated = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert translated is not None, name
        values = np.ascontiguousarray(values)
        if kind is None or values.ndim == 1:
            writer.add_tensor(translated, values)
        else:
            blocks = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(translated, gguf.quants.quantize(values, blocks), raw_dtype=blocks)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
