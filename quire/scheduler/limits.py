"""`SchedulerLimits`: what the scheduler must respect."""

from __future__ import annotations

from dataclasses import dataclass

from quire.protocol.errors import RequestError
from quire.protocol.kv_spec import held_blocks, most_blocks
from quire.protocol.request import NewRequest


@dataclass(frozen=True)
class SchedulerLimits:
    """All of it is known once the KV cache has its size."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    windows: tuple[int | None, ...] = (None,)
    """Of each KV group, how many tokens a query sees; None: all."""
    policy: str = "fcfs"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt per step; 0 leaves it to the budget."""
    target_itl_s: float | None = None
    """Gap between two tokens that prompts may stretch those of running streams to; None: chosen
    from step times, 0: any."""
    graph_tokens: int = 0
    """Most tokens of a step with prompts that runs as one CUDA graph; 0 without graphs."""
    reserves_max_length: bool = False
    """Reserve `max_model_len` tokens on admission, as engines without paging do (benchmarks)."""
    max_num_queued_reqs: int = 0
    """Most requests that wait and have never run; 0 for no limit."""
    max_num_queued_tokens: int = 0
    """Most prompt tokens of these; 0 for no limit."""
    groups_prefixes: bool = False
    """Tell the workers which running requests share leading blocks."""
    seed: int = 0
    cache_identity: tuple[str, ...] = ()
    """Model, dtype and layout: what the KV of equal tokens depends on."""

    @property
    def max_blocks_per_row(self) -> int:
        return self.blocks_for(self.max_model_len)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def max_held_blocks(self, group: int) -> int:
        """Most blocks of a sequence in a group."""
        window = self.windows[group]
        if window is None:
            return self.max_blocks_per_row
        return held_blocks(window, self.block_size, self.max_num_batched_tokens)

    def blocks_held(self, num_tokens: int) -> int:
        """Most blocks of a sequence of so many tokens, in all groups."""
        return most_blocks(self.windows, num_tokens, self.block_size, self.max_num_batched_tokens)

    def max_total(self, new: NewRequest) -> int:
        """Prompt and output tokens at which a request ends by length."""
        if new.params.max_tokens is None:
            return self.max_model_len
        return min(len(new.prompt_token_ids) + new.params.max_tokens, self.max_model_len)

    def check_fits(self, new: NewRequest) -> None:
        """Refuse a request that the cache or the rows could not hold even alone."""
        num_prompt, total = len(new.prompt_token_ids), self.max_total(new)
        need = self.blocks_held(total) * max(new.beam_width, 1)
        if need > self.num_blocks:
            raise RequestError(
                f"request {new.request_id!r} can never fit: {num_prompt} prompt tokens and up to "
                f"{total - num_prompt} generated ones need {need} KV blocks of {self.block_size} "
                f"tokens, but the cache has {self.num_blocks}. Lower max_tokens or beam_width, or "
                "give the cache more memory (kv_cache_memory_bytes, gpu_memory_utilization)."
            )
        if new.beam_width > self.max_num_seqs:
            raise RequestError(
                f"beam_width={new.beam_width} exceeds max_num_seqs={self.max_num_seqs}: all beams "
                "run at once. Lower beam_width or raise max_num_seqs."
            )
