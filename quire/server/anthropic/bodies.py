"""What a request to `/v1/messages` says: its body, and its turns as a conversation."""

from __future__ import annotations

from typing import Any, ClassVar

from quire.protocol.errors import RequestError
from quire.server.preparation.bodies import MessageBody, text_parts
from quire.text.message_stream import MessageFormat
from quire.text.tool_calls.declared import ToolUse, flat_tools

TEXT_BLOCKS = ("text",)
ROLES = ("user", "assistant", "system")
THINKING = {"enabled": True, "adaptive": True, "disabled": False}
"""The types of `thinking`, and what chat templates hear as `enable_thinking`."""


class CountBody(MessageBody):
    """A conversation; what is asked of `/v1/messages/count_tokens`."""

    prepared_fields: ClassVar[frozenset[str]] = MessageBody.prepared_fields | {
        *("messages", "system", "tools", "tool_choice", "output_config", "metadata"),
    }
    stubs: ClassVar[dict[str, Any]] = {"messages": []}

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    """Marks what to cache; here all prompts are, so marks say nothing new."""

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        self.refuse("logprob_token_ids")
        if self.thinking is not None and self.thinking.get("type") not in THINKING:
            raise RequestError(
                f"thinking.type must be one of {', '.join(THINKING)}, got {self.thinking!r:.200}."
            )

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to reason before it answers; None: as it likes."""
        return None if self.thinking is None else THINKING[self.thinking["type"]]

    def output_format(self) -> dict[str, Any]:
        format = (self.output_config or {}).get("format")
        if format is None:
            return {}
        if (
            not isinstance(format, dict)
            or format.get("type") != "json_schema"
            or "schema" not in format
        ):
            raise RequestError(
                "output_config.format must be {'type': 'json_schema', 'schema': {...}}, got "
                f"{format!r:.200}."
            )
        return {"type": "json_schema", "json_schema": format}

    @property
    def output_format_field(self) -> str:
        return "output_config.format"

    @property
    def continues(self) -> bool:
        """Whether the reply goes on from the last message instead of following it."""
        return bool(self.messages) and self.messages[-1].get("role") == "assistant"

    def chat_messages(self) -> list[dict[str, Any]]:
        """The messages as chat templates read them: turns of the same role become one."""
        if not self.messages:
            raise RequestError("messages is an empty list; give at least one message.")
        turns: list[dict[str, Any]] = []
        if self.system is not None:
            turns.append(
                {"role": "system", "content": text_parts(self.system, TEXT_BLOCKS, "system")}
            )
        for index, message in enumerate(self.messages):
            role, where = message.get("role"), f"messages[{index}]"
            if role not in ROLES:
                raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}.")
            for turn in _read_turn(role, message.get("content"), f"{where}.content"):
                last: dict[str, Any] = turns[-1] if turns else {"role": None}
                if last["role"] == turn["role"] != "tool":
                    if calls := turn.pop("tool_calls", None):
                        last.setdefault("tool_calls", []).extend(calls)
                    last["content"] += turn.pop("content")
                    last |= turn
                else:
                    turns.append(turn)
        return turns

    def template_settings(self) -> dict[str, Any]:
        effort = (self.output_config or {}).get("effort")
        kwargs = {"enable_thinking": self.thinks, "reasoning_effort": effort}
        return {
            "template_kwargs": {name: value for name, value in kwargs.items() if value is not None},
            "add_generation_prompt": not self.continues,
            "continue_final_message": self.continues,
        }

    @property
    def tool_use(self) -> ToolUse:
        tools = flat_tools(self.tools, "input_schema", ("custom", None))
        choice = self.tool_choice or {}
        parallel = False if choice.get("disable_parallel_tool_use") else None
        kind = choice.get("type")
        if kind == "tool":
            return ToolUse.of(tools, "required", [str(choice.get("name"))], parallel=False)
        mode = {"any": "required"}.get(str(kind), kind)
        return ToolUse.of(tools, mode, parallel=parallel)


class MessagesBody(CountBody):
    max_tokens: int
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.stop is not None and self.stop_sequences is not None:
            raise RequestError("stop is another name of stop_sequences here; give one of them.")

    def own_params(self) -> dict[str, Any]:
        return {} if self.stop_sequences is None else {"stop": self.stop_sequences}

    def check_reply(self, format: MessageFormat, model: str) -> None:
        if self.thinks and format.tags is None:
            raise RequestError(
                f"thinking={self.thinking!r:.200} is refused: the chat template of model {model!r} "
                "shows no reasoning; leave it out, or set the server's --reasoning-parser."
            )


def _read_turn(role: str, content: Any, where: str) -> list[dict[str, Any]]:
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
