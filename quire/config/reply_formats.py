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
HARMONY = ToolFormat(
    "harmony",
    openers=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
    closers=("<|call|>", "<|return|>", "<|end|>"),
    call_start="<|channel|>commentary to=functions.",
    call_middle=" <|constrain|>json<|message|>",
    call_end="",
    quotes_names=False,
    between="<|end|><|start|>assistant",
)
"""Messages in channels, as gpt-oss writes them: calls, reasoning and answer are messages. The reply
begins behind `<|start|>assistant`. `<|call|>` and `<|return|>` end it and so are in no grammar: a
model that goes on to another call ends the first one as a message."""
TOOL_FORMATS = {one.name: one for one in (HERMES, LLAMA3_JSON, MISTRAL, HARMONY, JSON)}
TOOL_PARSERS = {**TOOL_FORMATS, "openai": HARMONY, "openai_gptoss": HARMONY}
"""By the names that may be chosen: vLLM has its own for Harmony."""
TOOL_FORMAT_SIGNS = (
    ("<|channel|>", HARMONY),
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
    sign: str = ""
    """What in a chat template shows these, where one of the tags alone does not."""

    def are_in(self, template: str) -> bool:
        """Whether a chat template shows them. Templates write the end tag where they leave old
        reasoning out, or open the first one."""
        return any(
            tag in template for tag in ([self.sign] if self.sign else [self.start, self.end])
        )


THINK = ReasoningTags("<think>", "</think>")
BRACKETS = ReasoningTags("[THINK]", "[/THINK]")
CHANNELS = ReasoningTags("<|channel|>analysis<|message|>", "<|end|>", sign="<|channel|>")
"""Reasoning in Harmony: other templates end their turns with `<|end|>`."""
# As vLLM names its parsers, where the tags are the same.
REASONING_PARSERS = {
    "harmony": CHANNELS,
    "openai_gptoss": CHANNELS,
    "openai": CHANNELS,
    "deepseek_r1": THINK,
    "qwen3": THINK,
    "mistral": BRACKETS,
    "thinking": ReasoningTags("<thinking>", "</thinking>"),
    "reasoning": ReasoningTags("<reasoning>", "</reasoning>"),
    "thought": ReasoningTags("<thought>", "</thought>"),
    "seed_oss": ReasoningTags("<seed:think>", "</seed:think>"),
    "cohere_command": ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),
}
