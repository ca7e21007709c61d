"""Tensors of torch's pickled files, of which only tensors are accepted."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from quire.files.shards import DOWNLOAD_AGAIN, Shards, choose_tensors
from quire.protocol.errors import ModelError


def iter_torch_bin(shards: Shards, skips: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    for file, wanted in shards.items():
        tensors = _load_pickle(file)
        choose_tensors({file: wanted}, {file: list(tensors)})
        for name in list(tensors):
            tensor = tensors.pop(name)
            if (wanted is None or name in wanted) and not skips(name):
                yield name, tensor


def _load_pickle(file: Path) -> dict[str, Tensor]:
    try:
        # Files from before torch 1.6 are not zip archives and cannot be mapped.
        mapped = zipfile.is_zipfile(file)
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        code = re.search(r"GLOBAL (\S+)", str(error))
        if code is None:
            raise _damaged(file, error) from error
        raise ModelError(
            f"{file} was refused: it would run code on loading ({code[1]}), and only tensors are "
            "accepted. Use a safetensors version of the model."
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise _damaged(file, error) from error
    for wrapper in ("state_dict", "model"):
        if isinstance(loaded, dict) and isinstance(loaded.get(wrapper), dict):
            loaded = loaded[wrapper]
    if not isinstance(loaded, dict) or not loaded:
        raise ModelError(
            f"{file} must hold a dictionary of tensors, got {type(loaded).__name__}; "
            f"{DOWNLOAD_AGAIN}."
        )
    for name, tensor in loaded.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ModelError(
                f"{file}: entry {name!r} must be a tensor, got {type(tensor).__name__}; "
                "use a safetensors version of the model."
            )
    return dict(loaded)


def _damaged(file: Path, error: Exception) -> ModelError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ModelError(f"{file} is damaged or incomplete ({reason[:200]}); {DOWNLOAD_AGAIN}.")
