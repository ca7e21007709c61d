"""Applies masks of grammars: one program forbids tokens in one piece of one line."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


# Where the lines begin in the one array that masks come in depends on their number.
@triton.jit(do_not_specialize=["lines"])
def _bitmask_kernel(logits, lines, bits, stride, vocab_size, num_words, BLOCK: tl.constexpr):
    index = tl.program_id(0)
    line = tl.load(lines + index).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = token // 32
    known = tl.load(bits + index * num_words + word, mask=word < num_words, other=0)
    forbidden = ((known >> (token % 32)) & 1) == 0
    at = logits + line * stride + token
    tl.store(at, float("-inf"), mask=forbidden & (token < vocab_size))


def apply_bitmask(logits: Tensor, lines: Tensor, bits: Tensor) -> None:
    """As `quire.kernels.torch.bitmask.apply_bitmask`."""
    assert logits.stride(1) == 1
    num_lines, num_words = bits.shape
    vocab_size = logits.shape[1]
    grid = (num_lines, triton.cdiv(vocab_size, BLOCK))
    _bitmask_kernel[grid](logits, lines, bits, logits.stride(0), vocab_size, num_words, BLOCK)
