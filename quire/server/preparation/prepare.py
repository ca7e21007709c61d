"""`Preparation`: from the body of a request to what the engine is asked for. It reads, checks,
renders and tokenises, the same for all protocols and in whichever process."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError
from tokenizers import Tokenizer as Backend

from quire.config.options import EngineOptions
from quire.config.reply_formats import JSON
from quire.config.server import ServingOptions
from quire.config.structured import GrammarSettings
from quire.frontend.inputs import InputProcessor, Prompt, TokenizationOptions
from quire.frontend.pooling import PoolingParams
from quire.frontend.session import Session
from quire.protocol.adapter import LoRARequest
from quire.protocol.errors import ContextLengthError, QuireError, RequestError
from quire.protocol.sampling import BeamSearchParams, SamplingParams
from quire.protocol.structured import StructuredOutputs
from quire.server.http.errors import InvalidBodyError, StructuredFields, UnknownModelError
from quire.server.preparation.adapter_names import AdapterNames, AdapterSettings, reference_to
from quire.server.preparation.bodies import ConversationBody, GenerationBody, RequestBody
from quire.text.chat_template import find_reasoning_tags, find_tool_format, select_template
from quire.text.harmony import REPLY_ENDS, opened_header
from quire.text.message_stream import MessageFormat
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_files import TokenizerParts
from quire.text.tool_calls.declared import ToolUse
from quire.text.tool_calls.enforcement import reply_grammar

logger = logging.getLogger(__name__)

MAX_NAMED = 8
"""Models in an error."""
USED_BY_BEAM_SEARCH = frozenset(
    {
        *("n", "max_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
        *("temperature", "seed", "output_kind"),  # beams are not drawn, and end all at once
    }
)
"""Sampling parameters that a search follows, or that cannot change what it finds."""


@dataclass(frozen=True)
class TokenizerRecord:
    """A tokenizer as another process can be told of it: without `model_max_length`, which
    preparation has no use for, and which many models have beyond all integers of a message."""

    backend: str
    special_tokens: dict[str, str]
    extra_special_tokens: list[str]
    chat_template: str | dict[str, str] | None
    clean_up_spaces: bool
    name: str

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenizerRecord:
        return cls(
            tokenizer.backend.to_str(),
            tokenizer.special_tokens_map,
            tokenizer.extra_special_tokens,
            tokenizer.chat_template,
            tokenizer.cleans_up_spaces,
            tokenizer.name_or_path,
        )

    def tokenizer(self) -> Tokenizer:
        parts = TokenizerParts(
            Backend.from_str(self.backend),
            self.special_tokens,
            self.extra_special_tokens,
            self.chat_template,
            self.clean_up_spaces,
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
    adapters: AdapterSettings = field(default_factory=AdapterSettings)

    @classmethod
    def of(
        cls, session: Session, serving: ServingOptions, adapters: AdapterSettings | None = None
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
            serving.served_model_name or (model.source.name,),
            adapters or AdapterSettings(),
        )

    def preparation(self) -> Preparation:
        tokenizer = None if self.tokenizer is None else self.tokenizer.tokenizer()
        options = EngineOptions().replace(**self.engine_options)
        inputs = InputProcessor(tokenizer, self.vocab_size, self.eos_token_ids, options)
        return Preparation(self, inputs)


@dataclass
class Prepared:
    """A request that only the engine is missing for."""

    body: Any
    """The body that was read; from another process without what only preparation reads."""
    model: str
    prompts: list[Prompt]
    params: SamplingParams | PoolingParams | BeamSearchParams
    format: MessageFormat = field(default_factory=MessageFormat)
    echoes: list[str] | None = None
    """Texts of the prompts, where the reply repeats them."""
    structured_fields: StructuredFields = field(default_factory=StructuredFields)
    """Where the client wrote what the engine calls `structured_outputs`."""

    @property
    def sampling(self) -> SamplingParams:
        assert isinstance(self.params, SamplingParams)
        return self.params


Prepare = Callable[["Preparation", Any], "Prepared | bytes"]
"""From a checked body to a request for the engine, or to a reply that needs no engine."""


@dataclass(frozen=True)
class PreparedKind:
    """A route's body, and what is made of it."""

    path: str
    body: type[BaseModel]
    prepare: Prepare
    uses_template: bool
    """Templates are foreign code: they run where they can be stopped."""


class Preparation:
    """The same in an API process and in those that prepare requests for it."""

    def __init__(self, settings: PreparationSettings, inputs: InputProcessor) -> None:
        self.inputs = inputs
        self.options = EngineOptions().replace(**settings.engine_options)
        self.serving = ServingOptions(**settings.serving_options)
        self.default_params = settings.default_params
        self.chat_params = settings.chat_params
        """Defaults of chats."""
        self.hidden_size = settings.hidden_size
        self.model_names = settings.model_names
        self.adapters = AdapterNames(settings.adapters)
        self.limited: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext()
        """Bounds the time of what runs inside; `what` names it in the error."""

    @classmethod
    def of(cls, settings: PreparationSettings, session: Session) -> Preparation:
        """In the process of the session."""
        return cls(settings, session.inputs)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.inputs.loaded_tokenizer

    def prepare(self, kind: PreparedKind, data: bytes) -> Prepared | bytes:
        """What a route makes of a body, in whichever process."""
        body = read_body(kind.body, data)
        field: str | None = None
        try:
            if isinstance(body, RequestBody):
                body.refuse_unsupported()
            if isinstance(body, GenerationBody):
                field = body.structured_field
            made = kind.prepare(self, body)
            if isinstance(made, Prepared) and isinstance(made.params, SamplingParams):
                self.inputs.prepare_params(made.params)  # long lists that are refused stay here
            return made
        except QuireError as error:
            error.__dict__["structured_field"] = field
            raise

    def check(self, body: RequestBody) -> str:
        """The name of the model to answer with, if the body can be answered."""
        model = self.check_model(body.model)
        body.note_unknown_fields()
        return model

    def check_model(self, name: str | None) -> str:
        """The name to answer with, if requests for `name` are for this model or an adapter."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            self.adapter_named(name)
        return name

    def adapter_named(self, name: str) -> LoRARequest | None:
        """The adapter that requests for `name` use; None: they are for the model itself."""
        if name in self.model_names:
            return None
        module = self.adapters.find(name)
        if module is not None:
            return reference_to(module)
        names = [*self.model_names, *self.adapters.listed()]
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        more += ", and adapters of a folder, see /v1/models" if self.adapters.has_folder else ""
        raise UnknownModelError(
            f"model {name!r:.200} does not exist here; this server has "
            f"{', '.join(map(repr, names[:MAX_NAMED]))}{more}."
        )

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

    def beam_search_params(
        self, body: GenerationBody, params: SamplingParams, prompts: list[Prompt]
    ) -> BeamSearchParams:
        """The search that is asked for as vLLM has it: `use_beam_search` with `n` as the number of
        beams. `params` are the sampling parameters of the body."""
        plain = SamplingParams()
        for item in dataclasses.fields(params):
            name = item.name
            if name not in USED_BY_BEAM_SEARCH and getattr(params, name) != getattr(plain, name):
                raise RequestError(
                    f"{name}={getattr(params, name)!r} is not supported in beam search; leave "
                    f"{name} or use_beam_search out."
                )
        limit = self.options.scheduler.max_num_seqs
        if limit is not None and params.n > limit:
            raise RequestError(
                f"n={params.n} exceeds max_num_seqs={limit}: all beams run at once. Lower n, or "
                "start the server with a larger --max-num-seqs."
            )
        longest = max(len(prompt.token_ids) for prompt in prompts if prompt.token_ids is not None)
        room = self.inputs.max_model_len - longest
        return BeamSearchParams(
            beam_width=params.n,
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            ignore_eos=params.ignore_eos,
            temperature=0.0 if body.temperature is None else body.temperature,
            length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )

    def check_count(self, field: str, count: int, num_each: int = 1) -> None:
        """Refuse more prompts than may wait at once; before any work is done for them."""
        limit = self.options.scheduler.max_num_queued_reqs
        if limit and count * num_each > limit:
            raise RequestError(
                f"{field} holds {count} prompts with n={num_each}, which is more than "
                f"max_num_queued_reqs={limit}; send fewer at once."
            )

    # --- conversations ----------------------------------------------------------------------------

    def prepare_messages(self, body: ConversationBody) -> Prepared:
        """What a conversation of any protocol asks of the engine."""
        model = self.check(body)
        use = body.tool_use
        prompt = self.conversation_prompt(body, use)
        format = self._message_format(body.chat_template, prompt, use)
        body.check_reply(format, model)
        field = body.max_tokens_field
        max_tokens, defaults = getattr(body, field), self.chat_params
        self.check_max_tokens([prompt], max_tokens, field)
        params = body.sampling_params(
            defaults,
            max_tokens=defaults.max_tokens if max_tokens is None else max_tokens,
            output_kind=body.output_kind,
            **body.own_params(),
        )
        params, fields = self._with_format(body, params, format, use)
        made = Prepared(body, model, [prompt], params, format, structured_fields=fields)
        if body.use_beam_search:
            made.params = self.beam_search_params(body, params, made.prompts)
        return made

    def conversation_prompt(self, body: ConversationBody, use: ToolUse) -> Prompt:
        """A conversation as a tokenised prompt. The body's own template arguments win."""
        messages, settings = body.chat_messages(), body.template_settings()
        kwargs = {**settings.pop("template_kwargs", {}), **(body.chat_template_kwargs or {})}
        prompt = self.render_chat(
            messages,
            chat_template=body.chat_template,
            template_kwargs=kwargs,
            tools=use.declarations,
            **settings,
        )
        prompt.cache_salt = body.cache_salt
        options = body.tokenization(bool(body.add_special_tokens))
        self.tokenize([prompt], options, body.conversation_field)
        return prompt

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        chat_template: str | None = None,
        **settings: Any,
    ) -> Prompt:
        """A conversation as a prompt, not tokenised yet; `settings` are those of the tokenizer."""
        if chat_template is not None and not self.serving.trust_request_chat_template:
            raise RequestError(
                "chat_template is refused in requests; start the server with "
                "--trust-request-chat-template to allow it, or with --chat-template to set one."
            )
        if chat_template is None and not self.tokenizer.chat_template:
            raise RequestError(
                f"messages cannot be rendered: model {self.model_names[0]!r} has no chat template; "
                "start the server with --chat-template, or use /v1/completions."
            )
        of = "the request" if chat_template is not None else f"model {self.model_names[0]!r}"
        with self.limited(f"chat_template is refused: that of {of}"):
            return self.inputs.render_chat(
                messages,
                chat_template=chat_template,
                tool_call_parser=self.serving.tool_call_parser,
                **settings,
            )

    def _message_format(
        self, chosen_template: str | None, prompt: Prompt, use: ToolUse
    ) -> MessageFormat:
        """How to read the replies to a prompt."""
        tokenizer, serving = self.tokenizer, self.serving
        template = select_template(tokenizer.chat_template, chosen_template, use.mode != "none")
        calls = None if use.mode == "none" else find_tool_format(template, serving.tool_call_parser)
        tags = find_reasoning_tags(template, serving.reasoning_parser)
        text = prompt.text or ""
        return MessageFormat(
            tool_format=calls,
            tool_names=use.allowed,
            max_calls=use.max_calls,
            tags=tags,
            starts_in_reasoning=tags is not None and text.rstrip().endswith(tags.start),
            opened=opened_header(text),
            hidden_ends=tuple(tokenizer.special_ids),
        )

    def _with_format(
        self,
        body: ConversationBody,
        params: SamplingParams,
        format: MessageFormat,
        use: ToolUse,
    ) -> tuple[SamplingParams, StructuredFields]:
        """Parameters under which the replies have this format: required calls are enforced, a
        structured answer leaves calls possible, and markers that are special tokens are shown to
        the parser. And where the client wrote the structure."""
        tokenizer, config = self.tokenizer, self.options.decoding.structured_outputs_config
        settings = GrammarSettings.from_config(config).for_json(body.json_settings)
        fields = StructuredFields(body.structured_field)
        changes: dict[str, object] = {}
        wanted = params.structured_outputs
        answer_field = fields.whole or f"structured_outputs.{wanted.kind if wanted else ''}"
        grammar = reply_grammar(
            format, use, wanted, tokenizer.special_ids.get, settings, answer_field
        )
        if grammar is not None:
            changes["structured_outputs"] = StructuredOutputs(grammar=grammar.text)
            changes |= body.without_default_repetition()
            if use.mode == "required":
                names = list(grammar.fields.values())
                answer_field = names[0] if len(names) == 1 else "tools"
            fields = StructuredFields(answer_field, grammar.fields)
        if not tokenizer.special_ids.keys().isdisjoint(format.markers):
            changes["skip_special_tokens"] = False
        if format.has_channels and not (params.ignore_eos or body.use_beam_search):
            # Also where the model's configuration does not name them.
            ids = {tokenizer.special_ids.get(one) for one in REPLY_ENDS}
            if missing := ids - {None, *self.inputs.eos_token_ids}:
                changes["stop_token_ids"] = [*(params.stop_token_ids or ()), *missing]
        return dataclasses.replace(params, **changes), fields  # type: ignore[arg-type]

    def log_parsers(self, body: RequestBody) -> bytes:
        """Say what replies are searched for, once at start-up, at DEBUG."""
        tokenizer = self.inputs.tokenizer
        templates = None if tokenizer is None else tokenizer.chat_template
        if not templates:
            return b""
        template = select_template(templates, None, has_tools=True)
        serving = self.serving
        with self.limited(f"chat_template is refused: that of model {self.model_names[0]!r}"):
            found = find_tool_format(template, serving.tool_call_parser)
        if found is JSON and serving.tool_call_parser == "auto":
            logger.debug(
                "tool calls: the chat template shows no format that is known here, so they are "
                'read as JSON {"name": ..., "arguments": ...}; --tool-call-parser sets '
                "another format"
            )
        else:
            logger.debug("tool calls are read in the format %s", found.name)
        tags = find_reasoning_tags(template, serving.reasoning_parser)
        if tags is not None:
            logger.debug("reasoning is what stands between %s and %s", tags.start, tags.end)
        return b""


def read_body(kind: type[BaseModel], data: bytes) -> Any:
    """The body that `data` holds; raises `InvalidBodyError`."""
    try:
        value = json.loads(data) if data else None
    except json.JSONDecodeError as error:
        raise InvalidBodyError(
            f"the body is not JSON: {error.msg} (at character {error.pos})."
        ) from None
    except ValueError as error:  # not UTF-8, or a number of thousands of digits
        raise InvalidBodyError(f"the body is not JSON that can be read: {error}.") from None
    if not isinstance(value, dict):
        raise InvalidBodyError(
            "the body is not a JSON object; send one, with 'Content-Type: application/json'."
        )
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        # All errors of a long list would take longer to write down than to find.
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        where = [str(part) for part in errors[0]["loc"]]
        text = f"{'.'.join(where) or 'the body'}: {errors[0]['msg']}."
        if len(types := _alternatives([one["loc"] for one in errors])) > 1:
            text = f"{where[0]} must be one of {', '.join(types)}, and is none of them."
        raise InvalidBodyError(text, where[0] if where else None) from None


def _alternatives(places: list[tuple[int | str, ...]]) -> list[str]:
    """The types that the field of the first error may have, if it may have several: pydantic names
    them where an object would have a field and a list an index."""
    kinds = dict.fromkeys(str(p[1]) for p in places if p[:1] == places[0][:1] and len(p) > 1)
    return [kind for kind in kinds if re.match(r"(str|list|dict)\b", kind)]
