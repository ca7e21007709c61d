"""Tensors of safetensors files, memory-mapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from quire.files.safetensors import tensor_names
from quire.files.shards import Shards, choose_tensors
from quire.protocol.errors import ModelError


def iter_safetensors(shards: Shards, skips: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """All headers are checked before the first pair is given. Tensors are views of mapped files: of
    each, what is never looked at is never read."""
    tensors = choose_tensors(shards, {file: tensor_names(file) for file in shards})
    for file, names in tensors.items():
        tensors[file] = [name for name in names if not skips(name)]
    return (pair for file, names in tensors.items() if names for pair in _read(file, names))


def _read(file: Path, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    with safe_open(file, framework="pt", device="cpu") as opened:
        for name in names:
            try:
                tensor = opened.get_tensor(name)
            # The header allows types and shapes that torch does not have.
            except Exception as error:
                raise ModelError(
                    f"{file}: tensor {name} cannot be read ({error}); use a version of the model "
                    "with float or integer weights."
                ) from error
            yield name, tensor
