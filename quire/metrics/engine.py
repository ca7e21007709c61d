"""`EngineMetrics`: what one engine counts about itself. Names follow vLLM's, under `quire:`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.config.speculative import MAX_TOKENS
from quire.metrics.instruments import Counter, Gauge, Histogram, Metric, RecentRate
from quire.protocol.expert_counts import ExpertCounts
from quire.protocol.output import FinishedSequence
from quire.protocol.plan import BoolArray, Int32Array, StepPlan, StepResult
from quire.protocol.request import NewRequest

SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
STEP_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
REQUEST_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0),
    *(7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0),
)
REQUEST_TOKENS = (
    1,
    2,
    5,
    10,
    20,
    50,
    100,
    200,
    500,
    1_000,
    2_000,
    5_000,
    10_000,
    20_000,
    50_000,
    100_000,
)
MOST_PENDING = 512 * 7
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
    experts_per_step: float | None
    """Experts of a layer that a step used, averaged over steps and layers; None: it has none."""


T = TypeVar("T", Counter, Gauge)


def labelled(kind: type[T], name: str, help: str, /, **label: tuple[str, ...]) -> dict[str, T]:
    """One instrument for each value of a label."""
    ((key, values),) = label.items()
    return {value: kind(name, help, {key: value}) for value in values}


class EngineMetrics:
    def __init__(self) -> None:
        self.running = Gauge("quire:num_requests_running", "Sequences that are running.")
        self.waiting = Gauge("quire:num_requests_waiting", "Sequences in the queue.")
        self.waiting_by_reason = labelled(
            Gauge,
            "quire:num_requests_waiting_by_reason",
            "Sequences in the queue: for want of capacity, or deferred until they are ready.",
            reason=("capacity", "deferred"),
        )
        self.cache_usage = Gauge("quire:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        self.peak_blocks = Gauge("quire:kv_blocks_used_peak", "Most KV blocks in use at once.")
        self.shared_blocks = Gauge(
            "quire:kv_blocks_shared", "KV blocks shared by several sequences."
        )
        self.cached_blocks = Gauge(
            "quire:kv_blocks_cached", "Free KV blocks that are in the prefix cache."
        )
        self.waste = Gauge(
            "quire:kv_cache_waste_perc", "Share of allocated KV slots without a token, 0 to 1."
        )
        self.memory = labelled(
            Gauge, "quire:device_memory_bytes", "Memory of the device.", kind=MEMORY_KINDS
        )
        self.experts = ExpertGauges()
        self.queries = Counter(
            "quire:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self.hits = Counter("quire:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.preemptions = Counter(
            "quire:num_preemptions", "Preemptions of sequences, which are recomputed later."
        )
        self.prompt_tokens = Counter("quire:prompt_tokens", "Prompt tokens received.")
        self.by_source = labelled(
            Counter,
            "quire:prompt_tokens_by_source",
            "Prompt tokens of admitted sequences.",
            source=("local_compute", "local_cache_hit"),
        )
        self.prompt_tokens_cached = Counter(
            "quire:prompt_tokens_cached", "Prompt tokens taken from the prefix cache."
        )
        self.generation_tokens = Counter("quire:generation_tokens", "Tokens generated.")
        self.steps = Counter("quire:num_steps", "Steps scheduled.")
        self.held_blocks = Counter(
            "quire:kv_blocks_allocated", "KV blocks of running sequences, summed over steps."
        )
        self.held_tokens = Counter(
            "quire:kv_tokens_held", "Tokens in these KV blocks, summed over steps."
        )
        self.success = labelled(
            Counter, "quire:request_success", "Sequences finished.", finished_reason=FINISH_REASONS
        )
        self.time_to_first_token = Histogram(
            "quire:time_to_first_token_seconds", "Arrival to first token.", SECONDS
        )
        self.inter_token = Histogram(
            "quire:inter_token_latency_seconds", "One token of a sequence to the next.", SECONDS
        )
        self.step_tokens = Histogram("quire:iteration_tokens_total", "Tokens per step.", TOKENS)
        self.step_host = Histogram(
            "quire:step_host_seconds",
            "Scheduling, applying results and making outputs, per step.",
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
        self.drafts = Counter("quire:spec_decode_num_drafts", "Verifications of drafts, by row.")
        self.draft_tokens = Counter(
            "quire:spec_decode_num_draft_tokens", "Tokens that were drafted and verified."
        )
        self.accepted_tokens = Counter(
            "quire:spec_decode_num_accepted_tokens", "Drafts that were accepted."
        )
        self.accepted_by_position = labelled(
            Counter,
            "quire:spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were accepted, by their place among the drafts of a row.",
            position=tuple(map(str, range(MAX_TOKENS))),
        )
        self.adapters = AdapterMetrics()
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

    def verified(self, num_drafts: Int32Array, result: StepResult, live: BoolArray) -> None:
        """A step has verified so many drafts of each row that samples; `live` are the rows whose
        sequences still hold them."""
        drafted = live & (num_drafts > 0)
        accepted = result.counts[drafted] - 1
        self.drafts.add(int(drafted.sum()))
        self.draft_tokens.add(int(num_drafts[drafted].sum()))
        self.accepted_tokens.add(int(accepted.sum()))
        for position, count in enumerate(np.bincount(accepted)[:0:-1].cumsum()[::-1].tolist()):
            self.accepted_by_position[str(position)].add(count)

    def generated(self, num_tokens: int, gaps: NDArray[np.float64], now: float) -> None:
        """A step's tokens; `gaps` are the times since their sequences' tokens before them."""
        self.generation_tokens.add(num_tokens)
        self.recent_generation_tokens.add(now, num_tokens)
        self.inter_token.observe_many(gaps)

    def finished(self, ended: FinishedSequence, new: NewRequest, is_last: bool) -> None:
        """A sequence has finished, and with it its request if it `is_last`."""
        self.success[ended.finish_reason].add(1)
        self.requests.ended(ended, new, is_last)

    def statistics(
        self, num_blocks: int, block_size: int, experts: ExpertCounts
    ) -> EngineStatistics:
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
            experts_per_step=experts.mean_used,
        )

    def read(self) -> list[Metric]:
        self.requests.flush()
        hits = self.prompt_tokens_cached.value = self.hits.value
        self.by_source["local_cache_hit"].value = hits
        self.by_source["local_compute"].value = self.queries.value - hits
        found: list[Metric] = []
        groups = (self, self.experts, self.adapters, self.requests)
        for value in [value for group in groups for value in vars(group).values()]:
            several = list(value.values()) if isinstance(value, dict) else [value]
            several = value if isinstance(value, list) else several
            found += [i.read() for i in several if isinstance(i, Counter | Gauge | Histogram)]
        return found


class ExpertGauges:
    """Layers with experts, since the start. Counts of single experts would be thousands of series:
    the whole table is `/dashboard/experts`."""

    def __init__(self) -> None:
        self.used: dict[str, Gauge] = {}
        self.used_per_step: dict[str, Gauge] = {}
        self.busiest_share: dict[str, Gauge] = {}

    def set(self, counts: ExpertCounts) -> None:
        if len(self.used) != len(counts.layers):
            self._make(tuple(map(str, counts.layers)))
        for gauges, values in (
            (self.used, (counts.tokens > 0).sum(1)),
            (self.used_per_step, counts.used_per_step),
            (self.busiest_share, counts.busiest_share),
        ):
            for gauge, value in zip(gauges.values(), values.tolist(), strict=True):
                gauge.set(value)

    def _make(self, layers: tuple[str, ...]) -> None:
        def gauges(name: str, help: str) -> dict[str, Gauge]:
            return labelled(Gauge, f"quire:{name}", help, layer=layers)

        self.used = gauges("experts_used", "Experts of a layer that got a token.")
        self.used_per_step = gauges(
            "experts_used_per_step", "Experts of a layer that a step used, averaged over steps."
        )
        self.busiest_share = gauges(
            "expert_busiest_share",
            "Share of a layer's choices of an expert that fell on the busiest one, 0 to 1.",
        )


class AdapterMetrics:
    """Adapters (LoRA): where they were when they were needed."""

    def __init__(self) -> None:
        self.device_queries = Counter(
            "quire:adapter_device_queries", "Sequences with an adapter that got a row."
        )
        self.device_hits = Counter(
            "quire:adapter_device_hits", "Those whose adapter was on the devices already."
        )
        self.host_queries = Counter(
            "quire:adapter_host_queries", "Requests with an adapter that arrived."
        )
        self.host_hits = Counter(
            "quire:adapter_host_hits", "Those whose adapter was in the hosts' memory already."
        )
        self.host_evictions = Counter(
            "quire:adapter_host_evictions", "Adapters that left the hosts' memory."
        )
        self.load_time = Histogram(
            "quire:adapter_load_seconds", "From disk to the memory of all hosts.", SECONDS
        )
        self.hosted = Gauge("quire:adapters_hosted", "Adapters in the memory of the hosts.")
        self.resident = Gauge("quire:adapters_resident", "Adapters on the devices.")
        self.pool_usage = Gauge(
            "quire:adapter_pool_usage_perc", "Share of the devices' memory for adapters in use."
        )
        self.info: list[Gauge] = []
        """`lora_requests_info`, where adapters are served."""

    def acquired(self, was_there: bool) -> None:
        """A sequence with an adapter got a row."""
        self.device_queries.add(1)
        self.device_hits.add(was_there)

    def set_names(self, running: list[str], waiting: list[str], most: int, now: float) -> None:
        """As vLLM has them: names are labels, and the value is the time."""
        labels = {
            "running_lora_adapters": ",".join(running),
            "waiting_lora_adapters": ",".join(waiting),
            "max_lora": str(most),
        }
        self.info = [Gauge("quire:lora_requests_info", "Adapters of requests.", labels)]
        self.info[0].set(now)


class RequestHistograms:
    """What became of requests, taken in when they end and sorted in bulk."""

    def __init__(self) -> None:
        def seconds(name: str, help: str) -> Histogram:
            return Histogram(f"quire:{name}_seconds", help, REQUEST_SECONDS)

        def tokens(name: str, help: str) -> Histogram:
            return Histogram(f"quire:{name}", help, REQUEST_TOKENS)

        self.latency = seconds("e2e_request_latency", "Arrival to the last token.")
        self.queue = seconds("request_queue_time", "Arrival to the first step.")
        self.inference = seconds("request_inference_time", "First step to the last token.")
        self.prefill = seconds("request_prefill_time", "First step to the first token.")
        self.decode = seconds("request_decode_time", "First token to the last token.")
        self.per_token = seconds(
            "request_time_per_output_token", "Decode time over the tokens after the first."
        )
        self.prompt_tokens = tokens("request_prompt_tokens", "Prompt tokens per sequence.")
        self.generation_tokens = tokens(
            "request_generation_tokens", "Generated tokens per sequence."
        )
        self.prefill_tokens = tokens(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were computed."
        )
        self.longest = tokens(
            "request_max_num_generation_tokens", "Generated tokens of a request's longest sequence."
        )
        self.params_n = Histogram(
            "quire:request_params_n", "Sequences asked for.", (1, 2, 5, 10, 20)
        )
        self.params_max_tokens = tokens("request_params_max_tokens", "max_tokens asked for.")
        self._sequences: list[float] = []
        """Seven numbers for each, and three for each request; a time of 0 was not."""
        self._requests: list[float] = []
        self._longest: dict[str, int] = {}
        """Of requests that have sequences left."""

    def ended(self, sequence: FinishedSequence, new: NewRequest, is_last: bool) -> None:
        """A sequence has finished, and with it its request if it `is_last`."""
        params = new.params
        longest = num_out = len(sequence.token_ids)
        self._sequences += (
            sequence.arrival_time,
            sequence.first_scheduled_time,
            sequence.first_token_time,
            sequence.finished_time,
            len(new.prompt_token_ids),
            num_out,
            sequence.num_cached_tokens,
        )
        if params.n > 1:
            longest = max(num_out, self._longest.pop(new.request_id, 0))
            if not is_last:
                self._longest[new.request_id] = longest
        if is_last:
            self._requests += (longest, params.n, params.max_tokens or 0)
        if len(self._sequences) >= MOST_PENDING:
            self.flush()

    def flush(self) -> None:
        """Sort what has come since the last time into the histograms."""
        if self._sequences:
            self._sort_sequences()
        if self._requests:
            longest, n, max_tokens = np.array(self._requests, np.float64).reshape(-1, 3).T
            self.longest.observe_many(longest)
            self.params_n.observe_many(n)
            self.params_max_tokens.observe_many(max_tokens[max_tokens > 0])
        self._sequences, self._requests = [], []

    def _sort_sequences(self) -> None:
        columns = np.array(self._sequences, np.float64).reshape(-1, 7).T
        arrival, scheduled, first, end, num_prompt, num_out, num_cached = columns
        for times in (scheduled, first, end):
            times[times == 0] = np.nan
        for histogram, values in (
            (self.latency, end - arrival),
            (self.queue, scheduled - arrival),
            (self.inference, end - scheduled),
            (self.prefill, first - scheduled),
            (self.decode, end - first),
            (self.per_token, (end - first) / np.where(num_out > 1, num_out - 1, np.nan)),
            (self.prompt_tokens, num_prompt),
            (self.generation_tokens, num_out),
            (self.prefill_tokens, np.where(np.isnan(scheduled), np.nan, num_prompt - num_cached)),
        ):
            # A sequence that never ran, or had no token, has no such time.
            histogram.observe_many(values[~np.isnan(values)])
