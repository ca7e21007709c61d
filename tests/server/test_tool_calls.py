"""Tool calls over a real socket. The model is small, so calls are forced: by `tool_choice`, or, for
`auto`, by a grammar that leaves it one text to write."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from tests.server.running import RunningServer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
}
NUMBERS: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Weather now", "parameters": SCHEMA},
    },
    {"type": "function", "function": {"name": "square", "parameters": NUMBERS}},
]
SCHEMAS = {"get_weather": SCHEMA, "square": NUMBERS}
QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]


def settings(model: str, **more: Any) -> Any:
    return {"model": model, "messages": QUESTION, "tools": TOOLS, "max_tokens": 120, **more}


def joined_calls(chunks: Any) -> tuple[str, list[list[str]], str | None]:
    """Content, [id, name, arguments] of each call, and why it ended."""
    content, calls, reason = "", [], None
    for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for piece in choice.delta.tool_calls or ():
            if piece.id is not None:
                assert piece.index == len(calls) and piece.type == "function"
                calls.append([piece.id, piece.function.name, ""])
            calls[piece.index][2] += piece.function.arguments
    return content, calls, reason


@pytest.mark.parametrize("temperature", [0, 2.0])
@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "function", "function": {"name": "square"}}],
    ids=["required", "named"],
)
def test_forced_calls_are_valid(
    client: openai.OpenAI, model: str, choice: Any, temperature: float
) -> None:
    reply = client.chat.completions.create(
        **settings(model, tool_choice=choice, temperature=temperature, seed=3),
        parallel_tool_calls=False,
    )
    assert reply.choices[0].finish_reason == "tool_calls"
    message = reply.choices[0].message
    assert message.content is None and message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function" and call.id.startswith("call_")
    assert isinstance(choice, str) or call.function.name == "square"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_a_streamed_call_equals_the_whole_one(client: openai.OpenAI, model: str) -> None:
    arguments = settings(model, tool_choice="required", parallel_tool_calls=False, temperature=0)
    (whole,) = client.chat.completions.create(**arguments).choices
    chunks = list(client.chat.completions.create(**arguments, stream=True))
    content, [[_, name, text]], reason = joined_calls(chunks)
    (call,) = whole.message.tool_calls or ()
    assert call.type == "function"
    assert (name, text) == (call.function.name, call.function.arguments)
    assert content == "" and reason == whole.finish_reason == "tool_calls"
    pieces = [c for c in chunks if c.choices[0].delta.tool_calls]
    assert len(pieces) > 2, "the arguments come in pieces"


WRITTEN = 'Let me see.\n{"name": "square", "arguments": {"a": 12}}\n' + json.dumps(
    {"name": "get_weather", "arguments": {"city": "Łódź", "unit": "celsius"}}
)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_found_in_free_text(client: openai.OpenAI, model: str, stream: bool) -> None:
    """The model may write anything (`auto`), and writes this."""
    forced: Any = {"structured_outputs": {"choice": [WRITTEN]}}
    reply: Any = client.chat.completions.create(**settings(model), extra_body=forced, stream=stream)
    if stream:
        content, calls, reason = joined_calls(reply)
        made = [(name, arguments) for _, name, arguments in calls]
    else:
        (choice,) = reply.choices
        content, reason = choice.message.content, choice.finish_reason
        made = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls]
    assert content == "Let me see." and reason == "tool_calls"
    assert [(name, json.loads(text)) for name, text in made] == [
        ("square", {"a": 12}),
        ("get_weather", {"city": "Łódź", "unit": "celsius"}),
    ]


def test_without_tools_the_same_text_is_content(client: openai.OpenAI, model: str) -> None:
    forced: Any = {"structured_outputs": {"choice": [WRITTEN]}}
    for changes in ({"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}):
        (choice,) = client.chat.completions.create(
            **settings(model, **changes), extra_body=forced
        ).choices
        assert choice.message.content == WRITTEN and choice.message.tool_calls is None
        assert choice.finish_reason == "stop"


def test_a_call_that_is_cut_off(client: openai.OpenAI, model: str) -> None:
    reply = client.chat.completions.create(
        **{**settings(model), "max_tokens": 14}, tool_choice="required"
    )
    assert reply.choices[0].finish_reason == "length"


def test_results_of_calls_reach_the_model(server: RunningServer) -> None:
    call = {"id": "call_1", "type": "function"}
    call |= {"function": {"name": "square", "arguments": '{"a": 12}'}}  # type: ignore[dict-item]
    messages: Any = [
        {"role": "user", "content": "Square 12."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "144"},
    ]
    tokens = server.request("POST", "/tokenize", {"messages": messages}).json["tokens"]
    prompt = server.request("POST", "/detokenize", {"tokens": tokens}).json["prompt"]
    assert '<|im_start|>assistant\n{"name": "square", "arguments": {"a": 12}}<|im_end|>' in prompt
    assert "<|im_start|>user\nResult of square: 144<|im_end|>" in prompt


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "sometimes"}, "tool_choice must be"),
    ({"tool_choice": {"type": "function", "function": {"name": "cube"}}}, "'cube'"),
    ({"tool_choice": {"type": "function"}}, "tool_choice must be"),
    ({"tool_choice": {"type": "allowed_tools", "tools": 5}}, "tool_choice.tools must list"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.tools must"),
    ({"tools": [], "tool_choice": "required"}, "needs tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0] must be"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "name must be"),
    ({"tools": [*TOOLS, TOOLS[0]]}, "'get_weather' twice"),
    (
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
            ]
        },
        "tools[0].function.parameters.type must be 'object'",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_refusals(server: RunningServer, model: str, changes: dict[str, Any], message: str) -> None:
    reply = server.request("POST", "/v1/chat/completions", {**settings(model), **changes})
    assert reply.status == 400 and message in reply.error["message"]


BAD = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
DEAR = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 99999989}}}
ANY_OBJECT = {"type": "json_object"}
UNENFORCED: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (
        "/v1/chat/completions",
        {
            **settings("", tool_choice="required"),
            "tools": [*TOOLS, {"type": "function", "function": {"name": "f", "parameters": BAD}}],
        },
        "tools[2].function.parameters is refused: the keywords",
    ),
    "chat with a schema": (
        "/v1/chat/completions",
        {
            **settings("", response_format=ANY_OBJECT),
            "tools": [{"type": "function", "function": {"name": "f", "parameters": BAD}}],
        },
        "tools[0].function.parameters is refused: the keywords",
    ),
    "schema beside tools": (
        "/v1/chat/completions",
        settings("", response_format={"type": "json_schema", "json_schema": {"schema": BAD}}),
        "response_format is refused: the keywords",
    ),
    "takes too long": (
        "/v1/chat/completions",
        {
            **settings("", tool_choice="required"),
            "tools": [{"type": "function", "function": {"name": "f", "parameters": DEAR}}],
        },
        "tools[0].function.parameters takes more than",
    ),
    "responses": (
        "/v1/responses",
        {
            "input": "a",
            "tools": [{"type": "function", "name": "f", "parameters": BAD}],
            "tool_choice": "required",
        },
        "tools[0].parameters is refused: the keywords",
    ),
    "messages": (
        "/v1/messages",
        {
            "messages": QUESTION,
            "max_tokens": 9,
            "tools": [{"name": "f", "input_schema": BAD}],
            "tool_choice": {"type": "any"},
        },
        "tools[0].input_schema is refused: the keywords",
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "message"), UNENFORCED.values(), ids=UNENFORCED)
def test_a_schema_that_cannot_be_enforced_is_named(
    server: RunningServer, model: str, path: str, body: Any, message: str, stream: bool
) -> None:
    reply = server.request("POST", path, {**body, "model": model, "stream": stream})
    error = reply.json["error"]
    assert reply.status == 400 and error["message"].startswith(message), reply.body
    assert "takes" in message or "uniqueItems" in error["message"]
    assert error.get("param", "tools") == ("response_format" if message[0] == "r" else "tools")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": TOOLS[1]["function"]}]
)
def test_a_forced_call_beside_a_grammar_of_the_text(
    client: openai.OpenAI, model: str, choice: Any
) -> None:
    """A grammar is about text, and there is none."""
    reply = client.chat.completions.create(
        **settings(model, tool_choice=choice, response_format=ANY_OBJECT, temperature=0),
        parallel_tool_calls=False,
    )
    assert reply.choices[0].finish_reason == "tool_calls" and not reply.choices[0].message.content
    (call,) = reply.choices[0].message.tool_calls or ()
    assert call.type == "function"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("favoured", ["call", "answer"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_or_an_answer_of_a_schema(
    client: openai.OpenAI, model: str, favoured: str, stream: bool
) -> None:
    """`auto` leaves the choice to the model; a bias of its first words stands in for one that
    knows what it wants."""
    answer = {"type": "object", "properties": {"mood": {"enum": ["glad", "sad"]}}}
    answer |= {"required": ["mood"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "m", "schema": answer}}
    words = {"call": '{"name": "square", "arguments": {"a": 1}}', "answer": '{"mood": "sad"}'}
    told: Any = [*QUESTION, {"role": "assistant", "content": words[favoured]}, *QUESTION]
    arguments = settings(model, messages=told, response_format=wanted, temperature=0)
    biases = {"call": "name", "answer": "mood"}
    tokens = [t for word in biases.values() for t in _ids(client, word)]
    bias = {str(t): 100 if t in _ids(client, biases[favoured]) else -100 for t in tokens}
    reply: Any = client.chat.completions.create(**arguments, logit_bias=bias, stream=stream)
    if stream:
        content, calls, reason = joined_calls(reply)
        made = [(name, text) for _, name, text in calls]
    else:
        (choice,) = reply.choices
        content, reason = choice.message.content or "", choice.finish_reason
        made = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
    if favoured == "call":
        assert made and not content and reason == "tool_calls", content
        for name, text in made:
            jsonschema.validate(json.loads(text), SCHEMAS[name])
    else:
        assert not made and reason == "stop"
        jsonschema.validate(json.loads(content), answer)


def _ids(client: openai.OpenAI, text: str) -> list[int]:
    reply = client.post("/../tokenize", cast_to=object, body={"prompt": text})
    return list(reply["tokens"])  # type: ignore[index]


def test_settings_of_json_reach_tools_and_grammars(client: openai.OpenAI, model: str) -> None:
    """`structured_outputs` may have settings alone, for what asks for JSON elsewhere."""
    tight: Any = {"structured_outputs": {"disable_any_whitespace": True}}
    arguments = settings(model, temperature=0, parallel_tool_calls=False)
    forced = client.chat.completions.create(**arguments, tool_choice="required", extra_body=tight)
    (call,) = forced.choices[0].message.tool_calls or ()
    assert call.type == "function"
    text = call.function.arguments
    assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBERS}}
    arguments = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 100}
    plain = client.chat.completions.create(**arguments, response_format=wanted, extra_body=tight)
    text = plain.choices[0].message.content or ""
    assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)


def test_responses(client: openai.OpenAI, model: str) -> None:
    tools: Any = [{"type": "function", "name": "square", "parameters": NUMBERS, "strict": True}]
    arguments: Any = {"model": model, "input": "Square 12.", "tools": tools, "temperature": 0}
    arguments |= {"tool_choice": {"type": "function", "name": "square"}, "max_output_tokens": 80}
    whole = client.responses.create(**arguments)
    (item,) = whole.output
    assert whole.status == "completed" and item.type == "function_call" and item.name == "square"
    jsonschema.validate(json.loads(item.arguments), NUMBERS)
    with client.responses.stream(**arguments) as stream:
        kinds = [event.type for event in stream]
        (streamed,) = stream.get_final_response().output
    assert streamed.type == "function_call" and streamed.arguments == item.arguments
    assert "response.function_call_arguments.delta" in kinds
    assert kinds[-2:] == ["response.output_item.done", "response.completed"]
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "It is Paris."}
    follow: Any = [{"role": "user", "content": "What is the capital of France?"}, item, result]
    answer = client.responses.create(model=model, input=follow, tools=tools, temperature=0)
    assert answer.output_text


def test_responses_with_text_before_calls(client: openai.OpenAI, model: str) -> None:
    tools: Any = [{"type": "function", "name": "square", "parameters": NUMBERS}]
    text = 'Well.\n{"name": "square", "arguments": {"a": 1}}'
    events = list(
        client.responses.create(
            model=model,
            input="Square 1.",
            tools=tools,
            stream=True,
            extra_body={"structured_outputs": {"choice": [text]}},
        )
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    message, call = events[-1].response.output  # type: ignore[union-attr]
    assert message.type == "message" and message.content[0].text == "Well."  # type: ignore[union-attr]
    assert call.type == "function_call" and json.loads(call.arguments) == {"a": 1}
