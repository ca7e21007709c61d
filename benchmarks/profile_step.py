"""Where a decode step spends its time: the GPU by kind of kernel, the host by phase and function.

    python benchmarks/profile_step.py --model llama-8b
    python benchmarks/profile_step.py --model qwen3-0.6b --batches 1 256 --json profile.json

The floor is what the bytes of weights and cached tokens take at the read bandwidth measured in the
same run, or the arithmetic of the linear layers at the measured speed of a large matrix product.
"""

from __future__ import annotations

import argparse
import cProfile
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from harness import (
    QUANTIZED_SHAPES,
    SHAPES,
    SPARSE_SHAPES,
    Shape,
    require_gpu,
    say,
    start_engine,
    write_json,
)
from quire import SamplingParams
from step_report import Floor, functions_table, gpu_by_kind, gpu_table, host_table, other_kernels

if TYPE_CHECKING:
    from ceilings import Ceilings
    from quire import LLM
    from quire.protocol.plan import StepPlan

PROMPT_TOKENS = 448
"""Those who start first are about 60 tokens ahead when the last of 1,024 prompts is computed."""
MAX_OUTPUT_TOKENS = 200
WARM_UP_STEPS, TIMED_STEPS, PROFILED_STEPS = 5, 20, 5
NUM_FUNCTIONS = 12


class Batch:
    """Requests of an engine that all decode."""

    def __init__(self, llm: LLM, size: int) -> None:
        dice = random.Random(0)
        self.llm, self.size = llm, size
        self._last_plan: StepPlan | None = None
        prompts = [
            {"prompt_token_ids": [dice.randint(1000, 40000) for _ in range(PROMPT_TOKENS)]}
            for _ in range(size)
        ]
        params = SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=MAX_OUTPUT_TOKENS, detokenize=False
        )
        llm.reset_prefix_cache()
        llm.enqueue(prompts, params)
        llm._core.on_plan = self._note
        while not self._all_decode():
            llm._loop.step()
        self.run(WARM_UP_STEPS)

    def _note(self, plan: StepPlan) -> None:
        self._last_plan = plan

    def _all_decode(self) -> bool:
        plan = self._last_plan
        return plan is not None and plan.num_tokens == len(plan.rows) == self.size

    def run(self, steps: int) -> float:
        """Seconds per step."""
        import torch

        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            self.llm._loop.step()
            assert self._all_decode(), "a request ended: raise MAX_OUTPUT_TOKENS"
        torch.cuda.synchronize()
        return (time.perf_counter() - started) / steps

    def cached_tokens(self) -> float:
        """Tokens that a step attends to, all requests together, on average since the last call."""
        metrics = self.llm._core.metrics
        steps, held = metrics.steps.value, metrics.held_tokens.value
        self.run(1)
        return (metrics.held_tokens.value - held) / (metrics.steps.value - steps)

    def timed(self, steps: int) -> tuple[float, float | None]:
        """Seconds per step, and the distinct experts that a layer used in one; None: it has
        none."""
        before = self.llm._core.expert_counts()
        seconds = self.run(steps)
        return seconds, self.llm._core.expert_counts().since(before).mean_used

    def finish(self) -> None:
        self.llm._core.on_plan = None
        for request in self.llm._enqueued:
            self.llm._core.abort(request.engine_id)
        self.llm.wait_for_completion(use_tqdm=False)


def gpu_time(batch: Batch) -> dict[str, dict[str, float]]:
    """Microseconds and launches per step of each kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        batch.run(PROFILED_STEPS)
    return {
        event.key: {
            "us": event.self_device_time_total / PROFILED_STEPS,
            "launches": event.count / PROFILED_STEPS,
        }
        for event in profiler.key_averages()
        if event.self_device_time_total
    }


def host_phases(batch: Batch) -> dict[str, float]:
    """Microseconds per step of the engine's phases; the wait for the device is one of them."""
    from quire.worker.model_runner import PendingStep

    core = batch.llm._core
    phases: dict[str, tuple[object, str]] = {
        "schedule": (core.scheduler, "schedule"),
        "launch the forward pass": (core.executor, "execute"),
        "launch sampling": (core.executor, "sample"),
        "wait for the device": (PendingStep, "result"),
        "apply": (core.scheduler, "apply"),
        "outputs": (batch.llm._loop, "take_in"),
    }
    seconds = dict.fromkeys(phases, 0.0)
    with timed(phases, seconds):
        total = batch.run(TIMED_STEPS)
    per_step = {name: 1e6 * value / TIMED_STEPS for name, value in seconds.items()}
    return {**per_step, "between them": 1e6 * total - sum(per_step.values())}


@contextmanager
def timed(phases: dict[str, tuple[object, str]], seconds: dict[str, float]) -> Iterator[None]:
    """Adds to `seconds` what the named methods take."""

    def wrapped(phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                seconds[phase] += time.perf_counter() - started

        return call

    originals = {phase: getattr(owner, name) for phase, (owner, name) in phases.items()}
    for phase, (owner, name) in phases.items():
        setattr(owner, name, wrapped(phase, originals[phase]))
    try:
        yield
    finally:
        for phase, (owner, name) in phases.items():
            if isinstance(owner, type):
                setattr(owner, name, originals[phase])
            else:
                delattr(owner, name)


def host_functions(batch: Batch) -> dict[str, float]:
    """Own microseconds per step of the functions that take most, under Python's profiler, which
    slows them down. Waiting for the device shows as `synchronize`."""
    profiler = cProfile.Profile()
    profiler.runcall(batch.run, TIMED_STEPS)
    profiler.create_stats()
    own = {
        _readable(*function): 1e6 * numbers[2] / TIMED_STEPS
        for function, numbers in profiler.stats.items()
    }
    return dict(sorted(own.items(), key=lambda item: -item[1])[:NUM_FUNCTIONS])


def _readable(file: str, line: int, function: str) -> str:
    if line:
        return f"{file.rpartition('/')[2]}:{line} {function}"
    return re.sub(" at 0x.*", "", function.strip("<>"))  # built in: no file, but an address


def profile_batch(llm: LLM, shape: Shape, size: int, ceilings: Ceilings) -> dict[str, Any]:
    batch = Batch(llm, size)
    tokens = batch.cached_tokens()
    seconds, experts = batch.timed(TIMED_STEPS)
    step_us = 1e6 * seconds
    kernels = gpu_time(batch)
    figures = {
        "batch": size,
        "context": tokens / size,
        "step_us": step_us,
        "experts_used": experts,
        "floor": vars(Floor.of(shape, size, tokens, ceilings, experts)),
        "launches": sum(one["launches"] for one in kernels.values()),
        "gpu_us": gpu_by_kind(kernels, step_us),
        "kernels": kernels,
        "host_us": host_phases(batch),
        "host_functions_us": host_functions(batch),
    }
    batch.finish()
    return figures


def decode_figures(llm: LLM, shape: Shape, size: int, ceilings: Ceilings) -> dict[str, Any]:
    """The time of a decode step, what it reads, and its floor."""
    batch = Batch(llm, size)
    tokens = batch.cached_tokens()
    seconds, experts = batch.timed(TIMED_STEPS)
    batch.finish()
    floor = Floor.of(shape, size, tokens, ceilings, experts)
    return {
        "batch": size,
        "context": tokens / size,
        "step_us": 1e6 * seconds,
        "experts_used": experts,
        "floor": vars(floor),
        "ratio": 1e6 * seconds / floor.total_us,
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shapes = SHAPES | QUANTIZED_SHAPES | SPARSE_SHAPES
    parser.add_argument("--model", choices=shapes, default="llama-8b")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 256, 1024])
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    arguments = parser.parse_args(words)
    require_gpu()
    from ceilings import measure_ceilings  # needs triton

    shape, ceilings = shapes[arguments.model], measure_ceilings()
    say(f"Ceilings: {ceilings.describe()}")
    with start_engine(arguments.model) as llm:
        steps = [profile_batch(llm, shape, size, ceilings) for size in arguments.batches]
    say(f"\n### {arguments.model}: GPU time of a decode step, us (floor)\n\n{gpu_table(steps)}")
    for name, one in other_kernels(steps):
        say(f"other: {one['us']:.1f} us in {one['launches']:.0f} launches of {name}")
    say(f"\n### {arguments.model}: host time of a decode step, us\n\n{host_table(steps)}")
    for step in steps:
        say(f"\nOwn time of functions, batch {step['batch']:,}\n\n{functions_table(step)}")
    write_json(
        arguments.json, {"model": arguments.model, "ceilings": vars(ceilings), "steps": steps}
    )


if __name__ == "__main__":
    main()
