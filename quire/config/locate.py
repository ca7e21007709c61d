"""Finds the model that a user names: a folder, a .gguf file, a hub name, or nothing at all."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quire.config import embedded
from quire.config.foreign_names import remedy_for
from quire.config.options import LOAD_FORMATS
from quire.files.hub import HUB_NAME, fetch_from_hub
from quire.files.shards import weight_files
from quire.protocol.errors import ModelError, OptionError


@dataclass(frozen=True)
class ModelSource:
    """Where a model lies on this machine."""

    name: str
    """What the user wrote; the embedded model's own name if nothing."""
    kind: Literal["folder", "gguf"]
    path: Path

    @property
    def is_embedded(self) -> bool:
        return self.path.name == embedded.FILE_NAME and self.path == embedded.find_embedded_model()


def locate_model(
    name: str | os.PathLike[str] | None,
    *,
    revision: str | None = None,
    token: str | None = None,
    load_format: str = "auto",
    download_dir: str | None = None,
) -> ModelSource:
    """Resolve a model's name to files on this machine, fetching them from the hub if need be."""
    if load_format not in LOAD_FORMATS:
        raise OptionError(
            f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {load_format!r}."
        )
    if name is None:
        return ModelSource(embedded.NAME, "gguf", embedded.embedded_model_path())
    if not isinstance(name, (str, os.PathLike)) or not os.fspath(name).strip():
        raise ModelError(
            f"model must be a folder, a .gguf file or a hub name, got {name!r}; "
            "leave it out to use the embedded model."
        )
    name = os.fspath(name)
    path = Path(os.path.expanduser(name))
    # Unlike Path's methods, os.path's take a name that is too long to be a path for absent.
    if os.path.isdir(path):
        return _in_folder(name, path, load_format)
    if os.path.isfile(path):
        return _single_file(name, path, load_format)
    if remedy := remedy_for(name):
        raise ModelError(f"model {name!r} is not on this machine. {remedy}.")
    if _looks_like_path(name):
        raise ModelError(
            f"model {name!r} looks like a path, but {path.absolute()} does not exist; "
            "check its spelling."
        )
    folder = fetch_from_hub(
        name,
        revision=revision,
        token=token,
        load_format=load_format,
        download_dir=download_dir,
    )
    return _in_folder(name, folder, load_format)


def _looks_like_path(name: str) -> bool:
    return name.endswith((".gguf", "/")) or not HUB_NAME.fullmatch(name)


def _single_file(name: str, path: Path, load_format: str) -> ModelSource:
    with path.open("rb") as file:
        is_gguf = path.suffix == ".gguf" or file.read(4) == b"GGUF"
    if not is_gguf:
        raise ModelError(
            f"model {name!r} is a file but not GGUF; give a .gguf file, or the folder that holds "
            "the model's config.json and weights."
        )
    if load_format in ("safetensors", "pt"):
        raise OptionError(
            f"load_format={load_format!r} cannot read the GGUF file {path}; "
            "leave load_format at 'auto'."
        )
    return ModelSource(name, "gguf", path)


def _in_folder(name: str, folder: Path, load_format: str) -> ModelSource:
    gguf = sorted(folder.glob("*.gguf"))
    has_config = (folder / "config.json").is_file()
    if load_format == "gguf" or (gguf and not (has_config and _has_weights(folder, load_format))):
        if len(gguf) == 1:
            return ModelSource(name, "gguf", gguf[0])
        found = ", ".join(file.name for file in gguf) or "no .gguf file"
        raise ModelError(
            f"model folder {folder} must hold one .gguf file, found: {found}; "
            "give the path of the file itself."
        )
    if not has_config:
        names = sorted(file.name for file in folder.iterdir())
        raise ModelError(
            f"model folder {folder} has no config.json (it holds: "
            f"{', '.join(names[:12]) or 'nothing'}); give the folder that holds config.json and "
            "the weights, or a .gguf file."
        )
    return ModelSource(name, "folder", folder)


def _has_weights(folder: Path, load_format: str) -> bool:
    return load_format == "dummy" or bool(weight_files(folder))
