"""The part `calls` of structured.py: forced calls of random tools, and how many of them end."""

from __future__ import annotations

import random
from typing import Any

from quire import LLM, SamplingParams, StructuredOutputs
from quire.protocol.structured import JsonSettings
from quire.text.chat_template import find_tool_format, select_template, template_variables
from quire.text.message_stream import MessageFormat
from quire.text.tool_calls.declared import ToolUse, chat_tools
from quire.text.tool_calls.enforcement import reply_grammar
from quire.text.tool_calls.prompting import prepare_conversation

CALL_TOKENS = 400
MIN_FINISHED_CALLS = 0.95

NOUNS = ("city", "date", "query", "user", "path", "price", "language", "unit", "title", "limit")
VERBS = ("get", "find", "create", "update", "delete", "send", "convert", "schedule", "list")
PLACES = ("weather", "invoice", "flight", "document", "ticket", "playlist", "reminder", "order")
CHOICES = ("low", "medium", "high", "urgent", "celsius", "fahrenheit", "draft", "final")
MAX_DEPTH = 2


def random_tool(seed: int) -> dict[str, Any]:
    """A tool as chat completions have it; the same for the same seed."""
    rng = random.Random(seed)
    verb, place = rng.choice(VERBS), rng.choice(PLACES)
    function = {
        "name": f"{verb}_{place}",
        "description": f"{verb.capitalize()} a {place}.",
        "parameters": _object(rng, 0),
    }
    return {"type": "function", "function": function}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NOUNS, rng.randint(1, 5 if depth == 0 else 3))
    required = [name for name in names if rng.random() < 0.7]
    return {
        "type": "object",
        "properties": {name: _value(rng, name, depth + 1) for name in names},
        "required": required,
    }


def _value(rng: random.Random, name: str, depth: int) -> dict[str, Any]:
    kinds = ["string", "string", "integer", "number", "boolean", "enum", "array"]
    kind = rng.choice([*kinds, "object"] if depth <= MAX_DEPTH else kinds)
    if kind == "object":
        return _object(rng, depth)
    if kind == "enum":
        return {"type": "string", "enum": rng.sample(CHOICES, 3)}
    if kind == "array":
        items = {"type": rng.choice(["string", "integer"])}
        return {"type": "array", "items": items, "maxItems": 4, "description": f"Several {name}s."}
    return {"type": kind, "description": f"The {name}."}


def forced_call(llm: LLM, seed: int, settings: JsonSettings) -> tuple[Any, SamplingParams]:
    """A conversation in which one random tool must be called, and the parameters of its reply."""
    tokenizer = llm.get_tokenizer()
    template = select_template(tokenizer.chat_template, None, has_tools=True)
    format, tool = find_tool_format(template), random_tool(seed)
    use = ToolUse.read(chat_tools([tool]), "required", parallel=False)
    message_format = MessageFormat(format, use.allowed, use.max_calls)
    grammar = reply_grammar(message_format, use, None, tokenizer.special_ids.get, settings)
    assert grammar is not None
    asked = {"role": "user", "content": f"{tool['function']['description']} Fill in what you like."}
    messages, _ = prepare_conversation(
        [asked],
        use.declarations,
        takes_tools="tools" in template_variables(template),
        style=format,
    )
    wanted = StructuredOutputs(grammar=grammar.text)
    return messages, SamplingParams(
        temperature=1.0, seed=seed, max_tokens=CALL_TOKENS, structured_outputs=wanted
    )


def measure_calls(engine: dict[str, Any], count: int) -> dict[str, Any]:
    """Layouts: the default, and any amount of white space."""
    finished = []
    with LLM(**engine | {"max_model_len": 2048}) as llm:
        for settings in (JsonSettings(), JsonSettings(disable_any_whitespace=False)):
            asked = [forced_call(llm, seed, settings) for seed in range(count)]
            conversations, params = map(list, zip(*asked, strict=True))
            outputs = [one.outputs[0] for one in llm.chat(conversations, params, use_tqdm=False)]
            finished.append(sum(one.finish_reason == "stop" for one in outputs))
            wrong = [one.finish_reason for one in outputs if one.finish_reason == "error"]
            assert not wrong, wrong
    print(
        f"forced calls that end within {CALL_TOKENS} tokens: {finished[0]} of {count}; with any "
        f"white space {finished[1]}"
    )
    share = finished[0] / count
    return {"share": share, "share_free": finished[1] / count, "met": share >= MIN_FINISHED_CALLS}
