"""Streams a model's weights from disk: (name, tensor) pairs, one tensor at a time, on the CPU.

Files are memory-mapped, and checked as far as their headers go before the first pair is given.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quire.config.locate import ModelSource
from quire.files.hub import FOREIGN_WEIGHTS
from quire.files.json_file import read_json_object
from quire.kernels.torch.gguf_blocks import BlockRows
from quire.loading.gguf import iter_gguf_weights, keeps_none
from quire.protocol.errors import ModelError

DOWNLOAD_AGAIN = "download the model again"
NUMBERED_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)(\.\w+)")

Weights = Iterator[tuple[str, Tensor | BlockRows]]
Shards = dict[Path, set[str] | None]
"""Files to read and the tensors to take from each; None means all of them."""


def iter_weights(
    source: ModelSource,
    load_format: str = "auto",
    keeps_blocks: Callable[[str], bool] = keeps_none,
) -> Weights:
    """All weights of a model under the names its files use; none for the format "dummy".

    Quantised matrices that `keeps_blocks` names stay as they are stored, where kernels compute with
    such.
    """
    if load_format == "dummy":
        return iter(())
    if source.kind == "gguf":
        return iter_gguf_weights(source.path, keeps_blocks)
    folder = source.path
    if load_format in ("auto", "safetensors"):
        shards = _find_shards(folder, "model.safetensors", (".safetensors",))
        if shards:
            return _iter_safetensors(shards)
    if load_format in ("auto", "pt"):
        shards = _find_shards(folder, "pytorch_model.bin", (".bin", ".pt"))
        if shards:
            return _iter_pickles(shards)
    raise _no_weights(folder, load_format)


def _find_shards(folder: Path, single: str, suffixes: tuple[str, ...]) -> Shards:
    """The files of one format: those an index lists, else the single file, else all there are."""
    index = folder / f"{single}.index.json"
    if index.is_file():
        return _read_index(index)
    if (folder / single).is_file():
        return {folder / single: None}
    files = sorted(
        file
        for file in folder.iterdir()
        if file.suffix in suffixes and file.is_file() and not FOREIGN_WEIGHTS.match(file.name)
    )
    _check_numbering(folder, files)
    return dict.fromkeys(files)


def _read_index(index: Path) -> Shards:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(
            f"{index}: weight_map must name the file of each tensor, got {str(weight_map)[:80]}; "
            f"{DOWNLOAD_AGAIN}."
        )
    by_file: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or (file not in by_file and Path(file).name != file):
            raise ModelError(
                f"{index}: weight_map[{name!r}] must be the name of a file in the same folder, "
                f"got {file!r}; {DOWNLOAD_AGAIN}."
            )
        by_file.setdefault(file, set()).add(name)
    shards: dict[Path, set[str] | None] = {index.parent / file: by_file[file] for file in by_file}
    missing = [file for file in shards if not file.is_file()]
    if missing:
        raise ModelError(
            f"{missing[0]} is missing ({len(missing)} of {len(shards)} shards that {index.name} "
            f"lists are not there); {DOWNLOAD_AGAIN}."
        )
    return shards


def _check_numbering(folder: Path, files: list[Path]) -> None:
    """Without an index, `name-00001-of-00003` still tells how many shards there must be."""
    names = {file.name for file in files}
    for file in files:
        match = NUMBERED_SHARD.fullmatch(file.name)
        if match is None:
            continue
        stem, width, suffix = match[1], len(match[2]), match[4]
        for number in range(1, int(match[3]) + 1):
            shard = f"{stem}-{number:0{width}d}-of-{match[3]}{suffix}"
            if shard not in names:
                raise ModelError(f"{folder / shard} is missing; {DOWNLOAD_AGAIN}.")


def _iter_safetensors(shards: Shards) -> Weights:
    # Opening a file checks its header against its size.
    tensors = _choose_tensors(shards, {file: _safetensors_names(file) for file in shards})
    return _chain(tensors, _read_safetensors)


def _safetensors_names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is damaged or incomplete ({error}); {DOWNLOAD_AGAIN}.") from error


def _read_safetensors(file: Path, names: list[str]) -> Weights:
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


def _choose_tensors(shards: Shards, present: dict[Path, list[str]]) -> dict[Path, list[str]]:
    """What to read from each file, with every name found exactly once."""
    chosen: dict[Path, list[str]] = {}
    origin: dict[str, Path] = {}
    for file, wanted in shards.items():
        names = present[file]
        absent = sorted((wanted or set()) - set(names))
        if absent:
            raise ModelError(
                f"{file}: tensor {absent[0]} is missing although the index lists it there; "
                f"{DOWNLOAD_AGAIN}."
            )
        chosen[file] = [name for name in names if wanted is None or name in wanted]
        for name in chosen[file]:
            if name in origin:
                raise ModelError(
                    f"tensor {name} is in both {origin[name]} and {file}; remove the file that is "
                    f"not part of the model, or {DOWNLOAD_AGAIN}."
                )
            origin[name] = file
    return chosen


def _chain(tensors: dict[Path, list[str]], read: Callable[[Path, list[str]], Weights]) -> Weights:
    for file, names in tensors.items():
        yield from read(file, names)


def _iter_pickles(shards: Shards) -> Weights:
    for file, wanted in shards.items():
        tensors = _load_pickle(file)
        _choose_tensors({file: wanted}, {file: list(tensors)})
        for name in list(tensors):
            tensor = tensors.pop(name)
            if wanted is None or name in wanted:
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
