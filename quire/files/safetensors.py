"""The header of a safetensors file, read without torch."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from quire.files.shards import DOWNLOAD_AGAIN
from quire.protocol.errors import ModelError


def tensor_names(file: Path) -> list[str]:
    """Of all tensors in a file. Opening it checks its header against its size."""
    try:
        with safe_open(file, framework="np") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is damaged or incomplete ({error}); {DOWNLOAD_AGAIN}.") from error
