"""Conversations as requests for the engine; shared by all protocols that have messages."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from quire.config.reply_formats import JSON
from quire.config.structured import GrammarSettings
from quire.frontend.inputs import Prompt
from quire.protocol.errors import RequestError
from quire.protocol.sampling import SamplingParams
from quire.protocol.structured import StructuredOutputs
from quire.server.http.errors import FormFields
from quire.server.preparation.bodies import ConversationBody, RequestBody
from quire.server.preparation.context import Preparation, Prepared
from quire.text.chat_template import find_reasoning_tags, find_tool_format, select_template
from quire.text.message_stream import MessageFormat
from quire.text.tool_calls.declared import ToolUse
from quire.text.tool_calls.enforcement import reply_grammar

logger = logging.getLogger(__name__)


def prepare_messages(state: Preparation, body: ConversationBody) -> Prepared:
    """What a conversation of any protocol asks of the engine."""
    model = state.check(body)
    use = body.tool_use
    prompt = conversation_prompt(state, body, use)
    form = _message_form(state, body.chat_template, prompt, use)
    body.check_reply(form, model)
    field = body.max_tokens_field
    max_tokens, defaults = getattr(body, field), state.chat_params
    state.check_max_tokens([prompt], max_tokens, field)
    params = body.sampling_params(
        defaults,
        max_tokens=defaults.max_tokens if max_tokens is None else max_tokens,
        output_kind=body.output_kind,
        **body.own_params(),
    )
    params, fields = _with_form(state, body, params, form, use)
    return Prepared(body, model, [prompt], params, form, form_fields=fields)


def conversation_prompt(state: Preparation, body: ConversationBody, use: ToolUse) -> Prompt:
    """A conversation as a tokenised prompt. The body's own template arguments win."""
    messages, settings = body.chat_messages(), body.template_settings()
    kwargs = {**settings.pop("template_kwargs", {}), **(body.chat_template_kwargs or {})}
    prompt = render_chat(
        state,
        messages,
        chat_template=body.chat_template,
        template_kwargs=kwargs,
        tools=use.declarations,
        **settings,
    )
    prompt.cache_salt = body.cache_salt
    options = body.tokenization(bool(body.add_special_tokens))
    state.tokenize([prompt], options, body.conversation_field)
    return prompt


def render_chat(
    state: Preparation,
    messages: list[dict[str, Any]],
    *,
    chat_template: str | None = None,
    **settings: Any,
) -> Prompt:
    """A conversation as a prompt, not tokenised yet; `settings` are those of the tokenizer."""
    if chat_template is not None and not state.serving.trust_request_chat_template:
        raise RequestError(
            "chat_template is refused in requests; start the server with "
            "--trust-request-chat-template to allow it, or with --chat-template to set one."
        )
    if chat_template is None and not state.tokenizer.chat_template:
        raise RequestError(
            f"messages cannot be rendered: model {state.model_names[0]!r} has no chat template; "
            "start the server with --chat-template, or use /v1/completions."
        )
    of = "the request" if chat_template is not None else f"model {state.model_names[0]!r}"
    with state.limited(f"chat_template is refused: that of {of}"):
        text = state.tokenizer.render_chat(
            messages,
            chat_template=chat_template,
            tool_call_parser=state.serving.tool_call_parser,
            **settings,
        )
    return Prompt(text, None)


def _message_form(
    state: Preparation, chosen_template: str | None, prompt: Prompt, use: ToolUse
) -> MessageFormat:
    """How to read the replies to a prompt."""
    tokenizer, serving = state.tokenizer, state.serving
    template = select_template(tokenizer.chat_template, chosen_template, use.mode != "none")
    calls = None if use.mode == "none" else find_tool_format(template, serving.tool_call_parser)
    tags = find_reasoning_tags(template, serving.reasoning_parser)
    return MessageFormat(
        tool_format=calls,
        tool_names=use.allowed,
        max_calls=use.max_calls,
        tags=tags,
        starts_in_reasoning=tags is not None and (prompt.text or "").rstrip().endswith(tags.start),
        hidden_ends=tuple(tokenizer.special_ids),
    )


def _with_form(
    state: Preparation,
    body: ConversationBody,
    params: SamplingParams,
    form: MessageFormat,
    use: ToolUse,
) -> tuple[SamplingParams, FormFields]:
    """Parameters under which the replies have this form: calls that are required are enforced, a
    form of the answer leaves calls possible, and markers that are special tokens are shown to the
    parser. And where the client wrote the form."""
    tokenizer, config = state.tokenizer, state.options.decoding.structured_outputs_config
    settings = GrammarSettings.from_config(config).for_json(body.json_settings)
    fields = FormFields(body.form_field)
    changes: dict[str, object] = {}
    wanted = params.structured_outputs
    answer_field = fields.whole or f"structured_outputs.{wanted.kind if wanted else ''}"
    grammar = reply_grammar(form, use, wanted, tokenizer.special_ids.get, settings, answer_field)
    if grammar is not None:
        changes["structured_outputs"] = StructuredOutputs(grammar=grammar.text)
        changes |= body.without_default_repetition()
        if use.mode == "required":
            names = list(grammar.fields.values())
            answer_field = names[0] if len(names) == 1 else "tools"
        fields = FormFields(answer_field, grammar.fields)
    if not tokenizer.special_ids.keys().isdisjoint(form.markers):
        changes["skip_special_tokens"] = False
    return dataclasses.replace(params, **changes), fields  # type: ignore[arg-type]


def log_parsers(state: Preparation, body: RequestBody) -> bytes:
    """Say what replies are searched for, once at start-up, at DEBUG."""
    templates = None if state.given_tokenizer is None else state.given_tokenizer.chat_template
    if not templates:
        return b""
    template = select_template(templates, None, has_tools=True)
    serving = state.serving
    with state.limited(f"chat_template is refused: that of model {state.model_names[0]!r}"):
        found = find_tool_format(template, serving.tool_call_parser)
    if found is JSON and serving.tool_call_parser == "auto":
        logger.debug(
            "tool calls: the chat template shows no format that is known here, so they are read as "
            'JSON {"name": ..., "arguments": ...}; --tool-call-parser sets another format'
        )
    else:
        logger.debug("tool calls are read in the format %s", found.name)
    tags = find_reasoning_tags(template, serving.reasoning_parser)
    if tags is not None:
        logger.debug("reasoning is what stands between %s and %s", tags.start, tags.end)
    return b""


def text_parts(content: Any, kinds: tuple[str, ...], where: str) -> list[dict[str, Any]]:
    """A message's content as the text parts that templates read; `kinds` are the names that the
    protocol has for such parts."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a text or a list of parts, got {content!r:.80}.")
    parts = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in kinds:
            raise RequestError(
                f"{place} is of type {kind!r}, which is not supported; use {' or '.join(kinds)}."
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{place}.text must be a text, got {part.get('text')!r:.80}.")
        parts.append({"type": "text", "text": part["text"]})
    return parts
