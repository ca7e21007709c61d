"""How models write tool calls and reasoning: the formats that replies are read in.

The choices of `tool_call_parser` and `reasoning_parser` are the names in these tables.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ToolFormat:
    """One way to write calls as text."""

    name: str
    openers: tuple[str, ...]
    """Any of these says that a call follows."""
    closers: tuple[str, ...] = ()
    is_bare: bool = False
    """Whether calls also come without a marker, as JSON at the beginning of a line. What looks
    like one counts only if it names a tool of the request."""
    names_first: bool = False
    """Whether a call may be its name and then its arguments, instead of one object."""
    separators: str = ""
    """What may stand between calls that have no markers of their own."""
    has_short_ids: bool = False
    """Whether the template takes ids of nine letters and digits only."""

    call_start: str = '{"name": '
    """How a call is written when it is enforced: this, the name, the middle, the arguments, the
    end; and what stands before, between and after calls."""
    quotes_names: bool = True
    call_middle: str = ', "arguments": '
    arguments_key: str = "arguments"
    call_end: str = "}"
    before: str = ""
    between: str = "\n"
    after: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Everything that may be a special token."""
        return (*self.openers, *self.closers, *(NAME_MARKERS if self.names_first else ()))


NAME_MARKERS = ("[CALL_ID]", "[ARGS]")
HERMES = ToolFormat(
    "hermes",
    openers=("<tool_call>",),
    closers=("</tool_call>",),
    call_start='<tool_call>\n{"name": ',
    call_end="}\n</tool_call>",
)
LLAMA3_JSON = ToolFormat(
    "llama3_json",
    openers=("<|python_tag|>",),
    is_bare=True,
    separators=";,",
    call_middle=', "parameters": ',
    arguments_key="parameters",
    between="; ",
)
MISTRAL = ToolFormat(
    "mistral",
    openers=("[TOOL_CALLS]",),
    names_first=True,
    has_short_ids=True,
    before="[TOOL_CALLS] [",
    between=", ",
    after="]",
)
MISTRAL_NAMES_FIRST = replace(
    MISTRAL,
    call_start="[TOOL_CALLS]",
    call_middle="[ARGS]",
    call_end="",
    quotes_names=False,
    before="",
    between="",
    after="",
)
JSON = ToolFormat(
    "json",
    openers=("```json\n", "```\n"),
    closers=("```",),
    is_bare=True,
    separators=";,",
)
TOOL_FORMATS = {one.name: one for one in (HERMES, LLAMA3_JSON, MISTRAL, JSON)}
TOOL_FORMAT_SIGNS = (
    ("<function=", JSON),
    ("<arg_key>", JSON),
    ("<|tool_calls_section_begin|>", JSON),
    ("<tool_call>", HERMES),
    ("[ARGS]", MISTRAL_NAMES_FIRST),
    ("[TOOL_CALLS]", MISTRAL),
    ("<|python_tag|>", LLAMA3_JSON),
    ("<|start_header_id|>", LLAMA3_JSON),
)
"""What a chat template mentions -> the format that it asks for. JSON, where that is a format that
is not read here."""


@dataclass(frozen=True)
class ReasoningTags:
    start: str
    end: str


THINK = ReasoningTags("<think>", "</think>")
BRACKETS = ReasoningTags("[THINK]", "[/THINK]")
# As vLLM names its parsers, where the tags are the same.
REASONING_PARSERS = {
    "deepseek_r1": THINK,
    "qwen3": THINK,
    "mistral": BRACKETS,
    "thinking": ReasoningTags("<thinking>", "</thinking>"),
    "reasoning": ReasoningTags("<reasoning>", "</reasoning>"),
    "thought": ReasoningTags("<thought>", "</thought>"),
    "seed_oss": ReasoningTags("<seed:think>", "</seed:think>"),
    "cohere_command": ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),
}
