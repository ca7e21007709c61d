"""Messages of chat completions with tool calls and reasoning, as OpenAI and vLLM write them."""

from __future__ import annotations

from typing import Any

from quire.frontend.outputs import CompletionOutput
from quire.text.deltas import CallDelta, Delta, Message, ReasoningDelta


def whole_message(parsed: Message, role: str, with_reasoning: bool) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": role,
        "content": parsed.content or None,
        "refusal": None,
    }
    if parsed.reasoning and with_reasoning:
        message["reasoning"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in parsed.calls
        ]
    elif not parsed.reasoning:
        message["content"] = parsed.content
    return message


def delta_record(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, ReasoningDelta):
        return {"reasoning": delta.text}
    if not isinstance(delta, CallDelta):
        return {"content": delta.text}
    call: dict[str, Any] = {"index": delta.index}
    function = {"arguments": delta.arguments}
    if delta.name is not None:
        call |= {"id": delta.id, "type": "function"}
        function = {"name": delta.name, **function}
    return {"tool_calls": [{**call, "function": function}]}


def finish_reason(reason: str | None, has_calls: bool = False) -> str | None:
    """Why a choice ended, in OpenAI's words: a model that stops after calls waits for their
    results; a text that repeats itself was cut, as by a limit."""
    if reason == "repetition":
        return "length"
    return "tool_calls" if has_calls and reason == "stop" else reason


def stop_reason(one: CompletionOutput) -> int | str | None:
    """What made a choice end: a stop string or token, or "repetition"."""
    return "repetition" if one.finish_reason == "repetition" else one.stop_reason
