"""Conversations become prompts exactly as transformers renders them; the rest is a clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from quire.config.locate import locate_model
from quire.protocol.errors import QuireError, RequestError
from quire.text.chat_template import detect_content_format, is_batch, read_chat_template
from quire.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.tokenizer_samples import load, make_folder, train_byte_level

# After Llama 3.1: tools as JSON in the first user message, tool calls as JSON, a date.
TOOLS_TEMPLATE = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|head|>system\\n' }}
{{- 'Date: ' + strftime_now('%Y') + '\\n' }}{{- system + '<|end|>' }}
{%- for message in messages %}
    {%- if message.role == 'user' and loop.first and tools is not none %}
        {{- '<|head|>user\\nTools:\\n' }}
        {%- for tool in tools %}
            {{- tool | tojson(indent=4) }}
            {{- '\\n\\n' }}
        {%- endfor %}
        {{- message['content'] | trim + '<|end|>' }}
    {%- elif message.tool_calls is defined and message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('one tool call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|head|>assistant\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- '}<|end|>' }}
    {%- else %}
        {{- '<|head|>' + message['role'] + '\\n' + message['content'] | trim + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant\\n' }}{%- endif %}
"""

# After Mistral 7B Instruct: roles must alternate.
ALTERNATING_TEMPLATE = """\
{%- set ns = namespace(index=0) -%}
{{ bos_token }}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (ns.index % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {%- set ns.index = ns.index + 1 -%}
    {%- if message['role'] == 'user' -%}
        {{ '[INST] ' + message['content'] + ' [/INST]' }}
    {%- else -%}
        {% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
    {%- endif -%}
{%- endfor -%}
"""

# Parts, loop controls, block whitespace.
PARTS_TEMPLATE = """
{% macro show(content) %}
{% for part in content %}
{% if part.type != 'text' %}{% continue %}{% endif %}
{{ part.text }}|
{% endfor %}
{% endmacro %}
{% for message in messages %}
  {% if message.role == 'quit' %}{% break %}{% endif %}
  <{{ message.role }}>{{ show(message.content) }}{{ extra | default('none') }}
{% endfor %}
"""

SIMPLE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"

CHAT = [
    {"role": "system", "content": "  You are brief. Größe 日本 <&> "},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4 "},
    {"role": "user", "content": "Thanks!\nAnd 3 + 3?"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter für eine Stadt <b>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
TOOL_CHAT = [
    {"role": "user", "content": "Weather in Zürich?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
        ],
    },
    {"role": "tool", "content": '{"celsius": 21}'},
    {"role": "assistant", "content": "21 degrees."},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    path = make_folder(tmp_path_factory.mktemp("chat") / "model", "llama", config)
    train_byte_level(["<s>", "</s>"], 320).save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def ours(folder: Path) -> Tokenizer:
    return load(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def embedded() -> Tokenizer:
    return load_tokenizer(locate_model(None))


@pytest.mark.parametrize("generation_prompt", [False, True])
@pytest.mark.parametrize(
    ("template", "messages", "tools"),
    [
        ("embedded", CHAT, None),
        ("embedded", CHAT[1:], None),
        (TOOLS_TEMPLATE, CHAT, None),
        (TOOLS_TEMPLATE, TOOL_CHAT, TOOLS),
        (ALTERNATING_TEMPLATE, CHAT[1:], None),
        (SIMPLE, CHAT, None),
    ],
)
def test_prompts_are_those_of_transformers(
    ours: Tokenizer,
    theirs: Any,
    embedded: Tokenizer,
    template: str,
    messages: list[dict[str, Any]],
    tools: Any,
    generation_prompt: bool,
) -> None:
    if template == "embedded":
        assert isinstance(embedded.chat_template, str)
        template = embedded.chat_template
    arguments: dict[str, Any] = {
        "tools": tools,
        "chat_template": template,
        "add_generation_prompt": generation_prompt,
    }
    expected = theirs.apply_chat_template(messages, tokenize=False, **arguments)
    assert ours.apply_chat_template(messages, tokenize=False, **arguments) == expected
    ids = ours.apply_chat_template(messages, **arguments)
    assert ids == theirs.apply_chat_template(messages, **arguments)["input_ids"]
    assert ours.apply_chat_template(messages, return_dict=True, **arguments).input_ids == ids


def test_embedded_model_marks_turns_with_its_control_tokens(embedded: Tokenizer) -> None:
    ids = embedded.apply_chat_template([CHAT[1]], add_generation_prompt=True)
    assert ids.count(embedded.convert_tokens_to_ids("<|im_start|>")) == 3
    text = embedded.decode(ids)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("What is 2 + 2?<|im_end|>\n<|im_start|>assistant\n")


def test_parts_loop_controls_and_variables(ours: Tokenizer, theirs: Any) -> None:
    chat = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "quit", "content": []},
    ]
    arguments = {"chat_template": PARTS_TEMPLATE, "extra": "given", "tokenize": False}
    assert ours.apply_chat_template(chat, **arguments) == theirs.apply_chat_template(
        chat, **arguments
    )


def test_several_conversations_at_once(ours: Tokenizer, theirs: Any) -> None:
    chats = [CHAT, CHAT[1:2]]
    expected = theirs.apply_chat_template(chats, tokenize=False, chat_template=SIMPLE)
    assert ours.apply_chat_template(chats, tokenize=False, chat_template=SIMPLE) == expected
    ids = ours.apply_chat_template(chats, chat_template=SIMPLE)
    assert ids == ours.encode_batch(expected, add_special_tokens=False)


@pytest.mark.parametrize("template", ["embedded", ALTERNATING_TEMPLATE, TOOLS_TEMPLATE, SIMPLE])
@pytest.mark.parametrize("text", ["The answer is", "The answer is ", " two\nlines\n"])
def test_a_message_is_continued_as_in_transformers(
    ours: Tokenizer, theirs: Any, embedded: Tokenizer, template: str, text: str
) -> None:
    """The last message stays open: no end token, and no space that the template would trim."""
    if template == "embedded":
        template = str(embedded.chat_template)
    chat = [CHAT[1], {"role": "assistant", "content": text}]
    arguments: dict[str, Any] = {
        "tokenize": False, "chat_template": template, "continue_final_message": True
    }  # fmt: skip
    prompt = ours.apply_chat_template(chat, **arguments)
    assert prompt == theirs.apply_chat_template(chat, **arguments)
    assert prompt.rstrip().endswith(text.strip())
    assert chat[1]["content"] == text


def test_continuing_needs_a_text_and_no_generation_prompt(ours: Tokenizer) -> None:
    def render(chat: list[dict[str, Any]], template: str = SIMPLE, **arguments: Any) -> None:
        ours.apply_chat_template(
            chat, chat_template=template, continue_final_message=True, **arguments
        )

    with pytest.raises(RequestError, match="add_generation_prompt"):
        render(CHAT, add_generation_prompt=True)
    with pytest.raises(RequestError, match="no text to continue"):
        render([{"role": "assistant", "content": None}])
    with pytest.raises(RequestError, match="drops or changes"):
        render(CHAT, template="{{ messages[0].content }}")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (SIMPLE, "string"),
        (TOOLS_TEMPLATE, "string"),
        (PARTS_TEMPLATE, "openai"),
        (
            "{% for m in messages %}{% for c in m['content'] %}{{ c }}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% for m in messages %}{% set c = m.get('content') | list %}"
            "{% for part in c %}{{ part.text }}{% endfor %}{% endfor %}",
            "openai",
        ),
        (
            "{% for m in messages %}{% for call in m.tool_calls %}x{% endfor %}{% endfor %}",
            "string",
        ),
    ],
)
def test_whether_a_template_reads_parts_is_seen_in_its_loops(template: str, expected: str) -> None:
    assert detect_content_format(template) == expected


def test_content_is_given_in_the_format_that_the_template_reads(ours: Tokenizer) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]
    text = [{"role": "user", "content": "ab"}]
    only_parts = (
        "{% for m in messages %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}"
    )

    def render(chat: list[dict[str, Any]], template: str, content_format: str = "auto") -> str:
        return ours.apply_chat_template(
            chat,
            tokenize=False,
            chat_template=template,
            chat_template_content_format=content_format,
        )

    assert render(parts, SIMPLE) == "[user]a\nb</s>"
    assert render(text, SIMPLE) == "[user]ab</s>"
    assert render(parts, only_parts) == "a;b;"
    assert render(text, only_parts) == "ab;"
    assert render(parts, SIMPLE, "openai").startswith("[user][{'type': 'text'")
    assert render(parts, only_parts, "string") == ";;;"
    with pytest.raises(RequestError, match="chat_template_content_format must be one of"):
        render(text, SIMPLE, "parts")
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(RequestError, match=r"messages\[0\]\.content\[0\] has type 'image_url'"):
        render(image, SIMPLE)


def test_arguments_of_tool_calls_may_be_json_text(ours: Tokenizer, theirs: Any) -> None:
    """As the OpenAI protocol sends them; the template gets the object either way."""
    call = {"function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
    chat = [TOOL_CHAT[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    arguments: dict[str, Any] = {"tokenize": False, "chat_template": TOOLS_TEMPLATE}
    expected = theirs.apply_chat_template(TOOL_CHAT[:2], **arguments)
    assert ours.apply_chat_template(chat, **arguments) == expected
    assert call["function"]["arguments"] == '{"city": "Zürich"}'


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (ALTERNATING_TEMPLATE, "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ missing.attribute }}", "'missing' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% if %}", "not valid Jinja: .* in line 1"),
        ("{{ messages.append(1) }}", "append.* unsafe|unsafe|not safely callable"),
    ],
)
def test_what_goes_wrong_in_a_template_is_a_request_error(
    ours: Tokenizer, template: str, reason: str
) -> None:
    """Templates are foreign code, so they run in a sandbox; their errors reach the caller."""
    with pytest.raises(RequestError, match=reason) as caught:
        ours.apply_chat_template(CHAT, chat_template=template)
    assert "chat_template" in str(caught.value)
    assert isinstance(caught.value, QuireError)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "messages must be a non-empty list"),
        ("hello", "messages must be a non-empty list"),
        (["hello"], r"messages\[0\] must be an object with a string 'role'"),
        ([{"content": "x"}], r"messages\[0\] must be an object with a string 'role'"),
        ([CHAT[0], {"role": "user", "content": 5}], r"messages\[1\]\.content must be a string"),
        ([{"role": "user", "content": object()}], r"messages\[0\]\.content must be JSON data"),
    ],
)
def test_malformed_messages_are_refused_by_position(
    ours: Tokenizer, messages: Any, reason: str
) -> None:
    with pytest.raises(RequestError, match=reason):
        ours.apply_chat_template(messages, chat_template=SIMPLE)


def test_model_without_template_says_what_to_pass(ours: Tokenizer) -> None:
    assert ours.chat_template is None
    with pytest.raises(RequestError, match="no chat_template; pass one as chat_template"):
        ours.apply_chat_template(CHAT)


def test_named_templates(folder: Path) -> None:
    named = load(folder)
    named.chat_template = {"default": "d", "tool_use": "t"}
    assert named.apply_chat_template(CHAT, tokenize=False) == "d"
    assert named.apply_chat_template(CHAT, tokenize=False, tools=TOOLS) == "t"
    assert named.apply_chat_template(CHAT, tokenize=False, chat_template="tool_use") == "t"
    assert named.apply_chat_template(CHAT, tokenize=False, chat_template="{{ 1 }}") == "1"
    named.chat_template = {"rag": "r"}
    with pytest.raises(RequestError, match=r"chat_template must name one of .*rag"):
        named.apply_chat_template(CHAT)


def test_users_template_is_a_text_or_a_file(tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(SIMPLE)
    assert read_chat_template(str(file)) == read_chat_template(SIMPLE) == SIMPLE
    with pytest.raises(RequestError, match=r"chat_template 'nowhere\.jinja' is neither"):
        read_chat_template("nowhere.jinja")
    with pytest.raises(RequestError, match="not valid Jinja"):
        read_chat_template("{% for %}")
    source = locate_model(None)
    assert load_tokenizer(source, chat_template=str(file)).chat_template == SIMPLE


@pytest.mark.parametrize("name", ["tools", "messages", "chat_template", "tokenize"])
def test_variables_cannot_take_the_place_of_arguments(ours: Tokenizer, name: str) -> None:
    with pytest.raises(RequestError, match=rf"chat_template_kwargs\['{name}'\]"):
        ours.render_chat(CHAT, chat_template=SIMPLE, template_kwargs={name: []})


def test_one_conversation_or_several() -> None:
    assert is_batch([CHAT, CHAT]) and is_batch([[]])
    assert not any(map(is_batch, (CHAT, [], "hello", ["hello"], {0: []}, None)))
