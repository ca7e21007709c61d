"""Grammars that are refused, and hostile ones that must not cost other requests anything."""

from __future__ import annotations

from typing import Any

import pytest

from quire import LLM, RequestError, SamplingParams, StructuredOutputs
from tests.frontend.grammars import PERSON, run
from tests.frontend.refusals import refuses

pytest.importorskip("llguidance", reason="llguidance is not installed")

ENDLESS = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}


def _tag(**changes: Any) -> dict[str, Any]:
    return {"structures": [{"begin": "<a>", "schema": {}, "end": "", **changes}], "triggers": ["<"]}


@pytest.mark.parametrize(
    ("grammar", "parts"),
    [
        ({"json": {"uniqueItems": True}}, ("structured_outputs.json", "uniqueItems")),
        ({"json": {"not": {}, "x-guidance": {"lenient": True}}}, ("json", '"not"')),
        ({"json": {"format": "bogus"}}, ("json", "bogus")),
        ({"json": {"type": "string", "pattern": "(?=a)"}}, ("json", "look-ahead")),
        ({"json": "[1]"}, ("structured_outputs.json", "JSON schema")),
        ({"json": {"$ref": "#"}}, ("structured_outputs.json",)),
        ({"json": ENDLESS}, ("structured_outputs.json", "no text can match it")),
        ({"regex": "[^\\s\\S]"}, ("structured_outputs.regex", "no text can match it")),
        ({"regex": "("}, ("structured_outputs.regex", "unclosed group")),
        ({"grammar": "start: x"}, ("structured_outputs.grammar", "x")),
        ({"grammar": "root ::= ("}, ("structured_outputs.grammar",)),
        ({"structural_tag": {"a": 1}}, ("structural_tag", "triggers")),
        ({"structural_tag": _tag(begin=5)}, ("structural_tag", "triggers")),
        ({"structural_tag": _tag(end=[])}, ("structural_tag", "triggers")),
        ({"structural_tag": {**_tag(), "triggers": [5]}}, ("structural_tag", "triggers")),
        (
            {"structural_tag": _tag(schema={"not": {}, "x-guidance": {"lenient": True}})},
            ("structural_tag", '"not"'),
        ),
    ],
)
def test_what_cannot_be_enforced_is_refused(
    llm: LLM, grammar: dict[str, Any], parts: tuple[str, ...]
) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(**grammar))
    refuses(lambda: llm.generate(["x", "y"], params), "prompts[0]", *parts)


def _nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


HOSTILE = {
    "deep": {"json": _nested(900)},
    "huge enum": {"json": {"enum": [f"{i * 7919 % 1000003}" for i in range(90_000)]}},
    "huge": {"json": {"enum": ["x" * 100 + str(i) for i in range(100_000)]}},
    "deep expression": {"regex": "(" * 50_000 + "a" + ")" * 50_000},
    "deep grammar": {"grammar": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000},
    "blank lines": {"grammar": "\n" * 50_000},
    "blank lines in GBNF": {"grammar": "root ::= x" + "\n" * 50_000},
    "long chain in GBNF": {"grammar": "".join(f"r{i} ::= r{i + 1}\n" for i in range(20_000))},
    "endless": {"json": {"type": "integer", "multipleOf": 99999989}},
}


@pytest.mark.parametrize("grammar", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_grammars_are_refused(llm: LLM, grammar: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="structured_outputs"):
        run(llm, StructuredOutputs(**grammar))


@pytest.mark.parametrize(
    "grammar",
    [
        {"regex": "a\ud800"},
        {"choice": ["a", "\ud800"]},
        {"json": '{"const": "\ud800"}'},
        {"grammar": 'start: "\ud800"'},
        {"json": PERSON, "whitespace_pattern": "\ud800"},
    ],
)
def test_half_a_character_is_refused(grammar: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"{list(grammar)[-1]} has half a character, '.ud800'"):
        StructuredOutputs(**grammar)


def test_a_long_pattern_for_whitespace_is_refused() -> None:
    with pytest.raises(RequestError, match="whitespace_pattern has 1048577 bytes"):
        StructuredOutputs(json=PERSON, whitespace_pattern=" " * ((1 << 20) + 1))


def test_forms_beside_a_bad_one_are_not_compiled(llm: LLM) -> None:
    """Nothing waits for them: neither the next call nor the end of the program does."""
    many = [{"title": f"beside {i}", "type": "integer", "multipleOf": 99999989} for i in range(60)]
    grammars = [StructuredOutputs(regex="(beside"), *(StructuredOutputs(json=one) for one in many)]
    params = [SamplingParams(structured_outputs=grammar) for grammar in grammars]
    with pytest.raises(RequestError, match=r"prompts\[0\]"):
        llm.generate(["a"] * len(params), params, use_tqdm=False)
    last = [*llm._core.grammars.compiler._cache.values()][-1]
    assert last.is_outdated


def test_long_chains_do_not_overflow_the_stack(llm: LLM) -> None:
    """llguidance follows them by recursion; an overflow would end the process."""
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(5000))
    grammar = StructuredOutputs(grammar=f'start: r0\n{rules}r5000: "a"')
    assert run(llm, grammar).outputs[0].text == "a"
    parts: dict[str, Any] = {
        f"a{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/a{i + 1}"}], "minItems": 1}
        for i in range(1000)
    }
    schema = {"$defs": {**parts, "a1000": {"type": "null"}}, "$ref": "#/$defs/a0"}
    grammar = StructuredOutputs(json=schema, disable_any_whitespace=True)
    assert run(llm, grammar, max_tokens=20).outputs[0].text.startswith("[[[")


@pytest.mark.parametrize("pattern", ["(a+)+b", "((a{0,50}){0,50}b){0,50}", "(.*a){30}.{30}"])
def test_catastrophic_expressions_end(llm: LLM, pattern: str) -> None:
    """They cost no more than the limits allow: matching is linear."""
    completion = run(llm, StructuredOutputs(regex=pattern), max_tokens=10).outputs[0]
    assert completion.finish_reason in ("length", "stop", "error")
