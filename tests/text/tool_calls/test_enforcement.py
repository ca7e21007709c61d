"""Grammars of enforced calls: what they let through is what the parser reads as valid calls."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from quire.config.reply_formats import (
    CHANNELS,
    HARMONY,
    MISTRAL_NAMES_FIRST,
    THINK,
    TOOL_FORMATS,
    ToolFormat,
)
from quire.protocol.errors import RequestError
from quire.protocol.structured import JsonSettings, StructuredOutputs
from quire.text.message_stream import MessageFormat
from quire.text.tool_calls.declared import ToolUse, chat_tools
from quire.text.tool_calls.enforcement import ReplyGrammar, SpecialTokens, reply_grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = chat_tools(
    [
        {"type": "function", "function": {"name": "add", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "now"}},
    ]
)
ADD, NOW = ("add", {"a": 7}), ("now", {})
BYTES = LLTokenizer("byte")
ALL_FORMATS = [*TOOL_FORMATS.values(), MISTRAL_NAMES_FIRST]


def accepts(grammar: str, text: str) -> bool:
    """Whether the grammar lets a text through and can end there."""
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def no_marker(marker: str) -> int | None:
    return None


def made(
    message_format: MessageFormat,
    use: ToolUse = ToolUse(),  # noqa: B008
    wanted: StructuredOutputs | None = None,
    special: SpecialTokens = no_marker,
) -> ReplyGrammar:
    settings = JsonSettings() if wanted is None else wanted.json_settings
    grammar = reply_grammar(message_format, use, wanted, special, settings)
    assert grammar is not None
    return grammar


def written(format: ToolFormat, calls: list[tuple[str, Any]]) -> str:
    made = [
        format.call_start
        + (json.dumps(name) if format.quotes_names else name)
        + format.call_middle
        + json.dumps(arguments)
        + format.call_end
        for name, arguments in calls
    ]
    return format.before + format.between.join(made) + format.after


@pytest.mark.parametrize("format", ALL_FORMATS)
@pytest.mark.parametrize("inside", [None, False, True])
def test_required_calls(format: ToolFormat, inside: bool | None) -> None:
    """`inside`: whether the prompt has opened the reasoning; None: the model has none."""
    use = ToolUse.read(TOOLS, "required", None)
    tags = None if inside is None else THINK
    message_format = MessageFormat(
        format, use.allowed, tags=tags, starts_in_reasoning=bool(inside), opened=""
    )
    grammar = made(message_format, use).text
    thoughts = {None: "", False: "<think>{Hm}</think>\n\n", True: '{"name"</think>'}[inside]
    text = thoughts + written(format, [ADD, NOW])
    assert accepts(grammar, text)
    message = message_format.parse(text)
    assert [(one.name, json.loads(one.arguments)) for one in message.calls] == [ADD, NOW]
    assert message.content == "" and bool(message.reasoning) == (inside is not None)
    for wrong in ("Hello", "", written(format, [("add", {})]), written(format, [("sub", {})])):
        assert not accepts(grammar, thoughts + wrong)
    assert not accepts(grammar, thoughts + written(format, [("add", {"a": 1, "b": 2})]))


@pytest.mark.parametrize("format", ALL_FORMATS)
def test_one_named_call(format: ToolFormat) -> None:
    use = ToolUse.read(TOOLS, {"type": "function", "function": {"name": "now"}}, True)
    grammar = made(MessageFormat(format, use.allowed, opened=""), use).text
    assert accepts(grammar, written(format, [NOW]))
    assert not accepts(grammar, written(format, [ADD]))
    assert not accepts(grammar, written(format, [NOW, NOW]))


def test_allowed_tools() -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    use = ToolUse.read(TOOLS, {"type": "allowed_tools", "allowed_tools": allowed}, None)
    assert (use.mode, use.allowed, use.max_calls) == ("required", ("now",), None)
    flat = ToolUse.read(TOOLS, {"type": "allowed_tools", **allowed}, None)
    assert flat == use


def test_many_tools() -> None:
    """As many as a body can hold, in good time."""
    names = [f"f{i}" for i in range(50_000)]
    tools = chat_tools([{"type": "function", "function": {"name": name}} for name in names])
    use = ToolUse.read(tools, "required", None)
    assert list(use.allowed) == names
    grammar = made(MessageFormat(TOOL_FORMATS["json"], use.allowed), use).text
    assert grammar.count("%json") == len(names)


def test_markers_that_are_special_tokens_go_by_their_ids() -> None:
    use = ToolUse.read(TOOLS, "required", None)
    message_format = MessageFormat(MISTRAL_NAMES_FIRST, use.allowed)
    grammar = made(message_format, use, special={"[TOOL_CALLS]": 9, "[ARGS]": 32}.get).text
    assert 'call_0: <[9]> "add" <[32]> arguments_0' in grammar


ANALYSIS = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
OPENED: list[tuple[str | None, str, str]] = [
    # What the prompt has opened -> what the reply may begin with before a header, and what not.
    ("", f"{ANALYSIS}Hm.{NEXT}", "Hm."),
    ("", "", "<|start|>assistant"),
    (None, f"<|start|>assistant{ANALYSIS}Hm.{NEXT}{ANALYSIS}Hm.{NEXT}", ""),
    (ANALYSIS, f"Hm, {{}} and so on.{NEXT}", ""),
]


@pytest.mark.parametrize(("opened", "before", "wrong"), OPENED)
def test_calls_and_answers_in_channels(opened: str | None, before: str, wrong: str) -> None:
    message_format = MessageFormat(HARMONY, ("add", "now"), tags=CHANNELS, opened=opened)
    wanted = StructuredOutputs(json=SCHEMA)
    call, answer = written(HARMONY, [ADD]), f'{FINAL}{{"a": 5}}'
    cases = (
        (made(message_format, ToolUse.read(TOOLS, "required", None)).text, call, answer),
        (made(message_format, wanted=wanted).text, answer, call),
        (made(message_format, ToolUse.read(TOOLS, "auto", None), wanted).text, call, FINAL),
        (made(message_format, ToolUse.read(TOOLS, "auto", None), wanted).text, answer, FINAL),
    )
    for grammar, right, other in cases:
        assert accepts(grammar, before + right)
        for text in (wrong + right, before + other, before + "Well.", before + FINAL + "Well."):
            assert not accepts(grammar, text)
        message = message_format.parse(before + right)
        assert bool(message.reasoning) == bool(before)
        assert [one.name for one in message.calls] == (["add"] if right == call else [])
        assert message.content == ("" if right == call else '{"a": 5}')


def test_what_follows_a_final_message_that_the_prompt_has_begun() -> None:
    message_format = MessageFormat(HARMONY, ("add", "now"), tags=CHANNELS, opened=FINAL)
    wanted = StructuredOutputs(json=SCHEMA)
    for use in (ToolUse(), ToolUse.read(TOOLS, "auto", None)):
        grammar = made(message_format, use, wanted).text
        assert accepts(grammar, '{"a": 5}')
        assert not accepts(grammar, f'{FINAL}{{"a": 5}}')
    grammar = made(message_format, ToolUse.read(TOOLS, "required", None)).text
    text = f"More of it.{NEXT}{written(HARMONY, [NOW])}"
    assert accepts(grammar, text) and not accepts(grammar, "More of it.")
    message = message_format.parse(text)
    assert message.content == "More of it." and message.calls[0].name == "now"


def test_channels_that_are_special_tokens_go_by_their_ids() -> None:
    ids = {marker: 10 + i for i, marker in enumerate(HARMONY.markers)}
    use = ToolUse.read(TOOLS, "required", None)
    message_format = MessageFormat(HARMONY, use.allowed, tags=CHANNELS, opened=None)
    lines = made(message_format, use, special=ids.get).lines
    assert "rest: TEXT <[16]>" in lines
    assert 'analysis: <[11]> "analysis" <[13]> rest <[10]> "assistant"' in lines
    assert 'start: <[10]> "assistant" analysis* (calls)' in lines
    assert (
        'call_1: <[11]> "commentary to=functions.now " <[12]> "json" <[13]> arguments_1 ' in lines
    )


@pytest.mark.parametrize("inside", [False, True])
def test_answers_keep_their_grammar_after_reasoning(inside: bool) -> None:
    """Where the prompt has not opened the reasoning, the model may do so or answer at once."""
    message_format = MessageFormat(tags=THINK, starts_in_reasoning=inside)
    start = "" if inside else "<think>"
    for wanted, answer in (
        (StructuredOutputs(json=SCHEMA), '{"a": 5}'),
        (StructuredOutputs(json_object=True), "{}"),
        (StructuredOutputs(choice=["yes", "no"]), "no"),
    ):
        grammar = made(message_format, wanted=wanted).text
        assert accepts(grammar, f"{start}Let me think.\n</think>\n\n{answer}")
        assert accepts(grammar, answer) is not inside
        assert not accepts(grammar, f"{start}Hm</think>Well")
    regex = StructuredOutputs(regex="a+")
    assert reply_grammar(message_format, ToolUse(), regex, no_marker, JsonSettings()) is None


def test_settings_of_json_hold_after_reasoning() -> None:
    message_format = MessageFormat(tags=THINK, starts_in_reasoning=True)
    schema = {**SCHEMA, "x-guidance": {"whitespace_pattern": "x*"}}

    def text(**settings: Any) -> str:
        return made(message_format, wanted=StructuredOutputs(json=schema, **settings)).text

    assert accepts(text(), '</think>{ "a": 5, "b": 6}')
    assert not accepts(text(), '</think>{x"a":5}')
    assert not accepts(text(disable_any_whitespace=True), '</think>{"a": 5}')
    assert not accepts(text(disable_additional_properties=True), '</think>{"a": 5, "b": 6}')
    assert accepts(text(whitespace_pattern="_*"), '</think>{__"a":5}')


@pytest.mark.parametrize("format", ALL_FORMATS)
@pytest.mark.parametrize("inside", [None, False, True])
def test_a_call_or_an_answer_of_a_schema(format: ToolFormat, inside: bool | None) -> None:
    """With `auto` the model decides; whatever it writes is one or the other, and valid."""
    use = ToolUse.read(TOOLS, "auto", None)
    tags = None if inside is None else THINK
    message_format = MessageFormat(
        format, use.allowed, tags=tags, starts_in_reasoning=bool(inside), opened=""
    )
    schema = {"type": "object", "properties": {"mood": {"type": "string"}}, "required": ["mood"]}
    grammar = made(message_format, use, StructuredOutputs(json=schema)).text
    thoughts = {None: "", False: "<think>Hm</think>\n\n", True: "Hm</think>"}[inside]
    head = "<|channel|>final<|message|>" if format == HARMONY else ""
    call, answer = thoughts + written(format, [ADD]), thoughts + head + '{"mood": "glad"}'
    assert accepts(grammar, call) and accepts(grammar, answer)
    assert [one.name for one in message_format.parse(call).calls] == ["add"]
    assert (
        message_format.parse(answer).content == '{"mood": "glad"}'
        and not message_format.parse(answer).calls
    )
    for wrong in ("Hello", "{}", written(format, [("add", {})])):
        assert not accepts(grammar, thoughts + wrong)


def test_references_in_calls_beside_json() -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}, "to": {"$ref": "#/$defs/p"}}}
    tree["$defs"] = {"p": {"type": "integer"}}
    function = {"name": "grow", "parameters": tree}
    use = ToolUse.read(chat_tools([{"type": "function", "function": function}]), "auto", None)
    message_format, wanted = (
        MessageFormat(TOOL_FORMATS["json"], use.allowed),
        StructuredOutputs(json={"enum": [1]}),
    )
    grammar = made(message_format, use, wanted).text
    assert accepts(grammar, written(TOOL_FORMATS["json"], [("grow", {"left": {"to": 1}})]))
    assert not accepts(grammar, written(TOOL_FORMATS["json"], [("grow", {"left": {"to": "1"}})]))


@pytest.mark.parametrize("kind", ["regex", "grammar", "choice"])
def test_other_grammars_beside_tools_are_of_the_whole_text(kind: str) -> None:
    use = ToolUse.read(TOOLS, "auto", None)
    text: Any = ["a"] if kind == "choice" else 'start: "a"'
    message_format, wanted = (
        MessageFormat(TOOL_FORMATS["json"], use.allowed),
        StructuredOutputs(**{kind: text}),
    )
    assert reply_grammar(message_format, use, wanted, no_marker, JsonSettings()) is None


def test_lines_with_schemas_name_their_fields() -> None:
    use = ToolUse.read(TOOLS, "auto", None)
    message_format = MessageFormat(TOOL_FORMATS["hermes"], use.allowed)
    wanted = StructuredOutputs(json_object=True)
    grammar = reply_grammar(
        message_format, use, wanted, no_marker, JsonSettings(), "response_format"
    )
    assert grammar is not None
    lines = grammar.text.splitlines()
    found = {name: lines[number - 1].partition(":")[0] for number, name in grammar.fields.items()}
    assert found == {
        "tools[0].function.parameters": "arguments_0",
        "tools[1].function.parameters": "arguments_1",
        "response_format": "answer",
    }


def one_tool(parameters: dict[str, Any]) -> str:
    tools = chat_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    use = ToolUse.read(tools, "required", None)
    return made(MessageFormat(TOOL_FORMATS["json"], use.allowed), use).text


def accepts_arguments(parameters: dict[str, Any], arguments: Any) -> bool:
    return accepts(one_tool(parameters), written(TOOL_FORMATS["json"], [("f", arguments)]))


def test_arguments_that_no_schema_names_are_left_out() -> None:
    """Also of objects inside; but an object that names none may have any."""
    point = {"type": "object", "properties": {"x": {"type": "integer"}}}
    schema = {
        "type": "object",
        "properties": {"at": point, "all": {"type": "array", "items": point}, "extra": {}},
    }
    schema["properties"]["extra"] = {"type": "object"}  # type: ignore[index]
    assert accepts_arguments(schema, {"at": {"x": 1}, "all": [{"x": 2}], "extra": {"k": 1}})
    assert not accepts_arguments(schema, {"at": {"x": 1, "y": 1}})
    assert not accepts_arguments(schema, {"all": [{"y": 1}]})
    assert not accepts_arguments(schema, {"other": 1})
    assert accepts_arguments(
        {"type": "object", "properties": {"at": {**point, "additionalProperties": True}}},
        {"at": {"x": 1, "y": 1}},
    )


def test_parts_that_are_combined_stay_open() -> None:
    parts = [{"type": "object", "properties": {key: {"type": "integer"}}} for key in "xy"]
    schema = {"type": "object", "properties": {"at": {"allOf": parts}}}
    assert accepts_arguments(schema, {"at": {"x": 1, "y": 2}})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["object", "null"], "properties": {"a": {"type": "integer"}}},
        {"properties": {"a": {"type": "integer"}}},
        {"anyOf": [{"type": "string"}, {"type": "object"}]},
        {"$ref": "#/$defs/p", "$defs": {"p": {"anyOf": [{"type": "array"}, {"type": "object"}]}}},
    ],
)
def test_arguments_are_an_object(schema: dict[str, Any]) -> None:
    assert accepts_arguments(schema, {"a": 1})
    for wrong in ("text", [1], None, 5):
        assert not accepts_arguments(schema, wrong)


@pytest.mark.parametrize("kind", ["string", "array", None, 5, ["string", "null"], []])
def test_parameters_that_are_no_object_are_refused(kind: Any) -> None:
    with pytest.raises(RequestError, match=r"tools\[0\].function.parameters.type must be 'object'"):
        one_tool({"type": kind})


def test_the_arguments_schema_is_the_tools() -> None:
    jsonschema.validate(ADD[1], SCHEMA)
    assert TOOLS[1].parameters == {"type": "object", "properties": {}}
