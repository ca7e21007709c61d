"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request

from quire.frontend.async_llm import OutputStream
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.protocol.errors import QuireError
from quire.server.anthropic.blocks import Block, TextBlock, ThinkingBlock, ToolBlock, event
from quire.server.anthropic.bodies import CountBody, MessagesBody
from quire.server.http.errors import (
    ANTHROPIC,
    MessageError,
    described_errors,
    error_body,
    status_of,
)
from quire.server.preparation.prepare import Preparation, Prepared
from quire.server.routes import answered_already, prepared_route
from quire.text.deltas import CallDelta, Delta, Message, ReasoningDelta, TextDelta
from quire.text.message_stream import MessageFormat

router = APIRouter(responses=described_errors(MessageError))

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "repetition": "max_tokens"}
"""The protocol has no name for a deadline or an abort: null stands for these."""


@prepared_route(router, "/v1/messages", MessagesBody, Preparation.prepare_messages)
async def create_message(made: Prepared, request: Request) -> MessageReply:
    body: MessagesBody = made.body
    message_id = f"msg_{body.request_id or request.state.request_id}"
    return MessageReply(message_id, made.model, made.format)


def count_tokens(state: Preparation, body: CountBody) -> bytes:
    state.check(body)
    prompt = state.conversation_prompt(body, body.tool_use)
    assert prompt.token_ids is not None
    return msgspec.json.encode({"input_tokens": len(prompt.token_ids)})


prepared_route(router, "/v1/messages/count_tokens", CountBody, count_tokens)(answered_already)


class MessageReply:
    """Writes the reply to one request, whole or as events."""

    wants_progress = False
    last = b""

    def __init__(self, message_id: str, model: str, format: MessageFormat) -> None:
        self.id = message_id
        self._model = model
        self._format = format
        self._stream = format.open()
        self._output_tokens = 0
        self._block: Block | None = None
        """The one that is open, of `_num_blocks`."""
        self._num_blocks = 0

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        (one,) = output.outputs
        self._output_tokens += len(one.token_ids)
        parsed = self._format.parse(one.text)
        return {
            **self._message(content_of(parsed), self._usage(output)),
            **stop_of(one, bool(parsed.calls)),
        }

    async def events(self, stream: OutputStream) -> AsyncIterator[bytes]:
        output: RequestOutput | None = None
        stop = stop_of(None)
        async for outputs in stream:
            data = []
            for _, new in outputs:
                if output is None:
                    data += [self._opening(new), event("ping")]
                output = new
                for one in new.outputs:
                    self._output_tokens += len(one.token_ids)
                    data.append(self._take(one))
                    stop = stop_of(one, self._stream.has_calls)
            yield b"".join(data)
        assert output is not None, "a stream that has begun has an output"
        if self._block is not None:
            yield self._block.closing()
        yield event("message_delta", delta=stop, usage=self._usage(output))
        yield event("message_stop")

    def failure(self, error: QuireError) -> bytes:
        body = error_body(status_of(error), ANTHROPIC.message_of(error), dialect=ANTHROPIC)
        return event(body.pop("type"), **body)

    def _take(self, one: CompletionOutput) -> bytes:
        """The events of new text; this runs for every token."""
        if self._format.is_plain:
            opening = b"" if self._block else self._open_block(TextDelta(""))
            assert self._block is not None
            return opening + self._block.delta(one.text)
        data = []
        ends = one.finish_reason is not None
        for delta in self._stream.finish(one.text) if ends else self._stream.feed(one.text):
            begins = isinstance(delta, CallDelta) and delta.name is not None
            if begins or not isinstance(self._block, BLOCKS[type(delta)]):
                data.append(self._open_block(delta))
            text = delta.arguments if isinstance(delta, CallDelta) else delta.text
            assert self._block is not None
            data.append(self._block.delta(text))
        return b"".join(data)

    def _open_block(self, delta: Delta) -> bytes:
        """Close the open block and begin the one that `delta` belongs to."""
        closing = b"" if self._block is None else self._block.closing()
        index, self._num_blocks = self._num_blocks, self._num_blocks + 1
        if isinstance(delta, CallDelta):
            self._block = ToolBlock(index, delta.id or "", delta.name or "")
        else:
            thinks = isinstance(delta, ReasoningDelta)
            self._block = ThinkingBlock(index) if thinks else TextBlock(index)
        return closing + self._block.opening()

    def _opening(self, output: RequestOutput) -> bytes:
        return event("message_start", message=self._message([], self._usage(output)))

    def _message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **stop_of(None),
            "usage": usage,
        }

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        """Counts so far. What came from the cache is known at the end, and counted apart."""
        cached = output.num_cached_tokens or 0
        return {
            "input_tokens": len(output.prompt_token_ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._output_tokens,
        }


BLOCKS = {TextDelta: TextBlock, ReasoningDelta: ThinkingBlock, CallDelta: ToolBlock}


def content_of(parsed: Message) -> list[dict[str, Any]]:
    """The blocks of a whole message. One that says nothing has an empty text."""
    thought = [ThinkingBlock.record(parsed.reasoning)] if parsed.reasoning else []
    calls = [ToolBlock.record(call) for call in parsed.calls]
    is_empty = not thought and not calls
    text = [TextBlock.record(parsed.content)] if parsed.content or is_empty else []
    return [*thought, *text, *calls]


def stop_of(one: CompletionOutput | None, has_calls: bool = False) -> dict[str, Any]:
    """Why a message ends; nothing as long as it goes on."""
    if one is None or one.finish_reason is None:
        return {"stop_reason": None, "stop_sequence": None}
    if one.finish_reason == "stop" and isinstance(one.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": one.stop_reason}
    if one.finish_reason == "stop" and has_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    return {"stop_reason": STOP_REASONS.get(one.finish_reason), "stop_sequence": None}
