"""What is found in chat templates, and what conversations with tools look like through them."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from quire.config.reply_formats import (
    BRACKETS,
    REASONING_PARSERS,
    THINK,
    TOOL_FORMATS,
    ReasoningTags,
)
from quire.config.server import ServingOptions
from quire.protocol.errors import OptionError
from quire.text.chat_template import find_reasoning_tags, find_tool_format, render_chat
from quire.text.tool_calls.prompting import prepare_conversation
from tests.text.tool_calls import templates

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "call_0123456789abcdef", "type": "function"}
CALL |= {"function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}  # type: ignore[dict-item]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_0123456789abcdef", "content": "3"},
]


@pytest.mark.parametrize(
    ("template", "format"),
    [
        (templates.QWEN_2_5, "hermes"),
        (templates.QWEN_3, "hermes"),
        (templates.LLAMA_3_1, "llama3_json"),
        (templates.MISTRAL_V3, "mistral"),
        (templates.XML_CALLS, "json"),
        (templates.NO_TOOLS, "json"),
        ("{# <tool_call> #}" + templates.NO_TOOLS, "json"),
    ],
)
def test_format_of_a_template(template: str, format: str) -> None:
    assert find_tool_format(template).name == format
    assert find_tool_format(template, "mistral").name == "mistral"


@pytest.mark.parametrize(
    ("template", "tags"),
    [
        (templates.QWEN_2_5, None),
        (templates.QWEN_3, THINK),
        (templates.OPENS_THINKING, THINK),
        ("{{ '[THINK]' + message }}", BRACKETS),
        ("{{ content.split('</reasoning>') }}", ReasoningTags("<reasoning>", "</reasoning>")),
    ],
)
def test_reasoning_tags_of_a_template(template: str, tags: ReasoningTags | None) -> None:
    assert find_reasoning_tags(template) == tags
    assert find_reasoning_tags(template, "mistral") == BRACKETS
    assert find_reasoning_tags(template, "none") is None


def test_parsers_of_the_options_are_found_by_name() -> None:
    template = templates.QWEN_3
    for name in TOOL_FORMATS:
        assert ServingOptions(tool_call_parser=name).tool_call_parser == name
        assert find_tool_format(template, name).name == name
    for name, tags in REASONING_PARSERS.items():
        assert ServingOptions(reasoning_parser=name).reasoning_parser == name
        assert find_reasoning_tags(template, name) == tags
    for option in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(OptionError, match=option):
            ServingOptions(**{option: "unheard-of"})


def rendered(template: str, tools: list[dict[str, Any]] | None = None) -> str:
    return render_chat(template, CONVERSATION, tools=tools, tool_call_parser="auto")


def test_calls_and_results_reach_templates_with_arguments_as_objects() -> None:
    text = rendered(templates.QWEN_2_5, [TOOL])
    assert '{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>' in text
    assert "<|im_start|>tool\n3<|im_end|>" in text and json.dumps(TOOL) in text
    assert '"parameters": {"a": 1, "b": 2}}<|eot_id|>' in rendered(templates.LLAMA_3_1)


def test_ids_are_shortened_where_the_template_wants_it() -> None:
    text = rendered(templates.MISTRAL_V3)
    assert '{"name": "add", "arguments": {"a": 1, "b": 2}}' in text
    assert "3 of 789abcdef" in text


def test_a_template_without_tools_gets_them_as_text() -> None:
    text = rendered(templates.NO_TOOLS, [TOOL])
    system, user, assistant, result = text.split("<|im_end|>\n")[:4]
    assert system.startswith("<|im_start|>system\n") and json.dumps(TOOL["function"]) in system
    assert user == "<|im_start|>user\n1 + 2?"
    assert assistant == '<|im_start|>assistant\n{"name": "add", "arguments": {"a": 1, "b": 2}}'
    assert result == "<|im_start|>user\nResult of add: 3"


def test_tools_join_a_system_message_that_is_there() -> None:
    told: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, CONVERSATION[0]]
    tell = partial(prepare_conversation, takes_tools=False, short_ids=False)
    (system, _), tools = tell(told, [TOOL])
    assert tools is None and system["role"] == "system"
    assert system["content"].startswith("Be brief.\n\nYou may call functions.")
    assert tell(told, None) == (told, None)
