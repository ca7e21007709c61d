"""Turns as chat templates read them: tool blocks become calls and their results."""

from __future__ import annotations

from typing import Any

from quire.protocol.errors import RequestError
from quire.server.preparation.conversation import text_parts

TEXT_BLOCKS = ("text",)


def read_turn(role: str, content: Any, where: str) -> list[dict[str, Any]]:
    """The messages of one turn. The results of calls come before what the user says."""
    if not isinstance(content, list):
        return [{"role": role, "content": text_parts(content, TEXT_BLOCKS, where)}]
    turn: dict[str, Any] = {"role": role, "content": []}
    results: list[dict[str, Any]] = []
    for index, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        place = f"{where}[{index}]"
        if kind == "tool_use" and role == "assistant":
            turn.setdefault("tool_calls", []).append(_call(block, place))
        elif kind == "tool_result" and role == "user":
            results.append(_result(block, place))
        elif kind == "thinking" and role == "assistant":
            turn["reasoning"] = turn.get("reasoning", "") + str(block.get("thinking", ""))
        elif kind == "redacted_thinking" and role == "assistant":
            continue
        else:
            try:
                turn["content"] += text_parts([block], TEXT_BLOCKS, where)
            except RequestError as error:
                raise RequestError(str(error).replace(f"{where}[0]", place)) from None
    return results + ([turn] if turn["content"] or not results else [])


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    for name in ("id", "name"):
        if not isinstance(block.get(name), str):
            raise RequestError(f"{where}.{name} must be a string, got {block.get(name)!r:.80}.")
    if not isinstance(block.get("input"), dict):
        raise RequestError(f"{where}.input must be an object, got {block.get('input')!r:.80}.")
    function = {"name": block["name"], "arguments": block["input"]}
    return {"id": block["id"], "type": "function", "function": function}


def _result(block: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(block.get("tool_use_id"), str):
        raise RequestError(
            f"{where}.tool_use_id must be a string, got {block.get('tool_use_id')!r:.80}."
        )
    content = text_parts(block.get("content") or "", TEXT_BLOCKS, f"{where}.content")
    if block.get("is_error"):
        content = [{"type": "text", "text": "Error:"}, *content]
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}
