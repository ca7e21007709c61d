"""Conversations with tools, as chat templates take them: also those that know nothing of tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

INSTRUCTIONS = """\
You may call functions. These are there, with the JSON schema of their arguments:
{tools}
To call a function, answer with nothing but {{"name": its name, "arguments": its arguments as a \
JSON object}}; one such line for each call."""
SHORT_ID = 9


def prepare_conversation(
    messages: Sequence[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    *,
    takes_tools: bool,
    short_ids: bool,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages and tools to render. A template that takes no tools gets them as text."""
    prepared = [_with_content(message) for message in messages]
    if short_ids:
        prepared = [_with_short_ids(message) for message in prepared]
    if takes_tools:
        return prepared, tools
    names = _names_by_id(prepared)
    prepared = [_as_text(message, names) for message in prepared]
    return (_with_instructions(prepared, tools) if tools else prepared), None


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
