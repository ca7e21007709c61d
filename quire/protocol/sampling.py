"""`SamplingParams` and `BeamSearchParams`: how tokens are chosen. Checked when made."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from quire.protocol.errors import RequestError
from quire.protocol.structured import StructuredOutputs, as_structured_outputs
from quire.protocol.unknown_arguments import refuse_unknown

GREEDY_BELOW = 1e-5
MIN_TEMPERATURE = 1e-2
MAX_N = 16384
MAX_BAD_WORDS = 128
MAX_STOP_STRINGS = 256
"""All of them are looked for after every token."""
MAX_LOGPROB_TOKEN_IDS = 128
MAX_LENGTH_PENALTY = 10.0  # a length to a higher power leaves the range of floats

# Fields of vLLM's class that would change results if ignored; refused until they exist.
UNSUPPORTED_FIELDS = (
    "thinking_token_budget",
    "trace_decode_token_ids",
    "routed_experts_prompt_start",
)


# Arguments that vLLM's class once had or users expect, and what to do instead.
_BEAMS = "use LLM.beam_search with BeamSearchParams"
_TRUNCATION = "pass tokenization_kwargs={'truncate_prompt_tokens': ...} to generate"
MISSING_FIELDS = {
    "best_of": "set n, ask for logprobs, and choose by cumulative_logprob",
    "logits_processors": (
        "requests bring no code into the engine; logit_bias, allowed_token_ids, bad_words and "
        "structured_outputs change what is sampled"
    ),
    "use_beam_search": _BEAMS,
    "beam_width": _BEAMS,
    "length_penalty": _BEAMS,
    "early_stopping": _BEAMS,
    "truncate_prompt_tokens": _TRUNCATION,
    "truncation_side": _TRUNCATION,
    "max_new_tokens": "set max_tokens",
    "do_sample": "set temperature; 0 always takes the most likely token",
    "priority": "pass priority to generate",
    "lora_request": "adapters are not supported yet",
}


class RequestOutputKind(IntEnum):
    """What each streamed output holds."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True)
class RepetitionDetectionParams:
    """Ends a request (`finish_reason="repetition"`) whose tail repeats one pattern."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        _require(self.min_pattern_size >= 1, "min_pattern_size", ">= 1", self.min_pattern_size)
        _require(
            self.max_pattern_size >= self.min_pattern_size,
            "max_pattern_size",
            f">= min_pattern_size ({self.min_pattern_size})",
            self.max_pattern_size,
        )
        _require(self.min_count >= 2, "min_count", ">= 2", self.min_count)


def _require(condition: bool, name: str, rule: str, value: object) -> None:
    if not condition:
        raise RequestError(f"{name} must be {rule}, got {value!r}.")


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} must be a number, got {value!r}.")
    if not math.isfinite(value):
        raise RequestError(f"{name} must be finite, got {value!r}.")
    return float(value)


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        if isinstance(value, float) and value.is_integer():
            return int(value)
        raise RequestError(f"{name} must be an integer, got {value!r}.")
    return value


def _token_ids(name: str, value: object) -> list[int]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise RequestError(f"{name} must be a list of token ids, got {value!r}.")
    if all(type(v) is int for v in value) and min(value, default=0) >= 0:
        return list(value)
    ids = [_integer(f"{name}[{i}]", v) for i, v in enumerate(value)]
    for i, token in enumerate(ids):
        _require(token >= 0, f"{name}[{i}]", ">= 0", token)
    return ids


def _is_checked_bias(bias: dict[Any, Any]) -> bool:
    """Whether `_checked_bias` would change nothing, as where another process has called it."""
    tokens, values = bias.keys(), bias.values()
    return (
        all(type(token) is int for token in tokens)
        and all(type(value) is float and -100.0 <= value <= 100.0 for value in values)
        and min(tokens, default=0) >= 0
    )


def _checked_bias(bias: dict[Any, Any]) -> dict[int, float]:
    checked: dict[int, float] = {}
    for key, value in bias.items():
        try:
            token = int(key)
        except (TypeError, ValueError):
            raise RequestError(f"logit_bias key {key!r} must be a token id.") from None
        _require(token >= 0, f"logit_bias key {key!r}", ">= 0", token)
        checked[token] = min(100.0, max(-100.0, _number(f"logit_bias[{key!r}]", value)))
    return checked


@dataclass
class SamplingParams:
    """How one request samples. Names, defaults and rules are vLLM's."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprob_token_ids: list[int] | None = None
    prompt_logprob_start: int | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    skip_reading_prefix_cache: bool | None = None
    extra_args: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_decoding: StructuredOutputs | None = None
    """vLLM's older name of `structured_outputs`."""
    thinking_token_budget: int | None = None
    trace_decode_token_ids: Any = None
    routed_experts_prompt_start: int | None = None
    bad_words_token_ids: list[list[int]] = field(default_factory=list, repr=False)
    """Filled by the frontend from `bad_words`, which only a tokenizer can read."""

    def __new__(cls, *arguments: Any, **values: Any) -> SamplingParams:
        # Before __init__, whose TypeError for an unknown name would say neither why nor what else.
        refuse_unknown("SamplingParams", values, cls.__dataclass_fields__, MISSING_FIELDS)
        return super().__new__(cls)

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Parameters some of which may be None for their defaults; `max_tokens=None` is a value."""
        given = {k: v for k, v in values.items() if v is not None or k == "max_tokens"}
        return cls(**given)

    def __post_init__(self) -> None:
        for name in UNSUPPORTED_FIELDS:
            if getattr(self, name) is not None:
                raise RequestError(
                    f"{name} is not supported yet, got {getattr(self, name)!r}; leave it unset."
                )
        self._check_counts()
        self._check_numbers()
        self._check_stop()
        self._check_logprobs()
        self._check_token_lists()
        self._check_structured_outputs()
        self._normalise_greedy()

    def _check_counts(self) -> None:
        self.n = _integer("n", self.n)
        _require(1 <= self.n <= MAX_N, "n", f"from 1 to {MAX_N}", self.n)
        self.top_k = _integer("top_k", self.top_k)
        _require(self.top_k >= -1, "top_k", "0 or -1 (off), or at least 1", self.top_k)
        self.top_k = max(self.top_k, 0)
        if self.max_tokens is not None:
            self.max_tokens = _integer("max_tokens", self.max_tokens)
            _require(self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        self.min_tokens = _integer("min_tokens", self.min_tokens)
        _require(self.min_tokens >= 0, "min_tokens", ">= 0", self.min_tokens)
        if self.max_tokens is not None:
            rule = f"<= max_tokens ({self.max_tokens})"
            _require(self.min_tokens <= self.max_tokens, "min_tokens", rule, self.min_tokens)
        if self.stream_interval is not None:
            self.stream_interval = _integer("stream_interval", self.stream_interval)
            _require(self.stream_interval >= 1, "stream_interval", ">= 1", self.stream_interval)
        if self.seed is not None:
            self.seed = _integer("seed", self.seed)
            if self.seed == -1:
                self.seed = None
        try:
            self.output_kind = RequestOutputKind(self.output_kind)
        except ValueError:
            raise RequestError(
                f"output_kind must be a RequestOutputKind, got {self.output_kind!r}."
            ) from None

    def _check_numbers(self) -> None:
        for name, low, high in (
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("temperature", 0.0, 2.0),
            ("min_p", 0.0, 1.0),
        ):
            value = _number(name, getattr(self, name))
            _require(low <= value <= high, name, f"in [{low:g}, {high:g}]", value)
            setattr(self, name, value)
        self.top_p = _number("top_p", self.top_p)
        _require(0.0 < self.top_p <= 1.0, "top_p", "in (0, 1]", self.top_p)
        self.repetition_penalty = _number("repetition_penalty", self.repetition_penalty)
        in_range = 1e-30 <= self.repetition_penalty <= 1e30  # as 32-bit logits can bear
        rule = "> 0, from 1e-30 to 1e30"
        _require(in_range, "repetition_penalty", rule, self.repetition_penalty)

    def _check_stop(self) -> None:
        if self.stop is None:
            self.stop = []
        elif isinstance(self.stop, str):
            self.stop = [self.stop]
        elif isinstance(self.stop, Sequence):
            self.stop = list(self.stop)
        else:
            raise RequestError(f"stop must be a string or a list of strings, got {self.stop!r}.")
        rule = f"at most {MAX_STOP_STRINGS} strings"
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", rule, len(self.stop))
        for i, text in enumerate(self.stop):
            if not isinstance(text, str):
                raise RequestError(f"stop[{i}] must be a string, got {text!r}.")
            _require(text != "", f"stop[{i}]", "a non-empty string", text)
        if self.stop and not self.detokenize:
            raise RequestError(
                f"stop={self.stop!r} needs detokenize=True; stop strings are found in text. "
                "Use stop_token_ids instead."
            )
        ids = _token_ids("stop_token_ids", self.stop_token_ids or [])
        self.stop_token_ids = list(dict.fromkeys(ids))

    def _check_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is None or value is False:
                setattr(self, name, None)
                continue
            value = 1 if value is True else _integer(name, value)
            _require(value >= -1, name, "-1 (whole vocabulary) or at least 0", value)
            setattr(self, name, value)
        for name, count in (
            ("logprob_token_ids", self.logprobs),
            ("prompt_logprob_token_ids", self.prompt_logprobs),
        ):
            if getattr(self, name) is None:
                continue
            ids = _token_ids(name, getattr(self, name))
            rule = f"1 to {MAX_LOGPROB_TOKEN_IDS} ids"
            _require(1 <= len(ids) <= MAX_LOGPROB_TOKEN_IDS, name, rule, ids)
            if count is not None and count != len(ids):
                raise RequestError(
                    f"{name} has {len(ids)} ids but {name[: -len('_token_ids')]}s is {count}; "
                    "set both to the same number or leave the count unset."
                )
            setattr(self, name, ids)
        if self.prompt_logprob_start is not None:
            self.prompt_logprob_start = _integer("prompt_logprob_start", self.prompt_logprob_start)
            _require(
                self.prompt_logprob_start >= 0,
                "prompt_logprob_start",
                ">= 0",
                self.prompt_logprob_start,
            )

    def _check_token_lists(self) -> None:
        if self.allowed_token_ids is not None:
            ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
            _require(bool(ids), "allowed_token_ids", "a non-empty list", ids)
            self.allowed_token_ids = list(dict.fromkeys(ids))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise RequestError(f"logit_bias must be a dictionary, got {self.logit_bias!r}.")
            if not _is_checked_bias(self.logit_bias):
                self.logit_bias = _checked_bias(self.logit_bias)
        words = [self.bad_words] if isinstance(self.bad_words, str) else self.bad_words
        self.bad_words = list(words or [])
        for i, word in enumerate(self.bad_words):
            if not isinstance(word, str) or not word:
                raise RequestError(f"bad_words[{i}] must be a non-empty string, got {word!r}.")
        rule = f"at most {MAX_BAD_WORDS} words"
        _require(len(self.bad_words) <= MAX_BAD_WORDS, "bad_words", rule, len(self.bad_words))

    def _check_structured_outputs(self) -> None:
        if self.guided_decoding is not None:
            if self.structured_outputs is not None:
                raise RequestError(
                    "guided_decoding is an old name of structured_outputs; set the latter alone."
                )
            warnings.warn(
                "guided_decoding is an old name; use structured_outputs.",
                DeprecationWarning,
                stacklevel=4,
            )
            self.structured_outputs, self.guided_decoding = self.guided_decoding, None
        self.structured_outputs = as_structured_outputs(self.structured_outputs)

    def _normalise_greedy(self) -> None:
        if self.temperature < GREEDY_BELOW:
            if self.n > 1:
                raise RequestError(
                    f"n must be 1 with greedy sampling (temperature=0), got {self.n}; "
                    "all of them would be equal."
                )
            self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0
        elif self.temperature < MIN_TEMPERATURE:
            warnings.warn(
                f"temperature={self.temperature} is raised to {MIN_TEMPERATURE}: smaller values "
                "overflow; use 0 for greedy sampling.",
                stacklevel=4,
            )
            self.temperature = MIN_TEMPERATURE

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs is not None or self.prompt_logprob_token_ids is not None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None or self.logprob_token_ids is not None

    @property
    def stop_strings(self) -> list[str]:
        assert isinstance(self.stop, list)
        return self.stop

    def clone(self) -> SamplingParams:
        return copy.deepcopy(self)


@dataclass
class BeamSearchParams:
    """Beam search: `beam_width` hypotheses kept by cumulative log-probability."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: Any = None
    skip_special_tokens: bool = True

    def __new__(cls, *arguments: Any, **values: Any) -> BeamSearchParams:
        refuse_unknown("BeamSearchParams", values, cls.__dataclass_fields__, {})
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self.beam_width = _integer("beam_width", self.beam_width)
        _require(self.beam_width >= 1, "beam_width", "at least 1", self.beam_width)
        self.max_tokens = _integer("max_tokens", self.max_tokens)
        _require(self.max_tokens >= 1, "max_tokens", "at least 1", self.max_tokens)
        self.temperature = _number("temperature", self.temperature)
        _require(0.0 <= self.temperature <= 2.0, "temperature", "in [0, 2]", self.temperature)
        self.length_penalty = _number("length_penalty", self.length_penalty)
        rule = f"in [-{MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}]"
        fits = abs(self.length_penalty) <= MAX_LENGTH_PENALTY
        _require(fits, "length_penalty", rule, self.length_penalty)
        if self.structured_outputs is not None:
            raise RequestError(
                "structured_outputs is not supported in beam search; use generate, or leave it "
                "unset."
            )

    def sampling(self) -> SamplingParams:
        """What the members of a search have in common with requests that sample."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
