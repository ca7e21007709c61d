"""GGUF files of transformers models, as llama.cpp's converter makes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

UNQUANTIZED = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "norm.weight", ".bias")
"""Endings of tensors that llama.cpp keeps in F32."""
LARGEST_SCALE = 63
"""Of the whole-numbered scales in a Q4_K block."""

Join = Callable[[list[np.ndarray]], np.ndarray]
Stored = tuple[dict[str, np.ndarray], Join]
"""The tensors of a file that one of transformers becomes, and the way back."""


def permuted_rows(num_rows: int, num_heads: int) -> list[int]:
    head_dim = num_rows // num_heads
    return [
        head * head_dim + half * head_dim // 2 + i
        for head in range(num_heads)
        for i in range(head_dim // 2)
        for half in (0, 1)
    ]


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """The reordering that llama.cpp's converter applies, row by row."""
    return weights[permuted_rows(len(weights), num_heads)]


def to_q4_k(values: np.ndarray) -> np.ndarray:
    """Blocks of 256 numbers in 4 bits, with a scale and a minimum of 6 bits for every 32."""
    parts = values.astype(np.float32).reshape(-1, 8, 32)
    minima = np.maximum(-parts.min(-1), 0)
    scales = (parts.max(-1) + minima) / 15
    d = (scales.max(-1, keepdims=True) / LARGEST_SCALE).astype(np.float16)
    dmin = (minima.max(-1, keepdims=True) / LARGEST_SCALE).astype(np.float16)
    sc = np.clip(np.round(scales / np.maximum(d, 1e-6)), 1, LARGEST_SCALE).astype(np.uint8)
    mn = np.clip(np.round(minima / np.maximum(dmin, 1e-6)), 0, LARGEST_SCALE).astype(np.uint8)
    offset = (dmin.astype(np.float32) * mn)[..., None]
    step = (d.astype(np.float32) * sc)[..., None]
    numbers = np.clip(np.round((parts + offset) / step), 0, 15).astype(np.uint8)
    packed = numbers.reshape(-1, 4, 2, 32)
    nibbles = (packed[:, :, 0] | packed[:, :, 1] << 4).reshape(-1, 128)
    first = sc[:, :4] | (sc[:, 4:] >> 4) << 6
    second = mn[:, :4] | (mn[:, 4:] >> 4) << 6
    rest = (sc[:, 4:] & 15) | (mn[:, 4:] & 15) << 4
    halves = [d.view(np.uint8), dmin.view(np.uint8)]
    blocks = np.concatenate([*halves, first, second, rest, nibbles], axis=1)
    return blocks.reshape(*values.shape[:-1], -1)


def blocks_of(values: np.ndarray, kind: str) -> np.ndarray:
    if kind == "Q4_K":
        return to_q4_k(values)
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])


def convert(
    model: Any, arch: str, path: Path, kind: str | None = None, split_latent: bool = True
) -> Path:
    """Write a transformers model as llama.cpp's converter does, with gguf's own table of names;
    matrices in blocks of a kind, if any. The model is left with the numbers of the file."""
    config = model.config
    number = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, arch)
    _write_metadata(writer, config, arch, split_latent)

    def translate(name: str) -> str:
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        return str(found)

    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored, join = _stored(name, tensor.numpy(), config, arch, split_latent)
        numbers = []
        for own_name, values in stored.items():
            translated = translate(own_name)
            values = np.ascontiguousarray(values)
            if kind is None or values.ndim == 1 or translated.endswith(UNQUANTIZED):
                writer.add_tensor(translated, values)
                numbers.append(values)
                continue
            blocks, block_kind = blocks_of(values, kind), gguf.GGMLQuantizationType[kind]
            writer.add_tensor(translated, blocks, raw_dtype=block_kind)
            numbers.append(gguf.quants.dequantize(blocks, block_kind))
        tensor.copy_(torch.from_numpy(np.ascontiguousarray(join(numbers))))
    for name, factors in _rope_factors(config).items():
        writer.add_tensor(name, np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stored(name: str, values: np.ndarray, config: Any, arch: str, split_latent: bool) -> Stored:
    """Under names that gguf's table knows."""
    if arch == "gpt2" and values.ndim == 2 and (".attn." in name or ".mlp." in name):
        return {name: values.T}, lambda one: one[0].T
    if name.endswith(".sinks"):
        return {f"{name}.weight": values}, lambda one: one[0]
    if arch == "gpt-oss" and ".experts." in name:
        return _gpt_oss_experts(name, values)
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(values, 2, axis=1)
        prefix = name.removesuffix("gate_up_proj")
        stacks = {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}
        return stacks, lambda both: np.concatenate(both, axis=1)
    if name.endswith("experts.down_proj"):
        return {f"{name}.weight": values}, lambda one: one[0]
    if name.endswith("e_score_correction_bias"):
        return {name.replace("gate.e_score_correction_bias", "e_score_correction.bias"): values}, (
            lambda one: one[0]
        )
    if name.endswith("shared_expert_gate.weight"):
        return {name: values[0]}, lambda one: one[0][None]
    if name.endswith("kv_b_proj.weight") and split_latent:
        by_head = values.reshape(config.num_attention_heads, -1, values.shape[1])
        keys, rest = np.split(by_head, [config.qk_nope_head_dim], axis=1)
        halves = {
            name.replace("kv_b_proj", "k_b_proj"): keys.transpose(0, 2, 1),
            name.replace("kv_b_proj", "v_b_proj"): rest,
        }

        def join(both: list[np.ndarray]) -> np.ndarray:
            by_head = np.concatenate([both[0].transpose(0, 2, 1), both[1]], axis=1)
            return by_head.reshape(values.shape)

        return halves, join
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return {name: values + 1}, lambda one: one[0] - 1
    for part, heads in (
        ("q_proj", config.num_attention_heads),
        ("k_proj", getattr(config, "num_key_value_heads", 0)),
    ):
        if arch == "llama" and part in name:
            rows = permuted_rows(len(values), heads)
            return {name: values[rows]}, lambda one, rows=rows: one[0][np.argsort(rows)]
    return {name: values}, lambda one: one[0]


def _gpt_oss_experts(name: str, values: np.ndarray) -> Stored:
    """transformers has matrices as [inputs, outputs], with gates and ups in turns."""
    is_bias, ending = name.endswith("_bias"), "bias" if name.endswith("_bias") else "weight"

    def turned(one: np.ndarray) -> np.ndarray:
        return one if is_bias else one.swapaxes(1, 2)

    base = name.removesuffix("_bias")
    if base.endswith("down_proj"):
        return {f"{base}.{ending}": turned(values)}, lambda one: turned(one[0])
    prefix = base.removesuffix("gate_up_proj")
    halves = {
        f"{prefix}gate_proj.{ending}": turned(values[..., 0::2]),
        f"{prefix}up_proj.{ending}": turned(values[..., 1::2]),
    }

    def join(both: list[np.ndarray]) -> np.ndarray:
        return np.stack([turned(one) for one in both], -1).reshape(values.shape)

    return halves, join


def _write_metadata(writer: gguf.GGUFWriter, config: Any, arch: str, split_latent: bool) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if arch == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    ropes = config.rope_parameters
    rope = ropes.get("full_attention", ropes)
    writer.add_rope_freq_base(rope["rope_theta"])
    _write_scaling(writer, rope, arch)
    _write_experts(writer, config, arch)
    if arch == "deepseek2":
        _write_latent(writer, config, split_latent)
        return
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None)
    if head_dim and arch != "phi3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if arch == "phi3":
        whole = config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(whole * rope.get("partial_rotary_factor", 1.0)))
    if arch in ("phi3", "gemma2", "gemma3", "gpt-oss"):
        writer.add_sliding_window(config.sliding_window or 0)
    if arch == "gemma2" and config.attn_logit_softcapping:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if arch in ("gemma2", "gemma3") and config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "gemma3":
        slides = [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_sliding_window_pattern(slides)
        writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])


def _write_scaling(writer: gguf.GGUFWriter, rope: dict[str, Any], arch: str) -> None:
    kind = rope["rope_type"]
    if kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
    elif kind != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if arch == "deepseek2" and "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _rope_factors(config: Any) -> dict[str, list[float]]:
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return {}
    return {f"rope_factors_{kind}.weight": rope[f"{kind}_factor"] for kind in ("long", "short")}


def _write_experts(writer: gguf.GGUFWriter, config: Any, arch: str) -> None:
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    count = next((n for name in names if (n := getattr(config, name, None))), 0)
    if not count:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if arch == "llama":
        return
    if arch == "gpt-oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        return
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if arch != "deepseek2":
        return
    is_v3 = config.model_type == "deepseek_v3"
    writer.add_expert_gating_func(
        gguf.ExpertGatingFuncType.SIGMOID if is_v3 else gguf.ExpertGatingFuncType.SOFTMAX
    )
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if is_v3 and config.norm_topk_prob:
        writer.add_expert_weights_norm(True)
    if config.n_group:
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def _write_latent(writer: gguf.GGUFWriter, config: Any, split: bool) -> None:
    """The halves of `kv_b_proj` came with keys as long as latents, and one head of them."""
    rank, rope_dim = config.kv_lora_rank, config.qk_rope_head_dim
    key_dim = config.qk_nope_head_dim + rope_dim
    writer.add_head_count_kv(1 if split else config.num_attention_heads)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rope_dim if split else key_dim)
    writer.add_value_length(rank if split else config.v_head_dim)
    if split:
        writer.add_key_length_mla(key_dim)
        writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(rope_dim)
