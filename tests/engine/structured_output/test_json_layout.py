"""White space in forced JSON: what models write passes, and none goes on for ever."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from quire.config.structured import GrammarSettings
from quire.engine.structured_output.grammar_source import grammar_text
from quire.protocol.errors import OptionError, RequestError
from quire.protocol.structured import StructuredOutputs

BYTES = LLTokenizer("byte")
DOCUMENT = {"a": [1, {"b": "x"}], "c": {"d": None}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "array"}, "c": {"type": "object"}}}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}
WANTED: dict[str, tuple[dict[str, Any], str]] = {
    "json": ({"json": SCHEMA}, "{}"),
    "anything": ({"json": True}, "{}"),
    "json_object": ({"json_object": True}, "{}"),
    "structural_tag": ({"structural_tag": TAG}, "<f>{}</f>"),
}
LAYOUTS = {
    "python": json.dumps(DOCUMENT),
    "compact": json.dumps(DOCUMENT, separators=(",", ":")),
    "two": json.dumps(DOCUMENT, indent=2),
    "four": json.dumps(DOCUMENT, indent=4),
    "tabs": json.dumps(DOCUMENT, indent="\t"),
    "inner": '{ "a": [ 1, { "b": "x" } ], "c": { "d": null } }',
}
ENDLESS = ['{"a":%s[]}', '{%s"a": []}', '{"a"%s: []}', '{"a": [%s]}', '{"a": []%s}', '{"a": [1%s]}']


def accepts(text: str, engine: GrammarSettings | None = None, **wanted: Any) -> bool:
    grammar = grammar_text(StructuredOutputs(**wanted), engine or GrammarSettings())
    matcher = LLMatcher(BYTES, grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(("wanted", "around"), WANTED.values(), ids=WANTED)
def test_usual_layouts_pass(wanted: dict[str, Any], around: str) -> None:
    for name, text in LAYOUTS.items():
        assert accepts(around.replace("{}", text), **wanted), name


@pytest.mark.parametrize(("wanted", "around"), WANTED.values(), ids=WANTED)
@pytest.mark.parametrize("space", [" ", "\n", "\t", "\r", "\n ", " \n"])
def test_white_space_ends(wanted: dict[str, Any], around: str, space: str) -> None:
    """Wherever it may stand; a request or the engine can allow any."""
    free = GrammarSettings(disable_any_whitespace=False)
    for pattern in ENDLESS:
        text = around.replace("{}", pattern % (space * 60))
        assert not accepts(text, **wanted), text
        assert accepts(text, **wanted, disable_any_whitespace=False), text
        assert accepts(text, free, **wanted), text


def test_the_request_decides_before_the_engine() -> None:
    spaced, tight = '{"a": []}', '{"a":[]}'
    none = GrammarSettings(disable_any_whitespace=True)
    assert accepts(tight, none, json=SCHEMA) and not accepts(spaced, none, json=SCHEMA)
    assert accepts(spaced, none, json=SCHEMA, disable_any_whitespace=False)
    marked = GrammarSettings(whitespace_pattern="_")
    assert accepts('{"a":_[]}', marked, json=SCHEMA) and not accepts(spaced, marked, json=SCHEMA)
    assert accepts(spaced, marked, json=SCHEMA, whitespace_pattern=" ")


def test_wrong_settings_are_named() -> None:
    with pytest.raises(RequestError, match=r"structured_outputs\.disable_any_whitespace must be"):
        StructuredOutputs(json=SCHEMA, disable_any_whitespace="no")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="'whitespace_pattern'] must be a regular expression"):
        GrammarSettings.from_config({"whitespace_pattern": True})
    with pytest.raises(OptionError, match="'disable_any_whitespace'] must be true or false"):
        GrammarSettings.from_config({"disable_any_whitespace": "no"})
