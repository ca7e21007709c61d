"""The tools of a request, and whether the model may, must or must not call them. Checked here."""

from __future__ import annotations

from collections import Counter
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
    field: str = "tools"
    """Where the request has the schema."""


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
        counts = Counter(names)
        if twice := [name for name in names if counts[name] > 1]:
            raise RequestError(f"tools has {twice[0]!r:.80} twice; give each tool its own name.")
        if mode is None:
            mode = "auto" if tools else "none"
        if mode not in ("none", "auto", "required"):
            raise RequestError(
                f"tool_choice must be 'none', 'auto', 'required' or name a tool, got {mode!r:.80}."
            )
        for name in allowed or ():
            if name not in counts:
                known = ", ".join(names[:20]) or "none"
                raise RequestError(f"tool_choice names {name!r:.80}, but tools has {known:.800}.")
        if mode != "none" and not tools:
            if mode == "required":
                raise RequestError("tool_choice='required' needs tools; give at least one.")
            mode = "none"
        wanted = tuple(names if allowed is None else allowed)
        return cls(tuple(tools), mode, wanted, 1 if parallel is False else None)

    @classmethod
    def read(cls, tools: Sequence[Tool], choice: Any, parallel: bool | None) -> ToolUse:
        """From a `tool_choice` in any of OpenAI's formats."""
        if not isinstance(choice, dict):
            return cls.of(tools, choice, parallel=parallel)
        if choice.get("type") == "allowed_tools":
            inner = choice.get("allowed_tools")
            given = inner if isinstance(inner, dict) else choice
            listed = given.get("tools")
            if not isinstance(listed, list) or not listed:
                raise RequestError(
                    f"tool_choice.tools must list the tools that are allowed, got {listed!r:.80}."
                )
            names = [_named_function(one) for one in listed]
            return cls.of(tools, given.get("mode", "auto"), names, parallel)
        return cls.of(tools, "required", [_named_function(choice)], parallel=False)

    @property
    def declarations(self) -> list[dict[str, Any]] | None:
        """For the chat template: a model that must not call tools does not hear of them."""
        if self.mode == "none":
            return None
        return [tool.declaration for tool in self.tools]


def _named_function(choice: Any) -> str:
    """The name in `{"type": "function", "function": {"name": ...}}`, or in its inner object."""
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError(
            "tool_choice must be 'none', 'auto', 'required' or "
            f"{{'type': 'function', 'function': {{'name': ...}}}}, got {choice!r:.200}."
        )
    return name


def chat_tools(tools: Sequence[Any] | None) -> list[Tool]:
    """Tools as chat completions have them: with the function in an object of its own."""
    found = []
    for i, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise RequestError(
                f"tools[{i}] must be {{'type': 'function', 'function': {{...}}}}, got "
                f"{tool!r:.200}."
            )
        found.append(_read_tool(function, "parameters", f"tools[{i}].function"))
    return found


def flat_tools(tools: Sequence[Any] | None, schema: str, kinds: Sequence[str | None]) -> list[Tool]:
    """Tools that are functions themselves; `schema` names the field with that of the arguments,
    `kinds` what their type may be."""
    for i, tool in enumerate(tools or ()):
        if not isinstance(tool, dict) or tool.get("type") not in kinds:
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise RequestError(
                f"tools[{i}] is of type {kind!r:.80}, which this server does not have; use "
                f"{kinds[0]!r}."
            )
    return [_read_tool(tool, schema, f"tools[{i}]") for i, tool in enumerate(tools or ())]


def _read_tool(function: dict[str, Any], schema: str, where: str) -> Tool:
    name, parameters = function.get("name"), function.get(schema)
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise RequestError(
            f"{where}.name must be a string of 1 to {MAX_NAME} characters, got {name!r:.80}."
        )
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise RequestError(f"{where}.{schema} must be a JSON schema, got {parameters!r:.80}.")
    kinds = parameters.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise RequestError(
            f"{where}.{schema}.type must be 'object', got {kinds!r:.80}; put a value that is no "
            "object into a property of one."
        )
    declared = {"name": name, "parameters": parameters}
    if function.get("description") is not None:
        declared = {"name": name, "description": function["description"], **declared}
    declaration = {"type": "function", "function": declared}
    return Tool(name, parameters, declaration, f"{where}.{schema}")
