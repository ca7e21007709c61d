"""Weights of a GGUF file as transformers names and lays them out, dequantised."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.config.gguf_model import gguf_architecture, translate_gguf
from quire.files.gguf import LOADABLE_TYPES, GGUFFile, GGUFTensor
from quire.kernels import cpu
from quire.kernels.cpu.dequantize import DEQUANTIZED
from quire.kernels.cpu.dequantize import dequantize as dequantize_natively
from quire.kernels.torch.gguf_blocks import BLOCK_SIZES, BlockRows, dequantize_blocks
from quire.kernels.torch.gguf_groups import GROUPED_KINDS
from quire.kernels.torch.linear import KINDS
from quire.loading.dtypes import TORCH_FLOATS
from quire.protocol.errors import ModelError

_ROTARY_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GPT2_LAYER = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_GEMMA_LAYER = {
    **_ROTARY_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_LAYERS: dict[str, dict[str, str]] = {
    "llama": {**_ROTARY_LAYER, **_MIXTRAL_EXPERTS},
    "qwen2": _ROTARY_LAYER,
    "qwen2moe": {
        **_ROTARY_LAYER,
        **_EXPERTS,
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    },
    "qwen3": _ROTARY_LAYER,
    "qwen3moe": {**_ROTARY_LAYER, **_EXPERTS},
    "gemma2": _GEMMA_LAYER,
    "gemma3": _GEMMA_LAYER,
    "phi3": {
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    },
    "deepseek2": {
        **_ROTARY_LAYER,
        **_EXPERTS,
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "exp_probs_b": "mlp.gate",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    },
    "gpt-oss": {
        **_ROTARY_LAYER,
        **_EXPERTS,
        "attn_sinks": "self_attn.sinks",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
    "gpt2": _GPT2_LAYER,
}
"""Module in a layer of a GGUF file -> module in transformers. "{}" is the number of an expert: GGUF
stacks the matrices of all of them, and only the first files kept them apart."""
_ROTARY_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GPT2_TOP = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
# Rotary frequencies are part of the configuration, not of the weights.
_NOT_WEIGHTS = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd\.weight"
)
_EXPERT_TENSOR = re.compile(r"blk\.(\d+)\.(ffn_(?:gate|up|down))\.(\d+)\.weight")
_HALF_OF_LATENT = re.compile(r"blk\.(\d+)\.attn_(k|v)_b\.weight")
_GEMMA_NORM = re.compile(r".*norm\.weight")
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP_TENSOR = re.compile(r"(\w+)\.(weight|bias)")
# transformers keeps these GPT-2 matrices as [in, out], GGUF as [out, in].
_GPT2_TRANSPOSED = re.compile(r"blk\.\d+\.(attn_qkv|attn_output|ffn_up|ffn_down)\.weight")
_LLAMA_PERMUTED = re.compile(r"blk\.\d+\.attn_(q|k)\.(weight|bias)")


MIN_ALIGNMENT = 4
"""Bytes; what begins elsewhere cannot be viewed as numbers."""


def none_of_them(name: str) -> bool:
    return False


@dataclass(frozen=True)
class GGUFMatrix:
    """A matrix in a mapped file. Parts of it are read, put in transformers' order and, unless
    blocks are kept, dequantised when they are asked for."""

    stored: Tensor
    """uint8 [outputs, bytes], a view of the file."""
    kind: str
    shape: tuple[int, int]
    keeps_blocks: bool
    head_rows: int | None
    """Rows of a head whose two halves llama.cpp has interleaved; None where it has not."""

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor | BlockRows:
        outputs, inputs = part
        rows = self.stored[outputs]
        if self.head_rows is not None and len(rows):
            assert not (outputs.start or 0) % self.head_rows and not len(rows) % self.head_rows
            rows = unpermute(rows, len(rows) // self.head_rows)
        if self.kind in TORCH_FLOATS:
            return rows.view(TORCH_FLOATS[self.kind])[:, inputs]
        some = BlockRows(self.kind, rows, self.shape[1])[slice(None), inputs]
        if self.keeps_blocks or isinstance(some, Tensor):
            return some
        return dequantize(some.rows.contiguous().view(-1).numpy(), self.kind, some.shape)


@dataclass(frozen=True)
class GGUFLatent:
    """DeepSeek's matrix that makes keys and values of latents. llama.cpp stores it in halves: that
    of keys transposed, [heads, rank, key_dim], that of values as [heads, value_dim, rank]."""

    keys: GGUFMatrix
    values: GGUFMatrix
    num_heads: int

    @property
    def shape(self) -> tuple[int, int]:
        rank = self.values.shape[1]
        return self.num_heads * self.keys.shape[1] + self.values.shape[0], rank

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        outputs, inputs = part
        keys, values = self.keys[:, :], self.values[:, :]
        assert isinstance(keys, Tensor) and isinstance(values, Tensor), "no blocks are kept"
        rank = self.values.shape[1]
        by_head = (
            keys.view(self.num_heads, rank, -1).transpose(1, 2),
            values.view(self.num_heads, -1, rank),
        )
        return torch.cat(by_head, dim=1).view(-1, rank)[outputs, inputs]


@dataclass(frozen=True)
class _Piece:
    """What one tensor of transformers is in a file."""

    name: str
    """In transformers."""
    info: GGUFTensor
    """A tensor of the file, or an expert's part of one."""
    second: GGUFTensor | None = None
    """The other half of a matrix that is stored in two."""


def iter_gguf_weights(
    path: Path,
    keeps_blocks: Callable[[str], bool] = none_of_them,
    skips: Callable[[str], bool] = none_of_them,
) -> Iterator[tuple[str, Tensor | GGUFMatrix | GGUFLatent]]:
    """Names and values of all weights that it does not skip, one tensor at a time, in the order of
    the file.

    Matrices in formats that kernels compute with stay as they are stored where `keeps_blocks`
    is true of the name.
    """
    file = GGUFFile(path)
    pieces = _pieces(file)
    config = translate_gguf(file)
    mapped = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    return (
        (piece.name, _read(file, mapped, config, piece, keeps_blocks(piece.name)))
        for piece in pieces
        if not skips(piece.name)
    )


def stored_blocks(path: Path) -> dict[str, GGUFTensor]:
    """The tensors that can stay as they are stored, by their names in transformers."""
    file = GGUFFile(path)
    return {piece.name: piece.info for piece in _pieces(file) if _has_blocks(file, piece)}


def _pieces(file: GGUFFile) -> list[_Piece]:
    """All weights of a file, in its order."""
    pieces: list[_Piece] = []
    unknown: list[str] = []
    architecture = gguf_architecture(file)
    for name, info in file.tensors.items():
        if _NOT_WEIGHTS.fullmatch(name):
            continue
        if architecture == "deepseek2" and (half := _HALF_OF_LATENT.fullmatch(name)):
            pieces += _latent_piece(file, info, half)
            continue
        translated = transformers_name(architecture, name)
        if translated is None:
            unknown.append(name)
        elif "{}" in translated:
            pieces += _experts(file, translated, info)
        else:
            pieces.append(_Piece(translated, info))
    if unknown:
        raise ModelError(
            f"{file.path}: tensor {unknown[0]} has no place in a {architecture} model"
            + (f" (nor have {len(unknown) - 1} others)" if len(unknown) > 1 else "")
            + "; use a file converted by llama.cpp for this architecture."
        )
    return pieces


def _experts(file: GGUFFile, translated: str, info: GGUFTensor) -> Iterator[_Piece]:
    """The matrices of a stack, or their biases."""
    is_bias = translated.endswith(".bias")
    if len(info.shape) != (2 if is_bias else 3):
        raise ModelError(
            f"{file.path}: tensor {info.name} has shape {list(info.shape)}, but experts are "
            f"stacked in {'two' if is_bias else 'three'} dimensions; download or convert the file "
            "again."
        )
    count = info.shape[0]
    nbytes = info.nbytes // count
    for expert in range(count):
        place = info.offset + expert * nbytes
        own = replace(info, shape=info.shape[1:], offset=place, nbytes=nbytes)
        yield _Piece(translated.format(expert), own)


def _latent_piece(file: GGUFFile, info: GGUFTensor, match: re.Match[str]) -> Iterator[_Piece]:
    """Made when the half of keys comes. Some files have the whole matrix as well."""
    layer, half = match.groups()
    if f"blk.{layer}.attn_kv_b.weight" in file.tensors or half == "v":
        return
    values = file.tensors.get(f"blk.{layer}.attn_v_b.weight")
    halves = (info, values)
    if values is None or not all(half is not None and len(half.shape) == 3 for half in halves):
        raise ModelError(
            f"{file.path}: tensors blk.{layer}.attn_k_b.weight and attn_v_b.weight must both be "
            "there, with three dimensions; download or convert the file again."
        )
    (heads, rank, _), (value_heads, _, value_rank) = info.shape, values.shape
    if (heads, rank) != (value_heads, value_rank):
        raise ModelError(
            f"{file.path}: tensors blk.{layer}.attn_k_b.weight {list(info.shape)} and "
            f"attn_v_b.weight {list(values.shape)} differ in heads or rank; convert the file again."
        )
    yield _Piece(f"model.layers.{layer}.self_attn.kv_b_proj.weight", info, values)


def _has_blocks(file: GGUFFile, piece: _Piece) -> bool:
    """Whether kernels compute with a tensor as it is stored. GPT-2's matrices are transposed, which
    blocks cannot be."""
    info = piece.info
    is_matrix = len(info.shape) == 2 and piece.second is None
    is_known = info.type in KINDS or info.type in GROUPED_KINDS
    return is_known and is_matrix and gguf_architecture(file) != "gpt2"


def transformers_name(architecture: str, name: str) -> str | None:
    """The transformers name of a GGUF tensor, with "{}" for the number of an expert in a stack;
    None if the architecture has no such tensor."""
    is_gpt2 = architecture == "gpt2"
    parts = _LAYERS[architecture]
    if match := _EXPERT_TENSOR.fullmatch(name):
        layer, part, expert = match.groups()
        translated = parts.get(f"{part}_exps")
        return translated and f"model.layers.{layer}.{translated.format(expert)}.weight"
    if match := _LAYER_TENSOR.fullmatch(name):
        layer, part, kind = match.groups()
        translated = parts.get(part)
        if part == "exp_probs_b":
            kind = "e_score_correction_bias"
        prefix = "transformer.h" if is_gpt2 else "model.layers"
        return translated and f"{prefix}.{layer}.{translated}.{kind}"
    if match := _TOP_TENSOR.fullmatch(name):
        translated = (_GPT2_TOP if is_gpt2 else _ROTARY_TOP).get(match[1])
        return translated and f"{translated}.{match[2]}"
    return None


def unpermute(tensor: Tensor, num_heads: int) -> Tensor:
    """Undo llama.cpp's reordering of query or key rows.

    Its rotary embedding turns neighbouring rows of a head together, transformers' turns row i with
    row i + head_dim / 2; so llama.cpp interleaves the two halves of each head.
    """
    halves = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _read(
    file: GGUFFile, mapped: Tensor, config: dict[str, Any], piece: _Piece, keeps_blocks: bool
) -> Tensor | GGUFMatrix | GGUFLatent:
    info, architecture = piece.info, gguf_architecture(file)
    is_gpt2, head_rows = architecture == "gpt2", _head_rows(file, config, info)
    if piece.second is not None:
        keys, values = (_matrix(mapped, half) for half in (info, piece.second))
        return GGUFLatent(keys, values, info.shape[0])
    if len(info.shape) == 2 and info.type in LOADABLE_TYPES and not is_gpt2:
        kept = keeps_blocks and _has_blocks(file, piece)
        return _matrix(mapped, info, kept, head_rows)
    try:
        stored = mapped[info.offset : info.offset + info.nbytes].numpy()
        tensor = dequantize(stored, info.type, info.shape)
    except ModelError as error:
        raise ModelError(f"{file.path}: tensor {info.name}: {error}") from error
    if is_gpt2 and _GPT2_TRANSPOSED.fullmatch(info.name):
        return tensor.t()
    if architecture in ("gemma2", "gemma3") and _GEMMA_NORM.fullmatch(info.name):
        return tensor.float() - 1  # llama.cpp stores what they multiply with
    if piece.name.endswith(".shared_expert_gate.weight"):
        return tensor.view(1, -1)
    return tensor if head_rows is None else unpermute(tensor, info.shape[0] // head_rows)


def _matrix(
    mapped: Tensor, info: GGUFTensor, keeps_blocks: bool = False, head_rows: int | None = None
) -> GGUFMatrix:
    """The rows of a matrix, or of those of a stack one below the other."""
    num_rows = prod(info.shape[:-1])
    stored = mapped[info.offset : info.offset + info.nbytes].view(num_rows, -1)
    if info.offset % MIN_ALIGNMENT:
        stored = stored.clone()
    return GGUFMatrix(stored, info.type, (num_rows, info.shape[-1]), keeps_blocks, head_rows)


def _head_rows(file: GGUFFile, config: dict[str, Any], info: GGUFTensor) -> int | None:
    """See `GGUFMatrix`."""
    match = _LLAMA_PERMUTED.fullmatch(info.name)
    if match is None or gguf_architecture(file) != "llama":
        return None
    heads: int = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
    if heads < 1 or info.shape[0] % (2 * heads):
        raise ModelError(
            f"{file.path}: tensor {info.name} has {info.shape[0]} rows, which {heads} heads do "
            "not divide; download or convert the file again."
        )
    return info.shape[0] // heads


def dequantize(data: NDArray[np.uint8], type_name: str, shape: tuple[int, ...]) -> Tensor:
    """Turn stored bytes into numbers, exactly as llama.cpp defines them.

    Quantised types become float32; F16 and BF16 stay what they are.
    """
    if type_name in TORCH_FLOATS:
        # The copy detaches the tensor from the read-only mapping of the file.
        return torch.from_numpy(data.copy()).view(TORCH_FLOATS[type_name]).view(shape)
    if type_name not in BLOCK_SIZES:
        raise ModelError(
            f"GGUF type {type_name} is not supported; use a file with {', '.join(LOADABLE_TYPES)}."
        )
    if type_name in DEQUANTIZED and cpu.available()[0]:
        return dequantize_natively(data, type_name).view(shape)
    blocks = torch.from_numpy(data.copy()).view(-1, BLOCK_SIZES[type_name][1])
    return dequantize_blocks(blocks, type_name).view(shape)
