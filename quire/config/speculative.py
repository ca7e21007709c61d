"""`SpeculativeConfig`: what `speculative_config` says, understood. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from quire.protocol.errors import OptionError

METHODS = ("ngram", "auto", "draft_model", "eagle3", "mtp")
HEADS = ("eagle3", "mtp")
"""Methods that draft from the target's hidden states."""
MTP_NAMES = ("deepseek_mtp", "glm4_moe_mtp")
"""vLLM's names of 'mtp' by the architecture of the target."""
FROM_MODEL = "as the model"
"""In place of a method that follows from `model` and is not known before its files are read."""
ELSEWHERE = (
    "eagle",
    "medusa",
    "mlp_speculator",
    "suffix",
    "ngram_gpu",
    "dflash",
    "dspark",
    "custom",
)
"""Methods of other engines."""
LOOKUP = ("prompt_lookup_min", "prompt_lookup_max")
KEYS = (
    "method",
    "num_speculative_tokens",
    *LOOKUP,
    "num_speculative_tokens_per_batch_size",
)
OF_DRAFT_MODELS = ("model", "draft_tensor_parallel_size", "quantization", "max_model_len")
"""Keys for methods with a model of their own."""
MAX_TOKENS = 16
MAX_NGRAM = 32
DEFAULT_NGRAM = 5
AUTO_TOKENS = 4
AUTO_NGRAMS = (2, 12)
AUTO_BEYOND = 1
"""Drafts of `auto` beyond as many as tokens agree: they may begin to be wrong at any of these."""

Schedule = tuple[tuple[int, int, int], ...]


def scheduled_drafts(schedule: Schedule, num_decoding: int, most: int) -> int:
    """Most drafts of a row while so many rows decode."""
    for least, last, count in schedule:
        if least <= num_decoding <= last:
            return count
    return most


@dataclass(frozen=True)
class SpeculativeConfig:
    """How tokens are drafted."""

    method: str
    num_tokens: int
    """Most drafts of a row; 0 where it follows from the checkpoint of a head."""
    min_ngram: int
    max_ngram: int
    """Tokens at the end of a text that are looked for in the text before them."""
    schedule: Schedule = ()
    """(least, most, drafts): how many drafts a row has while so many rows decode; where no entry
    fits, as many as there may be."""
    model: str | None = None
    """The model that drafts; None: drafts come from the text."""
    quantization: str | None = None
    """Of that model."""
    max_model_len: int | None = None
    """Longest text that it drafts for; None: as long as it and the target can."""
    num_ranks: int | None = None
    """Ranks that it is divided among; None: as the target is."""

    @property
    def num_ahead(self) -> int:
        """Places behind a row's tokens whose KV a draft model computes."""
        return self.num_tokens if self.uses_model else 0

    @property
    def reads_text(self) -> bool:
        """Whether drafts come from the text, which may have none."""
        return self.method in ("ngram", "auto")

    @property
    def uses_model(self) -> bool:
        """Whether a model of its own drafts."""
        return self.method == "draft_model" or (self.is_measured and self.model is not None)

    @property
    def uses_head(self) -> bool:
        """Whether drafts come from the target's hidden states."""
        return self.method in HEADS

    @property
    def is_measured(self) -> bool:
        """Whether the number of drafts follows from what they cost and bring."""
        return self.method == "auto"

    @classmethod
    def from_config(cls, config: dict[str, Any] | None) -> SpeculativeConfig | None:
        """None where nothing is asked for."""
        if not config:
            return None
        given = {key: value for key, value in config.items() if value is not None}
        method = _method(given)
        auto, model = method == "auto", _text(given, "model")
        names_model = model not in (None, "ngram", "[ngram]")
        has_model = method in ("draft_model", FROM_MODEL, *HEADS) or (auto and names_model)
        for key, value in given.items():
            if key not in (*KEYS, *OF_DRAFT_MODELS):
                names = ", ".join((*KEYS, *OF_DRAFT_MODELS))
                raise OptionError(f"speculative_config[{key!r}] is unknown; use {names}.")
            is_ngram = key == "model" and not names_model
            if key in OF_DRAFT_MODELS and not has_model and not is_ngram:
                raise _error(key, f"left out: method {method!r} has no model", value)
            if key in LOOKUP and has_model and not auto:
                raise _error(key, "left out: a model that drafts looks nothing up", value)
        follows = method in (FROM_MODEL, *HEADS) and "num_speculative_tokens" not in given
        usual = AUTO_TOKENS if auto else None
        num_tokens = 0 if follows else _count(given, "num_speculative_tokens", usual)
        if num_tokens > MAX_TOKENS:
            raise _error("num_speculative_tokens", f"from 1 to {MAX_TOKENS}", num_tokens)
        least, most = 0, 0
        if auto or not has_model:
            least, most = _ngrams(given, AUTO_NGRAMS if auto else (DEFAULT_NGRAM, DEFAULT_NGRAM))
        schedule = _schedule(given, num_tokens or MAX_TOKENS)
        if not has_model:
            return cls(method, num_tokens, least, most, schedule)
        quantization = _text(given, "quantization")
        if model is None and method != "mtp":
            raise _error("model", "the folder, file or name of a model that drafts", None)
        longest, num_ranks = (
            _count(given, key, None) if key in given else None
            for key in ("max_model_len", "draft_tensor_parallel_size")
        )
        return cls(
            method, num_tokens, least, most, schedule, model, quantization, longest, num_ranks
        )


def _method(given: dict[str, Any]) -> str:
    """As given, or as it follows from `model`."""
    method, model = given.get("method"), given.get("model")
    if method is None and model is not None:
        return "ngram" if model in ("ngram", "[ngram]") else FROM_MODEL
    if method is None and given and not any(key in given for key in LOOKUP):
        return "mtp"  # refused where the target has no such layer
    if method in METHODS:
        return str(method)
    if method in MTP_NAMES:
        return "mtp"
    if method in ELSEWHERE or str(method).endswith("_mtp"):
        raise OptionError(
            f"speculative_config: method {method!r} is not supported; use one of "
            f"{', '.join(METHODS)}."
        )
    raise _error("method", f"one of {', '.join(METHODS)}", method)


def _text(given: dict[str, Any], key: str) -> str | None:
    value = given.get(key)
    value = fspath(value) if isinstance(value, PathLike) else value
    if value is not None and not isinstance(value, str):
        raise _error(key, "text", value)
    return value


def _ngrams(given: dict[str, Any], usual: tuple[int, int]) -> tuple[int, int]:
    """The shortest and the longest; one that is given alone is both, as in vLLM."""
    found: list[int] = []
    for key in LOOKUP:
        if key in given:
            found.append(_count(given, key, None))
            if found[-1] > MAX_NGRAM:
                raise _error(key, f"from 1 to {MAX_NGRAM}", found[-1])
    if not found:
        return usual
    least, most = found[0], found[-1]
    if least > most:
        raise _error("prompt_lookup_min", f"at most prompt_lookup_max ({most})", least)
    return least, most


def _schedule(given: dict[str, Any], num_tokens: int) -> Schedule:
    key = "num_speculative_tokens_per_batch_size"
    rule = f"a list of [least requests, most requests, drafts], drafts from 0 to {num_tokens}"
    entries = given.get(key, [])
    if not isinstance(entries, (list, tuple)):
        raise _error(key, rule, entries)
    found: list[tuple[int, int, int]] = []
    for entry in entries:
        if not isinstance(entry, (list, tuple)) or [type(one) for one in entry] != [int] * 3:
            raise _error(key, rule, entry)
        least, most, count = entry
        if not 1 <= least <= most or not 0 <= count <= num_tokens:
            raise _error(key, rule, entry)
        if any(least <= other[1] and other[0] <= most for other in found):
            raise _error(key, "a list of ranges that do not overlap", entries)
        found.append((least, most, count))
    return tuple(found)


def _count(given: dict[str, Any], key: str, usual: int | None) -> int:
    value = given.get(key, usual)
    if type(value) is not int or value < 1:
        raise _error(key, "an integer of at least 1", value)
    return value


def _error(key: str, rule: str, value: Any) -> OptionError:
    return OptionError(f"speculative_config[{key!r}] must be {rule}, got {value!r}.")
