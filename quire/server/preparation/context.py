"""`Preparation`: what the routes' `prepare` functions know of the model and the server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from tokenizers import Tokenizer as Backend

from quire.config.options import EngineOptions
from quire.config.server import ServingOptions
from quire.frontend.inputs import InputProcessor, Prompt, TokenizationOptions
from quire.frontend.pooling import PoolingParams
from quire.frontend.session import Session
from quire.protocol.errors import ContextLengthError, QuireError, RequestError
from quire.protocol.sampling import BeamSearchParams, SamplingParams
from quire.server.http.errors import FormFields, UnknownModelError
from quire.server.preparation.bodies import RequestBody
from quire.text.message_stream import MessageFormat
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_files import TokenizerParts


@dataclass(frozen=True)
class TokenizerRecord:
    """A tokenizer as another process can be told of it."""

    backend: str
    special_tokens: dict[str, str]
    extra_special_tokens: list[str]
    chat_template: str | dict[str, str] | None
    clean_up_spaces: bool
    model_max_length: int | None
    name: str

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenizerRecord:
        return cls(
            tokenizer.backend.to_str(),
            tokenizer.special_tokens_map,
            tokenizer.extra_special_tokens,
            tokenizer.chat_template,
            tokenizer.cleans_up_spaces,
            tokenizer.model_max_length,
            tokenizer.name_or_path,
        )

    def tokenizer(self) -> Tokenizer:
        parts = TokenizerParts(
            Backend.from_str(self.backend),
            self.special_tokens,
            self.extra_special_tokens,
            self.chat_template,
            self.clean_up_spaces,
            self.model_max_length,
        )
        return Tokenizer(parts, self.name)


@dataclass(frozen=True)
class PreparationSettings:
    """What a process that prepares requests is told first."""

    tokenizer: TokenizerRecord | None
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    hidden_size: int
    engine_options: dict[str, Any]
    """By their flat names."""
    serving_options: dict[str, Any]
    default_params: SamplingParams
    chat_params: SamplingParams
    """Defaults of chats."""
    model_names: tuple[str, ...]

    @classmethod
    def of(
        cls, session: Session, serving: ServingOptions, names: tuple[str, ...]
    ) -> PreparationSettings:
        tokenizer = TokenizerRecord.of(session.tokenizer) if session.has_tokenizer else None
        model = session.model_config
        return cls(
            tokenizer,
            model.vocab_size,
            tuple(model.eos_token_ids),
            model.hidden_size,
            {**session.options.flat(), "hf_token": None},
            dataclasses.asdict(serving),
            session.default_params,
            session.chat_params,
            names,
        )

    def preparation(self) -> Preparation:
        tokenizer = None if self.tokenizer is None else self.tokenizer.tokenizer()
        options = EngineOptions().replace(**self.engine_options)
        inputs = InputProcessor(tokenizer, self.vocab_size, self.eos_token_ids, options)
        return Preparation(self, tokenizer, inputs)


class Preparation:
    """The same in an API process and in those that prepare requests for it."""

    def __init__(
        self, settings: PreparationSettings, tokenizer: Tokenizer | None, inputs: InputProcessor
    ) -> None:
        self.given_tokenizer = tokenizer
        self.inputs = inputs
        self.options = EngineOptions().replace(**settings.engine_options)
        self.serving = ServingOptions(**settings.serving_options)
        self.default_params = settings.default_params
        self.chat_params = settings.chat_params
        """Defaults of chats."""
        self.hidden_size = settings.hidden_size
        self.model_names = settings.model_names
        self.limited: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext()
        """Bounds the time of what runs inside; `what` names it in the error."""

    @property
    def tokenizer(self) -> Tokenizer:
        if self.given_tokenizer is None:
            raise QuireError(
                "the engine has no tokenizer: it was started with skip_tokenizer_init=True."
            )
        return self.given_tokenizer

    def check(self, body: RequestBody) -> str:
        """The name of the model to answer with, if the body can be answered."""
        model = self.check_model(body.model)
        body.note_unknown_fields()
        return model

    def check_model(self, name: str | None) -> str:
        """The name to answer with, if requests for `name` are for this model."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise UnknownModelError(
                f"model {name!r} does not exist here; this server has "
                f"{', '.join(map(repr, self.model_names))}."
            )
        return name

    def check_max_tokens(
        self, prompts: list[Prompt], max_tokens: int | None, field: str = "max_tokens"
    ) -> None:
        """Refuse a limit that allows no token, or that the context cannot hold."""
        if max_tokens is None:
            return
        if max_tokens < 1:
            raise RequestError(f"{field} must be at least 1, got {max_tokens}.")
        limit = self.inputs.max_model_len
        for prompt in prompts:
            assert prompt.token_ids is not None
            if max_tokens > limit - len(prompt.token_ids):
                raise ContextLengthError(limit, len(prompt.token_ids), max_tokens, field)

    def tokenize(
        self, prompts: list[Prompt], options: Mapping[str, Any], field: str = "prompt"
    ) -> None:
        """Fill in the token ids of prompts; `field` is where the body has them."""
        given = {name: value for name, value in options.items() if value is not None}
        try:
            self.inputs.tokenize(prompts, TokenizationOptions.from_kwargs(given))
        except ContextLengthError as error:
            error.field = field
            if len(prompts) == 1:  # the client knows of no list
                error.args = (str(error).removeprefix("prompts[0]: "),)
            raise

    def check_count(self, field: str, count: int, num_each: int = 1) -> None:
        """Refuse more prompts than may wait at once; before any work is done for them."""
        limit = self.options.scheduler.max_num_queued_reqs
        if limit and count * num_each > limit:
            raise RequestError(
                f"{field} holds {count} prompts with n={num_each}, which is more than "
                f"max_num_queued_reqs={limit}; send fewer at once."
            )


@dataclass
class Prepared:
    """A request that only the engine is missing for."""

    body: Any
    """The body that was read; from another process without what only preparation reads."""
    model: str
    prompts: list[Prompt]
    params: SamplingParams | PoolingParams | BeamSearchParams
    form: MessageFormat = field(default_factory=MessageFormat)
    echoes: list[str] | None = None
    """Texts of the prompts, where the reply repeats them."""
    form_fields: FormFields = field(default_factory=FormFields)
    """Where the client wrote what the engine calls `structured_outputs`."""

    @property
    def sampling(self) -> SamplingParams:
        assert isinstance(self.params, SamplingParams)
        return self.params


Prepare = Callable[[Preparation, Any], "Prepared | bytes"]
"""From a checked body to a request for the engine, or to a reply that needs no engine."""


@dataclass(frozen=True)
class PreparedKind:
    """A route's body, and what is made of it."""

    path: str
    body: type[BaseModel]
    prepare: Prepare
    uses_template: bool
    """Templates are foreign code: they run where they can be stopped."""
