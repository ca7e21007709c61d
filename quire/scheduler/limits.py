"""`SchedulerLimits`: what the scheduler must respect."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerLimits:
    """All of it is known once the KV cache has its size."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str = "fcfs"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt per step; 0 leaves it to the budget."""
    reserves_max_length: bool = False
    """Reserve `max_model_len` tokens on admission, as engines without paging do (benchmarks)."""
    seed: int = 0
    cache_identity: tuple[str, ...] = ()
    """Model, dtype and layout: what the KV of equal tokens depends on."""

    @property
    def max_blocks_per_row(self) -> int:
        return self.blocks_for(self.max_model_len)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
