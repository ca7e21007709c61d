"""Tools and reasoning in a request and its reply; shared by all protocols that have messages."""

from __future__ import annotations

import dataclasses
import logging

from quire.config.structured import GrammarSettings
from quire.frontend.inputs import Prompt
from quire.protocol.sampling import SamplingParams
from quire.protocol.structured import StructuredOutputs
from quire.server.form_fields import FormFields
from quire.server.openai.response_format import form_field, json_settings
from quire.server.preparation.bodies import ConversationBody
from quire.server.preparation.context import Preparation
from quire.text.chat_template import select_template
from quire.text.message_stream import MessageForm
from quire.text.reasoning import find_tags
from quire.text.tool_calls.declared import ToolUse
from quire.text.tool_calls.enforcement import reply_grammar
from quire.text.tool_calls.formats import JSON, ToolFormat, find_format

logger = logging.getLogger(__name__)


def tool_format(state: Preparation, template: str) -> ToolFormat:
    return find_format(template, state.serving.tool_call_parser)


def log_parsers(state: Preparation) -> None:
    """Say what replies are searched for, once at start-up, at DEBUG."""
    templates = None if state.given_tokenizer is None else state.given_tokenizer.chat_template
    if not templates:
        return
    template = select_template(templates, None, has_tools=True)
    serving = state.serving
    with state.limited(f"chat_template is refused: that of model {state.model_names[0]!r}"):
        found = tool_format(state, template)
    if found is JSON and serving.tool_call_parser == "auto":
        logger.debug(
            "tool calls: the chat template shows no format that is known here, so they are read as "
            'JSON {"name": ..., "arguments": ...}; --tool-call-parser sets another format'
        )
    else:
        logger.debug("tool calls are read in the format %s", found.name)
    tags = find_tags(template, serving.reasoning_parser)
    if tags is not None:
        logger.debug("reasoning is what stands between %s and %s", tags.start, tags.end)


def message_form(
    state: Preparation, chosen_template: str | None, prompt: Prompt, use: ToolUse
) -> MessageForm:
    """How to read the replies to a prompt."""
    tokenizer = state.tokenizer
    template = select_template(tokenizer.chat_template, chosen_template, use.mode != "none")
    tags = find_tags(template, state.serving.reasoning_parser)
    return MessageForm(
        format=None if use.mode == "none" else tool_format(state, template),
        tool_names=use.allowed,
        max_calls=use.max_calls,
        tags=tags,
        starts_in_reasoning=tags is not None and (prompt.text or "").rstrip().endswith(tags.start),
        hidden_ends=tuple(tokenizer.special_ids),
    )


def with_form(
    state: Preparation,
    body: ConversationBody,
    params: SamplingParams,
    form: MessageForm,
    use: ToolUse,
) -> tuple[SamplingParams, FormFields]:
    """Parameters under which the replies have this form: calls that are required are enforced, a
    form of the answer leaves calls possible, and markers that are special tokens are shown to the
    parser. And where the client wrote the form."""
    tokenizer, config = state.tokenizer, state.options.decoding.structured_outputs_config
    settings = GrammarSettings.from_config(config).for_json(json_settings(body))
    fields = FormFields(form_field(body))
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
