"""`/v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.protocol.output import RequestProgress
from quire.server.generation import Generation
from quire.server.http.reply import num_values, off_loop, printable
from quire.server.openai.beam_search import beam_search_params
from quire.server.openai.bodies import ChatBody
from quire.server.openai.chat_messages import (
    delta_record,
    finish_reason,
    stop_reason,
    whole_message,
)
from quire.server.openai.logprobs import Candidates, chat_logprobs
from quire.server.openai.stream import ChunkWriter
from quire.server.openai.usage import Usage
from quire.server.preparation.prepare import Preparation, Prepared
from quire.server.preparation.routes import prepared_route
from quire.text.deltas import ReasoningDelta
from quire.text.message_stream import MessageFormat, MessageStream

router = APIRouter()


def prepare_chat(state: Preparation, body: ChatBody) -> Prepared:
    made = state.prepare_messages(body)
    if body.use_beam_search:
        made.params = beam_search_params(state, body, made.sampling, made.prompts)
    return made


@prepared_route(router, "/v1/chat/completions", ChatBody, prepare_chat)
async def create_chat_completion(made: Prepared, request: Request) -> Response:
    body: ChatBody = made.body
    response_id = f"chatcmpl-{body.request_id or request.state.request_id}"
    reply = ChatReply(body, response_id, made.model, made.format)
    terms = body.terms(request.state.tenant, body.wants_progress)
    generation = await Generation.start(request, made, reply.id, terms)
    return await generation.answer(reply, body.stream, begins_first=not body.wants_progress)


class ChatReply:
    """Writes the reply to one request, whole or in chunks."""

    def __init__(self, body: ChatBody, response_id: str, model: str, format: MessageFormat) -> None:
        self.id = response_id
        self._body = body
        self._format = format
        self._streams: dict[int, MessageStream] = {}
        """By choice: where the parsing of its text stands."""
        self._model = model
        self._created = int(time.time())
        self._plain = not (body.wants_logprobs or body.return_token_ids)
        self._candidates = Candidates(body.top_logprobs or 0, body.logprob_token_ids)
        self._continuous = bool(
            body.usage_options.include_usage and body.usage_options.continuous_usage_stats
        )

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        usage = Usage()
        usage.add(0, output)
        choices = [
            {
                "index": one.index,
                **self._message(one),
            }
            for one in output.outputs
        ]
        reply = {
            "id": self.id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": usage.record(),
        }
        return reply | self._about_prompt(output)

    def _about_prompt(self, output: RequestOutput) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if output.prompt_logprobs is not None:
            told["prompt_logprobs"] = list(output.prompt_logprobs)
        if self._body.return_token_ids:
            told["prompt_token_ids"] = output.prompt_token_ids
        return told

    def _message(self, one: CompletionOutput) -> dict[str, Any]:
        if self._format.is_plain:
            message = {"role": self._role, "content": one.text, "refusal": None}
            return {"message": message, **self._details(one, finish_reason(one.finish_reason))}
        parsed = self._format.parse(one.text)
        message = whole_message(parsed, self._role, self._body.include_reasoning is not False)
        reason = finish_reason(one.finish_reason, bool(parsed.calls))
        return {"message": message, **self._details(one, reason)}

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        writer = ChunkWriter(
            self.id,
            "chat.completion.chunk",
            self._created,
            self._model,
            tells_usage=bool(self._body.usage_options.include_usage),
        )
        usage = Usage()
        opened = False
        async with aclosing(generation.news()) as all_news:
            async for news in all_news:
                data = []
                for index, output in news:
                    if isinstance(output, RequestProgress):
                        data.append(writer.progress(output))
                        continue
                    usage.add(index, output)
                    if not opened:
                        opened = True
                        opening = partial(self._opening, writer, output, usage)
                        data.append(await off_loop(num_values([output]), opening))
                    data += [self._chunk(writer, one, usage) for one in output.outputs]
                yield b"".join(data)
        if self._body.usage_options.include_usage:
            yield writer.bare(usage=usage.record())

    def _opening(self, writer: ChunkWriter, output: RequestOutput, usage: Usage) -> bytes:
        """The role of each choice, before its text."""
        extra = self._about_prompt(output) | self._running_usage(usage)
        return b"".join(
            writer.choice(
                {
                    "index": index,
                    "delta": {"role": self._role, "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                },
                **extra,
            )
            for index in range(self._body.n or 1)
        )

    def _chunk(self, writer: ChunkWriter, one: CompletionOutput, usage: Usage) -> bytes:
        if not self._format.is_plain:
            return self._parsed_chunks(writer, one, usage)
        if self._plain and not self._continuous and one.finish_reason is None:
            return writer.text(one.index, one.text, b'"delta":{"content":', b"}")
        details = self._details(one, finish_reason(one.finish_reason))
        choice = {"index": one.index, "delta": {"content": one.text}, **details}
        return writer.choice(choice, **self._running_usage(usage))

    def _parsed_chunks(self, writer: ChunkWriter, one: CompletionOutput, usage: Usage) -> bytes:
        """A chunk for each thing that new text says; none while it may say several things."""
        stream = self._streams.setdefault(one.index, self._format.open())
        ends = one.finish_reason is not None
        found = stream.finish(one.text) if ends else stream.feed(one.text)
        deltas = [
            delta_record(delta)
            for delta in found
            if self._body.include_reasoning is not False or not isinstance(delta, ReasoningDelta)
        ]
        *early, last = deltas or [{}]
        quiet = {"logprobs": None, "finish_reason": None}
        running = self._running_usage(usage)
        data = [writer.choice({"index": one.index, "delta": d, **quiet}, **running) for d in early]
        if last or ends or not self._plain or self._continuous:
            details = self._details(one, finish_reason(one.finish_reason, stream.has_calls))
            choice = {"index": one.index, "delta": last, **details}
            data.append(writer.choice(choice, **running))
        return b"".join(data)

    def _running_usage(self, usage: Usage) -> dict[str, Any]:
        return {"usage": usage.record()} if self._continuous else {}

    def _details(self, one: CompletionOutput, finish_reason: str | None) -> dict[str, Any]:
        """What a choice says in addition to its text."""
        details: dict[str, Any] = {
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason(one),
        }
        if self._body.wants_logprobs and one.logprobs is not None:
            details["logprobs"] = chat_logprobs(
                one.token_ids,
                list(one.logprobs),  # type: ignore[arg-type]
                self._candidates,
                bool(self._body.return_tokens_as_token_ids),
            )
        if self._body.return_token_ids:
            details["token_ids"] = one.token_ids
        return details

    @property
    def _role(self) -> str:
        """The role that speaks on: a continued message keeps its own."""
        if self._body.continue_final_message:
            return printable(str(self._body.messages[-1]["role"]))
        return "assistant"
