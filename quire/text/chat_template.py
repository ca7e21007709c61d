"""Renders a conversation into a prompt with the model's Jinja template, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.config.reply_formats import (
    HARMONY,
    JSON,
    REASONING_PARSERS,
    TOOL_FORMAT_SIGNS,
    TOOL_PARSERS,
    ReasoningTags,
    ToolFormat,
)
from quire.protocol.errors import RequestError
from quire.text.tool_calls.prompting import (
    REASONING_KEYS,
    prepare_channels,
    prepare_conversation,
)

ContentFormat = Literal["string", "openai"]
CONTENT_FORMATS = ("auto", "string", "openai")
"""How a template wants `content`: as one string, or as a list of typed parts."""

TEXT_PARTS = ("text", "input_text", "output_text")
# The trailing space shows whether the template trims what it is given.
CONTINUE_MARK = "QUIRE_CONTINUES_HERE "


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool | str = False,
    content_format: str = "auto",
    variables: Mapping[str, Any] | None = None,
    tool_call_parser: str | None = None,
) -> str:
    """The prompt of one conversation, which is checked here. `variables` are passed to the template
    as they are. With a `tool_call_parser`, a template that has no place for tools and their calls
    gets them as text, and one that wants short ids of calls gets such."""
    if content_format not in CONTENT_FORMATS:
        raise RequestError(
            f"chat_template_content_format must be one of {', '.join(CONTENT_FORMATS)}, "
            f"got {content_format!r}."
        )
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt cannot both be set: the first "
            "continues the last message, the second opens a new one. Unset one of them."
        )
    compiled = _compile(template)
    wanted = detect_content_format(template) if content_format == "auto" else content_format
    conversation, declared = _checked(messages), _plain(tools, "tools")
    style: ToolFormat | None = None
    if tool_call_parser is not None:
        style = find_tool_format(template, tool_call_parser)
        conversation, declared = prepare_conversation(
            conversation,
            declared,
            takes_tools="tools" in template_variables(template),
            style=style,
        )
    for index, message in enumerate(conversation):
        _adapt(message, f"messages[{index}]", wanted, template)
    if style == HARMONY:
        conversation, declared = prepare_channels(conversation, declared)
    final_text = ""
    if continue_final_message:
        key = continue_final_message if isinstance(continue_final_message, str) else "content"
        final_text = _mark_end(conversation[-1], key)
    values = {"documents": None, **(variables or {})}
    try:
        prompt = compiled.render(
            messages=conversation,
            tools=declared,
            add_generation_prompt=add_generation_prompt,
            **{key: _plain(value, key) for key, value in values.items()},
        )
    except RequestError:
        raise
    # Templates are code: anything may go wrong inside them.
    except Exception as error:
        raise RequestError(f"the chat_template refused these messages: {_reason(error)}") from error
    return _cut_at_mark(prompt, final_text) if continue_final_message else prompt


def select_template(
    templates: str | Mapping[str, str] | None, chosen: str | None, has_tools: bool
) -> str:
    """The template to use: one given outright, one named, or the model's own."""
    if isinstance(templates, Mapping):
        if chosen is not None:
            return templates.get(chosen, chosen)
        if has_tools and "tool_use" in templates:
            return templates["tool_use"]
        if "default" in templates:
            return templates["default"]
        raise RequestError(
            "chat_template must name one of the model's templates, which has no default: "
            f"{', '.join(sorted(templates))}."
        )
    template = chosen if chosen is not None else templates
    if template is None:
        raise RequestError(
            "this model has no chat_template; pass one as chat_template, or send a plain prompt."
        )
    return template


def read_chat_template(value: str) -> str:
    """A template given on the command line or to the engine: its text, or the path of a file."""
    if "{" not in value and "\n" not in value:
        path = Path(value).expanduser()
        if not path.is_file():
            raise RequestError(
                f"chat_template {value!r} is neither a file nor a Jinja template (it has no '{{')."
            )
        value = path.read_text(encoding="utf-8")
    _compile(value)
    return value


@lru_cache(maxsize=64)
def template_variables(template: str) -> frozenset[str]:
    """Names of what a template reads from outside, such as `messages` and `tools`."""
    _compile(template)
    return frozenset(meta.find_undeclared_variables(_environment().parse(template)))


@lru_cache(maxsize=64)
def detect_content_format(template: str) -> ContentFormat:
    """ "openai" if the template loops over the parts of a message's content, else "string"."""
    tree = _environment().parse(template)
    names: set[str] = set()
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    size = -1
    while len(names) != size:
        size = len(names)
        for assignment in tree.find_all(nodes.Assign):
            target = assignment.target
            if isinstance(target, nodes.Name) and _is_content(assignment.node, names):
                names.add(target.name)
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name in macros:
                parameters = macros[call.node.name].args
                given = zip(parameters, call.args, strict=False)
                names |= {p.name for p, argument in given if _is_content(argument, names)}
    loops = tree.find_all(nodes.For)
    return "openai" if any(_is_content(loop.iter, names) for loop in loops) else "string"


def find_tool_format(template: str, parser: str = "auto") -> ToolFormat:
    """How calls are written: as the parser of that name reads them, or as the template asks."""
    return _detect_tool_format(template) if parser == "auto" else TOOL_PARSERS[parser]


@lru_cache(maxsize=64)
def _detect_tool_format(template: str) -> ToolFormat:
    if "tools" not in template_variables(template):
        return JSON
    return next((found for sign, found in TOOL_FORMAT_SIGNS if sign in template), JSON)


def find_reasoning_tags(template: str, parser: str = "auto") -> ReasoningTags | None:
    """The tags around reasoning: those of the parser of that name, or those in the template."""
    if parser == "auto":
        return _detect_reasoning_tags(template)
    return None if parser == "none" else REASONING_PARSERS[parser]


@lru_cache(maxsize=64)
def _detect_reasoning_tags(template: str) -> ReasoningTags | None:
    known = dict.fromkeys(REASONING_PARSERS.values())
    return next((tags for tags in known if tags.are_in(template)), None)


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    """Whether an expression is a message's content, or a variable that holds it."""
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Filter):
        return node.node is not None and _is_content(node.node, names)
    if isinstance(node, nodes.CondExpr):
        branches = [node.expr1, *([node.expr2] if node.expr2 else [])]
        return any(_is_content(branch, names) for branch in branches)
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
        keys = [key.value for key in node.args[:1] if isinstance(key, nodes.Const)]
        return node.node.attr == "get" and keys == ["content"]
    return False


@lru_cache(maxsize=64)
def _accepts_strings(template: str) -> bool:
    return any(
        test.name == "string" for test in _environment().parse(template).find_all(nodes.Test)
    )


def is_batch(messages: Any) -> bool:
    """Whether these are several conversations, and not the messages of one."""
    lists = (list, tuple)
    return isinstance(messages, lists) and bool(messages) and isinstance(messages[0], lists)


def _checked(messages: Any) -> list[dict[str, Any]]:
    """Plain copies of the messages of one conversation, each with a role."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        given = str(messages)[:80]
        raise RequestError(f"messages must be a non-empty list of messages, got {given!r}.")
    conversation = []
    for index, original in enumerate(messages):
        where = f"messages[{index}]"
        message = _plain(original, where)
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"{where} must be an object with a string 'role', got {str(original)[:80]!r}."
            )
        conversation.append(message)
    return conversation


def _adapt(message: dict[str, Any], where: str, content_format: str, template: str) -> None:
    """Put the content of a message into the format that the template reads."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [_text_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        joined = "\n".join(part["text"] for part in parts)
        message["content"] = joined if content_format == "string" else parts
    elif content_format == "openai" and isinstance(content, str):
        if not _accepts_strings(template):
            message["content"] = [{"type": "text", "text": content}]
    elif content is not None and not isinstance(content, str):
        raise RequestError(
            f"{where}.content must be a string or a list of parts, got {str(content)[:80]!r}."
        )
    _parse_arguments(message, where)
    _spread_reasoning(message)


def _text_part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if kind not in TEXT_PARTS:
        raise RequestError(f"{where} has type {kind!r}, but this model reads text only.")
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where}.text must be a string, got {part.get('text')!r}.")
    return {**part, "type": "text"}


def _parse_arguments(message: dict[str, Any], where: str) -> None:
    """Tool calls arrive with their arguments as JSON text; templates want the object itself."""
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise RequestError(f"{where}.tool_calls must be a list, got {str(calls)[:80]!r}.")
    for call in calls or ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except ValueError:  # not JSON, or a number of thousands of digits
                continue


def _spread_reasoning(message: dict[str, Any]) -> None:
    """Templates read a message's reasoning under different names; give it to each."""
    given = [message[key] for key in REASONING_KEYS if message.get(key) is not None]
    if given:
        message["reasoning_content"] = given[0]
        message.setdefault("thinking", given[0])


def _mark_end(message: dict[str, Any], key: str) -> str:
    """Mark where the text to continue ends, and return that text."""
    content = message.get(key)
    if isinstance(content, list):
        for part in reversed(content):
            text = str(part["text"])
            part["text"] = text + CONTINUE_MARK
            return text
    if not isinstance(content, str):
        raise RequestError(
            f"continue_final_message is set, but the last message's {key!r} is {content!r}: there "
            "is no text to continue."
        )
    same = [k for k in REASONING_KEYS if key in REASONING_KEYS and message.get(k) == content]
    for name in same or [key]:
        message[name] = content + CONTINUE_MARK
    return content


def _cut_at_mark(prompt: str, final_text: str) -> str:
    at = prompt.rfind(CONTINUE_MARK.strip())
    if at < 0 or final_text.strip() not in prompt:
        raise RequestError(
            "continue_final_message is set, but the chat_template drops or changes the last "
            "message; unset it, or use another chat_template."
        )
    kept = prompt[:at]
    return kept if prompt.startswith(CONTINUE_MARK, at) else kept.rstrip()


def _plain(value: Any, where: str) -> Any:
    """A copy made of JSON types only: templates are foreign code and get no live objects."""
    try:
        return _copy(value, where)
    except RecursionError:
        raise RequestError(f"{where} is nested too deeply; send flatter data.") from None


def _copy(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _copy(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if callable(getattr(value, "model_dump", None)):
        return _copy(value.model_dump(), where)
    raise RequestError(f"{where} must be JSON data, got {type(value).__name__}.")


class _GenerationTag(Extension):
    """Reads `{% generation %}` ... `{% endgeneration %}`, which only training looks at."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@lru_cache(maxsize=64)
def _compile(template: str) -> jinja2.Template:
    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(
            f"chat_template is not valid Jinja: {error.message} in line {error.lineno}."
        ) from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As it stands: Jinja's own filter would escape HTML and non-ASCII characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _reason(error: Exception) -> str:
    text = str(error).strip()
    if isinstance(error, jinja2.TemplateError) and text:
        return text
    return f"{type(error).__name__}: {text}"
