"""`Monitor`: what a running engine says about itself: where the time of its steps goes, a line of
status while it is busy, and advice about settings that do not suit the load."""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields

from quire.metrics.engine import EngineMetrics
from quire.protocol.request import NewRequest
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.sequence import SchedulerLimits

logger = logging.getLogger(__name__)

PREFIX_LENGTHS = (512, 64)
"""Prompts that agree in so many leading tokens could share their KV, longest first."""
MAX_PREFIXES = 4096
MIN_REQUESTS = 20
MIN_REPEATED_SHARE = 0.2
MIN_HIT_SHARE = 0.1
MAX_WASTE = 0.1
MIN_STEPS = 50
MAX_PREEMPTION_SHARE = 0.1


class Stopwatch:
    """Adds up the time that is spent inside its `with` blocks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.perf_counter() - self._started


class Monitor:
    """Told by the engine's loop when a step begins, when its parts are done and when it ends."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self.host, self.launch, self.wait = Stopwatch(), Stopwatch(), Stopwatch()
        """What the last step took: planning it, applying results and making outputs of them, which
        may go on after the step; launching it; waiting for a result."""
        self.advisor: Advisor | None = None
        self.status: StatusLog | None = None
        self._metrics = metrics
        self._has_host_time = False

    @property
    def advice(self) -> list[str]:
        return [] if self.advisor is None else [one.message for one in self.advisor.current]

    def arrived(self, new: NewRequest) -> None:
        if self.advisor is not None:
            self.advisor.arrived(new)

    def step_begins(self) -> None:
        self.keep_host_time()
        self.host.seconds = self.launch.seconds = self.wait.seconds = 0.0

    def launched(self) -> None:
        self._metrics.step_launch.observe(self.launch.seconds)

    def waited(self) -> None:
        self._metrics.step_wait.observe(self.wait.seconds)

    def step_ends(self, now: float, has_plan: bool) -> None:
        if self.advisor is not None:
            self.advisor.look(now)
        if self.status is not None:
            self.status.look(now)
        self._has_host_time = has_plan

    def keep_host_time(self) -> None:
        """All that the host did for the last step is known."""
        if self._has_host_time:
            self._metrics.step_host.observe(self.host.seconds)
            self._has_host_time = False


@dataclass(frozen=True)
class _Counts:
    """Counters at one time, or what was added between two."""

    prompt_tokens: int
    generation_tokens: int
    queries: int
    hits: int
    admitted: int
    steps: int
    held_blocks: int
    held_tokens: int
    preemptions: int
    draft_tokens: int
    accepted_tokens: int

    @classmethod
    def of(cls, metrics: EngineMetrics, admitted: int) -> _Counts:
        names = (field.name for field in fields(cls) if field.name != "admitted")
        return cls(**{name: getattr(metrics, name).value for name in names}, admitted=admitted)

    def __sub__(self, other: _Counts) -> _Counts:
        return _Counts(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


class _Increase:
    """What was counted since the last look."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._before = self._counts()

    def take(self) -> _Counts:
        before, self._before = self._before, self._counts()
        return self._before - before

    def _counts(self) -> _Counts:
        return _Counts.of(self._scheduler.metrics, self._scheduler.num_admissions)


class StatusLog:
    """One line every few seconds while the engine is busy, and none while it is not. `look` belongs
    after every step. Work that ends sooner than `interval_s` says nothing."""

    def __init__(self, scheduler: Scheduler, interval_s: float = 10.0) -> None:
        self._scheduler = scheduler
        self._interval_s = interval_s
        self._increase = _Increase(scheduler)
        self._began = self._last_look = -math.inf

    def look(self, now: float) -> None:
        # Time without work is no part of a rate: after a pause a new interval begins.
        was_idle = now - self._last_look >= self._interval_s
        self._last_look = now
        if now - self._began < self._interval_s:
            return
        new = self._increase.take()
        if not was_idle:
            logger.info("%s", self._line(new, now - self._began))
        self._began = now

    def _line(self, new: _Counts, passed_s: float) -> str:
        load = self._scheduler.load()
        hits = f"{new.hits / new.queries:.1%}" if new.queries else "none asked for"
        drafts = ""
        if new.draft_tokens:
            drafts = f", {new.accepted_tokens / new.draft_tokens:.1%} of drafts accepted"
        return (
            f"{new.prompt_tokens / passed_s:.1f} prompt tokens/s, "
            f"{new.generation_tokens / passed_s:.1f} generated tokens/s, "
            f"{load.num_running} running, {load.num_waiting} waiting, "
            f"KV cache {load.cache_usage:.1%} used, "
            f"prefix hits {hits}, {new.preemptions} preemptions{drafts}"
        )


@dataclass(frozen=True)
class Advice:
    kind: str
    message: str


class Advisor:
    """Says when the engine is set up badly for the load it sees, and what to change. Looks at what
    happened since it looked last, every `interval_s`; says the same thing again only after
    `repeat_s`."""

    def __init__(
        self,
        scheduler: Scheduler,
        limits: SchedulerLimits,
        interval_s: float = 30.0,
        repeat_s: float = 600.0,
    ) -> None:
        self._scheduler = scheduler
        self._limits = limits
        self._interval_s = interval_s
        self._repeat_s = repeat_s
        self._prefixes: OrderedDict[tuple[int, tuple[str, ...], int], None] = OrderedDict()
        self._num_arrived = self._num_repeated = 0
        """Prompt tokens since the last look, and those that repeat an earlier prompt's prefix."""
        self._next_look: float | None = None
        self._said: dict[str, float] = {}
        self._increase = _Increase(scheduler)
        self.current: list[Advice] = []
        """What holds since the last look, said or not."""

    def arrived(self, new: NewRequest) -> None:
        """A request has come: do its first tokens repeat?"""
        found = 0
        scope = new.cache_scope("" if new.adapter is None else new.adapter.lora_path)
        for length in PREFIX_LENGTHS:
            if len(new.prompt_token_ids) <= length:
                continue
            key = (hash(new.prompt_token_ids[:length].tobytes()), scope, length)
            if key in self._prefixes:
                found = found or length
                self._prefixes.move_to_end(key)
            else:
                self._prefixes[key] = None
        self._num_arrived += len(new.prompt_token_ids)
        self._num_repeated += found
        while len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.popitem(last=False)

    def look(self, now: float) -> None:
        """Log warnings about the settings, if it is time to look."""
        if self._next_look is None or now < self._next_look:
            self._next_look = self._next_look or now + self._interval_s
            return
        self._next_look = now + self._interval_s
        self.current = list(self._judge(self._increase.take()))
        self._num_arrived = self._num_repeated = 0
        for advice in self.current:
            if now - self._said.get(advice.kind, -self._repeat_s) >= self._repeat_s:
                self._said[advice.kind] = now
                logger.warning("advice: %s", advice.message)

    def _judge(self, new: _Counts) -> Iterator[Advice]:
        limits = self._limits
        # Shares, not counts: the requests that arrived and those that were admitted differ.
        repeated = self._num_repeated / self._num_arrived if self._num_arrived else 0.0
        hits = new.hits / new.queries if new.queries else 0.0
        if (
            new.admitted >= MIN_REQUESTS
            and repeated >= MIN_REPEATED_SHARE
            and hits < MIN_HIT_SHARE * repeated
        ):
            yield Advice("prefix_hits", self._about_hits(repeated, hits))
        slots = new.held_blocks * limits.block_size
        waste = 1 - new.held_tokens / slots if slots else 0.0
        if new.steps >= MIN_STEPS and waste > MAX_WASTE:
            yield Advice("waste", self._about_waste(waste))
        if new.preemptions >= max(MAX_PREEMPTION_SHARE * new.admitted, MIN_REQUESTS / 2):
            yield Advice(
                "preemptions",
                f"{new.preemptions} times in {self._interval_s:g} s a request lost its KV blocks "
                f"and is computed again ({new.admitted} were begun). Lower max_num_seqs "
                f"({limits.max_num_seqs}), or give the KV cache more memory "
                "(gpu_memory_utilization, kv_cache_memory_bytes).",
            )
        yield from self._about_pool()

    def _about_hits(self, repeated: float, hits: float) -> str:
        seen = (
            f"at least {repeated:.0%} of all prompt tokens repeat the beginning of an earlier "
            f"prompt, but {hits:.1%} were found in the prefix cache. "
        )
        if not self._limits.enable_prefix_caching:
            return seen + "Set enable_prefix_caching=True."
        return seen + (
            "They are evicted before they are asked for again: give the KV cache more memory "
            "(gpu_memory_utilization, kv_cache_memory_bytes) or lower max_num_seqs "
            f"({self._limits.max_num_seqs})."
        )

    def _about_waste(self, waste: float) -> str:
        limits = self._limits
        seen = f"{waste:.0%} of the KV slots that requests hold are empty. "
        if limits.reserves_max_length:
            return seen + "Set reservation='paged'."
        return seen + (
            f"Sequences are short for blocks of {limits.block_size} tokens: lower block_size."
        )

    def _about_pool(self) -> Iterator[Advice]:
        """Whether requests wait for blocks while rows are free."""
        load, limits = self._scheduler.load(), self._limits
        each = load.blocks_each
        if load.waits_for_blocks and each * limits.max_num_seqs > limits.num_blocks:
            yield Advice(
                "pool",
                f"{load.num_waiting} requests wait although {load.num_free_rows} of "
                f"max_num_seqs={limits.max_num_seqs} rows are free: at {each:.0f} blocks each, "
                f"the KV cache of {limits.num_blocks} blocks holds {load.num_running} sequences. "
                "Give it more memory (gpu_memory_utilization, kv_cache_memory_bytes), or lower "
                "max_num_seqs to what fits.",
            )
