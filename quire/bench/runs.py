"""Starts engines one at a time and measures what they do with a list of requests."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.bench.flags import Lengths
from quire.bench.steps import StepLog
from quire.bench.workload import BenchRequest, Dice
from quire.config.cli import Arguments, engine_arguments, engine_options
from quire.config.model import read_model
from quire.protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from quire import LLM

WARM_UP_REQUESTS = 4
WARM_UP_LENGTHS = Lengths(16, 16)
SECRET = frozenset({"hf_token"})


@dataclass(frozen=True)
class Run:
    """One pass of an engine over a list of requests, all of them there from the start."""

    seconds: float
    cpu_s: float
    """CPU time of the process, which other programs on the machine hardly change; with several
    threads it counts their waiting for each other too."""
    num_input_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    first_token_s: list[float]
    """Per request, from arrival to the first token."""
    per_token_s: list[float]
    """Per request with two or more tokens, between one token and the next on average."""
    num_allocated_blocks: int
    num_preemptions: int
    tokens: list[list[int]]
    """What was generated."""
    log: StepLog

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.seconds

    @property
    def hit_rate(self) -> float:
        return self.num_cached_tokens / self.num_input_tokens


class Engines:
    """The engines of one benchmark: the options of the command line, with some set for each."""

    def __init__(self, arguments: Arguments) -> None:
        self.wanted = engine_options(arguments)
        """As the command line has them, before an engine fills them in."""
        self.last: dict[str, Any] = {}
        """Those of the last engine, filled in, but for the ones set for it alone."""
        self.model = read_model(self.wanted.model)
        self._given = engine_arguments(arguments)

    def described(self) -> dict[str, Any]:
        return {"model": self.model.source.name, "engine_options": self.last}

    def dice(self, distribution: str = "log-uniform") -> Dice:
        return Dice(self.wanted.model.seed, self.model.vocab_size, distribution)

    @contextlib.contextmanager
    def start(self, **options: Any) -> Iterator[LLM]:
        """An engine that has warmed up. Only the first start shows its messages."""
        from quire import LLM

        with _quiet(bool(self.last)):
            llm = LLM(**{**self._given, **options})
        flat = llm.options.flat()
        self.last = {name: flat[name] for name in flat.keys() - options.keys() - SECRET}
        with llm:
            dice = Dice(self.wanted.model.seed + 1, self.model.vocab_size)
            generate(llm, dice.requests(WARM_UP_REQUESTS, WARM_UP_LENGTHS, Lengths(4, 4)))
            llm.reset_prefix_cache()
            yield llm


def measure(llm: LLM, requests: Sequence[BenchRequest]) -> Run:
    """Run the requests to their end, sampling the scheduler at every step."""
    core = llm._core
    pool, metrics = core.scheduler.kv.pool, core.metrics
    log = StepLog(core.scheduler)
    allocated, preemptions = pool.num_allocated_total, metrics.preemptions.value
    core.on_plan = log
    started, cpu_started = time.perf_counter(), time.process_time()
    outputs = generate(llm, requests)
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    core.on_plan = None
    tokens = [output.outputs[0].token_ids for output in outputs]
    times = [output.metrics for output in outputs if output.metrics is not None]
    return Run(
        seconds=seconds,
        cpu_s=cpu_s,
        num_input_tokens=sum(len(request.token_ids) for request in requests),
        num_output_tokens=sum(map(len, tokens)),
        num_cached_tokens=sum(output.num_cached_tokens or 0 for output in outputs),
        first_token_s=[one.time_to_first_token for one in times],
        per_token_s=[
            (one.finished_time - one.first_token_time) / (len(ids) - 1)
            for one, ids in zip(times, tokens, strict=True)
            if len(ids) > 1
        ],
        num_allocated_blocks=pool.num_allocated_total - allocated,
        num_preemptions=metrics.preemptions.value - preemptions,
        tokens=tokens,
        log=log,
    )


def say(text: str) -> None:
    """Tell the user what is being measured; results go to standard output, this does not."""
    print(f"quire bench: {text}", file=sys.stderr, flush=True)


def generate(llm: LLM, requests: Sequence[BenchRequest]) -> list[Any]:
    """Outputs of greedy requests that generate exactly as many tokens as planned."""
    return llm.generate(*inputs(requests), use_tqdm=False)


def inputs(requests: Sequence[BenchRequest]) -> tuple[list[Any], list[SamplingParams]]:
    """Prompts and parameters for `LLM.generate`."""
    prompts = [{"prompt_token_ids": request.token_ids} for request in requests]
    lengths = [request.num_output_tokens for request in requests]
    return prompts, [
        SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=length) for length in lengths
    ]


@contextlib.contextmanager
def _quiet(wanted: bool) -> Iterator[None]:
    """No messages but warnings, if wanted."""
    logger = logging.getLogger("quire")
    if not wanted:
        yield
        return
    level = logger.level
    logger.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        logger.setLevel(level)
