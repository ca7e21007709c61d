"""What is found in chat templates, and what conversations with tools look like through them."""

from __future__ import annotations

import json
from datetime import datetime
from functools import partial
from typing import Any

import pytest

from quire.config.reply_formats import (
    BRACKETS,
    CHANNELS,
    JSON,
    REASONING_PARSERS,
    THINK,
    TOOL_PARSERS,
    ReasoningTags,
)
from quire.config.server import ServingOptions
from quire.protocol.errors import OptionError, RequestError
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
        (templates.HARMONY, "harmony"),
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
        (templates.HARMONY, CHANNELS),
        ("{{ '<|user|>' + message + '<|end|>' }}", None),
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
    for name, format in TOOL_PARSERS.items():
        assert ServingOptions(tool_call_parser=name).tool_call_parser == name
        assert find_tool_format(template, name) == format
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
    tell = partial(prepare_conversation, takes_tools=False, style=JSON)
    (system, _), tools = tell(told, [TOOL])
    assert tools is None and system["role"] == "system"
    assert system["content"].startswith("Be brief.\n\nYou may call functions.")
    assert tell(told, None) == (told, None)


def call(call_id: str | None, name: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}


def result(call_id: str | None, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def in_channels(messages: list[dict[str, Any]], **settings: Any) -> list[str]:
    """The messages of a prompt, behind the first, which tells the model of itself."""
    settings = {"add_generation_prompt": True, "tool_call_parser": "auto", **settings}
    _, *found = render_chat(templates.HARMONY, messages, **settings).split("<|start|>")[1:]
    return found


USER = {"role": "user", "content": "1 + 2?"}
ADDS = 'assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}<|call|>'
SUM = 'functions.add to=assistant<|channel|>commentary<|message|>"3"<|end|>'


def test_reasoning_is_kept_until_the_answer() -> None:
    told = {**CONVERSATION[1], "reasoning": "Hm.", "tool_calls": [CALL], "content": ""}
    open_turn = [USER, told, CONVERSATION[2]]
    user = "user<|message|>1 + 2?<|end|>"
    hm = "assistant<|channel|>analysis<|message|>Hm.<|end|>"
    assert in_channels(open_turn) == [user, hm, ADDS, SUM, "assistant"]
    ended = [*open_turn, {"role": "assistant", "content": "3", "reasoning": "So 3."}, USER]
    answer = "assistant<|channel|>final<|message|>3<|end|>"
    assert in_channels(ended) == [user, ADDS, SUM, answer, user, "assistant"]


def test_calls_of_one_message_become_messages_with_their_results() -> None:
    calls = [call("1", "add"), call("2", "sub"), call("3", "mul")]
    several = {"role": "assistant", "content": "I add.", "thinking": "Hm.", "tool_calls": calls}
    for results in (
        [result("2", "two"), result("1", "one"), result("1", "more")],
        [result(None, "one"), result("2", "two"), result("1", "more")],
    ):
        found = in_channels([USER, several, *results])
        heads = [one.partition("<|message|>")[0] for one in found]
        texts = [one.partition("<|message|>")[2] for one in found]
        assert texts[1] == "Hm.\nI add.<|end|>" and heads[1] == "assistant<|channel|>analysis"
        assert [head.split()[0] for head in heads[2:-1]] == [
            *("assistant", "functions.add", "functions.add"),
            *("assistant", "functions.sub", "assistant"),
        ]
        names = [head.split("<")[0] for head in heads if head.startswith("assistant to=")]
        assert names == [f"assistant to=functions.{name}" for name in ("add", "sub", "mul")]
        assert texts[3:5] == ['"one"<|end|>', '"more"<|end|>'] and texts[6] == '"two"<|end|>'
    alone = in_channels([USER, several])
    assert len(alone) == 6 and alone[-1] == "assistant"


def test_what_the_template_would_refuse_or_leave_out() -> None:
    """Fields that are null, a tool without a description, instructions in two messages."""
    empty = {"reasoning": None, "thinking": None, "tool_calls": None}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
        USER,
        {"role": "assistant", "content": "3", **empty},
        {"role": "assistant", "content": None, "tool_calls": []},
        USER,
    ]
    developer, _, answer, nothing, _, _ = in_channels(messages, tools=[TOOL])
    assert developer.startswith("developer<|message|>Be brief.\n\nBe kind.\n// \ntype add = ")
    assert answer == "assistant<|channel|>final<|message|>3<|end|>"
    assert nothing == "assistant<|channel|>final<|message|><|end|>"
    with pytest.raises(RequestError, match="a result without a call"):
        in_channels([USER, result("1", "one")])
    with pytest.raises(RequestError, match="without channels"):
        in_channels([USER, {"role": "assistant", "content": "<|channel|>final<|message|>3"}, USER])


def test_arguments_without_a_description() -> None:
    properties = {"a": {"type": "integer"}, "b": {"type": "string", "description": None}}
    properties["c"] = {"type": "number", "description": "How much."}
    schema = {"type": "object", "properties": properties}
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}, TOOL]
    written = json.dumps(tools)
    text = render_chat(templates.HARMONY_ARGUMENTS, [USER], tools=tools, tool_call_parser="harmony")
    assert "\n// \na: integer\n// \nb: string\n// How much.\nc: number\n// \ntype add" in text
    assert json.dumps(tools) == written, "the request's tools are left alone"


def test_variables_of_the_template() -> None:
    variables = {"reasoning_effort": "high", "model_identity": "You are Q.", "builtin_tools": ["x"]}
    text = render_chat(templates.HARMONY, [USER], variables=variables)
    today = datetime.now().strftime("%Y-%m-")
    assert text.startswith(f"<|start|>system<|message|>You are Q.\nDate: {today}")
    assert "\nReasoning: high\n## x<|end|>" in text
    assert "Reasoning: medium" in render_chat(templates.HARMONY, [USER])


def test_a_final_message_that_is_continued() -> None:
    last = {"role": "assistant", "content": "The sum is"}
    settings: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    *_, found = in_channels([USER, last], **settings)
    assert found == "assistant<|channel|>final<|message|>The sum is"
