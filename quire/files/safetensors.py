"""The header of a safetensors file, read without torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from quire.files.shards import DOWNLOAD_AGAIN
from quire.protocol.errors import ModelError

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Floats as headers of safetensors and GGUF name them -> their names in torch."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a file."""

    dtype: str
    """As the header names it: F16, BF16, F8_E4M3, I32, ..."""
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def tensor_names(file: Path) -> list[str]:
    """Of all tensors in a file. Opening it checks its header against its size."""
    with _opened(file) as opened:
        return list(opened.keys())


def tensor_infos(file: Path) -> dict[str, TensorInfo]:
    """All tensors in a file, by name."""
    with _opened(file) as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return {
            name: TensorInfo(one.get_dtype(), tuple(one.get_shape()))
            for name, one in slices.items()
        }


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="np") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is damaged or incomplete ({error}); {DOWNLOAD_AGAIN}.") from error
