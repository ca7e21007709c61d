"""Bodies that mean no good: valid ones in which a few values were replaced by nasty ones."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any


def nested(depth: int, opening: Any = None) -> Any:
    value: Any = opening
    for i in range(depth):
        value = [value] if i % 2 else {"a": value}
    return value


NASTY: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 10**9, 2**31, -(2**31), 2**63, 2**64, 10**30, 10**400),
    *(1e308, -1e308, 1e-320, 0.5, -0.0, float("nan"), float("inf"), float("-inf")),
    *("", " ", "a", "\0", "\ud800", "\udfff\ud800", "é" * 50, "x" * 5000, "\U0001f600", "{{"),
    *("{% for", "%s%n", "../../etc/passwd", "<|end|>", "user", "1", "-1", "1e5", "nan"),
    *([], [[]], [None], [0], [-1], [2**70], ["a"], [""], ["\ud800"], ["a", 1], [True], [1.5]),
    *({}, {"a": 1}, {"": ""}, {"type": "text"}, {"1": 1}, {"0": 200}, {"\ud800": 1}),
    *(nested(200), nested(450), [{"role": "user", "content": nested(480, "a")}]),
    [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    [{"type": "image_url", "image_url": {"url": "x"}}],
    *([0] * 3000, ["a"] * 3000, {str(i): 1 for i in range(3000)}),
]

HELLO = [{"role": "user", "content": "Hi"}]
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": NOTHING}}
FLAT_TOOL = {"type": "function", "name": "f", "parameters": NOTHING}
CLAUDE_TOOL = {"name": "f", "input_schema": NOTHING}
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
CALLED = [
    {"role": "tool", "tool_call_id": "1", "content": "ok"},
    {"role": "assistant", "tool_calls": CALLS},
]
CALL_ITEMS = [
    {"type": "function_call_output", "call_id": "1", "output": "ok"},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
]
CLAUDE_CALLED = [
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "ok"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
]

VALID: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "Hi there", "max_tokens": 3},
        {"prompt": "Hi there", "max_tokens": 3, "use_beam_search": True, "n": 2},
    ],
    "/v1/chat/completions": [
        {"messages": HELLO, "max_tokens": 3},
        {"messages": CALLED, "max_tokens": 3, "tools": [TOOL]},
        {"messages": HELLO, "max_tokens": 3, "chat_template_kwargs": {"self": 1}},
    ],
    "/v1/responses": [
        {"input": "Hi", "max_output_tokens": 16},
        {"input": CALL_ITEMS, "max_output_tokens": 16, "tools": [FLAT_TOOL]},
    ],
    "/v1/messages": [
        {"messages": HELLO, "max_tokens": 3},
        {"messages": CLAUDE_CALLED, "max_tokens": 3, "tools": [CLAUDE_TOOL]},
    ],
    "/v1/messages/count_tokens": [
        {"messages": HELLO},
        {"messages": CLAUDE_CALLED, "tools": [CLAUDE_TOOL]},
    ],
    "/v1/embeddings": [{"input": "Hi"}],
    "/tokenize": [{"prompt": "Hi"}, {"messages": CALLED, "tools": [TOOL]}],
    "/detokenize": [{"tokens": [1, 2]}],
    "/admin/abort": [{"request_id": "unknown"}],
    "/admin/log_level": [{"level": "INFO"}],
}
"""What is spoilt is the last of a list, so those that need it come before."""


def routes_with_bodies(document: dict[str, Any]) -> dict[str, list[str]]:
    """Paths of an OpenAPI document that take a body, with the names of its fields."""
    schemas = document["components"]["schemas"]
    found = {}
    for path, operations in document["paths"].items():
        body = operations.get("post", {}).get("requestBody")
        if body is None or path == "/admin/pause":  # after which no request is answered
            continue
        reference = body["content"]["application/json"]["schema"].get("$ref", "")
        fields = schemas.get(reference.rpartition("/")[2], {}).get("properties", {})
        found[path] = [*fields, "no_such_field"]
    return found


def hostile_requests(
    document: dict[str, Any], count: int, seed: int
) -> Iterator[tuple[str, bytes, dict[str, Any]]]:
    """Paths with bodies, as they are sent and as they were before a byte may have been spoilt."""
    chance = random.Random(seed)
    routes = routes_with_bodies(document)
    for _ in range(count):
        path = chance.choice(list(routes))
        body = dict(chance.choice(VALID.get(path, [{}])))
        for _ in range(chance.choice([0, 1, 1, 1, 2, 3])):
            name = chance.choice([*body, chance.choice(routes[path])])
            inside = name in body and chance.random() < 0.5
            body[name] = _spoilt(body[name], chance) if inside else chance.choice(NASTY)
        if chance.random() < 0.4:
            body["stream"] = True
        if chance.random() < 0.3:
            body |= {"echo": True, "logprobs": chance.choice([True, 1, 0, 5])}
        if chance.random() < 0.2:
            body |= {"n": chance.choice([1, 2, 16]), "return_token_ids": True}
        data = json.dumps(body).encode()
        if chance.random() < 0.05:
            at = chance.randrange(len(data))
            data = data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
        yield path, data, body


def _spoilt(value: Any, chance: random.Random) -> Any:
    """A value in which something, somewhere inside, is nasty."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        name = chance.choice(list(value))
        return {**value, name: _spoilt(value[name], chance)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        return [*value[:-1], _spoilt(value[-1], chance)]
    return chance.choice(NASTY)
