"""Default sampling parameters, as a model's generation_config.json recommends them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from quire.config.embedded import CHAT_MAX_TOKENS
from quire.config.model import ModelConfig
from quire.files.json_file import read_json_object
from quire.protocol.errors import ModelError, RequestError
from quire.protocol.sampling import RepetitionDetectionParams, SamplingParams

MAX_NEW_TOKENS = "max_new_tokens"
KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    MAX_NEW_TOKENS: "max_tokens",
}
CHAT_REPETITION = RepetitionDetectionParams(max_pattern_size=64, min_pattern_size=16, min_count=4)
"""Ends a chat of the embedded model that goes round in circles. Of a shorter cycle, several make up
a pattern: 64 tokens in a row are no list or table any more."""


def generation_defaults(source: str, model: ModelConfig) -> SamplingParams:
    """`source` is the option generation_config: "auto", "vllm" or a folder."""
    values, where = _recommended(source, model)
    wanted = {name: values[key] for key, name in KEYS.items() if values.get(key) is not None}
    try:
        return SamplingParams(**wanted)
    except RequestError as error:
        raise ModelError(f"{where}: {error} Set generation_config='vllm' to ignore it.") from None


def chat_defaults(source: str, model: ModelConfig) -> SamplingParams:
    """The same for chats, which end where the model ends them, or at `max_new_tokens`."""
    params = generation_defaults(source, model)
    if source == "auto" and model.source.is_embedded:
        return dataclasses.replace(
            params, max_tokens=CHAT_MAX_TOKENS, repetition_detection=CHAT_REPETITION
        )
    values, _ = _recommended(source, model)
    return dataclasses.replace(params, max_tokens=values.get(MAX_NEW_TOKENS))


def _recommended(source: str, model: ModelConfig) -> tuple[dict[str, Any], str]:
    """What a generation_config.json says, and where it lies."""
    if source == "vllm":
        return {}, ""
    if source == "auto":
        return model.generation, "the model's generation_config.json"
    path = Path(source) / "generation_config.json"
    if not path.is_file():
        raise ModelError(
            f"generation_config={source!r}: {path} does not exist; use 'auto' (the model's "
            "own), 'vllm' (none) or a folder with such a file."
        )
    return read_json_object(path), str(path)
