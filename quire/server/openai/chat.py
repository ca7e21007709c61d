"""`/v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.frontend.inputs import Prompt
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.protocol.errors import RequestError
from quire.protocol.output import RequestProgress
from quire.protocol.sampling import RequestOutputKind, SamplingParams
from quire.server.conversation import conversation_prompt
from quire.server.event_stream import CLIENT_LEFT, EventStream
from quire.server.generation import Generation, check_max_tokens, state_of
from quire.server.openai.logprobs import chat_logprobs
from quire.server.openai.schemas import ChatBody
from quire.server.openai.stream import ChunkWriter, printable
from quire.server.openai.usage import Usage
from quire.server.state import ServerState

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatBody, request: Request) -> Response:
    state = state_of(request)
    model = state.check_model(body.model)
    body.note_unknown_fields()
    body.refuse_unsupported()
    _refuse_unsupported(body)
    prompt = await _render(state, body)
    params = _params(state, body, prompt)
    reply = ChatReply(body, f"chatcmpl-{body.request_id or request.state.request_id}", model)
    terms = body.terms(request.state.tenant, body.wants_progress)
    generation = await Generation.start(request, [prompt], params, reply.id, terms)
    if body.stream:
        if not body.usage_options.include_progress and not await generation.begin():
            return Response(status_code=CLIENT_LEFT)
        return EventStream(reply.events(generation))
    outputs = await generation.outputs()
    if outputs is None:
        return Response(status_code=CLIENT_LEFT)
    return Response(msgspec.json.encode(reply.whole(outputs[0])), media_type="application/json")


def _refuse_unsupported(body: ChatBody) -> None:
    if isinstance(body.tool_choice, dict) or body.tool_choice == "required":
        raise RequestError(
            f"tool_choice={body.tool_choice!r} is not supported yet; use 'auto' or 'none'."
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError(
            f"top_logprobs={body.top_logprobs} has no effect without logprobs; set logprobs=true."
        )
    if body.top_logprobs is not None and body.top_logprobs < 0:
        raise RequestError(f"top_logprobs must be at least 0, got {body.top_logprobs}.")


async def _render(state: ServerState, body: ChatBody) -> Prompt:
    """The conversation as a tokenised prompt."""
    kwargs: dict[str, Any] = {}
    if body.documents is not None:
        kwargs["documents"] = body.documents
    if body.reasoning_effort is not None:
        kwargs["reasoning_effort"] = body.reasoning_effort
    continues = bool(body.continue_final_message)
    generates = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return await conversation_prompt(
        state,
        body,
        body.messages,
        template_kwargs=kwargs,
        add_generation_prompt=generates,
        continue_final_message=continues,
        tools=None if body.tool_choice == "none" else body.tools,
    )


def _params(state: ServerState, body: ChatBody, prompt: Prompt) -> SamplingParams:
    old, new = body.max_tokens, body.max_completion_tokens
    name = "max_tokens" if new is None else "max_completion_tokens"
    max_tokens = old if new is None else new
    params = body.sampling_params(
        state.llm.session.default_params,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
    )
    check_max_tokens(state, [prompt], params.max_tokens, name)
    return params


class ChatReply:
    """Writes the reply to one request, whole or in chunks."""

    def __init__(self, body: ChatBody, response_id: str, model: str) -> None:
        self.id = response_id
        self._body = body
        self._model = model
        self._created = int(time.time())
        self._plain = not (body.logprobs or body.return_token_ids)
        self._continuous = bool(
            body.usage_options.include_usage and body.usage_options.continuous_usage_stats
        )

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        usage = Usage()
        usage.add(0, output)
        choices = [
            {
                "index": one.index,
                "message": {"role": self._role, "content": one.text},
                **self._details(one),
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
        if output.prompt_logprobs is not None:
            reply["prompt_logprobs"] = list(output.prompt_logprobs)
        if self._body.return_token_ids:
            reply["prompt_token_ids"] = output.prompt_token_ids
        return reply

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        writer = ChunkWriter(self.id, "chat.completion.chunk", self._created, self._model)
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
                        data.append(self._opening(writer, output))
                    data += [self._chunk(writer, one, usage) for one in output.outputs]
                yield b"".join(data)
        if self._body.usage_options.include_usage:
            yield writer.bare(usage=usage.record())

    def _opening(self, writer: ChunkWriter, output: RequestOutput) -> bytes:
        """The role of each choice, before its text."""
        extra = {"prompt_token_ids": output.prompt_token_ids} if self._body.return_token_ids else {}
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
        if self._plain and not self._continuous and one.finish_reason is None:
            return writer.text(one.index, one.text, b'"delta":{"content":', b"}")
        choice = {"index": one.index, "delta": {"content": one.text}, **self._details(one)}
        return writer.choice(choice, **({"usage": usage.record()} if self._continuous else {}))

    def _details(self, one: CompletionOutput) -> dict[str, Any]:
        """What a choice says besides its text."""
        details: dict[str, Any] = {
            "logprobs": None,
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        if self._body.logprobs and one.logprobs is not None:
            details["logprobs"] = chat_logprobs(
                one.token_ids,
                list(one.logprobs),  # type: ignore[arg-type]
                self._body.top_logprobs or 0,
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
