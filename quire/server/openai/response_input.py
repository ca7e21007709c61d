"""What a request to `/v1/responses` says: its body, and its input items as a conversation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from quire.protocol.errors import RequestError
from quire.server.openai.choices import refuse_stream_options
from quire.server.preparation.bodies import MessageBody, text_parts
from quire.text.tool_calls.declared import ToolUse, flat_tools

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (LOGPROBS, "reasoning.encrypted_content")
"""What `include` may name. Reasoning is returned as it is, so there is none to encrypt."""
STATEFUL = ("store", "previous_response_id", "conversation", "background", "prompt")
TEXT_PARTS = ("input_text", "output_text", "text")
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Roles of the protocol, and what chat templates call them."""


class ResponseBody(MessageBody):
    prepared_fields: ClassVar[frozenset[str]] = MessageBody.prepared_fields | {"input"}
    stubs: ClassVar[dict[str, Any]] = {"input": ""}

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: str | None = None
    stream_options: dict[str, Any] | None = None
    user: str | None = None

    store: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    prompt: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        named = self.top_logprobs is not None or self.logprob_token_ids is not None
        return named or LOGPROBS in (self.include or ())

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        for name in STATEFUL:
            if value := getattr(self, name):
                raise RequestError(
                    f"{name}={value!r} is not supported: this server keeps no responses. Leave it "
                    "out, and send the whole conversation as input."
                )
        refuse_stream_options(self.stream_options, self.stream)
        if self.truncation not in (None, "disabled"):
            raise RequestError(
                f"truncation={self.truncation!r} is not supported; use 'disabled', or "
                "truncate_prompt_tokens."
            )
        self._refuse_details()

    def _refuse_details(self) -> None:
        if (self.reasoning or {}).get("summary") is not None:
            raise RequestError("reasoning has a summary, which is not supported yet; leave it out.")
        for name in self.include or ():
            if name not in INCLUDABLE:
                raise RequestError(
                    f"include holds {name!r}, which is not supported; use "
                    f"{' or '.join(map(repr, INCLUDABLE))}."
                )
        if self.top_logprobs is not None and self.top_logprobs < 0:
            raise RequestError(f"top_logprobs must be at least 0, got {self.top_logprobs}.")

    def output_format(self) -> dict[str, Any]:
        if not isinstance(self.text_format, dict):
            raise RequestError(f"text.format must be an object, got {self.text_format!r:.80}.")
        return {**self.text_format, "json_schema": self.text_format}

    @property
    def output_format_field(self) -> str:
        return "text.format"

    @property
    def conversation_field(self) -> str:
        return "input"

    @property
    def max_tokens_field(self) -> str:
        return "max_output_tokens"

    def own_params(self) -> dict[str, Any]:
        return {"logprobs": self.num_logprobs(self.wants_logprobs, self.top_logprobs)}

    def template_settings(self) -> dict[str, Any]:
        effort = (self.reasoning or {}).get("effort")
        return {"template_kwargs": {} if effort is None else {"reasoning_effort": effort}}

    @property
    def text_format(self) -> Any:
        return (self.text or {}).get("format") or {"type": "text"}

    def chat_messages(self) -> list[dict[str, Any]]:
        """The conversation as chat templates read it."""
        told = [] if self.instructions is None else [_message("system", self.instructions)]
        if isinstance(self.input, str):
            return [*told, _message("user", self.input)]
        if not self.input:
            raise RequestError("input is an empty list; give at least one item.")
        items = [_read_item(item, f"input[{i}]") for i, item in enumerate(self.input)]
        return told + [message for message in _joined(items) if _says_something(message)]

    @property
    def tool_use(self) -> ToolUse:
        tools = flat_tools(self.tools, "parameters", ("function",))
        return ToolUse.read(tools, self.tool_choice, self.parallel_tool_calls)


def _message(role: str, content: Any, where: str = "input") -> dict[str, Any]:
    return {"role": role, "content": text_parts(content, TEXT_PARTS, f"{where}.content")}


def _read_message(item: dict[str, Any], where: str) -> dict[str, Any]:
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}.")
    content = item.get("content")
    if role == "assistant" and content is None:
        return {"role": role, "content": None}
    if role == "assistant" and isinstance(content, list):
        content = [_refusal_as_text(part) for part in content]
    return _message(ROLES[role], content, where)


def _refusal_as_text(part: Any) -> Any:
    is_refusal = isinstance(part, dict) and part.get("type") == "refusal"
    return {"type": "output_text", "text": part.get("refusal")} if is_refusal else part


def _read_call(item: dict[str, Any], where: str) -> dict[str, Any]:
    fields = {name: item.get(name) for name in ("call_id", "name", "arguments")}
    for name, value in fields.items():
        if not isinstance(value, str):
            raise RequestError(f"{where}.{name} must be a string, got {value!r:.80}.")
    function = {"name": fields["name"], "arguments": fields["arguments"]}
    call = {"id": fields["call_id"], "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _read_call_output(item: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(item.get("call_id"), str):
        raise RequestError(f"{where}.call_id must be a string, got {item.get('call_id')!r:.80}.")
    content = text_parts(item.get("output"), TEXT_PARTS, f"{where}.output")
    return {"role": "tool", "tool_call_id": item["call_id"], "content": content}


def _read_reasoning(item: dict[str, Any], where: str) -> dict[str, Any]:
    """What was thought; where that is kept secret, its summary."""
    parts = text_parts(item.get("content") or [], ("reasoning_text",), f"{where}.content")
    if not parts:
        parts = text_parts(item.get("summary") or [], ("summary_text",), f"{where}.summary")
    text = "\n".join(part["text"] for part in parts)
    return {"role": "assistant", "content": None, **({"reasoning": text} if text else {})}


ITEM_READERS: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_call_output,
    "reasoning": _read_reasoning,
}
"""By the type of an input item: what makes a message of it."""


def _says_something(message: dict[str, Any]) -> bool:
    """Not so a turn of which only a mark is left: a reasoning item that is empty, say."""
    parts = ("content", "tool_calls", "reasoning")
    return message["role"] != "assistant" or any(message.get(part) for part in parts)


def _joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the model thought, said and called in one turn are items here and one message there."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        last: dict[str, Any] = joined[-1] if joined else {"role": None}
        is_turn = last["role"] == message["role"] == "assistant"
        if is_turn and (message["content"] is None or last["content"] is None):
            content = message["content"] if last["content"] is None else last["content"]
            if calls := message.pop("tool_calls", None):
                last.setdefault("tool_calls", []).extend(calls)
            last |= {**message, "content": content}
        else:
            joined.append(message)
    return joined


def _read_item(item: dict[str, Any], where: str) -> dict[str, Any]:
    kind = item.get("type") or "message"
    reader = ITEM_READERS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise RequestError(
            f"{where} is of type {kind!r}, which is not supported; use "
            f"{' or '.join(map(repr, ITEM_READERS))}."
        )
    return reader(item, where)
