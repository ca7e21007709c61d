"""`EngineMetrics`: what one engine counts about itself. Names follow vLLM's, under `quire:`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.metrics.instruments import Counter, Gauge, Histogram, Metric, RecentRate
from quire.metrics.requests import RequestHistograms
from quire.protocol.output import FinishedSequence
from quire.protocol.plan import Int32Array, StepPlan
from quire.protocol.request import NewRequest

SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
STEP_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FINISH_REASONS = ("stop", "length", "abort", "timeout", "overloaded", "error", "repetition")
MEMORY_KINDS = ("weights", "kv_used", "kv_cached", "kv_free", "other")


@dataclass(frozen=True)
class EngineStatistics:
    """A summary for people, over the life of an engine."""

    prompt_tokens: int
    generation_tokens: int
    num_steps: int
    num_preemptions: int
    num_blocks: int
    peak_blocks: int
    """Most blocks in use at once."""
    block_size: int
    waste: float
    """Share of allocated token slots that held nothing, averaged over steps."""
    hit_rate: float
    """Share of prompt tokens found in the prefix cache."""


class EngineMetrics:
    def __init__(self) -> None:
        self.running = Gauge("quire:num_requests_running", "Sequences that hold a row.")
        self.waiting = Gauge("quire:num_requests_waiting", "Sequences in the queue.")
        self.waiting_by_reason = {
            reason: Gauge(
                "quire:num_requests_waiting_by_reason",
                "Sequences in the queue.",
                {"reason": reason},
            )
            for reason in ("capacity", "deferred")
        }
        self.cache_usage = Gauge("quire:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        self.peak_blocks = Gauge("quire:kv_blocks_used_peak", "Most KV blocks in use at once.")
        self.shared_blocks = Gauge("quire:kv_blocks_shared", "KV blocks with several owners.")
        self.cached_blocks = Gauge("quire:kv_blocks_cached", "Free KV blocks that can be found.")
        self.waste = Gauge(
            "quire:kv_cache_waste_perc", "Share of the slots held by rows that are empty, 0 to 1."
        )
        self.memory = {
            kind: Gauge("quire:device_memory_bytes", "Memory of the device.", {"kind": kind})
            for kind in MEMORY_KINDS
        }
        self.queries = Counter("quire:prefix_cache_queries", "Prompt tokens looked up.")
        self.hits = Counter("quire:prefix_cache_hits", "Prompt tokens found in the cache.")
        self.preemptions = Counter("quire:num_preemptions", "Times a request lost its blocks.")
        self.prompt_tokens = Counter("quire:prompt_tokens", "Prompt tokens received.")
        self.by_source = {
            source: Counter(
                "quire:prompt_tokens_by_source", "Prompt tokens begun.", {"source": source}
            )
            for source in ("local_compute", "local_cache_hit")
        }
        self.prompt_tokens_cached = Counter(
            "quire:prompt_tokens_cached", "Prompt tokens that were not computed."
        )
        self.generation_tokens = Counter("quire:generation_tokens", "Tokens generated.")
        self.steps = Counter("quire:num_steps", "Steps planned.")
        self.held_blocks = Counter(
            "quire:kv_blocks_allocated", "Blocks held by rows, summed over steps."
        )
        self.held_tokens = Counter(
            "quire:kv_tokens_held", "Tokens held in them, summed over steps."
        )
        self.success = {
            reason: Counter(
                "quire:request_success", "Sequences ended.", {"finished_reason": reason}
            )
            for reason in FINISH_REASONS
        }
        self.time_to_first_token = Histogram(
            "quire:time_to_first_token_seconds", "Arrival to first token.", SECONDS
        )
        self.inter_token = Histogram(
            "quire:inter_token_latency_seconds", "One token of a sequence to the next.", SECONDS
        )
        self.step_tokens = Histogram("quire:iteration_tokens_total", "Tokens per step.", TOKENS)
        self.step_host = Histogram(
            "quire:step_host_seconds",
            "Scheduling, taking in results and making outputs, per step.",
            STEP_SECONDS,
        )
        self.step_launch = Histogram(
            "quire:step_launch_seconds",
            "Launching a step; on a CPU this is the step itself.",
            STEP_SECONDS,
        )
        self.step_wait = Histogram(
            "quire:step_wait_seconds", "Waiting for the results of a step.", STEP_SECONDS
        )
        self.requests = RequestHistograms()
        self.recent_prompt_tokens = RecentRate()
        self._num_queries_seen = 0
        self.recent_generation_tokens = RecentRate()

    def planned(
        self,
        plan: StepPlan,
        num_used: int,
        num_blocks: Int32Array,
        num_computed: Int32Array,
        now: float,
    ) -> None:
        """A step is planned; `num_used` blocks are in use, the arrays are per row."""
        self.steps.add(1)
        if plan.added_rows:
            self.recent_prompt_tokens.add(now, self.queries.value - self._num_queries_seen)
            self._num_queries_seen = self.queries.value
        self.peak_blocks.set(max(self.peak_blocks.value, num_used))
        self.step_tokens.observe(plan.num_tokens)
        self.held_blocks.add(int(num_blocks.sum()))
        self.held_tokens.add(int(num_computed.sum()))

    def admitted(self, num_prompt: int, num_cached: int) -> None:
        self.queries.add(num_prompt)
        self.hits.add(num_cached)

    def generated(self, num_tokens: int, gaps: NDArray[np.float64], now: float) -> None:
        """A step's tokens; `gaps` are the times since their sequences' tokens before them."""
        self.generation_tokens.add(num_tokens)
        self.recent_generation_tokens.add(now, num_tokens)
        self.inter_token.observe_many(gaps)

    def finished(self, ended: FinishedSequence, new: NewRequest, is_last: bool) -> None:
        """A sequence ended, and with it its request if it `is_last`."""
        self.success[ended.finish_reason].add(1)
        self.requests.ended(ended, new, is_last)

    def statistics(self, num_blocks: int, block_size: int) -> EngineStatistics:
        slots = self.held_blocks.value * block_size
        queries = self.queries.value
        return EngineStatistics(
            prompt_tokens=self.prompt_tokens.value,
            generation_tokens=self.generation_tokens.value,
            num_steps=self.steps.value,
            num_preemptions=self.preemptions.value,
            num_blocks=num_blocks,
            peak_blocks=int(self.peak_blocks.value),
            block_size=block_size,
            waste=1.0 - self.held_tokens.value / slots if slots else 0.0,
            hit_rate=self.hits.value / queries if queries else 0.0,
        )

    def read(self) -> list[Metric]:
        self.requests.flush()
        hits = self.prompt_tokens_cached.value = self.hits.value
        self.by_source["local_cache_hit"].value = hits
        self.by_source["local_compute"].value = self.queries.value - hits
        found: list[Metric] = []
        for value in (*vars(self).values(), *vars(self.requests).values()):
            several = value.values() if isinstance(value, dict) else (value,)
            found += [i.read() for i in several if isinstance(i, Counter | Gauge | Histogram)]
        return found
