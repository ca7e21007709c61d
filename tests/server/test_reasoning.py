"""Reasoning over a real socket, with a chat template that opens it in the prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.running import ENGINE, RunningServer, eventually
from tests.text.tool_calls.templates import OPENS_THINKING

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    template = tmp_path_factory.mktemp("template") / "thinks.jinja"
    template.write_text(OPENS_THINKING)
    running = RunningServer.start(*ENGINE, "--chat-template", str(template), "--log-level", "debug")
    assert running.url, "".join(running.lines)
    yield running
    assert running.stop() == 0, "".join(running.lines)


def ask(server: RunningServer, text: str, **more: Any) -> Any:
    """A question that is answered with `text`, to the letter: no choice is left."""
    return ask_by_grammar(server, json.dumps(text), **more)


def ask_by_grammar(server: RunningServer, grammar: str, **more: Any) -> Any:
    forced = {"structured_outputs": {"grammar": f"start: {grammar}"}}
    extra = {**forced, **more.pop("extra_body", {})}
    client = server.client()
    model = client.models.list().data[0].id
    return client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=80, extra_body=extra, **more
    )


def test_the_log_says_what_was_found(thinker: RunningServer) -> None:
    for words in (
        "tool calls are read in the format hermes",
        "reasoning is what stands between <think> and </think>",
    ):
        eventually(lambda words=words: words in "".join(thinker.lines), words)  # type: ignore[misc]


def test_reasoning_is_apart_from_the_answer(thinker: RunningServer) -> None:
    text = "France, so...\n</think>\n\nParis."
    message = ask(thinker, text).choices[0].message
    assert (message.reasoning, message.content) == ("France, so...", "Paris.")
    hidden = ask(thinker, text, extra_body={"include_reasoning": False}).choices[0].message
    assert hidden.content == "Paris." and "reasoning" not in (hidden.model_extra or {})


def test_reasoning_is_streamed(thinker: RunningServer) -> None:
    reasoning, content, order = "", "", []
    grammar = f"/[a-z ]{{30}}/ {json.dumps('.</think>  Paris.')}"
    for chunk in ask_by_grammar(thinker, grammar, stream=True):
        delta = chunk.choices[0].delta
        if more := getattr(delta, "reasoning", None):
            reasoning += more
            order.append("reasoning")
        if delta.content:
            content += delta.content
            order.append("content")
    assert re.fullmatch(r"[a-z ]{1,30}\.", reasoning) and content == "Paris."
    assert order == sorted(order, reverse=True) and order.count("reasoning") > 1


def test_a_call_after_reasoning(thinker: RunningServer) -> None:
    (choice,) = ask(thinker, f"Hm.</think>\n{CALL}", tools=TOOLS).choices
    assert choice.message.reasoning == "Hm." and choice.message.content is None
    assert choice.message.tool_calls[0].function.name == "f"
    assert choice.finish_reason == "tool_calls"


def test_a_template_that_is_told_not_to_think(thinker: RunningServer) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    message = ask(thinker, "Paris.", extra_body=extra).choices[0].message
    assert message.content == "Paris." and getattr(message, "reasoning", None) is None


def test_required_calls_leave_room_for_thoughts(thinker: RunningServer) -> None:
    """This model never ends its thoughts, and so the reply ends within them."""
    client = thinker.client()
    model = client.models.list().data[0].id
    (choice,) = client.chat.completions.create(
        model=model, messages=QUESTION, tools=TOOLS, tool_choice="required", max_tokens=8
    ).choices
    assert choice.message.reasoning and choice.message.content is None  # type: ignore[attr-defined]
    assert choice.finish_reason == "length"


def test_responses(thinker: RunningServer) -> None:
    client = thinker.client()
    text = f"Hm.</think>\nWell.\n{CALL}"
    arguments: Any = {"model": client.models.list().data[0].id, "input": "Hello"}
    arguments |= {"tools": [{"type": "function", "name": "f", "parameters": None, "strict": None}]}
    forced = {"structured_outputs": {"grammar": f"start: {json.dumps(text)}"}}
    whole = client.responses.create(**arguments, extra_body=forced)
    events = list(client.responses.create(**arguments, stream=True, extra_body=forced))
    for output in (whole.output, events[-1].response.output):  # type: ignore[union-attr]
        thought, message, call = output
        assert thought.type == "reasoning" and thought.content
        assert thought.content[0].text == "Hm."
        assert message.type == "message" and message.content[0].text == "Well."  # type: ignore[union-attr]
        assert call.type == "function_call" and call.arguments == "{}"
    again: Any = [{"role": "user", "content": "Hello"}, *whole.output]
    again += [{"type": "function_call_output", "call_id": whole.output[2].call_id, "output": "1"}]  # type: ignore[union-attr]
    arguments["input"] = again
    assert client.responses.create(**arguments, max_output_tokens=4).status == "incomplete"


@pytest.mark.parametrize("kind", ["enabled", "adaptive", "disabled"])
def test_thinking_in_messages(thinker: RunningServer, kind: str) -> None:
    """It is what the template hears; a reply whose prompt opens no reasoning has none."""
    text = "Paris." if kind == "disabled" else "Hm.</think>Paris."
    body: dict[str, Any] = {"messages": QUESTION, "max_tokens": 40}
    body |= {"thinking": {"type": kind, "budget_tokens": 1024}}
    body |= {"structured_outputs": {"grammar": f"start: {json.dumps(text)}"}}
    reply = thinker.request("POST", "/v1/messages", body)
    assert reply.status == 200, reply.body
    *thought, answer = reply.json["content"]
    assert answer["text"] == "Paris."
    assert [one["thinking"] for one in thought] == ([] if kind == "disabled" else ["Hm."])
    assert reply.json["stop_reason"] == "end_turn"
