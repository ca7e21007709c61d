"""The block formats of GGUF files: bytes to numbers, exactly as llama.cpp defines them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.files.gguf import TENSOR_TYPES

# Small enough for the intermediate results of a chunk to stay in a core's cache.
CHUNK_ELEMENTS = 1 << 18
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Floats of 4 bits by their lower three; the highest is the sign."""


@dataclass(frozen=True)
class BlockRows:
    """A matrix as it is stored: rows [outputs, bytes] of blocks of one kind."""

    kind: str
    rows: Tensor
    num_inputs: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.num_inputs

    def __getitem__(self, part: tuple[slice, ...]) -> BlockRows | Tensor:
        """Some inputs of some outputs: blocks, or numbers where that cuts a block."""
        outputs, inputs = part
        elements, size = BLOCK_SIZES[self.kind]
        first, last, _ = inputs.indices(self.num_inputs)
        start, stop = first // elements, -(-last // elements)
        rows = self.rows[outputs, start * size : stop * size]
        if first % elements == 0 and last % elements == 0:
            return BlockRows(self.kind, rows, last - first)
        numbers = dequantize_blocks(rows.reshape(-1, size), self.kind).view(len(rows), -1)
        return numbers[:, first - start * elements : last - start * elements]


def dequantize_blocks(blocks: Tensor, type_name: str) -> Tensor:
    """Stored blocks [n, bytes] of a type in BLOCK_SIZES -> float32 [n, elements]."""
    decode = _DECODERS[type_name]
    block_elements, _ = BLOCK_SIZES[type_name]
    output = torch.empty(len(blocks), block_elements, device=blocks.device)
    step = CHUNK_ELEMENTS // block_elements
    for start in range(0, len(blocks), step):
        decode(blocks[start : start + step], output[start : start + step])
    return output


def half(blocks: Tensor, start: int) -> Tensor:
    """The float16 at byte `start` of every block, as a float32 column."""
    return blocks[:, start : start + 2].view(torch.float16).float()


def nibbles(packed: Tensor) -> Tensor:
    """[n, g, b] bytes -> [n, g, 2, b]: all low halves of a group, then all high halves."""
    return torch.stack((packed & 15, packed >> 4), dim=2)


def _bits(packed: Tensor, num_fields: int, width: int) -> Tensor:
    """[n, g, b] bytes -> [n, g, num_fields, b] fields of `width` bits, lowest first."""
    fields = [(packed >> (width * i)) & ((1 << width) - 1) for i in range(num_fields)]
    return torch.stack(fields, dim=2)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """Bit i of the 32-bit word at byte `start` becomes bit 4 of element i."""
    word = blocks[:, start : start + 4].unsqueeze(2)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    return (((word >> shifts) & 1) << 4).flatten(1)


def _q8_0(blocks: Tensor, output: Tensor) -> None:
    output.copy_(blocks[:, 2:].view(torch.int8)).mul_(half(blocks, 0))


def _q4_0(blocks: Tensor, output: Tensor) -> None:
    output.copy_(nibbles(blocks[:, None, 2:]).flatten(1)).sub_(8).mul_(half(blocks, 0))


def powers(blocks: Tensor) -> Tensor:
    """The scale of every MXFP4 block: a power of 2."""
    return torch.exp2(blocks[:, :1].float() - 127)


def _mxfp4(blocks: Tensor, output: Tensor) -> None:
    values = torch.tensor((*E2M1, *(-one for one in E2M1)), device=blocks.device)
    codes = nibbles(blocks[:, None, 1:]).flatten(1).int()
    torch.mul(values[codes], powers(blocks), out=output)


def _q4_1(blocks: Tensor, output: Tensor) -> None:
    output.copy_(nibbles(blocks[:, None, 4:]).flatten(1))
    output.mul_(half(blocks, 0)).add_(half(blocks, 2))


def _q5_0(blocks: Tensor, output: Tensor) -> None:
    numbers = nibbles(blocks[:, None, 6:]).flatten(1) | _fifth_bits(blocks, 2)
    output.copy_(numbers).sub_(16).mul_(half(blocks, 0))


def _q5_1(blocks: Tensor, output: Tensor) -> None:
    numbers = nibbles(blocks[:, None, 8:]).flatten(1) | _fifth_bits(blocks, 4)
    output.copy_(numbers).mul_(half(blocks, 0)).add_(half(blocks, 2))


def scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The eight whole-numbered scales and minima of every Q4_K or Q5_K block.

    Bytes 4 to 15 hold sixteen 6-bit numbers: the first four scales and minima in the low bits of
    bytes 0-3 and 4-7, the others' low halves in the nibbles of bytes 8-11 and their two high bits
    in the top of bytes 0-3 and 4-7.
    """
    packed = blocks[:, 4:16]
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (rest & 15) | ((first >> 6) << 4)), dim=1)
    minima = torch.cat((second & 63, (rest >> 4) | ((second >> 6) << 4)), dim=1)
    return scales, minima


def _scaled(blocks: Tensor, numbers: Tensor, output: Tensor) -> None:
    """numbers [n, 8, 32] times their scales less their minima."""
    scales, minima = scales_and_minima(blocks)
    output.view(-1, 8, 32).copy_(numbers).mul_((half(blocks, 0) * scales.float()).unsqueeze(2))
    output.view(-1, 8, 32).sub_((half(blocks, 2) * minima.float()).unsqueeze(2))


def q4_k_numbers(blocks: Tensor) -> Tensor:
    """[n, 8, 32] numbers from 0 to 15."""
    return nibbles(blocks[:, 16:].reshape(-1, 4, 32)).flatten(1, 2)


def _q4_k(blocks: Tensor, output: Tensor) -> None:
    _scaled(blocks, q4_k_numbers(blocks), output)


def _q5_k(blocks: Tensor, output: Tensor) -> None:
    high = _bits(blocks[:, None, 16:48], 8, 1).flatten(1, 2)
    low = nibbles(blocks[:, 48:].reshape(-1, 4, 32)).flatten(1, 2)
    _scaled(blocks, low | (high << 4), output)


def q6_k_numbers(blocks: Tensor) -> Tensor:
    """[n, 256] numbers from 0 to 63."""
    low = nibbles(blocks[:, :128].reshape(-1, 2, 64)).flatten(1)
    high = _bits(blocks[:, 128:192].reshape(-1, 2, 32), 4, 2).flatten(1)
    return low | (high << 4)


def _q6_k(blocks: Tensor, output: Tensor) -> None:
    scales = half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    output.copy_(q6_k_numbers(blocks)).sub_(32)
    output.view(-1, 16, 16).mul_(scales.unsqueeze(2))


_DECODERS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
BLOCK_SIZES = {
    name: (elements, size) for name, elements, size in TENSOR_TYPES.values() if name in _DECODERS
}
"""Elements and bytes of a block, for all formats that can be dequantised."""
