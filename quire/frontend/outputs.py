"""What `LLM` and `AsyncLLM` return. Names and fields are vLLM's."""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence
from dataclasses import dataclass, field
from typing import Any, overload


@dataclass(slots=True)
class Logprob:
    """One candidate at one position. `rank` counts from 1 over the whole vocabulary."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class FlatLogprobs(MutableSequence["dict[int, Logprob] | None"]):
    """Logprobs of many positions in flat lists (`flat_logprobs=True`), far lighter than objects."""

    def __init__(self) -> None:
        self.start_indices: list[int] = []
        self.end_indices: list[int] = []
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.ranks: list[int | None] = []
        self.decoded_tokens: list[str | None] = []

    def insert(self, index: int, value: dict[int, Logprob] | None) -> None:
        if index != len(self):
            raise TypeError("FlatLogprobs only grows at its end")
        self.start_indices.append(len(self.token_ids))
        for token_id, entry in (value or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | FlatLogprobs:
        if isinstance(index, slice):
            part = FlatLogprobs()
            for i in range(*index.indices(len(self))):
                part.append(self[i])
            return part
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i])
            for i in range(self.start_indices[index], self.end_indices[index])
        }

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("FlatLogprobs only grows at its end")

    def __delitem__(self, index: Any) -> None:
        raise TypeError("FlatLogprobs only grows at its end")

    def __iter__(self) -> Iterator[dict[int, Logprob] | None]:
        return (self[i] for i in range(len(self)))


SampleLogprobs = list[dict[int, Logprob]] | FlatLogprobs
PromptLogprobs = list["dict[int, Logprob] | None"] | FlatLogprobs


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None
    routed_experts: Any = None
    sampling_mask: Any = None
    spec_decode_metrics: Any = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of a monotonic clock."""

    arrival_time: float = 0.0
    first_scheduled_time: float = 0.0
    first_token_time: float = 0.0
    finished_time: float = 0.0

    @property
    def time_to_first_token(self) -> float:
        return self.first_token_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """A prompt and what was generated for it. `num_cached_tokens` counts prompt tokens that came
    from the prefix cache."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: Any
    """`PromptLogprobs`, or None if they were not asked for."""
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: Any = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    num_cache_creation_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(slots=True)
class BeamSearchSequence:
    """One hypothesis; `tokens` and `text` include the prompt."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    lora_request: Any = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best hypotheses for one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class EmbeddingOutput:
    """The vector of one prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """A prompt and its vector."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
