"""Looks for what the tokenizers library does not survive, before it reads a tokenizer.json.

It is written in Rust: where it panics, Python gets a `PanicException`, which is no `Exception`, and
where it panics twice the process is aborted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from quire.protocol.errors import ModelError

MAX_GROWTH = 1000
"""How much longer a text may become while it is normalised."""
MAX_STEPS = 10_000


class _Model(msgspec.Struct):
    continuing_subword_prefix: str | None = None
    merges: msgspec.Raw = msgspec.Raw(b"[]")
    """Read only where it must be: it is most of the file."""


class _Pipeline(msgspec.Struct):
    model: _Model | None = None
    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None


def check_tokenizer_json(path: Path, text: str) -> None:
    """Raise a `ModelError` for a file that would end the process, or never end."""
    try:
        pipeline = msgspec.json.decode(text, type=_Pipeline)
    except msgspec.ValidationError:
        return  # the library says what it expects instead
    except (msgspec.DecodeError, RecursionError) as error:
        raise ModelError(
            f"{path} cannot be read as a tokenizer: it is not JSON ({error}); download the model "
            "again."
        ) from None
    if pipeline.model is not None and pipeline.model.continuing_subword_prefix:
        _check_prefix(path, pipeline.model)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        count = _count(getattr(pipeline, name))
        if count > MAX_STEPS:
            raise ModelError(
                f"{path}: {name} has {count} parts, and every text goes through all of them (at "
                f"most {MAX_STEPS} are accepted); download the model again."
            )
    growth = _growth(pipeline.normalizer)
    if growth > MAX_GROWTH:
        raise ModelError(
            f"{path}: normalizer makes texts up to {growth:g} times as long, which would exhaust "
            f"the memory (at most {MAX_GROWTH} is accepted); repair its Replace steps."
        )


def _check_prefix(path: Path, model: _Model) -> None:
    """A merge whose second part lacks the prefix is cut in the middle of a character."""
    prefix = str(model.continuing_subword_prefix)
    for merge in msgspec.json.decode(model.merges):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2 or not str(parts[1]).startswith(prefix):
            raise ModelError(
                f"{path}: model.merges holds {merge!r}, whose second part does not begin with "
                f"continuing_subword_prefix ({prefix!r}); download the model again."
            )


def _count(part: Any) -> int:
    """Objects in a part of the pipeline."""
    members = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return isinstance(part, dict) + sum(map(_count, members))


def _growth(normalizer: Any) -> float:
    """The product over all steps that replace one text by a longer one."""
    if not isinstance(normalizer, dict):
        return 1.0
    if normalizer.get("type") == "Sequence" and isinstance(normalizer.get("normalizers"), list):
        growth = 1.0
        for step in normalizer["normalizers"]:
            growth = min(growth * _growth(step), 1e300)
        return growth
    if normalizer.get("type") != "Replace":
        return 1.0
    pattern, content = normalizer.get("pattern"), normalizer.get("content")
    literal = pattern.get("String") if isinstance(pattern, dict) else None
    shortest = len(literal) if isinstance(literal, str) else 1  # an expression may match a letter
    return max(len(content) / max(shortest, 1), 1.0) if isinstance(content, str) else 1.0


def is_panic(error: BaseException) -> bool:
    return type(error).__name__ == "PanicException"


@contextmanager
def panics_named(path: Path) -> Iterator[None]:
    """Failures of the library inside are `ModelError`s about the file."""
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ModelError(
            f"{path} cannot be read as a tokenizer ({error}); download the model again."
        ) from error
