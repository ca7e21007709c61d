"""Five workloads on a GPU, next to the targets and to vLLM on the same machine.

    python benchmarks/gpu.py --model llama-8b
    python benchmarks/gpu.py --model qwen3-0.6b --workloads w1 w3 w5 --json qwen.json

Weights and prompts are random, outputs greedy and of forced length. All requests of a workload are
there from the start. Each workload runs twice, with an empty prefix cache; the second round counts.

Of mixtures of experts decode steps are timed too, beside their floor: the bytes of the distinct
experts that a layer was counted to use, of other weights and of cached tokens, at the bandwidth
measured in the same run.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import (
    QUANTIZED_SHAPES,
    SHAPES,
    SPARSE_SHAPES,
    markdown_table,
    require_gpu,
    say,
    start_engine,
    write_json,
)
from profile_step import decode_figures
from quire import SamplingParams
from quire.metrics.instruments import HistogramReading

if TYPE_CHECKING:
    from quire import LLM

ROUNDS = 2
DECODE_BATCHES = (1, 256)
HOST_METRICS = {
    "schedule and apply": "quire:step_host_seconds",
    "launch": "quire:step_launch_seconds",
}
"""What the host does in a step other than waiting for the device; both are kept by the engine."""


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    num_outputs: int


class Dice:
    """Random token ids and lengths; the first ones are always the same."""

    def __init__(self) -> None:
        self._random = random.Random(0)

    def tokens(self, count: int) -> list[int]:
        return [self._random.randint(1000, 40000) for _ in range(count)]

    def length(self) -> int:
        return self._random.randint(100, 1024)


def _mixed(dice: Dice) -> list[Request]:
    # Arguments are drawn in this order: prompt length, prompt, output length.
    return [Request(dice.tokens(dice.length()), dice.length()) for _ in range(256)]


def _shared_prefix(dice: Dice) -> list[Request]:
    shared = dice.tokens(2048)
    return [Request(shared + dice.tokens(64), 64) for _ in range(256)]


@dataclass(frozen=True)
class Workload:
    title: str
    make: Callable[[Dice], list[Request]]

    def requests(self) -> list[Request]:
        return self.make(Dice())


def _equal(count: int, inputs: int, outputs: int) -> Callable[[Dice], list[Request]]:
    return lambda dice: [Request(dice.tokens(inputs), outputs) for _ in range(count)]


WORKLOADS = {
    "w1": Workload("256 requests, 100-1024 in and out", _mixed),
    "w2": Workload("256 x 2048 in, 32 out", _equal(256, 2048, 32)),
    "w3": Workload("one stream, 512 in, 256 out", _equal(1, 512, 256)),
    "w4": Workload("256 requests that share 2048, 64 in, 64 out", _shared_prefix),
    "w5": Workload("1024 x 128 in, 256 out", _equal(1024, 128, 256)),
}


@dataclass(frozen=True)
class Goal:
    """What a time is compared with: seconds, or milliseconds per token for a single stream."""

    target: float
    vllm: tuple[float, ...]
    unit: str = "s"


GOALS = {
    ("llama-8b", "w1"): Goal(14.0, (14.9,)),
    ("llama-8b", "w2"): Goal(13.1, (13.3,)),
    ("llama-8b", "w3"): Goal(4.5, (5.06,), "ms/token"),
    ("llama-8b", "w4"): Goal(1.1, (1.98,)),
    ("llama-8b", "w5"): Goal(12.0, (15.2, 15.9)),
    ("llama-8b-fp8", "w1"): Goal(9.6, (11.3,)),
    ("llama-8b-fp8", "w3"): Goal(2.4, (3.51,), "ms/token"),
    ("llama-8b-fp8block", "w1"): Goal(10.2, ()),
    ("llama-8b-fp8block", "w3"): Goal(2.5, (), "ms/token"),
    ("llama-8b-gptq", "w1"): Goal(12.0, (14.0,)),
    ("llama-8b-gptq", "w3"): Goal(1.6, (5.0,), "ms/token"),
    ("llama-8b-awq", "w1"): Goal(12.0, (14.0,)),
    ("llama-8b-awq", "w3"): Goal(1.6, (5.0,), "ms/token"),
    ("qwen3-0.6b", "w1"): Goal(5.2, (6.7,)),
    ("qwen3-0.6b", "w3"): Goal(1.0, (2.08,), "ms/token"),
    ("qwen3-0.6b", "w5"): Goal(4.0, (11.1, 12.6)),
    ("qwen3-30b-a3b", "w3"): Goal(2.2, (4.21,), "ms/token"),
    ("deepseek-v2-lite", "w3"): Goal(1.8, (3.50,), "ms/token"),
}
"""vLLM 0.26.0 with its defaults (FlashAttention 3, CUDA graphs, compile, asynchronous scheduling)
ran these requests on one H200 on 2026-11-15; second of two rounds, or the range of several runs."""


@dataclass(frozen=True)
class HostTime:
    """Host work per step over a round. Quantiles are upper bounds of histogram buckets, seconds."""

    steps: int
    mean: float
    p50: float
    p99: float
    worst: float

    @classmethod
    def between(cls, before: HistogramReading, after: HistogramReading) -> HostTime:
        """What was observed after `before` was read, until `after` was."""
        bounds = [float(bound) for bound in after.buckets]
        counts = [after.buckets[bound] - before.buckets[bound] for bound in after.buckets]
        steps = after.count - before.count

        def quantile(share: float) -> float:
            return next(
                bound for bound, n in zip(bounds, counts, strict=True) if n >= share * steps
            )

        mean = (after.sum - before.sum) / steps
        return cls(steps, mean, quantile(0.5), quantile(0.99), quantile(1.0))


def run_workload(llm: LLM, name: str) -> dict[str, Any]:
    requests = WORKLOADS[name].requests()
    rounds = []
    for _ in range(ROUNDS):
        llm.reset_prefix_cache()
        before, started = _host_readings(llm), time.perf_counter()
        generate(llm, requests)
        rounds.append(time.perf_counter() - started)
    seconds, num_outputs = rounds[-1], sum(request.num_outputs for request in requests)
    num_inputs = sum(len(request.prompt) for request in requests)
    return {
        "workload": name,
        "seconds": seconds,
        "rounds_s": rounds,
        "output_tokens_per_s": num_outputs / seconds,
        "total_tokens_per_s": (num_inputs + num_outputs) / seconds,
        "ms_per_output_token": 1000 * seconds / num_outputs,
        "host": {
            part: vars(HostTime.between(before[part], after))
            for part, after in _host_readings(llm).items()
        },
    }


def generate(llm: LLM, requests: Sequence[Request]) -> None:
    outputs = llm.generate(
        [{"prompt_token_ids": request.prompt} for request in requests],
        [
            SamplingParams(
                temperature=0.0, ignore_eos=True, max_tokens=request.num_outputs, detokenize=False
            )
            for request in requests
        ],
        use_tqdm=False,
    )
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == [request.num_outputs for request in requests], "tokens are missing"


def _host_readings(llm: LLM) -> dict[str, HistogramReading]:
    readings = {one.name: one for one in llm.get_metrics() if isinstance(one, HistogramReading)}
    return {part: readings[metric] for part, metric in HOST_METRICS.items()}


class CompiledKernels:
    """Names of the Triton kernels built or loaded since it was made; there should be none."""

    def __init__(self) -> None:
        import triton

        self.names: list[str] = []
        triton.knobs.compilation.listener = self._note

    def _note(self, *, src: Any, **_: Any) -> None:
        self.names.append(src.name)


def seconds_since_process_start() -> float:
    """By the kernel's clock, so that starting the interpreter and all imports count."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def row(model: str, figures: dict[str, Any]) -> list[str]:
    name = figures["workload"]
    goal = GOALS.get((model, name))
    target = f"{goal.target:g} {goal.unit}" if goal else ""
    vllm = ""
    if goal and goal.vllm:
        vllm = f"{'-'.join(f'{value:g}' for value in goal.vllm)} {goal.unit}"
    return [
        f"{name}: {WORKLOADS[name].title}",
        f"{figures['seconds']:.2f} s",
        f"{figures['output_tokens_per_s']:,.0f}",
        f"{figures['ms_per_output_token']:.3f}",
        target,
        vllm,
        *(_host_cell(figures["host"][part]) for part in HOST_METRICS),
    ]


def _host_cell(host: dict[str, float]) -> str:
    bounds = (f"{1000 * host[name]:g}" for name in ("p50", "p99", "worst"))
    return f"{1000 * host['mean']:.2f} / {' / '.join(bounds)}"


HEADER = [
    "workload",
    "time",
    "output tokens/s",
    "ms/token",
    "target",
    "vLLM 0.26",
    *(f"{part}, ms: mean / p50 / p99 / worst, at most" for part in HOST_METRICS),
]


def decode_table(steps: Sequence[dict[str, Any]]) -> str:
    """Decode steps of a mixture of experts and what they cannot go below."""
    header = ["decode step of", "time, ms", "experts per layer", "floor, ms", "ratio"]
    rows = [
        [
            f"{step['batch']} x {step['context']:.0f} tokens",
            f"{step['step_us'] / 1000:.3f}",
            f"{step['experts_used']:.1f}",
            f"{sum(step['floor'].values()) / 1000:.3f}",
            f"{step['ratio']:.2f}",
        ]
        for step in steps
    ]
    return markdown_table(header, rows)


def measure_without_prefix_cache(model: str, with_cache: dict[str, Any]) -> dict[str, Any]:
    """w4 in a second engine, which shares nothing between requests."""
    with start_engine(model, enable_prefix_caching=False) as llm:
        generate(llm, [Request([7] * 300, 8)] * 8)
        figures = run_workload(llm, "w4")
    return {**figures, "ratio": figures["seconds"] / with_cache["seconds"]}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", choices=[*SHAPES, *QUANTIZED_SHAPES, *SPARSE_SHAPES], default="llama-8b"
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument(
        "--empty-triton-cache", action="store_true", help="start without any compiled kernels"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    arguments = parser.parse_args(words)
    require_gpu()
    if arguments.empty_triton_cache:
        os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="empty-triton-cache-")
    model = arguments.model
    with start_engine(model) as llm:
        ready_s, compiled = seconds_since_process_start(), CompiledKernels()
        generate(llm, [Request([7] * 300, 1)])
        first_token_s = seconds_since_process_start()
        say(f"{model}: ready after {ready_s:.1f} s, first token after {first_token_s:.1f} s")
        generate(llm, [Request([7] * 300, 8)] * 8)
        results = []
        for name in arguments.workloads:
            results.append(run_workload(llm, name))
            say(f"{name}: {', '.join(f'{seconds:.3f} s' for seconds in results[-1]['rounds_s'])}")
        late = sorted(set(compiled.names))
        steps = []
        if model in SPARSE_SHAPES:
            from ceilings import measure_ceilings  # needs triton

            ceilings = measure_ceilings()
            shape = SPARSE_SHAPES[model]
            steps = [decode_figures(llm, shape, size, ceilings) for size in DECODE_BATCHES]
    figures = {
        "model": model,
        "ready_s": ready_s,
        "first_token_s": first_token_s,
        "compiled_after_ready": late,
        "workloads": results,
        "decode_steps": steps,
    }
    say(f"kernels compiled or loaded after that: {', '.join(late) or 'none'}\n")
    say(markdown_table(HEADER, [row(model, one) for one in results]))
    if steps:
        say(f"\nCeilings: {ceilings.describe()}\n\n{decode_table(steps)}")
    for one in results:
        if one["workload"] == "w4":
            figures["w4_without_prefix_cache"] = off = measure_without_prefix_cache(model, one)
            say(
                f"\nw4 without prefix caching: {off['seconds']:.2f} s, {off['ratio']:.2f} x as long"
            )
    write_json(arguments.json, figures)


if __name__ == "__main__":
    main()
