"""Tools and reasoning in a request and its reply; shared by all protocols that have messages."""

from __future__ import annotations

import dataclasses
import logging

from fastapi import Request

from quire.config.structured import GrammarSettings
from quire.frontend.chat_template import select_template
from quire.frontend.inputs import Prompt
from quire.frontend.tools.declared import ToolUse
from quire.frontend.tools.enforcement import reply_grammar
from quire.frontend.tools.formats import JSON, ToolFormat, find_format
from quire.frontend.tools.message_stream import MessageForm
from quire.frontend.tools.reasoning import find_tags
from quire.protocol.sampling import SamplingParams
from quire.protocol.structured import StructuredOutputs
from quire.server.bodies import ConversationBody
from quire.server.form_fields import FormFields
from quire.server.generation import state_of
from quire.server.openai.response_format import json_settings
from quire.server.state import ServerState

logger = logging.getLogger(__name__)


def tool_format(state: ServerState, template: str) -> ToolFormat:
    return find_format(template, state.options.serving.tool_call_parser)


def log_parsers(state: ServerState) -> None:
    """Say what replies are searched for, once at start-up."""
    templates = state.llm.session.tokenizer.chat_template
    if not templates:
        return
    template = select_template(templates, None, has_tools=True)
    serving = state.options.serving
    found = tool_format(state, template)
    if found is JSON and serving.tool_call_parser == "auto":
        logger.info(
            "tool calls: the chat template shows no format that is known here, so they are read as "
            'JSON {"name": ..., "arguments": ...}; --tool-call-parser sets another format'
        )
    else:
        logger.info("tool calls are read in the format %s", found.name)
    tags = find_tags(template, serving.reasoning_parser)
    if tags is not None:
        logger.info("reasoning is what stands between %s and %s", tags.start, tags.end)


def message_form(
    state: ServerState, chosen_template: str | None, prompt: Prompt, use: ToolUse
) -> MessageForm:
    """How to read the replies to a prompt."""
    tokenizer = state.llm.session.tokenizer
    template = select_template(tokenizer.chat_template, chosen_template, use.mode != "none")
    tags = find_tags(template, state.options.serving.reasoning_parser)
    return MessageForm(
        format=None if use.mode == "none" else tool_format(state, template),
        tool_names=use.allowed,
        max_calls=use.max_calls,
        tags=tags,
        starts_in_reasoning=tags is not None and (prompt.text or "").rstrip().endswith(tags.start),
        hidden_ends=tuple(tokenizer.special_ids),
    )


def with_form(
    request: Request,
    body: ConversationBody,
    params: SamplingParams,
    form: MessageForm,
    use: ToolUse,
) -> SamplingParams:
    """Parameters under which the replies have this form: calls that are required are enforced, a
    form of the answer leaves calls possible, and markers that are special tokens are shown to the
    parser."""
    session = state_of(request).llm.session
    tokenizer, config = session.tokenizer, session.options.decoding.structured_outputs_config
    settings = GrammarSettings.from_config(config).for_json(json_settings(body))
    places: FormFields = request.state.form_fields
    changes: dict[str, object] = {}
    wanted = params.structured_outputs
    answer_field = places.whole or f"structured_outputs.{wanted.kind if wanted else ''}"
    grammar = reply_grammar(form, use, wanted, tokenizer.special_ids.get, settings, answer_field)
    if grammar is not None:
        changes["structured_outputs"] = StructuredOutputs(grammar=grammar.text)
        if use.mode == "required":
            names = list(grammar.fields.values())
            answer_field = names[0] if len(names) == 1 else "tools"
        request.state.form_fields = FormFields(answer_field, grammar.fields)
    if not tokenizer.special_ids.keys().isdisjoint(form.markers):
        changes["skip_special_tokens"] = False
    return dataclasses.replace(params, **changes) if changes else params  # type: ignore[arg-type]
