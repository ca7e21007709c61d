"""Grammars of enforced calls: what they let through is what the parser reads as valid calls."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from quire.config.structured import GrammarSettings
from quire.frontend.tools.declared import ToolUse, chat_tools
from quire.frontend.tools.enforcement import answer_after_reasoning, calls_grammar
from quire.frontend.tools.formats import FORMATS, MISTRAL_NAMES_FIRST, ToolFormat
from quire.frontend.tools.message_stream import MessageForm
from quire.frontend.tools.reasoning import THINK
from quire.protocol.structured import StructuredOutputs

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = chat_tools(
    [
        {"type": "function", "function": {"name": "add", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "now"}},
    ]
)
ADD, NOW = ("add", {"a": 7}), ("now", {})
BYTES = LLTokenizer("byte")
ALL_FORMATS = [*FORMATS.values(), MISTRAL_NAMES_FIRST]


def accepts(grammar: str, text: str) -> bool:
    """Whether the grammar lets a text through and can end there."""
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


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
    form = MessageForm(format, use.allowed, tags=tags, starts_in_reasoning=bool(inside))
    grammar = calls_grammar(form, use, lambda marker: None)
    thoughts = {None: "", False: "<think>{Hm}</think>\n\n", True: '{"name"</think>'}[inside]
    text = thoughts + written(format, [ADD, NOW])
    assert accepts(grammar, text)
    message = form.parse(text)
    assert [(one.name, json.loads(one.arguments)) for one in message.calls] == [ADD, NOW]
    assert message.content == "" and bool(message.reasoning) == (inside is not None)
    for wrong in ("Hello", "", written(format, [("add", {})]), written(format, [("sub", {})])):
        assert not accepts(grammar, thoughts + wrong)
    assert not accepts(grammar, thoughts + written(format, [("add", {"a": 1, "b": 2})]))


@pytest.mark.parametrize("format", ALL_FORMATS)
def test_one_named_call(format: ToolFormat) -> None:
    use = ToolUse.read(TOOLS, {"type": "function", "function": {"name": "now"}}, True)
    grammar = calls_grammar(MessageForm(format, use.allowed), use, lambda marker: None)
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
    grammar = calls_grammar(MessageForm(FORMATS["json"], use.allowed), use, lambda marker: None)
    assert grammar.count("%json") == len(names)


def test_markers_that_are_special_tokens_go_by_their_ids() -> None:
    use = ToolUse.read(TOOLS, "required", None)
    form = MessageForm(MISTRAL_NAMES_FIRST, use.allowed)
    grammar = calls_grammar(form, use, {"[TOOL_CALLS]": 9, "[ARGS]": 32}.get)
    assert 'call_0: <[9]> "add" <[32]> arguments_0' in grammar


@pytest.mark.parametrize("inside", [False, True])
def test_answers_keep_their_form_after_reasoning(inside: bool) -> None:
    """Where the prompt has not opened the reasoning, the model may do so or answer at once."""
    form = MessageForm(tags=THINK, starts_in_reasoning=inside)
    start = "" if inside else "<think>"
    for wanted, answer in (
        (StructuredOutputs(json=SCHEMA), '{"a": 5}'),
        (StructuredOutputs(json_object=True), "{}"),
        (StructuredOutputs(choice=["yes", "no"]), "no"),
    ):
        made = answer_after_reasoning(form, wanted, lambda marker: None, GrammarSettings())
        assert made.grammar is not None
        assert accepts(made.grammar, f"{start}Let me think.\n</think>\n\n{answer}")
        assert accepts(made.grammar, answer) is not inside
        assert not accepts(made.grammar, f"{start}Hm</think>Well")
    regex = StructuredOutputs(regex="a+")
    assert answer_after_reasoning(form, regex, lambda marker: None, GrammarSettings()) is regex


def test_settings_of_json_hold_after_reasoning() -> None:
    form = MessageForm(tags=THINK, starts_in_reasoning=True)
    schema = {**SCHEMA, "x-guidance": {"whitespace_pattern": "x*"}}

    def made(engine: GrammarSettings | None = None, **settings: Any) -> str:
        wanted = StructuredOutputs(json=schema, **settings)
        engine = engine or GrammarSettings()
        return str(answer_after_reasoning(form, wanted, lambda marker: None, engine).grammar)

    assert accepts(made(), '</think>{ "a": 5, "b": 6}')
    assert not accepts(made(disable_any_whitespace=True), '</think>{"a": 5}')
    assert not accepts(made(disable_additional_properties=True), '</think>{"a": 5, "b": 6}')
    assert not accepts(made(GrammarSettings(disable_any_whitespace=True)), '</think>{"a": 5}')
    closed = GrammarSettings(disable_additional_properties=True)
    assert not accepts(made(closed), '</think>{"a": 5, "b": 6}')
    assert accepts(made(whitespace_pattern="_*"), '</think>{__"a":5}')
    assert not accepts(made(), '</think>{x"a":5}')


def test_the_arguments_schema_is_the_tools() -> None:
    jsonschema.validate(ADD[1], SCHEMA)
    assert TOOLS[1].parameters == {"type": "object", "properties": {}}
