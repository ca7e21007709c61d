"""Streams a model's weights from disk: (name, tensor) pairs, one tensor at a time, on the CPU.

Files are memory-mapped, and checked as far as their headers go before the first pair is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from quire.config.locate import ModelSource
from quire.files.safetensors import TensorInfo, tensor_infos, tensor_names
from quire.files.shards import DOWNLOAD_AGAIN, choose_tensors, find_shards
from quire.layers.weights import Weight
from quire.loading.gguf import iter_gguf_weights, none_of_them
from quire.loading.safetensors import iter_safetensors
from quire.loading.torch_bin import iter_torch_bin
from quire.protocol.errors import ModelError


def iter_weights(
    source: ModelSource,
    load_format: str = "auto",
    keeps_blocks: Callable[[str], bool] = none_of_them,
    skips: Callable[[str], bool] = none_of_them,
) -> Iterator[tuple[str, Weight]]:
    """All weights of a model under the names its files use, but for those that it `skips`; none for
    the format "dummy".

    Quantised matrices that `keeps_blocks` names stay as they are stored, where kernels compute with
    such.
    """
    if load_format == "dummy":
        return iter(())
    if source.kind == "gguf":
        return iter_gguf_weights(source.path, keeps_blocks, skips)
    folder = source.path
    if load_format in ("auto", "safetensors"):
        shards = find_shards(folder, "model.safetensors", (".safetensors",))
        if shards:
            return iter_safetensors(shards, skips)
    if load_format in ("auto", "pt"):
        shards = find_shards(folder, "pytorch_model.bin", (".bin", ".pt"))
        if shards:
            return iter_torch_bin(shards, skips)
    raise _no_weights(folder, load_format)


def stored_tensors(source: ModelSource, load_format: str = "auto") -> dict[str, TensorInfo]:
    """What the weight files of a folder hold, by headers where they have such."""
    if load_format in ("auto", "safetensors"):
        shards = find_shards(source.path, "model.safetensors", (".safetensors",))
        if shards:
            infos = {file: tensor_infos(file) for file in shards}
            chosen = choose_tensors(shards, {file: list(infos[file]) for file in infos})
            return {name: infos[file][name] for file, names in chosen.items() for name in names}
    return {
        name: TensorInfo(_TYPE_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
        for name, tensor in iter_weights(source, load_format)
        if isinstance(tensor, Tensor)
    }


def file_of(source: ModelSource, tensor: str, rename: Callable[[str], str]) -> Path:
    """Where a tensor is, for an error about it; `rename` gives it the name that it is known by."""
    for file in find_shards(source.path, "model.safetensors", (".safetensors",)):
        if any(rename(name) == tensor for name in tensor_names(file)):
            return file
    return source.path


_TYPE_NAMES = {torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8"}


def read_weights(source: ModelSource) -> dict[str, Tensor]:
    """All weights of a model at once, as numbers."""
    weights: dict[str, Tensor] = {}
    for name, weight in iter_weights(source):
        whole = weight if isinstance(weight, Tensor) else weight[:, :]
        assert isinstance(whole, Tensor), "no blocks are kept"
        weights[name] = whole
    return weights


def _no_weights(folder: Path, load_format: str) -> ModelError:
    names = sorted(file.name for file in folder.iterdir())
    wanted = {"safetensors": "*.safetensors", "pt": "*.bin"}.get(
        load_format, "*.safetensors or *.bin"
    )
    hint = ""
    if any(name.startswith("consolidated") for name in names):
        hint = " (consolidated files are in the publisher's own layout, which is not read)"
    return ModelError(
        f"model folder {folder} has no weights for load_format={load_format!r}: no {wanted} file "
        f"among {', '.join(names[:12]) or 'nothing'}{hint}; {DOWNLOAD_AGAIN}, or use "
        "load_format='dummy' for random weights."
    )
