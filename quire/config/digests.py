"""`model_digests`: whether two hosts have the same files of a model. No torch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quire.files.shards import find_shards

NUM_SAMPLES = 8
SAMPLE_BYTES = 1024
"""Models that were trained further have the same headers, and other numbers everywhere."""


def model_digests(raw: dict[str, Any], path: Path, load_format: str) -> dict[str, str]:
    """Of the configuration `raw` and of each weight file, by name: its size and some of its data,
    since to read it all would take as long as to load it."""
    config = hashlib.sha256(json.dumps(raw, sort_keys=True, default=str).encode()).hexdigest()
    weights = {file.name: _digest(file) for file in _weight_files(path, load_format)}
    return {"config.json" if path.is_dir() else "header": config[:32], **weights}


def different(digests: dict[str, str], others: dict[str, str]) -> str | None:
    """The first name that only one side has, or that means something else on both."""
    names = {**digests, **others}
    return next((name for name in names if digests.get(name) != others.get(name)), None)


def _weight_files(path: Path, load_format: str) -> Iterable[Path]:
    if load_format == "dummy":
        return ()
    if path.is_file():
        return (path,)
    formats = {
        "safetensors": ("model.safetensors", (".safetensors",)),
        "pt": ("pytorch_model.bin", (".bin", ".pt")),
    }
    for name, (single, suffixes) in formats.items():
        if load_format in ("auto", name) and (found := find_shards(path, single, suffixes)):
            return sorted(found)
    return ()


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        digest.update(str(size).encode())
        for i in range(NUM_SAMPLES):
            stream.seek(max(size - SAMPLE_BYTES, 0) * i // (NUM_SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]
