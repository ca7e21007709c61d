"""Routes about the server itself: health, version, load, models, tokens."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import BaseModel, Strict
from starlette.responses import Response

from quire import __version__
from quire.protocol.errors import RequestError
from quire.server.anthropic.models import DEFAULT_PAGE, model_record, page
from quire.server.dialect import ANTHROPIC
from quire.server.generation import state_of
from quire.server.http.errors import RETRY_AFTER_S, error_response
from quire.server.preparation.context import Preparation
from quire.server.preparation.conversation import render_chat
from quire.server.preparation.routes import answered_already, prepared_route
from quire.text.tool_calls.declared import ToolUse, chat_tools

router = APIRouter()
BODILESS: Any = {"response_class": Response, "response_description": "The engine serves requests."}

DETOKENIZED = 1 << 18
"""Tokens that /detokenize takes, though no context may hold them."""
COUNTED_CHARACTERS = 1 << 20
"""Of a text that /tokenize counts the tokens of, though no context may hold it."""


@router.get("/health", **BODILESS)
@router.head("/health", include_in_schema=False)  # load balancers ask so
@router.get("/ping", **BODILESS)
@router.head("/ping", include_in_schema=False)
@router.post("/ping", **BODILESS)
async def health(request: Request) -> Response:
    state = state_of(request)
    death = state.llm.client.death
    if death is None:
        return Response(status_code=200)
    after = RETRY_AFTER_S if state.restarting else None
    return error_response(503, f"the engine serves nothing now: {death}", retry_after_s=after)


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/load")
async def load(request: Request) -> dict[str, int]:
    """Requests that are being answered, by whichever API process."""
    return {"server_load": state_of(request).load.num_requests}


@router.get("/v1/models")
async def models(
    request: Request,
    limit: int = DEFAULT_PAGE,
    after_id: str | None = None,
    before_id: str | None = None,
) -> dict[str, Any]:
    """In the form of the client's protocol; the parameters are those of Anthropic's."""
    records = [_model(request, name) for name in state_of(request).model_names]
    if request.state.dialect is ANTHROPIC:
        return page(records, limit, after_id, before_id)
    return {"object": "list", "data": records}


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    return _model(request, state_of(request).check_model(name))


def _model(request: Request, name: str) -> dict[str, Any]:
    state = state_of(request)
    if request.state.dialect is ANTHROPIC:
        return model_record(name, state.created, state.llm.session.inputs.max_model_len)
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "quire",
        "root": state.llm.model_config.source.name,
        "parent": None,
        "max_model_len": state.llm.session.inputs.max_model_len,
    }


class TokenizeBody(BaseModel):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool = False


class DetokenizeBody(BaseModel):
    model: str | None = None
    tokens: list[Annotated[int, Strict()]]


def tokenize_text(state: Preparation, body: TokenizeBody) -> bytes:
    state.check_model(body.model)
    special = body.add_special_tokens
    if body.messages is not None:
        prompt = render_chat(
            state,
            body.messages,
            chat_template=body.chat_template,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            tools=ToolUse.read(chat_tools(body.tools), None, None).declarations,
            template_kwargs=body.chat_template_kwargs,
        )
        text = prompt.text or ""
        special = bool(special)
    elif body.prompt is not None:
        text = body.prompt
        special = special is not False
    else:
        raise RequestError("prompt is missing; give prompt or messages.")
    state.inputs.check_text(text, least=COUNTED_CHARACTERS)
    tokenizer = state.tokenizer
    ids = tokenizer.encode(text, special)
    reply = {
        "count": len(ids),
        "max_model_len": state.inputs.max_model_len,
        "tokens": ids,
        "token_strs": tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None,
    }
    return msgspec.json.encode(reply)


def detokenize(state: Preparation, body: DetokenizeBody) -> bytes:
    state.check_model(body.model)
    most = max(DETOKENIZED, state.inputs.max_model_len)
    if len(body.tokens) > most:
        raise RequestError(f"tokens holds {len(body.tokens)} ids, more than {most}; send fewer.")
    state.inputs.check_ids("tokens", body.tokens)
    return msgspec.json.encode({"prompt": state.tokenizer.decode(body.tokens)})


prepared_route(router, "/tokenize", TokenizeBody, tokenize_text)(answered_already)
prepared_route(router, "/detokenize", DetokenizeBody, detokenize, uses_template=False)(
    answered_already
)
