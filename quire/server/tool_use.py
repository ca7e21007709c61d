"""Tools and reasoning in a request and its reply; shared by all protocols that have messages."""

from __future__ import annotations

import dataclasses
import logging

from quire.config.structured import GrammarSettings
from quire.frontend.chat_template import select_template
from quire.frontend.inputs import Prompt
from quire.frontend.tools.declared import ToolUse
from quire.frontend.tools.enforcement import answer_after_reasoning, calls_grammar
from quire.frontend.tools.formats import JSON, ToolFormat, find_format
from quire.frontend.tools.message_stream import MessageForm
from quire.frontend.tools.reasoning import find_tags
from quire.protocol.errors import RequestError
from quire.protocol.sampling import SamplingParams
from quire.protocol.structured import StructuredOutputs
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
    state: ServerState, params: SamplingParams, form: MessageForm, use: ToolUse
) -> SamplingParams:
    """Parameters under which the replies have this form: calls that are required are enforced,
    and markers that are special tokens are shown to the parser."""
    tokenizer = state.llm.session.tokenizer
    changes: dict[str, object] = {}
    if use.mode == "required":
        if params.structured_outputs is not None:
            raise RequestError(
                "tool_choice forces a call, so response_format and structured_outputs must not be "
                "set; leave one of them out."
            )
        grammar = calls_grammar(form, use, tokenizer.special_ids.get)
        changes["structured_outputs"] = StructuredOutputs(grammar=grammar)
    elif params.structured_outputs is not None and form.tags is not None:
        engine = state.llm.session.options.decoding
        settings = GrammarSettings.from_config(engine.structured_outputs_config)
        changes["structured_outputs"] = answer_after_reasoning(
            form, params.structured_outputs, tokenizer.special_ids.get, settings
        )
    if not tokenizer.special_ids.keys().isdisjoint(form.markers):
        changes["skip_special_tokens"] = False
    return dataclasses.replace(params, **changes) if changes else params  # type: ignore[arg-type]
