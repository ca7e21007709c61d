"""Fetches a model by its hub name, through huggingface_hub, and only the files it needs."""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from quire.files.shards import FOREIGN_WEIGHTS
from quire.protocol.errors import ModelError

logger = logging.getLogger(__name__)

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")
SMALL_FILES = (".json", ".model", ".txt", ".jinja", ".tiktoken")


def files_to_fetch(listing: Iterable[str], load_format: str = "auto") -> list[str]:
    """Tokenizer and JSON files, and weights in the one format that will be loaded."""
    names = [name for name in listing if "/" not in name]
    if load_format == "gguf" or "config.json" not in names:
        return [name for name in names if name.endswith(".gguf")]
    weights = {
        suffix: [n for n in names if n.endswith(suffix) and not FOREIGN_WEIGHTS.match(n)]
        for suffix in (".safetensors", ".bin")
    }
    wanted = [name for name in names if name.endswith(SMALL_FILES)]
    if load_format == "dummy":
        return wanted
    if load_format == "pt":
        return wanted + weights[".bin"]
    if load_format == "safetensors":
        return wanted + weights[".safetensors"]
    return wanted + (weights[".safetensors"] or weights[".bin"])


def fetch_from_hub(
    name: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    load_format: str = "auto",
    download_dir: str | None = None,
    before_weights: Callable[[Path], None] | None = None,
) -> Path:
    """The folder that holds the model, downloaded where needed, or cached where the hub is away.

    `before_weights` is called with the folder when all but weights is there, and may refuse the
    model."""
    try:
        from huggingface_hub import HfApi, snapshot_download
    except ImportError:
        raise ModelError(
            f"model {name!r} is not a local folder, and fetching it needs the package "
            "huggingface_hub; install that, or give the path of a folder or .gguf file."
        ) from None
    try:
        siblings = HfApi(token=token).model_info(name, revision=revision).siblings or []
    # The network library beneath huggingface_hub, and so its errors, differ between versions.
    except Exception as error:
        cached = _cached_folder(name, revision, download_dir)
        if cached is None:
            raise _not_fetched(name, revision, error) from None
        return cached
    listing = [sibling.rfilename for sibling in siblings]
    _check_listing(name, listing, load_format)

    def fetch(files: list[str]) -> Path:
        try:
            return Path(
                snapshot_download(
                    name,
                    revision=revision,
                    token=token,
                    allow_patterns=[glob.escape(file) for file in files],
                    cache_dir=download_dir,
                )
            )
        except Exception as error:
            raise _not_fetched(name, revision, error) from None

    files = files_to_fetch(listing, load_format)
    if before_weights is not None and "config.json" in files:
        before_weights(fetch(files_to_fetch(listing, "dummy")))
    return fetch(files)


def _cached_folder(name: str, revision: str | None, download_dir: str | None) -> Path | None:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            name,
            revision=revision,
            local_files_only=True,
            allow_patterns=["config.json"],
            cache_dir=download_dir,
        )
    except Exception:
        return None
    return Path(folder)


def _check_listing(name: str, listing: list[str], load_format: str) -> None:
    fetched = files_to_fetch(listing, load_format)
    gguf = [file for file in fetched if file.endswith(".gguf")]
    if len(gguf) > 1:
        raise ModelError(
            f"model {name!r} on the hub holds several GGUF files; download one of them "
            f"({', '.join(gguf[:8])}) and give its path as the model."
        )
    if "config.json" not in listing and not gguf:
        raise ModelError(
            f"model {name!r} on the hub has no config.json; check that it is a language model in "
            "the transformers layout."
        )
    weights = (".safetensors", ".bin", ".gguf")
    if load_format != "dummy" and not any(file.endswith(weights) for file in fetched):
        raise ModelError(
            f"model {name!r} on the hub has no weights for load_format={load_format!r}; "
            "it has: " + ", ".join(sorted(listing)[:12]) + "."
        )


def _not_fetched(name: str, revision: str | None, error: Exception) -> ModelError:
    from huggingface_hub import errors

    logger.debug("the hub did not give %s", name, exc_info=error)
    where = f"model {name!r}" + (f" (revision {revision!r})" if revision else "")
    if isinstance(error, errors.GatedRepoError):
        return ModelError(
            f"{where} is gated on the hub; accept its terms on its page, then set HF_TOKEN or pass "
            "hf_token."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelError(f"{where}: the hub has no such revision; check its spelling.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelError(
            f"{where} was not found: there is no local folder of that name, and the hub does not "
            "know it. Check its spelling; if it is private, set HF_TOKEN or pass hf_token."
        )
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ModelError(
        f"{where} is not a local folder, is not in the local hub cache, and the hub could not be "
        f"asked ({type(error).__name__}: {reason}). Check the spelling and the network, or give "
        "the path of a local folder or .gguf file."
    )
