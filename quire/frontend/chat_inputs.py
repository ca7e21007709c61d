"""Conversations: told apart, checked, and rendered to prompts by the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.frontend.inputs import naming_index
from quire.protocol.errors import RequestError
from quire.text.tokenizer import Tokenizer

Conversation = list[dict[str, Any]]


def parse_conversations(messages: Any) -> list[Conversation]:
    """A list of messages is one conversation, a list of such lists is many."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError(f"messages must be a non-empty list of messages, got {messages!r}.")
    if isinstance(messages[0], Mapping):
        return [_parse(messages)]
    parsed = []
    for i, conversation in enumerate(messages):
        with naming_index(i):
            parsed.append(_parse(conversation))
    return parsed


def _parse(messages: Any) -> Conversation:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError(f"messages must be a non-empty list of messages, got {messages!r}.")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"messages[{i}] must be a dictionary with a 'role', got {message!r}."
            )
    return [dict(message) for message in messages]


def render_conversations(
    tokenizer: Tokenizer,
    conversations: list[Conversation],
    *,
    chat_template: str | None = None,
    content_format: str = "auto",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[str]:
    """Prompt texts, special tokens included."""
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "continue_final_message=True continues the last message, so add_generation_prompt must "
            "be False, got True."
        )
    texts = []
    for i, conversation in enumerate(conversations):
        with naming_index(i):
            texts.append(
                tokenizer.apply_chat_template(
                    conversation,
                    tokenize=False,
                    chat_template=chat_template,
                    chat_template_content_format=content_format,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    tools=tools,
                    **(template_kwargs or {}),
                )
            )
    return texts
