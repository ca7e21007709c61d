"""`/v1/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from quire.frontend.inputs import Prompt, number_of_prompts, parse_prompts
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.protocol.errors import RequestError
from quire.protocol.output import RequestProgress
from quire.protocol.sampling import BeamSearchParams, SamplingParams
from quire.server.generation import Generation
from quire.server.http.errors import StructuredFields
from quire.server.http.reply import num_values, off_loop
from quire.server.openai.beam_search import beam_search_params
from quire.server.openai.bodies import CompletionBody
from quire.server.openai.chat_messages import finish_reason, stop_reason
from quire.server.openai.logprobs import Candidates, CompletionLogprobs
from quire.server.openai.stream import ChunkWriter
from quire.server.openai.usage import Usage
from quire.server.preparation.prepare import Preparation, Prepared
from quire.server.preparation.routes import prepared_route
from quire.server.state import state_of
from quire.text.tokenizer import Tokenizer

router = APIRouter()


def prepare_completion(state: Preparation, body: CompletionBody) -> Prepared:
    model = state.check(body)
    prompts = _prompts(state, body)
    params = _params(state, body, prompts)
    echoes = [_text_of(state, prompt) for prompt in prompts] if body.echo else None
    fields = StructuredFields(body.structured_field)
    return Prepared(body, model, prompts, params, echoes=echoes, structured_fields=fields)


@prepared_route(router, "/v1/completions", CompletionBody, prepare_completion, uses_template=False)
async def create_completion(made: Prepared, request: Request) -> Response:
    body: CompletionBody = made.body
    response_id = f"cmpl-{body.request_id or request.state.request_id}"
    tokenizer = state_of(request).preparation.tokenizer
    reply = CompletionReply(body, response_id, made.model, tokenizer, made.echoes)
    terms = body.terms(request.state.tenant, body.wants_progress)
    generation = await Generation.start(request, made, response_id, terms)
    return await generation.answer(reply, body.stream, begins_first=not body.wants_progress)


def _prompts(state: Preparation, body: CompletionBody) -> list[Prompt]:
    state.check_count(
        "prompt", number_of_prompts(body.prompt), 1 if body.use_beam_search else body.n or 1
    )
    prompts = parse_prompts(body.prompt)
    if not prompts:
        raise RequestError("prompt is an empty list; give at least one prompt.")
    for prompt in prompts:
        prompt.cache_salt = body.cache_salt
    state.tokenize(prompts, body.tokenization(body.add_special_tokens))
    return prompts


def _params(
    state: Preparation, body: CompletionBody, prompts: list[Prompt]
) -> SamplingParams | BeamSearchParams:
    defaults = state.default_params
    max_tokens = defaults.max_tokens
    if body.max_tokens is not None:
        # The engine generates at least one token; the reply leaves it out.
        max_tokens = 1 if body.max_tokens == 0 and body.echo else body.max_tokens
        state.check_max_tokens(prompts, max_tokens)
    own: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": body.logprobs}
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        own["prompt_logprobs"] = body.logprobs
    if body.echo and body.logprobs is None and not body.asks_about_prompt:
        own["prompt_logprob_token_ids"] = body.logprob_token_ids
    params = body.sampling_params(defaults, output_kind=body.output_kind, **own)
    if body.use_beam_search:
        return beam_search_params(state, body, params, prompts)
    return params


def _text_of(state: Preparation, prompt: Prompt) -> str:
    if prompt.text is not None:
        return prompt.text
    assert prompt.token_ids is not None
    return state.tokenizer.decode(prompt.token_ids.tolist())


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
        self._wants_logprobs = body.logprobs is not None or body.logprob_token_ids is not None
        self._plain = not (self._wants_logprobs or body.return_token_ids or body.asks_about_prompt)
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
            choices += [self._first_choice(index, output, one) for one in output.outputs]
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

    def _first_choice(
        self, index: int, output: RequestOutput, one: CompletionOutput
    ) -> dict[str, Any]:
        """What a choice says first, or altogether: what is about the prompt, then new text."""
        choice = self._choice(index, output, one, about_prompt=self._echoes is not None)
        if self._echoes is not None:
            choice["text"] = self._echoes[index] + one.text
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
        if output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = list(output.prompt_logprobs)
        return choice

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        writer = ChunkWriter(
            self._id,
            "text_completion",
            self._created,
            self._model,
            tells_usage=bool(self._body.usage_options.include_usage),
        )
        usage = Usage()
        begun: set[int] = set()
        async with aclosing(generation.news()) as all_news:
            async for news in all_news:
                data = []
                for index, output in news:
                    if isinstance(output, RequestProgress):
                        data.append(writer.progress(output))
                        continue
                    self._leave_out_generated(output)
                    usage.add(index, output)
                    for one in output.outputs:
                        write = partial(self._chunk, writer, index, output, one, usage, begun)
                        begins = index * self._num_each + one.index not in begun
                        size = num_values([output]) if begins else 0
                        data.append(await off_loop(size, write))
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
        begun: set[int],
    ) -> bytes:
        place = index * self._num_each + one.index
        begins = place not in begun
        begun.add(place)
        if self._plain and not self._continuous and one.finish_reason is None:
            echo = self._echoes[index] if begins and self._echoes is not None else ""
            return writer.text(place, echo + one.text, b'"text":', b"")
        choose = self._first_choice if begins else self._choice
        choice = choose(index, output, one)
        return writer.choice(choice, **({"usage": usage.record()} if self._continuous else {}))

    def _choice(
        self,
        index: int,
        output: RequestOutput,
        one: CompletionOutput,
        about_prompt: bool = False,
    ) -> dict[str, Any]:
        place = index * self._num_each + one.index
        choice: dict[str, Any] = {
            "index": place,
            "text": one.text,
            "logprobs": None,
            "finish_reason": finish_reason(one.finish_reason),
            "stop_reason": stop_reason(one),
        }
        if self._wants_logprobs and one.logprobs is not None:
            ids, entries = one.token_ids, list(one.logprobs)
            if about_prompt:
                ids = output.prompt_token_ids + ids
                entries = [*(output.prompt_logprobs or ()), *entries]
            writer = self._logprobs.setdefault(place, self._new_logprobs())
            choice["logprobs"] = writer.lists(ids, entries)
        if self._body.return_token_ids:
            choice["token_ids"] = one.token_ids
        return choice

    def _new_logprobs(self) -> CompletionLogprobs:
        candidates = Candidates(self._body.logprobs or 0, self._body.logprob_token_ids)
        as_ids = bool(self._body.return_tokens_as_token_ids)
        return CompletionLogprobs(candidates, as_ids, self._text_of)
