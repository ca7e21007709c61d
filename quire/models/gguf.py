"""Weights of a GGUF file as transformers names and lays them out, dequantised."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.config.gguf import LOADABLE_TYPES, TENSOR_TYPES, GGUFFile, GGUFTensor
from quire.config.gguf_model import gguf_architecture, translate_gguf
from quire.protocol.errors import ModelError

# Small enough for the intermediate results of a chunk to stay in a core's cache.
CHUNK_ELEMENTS = 1 << 18

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


def iter_gguf_weights(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and values of all weights, one tensor at a time, in the order of the file."""
    file = GGUFFile(path)
    architecture = gguf_architecture(file)
    names = {
        name: transformers_name(architecture, name)
        for name in file.tensors
        if not _NOT_WEIGHTS.fullmatch(name)
    }
    unknown = [name for name, translated in names.items() if translated is None]
    if unknown:
        raise ModelError(
            f"{path}: tensor {unknown[0]} has no place in a {architecture} model"
            + (f" (nor have {len(unknown) - 1} others)" if len(unknown) > 1 else "")
            + "; use a file converted by llama.cpp for this architecture."
        )
    config = translate_gguf(file)
    return (
        (translated, _read_tensor(file, config, file.tensors[name]))
        for name, translated in names.items()
        if translated is not None
    )


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


def _read_tensor(file: GGUFFile, config: dict[str, Any], info: GGUFTensor) -> Tensor:
    architecture = gguf_architecture(file)
    try:
        tensor = dequantize(file.data(info.name), info.type, info.shape)
    except ModelError as error:
        raise ModelError(f"{file.path}: tensor {info.name}: {error}") from error
    if architecture == "llama" and (match := _LLAMA_PERMUTED.fullmatch(info.name)):
        heads = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
        if heads < 1 or info.shape[0] % (2 * heads):
            raise ModelError(
                f"{file.path}: tensor {info.name} has {info.shape[0]} rows, which {heads} heads do "
                "not divide; download or convert the file again."
            )
        return unpermute(tensor, heads)
    if architecture == "gpt2" and _GPT2_TRANSPOSED.fullmatch(info.name):
        return tensor.t()
    return tensor


def dequantize(data: NDArray[np.uint8], type_name: str, shape: tuple[int, ...]) -> Tensor:
    """Turn stored bytes into numbers, exactly as llama.cpp defines them.

    Quantised types become float32; F16 and BF16 stay what they are.
    """
    if type_name in _FLOAT_TYPES:
        # The copy detaches the tensor from the read-only mapping of the file.
        return torch.from_numpy(data.copy()).view(_FLOAT_TYPES[type_name]).view(shape)
    if type_name not in _BLOCK_DECODERS:
        raise ModelError(
            f"GGUF type {type_name} is not supported; use a file with {', '.join(LOADABLE_TYPES)}."
        )
    decode = _BLOCK_DECODERS[type_name]
    block_elements, block_bytes = _BLOCK_SIZES[type_name]
    blocks = torch.from_numpy(data.copy()).view(-1, block_bytes)
    output = torch.empty(len(blocks), block_elements)
    step = CHUNK_ELEMENTS // block_elements
    for start in range(0, len(blocks), step):
        decode(blocks[start : start + step], output[start : start + step])
    return output.view(shape)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of every block, as a float32 column."""
    return blocks[:, start : start + 2].view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[n, g, b] bytes -> [n, g, 2, b]: all low halves of a group, then all high halves."""
    return torch.stack((packed & 15, packed >> 4), dim=2)


def _bits(packed: Tensor, num_fields: int, width: int) -> Tensor:
    """[n, g, b] bytes -> [n, g, num_fields, b] fields of `width` bits, lowest first."""
    fields = [(packed >> (width * i)) & ((1 << width) - 1) for i in range(num_fields)]
    return torch.stack(fields, dim=2)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """Bit i of the 32-bit word at byte `start` becomes bit 4 of element i."""
    word = blocks[:, start : start + 4].unsqueeze(2)
    shifts = torch.arange(8, dtype=torch.uint8)
    return (((word >> shifts) & 1) << 4).flatten(1)


def _q8_0(blocks: Tensor, output: Tensor) -> None:
    output.copy_(blocks[:, 2:].view(torch.int8)).mul_(_half(blocks, 0))


def _q4_0(blocks: Tensor, output: Tensor) -> None:
    output.copy_(_nibbles(blocks[:, None, 2:]).flatten(1)).sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor, output: Tensor) -> None:
    output.copy_(_nibbles(blocks[:, None, 4:]).flatten(1))
    output.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor, output: Tensor) -> None:
    numbers = _nibbles(blocks[:, None, 6:]).flatten(1) | _fifth_bits(blocks, 2)
    output.copy_(numbers).sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor, output: Tensor) -> None:
    numbers = _nibbles(blocks[:, None, 8:]).flatten(1) | _fifth_bits(blocks, 4)
    output.copy_(numbers).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The eight float scales and minima of a Q4_K or Q5_K block.

    Bytes 4 to 15 hold sixteen 6-bit numbers: the first four scales and minima in the low bits of
    bytes 0-3 and 4-7, the others' low halves in the nibbles of bytes 8-11 and their two high bits
    in the top of bytes 0-3 and 4-7.
    """
    packed = blocks[:, 4:16]
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (rest & 15) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 63, (rest >> 4) | ((second >> 6) << 4)), dim=1)
    return (
        (_half(blocks, 0) * scales.float()).unsqueeze(2),
        (_half(blocks, 2) * minima.float()).unsqueeze(2),
    )


def _q4_k(blocks: Tensor, output: Tensor) -> None:
    scales, minima = _scales_and_minima(blocks)
    numbers = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1, 2)
    output.view(-1, 8, 32).copy_(numbers).mul_(scales).sub_(minima)


def _q5_k(blocks: Tensor, output: Tensor) -> None:
    scales, minima = _scales_and_minima(blocks)
    high = _bits(blocks[:, None, 16:48], 8, 1).flatten(1, 2)
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).flatten(1, 2)
    output.view(-1, 8, 32).copy_(low | (high << 4)).mul_(scales).sub_(minima)


def _q6_k(blocks: Tensor, output: Tensor) -> None:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).flatten(1)
    high = _bits(blocks[:, 128:192].reshape(-1, 2, 32), 4, 2).flatten(1)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    output.copy_(low | (high << 4)).sub_(32)
    output.view(-1, 16, 16).mul_(scales.unsqueeze(2))


_FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCK_DECODERS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
_BLOCK_SIZES = {name: (elements, size) for name, elements, size in TENSOR_TYPES.values()}
