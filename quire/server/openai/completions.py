"""`/v1/completions`."""

from __future__ import annotations

from typing import Any, ClassVar

from fastapi import APIRouter, Request

from quire.frontend.inputs import Prompt, number_of_prompts, parse_prompts
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.protocol.errors import RequestError
from quire.protocol.sampling import BeamSearchParams, SamplingParams
from quire.server.http.errors import StructuredFields
from quire.server.openai.choices import ChoicesBody, ChoicesReply, finish_reason, stop_reason
from quire.server.openai.logprobs import Candidates, CompletionLogprobs
from quire.server.preparation.bodies import PromptInput
from quire.server.preparation.prepare import Preparation, Prepared
from quire.server.routes import prepared_route
from quire.server.state import state_of
from quire.text.tokenizer import Tokenizer

router = APIRouter()


class CompletionBody(ChoicesBody):
    prepared_fields: ClassVar[frozenset[str]] = ChoicesBody.prepared_fields | {
        "prompt",
        "response_format",
    }

    prompt: PromptInput | None = None
    logprobs: int | None = None
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = True

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs is not None or self.prompt_logprob_token_ids is not None

    def refuse_unsupported(self) -> None:
        super().refuse_unsupported()
        if self.suffix:
            raise RequestError(
                f"suffix={self.suffix!r} is not supported: models here continue text and cannot "
                "fill it in. Leave suffix out."
            )
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(f"best_of={self.best_of} is not supported; use n, or leave it out.")
        if self.prompt is None:
            raise RequestError("prompt is missing; give text, token ids, or a list of these.")


def prepare_completion(state: Preparation, body: CompletionBody) -> Prepared:
    model = state.check(body)
    prompts = _prompts(state, body)
    params = _params(state, body, prompts)
    echoes = [_text_of(state, prompt) for prompt in prompts] if body.echo else None
    fields = StructuredFields(body.structured_field)
    return Prepared(body, model, prompts, params, echoes=echoes, structured_fields=fields)


@prepared_route(router, "/v1/completions", CompletionBody, prepare_completion, uses_template=False)
async def create_completion(made: Prepared, request: Request) -> CompletionReply:
    body: CompletionBody = made.body
    response_id = f"cmpl-{body.request_id or request.state.request_id}"
    tokenizer = state_of(request).preparation.tokenizer
    return CompletionReply(body, response_id, made.model, tokenizer, made.echoes)


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
    if body.echo and body.logprobs is None and not body.wants_prompt_logprobs:
        own["prompt_logprob_token_ids"] = body.logprob_token_ids
    params = body.sampling_params(defaults, output_kind=body.output_kind, **own)
    if body.use_beam_search:
        return state.beam_search_params(body, params, prompts)
    return params


def _text_of(state: Preparation, prompt: Prompt) -> str:
    if prompt.text is not None:
        return prompt.text
    assert prompt.token_ids is not None
    return state.tokenizer.decode(prompt.token_ids.tolist())


class CompletionReply(ChoicesReply):
    """`echoes` are the prompts to repeat."""

    whole_kind = chunk_kind = "text_completion"

    def __init__(
        self,
        body: CompletionBody,
        response_id: str,
        model: str,
        tokenizer: Tokenizer,
        echoes: list[str] | None,
    ) -> None:
        super().__init__(body, response_id, model)
        self._body = body
        self._text_of = tokenizer.decode
        self._echoes = echoes
        self._num_each = body.n or 1
        self._prompt_only = bool(body.echo) and body.max_tokens == 0
        self._wants_logprobs = body.logprobs is not None or body.logprob_token_ids is not None
        self._is_plain = not (
            self._wants_logprobs or body.return_token_ids or body.wants_prompt_logprobs
        )
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._begun: set[int] = set()
        """Choices that have said something."""

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        choices = []
        for index, output in enumerate(outputs):
            self._count(index, output)
            choices += [self._first_choice(index, output, one) for one in output.outputs]
        return self._whole(choices)

    def _count(self, index: int, output: RequestOutput) -> None:
        if self._prompt_only:  # what was generated is left out
            for one in output.outputs:
                one.text, one.token_ids = "", []
                one.logprobs = None if one.logprobs is None else []
        super()._count(index, output)

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

    def _begins(self, index: int, output: RequestOutput) -> bool:
        return any(index * self._num_each + one.index not in self._begun for one in output.outputs)

    def _chunk(self, index: int, output: RequestOutput, one: CompletionOutput) -> bytes:
        place = index * self._num_each + one.index
        begins = place not in self._begun
        self._begun.add(place)
        if self._is_plain and not self._continuous and one.finish_reason is None:
            echo = self._echoes[index] if begins and self._echoes is not None else ""
            return self._text(place, echo + one.text, b'"text":', b"")
        choose = self._first_choice if begins else self._choice
        return self._choice_chunk(choose(index, output, one))

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
