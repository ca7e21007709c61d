"""What a request to `/v1/messages` says: its body, and its turns as a conversation."""

from __future__ import annotations

from typing import Any, ClassVar

from quire.protocol.errors import RequestError
from quire.server.anthropic.turns import read_turn
from quire.server.preparation.bodies import MessageBody
from quire.server.preparation.conversation import text_parts
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
        form = (self.output_config or {}).get("format")
        if form is None:
            return {}
        if not isinstance(form, dict) or form.get("type") != "json_schema" or "schema" not in form:
            raise RequestError(
                "output_config.format must be {'type': 'json_schema', 'schema': {...}}, got "
                f"{form!r:.200}."
            )
        return {"type": "json_schema", "json_schema": form}

    @property
    def output_format_field(self) -> str:
        return "output_config.format"

    @property
    def continues(self) -> bool:
        """Whether the reply goes on from the last message instead of following it."""
        return bool(self.messages) and self.messages[-1].get("role") == "assistant"

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as chat templates read them: turns of the same role become one."""
        if not self.messages:
            raise RequestError("messages is an empty list; give at least one message.")
        turns: list[dict[str, Any]] = []
        if self.system is not None:
            turns.append({"role": "system", "content": _text_blocks(self.system, "system")})
        for index, message in enumerate(self.messages):
            role, where = message.get("role"), f"messages[{index}]"
            if role not in ROLES:
                raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}, got {role!r}.")
            for turn in read_turn(role, message.get("content"), f"{where}.content"):
                last: dict[str, Any] = turns[-1] if turns else {"role": None}
                if last["role"] == turn["role"] != "tool":
                    if calls := turn.pop("tool_calls", None):
                        last.setdefault("tool_calls", []).extend(calls)
                    last["content"] += turn.pop("content")
                    last |= turn
                else:
                    turns.append(turn)
        return turns

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


def _text_blocks(content: Any, where: str) -> list[dict[str, Any]]:
    return text_parts(content, TEXT_BLOCKS, where)
