"""An answer that goes round in circles is ended, and each protocol says so in a word it has."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.embedded import CHAT_MAX_TOKENS
from quire.protocol.sampling import RepetitionDetectionParams, SamplingParams
from quire.server.openai.chat import ChatBody
from tests.server.running import RunningServer

MESSAGES = [{"role": "user", "content": "Hello"}]
ONE_TOKEN = {"logit_bias": {"1000": 100.0}, "temperature": 0.0}
"""Nothing but one token, again and again."""
LOOP = {**ONE_TOKEN, "repetition_detection": {"max_pattern_size": 2, "min_count": 5}}


def post(server: RunningServer, path: str, **body: Any) -> Any:
    reply = server.request(
        "POST", path, {"model": server.client().models.list().data[0].id, **body}
    )
    assert reply.status == 200, reply.body
    return reply.json


def test_chat_and_completions(server: RunningServer) -> None:
    chat = post(server, "/v1/chat/completions", messages=MESSAGES, **LOOP)
    text = post(server, "/v1/completions", prompt="Hello", max_tokens=50, **LOOP)
    for reply in (chat, text):
        (choice,) = reply["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "repetition")
        assert reply["usage"]["completion_tokens"] == 5


def test_streamed_chat(server: RunningServer, client: Any, model: str) -> None:
    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, stream=True, extra_body=LOOP
    )
    reasons = [chunk.choices[0].finish_reason for chunk in stream if chunk.choices]
    assert reasons[-1] == "length" and set(reasons[:-1]) <= {None}


def test_responses_and_messages(server: RunningServer) -> None:
    reply = post(server, "/v1/responses", input="Hello", **LOOP)
    assert reply["status"] == "incomplete"
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    message = post(server, "/v1/messages", messages=MESSAGES, max_tokens=50, **LOOP)
    assert message["stop_reason"] == "max_tokens"
    assert message["usage"]["output_tokens"] == 5


@pytest.mark.slow
def test_a_chat_without_limits_ends() -> None:
    """With the embedded model's own defaults: a cycle at once, anything else at its limit."""
    server = RunningServer.start("--max-model-len", "4096", "--kv-cache-memory-bytes", "256MiB")
    assert server.url, "".join(server.lines)
    try:
        looped = post(server, "/v1/chat/completions", messages=MESSAGES, **ONE_TOKEN)
        assert looped["choices"][0]["finish_reason"] == "length"
        assert looped["usage"]["completion_tokens"] < 100
        endless = {"logit_bias": {"0": -100, "2": -100}, "temperature": 1.5}
        cut = post(server, "/v1/chat/completions", messages=MESSAGES, **endless)
        assert cut["choices"][0]["finish_reason"] == "length"
        assert cut["usage"]["completion_tokens"] <= CHAT_MAX_TOKENS
    finally:
        server.stop()


@pytest.mark.parametrize(("given", "expected"), [({}, 1.0), ({"repetition_penalty": 1.3}, 1.3)])
def test_default_penalty_is_not_for_grammars(given: dict[str, float], expected: float) -> None:
    """It would penalise the quotes and commas of JSON, which then become white space."""
    defaults = SamplingParams(repetition_penalty=1.1)
    grammar = {"response_format": {"type": "json_object"}}
    body = ChatBody.model_validate({"messages": MESSAGES, **grammar, **given})
    assert body.sampling_params(defaults).repetition_penalty == expected
    plain = ChatBody.model_validate({"messages": MESSAGES})
    assert plain.sampling_params(defaults).repetition_penalty == 1.1


@pytest.mark.parametrize(
    ("given", "stays"),
    [
        ({}, True),
        ({"temperature": 0.5}, True),
        ({"response_format": {"type": "json_object"}}, False),
        ({"structured_outputs": {"regex": "(0, ){60}"}}, False),
        ({"min_tokens": 80}, False),
        ({"ignore_eos": True}, False),
        ({"repetition_detection": None}, False),
    ],
)
def test_default_detection_gives_way_to_the_client(given: dict[str, Any], stays: bool) -> None:
    """A grammar may ask for the same again and again, and a client for so many tokens."""
    detection = RepetitionDetectionParams(max_pattern_size=8)
    body = ChatBody.model_validate({"messages": MESSAGES, **given})
    found = body.sampling_params(SamplingParams(repetition_detection=detection, max_tokens=None))
    assert found.repetition_detection == (detection if stays else None)
