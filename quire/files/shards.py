"""Which files of a folder hold a model's weights, and which tensors each must have. No torch."""

from __future__ import annotations

import re
from pathlib import Path

from quire.files.json_file import read_json_object
from quire.protocol.errors import ModelError

DOWNLOAD_AGAIN = "download the model again"
FOREIGN_WEIGHTS = re.compile(
    r"(consolidated|adapter_model|training_args|optimizer|scheduler|rng_state).*"
)
"""Names of weight-like files that are not this model's weights in the layout Quire reads."""
NUMBERED_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)(\.\w+)")

Shards = dict[Path, set[str] | None]
"""Files to read and the tensors to take from each; None means all of them."""


def weight_files(folder: Path) -> list[Path]:
    """Files of a folder that may hold weights, in any of its formats."""
    return [
        file
        for pattern in ("*.safetensors", "*.bin")
        for file in folder.glob(pattern)
        if file.is_file() and not FOREIGN_WEIGHTS.match(file.name)
    ]


def find_shards(folder: Path, single: str, suffixes: tuple[str, ...]) -> Shards:
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


def choose_tensors(shards: Shards, present: dict[Path, list[str]]) -> dict[Path, list[str]]:
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
