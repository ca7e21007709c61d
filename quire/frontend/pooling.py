"""`PoolingParams`: how the hidden states of a prompt become its embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.protocol.errors import RequestError
from quire.protocol.plan import Float32Array
from quire.protocol.sampling import RequestOutputKind, SamplingParams, refuse_unknown

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
