"""Embeddings: prompts in, one vector each out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.frontend.inputs import TokenizationOptions, parse_prompts
from quire.frontend.output_processor import OpenRequest
from quire.frontend.outputs import EmbeddingOutput, EmbeddingRequestOutput
from quire.frontend.progress import ProgressBar
from quire.frontend.requests import checked_requests
from quire.frontend.session import request_failure
from quire.protocol.errors import QuireError, RequestError
from quire.protocol.plan import Float32Array
from quire.protocol.sampling import RequestOutputKind, SamplingParams
from quire.protocol.unknown_arguments import refuse_unknown

if TYPE_CHECKING:
    from quire.frontend.llm import LLM

POOLINGS = ("last", "mean")


@dataclass(frozen=True)
class PoolingParams:
    """How the hidden states of a prompt become a vector."""

    pooling: str = "last"
    """last: of the last token, which has seen all others, as vLLM has it for causal models;
    mean: over all tokens."""
    normalize: bool = True
    """Scale vectors to length 1."""
    dimensions: int | None = None
    """Keep the first so many numbers only, for models trained for that."""

    def __new__(cls, *arguments: Any, **values: Any) -> PoolingParams:
        refuse_unknown("PoolingParams", values, cls.__dataclass_fields__, {})
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise RequestError(
                f"pooling must be one of {', '.join(POOLINGS)}, got {self.pooling!r}."
            )
        if self.dimensions is not None and self.dimensions < 1:
            raise RequestError(f"dimensions must be at least 1, got {self.dimensions}.")

    def finish(self, vector: Float32Array) -> Float32Array:
        """A pooled vector as the caller wants it: cut first, then scaled, as vLLM does."""
        vector = vector[: self.dimensions]
        if not self.normalize:
            return vector
        return vector / np.maximum(np.linalg.norm(vector), np.float32(1e-12))

    def sampling(self) -> SamplingParams:
        """What the engine samples by: one token, which only says that the prompt is complete."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def checked_params(params: PoolingParams | None, hidden_size: int) -> PoolingParams:
    params = params or PoolingParams()
    if not isinstance(params, PoolingParams):
        raise RequestError(f"pooling_params must be PoolingParams, got {params!r}.")
    if params.dimensions is not None and params.dimensions > hidden_size:
        raise RequestError(
            f"dimensions={params.dimensions} is more than the model's {hidden_size}; lower it."
        )
    return params


def embed(
    llm: LLM,
    prompts: Any,
    *,
    pooling_params: PoolingParams | None = None,
    use_tqdm: bool = True,
    priority: Sequence[int] | None = None,
    tokenization_kwargs: Mapping[str, Any] | None = None,
) -> list[EmbeddingRequestOutput]:
    """One vector for each prompt, from the model's last hidden states."""
    params = checked_params(pooling_params, llm.model_config.hidden_size)
    parsed = parse_prompts(prompts)
    options = TokenizationOptions.from_kwargs(tokenization_kwargs)
    session, core, sampling = llm._session, llm._core, [params.sampling()] * len(parsed)
    session.inputs.encode_texts(parsed, options)
    news = llm._all_checked(
        checked_requests(session, core, parsed, sampling, priority, options, pooling=params.pooling)
    )
    with ProgressBar(len(news), use_tqdm) as bar:
        requests = llm._run_apart(news, parsed, bar)
    return [embedding_of(request, params, core.death) for request in requests]


def no_vector(error: str | None, finish_reason: str | None, death: str | None) -> QuireError:
    """What to raise for a request that ended before its vector was there."""
    return request_failure(error or f"the request ended by {finish_reason}", death)


def embedding_of(
    request: OpenRequest, params: PoolingParams, death: str | None
) -> EmbeddingRequestOutput:
    """What an ended request came to."""
    (sequence,) = request.sequences
    if sequence.embedding is None:
        raise no_vector(request.error, sequence.finish_reason, death)
    return EmbeddingRequestOutput(
        request_id=request.request_id,
        outputs=EmbeddingOutput(params.finish(sequence.embedding).tolist()),
        prompt_token_ids=request.prompt_token_ids,
        num_cached_tokens=request.num_cached_tokens_shown or 0,
    )
