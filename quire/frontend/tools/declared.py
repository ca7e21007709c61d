"""The tools of a request, and whether the model may, must or must not call them. Checked here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from quire.protocol.errors import RequestError

MAX_NAME = 256


@dataclass(frozen=True)
class Tool:
    name: str
    parameters: dict[str, Any]
    """The JSON schema of its arguments."""
    declaration: dict[str, Any]
    """As chat templates read it."""

    @classmethod
    def of(cls, name: Any, description: Any, parameters: Any, where: str) -> Tool:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
            raise RequestError(
                f"{where}.name must be a string of 1 to {MAX_NAME} characters, got {name!r:.80}."
            )
        schema = {"type": "object", "properties": {}} if parameters is None else parameters
        if not isinstance(schema, dict):
            raise RequestError(f"{where}.parameters must be a JSON schema, got {schema!r:.80}.")
        function: dict[str, Any] = {"name": name}
        if description is not None:
            function["description"] = description
        function["parameters"] = schema
        return cls(name, schema, {"type": "function", "function": function})


@dataclass(frozen=True)
class ToolUse:
    """What a request says about tools, whatever its protocol."""

    tools: tuple[Tool, ...] = ()
    mode: Literal["none", "auto", "required"] = "none"
    allowed: tuple[str, ...] = ()
    """Names of those that may be called."""
    max_calls: int | None = None

    @classmethod
    def of(
        cls,
        tools: Sequence[Tool],
        mode: Any = None,
        allowed: Sequence[str] | None = None,
        parallel: bool | None = None,
    ) -> ToolUse:
        names = [tool.name for tool in tools]
        if twice := [name for name in names if names.count(name) > 1]:
            raise RequestError(f"tools has {twice[0]!r} twice; give each tool its own name.")
        if mode is None:
            mode = "auto" if tools else "none"
        if mode not in ("none", "auto", "required"):
            raise RequestError(
                f"tool_choice must be 'none', 'auto', 'required' or name a tool, got {mode!r:.80}."
            )
        for name in allowed or ():
            if name not in names:
                raise RequestError(
                    f"tool_choice names {name!r:.80}, but tools has {', '.join(names) or 'none'}."
                )
        if mode != "none" and not tools:
            if mode == "required":
                raise RequestError("tool_choice='required' needs tools; give at least one.")
            mode = "none"
        wanted = tuple(names if allowed is None else allowed)
        return cls(tuple(tools), mode, wanted, 1 if parallel is False else None)

    @classmethod
    def of_chat(cls, tools: Any, choice: Any, parallel: bool | None) -> ToolUse:
        """From the fields of a chat completion."""
        declared = [_chat_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools or ())]
        if not isinstance(choice, dict):
            return cls.of(declared, choice, parallel=parallel)
        if choice.get("type") == "allowed_tools":
            inner = choice.get("allowed_tools")
            given = inner if isinstance(inner, dict) else choice
            names = [named_function(one) for one in given.get("tools") or ()]
            return cls.of(declared, given.get("mode", "auto"), names, parallel)
        return cls.of(declared, "required", [named_function(choice)], parallel=False)

    @property
    def declarations(self) -> list[dict[str, Any]] | None:
        """For the chat template: a model that must not call tools does not hear of them."""
        if self.mode == "none":
            return None
        return [tool.declaration for tool in self.tools]


def named_function(choice: Any) -> str:
    """The name in `{"type": "function", "function": {"name": ...}}`, or in its flat form."""
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError(
            "tool_choice must be 'none', 'auto', 'required' or "
            f"{{'type': 'function', 'function': {{'name': ...}}}}, got {choice!r:.200}."
        )
    return name


def _chat_tool(tool: Any, where: str) -> Tool:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        raise RequestError(
            f"{where} must be {{'type': 'function', 'function': {{...}}}}, got {tool!r:.200}."
        )
    where = f"{where}.function"
    made = Tool.of(
        function.get("name"), function.get("description"), function.get("parameters"), where
    )
    # Templates may read what this server does not know.
    return Tool(made.name, made.parameters, {**tool, "function": {**function, **_known(made)}})


def _known(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "parameters": tool.parameters}
