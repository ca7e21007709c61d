"""Digests that tell models on two hosts apart, without reading them whole."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from quire.config.digests import different, model_digests

RAW = {"hidden_size": 64, "layer_types": ["full_attention"]}


def save(folder: Path, *sizes: int, begins: bytes = b"head") -> Path:
    """Shards with the same header and other data each time."""
    folder.mkdir()
    names = [f"model-{i:05}-of-{len(sizes):05}.safetensors" for i in range(1, len(sizes) + 1)]
    for name, size in zip(names, sizes, strict=True):
        (folder / name).write_bytes(begins + os.urandom(size))
    index = {"weight_map": {f"tensor{i}": name for i, name in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_same_files_and_others(tmp_path: Path) -> None:
    first = save(tmp_path / "a", 100_000, 5, 0, begins=bytes(4096))
    there = model_digests(RAW, first, "auto")
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert list(there) == ["config.json", *shards]
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in first.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert different(there, model_digests(dict(reversed(RAW.items())), copy, "auto")) is None

    other = model_digests(RAW, save(tmp_path / "b", 100_000, 5, 0, begins=bytes(4096)), "auto")
    assert different(there, other) == shards[0]
    assert different(there, model_digests({**RAW, "x": 1}, copy, "auto")) == "config.json"
    (copy / "model-00003-of-00003.safetensors").write_bytes(bytes(4097))
    assert different(there, model_digests(RAW, copy, "auto")) == shards[2]


@pytest.mark.parametrize(
    ("load_format", "files"),
    [
        ("auto", ["config.json", "model.safetensors"]),
        ("safetensors", ["config.json", "model.safetensors"]),
        ("pt", ["config.json", "pytorch_model.bin"]),
        ("dummy", ["config.json"]),
    ],
)
def test_files_that_are_loaded(load_format: str, files: list[str], tmp_path: Path) -> None:
    """A file that only one side has counts where it is read."""
    for name in ("model.safetensors", "pytorch_model.bin", "optimizer.bin"):
        (tmp_path / name).write_bytes(b"data")
    digests = model_digests(RAW, tmp_path, load_format)
    assert list(digests) == files
    assert different(digests, {}) == "config.json"
    assert different({}, dict(reversed(digests.items()))) == files[-1]


def test_gguf(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert list(model_digests(RAW, file, "auto")) == ["header", "model.gguf"]
