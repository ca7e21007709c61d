"""`NewRequest`: a request on its way into the engine. Its maker has checked it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from quire.protocol.adapter import LoRARequest
from quire.protocol.plan import Int32Array
from quire.protocol.sampling import SamplingParams

KEY_BITS = 40
"""Sequences a client can number: key = client_index << KEY_BITS | n."""


class SchedulingPolicy(StrEnum):
    """Order of waiting requests."""

    FCFS = "fcfs"
    """First come first served."""
    PRIORITY = "priority"
    """Lowest `NewRequest.priority` first."""


@dataclass(frozen=True)
class MediaSpan:
    """Placeholder tokens of an image or the like in a prompt."""

    start: int
    length: int
    digest: bytes
    """Of its content: equal placeholders of different media have different KV."""


@dataclass(slots=True)
class NewRequest:
    """One prompt. With `params.n > 1` it stands for n sequences, of keys `key` to `key + n - 1`."""

    key: int
    """Integer name of the request (of its first sequence), unique within its client."""
    request_id: str
    prompt_token_ids: Int32Array
    params: SamplingParams
    arrival_time: float
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    """Lower runs first; used by the priority policy only."""
    tenant: str = ""
    """On whose behalf; tenants share the engine fairly, however many requests each queues."""
    shares_prefixes: bool = False
    """Whether its prefix may come from the cache of other tenants that share theirs. Its reply does
    not say how much did."""
    deadline: float | None = None
    """When it ends by itself, on the engine's clock (CLOCK_MONOTONIC, the same in all processes of
    a host): with finish_reason "timeout" before its first token, else with "abort"."""
    cache_salt: str | None = None
    """Prefixes are shared only between equal ones (and within one tenant)."""
    adapter: LoRARequest | None = None
    media: tuple[MediaSpan, ...] = ()
    streams: bool = False
    """Whether tokens are sent as they come; otherwise they arrive with the end."""
    interactive: bool = False
    """Whether a client shows tokens as they come, so that the gap between two of them matters."""
    wants_progress: bool = False
    """Whether the client hears how its prompt gets on until the first token."""
    pooling: str | None = None
    """"last" or "mean": the request wants the pooled hidden states of its prompt and no text."""
    beam_width: int = 0
    """Above 0: beam search, driven by `params.max_tokens` and `length_penalty`."""
    length_penalty: float = 1.0

    def cache_scope(self, adapter_digest: str = "") -> tuple[str, str, str]:
        """Whose prefixes it may use: those of requests with the same one. An adapter counts by its
        content."""
        return (
            adapter_digest,
            self.cache_salt or "",
            "" if self.shares_prefixes else self.tenant,
        )
