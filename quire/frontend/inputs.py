"""From what a caller passes to checked requests. Bad input ends here, before any work is done."""

from __future__ import annotations

import contextlib
import copy
from array import array as array_of_ints
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from quire.config.options import EngineOptions
from quire.protocol.adapter import LoRARequest
from quire.protocol.errors import ContextLengthError, QuireError, RequestError
from quire.protocol.messages import ID_SEPARATOR
from quire.protocol.plan import Int32Array
from quire.protocol.request import KEY_BITS, NewRequest, SchedulingPolicy
from quire.protocol.sampling import BeamSearchParams, SamplingParams
from quire.text.chat_template import is_batch
from quire.text.tokenizer import Tokenizer

REFUSED_PROMPT_KEYS = (
    "multi_modal_data",
    "multi_modal_uuids",
    "mm_processor_kwargs",
    "prompt_embeds",
    "encoder_prompt",
    "decoder_prompt",
    "negative_prompt",
)
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
Params = SamplingParams | Sequence[SamplingParams] | None
ALWAYS_TOKENISED = 1 << 16
"""Characters of a text that is tokenised however short the context is."""
BATCH_CHARACTERS = 4 << 20
MIN_PRIORITY, MAX_PRIORITY = -(1 << 63), (1 << 63) - 1


@dataclass(slots=True)
class Prompt:
    """One prompt as the caller gave it: text, token ids, or both."""

    text: str | None
    token_ids: Int32Array | None
    cache_salt: str | None = None
    given_ids: Any = None
    """Token ids as they came, until `InputProcessor.check_prompt` makes `token_ids` of them."""


@dataclass(frozen=True)
class TokenizationOptions:
    """`tokenization_kwargs` of `generate` and `chat`."""

    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: str = "left"

    @classmethod
    def from_kwargs(cls, kwargs: Mapping[str, Any] | None, **defaults: Any) -> TokenizationOptions:
        values = {**defaults, **(kwargs or {})}
        unknown = sorted(set(values) - set(cls.__dataclass_fields__))
        if unknown:
            raise RequestError(
                f"tokenization_kwargs[{unknown[0]!r}] is not supported; use "
                f"{', '.join(cls.__dataclass_fields__)}."
            )
        options = cls(**values)
        limit = options.truncate_prompt_tokens
        if limit is not None and (not isinstance(limit, int) or limit < -1 or limit == 0):
            raise RequestError(
                f"truncate_prompt_tokens must be -1 (to the context) or at least 1, got {limit!r}."
            )
        if options.truncation_side not in ("left", "right"):
            raise RequestError(
                f"truncation_side must be 'left' or 'right', got {options.truncation_side!r}."
            )
        return options


@dataclass(frozen=True)
class RequestTerms:
    """How the engine is to treat requests that were made together."""

    priority: int = 0
    tenant: str = ""
    shares_prefixes: bool = False
    timeout_s: float | None = None
    wants_progress: bool = False
    adapter: LoRARequest | None = None


def parse_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or many, each a string, a list of token ids or a dictionary."""
    if isinstance(prompts, str | Mapping) or _is_token_ids(prompts):
        return [_parse_prompt(prompts)]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise RequestError(
            "prompts must be a string, a dictionary, a list of token ids, or a list of these, "
            f"got {type(prompts).__name__}."
        )
    parsed = []
    for i, prompt in enumerate(prompts):
        with naming_index(i):
            parsed.append(_parse_prompt(prompt))
    return parsed


def number_of_prompts(prompts: Any) -> int:
    """Of what `parse_prompts` takes, without looking at more than the first."""
    if not isinstance(prompts, list) or not prompts:
        return 1
    return len(prompts) if isinstance(prompts[0], str | list | Mapping) else 1


def _is_token_ids(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.dtype.kind in "iu"
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and len(value) > 0
        and all(isinstance(token, int | np.integer) for token in value)
    )


def _parse_prompt(prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(prompt, None)
    if isinstance(prompt, Mapping):
        for key in prompt:
            if key in REFUSED_PROMPT_KEYS and prompt[key] is not None:
                raise RequestError(f"prompt key {key!r} is not supported; pass text or token ids.")
            if key not in PROMPT_KEYS and key not in REFUSED_PROMPT_KEYS:
                raise RequestError(
                    f"prompt key {key!r} is unknown; use one of {', '.join(PROMPT_KEYS)}."
                )
        text, ids, salt = (
            prompt.get("prompt"),
            prompt.get("prompt_token_ids"),
            prompt.get("cache_salt"),
        )
        if text is not None and not isinstance(text, str):
            raise RequestError(f"prompt must be a string, got {text!r}.")
        if salt is not None and not isinstance(salt, str):
            raise RequestError(f"cache_salt must be a string, got {salt!r}.")
        if text is None and ids is None:
            raise RequestError("prompt dictionary needs 'prompt' or 'prompt_token_ids'.")
        return Prompt(text, None, salt, given_ids=ids)
    if _is_token_ids(prompt):
        return Prompt(None, None, given_ids=prompt)
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes) and not len(prompt):
        raise RequestError("prompt is empty; give at least one token.")
    raise RequestError(
        f"prompt must be a string, a dictionary or a list of token ids, got {prompt!r}."
    )


def _token_array(ids: Any) -> Int32Array:
    if isinstance(ids, str | bytes):
        raise RequestError(f"prompt_token_ids must be a list of token ids, got {ids!r}.")
    if isinstance(ids, list) and ids:
        # Quicker than numpy where there is a list of integers, and refuses what is none.
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return np.asarray(array_of_ints("i", ids))  # those below 0 are refused later
    try:
        array = np.asarray(ids)
    except (TypeError, ValueError):
        array = np.empty((0, 0))
    if not array.size:
        if array.ndim == 1:
            raise RequestError("prompt_token_ids is empty; give at least one token.")
        array = np.empty((0, 0))
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise RequestError(f"prompt_token_ids must be a list of integers, got {ids!r}.")
    if int(array.max()) > np.iinfo(np.int32).max or int(array.min()) < 0:
        bad = next(int(token) for token in array if not 0 <= token <= np.iinfo(np.int32).max)
        raise RequestError(f"prompt_token_ids holds {bad}, which is outside the vocabulary.")
    return array.astype(np.int32)


def params_per_prompt(params: Params, count: int, default: SamplingParams) -> list[SamplingParams]:
    """One for each of `count` prompts, from one for all, or a list, or nothing."""
    if params is None:
        params = default
    if isinstance(params, SamplingParams):
        return [params] * count
    given = list(params) if isinstance(params, Sequence) else [params]
    for i, one in enumerate(given):
        if not isinstance(one, SamplingParams):
            raise RequestError(f"sampling_params[{i}] must be SamplingParams, got {one!r}.")
    if len(given) != count:
        raise RequestError(
            f"sampling_params has {len(given)} entries for {count} prompts; give one, or one "
            "for each prompt."
        )
    return given


def adapters_per_prompt(lora_request: Any, count: int) -> list[LoRARequest | None]:
    """One for each of `count` prompts, from one for all, or a list, or nothing."""
    if lora_request is None or isinstance(lora_request, LoRARequest):
        return [lora_request] * count
    if not isinstance(lora_request, Sequence) or isinstance(lora_request, str):
        raise RequestError(
            f"lora_request must be a LoRARequest, or a list of them, got {lora_request!r}."
        )
    for i, one in enumerate(lora_request):
        if one is not None and not isinstance(one, LoRARequest):
            raise RequestError(f"lora_request[{i}] must be a LoRARequest or None, got {one!r}.")
    if len(lora_request) != count:
        raise RequestError(
            f"lora_request has {len(lora_request)} entries for {count} prompts; give one, or one "
            "for each prompt."
        )
    return list(lora_request)


class naming_index:
    """Prefixes a `RequestError` raised inside with the index of the prompt it is about."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RequestError):
            error.args = (f"prompts[{self.index}]: {error}",)  # it keeps its kind


def _batches(strings: list[str]) -> Iterator[slice]:
    """Of `BATCH_CHARACTERS` or one string: a tokenizer takes a hundred bytes for each character."""
    first = size = 0
    for i, text in enumerate(strings):
        if i > first and size + len(text) > BATCH_CHARACTERS:
            yield slice(first, i)
            first, size = i, 0
        size += len(text)
    yield slice(first, len(strings))


class InputProcessor:
    """Makes valid `NewRequest`s for one engine."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        options: EngineOptions,
        client_index: int = 0,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        assert options.model.max_model_len is not None
        self.max_model_len = options.model.max_model_len
        self.max_logprobs = options.model.max_logprobs
        self.uses_priority = options.scheduler.scheduling_policy == SchedulingPolicy.PRIORITY
        eos = list(eos_token_ids)
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            eos.append(tokenizer.eos_token_id)
        # A tokenizer may know more tokens than the model, which never generates those.
        self.eos_token_ids = tuple(i for i in dict.fromkeys(eos) if i < self.vocab_size)
        self._next_key = client_index << KEY_BITS
        self._key_lock = Lock()

    @property
    def loaded_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise QuireError(
                "the engine has no tokenizer: it was started with skip_tokenizer_init=True."
            )
        return self.tokenizer

    def render_chat(self, messages: Sequence[Any], **settings: Any) -> Prompt:
        """A conversation as text; `settings` are those of `Tokenizer.render_chat`."""
        return Prompt(self.loaded_tokenizer.render_chat(messages, **settings), None)

    def render_chats(self, messages: Any, **settings: Any) -> list[Prompt]:
        """The same of one or several conversations."""
        if not is_batch(messages):
            return [self.render_chat(messages, **settings)]
        prompts = []
        for i, conversation in enumerate(messages):
            with naming_index(i):
                prompts.append(self.render_chat(conversation, **settings))
        return prompts

    def tokenize(self, prompts: list[Prompt], options: TokenizationOptions) -> None:
        """Fill in all token ids and check them."""
        self.encode_texts(prompts, options)
        for i, prompt in enumerate(prompts):
            with naming_index(i):
                self.check_prompt(prompt, options)

    def encode_texts(self, prompts: list[Prompt], options: TokenizationOptions) -> None:
        """Fill in the token ids of text prompts."""
        texts = [i for i, one in enumerate(prompts) if one.token_ids is one.given_ids is None]
        if texts and self.tokenizer is None:
            raise RequestError(
                f"prompts[{texts[0]}] is text, but the engine was started with "
                "skip_tokenizer_init=True; pass prompt_token_ids."
            )
        if texts:
            assert self.tokenizer is not None
            strings = [prompts[i].text or "" for i in texts]
            if options.truncate_prompt_tokens is not None:
                strings = [self._cut_text(text, options) for text in strings]
                for i, text in zip(texts, strings, strict=True):
                    prompts[i].text = text
            else:
                for i, text in zip(texts, strings, strict=True):
                    with naming_index(i):
                        self.check_text(text)
            for part in _batches(strings):
                self._encode_batch(prompts, texts[part], strings[part], options)

    def _encode_batch(
        self,
        prompts: list[Prompt],
        indices: list[int],
        strings: list[str],
        options: TokenizationOptions,
    ) -> None:
        assert self.tokenizer is not None
        try:
            encoded = self.tokenizer.encode_batch(strings, options.add_special_tokens)
        except RequestError:
            for i, text in zip(indices, strings, strict=True):
                with naming_index(i):
                    self.tokenizer.encode(text)
            raise
        for i, ids in zip(indices, encoded, strict=True):
            prompts[i].token_ids = np.array(ids, np.int32)

    def _cut_text(self, text: str, options: TokenizationOptions) -> str:
        """What of a text that will be truncated can become one of its tokens: tokenising the rest
        is for nothing. Twice the characters that the tokens can have leave room for another split
        where the text was cut."""
        assert self.tokenizer is not None
        most = max(2 * self.max_model_len * self.tokenizer.max_chars_per_token, ALWAYS_TOKENISED)
        if len(text) <= most:
            return text
        return text[-most:] if options.truncation_side == "left" else text[:most]

    def check_text(self, text: str, least: int = ALWAYS_TOKENISED) -> None:
        """Refuse a text that cannot fit whatever its tokens are, before it is tokenised. One of up
        to `least` characters is not refused."""
        if len(text) <= max(least, self.max_model_len) or self.tokenizer is None:
            return
        most = self.max_model_len * self.tokenizer.max_chars_per_token
        if len(text) > max(most, least):
            num_tokens = -(-len(text) // self.tokenizer.max_chars_per_token)
            raise ContextLengthError(self.max_model_len, num_tokens, is_bound=True)

    def check_prompt(self, prompt: Prompt, options: TokenizationOptions) -> None:
        """Make its token ids final, unless they cannot be used."""
        ids = prompt.token_ids
        if prompt.given_ids is not None:
            ids = _token_array(prompt.given_ids)
        assert ids is not None
        if (limit := options.truncate_prompt_tokens) is not None:
            limit = self.max_model_len - 1 if limit == -1 else limit
            ids = ids[-limit:] if options.truncation_side == "left" else ids[:limit]
        prompt.token_ids = ids
        if prompt.text == "" or not len(ids):
            raise RequestError("prompt is empty; give at least one token.")
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if len(outside):
            raise RequestError(
                f"prompt_token_ids holds {int(outside[0])}, which is outside the vocabulary of "
                f"{self.vocab_size} tokens (0 to {self.vocab_size - 1})."
            )
        if len(ids) >= self.max_model_len:
            raise ContextLengthError(self.max_model_len, len(ids))

    def prepare_params(self, params: SamplingParams) -> SamplingParams:
        """Check parameters against the model and fill in what only the tokenizer knows."""
        for name in (
            "allowed_token_ids",
            "logprob_token_ids",
            "prompt_logprob_token_ids",
            "stop_token_ids",
        ):
            self.check_ids(name, getattr(params, name) or ())
        self.check_ids("logit_bias", params.logit_bias or ())
        prepared = copy.copy(params)
        prepared.top_k = 0 if params.top_k >= self.vocab_size else params.top_k
        prepared.logprobs = self._logprob_count("logprobs", params.logprobs)
        prepared.prompt_logprobs = self._logprob_count("prompt_logprobs", params.prompt_logprobs)
        needs_text = "stop" if params.stop else "bad_words" if params.bad_words else None
        if needs_text and self.tokenizer is None:
            raise RequestError(
                f"{needs_text}={getattr(params, needs_text)!r} needs a tokenizer, but the engine "
                "was started with skip_tokenizer_init=True."
            )
        if params.bad_words:
            assert self.tokenizer is not None
            prepared.bad_words_token_ids = self.tokenizer.bad_words_ids(params.bad_words)
        return prepared

    def check_ids(self, name: str, ids: Collection[int]) -> None:
        if not ids or (min(ids) >= 0 and max(ids) < self.vocab_size):
            return
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"{name} holds {token}, which is outside the vocabulary of {self.vocab_size} "
                    "tokens."
                )

    def _logprob_count(self, name: str, wanted: int | None) -> int | None:
        if wanted is None:
            return None
        count = self.vocab_size if wanted == -1 else wanted
        if self.max_logprobs != -1 and count > self.max_logprobs:
            raise RequestError(
                f"{name}={wanted} asks for {count} logprobs per token, but max_logprobs is "
                f"{self.max_logprobs}. Lower {name}, or start the engine with a larger "
                "max_logprobs (-1 for no limit)."
            )
        return min(count, self.vocab_size)

    def check_priority(self, priority: int) -> int:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority must be an integer, got {priority!r}.")
        if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
            raise RequestError(f"priority must fit in 64 bits, got {priority}; use a smaller one.")
        if priority and not self.uses_priority:
            raise RequestError(
                f"priority={priority} has no effect under scheduling_policy='fcfs'; start the "
                "engine with scheduling_policy='priority'."
            )
        return priority

    def new_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        terms: RequestTerms,
        *,
        arrival_time: float,
        name: str | None = None,
        first_key: int = 0,
        streams: bool = False,
        pooling: str | None = None,
        beams: BeamSearchParams | None = None,
        adapter: LoRARequest | None = None,
    ) -> NewRequest:
        """A request from a checked prompt and prepared parameters. The engine knows it by its key,
        which is counted from `first_key` on, and by `name`. `beams`, if it is a beam search; then
        `params` are `beams.sampling()`."""
        assert prompt.token_ids is not None
        num_tokens = len(prompt.token_ids)
        if params.min_tokens > self.max_model_len - num_tokens:
            raise ContextLengthError(
                self.max_model_len, num_tokens, params.min_tokens, "min_tokens"
            )
        with self._key_lock:
            key = first_key + self._next_key
            self._next_key += params.n
        return NewRequest(
            key=key,
            request_id=str(key) if name is None else f"{name}{ID_SEPARATOR}{key}",
            prompt_token_ids=prompt.token_ids,
            params=params,
            arrival_time=arrival_time,
            eos_token_ids=self.eos_token_ids,
            priority=self.check_priority(terms.priority),
            cache_salt=prompt.cache_salt,
            adapter=adapter,
            # The frontend must see tokens as they come also where it looks for an end in them.
            streams=streams
            or bool(params.stop)
            or params.wants_logprobs
            or params.repetition_detection is not None,
            interactive=streams,
            tenant=terms.tenant,
            shares_prefixes=terms.shares_prefixes,
            deadline=None if terms.timeout_s is None else arrival_time + terms.timeout_s,
            wants_progress=terms.wants_progress,
            pooling=pooling,
            beam_width=0 if beams is None else beams.beam_width,
            length_penalty=1.0 if beams is None else beams.length_penalty,
        )
