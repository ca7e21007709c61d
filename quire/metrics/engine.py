"""`EngineMetrics`: what one engine counts about itself. Names follow vLLM's, under `quire:`."""

from __future__ import annotations

from dataclasses import dataclass

from quire.metrics.instruments import Counter, Gauge, Histogram, Metric
from quire.protocol.output import FinishedSequence
from quire.protocol.plan import Int32Array, StepPlan

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
STEP_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FINISH_REASONS = ("stop", "length", "abort", "timeout", "error", "repetition")


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
        self.cache_usage = Gauge("quire:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        self.peak_blocks = Gauge("quire:kv_blocks_used_peak", "Most KV blocks in use at once.")
        self.queries = Counter("quire:prefix_cache_queries", "Prompt tokens looked up.")
        self.hits = Counter("quire:prefix_cache_hits", "Prompt tokens found in the cache.")
        self.preemptions = Counter("quire:num_preemptions", "Times a request lost its blocks.")
        self.prompt_tokens = Counter("quire:prompt_tokens", "Prompt tokens received.")
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
        self.latency = Histogram(
            "quire:e2e_request_latency_seconds", "Arrival to the last token.", SECONDS
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

    def planned(
        self, plan: StepPlan, num_used: int, num_blocks: Int32Array, num_computed: Int32Array
    ) -> None:
        """A step is planned; `num_used` blocks are in use, the arrays are per row."""
        self.steps.add(1)
        self.peak_blocks.set(max(self.peak_blocks.value, num_used))
        self.step_tokens.observe(plan.num_tokens)
        self.held_blocks.add(int(num_blocks.sum()))
        self.held_tokens.add(int(num_computed.sum()))

    def admitted(self, num_prompt: int, num_cached: int) -> None:
        self.queries.add(num_prompt)
        self.hits.add(num_cached)

    def finished(self, ended: FinishedSequence) -> None:
        self.success[ended.finish_reason].add(1)
        if ended.finished_time:
            self.latency.observe(ended.finished_time - ended.arrival_time)

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
        instruments = [v for v in vars(self).values() if isinstance(v, Counter | Gauge | Histogram)]
        return [i.read() for i in (*instruments, *self.success.values())]
