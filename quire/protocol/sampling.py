"""`SamplingParams` and `BeamSearchParams`: how tokens are sampled. Checked when made."""

from __future__ import annotations

import copy
import difflib
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import IntEnum
from typing import Any

from quire.protocol.errors import RequestError
from quire.protocol.structured import StructuredOutputs, as_structured_outputs


def refuse_unknown(
    owner: str, given: Mapping[str, Any], known: Collection[str], reasons: Mapping[str, str]
) -> None:
    """Raise for the first name in `given` that is not known, with its reason or the name that is
    most like it."""
    for name, value in given.items():
        if name in known:
            continue
        if name in reasons:
            raise RequestError(f"{owner}.{name} does not exist (got {value!r}): {reasons[name]}.")
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(known)}."
        raise RequestError(f"{owner}.{name} does not exist (got {value!r}); {hint}")


GREEDY_BELOW = 1e-5
MIN_TEMPERATURE = 1e-2
MAX_N = 16384
MAX_BAD_WORDS = 128
MAX_STOP_STRINGS = 256
"""All of them are looked for after every token."""
MAX_LOGPROB_TOKEN_IDS = 128
MAX_LENGTH_PENALTY = 10.0  # a length to a higher power leaves the range of floats

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
    "lora_request": "pass lora_request to generate",
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


def _boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {value!r}.")
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
    """Whether `_bias` would change nothing, as where another process has called it."""
    tokens, values = bias.keys(), bias.values()
    return (
        all(type(token) is int for token in tokens)
        and all(type(value) is float and -100.0 <= value <= 100.0 for value in values)
        and min(tokens, default=0) >= 0
    )


def _bias(name: str, value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be a dictionary, got {value!r}.")
    if _is_checked_bias(value):
        return value
    checked: dict[int, float] = {}
    for key, bias in value.items():
        try:
            token = int(key)
        except (TypeError, ValueError):
            raise RequestError(f"{name} key {key!r} must be a token id.") from None
        _require(token >= 0, f"{name} key {key!r}", ">= 0", token)
        checked[token] = min(100.0, max(-100.0, _number(f"{name}[{key!r}]", bias)))
    return checked


def _stop(name: str, value: object) -> list[str]:
    if value is None:
        texts: list[str] = []
    elif isinstance(value, str):
        texts = [value]
    elif isinstance(value, Sequence):
        texts = list(value)
    else:
        raise RequestError(f"{name} must be a string or a list of strings, got {value!r}.")
    rule = f"at most {MAX_STOP_STRINGS} strings"
    _require(len(texts) <= MAX_STOP_STRINGS, name, rule, len(texts))
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise RequestError(f"{name}[{i}] must be a string, got {text!r}.")
        _require(text != "", f"{name}[{i}]", "a non-empty string", text)
    return texts


def _words(name: str, value: Any) -> list[str]:
    words = [value] if isinstance(value, str) else list(value or [])
    for i, word in enumerate(words):
        if not isinstance(word, str) or not word:
            raise RequestError(f"{name}[{i}] must be a non-empty string, got {word!r}.")
    _require(len(words) <= MAX_BAD_WORDS, name, f"at most {MAX_BAD_WORDS} words", len(words))
    return words


def _distinct_ids(name: str, value: object) -> list[int]:
    return list(dict.fromkeys(_token_ids(name, value or [])))


def _allowed_ids(name: str, value: object) -> list[int]:
    ids = _token_ids(name, value)
    _require(bool(ids), name, "a non-empty list", ids)
    return list(dict.fromkeys(ids))


def _named_ids(name: str, value: object) -> list[int]:
    ids = _token_ids(name, value)
    rule = f"1 to {MAX_LOGPROB_TOKEN_IDS} ids"
    _require(1 <= len(ids) <= MAX_LOGPROB_TOKEN_IDS, name, rule, ids)
    return ids


def _num_logprobs(name: str, value: object) -> int | None:
    if value is None or value is False:
        return None
    number = 1 if value is True else _integer(name, value)
    _require(number >= -1, name, "-1 (whole vocabulary) or at least 0", number)
    return number


def _top_k(name: str, value: object) -> int:
    number = _integer(name, value)
    _require(number >= -1, name, "0 or -1 (off), or at least 1", number)
    return max(number, 0)


def _seed(name: str, value: object) -> int | None:
    number = _integer(name, value)
    return None if number == -1 else number


def _output_kind(name: str, value: Any) -> RequestOutputKind:
    try:
        return RequestOutputKind(value)
    except ValueError:
        raise RequestError(f"{name} must be a RequestOutputKind, got {value!r}.") from None


def _unsupported(name: str, value: object) -> None:
    """Of a field of vLLM's class that would change results if it were ignored."""
    if value is not None:
        raise RequestError(f"{name} is not supported yet, got {value!r}; leave it unset.")


Check = Callable[[str, Any], Any]
"""(name, value) -> the value as it is kept; `RequestError` if it may not be."""


def _rule(read: Check, holds: Callable[[Any], bool], rule: str) -> Check:
    def check(name: str, value: object) -> Any:
        value = read(name, value)
        _require(holds(value), name, rule, value)
        return value

    return check


def _range(low: float, high: float) -> Check:
    return _rule(_number, lambda value: low <= value <= high, f"in [{low:g}, {high:g}]")


def _or_none(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


_count = _rule(_integer, lambda value: value >= 0, ">= 0")
_positive = _rule(_integer, lambda value: value >= 1, "at least 1")
_penalty = _range(-2.0, 2.0)
_temperature = _range(0.0, 2.0)
_length_penalty = _range(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)


@dataclass(frozen=True)
class ParameterInfo:
    """What is declared about a sampling parameter beside its type and its default."""

    check: Check | None
    help: str
    """Of its flag on the command line; it has none where this is empty."""
    body_type: Any
    """Its type in bodies of HTTP, where that is another."""
    not_in_bodies: str
    """Why bodies cannot set it under its own name; empty where they can."""


def parameter(
    default: Any,
    check: Check | None = None,
    help: str = "",
    *,
    body_type: Any = None,
    not_in_bodies: str = "",
) -> Any:
    """A field of `SamplingParams`, from which its flag and its field in bodies follow."""
    info = ParameterInfo(check, help, body_type, not_in_bodies)
    return field(default=default, metadata={"parameter": info})


@dataclass
class SamplingParams:
    """How one request samples. Names, defaults and rules are vLLM's."""

    n: int = parameter(
        1,
        _rule(_integer, lambda n: 1 <= n <= MAX_N, f"from 1 to {MAX_N}"),
        "Completions per prompt.",
    )
    presence_penalty: float = parameter(
        0.0, _penalty, "Lower the logits of tokens already generated."
    )
    frequency_penalty: float = parameter(
        0.0, _penalty, "Lower the logits of tokens by how often they were generated."
    )
    repetition_penalty: float = parameter(
        1.0,
        # As 32-bit logits can bear.
        _rule(_number, lambda value: 1e-30 <= value <= 1e30, "> 0, from 1e-30 to 1e30"),
        "Divide the logits of tokens seen in prompt or output; 1: off.",
    )
    temperature: float = parameter(
        1.0, _temperature, "Spread of the random draw; 0 always takes the most likely token."
    )
    top_p: float = parameter(
        1.0,
        _rule(_number, lambda value: 0.0 < value <= 1.0, "in (0, 1]"),
        "Sample among the most likely tokens that together have this probability.",
    )
    top_k: int = parameter(0, _top_k, "Sample among this many most likely tokens; 0: all.")
    min_p: float = parameter(
        0.0,
        _range(0.0, 1.0),
        "Leave out tokens less likely than this share of the most likely one.",
    )
    seed: int | None = parameter(None, _or_none(_seed), "Draw the same random numbers each time.")
    stop: str | list[str] | None = parameter(
        None, _stop, "Text that ends the output; may be given several times."
    )
    stop_token_ids: list[int] | None = parameter(
        None, _distinct_ids, "Token ids that end the output, such as 1,2."
    )
    ignore_eos: bool = parameter(False, _boolean, "Go on after the end-of-sequence token.")
    max_tokens: int | None = parameter(
        16,
        _or_none(_positive),
        "Most tokens to generate.",
        not_in_bodies="has another default in each protocol",
    )
    min_tokens: int = parameter(0, _count, "Least tokens to generate.")
    logprobs: int | None = parameter(
        None, _num_logprobs, not_in_bodies="means another thing in each protocol"
    )
    prompt_logprobs: int | None = parameter(None, _num_logprobs)
    logprob_token_ids: list[int] | None = parameter(None, _or_none(_named_ids))
    prompt_logprob_token_ids: list[int] | None = parameter(None, _or_none(_named_ids))
    prompt_logprob_start: int | None = parameter(None, _or_none(_count))
    flat_logprobs: bool = parameter(False, _boolean, not_in_bodies="is a layout of Python objects")
    detokenize: bool = parameter(True, _boolean)
    skip_special_tokens: bool = parameter(True, _boolean, "Leave special tokens out of the text.")
    spaces_between_special_tokens: bool = parameter(
        True, _boolean, "Put spaces between special tokens."
    )
    include_stop_str_in_output: bool = parameter(
        False, _boolean, "Keep the stop text at the end of the output."
    )
    logit_bias: dict[int, float] | None = parameter(
        None,
        _or_none(_bias),
        'Numbers added to the logits of tokens, such as {"42": -5}.',
        body_type=dict[str, float],
    )
    allowed_token_ids: list[int] | None = parameter(
        None, _or_none(_allowed_ids), "Token ids that may be sampled, such as 1,2."
    )
    bad_words: list[str] | None = parameter(
        None, _words, "Text that must not appear; may be given several times."
    )
    output_kind: RequestOutputKind = parameter(
        RequestOutputKind.CUMULATIVE, _output_kind, not_in_bodies="follows from `stream`"
    )
    stream_interval: int | None = parameter(
        None, _or_none(_rule(_integer, lambda value: value >= 1, ">= 1"))
    )
    repetition_detection: RepetitionDetectionParams | None = parameter(
        None, help='End outputs that repeat a pattern, such as {"max_pattern_size": 8}.'
    )
    skip_reading_prefix_cache: bool | None = parameter(
        None, _or_none(_boolean), "Compute the whole prompt even if its prefix is cached."
    )
    speculation: bool = parameter(
        True, _boolean, "Draft tokens, where the engine does; the text is the same without."
    )
    extra_args: dict[str, Any] | None = parameter(None, not_in_bodies="is called vllm_xargs")
    structured_outputs: StructuredOutputs | None = parameter(None, body_type=dict[str, Any])
    guided_decoding: StructuredOutputs | None = parameter(
        None, not_in_bodies="is called guided_json, guided_regex and so on"
    )
    """vLLM's older name of `structured_outputs`."""
    thinking_token_budget: int | None = parameter(None, _unsupported)
    trace_decode_token_ids: Any = parameter(None, _unsupported, not_in_bodies="is not supported")
    routed_experts_prompt_start: int | None = parameter(
        None, _unsupported, not_in_bodies="is not supported"
    )
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
        for name, check, default in _CHECKS:
            value = getattr(self, name)
            if value is not default:
                setattr(self, name, check(name, value))
        if self.max_tokens is not None:
            rule = f"<= max_tokens ({self.max_tokens})"
            _require(self.min_tokens <= self.max_tokens, "min_tokens", rule, self.min_tokens)
        if self.stop and not self.detokenize:
            raise RequestError(
                f"stop={self.stop!r} needs detokenize=True; stop strings are found in text. "
                "Use stop_token_ids instead."
            )
        self._check_named_ids("logprob_token_ids", self.logprobs)
        self._check_named_ids("prompt_logprob_token_ids", self.prompt_logprobs)
        self._check_structured_outputs()
        self._normalise_greedy()
        if self.extra_args is not None and "speculation" in self.extra_args:
            wanted = self.extra_args["speculation"]
            self.speculation = _boolean("extra_args['speculation']", wanted)

    def _check_named_ids(self, name: str, count: int | None) -> None:
        ids = getattr(self, name)
        if ids is not None and count is not None and count != len(ids):
            raise RequestError(
                f"{name} has {len(ids)} ids but {name[: -len('_token_ids')]}s is {count}; "
                "set both to the same number or leave the count unset."
            )

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
        if self.structured_outputs is not None:
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
    def penalizes(self) -> bool:
        amounts = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)
        return amounts != (1.0, 0.0, 0.0)

    @property
    def edits_logits(self) -> bool:
        """Whether anything but a grammar changes logits before tokens are drawn from them."""
        return bool(
            self.min_tokens
            or self.logit_bias
            or self.allowed_token_ids
            or self.bad_words_token_ids
            or self.penalizes
        )

    @property
    def stop_strings(self) -> list[str]:
        assert isinstance(self.stop, list)
        return self.stop

    def clone(self) -> SamplingParams:
        return copy.deepcopy(self)


PARAMETERS: dict[str, ParameterInfo] = {
    item.name: item.metadata["parameter"]
    for item in fields(SamplingParams)
    if "parameter" in item.metadata
}


def _checks() -> Iterator[tuple[str, Check, Any]]:
    """Name and check of each parameter, and its default where that need not be checked."""
    for name, info in PARAMETERS.items():
        if info.check is not None:
            default = getattr(SamplingParams, name)
            is_kept = info.check(name, default) is default
            yield name, info.check, default if is_kept else MISSING


_CHECKS = tuple(_checks())


@dataclass
class BeamSearchParams:
    """Beam search: `beam_width` hypotheses kept by cumulative log-probability."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Checked, and without effect: log-probabilities are those of the logits as the model gives
    them, as vLLM's are unless it is started with another `logprobs_mode`."""
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: Any = None
    skip_special_tokens: bool = True

    def __new__(cls, *arguments: Any, **values: Any) -> BeamSearchParams:
        refuse_unknown("BeamSearchParams", values, cls.__dataclass_fields__, {})
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self.beam_width = _positive("beam_width", self.beam_width)
        self.max_tokens = _positive("max_tokens", self.max_tokens)
        self.temperature = _temperature("temperature", self.temperature)
        self.length_penalty = _length_penalty("length_penalty", self.length_penalty)
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
