"""Default sampling parameters, as a model's generation_config.json recommends them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.config.json_file import read_json_object
from quire.protocol.errors import ModelError, RequestError
from quire.protocol.sampling import SamplingParams

KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def generation_defaults(source: str, models_own: dict[str, Any]) -> SamplingParams:
    """`source` is the option generation_config: "auto", "vllm" or a folder."""
    values, where = models_own, "the model's generation_config.json"
    if source == "vllm":
        values = {}
    elif source != "auto":
        path = Path(source) / "generation_config.json"
        if not path.is_file():
            raise ModelError(
                f"generation_config={source!r}: {path} does not exist; use 'auto' (the model's "
                "own), 'vllm' (none) or a folder with such a file."
            )
        values, where = read_json_object(path), str(path)
    wanted = {name: values[key] for key, name in KEYS.items() if values.get(key) is not None}
    try:
        return SamplingParams(**wanted)
    except RequestError as error:
        raise ModelError(f"{where}: {error} Set generation_config='vllm' to ignore it.") from None
