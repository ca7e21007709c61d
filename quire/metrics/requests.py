"""`RequestHistograms`: what became of requests, taken in when they end and sorted in bulk."""

from __future__ import annotations

import numpy as np

from quire.metrics.instruments import Histogram
from quire.protocol.output import FinishedSequence
from quire.protocol.request import NewRequest

SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0),
    *(7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0),
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
MOST_PENDING = 512 * 7


class RequestHistograms:
    def __init__(self) -> None:
        def seconds(name: str, help: str) -> Histogram:
            return Histogram(f"quire:{name}_seconds", help, SECONDS)

        def tokens(name: str, help: str) -> Histogram:
            return Histogram(f"quire:{name}", help, TOKENS)

        self.latency = seconds("e2e_request_latency", "Arrival to the end.")
        self.queue = seconds("request_queue_time", "Arrival to the first step.")
        self.inference = seconds("request_inference_time", "First step to the end.")
        self.prefill = seconds("request_prefill_time", "First step to the first token.")
        self.decode = seconds("request_decode_time", "First token to the end.")
        self.per_token = seconds(
            "request_time_per_output_token", "Decode time over the tokens after the first."
        )
        self.prompt_tokens = tokens("request_prompt_tokens", "Prompt tokens per sequence.")
        self.generation_tokens = tokens("request_generation_tokens", "Tokens out per sequence.")
        self.prefill_tokens = tokens(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were not in the cache."
        )
        self.longest = tokens(
            "request_max_num_generation_tokens", "Tokens out of a request's longest sequence."
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
        """A sequence has ended, and with it its request if it `is_last`."""
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
