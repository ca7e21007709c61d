"""Weights of a GGUF file as transformers names and lays them out, dequantised."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from quire.kernels.torch.linear import KINDS
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
_ROTARY_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_GPT2_TOP = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
# Rotary frequencies are part of the configuration, not of the weights.
_NOT_WEIGHTS = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")
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
        if self.kind in _FLOAT_TYPES:
            return rows.view(_FLOAT_TYPES[self.kind])[:, inputs]
        some = BlockRows(self.kind, rows, self.shape[1])[slice(None), inputs]
        if self.keeps_blocks or isinstance(some, Tensor):
            return some
        return dequantize(some.rows.contiguous().view(-1).numpy(), self.kind, some.shape)


def iter_gguf_weights(
    path: Path,
    keeps_blocks: Callable[[str], bool] = none_of_them,
    skips: Callable[[str], bool] = none_of_them,
) -> Iterator[tuple[str, Tensor | GGUFMatrix]]:
    """Names and values of all weights that it does not skip, one tensor at a time, in the order of
    the file.

    Matrices in formats that kernels compute with stay as they are stored where `keeps_blocks`
    is true of the name.
    """
    file = GGUFFile(path)
    names = _translated_names(file)
    config = translate_gguf(file)
    mapped = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    return (
        (translated, _read(file, mapped, config, file.tensors[name], keeps_blocks(translated)))
        for name, translated in names.items()
        if not skips(translated)
    )


def stored_blocks(path: Path) -> dict[str, GGUFTensor]:
    """The tensors that can stay as they are stored, by their names in transformers."""
    file = GGUFFile(path)
    return {
        translated: file.tensors[name]
        for name, translated in _translated_names(file).items()
        if _has_blocks(file, file.tensors[name])
    }


def _translated_names(file: GGUFFile) -> dict[str, str]:
    architecture = gguf_architecture(file)
    names = {
        name: transformers_name(architecture, name)
        for name in file.tensors
        if not _NOT_WEIGHTS.fullmatch(name)
    }
    unknown = [name for name, translated in names.items() if translated is None]
    if unknown:
        raise ModelError(
            f"{file.path}: tensor {unknown[0]} has no place in a {architecture} model"
            + (f" (nor have {len(unknown) - 1} others)" if len(unknown) > 1 else "")
            + "; use a file converted by llama.cpp for this architecture."
        )
    return {name: translated for name, translated in names.items() if translated is not None}


def _has_blocks(file: GGUFFile, info: GGUFTensor) -> bool:
    """Whether kernels compute with a tensor as it is stored. GPT-2's matrices are transposed, which
    blocks cannot be."""
    return info.type in KINDS and len(info.shape) == 2 and gguf_architecture(file) != "gpt2"


def transformers_name(architecture: str, name: str) -> str | None:
    """The transformers name of a GGUF tensor; None if the architecture has no such tensor."""
    is_gpt2 = architecture == "gpt2"
    if match := _LAYER_TENSOR.fullmatch(name):
        layer, part, kind = match.groups()
        translated = (_GPT2_LAYER if is_gpt2 else _ROTARY_LAYER).get(part)
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
    file: GGUFFile, mapped: Tensor, config: dict[str, Any], info: GGUFTensor, keeps_blocks: bool
) -> Tensor | GGUFMatrix:
    is_gpt2, head_rows = gguf_architecture(file) == "gpt2", _head_rows(file, config, info)
    if len(info.shape) == 2 and info.type in LOADABLE_TYPES and not is_gpt2:
        stored = mapped[info.offset : info.offset + info.nbytes].view(info.shape[0], -1)
        if info.offset % MIN_ALIGNMENT:
            stored = stored.clone()
        shape = (info.shape[0], info.shape[1])
        kept = keeps_blocks and _has_blocks(file, info)
        return GGUFMatrix(stored, info.type, shape, kept, head_rows)
    try:
        tensor = dequantize(file.data(info.name), info.type, info.shape)
    except ModelError as error:
        raise ModelError(f"{file.path}: tensor {info.name}: {error}") from error
    if is_gpt2 and _GPT2_TRANSPOSED.fullmatch(info.name):
        return tensor.t()
    return tensor if head_rows is None else unpermute(tensor, info.shape[0] // head_rows)


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
    if type_name in _FLOAT_TYPES:
        # The copy detaches the tensor from the read-only mapping of the file.
        return torch.from_numpy(data.copy()).view(_FLOAT_TYPES[type_name]).view(shape)
    if type_name not in BLOCK_SIZES:
        raise ModelError(
            f"GGUF type {type_name} is not supported; use a file with {', '.join(LOADABLE_TYPES)}."
        )
    if type_name in DEQUANTIZED and cpu.available()[0]:
        return dequantize_natively(data, type_name).view(shape)
    blocks = torch.from_numpy(data.copy()).view(-1, BLOCK_SIZES[type_name][1])
    return dequantize_blocks(blocks, type_name).view(shape)


_FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
