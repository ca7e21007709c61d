"""`Preparation`: what the routes' `prepare` functions know of the model and the server."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from tokenizers import Tokenizer as Backend

from quire.config.options import EngineOptions
from quire.config.server import ServingOptions
from quire.frontend.inputs import InputProcessor, Prompt
from quire.frontend.pooling import PoolingParams
from quire.frontend.session import Session
from quire.protocol.errors import QuireError, RequestError
from quire.protocol.sampling import BeamSearchParams, SamplingParams
from quire.server.form_fields import FormFields
from quire.server.http.errors import UnknownModelError
from quire.text.message_stream import MessageForm
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
        cls, session: Session, serving: dict[str, Any], names: tuple[str, ...]
    ) -> PreparationSettings:
        tokenizer = TokenizerRecord.of(session.tokenizer) if session.has_tokenizer else None
        model = session.model_config
        return cls(
            tokenizer,
            model.vocab_size,
            tuple(model.eos_token_ids),
            model.hidden_size,
            {**session.options.flat(), "hf_token": None},
            serving,
            session.default_params,
            session.chat_params,
            names,
        )

    def preparation(self) -> Preparation:
        tokenizer = None if self.tokenizer is None else self.tokenizer.tokenizer()
        options = EngineOptions().replace(**self.engine_options)
        return Preparation(
            tokenizer,
            InputProcessor(tokenizer, self.vocab_size, self.eos_token_ids, options),
            options,
            ServingOptions(**self.serving_options),
            self.default_params,
            self.chat_params,
            self.hidden_size,
            self.model_names,
        )


@dataclass
class Preparation:
    """The same in an API process and in those that prepare requests for it."""

    given_tokenizer: Tokenizer | None
    inputs: InputProcessor
    options: EngineOptions
    serving: ServingOptions
    default_params: SamplingParams
    chat_params: SamplingParams
    """Defaults of chats."""
    hidden_size: int
    model_names: tuple[str, ...]
    limited: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext()
    """Bounds the time of what runs inside; `what` names it in the error."""

    @classmethod
    def of(cls, session: Session, serving: ServingOptions, names: tuple[str, ...]) -> Preparation:
        return cls(
            session.tokenizer if session.has_tokenizer else None,
            session.inputs,
            session.options,
            serving,
            session.default_params,
            session.chat_params,
            session.model_config.hidden_size,
            names,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        if self.given_tokenizer is None:
            raise QuireError(
                "the engine has no tokenizer: it was started with skip_tokenizer_init=True."
            )
        return self.given_tokenizer

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
    form: MessageForm = field(default_factory=MessageForm)
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
