"""Conversations with tools, as chat templates take them: also those that know nothing of tools."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from quire.config.reply_formats import ToolFormat

INSTRUCTIONS = """\
You may call functions. These are there, with the JSON schema of their arguments:
{tools}
To call a function, answer with nothing but {{"name": its name, "arguments": its arguments as a \
JSON object}}; one such line for each call."""
SHORT_ID = 9
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""What clients and templates call what a message's author thought before it."""


def prepare_conversation(
    messages: Sequence[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    *,
    takes_tools: bool,
    style: ToolFormat,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools to render in a template that asks for calls of this `style`. One that
    takes no tools gets them as text."""
    prepared = [_with_content(_without_nulls(message)) for message in messages]
    if style.has_short_ids:
        prepared = [_with_short_ids(message) for message in prepared]
    if takes_tools:
        return prepared, tools
    names = _names_by_id(prepared)
    prepared = [_as_text(message, names) for message in prepared]
    return (_with_instructions(prepared, tools) if tools else prepared), None


def _without_nulls(message: dict[str, Any]) -> dict[str, Any]:
    """Clients send all fields of a message, some of them empty; some templates ask only whether a
    field is there."""
    empty = {key for key in REASONING_KEYS if message.get(key) is None}
    if message.get("tool_calls") in (None, []):
        empty.add("tool_calls")
    return {key: value for key, value in message.items() if key not in empty}


def _with_content(message: dict[str, Any]) -> dict[str, Any]:
    """Clients leave out the content of messages that call tools or refuse; templates print it."""
    is_spoken = message.get("role") == "assistant" or message.get("tool_calls")
    if is_spoken and message.get("content") is None:
        refusal = message.get("refusal")
        return {**message, "content": refusal if isinstance(refusal, str) else ""}
    return message


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Ids that other servers made are too long for some templates; their ends are unique too."""
    short = dict(message)
    if isinstance(short.get("tool_call_id"), str):
        short["tool_call_id"] = _short(short["tool_call_id"])
    if isinstance(short.get("tool_calls"), list):
        short["tool_calls"] = [
            {**call, "id": _short(call["id"])}
            if isinstance(call, dict) and isinstance(call.get("id"), str)
            else call
            for call in short["tool_calls"]
        ]
    return short


def _short(call_id: str) -> str:
    letters = "".join(char for char in call_id if char.isalnum())
    return letters[-SHORT_ID:].rjust(SHORT_ID, "0")


def _as_text(message: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Calls and their results as what the model would write and read without a template."""
    if message.get("role") == "tool":
        name = message.get("name") or names.get(str(message.get("tool_call_id")), "the function")
        content = message.get("content")
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        return {"role": "user", "content": f"Result of {name}: {text}"}
    calls = _calls(message)
    if not calls:
        return message
    written = [_written(call.get("function")) for call in calls]
    spoken = [message["content"]] if message.get("content") else []
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**plain, "content": "\n".join([*map(str, spoken), *written])}


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The calls of a message that are not checked yet."""
    calls = message.get("tool_calls")
    return [one for one in calls if isinstance(one, dict)] if isinstance(calls, list) else []


def _names_by_id(messages: list[dict[str, Any]]) -> dict[str, str]:
    """What was called, by the id of the call; of two with one id, the first."""
    names: dict[str, str] = {}
    for message in messages:
        for call in _calls(message):
            if isinstance(call.get("function"), dict):
                names.setdefault(str(call.get("id")), str(call["function"].get("name")))
    return names


def _written(function: Any) -> str:
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(function.get("name"))}, "arguments": {arguments}}}'


def _with_instructions(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    listed = "\n".join(
        json.dumps(
            tool.get("function", tool) if isinstance(tool, dict) else tool, ensure_ascii=False
        )
        for tool in tools
    )
    text = INSTRUCTIONS.format(tools=listed)
    if not messages or messages[0].get("role") not in ("system", "developer"):
        return [{"role": "system", "content": text}, *messages]
    first, content = messages[0], messages[0].get("content")
    joined: Any = f"{content}\n\n{text}"
    if isinstance(content, list):
        joined = [*content, {"type": "text", "text": text}]
    return [{**first, "content": joined}, *messages[1:]]


def prepare_channels(
    messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools as gpt-oss's template takes them: instructions are one message, a call is
    a message with its result behind it, what was thought and said before a call is one text, and
    each tool and argument has a description. It would leave out, or refuse, what is written
    otherwise."""
    single = _single_calls(_with_one_instruction(messages))
    return [_with_one_thought(message) for message in single], _with_descriptions(tools)


def _with_one_instruction(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of system and developer that begin the conversation, joined."""
    first = list(itertools.takewhile(lambda m: m["role"] in ("system", "developer"), messages))
    texts = [message.get("content") for message in first]
    if len(first) < 2 or not all(isinstance(text, str) for text in texts):
        return list(messages)
    return [{**first[0], "content": "\n\n".join(map(str, texts))}, *messages[len(first) :]]


def _single_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A message for each call, with the results of that call behind it."""
    prepared: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    places: dict[Any, int] = {}
    """Of the calls that results are looked for: where their results go, by the call's id."""
    groups: list[list[dict[str, Any]]] = []
    unanswered: Iterator[int] = iter(())
    for message in messages:
        if groups and message["role"] == "tool":
            place = places.get(message.get("tool_call_id"))
            groups[next(unanswered, -1) if place is None else place].append(message)
            continue
        prepared += itertools.chain.from_iterable(groups)
        calls, groups = _calls(message), []
        if len(calls) < 2:
            prepared.append(message)
            continue
        bare = {"role": message["role"], "content": ""}
        groups = [
            [{**(message if i == 0 else bare), "tool_calls": [call]}]
            for i, call in enumerate(calls)
        ]
        unanswered = (i for i, group in enumerate(groups) if len(group) == 1)
        places = {call["id"]: i for i, call in enumerate(calls) if isinstance(call.get("id"), str)}
    return [*prepared, *itertools.chain.from_iterable(groups)]


def _with_one_thought(message: dict[str, Any]) -> dict[str, Any]:
    thought, content = message.get("thinking"), message.get("content")
    if not (_calls(message) and content and thought):
        return message
    if not (isinstance(thought, str) and isinstance(content, str)):
        return message
    both = f"{thought}\n{content}"
    return {**message, "content": "", "thinking": both, "reasoning_content": both}


def _with_descriptions(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    described = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict):
            function = _with_description(function)
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            if isinstance(parameters, dict) and isinstance(properties, dict):
                properties = {name: _with_description(one) for name, one in properties.items()}
                function = {**function, "parameters": {**parameters, "properties": properties}}
            tool = {**tool, "function": function}
        described.append(tool)
    return described


def _with_description(described: Any) -> Any:
    """A function, or a property of its arguments; those that are no objects as they are."""
    if not isinstance(described, dict) or described.get("description") is not None:
        return described
    return {**described, "description": ""}
