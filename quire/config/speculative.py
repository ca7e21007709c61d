"""`SpeculativeConfig`: what `speculative_config` says, understood. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.protocol.errors import OptionError

METHODS = ("ngram", "auto")
LATER = ("draft_model", "eagle3", "mtp")
"""Methods that need a model of their own, and are not there yet."""
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
KEYS = (
    "method",
    "model",
    "num_speculative_tokens",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "num_speculative_tokens_per_batch_size",
)
OF_DRAFT_MODELS = ("draft_tensor_parallel_size", "quantization", "max_model_len", "revision")
MAX_TOKENS = 16
MAX_NGRAM = 32
DEFAULT_NGRAM = 5
AUTO_TOKENS = 4
AUTO_NGRAMS = (3, 12)

Schedule = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class SpeculativeConfig:
    """How tokens are drafted."""

    method: str
    num_tokens: int
    """Most drafts of a row."""
    min_ngram: int
    max_ngram: int
    """Tokens at the end of a text that are looked for in the text before them."""
    schedule: Schedule = ()
    """(least, most, drafts): how many drafts a row has while so many rows decode; where no entry
    fits, as many as there may be."""

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
        for key in given:
            if key in OF_DRAFT_MODELS:
                raise _error(key, f"left out: method {method!r} has no model", given[key])
            if key not in KEYS:
                names = ", ".join((*KEYS, *OF_DRAFT_MODELS))
                raise OptionError(f"speculative_config[{key!r}] is unknown; use {names}.")
        auto = method == "auto"
        num_tokens = _count(given, "num_speculative_tokens", AUTO_TOKENS if auto else None)
        if num_tokens > MAX_TOKENS:
            raise _error("num_speculative_tokens", f"from 1 to {MAX_TOKENS}", num_tokens)
        least, most = _ngrams(given, AUTO_NGRAMS if auto else (DEFAULT_NGRAM, DEFAULT_NGRAM))
        return cls(method, num_tokens, least, most, _schedule(given, num_tokens))


def _method(given: dict[str, Any]) -> str:
    """As given, or as it follows from `model`."""
    method, model = given.get("method"), given.get("model")
    if method is None:
        method = "ngram" if model in ("ngram", "[ngram]") else "draft_model"
        if model is None:
            raise _error("method", f"one of {', '.join(METHODS)}", None)
    if method in METHODS:
        if model not in (None, "ngram", "[ngram]"):
            raise _error("model", f"left out with method {method!r}", model)
        return str(method)
    if method in LATER:
        raise OptionError(
            f"speculative_config: method {method!r} is not supported yet; use one of "
            f"{', '.join(METHODS)}, which draft from the text itself."
        )
    if method in ELSEWHERE:
        raise OptionError(
            f"speculative_config: method {method!r} is not supported; use one of "
            f"{', '.join(METHODS)}."
        )
    raise _error("method", f"one of {', '.join(METHODS)}", method)


def _ngrams(given: dict[str, Any], usual: tuple[int, int]) -> tuple[int, int]:
    """The shortest and the longest; one that is given alone is both, as in vLLM."""
    least, most = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
    if least is None and most is None:
        return usual
    least = _count(given, "prompt_lookup_min", most)
    most = _count(given, "prompt_lookup_max", least)
    if most > MAX_NGRAM:
        raise _error("prompt_lookup_max", f"from 1 to {MAX_NGRAM}", most)
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
        found.append((least, most, count))
    return tuple(found)


def _count(given: dict[str, Any], key: str, usual: int | None) -> int:
    value = given.get(key, usual)
    if type(value) is not int or value < 1:
        raise _error(key, "an integer of at least 1", value)
    return value


def _error(key: str, rule: str, value: Any) -> OptionError:
    return OptionError(f"speculative_config[{key!r}] must be {rule}, got {value!r}.")
