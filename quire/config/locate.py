"""Finds the model that a user names: a folder, a .gguf file, a hub name, or nothing at all."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quire.config import embedded
from quire.config.options import LOAD_FORMATS
from quire.files.hub import HUB_NAME, fetch_from_hub
from quire.files.shards import weight_files
from quire.protocol.errors import ModelError, OptionError

# Families in Ollama's library -> the repository on the hub, with the size as the hub writes it.
_FAMILIES = {
    "llama2": ("meta-llama/Llama-2-{size}-chat-hf", "7b"),
    "llama3": ("meta-llama/Meta-Llama-3-{size}-Instruct", "8B"),
    "llama3.1": ("meta-llama/Llama-3.1-{size}-Instruct", "8B"),
    "llama3.2": ("meta-llama/Llama-3.2-{size}-Instruct", "3B"),
    "mistral": ("mistralai/Mistral-{size}-Instruct-v0.3", "7B"),
    "qwen2": ("Qwen/Qwen2-{size}-Instruct", "7B"),
    "qwen2.5": ("Qwen/Qwen2.5-{size}-Instruct", "7B"),
    "qwen3": ("Qwen/Qwen3-{size}", "8B"),
    "smollm2": ("HuggingFaceTB/SmolLM2-{size}-Instruct", "1.7B"),
    "tinyllama": ("TinyLlama/TinyLlama-{size}-Chat-v1.0", "1.1B"),
}
_HUB = re.compile(r"((https?://)?(www\.)?(huggingface\.co|hf\.co)/|hf://|hf:)(?P<rest>.+)")
_TAGGED = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)*)[:@](?P<tag>[\w.-]+)")
_ANY = "Give a folder, a .gguf file, or a name on the Hugging Face hub such as Qwen/Qwen3-0.6B"


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
    before_weights: Callable[[ModelSource], None] | None = None,
) -> ModelSource:
    """Resolve a model's name to files on this machine, fetching them from the hub if need be.
    `before_weights` is called when a model is fetched and all but its weights is there."""
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
    if remedy := _remedy_for(name):
        raise ModelError(f"model {name!r} is not on this machine. {remedy}.")
    if _looks_like_path(name):
        raise ModelError(
            f"model {name!r} looks like a path, but {path.absolute()} does not exist; "
            "check its spelling."
        )

    def check(folder: Path) -> None:
        if before_weights is not None:
            before_weights(ModelSource(name, "folder", folder))

    folder = fetch_from_hub(
        name,
        revision=revision,
        token=token,
        load_format=load_format,
        download_dir=download_dir,
        before_weights=check,
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


# --- names of models as other programs write them ------------------------------------------------


def _remedy_for(name: str) -> str | None:
    """What is wrong with the spelling of `name`, which no local file has, and what to write; None
    if it may be a path or a name on the hub."""
    if found := _HUB.fullmatch(name):
        return _hub_address(found["rest"])
    if "://" in name:
        return f"Quire does not read addresses. {_ANY}"
    if found := _TAGGED.fullmatch(name):
        if "/" in found["name"]:
            return _revision(found["name"], found["tag"])
        return _ollama(found["name"], found["tag"])
    return _ollama(name, "") if name in _FAMILIES else None


def _hub_address(rest: str) -> str:
    words = rest.partition("?")[0].strip("/").split("/")
    repository, more = "/".join(words[:2]), words[2:]
    if found := _TAGGED.fullmatch(repository):
        return _revision(found["name"], found["tag"])
    if more and more[-1].endswith(".gguf"):
        file = "/".join(more[2:] if more[0] in ("resolve", "blob") else more)
        return (
            f"Quire does not read addresses. Run `hf download {repository} {file}` and give the "
            "path that it prints"
        )
    text = f"Of an address on the hub only the name is needed: write {repository!r}"
    if len(more) > 1 and more[0] == "tree" and more[1] != "main":
        return f"{text} with revision={more[1]!r} (--revision {more[1]})"
    return text


def _revision(name: str, tag: str) -> str:
    if re.match(r"(?i)(iq|q|bf|f)\d", tag):
        return (
            f"Names on the hub have no tags. For one GGUF file of several, run "
            f"`hf download {name} --include '*{tag}*'` and give the path of the file"
        )
    return (
        f"Names on the hub have no tags: write {name!r}, with revision={tag!r} (--revision {tag}) "
        "if that is a branch, a tag or a commit there"
    )


def _ollama(name: str, tag: str) -> str:
    family = _FAMILIES.get(name.lower())
    if family is None:
        return f"This looks like a name in Ollama's library, which Quire does not read. {_ANY}"
    text = "This is a name in Ollama's library, which Quire does not read."
    pattern, size = family
    given = re.match(r"\d+(\.\d+)?[bm]", tag.lower())
    if given:
        size = given[0].upper() if size[-1].isupper() else given[0]
    return f"{text} On the Hugging Face hub the model is {pattern.format(size=size)!r}: write that"
