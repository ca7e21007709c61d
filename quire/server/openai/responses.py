"""`/v1/responses`: OpenAI's Responses API without its state; nothing is kept between requests."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request

from quire.frontend.async_llm import OutputStream
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.protocol.errors import QuireError
from quire.protocol.sampling import SamplingParams
from quire.server.http.reply import printable, printable_data
from quire.server.openai.choices import Usage
from quire.server.openai.logprobs import Candidates, chat_logprobs
from quire.server.openai.response_input import ResponseBody
from quire.server.openai.response_items import (
    CallItem,
    EventWriter,
    Item,
    MessageItem,
    ReasoningItem,
)
from quire.server.preparation.prepare import Preparation, Prepared
from quire.server.routes import prepared_route
from quire.text.deltas import CallDelta, Delta, ReasoningDelta, TextDelta
from quire.text.message_stream import MessageFormat

router = APIRouter()


@prepared_route(router, "/v1/responses", ResponseBody, Preparation.prepare_messages)
async def create_response(made: Prepared, request: Request) -> ResponseReply:
    body: ResponseBody = made.body
    request_id = body.request_id or request.state.request_id
    return ResponseReply(body, request_id, made.model, made.sampling, made.format)


class ResponseReply:
    """Writes the reply to one request, whole or as events."""

    wants_progress = False
    last = b""

    def __init__(
        self,
        body: ResponseBody,
        request_id: str,
        model: str,
        params: SamplingParams,
        format: MessageFormat,
    ) -> None:
        self.id = f"resp_{request_id}"
        self._body = body
        self._model = model
        self._params = params
        self._created = int(time.time())
        self._repeated = _repeated(body)
        self._usage = Usage()
        self._writer = EventWriter()
        self._is_plain = format.is_plain
        self._stream = format.open()
        self._items: list[Item] = []
        """In order; all but the last are complete."""
        self._open: type[Delta] | None = None
        """What the last item consists of."""

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        self._usage.add(0, output)
        (one,) = output.outputs
        self._take(one)
        return self._ended(one.finish_reason)

    async def events(self, stream: OutputStream) -> AsyncIterator[bytes]:
        begun = self._record("in_progress", [])
        yield self._writer.event("response.created", response=begun)
        yield self._writer.event("response.in_progress", response=begun)
        finish_reason = None
        if self._is_plain:
            yield self._open_item(TextDelta(""))
        async for outputs in stream:
            data = []
            for _, output in outputs:
                self._usage.add(0, output)
                for one in output.outputs:
                    finish_reason = one.finish_reason
                    data.append(self._take(one))
            yield b"".join(data)
        status = status_of_end(finish_reason)
        yield self._items[-1].closing(self._writer, status)
        yield self._writer.event(f"response.{status}", response=self._ended(finish_reason))

    def failure(self, error: QuireError) -> bytes:
        """The last event of a stream that fails."""
        cause = {"code": "server_error", "message": str(error)}
        items = [item.record("incomplete") for item in self._items]
        failed = self._record("failed", items, error=cause, usage=self._usage_record())
        return self._writer.event("response.failed", response=failed)

    def _take(self, one: CompletionOutput) -> bytes:
        """The events of new text; this runs for every token."""
        logprobs = self._logprobs(one)
        if self._is_plain:
            opening = b"" if self._items else self._open_item(TextDelta(""))
            return opening + self._items[-1].delta(self._writer, one.text, logprobs)
        ends = one.finish_reason is not None
        data = []
        for delta in self._stream.finish(one.text) if ends else self._stream.feed(one.text):
            begins = isinstance(delta, CallDelta) and delta.name is not None
            if begins or type(delta) is not self._open:
                data.append(self._open_item(delta))
            text = delta.arguments if isinstance(delta, CallDelta) else delta.text
            data.append(self._items[-1].delta(self._writer, text, logprobs))
            logprobs = logprobs if isinstance(delta, ReasoningDelta) else []
        if ends and not self._items:
            data.append(self._open_item(TextDelta("")))
        return b"".join(data)

    def _open_item(self, delta: Delta) -> bytes:
        """Complete the last item and begin the one that `delta` belongs to."""
        closing = self._items[-1].closing(self._writer, "completed") if self._items else b""
        index, name = len(self._items), self.id.removeprefix("resp_")
        item: Item
        if isinstance(delta, CallDelta):
            item = CallItem(f"fc_{index}_{name}", index, delta.id or "", delta.name or "")
        elif isinstance(delta, ReasoningDelta):
            item = ReasoningItem(f"rs_{index}_{name}", index)
        else:
            item = MessageItem(f"msg_{index}_{name}", index)
        self._items.append(item)
        self._open = type(delta)
        return closing + item.opening(self._writer)

    def _ended(self, finish_reason: str | None) -> dict[str, Any]:
        status = status_of_end(finish_reason)
        # The protocol has no name for a deadline or an abort.
        reason = "max_output_tokens" if finish_reason in ("length", "repetition") else None
        return self._record(
            status,
            [item.record("completed") for item in self._items[:-1]]
            + [item.record(status) for item in self._items[-1:]],
            incomplete_details=None if status == "completed" else {"reason": reason},
            completed_at=int(time.time()) if status == "completed" else None,
            usage=self._usage_record(),
        )

    def _record(self, status: str, items: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        body, params = self._body, self._params
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": printable_data(body.text_format)},
            "tool_choice": printable_data(body.tool_choice or "auto"),
            "tools": printable_data(body.tools or []),
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            **self._repeated,
            "background": False,
            **more,
        }

    def _usage_record(self) -> dict[str, Any]:
        counts = self._usage.record()
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {
                **counts["prompt_tokens_details"],
                "cache_write_tokens": 0,  # writing to the cache costs nothing here
            },
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        }

    def _logprobs(self, one: CompletionOutput) -> list[dict[str, Any]]:
        if one.logprobs is None:
            return []
        entries: Any = list(one.logprobs)
        told = Candidates(self._body.top_logprobs or 0, self._body.logprob_token_ids)
        content: list[dict[str, Any]]
        content = chat_logprobs(one.token_ids, entries, told, False)["content"]
        return content


def _repeated(body: ResponseBody) -> dict[str, Any]:
    """Texts of the request that its reply repeats."""
    effort = (body.reasoning or {}).get("effort")
    metadata = {printable(key): printable(text) for key, text in (body.metadata or {}).items()}
    return {
        "instructions": None if body.instructions is None else printable(body.instructions),
        "metadata": metadata,
        "reasoning": {
            "effort": printable(effort) if isinstance(effort, str) else None,
            "summary": None,
        },
        "user": None if body.user is None else printable(body.user),
    }


def status_of_end(finish_reason: str | None) -> str:
    return "completed" if finish_reason == "stop" else "incomplete"
