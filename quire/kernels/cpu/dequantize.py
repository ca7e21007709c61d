"""Stored blocks of GGUF files as numbers, in the native library."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.cpu.library import native, num_threads
from quire.kernels.torch.gguf_blocks import BLOCK_SIZES
from quire.kernels.torch.linear import KINDS

DEQUANTIZED = ("Q8_0", "Q4_0", "Q4_1")
"""Formats that the library can turn into numbers."""


def dequantize(data: NDArray[np.uint8], kind: str) -> Tensor:
    """Stored bytes, read where they lie, -> float32; the same as
    `quire.kernels.torch.gguf_blocks.dequantize_blocks` to the bit."""
    block_elements, block_bytes = BLOCK_SIZES[kind]
    assert data.flags.c_contiguous and data.nbytes % block_bytes == 0
    num_blocks = data.nbytes // block_bytes
    out = torch.empty(num_blocks * block_elements)
    code = native().quire_dequantize(
        KINDS.index(kind), data.ctypes.data, num_blocks, out.data_ptr(), num_threads()
    )
    assert code == 0, kind
    return out
