"""Adapters that a server is told of when it starts. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from quire.files.adapter import CONFIG_FILE as CONFIG_FILE
from quire.files.adapter import adapter_folder as adapter_folder
from quire.protocol.errors import OptionError

FORMATS = 'name=folder, or JSON with "name", "path" and perhaps "base_model_name"'
MAX_NAME = 256


@dataclass(frozen=True)
class AdapterModule:
    """An adapter that requests can name as their model."""

    name: str
    path: str
    base_model_name: str | None = None
    """What lists of models show as its parent; None: the model that is served."""


def check_adapter_name(name: object) -> str:
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise OptionError(f"lora_name must be a name, got {str(name)[:80]!r}.")
    if len(name) > MAX_NAME:
        raise OptionError(f"lora_name has {len(name)} characters; give at most {MAX_NAME}.")
    return name


def read_modules(texts: tuple[str, ...]) -> tuple[AdapterModule, ...]:
    """What `lora_modules` says."""
    modules = [module for text in texts for module in _read(text)]
    names = [module.name for module in modules]
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"lora_modules has {name!r} twice; give each name once.")
    return tuple(modules)


def check_folders(modules: tuple[AdapterModule, ...], folder: str | None) -> None:
    """At the start, before a model is loaded for them."""
    for module in modules:
        if not (adapter_folder(module.path) / CONFIG_FILE).is_file():
            raise OptionError(
                f"lora_modules: {module.path!r} (of {module.name!r}) is not the folder of an "
                f"adapter, which has {CONFIG_FILE}."
            )
    if folder is not None and not adapter_folder(folder).is_dir():
        raise OptionError(f"lora_folder {folder!r} is not a folder.")


def as_texts(value: Any) -> Any:
    """Lists and dictionaries as flags would have them."""
    if isinstance(value, (str, dict)):
        value = [value]
    if not isinstance(value, (list, tuple)):
        return value
    return tuple(json.dumps(one) if isinstance(one, dict) else one for one in value)


def _read(text: str) -> list[AdapterModule]:
    if not text.lstrip().startswith(("{", "[")):
        name, equals, path = text.partition("=")
        if not equals or not path:
            raise OptionError(f"lora_modules must be {FORMATS}, got {text!r}.")
        return [AdapterModule(check_adapter_name(name), path)]
    try:
        found = json.loads(text)
    except ValueError as error:
        raise OptionError(f"lora_modules must be {FORMATS}, got {text!r} ({error}).") from None
    return [_from_json(one) for one in (found if isinstance(found, list) else [found])]


def _from_json(found: Any) -> AdapterModule:
    # vLLM must be told how experts are stored; here the tensors say it.
    known = {"name", "path", "base_model_name", "is_3d_lora_weight"}
    if not isinstance(found, dict) or not {"name", "path"} <= found.keys() <= known:
        raise OptionError(f"lora_modules must be {FORMATS}, got {found!r}.")
    path, base = found["path"], found.get("base_model_name")
    if not isinstance(path, str) or not path:
        raise OptionError(f"lora_modules: path must be a folder, got {path!r}.")
    if base is not None and not isinstance(base, str):
        raise OptionError(f"lora_modules: base_model_name must be a name, got {base!r}.")
    return AdapterModule(check_adapter_name(found["name"]), path, base)
