"""Structured output over HTTP, through the `openai` client as users call it."""

from __future__ import annotations

import json
import re
import threading
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.server.running import RunningServer

pytest.importorskip("llguidance", reason="llguidance is not installed")

MESSAGES: Any = [{"role": "user", "content": "Describe a person in JSON."}]
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["age"],
    "additionalProperties": False,
}


class Person(BaseModel):
    mood: Literal["glad", "sad"]
    is_tall: bool


def test_parse(client: openai.OpenAI, model: str) -> None:
    """The client sends the model's schema as strict and reads the object back."""
    reply = client.beta.chat.completions.parse(
        model=model, messages=MESSAGES, response_format=Person, max_tokens=60, temperature=0
    )
    assert reply.choices[0].finish_reason == "stop"
    assert isinstance(reply.choices[0].message.parsed, Person)


def test_parse_a_response(client: openai.OpenAI, model: str) -> None:
    reply = client.responses.parse(
        model=model, input="Describe a person.", text_format=Person, max_output_tokens=60
    )
    assert reply.status == "completed" and isinstance(reply.output_parsed, Person)


@pytest.mark.parametrize(
    "fields",
    [
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": SCHEMA, "strict": False},
            }
        },
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
    ],
    ids=["json_schema", "structured_outputs", "guided_json", "text"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_schemas(server: RunningServer, fields: dict[str, Any], stream: bool) -> None:
    body = {"messages": MESSAGES, "max_tokens": 60, "temperature": 0, "stream": stream, **fields}
    reply = server.request("POST", "/v1/chat/completions", body)
    assert reply.status == 200, reply.body
    if stream:
        events = [line[6:] for line in reply.body.decode().splitlines() if line[:6] == "data: "]
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
        text = "".join(delta.get("content") or "" for delta in deltas)
    else:
        text = reply.json["choices"][0]["message"]["content"]
    jsonschema.validate(json.loads(text), SCHEMA)


def test_other_kinds_of_grammars(server: RunningServer) -> None:
    def complete(**fields: Any) -> str:
        body = {"prompt": "It is", "max_tokens": 30, "seed": 1, **fields}
        reply = server.request("POST", "/v1/completions", body)
        assert reply.status == 200, reply.body
        text: str = reply.json["choices"][0]["text"]
        return text

    assert complete(guided_choice=["red", "green"]) in ("red", "green")
    assert re.fullmatch("[0-9]{4}", complete(guided_regex="[0-9]{4}"))
    assert complete(guided_grammar='root ::= "a" | "b"') in ("a", "b")
    assert complete(response_format={"type": "json_object"}).lstrip().startswith("{")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "keyword": ({"structured_outputs": {"json": {"uniqueItems": True}}}, "uniqueItems"),
    "two": (
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        "response_format and guided_regex",
    ),
    "no schema": ({"response_format": {"type": "json_schema"}}, "json_schema.schema"),
    "kind": ({"response_format": {"type": "xml"}}, "xml"),
    "deep": ({"guided_regex": "(" * 5000}, "structured_outputs.regex"),
    "huge enum": ({"guided_choice": [str(i) * 9 for i in range(100_000)]}, "choice"),
    "huge": ({"guided_json": {"enum": ["x" * 1000] * 10_000}}, "structured_outputs.json"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "part"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals(server: RunningServer, fields: dict[str, Any], part: str, stream: bool) -> None:
    """A clear 400, also for streams, while other requests go on."""
    done: list[int] = []

    def other() -> None:
        body = {"prompt": "a", "max_tokens": 4}
        done.append(server.request("POST", "/v1/completions", body).status)

    thread = threading.Thread(target=other)
    thread.start()
    body = {"prompt": "a", "max_tokens": 4, "stream": stream, **fields}
    reply = server.request("POST", "/v1/completions", body)
    thread.join()
    assert (reply.status, done) == (400, [200]), reply.body
    assert part in reply.error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_cannot_go_on(server: RunningServer, stream: bool) -> None:
    """It compiles, and leads nowhere after its first letter: trying again would not help."""
    grammar = {"grammar": 'start: "a" nowhere\nnowhere: nowhere "b" | nowhere "c"'}
    body = {"prompt": "a", "max_tokens": 4, "stream": stream, "structured_outputs": grammar}
    reply = server.request("POST", "/v1/completions", body)
    if not stream:
        assert reply.status == 400 and "cannot go on" in reply.error["message"], reply.body
        return
    *_, last, done, _ = reply.body.decode().split("\n\n")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (reply.status, error["code"], done) == (200, 400, "data: [DONE]")
    assert "cannot go on" in error["message"]


BAD = {"type": "array", "uniqueItems": True}
NAMED: dict[str, tuple[str, dict[str, Any], str]] = {
    "completions": (
        "/v1/completions",
        {
            "prompt": "a",
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": BAD}},
        },
        "response_format",
    ),
    "responses": (
        "/v1/responses",
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": BAD}}},
        "text.format",
    ),
    "messages": (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": "a"}],
            "output_config": {"format": {"type": "json_schema", "schema": BAD}},
        },
        "output_config.format",
    ),
    "structured_outputs": (
        "/v1/responses",
        {"input": "a", "structured_outputs": {"json": BAD}},
        "structured_outputs.json",
    ),
}


@pytest.mark.parametrize(("path", "fields", "name"), NAMED.values(), ids=NAMED.keys())
def test_errors_name_what_the_client_wrote(
    server: RunningServer, model: str, path: str, fields: dict[str, Any], name: str
) -> None:
    body = {"model": model, "max_tokens": 4, **fields}
    if "input" in fields:
        body["max_output_tokens"] = body.pop("max_tokens")
    reply = server.request("POST", path, body)
    assert reply.status == 400, reply.body
    error = reply.json["error"]
    assert error["message"].startswith(f"{name} is refused") and "uniqueItems" in error["message"]
    assert error.get("param", name.partition(".")[0]) == name.partition(".")[0]
