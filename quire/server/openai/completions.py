"""`/v1/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.frontend.inputs import Prompt, parse_prompts
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.frontend.tokenizer import Tokenizer
from quire.protocol.errors import RequestError
from quire.protocol.output import RequestProgress
from quire.protocol.sampling import RequestOutputKind, SamplingParams
from quire.server.event_stream import CLIENT_LEFT, EventStream
from quire.server.generation import (
    Generation,
    check_max_tokens,
    state_of,
    tokenize,
)
from quire.server.openai.logprobs import CompletionLogprobs
from quire.server.openai.schemas import CompletionBody
from quire.server.openai.stream import ChunkWriter
from quire.server.openai.usage import Usage
from quire.server.state import ServerState

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(body: CompletionBody, request: Request) -> Response:
    state = state_of(request)
    model = state.check_model(body.model)
    body.note_unknown_fields()
    body.refuse_unsupported()
    _refuse_unsupported(body)
    prompts = await _prompts(state, body)
    params = _params(state, body, prompts)
    response_id = f"cmpl-{body.request_id or request.state.request_id}"
    terms = body.terms(request.state.tenant, body.wants_progress)
    generation = await Generation.start(request, prompts, params, response_id, terms)
    echoes = [_text_of(state, prompt) for prompt in prompts] if body.echo else None
    reply = CompletionReply(body, response_id, model, state.llm.session.tokenizer, echoes)
    if body.stream:
        if not body.usage_options.include_progress and not await generation.begin():
            return Response(status_code=CLIENT_LEFT)
        return EventStream(reply.events(generation))
    outputs = await generation.outputs()
    if outputs is None:
        return Response(status_code=CLIENT_LEFT)
    return Response(msgspec.json.encode(reply.whole(outputs)), media_type="application/json")


def _refuse_unsupported(body: CompletionBody) -> None:
    if body.suffix:
        raise RequestError(
            f"suffix={body.suffix!r} is not supported: models here continue text and cannot fill "
            "it in. Leave suffix out."
        )
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError(f"best_of={body.best_of} is not supported; use n, or leave it out.")
    if body.prompt is None:
        raise RequestError("prompt is missing; give text, token ids, or a list of these.")
    if body.echo and body.stream and body.logprobs is not None:
        raise RequestError("echo with logprobs is not supported in streams; set stream=false.")


async def _prompts(state: ServerState, body: CompletionBody) -> list[Prompt]:
    prompts = parse_prompts(body.prompt)
    if not prompts:
        raise RequestError("prompt is an empty list; give at least one prompt.")
    for prompt in prompts:
        prompt.cache_salt = body.cache_salt
    await tokenize(state, prompts, body.tokenization(body.add_special_tokens))
    return prompts


def _params(state: ServerState, body: CompletionBody, prompts: list[Prompt]) -> SamplingParams:
    defaults = state.llm.session.default_params
    max_tokens = defaults.max_tokens if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and body.echo:
        max_tokens = 1  # the engine generates at least one token; the reply leaves it out
    own: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": body.logprobs}
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        own["prompt_logprobs"] = body.logprobs
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    params = body.sampling_params(defaults, output_kind=kind, **own)
    if body.max_tokens is not None:
        check_max_tokens(state, prompts, params.max_tokens, "max_tokens")
    return params


def _text_of(state: ServerState, prompt: Prompt) -> str:
    if prompt.text is not None:
        return prompt.text
    assert prompt.token_ids is not None
    return state.llm.session.tokenizer.decode(prompt.token_ids.tolist())


class CompletionReply:
    """Writes the reply to one request, whole or in chunks. `echoes` are the prompts to repeat."""

    def __init__(
        self,
        body: CompletionBody,
        response_id: str,
        model: str,
        tokenizer: Tokenizer,
        echoes: list[str] | None,
    ) -> None:
        self._id = response_id
        self._body = body
        self._model = model
        self._text_of = tokenizer.decode
        self._echoes = echoes
        self._created = int(time.time())
        self._num_each = body.n or 1
        self._prompt_only = bool(body.echo) and body.max_tokens == 0
        self._plain = body.logprobs is None and not body.return_token_ids
        self._continuous = bool(
            body.usage_options.include_usage and body.usage_options.continuous_usage_stats
        )
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        usage = Usage()
        choices = []
        for index, output in enumerate(outputs):
            self._leave_out_generated(output)
            usage.add(index, output)
            choices += [self._whole_choice(index, output, one) for one in output.outputs]
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": usage.record(),
        }

    def _leave_out_generated(self, output: RequestOutput) -> None:
        if self._prompt_only:
            for one in output.outputs:
                one.text, one.token_ids = "", []
                one.logprobs = None if one.logprobs is None else []

    def _whole_choice(
        self, index: int, output: RequestOutput, one: CompletionOutput
    ) -> dict[str, Any]:
        echo = "" if self._echoes is None else self._echoes[index]
        choice = self._choice(index, output, one)
        choice["text"] = echo + one.text
        if self._body.logprobs is not None and self._echoes is not None:
            known = [*(output.prompt_logprobs or ()), *(one.logprobs or ())]
            ids = output.prompt_token_ids + one.token_ids
            choice["logprobs"] = self._new_logprobs().lists(ids, known)
        if output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = list(output.prompt_logprobs)
        return choice

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        writer = ChunkWriter(self._id, "text_completion", self._created, self._model)
        usage = Usage()
        echoed: set[int] = set()
        async with aclosing(generation.news()) as all_news:
            async for news in all_news:
                data = []
                for index, output in news:
                    if isinstance(output, RequestProgress):
                        data.append(writer.progress(output))
                        continue
                    self._leave_out_generated(output)
                    usage.add(index, output)
                    data += [
                        self._chunk(writer, index, output, one, usage, echoed)
                        for one in output.outputs
                    ]
                yield b"".join(data)
        if self._body.usage_options.include_usage:
            yield writer.bare(usage=usage.record())

    def _chunk(
        self,
        writer: ChunkWriter,
        index: int,
        output: RequestOutput,
        one: CompletionOutput,
        usage: Usage,
        echoed: set[int],
    ) -> bytes:
        place = index * self._num_each + one.index
        first = place not in echoed
        echoed.add(place)
        if first and self._echoes is not None:
            one.text = self._echoes[index] + one.text
        if self._plain and not self._continuous and one.finish_reason is None:
            return writer.text(place, one.text, b'"text":', b"")
        choice = self._choice(index, output, one)
        if not first:
            choice.pop("prompt_token_ids", None)
        return writer.choice(choice, **({"usage": usage.record()} if self._continuous else {}))

    def _choice(self, index: int, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        place = index * self._num_each + one.index
        choice: dict[str, Any] = {
            "index": place,
            "text": one.text,
            "logprobs": None,
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        if self._body.logprobs is not None and one.logprobs is not None:
            writer = self._logprobs.setdefault(place, self._new_logprobs())
            choice["logprobs"] = writer.lists(one.token_ids, list(one.logprobs))
        if self._body.return_token_ids:
            choice["token_ids"] = one.token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _new_logprobs(self) -> CompletionLogprobs:
        return CompletionLogprobs(
            self._body.logprobs or 0, bool(self._body.return_tokens_as_token_ids), self._text_of
        )
