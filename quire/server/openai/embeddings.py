"""`/v1/embeddings`: one vector for each input, pooled from a causal model's hidden states."""

from __future__ import annotations

import base64
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import Strict
from starlette.responses import Response

from quire.frontend.inputs import Prompt, number_of_prompts, parse_prompts
from quire.frontend.outputs import EmbeddingRequestOutput
from quire.frontend.pooling import PoolingParams, checked_params
from quire.protocol.errors import RequestError
from quire.server.http.reply import CLIENT_LEFT, encoded, off_loop
from quire.server.preparation.bodies import PromptInput, RequestBody
from quire.server.preparation.prepare import Preparation, Prepared
from quire.server.routes import open_stream, prepared_route, read_to_end

router = APIRouter()


class EmbeddingBody(RequestBody):
    prepared_fields: ClassVar[frozenset[str]] = frozenset({"input"})
    stubs: ClassVar[dict[str, Any]] = {"input": ""}

    input: PromptInput
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[int, Strict()] | None = None
    pooling: str | None = None
    normalize: Annotated[bool, Strict()] | None = None
    add_special_tokens: Annotated[bool, Strict()] | None = True
    user: str | None = None


def prepare_embedding(state: Preparation, body: EmbeddingBody) -> Prepared:
    model = state.check(body)
    params = _params(state, body)
    return Prepared(body, model, _prompts(state, body), params)


@prepared_route(router, "/v1/embeddings", EmbeddingBody, prepare_embedding, uses_template=False)
async def create_embedding(made: Prepared, request: Request) -> Response:
    body: EmbeddingBody = made.body
    params = made.params
    assert isinstance(params, PoolingParams)
    name = f"embd-{body.request_id or request.state.request_id}"
    stream = await open_stream(request, made, name)
    outputs = await read_to_end(request, stream, stream.embeddings(params))
    if outputs is None:
        return Response(status_code=CLIENT_LEFT)
    size = sum(output.outputs.hidden_size for output in outputs)
    as_bytes = body.encoding_format == "base64"
    data = await off_loop(size, lambda: encoded(_reply(outputs, made.model, as_bytes)))
    return Response(data, media_type="application/json")


def _params(state: Preparation, body: EmbeddingBody) -> PoolingParams:
    given = {
        name: value
        for name in ("pooling", "normalize", "dimensions")
        if (value := getattr(body, name)) is not None
    }
    return checked_params(PoolingParams(**given), state.hidden_size)


def _prompts(state: Preparation, body: EmbeddingBody) -> list[Prompt]:
    state.check_count("input", number_of_prompts(body.input))
    try:
        prompts = parse_prompts(body.input)
        if not prompts:
            raise RequestError("it is an empty list; give at least one text.")
        for prompt in prompts:
            prompt.cache_salt = body.cache_salt
        state.tokenize(prompts, body.tokenization(body.add_special_tokens), "input")
    except RequestError as error:  # names fields of completions
        error.args = (f"input is refused: {error}",)
        raise
    return prompts


def _reply(outputs: list[EmbeddingRequestOutput], model: str, as_bytes: bool) -> dict[str, Any]:
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": _encoded(output.outputs.embedding, as_bytes),
            }
            for index, output in enumerate(outputs)
        ],
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _encoded(vector: list[float], as_bytes: bool) -> list[float] | str:
    """As numbers, or as the base64 text of little-endian 32-bit floats."""
    if not as_bytes:
        return vector
    return base64.b64encode(np.array(vector, "<f4").tobytes()).decode("ascii")
