"""Conversations and tools on their way through chat templates."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from quire.protocol.errors import RequestError
from quire.text.chat_template import (
    detect_content_format,
    find_reasoning_tags,
    find_tool_format,
    read_chat_template,
    render_chat,
    template_variables,
)
from quire.text.tool_calls.declared import ToolUse, chat_tools
from tests.fuzz.mutations import Mutator
from tests.fuzz.target import Target
from tests.text.tool_calls import templates

TEMPLATES = (
    *(templates.QWEN_3, templates.LLAMA_3_1, templates.MISTRAL_V3, templates.HARMONY),
    templates.NO_TOOLS,
)


class ChatTemplate(Target):
    """Any messages, tools and variables through fixed templates; any template up to its syntax tree
    (what a template of strangers may do while it runs is bounded elsewhere, by time)."""

    name = "chat_template"
    tokens = tuple(
        word.encode()
        for word in (
            *("messages", "role", "content", "tools", "tool_calls", "function", "arguments", "id"),
            *("user", "assistant", "tool", "system", "type", "text", "tool_call_id", "template"),
            *("reasoning_content", "thinking", "variables", "{{ messages }}", "{% for m in x %}"),
            *("{% endfor %}", "{% generation %}", "{{ a | tojson }}", "{% macro f(x) %}", "{#"),
        )
    )

    def check(self, data: bytes) -> None:
        try:
            given = json.loads(data)
        except (ValueError, RecursionError):
            return
        if not isinstance(given, dict):
            return
        self._check_template(given.pop("template", None))
        tools: list[Any] | None = None
        with contextlib.suppress(RequestError):
            if isinstance(given.get("tools"), list):
                tools = ToolUse.of(chat_tools(given["tools"])).declarations
        messages, variables = given.get("messages"), given.get("variables")
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            return  # the types of bodies are checked before
        for template in TEMPLATES:
            with contextlib.suppress(RequestError):
                prompt = render_chat(
                    template,
                    messages,
                    tools=tools,
                    tool_call_parser="auto",
                    add_generation_prompt=given.get("add_generation_prompt") is True,
                    continue_final_message=given.get("continue_final_message") is True,
                    variables=variables if isinstance(variables, dict) else None,
                )
                assert isinstance(prompt, str)

    @staticmethod
    def _check_template(template: Any) -> None:
        if not isinstance(template, str):
            return
        with contextlib.suppress(RequestError):
            read_chat_template("{" + template)
            template_variables(template)
            detect_content_format(template)
            find_tool_format(template)
            find_reasoning_tags(template)

    def mutate(self, corpus: Sequence[bytes], mutator: Mutator) -> bytes:
        return mutator.mutate_json(mutator.chance.choice(corpus), corpus)
