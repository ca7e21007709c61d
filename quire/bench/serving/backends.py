"""The servers that `quire bench serve` speaks to: what each is asked, and how its events look.

Each follows the server's public documentation; fields that a benchmark does not need are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import msgspec

from quire.bench.serving.streams import Event, ReadEvent
from quire.client.errors import error_message

Prompt = str | list[int]


@dataclass(frozen=True)
class Question:
    """What is asked of a server, whichever it is."""

    model: str
    prompt: Prompt
    num_output_tokens: int
    ignore_eos: bool
    """Whether to generate exactly that many tokens, where a server can be told so."""


@dataclass(frozen=True)
class Backend:
    path: str
    """The route; `{model}` stands for the model's name."""
    body: Callable[[Question], dict[str, Any]]
    read_event: ReadEvent
    takes_token_ids: bool = False
    lists_models: str = "/v1/models"
    """The route that names the models; empty if there is none."""
    marks_end: bool = True
    """Whether a stream says that it is complete."""

    def route(self, model: str) -> str:
        return self.path.format(model=quote(model, safe=""))


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: dict[str, Any] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _OpenAIEvent(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


def _completion_body(question: Question) -> dict[str, Any]:
    return {"prompt": question.prompt, **_openai_options(question)}


def _chat_body(question: Question) -> dict[str, Any]:
    messages = [{"role": "user", "content": question.prompt}]
    return {"messages": messages, **_openai_options(question)}


def _openai_options(question: Question) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": question.model,
        "max_tokens": question.num_output_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return body | {"ignore_eos": True} if question.ignore_eos else body


_openai_decoder = msgspec.json.Decoder(_OpenAIEvent)
TEXT_FIELDS = ("content", "reasoning", "reasoning_content")


def read_openai_event(line: bytes) -> Event:
    """Completions and chat; an event without choices carries usage or progress."""
    event = _openai_decoder.decode(line)
    if event.error:
        return Event(error=error_message(line))
    usage = event.usage or _Usage()
    text, has_token, is_last = "", False, False
    for choice in event.choices:
        delta = choice.delta
        if delta is None:
            piece, opens = choice.text or "", False
        else:
            piece = next((delta[name] for name in TEXT_FIELDS if delta.get(name)), "")
            opens = "role" in delta or not delta  # the chunk that opens a chat has no token
        ends = choice.finish_reason is not None
        calls = bool(delta and delta.get("tool_calls"))
        has_token = has_token or bool(piece) or calls or not (opens or ends)
        text, is_last = text + piece, is_last or ends
    return Event(text, has_token, is_last, usage.prompt_tokens, usage.completion_tokens)


class _TgiToken(msgspec.Struct):
    text: str = ""


class _TgiDetails(msgspec.Struct):
    generated_tokens: int | None = None
    input_length: int | None = None


class _TgiEvent(msgspec.Struct):
    token: _TgiToken | None = None
    generated_text: str | None = None
    details: _TgiDetails | None = None
    error: str | None = None


def _tgi_body(question: Question) -> dict[str, Any]:
    parameters = {
        "max_new_tokens": question.num_output_tokens,
        "do_sample": False,
        "details": True,
        "ignore_eos_token": question.ignore_eos,
    }
    return {"inputs": question.prompt, "parameters": parameters}


_tgi_decoder = msgspec.json.Decoder(_TgiEvent)


def read_tgi_event(line: bytes) -> Event:
    event = _tgi_decoder.decode(line)
    if event.error:
        return Event(error=event.error)
    details = event.details or _TgiDetails()
    return Event(
        text=event.token.text if event.token else "",
        has_token=event.token is not None,
        is_last=event.generated_text is not None,
        num_input_tokens=details.input_length,
        num_output_tokens=details.generated_tokens,
    )


class _TritonEvent(msgspec.Struct):
    text_output: str | None = None
    error: str | None = None


def _triton_body(question: Question) -> dict[str, Any]:
    """As the TensorRT-LLM backend names its inputs; pieces are to be new text only."""
    body: dict[str, Any] = {
        "text_input": question.prompt,
        "max_tokens": question.num_output_tokens,
        "temperature": 0.0,
        "stream": True,
        "accumulate_tokens": False,
    }
    return body | {"min_length": question.num_output_tokens} if question.ignore_eos else body


_triton_decoder = msgspec.json.Decoder(_TritonEvent)


def read_triton_event(line: bytes) -> Event:
    """Triton marks no end: the answer is complete when its body is."""
    event = _triton_decoder.decode(line)
    return Event(
        text=event.text_output or "",
        has_token=event.text_output is not None,
        error=event.error or None,
    )


class _OllamaEvent(msgspec.Struct):
    response: str = ""
    thinking: str = ""
    done: bool = False
    prompt_eval_count: int | None = None
    eval_count: int | None = None
    error: str | None = None


def _ollama_body(question: Question) -> dict[str, Any]:
    """Ollama has no way to go on after the end of a text, so its outputs may be shorter."""
    return {
        "model": question.model,
        "prompt": question.prompt,
        "raw": True,
        "stream": True,
        "options": {"num_predict": question.num_output_tokens, "temperature": 0.0},
    }


_ollama_decoder = msgspec.json.Decoder(_OllamaEvent)


def read_ollama_event(line: bytes) -> Event:
    event = _ollama_decoder.decode(line)
    return Event(
        text=event.response or event.thinking,
        has_token=bool(event.response or event.thinking) or not (event.done or event.error),
        is_last=event.done,
        num_input_tokens=event.prompt_eval_count,
        num_output_tokens=event.eval_count,
        error=event.error or None,
    )


BACKENDS = {
    "openai": Backend("/v1/completions", _completion_body, read_openai_event, takes_token_ids=True),
    "openai-chat": Backend("/v1/chat/completions", _chat_body, read_openai_event),
    "tgi": Backend("/generate_stream", _tgi_body, read_tgi_event, lists_models="/info"),
    "triton": Backend(
        "/v2/models/{model}/generate_stream",
        _triton_body,
        read_triton_event,
        lists_models="",
        marks_end=False,
    ),
    "ollama": Backend("/api/generate", _ollama_body, read_ollama_event, lists_models="/api/tags"),
}


def first_model(backend: Backend, body: bytes) -> str | None:
    """The first model that the answer of `lists_models` names."""
    try:
        content = msgspec.json.decode(body)
        if backend.lists_models == "/info":
            return str(content["model_id"])
        if backend.lists_models == "/api/tags":
            return str(content["models"][0]["name"])
        return str(content["data"][0]["id"])
    except (msgspec.MsgspecError, LookupError, TypeError):
        return None
