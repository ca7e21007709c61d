"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel, Strict

from quire.protocol.errors import RequestError
from quire.server.preparation.prepare import Preparation
from quire.server.routes import answered_already, prepared_route
from quire.text.tool_calls.declared import ToolUse, chat_tools

router = APIRouter()

DETOKENIZED = 1 << 18
"""Tokens that /detokenize takes, though no context may hold them."""
COUNTED_CHARACTERS = 1 << 20
"""Of a text that /tokenize counts the tokens of, though no context may hold it."""


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
        prompt = state.render_chat(
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
