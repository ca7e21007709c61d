"""`AdapterNames`: which adapters requests can name as their model. Every process of a server looks
them up by itself, those that prepare requests too."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.config.adapters import CONFIG_FILE, AdapterModule, adapter_folder
from quire.config.server import ServedAdapterOptions
from quire.protocol.adapter import LoRARequest


@dataclass(frozen=True)
class AdapterSettings:
    """What processes are told of adapters."""

    modules: tuple[AdapterModule, ...] = ()
    folder: str | None = None
    file: str | None = None
    """Where they write what was loaded and unloaded while the server runs; None: nothing can be."""

    @classmethod
    def of(cls, options: ServedAdapterOptions, file: str | None) -> AdapterSettings:
        folder = options.lora_folder
        return cls(
            options.modules,
            None if folder is None else str(adapter_folder(folder).absolute()),
            file if options.allow_runtime_lora else None,
        )


class AdapterNames:
    def __init__(self, settings: AdapterSettings) -> None:
        self._modules = {module.name: module for module in settings.modules}
        self._folder = None if settings.folder is None else Path(settings.folder)
        self._file = None if settings.file is None else Path(settings.file)
        self._read: tuple[object, dict[str, AdapterModule | None]] = (None, {})
        """What the file says, and how it looked then."""

    def find(self, name: str) -> AdapterModule | None:
        changes = self._changes()
        if name in changes and (changes[name] is not None or name in self._modules):
            return changes[name]
        return self._modules.get(name) or self._in_folder(name)

    @property
    def has_folder(self) -> bool:
        return self._folder is not None

    def listed(self) -> dict[str, AdapterModule]:
        """By name: those of the start and what was loaded since, without what the folder has."""
        changed = {**self._modules, **self._changes()}
        return {name: module for name, module in changed.items() if module is not None}

    def all(self) -> list[AdapterModule]:
        """Those, then what the folder has, which takes a look at each folder in it."""
        found = self.listed()
        for name in self._folder_names():
            if name not in found and (module := self._in_folder(name)) is not None:
                found[name] = module
        return list(found.values())

    def add(self, module: AdapterModule) -> None:
        with self._changing() as changes:
            changes[module.name] = module

    def remove(self, name: str) -> None:
        """What the folder has stays there, and is loaded again when it is asked for."""
        with self._changing() as changes:
            if name in self._modules:
                changes[name] = None
            else:
                changes.pop(name, None)

    def _in_folder(self, name: str) -> AdapterModule | None:
        """A name is one folder below, never a path to another one."""
        if self._folder is None or not _is_file_name(name):
            return None
        place = self._folder / name
        try:
            is_there = (place / CONFIG_FILE).is_file()
        except (OSError, ValueError):
            return None
        return AdapterModule(name, str(place)) if is_there else None

    def _folder_names(self) -> list[str]:
        if self._folder is None:
            return []
        try:
            return sorted(os.listdir(self._folder))
        except OSError:
            return []

    def _changes(self) -> dict[str, AdapterModule | None]:
        if self._file is None:
            return {}
        about = self._file.stat()
        looks = (about.st_mtime_ns, about.st_ino, about.st_size)
        if self._read[0] != looks:
            values = json.loads(self._file.read_text())
            modules = {
                name: None if value is None else AdapterModule(*value)
                for name, value in values.items()
            }
            self._read = looks, modules
        return self._read[1]

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, AdapterModule | None]]:
        """The file for one process at a time; readers see it before or after."""
        assert self._file is not None, "adapters can be changed where allow_runtime_lora is set"
        with self._file.with_suffix(".json.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            changes = dict(self._changes())
            yield changes
            values = {
                name: None if module is None else (module.name, module.path, module.base_model_name)
                for name, module in changes.items()
            }
            written = self._file.with_suffix(".json.new")
            written.write_text(json.dumps(values))
            written.replace(self._file)


def reference_to(module: AdapterModule, *, load_inplace: bool = False) -> LoRARequest:
    """For the engine. Its number follows from the name, so that all processes say the same."""
    digest = hashlib.sha256(module.name.encode("utf-8", "surrogatepass")).digest()
    number = int.from_bytes(digest[:6], "big") + 1
    path = str(adapter_folder(module.path).absolute())
    return LoRARequest(module.name, number, path, module.base_model_name, None, load_inplace)


def _is_file_name(name: str) -> bool:
    return (
        0 < len(name) <= 255
        and not name.startswith(".")
        and name.isprintable()
        and not any(separator in name for separator in "/\\:")
    )
