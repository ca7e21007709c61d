"""`PrefillBudget`: prompt tokens that a step may compute while clients read tokens as they come."""

from __future__ import annotations

from collections import deque

AUTOMATIC_TARGET_S = 0.036
"""Gap between two tokens that is aimed at by default; clients see a few milliseconds more."""
AUTOMATIC_RATIO = 2.0
"""Where decode steps are slow, steps with prompts may take this many times as long by default."""
MIN_SHARE = 0.25
"""Prompts get at least this share of a decode step's time, whatever the target: none starves."""
MIN_TOKENS = 16
UNMEASURED_TOKENS = 256
"""Allowed before the first step is measured."""
MAX_GROWTH = 2.0
"""A line fitted to small chunks says little about ones more than this many times as large."""
MAX_SURPRISE = 4.0
"""A step that takes more times as long as expected is counted as this: compilation, a busy host."""
FORGETTING = 0.9
"""Weight of a step when the next one is measured."""
MIN_GRAPH_SHARE = 0.5
"""Steps are kept small enough for a CUDA graph where that leaves this share of the tokens that
would fit: launched one by one, kernels leave gaps, and steps differ in length."""


class PrefillBudget:
    """Keeps the gap between two tokens of a stream near a target.

    A line through recent steps, time = base + slope * prompt tokens, says how many prompt tokens
    fit. The base is what the step takes for the decoding rows alone. While all steps are of one
    size the slope stays what it was, and the line moves up and down as a whole.
    """

    def __init__(self, target_s: float | None, graph_tokens: int = 0, num_stages: int = 1) -> None:
        """No target stands for the automatic one. Steps of up to `graph_tokens` run as graphs. In a
        pipeline of several stages as many steps end between two tokens of a stream."""
        self._target_s = None if target_s is None else target_s / num_stages
        self._automatic_target_s = AUTOMATIC_TARGET_S / num_stages
        self._graph_tokens = graph_tokens
        self._planned: deque[tuple[int, float, int]] = deque()
        self._last_applied = float("-inf")
        self._slope = 0.0
        self._base = 0.0
        self._largest = 0.0
        """The most prompt tokens of a recent step."""
        # Weighted sums over steps: 1, tokens, tokens squared, seconds, tokens x seconds.
        self._weight = self._p = self._pp = self._t = self._pt = 0.0

    def planned(self, step: int, now: float, num_prompt_tokens: int) -> None:
        """A step is about to be launched."""
        self._planned.append((step, now, num_prompt_tokens))

    def applied(self, step: int, now: float) -> None:
        """A step's result is there; steps that failed before it never had one."""
        while self._planned and self._planned[0][0] < step:
            self._planned.popleft()
        if self._planned and self._planned[0][0] == step:
            _, planned_at, num_tokens = self._planned.popleft()
            # A step launched ahead begins when the one before it ends.
            self._measure(num_tokens, max(now - max(planned_at, self._last_applied), 0.0))
        self._last_applied = now

    def _measure(self, tokens: float, seconds: float) -> None:
        if self._weight:
            seconds = min(seconds, MAX_SURPRISE * (self._base + self._slope * tokens) + 1e-3)
        self._largest = max(tokens, 0.995 * self._largest)
        self._weight = FORGETTING * self._weight + 1
        self._p = FORGETTING * self._p + tokens
        self._pp = FORGETTING * self._pp + tokens * tokens
        self._t = FORGETTING * self._t + seconds
        self._pt = FORGETTING * self._pt + tokens * seconds
        p, t = self._p / self._weight, self._t / self._weight
        variance = self._pp / self._weight - p * p
        covariance = self._pt / self._weight - p * t
        doubt = (0.25 * p + 8) ** 2  # pulls towards the slope known so far
        slope = (covariance + doubt * self._slope) / (variance + doubt)
        self._slope = min(max(slope, 0.0), t / p if p else slope)
        self._base = max(t - self._slope * p, 0.0)

    def tokens(self, num_decoding: int) -> int:
        """Prompt tokens for a step in which `num_decoding` rows compute one token each."""
        if not self._weight:
            return UNMEASURED_TOKENS
        target = self._target_s
        if target is None:
            target = max(self._automatic_target_s, AUTOMATIC_RATIO * self._base)
        seconds = max(target - self._base, MIN_SHARE * self._base)
        most = max(MAX_GROWTH * self._largest, MIN_TOKENS)
        tokens = int(min(seconds / self._slope if self._slope else most, most))
        in_graph = self._graph_tokens - num_decoding
        if MIN_GRAPH_SHARE * tokens <= in_graph:
            tokens = min(tokens, in_graph)
        return max(tokens, MIN_TOKENS)
