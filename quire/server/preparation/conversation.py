"""Conversations as prompts; shared by all protocols that have messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.frontend.chat_inputs import parse_conversations, render_conversations
from quire.frontend.inputs import Prompt
from quire.protocol.errors import RequestError
from quire.server.generation import tokenize
from quire.server.preparation.bodies import ConversationBody
from quire.server.preparation.context import Preparation
from quire.server.tool_use import tool_format
from quire.text.chat_template import select_template
from quire.text.tool_calls.prompting import prepare_conversation

RESERVED_TEMPLATE_KWARGS = (
    "messages",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "chat_template_content_format",
    "return_dict",
)


def render_chat(
    state: Preparation,
    messages: list[dict[str, Any]],
    *,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    tools: list[dict[str, Any]] | None = None,
    **settings: Any,
) -> Prompt:
    """A conversation as a prompt, not tokenised yet."""
    kwargs = template_kwargs or {}
    for name in ("chat_template", *RESERVED_TEMPLATE_KWARGS):
        if name in kwargs:
            raise RequestError(
                f"chat_template_kwargs[{name!r}] is a field of the body; set it there."
            )
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

    tokenizer = state.tokenizer
    template = select_template(tokenizer.chat_template, chat_template, tools is not None)
    of = "the request" if chat_template is not None else f"model {state.model_names[0]!r}"
    with state.limited(f"chat_template is refused: that of {of}"):
        format = tool_format(state, template)
        told, declared = prepare_conversation(messages, tools, template, format)
        (text,) = render_conversations(
            tokenizer,
            parse_conversations(told),
            chat_template=template,
            template_kwargs=kwargs,
            tools=declared,
            **settings,
        )
    return Prompt(text, None)


def conversation_prompt(
    state: Preparation,
    body: ConversationBody,
    messages: list[dict[str, Any]],
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Prompt:
    """A conversation as a tokenised prompt. The body's own template arguments win."""
    prompt = render_chat(
        state,
        messages,
        chat_template=body.chat_template,
        template_kwargs={**(template_kwargs or {}), **(body.chat_template_kwargs or {})},
        **settings,
    )
    prompt.cache_salt = body.cache_salt
    options = body.tokenization(bool(body.add_special_tokens))
    tokenize(state, [prompt], options, body.conversation_field)
    return prompt


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
